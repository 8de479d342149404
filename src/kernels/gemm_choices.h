/* Which algorithm a matrix product takes, by shape: found once by timing, kept in a file per GPU and library version, and
 * in checkpoints, because another algorithm gives other bits. A GPU that has no file yet begins with that of its kind. Ranks on
 * several GPUs, which time for themselves, so find what they had before. What was found on GPUs that the developers had is in the
 * program (src/kernels/products), so that a first start there times little.
 *
 * As text one line per choice: m n k transpose_a transpose_b bias residual sums operand result bias_type workspace
 * milliseconds w0 .. w7, the words in hexadecimal; at the end multiprocessors, where they are not all. Threads: one caller at a time; several processes may share the file (it is written whole). */
#ifndef VLAI_GEMM_CHOICES_H
#define VLAI_GEMM_CHOICES_H

#include "base/text.h"
#include "vendor/cublaslt.h"
#include "vla/error.h"

VLA_BEGIN_DECLS

typedef struct vlai_gemm_choices vlai_gemm_choices;

/* What the program has, one row per kind of GPU, library and search, made by CMake; ends with a row without a name. */
typedef struct vlai_gemm_product_text {
    const char *name, *text;
} vlai_gemm_product_text;
extern const vlai_gemm_product_text vlai_gemm_product_texts[];

/* The text that the program has for a file of this name, GPU-LIBRARY-SEARCH.txt; NULL: none. */
const char *vlai_gemm_choices_known(const char *name);
/* path: file of this kind of GPU; NULL: none. gpu: name of this one. Its own file, PATH.GPU, is read now, or PATH where there is
 * none; save writes it, and PATH where that is not there. known: text to begin with, which the files go before; NULL: none. A line
 * that is not understood is left out. */
vla_status vlai_gemm_choices_open(const char *path, const char *gpu, const char *known, vlai_gemm_choices **out, vla_error *err);
void vlai_gemm_choices_close(vlai_gemm_choices *choices);
/* false when there is none. */
bool vlai_gemm_choices_find(const vlai_gemm_choices *choices, const vlai_gemm_shape *shape, vlai_gemm_choice *out);
/* Whether two shapes are the same to a choice. */
bool vlai_gemm_shape_same(const vlai_gemm_shape *a, const vlai_gemm_shape *b);
/* Choices of products that differ from `shape` in their number of rows alone, by less than half or twice (m, or of a gradient of weights
 * k): up to `most`, each algorithm once. -> how many. */
int vlai_gemm_choices_near(const vlai_gemm_choices *choices, const vlai_gemm_shape *shape, vlai_gemm_choice *out, int most);
vla_status vlai_gemm_choices_put(vlai_gemm_choices *choices, const vlai_gemm_shape *shape, const vlai_gemm_choice *choice, vla_error *err);
/* A run works with the choice of this shape; nothing when there is none. What was timed and not taken is not used. */
void vlai_gemm_choices_use(vlai_gemm_choices *choices, const vlai_gemm_shape *shape);
/* Writes the files when something was put since, also since a save that failed. */
vla_status vlai_gemm_choices_save(vlai_gemm_choices *choices, vla_error *err);
/* The choices that were used, as text: the same for the same choices, whatever else is known and in whatever order they came. */
void vlai_gemm_choices_text(const vlai_gemm_choices *choices, vlai_text *out);
/* Takes every line of `text` in place of what is known, as used: a run that goes on passes on all that it ever used, also for
 * shapes that it has not met again yet. A line that is not understood is an error naming it. */
vla_status vlai_gemm_choices_adopt(vlai_gemm_choices *choices, const char *text, vla_error *err);

VLA_END_DECLS

#endif
