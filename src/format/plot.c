#include "format/plot.h"

#include "base/fail.h"
#include "base/memory.h"
#include "format/plot_font.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LETTER_WIDTH = 6, MOST_SIDE = 20000 };

static const vlai_colour ink = {40, 40, 44}, grid = {222, 222, 228}, frame = {150, 150, 158};

vla_status vlai_canvas_make(int width, int height, vlai_canvas *out, vla_error *err)
{
    *out = (vlai_canvas){0};
    if (width < 1 || height < 1 || width > MOST_SIDE || height > MOST_SIDE)
        return vlai_fail(err, VLA_E_INVALID, "a picture of %d x %d, wanted 1 to %d each", width, height, MOST_SIDE);
    size_t bytes = (size_t)width * (size_t)height * 3;
    out->rgb = vlai_alloc(bytes);
    if (!out->rgb)
        return vlai_nomem(err, bytes);
    memset(out->rgb, 255, bytes);
    out->width = width;
    out->height = height;
    return VLA_OK;
}

void vlai_canvas_fini(vlai_canvas *c)
{
    vlai_free(c->rgb);
    *c = (vlai_canvas){0};
}

/* Covers `share` of a pixel with a colour. */
static void blend(vlai_canvas *c, int x, int y, vlai_colour colour, double share)
{
    if (x < 0 || y < 0 || x >= c->width || y >= c->height || share <= 0)
        return;
    uint8_t *p = c->rgb + 3 * ((size_t)y * (size_t)c->width + (size_t)x);
    const uint8_t to[3] = {colour.r, colour.g, colour.b};
    for (int i = 0; i < 3; i++)
        p[i] = (uint8_t)lround(p[i] + (to[i] - p[i]) * (share > 1 ? 1 : share));
}

void vlai_plot_box(vlai_canvas *c, int x, int y, int width, int height, vlai_colour colour)
{
    for (int j = y < 0 ? 0 : y; j < y + height && j < c->height; j++)
        for (int i = x < 0 ? 0 : x; i < x + width && i < c->width; i++)
            blend(c, i, j, colour, 1);
}

/* A pixel is covered as far as its centre lies inside the line, with a soft edge one pixel wide. */
void vlai_plot_line(vlai_canvas *c, double x0, double y0, double x1, double y1, double thickness, vlai_colour colour)
{
    if (!isfinite(x0) || !isfinite(y0) || !isfinite(x1) || !isfinite(y1))
        return;
    double dx = x1 - x0, dy = y1 - y0, length2 = dx * dx + dy * dy, reach = thickness / 2 + 1;
    double left = fmax(fmin(x0, x1) - reach, 0), right = fmin(fmax(x0, x1) + reach, c->width - 1);
    double top = fmax(fmin(y0, y1) - reach, 0), bottom = fmin(fmax(y0, y1) + reach, c->height - 1);
    for (int y = (int)top; y <= bottom; y++)
        for (int x = (int)left; x <= right; x++) {
            double along = length2 > 0 ? ((x - x0) * dx + (y - y0) * dy) / length2 : 0;
            along = along < 0 ? 0 : along > 1 ? 1 : along;
            double distance = hypot(x - x0 - along * dx, y - y0 - along * dy);
            blend(c, x, y, colour, thickness / 2 + 0.5 - distance);
        }
}

int vlai_plot_text_width(const char *text, int scale)
{
    return (int)strlen(text) * LETTER_WIDTH * scale;
}

void vlai_plot_text(vlai_canvas *c, int x, int y, int scale, vlai_colour colour, const char *text)
{
    for (; *text; text++, x += LETTER_WIDTH * scale) {
        unsigned char byte = (unsigned char)*text;
        const uint8_t *rows = vlai_plot_font[(byte < 32 || byte > 126 ? '?' : byte) - 32];
        for (int row = 0; row < 9; row++)
            for (int column = 0; column < 5; column++)
                if (rows[row] >> (4 - column) & 1)
                    vlai_plot_box(c, x + column * scale, y + row * scale, scale, scale, colour);
    }
}

void vlai_plot_ticks(double low, double high, int wanted, double *first, double *step)
{
    double raw = (high - low) / (wanted > 0 ? wanted : 1), power = pow(10, floor(log10(raw > 0 ? raw : 1)));
    double rest = raw / power;
    *step = power * (rest <= 1 ? 1 : rest <= 2 ? 2 : rest <= 5 ? 5 : 10);
    *first = ceil(low / *step - 1e-9) * *step;
}

/* The range of all finite values, with a margin; a flat line gets a range around it. */
static void range_of(const vlai_series *series, int count, double *low, double *high)
{
    *low = INFINITY;
    *high = -INFINITY;
    for (int s = 0; s < count; s++)
        for (int64_t i = 0; i < series[s].count; i++)
            if (isfinite(series[s].y[i])) {
                *low = fmin(*low, series[s].y[i]);
                *high = fmax(*high, series[s].y[i]);
            }
    if (*low > *high)
        *low = *high = 0;
    double margin = (*high - *low) * 0.06;
    if (!(margin > 1e-12 * fmax(fabs(*low), fabs(*high)))) /* flat */
        margin = fmax(fabs(*low) * 0.1, 1e-3);
    *low -= margin;
    *high += margin;
}

typedef struct area {
    double left, top, width, height, x0, x1, low, high;
} area;

static double to_x(const area *a, double x)
{
    return a->left + (x - a->x0) / (a->x1 - a->x0) * a->width;
}

static double to_y(const area *a, double y)
{
    return a->top + (a->high - y) / (a->high - a->low) * a->height;
}

static void draw_axes(vlai_canvas *c, const area *a)
{
    double first, step;
    char text[32];
    vlai_plot_ticks(a->low, a->high, a->height > 160 ? 5 : 3, &first, &step);
    for (double v = first; v <= a->high; v += step) {
        vlai_plot_line(c, a->left, to_y(a, v), a->left + a->width, to_y(a, v), 1, grid);
        snprintf(text, sizeof text, "%.4g", fabs(v) < step * 1e-6 ? 0 : v);
        vlai_plot_text(c, (int)a->left - 6 - vlai_plot_text_width(text, 1), (int)to_y(a, v) - 4, 1, ink, text);
    }
    vlai_plot_ticks(a->x0, a->x1, 8, &first, &step);
    step = fmax(1, step);
    for (double v = ceil(a->x0 / step) * step; v <= a->x1 + 1e-9; v += step) {
        vlai_plot_line(c, to_x(a, v), a->top, to_x(a, v), a->top + a->height, 1, grid);
        snprintf(text, sizeof text, "%.0f", v);
        vlai_plot_text(c, (int)to_x(a, v) - vlai_plot_text_width(text, 1) / 2, (int)(a->top + a->height) + 6, 1, ink, text);
    }
    vlai_plot_line(c, a->left, a->top + a->height, a->left + a->width, a->top + a->height, 1, frame);
    vlai_plot_line(c, a->left, a->top, a->left, a->top + a->height, 1, frame);
}

void vlai_plot_panel(vlai_canvas *c, int x, int y, int width, int height, const char *title, const vlai_series *series, int count)
{
    area a = {.left = x + 60, .top = y + 24, .width = width - 72, .height = height - 44, .x0 = INFINITY, .x1 = -INFINITY};
    range_of(series, count, &a.low, &a.high);
    for (int s = 0; s < count; s++)
        if (series[s].count > 0) {
            a.x0 = fmin(a.x0, series[s].first_x);
            a.x1 = fmax(a.x1, series[s].first_x + (double)(series[s].count - 1));
        }
    if (!(a.x1 > a.x0)) { /* one point, or none */
        a.x0 = isfinite(a.x0) ? a.x0 - 0.5 : 0;
        a.x1 = a.x0 + 1;
    }
    vlai_plot_text(c, x + 60, y + 2, 2, ink, title);
    draw_axes(c, &a);
    for (int s = 0; s < count; s++) {
        const vlai_series *line = &series[s];
        for (int64_t i = 0; i < line->count; i++) {
            double px = to_x(&a, line->first_x + (double)i), py = to_y(&a, line->y[i]);
            int next = i + 1 < line->count && isfinite(line->y[i + 1]);
            if (next)
                vlai_plot_line(c, px, py, to_x(&a, line->first_x + (double)(i + 1)), to_y(&a, line->y[i + 1]), 2, line->colour);
            else
                vlai_plot_line(c, px, py, px, py, 3, line->colour);
        }
    }
}
