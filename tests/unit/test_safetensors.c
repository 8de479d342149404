/* safetensors: what is written reads back, sets of files, hostile headers, and writes that fail. */
#include "alloc.h"
#include "test.h"

#include "base/io.h"
#include "format/safetensors.h"

#include <math.h>
#include <unistd.h>

static char folder[64]; /* made anew by main */

static const char *in_folder(const char *name)
{
    static char path[2][256];
    static int turn;
    turn ^= 1;
    snprintf(path[turn], sizeof path[turn], "%s/%s", folder, name);
    return path[turn];
}

/* One tensor of each type, at an odd offset for most of them, with values that its type can hold exactly. */
static void every_type_round_trips(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    static const uint8_t bytes[48] = {1, 0, 1, 1, 0, 0, 1, 0};
    static const float wanted_f16[] = {1, -2, 0.5f, 65504, 0x1p-24f, -0x1p-14f};
    static const uint16_t f16[] = {0x3C00, 0xC000, 0x3800, 0x7BFF, 0x0001, 0x8400};
    static const uint16_t bf16[] = {0x3F80, 0xC000, 0x3F00, 0x7F80, 0x0001, 0xFF80};
    static const float wanted_bf16[] = {1, -2, 0.5f, INFINITY, 0x1p-133f, -INFINITY};
    static const float f32[] = {1, -2, 3.25f, 1e-40f, INFINITY, 0};
    static const double f64[] = {1, -2, 3.25, 1e30, 0, 0.5};
    static const int64_t i64[] = {1, -2, INT64_MAX, INT64_MIN, 0, 7};
    static const int32_t i32[] = {1, -2, INT32_MAX, INT32_MIN, 0, 7};
    static const int16_t i16[] = {1, -2, INT16_MAX, INT16_MIN, 0, 7};
    static const int8_t i8[] = {1, -2, 127, -128, 0, 7};
    static const uint16_t u16[] = {1, 2, 65535, 0, 3, 7};
    static const uint32_t u32[] = {1, 2, UINT32_MAX, 0, 3, 7};
    static const uint64_t u64[] = {1, 2, INT64_MAX, 0, 3, 7};
    const struct {
        vla_dtype dtype;
        const void *data;
    } all[] = {
        {VLA_BOOL, bytes}, {VLA_F32, f32}, {VLA_F64, f64}, {VLA_BF16, bf16}, {VLA_F16, f16}, {VLA_I64, i64}, {VLA_I32, i32},
        {VLA_I16, i16},    {VLA_I8, i8},   {VLA_U8, bytes}, {VLA_U16, u16},  {VLA_U32, u32}, {VLA_U64, u64},
    };
    enum { COUNT = sizeof all / sizeof *all };
    assert_int_equal(COUNT, VLA_DTYPE_COUNT - 1);
    vlai_tensor_view out[COUNT + 2];
    for (int i = 0; i < COUNT; i++)
        out[i] = (vlai_tensor_view){.name = vla_dtype_name(all[i].dtype), .dtype = all[i].dtype, .rank = 3, .shape = {1, 3, 2},
                                    .data = all[i].data, .bytes = 6 * vla_dtype_size(all[i].dtype)};
    out[COUNT] = (vlai_tensor_view){.name = "scalar \"\\\n\xC3\xA9", .dtype = VLA_U8, .data = bytes, .bytes = 1};
    out[COUNT + 1] = (vlai_tensor_view){.name = "empty", .dtype = VLA_F32, .rank = 2, .shape = {0, 5}};
    const char *metadata[] = {"format", "pt", "note", "a \"b\"", NULL};
    assert_ok(vlai_safetensors_write(in_folder("all.safetensors"), out, COUNT + 2, metadata, &err), err);

    vlai_safetensors *st;
    assert_ok(vlai_safetensors_open(in_folder("all.safetensors"), &st, &err), err);
    assert_int_equal(vlai_safetensors_count(st), COUNT + 2);
    assert_string_equal(vlai_safetensors_metadata(st, "format"), "pt");
    assert_string_equal(vlai_safetensors_metadata(st, "note"), "a \"b\"");
    assert_null(vlai_safetensors_metadata(st, "other"));
    assert_null(vlai_safetensors_find(st, "other"));
    for (int i = 0; i < COUNT + 2; i++) {
        const vlai_tensor_view *v = vlai_safetensors_find(st, out[i].name);
        assert_non_null(v);
        assert_int_equal(v->dtype, out[i].dtype);
        assert_int_equal(v->rank, out[i].rank);
        assert_int_equal(v->bytes, out[i].bytes);
        if (v->bytes)
            assert_memory_equal(v->data, out[i].data, v->bytes);
        if (i < COUNT)
            assert_string_equal(vlai_safetensors_at(st, (size_t)i)->name, out[i].name); /* file order */
    }
    float values[6];
    int64_t integers[6];
    assert_ok(vlai_tensor_to_float(vlai_safetensors_find(st, "F16"), 0, 6, values, &err), err);
    assert_memory_equal(values, wanted_f16, sizeof values);
    assert_ok(vlai_tensor_to_float(vlai_safetensors_find(st, "BF16"), 0, 6, values, &err), err);
    assert_memory_equal(values, wanted_bf16, sizeof values);
    assert_ok(vlai_tensor_to_float(vlai_safetensors_find(st, "F32"), 1, 5, values, &err), err);
    assert_memory_equal(values, f32 + 1, 5 * sizeof *values);
    assert_ok(vlai_tensor_to_float(vlai_safetensors_find(st, "F64"), 0, 6, values, &err), err);
    assert_true(values[2] == 3.25f && values[3] == 1e30f);
    assert_ok(vlai_tensor_to_float(vlai_safetensors_find(st, "I8"), 0, 6, values, &err), err);
    assert_true(values[1] == -2 && values[3] == -128);
    assert_ok(vlai_tensor_to_float(vlai_safetensors_find(st, "BOOL"), 0, 4, values, &err), err);
    assert_true(values[0] == 1 && values[1] == 0);
    for (int i = VLA_DTYPE_NONE + 1; i < VLA_DTYPE_COUNT; i++) {
        const vlai_tensor_view *v = vlai_safetensors_find(st, vla_dtype_name((vla_dtype)i));
        bool floating = i == VLA_F32 || i == VLA_F64 || i == VLA_BF16 || i == VLA_F16;
        if (floating) {
            assert_fails(vlai_tensor_to_int64(v, 0, 6, integers, &err), VLA_E_DTYPE, err, "wanted integers");
            continue;
        }
        assert_ok(vlai_tensor_to_int64(v, 0, 6, integers, &err), err);
        assert_int_equal(integers[0], 1);
    }
    assert_ok(vlai_tensor_to_int64(vlai_safetensors_find(st, "I64"), 2, 2, integers, &err), err);
    assert_true(integers[0] == INT64_MAX && integers[1] == INT64_MIN);
    assert_fails(vlai_tensor_to_float(vlai_safetensors_find(st, "F32"), 5, 2, values, &err), VLA_E_INVALID, err,
                 "elements 5 to 7 asked for, it has 6");
    assert_fails(vlai_tensor_to_float(vlai_safetensors_find(st, "F32"), -1, 2, values, &err), VLA_E_INVALID, err, "asked for");
    vlai_safetensors_close(st);
}

/* The first NaN or infinity of a range is named with its place in the tensor; in whole blocks, behind them, and at any alignment. */
static void what_is_not_finite_is_named(void **state)
{
    (void)state;
    enum { N = 2500 };
    static const int64_t places[] = {0, 7, 1023, 1024, 2047, 2048, N - 1};
    static const struct {
        vla_dtype dtype;
        uint64_t largest, bits[4]; /* largest finite number; nan, a nan with a sign, inf, -inf */
    } types[] = {
        {VLA_F64, 0x7FEFFFFFFFFFFFFFu, {0x7FF8000000000000u, 0xFFF0000000000001u, 0x7FF0000000000000u, 0xFFF0000000000000u}},
        {VLA_F32, 0x7F7FFFFFu, {0x7FC00000u, 0xFF800001u, 0x7F800000u, 0xFF800000u}},
        {VLA_BF16, 0x7F7Fu, {0x7FC0u, 0xFF81u, 0x7F80u, 0xFF80u}},
        {VLA_F16, 0x7BFFu, {0x7E00u, 0xFC01u, 0x7C00u, 0xFC00u}},
    };
    static const char *const called[] = {"nan", "nan", "inf", "-inf"};
    static char memory[N * 8 + 1];
    for (size_t k = 0; k < sizeof types / sizeof *types; k++) {
        size_t size = vla_dtype_size(types[k].dtype);
        char *data = memory + 1;
        vlai_tensor_view v = {.name = "a.weight", .dtype = types[k].dtype, .rank = 1, .shape = {N}, .elements = N, .data = data,
                              .bytes = N * size, .file = "some/file"};
        for (size_t i = 0; i < N; i++)
            memcpy(data + i * size, &types[k].largest, size); /* the low bytes: little-endian as the format is */
        vla_error err = VLA_ERROR_INIT;
        assert_ok(vlai_tensor_check_finite(&v, 0, N, &err), err);
        for (size_t p = 0; p < sizeof places / sizeof *places; p++)
            for (int b = 0; b < 4; b++) {
                char wanted[128];
                int64_t at = places[p];
                memcpy(data + (size_t)at * size, &types[k].bits[b], size);
                snprintf(wanted, sizeof wanted, "some/file: tensor 'a.weight' is %s at element %lld, wanted a finite number", called[b], (long long)at);
                assert_fails(vlai_tensor_check_finite(&v, 0, N, &err), VLA_E_NONFINITE, err, wanted);
                assert_non_null(strstr(err.hint, "take another file"));
                assert_fails(vlai_tensor_check_finite(&v, at, N - at, &err), VLA_E_NONFINITE, err, wanted);
                assert_ok(vlai_tensor_check_finite(&v, 0, at, &err), err);
                assert_ok(vlai_tensor_check_finite(&v, at + 1, N - at - 1, &err), err);
                memcpy(data + (size_t)at * size, &types[k].largest, size);
            }
        assert_fails(vlai_tensor_check_finite(&v, 1, N, &err), VLA_E_INVALID, err, "asked for");
    }
    memset(memory, 0xFF, sizeof memory);
    vlai_tensor_view whole = {.name = "low", .dtype = VLA_U16, .rank = 1, .shape = {N}, .elements = N, .data = memory, .bytes = 2 * N, .file = "f"};
    vla_error err = VLA_ERROR_INIT;
    assert_ok(vlai_tensor_check_finite(&whole, 0, N, &err), err);
}

static void write_raw(const char *name, const char *header, size_t header_size, uint64_t claimed, const char *data, size_t n)
{
    FILE *f = fopen(in_folder(name), "wb");
    assert_non_null(f);
    for (int i = 0; i < 8; i++)
        fputc((int)(claimed >> (8 * i) & 255), f);
    fwrite(header, 1, header_size, f);
    fwrite(data, 1, n, f);
    fclose(f);
}

static void hostile_headers(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        vla_status status;
        const char *part;
    } cases[] = {
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", VLA_OK, NULL},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}   ", VLA_OK, NULL},
        {"", VLA_E_FORMAT, "not a JSON object"},
        {"[]", VLA_E_FORMAT, "not a JSON object"},
        {" {}", VLA_E_FORMAT, "not a JSON object"},
        {"{\"a\":", VLA_E_FORMAT, "not valid JSON"},
        {"{}", VLA_E_CORRUPT, "8 bytes after the last tensor belong to none"},
        {"{\"a\":3}", VLA_E_CORRUPT, "entry of tensor 'a' is not an object"},
        {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", VLA_E_CORRUPT, "has no dtype string"},
        {"{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[8],\"data_offsets\":[0,8]}}", VLA_E_UNSUPPORTED, "dtype 'F8_E4M3'"},
        {"{\"a\":{\"dtype\":\"?\",\"shape\":[0],\"data_offsets\":[0,0]}}", VLA_E_UNSUPPORTED, "dtype '?'"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", VLA_E_CORRUPT, "has no shape list"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", VLA_E_CORRUPT, "dimension 0 is not a non-neg"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2.0],\"data_offsets\":[0,8]}}", VLA_E_CORRUPT, "dimension 0 is not a non-neg"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,2],\"data_offsets\":[0,8]}}", VLA_E_UNSUPPORTED, "has 9 dim"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,8],\"data_offsets\":[0,8]}}", VLA_E_CORRUPT,
         "product of its shape overflows"},
        {"{\"a\":{\"dtype\":\"F64\",\"shape\":[4611686018427387904],\"data_offsets\":[0,8]}}", VLA_E_CORRUPT,
         "size in bytes overflows"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,8]}}", VLA_E_FORMAT, "not valid JSON"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", VLA_E_CORRUPT, "data_offsets is not a pair"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", VLA_E_CORRUPT, "data_offsets is not a pair"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,9]}}", VLA_E_CORRUPT, "data_offsets is not a pair"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", VLA_E_CORRUPT, "[8, 0] are not a range"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-8,0]}}", VLA_E_CORRUPT, "[-8, 0] are not a range"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}", VLA_E_CORRUPT, "ends at byte 16 of the data"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", VLA_E_CORRUPT, "takes 8 bytes, its shape and"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", VLA_E_CORRUPT, "4 bytes before tensor 'a'"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", VLA_E_CORRUPT, "4 bytes after the last tensor"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
         VLA_E_CORRUPT, "tensors 'a' and 'b' overlap"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
         "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
         VLA_E_FORMAT, "duplicate"},
        {"{\"__metadata__\":[],\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", VLA_E_CORRUPT,
         "__metadata__ is not an object"},
        {"{\"__metadata__\":{\"k\":1},\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", VLA_E_CORRUPT,
         "__metadata__ entry 'k' is not a string"},
    };
    vla_error err = VLA_ERROR_INIT;
    vlai_safetensors *st;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_raw("bad.safetensors", cases[i].header, strlen(cases[i].header), strlen(cases[i].header), "12345678", 8);
        if (cases[i].status == VLA_OK) {
            assert_ok(vlai_safetensors_open(in_folder("bad.safetensors"), &st, &err), err);
            vlai_safetensors_close(st);
            continue;
        }
        assert_fails(vlai_safetensors_open(in_folder("bad.safetensors"), &st, &err), cases[i].status, err, cases[i].part);
        assert_null(st);
        assert_non_null(strstr(err.message, "bad.safetensors"));
    }
    write_raw("bad.safetensors", "{}", 2, 3, "", 0);
    assert_fails(vlai_safetensors_open(in_folder("bad.safetensors"), &st, &err), VLA_E_CORRUPT, err,
                 "claims 3 bytes, the file has only 2");
    write_raw("bad.safetensors", "{}", 2, UINT64_MAX, "", 0);
    assert_fails(vlai_safetensors_open(in_folder("bad.safetensors"), &st, &err), VLA_E_FORMAT, err,
                 "claims 18446744073709551615 bytes, at most 100000000");
    FILE *f = fopen(in_folder("bad.safetensors"), "wb");
    fputs("version", f);
    fclose(f);
    assert_fails(vlai_safetensors_open(in_folder("bad.safetensors"), &st, &err), VLA_E_FORMAT, err, "7 bytes are too few");
    f = fopen(in_folder("bad.safetensors"), "wb");
    fputs("version https://git-lfs.github.com/spec/v1\n", f);
    fclose(f);
    assert_fails(vlai_safetensors_open(in_folder("bad.safetensors"), &st, &err), VLA_E_FORMAT, err, "the header claims 2336927755350992246 bytes");
    assert_non_null(strstr(err.hint, "it begins with the text 'version '"));
    assert_fails(vlai_safetensors_open(in_folder("none.safetensors"), &st, &err), VLA_E_NOT_FOUND, err, "none.safetensors");
    unlink(in_folder("bad.safetensors"));
}

static void write_text(const char *name, const char *text)
{
    FILE *f = fopen(in_folder(name), "wb");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void sets_of_files(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    char set[128], path[256];
    snprintf(set, sizeof set, "%s/set", folder);
    assert_ok(vlai_mkdirs(set, &err), err);
    const float one = 1, two = 2;
    vlai_tensor_view a = {.name = "a", .dtype = VLA_F32, .data = &one, .bytes = 4};
    vlai_tensor_view b = {.name = "b", .dtype = VLA_F32, .data = &two, .bytes = 4};
    vlai_safetensors *st;
    assert_fails(vlai_safetensors_open(set, &st, &err), VLA_E_NOT_FOUND, err, "no *.safetensors file in this folder");
    assert_ok(vlai_safetensors_write(in_folder("set/x-1.safetensors"), &a, 1, NULL, &err), err);
    assert_ok(vlai_safetensors_write(in_folder("set/x-2.safetensors"), &b, 1, NULL, &err), err);

    /* without an index: all files, by name */
    assert_ok(vlai_safetensors_open(set, &st, &err), err);
    assert_int_equal(vlai_safetensors_count(st), 2);
    assert_string_equal(vlai_safetensors_at(st, 1)->name, "b");
    vlai_safetensors_close(st);

    static const struct {
        const char *index;
        vla_status status;
        const char *part;
    } cases[] = {
        {"{\"weight_map\":{\"a\":\"x-1.safetensors\",\"b\":\"x-2.safetensors\"}}", VLA_OK, NULL},
        {"{\"weight_map\":{\"a\":\"x-2.safetensors\",\"b\":\"x-2.safetensors\"}}", VLA_E_CORRUPT,
         "tensor 'a' should be in 'x-2.safetensors' and is not there"},
        {"{\"weight_map\":{\"c\":\"x-2.safetensors\"}}", VLA_E_CORRUPT, "tensor 'c' should be in"},
        {"{\"weight_map\":{\"a\":\"x-3.safetensors\"}}", VLA_E_NOT_FOUND, "x-3.safetensors"},
        {"{\"weight_map\":{\"a\":\"../all.safetensors\"}}", VLA_E_CORRUPT, "not the name of a file beside it"},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", VLA_E_CORRUPT, "not the name of a file beside it"},
        {"{\"weight_map\":{\"a\":\"\"}}", VLA_E_CORRUPT, "not the name of a file beside it"},
        {"{\"weight_map\":{\"a\":7}}", VLA_E_CORRUPT, "file of tensor 'a' is not a string"},
        {"{\"weight_map\":[]}", VLA_E_FORMAT, "'weight_map' is array"},
        {"{}", VLA_E_FORMAT, "'weight_map' is missing"},
    };
    snprintf(path, sizeof path, "%s", in_folder("set/model.safetensors.index.json"));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_text("set/model.safetensors.index.json", cases[i].index);
        for (int named = 0; named < 2; named++) { /* the folder, and the index itself */
            const char *open = named ? path : set;
            if (cases[i].status != VLA_OK) {
                assert_fails(vlai_safetensors_open(open, &st, &err), cases[i].status, err, cases[i].part);
                continue;
            }
            assert_ok(vlai_safetensors_open(open, &st, &err), err);
            float value;
            assert_ok(vlai_tensor_to_float(vlai_safetensors_find(st, "b"), 0, 1, &value, &err), err);
            assert_true(value == 2);
            vlai_safetensors_close(st);
        }
    }
    unlink(path);
    assert_ok(vlai_safetensors_write(in_folder("set/x-3.safetensors"), &a, 1, NULL, &err), err);
    assert_fails(vlai_safetensors_open(set, &st, &err), VLA_E_CORRUPT, err, "tensor 'a' stands already in");
    /* model.safetensors goes before everything else */
    assert_ok(vlai_safetensors_write(in_folder("set/model.safetensors"), &b, 1, NULL, &err), err);
    assert_ok(vlai_safetensors_open(set, &st, &err), err);
    assert_int_equal(vlai_safetensors_count(st), 1);
    vlai_safetensors_close(st);
}

static void wrong_tensors_are_not_written(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    const float values[4] = {0};
    const vlai_tensor_view good = {.name = "a", .dtype = VLA_F32, .rank = 1, .shape = {4}, .data = values, .bytes = 16};
    vlai_tensor_view two[2] = {good, good};
    const char *path = in_folder("never.safetensors");
    assert_fails(vlai_safetensors_write(path, two, 2, NULL, &err), VLA_E_INVALID, err, "'a' is given twice");
    two[0].bytes = 12;
    assert_fails(vlai_safetensors_write(path, two, 1, NULL, &err), VLA_E_SHAPE, err, "brings 12 bytes");
    two[0] = good;
    two[0].shape[0] = -4;
    assert_fails(vlai_safetensors_write(path, two, 1, NULL, &err), VLA_E_SHAPE, err, "dimension 0 (-4)");
    two[0] = good;
    two[0].name = "__metadata__";
    assert_fails(vlai_safetensors_write(path, two, 1, NULL, &err), VLA_E_INVALID, err, "cannot be the name");
    two[0] = good;
    two[0].rank = 9;
    assert_fails(vlai_safetensors_write(path, two, 1, NULL, &err), VLA_E_INVALID, err, "rank 9");
    assert_false(vlai_is_file(path));
}

/* Whichever operation fails, the folder holds either nothing or the whole file, and no temporary one. */
static void failed_writes_leave_nothing(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    char dir[128], path[256];
    snprintf(dir, sizeof dir, "%s/faults", folder);
    snprintf(path, sizeof path, "%s/w.safetensors", dir);
    assert_ok(vlai_mkdirs(dir, &err), err);
    size_t size = (size_t)3 << 20; /* larger than the writer's buffer, so that several writes happen */
    void *data = calloc(1, size);
    vlai_tensor_view t = {.name = "a", .dtype = VLA_U8, .rank = 1, .shape = {(int64_t)size}, .data = data, .bytes = size};
    int failures = 0;
    for (uint64_t n = 1;; n++) {
        vlai_io_fail_nth(n);
        vla_status status = vlai_safetensors_write(path, &t, 1, NULL, &err);
        vlai_io_fail_nth(0);
        char **names;
        size_t count;
        assert_ok(vlai_list_dir(dir, &names, &count, &err), err);
        if (count) {
            assert_int_equal(count, 1);
            assert_string_equal(names[0], "w.safetensors");
            vlai_safetensors *st;
            assert_ok(vlai_safetensors_open(path, &st, &err), err);
            vlai_safetensors_close(st);
        }
        vlai_names_free(names, count);
        if (status == VLA_OK)
            break;
        assert_int_equal(status, VLA_E_IO);
        failures++;
        unlink(path);
    }
    assert_true(failures >= 5); /* open, writes, fsync, rename, directory */
    free(data);
}

/* Loading a set and writing a file: no allocation may be lost, and none may be missed. */
static void failing_allocations(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    char set[128];
    snprintf(set, sizeof set, "%s/memory", folder);
    assert_ok(vlai_mkdirs(set, &err), err);
    const float one = 1;
    static const char *const metadata[] = {"format", "pt", NULL};
    vlai_tensor_view a = {.name = "a", .dtype = VLA_F32, .data = &one, .bytes = 4};
    vlai_tensor_view b = {.name = "b", .dtype = VLA_F32, .data = &one, .bytes = 4};
    assert_ok(vlai_safetensors_write(in_folder("memory/y.safetensors"), &b, 1, NULL, &err), err);
    uint64_t n = 0;
    for (vla_status status = VLA_E_NOMEM; status != VLA_OK;) {
        vlai_safetensors *st = NULL;
        failing_allocation(++n);
        status = vlai_safetensors_write(in_folder("memory/x.safetensors"), &a, 1, metadata, &err);
        if (status == VLA_OK)
            status = vlai_safetensors_open(set, &st, &err);
        if (status != VLA_OK && status != VLA_E_NOMEM)
            fail_msg("allocation %d: %s", (int)n, err.message);
        vlai_safetensors_close(st);
    }
    failing_allocation(0);
    assert_true(n > 10);
}

static void recorded_shards(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    char path[2048];
    snprintf(path, sizeof path, "%s/wallx-unfused/model.safetensors.index.json", golden_dir());
    if (!vlai_is_file(path))
        skip();
    vlai_safetensors *st;
    assert_ok(vlai_safetensors_open(path, &st, &err), err);
    assert_string_equal(vlai_safetensors_metadata(st, "format"), "pt");
    const vlai_tensor_view *w = vlai_safetensors_find(st, "visual.patch_embed.proj.weight");
    assert_non_null(w);
    assert_true(w->rank == 5 && w->shape[0] == 32 && w->shape[4] == 10);
    assert_non_null(strstr(w->file, "model-00002-of-00002.safetensors"));
    assert_non_null(vlai_safetensors_find(st, "model.layers.2.self_attn.k_proj_experts.1.bias"));
    vlai_safetensors_close(st);
}

int main(void)
{
    vla_error err = VLA_ERROR_INIT;
    snprintf(folder, sizeof folder, "test_safetensors.%ld", (long)getpid());
    if (vlai_mkdirs(folder, &err) != VLA_OK)
        return fprintf(stderr, "%s\n", err.message), 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_type_round_trips), cmocka_unit_test(hostile_headers),
        cmocka_unit_test(what_is_not_finite_is_named),
        cmocka_unit_test(sets_of_files),          cmocka_unit_test(wrong_tensors_are_not_written),
        cmocka_unit_test(failed_writes_leave_nothing), cmocka_unit_test(failing_allocations),
        cmocka_unit_test(recorded_shards),
    };
    int failed = cmocka_run_group_tests_name("safetensors", tests, NULL, NULL);
    vlai_remove_tree(folder, &err);
    return failed;
}
