/* Any bytes as the metadata of a dataset: meta/info.json, a zero byte, meta/episodes.jsonl. Whatever is taken must keep the
 * promises that the rest of the reader builds on: bounded shapes, ascending episodes, paths that stay inside. */
#include "base/memory.h"
#include "data/episodes.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void ignore(const vlai_finding *finding, void *user)
{
    (void)user;
    if (!finding->message[0])
        __builtin_trap();
}

static void check_features(const vla_dataset *set)
{
    for (int64_t i = 0; i < set->feature_count; i++) {
        const vla_feature *f = &set->features[i];
        int64_t product = 1;
        for (int d = 0; d < f->rank; d++)
            product *= f->shape[d];
        if (f->rank > 8 || f->dim < 1 || f->dim > (1 << 30) || product != f->dim || strchr(f->name, '/'))
            __builtin_trap();
    }
}

static void check_paths(const vla_dataset *set)
{
    const char *const templates[] = {set->data_path, set->video_path};
    for (int t = 0; t < 2; t++) {
        char path[2048];
        vlai_template_fields fields = {.episode_chunk = 3, .episode_index = 3456, .chunk_index = 1, .file_index = 999,
                                       .video_key = "cam"};
        if (templates[t] && vlai_template_fill(templates[t], &fields, path, sizeof path, NULL) == VLA_OK &&
            vlai_path_escapes(path))
            __builtin_trap();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *zero = memchr(data, 0, size);
    size_t first = zero ? (size_t)(zero - data) : size;
    vla_dataset *set;
    vla_error err = VLA_ERROR_INIT;
    if (vlai_set_create("fuzz", &set, &err) != VLA_OK)
        return 0;
    vlai_findings findings = {.report = ignore};
    if (vlai_info_parse(set, (const char *)data, first, &findings, &err) == VLA_OK && set->version) {
        check_features(set);
        check_paths(set);
        if (zero)
            (void)vlai_episodes_parse(set, (const char *)zero + 1, size - first - 1, &findings, &err);
        for (int64_t i = 0; i < set->episode_count; i++)
            if (set->episodes[i].length < 0 || (i && set->episodes[i].index <= set->episodes[i - 1].index) ||
                vlai_set_episode(set, set->episodes[i].index) != i)
                __builtin_trap();
    }
    vla_dataset_close(set);
    return 0;
}
