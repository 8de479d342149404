/* Files of torch.save: recorded ones, and hostile ones built here byte by byte. */
#include "alloc.h"
#include "test.h"

#include "base/io.h"
#include "format/pickle.h"
#include "format/zip.h"

/* ---- a small archive builder ---- */

typedef struct bytes {
    uint8_t data[1 << 14];
    size_t size;
} bytes;

static void put(bytes *b, const void *data, size_t n)
{
    assert_true(b->size + n <= sizeof b->data);
    memcpy(b->data + b->size, data, n);
    b->size += n;
}

static void put_number(bytes *b, uint64_t value, int n)
{
    for (int i = 0; i < n; i++)
        put(b, &(uint8_t){i < 8 ? (uint8_t)(value >> (8 * i)) : 0}, 1);
}

typedef struct entry {
    const char *name;
    const void *data;
    size_t size;
    unsigned method;
} entry;

static void build_zip(bytes *out, const entry *entries, size_t count)
{
    bytes directory = {.size = 0};
    out->size = 0;
    for (size_t i = 0; i < count; i++) {
        size_t local = out->size, n = strlen(entries[i].name);
        put(out, "PK\3\4", 4);
        put_number(out, 20, 2);
        put_number(out, 0, 2);
        put_number(out, entries[i].method, 2);
        put_number(out, 0, 8);
        put_number(out, entries[i].size, 4);
        put_number(out, entries[i].size, 4);
        put_number(out, n, 2);
        put_number(out, 3, 2); /* padding, as torch aligns its storages */
        put(out, entries[i].name, n);
        put(out, "pad", 3);
        put(out, entries[i].data, entries[i].size);
        put(&directory, "PK\1\2", 4);
        put_number(&directory, 0, 6);
        put_number(&directory, entries[i].method, 2);
        put_number(&directory, 0, 8);
        put_number(&directory, entries[i].size, 4);
        put_number(&directory, entries[i].size, 4);
        put_number(&directory, n, 2);
        put_number(&directory, 0, 12);
        put_number(&directory, local, 4);
        put(&directory, entries[i].name, n);
    }
    size_t at = out->size;
    put(out, directory.data, directory.size);
    put(out, "PK\5\6", 4);
    put_number(out, 0, 4);
    put_number(out, count, 2);
    put_number(out, count, 2);
    put_number(out, directory.size, 4);
    put_number(out, at, 4);
    put_number(out, 0, 2);
}

/* Opcodes of one tensor 'w' with the given numbers; `storage` names its type. */
typedef struct tensor {
    const char *storage, *key;
    int elements, offset, rows, columns, row_stride, column_stride;
} tensor;

static const tensor plain = {"FloatStorage", "0", 6, 0, 2, 3, 3, 1};

static void put_text(bytes *b, const char *text)
{
    put(b, "X", 1);
    put_number(b, strlen(text), 4);
    put(b, text, strlen(text));
}

static void put_int(bytes *b, int value)
{
    put(b, "J", 1);
    put_number(b, (uint32_t)value, 4);
}

static void put_tensor(bytes *b, const tensor *t)
{
    put(b, "ctorch._utils\n_rebuild_tensor_v2\n((", 35);
    put_text(b, "storage");
    put(b, "ctorch\n", 7);
    put(b, t->storage, strlen(t->storage));
    put(b, "\n", 1);
    put_text(b, t->key);
    put_text(b, "cpu");
    put_int(b, t->elements);
    put(b, "tQ", 2);
    put_int(b, t->offset);
    put_int(b, t->rows);
    put_int(b, t->columns);
    put(b, "\x86", 1);
    put_int(b, t->row_stride);
    put_int(b, t->column_stride);
    put(b, "\x86\x89" "ccollections\nOrderedDict\n)RtR", 31);
}

static void build_pickle(bytes *b, const tensor *t)
{
    b->size = 0;
    put(b, "\x80\2}(", 4);
    put_text(b, "w");
    put_tensor(b, t);
    put(b, "u.", 2);
}

static int seen;
static char last_name[256];
static float last_value;

static vla_status note(void *context, const vlai_tensor_view *view, vla_error *err)
{
    (void)context;
    seen++;
    snprintf(last_name, sizeof last_name, "%s", view->name);
    if (view->elements)
        return vlai_tensor_to_float(view, view->elements - 1, 1, &last_value, err);
    return VLA_OK;
}

static const float storage[6] = {1, 2, 3, 4, 5, 6};

static vla_status read_pickle(const bytes *pickle, unsigned method, vla_error *err)
{
    static bytes zip;
    const entry entries[] = {{"a/data.pkl", pickle->data, pickle->size, 0},
                             {"a/byteorder", "little", 6, 0},
                             {"a/data/0", storage, sizeof storage, method}};
    build_zip(&zip, entries, 3);
    seen = 0;
    return vlai_pickle_read(zip.data, zip.size, "t.pth", note, NULL, err);
}

static void built_file_reads(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    static bytes b;
    build_pickle(&b, &plain);
    assert_ok(read_pickle(&b, 0, &err), err);
    assert_int_equal(seen, 1);
    assert_string_equal(last_name, "w");
    assert_true(last_value == 6);
    const tensor part = {"FloatStorage", "0", 6, 2, 2, 1, 1, 7}; /* a piece; strides of size-1 dimensions mean nothing */
    build_pickle(&b, &part);
    assert_ok(read_pickle(&b, 0, &err), err);
    assert_true(last_value == 4);
    const tensor empty = {"HalfStorage", "0", 0, 0, 3, 0, 1, 1};
    build_pickle(&b, &empty);
    assert_ok(read_pickle(&b, 0, &err), err);
    /* {"epoch": 3, "model_state_dict": {"net": {"w": ...}}}, by protocol 4 with a frame, a memo and an unknown name */
    b.size = 0;
    put(&b, "\x80\4\x95\0\0\0\0\0\0\0\0}\x94(", 14);
    put(&b, "\x8C\5epochK\3", 9);
    put(&b, "\x8C\5other\x8C\5numpy\x8C\5thing\x93)R", 24);
    put_text(&b, "model_state_dict");
    put(&b, "}", 1);
    put_text(&b, "net");
    put(&b, "}", 1);
    put_text(&b, "w");
    put_tensor(&b, &plain);
    put(&b, "sNbsu.", 6); /* SETITEM, BUILD with None, SETITEM, SETITEMS */
    assert_ok(read_pickle(&b, 0, &err), err);
    assert_string_equal(last_name, "net.w");
}

static void refused(const tensor *t, vla_status status, const char *part)
{
    vla_error err = VLA_ERROR_INIT;
    static bytes b;
    build_pickle(&b, t);
    assert_fails(read_pickle(&b, 0, &err), status, err, part);
    assert_non_null(strstr(err.message, "t.pth"));
}

static void refused_raw(const char *pickle, size_t n, vla_status status, const char *part)
{
    vla_error err = VLA_ERROR_INIT;
    static bytes b;
    b.size = 0;
    put(&b, pickle, n);
    assert_fails(read_pickle(&b, 0, &err), status, err, part);
}
#define REFUSED(text, status, part) refused_raw(text, sizeof text - 1, status, part)

static void hostile_pickles(void **state)
{
    (void)state;
    const vla_status bad = VLA_E_CORRUPT, no = VLA_E_UNSUPPORTED;
    tensor t = plain;
    t.elements = 7;
    refused(&t, bad, "claims more than its entry holds");
    t = plain;
    t.elements = -1;
    refused(&t, bad, "claims more than its entry holds");
    t = plain;
    t.offset = 1;
    refused(&t, bad, "reaches beyond its storage");
    t.offset = -1;
    refused(&t, bad, "reaches beyond its storage");
    t = plain;
    t.row_stride = 1;
    t.column_stride = 2;
    refused(&t, no, "not stored row-major");
    t = plain;
    t.rows = -2;
    refused(&t, bad, "a dimension is not a size");
    t = plain;
    t.key = "9";
    refused(&t, bad, "no entry in the archive");
    t.key = "../data/0";
    refused(&t, bad, "no entry in the archive");
    t = plain;
    t.storage = "ComplexFloatStorage";
    refused(&t, no, "element type that is not read");
    REFUSED("", bad, "cut short");
    REFUSED("\x80\2}", bad, "cut short");
    REFUSED("\x80\2X\xff\xff\xff\xff.", bad, "cut short");
    REFUSED("\x80\2}.", VLA_E_NOT_FOUND, "no tensor under a name");
    REFUSED("\x80\2].", bad, "does not hold a map");
    REFUSED("\x80\2.", bad, "a value is missing on the stack");
    REFUSED("\x80\2u.", bad, "a mark is missing");
    REFUSED("\x80\2(u.", bad, "do not pair up");
    REFUSED("\x80\2}(Nu.", bad, "do not pair up");
    REFUSED("\x80\2K\1(NNu.", bad, "not a map");
    REFUSED("\x80\2}N(e.", bad, "not a list");
    REFUSED("\x80\2Nq\5.", bad, "memo number is out of order");
    REFUSED("\x80\2h\0.", bad, "never set");
    REFUSED("\x80\2cos\nsystem\nX\2\0\0\0ls\x85R.", bad, "does not hold a map"); /* kept as an unknown value */
    REFUSED("\x80\2cos\nsystem", bad, "a name without end");
    REFUSED("\x80\2}R.", bad, "a value is missing");
    REFUSED("\x80\2)Q.", bad, "not the reference to a storage");
    REFUSED("\x80\2" "ctorch._utils\n_rebuild_tensor_v2\n)R.", bad, "not described as expected");
    REFUSED("\x80\2i", no, "opcode 0x69 is not read here");
    REFUSED("\x80\2\x8A\x09", bad, "more than 8 bytes");
    REFUSED("\x80\2}q\0(X\1\0\0\0ah\0u.", VLA_E_NOT_FOUND, "no tensor"); /* a map that contains itself */
    /* 2^40 paths through maps that contain the next one twice */
    static bytes b;
    b.size = 0;
    put(&b, "\x80\2", 2);
    for (int i = 0; i < 40; i++) {
        put(&b, "}", 1);
        put(&b, "q", 1);
        put_number(&b, (uint64_t)i, 1);
        put(&b, "(", 1);
        for (int j = 0; i && j < 30; j++) {
            put_text(&b, "k");
            put(&b, "h", 1);
            put_number(&b, (uint64_t)i - 1, 1);
        }
        put(&b, i == 39 ? "u." : "u0", i == 39 ? 2 : 1);
    }
    vla_error err = VLA_ERROR_INIT;
    assert_fails(read_pickle(&b, 0, &err), bad, err, "more than a million entries");
    build_pickle(&b, &plain);
    assert_fails(read_pickle(&b, 8, &err), no, err, "compressed");
}

static void hostile_archives(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    static bytes pickle, whole;
    build_pickle(&pickle, &plain);
    const entry entries[] = {{"a/data.pkl", pickle.data, pickle.size, 0}, {"a/data/0", storage, sizeof storage, 0}};
    build_zip(&whole, entries, 2);
    /* cut anywhere, or with any byte changed: never more than an error */
    for (size_t n = 0; n < whole.size; n++) {
        static bytes part;
        part = whole;
        assert_fails(vlai_pickle_read(part.data, n, "t.pth", note, NULL, &err), err.status, err, "t.pth");
        for (int bit = 0; bit < 8; bit++) {
            part = whole;
            part.data[n] ^= (uint8_t)(1 << bit);
            vlai_pickle_read(part.data, part.size, "t.pth", note, NULL, &err);
        }
    }
    assert_fails(vlai_pickle_read((const uint8_t *)"x", 1, "t.pth", note, NULL, &err), VLA_E_FORMAT, err, "not a zip archive");
    const entry big[] = {{"a/data.pkl", pickle.data, pickle.size, 0}, {"a/byteorder", "big", 3, 0}};
    build_zip(&whole, big, 2);
    assert_fails(vlai_pickle_read(whole.data, whole.size, "t.pth", note, NULL, &err), VLA_E_UNSUPPORTED, err, "byte order");
    const entry twice[] = {{"a/data.pkl", pickle.data, pickle.size, 0}, {"a/data.pkl", "", 0, 0}};
    build_zip(&whole, twice, 2);
    assert_fails(vlai_pickle_read(whole.data, whole.size, "t.pth", note, NULL, &err), VLA_E_CORRUPT, err, "one name");
    const entry none[] = {{"a/data/0", storage, sizeof storage, 0}};
    build_zip(&whole, none, 1);
    assert_fails(vlai_pickle_read(whole.data, whole.size, "t.pth", note, NULL, &err), VLA_E_FORMAT, err, "without data.pkl");
}

static void failing_allocations(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    static bytes b;
    build_pickle(&b, &plain);
    uint64_t n = 0;
    for (vla_status status = VLA_E_NOMEM; status != VLA_OK;) {
        failing_allocation(++n);
        status = read_pickle(&b, 0, &err);
        if (status != VLA_OK && status != VLA_E_NOMEM)
            fail_msg("allocation %d: %s", (int)n, err.message);
    }
    failing_allocation(0);
    assert_true(n > 2);
}

/* What PyTorch itself wrote. */
static void recorded_files(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    static const char *const names[] = {"plain", "wrapped", "nested"};
    char path[2048];
    snprintf(path, sizeof path, "%s/wsa-large-fingerprint/plain.pth", golden_dir());
    if (!vlai_is_file(path))
        skip();
    for (int i = 0; i < 3; i++) {
        vlai_safetensors *st;
        snprintf(path, sizeof path, "%s/wsa-large-fingerprint/%s.pth", golden_dir(), names[i]);
        assert_ok(vlai_safetensors_open(path, &st, &err), err);
        const vlai_tensor_view *w = vlai_safetensors_find(st, "blocks.0.w");
        assert_non_null(w);
        assert_true(w->dtype == VLA_F32 && w->rank == 2 && w->shape[0] == 2 && w->shape[1] == 3);
        vlai_safetensors_close(st);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(built_file_reads),
        cmocka_unit_test(hostile_pickles),
        cmocka_unit_test(hostile_archives),
        cmocka_unit_test(failing_allocations),
        cmocka_unit_test(recorded_files),
    };
    return cmocka_run_group_tests_name("pickle", tests, NULL, NULL);
}
