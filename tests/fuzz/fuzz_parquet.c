/* Any bytes between the marks of a Parquet file, its footer as long as they claim: refused with a sentence, or columns whose
 * every row can be read, alone and with the others, to the same values. Arrow, which decodes, is not instrumented: what is
 * looked at is the code around it. The bytes also stand for the header of a page, which is read by code of our own. */
#define _GNU_SOURCE /* memfd_create */
#include "base/memory.h"
#include "format/page_header.h"
#include "format/parquet.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { ROWS = 64, COLUMNS = 16, MARK = 4 };

static void need(bool fact)
{
    if (!fact)
        __builtin_trap();
}

static void refused(const vla_error *err)
{
    need(err->message[0] && err->status != VLA_OK && err->status != VLA_E_INTERNAL);
}

static size_t width_of(vlai_parquet_type type)
{
    return type == VLAI_PARQUET_F32 ? sizeof(float) : sizeof(double);
}

static const void *numbers_of(const vlai_parquet_values *v, vlai_parquet_type type)
{
    return type == VLAI_PARQUET_F32 ? (const void *)v->f32 : type == VLAI_PARQUET_F64 ? (const void *)v->f64 : v->i64;
}

static bool same_bytes(const vlai_parquet_bytes *a, const vlai_parquet_bytes *b)
{
    return a->size == b->size && (a->size == 0 || !memcmp(a->data, b->data, a->size));
}

static void check_values(const vlai_parquet_values *v, vlai_parquet_type type, int64_t rows)
{
    need(v->rows == rows && v->offsets[rows] == v->count && v->count >= 0);
    int64_t nulls = 0;
    for (int64_t r = 0; r < rows; r++) {
        need(v->offsets[r] >= 0 && v->offsets[r] <= v->offsets[r + 1] && v->null[r] <= 2);
        nulls += v->null[r] != 0;
        need(v->null[r] != 1 || v->offsets[r] == v->offsets[r + 1]);
    }
    need(nulls == v->nulls);
    if (type == VLAI_PARQUET_TEXT || type == VLAI_PARQUET_IMAGE)
        for (int64_t i = 0; i < v->count; i++)
            need(v->bytes[i].data && v->bytes[i].data[v->bytes[i].size] == 0);
}

/* Row `r` of `all` beside the same row read alone. */
static void check_row(const vlai_parquet_values *all, int64_t r, const vlai_parquet_values *one, vlai_parquet_type type)
{
    int64_t first = all->offsets[r], count = all->offsets[r + 1] - first;
    need(one->count == count && one->null[0] == all->null[r]);
    if (type == VLAI_PARQUET_TEXT || type == VLAI_PARQUET_IMAGE) {
        for (int64_t i = 0; i < count; i++)
            need(same_bytes(&all->bytes[first + i], &one->bytes[i]));
        need(!all->paths == !one->paths && (!all->paths || same_bytes(&all->paths[r], &one->paths[0])));
    } else if (count) {
        size_t width = width_of(type);
        need(!memcmp((const char *)numbers_of(all, type) + (size_t)first * width, numbers_of(one, type), (size_t)count * width));
    }
}

static void check_column(vlai_parquet *file, const vlai_parquet_column *column)
{
    vla_error err = VLA_ERROR_INIT;
    int64_t rows = vlai_parquet_rows(file), low, high;
    need(column->name && column->stored && column->depth >= 0 && vlai_parquet_find(file, column->name));
    for (int g = 0; g < vlai_parquet_group_count(file) && g < COLUMNS; g++)
        (void)vlai_parquet_group_range(file, g, column, &low, &high);
    vlai_parquet_type type = column->type;
    if (type == VLAI_PARQUET_OTHER || rows > ROWS)
        return;
    vlai_parquet_values all, one;
    if (vlai_parquet_read(file, column, 0, rows, type, &all, &err) != VLA_OK) {
        refused(&err);
        return;
    }
    check_values(&all, type, rows);
    for (int64_t r = 0; r < rows; r += rows > 4 ? rows / 3 : 1) {
        if (vlai_parquet_read(file, column, r, 1, type, &one, &err) != VLA_OK) {
            refused(&err);
            continue;
        }
        check_values(&one, type, 1);
        check_row(&all, r, &one, type);
        vlai_parquet_values_fini(&one);
    }
    vlai_parquet_values_fini(&all);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    vlai_page_header header;
    if (vlai_page_header_parse(data, size, &header))
        need(header.length <= size && header.compressed >= 0 && header.values >= 0);
    static int fd = -1;
    static char path[64];
    if (fd < 0) {
        fd = memfd_create("parquet", MFD_CLOEXEC);
        need(fd >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    if (size < 3 * MARK || ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size ||
        pwrite(fd, "PAR1", MARK, 0) != MARK || pwrite(fd, "PAR1", MARK, (off_t)size - MARK) != MARK)
        return 0;
    vlai_parquet *file;
    vla_error err = VLA_ERROR_INIT;
    if (vlai_parquet_open(path, &file, &err) != VLA_OK) {
        refused(&err);
        return 0;
    }
    int64_t rows = 0;
    for (int g = 0; g < vlai_parquet_group_count(file); g++) {
        need(vlai_parquet_group_first(file, g) == rows && vlai_parquet_group_rows(file, g) >= 0);
        rows += vlai_parquet_group_rows(file, g);
    }
    need(rows == vlai_parquet_rows(file));
    for (int c = 0; c < vlai_parquet_column_count(file) && c < COLUMNS; c++)
        check_column(file, vlai_parquet_column_at(file, c));
    vlai_parquet_close(file);
    return 0;
}
