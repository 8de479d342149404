/* The byte alphabet of byte-level BPE: each byte is written as one printable character in vocabulary files. Bytes that
 * are printable in Latin-1 stand for themselves; the 68 others follow from U+0100 on in increasing order. */
#ifndef VLAI_TEXT_BYTES_H
#define VLAI_TEXT_BYTES_H

#include <stdbool.h>
#include <stdint.h>

static inline bool byte_is_printable(int byte)
{
    return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

/* Fills character[byte] (code points below 0x144) and byte_of[code point], -1 where no byte has it. */
static inline void byte_alphabet(uint16_t character[256], int16_t byte_of[0x144])
{
    for (int i = 0; i < 0x144; i++)
        byte_of[i] = -1;
    uint16_t next = 0x100;
    for (int b = 0; b < 256; b++) {
        character[b] = byte_is_printable(b) ? (uint16_t)b : next++;
        byte_of[character[b]] = (int16_t)b;
    }
}

/* Writes a code point below 0x800 as UTF-8 (1 or 2 bytes) and returns its length. */
static inline int byte_utf8(uint16_t c, char out[2])
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    out[0] = (char)(0xC0 | (c >> 6));
    out[1] = (char)(0x80 | (c & 0x3F));
    return 2;
}

#endif
