/* The inside of the trainer, shared by trainer.c (creation, validation, saving, the loop), step.c (one step) and ranks.c (what
 * several ranks do together). */
#ifndef VLAI_TRAINER_INTERNAL_H
#define VLAI_TRAINER_INTERNAL_H

#include "ckpt/ckpt.h"
#include "optim/schedule.h"
#include "train/bucket.h"
#include "train/loader.h"
#include "train/metrics.h"
#include "train/resume.h"
#include "vla/trainer.h"

/* A micro-batch that stands in the inputs of its run, and has not been submitted. */
typedef struct vlai_prepared {
    vlai_bucket *bucket; /* NULL: nothing is prepared */
    void *const *slots;
    int64_t count;
    double weight, scale; /* of its loss in the step's mean; what its gradients are scaled by */
} vlai_prepared;

/* The results of one micro-batch, as they are: not weighted. */
typedef struct vlai_micro {
    double weight; /* 0: there was none */
    double loss, part[VLA_RECORD_PARTS];
    uint32_t has; /* bit i: part i */
    double channel[VLA_RECORD_CHANNELS], terms[VLA_RECORD_CHANNELS]; /* sums of terms, and their numbers */
} vlai_micro;

/* Weighted sums over micro-batches. */
typedef struct vlai_sums {
    double loss, weight, part[VLA_RECORD_PARTS], part_weight[VLA_RECORD_PARTS];
    double channel[VLA_RECORD_CHANNELS], terms[VLA_RECORD_CHANNELS];
} vlai_sums;

/* A step that was begun and not yet reported. */
typedef struct vlai_flight {
    int64_t step;      /* its number, from 1 */
    int64_t first;     /* its first sample's place in the endless order */
    vla_run *run;      /* of the last micro-batch */
    const vlai_bucket *bucket;
    void **slots;      /* of that micro-batch */
    int64_t count;
    bool collected;    /* its results are in `sums` */
    bool finite;
    double weight, stall, flops;
    double ended;      /* on a CPU: when its work was done, which is before the next step is begun */
    vlai_sums sums;    /* of its micro-batches; on rank 0 of all ranks' once they are joined */
    vlai_micro *micro; /* of several ranks: this one's */
    char culprit[160]; /* what was not finite here */
    vla_record record;
} vlai_flight;

struct vla_trainer {
    vla_model model;
    vla_samples samples, validation;
    bool validates;
    vla_trainer_options options;
    vlai_schedule schedule;
    vla_store *store;
    vla_executor *executor;
    vlai_plans *plans;
    vlai_loader *loader;
    vlai_metrics *metrics;
    vla_checkpoint_writer *writer;
    int run_lock; /* open while the run folder is ours; -1 */
    bool on_device;
    /* several ranks; of one, group is NULL */
    struct vlai_group *group;
    int rank, world;
    struct vlai_comm *comm;
    char *row, *rows;    /* what this rank says of a step, and on rank 0 what all do */
    size_t row_bytes;
    vlai_micro *micro_room;
    int64_t stop_after;  /* step that all end with; 0 = nobody was asked to end */
    bool agreed, failed; /* on the first plan; this rank ends alone */
    vla_gradient_status *status; /* of the step in progress */
    void *shape;
    uint8_t *guilty;
    int64_t epoch_samples; /* that an epoch hands out: whole steps */
    vlai_progress progress; /* of the steps that were reported */
    int64_t saved;         /* step of the newest save that was begun; -1 = none */
    vla_checkpoint *from;  /* that the run starts from, until its state is loaded */
    char *resumed;         /* checkpoint that the run started from; NULL */
    char culprit[256];     /* what was not finite in the newest step that was skipped */
    vla_metric *more;      /* of the record that was reported last: channels, rates, norms */
    int more_count;
    char *rate_names;      /* "lr_group/NAME" of all groups, one behind the other */
    int *norm_group, norm_groups; /* of each parameter of the store, -1: of none; NULL: norms are not measured */
    const char *norm_name[VLA_RECORD_NORMS + 1]; /* of each group; NULL: in the total alone */
    /* The last values of the loss (0) and of part i (1 + i), for what records say of several steps. */
    struct {
        double *last;
        int64_t count; /* so far */
    } window[1 + VLA_RECORD_PARTS];
    /* of the steps in progress */
    void *const *slots;  /* of the next micro-batch; with global_loss of the step, in step_slots */
    void **step_slots;
    int64_t micro;       /* next micro-batch of the step that is being made ready */
    bool ready, weighed; /* slots are there; total_weight is known */
    double stall, total_weight;
    double *weights;     /* per micro-batch of the step; behind those of this rank, those of all */
    vlai_prepared next;
    vlai_flight flights[VLAI_FLIGHTS]; /* oldest first */
    int flight_count;
    void **flight_slots;
    bool goes_on;      /* another step follows at once: its batch may be prepared */
    vla_status broken; /* of a step that could not be begun while another was under way */
    vla_error broken_error;
    double last_end, save_stall;
    double phase_began;    /* of the start; 0 once the first step is done */
    double usual_seconds; /* of a step: a running mean, for the time left */
};

/* Samples of a step, of all ranks. */
static inline int64_t vlai_step_samples(const vla_trainer *t)
{
    return t->options.batch * t->options.accumulation * t->world;
}

/* ---- step.c ---- */

/* Where the run stands once the steps under way are reported, if all are applied. */
vlai_progress vlai_step_cursor(const vla_trainer *t);
/* Begins the next step. Its results may be under way when this returns: see flight_count. */
vla_status vlai_step_begin(vla_trainer *t, vla_error *err);
/* Waits for the oldest step under way, advances the progress, and fills `record` but for what trainer.c knows. */
vla_status vlai_step_end(vla_trainer *t, vla_record *record, vla_error *err);
/* The next samples, into t->slots; nothing when they are there already. With global_loss those of a whole step. */
vla_status vlai_step_slots(vla_trainer *t, vla_error *err);
/* The plan of these samples. only_made: NULL when it has yet to be made. */
vla_status vlai_step_bucket(vla_trainer *t, void *const *slots, int64_t count, bool training, bool only_made, vlai_bucket **out,
                            vla_error *err);
/* The results of a run that was waited for. */
vlai_micro vlai_micro_of(const vla_model *model, const vla_run *run, double weight);
/* Adds them to a step's or validation's; sums become means in the record, and what no batch had is left out. */
void vlai_sums_add(vlai_sums *sums, const vlai_micro *micro);
void vlai_sums_take(vla_trainer *t, const vlai_sums *sums, vla_record *r);

/* ---- ranks.c: without a group these do nothing, or what one rank needs ---- */

/* Says where this rank is, for those who would miss it. */
void vlai_ranks_progress(const vla_trainer *t, const char *phase);
void vlai_ranks_work(const vla_trainer *t, const char *phase); /* a phase of bulk work, which may take long */
vla_status vlai_ranks_open(vla_trainer *t, vla_error *err);
vla_status vlai_ranks_see_folder(const vla_trainer *t, vla_error *err);
/* path: rank 0's choice, on return every rank's. */
vla_status vlai_ranks_choose(const vla_trainer *t, char *path, size_t size, vla_error *err);
vla_status vlai_ranks_agree_settings(const vla_trainer *t, vla_error *err);
vla_status vlai_ranks_agree_weights(const vla_trainer *t, vla_error *err);
/* `stepped`: of the store's parameters. Once; later plans are compared with the first one where they are made. */
vla_status vlai_ranks_agree_plan(vla_trainer *t, const vla_plan *plan, const vla_gradient_status *stepped, vla_error *err);
/* What the losses of all ranks' micro-batches of the next step weigh together; weights: of this one's. All wait for each other. */
vla_status vlai_ranks_weigh(const vla_trainer *t, double *weights, double *total, vla_error *err);
/* Brings a step's results to rank 0, whose sums are then those of one rank that had all micro-batches; nobody else waits.
 * Learns of a step to end with. */
vla_status vlai_ranks_step(vla_trainer *t, vlai_flight *f, vla_error *err);
/* Whether the run ends at `p` because somebody was asked to end. */
bool vlai_ranks_stopped(const vla_trainer *t, const vlai_progress *p);
/* One batch of each rank, in order (weight 0: this one has none any more); then means, the same on every rank. */
vla_status vlai_ranks_add_round(const vla_trainer *t, const vlai_micro *own, vlai_sums *sums, vla_error *err);
vla_status vlai_ranks_end_rounds(vla_trainer *t, vlai_sums *sums, vla_record *r, vla_error *err);
/* This rank ends: the others are told at once, and nothing that it does waits for them any more. Returns the cause, which is another
 * rank's loss where this failure only follows from it. */
vla_status vlai_ranks_failed(vla_trainer *t, vla_status status, vla_error *err);

#endif
