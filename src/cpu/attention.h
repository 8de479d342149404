/* Block sizes of attention, shared by the kernel and by the workspace table. */
#ifndef VLAI_CPU_ATTENTION_H
#define VLAI_CPU_ATTENTION_H

enum {
    VLAI_ATTENTION_QUERIES = 64, /* rows of one block of scores */
    VLAI_ATTENTION_KEYS = 128,   /* columns of one block of scores */
    VLAI_ATTENTION_JOIN = 8      /* rows of a block from which on no other segment joins it */
};

#endif
