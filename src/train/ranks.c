/* What the ranks of a training do together besides the collectives of their plans: they agree on what must be equal, bring the
 * losses of a step to rank 0, decide on the step that all end with, and see one run folder. */
#include "train/trainer_internal.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/time.h"
#include "dist/comm.h"
#include "dist/group.h"
#include "exec/plan.h"
#include "exec/shard.h"
#include "exec/store.h"
#include "ops/op.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

enum {
    /* A rank that has ended step s + 2 knows what rank 0 decided in step s: the collectives of s + 2 want rank 0, which begins that
     * step after it has ended s. With options.ahead step s + 3 is then under way already. */
    STOP_LAG = 3,
    SAMPLED = 64 /* elements at three places of a tensor that its digest is of */
};
#define STOP_KEY "trainer/stop"
#define TOKEN_FILE ".ranks"

/* What a rank says of a step. */
typedef struct row {
    double stall, flops;
    int32_t stop; /* its process was asked to end */
    char culprit[192]; /* what was not finite here; "": nothing */
    vlai_micro micro[];
} row;

void vlai_ranks_progress(const vla_trainer *t, const char *phase)
{
    if (t->group)
        vlai_group_progress(t->group, phase, t->progress.step);
}

void vlai_ranks_work(const vla_trainer *t, const char *phase)
{
    if (t->group)
        vlai_group_work(t->group, phase, t->progress.step);
}

/* ---- the start ---- */

vla_status vlai_ranks_open(vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    if (!t->group)
        return VLA_OK;
    if (vlai_group_rank(t->group) != t->rank || vlai_group_world(t->group) != t->world)
        return vlai_fail(err, VLA_E_INVALID, "trainer: rank %d of %d, and its group says %d of %d", t->rank, t->world, vlai_group_rank(t->group),
                         vlai_group_world(t->group));
    t->row_bytes = sizeof(row) + (size_t)o->accumulation * sizeof(vlai_micro);
    t->row_bytes = (t->row_bytes + 15) / 16 * 16;
    t->row = vlai_calloc(1, t->row_bytes);
    t->rows = t->rank == 0 ? vlai_calloc((size_t)t->world, t->row_bytes) : NULL;
    if (!t->row || (t->rank == 0 && !t->rows))
        return vlai_nomem(err, (size_t)t->world * t->row_bytes);
    return VLA_OK;
}

/* Rank 0 leaves a file with a number in it, and the others must find it there. */
vla_status vlai_ranks_see_folder(const vla_trainer *t, vla_error *err)
{
    static const double patience_s = 10; /* a network's file system may show a new file late */
    char path[4096], token[40], *found = NULL;
    size_t size;
    int blind = 0;
    if (!t->group)
        return VLA_OK;
    if (!vlai_path_join(path, sizeof path, t->options.run, TOKEN_FILE))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", t->options.run);
    memset(token, 0, sizeof token);
    if (t->rank == 0) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        snprintf(token, sizeof token, "%llx-%lx-%lx", (unsigned long long)now.tv_sec, now.tv_nsec, (long)getpid());
        VLA_TRY(vlai_write_file_atomic(path, token, strlen(token), err));
    }
    VLA_TRY(vlai_group_broadcast(t->group, "the run folder", token, sizeof token, err));
    vla_error ignored = VLA_ERROR_INIT;
    uint8_t same = t->rank == 0, *seen = vlai_calloc(1, (size_t)t->world);
    if (!seen)
        return vlai_nomem(err, (size_t)t->world);
    double end = vlai_now() + fmin(patience_s, vlai_group_timeout(t->group) / 2);
    while (!same && vlai_now() < end) {
        if (vlai_read_file(path, 64, &found, &size, &ignored) == VLA_OK) {
            same = !strcmp(found, token);
            vlai_free(found);
        }
        if (!same)
            nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
    vla_status status = vlai_group_gather_all(t->group, "who sees the run folder", &same, sizeof same, seen, err);
    if (t->rank == 0)
        unlink(path);
    while (status == VLA_OK && blind < t->world && seen[blind])
        blind++;
    vlai_free(seen);
    if (status == VLA_OK && blind < t->world)
        status = vlai_fail_hint(err, VLA_E_IO, "set checkpoint.save_path to a folder of a file system that all machines share",
                                "%s: rank %d on host %s does not see the run folder of rank 0 on host %s", t->options.run, blind,
                                vlai_group_host(t->group, blind), vlai_group_host(t->group, 0));
    return status;
}

/* Rank 0 has chosen the checkpoint that all start from; "" = none. */
vla_status vlai_ranks_choose(const vla_trainer *t, char *path, size_t size, vla_error *err)
{
    return t->group ? vlai_group_broadcast(t->group, "the checkpoint to start from", path, size, err) : VLA_OK;
}

vla_status vlai_ranks_agree_settings(const vla_trainer *t, vla_error *err)
{
    const vla_trainer_options *o = &t->options;
    vlai_text text = {0};
    if (!t->group)
        return VLA_OK;
    vla_status status = vlai_state_text(o, t->samples.count, &t->progress, NULL, &text, err);
    vlai_text_printf(&text, "validation: %lld samples of %lld\n", t->validates ? (long long)t->validation.count : 0,
                     (long long)(o->validation_batch > 0 ? o->validation_batch : o->batch));
    vlai_text_printf(&text, "steps: epochs %lld, stop at %lld, save %lld %lld, validate %lld %d, ignore until %lld, bad steps %lld, norms %lld\n",
                     (long long)o->epochs, (long long)o->stop_at, (long long)o->save_interval, (long long)o->epoch_save_interval,
                     (long long)o->validation_interval, o->validate_first, (long long)o->ignore_until, (long long)o->max_bad_steps,
                     (long long)o->norm_interval);
    vlai_text_printf(&text, "dist: zero %d, overlap %d, buckets of %zu bytes, gradients %s, whole step %d, multiprocessors free %d\n", o->zero, o->overlap,
                     o->bucket_bytes, o->gradient_dtype == VLA_DTYPE_NONE ? "as kept" : vla_dtype_name(o->gradient_dtype), o->whole_step, o->product_sms_free);
    if (status == VLA_OK)
        status = vlai_text_status(&text, err);
    if (status == VLA_OK)
        status = vlai_group_agree(t->group, "the settings", text.data, err);
    vlai_text_fini(&text);
    return status;
}

/* Of a tensor's elements at its beginning, in the middle and at its end. */
static vla_status digest_of(const vla_store *store, size_t index, uint64_t *out, vla_error *err)
{
    double data[SAMPLED];
    vla_tensor w = vla_store_tensor(store, VLA_STORE_WEIGHT, index);
    int64_t n = w.elements < SAMPLED ? w.elements : SAMPLED;
    *out = 0;
    for (int place = 0; place < 3; place++) {
        VLA_TRY(vla_store_read(store, VLA_STORE_WEIGHT, index, (w.elements - n) * place / 2, n, data, err));
        *out = XXH64(data, (size_t)n * vla_dtype_size(w.dtype), *out);
    }
    return VLA_OK;
}

vla_status vlai_ranks_agree_weights(const vla_trainer *t, vla_error *err)
{
    vlai_text text = {0};
    vla_status status = VLA_OK;
    if (!t->group)
        return VLA_OK;
    for (size_t i = 0; status == VLA_OK && i < vla_store_count(t->store); i++) {
        uint64_t digest;
        status = digest_of(t->store, i, &digest, err);
        vlai_text_printf(&text, "%s %016llx\n", vla_store_tensor(t->store, VLA_STORE_WEIGHT, i).name, (unsigned long long)digest);
    }
    if (status == VLA_OK)
        status = vlai_text_status(&text, err);
    if (status == VLA_OK)
        status = vlai_group_agree(t->group, "the weights at the start", text.data, err);
    vlai_text_fini(&text);
    return status;
}

/* Before the first collective of a plan: which it has, in which order, and which parameters are stepped. */
vla_status vlai_ranks_agree_plan(vla_trainer *t, const vla_plan *plan, const vla_gradient_status *stepped, vla_error *err)
{
    vlai_text text = {0};
    if (!t->group || t->agreed)
        return VLA_OK;
    const vla_graph *g = plan->graph;
    for (size_t n = 0; n < g->n_nodes; n++) {
        const vlai_node *node = &g->nodes[n];
        if (!vlai_op_is_collective(node->op))
            continue;
        const vlai_value_info *x = &g->values[node->inputs[0]];
        vlai_text_printf(&text, "collective %d: %s of bucket %d, %lld x %s\n", node->attrs.comm.order, vlai_ops[node->op].name, node->attrs.comm.bucket, (long long)x->elements,
                         vla_dtype_name(x->dtype));
    }
    for (size_t i = 0; i < vla_store_count(t->store); i++)
        vlai_text_printf(&text, "%s: %s\n", t->store->params[i].name, stepped[i] == VLA_GRADIENT_NONE ? "not stepped" : "stepped");
    vla_status status = vlai_text_status(&text, err);
    if (status == VLA_OK)
        status = vlai_group_agree(t->group, "the first plan", text.data, err);
    vlai_text_fini(&text);
    t->agreed = status == VLA_OK;
    return status;
}

/* ---- a step ---- */

/* The handler that sets it may run in another thread. */
static bool is_asked_to_stop(const vla_trainer *t)
{
    return t->options.stop && __atomic_load_n(t->options.stop, __ATOMIC_RELAXED);
}

/* Counts of terms: their sum is exact, in whatever order. */
vla_status vlai_ranks_weigh(const vla_trainer *t, double *weights, double *total, vla_error *err)
{
    int64_t own = t->options.accumulation, n = own * t->world;
    double *all = t->group ? weights + own : weights;
    if (t->group)
        VLA_TRY(vlai_group_gather_all(t->group, "the terms of a step", weights, (size_t)own * sizeof *weights, all, err));
    *total = 0;
    for (int64_t i = 0; i < n; i++)
        *total += all[i];
    return VLA_OK;
}

static const row *row_of(const vla_trainer *t, int rank)
{
    return (const row *)(t->rows + (size_t)rank * t->row_bytes);
}

/* Rank 0: the step's sums out of every rank's row, in the order that one rank would have had the micro-batches in. */
static void join_rows(vla_trainer *t, vlai_flight *f)
{
    f->sums = (vlai_sums){0};
    for (int64_t a = 0; a < t->options.accumulation; a++)
        for (int r = 0; r < t->world; r++)
            vlai_sums_add(&f->sums, &row_of(t, r)->micro[a]);
    f->flops = 0;
    f->stall = 0;
    int culprit = -1;
    for (int r = 0; r < t->world; r++) {
        const row *w = row_of(t, r);
        f->flops += w->flops;
        f->stall = w->stall > f->stall ? w->stall : f->stall;
        if (w->culprit[0] && culprit < 0)
            culprit = r;
        if (w->stop && !t->stop_after)
            t->stop_after = f->step + STOP_LAG;
    }
    if (f->finite)
        return;
    if (culprit >= 0) {
        snprintf(t->culprit, sizeof t->culprit, "%s on rank %d", row_of(t, culprit)->culprit, culprit);
        return;
    }
    snprintf(t->culprit, sizeof t->culprit, "the gradient norm");
    vlai_warn("step %lld: the gradient norm is not finite, samples %lld to %lld of the order", (long long)f->step, (long long)f->first,
              (long long)(f->first + vlai_step_samples(t) - 1));
}

/* Whether rank 0 has said when all end. */
static vla_status hear_stop(vla_trainer *t, vla_error *err)
{
    void *data;
    size_t size;
    if (t->stop_after)
        return VLA_OK;
    vla_status status = vlai_group_get(t->group, STOP_KEY, -1, &data, &size, err);
    if (status == VLA_E_NOT_FOUND)
        return VLA_OK;
    VLA_TRY(status);
    if (size == sizeof t->stop_after)
        memcpy(&t->stop_after, data, sizeof t->stop_after);
    vlai_free(data);
    return VLA_OK;
}

vla_status vlai_ranks_step(vla_trainer *t, vlai_flight *f, vla_error *err)
{
    row *own = (row *)t->row;
    if (!t->group)
        return VLA_OK;
    memset(own, 0, t->row_bytes);
    own->stall = f->stall;
    own->flops = f->flops;
    own->stop = is_asked_to_stop(t);
    if (!f->finite)
        snprintf(own->culprit, sizeof own->culprit, "%s", f->culprit);
    memcpy(own->micro, f->micro, (size_t)t->options.accumulation * sizeof *f->micro);
    VLA_TRY(vlai_group_gather(t->group, "the losses of a step", own, t->row_bytes, t->rows, err));
    if (t->rank > 0) {
        if (!f->finite && !f->culprit[0])
            snprintf(t->culprit, sizeof t->culprit, "a value on another rank");
        return hear_stop(t, err);
    }
    int64_t before = t->stop_after;
    join_rows(t, f);
    return t->stop_after != before ? vlai_group_set(t->group, STOP_KEY, &t->stop_after, sizeof t->stop_after, err) : VLA_OK;
}

bool vlai_ranks_stopped(const vla_trainer *t, const vlai_progress *p)
{
    if (!t->group)
        return is_asked_to_stop(t);
    return t->stop_after > 0 && p->step >= t->stop_after;
}

/* ---- validation ---- */

vla_status vlai_ranks_add_round(const vla_trainer *t, const vlai_micro *own, vlai_sums *sums, vla_error *err)
{
    if (!t->group) {
        vlai_sums_add(sums, own);
        return VLA_OK;
    }
    vlai_micro *all = t->rank == 0 ? vlai_array((size_t)t->world, sizeof *all) : NULL;
    if (t->rank == 0 && !all)
        return vlai_nomem(err, (size_t)t->world * sizeof *all);
    vla_status status = vlai_group_gather(t->group, "the losses of a validation", own, sizeof *own, all, err);
    for (int r = 0; status == VLA_OK && all && r < t->world; r++)
        vlai_sums_add(sums, &all[r]);
    vlai_free(all);
    return status;
}

vla_status vlai_ranks_end_rounds(vla_trainer *t, vlai_sums *sums, vla_record *r, vla_error *err)
{
    if (t->group)
        VLA_TRY(vlai_group_broadcast(t->group, "the losses of a validation", sums, sizeof *sums, err));
    vlai_sums_take(t, sums, r);
    return VLA_OK;
}

/* ---- the end ---- */

vla_status vlai_ranks_failed(vla_trainer *t, vla_status status, vla_error *err)
{
    vla_error unsaid = {.status = status};
    if (!t->group || t->failed)
        return status;
    t->failed = true;
    /* Before the collectives break: who hears of those first would name this rank for them. */
    status = vlai_group_fail(t->group, err ? err : &unsaid);
    vlai_comm_abort(t->comm, "this rank has failed");
    vlai_checkpoint_abandon(t->writer);
    return status;
}
