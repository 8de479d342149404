#include "train/report_bench.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"
#include "train/report_svg.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { PATH = 4096, PROFILED = 16 };

static bool place(const char *run, char path[PATH])
{
    return vlai_path_join(path, PATH, run, VLAI_BENCH_FILE) && vlai_is_file(path);
}

bool vlai_report_has_bench(const char *run)
{
    char path[PATH];
    return place(run, path);
}

static double number(const json_t *row, const char *key)
{
    const json_t *value = json_object_get(row, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static const char *word(const json_t *row, const char *key)
{
    const char *text = json_string_value(json_object_get(row, key));
    return text ? text : "";
}

/* A cell; a dash where there is no number. */
static void cell(vlai_text *h, const char *format, double value)
{
    char text[64];
    if (isfinite(value))
        snprintf(text, sizeof text, format, value);
    vlai_text_printf(h, "<td>%s</td>", isfinite(value) ? text : "&ndash;");
}

static void put_machine(vlai_text *h, const json_t *row)
{
    double copy = number(row, "copy_gb_per_s"), gemm = number(row, "gemm_tflops");
    vlai_text_puts(h, "<p class=sub>");
    vlai_html_escape(h, word(row, "device"));
    vlai_text_puts(h, ", ");
    vlai_html_escape(h, word(row, "date"));
    if (copy > 0 && gemm > 0)
        vlai_text_printf(h, "; copy %.0f GB/s, bf16 product of 8192&sup3; %.0f TFLOP/s on the warm device", copy, gemm);
    if (number(row, "memory_limit_gb") > 0)
        vlai_text_printf(h, "; at most %.4g GB of device memory", number(row, "memory_limit_gb"));
    vlai_text_puts(h, "</p>\n");
}

static void put_step(vlai_text *h, const json_t *row)
{
    vlai_text_puts(h, "<tr><td>");
    vlai_html_escape(h, word(row, "variant"));
    vlai_text_puts(h, "</td><td>");
    vlai_html_escape(h, word(row, "numerics"));
    vlai_text_printf(h, "</td><td>%lld</td><td>%lld</td>", (long long)json_integer_value(json_object_get(row, "batch")),
                     (long long)json_integer_value(json_object_get(row, "global_batch")));
    if (json_is_true(json_object_get(row, "oom"))) {
        vlai_text_puts(h, "<td colspan=9>out of memory</td></tr>\n");
        return;
    }
    cell(h, "%.2f", number(row, "step_ms"));
    cell(h, "%.2f", number(row, "samples_per_s"));
    cell(h, "%.4g", number(row, "tflops"));
    cell(h, "%.1f %%", 100 * number(row, "mfu"));
    cell(h, "%.1f %%", 100 * number(row, "gemm_share"));
    cell(h, "%.2f", number(row, "device_gb_own"));
    cell(h, "%.0f", number(row, "mhz"));
    cell(h, "%.0f", number(row, "watts"));
    vlai_text_puts(h, "<td>");
    const char *key, *between = "";
    json_t *losses = json_object_get(row, "loss"), *value;
    json_object_foreach(losses, key, value)
    {
        vlai_text_printf(h, "%s%.5g", between, json_number_value(value));
        between = " / ";
    }
    vlai_text_puts(h, "</td></tr>\n");
}

/* Operations by falling time. */
static void put_profile(vlai_text *h, const json_t *row)
{
    json_t *ops = json_object_get(json_object_get(row, "profile"), "ops"), *value;
    const char *key, *names[PROFILED] = {0};
    double ms[PROFILED] = {0}, sum = 0;
    int n = 0;
    json_object_foreach(ops, key, value)
    {
        double own = number(value, "ms");
        sum += own;
        int at = n < PROFILED ? n++ : own > ms[PROFILED - 1] ? PROFILED - 1 : PROFILED;
        for (; at < PROFILED && at > 0 && ms[at - 1] < own; at--) {
            ms[at] = ms[at - 1];
            names[at] = names[at - 1];
        }
        if (at < PROFILED) {
            ms[at] = own;
            names[at] = key;
        }
    }
    if (n == 0 || !(sum > 0))
        return;
    vlai_text_puts(h, "<details><summary>Time by operation: ");
    vlai_html_escape(h, word(row, "numerics"));
    vlai_text_printf(h, ", batch %lld</summary><div class=scroll><table><tr><th>operation</th><th>ms</th><th>share</th></tr>\n",
                     (long long)json_integer_value(json_object_get(row, "batch")));
    for (int i = 0; i < n; i++) {
        vlai_text_puts(h, "<tr><td>");
        vlai_html_escape(h, names[i]);
        vlai_text_printf(h, "</td><td>%.3f</td><td>%.1f %%</td></tr>\n", ms[i], 100 * ms[i] / sum);
    }
    vlai_text_puts(h, "</table></div></details>\n");
}

static void put_rows(vlai_text *h, json_t *const *rows, size_t count)
{
    static const char head[] = "<div class=scroll><table><tr><th>switches</th><th>numerics</th><th>batch</th><th>global batch</th><th>step ms</th><th>samples/s</th>"
                               "<th>TFLOP/s</th><th>MFU</th><th>of GEMM peak</th><th>memory GB</th><th>MHz</th><th>W</th><th>loss at 1 / 5 / 10 / 20 / 29</th></tr>\n";
    bool open = false;
    for (size_t i = 0; i < count; i++) {
        bool step = !strcmp(word(rows[i], "kind"), "step");
        if (!step && strcmp(word(rows[i], "kind"), "machine") != 0)
            continue;
        if (step && !open)
            vlai_text_puts(h, head);
        else if (!step && open)
            vlai_text_puts(h, "</table></div>\n");
        open = step;
        if (step)
            put_step(h, rows[i]);
        else
            put_machine(h, rows[i]);
    }
    if (open)
        vlai_text_puts(h, "</table></div>\n");
    for (size_t i = 0; i < count; i++)
        put_profile(h, rows[i]);
}

/* ---- several ranks ---- */

static void put_rank_row(vlai_text *h, const json_t *row)
{
    const json_t *model = json_object_get(row, "model");
    const char *error = word(row, "error");
    vlai_text_printf(h, "<tr><td>%lld</td><td>", (long long)json_integer_value(json_object_get(row, "ranks")));
    vlai_html_escape(h, word(row, "numerics"));
    vlai_text_puts(h, "</td><td>");
    vlai_html_escape(h, word(row, "variant"));
    vlai_text_printf(h, "</td><td>%lld</td><td>%lld</td>", (long long)json_integer_value(json_object_get(row, "batch")),
                     (long long)json_integer_value(json_object_get(row, "global_batch")));
    if (*error || json_is_true(json_object_get(row, "oom"))) {
        vlai_text_puts(h, *error ? "<td colspan=13>failed: " : "<td colspan=13>out of memory");
        vlai_html_escape(h, error);
        vlai_text_puts(h, "</td></tr>\n");
        return;
    }
    cell(h, "%.2f", number(row, "step_ms"));
    cell(h, "%.2f", number(row, "samples_per_s"));
    cell(h, "%.4f", number(row, "efficiency"));
    cell(h, "%.2f", number(row, "exposed_ms"));
    cell(h, "%.2f %%", 100 * number(row, "exposed_share"));
    cell(h, "%.2f", number(row, "device_gb_own"));
    cell(h, "%.2f", number(row, "device_gb_used"));
    cell(h, "%.3f", number(row, "collective_bytes") * 1e-9);
    double reduce = number(row, "reduce_gb_per_s");
    cell(h, "%.1f", isfinite(reduce) ? reduce : number(row, "all_reduce_gb_per_s"));
    cell(h, "%.1f", number(row, "gather_gb_per_s"));
    cell(h, "%.0f", number(row, "watts"));
    cell(h, "%.2f", number(model, "step_ms"));
    cell(h, "%+.2f %%", 100 * number(model, "difference"));
    vlai_text_puts(h, "</tr>\n");
}

static void put_forecast(vlai_text *h, const json_t *row)
{
    double gbit = number(row, "gbit_per_s");
    vlai_text_printf(h, "<tr><td>%lld</td><td>", (long long)json_integer_value(json_object_get(row, "ranks")));
    vlai_html_escape(h, word(row, "numerics"));
    if (gbit > 0)
        vlai_text_printf(h, "</td><td>%lld machines, %.0f Gb/s</td>", (long long)json_integer_value(json_object_get(row, "machines")), gbit);
    else
        vlai_text_puts(h, "</td><td>one machine</td>");
    cell(h, "%.1f", number(row, "gb_per_s"));
    cell(h, "%.2f", number(row, "step_ms"));
    cell(h, "%.2f", number(row, "exposed_ms"));
    cell(h, "%.4f", number(row, "efficiency"));
    cell(h, "%.1f", number(row, "samples_per_s"));
    vlai_text_puts(h, "</tr>\n");
}

static void put_table(vlai_text *h, const char *kind, const char *head, void (*put)(vlai_text *h, const json_t *row), json_t *const *rows, size_t count)
{
    bool open = false;
    for (size_t i = 0; i < count; i++) {
        if (strcmp(word(rows[i], "kind"), kind) != 0)
            continue;
        if (!open)
            vlai_text_puts(h, head);
        open = true;
        put(h, rows[i]);
    }
    if (open)
        vlai_text_puts(h, "</table></div>\n");
}

static void put_ranks(vlai_text *h, json_t *const *rows, size_t count)
{
    put_table(h, "ranks", "<h3>Several GPUs</h3>\n<div class=scroll><table><tr><th>GPUs</th><th>numerics</th><th>switches</th><th>batch each</th><th>global batch</th><th>step ms</th>"
              "<th>samples/s</th><th>efficiency</th><th>exposed ms</th><th>share</th><th>own GB</th><th>all GB</th><th>exchanged GB</th><th>reduce GB/s</th>"
              "<th>gather GB/s</th><th>W</th><th>model: step ms</th><th>against measured</th></tr>\n", put_rank_row, rows, count);
    put_table(h, "ranks_model", "<h3>Model of scaling</h3>\n<div class=scroll><table><tr><th>GPUs</th><th>numerics</th><th>links</th><th>slowest link GB/s</th><th>step ms</th>"
              "<th>exposed ms</th><th>efficiency</th><th>samples/s</th></tr>\n", put_forecast, rows, count);
}

vla_status vlai_report_bench(const char *run, vlai_text *html, vla_error *err)
{
    char path[PATH], *data;
    size_t size, count = 0, capacity = 0;
    json_t **rows = NULL;
    if (!place(run, path))
        return VLA_OK;
    VLA_TRY(vlai_read_file(path, 0, &data, &size, err));
    vla_status status = VLA_OK;
    for (const char *line = data, *end; line < data + size && status == VLA_OK; line = end + 1) {
        end = memchr(line, '\n', size - (size_t)(line - data));
        end = end ? end : data + size;
        json_t *object = json_loadb(line, (size_t)(end - line), 0, NULL);
        if (json_is_object(object))
            status = vlai_reserve((void **)&rows, &capacity, count, sizeof *rows, err);
        if (json_is_object(object) && status == VLA_OK)
            rows[count++] = object;
        else
            json_decref(object);
    }
    if (status == VLA_OK && count) {
        vlai_text_puts(html, "<h2>Measurements</h2>\n");
        put_rows(html, rows, count);
        put_ranks(html, rows, count);
    }
    for (size_t i = 0; i < count; i++)
        json_decref(rows[i]);
    vlai_free(rows);
    vlai_free(data);
    return status;
}
