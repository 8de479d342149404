#include "train/report_svg.h"

#include "format/plot.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { WIDTH = 640, HEIGHT = 250, LEFT = 62, RIGHT = 14, TOP = 14, BOTTOM = 34, COLUMNS = 280 };

void vlai_html_escape(vlai_text *out, const char *text)
{
    for (; *text; text++)
        switch (*text) {
        case '<': vlai_text_puts(out, "&lt;"); break;
        case '>': vlai_text_puts(out, "&gt;"); break;
        case '&': vlai_text_puts(out, "&amp;"); break;
        case '"': vlai_text_puts(out, "&quot;"); break;
        default: vlai_text_put(out, text, 1);
        }
}

typedef struct frame {
    double x0, x1, low, high;
    bool orders;
} frame;

static double scaled(const frame *f, double y)
{
    return f->orders ? log10(y) : y;
}

static double at_x(const frame *f, double x)
{
    return LEFT + (x - f->x0) / (f->x1 - f->x0) * (WIDTH - LEFT - RIGHT);
}

static double at_y(const frame *f, double y)
{
    return TOP + (f->high - scaled(f, y)) / (f->high - f->low) * (HEIGHT - TOP - BOTTOM);
}

static frame frame_of(const vlai_curve_chart *chart, const vlai_curve *curves, int count)
{
    frame f = {INFINITY, -INFINITY, INFINITY, -INFINITY, false};
    for (int c = 0; c < count; c++)
        for (int64_t i = 0; i < curves[c].count; i++) {
            f.x0 = fmin(f.x0, curves[c].x[i]);
            f.x1 = fmax(f.x1, curves[c].x[i]);
            if (isfinite(curves[c].y[i])) {
                f.low = fmin(f.low, curves[c].y[i]);
                f.high = fmax(f.high, curves[c].y[i]);
            }
        }
    if (!(f.low <= f.high))
        f = (frame){0, 1, 0, 1, false};
    f.orders = chart->orders && f.low > 0 && f.high / f.low > 50;
    if (chart->zero && !f.orders)
        f.low = fmin(f.low, 0);
    if (f.orders) {
        f.low = log10(f.low);
        f.high = log10(f.high);
    }
    double margin = (f.high - f.low) * 0.05;
    if (!(margin > 1e-9 * fmax(fabs(f.low), fabs(f.high))))
        margin = fmax(fabs(f.high) * 0.1, 1e-9);
    f.high += margin;
    if (!chart->zero || f.low < 0 || f.orders)
        f.low -= margin;
    if (!(f.x1 > f.x0))
        f.x1 = f.x0 + 1;
    return f;
}

static void put_tick(vlai_text *out, const frame *f, double value, const char *label)
{
    double y = at_y(f, value);
    vlai_text_printf(out, "<line class=g x1='%d' y1='%.1f' x2='%d' y2='%.1f'/><text x='%d' y='%.1f' text-anchor=end>%s</text>",
                     LEFT, y, WIDTH - RIGHT, y, LEFT - 7, y + 4, label);
}

static void put_axes(vlai_text *out, const frame *f, const char *x_name)
{
    double first, step;
    char label[32];
    if (f->orders) {
        static const double steps[] = {1, 2, 5};
        bool fine = f->high - f->low < 2.5;
        for (int e = (int)floor(f->low); e <= f->high; e++)
            for (int k = 0; k < (fine ? 3 : 1); k++) {
                double v = steps[k] * pow(10, e);
                snprintf(label, sizeof label, "%.3g", v);
                if (log10(v) >= f->low && log10(v) <= f->high)
                    put_tick(out, f, v, label);
            }
    } else {
        vlai_plot_ticks(f->low, f->high, 5, &first, &step);
        for (double v = first; v <= f->high; v += step) {
            snprintf(label, sizeof label, "%.4g", fabs(v) < step * 1e-6 ? 0 : v);
            put_tick(out, f, v, label);
        }
    }
    vlai_plot_ticks(f->x0, f->x1, 6, &first, &step);
    if (step < 1) {
        first = ceil(f->x0);
        step = 1;
    }
    for (double v = first; v <= f->x1 + step * 1e-9; v += step)
        vlai_text_printf(out, "<text x='%.1f' y='%d' text-anchor=middle>%.6g</text>", at_x(f, v), HEIGHT - BOTTOM + 16, v);
    vlai_text_printf(out, "<text x='%d' y='%d' text-anchor=end>%s</text>", WIDTH - RIGHT, HEIGHT - 3, x_name);
    vlai_text_printf(out, "<line class=a x1='%d' y1='%d' x2='%d' y2='%d'/>", LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM);
}

/* One column of the chart. */
typedef struct column {
    double x, sum, low, high;
    int64_t n;
} column;

static int64_t thin(const vlai_curve *curve, const frame *f, column out[COLUMNS])
{
    memset(out, 0, COLUMNS * sizeof *out);
    for (int64_t i = 0; i < curve->count; i++) {
        if (!isfinite(curve->y[i]))
            continue;
        int64_t k = curve->count <= COLUMNS ? i : (int64_t)((curve->x[i] - f->x0) / (f->x1 - f->x0) * (COLUMNS - 1));
        if (k < 0 || k >= COLUMNS)
            continue;
        column *c = &out[k];
        c->low = c->n ? fmin(c->low, curve->y[i]) : curve->y[i];
        c->high = c->n ? fmax(c->high, curve->y[i]) : curve->y[i];
        c->x += curve->x[i];
        c->sum += curve->y[i];
        c->n++;
    }
    int64_t kept = 0;
    for (int k = 0; k < COLUMNS; k++)
        if (out[k].n) {
            out[kept] = out[k];
            out[kept].x /= (double)out[kept].n;
            out[kept].sum /= (double)out[kept].n;
            kept++;
        }
    return kept;
}

static void put_curve(vlai_text *out, const frame *f, const vlai_curve *curve)
{
    column columns[COLUMNS];
    int64_t n = thin(curve, f, columns);
    if (curve->count > COLUMNS) { /* the band from the lowest to the highest value of each column */
        vlai_text_printf(out, "<path class='b c%d' d='", curve->colour);
        for (int64_t k = 0; k < n; k++)
            vlai_text_printf(out, "%c%.1f %.1f", k ? 'L' : 'M', at_x(f, columns[k].x), at_y(f, columns[k].high));
        for (int64_t k = n - 1; k >= 0; k--)
            vlai_text_printf(out, "L%.1f %.1f", at_x(f, columns[k].x), at_y(f, columns[k].low));
        vlai_text_puts(out, "Z'/>");
    }
    vlai_text_printf(out, "<path class='l c%d' d='", curve->colour);
    for (int64_t k = 0; k < n; k++)
        vlai_text_printf(out, "%c%.1f %.1f", k ? 'L' : 'M', at_x(f, columns[k].x), at_y(f, columns[k].sum));
    vlai_text_puts(out, "'/>");
    for (int64_t k = 0; curve->points && k < n; k++)
        vlai_text_printf(out, "<circle class='p c%d' cx='%.1f' cy='%.1f' r=3.5><title>%.6g: %.6g</title></circle>", curve->colour,
                         at_x(f, columns[k].x), at_y(f, columns[k].sum), columns[k].x, columns[k].sum);
}

void vlai_svg_chart(vlai_text *out, const vlai_curve_chart *chart, const vlai_curve *curves, int count)
{
    frame f = frame_of(chart, curves, count);
    vlai_text_puts(out, "<figure><figcaption><b>");
    vlai_html_escape(out, chart->title);
    vlai_text_puts(out, "</b>");
    if (*chart->unit)
        vlai_text_printf(out, " <span>%s</span>", chart->unit);
    for (int c = 0; c < count; c++) {
        if (!*curves[c].name)
            continue;
        vlai_text_printf(out, " <span class=k><i class=c%d></i>", curves[c].colour);
        vlai_html_escape(out, curves[c].name);
        vlai_text_puts(out, "</span>");
    }
    vlai_text_printf(out, "</figcaption><svg viewBox='0 0 %d %d' role=img aria-label='%s'>", WIDTH, HEIGHT, chart->title);
    put_axes(out, &f, chart->x_name);
    for (int c = 0; c < count; c++)
        put_curve(out, &f, &curves[c]);
    vlai_text_puts(out, "</svg></figure>\n");
}
