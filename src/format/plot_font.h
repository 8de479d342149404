#ifndef VLAI_PLOT_FONT_H
#define VLAI_PLOT_FONT_H

#include <stdint.h>

extern const uint8_t vlai_plot_font[95][9];

#endif
