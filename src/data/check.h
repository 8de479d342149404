/* The validator of datasets: everything that a training run, today or in a month, could trip over.
 *
 *     vlai_findings findings = {.report = print_one, .user = NULL};
 *     vlai_check_options options = {.depth = VLAI_CHECK_NORMAL};
 *     VLA_TRY(vlai_check("path/to/set", &options, &findings, err));
 *     // findings.errors + findings.bound_errors == 0: the set can be trained on
 *
 * Faults of the set are findings; an error is returned only when the check itself cannot go on (memory). */
#ifndef VLAI_CHECK_H
#define VLAI_CHECK_H

#include "data/set.h"

VLA_BEGIN_DECLS

typedef enum vlai_check_depth {
    VLAI_CHECK_QUICK,  /* metadata, footers, headers, index columns */
    VLAI_CHECK_NORMAL, /* and every number, statistics, sample frames of every video */
    VLAI_CHECK_FULL,   /* and every frame */
} vlai_check_depth;

typedef struct vlai_check_options {
    vlai_check_depth depth;
    const char *const *cameras; /* that a configuration maps: each must exist */
    size_t camera_count;
} vlai_check_options;

vla_status vlai_check(const char *root, const vlai_check_options *options, vlai_findings *findings, vla_error *err);

/* Rotations among the dimensions of a column, by their names; one finding of each kind per column. */
enum { VLAI_QUATERNIONS = 16 };
typedef struct vlai_angles {
    double *last; /* values of the row before */
    int64_t last_row;
    int64_t quaternion[VLAI_QUATERNIONS]; /* first of four dimensions */
    int quaternions;
    bool any; /* some dimension is an angle */
    bool jump_told, norm_told;
} vlai_angles;
vla_status vlai_angles_make(const vla_feature *feature, vlai_angles *out, vla_error *err);
void vlai_angles_fini(vlai_angles *angles);
/* One row, `frame` of its episode. `at` says where: file, column, episode, frame. */
void vlai_angles_look(vlai_angles *angles, const vla_feature *feature, const double *x, int64_t row, int64_t frame,
                      vlai_finding at, vlai_findings *findings);

/* Parts, in files of their own. */
vla_status vlai_check_values(vla_dataset *set, vlai_findings *findings, vla_error *err);
vla_status vlai_check_media(vla_dataset *set, vlai_check_depth depth, vlai_findings *findings, vla_error *err);

VLA_END_DECLS

#endif
