/* The folder of a new model: processor, architecture and weights under a temporary name, then one rename. */
#include "model/wallx_init.h"

#include "base/bf16.h"
#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/pool.h"
#include "base/rng.h"
#include "format/safetensors.h"
#include "model/wallx.h"
#include "model/wallx_layout.h"
#include "text/prompt.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    CHUNK = 1 << 20, /* elements drawn at a time; 4 MiB */
    TILE = 1 << 14,  /* elements that one thread draws */
    NAME = 4096,
};

/* ---- architecture ---- */

static json_t *sizes_json(const vlai_wallx_sizes *s)
{
    int64_t half = s->hidden / s->heads / 2, time = half / 4, rows = (half - time) / 2;
    json_t *full = json_array();
    for (int64_t b = s->vision_full_every; b > 0 && b <= s->vision_depth; b += s->vision_full_every)
        json_array_append_new(full, json_integer(b - 1));
    json_t *vision = json_pack("{s:s, s:I, s:I, s:s, s:I, s:I, s:i, s:I, s:I, s:i, s:i, s:I, s:o, s:I}", "model_type", "qwen2_5_vl",
                               "depth", s->vision_depth, "hidden_size", s->vision_hidden, "hidden_act", "silu",
                               "intermediate_size", s->vision_intermediate, "num_heads", s->vision_heads, "in_channels", 3,
                               "patch_size", s->patch, "spatial_merge_size", s->merge, "temporal_patch_size", 2,
                               "tokens_per_second", 2, "window_size", s->window, "fullatt_block_indexes", full,
                               "out_hidden_size", s->hidden);
    json_t *experts = json_pack("[{s:I, s:I, s:s}, {s:I, s:I, s:s}]", "hidden_size", s->hidden, "intermediate_size",
                                s->intermediate, "hidden_act", "silu", "hidden_size", s->action_hidden, "intermediate_size",
                                s->action_intermediate, "hidden_act", "silu");
    json_t *noise = json_pack("{s:f, s:f, s:f, s:i}", "beta_alpha", 1.5, "beta_beta", 1.0, "s", 0.999,
                              "num_inference_timesteps", 10);
    return json_pack(
        "{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:f, s:f, s:{s:s, s:[I,I,I]}, s:b, s:f, s:b, s:f, s:I, s:I, s:i, s:[I,I], "
        "s:o, s:b, s:b, s:b, s:b, s:b, s:b, s:b, s:b, s:b, s:b, s:s, s:o, s:o}",
        "architectures", "Qwen2_5_VLMoEForAction", "model_type", "qwen2_5_vl", "vocab_size", s->vocab, "hidden_size", s->hidden,
        "intermediate_size", s->intermediate, "num_hidden_layers", s->layers, "num_attention_heads", s->heads,
        "num_key_value_heads", s->kv_heads, "hidden_act", "silu", "rms_norm_eps", 1e-6, "rope_theta", s->theta, "rope_scaling",
        "type", "mrope", "mrope_section", time, rows, half - time - rows, "tie_word_embeddings", 1, "attention_dropout", 0.0,
        "use_sliding_window", 0, "initializer_range", s->range, "action_hidden_size", s->action_hidden, "state_hidden_size",
        s->hidden, "num_experts", 2, "dim_inputs", s->hidden, s->action_hidden, "experts", experts, "attention_moe", 1,
        "mlp_moe", 1, "norm_moe", 1, "mot_opt", 1, "use_flow_action_expert", 1, "causal_action_attention_mask", 1,
        "proj_with_mask", 1, "use_adarms", 0, "use_x_pred", 0, "use_x_loss", 1, "_attn_implementation", "flash_mask",
        "noise_scheduler", noise, "vision_config", vision);
}

/* Ids in the architecture are those of the processor that lies beside it. */
static const struct {
    const char *key, *token;
} ids[] = {
    {"image_token_id", "<|image_pad|>"},         {"video_token_id", "<|video_pad|>"},
    {"vision_start_token_id", "<|vision_start|>"}, {"vision_end_token_id", "<|vision_end|>"},
    {"vision_token_id", "<|vision_pad|>"},       {"bos_token_id", "<|endoftext|>"},
    {"eos_token_id", "<|im_end|>"},              {"pad_token_id", "<|endoftext|>"},
};

static vla_status check_sizes(const vlai_wallx_sizes *s, vla_error *err)
{
    const struct {
        const char *name;
        int64_t value, high;
    } rows[] = {
        {"hidden", s->hidden, 1 << 20}, {"layers", s->layers, 1024}, {"heads", s->heads, 1024},
        {"kv-heads", s->kv_heads, 1024}, {"intermediate", s->intermediate, 1 << 20},
        {"action-hidden", s->action_hidden, 1 << 20}, {"action-intermediate", s->action_intermediate, 1 << 20},
        {"vision-hidden", s->vision_hidden, 1 << 20}, {"vision-depth", s->vision_depth, 128},
        {"vision-heads", s->vision_heads, 1024}, {"vision-intermediate", s->vision_intermediate, 1 << 20},
        {"vision-full-every", s->vision_full_every, 128}, {"patch", s->patch, 256}, {"merge", s->merge, 16},
        {"window", s->window, 65536},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].value < 1 || rows[i].value > rows[i].high)
            return vlai_fail(err, VLA_E_INVALID, "%s is %" PRId64 ", wanted 1 to %" PRId64, rows[i].name, rows[i].value,
                             rows[i].high);
    if (!(s->theta >= 1 && s->theta <= 1e12))
        return vlai_fail(err, VLA_E_INVALID, "rope-theta is %g, wanted 1 to 1e12", s->theta);
    return VLA_OK;
}

/* ---- processor ---- */

static const char *const processor_files[] = {"tokenizer.json",   "tokenizer_config.json",   "preprocessor_config.json",
                                              "vocab.json",       "merges.txt",              "special_tokens_map.json",
                                              "tokenizer.model",  "added_tokens.json",       "chat_template.json"};

static vla_status copy_processor(const char *from, const char *to, vla_error *err)
{
    for (size_t i = 0; i < sizeof processor_files / sizeof *processor_files; i++) {
        char source[NAME], target[NAME];
        if (!vlai_path_join(source, sizeof source, from, processor_files[i]) ||
            !vlai_path_join(target, sizeof target, to, processor_files[i]))
            return vlai_fail(err, VLA_E_INVALID, "%s: path too long", from);
        if (!vlai_is_file(source)) {
            if (i < 3)
                return vlai_fail_hint(err, VLA_E_NOT_FOUND, "leave out --processor to have a small vocabulary made",
                                      "%s: no such file; a processor folder holds it", source);
            continue;
        }
        char *data;
        size_t size;
        VLA_TRY(vlai_read_file(source, 0, &data, &size, err));
        vla_status status = vlai_write_file_atomic(target, data, size, err);
        vlai_free(data);
        VLA_TRY(status);
    }
    return VLA_OK;
}

/* Writes the processor and takes ids and vocabulary from it into the architecture. */
static vla_status make_processor(const vlai_wallx_init_options *o, const char *dir, json_t *architecture, vla_error *err)
{
    if (o->processor)
        VLA_TRY(copy_processor(o->processor, dir, err));
    else
        VLA_TRY(vlai_tokenizer_write(dir, o->texts, o->text_count, o->merges, err));
    vlai_tokenizer *tok;
    VLA_TRY(vlai_tokenizer_open(dir, &tok, err));
    vla_status status = vlai_prompt_add_tokens(tok, 0, NULL, 0, err);
    int64_t size = vlai_tokenizer_size(tok);
    for (size_t i = 0; i < sizeof ids / sizeof *ids && status == VLA_OK; i++) {
        int32_t id = vlai_tokenizer_id(tok, ids[i].token);
        if (id < 0)
            status = vlai_fail(err, VLA_E_NOT_FOUND, "%s: the vocabulary has no token %s", vlai_tokenizer_name(tok), ids[i].token);
        else if (json_object_set_new(architecture, ids[i].key, json_integer(id)))
            status = vlai_nomem(err, 64);
    }
    vlai_tokenizer_close(tok);
    VLA_TRY(status);
    int64_t rows = o->vocab;
    if (!rows)
        VLA_TRY(vlai_json_int(architecture, "vocab_size", 0, "architecture", &rows, err));
    if (!rows)
        rows = size;
    if (rows < size)
        return vlai_fail_hint(err, VLA_E_SHAPE, "leave out --vocab, or make it at least as large",
                              "the vocabulary of %s has %" PRId64 " tokens with those that training adds, the embedding %" PRId64
                              " rows",
                              o->processor ? o->processor : "the new processor", size, rows);
    return json_object_set_new(architecture, "vocab_size", json_integer(rows)) ? vlai_nomem(err, 64) : VLA_OK;
}

/* ---- weights ---- */

typedef struct job {
    const vlai_wallx_weight *weights; /* of the file being written */
    const vlai_tensor_view *views;
    double range;
    uint64_t seed;
    vlai_pool *pool;
    float *draws; /* CHUNK */
    uint16_t *halves;
} job;

/* 64-bit FNV-1a of a name: the position of its stream. */
static uint64_t name_hash(const char *name)
{
    uint64_t h = 14695981039346656037u;
    for (; *name; name++)
        h = (h ^ (uint8_t)*name) * 1099511628211u;
    return h;
}

typedef struct draw {
    vlai_rng_key key;
    uint32_t first;
    int64_t n;
    double range;
    float *out;
    uint16_t *halves; /* NULL: fp32 is wanted */
} draw;

static void draw_tile(void *context, int64_t tile, int thread)
{
    (void)thread;
    const draw *d = context;
    int64_t at = tile * TILE, n = d->n - at < TILE ? d->n - at : TILE;
    vlai_rng_normal(&d->key, d->first + (uint32_t)at, (size_t)n, d->out + at);
    for (int64_t i = at; i < at + n; i++)
        d->out[i] = (float)(d->out[i] * d->range);
    for (int64_t i = at; d->halves && i < at + n; i++)
        d->halves[i] = vlai_bf16_from_float(d->out[i]);
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && !strcmp(text + n - m, end);
}

static vla_status put_weight(void *context, size_t i, vlai_writer *writer, vla_error *err)
{
    const job *j = context;
    const vlai_wallx_weight *w = &j->weights[i];
    bool half = j->views[i].dtype == VLA_BF16;
    for (int64_t first = 0; first < w->elements; first += CHUNK) {
        int64_t n = w->elements - first < CHUNK ? w->elements - first : CHUNK;
        if (w->rank == 1) {
            float value = ends_with(w->name, ".bias") ? 0.0f : 1.0f;
            for (int64_t k = 0; k < n; k++) {
                j->draws[k] = value;
                j->halves[k] = vlai_bf16_from_float(value);
            }
        } else {
            draw d = {{j->seed, VLAI_RNG_INIT, name_hash(w->name), (uint32_t)(first >> 32)},
                      (uint32_t)first, n, j->range, j->draws, half ? j->halves : NULL};
            vlai_pool_run(j->pool, (n + TILE - 1) / TILE, draw_tile, &d);
        }
        VLA_TRY(vlai_writer_put(writer, half ? (const void *)j->halves : j->draws, (size_t)n * (half ? 2 : 4), err));
    }
    return VLA_OK;
}

static vla_status write_index(const char *dir, const vlai_tensor_view *views, const size_t *starts, size_t files, uint64_t bytes,
                              vla_error *err)
{
    char path[NAME], name[64];
    json_t *map = json_object();
    for (size_t f = 0; f < files; f++)
        for (size_t i = starts[f]; i < starts[f + 1]; i++) {
            snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", f + 1, files);
            json_object_set_new(map, views[i].name, json_string(name));
        }
    json_t *index = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)bytes, "weight_map", map);
    if (!index)
        return vlai_nomem(err, 4096);
    vla_status status = vlai_path_join(path, sizeof path, dir, "model.safetensors.index.json")
                            ? vlai_json_save(index, path, err)
                            : vlai_fail(err, VLA_E_INVALID, "%s: path too long", dir);
    json_decref(index);
    return status;
}

/* First tensor of every file: a new one begins before `limit` is passed. Ends with `count`; at most count+1 entries. */
static size_t cut_files(const vlai_tensor_view *views, size_t count, double limit, size_t *starts)
{
    size_t files = 0;
    double used = 0;
    for (size_t i = 0; i < count; i++) {
        if (!i || (limit > 0 && used + (double)views[i].bytes > limit)) {
            starts[files++] = i;
            used = 0;
        }
        used += (double)views[i].bytes;
    }
    starts[files] = count;
    return files;
}

static vla_status write_weights(const vlai_wallx_init_options *o, const char *dir, job *j, const vlai_wallx_weight *weights,
                                const vlai_tensor_view *views, size_t count, vlai_wallx_init_summary *made, vla_error *err)
{
    static const char *const metadata[] = {"format", "pt", NULL};
    size_t *starts = vlai_array(count + 1, sizeof *starts);
    if (!starts)
        return vlai_nomem(err, (count + 1) * sizeof *starts);
    made->files = cut_files(views, count, o->shard_gb * 1e9, starts);
    vla_status status = VLA_OK;
    for (size_t f = 0; f < made->files && status == VLA_OK && !o->dry; f++) {
        char name[64] = "model.safetensors", path[NAME];
        if (made->files > 1)
            snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", f + 1, made->files);
        j->weights = weights + starts[f];
        j->views = views + starts[f];
        status = vlai_path_join(path, sizeof path, dir, name)
                     ? vlai_safetensors_stream(path, j->views, starts[f + 1] - starts[f], metadata, put_weight, j, err)
                     : vlai_fail(err, VLA_E_INVALID, "%s: path too long", dir);
    }
    if (status == VLA_OK && made->files > 1 && !o->dry)
        status = write_index(dir, views, starts, made->files, made->bytes, err);
    vlai_free(starts);
    return status;
}

static vla_status make_weights(const vlai_wallx_init_options *o, const vlai_wallx_config *config, double range, const char *dir,
                               vlai_wallx_init_summary *made, vla_error *err)
{
    vlai_wallx_weight *weights = NULL;
    vlai_tensor_view *views = NULL;
    job j = {.seed = o->seed, .range = range};
    size_t all, count = 0;
    vla_status status;
    VLA_TRY_GOTO(vlai_wallx_weights(config, &weights, &all, err), done);
    views = vlai_calloc(all, sizeof *views);
    j.draws = vlai_array(CHUNK, sizeof *j.draws);
    j.halves = vlai_array(CHUNK, sizeof *j.halves);
    if (!views || !j.draws || !j.halves) {
        status = vlai_nomem(err, all * sizeof *views + CHUNK * (sizeof *j.draws + sizeof *j.halves));
        goto done;
    }
    for (size_t i = 0; i < all; i++) { /* a tied lm_head is the embedding and is not stored twice */
        if (config->tie_word_embeddings && !strcmp(weights[i].name, "lm_head.weight"))
            continue;
        weights[count] = weights[i];
        vlai_tensor_view *v = &views[count];
        v->name = weights[count].name;
        v->dtype = o->dtype == VLA_BF16 && !vlai_wallx_precise(v->name) ? VLA_BF16 : VLA_F32;
        v->rank = weights[count].rank;
        memcpy(v->shape, weights[count].shape, sizeof v->shape);
        v->elements = weights[count].elements;
        v->bytes = (size_t)v->elements * vla_dtype_size(v->dtype);
        made->bytes += v->bytes;
        made->parameters += v->elements;
        if (o->each)
            o->each(o->user, v->name, v->dtype, v->rank, v->shape, v->bytes);
        count++;
    }
    made->tensors = count;
    made->vocab = config->vocab_size;
    VLA_TRY_GOTO(vlai_pool_create(o->threads, &j.pool, err), done);
    status = write_weights(o, dir, &j, weights, views, count, made, err);
done:
    vlai_pool_destroy(j.pool);
    vlai_free(j.halves);
    vlai_free(j.draws);
    vlai_free(views);
    vlai_free(weights);
    return status;
}

/* ---- the folder ---- */

static vla_status finish_architecture(const vlai_wallx_init_options *o, json_t *architecture, const char *dir,
                                      vlai_wallx_config *config, double *range, vla_error *err)
{
    char path[NAME];
    *range = o->range;
    if (*range <= 0)
        VLA_TRY(vlai_json_real(architecture, "initializer_range", 0.02, "architecture", range, err));
    if (!(*range > 0 && *range <= 10))
        return vlai_fail(err, VLA_E_INVALID, "initializer_range is %g, wanted more than 0, at most 10", *range);
    if (json_object_set_new(architecture, "initializer_range", json_real(*range)))
        return vlai_nomem(err, 64);
    if (!vlai_path_join(path, sizeof path, dir, "config.json"))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", dir);
    VLA_TRY(vlai_json_save(architecture, path, err));
    vla_error inner = VLA_ERROR_INIT;
    vla_status status = vlai_wallx_config_load(path, config, &inner);
    if (status != VLA_OK) { /* the temporary file says nothing to the user: the sizes came from options or from o->config */
        size_t n = strlen(path);
        const char *what = !strncmp(inner.message, path, n) && inner.message[n] == ':' ? inner.message + n + 1 : inner.message;
        what += strspn(what, " ");
        return vlai_fail_hint(err, o->config || status == VLA_E_NOMEM ? status : VLA_E_INVALID, inner.hint, "%s: %s",
                              o->config ? o->config : "the chosen sizes", what);
    }
    config->action_dim = o->action_dim;
    config->propri_dim = o->state_dim;
    return VLA_OK;
}

static vla_status make_all(const vlai_wallx_init_options *o, const char *dir, json_t *architecture,
                           vlai_wallx_init_summary *made, vla_error *err)
{
    vlai_wallx_config config;
    double range;
    VLA_TRY(make_processor(o, dir, architecture, err));
    VLA_TRY(finish_architecture(o, architecture, dir, &config, &range, err));
    VLA_TRY(make_weights(o, &config, range, dir, made, err));
    return o->dry ? VLA_OK : vlai_publish(dir, o->out, err);
}

static vla_status load_architecture(const vlai_wallx_init_options *o, json_t **out, vla_error *err)
{
    char inside[NAME];
    *out = NULL;
    if (!o->config) {
        VLA_TRY(check_sizes(&o->sizes, err));
        *out = sizes_json(&o->sizes);
        return *out ? VLA_OK : vlai_nomem(err, 4096);
    }
    const char *path = o->config;
    if (vlai_is_dir(path)) {
        if (!vlai_path_join(inside, sizeof inside, path, "config.json"))
            return vlai_fail(err, VLA_E_INVALID, "%s: path too long", path);
        path = inside;
    }
    VLA_TRY(vlai_json_load(path, out, err));
    if (json_is_object(*out))
        return VLA_OK;
    json_decref(*out);
    return vlai_fail(err, VLA_E_FORMAT, "%s: not a JSON object", path);
}

vla_status vlai_wallx_init(const vlai_wallx_init_options *given, vlai_wallx_init_summary *made, vla_error *err)
{
    char out[NAME], dir[NAME];
    vlai_wallx_init_options options = *given, *o = &options;
    *made = (vlai_wallx_init_summary){0};
    if (!vlai_temporary_dir(given->out, out, dir, sizeof dir - 64))
        return vlai_fail(err, VLA_E_INVALID, "'%s': path %s", given->out, *given->out ? "too long" : "is empty");
    options.out = out;
    struct stat st;
    if (!o->dry && lstat(o->out, &st) == 0)
        return vlai_fail_hint(err, VLA_E_INVALID, "name a folder that does not exist yet, or remove this one",
                              "%s: exists already", o->out);
    if (o->dtype != VLA_F32 && o->dtype != VLA_BF16)
        return vlai_fail(err, VLA_E_DTYPE, "weights of type %s, wanted F32 or BF16", vla_dtype_name(o->dtype));
    if (o->action_dim < 1 || o->action_dim > 4096 || o->state_dim < 1 || o->state_dim > 4096)
        return vlai_fail(err, VLA_E_INVALID, "actions of %" PRId64 " and states of %" PRId64 " values, wanted 1 to 4096",
                         o->action_dim, o->state_dim);
    if (o->shard_gb < 0)
        return vlai_fail(err, VLA_E_INVALID, "weights files of %g GB, wanted 0 or more", o->shard_gb);
    json_t *architecture;
    VLA_TRY(load_architecture(o, &architecture, err));
    int lock;
    vla_status status = vlai_temporary_begin(o->out, dir, &lock, err);
    if (status == VLA_OK) {
        status = make_all(o, dir, architecture, made, err);
        if (status != VLA_OK || o->dry)
            vlai_remove_tree(dir, NULL);
    }
    json_decref(architecture);
    vlai_unlock_dir(lock);
    return status;
}
