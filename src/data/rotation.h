/* Layouts of state and action vectors, and the rotations in them: Euler angles to the 6D form, absolute to relative.
 *
 *     vlai_layout dof;
 *     VLA_TRY(vlai_layout_parse(json_object_get(task, "dof_config"), "config.yml", &dof, err));
 *     n = vlai_layout_to_six(&dof, raw, n, out);                          // 3 -> 6 per 6D key, if the raw width says so
 *     VLA_TRY(vlai_layout_relative(&dof, action, n, state, m, err));      // in place
 *     VLA_TRY(vlai_layout_absolute(&dof, action, n, state, m, err));      // the way back of a prediction, in place
 *     n = vlai_layout_from_six(&dof, action, n, raw);                     // 6 -> 3
 *     vlai_layout_fini(&dof);
 *
 * Angles are roll, pitch, yaw with R = Rz(yaw) Ry(pitch) Rx(roll); 6D = rows 0 and 1 of R. All in double, stored float32.
 * Threads: read-only after parsing. */
#ifndef VLAI_ROTATION_H
#define VLAI_ROTATION_H

#include "vla/error.h"

#include <jansson.h>
#include <stdbool.h>

VLA_BEGIN_DECLS

/* (3, 3) row-major. */
void vlai_rotation_from_euler(const double rpy[3], double m[9]);
void vlai_rotation_to_euler(const double m[9], double rpy[3]);
/* Rows are made orthonormal first (Gram-Schmidt, norms + 1e-12). */
void vlai_rotation_from_six(const double six[6], double m[9]);
/* Each angle into [-pi, pi), pitch into (-pi/2, pi/2]; the same rotation. */
void vlai_rotation_canonical(double rpy[3]);
/* absolute * reference^T. */
void vlai_rotation_relative(const double absolute[9], const double reference[9], double m[9]);
/* relative * reference: the way back. */
void vlai_rotation_compose(const double relative[9], const double reference[9], double m[9]);

typedef struct vlai_layout_part {
    char *name;
    int64_t dim;
    bool skipped;  /* virtual: not in the dataset's columns (action_padding, height, head_actions, velocity_decomposed) */
    bool rotation, six, relative; /* by its name; six also needs dim 6 */
} vlai_layout_part;

typedef struct vlai_layout {
    vlai_layout_part *parts; /* in the order of the file: it matters */
    int count;
    int64_t total; /* of all parts: the width of the model's vector */
    int64_t width; /* of the parts that are not skipped */
    int64_t euler; /* the same with 3 for each 6D rotation */
    bool six, relative; /* any part */
} vlai_layout;

/* `object`: ordered map name -> dims. */
vla_status vlai_layout_parse(const json_t *object, const char *where, vlai_layout *out, vla_error *err);
vla_status vlai_layout_copy(const vlai_layout *from, vlai_layout *out, vla_error *err);
json_t *vlai_layout_to_json(const vlai_layout *layout);
void vlai_layout_fini(vlai_layout *layout);
/* Name of the part that holds column i of the dataset's vector ("action_padding" beyond); never NULL. */
const char *vlai_layout_name(const vlai_layout *layout, int64_t column, int64_t *within);

/* Copies n values to out, each Euler triple of a 6D key turned into 6 values when n is the layout's Euler width. Returns the
 * number written (at most max(n, width)). */
int64_t vlai_layout_to_six(const vlai_layout *layout, const float *in, int64_t n, float *out);
/* Makes the keys named "relative" of one action row differences to the state; n and m are the widths. */
vla_status vlai_layout_relative(const vlai_layout *layout, float *action, int64_t n, const float *state, int64_t m,
                                vla_error *err);
/* The inverses. Angles come back canonical; a 6D rotation that is not one is made one first. from_six converts when n is the
 * layout's width, and returns the number written (at most n). */
vla_status vlai_layout_absolute(const vlai_layout *layout, float *action, int64_t n, const float *state, int64_t m,
                                vla_error *err);
int64_t vlai_layout_from_six(const vlai_layout *layout, const float *in, int64_t n, float *out);

VLA_END_DECLS

#endif
