/* State values of a graph name a tensor of the store: a two-character prefix for the kind, then the parameter. */
#ifndef VLAI_STATE_NAMES_H
#define VLAI_STATE_NAMES_H
#include "vla/run.h"
extern const char *const vlai_state_prefix[VLA_STORE_KINDS];
#endif
