#include "text/fast_actions.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <utf8proc.h>
#include <xxhash.h>

enum { PATH = 4096, LAST_POINT = 0x10FFFF };

struct vlai_fast {
    vlai_tokenizer *tok;
    int64_t vocabulary;
    double scale, min_token;
    uint64_t digest;
};

/* ---- the folder ---- */

static vla_status read_settings(const char *path, vlai_fast *f, vla_error *err)
{
    static const char hint[] = "give the folder of a FAST processor: processor_config.json and tokenizer.json";
    json_t *config;
    const char *class;
    vla_status status = vlai_json_load(path, &config, err);
    if (status != VLA_OK)
        return vlai_hint(err, status, hint);
    /* Defaults are those of the processor's constructor. */
    VLA_TRY_GOTO(vlai_json_string(config, "processor_class", "UniversalActionProcessor", path, &class, err), done);
    if (strcmp(class, "UniversalActionProcessor")) {
        status = vlai_fail_hint(err, VLA_E_UNSUPPORTED, hint, "%s: processor_class '%s', wanted UniversalActionProcessor", path, class);
        goto done;
    }
    VLA_TRY_GOTO(vlai_json_real(config, "scale", 10, path, &f->scale, err), done);
    VLA_TRY_GOTO(vlai_json_real(config, "min_token", 0, path, &f->min_token, err), done);
    VLA_TRY_GOTO(vlai_json_int(config, "vocab_size", 1024, path, &f->vocabulary, err), done);
    if (!(f->scale > 0 && f->scale <= 1e6) || !(fabs(f->min_token) <= LAST_POINT) || f->min_token != floor(f->min_token) ||
        f->vocabulary < 1 || f->vocabulary > 1 << 20)
        status = vlai_fail(err, VLA_E_INVALID, "%s: scale %g (above 0, at most 1e6), min_token %g (an integer within %d), vocab_size %" PRId64
                           " (1 to %d)", path, f->scale, f->min_token, LAST_POINT, f->vocabulary, 1 << 20);
done:
    json_decref(config);
    return status;
}

/* The vocabulary begins with all characters from U+0000 on. An object's key cannot hold that one here, and no text needs it, since a
 * byte-level vocabulary spells byte 0 otherwise: its entry only keeps its id, under the name U+FFFF. */
static void rename_nul(char *json, size_t size)
{
    for (size_t i = 0; i + 6 <= size; i++) {
        if (json[i] != '\\')
            continue;
        if (!memcmp(json + i, "\\u0000", 6))
            memcpy(json + i + 2, "ffff", 4);
        i++; /* what follows a backslash belongs to it */
    }
}

static vla_status read_tokenizer(const char *path, vlai_fast *f, vla_error *err)
{
    char *json;
    size_t size;
    VLA_TRY(vlai_read_file(path, (size_t)64 << 20, &json, &size, err));
    f->digest = XXH3_64bits(json, size);
    rename_nul(json, size);
    vla_status status = vlai_tokenizer_parse(json, size, NULL, 0, path, &f->tok, err);
    vlai_free(json);
    VLA_TRY(status);
    if (vlai_tokenizer_size(f->tok) > f->vocabulary)
        return vlai_fail_hint(err, VLA_E_INVALID, "both files must come from one processor",
                              "%s has %" PRId64 " tokens, its processor_config.json says vocab_size %" PRId64, path,
                              vlai_tokenizer_size(f->tok), f->vocabulary);
    return VLA_OK;
}

vla_status vlai_fast_open_files(const char *config, const char *tokenizer, vlai_fast **out, vla_error *err)
{
    *out = NULL;
    vlai_fast *f = vlai_calloc(1, sizeof *f);
    if (!f)
        return vlai_nomem(err, sizeof *f);
    vla_status status = read_settings(config, f, err);
    if (status == VLA_OK)
        status = read_tokenizer(tokenizer, f, err);
    if (status != VLA_OK) {
        vlai_fast_close(f);
        return status;
    }
    *out = f;
    return VLA_OK;
}

vla_status vlai_fast_find(const char *dir, char config[PATH], char tokenizer[PATH], vla_error *err)
{
    char inner[PATH];
    if (!vlai_path_join(config, PATH, dir, "processor_config.json") || !vlai_path_join(tokenizer, PATH, dir, "tokenizer.json") ||
        !vlai_path_join(inner, PATH, dir, "bpe_tokenizer/tokenizer.json"))
        return vlai_fail(err, VLA_E_INVALID, "%s: path too long", dir);
    if (!vlai_is_file(tokenizer) && vlai_is_file(inner)) /* as transformers 5 saves a processor */
        memcpy(tokenizer, inner, sizeof inner);
    return VLA_OK;
}

vla_status vlai_fast_open(const char *dir, vlai_fast **out, vla_error *err)
{
    char config[PATH], tokenizer[PATH];
    *out = NULL;
    VLA_TRY(vlai_fast_find(dir, config, tokenizer, err));
    return vlai_fast_open_files(config, tokenizer, out, err);
}

void vlai_fast_close(vlai_fast *f)
{
    if (!f)
        return;
    vlai_tokenizer_close(f->tok);
    vlai_free(f);
}

int64_t vlai_fast_vocabulary(const vlai_fast *f)
{
    return f->vocabulary;
}

json_t *vlai_fast_to_json(const vlai_fast *f)
{
    char digest[17];
    snprintf(digest, sizeof digest, "%016" PRIx64, f->digest);
    return json_pack("{s:s, s:I, s:f, s:f, s:s}", "type", "fast", "vocab_size", (json_int_t)f->vocabulary, "scale", f->scale, "min_token",
                     f->min_token, "tokenizer", digest);
}

/* ---- the transform ---- */

/* cos(pi k / (2 n)), k = 0 .. 4n-1: all angles of a DCT of n values. NULL: out of memory. */
static double *cosines(int64_t n)
{
    double *c = vlai_array((size_t)(4 * n), sizeof *c);
    for (int64_t k = 0; c && k < 4 * n; k++)
        c[k] = cos(3.14159265358979323846 * (double)k / (double)(2 * n));
    return c;
}

/* Orthonormal: sqrt(2/n), and of the mean's row sqrt(1/n). */
static double norm_of(int64_t k, int64_t n)
{
    return sqrt((k ? 2.0 : 1.0) / (double)n);
}

vla_status vlai_fast_encode(const vlai_fast *f, const float *chunk, const float *mask, int64_t horizon, int64_t width, vlai_ids *out,
                            vla_error *err)
{
    vlai_text text = {0};
    double *c = cosines(horizon);
    if (!c)
        return vlai_nomem(err, (size_t)horizon * 4 * sizeof *c);
    vla_status status = VLA_OK;
    for (int64_t k = 0; k < horizon && status == VLA_OK; k++)
        for (int64_t d = 0; d < width && status == VLA_OK; d++) {
            if (mask[d] == 0)
                continue;
            double sum = 0;
            for (int64_t t = 0; t < horizon; t++)
                sum += (double)chunk[t * width + d] * c[(2 * t + 1) * k % (4 * horizon)];
            float scaled = (float)(norm_of(k, horizon) * sum) * (float)f->scale;
            double code = rint((double)scaled) - f->min_token; /* half to even */
            code = code < 0 ? 0 : code;
            utf8proc_uint8_t bytes[4];
            utf8proc_int32_t point = code <= LAST_POINT ? (utf8proc_int32_t)code : -1;
            if (!utf8proc_codepoint_valid(point)) {
                status = vlai_fail(err, VLA_E_INVALID, "%s: coefficient %" PRId64 " of action column %" PRId64 " becomes character %.0f, which is none",
                                   vlai_tokenizer_name(f->tok), k, d, code);
                break;
            }
            vlai_text_put(&text, (const char *)bytes, (size_t)utf8proc_encode_char(point, bytes));
        }
    vlai_free(c);
    if (status == VLA_OK)
        status = vlai_text_status(&text, err);
    if (status == VLA_OK && !text.size)
        status = vlai_fail(err, VLA_E_INVALID, "no action column has a value in the chunk's first row: there is nothing to write as tokens");
    if (status == VLA_OK)
        status = vlai_tokenizer_encode(f->tok, text.data, text.size, out, err);
    vlai_text_fini(&text);
    return status;
}

/* The characters of a text less min_token; their number, or -1 when it is no text or has more than `most`. */
static int64_t read_codes(const vlai_fast *f, const vlai_text *text, int64_t most, double *codes)
{
    int64_t n = 0;
    for (size_t at = 0; at < text->size; n++) {
        utf8proc_int32_t point;
        utf8proc_ssize_t size = utf8proc_iterate((const utf8proc_uint8_t *)text->data + at, (utf8proc_ssize_t)(text->size - at), &point);
        if (size <= 0 || n == most)
            return -1;
        codes[n] = (double)point + f->min_token;
        at += (size_t)size;
    }
    return n;
}

vla_status vlai_fast_decode(const vlai_fast *f, const int32_t *ids, size_t count, int64_t horizon, int64_t dims, float *chunk, bool *whole,
                            vla_error *err)
{
    vlai_text text = {0};
    double *c = cosines(horizon), *codes = vlai_array((size_t)(horizon * dims), sizeof *codes);
    vla_status status = c && codes ? VLA_OK : vlai_nomem(err, (size_t)(horizon * (dims + 4)) * sizeof *c);
    bool known = true; /* processor_config.json may count more tokens than there are */
    for (size_t i = 0; i < count; i++)
        known &= ids[i] >= 0 && ids[i] < vlai_tokenizer_size(f->tok);
    if (status == VLA_OK && known)
        status = vlai_tokenizer_decode(f->tok, ids, count, false, &text, err);
    if (status == VLA_OK) {
        *whole = known && read_codes(f, &text, horizon * dims, codes) == horizon * dims;
        for (int64_t t = 0; t < horizon; t++)
            for (int64_t d = 0; d < dims; d++) {
                double sum = 0;
                for (int64_t k = 0; k < horizon && *whole; k++)
                    sum += norm_of(k, horizon) * codes[k * dims + d] / f->scale * c[(2 * t + 1) * k % (4 * horizon)];
                chunk[t * dims + d] = (float)sum;
            }
    }
    vlai_free(c);
    vlai_free(codes);
    vlai_text_fini(&text);
    return status;
}
