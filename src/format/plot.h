/* Line charts drawn into an RGB picture, for PNG files: a canvas, lines, letters of a built-in font, and panels with axes.
 *
 *     vlai_canvas c;
 *     VLA_TRY(vlai_canvas_make(1200, 400, &c, err));
 *     vlai_series lines[] = {{recorded, n, 0, {31, 119, 180}}, {predicted, n, 0, {255, 127, 14}}};
 *     vlai_plot_panel(&c, 10, 10, 1180, 380, "gripper", lines, 2);
 *     VLA_TRY(vlai_png_write("gripper.png", c.rgb, c.width, c.height, err));
 *     vlai_canvas_fini(&c);
 *
 * What lies outside the canvas is cut off. Values that are not finite leave gaps. Threads: any, one per canvas. */
#ifndef VLAI_PLOT_H
#define VLAI_PLOT_H

#include "vla/error.h"

VLA_BEGIN_DECLS

typedef struct vlai_colour {
    uint8_t r, g, b;
} vlai_colour;

typedef struct vlai_canvas {
    uint8_t *rgb; /* (height, width, 3) */
    int width, height;
} vlai_canvas;

typedef struct vlai_series {
    const double *y;
    int64_t count;
    double first_x; /* x of y[0]; the others follow at 1 each */
    vlai_colour colour;
} vlai_series;

vla_status vlai_canvas_make(int width, int height, vlai_canvas *out, vla_error *err); /* white */
void vlai_canvas_fini(vlai_canvas *c);
void vlai_plot_box(vlai_canvas *c, int x, int y, int width, int height, vlai_colour colour);
void vlai_plot_line(vlai_canvas *c, double x0, double y0, double x1, double y1, double thickness, vlai_colour colour);
/* Letters of 6 x 10 times `scale` pixels, (x, y) the upper left corner. Bytes that are not ASCII become '?'. */
void vlai_plot_text(vlai_canvas *c, int x, int y, int scale, vlai_colour colour, const char *text);
int vlai_plot_text_width(const char *text, int scale);
/* A framed chart with ticks and title that fills the rectangle. */
void vlai_plot_panel(vlai_canvas *c, int x, int y, int width, int height, const char *title, const vlai_series *series,
                     int count);
/* Nice steps for about `wanted` ticks over [low, high]: the first tick and the distance. */
void vlai_plot_ticks(double low, double high, int wanted, double *first, double *step);

VLA_END_DECLS

#endif
