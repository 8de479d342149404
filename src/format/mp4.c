#include "format/mp4.h"

#include "base/fail.h"
#include "base/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A box body, or any part of one. */
typedef struct span {
    const uint8_t *data;
    size_t size;
} span;

enum { MOOV_LIMIT = 1 << 28 }; /* a header of 256 MiB would describe some ten million frames */

static uint32_t be32(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static uint64_t be64(const uint8_t *p)
{
    return (uint64_t)be32(p) << 32 | be32(p + 4);
}

/* Takes the next child box off `in`. False at the end or when the box does not fit. */
static bool next_box(span *in, char type[5], span *body)
{
    if (in->size < 8)
        return false;
    uint64_t size = be32(in->data);
    size_t head = 8;
    memcpy(type, in->data + 4, 4);
    type[4] = 0;
    if (size == 1) {
        if (in->size < 16)
            return false;
        size = be64(in->data + 8);
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

static bool find_box(span in, const char *type, span *body)
{
    char got[5];
    while (next_box(&in, got, body))
        if (!strcmp(got, type))
            return true;
    return false;
}

/* A full box that starts with version/flags and a count of fixed-size entries. */
static bool table(span box, size_t entry, uint32_t *count, const uint8_t **entries)
{
    if (box.size < 8)
        return false;
    *count = be32(box.data + 4);
    *entries = box.data + 8;
    return (box.size - 8) / entry >= *count;
}

static vla_status corrupt(const char *name, const char *what, vla_error *err)
{
    return vlai_fail(err, VLA_E_CORRUPT, "%s: damaged mp4: %s", name, what);
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
    if (stsd.size < 8 || be32(stsd.data + 4) == 0)
        return corrupt(name, "no sample entry", err);
    span list = {stsd.data + 8, stsd.size - 8}, entry, box;
    if (!next_box(&list, out->codec, &entry) || entry.size < 78)
        return corrupt(name, "sample entry too short", err);
    out->width = (int)(be32(entry.data + 24) >> 16);
    out->height = (int)(be32(entry.data + 24) & 0xffff);
    span children = {entry.data + 78, entry.size - 78};
    static const char *const boxes[] = {"av1C", "avcC", "hvcC"};
    span config = {NULL, 0};
    for (size_t i = 0; i < sizeof boxes / sizeof *boxes; i++)
        if (find_box(children, boxes[i], &box))
            config = box;
    if (find_box(children, "esds", &box)) {
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
    if (!find_box(stbl, "stsz", &box) || box.size < 12)
        return corrupt(name, "no sample sizes (stsz)", err);
    uint32_t fixed = be32(box.data + 4), count = be32(box.data + 8);
    if (fixed ? (uint64_t)fixed * count > out->file_size : (box.size - 12) / 4 < count)
        return corrupt(name, "more samples than the file can hold", err);
    if (count > INT32_MAX)
        return corrupt(name, "too many samples", err);
    out->samples = vlai_calloc(count ? count : 1, sizeof *out->samples);
    if (!out->samples)
        return vlai_nomem(err, count * sizeof *out->samples);
    out->count = count;
    for (uint32_t i = 0; i < count; i++)
        out->samples[i].size = fixed ? fixed : be32(box.data + 12 + 4 * (size_t)i);
    return VLA_OK;
}

static vla_status read_offsets(span stbl, const char *name, vlai_mp4 *out, vla_error *err)
{
    span box;
    uint32_t runs, chunks;
    const uint8_t *run, *chunk;
    size_t width = 4;
    if (!find_box(stbl, "stsc", &box) || !table(box, 12, &runs, &run))
        return corrupt(name, "sample-to-chunk table (stsc)", err);
    if (!find_box(stbl, "stco", &box)) {
        width = 8;
        if (!find_box(stbl, "co64", &box))
            return corrupt(name, "no chunk offsets (stco)", err);
    }
    if (!table(box, width, &chunks, &chunk))
        return corrupt(name, "chunk offsets (stco) longer than their box", err);
    int64_t at = 0;
    for (uint32_t r = 0; r < runs && at < out->count; r++) {
        uint32_t first = be32(run + 12 * (size_t)r), per_chunk = be32(run + 12 * (size_t)r + 4);
        uint32_t end = r + 1 < runs ? be32(run + 12 * (size_t)(r + 1)) : chunks + 1;
        if (first == 0 || end < first || end > chunks + 1 || per_chunk == 0)
            return corrupt(name, "sample-to-chunk table (stsc)", err);
        for (uint32_t c = first; c < end && at < out->count; c++) {
            const uint8_t *p = chunk + width * (size_t)(c - 1);
            uint64_t offset = width == 4 ? be32(p) : be64(p);
            for (uint32_t k = 0; k < per_chunk && at < out->count; k++, at++) {
                vlai_mp4_sample *s = &out->samples[at];
                if (offset > out->file_size || s->size > out->file_size - offset)
                    return vlai_fail_hint(err, VLA_E_FORMAT, "the download was cut short: fetch the file again",
                                          "%s: truncated: sample %lld lies past the end of the file (%llu + %u of %llu "
                                          "bytes)",
                                          name, (long long)at, (unsigned long long)offset, s->size,
                                          (unsigned long long)out->file_size);
                s->offset = offset;
                offset += s->size;
            }
        }
    }
    return at == out->count ? VLA_OK : corrupt(name, "samples without a place in the file", err);
}

static vla_status read_times(span stbl, const char *name, vlai_mp4 *out, vla_error *err)
{
    span box;
    uint32_t entries;
    const uint8_t *entry;
    if (!find_box(stbl, "stts", &box) || !table(box, 8, &entries, &entry))
        return corrupt(name, "no decoding times (stts)", err);
    int64_t at = 0, time = 0;
    for (uint32_t e = 0; e < entries; e++) {
        uint32_t n = be32(entry + 8 * (size_t)e), step = be32(entry + 8 * (size_t)e + 4);
        for (uint32_t k = 0; k < n && at < out->count; k++, at++) {
            out->samples[at].pts = time;
            time += step; /* at most 2^31 steps of 2^32 */
        }
    }
    if (at != out->count)
        return corrupt(name, "fewer decoding times than samples", err);
    if (find_box(stbl, "ctts", &box)) {
        if (!table(box, 8, &entries, &entry))
            return corrupt(name, "composition offsets (ctts) longer than their box", err);
        at = 0;
        for (uint32_t e = 0; e < entries; e++) {
            uint32_t n = be32(entry + 8 * (size_t)e);
            int32_t shift = (int32_t)be32(entry + 8 * (size_t)e + 4);
            for (uint32_t k = 0; k < n && at < out->count; k++, at++)
                out->samples[at].pts += shift;
        }
    }
    bool all = !find_box(stbl, "stss", &box);
    if (!all && !table(box, 4, &entries, &entry))
        return corrupt(name, "key frame table (stss) longer than its box", err);
    for (int64_t i = 0; i < out->count && all; i++)
        out->samples[i].key = 1;
    for (uint32_t e = 0; e < entries && !all; e++) {
        uint32_t number = be32(entry + 4 * (size_t)e);
        if (number >= 1 && number <= out->count)
            out->samples[number - 1].key = 1;
    }
    if (out->count)
        out->samples[0].key = 1; /* decoding has to start somewhere */
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
    if (!find_box(trak, "edts", &edts) || !find_box(edts, "elst", &elst) || elst.size < 8)
        return;
    bool wide = elst.data[0] == 1;
    if (!table(elst, wide ? 20 : 12, &count, &entry))
        return;
    for (uint32_t i = 0; i < count; i++, entry += wide ? 20 : 12) {
        uint64_t duration = wide ? be64(entry) : be32(entry);
        int64_t time = wide ? (int64_t)be64(entry + 8) : (int32_t)be32(entry + 4);
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

static vla_status order_samples(int64_t start, int64_t delay, int64_t end, vlai_mp4 *out, vla_error *err)
{
    int64_t n = 0;
    shown_at *list = vlai_array((size_t)out->count + 1, sizeof *list);
    out->shown = vlai_array((size_t)out->count + 1, sizeof *out->shown);
    if (!list || !out->shown) {
        vlai_free(list);
        return vlai_nomem(err, (size_t)out->count * sizeof *list);
    }
    /* The movie's clock is coarse (milliseconds), so an edit may end up to one of its ticks before the last picture. */
    int64_t slack = out->timescale / 1000 + 1;
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

/* `moov` is the body of the box; out->file_size is set. */
static vla_status read_moov(span moov, const char *name, vlai_mp4 *out, vla_error *err)
{
    span box, trak, mdia, minf, stbl, rest = moov;
    uint32_t movie_scale = 0;
    if (find_box(moov, "mvhd", &box) && box.size >= 24)
        movie_scale = be32(box.data + (box.data[0] == 1 ? 20 : 12));
    char type[5];
    while (next_box(&rest, type, &trak)) {
        if (strcmp(type, "trak") || !find_box(trak, "mdia", &mdia) || !find_box(mdia, "hdlr", &box) || box.size < 12 ||
            memcmp(box.data + 8, "vide", 4))
            continue;
        if (!find_box(mdia, "mdhd", &box) || box.size < 24)
            return corrupt(name, "no media header (mdhd)", err);
        out->timescale = be32(box.data + (box.data[0] == 1 ? 20 : 12));
        if (out->timescale == 0)
            return corrupt(name, "time scale of 0", err);
        if (!find_box(mdia, "minf", &minf) || !find_box(minf, "stbl", &stbl) || !find_box(stbl, "stsd", &box))
            return corrupt(name, "no sample table (stbl)", err);
        VLA_TRY(read_entry(box, name, out, err));
        VLA_TRY(read_sizes(stbl, name, out, err));
        if (out->count == 0 && find_box(moov, "mvex", &box))
            return vlai_fail_hint(err, VLA_E_UNSUPPORTED, "join it into a plain mp4 first: ffmpeg -i IN -c copy OUT.mp4",
                                  "%s: a fragmented mp4, which is not read", name);
        VLA_TRY(read_offsets(stbl, name, out, err));
        VLA_TRY(read_times(stbl, name, out, err));
        int64_t start, delay, end;
        read_edits(trak, movie_scale, out->timescale, &start, &delay, &end);
        return order_samples(start, delay, end, out, err);
    }
    return corrupt(name, "no video track", err);
}

static vla_status no_moov(const char *name, uint64_t size, vla_error *err)
{
    return vlai_fail_hint(err, VLA_E_FORMAT, "the download or the recording was cut short: fetch the file again",
                          "%s: truncated: no moov (%llu bytes), so the frames cannot be found", name,
                          (unsigned long long)size);
}

vla_status vlai_mp4_parse(const uint8_t *data, size_t size, const char *name, vlai_mp4 *out, vla_error *err)
{
    *out = (vlai_mp4){.file_size = size};
    span moov;
    if (!find_box((span){data, size}, "moov", &moov))
        return no_moov(name, size, err);
    vla_status status = read_moov(moov, name, out, err);
    if (status != VLA_OK)
        vlai_mp4_fini(out);
    return status;
}

const char *vlai_file_fault(const char *path)
{
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISREG(st.st_mode))
        return "file-missing";
    if (st.st_size == 0)
        return "file-empty";
    if (st.st_size > 1024) /* pointers are about 130 bytes */
        return NULL;
    char head[32] = {0};
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    ssize_t got = read(fd, head, sizeof head - 1);
    close(fd);
    return got > 0 && !strncmp(head, "version https://git-lfs", 23) ? "lfs-pointer" : NULL;
}

/* Walks the top-level boxes on disk to `moov`; only that one is read into memory. */
static vla_status find_moov(int fd, uint64_t file_size, const char *path, uint64_t *offset, size_t *size, vla_error *err)
{
    uint64_t at = 0;
    while (file_size - at >= 8) {
        uint8_t head[16] = {0};
        ssize_t got = pread(fd, head, sizeof head, (off_t)at);
        if (got < 8)
            break;
        uint64_t box = be32(head), header = 8;
        if (box == 1) {
            box = be64(head + 8);
            header = 16;
        } else if (box == 0) {
            box = file_size - at;
        }
        if (at == 0 && memcmp(head + 4, "ftyp", 4) && memcmp(head + 4, "moov", 4) && memcmp(head + 4, "mdat", 4) &&
            memcmp(head + 4, "free", 4) && memcmp(head + 4, "wide", 4) && memcmp(head + 4, "skip", 4))
            return vlai_fail(err, VLA_E_CORRUPT, "%s: not an mp4 file (%llu bytes)", path, (unsigned long long)file_size);
        if (box < header || box > file_size - at)
            break;
        if (!memcmp(head + 4, "moov", 4)) {
            if (box - header > MOOV_LIMIT)
                return vlai_fail(err, VLA_E_UNSUPPORTED, "%s: header of %llu bytes is too large", path,
                                 (unsigned long long)box);
            *offset = at + header;
            *size = (size_t)(box - header);
            return VLA_OK;
        }
        at += box;
    }
    return no_moov(path, file_size, err);
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
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return vlai_fail(err, errno == ENOENT ? VLA_E_NOT_FOUND : VLA_E_IO, "%s: cannot open: %s", path, strerror(errno));
    vla_status status;
    uint8_t *data = NULL;
    struct stat st;
    uint64_t offset = 0;
    size_t size = 0, got = 0;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        status = vlai_fail(err, VLA_E_IO, "%s: not a regular file", path);
        goto done;
    }
    out->file_size = (uint64_t)st.st_size;
    VLA_TRY_GOTO(find_moov(fd, out->file_size, path, &offset, &size, err), done);
    data = vlai_alloc(size ? size : 1);
    if (!data) {
        status = vlai_nomem(err, size);
        goto done;
    }
    while (got < size) {
        ssize_t n = pread(fd, data + got, size - got, (off_t)(offset + got));
        if (n <= 0) {
            status = vlai_fail(err, VLA_E_IO, "%s: cannot read: %s", path, n < 0 ? strerror(errno) : "file shrank");
            goto done;
        }
        got += (size_t)n;
    }
    status = read_moov((span){data, size}, path, out, err);
done:
    vlai_free(data);
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
