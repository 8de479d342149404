/* 4:2:0 of a WebP picture to RGB, bit for bit as libwebp does it: chroma is interpolated, then converted in fixed point
 * (BT.601, limited range, units of 2^-14; the halves of the rounding are in the constants):
 *
 *     R = clip((y * 19077 >> 8) + (v * 26149 >> 8) - 14234)
 *     G = clip((y * 19077 >> 8) - (u * 6419 >> 8) - (v * 13320 >> 8) + 8708)
 *     B = clip((y * 19077 >> 8) + (u * 33050 >> 8) - 17685),  clip to 0..2^14 - 1, then >> 6
 *
 * A chroma sample lies in the middle of four pixels. A pixel weighs the four samples around it by 9, 3, 3, 1 sixteenths,
 * in two roundings: with a the nearest, d the one across and b, c the others, ((a + b + c + d + 8 + 2 * (b + c)) >> 3)
 * is taken to a, + a, >> 1. At the borders of the picture, where two are missing, it is (3a + b + 2) >> 2; beyond the
 * first and last row the row stands for its neighbour. */
#include "format/image_impl.h"

#include <string.h>

static inline uint8_t clip(int x)
{
    return (uint8_t)(x < 0 ? 0 : x >= 1 << 14 ? 255 : x >> 6);
}

static inline void put(uint8_t *rgb, int luma, int u, int v)
{
    int y = luma * 19077 >> 8;
    rgb[0] = clip(y + (v * 26149 >> 8) - 14234);
    rgb[1] = clip(y - (u * 6419 >> 8) - (v * 13320 >> 8) + 8708);
    rgb[2] = clip(y + (u * 33050 >> 8) - 17685);
}

/* Chroma of pixel x, from the row of samples nearer to it and the one on its other side. */
static inline int chroma(const uint8_t *near, const uint8_t *far, int x, int width)
{
    int own = x / 2, side = x % 2 ? own + 1 : own - 1;
    if (side < 0 || side >= (width + 1) / 2)
        return (3 * near[own] + far[own] + 2) >> 2;
    int a = near[own], b = near[side], c = far[own], d = far[side];
    return (((a + b + c + d + 8 + 2 * (b + c)) >> 3) + a) >> 1;
}

void vlai_webp_rgb(const uint8_t *const planes[3], const int strides[3], int width, int height, uint8_t *rgb)
{
    for (int row = 0; row < height; row++) {
        int near = row / 2, far = row % 2 ? near + 1 : near - 1;
        if (far < 0 || far >= (height + 1) / 2)
            far = near;
        const uint8_t *y = planes[0] + (int64_t)row * strides[0], *u = planes[1] + (int64_t)near * strides[1],
                      *v = planes[2] + (int64_t)near * strides[2], *u_far = planes[1] + (int64_t)far * strides[1],
                      *v_far = planes[2] + (int64_t)far * strides[2];
        for (int x = 0; x < width; x++)
            put(rgb + ((int64_t)row * width + x) * 3, y[x], chroma(u, u_far, x, width), chroma(v, v_far, x, width));
    }
}
