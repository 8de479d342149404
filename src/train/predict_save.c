/* What an evaluation leaves behind: tables for the terminal, JSON, CSV, and pictures of recorded against predicted. */
#include "train/predict_internal.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/json.h"
#include "base/memory.h"
#include "format/image.h"
#include "format/plot.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *const swap_names[] = {"nothing", "images", "instructions"};
static const vlai_colour blue = {31, 119, 180}, orange = {255, 127, 14}, grey = {140, 140, 148}, black = {40, 40, 44};

/* ---- terminal ---- */

/* "-": there is none. */
static const char *ratio(double a, double b, char text[32])
{
    if (b > 0)
        snprintf(text, 32, "%.3f", a / b);
    return b > 0 ? text : "-";
}

static void print_row(vlai_text *out, const char *name, const vlai_predict_error *e)
{
    char text[32];
    if (e->count == 0) /* a step that no episode is long enough for */
        vlai_text_printf(out, "  %-28.28s %12s %12s %14s %14s %8s\n", name, "-", "-", "-", "-", "-");
    else
        vlai_text_printf(out, "  %-28.28s %12.5g %12.5g %14.5g %14.5g %8s\n", name, e->l1, e->mse, e->mean_l1, e->mean_mse,
                         ratio(e->l1, e->mean_l1, text));
}

void vlai_predict_print(const vlai_predict *p, vlai_text *out)
{
    const vlai_predict_result *r = &p->result;
    char text[32];
    vlai_text_printf(out, "%s (step %" PRId64 ")%s%s on %s\n", vlai_predict_checkpoint(p), vlai_predict_step(p),
                     p->options.weights ? " with the weights of " : "", p->options.weights ? p->options.weights : "", p->root);
    vlai_text_printf(out, "%" PRId64 " episode%s, %" PRId64 " predictions of %" PRId64 " actions, one every %" PRId64 " frames, %" PRId64
                     " Euler steps; %" PRId64 " actions compared, %.1f s\n", r->episode_count, r->episode_count == 1 ? "" : "s", r->frame_count, r->horizon,
                     p->options.stride, p->options.steps, r->columns ? r->all.count / r->columns : 0, r->seconds);
    if (p->writer)
        vlai_text_printf(out, "action tokens: %" PRId64 " predictions stand for no chunk and count as the middle of the range\n", r->unreadable);
    if (p->options.swap != VLAI_SWAP_NOTHING)
        vlai_text_printf(out, "%s swapped between episodes\n", swap_names[p->options.swap]);
    vlai_text_printf(out, "  %-28s %12s %12s %14s %14s %8s\n", p->contract.action_key, "L1", "MSE", "mean act. L1", "mean act. MSE",
                     "L1 ratio");
    for (int64_t i = 0; i < r->columns; i++)
        print_row(out, r->names[i], &r->dims[i]);
    for (int64_t h = 0; h < r->horizon; h++) {
        char name[64];
        snprintf(name, sizeof name, "step %" PRId64 " of the horizon", h);
        print_row(out, name, &r->steps[h]);
    }
    print_row(out, "all", &r->all);
    print_row(out, "all, in half ranges", &r->unit);
    vlai_text_printf(out, "mean L1 error %.6g, of the mean action %.6g (over %" PRId64 " training frames): %s of it\n", r->all.l1,
                     r->all.mean_l1, r->training_rows, ratio(r->all.l1, r->all.mean_l1, text));
}

/* ---- JSON ---- */

static json_t *error_json(const char *key, json_t *name, const vlai_predict_error *e)
{
    json_t *o = json_pack("{s:f, s:f, s:f, s:f, s:I}", "l1", e->l1, "mse", e->mse, "mean_action_l1", e->mean_l1, "mean_action_mse",
                          e->mean_mse, "values", (json_int_t)e->count);
    if (key)
        json_object_set_new(o, key, name);
    return o;
}

static json_t *summary(const vlai_predict *p)
{
    const vlai_predict_result *r = &p->result;
    json_t *dims = json_array(), *steps = json_array(), *episodes = json_array();
    for (int64_t i = 0; i < r->columns; i++)
        json_array_append_new(dims, error_json("name", json_string(r->names[i]), &r->dims[i]));
    for (int64_t h = 0; h < r->horizon; h++)
        json_array_append_new(steps, error_json("step", json_integer(h), &r->steps[h]));
    for (int64_t e = 0; e < r->episode_count; e++)
        json_array_append_new(episodes, error_json("episode", json_integer(r->episode_numbers[e]), &r->episodes[e]));
    return json_pack("{s:o, s:I, s:o, s:o, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:o, s:o, s:o, s:o, s:o}", "checkpoint",
                     vlai_json_text(vlai_predict_checkpoint(p)), "step", (json_int_t)vlai_predict_step(p), "weights", vlai_json_text(p->weights), "dataset", vlai_json_text(p->root),
                     "digest", vla_dataset_info_get(p->set)->digest, "swap", swap_names[p->options.swap], "seed",
                     (json_int_t)p->options.seed, "euler_steps", (json_int_t)p->options.steps, "stride",
                     (json_int_t)p->options.stride, "horizon", (json_int_t)r->horizon, "predictions", (json_int_t)r->frame_count,
                     "unreadable", (json_int_t)r->unreadable, "training_rows", (json_int_t)r->training_rows, "seconds", r->seconds, "overall",
                     error_json(NULL, NULL, &r->all), "half_ranges", error_json(NULL, NULL, &r->unit), "dimensions", dims,
                     "horizon_steps", steps, "episodes", episodes);
}

vla_status vlai_predict_json(const vlai_predict *p, vlai_text *out, vla_error *err)
{
    json_t *all = summary(p);
    char *text = all ? json_dumps(all, JSON_INDENT(2)) : NULL;
    json_decref(all);
    if (!text)
        return vlai_nomem(err, 4096);
    vlai_text_puts(out, text);
    vlai_text_puts(out, "\n");
    json_free_t release;
    json_get_alloc_funcs(NULL, &release);
    release(text);
    return vlai_text_status(out, err);
}

/* ---- files ---- */

static vla_status path_in(char out[VLAI_PREDICT_PATH], const char *dir, const char *name, vla_error *err)
{
    return vlai_path_join(out, VLAI_PREDICT_PATH, dir, name) ? VLA_OK : vlai_fail(err, VLA_E_INVALID, "%s: path too long", dir);
}

/* A name as a CSV field; names with commas or quotation marks are quoted. */
static void put_field(vlai_text *out, const char *kind, const char *name)
{
    vlai_text_printf(out, ",\"%s.", kind);
    for (; *name; name++)
        vlai_text_printf(out, *name == '"' ? "\"\"" : "%c", *name);
    vlai_text_puts(out, "\"");
}

/* One row per predicted action that lies inside its episode. */
static vla_status save_csv(const vlai_predict *p, const char *dir, vla_error *err)
{
    const vlai_predict_result *r = &p->result;
    char path[VLAI_PREDICT_PATH];
    vlai_text text = {0};
    vlai_text_puts(&text, "episode,frame,step");
    for (int64_t i = 0; i < r->columns; i++) {
        put_field(&text, "predicted", r->names[i]);
        put_field(&text, "recorded", r->names[i]);
    }
    vlai_text_puts(&text, "\n");
    for (int64_t k = 0; k < r->frame_count; k++)
        for (int64_t h = 0; h < r->frames[k].known; h++) {
            const vlai_predict_frame *f = &r->frames[k];
            vlai_text_printf(&text, "%" PRId64 ",%" PRId64 ",%" PRId64, r->episode_numbers[f->episode], f->frame, h);
            for (int64_t i = 0; i < r->columns; i++)
                vlai_text_printf(&text, ",%.7g,%.7g", f->predicted[h * r->columns + i], f->recorded[h * r->columns + i]);
            vlai_text_puts(&text, "\n");
        }
    vla_status status = vlai_text_status(&text, err);
    if (status == VLA_OK)
        status = path_in(path, dir, "predictions.csv", err);
    if (status == VLA_OK)
        status = vlai_write_file_atomic(path, text.data, text.size, err);
    vlai_text_fini(&text);
    return status;
}

static vla_status save_episode(const vlai_predict *p, int64_t e, const char *dir, vla_error *err)
{
    const vlai_predict_result *r = &p->result;
    const vla_episode *episode = vla_dataset_episode(p->set, p->episodes[e]);
    const char *task = vla_dataset_task(p->set, episode->first_row);
    char name[64], path[VLAI_PREDICT_PATH];
    int64_t points = 0;
    for (int64_t k = 0; k < r->frame_count; k++)
        points += r->frames[k].episode == e;
    json_t *o = json_pack("{s:I, s:o, s:I, s:I, s:I, s:I, s:f, s:s, s:s}", "episode_index", (json_int_t)episode->index, "instruction",
                          vlai_json_text(task ? task : ""), "num_steps", (json_int_t)episode->length, "obs_infer_points", (json_int_t)points,
                          "action_horizon", (json_int_t)r->horizon, "stride", (json_int_t)p->options.stride, "mean_l1",
                          r->episodes[e].l1, "state_key", p->contract.state_key, "action_key", p->contract.action_key);
    if (!o)
        return vlai_nomem(err, 4096);
    snprintf(name, sizeof name, "ep%" PRId64 "_summary.json", episode->index);
    vla_status status = path_in(path, dir, name, err);
    if (status == VLA_OK)
        status = vlai_json_save(o, path, err);
    json_decref(o);
    return status;
}

/* One column of an episode: recorded actions, and those predicted for the next `stride` frames at each prediction. */
static void fill_series(const vlai_predict *p, int64_t e, int64_t column, double *recorded, double *predicted, int64_t length)
{
    const vlai_predict_result *r = &p->result;
    for (int64_t i = 0; i < length; i++)
        recorded[i] = predicted[i] = NAN;
    for (int64_t k = 0; k < r->frame_count; k++) {
        const vlai_predict_frame *f = &r->frames[k];
        for (int64_t h = 0; f->episode == e && h < f->known; h++) {
            recorded[f->frame + h] = f->recorded[h * r->columns + column];
            if (h < p->options.stride)
                predicted[f->frame + h] = f->predicted[h * r->columns + column];
        }
    }
}

enum { PANEL_WIDTH = 620, PANEL_HEIGHT = 190, HEAD = 64, MARGIN = 12, MOST_ROWS = 80 };

static void draw_key(vlai_canvas *c, int x, int y, vlai_colour colour, const char *text)
{
    vlai_plot_line(c, x, y + 7, x + 34, y + 7, 3, colour);
    vlai_plot_text(c, x + 42, y, 2, black, text);
}

/* Mean distance of the two lines where both are drawn. */
static double mean_distance(const double *a, const double *b, int64_t n)
{
    double sum = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(a[i]) && isfinite(b[i])) {
            sum += fabs(a[i] - b[i]);
            count++;
        }
    return count ? sum / (double)count : 0;
}

static vla_status draw_episode(const vlai_predict *p, int64_t e, vlai_canvas *c, vla_error *err)
{
    const vlai_predict_result *r = &p->result;
    const vla_episode *episode = vla_dataset_episode(p->set, p->episodes[e]);
    const char *task = vla_dataset_task(p->set, episode->first_row);
    int64_t length = episode->length;
    double *values = vlai_array((size_t)length * 2, sizeof *values);
    if (!values)
        return vlai_nomem(err, (size_t)length * 2 * sizeof *values);
    char text[160];
    snprintf(text, sizeof text, "episode %" PRId64 ": %.60s   L1 %.4g", episode->index, task ? task : "", r->episodes[e].l1);
    vlai_plot_text(c, MARGIN, 10, 2, black, text);
    draw_key(c, MARGIN, 38, blue, "recorded");
    draw_key(c, MARGIN + 170, 38, orange, "predicted");
    for (int64_t i = 0; i < r->columns && i < 2 * MOST_ROWS; i++) {
        fill_series(p, e, i, values, values + length, length);
        vlai_series lines[] = {{values, length, 0, blue}, {values + length, length, 0, orange}};
        snprintf(text, sizeof text, "%.30s  L1 %.3g", r->names[i], mean_distance(values, values + length, length));
        vlai_plot_panel(c, MARGIN + (int)(i % 2) * PANEL_WIDTH, HEAD + (int)(i / 2) * PANEL_HEIGHT, PANEL_WIDTH - MARGIN,
                        PANEL_HEIGHT - 6, text, lines, 2);
    }
    vlai_free(values);
    return VLA_OK;
}

static vla_status save_plot(const vlai_predict *p, int64_t e, const char *dir, vla_error *err)
{
    char name[64], path[VLAI_PREDICT_PATH];
    vlai_canvas c;
    int rows = (int)((p->result.columns + 1) / 2 < MOST_ROWS ? (p->result.columns + 1) / 2 : MOST_ROWS);
    VLA_TRY(vlai_canvas_make(2 * PANEL_WIDTH + MARGIN, HEAD + rows * PANEL_HEIGHT + MARGIN, &c, err));
    vla_status status = draw_episode(p, e, &c, err);
    snprintf(name, sizeof name, "ep%" PRId64 ".png", p->result.episode_numbers[e]);
    if (status == VLA_OK)
        status = path_in(path, dir, name, err);
    if (status == VLA_OK)
        status = vlai_png_write(path, c.rgb, c.width, c.height, err);
    vlai_canvas_fini(&c);
    return status;
}

/* Error over the horizon, against that of the mean action. */
static vla_status save_horizon(const vlai_predict *p, const char *dir, vla_error *err)
{
    const vlai_predict_result *r = &p->result;
    char path[VLAI_PREDICT_PATH];
    vlai_canvas c;
    double *values = vlai_array((size_t)r->horizon * 2, sizeof *values);
    if (!values)
        return vlai_nomem(err, (size_t)r->horizon * 2 * sizeof *values);
    for (int64_t h = 0; h < r->horizon; h++) {
        values[h] = r->steps[h].count ? r->steps[h].l1 : NAN;
        values[r->horizon + h] = r->steps[h].count ? r->steps[h].mean_l1 : NAN;
    }
    vla_status status = vlai_canvas_make(760, 330, &c, err);
    if (status == VLA_OK) {
        vlai_series lines[] = {{values, r->horizon, 0, orange}, {values + r->horizon, r->horizon, 0, grey}};
        vlai_plot_panel(&c, MARGIN, MARGIN, 760 - 2 * MARGIN, 280, "L1 over the steps of the horizon", lines, 2);
        draw_key(&c, 72, 304, orange, "predicted");
        draw_key(&c, 262, 304, grey, "mean action");
        status = path_in(path, dir, "horizon.png", err);
        if (status == VLA_OK)
            status = vlai_png_write(path, c.rgb, c.width, c.height, err);
        vlai_canvas_fini(&c);
    }
    vlai_free(values);
    return status;
}

/* Files of an older result: the summary, which is written last, so that none of another result lies beside what an interrupted one
 * has left; and those that this one might not write again, epN.png and epN_summary.json. */
static vla_status remove_old(const char *dir, vla_error *err)
{
    char **names, path[VLAI_PREDICT_PATH];
    size_t count;
    if (vlai_path_join(path, sizeof path, dir, "summary.json"))
        unlink(path);
    VLA_TRY(vlai_list_dir(dir, &names, &count, err));
    for (size_t i = 0; i < count; i++) {
        const char *rest = names[i] + 2;
        if (strncmp(names[i], "ep", 2) != 0 || !isdigit((unsigned char)*rest))
            continue;
        rest += strspn(rest, "0123456789");
        if ((!strcmp(rest, ".png") || !strcmp(rest, "_summary.json")) && vlai_path_join(path, sizeof path, dir, names[i]))
            unlink(path);
    }
    vlai_names_free(names, count);
    return VLA_OK;
}

vla_status vlai_predict_save(const vlai_predict *p, const char *dir, vla_error *err)
{
    char path[VLAI_PREDICT_PATH];
    VLA_TRY(vlai_mkdirs(dir, err));
    VLA_TRY(remove_old(dir, err));
    VLA_TRY(save_csv(p, dir, err));
    for (int64_t e = 0; e < p->result.episode_count; e++) {
        VLA_TRY(save_episode(p, e, dir, err));
        if (e < p->options.plots)
            VLA_TRY(save_plot(p, e, dir, err));
    }
    VLA_TRY(save_horizon(p, dir, err));
    json_t *all = summary(p);
    if (!all)
        return vlai_nomem(err, 4096);
    vla_status status = path_in(path, dir, "summary.json", err);
    if (status == VLA_OK)
        status = vlai_json_save(all, path, err);
    json_decref(all);
    return status;
}
