#include "train/report.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/order.h"
#include "ckpt/ckpt.h"
#include "train/metrics.h"
#include "train/report_bench.h"
#include "train/report_svg.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH = 4096, PICTURES = 24, PICTURE_BYTES = 8 << 20 };

/* ---- numbers of a .jsonl file, one array per key ---- */

enum { STEP, LOSS, FLOW, ENTROPY, RATE, NORM, STEP_MS, SPEED, STALL, FLOPS, RSS, DEVICE, SKIPPED, SAMPLES, SERIES };
static const char *const keys[SERIES] = {"step",          "loss",     "flow_loss", "cross_entropy_loss", "lr",      "grad_norm", "step_ms",
                                         "samples_per_s", "stall_ms", "tflops",    "rss",                "device_memory", "skipped", "samples"};

/* Keys of which a run has as many as it has groups, data sets, parts of the model. */
enum { RATES, CHANNELS, NORMS, FAMILIES };
enum { CURVES = 4 /* that a chart shows */, ALL = SERIES + FAMILIES * CURVES };
static const struct {
    const char *begin, *end;
} families[FAMILIES] = {[RATES] = {"lr_group/", ""}, [CHANNELS] = {"channel_loss_", ""}, [NORMS] = {"", "_param_norm"}};

typedef struct records {
    double *values[ALL]; /* SERIES of the keys above, then CURVES of each family */
    size_t capacities[ALL];
    char *names[ALL]; /* of the families' keys that were met */
    int64_t count, bad;
} records;

static void records_fini(records *r)
{
    for (int k = 0; k < ALL; k++) {
        vlai_free(r->values[k]);
        vlai_free(r->names[k]);
    }
}

static bool is_of_family(const char *key, int f)
{
    size_t n = strlen(key), begin = strlen(families[f].begin), end = strlen(families[f].end);
    return n > begin + end && !strncmp(key, families[f].begin, begin) && !strcmp(key + n - end, families[f].end);
}

/* The key gets the first free curve of its family, unless it has one or there is none. */
static vla_status meet(records *r, int f, const char *key, vla_error *err)
{
    for (int k = SERIES + f * CURVES; k < SERIES + (f + 1) * CURVES; k++) {
        if (r->names[k] && strcmp(r->names[k], key) != 0)
            continue;
        if (!r->names[k])
            r->names[k] = vlai_strdup(key);
        return r->names[k] ? VLA_OK : vlai_nomem(err, strlen(key));
    }
    return VLA_OK;
}

static vla_status add_record(records *r, const json_t *object, vla_error *err)
{
    void *at = json_object_iter((json_t *)(uintptr_t)object);
    for (; at; at = json_object_iter_next((json_t *)(uintptr_t)object, at))
        for (int f = 0; f < FAMILIES; f++)
            if (is_of_family(json_object_iter_key(at), f))
                VLA_TRY(meet(r, f, json_object_iter_key(at), err));
    for (int k = 0; k < ALL; k++) {
        const char *key = k < SERIES ? keys[k] : r->names[k];
        const json_t *value = key ? json_object_get(object, key) : NULL;
        VLA_TRY(vlai_reserve((void **)&r->values[k], &r->capacities[k], (size_t)r->count, sizeof(double), err));
        r->values[k][r->count] = json_is_number(value) ? json_number_value(value) : json_is_true(value) ? 1 : NAN;
    }
    r->count++;
    return VLA_OK;
}

static vla_status read_records(const char *run, const char *name, records *r, vla_error *err)
{
    char path[PATH], *data;
    size_t size;
    if (!vlai_path_join(path, sizeof path, run, name))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", run);
    if (!vlai_is_file(path))
        return VLA_OK;
    VLA_TRY(vlai_read_file(path, 0, &data, &size, err));
    vla_status status = VLA_OK;
    for (const char *line = data, *end; line < data + size && status == VLA_OK; line = end + 1) {
        const char *ended = memchr(line, '\n', size - (size_t)(line - data));
        end = ended ? ended : data + size;
        json_t *object = json_loadb(line, (size_t)(end - line), 0, NULL);
        if (json_is_object(object) && json_is_number(json_object_get(object, "step")))
            status = add_record(r, object, err);
        else if (ended > line) /* a last line without an end was cut off by a kill */
            r->bad++;
        json_decref(object);
    }
    vlai_free(data);
    return status;
}

static bool has(const records *r, int key)
{
    for (int64_t i = 0; i < r->count; i++)
        if (isfinite(r->values[key][i]))
            return true;
    return false;
}

static bool has_other_than_zero(const records *r, int key)
{
    for (int64_t i = 0; i < r->count; i++)
        if (isfinite(r->values[key][i]) && r->values[key][i] != 0)
            return true;
    return false;
}

/* ---- the page ---- */

typedef struct page {
    const char *run;
    records steps, validations;
    json_t *config, *predict;
    vlai_text html;
    vlai_report_summary *summary;
} page;

static const char style[] =
    ":root{--bg:#fbfbfd;--card:#fff;--ink:#1d1d22;--soft:#6a6a76;--line:#e4e4ea;--c0:#1f6fb4;--c1:#e07b16;--c2:#2e9e5b;--c3:#b04a9c}\n"
    "@media(prefers-color-scheme:dark){:root{--bg:#141418;--card:#1d1d23;--ink:#ececf1;--soft:#9a9aa8;--line:#33333d;"
    "--c0:#62aee8;--c1:#f2a154;--c2:#62c98a;--c3:#d98ac8}.plot{filter:invert(.9) hue-rotate(180deg)}}\n"
    "*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}\n"
    "main{max-width:1340px;margin:0 auto;padding:28px 20px 60px}h1{font-size:26px;margin:0}h2{font-size:19px;margin:38px 0 12px}\n"
    "p.sub{color:var(--soft);margin:4px 0 20px;overflow-wrap:anywhere}\n"
    ".tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(165px,1fr));gap:12px}\n"
    ".tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}\n"
    ".tile b{display:block;font-size:21px;font-variant-numeric:tabular-nums;white-space:nowrap}.tile span{color:var(--soft);font-size:13px}\n"
    ".charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,520px),1fr));gap:14px}\n"
    "figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}\n"
    "figcaption{font-size:14px;margin-bottom:4px}figcaption span{color:var(--soft)}\n"
    "figcaption i{display:inline-block;width:18px;height:3px;border-radius:2px;margin:0 5px 3px 12px;background:currentColor}\n"
    ".k{display:inline-block;overflow-wrap:anywhere}figcaption .k{color:inherit}\n"
    "svg{width:100%;height:auto;display:block}svg text{font-size:11px;fill:var(--soft)}.g{stroke:var(--line)}.a{stroke:var(--soft)}\n"
    ".l{fill:none;stroke:currentColor;stroke-width:1.8;stroke-linejoin:round}.b{fill:currentColor;opacity:.16;stroke:none}\n"
    ".p{fill:currentColor}.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}\n"
    ".scroll{overflow-x:auto}table{border-collapse:collapse;background:var(--card);border:1px solid var(--line);border-radius:10px}\n"
    "th,td{padding:6px 14px;text-align:right;border-top:1px solid var(--line);font-variant-numeric:tabular-nums;white-space:nowrap}\n"
    "th{color:var(--soft);font-weight:600;border-top:0}td:first-child,th:first-child{text-align:left}\n"
    "img.plot{max-width:100%;border-radius:6px;display:block}.pictures{display:grid;gap:14px}\n"
    "details{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 14px;margin-top:12px}\n"
    "summary{cursor:pointer;font-weight:600}pre{overflow-x:auto;font-size:13px;line-height:1.45}\n";

static void tile(page *p, const char *label, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void tile(page *p, const char *label, const char *format, ...)
{
    char value[128];
    va_list args;
    va_start(args, format);
    vsnprintf(value, sizeof value, format, args);
    va_end(args);
    vlai_text_puts(&p->html, "<div class=tile><b>");
    vlai_html_escape(&p->html, strstr(value, "nan") ? "none" : value);
    vlai_text_printf(&p->html, "</b><span>%s</span></div>\n", label);
}

static double last_of(const records *r, int key)
{
    for (int64_t i = r->count - 1; i >= 0; i--)
        if (isfinite(r->values[key][i]))
            return r->values[key][i];
    return NAN;
}

/* The middle value; the array is reordered. */
static double median(double *values, int64_t count)
{
    if (!count)
        return NAN;
    qsort(values, (size_t)count, sizeof *values, vlai_by_value);
    return values[count / 2];
}

static vla_status median_of(const records *r, int key, double *out, vla_error *err)
{
    double *copy = vlai_array((size_t)r->count + 1, sizeof *copy);
    if (!copy)
        return vlai_nomem(err, (size_t)r->count * sizeof *copy);
    int64_t n = 0;
    for (int64_t i = 0; i < r->count; i++)
        if (isfinite(r->values[key][i]))
            copy[n++] = r->values[key][i];
    *out = median(copy, n);
    vlai_free(copy);
    return VLA_OK;
}

static double sum_of(const records *r, int key)
{
    double sum = 0;
    for (int64_t i = 0; i < r->count; i++)
        sum += isfinite(r->values[key][i]) ? r->values[key][i] : 0;
    return sum;
}

static double largest(const records *r, int key)
{
    double most = NAN;
    for (int64_t i = 0; i < r->count; i++)
        if (isfinite(r->values[key][i]) && !(most >= r->values[key][i]))
            most = r->values[key][i];
    return most;
}

/* Mean loss of the last tenth of the steps. */
static double closing_loss(const records *r)
{
    double sum = 0, n = 0;
    for (int64_t i = r->count - (r->count + 9) / 10; i < r->count; i++)
        if (isfinite(r->values[LOSS][i])) {
            sum += r->values[LOSS][i];
            n++;
        }
    return n > 0 ? sum / n : NAN;
}

static vla_status put_tiles(page *p, vla_error *err)
{
    const records *r = &p->steps;
    double speed = NAN, seconds = sum_of(r, STEP_MS) / 1000;
    VLA_TRY(median_of(r, SPEED, &speed, err));
    vlai_text_puts(&p->html, "<div class=tiles>\n");
    tile(p, "steps", "%.0f", last_of(r, STEP));
    tile(p, "samples seen", "%.0f", last_of(r, SAMPLES));
    tile(p, "loss, last tenth of the steps", "%.4g", closing_loss(r));
    if (p->validations.count)
        tile(p, "newest validation loss", "%.4g", last_of(&p->validations, LOSS));
    tile(p, "samples per second, median", "%.4g", speed);
    tile(p, "time in steps", seconds < 120 ? "%.1f s" : seconds < 7200 ? "%.1f min" : "%.1f h",
         seconds < 120 ? seconds : seconds < 7200 ? seconds / 60 : seconds / 3600);
    tile(p, "waiting for data", "%.2g %%", seconds > 0 ? sum_of(r, STALL) / 10 / seconds : 0);
    tile(p, "largest resident memory", "%.3g GB", largest(r, RSS) / 1e9);
    if (has_other_than_zero(r, DEVICE))
        tile(p, "largest device memory", "%.3g GB", largest(r, DEVICE) / 1e9);
    if (has_other_than_zero(r, SKIPPED))
        tile(p, "steps skipped (not finite)", "%.0f", sum_of(r, SKIPPED));
    const json_t *all = json_object_get(p->predict, "overall");
    double l1 = json_number_value(json_object_get(all, "l1")), mean = json_number_value(json_object_get(all, "mean_action_l1"));
    if (all && mean > 0)
        tile(p, "prediction error over that of the mean action", "%.3f", l1 / mean);
    vlai_text_puts(&p->html, "</div>\n");
    return VLA_OK;
}

/* Bytes as decimal GB, for a chart. */
static void in_gigabytes(records *r, int key)
{
    for (int64_t i = 0; i < r->count; i++)
        r->values[key][i] /= 1e9;
}

/* A curve for each key of the family, by what tells it from the others. */
static bool put_family(page *p, const records *r, int f, const vlai_curve_chart *chart)
{
    vlai_curve curves[CURVES];
    char names[CURVES][256];
    int n = 0;
    for (int k = SERIES + f * CURVES; k < SERIES + (f + 1) * CURVES && r->names[k]; k++) {
        size_t begin = strlen(families[f].begin), length = strlen(r->names[k]) - begin - strlen(families[f].end);
        snprintf(names[n], sizeof names[n], "%.*s", (int)length, r->names[k] + begin);
        curves[n] = (vlai_curve){names[n], r->values[STEP], r->values[k], r->count, n, f == NORMS};
        n++;
    }
    if (n)
        vlai_svg_chart(&p->html, chart, curves, n);
    return n > 0;
}

static void put_charts(page *p)
{
    records *r = &p->steps, *v = &p->validations;
    vlai_curve curves[4];
    int n = 0;
#define CURVE(records, key, label, colour, dots) \
    (vlai_curve){label, (records)->values[STEP], (records)->values[key], (records)->count, colour, dots}
    vlai_text_puts(&p->html, "<h2>Training</h2>\n<div class=charts>\n");
    curves[n++] = CURVE(r, LOSS, "training", 0, false);
    if (has(r, ENTROPY)) {
        curves[n++] = CURVE(r, FLOW, "flow", 2, false);
        curves[n++] = CURVE(r, ENTROPY, "cross entropy", 3, false);
    }
    if (v->count)
        curves[n++] = CURVE(v, LOSS, "validation", 1, true);
    vlai_svg_chart(&p->html, &(vlai_curve_chart){"Loss", "", "step", false, true}, curves, n);
    put_family(p, r, CHANNELS, &(vlai_curve_chart){"Loss by data set", "mean over all terms of a step", "step", false, true});
    curves[0] = CURVE(r, RATE, "", 2, false);
    if (!put_family(p, r, RATES, &(vlai_curve_chart){"Learning rate", "by group", "step", true, false}))
        vlai_svg_chart(&p->html, &(vlai_curve_chart){"Learning rate", "", "step", true, false}, curves, 1);
    if (has_other_than_zero(r, NORM)) {
        curves[0] = CURVE(r, NORM, "", 3, false);
        vlai_svg_chart(&p->html, &(vlai_curve_chart){"Gradient norm", "before the clip", "step", true, true}, curves, 1);
    }
    put_family(p, r, NORMS, &(vlai_curve_chart){"Norm of the weights", "", "step", false, true});
    curves[0] = CURVE(r, SPEED, "", 0, false);
    vlai_svg_chart(&p->html, &(vlai_curve_chart){"Throughput", "samples per second", "step", true, false}, curves, 1);
    curves[0] = CURVE(r, STEP_MS, "step", 0, false);
    curves[1] = CURVE(r, STALL, "of it waiting for data", 1, false);
    vlai_svg_chart(&p->html, &(vlai_curve_chart){"Time of a step", "ms", "step", true, false}, curves, 2);
    in_gigabytes(r, RSS);
    in_gigabytes(r, DEVICE);
    curves[0] = CURVE(r, RSS, "host", 0, false);
    curves[1] = CURVE(r, DEVICE, "device", 1, false);
    vlai_svg_chart(&p->html, &(vlai_curve_chart){"Memory", "GB resident", "step", true, false}, curves,
                   has_other_than_zero(r, DEVICE) ? 2 : 1);
    vlai_text_puts(&p->html, "</div>\n");
#undef CURVE
}

/* ---- predictions ---- */

static void put_error_rows(page *p, const json_t *list, const char *name_key, const char *prefix)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *row = json_array_get(list, i), *name = json_object_get(row, name_key);
        double l1 = json_number_value(json_object_get(row, "l1")), mean = json_number_value(json_object_get(row, "mean_action_l1"));
        vlai_text_printf(&p->html, "<tr><td>%s", prefix);
        if (json_is_string(name))
            vlai_html_escape(&p->html, json_string_value(name));
        else
            vlai_text_printf(&p->html, "%lld", (long long)json_integer_value(name));
        vlai_text_printf(&p->html, "</td><td>%.5g</td><td>%.5g</td><td>%.5g</td><td>%.3f</td></tr>\n", l1,
                         json_number_value(json_object_get(row, "mse")), mean, mean > 0 ? l1 / mean : NAN);
    }
}

/* A file that cannot be read is left out and named; only want of memory ends the page. */
static vla_status leave_out(page *p, vla_status status, const vla_error *why, vla_error *err)
{
    if (status == VLA_E_NOMEM)
        return vlai_fail(err, status, "%s", why->message);
    if (status != VLA_OK && p->summary->damaged_count < VLAI_REPORT_FILES)
        p->summary->damaged[p->summary->damaged_count++] = *why;
    return VLA_OK;
}

static void put_base64(vlai_text *out, const uint8_t *data, size_t size)
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < size; i += 3) {
        size_t n = size - i < 3 ? size - i : 3;
        uint32_t bits = (uint32_t)data[i] << 16 | (n > 1 ? (uint32_t)data[i + 1] << 8 : 0) | (n > 2 ? data[i + 2] : 0);
        char four[4];
        for (size_t k = 0; k < 4; k++)
            four[k] = k <= n ? letters[bits >> (18 - 6 * k) & 63] : '=';
        vlai_text_put(out, four, 4);
    }
}

static vla_status put_picture(page *p, const char *dir, const char *name, vla_error *err)
{
    char path[PATH], *data;
    size_t size;
    if (!vlai_path_join(path, sizeof path, dir, name))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", dir);
    if (!vlai_is_file(path))
        return VLA_OK;
    vla_error why = VLA_ERROR_INIT;
    vla_status status = vlai_read_file(path, PICTURE_BYTES, &data, &size, &why);
    if (status != VLA_OK)
        return leave_out(p, status, &why, err);
    vlai_text_puts(&p->html, "<figure><img class=plot alt=\"");
    vlai_html_escape(&p->html, name);
    vlai_text_puts(&p->html, "\" src=\"data:image/png;base64,");
    put_base64(&p->html, (const uint8_t *)data, size);
    vlai_text_puts(&p->html, "\"></figure>\n");
    vlai_free(data);
    p->summary->pictures++;
    return VLA_OK;
}

static vla_status put_pictures(page *p, const char *dir, vla_error *err)
{
    const json_t *episodes = json_object_get(p->predict, "episodes");
    vlai_text_puts(&p->html, "<div class=pictures>\n");
    VLA_TRY(put_picture(p, dir, "horizon.png", err));
    for (size_t i = 0; i < json_array_size(episodes) && p->summary->pictures < PICTURES; i++) {
        char name[64];
        snprintf(name, sizeof name, "ep%lld.png", (long long)json_integer_value(json_object_get(json_array_get(episodes, i), "episode")));
        VLA_TRY(put_picture(p, dir, name, err));
    }
    vlai_text_puts(&p->html, "</div>\n");
    return VLA_OK;
}

static vla_status put_predictions(page *p, const char *dir, vla_error *err)
{
    const json_t *all = json_object_get(p->predict, "overall");
    size_t episodes = json_array_size(json_object_get(p->predict, "episodes"));
    vlai_text_printf(&p->html, "<h2>Predictions</h2>\n<p class=sub>%zu episode%s, %lld predictions, checkpoint of step %lld; errors "
                               "in the data set's units, beside those of always predicting the mean action</p>\n",
                     episodes, episodes == 1 ? "" : "s", (long long)json_integer_value(json_object_get(p->predict, "predictions")),
                     (long long)json_integer_value(json_object_get(p->predict, "step")));
    vlai_text_puts(&p->html, "<div class=scroll><table><tr><th></th><th>L1</th><th>MSE</th><th>L1 of the mean action</th><th>ratio</th></tr>\n");
    put_error_rows(p, json_object_get(p->predict, "dimensions"), "name", "");
    put_error_rows(p, json_object_get(p->predict, "horizon_steps"), "step", "horizon step ");
    json_t *one = json_pack("[{s:s, s:O, s:O, s:O}]", "name", "all", "l1", json_object_get(all, "l1"), "mse", json_object_get(all, "mse"),
                            "mean_action_l1", json_object_get(all, "mean_action_l1"));
    put_error_rows(p, one, "name", "");
    json_decref(one);
    vlai_text_puts(&p->html, "</table></div><br>\n");
    return put_pictures(p, dir, err);
}

/* ---- the rest ---- */

static vla_status put_checkpoints(page *p, vla_error *err)
{
    vlai_ckpt_entry *entries;
    size_t count;
    vla_error why = VLA_ERROR_INIT;
    VLA_TRY(leave_out(p, vlai_ckpt_list(p->run, &entries, &count, &why), &why, err));
    p->summary->checkpoints = (int64_t)count;
    if (count) {
        vlai_text_puts(&p->html, "<h2>Checkpoints</h2>\n<div class=scroll><table><tr><th>folder</th><th>epoch</th><th>step</th></tr>\n");
        for (size_t i = 0; i < count; i++) {
            vlai_text_puts(&p->html, "<tr><td>");
            vlai_html_escape(&p->html, entries[i].name);
            vlai_text_printf(&p->html, "</td><td>%" PRId64 "</td><td>%" PRId64 "</td></tr>\n", entries[i].epoch, entries[i].step);
        }
        vlai_text_puts(&p->html, "</table></div>\n");
    }
    vlai_ckpt_list_free(entries, count);
    return VLA_OK;
}

static vla_status put_config(page *p, vla_error *err)
{
    if (!p->config)
        return VLA_OK;
    char *text = json_dumps(p->config, JSON_INDENT(2));
    if (!text)
        return vlai_nomem(err, 4096);
    vlai_text_puts(&p->html, "<h2>Configuration</h2>\n<details><summary>config.resolved.json</summary><pre>");
    vlai_html_escape(&p->html, text);
    vlai_text_puts(&p->html, "</pre></details>\n");
    json_free_t release;
    json_get_alloc_funcs(NULL, &release);
    release(text);
    return VLA_OK;
}

static const char *config_text(const page *p, const char *section, const char *inner, const char *key)
{
    const json_t *at = json_object_get(p->config, section);
    const char *text = json_string_value(json_object_get(inner ? json_object_get(at, inner) : at, key));
    return text ? text : "";
}

static vla_status put_page(page *p, const char *predict_dir, vla_error *err)
{
    vlai_text *h = &p->html;
    vlai_text_puts(h, "<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1'>\n<title>");
    vlai_html_escape(h, p->run);
    vlai_text_printf(h, "</title>\n<style>\n%s</style></head><body><main>\n<h1>Training run", style);
    if (*config_text(p, "logging", NULL, "log_name")) {
        vlai_text_puts(h, " ");
        vlai_html_escape(h, config_text(p, "logging", NULL, "log_name"));
    }
    vlai_text_puts(h, "</h1>\n<p class=sub>");
    vlai_html_escape(h, p->run);
    if (*config_text(p, "data", "lerobot_config", "repo_id")) {
        vlai_text_puts(h, " &middot; data ");
        vlai_html_escape(h, config_text(p, "data", "lerobot_config", "repo_id"));
    }
    if (*config_text(p, "model", NULL, "config_path")) {
        vlai_text_puts(h, " &middot; model ");
        vlai_html_escape(h, config_text(p, "model", NULL, "config_path"));
    }
    vlai_text_printf(h, " &middot; vla %s</p>\n", VLA_VERSION);
    if (p->steps.count) {
        VLA_TRY(put_tiles(p, err));
        put_charts(p);
    }
    if (p->predict)
        VLA_TRY(put_predictions(p, predict_dir, err));
    vla_error why = VLA_ERROR_INIT;
    VLA_TRY(leave_out(p, vlai_report_bench(p->run, h, &why), &why, err));
    VLA_TRY(put_checkpoints(p, err));
    VLA_TRY(put_config(p, err));
    for (int i = 0; i < p->summary->damaged_count; i++) {
        vlai_text_puts(h, "<p class=sub>left out: ");
        vlai_html_escape(h, p->summary->damaged[i].message);
        vlai_text_puts(h, "</p>\n");
    }
    vlai_text_puts(h, "</main></body></html>\n");
    return vlai_text_status(h, err);
}

/* A file that is there and is no JSON object is left out and named. */
static vla_status load_optional(page *p, const char *dir, const char *name, json_t **out, vla_error *err)
{
    char path[PATH];
    vla_error why = VLA_ERROR_INIT;
    *out = NULL;
    if (!vlai_path_join(path, sizeof path, dir, name))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", dir);
    if (!vlai_is_file(path))
        return VLA_OK;
    vla_status status = vlai_json_load(path, out, &why);
    if (status == VLA_OK && !json_is_object(*out)) {
        json_decref(*out);
        *out = NULL;
        status = vlai_fail(&why, VLA_E_FORMAT, "%s: the top level is not an object", path);
    }
    return leave_out(p, status, &why, err);
}

vla_status vlai_report_write(const char *run, const char *out, vlai_report_summary *summary, vla_error *err)
{
    page p = {.run = run, .summary = summary};
    char predict_dir[PATH];
    vla_status status;
    vla_error why = VLA_ERROR_INIT;
    *summary = (vlai_report_summary){0};
    if (access(run, R_OK | X_OK) != 0 && errno == EACCES)
        return vlai_fail(err, VLA_E_IO, "%s: cannot open: %s", run, strerror(errno));
    if (!vlai_is_dir(run))
        return vlai_fail_hint(err, VLA_E_NOT_FOUND, "name checkpoint.save_path of the training", "%s: no such run folder", run);
    if (!vlai_path_join(predict_dir, sizeof predict_dir, run, "predict") ||
        !(out ? snprintf(summary->path, sizeof summary->path, "%s", out) < (int)sizeof summary->path
              : vlai_path_join(summary->path, sizeof summary->path, run, "report.html")))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", run);
    VLA_TRY_GOTO(read_records(run, VLAI_METRICS_FILE, &p.steps, err), done);
    VLA_TRY_GOTO(leave_out(&p, read_records(run, VLAI_VALIDATION_FILE, &p.validations, &why), &why, err), done);
    VLA_TRY_GOTO(load_optional(&p, run, "config.resolved.json", &p.config, err), done);
    VLA_TRY_GOTO(load_optional(&p, predict_dir, "summary.json", &p.predict, err), done);
    if (!p.steps.count && !p.predict && !vlai_report_has_bench(run)) {
        if (summary->damaged_count)
            VLA_TRY_GOTO(vlai_fail(err, summary->damaged[0].status, "%s", summary->damaged[0].message), done);
        status = vlai_fail_hint(err, VLA_E_NOT_FOUND, "a run folder is checkpoint.save_path of a training that has made a step",
                                "%s holds neither %s with a step nor predict/summary.json", run, VLAI_METRICS_FILE);
        goto done;
    }
    VLA_TRY_GOTO(put_page(&p, predict_dir, err), done);
    summary->steps = p.steps.count;
    summary->validations = p.validations.count;
    summary->bad_lines = p.steps.bad + p.validations.bad;
    summary->bytes = p.html.size;
    status = vlai_write_file_atomic(summary->path, p.html.data, p.html.size, err);
done:
    records_fini(&p.steps);
    records_fini(&p.validations);
    json_decref(p.config);
    json_decref(p.predict);
    vlai_text_fini(&p.html);
    return status;
}
