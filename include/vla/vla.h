/* Everything of libvla, and the life of a training run in one comment.
 *
 *   dataset ──► batch ──► graph ──► plan ──► step ──► checkpoint
 *
 *   dataset.h     opens a LeRobot set: an index over episodes, no pixels
 *   trainer.h     samples come from it through worker threads, in an order that depends on the seed alone
 *   graph.h       the model adds typed operations for one shape of batch; the backward pass is added by the library
 *   plan.h        types resolved, dead work removed, memory laid out: data that can be printed
 *   run.h         a plan bound to a store of parameters and an executor; a step is one run of it, then the update
 *   trainer.h     repeats that: next batch, run, update, note, save, stop
 *   checkpoint.h  directories that are complete or absent, and weights as files that other frameworks read
 *
 * Start with examples/custom_model.c: a whole program against these headers. Every call that can fail returns a vla_status
 * and fills in a sentence (error.h); the library never prints, exits or aborts. */
#ifndef VLA_VLA_H
#define VLA_VLA_H

#include "vla/api.h"
#include "vla/checkpoint.h"
#include "vla/dataset.h"
#include "vla/dtype.h"
#include "vla/error.h"
#include "vla/graph.h"
#include "vla/log.h"
#include "vla/memory.h"
#include "vla/plan.h"
#include "vla/run.h"
#include "vla/trainer.h"

#endif
