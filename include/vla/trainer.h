/* The trainer: batches, plans, steps, metrics, checkpoints, for any model that is a graph.
 *
 * A caller describes its model and its samples by a few functions; the trainer does the rest: worker threads, plans per
 * shape, accumulation, clip and AdamW, learning rates, protection against values that are not finite, metrics.jsonl,
 * checkpoints, exact resume. examples/custom_model.c is a whole program.
 *
 *     vla_trainer_options o = VLA_TRAINER_OPTIONS_DEFAULT;
 *     o.run = "run";
 *     o.batch = 8;
 *     o.steps = 1000;
 *     vla_trainer *t;
 *     if (vla_trainer_create(&model, &samples, NULL, &o, &t, &err) != VLA_OK) return report(&err);
 *     if (vla_trainer_run(t, &err) != VLA_OK) return report(&err);
 *     vla_trainer_destroy(t);
 *
 * Every step is a pure function of (state, samples): two runs with one seed give the same bits, whatever the number of
 * workers and threads, and a run that was interrupted and resumed gives those bits too.
 *
 * Several ranks (options.group) give the losses and, as far as sums over ranks keep their order, the weights of one rank with
 * accumulation x ranks. All make the same calls. Rank 0's records are those of all; the others report their own losses, and
 * write no metrics. After a failure that a rank has alone it must end, and tell the group why.
 *
 * Structs begin with their own size: members beyond it have their defaults, and one without a size is INVALID.
 *
 * Ownership: model, samples and all strings are borrowed and must outlive the trainer. Threads: one caller; functions of
 * vla_samples are called from the workers, each with its own worker object. */
#ifndef VLA_TRAINER_H
#define VLA_TRAINER_H

#include "vla/checkpoint.h"
#include "vla/run.h"

#include <signal.h>

typedef struct vla_trainer vla_trainer;

/* Which draw of a sample's times and noise: training and validation never share one. */
enum { VLA_SAMPLES_TRAIN = 0, VLA_SAMPLES_VALIDATION = 1 };

typedef struct vla_sample_key {
    int64_t epoch;
    int64_t place;     /* in the epoch's order */
    uint64_t position; /* epoch * count + place: the key of all randomness of the sample */
    uint32_t stream;
} vla_sample_key;

/* Where samples come from. A slot is the caller's own structure for one sample, made once and filled again and again; a
 * worker is what a thread needs to read one (decoders, buffers). */
typedef struct vla_samples {
    size_t size; /* of this struct */
    void *user;
    int64_t count; /* samples of an epoch */
    vla_status (*slot_create)(void *user, void **slot, vla_error *err);
    void (*slot_destroy)(void *user, void *slot);
    vla_status (*worker_create)(void *user, void **worker, vla_error *err); /* NULL: there are no workers' objects */
    void (*worker_destroy)(void *user, void *worker);
    vla_status (*read)(void *user, void *worker, const vla_sample_key *key, void *slot, vla_error *err);
    /* "dataset, episode 3, frame 17", for messages; NULL: the position is named */
    void (*describe)(void *user, const void *slot, char *text, size_t size);
} vla_samples;

/* A metric that is a mean over all terms of a step, of all its micro-batches and ranks: the mean of result `mean` of the graph,
 * which each batch weighs by its result `count`. Batches without terms, or without these results, have no part in it. */
typedef struct vla_channel {
    const char *name, *mean, *count;
} vla_channel;

/* A metric that is the norm of some parameters that are trained: of those whose name holds `part` and that no earlier row takes; ""
 * takes all that are left. */
typedef struct vla_norm {
    const char *name, *part;
} vla_norm;

/* What is trained. A shape is the caller's own structure without padding bytes; batches of equal shapes share a plan. */
typedef struct vla_model {
    size_t size; /* of this struct */
    void *user;
    size_t shape_size;
    const char *const *parts; /* names of results besides "loss" that metrics record, ended by NULL; may be NULL */
    const vla_channel *channels;    /* ended by a name of NULL, at most VLA_RECORD_CHANNELS; may be NULL */
    const vla_norm *norms;          /* besides that of all that are trained; ended by a name of NULL, at most VLA_RECORD_NORMS; may be NULL */
    /* Declares the parameters (vla_store_add), and gives them their first values once the store is allocated. */
    vla_status (*params)(void *user, vla_store *store, vla_error *err);
    vla_status (*init)(void *user, vla_store *store, vla_error *err);
    /* Called once per batch, before fill. */
    vla_status (*shape)(void *user, void *const *slots, int64_t count, void *shape, vla_error *err);
    /* A graph whose result "loss" is trained. */
    vla_status (*build)(void *user, const void *shape, vla_graph **out, vla_error *err);
    /* Writes every input of the graph (vla_run_data). */
    vla_status (*fill)(void *user, const void *shape, void *const *slots, int64_t count, vla_run *run, vla_error *err);
    /* After a run with a loss that is not finite: marks the samples that made it so. NULL: all of them. */
    void (*blame)(void *user, const void *shape, vla_run *run, int64_t count, uint8_t *guilty);
    /* What the loss of this batch is the mean over, when losses are to be means over all of a step; NULL: 1 each. */
    double (*weight)(void *user, void *const *slots, int64_t count);
    /* Whether the graphs freeze this parameter, so that norms leave it out. Called once the parameters are declared; NULL: none is frozen. */
    int (*frozen)(void *user, const char *param);
} vla_model;

typedef struct vla_lr_group {
    const char *name;
    double rate; /* peak */
} vla_lr_group;

typedef enum vla_lr_schedule { VLA_LR_COSINE, VLA_LR_CONSTANT } vla_lr_schedule;

typedef enum vla_record_kind { VLA_RECORD_STEP, VLA_RECORD_VALIDATION, VLA_RECORD_SAVED, VLA_RECORD_MESSAGE } vla_record_kind;

enum { VLA_RECORD_PARTS = 8, VLA_RECORD_CHANNELS = 4, VLA_RECORD_NORMS = 4 };

typedef struct vla_metric {
    const char *name;
    double value;
} vla_metric;

/* One step, as metrics.jsonl has it; also validations and saves, for whoever shows progress. Its texts and lists are lent until the
 * trainer is called again. */
typedef struct vla_record {
    vla_record_kind kind;
    int64_t step;    /* steps completed */
    int64_t steps;   /* of the whole run; 0 = not bounded by steps */
    int64_t epoch, epochs;
    int64_t iteration, iterations; /* this rank's micro-batch of the epoch, from 0, and how many it has */
    int64_t samples; /* seen since step 0 */
    double loss, smooth_loss; /* mean of the step's micro-batches; the same over loss_smooth steps */
    int parts;
    const char *part_name[VLA_RECORD_PARTS];
    double part[VLA_RECORD_PARTS], smooth_part[VLA_RECORD_PARTS]; /* the same, each over the last loss_smooth steps that had it */
    double rate, next_rate; /* of the base group: of this step, of the next */
    double grad_norm;       /* before the clip; 0 without clip */
    /* Rates by group ("lr_group/NAME", where there are several), channels, and in their steps norms of parameters. */
    const vla_metric *more;
    int more_count;
    double step_seconds, stall_seconds, samples_per_second, teraflops, eta_seconds;
    double save_seconds;    /* that the run stood still for a save before this step */
    uint64_t resident, device; /* bytes */
    int skipped;       /* the update was skipped: a value was not finite */
    int64_t skips;     /* so far */
    const char *text;  /* path of what was saved, or the message */
} vla_record;

typedef struct vla_trainer_options {
    size_t size; /* of this struct */
    const char *run;    /* run folder */
    const char *resume; /* checkpoint or run folder to go on from; NULL = start */
    /* Values of the state that may differ from the checkpoint's, ended by NULL: "seed", "contract.image", ..., or "all". */
    const char *const *allow_change;
    int64_t batch, validation_batch; /* samples of a micro-batch; validation 0 = the same */
    int64_t accumulation;            /* micro-batches of a step */
    int64_t accumulation_given;      /* what `accumulation` was before it followed a checkpoint of another number of ranks; 0 = it has not */
    int64_t steps;      /* stop after so many; 0 = after the epochs */
    int64_t epochs;
    int64_t stop_at;    /* end here, saved, as if it had been asked to (0 = never): schedules are not touched */
    int64_t workers;
    int threads;        /* 0 = one per core */
    const char *device; /* "cpu" (NULL: the same), "cuda" or "cuda:N" */
    uint64_t seed;      /* recorded with the state; samples draw from it themselves */
    vla_numerics numerics;
    vla_recompute recompute;
    vla_memory_layout layout;
    unsigned fuse;      /* VLA_FUSE_*, visual_layers, fast_attention, VLA_FAST_*: as in vla_plan_options */
    int visual_layers, fast_attention;
    unsigned fast;
    int recompute_auto; /* the least recompute whose plans fit, at the first batch; `recompute` is where it begins */
    size_t memory_limit; /* most bytes of device memory (on the CPU: of parameters and plans); 0 = what is free */
    size_t memory_keep;  /* most bytes of what cheap recompute keeps all the same; 0 = by the room there is, with fp32 masters alone */
    int whole_step;     /* clip and AdamW are part of the micro-batch's plan; accumulation is 1 then */
    int ahead;          /* the next step is begun before the results of this one are read: same bits, one step more in flight */
    int timing;         /* log how long each part of the start takes */
    int64_t most_plans; /* kept at once */
    int global_loss;    /* losses are means over a step instead of over a micro-batch */
    /* Several ranks that train together; batch and accumulation are each rank's. */
    struct vlai_group *group; /* theirs (dist/group.h), joined; borrowed; NULL = one rank */
    int rank, world;    /* 0 of 1 where there is no group */
    int zero;           /* every rank keeps and steps its share of the optimizer's state; 0: all of it */
    int overlap;        /* buckets are reduced while the backward runs and weights gathered under the next forward */
    size_t bucket_bytes; /* of a gradient bucket, at most, but for tensors larger than that */
    vla_dtype gradient_dtype; /* that gradients are summed over ranks in: BF16, F32, or NONE = as they are kept */
    int product_sms_free; /* as in vla_plan_options */
    /* optimizer */
    vla_adamw_options adamw;
    const vla_lr_group *groups; /* index = group of vla_store_add; the first is the base */
    int group_count;
    vla_lr_schedule schedule;
    double min_rate;    /* cosine; negative = a tenth of the base rate */
    int64_t warmup;
    /* intervals in steps; 0 = never */
    int64_t save_interval, validation_interval, epoch_save_interval, ignore_until, loss_smooth;
    int64_t norm_interval; /* norms of the weights in step 1 and every so many steps after it: "total_param_norm", model->norms */
    int validate_first;
    int64_t keep_last, max_bad_steps;
    /* Sections that the state records besides and a resume compares: JSON text of an object of objects; NULL = none. */
    const char *contract;
    const vla_checkpoint_file *files; /* copied into each checkpoint */
    size_t file_count;
    volatile sig_atomic_t *stop;      /* set by a signal handler of the program: save and end with CANCELLED; of several ranks by any */
    void (*report)(void *user, const vla_record *record); /* may be NULL */
    void *report_user;
} vla_trainer_options;

#define VLA_TRAINER_OPTIONS_DEFAULT                                                                                      \
    {                                                                                                                    \
        .size = sizeof(vla_trainer_options), .run = "run", .batch = 1, .accumulation = 1, .epochs = 1, .seed = 42,       \
        .layout = VLA_MEMORY_LIFETIMES, .most_plans = 64, .world = 1, .zero = 1, .bucket_bytes = 25000000,               \
        .adamw = {sizeof(vla_adamw_options), 0.9, 0.98, 1e-8, 1e-8, 1.0, 1}, .schedule = VLA_LR_CONSTANT,                \
        .min_rate = -1, .save_interval = 1000, .epoch_save_interval = 1, .loss_smooth = 1, .max_bad_steps = 10           \
    }

/* Memory in bytes, for the table printed before the first step. */
typedef struct vla_trainer_memory {
    vla_plan_memory plan; /* of the largest plan so far; weights, gradients, optimizer of the store */
    size_t executor;      /* arena and kernel scratch that are really held: of a host's arena, and in plan.activations, the pages that
                             values lie on */
    size_t snapshot;      /* staging of checkpoints */
} vla_trainer_memory;

VLA_BEGIN_DECLS

/* validation: samples that are validated on, or NULL. Loads the checkpoint when one is given. */
VLA_API vla_status vla_trainer_create(const vla_model *model, const vla_samples *samples, const vla_samples *validation,
                                      const vla_trainer_options *options, vla_trainer **out, vla_error *err);
VLA_API void vla_trainer_destroy(vla_trainer *trainer);
/* One optimizer step; CANCELLED when the run is over. */
VLA_API vla_status vla_trainer_step(vla_trainer *trainer, vla_record *record, vla_error *err);
/* Steps until the end. The last state is always saved. CANCELLED after a stop that was asked for, NONFINITE after too
 * many bad steps in a row. */
VLA_API vla_status vla_trainer_run(vla_trainer *trainer, vla_error *err);
/* Mean losses over all validation samples; INVALID where the trainer was given none. */
VLA_API vla_status vla_trainer_validate(vla_trainer *trainer, vla_record *record, vla_error *err);
/* The trainer's parameters: borrowed, until it is destroyed. */
VLA_API vla_store *vla_trainer_store(vla_trainer *trainer);
VLA_API int64_t vla_trainer_steps_done(const vla_trainer *trainer);
/* Builds the plan of the next batch, so that memory is known before the first step. */
VLA_API vla_status vla_trainer_prepare(vla_trainer *trainer, vla_trainer_memory *memory, vla_error *err);

VLA_END_DECLS

#endif
