/* 4:2:0 to RGB by the fixed-point rule that libswscale's x86 code computes (BT.601, limited range, chroma not
 * interpolated):
 *
 *     y = ((8Y - 128) * 9539) >> 16,  u = 8U - 1024,  v = 8V - 1024
 *     R = clamp(y + (v * 13075 >> 16)),  G = clamp(y + (u * -3209 >> 16) + (v * -6660 >> 16)),
 *     B = clamp(y + (u * 16525 >> 16)),  >> rounding down, clamp to 0..255
 *
 * 9539, 13075, 3209, 6660, 16525 are 1.164, 1.596, 0.392, 0.813, 2.017 in units of 2^-13. */
#include "format/video.h"

static inline uint8_t clamp(int x)
{
    return (uint8_t)(x < 0 ? 0 : x > 255 ? 255 : x);
}

static inline void put(uint8_t *rgb, int luma, int r, int g, int b)
{
    int y = ((8 * luma - 128) * 9539) >> 16;
    rgb[0] = clamp(y + r);
    rgb[1] = clamp(y + g);
    rgb[2] = clamp(y + b);
}

void vlai_yuv420_to_rgb(const uint8_t *const planes[3], const int strides[3], int width, int height, uint8_t *rgb)
{
    for (int row = 0; row < height; row++) {
        const uint8_t *y = planes[0] + (int64_t)row * strides[0];
        const uint8_t *u = planes[1] + (int64_t)(row / 2) * strides[1];
        const uint8_t *v = planes[2] + (int64_t)(row / 2) * strides[2];
        uint8_t *out = rgb + (int64_t)row * width * 3;
        for (int x = 0; x < width; x += 2) {
            int du = 8 * u[x / 2] - 1024, dv = 8 * v[x / 2] - 1024;
            int r = (dv * 13075) >> 16, g = ((du * -3209) >> 16) + ((dv * -6660) >> 16), b = (du * 16525) >> 16;
            put(out + 3 * x, y[x], r, g, b);
            if (x + 1 < width)
                put(out + 3 * x + 3, y[x + 1], r, g, b);
        }
    }
}
