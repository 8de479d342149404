/* The Parquet shim: what it writes it reads back, and what it cannot read it names. */
#include "test.h"

#include "base/io.h"
#include "base/memory.h"
#include "format/parquet.h"

#include <unistd.h>

static const char *scratch(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "/tmp/vla-test-parquet-%d-%s", (int)getpid(), name);
    return path;
}

static const vlai_parquet_bytes texts[] = {
    {(const uint8_t *)"red", 3}, {(const uint8_t *)"", 0}, {(const uint8_t *)"gr\xc3\xbcn", 5}, {(const uint8_t *)"x", 1}};

static void write_sample(const char *path)
{
    vla_error err = VLA_ERROR_INIT;
    const vlai_parquet_field fields[] = {
        {"observation.state", VLAI_PARQUET_F32, 1, {2}}, {"index", VLAI_PARQUET_I64, 0, {0}},
        {"tasks", VLAI_PARQUET_TEXT, 1, {0}},            {"stats/a.b/mean", VLAI_PARQUET_F64, 3, {3, 1, 2}},
        {"done", VLAI_PARQUET_BOOL, 0, {0}},             {"cam", VLAI_PARQUET_IMAGE, 0, {0}},
    };
    const char *const metadata[] = {"pandas", "{}", NULL};
    vlai_parquet_writer *w;
    assert_ok(vlai_parquet_writer_open(path, fields, 6, metadata, &w, &err), err);
    for (int64_t group = 0; group < 3; group++) {
        float state[4];
        int64_t index[2], lengths[2] = {group, 2};
        double mean[12];
        uint8_t done[2] = {0, 1};
        for (int i = 0; i < 4; i++)
            state[i] = (float)(group * 4 + i) / 3;
        for (int i = 0; i < 12; i++)
            mean[i] = (double)(group * 12 + i);
        index[0] = group * 2, index[1] = group * 2 + 1;
        vlai_parquet_cells cells[] = {{state, NULL, NULL}, {index, NULL, NULL}, {texts, NULL, lengths},
                                      {mean, NULL, NULL},  {done, NULL, NULL},  {texts, texts + 2, NULL}};
        assert_ok(vlai_parquet_writer_append(w, 2, cells, &err), err);
    }
    assert_ok(vlai_parquet_writer_close(w, &err), err);
}

static void round_trip(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    const char *path = scratch("a.parquet");
    write_sample(path);
    vlai_parquet *file;
    assert_ok(vlai_parquet_open(path, &file, &err), err);
    assert_int_equal(vlai_parquet_rows(file), 6);
    assert_int_equal(vlai_parquet_group_count(file), 3);
    assert_int_equal(vlai_parquet_column_count(file), 6);
    assert_string_equal(vlai_parquet_metadata(file, "pandas"), "{}");
    int64_t low, high;
    assert_true(vlai_parquet_group_range(file, 1, vlai_parquet_find(file, "index"), &low, &high));
    assert_int_equal(low, 2);
    assert_int_equal(high, 3);
    assert_null(vlai_parquet_find(file, "observation"));
    const vlai_parquet_column *c = vlai_parquet_find(file, "observation.state");
    assert_non_null(c);
    assert_int_equal(c->depth, 1);
    vlai_parquet_values v;
    assert_ok(vlai_parquet_read(file, c, 1, 4, VLAI_PARQUET_F32, &v, &err), err);
    assert_int_equal(v.rows, 4);
    assert_int_equal(v.count, 8);
    for (int64_t i = 0; i < 8; i++)
        assert_float_equal(v.f32[i], (float)(i + 2) / 3, 0);
    for (int64_t r = 0; r <= 4; r++)
        assert_int_equal(v.offsets[r], 2 * r);
    vlai_parquet_values_fini(&v);
    assert_ok(vlai_parquet_read(file, vlai_parquet_find(file, "tasks"), 0, 6, VLAI_PARQUET_TEXT, &v, &err), err);
    static const int64_t counts[] = {0, 2, 1, 2, 2, 2};
    for (int64_t r = 0; r < 6; r++)
        assert_int_equal(v.offsets[r + 1] - v.offsets[r], counts[r]);
    assert_string_equal((const char *)v.bytes[v.offsets[1]].data, "red");
    assert_int_equal(v.nulls, 0);
    vlai_parquet_values_fini(&v);
    assert_ok(vlai_parquet_read(file, vlai_parquet_find(file, "stats/a.b/mean"), 2, 3, VLAI_PARQUET_F64, &v, &err), err);
    assert_int_equal(v.count, 18);
    for (int64_t i = 0; i < 18; i++)
        assert_float_equal(v.f64[i], (double)(i + 12), 0);
    vlai_parquet_values_fini(&v);
    assert_ok(vlai_parquet_read(file, vlai_parquet_find(file, "done"), 0, 6, VLAI_PARQUET_I64, &v, &err), err);
    for (int64_t r = 0; r < 6; r++)
        assert_int_equal(v.i64[r], r % 2);
    vlai_parquet_values_fini(&v);
    assert_ok(vlai_parquet_read(file, vlai_parquet_find(file, "cam"), 3, 2, VLAI_PARQUET_IMAGE, &v, &err), err);
    assert_int_equal(v.bytes[0].size, 0);
    assert_int_equal(v.paths[0].size, 1);
    assert_int_equal(v.bytes[1].size, 3);
    assert_memory_equal(v.paths[1].data, texts[2].data, 5);
    vlai_parquet_values_fini(&v);
    assert_fails(vlai_parquet_read(file, c, 0, 1, VLAI_PARQUET_TEXT, &v, &err), VLA_E_DTYPE, err, "observation.state");
    assert_fails(vlai_parquet_read(file, c, 4, 3, VLAI_PARQUET_F32, &v, &err), VLA_E_INVALID, err, "rows 4");
    vlai_parquet_close(file);
    unlink(path);
}

/* A failing write at any place leaves an error and no file. */
static void failing_writes(void **state)
{
    (void)state;
    const char *path = scratch("fail.parquet");
    const vlai_parquet_field field = {"x", VLAI_PARQUET_F64, 0, {0}};
    double *values = calloc(1 << 18, sizeof *values);
    for (int i = 0; i < 1 << 18; i++)
        values[i] = i * 1.234567;
    for (uint64_t n = 1;; n++) {
        vla_error err = VLA_ERROR_INIT;
        vlai_io_fail_nth(n);
        vlai_parquet_writer *w;
        vla_status status = vlai_parquet_writer_open(path, &field, 1, NULL, &w, &err);
        if (status == VLA_OK) {
            vlai_parquet_cells cells = {values, NULL, NULL};
            status = vlai_parquet_writer_append(w, 1 << 18, &cells, &err);
            if (status == VLA_OK)
                status = vlai_parquet_writer_close(w, &err);
            else
                vlai_parquet_writer_abort(w);
        }
        uint64_t counted = vlai_io_fail_nth(0);
        if (status == VLA_OK) {
            assert_true(counted < n);
            assert_true(n > 2);
            break;
        }
        assert_int_equal(status, VLA_E_IO);
        assert_non_null(strstr(err.message, "No space left"));
        assert_int_not_equal(access(path, F_OK), 0);
    }
    unlink(path);
    free(values);
}

static void named_damage(void **state)
{
    (void)state;
    static const struct {
        const char *content;
        size_t size;
        vla_status status;
        const char *part;
    } cases[] = {
        {"", 0, VLA_E_FORMAT, "empty file"},
        {"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", 64, VLA_E_FORMAT, "Git-LFS pointer"},
        {"PAR1aaaaaaaaaaaaaaaaaaaa", 24, VLA_E_FORMAT, "no PAR1 at the end"},
        {"PAR1aaaaaaaa\377\377\377\177PAR1", 20, VLA_E_CORRUPT, "footer longer"},
        {"hello, this is no file of that kind", 35, VLA_E_FORMAT, "not a Parquet file"},
        {"PAR1aaaaaaaa\010\000\000\000PAR1", 20, VLA_E_CORRUPT, "bad.parquet: damaged: its footer or the header of a page cannot be decoded"},
    };
    const char *path = scratch("bad.parquet");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        FILE *f = fopen(path, "wb");
        fwrite(cases[i].content, 1, cases[i].size, f);
        fclose(f);
        vla_error err = VLA_ERROR_INIT;
        vlai_parquet *file;
        assert_fails(vlai_parquet_open(path, &file, &err), cases[i].status, err, cases[i].part);
        assert_null(file);
    }
    unlink(path);
    vla_error err = VLA_ERROR_INIT;
    vlai_parquet *file;
    assert_fails(vlai_parquet_open(path, &file, &err), VLA_E_NOT_FOUND, err, "cannot open");
}

/* Pictures one by one, out of order, come from single pages; they equal those of a read of the whole column. Values repeat,
 * so that the first pages use a dictionary and later ones, past its limit, do not. */
static void single_pictures(void **state)
{
    (void)state;
    enum { ROWS = 300, BYTES = 20000 };
    vla_error err = VLA_ERROR_INIT;
    const char *path = scratch("pictures.parquet");
    const vlai_parquet_field fields[] = {{"cam", VLAI_PARQUET_IMAGE, 0, {0}}, {"text", VLAI_PARQUET_TEXT, 0, {0}}};
    vlai_parquet_writer *w;
    vlai_parquet_bytes *cells = calloc(ROWS, sizeof *cells), *names = calloc(ROWS, sizeof *names);
    uint8_t *data = malloc((size_t)ROWS * BYTES);
    for (int r = 0; r < ROWS; r++) {
        for (int i = 0; i < BYTES; i++)
            data[r * BYTES + i] = (uint8_t)(i * (r + 3) + i / 251 * r);
        cells[r] = (vlai_parquet_bytes){data + r * BYTES, (size_t)(BYTES - r)};
        names[r] = (vlai_parquet_bytes){data + r % 7 * BYTES, (size_t)(9000 + r % 7)};
        if (r > 100)
            names[r] = (vlai_parquet_bytes){data + r * BYTES, (size_t)(9000 + r)};
    }
    assert_ok(vlai_parquet_writer_open(path, fields, 2, NULL, &w, &err), err);
    for (int group = 0; group < 2; group++) {
        const vlai_parquet_cells columns[] = {{cells, names, NULL}, {names, NULL, NULL}};
        assert_ok(vlai_parquet_writer_append(w, ROWS, columns, &err), err);
    }
    assert_ok(vlai_parquet_writer_close(w, &err), err);
    vlai_parquet *file;
    assert_ok(vlai_parquet_open(path, &file, &err), err);
    for (int k = 0; k < 400; k++) {
        int64_t row = k * 7919 % (2 * ROWS), count = row + k % 3 < 2 * ROWS ? 1 + k % 3 : 1;
        vlai_parquet_values image, text;
        assert_ok(vlai_parquet_read(file, vlai_parquet_find(file, "cam"), row, count, VLAI_PARQUET_IMAGE, &image, &err), err);
        assert_ok(vlai_parquet_read(file, vlai_parquet_find(file, "text"), row, count, VLAI_PARQUET_TEXT, &text, &err), err);
        assert_int_equal(image.count, count);
        for (int64_t i = 0; i < count; i++) {
            const vlai_parquet_bytes *want = &cells[(row + i) % ROWS], *name = &names[(row + i) % ROWS];
            assert_int_equal(image.bytes[i].size, want->size);
            assert_memory_equal(image.bytes[i].data, want->data, want->size);
            assert_int_equal(image.paths[i].size, name->size);
            assert_memory_equal(image.paths[i].data, name->data, name->size);
            assert_int_equal(text.bytes[i].size, name->size);
            assert_memory_equal(text.bytes[i].data, name->data, name->size);
        }
        vlai_parquet_values_fini(&image);
        vlai_parquet_values_fini(&text);
    }
    vlai_parquet_close(file);
    unlink(path);
    free(cells), free(names), free(data);
}

/* Any single byte inverted: an error or values, never a crash. The short form takes every 5th byte and the footer's length
 * (opening a file takes Arrow a millisecond, and fifty under a sanitizer). */
static void flipped_bytes(void **state)
{
    (void)state;
    const char *path = scratch("flip.parquet");
    write_sample(path);
    vla_error err = VLA_ERROR_INIT;
    char *data;
    size_t size;
    assert_ok(vlai_read_file(path, 0, &data, &size, &err), err);
    int refused = 0;
    size_t stride = test_long() ? 1 : test_sanitized() ? 53 : 5;
    for (size_t i = 0; i < size; i += i + 8 < size ? stride : 1) {
        data[i] ^= (char)0xff;
        FILE *f = fopen(path, "wb");
        fwrite(data, 1, size, f);
        fclose(f);
        data[i] ^= (char)0xff;
        vlai_parquet *file;
        if (vlai_parquet_open(path, &file, &err) != VLA_OK) {
            refused++;
            continue;
        }
        for (int c = 0; c < vlai_parquet_column_count(file); c++) {
            const vlai_parquet_column *column = vlai_parquet_column_at(file, c);
            vlai_parquet_values v;
            if (column->type == VLAI_PARQUET_OTHER || vlai_parquet_rows(file) > 1000)
                continue;
            if (vlai_parquet_read(file, column, 0, vlai_parquet_rows(file), column->type, &v, &err) == VLA_OK)
                vlai_parquet_values_fini(&v);
            if (vlai_parquet_rows(file) > 1 && vlai_parquet_read(file, column, 1, 1, column->type, &v, &err) == VLA_OK)
                vlai_parquet_values_fini(&v);
        }
        vlai_parquet_close(file);
    }
    assert_true(refused > 10);
    vlai_free(data);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),
        cmocka_unit_test(failing_writes),
        cmocka_unit_test(named_damage),
        cmocka_unit_test(single_pictures),
        cmocka_unit_test(flipped_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
