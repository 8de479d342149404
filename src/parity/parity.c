#include "parity/parity.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    vla_status (*run)(vlai_parity_case *, vla_error *);
} stages[] = {
#define X(name, c_name) {name, vlai_parity_##c_name},
    VLAI_PARITY_STAGES(X)
#undef X
};

void vlai_parity_report(vlai_parity_case *c, const char *quantity, const char *tensor, double error, double bound)
{
    bool pass = error <= bound; /* false for NaN */
    if (!c->compared)
        c->compared = json_object();
    json_object_set_new(c->compared, tensor, json_true());
    if (c->verbose)
        printf("  %-5s %-16s %-60s error %.3g bound %.3g\n", pass ? "ok" : "FAIL", quantity, tensor, error, bound);
    vlai_parity_quantity *q = NULL;
    for (int i = 0; i < c->count && !q; i++)
        if (!strcmp(c->quantities[i].name, quantity))
            q = &c->quantities[i];
    if (!q && c->count == (int)(sizeof c->quantities / sizeof *c->quantities))
        q = &c->quantities[c->count - 1];
    if (!q) {
        q = &c->quantities[c->count++];
        snprintf(q->name, sizeof q->name, "%s", quantity);
        q->pass = true;
        q->error = -1;
    }
    q->tensors++;
    double ratio = bound > 0 ? error / bound : error > 0 ? INFINITY : 0;
    double worst = q->error < 0 ? -1 : q->bound > 0 ? q->error / q->bound : q->error > 0 ? INFINITY : 0;
    if (isnan(error) || ratio > worst || q->error < 0 || (!pass && q->pass)) {
        q->error = error;
        q->bound = bound;
        snprintf(q->tensor, sizeof q->tensor, "%s", tensor);
    }
    q->pass = q->pass && pass;
}

vla_status vlai_parity_integers(vlai_parity_case *c, const char *quantity, const char *tensor, const vlai_tensor_view *want,
                                const int64_t *got, int64_t n, bool may_lack, vla_error *err)
{
    if (!want) {
        if (!may_lack)
            vlai_parity_report(c, quantity, tensor, got ? 1 : 0, 0);
        return VLA_OK;
    }
    double wrong = got && want->elements == n ? 0 : INFINITY;
    for (int64_t i = 0; wrong < INFINITY && i < n; i++) {
        int64_t value;
        VLA_TRY(vlai_tensor_to_int64(want, i, 1, &value, err));
        wrong += value != got[i];
    }
    vlai_parity_report(c, quantity, tensor, wrong, vlai_parity_bound(c, quantity));
    return VLA_OK;
}

vla_status vlai_parity_path(const vlai_parity_case *c, const char *file, char *out, size_t size, vla_error *err)
{
    const char *base = strncmp(file, "assets/", 7) == 0 ? c->golden : c->dir;
    if (!vlai_path_join(out, size, base, file))
        return vlai_fail(err, VLA_E_INVALID, "%s/%s: path too long", base, file);
    return VLA_OK;
}

vla_status vlai_parity_open(const vlai_parity_case *c, const char *file, vlai_safetensors **out, vla_error *err)
{
    char path[4096];
    VLA_TRY(vlai_parity_path(c, file, path, sizeof path, err));
    return vlai_safetensors_open(path, out, err);
}

vla_status vlai_parity_json(const vlai_parity_case *c, const char *file, json_t **out, vla_error *err)
{
    char path[4096];
    VLA_TRY(vlai_parity_path(c, file, path, sizeof path, err));
    return vlai_json_load(path, out, err);
}

static bool names_output(const char *key, const char *output)
{
    size_t n = strlen(output);
    for (const char *p = key; (p = strstr(p, output)); p++)
        if ((p == key || p[-1] == ' ' || p[-1] == ',') && (p[n] == 0 || p[n] == ','))
            return true;
    return false;
}

double vlai_parity_bound(const vlai_parity_case *c, const char *output)
{
    const json_t *bounds = json_object_get(c->meta, "bound"), *value = json_object_get(bounds, output);
    const char *key;
    json_t *entry;
    json_object_foreach((json_t *)bounds, key, entry)
        if (!value && names_output(key, output))
            value = entry;
    if (!value)
        value = json_object_get(bounds, "*");
    if (json_is_object(value)) {
        const json_t *abs_bound = json_object_get(value, "abs");
        value = abs_bound ? abs_bound : json_object_get(value, "rel");
    }
    return json_number_value(value);
}

vla_status vlai_parity_rows(const vlai_tensor_view *t, const char *name, float **out, vla_error *err)
{
    *out = NULL;
    if (!t)
        return vlai_fail(err, VLA_E_NOT_FOUND, "there is no tensor '%s'", name);
    if (t->rank < 1)
        return vlai_fail(err, VLA_E_SHAPE, "%s: '%s' is a single number, wanted rows", t->file, t->name);
    float *values = vlai_array(t->elements ? (size_t)t->elements : 1, sizeof *values);
    if (!values)
        return vlai_nomem(err, (size_t)t->elements * sizeof *values);
    vla_status status = vlai_tensor_to_float(t, 0, t->elements, values, err);
    if (status != VLA_OK) {
        vlai_free(values);
        return status;
    }
    *out = values;
    return VLA_OK;
}

double vlai_parity_max_abs(const float *got, const float *want, int64_t n)
{
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        if (isnan(got[i]) && isnan(want[i]))
            continue;
        double d = got[i] == want[i] ? 0 : fabs((double)got[i] - (double)want[i]);
        if (isnan(d))
            return INFINITY;
        if (d > worst)
            worst = d;
    }
    return worst;
}

double vlai_parity_rel_l2(const float *got, const float *want, int64_t n)
{
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = (double)got[i] - (double)want[i];
        difference += d * d;
        norm += (double)want[i] * (double)want[i];
    }
    if (norm == 0)
        return difference == 0 ? 0 : isnan(difference) ? NAN : INFINITY;
    return sqrt(difference / norm);
}

/* What is recorded and was not compared is named: a pass says nothing about it. */
static void note_outputs(vlai_parity_case *c)
{
    char path[4096];
    vlai_safetensors *st = NULL;
    size_t others = 0, used = strlen(c->note);
    if (vlai_parity_path(c, "outputs.safetensors", path, sizeof path, NULL) != VLA_OK || vlai_safetensors_open(path, &st, NULL) != VLA_OK)
        return;
    for (size_t i = 0; i < vlai_safetensors_count(st); i++) {
        const char *name = vlai_safetensors_at(st, i)->name;
        if (!json_object_get(c->compared, name) && others++ == 0)
            used += (size_t)snprintf(c->note + used, sizeof c->note - used, "%soutputs.safetensors: '%.80s' was not compared", used ? "; " : "", name);
    }
    if (others > 1 && used < sizeof c->note)
        snprintf(c->note + used, sizeof c->note - used, ", nor were %zu others", others - 1);
    vlai_safetensors_close(st);
}

vla_status vlai_parity_run(const char *dir, vlai_parity_case *c, vla_error *err)
{
    snprintf(c->dir, sizeof c->dir, "%s", dir);
    size_t n = strlen(c->dir);
    while (n > 1 && c->dir[n - 1] == '/')
        c->dir[--n] = 0;
    snprintf(c->golden, sizeof c->golden, "%s/..", c->dir);
    VLA_TRY(vlai_parity_json(c, "case.json", &c->meta, err));
    const char *kind, *name, *stage;
    VLA_TRY(vlai_json_string(c->meta, "case", c->dir, "case.json", &name, err));
    snprintf(c->name, sizeof c->name, "%s", name);
    VLA_TRY(vlai_json_string(c->meta, "kind", "", "case.json", &kind, err));
    VLA_TRY(vlai_json_string(c->meta, strcmp(kind, "model") ? "stage" : "component", "", "case.json", &stage, err));
    if (strcmp(kind, "model") && strcmp(kind, "data"))
        return vlai_fail(err, VLA_E_FORMAT, "%s: case.json: kind is '%s', wanted model or data", c->dir, kind);
    const char *policy;
    VLA_TRY(vlai_json_string(c->meta, "policy", "wallx", "case.json", &policy, err));
    if (!strcmp(kind, "model") && strcmp(policy, "wallx"))
        return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: case.json: policy is '%s', wanted wallx", c->dir, policy);
    for (size_t i = 0; i < sizeof stages / sizeof *stages; i++)
        if (!strcmp(stages[i].name, stage)) {
            VLA_TRY(vlai_prefix(err, stages[i].run(c, err), "%s", c->name));
            if (!c->skipped && !strcmp(c->numerics, "fp32"))
                note_outputs(c);
            return VLA_OK;
        }
    return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: unknown %s '%s'", c->dir,
                     strcmp(kind, "model") ? "stage" : "component", stage);
}

void vlai_parity_case_fini(vlai_parity_case *c)
{
    json_decref(c->meta);
    json_decref(c->compared);
    c->meta = c->compared = NULL;
}
