/* Writing text token by token. The texts of a batch lie in a graph that has room for all that may still be written, so that one plan
 * serves every pass: what is not written yet is the tail of the text stream, which no token sees. Behind each text stands one more
 * token that the passes do not look at; it makes the row before it the one whose successor is asked for. */
#include "base/fail.h"
#include "base/memory.h"
#include "model/wallx.h"
#include "pass/pass.h"

#include <math.h>
#include <string.h>

struct vlai_wallx_writer {
    vlai_wallx_config config;
    vla_store *store;
    vla_executor *executor;
    vlai_wallx_shape shape; /* of the plan below */
    vla_plan *plan;
    vla_run *run;
};

vla_status vlai_wallx_writer_create(const vlai_wallx_config *config, vla_store *store, vla_executor *executor, vlai_wallx_writer **out,
                                    vla_error *err)
{
    *out = vlai_calloc(1, sizeof **out);
    if (!*out)
        return vlai_nomem(err, sizeof **out);
    (*out)->config = *config;
    (*out)->store = store;
    (*out)->executor = executor;
    return VLA_OK;
}

static void drop_plan(vlai_wallx_writer *w)
{
    vla_run_destroy(w->run);
    vla_plan_destroy(w->plan);
    w->run = NULL;
    w->plan = NULL;
}

void vlai_wallx_writer_destroy(vlai_wallx_writer *w)
{
    if (!w)
        return;
    drop_plan(w);
    vlai_free(w);
}

static vla_status prepare(vlai_wallx_writer *w, const vlai_wallx_shape *shape, vla_error *err)
{
    vla_graph *g;
    vla_plan_options o = VLA_PLAN_OPTIONS_DEFAULT;
    o.numerics = vla_store_numerics(w->store);
    if (w->run && !memcmp(&w->shape, shape, sizeof *shape))
        return VLA_OK;
    drop_plan(w);
    w->shape = *shape;
    VLA_TRY(vlai_wallx_build(&w->config, shape, &(vlai_wallx_options){.next = true}, &g, err));
    vla_status status = vlai_pass_narrow(g, NULL, err);
    if (status != VLA_OK) {
        vla_graph_destroy(g);
        return status;
    }
    VLA_TRY(vla_plan_build(g, &o, &w->plan, err));
    return vla_run_create(w->executor, w->plan, w->store, &w->run, err);
}

/* Texts and what follows them so far. */
typedef struct {
    int64_t *offset;
    int32_t *ids, *labels;
} texts;

/* The texts with what was written behind them; `count` NULL: with room for `most` tokens each. */
static void lay_out(const vlai_wallx_batch *b, const int32_t *written, const int64_t *count, int64_t most, texts *t)
{
    int64_t at = 0;
    for (int64_t s = 0; s < b->samples; s++) {
        int64_t first = b->offset[s], length = b->offset[s + 1] - first, more = count ? count[s] : most;
        t->offset[s] = at;
        for (int64_t i = 0; i <= length + more; i++, at++) {
            bool new = count && i >= length && i < length + more;
            t->ids[at] = i < length ? b->ids[first + i] : new ? written[s * most + i - length] : b->ids[first + length - 1];
            t->labels[at] = i == length + more ? 0 : -100;
        }
    }
    t->offset[b->samples] = at;
}

static vla_status next_tokens(vlai_wallx_writer *w, const vlai_wallx_tokens *tokens, const vlai_wallx_batch *b, int32_t *next, vla_error *err)
{
    VLA_TRY(vlai_wallx_fill(&w->config, tokens, &w->shape, b, vlai_wallx_find_in_run, w->run, err));
    VLA_TRY(vla_run_execute(w->run, err));
    const float *logits = vla_run_data(w->run, "next");
    for (int64_t s = 0; s < b->samples; s++, logits += w->config.vocab_size) {
        int64_t best = 0;
        for (int64_t i = 0; i < w->config.vocab_size; i++) {
            if (!isfinite(logits[i]))
                return vlai_fail(err, VLA_E_NONFINITE, "the model's logits are not finite (sample %lld, token %lld)", (long long)s, (long long)i);
            best = logits[i] > logits[best] ? i : best;
        }
        next[s] = (int32_t)best;
    }
    return VLA_OK;
}

static vla_status write_all(vlai_wallx_writer *w, const vlai_wallx_tokens *tokens, vlai_wallx_batch *b, const vlai_wallx_batch *from, int32_t end,
                            int64_t most, texts *t, int32_t *next, int32_t *ids, int64_t *count, vla_error *err)
{
    vlai_wallx_shape shape;
    lay_out(from, ids, NULL, most, t);
    VLA_TRY(vlai_wallx_shape_of(&w->config, tokens, b, true, &shape, err));
    VLA_TRY(prepare(w, &shape, err));
    bool going = true;
    for (int64_t k = 0; k < most && going; k++) {
        lay_out(from, ids, count, most, t);
        VLA_TRY(next_tokens(w, tokens, b, next, err));
        going = false;
        for (int64_t s = 0; s < b->samples; s++) {
            bool placeholder = next[s] == w->config.image_token_id || next[s] == tokens->action || next[s] == tokens->propri;
            if (count[s] < k || next[s] == end || placeholder) /* it has ended: what stands for no text ends it too */
                continue;
            ids[s * most + count[s]++] = next[s];
            going = true;
        }
    }
    return VLA_OK;
}

vla_status vlai_wallx_write(vlai_wallx_writer *w, const vlai_wallx_tokens *tokens, const vlai_wallx_batch *batch, int32_t end, int64_t most,
                            int32_t *ids, int64_t *count, vla_error *err)
{
    size_t samples = (size_t)batch->samples, all = (size_t)batch->offset[batch->samples] + samples * ((size_t)most + 1);
    texts t = {vlai_array(samples + 1, sizeof *t.offset), vlai_array(all, sizeof *t.ids), vlai_array(all, sizeof *t.labels)};
    int32_t *next = vlai_array(samples + 1, sizeof *next);
    vlai_wallx_batch b = *batch;
    b.offset = t.offset;
    b.ids = t.ids;
    b.labels = t.labels;
    b.real = NULL;
    b.horizon = 0;
    b.action = b.dof_mask = b.noise = b.time = b.flow_loss_mask = NULL;
    memset(count, 0, samples * sizeof *count);
    vla_status status = t.offset && t.ids && t.labels && next
                            ? write_all(w, tokens, &b, batch, end, most, &t, next, ids, count, err)
                            : vlai_nomem(err, all * 2 * sizeof *t.ids);
    vlai_free(t.offset);
    vlai_free(t.ids);
    vlai_free(t.labels);
    vlai_free(next);
    return status;
}
