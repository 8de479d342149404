#include "train/resume.h"

#include "base/fail.h"
#include "base/json.h"
#include "base/log.h"
#include "base/memory.h"
#include "optim/settings.h"

#include <stdio.h>
#include <string.h>

/* jansson's setters report a failed allocation by -1; one flag collects them. */
static void set(json_t *object, const char *key, json_t *value, int *failed)
{
    *failed |= json_object_set_new(object, key, value);
}

/* The sections that a resume compares: the caller's (contract, data, ...), and "settings". */
static json_t *fixed_sections(const vla_trainer_options *o, int64_t count, vla_error *err)
{
    int failed = 0;
    json_t *sections = json_object(), *s = json_object();
    if (o->contract) {
        json_t *contract;
        if (vlai_json_parse(o->contract, strlen(o->contract), "contract", &contract, err) != VLA_OK) {
            json_decref(sections);
            json_decref(s);
            return NULL;
        }
        failed |= json_object_update(sections, contract);
        json_decref(contract);
    }
    set(s, "seed", json_integer((json_int_t)o->seed), &failed);
    set(s, "numerics", json_string(vlai_numerics_name(o->numerics)), &failed);
    set(s, "batch", json_integer(o->batch), &failed);
    set(s, "accumulation", json_integer(o->accumulation), &failed);
    set(s, "global_loss", json_boolean(o->global_loss), &failed);
    set(s, "epoch_samples", json_integer(count), &failed);
    set(s, "beta1", json_real(o->adamw.beta1), &failed);
    set(s, "beta2", json_real(o->adamw.beta2), &failed);
    set(s, "eps", json_real(o->adamw.eps), &failed);
    set(s, "weight_decay", json_real(o->adamw.weight_decay), &failed);
    set(sections, "settings", s, &failed);
    if (failed) {
        json_decref(sections);
        vlai_fail(err, VLA_E_NOMEM, "out of host memory while a run's state is written");
        return NULL;
    }
    return sections;
}

static json_t *schedule_values(const vla_trainer_options *o, int *failed)
{
    json_t *values = json_object(), *rates = json_object();
    for (int i = 0; i < o->group_count; i++)
        set(rates, o->groups[i].name, json_real(o->groups[i].rate), failed);
    set(values, "rates", rates, failed);
    set(values, "kind", json_string(o->schedule == VLA_LR_COSINE ? "cosine" : "constant"), failed);
    set(values, "min_rate", json_real(o->min_rate), failed);
    set(values, "warmup", json_integer(o->warmup), failed);
    set(values, "steps", json_integer(o->steps), failed);
    set(values, "max_norm", json_real(o->adamw.max_norm), failed);
    return values;
}

vla_status vlai_state_text(const vla_trainer_options *o, int64_t count, const vlai_progress *p, const char *choices,
                           vlai_text *out, vla_error *err)
{
    int failed = 0;
    json_t *fixed = fixed_sections(o, count, err);
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
    set(state, "world", json_integer(o->world > 1 ? o->world : 1), &failed);
    if (o->accumulation_given)
        set(state, "accumulation_given", json_integer(o->accumulation_given), &failed);
    failed |= json_object_update(state, fixed);
    json_decref(fixed);
    set(state, "schedule", schedule_values(o, &failed), &failed);
    if (choices && *choices)
        set(state, "choices", json_string(choices), &failed);
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

/* Compact JSON; NULL where there is no value or no memory. */
static char *dump(const json_t *value)
{
    return value ? json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(12)) : NULL;
}

/* Where a message begins to show two values that are too long for it: shortly before they differ. */
static size_t first_difference(const char *a, const char *b)
{
    enum { SHOWN = 80, BEFORE = 40 };
    size_t at = 0;
    if (!a || !b || (strlen(a) <= SHOWN && strlen(b) <= SHOWN))
        return 0;
    while (a[at] && a[at] == b[at])
        at++;
    at = at > BEFORE ? at - BEFORE : 0;
    while (at && ((unsigned char)a[at] & 0xc0) == 0x80) /* not inside a letter of UTF-8 */
        at--;
    return at;
}

static void put_value(vlai_text *out, const char *text, size_t from)
{
    if (!text)
        vlai_text_puts(out, "nothing");
    else
        vlai_text_printf(out, "%s%.80s%s", from ? "..." : "", text + from, strlen(text + from) > 80 ? "..." : "");
}

/* A file of integers may give 1 where 1.0 was written. */
static bool equal(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b))
        return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

/* `allow` holds the name itself or a section that the name lies in. */
static bool is_allowed(const char *const *allow, const char *name)
{
    for (; allow && *allow; allow++) {
        size_t n = strlen(*allow);
        if (!strcmp(*allow, "all") || (!strncmp(*allow, name, n) && (!name[n] || name[n] == '.')))
            return true;
    }
    return false;
}

typedef struct {
    vlai_text refused, names;
    const char *const *allow;
    bool all; /* nothing is refused */
} comparison;

static void differ(comparison *c, const char *name, const json_t *old, const json_t *now)
{
    vlai_text line = {0};
    char *was = dump(old), *is = dump(now);
    size_t from = first_difference(was, is);
    vlai_text_printf(&line, "%s: ", name);
    put_value(&line, was, from);
    vlai_text_puts(&line, " in the checkpoint, ");
    put_value(&line, is, from);
    vlai_text_puts(&line, " now");
    json_free_t release;
    json_get_alloc_funcs(NULL, &release);
    release(was);
    release(is);
    if (c->all || is_allowed(c->allow, name)) {
        vlai_info("resume: %s", line.data ? line.data : name);
    } else {
        vlai_text_printf(&c->refused, "%s%s", c->refused.size ? "; " : "", line.data ? line.data : name);
        vlai_text_printf(&c->names, "%s%s", c->names.size ? "," : "", name);
    }
    vlai_text_fini(&line);
}

enum { NAME = 512, DEPTH = 8 };

/* The order of a layout says which columns its parts are. */
static bool is_reordered(const char *path, const json_t *old, const json_t *now)
{
    const char *last = strrchr(path, '.');
    if (!last || strcmp(last, ".layout") != 0 || json_object_size(old) != json_object_size(now))
        return false;
    void *i = json_object_iter((json_t *)(uintptr_t)old), *k = json_object_iter((json_t *)(uintptr_t)now);
    while (i && k && !strcmp(json_object_iter_key(i), json_object_iter_key(k))) {
        i = json_object_iter_next((json_t *)(uintptr_t)old, i);
        k = json_object_iter_next((json_t *)(uintptr_t)now, k);
    }
    return i != NULL;
}

/* Every leaf of either tree, under its dotted name; the values of "settings" under their own. */
static void compare(comparison *c, const char *path, int depth, const json_t *old, const json_t *now)
{
    bool leaf = !json_is_object(old) || !json_is_object(now) || depth == DEPTH, reordered = !leaf && is_reordered(path, old, now);
    if (reordered || (leaf && !equal(old, now)))
        differ(c, path, old, now);
    if (leaf || reordered)
        return;
    const char *key;
    json_t *value;
    char name[NAME];
    bool plain = !*path || !strcmp(path, "settings");
    json_object_foreach((json_t *)(uintptr_t)now, key, value) {
        snprintf(name, sizeof name, "%s%s%s", plain ? "" : path, plain ? "" : ".", key);
        compare(c, name, depth + 1, json_object_get(old, key), value);
    }
    json_object_foreach((json_t *)(uintptr_t)old, key, value) {
        snprintf(name, sizeof name, "%s%s%s", plain ? "" : path, plain ? "" : ".", key);
        if (!json_object_get(now, key))
            compare(c, name, depth + 1, value, NULL);
    }
}

/* Whether a value of the tree, or a section of it, is compared under this name. */
static bool is_compared(const char *path, int depth, const json_t *tree, const char *wanted)
{
    const char *key;
    json_t *value;
    char name[NAME];
    bool plain = !*path || !strcmp(path, "settings");
    if (!strcmp(path, wanted) && !plain)
        return true;
    if (json_is_object(tree) && depth < DEPTH)
        json_object_foreach((json_t *)(uintptr_t)tree, key, value) {
            snprintf(name, sizeof name, "%s%s%s", plain ? "" : path, plain ? "" : ".", key);
            if (is_compared(name, depth + 1, value, wanted))
                return true;
        }
    return false;
}

/* A name that is none would be taken for an acceptance, also where nothing is resumed yet. */
vla_status vlai_state_check_allowed(const char *text, const char *path, const vla_trainer_options *o, int64_t count, vla_error *err)
{
    const char *section;
    json_t *state = NULL, *value, *now;
    if (!o->allow_change)
        return VLA_OK;
    if (text)
        VLA_TRY(vlai_json_parse(text, strlen(text), path, &state, err));
    if (!(now = fixed_sections(o, count, err))) {
        json_decref(state);
        return err ? err->status : VLA_E_NOMEM;
    }
    vla_status status = VLA_OK;
    for (const char *const *allow = o->allow_change; *allow && status == VLA_OK; allow++) {
        bool known = !strcmp(*allow, "all");
        json_object_foreach(now, section, value)
            known |= is_compared(section, 1, value, *allow) || is_compared(section, 1, json_object_get(state, section), *allow);
        if (known)
            continue;
        vlai_text list = {0};
        json_object_foreach(now, section, value)
            if (strcmp(section, "settings") != 0)
                vlai_text_printf(&list, "%s, ", section);
        json_object_foreach(json_object_get(now, "settings"), section, value)
            vlai_text_printf(&list, "%s, ", section);
        status = vlai_fail_hint(err, VLA_E_INVALID, "the error that refuses a change names what it is to be accepted by",
                                "--allow-change: a state has no '%s'; it has %sand what lies in its sections (contract.image), or all", *allow,
                                list.data ? list.data : "");
        vlai_text_fini(&list);
    }
    json_decref(now);
    json_decref(state);
    return status;
}

static vla_status read_counters(const json_t *state, const char *path, vlai_progress *out, vla_error *err)
{
    const struct {
        const char *key;
        int64_t *to;
    } rows[] = {{"step", &out->step},   {"updates", &out->updates}, {"skips", &out->skips}, {"bad_in_a_row", &out->bad_in_a_row},
                {"epoch", &out->epoch}, {"place", &out->place},     {"samples", &out->samples}};
    static const int64_t most = INT64_C(1000000000000000), most_epochs = 1000000000; /* as far as the configuration counts */
    int64_t format;
    VLA_TRY(vlai_json_int(state, "format", 1, path, &format, err));
    if (format != 1)
        return vlai_fail_hint(err, VLA_E_UNSUPPORTED, "a newer version of vla wrote it", "%s: state of format %lld, this build reads 1", path, (long long)format);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const int64_t limit = rows[i].to == &out->epoch ? most_epochs : most;
        VLA_TRY(vlai_json_need_int(state, rows[i].key, path, rows[i].to, err));
        if (*rows[i].to < 0 || *rows[i].to > limit)
            return vlai_fail(err, VLA_E_CORRUPT, "%s: '%s' is %lld, wanted 0 to %lld", path, rows[i].key, (long long)*rows[i].to, (long long)limit);
    }
    if (out->updates + out->skips != out->step)
        return vlai_fail(err, VLA_E_CORRUPT, "%s: %lld updates and %lld skipped steps do not make %lld steps", path, (long long)out->updates,
                         (long long)out->skips, (long long)out->step);
    return VLA_OK;
}

/* Samples of a step as the state has it, and of a micro-batch of all ranks as the options do. */
typedef struct step_sizes {
    int64_t batch, accumulation, given, world, step; /* of the state */
    int64_t micro, now;
} step_sizes;

static vla_status read_sizes(const json_t *state, const char *path, const vla_trainer_options *o, step_sizes *out, vla_error *err)
{
    json_t *settings;
    VLA_TRY(vlai_json_need(state, "settings", JSON_OBJECT, path, &settings, err));
    VLA_TRY(vlai_json_need_int(settings, "batch", path, &out->batch, err));
    VLA_TRY(vlai_json_need_int(settings, "accumulation", path, &out->accumulation, err));
    VLA_TRY(vlai_json_int(state, "accumulation_given", out->accumulation, path, &out->given, err));
    VLA_TRY(vlai_json_int(state, "world", 1, path, &out->world, err));
    out->now = o->world > 1 ? o->world : 1;
    if (__builtin_mul_overflow(out->batch, out->accumulation, &out->step) || __builtin_mul_overflow(out->step, out->world, &out->step) ||
        __builtin_mul_overflow(o->batch, out->now, &out->micro) || out->step < 1 || out->micro < 1)
        return vlai_fail(err, VLA_E_CORRUPT, "%s: batch %lld, accumulation %lld, world %lld", path, (long long)out->batch,
                         (long long)out->accumulation, (long long)out->world);
    return VLA_OK;
}

vla_status vlai_state_follow(const char *text, const char *path, vla_trainer_options *o, vla_error *err)
{
    json_t *state;
    step_sizes s;
    VLA_TRY(vlai_json_parse(text, strlen(text), path, &state, err));
    vla_status status = read_sizes(state, path, o, &s, err);
    json_decref(state);
    VLA_TRY(status);
    bool followed = s.world == s.now && s.batch == o->batch && s.given == o->accumulation; /* the state's own run, and this is its restart */
    if ((s.world == s.now && !followed) || s.micro * o->accumulation == s.step || is_allowed(o->allow_change, "accumulation") ||
        is_allowed(o->allow_change, "batch"))
        return VLA_OK;
    if (s.step % s.micro)
        return vlai_fail_hint(err, VLA_E_INVALID,
                              "choose a batch per rank, or a number of ranks, that divides the step; or accept another one with --allow-change accumulation",
                              "%s: its steps have %lld samples (batch %lld x accumulation %lld x %lld ranks), and batch %lld x %lld ranks does "
                              "not divide that", path, (long long)s.step, (long long)s.batch, (long long)s.accumulation, (long long)s.world,
                              (long long)o->batch, (long long)s.now);
    vlai_info("resume: saved by %lld rank%s, %lld now: accumulation is %lld instead of %lld, so that a step keeps its %lld samples",
              (long long)s.world, s.world == 1 ? "" : "s", (long long)s.now, (long long)(s.step / s.micro), (long long)o->accumulation, (long long)s.step);
    o->accumulation_given = o->accumulation;
    o->accumulation = s.step / s.micro;
    return VLA_OK;
}

/* With another number of ranks, batch and accumulation may share a step's samples otherwise. */
static vla_status same_step(const json_t *state, const char *path, const vla_trainer_options *o, json_t *now, vla_error *err)
{
    step_sizes s;
    VLA_TRY(read_sizes(state, path, o, &s, err));
    json_t *settings = json_object_get(now, "settings");
    if (s.world != s.now && s.step % s.micro == 0 &&
        (json_object_set_new(settings, "batch", json_integer(s.batch)) || json_object_set_new(settings, "accumulation", json_integer(s.accumulation))))
        return vlai_fail(err, VLA_E_NOMEM, "out of host memory while a run's state is compared");
    return VLA_OK;
}

static vla_status compare_states(const json_t *state, const char *path, const vla_trainer_options *o, int64_t count,
                                 vla_error *err)
{
    json_t *now = fixed_sections(o, count, err), *value;
    if (!now)
        return err ? err->status : VLA_E_NOMEM;
    vla_status same = same_step(state, path, o, now, err);
    if (same != VLA_OK) {
        json_decref(now);
        return same;
    }
    comparison c = {.allow = o->allow_change};
    const char *section;
    json_object_foreach(now, section, value)
        compare(&c, section, 1, json_object_get(state, section), value);
    json_decref(now);
    vla_status status = VLA_OK;
    if (c.refused.size) {
        char hint[512];
        snprintf(hint, sizeof hint, "set them back, or accept the change with --allow-change %s", c.names.data);
        status = vlai_fail_hint(err, VLA_E_INVALID, hint, "%s: cannot go on with other settings: %s", path, c.refused.data);
    }
    vlai_text_fini(&c.refused);
    vlai_text_fini(&c.names);
    int failed = 0;
    json_t *schedule = schedule_values(o, &failed);
    comparison notes = {.all = true};
    if (status == VLA_OK && !failed)
        compare(&notes, "schedule", 1, json_object_get(state, "schedule"), schedule);
    json_decref(schedule);
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

vla_status vlai_state_adopt(const char *text, const char *path, vla_executor *executor, vla_error *err)
{
    json_t *state;
    const char *choices;
    VLA_TRY(vlai_json_parse(text, strlen(text), path, &state, err));
    vla_status status = vlai_json_string(state, "choices", "", path, &choices, err);
    if (status == VLA_OK && *choices)
        status = vla_executor_adopt(executor, choices, err);
    json_decref(state);
    return status;
}
