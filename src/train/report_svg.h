/* Line charts as inline SVG, drawn with the page's CSS classes c0..c3 for lines, k for their names, g for grids.
 *
 * Long series are thinned to what a screen can show: per column of the chart the mean, with the extremes as a pale band. */
#ifndef VLAI_REPORT_SVG_H
#define VLAI_REPORT_SVG_H

#include "base/text.h"

#include <stdbool.h>
#include <stdint.h>

VLA_BEGIN_DECLS

typedef struct vlai_curve {
    const char *name;    /* in the legend; "": not there */
    const double *x, *y; /* x: whole numbers, ascending; y that is not finite leaves a gap */
    int64_t count;
    int colour;  /* 0 to 3 */
    bool points; /* single values with dots, joined */
} vlai_curve;

typedef struct vlai_curve_chart {
    const char *title, *unit, *x_name;
    bool zero;   /* the axis begins at 0 */
    bool orders; /* logarithmic when all values are positive and span more than a factor of 50 */
} vlai_curve_chart;

void vlai_svg_chart(vlai_text *out, const vlai_curve_chart *chart, const vlai_curve *curves, int count);
/* Text with <, >, & and quotation marks made harmless. */
void vlai_html_escape(vlai_text *out, const char *text);

VLA_END_DECLS

#endif
