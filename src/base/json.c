#include "base/json.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"
#include "base/text.h"

#include <math.h>
#include <string.h>

static const char *type_name(json_type type)
{
    static const char *const names[] = {"object", "array", "string", "integer", "real", "true", "false", "null"};
    return (unsigned)type < 8 ? names[type] : "nothing";
}

json_t *vlai_json_text(const char *text)
{
    vlai_text clean = {0};
    for (size_t left = strlen(text), n; left; text += n + 1, left -= n + 1) {
        n = vlai_utf8_check(text, left);
        vlai_text_put(&clean, text, n);
        if (n == left)
            break;
        vlai_text_puts(&clean, "\xef\xbf\xbd");
    }
    json_t *value = clean.failed ? NULL : json_stringn(clean.data ? clean.data : "", clean.size);
    vlai_text_fini(&clean);
    return value;
}

vla_status vlai_json_parse(const char *data, size_t size, const char *name, json_t **out, vla_error *err)
{
    json_error_t e;
    *out = NULL;
    if (size >= 3 && !memcmp(data, "\xef\xbb\xbf", 3)) /* RFC 8259 forbids writing it, and Python's json refuses it too */
        return vlai_fail_hint(err, VLA_E_FORMAT, "save the file without it: sed -i '1s/^\\xef\\xbb\\xbf//' FILE",
                              "%s:1:1: not valid JSON: a byte-order mark (EF BB BF) stands before the text", name);
    *out = json_loadb(data, size, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, &e);
    if (*out)
        return VLA_OK;
    if (json_error_code(&e) == json_error_out_of_memory)
        return vlai_fail(err, VLA_E_NOMEM, "%s: out of host memory while reading JSON", name);
    return vlai_fail(err, VLA_E_FORMAT, "%s:%d:%d: not valid JSON: %s", name, e.line, e.column, e.text);
}

vla_status vlai_json_load(const char *path, json_t **out, vla_error *err)
{
    *out = NULL;
    char *data;
    size_t size;
    VLA_TRY(vlai_read_file(path, 0, &data, &size, err));
    vla_status status = vlai_json_parse(data, size, path, out, err);
    vlai_free(data);
    return status;
}

vla_status vlai_json_save(const json_t *value, const char *path, vla_error *err)
{
    char *text = json_dumps(value, JSON_INDENT(2) | JSON_ENCODE_ANY | JSON_REAL_PRECISION(17));
    if (!text)
        return vlai_fail(err, VLA_E_NOMEM, "%s: out of host memory while writing JSON", path);
    size_t n = strlen(text);
    text[n] = '\n'; /* the terminating zero becomes the final newline; the length is passed explicitly */
    vla_status status = vlai_write_file_atomic(path, text, n + 1, err);
    json_free_t release;
    json_get_alloc_funcs(NULL, &release);
    release(text);
    return status;
}

static vla_status wrong_type(const json_t *found, const char *key, const char *wanted, const char *where,
                             vla_error *err)
{
    return vlai_fail(err, VLA_E_FORMAT, "%s: key '%s' is %s, wanted %s", where, key,
                     found ? type_name(json_typeof(found)) : "missing", wanted);
}

vla_status vlai_json_int(const json_t *object, const char *key, int64_t fallback, const char *where, int64_t *out,
                         vla_error *err)
{
    const json_t *v = json_object_get(object, key);
    *out = fallback;
    if (!v || json_is_null(v))
        return VLA_OK;
    if (json_is_integer(v)) {
        *out = json_integer_value(v);
        return VLA_OK;
    }
    if (json_is_real(v)) {
        double d = json_real_value(v);
        if (d == floor(d) && fabs(d) < 9e15) {
            *out = (int64_t)d;
            return VLA_OK;
        }
    }
    return wrong_type(v, key, "an integer", where, err);
}

vla_status vlai_json_need_int(const json_t *object, const char *key, const char *where, int64_t *out, vla_error *err)
{
    const json_t *v = json_object_get(object, key);
    if (!v || json_is_null(v))
        return wrong_type(v, key, "an integer", where, err);
    return vlai_json_int(object, key, 0, where, out, err);
}

vla_status vlai_json_real(const json_t *object, const char *key, double fallback, const char *where, double *out,
                          vla_error *err)
{
    const json_t *v = json_object_get(object, key);
    *out = fallback;
    if (!v || json_is_null(v))
        return VLA_OK;
    if (!json_is_number(v))
        return wrong_type(v, key, "a number", where, err);
    *out = json_number_value(v);
    return VLA_OK;
}

vla_status vlai_json_bool(const json_t *object, const char *key, bool fallback, const char *where, bool *out,
                          vla_error *err)
{
    const json_t *v = json_object_get(object, key);
    *out = fallback;
    if (!v || json_is_null(v))
        return VLA_OK;
    if (!json_is_boolean(v))
        return wrong_type(v, key, "true or false", where, err);
    *out = json_is_true(v);
    return VLA_OK;
}

vla_status vlai_json_string(const json_t *object, const char *key, const char *fallback, const char *where,
                            const char **out, vla_error *err)
{
    const json_t *v = json_object_get(object, key);
    *out = fallback;
    if (!v || json_is_null(v))
        return VLA_OK;
    if (!json_is_string(v))
        return wrong_type(v, key, "a string", where, err);
    *out = json_string_value(v);
    return VLA_OK;
}

vla_status vlai_json_need(const json_t *object, const char *key, json_type type, const char *where, json_t **out,
                          vla_error *err)
{
    *out = json_object_get(object, key);
    if (*out && json_typeof(*out) == type)
        return VLA_OK;
    return wrong_type(*out, key, type_name(type), where, err);
}
