/* Comparing with recorded results of the reference: golden cases (form: the README of the golden folder).
 *
 * A case is input data. The runner reads case.json, picks the stage's function from the table below, and that function
 * reports every quantity it compared: its error against its bound. A case passes when every report is within its bound
 * and at least one was made. */
#ifndef VLAI_PARITY_H
#define VLAI_PARITY_H

#include "base/memory.h"
#include "format/safetensors.h"
#include "vla/error.h"
#include "vla/run.h"

#include <jansson.h>
#include <stdbool.h>

VLA_BEGIN_DECLS

/* One row per stage of a data case, and per component of a model case: name in case.json, C name. */
#define VLAI_PARITY_STAGES(X)                 \
    X("tokenize", tokenize)                   \
    X("prompt", prompt)                       \
    X("state-string", state_string)           \
    X("resize", resize)                       \
    X("image-processor", image_processor)     \
    X("normalise", normalise)                 \
    X("sample-time", sample_time)             \
    X("rotation", rotation)                   \
    X("lr", lr)                               \
    X("order", order)                         \
    X("batch", batch)                         \
    X("norm-stats", norm_stats)               \
    X("lerobot-read", lerobot_read)           \
    X("policy", policy)                       \
    X("vision", vision)                       \
    X("rope", rope)                           \
    X("attention-mask", attention_mask)       \
    X("sample", sample)

/* The worst tensor of one quantity ("loss", "grads", "input_ids", ...). */
typedef struct vlai_parity_quantity {
    char name[48], tensor[160];
    double error, bound; /* of the tensor with the largest error/bound; pass means error <= bound */
    int64_t tensors;     /* how many were compared */
    bool pass;
} vlai_parity_quantity;

/* What one run computed of a case, by name: another run is then held to that instead of to what the case recorded. */
typedef struct vlai_parity_tape {
    vlai_arena arena; /* of all that is kept */
    struct vlai_parity_kept *kept;
    bool replay;      /* false: distances keep what they are given */
} vlai_parity_tape;

typedef struct vlai_parity_case {
    char dir[2048];    /* the case folder */
    char golden[2048]; /* its parent; "assets/..." is looked up there */
    char name[128];
    json_t *meta;      /* case.json */
    const char *numerics, *device; /* "fp32", "cpu" */
    bool verbose;      /* print each tensor */
    bool fuse;         /* model cases: plans with fused operations and cheap recompute */
    uint64_t draw;     /* model cases: moves every weight by a normal 2 % of itself, drawn by this number; 0: as recorded */
    vlai_parity_tape *tape; /* NULL: distances are those from what the case recorded */
    vlai_parity_quantity quantities[64];
    int count;
    bool skipped;      /* the case does not apply to this run; `note` says why */
    json_t *compared;  /* names of the tensors that reports spoke of */
    char note[256];    /* may also say what of a case that ran was not looked at */
} vlai_parity_case;

/* Records one comparison: folded into the quantity of that name, or into the last one where there is no room for another. NaN errors
 * fail. */
void vlai_parity_report(vlai_parity_case *c, const char *quantity, const char *tensor, double error, double bound);
/* Counts the whole numbers got[n] that differ from those of `want`; got NULL differs from any. A `want` that the case lacks (NULL) is no
 * comparison with may_lack, and else means that there are none: got must be NULL. */
vla_status vlai_parity_integers(vlai_parity_case *c, const char *quantity, const char *tensor, const vlai_tensor_view *want,
                                const int64_t *got, int64_t n, bool may_lack, vla_error *err);

/* Opens FILE of the case folder ("inputs.safetensors"); `assets/x` names resolve beside the case. */
vla_status vlai_parity_open(const vlai_parity_case *c, const char *file, vlai_safetensors **out, vla_error *err);
vla_status vlai_parity_json(const vlai_parity_case *c, const char *file, json_t **out, vla_error *err);
vla_status vlai_parity_path(const vlai_parity_case *c, const char *file, char *out, size_t size, vla_error *err);

/* The bound of one output: case.json "bound" holds 0, a number, {"abs": x} or {"rel": x} per output name or "*"; several
 * names may share a key separated by ", ". An output without an entry gets 0 (exact). */
double vlai_parity_bound(const vlai_parity_case *c, const char *output);

/* The values of a tensor of rows, whose last dimension is the columns, as float; the caller's to vlai_free. VLA_E_NOT_FOUND where t is
 * NULL (`name` is in the message), VLA_E_SHAPE for a single number. */
vla_status vlai_parity_rows(const vlai_tensor_view *t, const char *name, float **out, vla_error *err);

/* Compares arrays: largest |a-b| (inf when a NaN stands on one side only or the shapes differ), and relative L2. */
double vlai_parity_max_abs(const float *got, const float *want, int64_t n);
double vlai_parity_rel_l2(const float *got, const float *want, int64_t n);
/* The relative L2 of a model case's result, from `want` or from what the case's tape kept of that name. infinity where it kept
 * nothing of that name and size, NaN without memory to keep it. */
double vlai_parity_distance(vlai_parity_case *c, const char *quantity, const char *tensor, const float *got, const float *want, int64_t n);
/* Moves the weights of a model case as its `draw` says. */
vla_status vlai_parity_move(const vlai_parity_case *c, vla_store *store, vla_error *err);

#define X(name, c_name) vla_status vlai_parity_##c_name(vlai_parity_case *c, vla_error *err);
VLAI_PARITY_STAGES(X)
#undef X

/* Runs one case folder and fills `c`. An error means the case could not be run at all. */
vla_status vlai_parity_run(const char *dir, vlai_parity_case *c, vla_error *err);
void vlai_parity_case_fini(vlai_parity_case *c);

VLA_END_DECLS

#endif
