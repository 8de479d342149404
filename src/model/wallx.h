/* Wall-X as graph: vision tower, two-expert backbone, action head, losses. Facts: the model is X-Square-Robot/wall-x
 * (wall_x/model/qact, wall_x/model/core); names of parameters are those of its checkpoints, fused layout.
 *
 * A micro-batch is laid out as two packed streams, one per expert: stream 0 holds every token that is not <|action|>, in
 * (sample, position) order, stream 1 the action tokens. Attention sees the tokens in sample order. Everything that depends
 * on the tokens (positions, routing, mask columns, windows) is integer data in the batch's slot, so that one graph serves
 * all batches of a shape.
 *
 *     vlai_wallx_shape shape;
 *     VLA_TRY(vlai_wallx_shape_of(&config, &tokens, &batch, true, &shape, err));  // the bucket of this batch
 *     VLA_TRY(vlai_wallx_build(&config, &shape, &options, &graph, err));          // once per bucket
 *     ... vla_graph_backward(graph, vla_graph_find(graph, "loss"), 1.0, err), vla_plan_build, vla_run_create ...
 *     VLA_TRY(vlai_wallx_fill(&config, &tokens, &shape, &batch, vlai_wallx_find_in_run, run, err)); // once per batch
 *     vla_run_execute(run, err); */
#ifndef VLAI_WALLX_H
#define VLAI_WALLX_H

#include "model/wallx_config.h"
#include "vla/graph.h"
#include "vla/run.h"

#include <math.h>

VLA_BEGIN_DECLS

static inline double vlai_inverse_sqrt(double x)
{
    return 1.0 / sqrt(x);
}

/* Ids that the tokenizer gives. */
typedef struct vlai_wallx_tokens {
    int64_t action, propri, pad;
} vlai_wallx_tokens;

/* Working memory of vlai_wallx_fill. Zero at first; released with vlai_free(data). */
typedef struct vlai_wallx_scratch {
    void *data;
    size_t capacity;
} vlai_wallx_scratch;

/* One micro-batch on the host. Borrowed pointers; NULL where the reference receives None. */
typedef struct vlai_wallx_batch {
    int64_t samples;
    const int64_t *offset; /* [samples+1]: sample s owns tokens offset[s] .. offset[s+1] */
    const int32_t *ids;    /* [tokens] */
    const uint8_t *real;   /* [tokens] 1 = real token, 0 = pad (attention_mask); NULL: all real */
    const int32_t *labels; /* [tokens] not shifted, -100 = none */
    /* pictures, in the order of their placeholders */
    int64_t images;
    const int32_t *grid;         /* [images,3]: t, h, w in patches */
    const uint8_t *const *pixels; /* [images]: RGB, HWC, (h*patch) x (w*patch) */
    const float *pixel_values;   /* [patches, patch row], instead of pixels */
    const float *mean, *std;     /* [3] of the image processor, for pixels */
    /* actions: time and noise are drawn by the caller */
    int64_t horizon;
    const float *action, *dof_mask, *noise; /* [samples, horizon, action_dim] */
    const float *time;                      /* [samples] */
    const float *flow_loss_mask;            /* [samples, horizon] */
    const float *state, *state_mask;        /* [samples, propri_dim]; needed when the model has propri_proj */
    /* positional masks, [tokens] each */
    const uint8_t *padding_positions, *valid_flow_action_positions, *ar_predict_token_positions, *ar_action_mask;
    bool ar_visible;
    vlai_wallx_scratch *scratch; /* kept by the caller between fills; NULL: memory of the call */
} vlai_wallx_batch;

/* What decides the graph. Comparable with memcmp after vlai_wallx_shape_of (no padding bytes). */
typedef struct vlai_wallx_shape {
    int64_t samples, horizon;
    int64_t tokens0; /* rows of stream 0, rounded up */
    int64_t tokens1; /* action tokens */
    int64_t patches, units; /* of all pictures; units = patches / merge^2 */
    int64_t images; /* and their frames: each is a picture of its own to the tower */
    int64_t pixel_bytes; /* 0: pixel_values are given */
    int64_t propri;     /* <|propri|> tokens */
    int64_t state_rows; /* states given: samples, or 0 */
    int64_t labels;  /* -1: no labels at all; else rows that are projected, rounded up */
    int64_t action_labels; /* of them rows of stream 1: labels of a token right after <|action|> */
    double flow_scale; /* 1; else what turns the mean by weights into the mean by elements: see flow_scale in wallx_fill.c */
    int64_t pairs, pairs_window, pairs_full; /* visible pairs of one attention, for FLOPs; a function of the rest */
    int64_t causal;  /* 1: every query sees the keys of its sample up to its own, and no others */
    int64_t longest; /* most tokens of a sample, rounded up to 128 in a bucket */
    int64_t windows; /* of the tower, in all pictures */
    int64_t longest_window, longest_picture; /* most patches of one */
    float mean[3], std[3];                   /* of the image processor, when pixel_bytes is not 0 */
} vlai_wallx_shape;

typedef struct vlai_wallx_options {
    bool activations; /* name every activation that golden cases list (act.*), keep all of them */
    bool inference;   /* no loss: input "x_t" instead of noise and action, result "action.out" */
    bool keep_prefix; /* with inference: results "cache.k.L", "cache.v.L" [tokens0, kv width], rotated, of every layer */
    bool from_prefix; /* with inference: the action rows alone, against inputs of those names */
    bool next;        /* no loss: result "next" [labels, vocabulary], logits of the token after each row that has a label behind it */
} vlai_wallx_options;

/* `bucket`: round rows up to the largest power of two <= rows/64; false: exact. */
vla_status vlai_wallx_shape_of(const vlai_wallx_config *config, const vlai_wallx_tokens *tokens,
                               const vlai_wallx_batch *batch, bool bucket, vlai_wallx_shape *out, vla_error *err);
/* A shape for planning from sizes alone: text tokens per sample and the grids of one sample's pictures. */
vla_status vlai_wallx_shape_plan(const vlai_wallx_config *config, int64_t samples, int64_t text_tokens, int64_t horizon,
                                 int64_t images, const int32_t *grid, vlai_wallx_shape *out, vla_error *err);

/* Adds every parameter of the model to a store, in checkpoint order. group_of (may be NULL: 0) gives the learning-rate
 * group by name. An untied head (config->tie_word_embeddings false) is one of them. */
vla_status vlai_wallx_params(const vlai_wallx_config *config, int (*group_of)(const char *name, void *user), void *user,
                             vla_store *store, vla_error *err);

/* True for parameters that stay fp32 in every mode of numerics: norms of the language model, the action head. */
bool vlai_wallx_precise(const char *name);
/* Inner width of a SwiGLU block as graphs and stores see it. Rows of bf16 that are no multiple of 16 bytes (3420 of the
 * tower) would keep tensor cores from loading them, so such a width is rounded up to a multiple of 64: rows of gate and up
 * (each half padded) and columns of down are zeros there, and so are their gradients. With config->exact_widths, as in a
 * training run without WALLX_PERF_COMPILE_VISUAL, it stays as it is. */
int64_t vlai_wallx_inner(const vlai_wallx_config *config, int64_t inner);
/* vla_store_pad of a parameter of the model that such a width touches; others are left as they are. */
vla_status vlai_wallx_pad(const vlai_wallx_config *config, vla_store *store, const char *name, int rank, const int64_t *shape, vla_error *err);

/* Fills the store from a checkpoint, strictly: missing, unexpected and reshaped tensors are an error that lists them. The
 * pool's threads share the work (NULL: this thread alone). */
struct vlai_safetensors;
struct vlai_pool;
vla_status vlai_wallx_load(const vlai_wallx_config *config, const struct vlai_safetensors *st, vla_store *store,
                           struct vlai_pool *pool, vla_error *err);

/* Results: "loss", "flow_loss" (with actions), "cross_entropy_loss" (with labels), "flow_error" [samples*horizon, D],
 * "ce_error" [labels], and with inference "action.out" [tokens1, D]. */
vla_status vlai_wallx_build(const vlai_wallx_config *config, const vlai_wallx_shape *shape,
                            const vlai_wallx_options *options, vla_graph **out, vla_error *err);

/* The tower alone: inputs "pixel_values", "d_out" [units, out_hidden]; "loss" = sum(out * d_out). */
vla_status vlai_wallx_build_vision(const vlai_wallx_config *config, const vlai_wallx_shape *shape, vla_graph **out,
                                   vla_error *err);

/* Writes all inputs of the graph. find(user, name) gives the buffer of an input, or NULL when the plan has none. */
typedef void *(*vlai_wallx_find)(void *user, const char *name);
/* One whose `user` is a vla_run of the graph. */
void *vlai_wallx_find_in_run(void *run, const char *name);
vla_status vlai_wallx_fill(const vlai_wallx_config *config, const vlai_wallx_tokens *tokens, const vlai_wallx_shape *shape,
                           const vlai_wallx_batch *batch, vlai_wallx_find find, void *user, vla_error *err);

/* The inputs of the tower alone. */
void vlai_wallx_fill_vision(const vlai_wallx_config *config, const vlai_wallx_shape *shape, const vlai_wallx_batch *batch,
                            vlai_wallx_find find, void *user);
/* M-RoPE positions of the tokens first..end-1 of one sample: text counts up, a picture spans rows and columns, pads get 1.
 * `image` counts the pictures of the batch so far. Axis k goes to pos + k*n, at the tokens' places. */
void vlai_wallx_positions(const vlai_wallx_config *config, const vlai_wallx_batch *batch, int64_t first, int64_t end,
                          int64_t *image, int32_t *pos, int64_t n);

/* Euler sampling of actions (vla predict): prefix once, then the action rows against the kept prefix. */
typedef struct vlai_wallx_sampler vlai_wallx_sampler;
vla_status vlai_wallx_sampler_create(const vlai_wallx_config *config, vla_store *store, vla_executor *executor,
                                     vlai_wallx_sampler **out, vla_error *err);
void vlai_wallx_sampler_destroy(vlai_wallx_sampler *sampler);
typedef struct vlai_wallx_sample_options {
    int64_t steps;               /* Euler steps = network evaluations */
    bool cache;                  /* prefix once; false: the whole sequence at every evaluation */
    const float *padding_action; /* [action_dim]: value that channels with dof_mask 0 are driven to; NULL: no such channel */
    float *trace_x, *trace_out;  /* [steps, samples, horizon, action_dim] or NULL: what entered and left every evaluation */
    float *times;                /* [steps] or NULL */
} vlai_wallx_sample_options;
/* batch->noise is the start; batch->action and time are not read. out [samples, horizon, action_dim]: the end of the path
 * at t = s, still normalised. */
vla_status vlai_wallx_sample(vlai_wallx_sampler *sampler, const vlai_wallx_tokens *tokens, const vlai_wallx_batch *batch,
                             const vlai_wallx_sample_options *options, float *out, vla_error *err);

/* Writing text (vla predict of action tokens): the most likely token after the text of every sample, again and again, as
 * generate_text of the reference does it without retries; a placeholder of pictures, actions or state ends a text. Every token takes a forward pass over the whole text. */
typedef struct vlai_wallx_writer vlai_wallx_writer;
vla_status vlai_wallx_writer_create(const vlai_wallx_config *config, vla_store *store, vla_executor *executor,
                                    vlai_wallx_writer **out, vla_error *err);
void vlai_wallx_writer_destroy(vlai_wallx_writer *writer); /* accepts NULL */
/* Goes on after the batch's texts until each has written `end` or `most` tokens. ids [samples, most]; count [samples]: how many
 * each has written, without `end`. Actions, labels and masks of the batch are not read. */
vla_status vlai_wallx_write(vlai_wallx_writer *writer, const vlai_wallx_tokens *tokens, const vlai_wallx_batch *batch, int32_t end,
                            int64_t most, int32_t *ids, int64_t *count, vla_error *err);

VLA_END_DECLS

#endif
