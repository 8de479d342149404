/* A contract against a data set: what would train on the wrong numbers or pictures is refused before the first step. */
#include "data/contract.h"

#include "base/fail.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const vlai_contract_camera *mapped(const vlai_contract *c, const char *key)
{
    for (size_t i = 0; i < c->camera_count; i++)
        if (!strcmp(c->cameras[i].key, key))
            return &c->cameras[i];
    return NULL;
}

static bool has_camera(const vla_dataset *set, const char *key)
{
    for (int64_t i = 0; i < vla_dataset_info_get(set)->cameras; i++)
        if (!strcmp(vla_dataset_camera(set, i)->name, key))
            return true;
    return false;
}

/* Which view an unmapped camera most likely is, by the words in its name. */
static const char *guess_view(const char *key)
{
    bool wrist = strstr(key, "wrist") || strstr(key, "hand") || strstr(key, "gripper");
    if (strstr(key, "left"))
        return "left_wrist_view";
    return wrist || strstr(key, "right") ? "right_wrist_view" : "face_view";
}

static vla_status check_cameras(const vlai_contract *c, const vla_dataset *set, vla_error *err)
{
    const vla_dataset_info *info = vla_dataset_info_get(set);
    vlai_text missing = {0}, unmapped = {0}, have = {0}, map = {0}, line = {0};
    for (size_t i = 0; i < c->camera_count; i++) {
        vlai_text_printf(&map, "%s'%s': %s", i ? ", " : "", c->cameras[i].key, c->cameras[i].view);
        if (!has_camera(set, c->cameras[i].key))
            vlai_text_printf(&missing, "%s'%s'", missing.size ? ", " : "", c->cameras[i].key);
    }
    for (int64_t i = 0; i < info->cameras; i++) {
        const char *key = vla_dataset_camera(set, i)->name;
        vlai_text_printf(&have, "%s'%s'", i ? ", " : "", key);
        const vlai_contract_camera *camera = mapped(c, key);
        if (!camera && vla_dataset_camera(set, i)->is_depth)
            continue; /* no picture for this policy */
        if (!camera)
            vlai_text_printf(&unmapped, "%s'%s'", unmapped.size ? ", " : "", key);
        vlai_text_printf(&line, "%s%s: %s", i ? ", " : "", key, camera ? camera->view : guess_view(key));
    }
    vla_status status = VLA_OK;
    if (missing.size || unmapped.size) {
        status = vlai_fail(err, VLA_E_INVALID,
                           "data.key_mappings.camera and the data set %s do not fit: %s%s%s%s%s; mapping: %s; the set's cameras: %s",
                           info->root, missing.size ? "not in the set: " : "", missing.size ? missing.data : "",
                           missing.size && unmapped.size ? "; " : "", unmapped.size ? "not mapped: " : "",
                           unmapped.size ? unmapped.data : "", map.data ? map.data : "none", have.data ? have.data : "none");
        vlai_hint(err, status, "write data.key_mappings.camera: {%s}", line.data ? line.data : "");
    }
    vlai_text_fini(&missing);
    vlai_text_fini(&unmapped);
    vlai_text_fini(&have);
    vlai_text_fini(&map);
    vlai_text_fini(&line);
    return status;
}

/* The table of slots: which column of the data set goes where. */
static void put_slots(const vlai_layout *layout, const vla_feature *feature, vlai_text *out)
{
    int64_t at = 0;
    for (int i = 0; i < layout->count; i++) {
        const vlai_layout_part *part = &layout->parts[i];
        if (part->skipped) {
            vlai_text_printf(out, "\n  %s %" PRId64 ": no column", part->name, part->dim);
            continue;
        }
        vlai_text_printf(out, "\n  %s %" PRId64 ":", part->name, part->dim);
        for (int64_t k = 0; k < part->dim; k++, at++) {
            if (at >= feature->dim)
                vlai_text_puts(out, " -");
            else if (at < feature->name_count)
                vlai_text_printf(out, " %s", feature->names[at]);
            else
                vlai_text_printf(out, " [%" PRId64 "]", at);
        }
    }
    for (; at < feature->dim; at++) {
        if (at < feature->name_count)
            vlai_text_printf(out, "\n  no slot: %s", feature->names[at]);
        else
            vlai_text_printf(out, "\n  no slot: [%" PRId64 "]", at);
    }
}

static vla_status check_vector(const vlai_layout *layout, const char *layout_name, const vlai_norm *norm, const char *key,
                               const vla_dataset *set, vlai_text *notes, vla_error *err)
{
    const vla_feature *feature = vla_dataset_find(set, key);
    if (!feature || feature->kind != VLA_FEATURE_NUMBER) {
        vlai_text known = {0};
        for (int64_t i = 0; i < vla_dataset_info_get(set)->features; i++) {
            const vla_feature *f = vla_dataset_feature(set, i);
            if (f->kind == VLA_FEATURE_NUMBER && f->dim > 1)
                vlai_text_printf(&known, "%s'%s' (%" PRId64 ")", known.size ? ", " : "", f->name, f->dim);
        }
        vla_status status = vlai_fail_hint(err, VLA_E_NOT_FOUND, "correct data.key_mappings",
                                           "data set %s has no number column '%s'; there are: %s",
                                           vla_dataset_info_get(set)->root, key, known.data ? known.data : "none");
        vlai_text_fini(&known);
        return status;
    }
    if (feature->dim != layout->width && !(layout->six && feature->dim == layout->euler)) {
        vlai_text slots = {0};
        put_slots(layout, feature, &slots);
        vla_status status = vlai_fail_hint(
            err, VLA_E_SHAPE, "make the widths of the parts that are not padding add up to the column's",
            "column '%s' has %" PRId64 " dimensions and task.%s has slots for %" PRId64 ":%s", key, feature->dim, layout_name,
            layout->width, slots.data ? slots.data : "");
        vlai_text_fini(&slots);
        return status;
    }
    if (!notes)
        return VLA_OK;
    int64_t width = layout->six && feature->dim == layout->euler ? layout->width : feature->dim;
    if (norm->dims > width)
        vlai_text_printf(notes, "Truncating LeRobot %s norm stat from %" PRId64 " to %" PRId64 " dims\n", key, norm->dims, width);
    if (norm->dims < width)
        vlai_text_printf(notes, "Padding LeRobot %s norm stat from %" PRId64 " to %" PRId64 " dims\n", key, norm->dims, width);
    for (int64_t i = 0; i < norm->dims && i < width; i++) {
        const char *oddity = vlai_norm_oddity(norm, i);
        if (!oddity)
            continue;
        int64_t within;
        const char *slot = vlai_layout_name(layout, i, &within);
        char std[32] = "unknown";
        if (!isnan(norm->std[i]))
            snprintf(std, sizeof std, "%.6g", norm->std[i]);
        bool constant = !strcmp(oddity, "constant"), reversed = !strcmp(oddity, "reversed");
        vlai_text_printf(notes,
                         "'%s' dim %" PRId64 " (%s[%" PRId64 "]%s%s) has %s: q01 %.6g, q99 %.6g, std %s; %s\n", key, i, slot,
                         within, i < feature->name_count ? ", " : "", i < feature->name_count ? feature->names[i] : "",
                         constant ? "no range" : reversed ? "a reversed range" : oddity, norm->q01[i], norm->q99[i], std,
                         constant   ? "it is scaled by 1 instead: x - q01 doubled, less 1"
                         : reversed ? "q01 should not exceed q99: its sign is turned around"
                                    : "it is scaled as it is, so small noise in it becomes large");
    }
    return VLA_OK;
}

vla_status vlai_contract_check_set(const vlai_contract *c, const vla_dataset *set, vlai_text *notes, vla_error *err)
{
    VLA_TRY(check_cameras(c, set, err));
    VLA_TRY(check_vector(&c->pos, "agent_pos_config", &c->state, c->state_key, set, notes, err));
    VLA_TRY(check_vector(&c->dof, "dof_config", &c->action, c->action_key, set, notes, err));
    return notes ? vlai_text_status(notes, err) : VLA_OK;
}
