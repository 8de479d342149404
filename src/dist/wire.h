/* Messages over sockets for the control plane (group.c, server.c): framing, limits, addresses. Nothing here waits, but
 * vlai_wire_connect.
 *
 * A frame is 16 bytes, then its payload: "VLAG", type (16 bits), zero (16 bits), id (32 bits), bytes of payload (32 bits), all
 * little-endian. Whoever does not begin with these four bytes is a stranger; one byte suffices to know most of them. A payload above
 * the connection's limit ends it before anything is allocated, and buffers grow with the bytes that came, never by what a length says. */
#ifndef VLAI_DIST_WIRE_H
#define VLAI_DIST_WIRE_H

#include "vla/error.h"

#include <stdbool.h>

VLA_BEGIN_DECLS

enum {
    VLAI_WIRE_HEADER = 16,
    VLAI_WIRE_WHY = 128,
    VLAI_WIRE_HEAD = 2560,      /* most bytes of a vlai_head: an error's message and hint, a key, some numbers */
    VLAI_WIRE_PENDING = 256 << 20, /* most bytes that wait to be sent */
};

/* One connection. The receiving half (fill, next) and the sending half (put, start, append, flush) share nothing but the descriptor:
 * they may be used by two threads. */
typedef struct vlai_wire {
    int fd;                  /* -1: none */
    size_t limit;            /* most bytes of a payload that is taken */
    uint8_t *in;
    size_t in_first, in_size, in_capacity;
    uint64_t received;       /* bytes so far: whether the other side lives */
    char why[VLAI_WIRE_WHY]; /* why fill or next said no */
    uint8_t *out;
    size_t out_first, out_size, out_capacity;
} vlai_wire;

typedef struct vlai_frame {
    unsigned type;
    uint32_t id;
    const uint8_t *data; /* valid until the next fill */
    size_t size;
} vlai_frame;

/* Takes over a descriptor that vlai_wire_listen's accept, connect or pair gave (non-blocking, close-on-exec). */
void vlai_wire_init(vlai_wire *wire, int fd, size_t limit);
void vlai_wire_fini(vlai_wire *wire); /* closes and releases; again: nothing */

/* Reads what has come; false when nothing more will (closed, reset, no memory). What came before can still be taken by next. */
bool vlai_wire_fill(vlai_wire *wire);
/* The next whole frame: 1; 0 none yet; -1 not ours or too large, and the connection is of no further use. */
int vlai_wire_next(vlai_wire *wire, vlai_frame *out);

/* The small numbers and texts that begin a payload. */
typedef struct vlai_head {
    uint8_t data[VLAI_WIRE_HEAD];
    size_t size;
    bool failed; /* it did not fit: put refuses it */
} vlai_head;

void vlai_head_u32(vlai_head *head, uint32_t value);
void vlai_head_i64(vlai_head *head, int64_t value);
void vlai_head_text(vlai_head *head, const char *text); /* NULL: empty */

/* Taken apart again: once something does not fit, `failed` stays set and every value is 0 or empty. */
typedef struct vlai_cut {
    const uint8_t *data;
    size_t size;
    bool failed;
} vlai_cut;

uint32_t vlai_cut_u32(vlai_cut *cut);
int64_t vlai_cut_i64(vlai_cut *cut);
/* A text of less than `room` bytes; control characters become '?', as it may be printed. */
void vlai_cut_text(vlai_cut *cut, char *out, size_t room);

/* Appends a frame to what waits to be sent: head (may be NULL), then size bytes. False without memory or above VLAI_WIRE_PENDING. */
bool vlai_wire_put(vlai_wire *wire, unsigned type, uint32_t id, const vlai_head *head, const void *data, size_t size);
/* The same in parts: start says how many bytes of payload the following appends bring together. */
bool vlai_wire_start(vlai_wire *wire, unsigned type, uint32_t id, size_t size);
bool vlai_wire_append(vlai_wire *wire, const void *data, size_t size);
/* Sends what the socket takes; true when nothing is left. An error of the connection drops the rest: the receiving half reports it. */
bool vlai_wire_flush(vlai_wire *wire);

/* Whether the resolver says that no host has this name or number; false when it has no answer now. */
bool vlai_wire_is_nowhere(const char *address);

/* Listens at `port`. `local`: at the loopback address that `address` stands for, if it does, so that a run on one host is not
 * reachable from others; otherwise at every address, IPv6 and IPv4. VLA_E_IO names the port. */
vla_status vlai_wire_listen(const char *address, int port, bool local, int *fd, vla_error *err);
/* The next connection that waits at a listener, or -1. `peer` gets its address. */
int vlai_wire_accept(int listener, char *peer, size_t room);
/* Tries every address of the name once; returns a connected descriptor, or -1 with the reason of the last failure. At most until
 * `deadline` (vlai_now), plus what the resolver takes. */
int vlai_wire_connect(const char *address, int port, double deadline, char *why, size_t room);
/* Two connected descriptors of this process. */
vla_status vlai_wire_pair(int fd[2], vla_error *err);

/* strerror for threads. */
void vlai_wire_reason(int error, char *out, size_t room);

VLA_END_DECLS

#endif
