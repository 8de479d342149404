/* Pillow's resampling (src/libImaging/Resample.c, 8 bits per channel, bicubic with a = -0.5): coefficients in double,
 * normalised, rounded to 22 fractional bits; sums in 32-bit integers, rounded and clamped. */
#include "image/resize.h"

#include "base/fail.h"
#include "base/memory.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum {
    FRACTION_BITS = 22,
    AXIS_SLOTS = 32,       /* tables kept; the oldest goes first */
    MAX_SIDE = 1 << 16,    /* as PNG and JPEG readers allow; keeps every product in 64 bits */
};

/* How one axis of length `from` becomes one of length `to`: output j is the sum of taps[j * stride + k] times input
 * first[j] + k, k < count[j]; taps beyond count are zero.
 *
 * For 16-bit multiply-adds a tap is split as high * 2^12 + low with 0 <= low < 2^12; the sum is the same integer. `high`
 * and `low` hold two taps each, the even one in the lower half. */
typedef struct axis {
    int64_t from, to;
    int stride; /* taps per output, even */
    int32_t *first, *count, *taps;
    int32_t *high, *low; /* (to, stride / 2) */
} axis;

struct vlai_resizer {
    axis axes[AXIS_SLOTS];
    int used, next;
    uint8_t *between, *step; /* after the horizontal pass; after the first of two resizes */
    size_t between_size, step_size;
};

/* Sizes. */

void vlai_image_longest_side(int64_t width, int64_t height, int64_t target, int64_t *out_width, int64_t *out_height)
{
    *out_width = width;
    *out_height = height;
    if (target == -1)
        return;
    if (width > height) {
        *out_width = target;
        *out_height = (int64_t)((double)(target * height) / (double)width);
    } else {
        *out_width = (int64_t)((double)(target * width) / (double)height);
        *out_height = target;
    }
}

vla_status vlai_image_smart_size(int64_t width, int64_t height, const vlai_image_rule *rule, int64_t *out_width,
                                 int64_t *out_height, vla_error *err)
{
    int64_t longest = width > height ? width : height, shortest = width > height ? height : width;
    if (shortest <= 0)
        return vlai_fail_hint(err, VLA_E_INVALID, "raise data.resolution of this view, or set it to -1",
                              "a picture would become %" PRId64 "x%" PRId64 " pixels", width, height);
    if ((double)longest / (double)shortest > 200)
        return vlai_fail_hint(err, VLA_E_INVALID, "crop the camera's pictures",
                              "a picture of %" PRId64 "x%" PRId64 " pixels has sides in a ratio above 200", width, height);
    double f = (double)rule->factor, h = (double)height, w = (double)width;
    /* rint rounds half to even, as Python's round does. */
    double h2 = fmax(f, rint(h / f) * f), w2 = fmax(f, rint(w / f) * f);
    if (h2 * w2 > (double)rule->max_pixels) {
        double beta = sqrt(h * w / (double)rule->max_pixels);
        h2 = fmax(f, floor(h / beta / f) * f);
        w2 = fmax(f, floor(w / beta / f) * f);
    } else if (h2 * w2 < (double)rule->min_pixels) {
        double beta = sqrt((double)rule->min_pixels / (h * w));
        h2 = ceil(h * beta / f) * f;
        w2 = ceil(w * beta / f) * f;
    }
    *out_width = (int64_t)w2;
    *out_height = (int64_t)h2;
    return VLA_OK;
}

vla_status vlai_image_fit(int64_t width, int64_t height, int64_t target, const vlai_image_rule *rule,
                          vlai_image_size *out, vla_error *err)
{
    if (width <= 0 || height <= 0 || width > MAX_SIDE || height > MAX_SIDE)
        return vlai_fail(err, VLA_E_INVALID, "a picture of %" PRId64 "x%" PRId64 " pixels; 1 to %d are taken", width,
                         height, MAX_SIDE);
    if (target != -1 && (target <= 0 || target > MAX_SIDE))
        return vlai_fail(err, VLA_E_INVALID, "resolution %" PRId64 "; -1 (keep) or 1 to %d are taken", target, MAX_SIDE);
    vlai_image_longest_side(width, height, target, &out->width1, &out->height1);
    return vlai_image_smart_size(out->width1, out->height1, rule, &out->width, &out->height, err);
}

/* Tables. */

static double bicubic(double x)
{
    const double a = -0.5;
    x = fabs(x);
    if (x < 1)
        return ((a + 2) * x - (a + 3)) * x * x + 1;
    if (x < 2)
        return (((x - 5) * x + 8) * x - 4) * a;
    return 0;
}

static void axis_fini(axis *t)
{
    vlai_free(t->first);
    vlai_free(t->count);
    vlai_free(t->taps);
    vlai_free(t->high);
    vlai_free(t->low);
    *t = (axis){0};
}

static vla_status axis_init(axis *t, int64_t from, int64_t to, vla_error *err)
{
    double scale = (double)from / (double)to, filter = scale > 1 ? scale : 1, support = 2 * filter;
    int size = (int)ceil(support) * 2 + 1, stride = (size + 1) & ~1;
    *t = (axis){.from = from, .to = to, .stride = stride};
    t->first = vlai_array((size_t)to, sizeof *t->first);
    t->count = vlai_array((size_t)to, sizeof *t->count);
    t->taps = vlai_calloc((size_t)to, (size_t)stride * sizeof *t->taps);
    t->high = vlai_calloc((size_t)to, (size_t)stride / 2 * sizeof *t->high);
    t->low = vlai_calloc((size_t)to, (size_t)stride / 2 * sizeof *t->low);
    double *weights = vlai_array((size_t)stride, sizeof *weights);
    vla_status status = VLA_OK;
    if (!t->first || !t->count || !t->taps || !t->high || !t->low || !weights) {
        axis_fini(t);
        status = vlai_nomem(err, (size_t)to * (size_t)stride * sizeof *t->taps);
        goto done;
    }
    for (int64_t j = 0; j < to; j++) {
        double centre = ((double)j + 0.5) * scale, sum = 0, inverse = 1 / filter;
        int lo = (int)(centre - support + 0.5), hi = (int)(centre + support + 0.5);
        lo = lo < 0 ? 0 : lo;
        hi = hi > from ? (int)from : hi;
        for (int k = 0; k < hi - lo; k++) {
            weights[k] = bicubic(((double)(k + lo) - centre + 0.5) * inverse);
            sum += weights[k];
        }
        int32_t *taps = t->taps + j * stride;
        for (int k = 0; k < hi - lo; k++) {
            double w = sum != 0 ? weights[k] / sum : weights[k];
            taps[k] = (int32_t)(w * (1 << FRACTION_BITS) + (w < 0 ? -0.5 : 0.5));
        }
        for (int k = 0; k < hi - lo; k += 2) {
            int32_t a = taps[k], b = taps[k + 1]; /* stride is even and beyond count */
            t->high[(j * stride + k) / 2] = (int32_t)((uint32_t)(b >> 12) << 16 | (uint16_t)(a >> 12));
            t->low[(j * stride + k) / 2] = (b & 4095) << 16 | (a & 4095);
        }
        t->first[j] = lo;
        t->count[j] = hi - lo;
    }
done:
    vlai_free(weights);
    return status;
}

static vla_status find_axis(vlai_resizer *r, int64_t from, int64_t to, const axis **out, vla_error *err)
{
    for (int i = 0; i < r->used; i++)
        if (r->axes[i].from == from && r->axes[i].to == to) {
            *out = &r->axes[i];
            return VLA_OK;
        }
    axis fresh;
    VLA_TRY(axis_init(&fresh, from, to, err));
    axis *slot = &r->axes[r->next];
    axis_fini(slot);
    *slot = fresh;
    r->next = (r->next + 1) % AXIS_SLOTS;
    if (r->used < AXIS_SLOTS)
        r->used++;
    *out = slot;
    return VLA_OK;
}

static uint8_t rounded(int32_t sum)
{
    int32_t v = (sum + (1 << (FRACTION_BITS - 1))) >> FRACTION_BITS;
    return (uint8_t)(v < 0 ? 0 : v > 255 ? 255 : v);
}

#if defined(__SSE2__)
/* Four sums from their two halves, rounded, not yet clamped. */
static __m128i joined(__m128i high, __m128i low)
{
    __m128i half = _mm_set1_epi32(1 << (FRACTION_BITS - 1));
    return _mm_srai_epi32(_mm_add_epi32(_mm_add_epi32(_mm_slli_epi32(high, 12), low), half), FRACTION_BITS);
}

/* One output pixel; reads two bytes past the last pixel that has a pair of taps. */
static void pixel_sse2(const uint8_t *p, const int32_t *high, const int32_t *low, int pairs, uint8_t *out)
{
    __m128i zero = _mm_setzero_si128(), sum_high = zero, sum_low = zero;
    for (int k = 0; k < pairs; k++, p += 6) {
        __m128i v = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)p), zero); /* r g b R G B . . */
        __m128i twos = _mm_unpacklo_epi16(v, _mm_srli_si128(v, 6));               /* r R g G b B . . */
        sum_high = _mm_add_epi32(sum_high, _mm_madd_epi16(twos, _mm_set1_epi32(high[k])));
        sum_low = _mm_add_epi32(sum_low, _mm_madd_epi16(twos, _mm_set1_epi32(low[k])));
    }
    __m128i words = _mm_packs_epi32(joined(sum_high, sum_low), zero);
    uint32_t bytes = (uint32_t)_mm_cvtsi128_si32(_mm_packus_epi16(words, words));
    out[0] = (uint8_t)bytes;
    out[1] = (uint8_t)(bytes >> 8);
    out[2] = (uint8_t)(bytes >> 16);
}
#endif

static void pixel(const uint8_t *p, const int32_t *taps, int count, uint8_t *out)
{
    int32_t r = 0, g = 0, b = 0;
    for (int k = 0; k < count; k++) {
        r += p[3 * k] * taps[k];
        g += p[3 * k + 1] * taps[k];
        b += p[3 * k + 2] * taps[k];
    }
    out[0] = rounded(r);
    out[1] = rounded(g);
    out[2] = rounded(b);
}

/* (rows, from, 3) -> (rows, to, 3). */
static void horizontal(const axis *t, const uint8_t *in, int64_t rows, uint8_t *out)
{
    for (int64_t y = 0; y < rows; y++) {
        const uint8_t *row = in + y * t->from * 3;
        for (int64_t j = 0; j < t->to; j++, out += 3) {
            const uint8_t *p = row + (int64_t)t->first[j] * 3;
#if defined(__SSE2__)
            int pairs = (t->count[j] + 1) / 2;
            if ((rows - y) * t->from - t->first[j] > 2 * pairs) { /* a pixel of the picture follows the pairs */
                int64_t at = j * t->stride / 2;
                pixel_sse2(p, t->high + at, t->low + at, pairs, out);
                continue;
            }
#endif
            pixel(p, t->taps + j * t->stride, t->count[j], out);
        }
    }
}

/* Output row j of `bytes` bytes from input rows that lie `bytes` apart; `in` is the first of them. */
static void blend_rows(const axis *t, int64_t j, const uint8_t *in, int64_t bytes, uint8_t *out)
{
    const int32_t *taps = t->taps + j * t->stride;
    int count = t->count[j];
    int64_t x = 0;
#if defined(__SSE2__)
    const int32_t *high = t->high + j * t->stride / 2, *low = t->low + j * t->stride / 2;
    for (; x + 8 <= bytes; x += 8) {
        __m128i zero = _mm_setzero_si128(), high0 = zero, high1 = zero, low0 = zero, low1 = zero;
        for (int k = 0; k < count; k += 2) {
            const uint8_t *pa = in + k * bytes + x, *pb = k + 1 < count ? pa + bytes : pa;
            __m128i va = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)pa), zero);
            __m128i vb = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)pb), zero);
            __m128i first = _mm_unpacklo_epi16(va, vb), second = _mm_unpackhi_epi16(va, vb);
            __m128i h = _mm_set1_epi32(high[k / 2]), l = _mm_set1_epi32(low[k / 2]);
            high0 = _mm_add_epi32(high0, _mm_madd_epi16(first, h));
            high1 = _mm_add_epi32(high1, _mm_madd_epi16(second, h));
            low0 = _mm_add_epi32(low0, _mm_madd_epi16(first, l));
            low1 = _mm_add_epi32(low1, _mm_madd_epi16(second, l));
        }
        __m128i words = _mm_packs_epi32(joined(high0, low0), joined(high1, low1));
        _mm_storel_epi64((__m128i *)(out + x), _mm_packus_epi16(words, words));
    }
#endif
    for (; x < bytes; x++) {
        int32_t sum = 0;
        for (int k = 0; k < count; k++)
            sum += in[k * bytes + x] * taps[k];
        out[x] = rounded(sum);
    }
}

static vla_status room(uint8_t **buffer, size_t *size, int64_t width, int64_t height, vla_error *err)
{
    size_t wanted = (size_t)width * (size_t)height * 3; /* sides are at most 2^16 */
    if (wanted <= *size)
        return VLA_OK;
    vlai_free(*buffer);
    *size = 0;
    *buffer = vlai_alloc(wanted);
    if (!*buffer)
        return vlai_nomem(err, wanted);
    *size = wanted;
    return VLA_OK;
}

vla_status vlai_resizer_run(vlai_resizer *r, const uint8_t *in, int64_t width, int64_t height, int64_t to_width,
                            int64_t to_height, uint8_t *out, vla_error *err)
{
    if (width <= 0 || height <= 0 || to_width <= 0 || to_height <= 0 || width > MAX_SIDE || height > MAX_SIDE ||
        to_width > MAX_SIDE || to_height > MAX_SIDE)
        return vlai_fail(err, VLA_E_INVALID,
                         "cannot resize %" PRId64 "x%" PRId64 " to %" PRId64 "x%" PRId64 " pixels; sides are 1 to %d", width,
                         height, to_width, to_height, MAX_SIDE);
    const axis *across = NULL, *down = NULL;
    if (to_width != width)
        VLA_TRY(find_axis(r, width, to_width, &across, err));
    if (to_height != height)
        VLA_TRY(find_axis(r, height, to_height, &down, err));
    if (!across && !down) {
        memcpy(out, in, (size_t)width * (size_t)height * 3);
        return VLA_OK;
    }
    if (across) {
        uint8_t *to = out;
        if (down) {
            VLA_TRY(room(&r->between, &r->between_size, to_width, height, err));
            to = r->between;
        }
        horizontal(across, in, height, to);
        in = to;
    }
    if (down)
        for (int64_t y = 0; y < to_height; y++)
            blend_rows(down, y, in + (int64_t)down->first[y] * to_width * 3, to_width * 3, out + y * to_width * 3);
    return VLA_OK;
}

vla_status vlai_resizer_fit(vlai_resizer *r, const uint8_t *in, int64_t width, int64_t height,
                            const vlai_image_size *size, uint8_t *out, vla_error *err)
{
    if (size->width1 == width && size->height1 == height)
        return vlai_resizer_run(r, in, width, height, size->width, size->height, out, err);
    if (size->width1 == size->width && size->height1 == size->height)
        return vlai_resizer_run(r, in, width, height, size->width, size->height, out, err);
    if (size->width1 <= 0 || size->height1 <= 0 || size->width1 > MAX_SIDE || size->height1 > MAX_SIDE)
        return vlai_fail(err, VLA_E_INVALID, "cannot resize to %" PRId64 "x%" PRId64 " pixels", size->width1, size->height1);
    VLA_TRY(room(&r->step, &r->step_size, size->width1, size->height1, err));
    VLA_TRY(vlai_resizer_run(r, in, width, height, size->width1, size->height1, r->step, err));
    return vlai_resizer_run(r, r->step, size->width1, size->height1, size->width, size->height, out, err);
}

vla_status vlai_resizer_create(vlai_resizer **out, vla_error *err)
{
    *out = vlai_calloc(1, sizeof **out);
    return *out ? VLA_OK : vlai_nomem(err, sizeof **out);
}

void vlai_resizer_destroy(vlai_resizer *r)
{
    if (!r)
        return;
    for (int i = 0; i < r->used; i++)
        axis_fini(&r->axes[i]);
    vlai_free(r->between);
    vlai_free(r->step);
    vlai_free(r);
}
