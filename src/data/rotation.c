#include "data/rotation.h"

#include "base/fail.h"
#include "base/memory.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const double pi = 3.14159265358979323846;

void vlai_rotation_from_euler(const double rpy[3], double m[9])
{
    double sr = sin(rpy[0]), cr = cos(rpy[0]), sp = sin(rpy[1]), cp = cos(rpy[1]), sy = sin(rpy[2]), cy = cos(rpy[2]);
    m[0] = cy * cp;
    m[1] = cy * sp * sr - sy * cr;
    m[2] = cy * sp * cr + sy * sr;
    m[3] = sy * cp;
    m[4] = sy * sp * sr + cy * cr;
    m[5] = sy * sp * cr - cy * sr;
    m[6] = -sp;
    m[7] = cp * sr;
    m[8] = cp * cr;
}

void vlai_rotation_to_euler(const double m[9], double rpy[3])
{
    double s = -m[6];
    rpy[0] = atan2(m[7], m[8]);
    rpy[1] = asin(s < -1 ? -1 : s > 1 ? 1 : s);
    rpy[2] = atan2(m[3], m[0]);
}

void vlai_rotation_from_six(const double six[6], double m[9])
{
    double norm = sqrt(six[0] * six[0] + six[1] * six[1] + six[2] * six[2]) + 1e-12;
    for (int i = 0; i < 3; i++)
        m[i] = six[i] / norm;
    double dot = m[0] * six[3] + m[1] * six[4] + m[2] * six[5];
    for (int i = 0; i < 3; i++)
        m[3 + i] = six[3 + i] - dot * m[i];
    norm = sqrt(m[3] * m[3] + m[4] * m[4] + m[5] * m[5]) + 1e-12;
    for (int i = 3; i < 6; i++)
        m[i] /= norm;
    m[6] = m[1] * m[5] - m[2] * m[4];
    m[7] = m[2] * m[3] - m[0] * m[5];
    m[8] = m[0] * m[4] - m[1] * m[3];
}

static double wrap(double x)
{
    double y = fmod(x + pi, 2 * pi);
    if (y < 0)
        y += 2 * pi;
    return y - pi;
}

void vlai_rotation_canonical(double rpy[3])
{
    for (int i = 0; i < 3; i++)
        rpy[i] = wrap(rpy[i]);
    if (rpy[1] > pi / 2)
        rpy[1] = pi - rpy[1];
    else if (rpy[1] <= -pi / 2)
        rpy[1] = -pi - rpy[1];
    else
        return;
    rpy[0] = wrap(rpy[0] + pi);
    rpy[1] = wrap(rpy[1]);
    rpy[2] = wrap(rpy[2] + pi);
}

void vlai_rotation_relative(const double absolute[9], const double reference[9], double m[9])
{
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 3; j++) {
            double sum = 0;
            for (int k = 0; k < 3; k++)
                sum += absolute[3 * i + k] * reference[3 * j + k];
            m[3 * i + j] = sum;
        }
}

void vlai_rotation_compose(const double relative[9], const double reference[9], double m[9])
{
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 3; j++) {
            double sum = 0;
            for (int k = 0; k < 3; k++)
                sum += relative[3 * i + k] * reference[3 * k + j];
            m[3 * i + j] = sum;
        }
}

/* Layouts. */

static bool is_skipped(const char *name)
{
    static const char *const names[] = {"velocity_decomposed", "height", "head_actions", "action_padding"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(name, names[i]))
            return true;
    return false;
}

static vla_status add_part(vlai_layout *layout, const char *name, int64_t dim, vla_error *err)
{
    char *copy = vlai_strdup(name);
    if (!copy)
        return vlai_nomem(err, strlen(name));
    bool rotation = strstr(name, "rotation") != NULL;
    vlai_layout_part *part = &layout->parts[layout->count++];
    *part = (vlai_layout_part){
        .name = copy,
        .dim = dim,
        .skipped = is_skipped(name),
        .rotation = rotation,
        .six = rotation && strstr(name, "6D") && dim == 6,
        .relative = strstr(name, "relative") != NULL,
    };
    layout->total += dim;
    layout->relative |= part->relative;
    if (part->skipped)
        return VLA_OK;
    layout->width += dim;
    layout->euler += part->six ? 3 : dim;
    layout->six |= part->six;
    return VLA_OK;
}

vla_status vlai_layout_parse(const json_t *object, const char *where, vlai_layout *out, vla_error *err)
{
    *out = (vlai_layout){0};
    if (!json_is_object(object) || !json_object_size(object))
        return vlai_fail(err, VLA_E_INVALID, "%s: a layout is an ordered map of names to numbers of dimensions", where);
    out->parts = vlai_calloc(json_object_size(object), sizeof *out->parts);
    if (!out->parts)
        return vlai_nomem(err, json_object_size(object) * sizeof *out->parts);
    const char *name;
    json_t *value;
    vla_status status = VLA_OK;
    json_object_foreach((json_t *)object, name, value) {
        int64_t dim = json_integer_value(value);
        if (!json_is_integer(value) || dim < 0 || dim > 4096) {
            status = vlai_fail(err, VLA_E_INVALID, "%s: '%s' must have a number of dimensions from 0 to 4096", where, name);
            break;
        }
        status = add_part(out, name, dim, err);
        if (status != VLA_OK)
            break;
    }
    if (status != VLA_OK)
        vlai_layout_fini(out);
    return status;
}

vla_status vlai_layout_copy(const vlai_layout *from, vlai_layout *out, vla_error *err)
{
    *out = (vlai_layout){0};
    out->parts = vlai_calloc(from->count ? (size_t)from->count : 1, sizeof *out->parts);
    if (!out->parts)
        return vlai_nomem(err, (size_t)from->count * sizeof *out->parts);
    for (int i = 0; i < from->count; i++) {
        vla_status status = add_part(out, from->parts[i].name, from->parts[i].dim, err);
        if (status != VLA_OK)
            return vlai_layout_fini(out), status;
    }
    return VLA_OK;
}

json_t *vlai_layout_to_json(const vlai_layout *layout)
{
    json_t *object = json_object();
    for (int i = 0; i < layout->count; i++)
        if (json_object_set_new(object, layout->parts[i].name, json_integer(layout->parts[i].dim))) {
            json_decref(object);
            return NULL;
        }
    return object;
}

void vlai_layout_fini(vlai_layout *layout)
{
    for (int i = 0; i < layout->count; i++)
        vlai_free(layout->parts[i].name);
    vlai_free(layout->parts);
    *layout = (vlai_layout){0};
}

const char *vlai_layout_name(const vlai_layout *layout, int64_t column, int64_t *within)
{
    for (int i = 0; i < layout->count; i++) {
        const vlai_layout_part *part = &layout->parts[i];
        if (part->skipped)
            continue;
        if (column < part->dim) {
            *within = column;
            return part->name;
        }
        column -= part->dim;
    }
    *within = column;
    return "action_padding";
}

int64_t vlai_layout_to_six(const vlai_layout *layout, const float *in, int64_t n, float *out)
{
    if (!layout->six || n != layout->euler) {
        memcpy(out, in, (size_t)n * sizeof *out);
        return n;
    }
    float *to = out;
    for (int i = 0; i < layout->count; i++) {
        const vlai_layout_part *part = &layout->parts[i];
        if (part->skipped)
            continue;
        if (!part->six) {
            memcpy(to, in, (size_t)part->dim * sizeof *to);
            in += part->dim;
            to += part->dim;
            continue;
        }
        double rpy[3] = {in[0], in[1], in[2]}, m[9];
        vlai_rotation_from_euler(rpy, m);
        for (int k = 0; k < 6; k++)
            to[k] = (float)m[k];
        in += 3;
        to += 6;
    }
    return to - out;
}

int64_t vlai_layout_from_six(const vlai_layout *layout, const float *in, int64_t n, float *out)
{
    if (!layout->six || n != layout->width) {
        memcpy(out, in, (size_t)n * sizeof *out);
        return n;
    }
    float *to = out;
    for (int i = 0; i < layout->count; i++) {
        const vlai_layout_part *part = &layout->parts[i];
        if (part->skipped)
            continue;
        if (part->six) {
            double six[6], m[9], rpy[3];
            for (int k = 0; k < 6; k++)
                six[k] = in[k];
            vlai_rotation_from_six(six, m);
            vlai_rotation_to_euler(m, rpy);
            for (int k = 0; k < 3; k++)
                to[k] = (float)rpy[k];
        } else {
            memcpy(to, in, (size_t)part->dim * sizeof *to);
        }
        in += part->dim;
        to += part->six ? 3 : part->dim;
    }
    return to - out;
}

/* (3, 3) from 3 angles or the 6D form. */
static void read_rotation(const float *values, int64_t dim, double m[9])
{
    double in[6] = {0};
    for (int64_t i = 0; i < dim; i++)
        in[i] = values[i];
    dim == 6 ? vlai_rotation_from_six(in, m) : vlai_rotation_from_euler(in, m);
}

static void change_rotation(float *action, const float *state, int64_t dim, bool back)
{
    double a[9], s[9], m[9], rpy[3];
    read_rotation(action, dim, a);
    read_rotation(state, dim, s);
    back ? vlai_rotation_compose(a, s, m) : vlai_rotation_relative(a, s, m);
    if (dim == 3) {
        vlai_rotation_to_euler(m, rpy);
        vlai_rotation_canonical(rpy);
    }
    for (int64_t i = 0; i < dim; i++)
        action[i] = (float)(dim == 6 ? m[i] : rpy[i]);
}

/* Absolute to relative, or back. */
static vla_status change(const vlai_layout *layout, float *action, int64_t n, const float *state, int64_t m, bool back,
                         vla_error *err)
{
    if (!layout->relative)
        return VLA_OK;
    int64_t at = 0;
    for (int i = 0; i < layout->count; i++) {
        const vlai_layout_part *part = &layout->parts[i];
        if (part->skipped)
            continue;
        if (part->relative) {
            if (at + part->dim > n || at + part->dim > m)
                return vlai_fail(err, VLA_E_SHAPE,
                                 "'%s' takes columns %lld to %lld, but actions have %lld and states %lld columns",
                                 part->name, (long long)at, (long long)(at + part->dim - 1), (long long)n, (long long)m);
            if (part->rotation && part->dim != 3 && part->dim != 6)
                return vlai_fail(err, VLA_E_SHAPE, "'%s' is a relative rotation of %lld dims; 3 and 6 are known", part->name,
                                 (long long)part->dim);
            if (part->rotation)
                change_rotation(action + at, state + at, part->dim, back);
            else
                for (int64_t k = 0; k < part->dim; k++)
                    action[at + k] += back ? state[at + k] : -state[at + k];
        }
        at += part->dim;
    }
    return VLA_OK;
}

vla_status vlai_layout_relative(const vlai_layout *layout, float *action, int64_t n, const float *state, int64_t m,
                                vla_error *err)
{
    return change(layout, action, n, state, m, false, err);
}

vla_status vlai_layout_absolute(const vlai_layout *layout, float *action, int64_t n, const float *state, int64_t m,
                                vla_error *err)
{
    return change(layout, action, n, state, m, true, err);
}
