#include "format/mp4_impl.h"

#include "base/fail.h"
#include "base/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef vlai_span span;

enum { MOOV_LIMIT = 1 << 28 }; /* a header of 256 MiB would describe some ten million frames */

bool vlai_box_next(span *in, char type[5], span *body)
{
    if (in->size < 8)
        return false;
    uint64_t size = vlai_be32(in->data);
    size_t head = 8;
    memcpy(type, in->data + 4, 4);
    type[4] = 0;
    if (size == 1) {
        if (in->size < 16)
            return false;
        size = vlai_be64(in->data + 8);
        head = 16;
    } else if (size == 0) {
        size = in->size;
    }
    if (size < head || size > in->size)
        return false;
    body->data = in->data + head;
    body->size = (size_t)size - head;
    in->data += size;
    in->size -= (size_t)size;
    return true;
}

bool vlai_box_find(span in, const char *type, span *body)
{
    char got[5];
    while (vlai_box_next(&in, got, body))
        if (!strcmp(got, type))
            return true;
    return false;
}

/* A full box that starts with version/flags and a count of fixed-size entries. */
static bool table(span box, size_t entry, uint32_t *count, const uint8_t **entries)
{
    if (box.size < 8)
        return false;
    *count = vlai_be32(box.data + 4);
    *entries = box.data + 8;
    return (box.size - 8) / entry >= *count;
}

vla_status vlai_mp4_corrupt(const char *name, const char *what, vla_error *err)
{
    return vlai_fail(err, VLA_E_CORRUPT, "%s: damaged mp4: %s", name, what);
}

vla_status vlai_mp4_past_end(const char *name, int64_t sample, uint64_t offset, uint32_t size, uint64_t file_size, vla_error *err)
{
    return vlai_fail_hint(err, VLA_E_FORMAT, "the download or the recording was cut short: fetch the file again",
                          "%s: truncated: sample %lld lies past the end of the file (%llu + %u of %llu bytes)", name,
                          (long long)sample, (unsigned long long)offset, size, (unsigned long long)file_size);
}

/* --- codec configuration --- */

/* Descriptor length of an esds box: 7 bits a byte. */
static bool esds_length(span *in, size_t *length)
{
    size_t n = 0;
    for (int i = 0; i < 4; i++) {
        if (!in->size)
            return false;
        uint8_t b = *in->data;
        in->data++, in->size--;
        n = n << 7 | (b & 0x7f);
        if (!(b & 0x80))
            break;
    }
    *length = n;
    return n <= in->size;
}

/* DecoderSpecificInfo (tag 5) inside DecoderConfigDescriptor (4) inside ES_Descriptor (3). `object`: the type that the
 * decoder's descriptor begins with. */
static span esds_config(span in, int *object)
{
    span none = {NULL, 0};
    if (in.size < 4)
        return none;
    in.data += 4, in.size -= 4;
    while (in.size > 1) {
        uint8_t tag = *in.data;
        size_t length;
        in.data++, in.size--;
        if (!esds_length(&in, &length))
            return none;
        if (tag == 5)
            return (span){in.data, length};
        size_t skip = tag == 3 ? 3 : tag == 4 ? 13 : length;
        if (skip > in.size)
            return none;
        if (tag == 4)
            *object = *in.data;
        in.data += skip, in.size -= skip;
    }
    return none;
}

static vla_status read_entry(span stsd, const char *name, vlai_mp4 *out, vla_error *err)
{
    if (stsd.size < 8 || vlai_be32(stsd.data + 4) == 0)
        return vlai_mp4_corrupt(name, "no sample entry", err);
    span list = {stsd.data + 8, stsd.size - 8}, entry, box;
    if (!vlai_box_next(&list, out->codec, &entry) || entry.size < 78)
        return vlai_mp4_corrupt(name, "sample entry too short", err);
    out->width = (int)(vlai_be32(entry.data + 24) >> 16);
    out->height = (int)(vlai_be32(entry.data + 24) & 0xffff);
    span children = {entry.data + 78, entry.size - 78};
    static const char *const boxes[] = {"av1C", "avcC", "hvcC"};
    span config = {NULL, 0};
    for (size_t i = 0; i < sizeof boxes / sizeof *boxes; i++)
        if (vlai_box_find(children, boxes[i], &box))
            config = box;
    if (vlai_box_find(children, "esds", &box)) {
        enum { OBJECT_JPEG = 0x6c };
        int object = 0;
        config = esds_config(box, &object);
        if (object == OBJECT_JPEG)
            memcpy(out->codec, "jpeg", sizeof out->codec);
    }
    if (config.size) {
        enum { PADDING = 64 }; /* libavcodec reads past the end of its input */
        out->config = vlai_calloc(1, config.size + PADDING);
        if (!out->config)
            return vlai_nomem(err, config.size + PADDING);
        memcpy(out->config, config.data, config.size);
        out->config_size = config.size;
    }
    return VLA_OK;
}

/* --- sample tables --- */

static vla_status read_sizes(span stbl, const char *name, vlai_mp4 *out, vla_error *err)
{
    span box;
    if (!vlai_box_find(stbl, "stsz", &box) || box.size < 12)
        return vlai_mp4_corrupt(name, "no sample sizes (stsz)", err);
    uint32_t fixed = vlai_be32(box.data + 4), count = vlai_be32(box.data + 8);
    if (fixed ? (uint64_t)fixed * count > out->file_size : (box.size - 12) / 4 < count)
        return vlai_mp4_corrupt(name, "more samples than the file can hold", err);
    if (count > INT32_MAX)
        return vlai_mp4_corrupt(name, "too many samples", err);
    out->samples = vlai_calloc(count ? count : 1, sizeof *out->samples);
    if (!out->samples)
        return vlai_nomem(err, count * sizeof *out->samples);
    out->count = count;
    for (uint32_t i = 0; i < count; i++)
        out->samples[i].size = fixed ? fixed : vlai_be32(box.data + 12 + 4 * (size_t)i);
    return VLA_OK;
}

static vla_status read_offsets(span stbl, const char *name, vlai_mp4 *out, vla_error *err)
{
    span box;
    uint32_t runs, chunks;
    const uint8_t *run, *chunk;
    size_t width = 4;
    if (!vlai_box_find(stbl, "stsc", &box) || !table(box, 12, &runs, &run))
        return vlai_mp4_corrupt(name, "sample-to-chunk table (stsc)", err);
    if (!vlai_box_find(stbl, "stco", &box)) {
        width = 8;
        if (!vlai_box_find(stbl, "co64", &box))
            return vlai_mp4_corrupt(name, "no chunk offsets (stco)", err);
    }
    if (!table(box, width, &chunks, &chunk))
        return vlai_mp4_corrupt(name, "chunk offsets (stco) longer than their box", err);
    int64_t at = 0;
    for (uint32_t r = 0; r < runs && at < out->count; r++) {
        uint32_t first = vlai_be32(run + 12 * (size_t)r), per_chunk = vlai_be32(run + 12 * (size_t)r + 4);
        uint32_t end = r + 1 < runs ? vlai_be32(run + 12 * (size_t)(r + 1)) : chunks + 1;
        if (first == 0 || end < first || end > chunks + 1 || per_chunk == 0)
            return vlai_mp4_corrupt(name, "sample-to-chunk table (stsc)", err);
        for (uint32_t c = first; c < end && at < out->count; c++) {
            const uint8_t *p = chunk + width * (size_t)(c - 1);
            uint64_t offset = width == 4 ? vlai_be32(p) : vlai_be64(p);
            for (uint32_t k = 0; k < per_chunk && at < out->count; k++, at++) {
                vlai_mp4_sample *s = &out->samples[at];
                if (offset > out->file_size || s->size > out->file_size - offset)
                    return vlai_mp4_past_end(name, at, offset, s->size, out->file_size, err);
                s->offset = offset;
                offset += s->size;
            }
        }
    }
    return at == out->count ? VLA_OK : vlai_mp4_corrupt(name, "samples without a place in the file", err);
}

/* `end`: when the last sample ends, in decoding time. */
static vla_status read_times(span stbl, int64_t *end, const char *name, vlai_mp4 *out, vla_error *err)
{
    span box;
    uint32_t entries;
    const uint8_t *entry;
    if (!vlai_box_find(stbl, "stts", &box) || !table(box, 8, &entries, &entry))
        return vlai_mp4_corrupt(name, "no decoding times (stts)", err);
    int64_t at = 0, time = 0;
    for (uint32_t e = 0; e < entries; e++) {
        uint32_t n = vlai_be32(entry + 8 * (size_t)e), step = vlai_be32(entry + 8 * (size_t)e + 4);
        for (uint32_t k = 0; k < n && at < out->count; k++, at++) {
            out->samples[at].pts = time;
            time += step; /* at most 2^31 steps of 2^32 */
        }
    }
    *end = time;
    if (at != out->count)
        return vlai_mp4_corrupt(name, "fewer decoding times than samples", err);
    if (vlai_box_find(stbl, "ctts", &box)) {
        if (!table(box, 8, &entries, &entry))
            return vlai_mp4_corrupt(name, "composition offsets (ctts) longer than their box", err);
        at = 0;
        for (uint32_t e = 0; e < entries; e++) {
            uint32_t n = vlai_be32(entry + 8 * (size_t)e);
            int32_t shift = (int32_t)vlai_be32(entry + 8 * (size_t)e + 4);
            for (uint32_t k = 0; k < n && at < out->count; k++, at++)
                out->samples[at].pts += shift;
        }
    }
    bool all = !vlai_box_find(stbl, "stss", &box);
    if (!all && !table(box, 4, &entries, &entry))
        return vlai_mp4_corrupt(name, "key frame table (stss) longer than its box", err);
    for (int64_t i = 0; i < out->count && all; i++)
        out->samples[i].key = 1;
    for (uint32_t e = 0; e < entries && !all; e++) {
        uint32_t number = vlai_be32(entry + 4 * (size_t)e);
        if (number >= 1 && number <= out->count)
            out->samples[number - 1].key = 1;
    }
    return VLA_OK;
}

/* The first edit that shows media gives the time zero; an empty edit before it delays the start. */
static void read_edits(span trak, uint32_t movie_scale, uint32_t scale, int64_t *start, int64_t *delay, int64_t *end)
{
    span edts, elst;
    *start = *delay = 0;
    *end = INT64_MAX;
    uint32_t count;
    const uint8_t *entry;
    if (!vlai_box_find(trak, "edts", &edts) || !vlai_box_find(edts, "elst", &elst) || elst.size < 8)
        return;
    bool wide = elst.data[0] == 1;
    if (!table(elst, wide ? 20 : 12, &count, &entry))
        return;
    for (uint32_t i = 0; i < count; i++, entry += wide ? 20 : 12) {
        uint64_t duration = wide ? vlai_be64(entry) : vlai_be32(entry);
        int64_t time = wide ? (int64_t)vlai_be64(entry + 8) : (int32_t)vlai_be32(entry + 4);
        double ticks = movie_scale ? (double)duration * scale / movie_scale : 0;
        if (time < 0) {
            if (ticks < 1e15 && *delay < INT64_MAX / 8)
                *delay += (int64_t)ticks;
            continue;
        }
        if (time > INT64_MAX / 4)
            return;
        *start = time;
        if (count - i == 1 && duration && ticks < 1e15)
            *end = time + (int64_t)ticks;
        return;
    }
}

typedef struct shown_at {
    int64_t pts;
    int32_t sample;
} shown_at;

static int by_time(const void *a, const void *b)
{
    const shown_at *x = a, *y = b;
    return x->pts != y->pts ? (x->pts < y->pts ? -1 : 1) : x->sample < y->sample ? -1 : x->sample > y->sample;
}

static vla_status order_samples(const vlai_mp4_track *track, vlai_mp4 *out, vla_error *err)
{
    int64_t n = 0, start = track->start, delay = track->delay, end = track->end;
    shown_at *list = vlai_array((size_t)out->count + 1, sizeof *list);
    out->shown = vlai_array((size_t)out->count + 1, sizeof *out->shown);
    if (!list || !out->shown) {
        vlai_free(list);
        return vlai_nomem(err, (size_t)out->count * sizeof *list);
    }
    /* The movie's clock is coarse (milliseconds), so an edit may end up to one of its ticks before the last picture. */
    int64_t slack = out->timescale / 1000 + 1;
    if (out->count)
        out->samples[0].key = 1; /* decoding has to start somewhere */
    for (int64_t i = 0; i < out->count; i++) {
        int64_t pts = out->samples[i].pts;
        out->samples[i].pts = pts - start + delay;
        if (pts >= start && (end == INT64_MAX || pts < end + slack))
            list[n++] = (shown_at){pts, (int32_t)i};
    }
    qsort(list, (size_t)n, sizeof *list, by_time);
    for (int64_t i = 0; i < n; i++)
        out->shown[i] = list[i].sample;
    out->shown_count = n;
    vlai_free(list);
    return VLA_OK;
}

/* What the header says of fragments to come: the values of a sample of which they say nothing. */
static vla_status expect_fragments(span moov, span trak, vlai_mp4_track *track, const char *name, const vlai_mp4 *out,
                                   vla_error *err)
{
    span mvex, box;
    char type[5];
    if (!vlai_box_find(moov, "mvex", &mvex))
        return VLA_OK;
    if (!vlai_box_find(trak, "tkhd", &box) || box.size < 24)
        return vlai_mp4_corrupt(name, "no track header (tkhd)", err);
    track->id = vlai_be32(box.data + (box.data[0] == 1 ? 20 : 12));
    while (vlai_box_next(&mvex, type, &box)) {
        if (strcmp(type, "trex") || box.size < 24 || vlai_be32(box.data + 4) != track->id)
            continue;
        track->fragmented = true;
        track->duration = vlai_be32(box.data + 12);
        track->size = vlai_be32(box.data + 16);
        track->flags = vlai_be32(box.data + 20);
    }
    track->room = out->count ? out->count : 1;
    return VLA_OK;
}

/* `moov` is the body of the box; out->file_size is set. */
static vla_status read_moov(span moov, vlai_mp4_track *track, const char *name, vlai_mp4 *out, vla_error *err)
{
    span box, trak, mdia, minf, stbl, rest = moov;
    uint32_t movie_scale = 0;
    if (vlai_box_find(moov, "mvhd", &box) && box.size >= 24)
        movie_scale = vlai_be32(box.data + (box.data[0] == 1 ? 20 : 12));
    char type[5];
    while (vlai_box_next(&rest, type, &trak)) {
        if (strcmp(type, "trak") || !vlai_box_find(trak, "mdia", &mdia) || !vlai_box_find(mdia, "hdlr", &box) ||
            box.size < 12 || memcmp(box.data + 8, "vide", 4))
            continue;
        if (!vlai_box_find(mdia, "mdhd", &box) || box.size < 24)
            return vlai_mp4_corrupt(name, "no media header (mdhd)", err);
        out->timescale = vlai_be32(box.data + (box.data[0] == 1 ? 20 : 12));
        if (out->timescale == 0)
            return vlai_mp4_corrupt(name, "time scale of 0", err);
        if (!vlai_box_find(mdia, "minf", &minf) || !vlai_box_find(minf, "stbl", &stbl) || !vlai_box_find(stbl, "stsd", &box))
            return vlai_mp4_corrupt(name, "no sample table (stbl)", err);
        VLA_TRY(read_entry(box, name, out, err));
        VLA_TRY(read_sizes(stbl, name, out, err));
        VLA_TRY(read_offsets(stbl, name, out, err));
        VLA_TRY(read_times(stbl, &track->time, name, out, err));
        read_edits(trak, movie_scale, out->timescale, &track->start, &track->delay, &track->end);
        return expect_fragments(moov, trak, track, name, out, err);
    }
    return vlai_mp4_corrupt(name, "no video track", err);
}

static vla_status no_moov(const char *name, uint64_t size, vla_error *err)
{
    return vlai_fail_hint(err, VLA_E_FORMAT, "the download or the recording was cut short: fetch the file again",
                          "%s: truncated: no moov (%llu bytes), so the frames cannot be found", name,
                          (unsigned long long)size);
}

const char *vlai_file_fault(const char *path)
{
    struct stat st;
    if (stat(path, &st) != 0)
        return errno == ENOENT || errno == ENOTDIR ? "file-missing" : "file-unreadable";
    if (!S_ISREG(st.st_mode) || access(path, R_OK) != 0)
        return "file-unreadable";
    if (st.st_size == 0)
        return "file-empty";
    if (st.st_size > 1024) /* pointers are about 130 bytes */
        return NULL;
    char head[32] = {0};
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return NULL;
    ssize_t got = read(fd, head, sizeof head - 1);
    close(fd);
    return got > 0 && !strncmp(head, "version https://git-lfs", 23) ? "lfs-pointer" : NULL;
}

/* Where the bytes of a file come from: memory, or a descriptor when `data` is NULL. */
typedef struct source {
    const uint8_t *data;
    int fd;
    uint64_t size;
    const char *name;
} source;

static vla_status fetch(const source *from, uint64_t at, size_t size, uint8_t *out, vla_error *err)
{
    if (from->data) {
        memcpy(out, from->data + at, size);
        return VLA_OK;
    }
    for (size_t got = 0; got < size;) {
        ssize_t n = pread(from->fd, out + got, size - got, (off_t)(at + got));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return vlai_fail(err, VLA_E_IO, "%s: cannot read: %s", from->name, n < 0 ? strerror(errno) : "file shrank");
        got += (size_t)n;
    }
    return VLA_OK;
}

/* A box of the top level. */
typedef struct top_box {
    char type[5];
    uint64_t at, body, size; /* of the box; where its body begins; how long that is */
} top_box;

/* The box at `at`; *fits is false when there is none that lies in the file. */
static vla_status look_at_box(const source *from, uint64_t at, top_box *box, bool *fits, vla_error *err)
{
    uint8_t head[16] = {0};
    uint64_t left = from->size - at;
    *fits = left >= 8;
    if (!*fits)
        return VLA_OK;
    VLA_TRY(fetch(from, at, left < sizeof head ? (size_t)left : sizeof head, head, err));
    uint64_t size = vlai_be32(head), header = 8;
    if (size == 1) {
        size = vlai_be64(head + 8);
        header = 16;
    } else if (size == 0) {
        size = left;
    }
    *box = (top_box){.at = at, .body = at + header, .size = size - header};
    memcpy(box->type, head + 4, 4);
    *fits = size >= header && size <= left;
    return VLA_OK;
}

/* The body of a box that is read as a whole (vlai_free). */
static vla_status load_box(const source *from, const top_box *box, span *out, vla_error *err)
{
    *out = (span){NULL, 0};
    if (box->size > MOOV_LIMIT)
        return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: header of %llu bytes is too large", from->name,
                         (unsigned long long)box->size);
    uint8_t *data = vlai_alloc(box->size ? (size_t)box->size : 1);
    if (!data)
        return vlai_nomem(err, (size_t)box->size);
    vla_status status = fetch(from, box->body, (size_t)box->size, data, err);
    if (status == VLA_OK)
        *out = (span){data, (size_t)box->size};
    else
        vlai_free(data);
    return status;
}

static bool begins_mp4(const char *type)
{
    static const char *const types[] = {"ftyp", "moov", "mdat", "free", "wide", "skip"};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (!strcmp(type, types[i]))
            return true;
    return false;
}

/* Walks the top-level boxes to the moof boxes; only those are read. */
static vla_status read_fragments(const source *from, vlai_mp4_track *track, vlai_mp4 *out, vla_error *err)
{
    top_box box;
    bool fits = true;
    for (uint64_t at = 0; at < from->size; at = box.body + box.size) {
        VLA_TRY(look_at_box(from, at, &box, &fits, err));
        if (!fits)
            return vlai_fail_hint(err, VLA_E_FORMAT, "the download or the recording was cut short: fetch the file again, or "
                                  "keep its whole fragments by ffmpeg -i IN -c copy OUT.mp4",
                                  "%s: truncated: the fragment at byte %llu ends past the end of the file (%llu bytes)",
                                  from->name, (unsigned long long)at, (unsigned long long)from->size);
        if (strcmp(box.type, "moof"))
            continue;
        span moof;
        VLA_TRY(load_box(from, &box, &moof, err));
        vla_status status = vlai_mp4_fragment(moof, box.at, track, from->name, out, err);
        vlai_free((void *)moof.data);
        VLA_TRY(status);
    }
    return VLA_OK;
}

/* Walks the top-level boxes to `moov`; only that one is read. */
static vla_status read_source(const source *from, vlai_mp4 *out, vla_error *err)
{
    top_box box;
    bool fits = true;
    out->file_size = from->size;
    for (uint64_t at = 0;; at = box.body + box.size) {
        VLA_TRY(look_at_box(from, at, &box, &fits, err));
        if (at == 0 && from->size >= 8 && !begins_mp4(box.type))
            return vlai_fail(err, VLA_E_CORRUPT, "%s: not an mp4 file (%llu bytes)", from->name, (unsigned long long)from->size);
        if (!fits)
            return no_moov(from->name, from->size, err);
        if (!strcmp(box.type, "moov"))
            break;
    }
    span moov;
    vlai_mp4_track track = {0};
    VLA_TRY(load_box(from, &box, &moov, err));
    vla_status status = read_moov(moov, &track, from->name, out, err);
    vlai_free((void *)moov.data);
    if (status == VLA_OK && track.fragmented) {
        track.end = INT64_MAX; /* an edit's length is that of the header's own samples */
        status = read_fragments(from, &track, out, err);
    }
    return status == VLA_OK ? order_samples(&track, out, err) : status;
}

vla_status vlai_mp4_parse(const uint8_t *data, size_t size, const char *name, vlai_mp4 *out, vla_error *err)
{
    *out = (vlai_mp4){0};
    const source from = {.data = data, .fd = -1, .size = size, .name = name};
    vla_status status = read_source(&from, out, err);
    if (status != VLA_OK)
        vlai_mp4_fini(out);
    return status;
}

vla_status vlai_mp4_read(const char *path, vlai_mp4 *out, vla_error *err)
{
    *out = (vlai_mp4){0};
    const char *fault = vlai_file_fault(path);
    if (fault && !strcmp(fault, "lfs-pointer")) {
        struct stat st = {0};
        stat(path, &st);
        return vlai_fail_hint(err, VLA_E_FORMAT, "fetch the real file: git lfs pull, or download the set again",
                              "%s: a Git-LFS pointer (%lld bytes of text), not a video", path, (long long)st.st_size);
    }
    if (fault && !strcmp(fault, "file-empty"))
        return vlai_fail_hint(err, VLA_E_FORMAT, "download the file again", "%s: empty file (0 bytes)", path);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe that nobody writes to is no reason to wait */
    if (fd < 0)
        return vlai_fail(err, errno == ENOENT ? VLA_E_NOT_FOUND : VLA_E_IO, "%s: cannot open: %s", path, strerror(errno));
    struct stat st;
    vla_status status;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        status = vlai_fail(err, VLA_E_IO, "%s: not a regular file", path);
    } else {
        const source from = {.fd = fd, .size = (uint64_t)st.st_size, .name = path};
        status = read_source(&from, out, err);
    }
    close(fd);
    if (status != VLA_OK)
        vlai_mp4_fini(out);
    return status;
}

void vlai_mp4_fini(vlai_mp4 *mp4)
{
    vlai_free(mp4->samples);
    vlai_free(mp4->shown);
    vlai_free(mp4->config);
    *mp4 = (vlai_mp4){0};
}
