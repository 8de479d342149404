/* Parquet files through Apache Arrow's C++ library, behind plain C: no Arrow type appears here.
 *
 * Reading. A column is named whole ("observation.state" is one name; names are never split at dots) and is one of: a
 * scalar, a list (nested lists are flattened row by row), or an image cell {bytes, path}. A read returns all values of
 * a range of rows, which row each belongs to, and which rows are null; it never fails because of what the values are,
 * so that a validator can name the faulty row.
 *
 *     vlai_parquet *file;
 *     VLA_TRY(vlai_parquet_open("data/chunk-000/file-000.parquet", &file, err));
 *     const vlai_parquet_column *state = vlai_parquet_find(file, "observation.state");
 *     vlai_parquet_values v;
 *     status = vlai_parquet_read(file, state, 0, vlai_parquet_rows(file), VLAI_PARQUET_F32, &v, err);
 *     ...  v.f32[v.offsets[row] + dim]  ...
 *     vlai_parquet_values_fini(&v);
 *     vlai_parquet_close(file);
 *
 * Writing. One row group per append; Snappy; readable by pandas, Hugging Face datasets and LeRobot.
 *
 * Ownership: column descriptions live as long as the file; values belong to the caller. Threads: one caller per handle.
 * Files are hostile input: every C++ exception and Arrow status becomes a vla_error, and no buffer is sized by a number
 * that the file only claims beyond what its own bytes can hold. */
#ifndef VLAI_PARQUET_H
#define VLAI_PARQUET_H

#include "vla/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

VLA_BEGIN_DECLS

typedef struct vlai_parquet vlai_parquet;

typedef enum vlai_parquet_type {
    VLAI_PARQUET_F32,
    VLAI_PARQUET_F64,
    VLAI_PARQUET_I64, /* any integer or bool leaf; a floating leaf with whole numbers is read too */
    VLAI_PARQUET_BOOL,
    VLAI_PARQUET_TEXT,  /* UTF-8 or binary */
    VLAI_PARQUET_IMAGE, /* struct {bytes: binary, path: string} */
    VLAI_PARQUET_OTHER, /* anything else: named, never read */
} vlai_parquet_type;

typedef struct vlai_parquet_column {
    const char *name;
    const char *stored; /* leaf as Parquet names it: "FLOAT", "INT64", "BYTE_ARRAY", ...; for messages */
    vlai_parquet_type type; /* I64 for every integer width */
    int depth;              /* list nesting: 0 scalar, 1 list, ... */
    int leaf, leaf_path;    /* column numbers inside the file; leaf_path is the "path" member of an image, else -1 */
} vlai_parquet_column;

/* Errors: NOT_FOUND; FORMAT with "empty file", "Git-LFS pointer", "no PAR1 at the end" (truncated download); CORRUPT. */
vla_status vlai_parquet_open(const char *path, vlai_parquet **out, vla_error *err);
void vlai_parquet_close(vlai_parquet *file);

int64_t vlai_parquet_rows(const vlai_parquet *file);
int vlai_parquet_column_count(const vlai_parquet *file);
const vlai_parquet_column *vlai_parquet_column_at(const vlai_parquet *file, int i);
const vlai_parquet_column *vlai_parquet_find(const vlai_parquet *file, const char *name); /* NULL when absent */
const char *vlai_parquet_metadata(const vlai_parquet *file, const char *key);             /* NULL when absent */

/* Row groups. _range gives min and max of an integer scalar column from the footer; false when it has none. */
int vlai_parquet_group_count(const vlai_parquet *file);
int64_t vlai_parquet_group_first(const vlai_parquet *file, int group);
int64_t vlai_parquet_group_rows(const vlai_parquet *file, int group);
bool vlai_parquet_group_range(const vlai_parquet *file, int group, const vlai_parquet_column *column, int64_t *min,
                              int64_t *max);

typedef struct vlai_parquet_bytes {
    const uint8_t *data; /* not zero-terminated, except for values that were read (one 0 past the end) */
    size_t size;
} vlai_parquet_bytes;

typedef struct vlai_parquet_values {
    int64_t rows, count; /* count = values of all rows */
    int64_t *offsets;    /* rows + 1: row r holds values offsets[r] .. offsets[r+1]-1; a null row holds none */
    uint8_t *null;       /* rows: 1 when the row is null, 2 when an element of its list is (element dropped) */
    int64_t nulls;       /* rows with null != 0 */
    /* One of these, by the type asked for: */
    float *f32;
    double *f64;
    int64_t *i64;
    vlai_parquet_bytes *bytes; /* TEXT, IMAGE */
    vlai_parquet_bytes *paths; /* IMAGE: the path member; data NULL when null */
    void *storage;             /* internal */
} vlai_parquet_values;

/* Rows first .. first+rows-1 as `want`: F32, F64 and I64 convert between number types (I64 of a fraction: CORRUPT);
 * TEXT and IMAGE need that type. */
vla_status vlai_parquet_read(vlai_parquet *file, const vlai_parquet_column *column, int64_t first, int64_t rows,
                             vlai_parquet_type want, vlai_parquet_values *out, vla_error *err);
void vlai_parquet_values_fini(vlai_parquet_values *values);

/* --- writing --- */

typedef struct vlai_parquet_field {
    const char *name;
    vlai_parquet_type type; /* F32, F64, I64, BOOL, TEXT, IMAGE */
    int depth;              /* 0 scalar, 1..3 list */
    int64_t dims[3];        /* lengths of the nested lists, outermost first; dims[0] = 0: given per row (`lengths`) */
} vlai_parquet_field;

/* The values of one column for one append. All rows are present (no nulls). */
typedef struct vlai_parquet_cells {
    const void *values;     /* float, double, int64_t, uint8_t (BOOL) or vlai_parquet_bytes (TEXT, IMAGE), row-major */
    const vlai_parquet_bytes *paths; /* IMAGE only */
    const int64_t *lengths; /* rows: outermost list length of each row when dims[0] == 0, else NULL */
} vlai_parquet_cells;

typedef struct vlai_parquet_writer vlai_parquet_writer;

/* `metadata` is NULL-terminated key, value, key, value ... or NULL. Writes to `path` itself: give a temporary name and
 * vlai_publish it after closing. */
vla_status vlai_parquet_writer_open(const char *path, const vlai_parquet_field *fields, int count,
                                    const char *const *metadata, vlai_parquet_writer **out, vla_error *err);
/* Appends one row group of `rows` >= 1 rows; cells[i] belongs to fields[i]. */
vla_status vlai_parquet_writer_append(vlai_parquet_writer *writer, int64_t rows, const vlai_parquet_cells *cells,
                                      vla_error *err);
uint64_t vlai_parquet_writer_bytes(const vlai_parquet_writer *writer); /* written so far */
/* Footer, fsync, close; frees the writer also when it fails. */
vla_status vlai_parquet_writer_close(vlai_parquet_writer *writer, vla_error *err);
void vlai_parquet_writer_abort(vlai_parquet_writer *writer); /* close, unlink, free; NULL is fine */

VLA_END_DECLS

#endif
