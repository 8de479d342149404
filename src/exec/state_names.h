/* State values of a graph name a tensor of the store: a two-character prefix for the kind, then the parameter. Of a sharded
 * store (exec/shard.h) the optimizer's kinds are slices; weights have names for both, and buckets go by number. */
#ifndef VLAI_STATE_NAMES_H
#define VLAI_STATE_NAMES_H
#include "vla/run.h"
extern const char *const vlai_state_prefix[VLA_STORE_KINDS];
#define VLAI_STATE_SLICE "W:"     /* the rank's slice of a weight */
#define VLAI_STATE_WEIGHTS "B:"   /* the weights of bucket N */
#define VLAI_STATE_GRADIENTS "S:" /* the gradients of bucket N */
#endif
