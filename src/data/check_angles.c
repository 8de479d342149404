/* Rotations in numeric columns, as far as their names tell: angles that jump by more than half a turn from frame to frame
 * (a recording that wraps: a network cannot follow it), and quaternions that are not of unit length. */
#include "data/check.h"

#include "base/fail.h"
#include "base/memory.h"

#include <ctype.h>
#include <math.h>
#include <string.h>

static const double half_turn = 3.14159265358979323846;

/* `part` is lower case. */
static bool contains(const char *name, const char *part)
{
    size_t n = strlen(part);
    for (; *name; name++) {
        size_t i = 0;
        while (i < n && tolower((unsigned char)name[i]) == part[i])
            i++;
        if (i == n)
            return true;
    }
    return false;
}

static bool is_angle(const char *name)
{
    return contains(name, "roll") || contains(name, "pitch") || contains(name, "yaw") || contains(name, "euler");
}

static bool is_quaternion(const char *name)
{
    size_t n = strlen(name);
    return contains(name, "quat") || (n >= 2 && tolower((unsigned char)name[n - 2]) == 'q' && strchr("wxyzWXYZ", name[n - 1]));
}

vla_status vlai_angles_make(const vla_feature *feature, vlai_angles *out, vla_error *err)
{
    *out = (vlai_angles){.last_row = -2};
    int64_t run = 0;
    if (!feature->names || feature->name_count != feature->dim || feature->dim > 4096)
        return VLA_OK;
    for (int64_t d = 0; d < feature->dim; d++) {
        run = is_quaternion(feature->names[d]) ? run + 1 : 0;
        if (run == 4 && (d + 1 == feature->dim || !is_quaternion(feature->names[d + 1])) && out->quaternions < VLAI_QUATERNIONS)
            out->quaternion[out->quaternions++] = d - 3;
        out->any |= is_angle(feature->names[d]);
    }
    if (out->any) {
        out->last = vlai_calloc((size_t)feature->dim, sizeof *out->last);
        if (!out->last)
            return vlai_nomem(err, (size_t)feature->dim * sizeof *out->last);
    }
    return VLA_OK;
}

void vlai_angles_fini(vlai_angles *a)
{
    vlai_free(a->last);
    a->last = NULL;
}

void vlai_angles_look(vlai_angles *a, const vla_feature *feature, const double *x, int64_t row, int64_t frame, vlai_finding at,
                      vlai_findings *findings)
{
    for (int q = 0; q < a->quaternions && !a->norm_told; q++) {
        const double *v = x + a->quaternion[q];
        double norm = sqrt(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]);
        if (fabs(norm - 1) <= 0.05)
            continue;
        vlai_finding told = at;
        told.kind = "quaternion-norm";
        told.dim = a->quaternion[q];
        told.expected = vlai_value_real(1);
        told.found = vlai_value_real(norm);
        vlai_report(findings, &told, "column '%s' %s .. %s is named a quaternion and has length %.4g", feature->name,
                    feature->names[told.dim], feature->names[told.dim + 3], norm);
        a->norm_told = true;
    }
    if (!a->any)
        return;
    for (int64_t d = 0; d < feature->dim; d++) {
        double step = x[d] - a->last[d];
        if (frame > 0 && a->last_row == row - 1 && fabs(step) > half_turn && is_angle(feature->names[d]) && !a->jump_told) {
            vlai_finding told = at;
            told.kind = "angle-jump";
            told.dim = d;
            told.found = vlai_value_real(step);
            vlai_report(findings, &told, "column '%s' %s jumps by %.4g from the frame before: more than half a turn", feature->name,
                        feature->names[d], step);
            a->jump_told = true;
        }
        a->last[d] = x[d];
    }
    a->last_row = row;
}
