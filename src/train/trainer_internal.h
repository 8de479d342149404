/* The inside of the trainer, shared by trainer.c (creation, validation, saving, the loop) and step.c (one step). */
#ifndef VLAI_TRAINER_INTERNAL_H
#define VLAI_TRAINER_INTERNAL_H

#include "ckpt/ckpt.h"
#include "optim/schedule.h"
#include "train/bucket.h"
#include "train/loader.h"
#include "train/metrics.h"
#include "train/resume.h"
#include "vla/trainer.h"

enum { VLAI_FLIGHTS = 2 }; /* steps that may be under way at once */

/* A micro-batch that stands in the inputs of its run, and has not been submitted. */
typedef struct vlai_prepared {
    vlai_bucket *bucket; /* NULL: nothing is prepared */
    void *const *slots;
    int64_t count;
    double weight, scale; /* of its loss in the step's mean; what its gradients are scaled by */
} vlai_prepared;

/* A step that was begun and not yet reported. */
typedef struct vlai_flight {
    int64_t step;      /* its number, from 1 */
    int64_t first;     /* its first sample's place in the endless order */
    vla_run *run;      /* of the last micro-batch */
    const vlai_bucket *bucket;
    void **slots;      /* of that micro-batch */
    int64_t count;
    bool collected;    /* its results are in `record` */
    bool finite;
    double part_weight[VLA_RECORD_PARTS], weight, stall, flops;
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
    vla_gradient_status *status; /* of the step in progress */
    void *shape;
    uint8_t *guilty;
    int64_t epoch_samples; /* that an epoch hands out: whole steps */
    vlai_progress progress; /* of the steps that were reported */
    int64_t saved;         /* step of the newest save that was begun; -1 = none */
    char *resumed;         /* checkpoint that the run started from; NULL */
    char culprit[256];     /* what was not finite in the newest step that was skipped */
    double *window_loss;   /* the last losses, for smooth_loss */
    int64_t window;
    /* of the steps in progress */
    void *const *slots; /* read ahead by vla_trainer_prepare */
    int64_t slot_count, micro; /* micro: next micro-batch of the step that is being made ready */
    bool ready;
    double stall, total_weight;
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

/* ---- step.c ---- */

/* Where the run stands once the steps under way are reported, if all are applied. */
vlai_progress vlai_step_cursor(const vla_trainer *t);
/* Begins the next step. Its results may be under way when this returns: see flight_count. */
vla_status vlai_step_begin(vla_trainer *t, vla_error *err);
/* Waits for the oldest step under way, advances the progress, and fills `record` but for what trainer.c knows. */
vla_status vlai_step_end(vla_trainer *t, vla_record *record, vla_error *err);
/* The next samples, into t->slots; nothing when they are there already. */
vla_status vlai_step_slots(vla_trainer *t, vla_error *err);
/* The plan of these samples. only_made: NULL when it has yet to be made. */
vla_status vlai_step_bucket(vla_trainer *t, void *const *slots, int64_t count, bool training, bool only_made, vlai_bucket **out,
                            vla_error *err);
/* Adds the results of a run to the record's sums; sums become means, and parts that no batch had are left out. */
void vlai_results_add(const vla_model *model, const vla_run *run, double weight, vla_record *r, double *part_weight);
void vlai_results_finish(const vla_model *model, double weight, const double *part_weight, vla_record *r);

#endif
