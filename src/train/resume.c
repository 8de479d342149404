#include "train/resume.h"

#include "base/fail.h"
#include "base/json.h"
#include "base/log.h"
#include "base/memory.h"

#include <string.h>

static const char *numerics_name(vla_numerics n)
{
    static const char *const names[] = {"fp32", "bf16", "bf16-sr", "bf16-plain", "fp64"};
    return (unsigned)n < 5 ? names[n] : "?";
}

/* jansson's setters report a failed allocation by -1; one flag collects them. */
static void set(json_t *object, const char *key, json_t *value, int *failed)
{
    *failed |= json_object_set_new(object, key, value);
}

static json_t *fixed_values(const vla_trainer_options *o, int64_t count, vla_error *err)
{
    int failed = 0;
    json_t *fixed = json_object();
    if (o->contract) {
        json_t *contract;
        if (vlai_json_parse(o->contract, strlen(o->contract), "contract", &contract, err) != VLA_OK) {
            json_decref(fixed);
            return NULL;
        }
        failed |= json_object_update(fixed, contract);
        json_decref(contract);
    }
    set(fixed, "seed", json_integer((json_int_t)o->seed), &failed);
    set(fixed, "numerics", json_string(numerics_name(o->numerics)), &failed);
    set(fixed, "batch", json_integer(o->batch), &failed);
    set(fixed, "accumulation", json_integer(o->accumulation), &failed);
    set(fixed, "global_loss", json_boolean(o->global_loss), &failed);
    set(fixed, "epoch_samples", json_integer(count), &failed);
    set(fixed, "beta1", json_real(o->adamw.beta1), &failed);
    set(fixed, "beta2", json_real(o->adamw.beta2), &failed);
    set(fixed, "eps", json_real(o->adamw.eps), &failed);
    set(fixed, "weight_decay", json_real(o->adamw.weight_decay), &failed);
    if (failed) {
        json_decref(fixed);
        vlai_fail(err, VLA_E_NOMEM, "out of host memory while a run's state is written");
        return NULL;
    }
    return fixed;
}

static json_t *free_values(const vla_trainer_options *o, int *failed)
{
    json_t *values = json_object(), *rates = json_object();
    for (int i = 0; i < o->group_count; i++)
        set(rates, o->groups[i].name, json_real(o->groups[i].rate), failed);
    set(values, "rates", rates, failed);
    set(values, "schedule", json_string(o->schedule == VLA_LR_COSINE ? "cosine" : "constant"), failed);
    set(values, "min_rate", json_real(o->min_rate), failed);
    set(values, "warmup", json_integer(o->warmup), failed);
    set(values, "steps", json_integer(o->steps), failed);
    set(values, "max_norm", json_real(o->adamw.max_norm), failed);
    return values;
}

vla_status vlai_state_text(const vla_trainer_options *o, int64_t count, const vlai_progress *p, vlai_text *out,
                           vla_error *err)
{
    int failed = 0;
    json_t *fixed = fixed_values(o, count, err);
    if (!fixed)
        return err ? err->status : VLA_E_NOMEM;
    json_t *state = json_object();
    set(state, "format", json_integer(1), &failed);
    set(state, "vla", json_string(VLA_VERSION), &failed);
    set(state, "step", json_integer(p->step), &failed);
    set(state, "updates", json_integer(p->updates), &failed);
    set(state, "skips", json_integer(p->skips), &failed);
    set(state, "bad_in_a_row", json_integer(p->bad_in_a_row), &failed);
    set(state, "epoch", json_integer(p->epoch), &failed);
    set(state, "place", json_integer(p->place), &failed);
    set(state, "samples", json_integer(p->samples), &failed);
    set(state, "world", json_integer(1), &failed);
    set(state, "fixed", fixed, &failed);
    set(state, "free", free_values(o, &failed), &failed);
    char *text = failed ? NULL : json_dumps(state, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
    json_decref(state);
    if (text) {
        vlai_text_puts(out, text);
        vlai_text_puts(out, "\n");
    }
    json_free_t release;
    json_get_alloc_funcs(NULL, &release);
    release(text);
    return text ? vlai_text_status(out, err) : vlai_fail(err, VLA_E_NOMEM, "out of host memory while a run's state is written");
}

/* A value for a message: compact JSON, cut. */
static void put_value(vlai_text *out, const json_t *value)
{
    char *text = value ? json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(12)) : NULL;
    if (!value)
        vlai_text_puts(out, "nothing");
    else
        vlai_text_printf(out, "%.80s%s", text ? text : "?", text && strlen(text) > 80 ? "..." : "");
    json_free_t release;
    json_get_alloc_funcs(NULL, &release);
    release(text);
}

/* A file of integers may give 1 where 1.0 was written. */
static bool equal(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b))
        return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

static bool is_allowed(const char *const *allow, const char *name)
{
    for (; allow && *allow; allow++)
        if (!strcmp(*allow, "all") || !strcmp(*allow, name))
            return true;
    return false;
}

typedef struct {
    vlai_text refused, names;
    const char *const *allow;
    bool all; /* nothing is refused */
} comparison;

static void compare_one(comparison *c, const char *name, const json_t *old, const json_t *now)
{
    if (equal(old, now))
        return;
    vlai_text line = {0};
    vlai_text_printf(&line, "%s: ", name);
    put_value(&line, old);
    vlai_text_puts(&line, " in the checkpoint, ");
    put_value(&line, now);
    vlai_text_puts(&line, " now");
    if (c->all || is_allowed(c->allow, name)) {
        vlai_info("resume: %s", line.data ? line.data : name);
    } else {
        vlai_text_printf(&c->refused, "%s%s", c->refused.size ? "; " : "", line.data ? line.data : name);
        vlai_text_printf(&c->names, "%s%s", c->names.size ? "," : "", name);
    }
    vlai_text_fini(&line);
}

/* Every name of either object. */
static void compare(comparison *c, const json_t *old, const json_t *now)
{
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)now, name, value)
        compare_one(c, name, json_object_get(old, name), value);
    json_object_foreach((json_t *)(uintptr_t)old, name, value)
        if (!json_object_get(now, name))
            compare_one(c, name, value, NULL);
}

static vla_status read_counters(const json_t *state, const char *path, vlai_progress *out, vla_error *err)
{
    const struct {
        const char *key;
        int64_t *to;
    } rows[] = {{"step", &out->step},   {"updates", &out->updates}, {"skips", &out->skips}, {"bad_in_a_row", &out->bad_in_a_row},
                {"epoch", &out->epoch}, {"place", &out->place},     {"samples", &out->samples}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        VLA_TRY(vlai_json_need_int(state, rows[i].key, path, rows[i].to, err));
        if (*rows[i].to < 0)
            return vlai_fail(err, VLA_E_CORRUPT, "%s: '%s' is %lld, wanted 0 or more", path, rows[i].key, (long long)*rows[i].to);
    }
    return VLA_OK;
}

static vla_status compare_states(const json_t *state, const char *path, const vla_trainer_options *o, int64_t count,
                                 vla_error *err)
{
    json_t *old, *now = fixed_values(o, count, err);
    if (!now)
        return err ? err->status : VLA_E_NOMEM;
    comparison c = {.allow = o->allow_change};
    vla_status status = vlai_json_need(state, "fixed", JSON_OBJECT, path, &old, err);
    if (status == VLA_OK)
        compare(&c, old, now);
    json_decref(now);
    if (status == VLA_OK && c.refused.size) {
        char hint[512];
        snprintf(hint, sizeof hint, "set them back, or accept the change with --allow-change %s",
                 c.names.data ? c.names.data : "all");
        status = vlai_fail_hint(err, VLA_E_INVALID, hint, "%s: cannot go on with other settings: %s", path,
                                c.refused.data ? c.refused.data : "");
    }
    vlai_text_fini(&c.refused);
    vlai_text_fini(&c.names);
    int failed = 0;
    json_t *values = free_values(o, &failed);
    comparison notes = {.all = true};
    if (status == VLA_OK && !failed && json_is_object(json_object_get(state, "free")))
        compare(&notes, json_object_get(state, "free"), values);
    json_decref(values);
    return status;
}

vla_status vlai_state_read(const char *text, const char *path, const vla_trainer_options *o, int64_t count,
                           vlai_progress *out, vla_error *err)
{
    json_t *state;
    VLA_TRY(vlai_json_parse(text, strlen(text), path, &state, err));
    vla_status status = read_counters(state, path, out, err);
    if (status == VLA_OK)
        status = compare_states(state, path, o, count, err);
    json_decref(state);
    return status;
}
