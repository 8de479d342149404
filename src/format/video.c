#include "format/video.h"

#include "base/fail.h"
#include "base/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <libavcodec/avcodec.h>
#include <libavutil/imgutils.h>
#include <libavutil/pixdesc.h>
#include <libswscale/swscale.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct vlai_clip {
    atomic_int owners;
    vlai_mp4 mp4;
    enum AVCodecID codec;
    int32_t *key_of; /* per sample: the sample at which decoding starts */
    int64_t gop;
    char *path;
};

/* --- clips --- */

static const struct {
    char entry[5];
    enum AVCodecID codec;
} codecs[] = {
    {"av01", AV_CODEC_ID_AV1},  {"avc1", AV_CODEC_ID_H264}, {"avc3", AV_CODEC_ID_H264},  {"hvc1", AV_CODEC_ID_HEVC},
    {"hev1", AV_CODEC_ID_HEVC}, {"vp09", AV_CODEC_ID_VP9},  {"mp4v", AV_CODEC_ID_MPEG4}, {"jpeg", AV_CODEC_ID_MJPEG},
    {"mjpa", AV_CODEC_ID_MJPEG},
};

vla_status vlai_clip_open(const char *path, vlai_clip **out, vla_error *err)
{
    *out = NULL;
    vlai_clip *clip = vlai_calloc(1, sizeof *clip);
    if (!clip)
        return vlai_nomem(err, sizeof *clip);
    atomic_init(&clip->owners, 1);
    vla_status status;
    VLA_TRY_GOTO(vlai_mp4_read(path, &clip->mp4, err), fail);
    clip->path = vlai_strdup(path);
    clip->key_of = vlai_array((size_t)clip->mp4.count + 1, sizeof *clip->key_of);
    if (!clip->path || !clip->key_of) {
        status = vlai_nomem(err, (size_t)clip->mp4.count * sizeof *clip->key_of);
        goto fail;
    }
    for (size_t i = 0; i < sizeof codecs / sizeof *codecs; i++)
        if (!strcmp(codecs[i].entry, clip->mp4.codec))
            clip->codec = codecs[i].codec;
    int32_t key = 0, before = 0;
    for (int64_t i = 0; i < clip->mp4.count; i++) {
        if (clip->mp4.samples[i].key) {
            before = key;
            key = (int32_t)i;
        }
        /* Pictures shown before their key frame (an open group) refer to the group before it too. */
        clip->key_of[i] = clip->mp4.samples[i].pts < clip->mp4.samples[key].pts ? before : key;
        if (i - key + 1 > clip->gop)
            clip->gop = i - key + 1;
    }
    *out = clip;
    return VLA_OK;
fail:
    vlai_clip_close(clip);
    return status;
}

vlai_clip *vlai_clip_share(vlai_clip *clip)
{
    atomic_fetch_add(&clip->owners, 1);
    return clip;
}

void vlai_clip_close(vlai_clip *clip)
{
    if (!clip || atomic_fetch_sub(&clip->owners, 1) != 1)
        return;
    vlai_mp4_fini(&clip->mp4);
    vlai_free(clip->key_of);
    vlai_free(clip->path);
    vlai_free(clip);
}

const char *vlai_clip_path(const vlai_clip *clip)
{
    return clip->path;
}

const char *vlai_clip_codec(const vlai_clip *clip)
{
    return clip->codec == AV_CODEC_ID_NONE ? clip->mp4.codec : avcodec_get_name(clip->codec);
}

int64_t vlai_clip_frames(const vlai_clip *clip)
{
    return clip->mp4.shown_count;
}

int vlai_clip_width(const vlai_clip *clip)
{
    return clip->mp4.width;
}

int vlai_clip_height(const vlai_clip *clip)
{
    return clip->mp4.height;
}

static int64_t pts_of(const vlai_clip *clip, int64_t ordinal)
{
    return clip->mp4.samples[clip->mp4.shown[ordinal]].pts;
}

double vlai_clip_time(const vlai_clip *clip, int64_t ordinal)
{
    return (double)pts_of(clip, ordinal) / clip->mp4.timescale;
}

double vlai_clip_fps(const vlai_clip *clip)
{
    int64_t n = clip->mp4.shown_count;
    double span = n < 2 ? 0 : vlai_clip_time(clip, n - 1) - vlai_clip_time(clip, 0);
    return span > 0 ? (double)(n - 1) / span : 0;
}

int64_t vlai_clip_gop(const vlai_clip *clip)
{
    return clip->gop;
}

int64_t vlai_clip_nearest(const vlai_clip *clip, double seconds)
{
    int64_t low = 0, high = clip->mp4.shown_count - 1;
    if (high < 0)
        return -1;
    while (low < high) { /* first frame at or after */
        int64_t middle = low + (high - low) / 2;
        if (vlai_clip_time(clip, middle) < seconds)
            low = middle + 1;
        else
            high = middle;
    }
    if (low > 0 && seconds - vlai_clip_time(clip, low - 1) <= vlai_clip_time(clip, low) - seconds)
        return low - 1;
    return low;
}

/* --- decoders --- */

/* One open codec context, standing at some place of some clip. */
typedef struct slot {
    vlai_clip *clip; /* shared; NULL: free */
    int fd;
    AVCodecContext *codec;
    int64_t next;   /* the sample to feed next; -1 after draining: starts over at a key frame */
    int64_t at;     /* ordinal of `picture`, -1 = none */
    int64_t last;   /* pts of the picture that came out last: later ones that were fed are still inside */
    int64_t from;   /* pts at which decoding began: earlier ones lack what they refer to and are not fed */
    AVFrame *picture;
    uint64_t used;
} slot;

struct vlai_decoder {
    slot *slots;
    int capacity;
    uint64_t clock;
    AVPacket *packet;
    uint8_t *buffer; /* one compressed sample with libavcodec's padding */
    size_t buffer_size;
    struct SwsContext *sws;
    uint8_t *wide; /* what sws writes */
    size_t wide_size;
    int64_t packets, opened;
};

vla_status vlai_decoder_create(int capacity, vlai_decoder **out, vla_error *err)
{
    *out = NULL;
    if (capacity <= 0)
        capacity = 32;
    vlai_decoder *d = vlai_calloc(1, sizeof *d);
    if (!d)
        return vlai_nomem(err, sizeof *d);
    av_log_set_level(AV_LOG_FATAL); /* errors are returned, with more to say than libavcodec's lines */
    d->capacity = capacity;
    d->slots = vlai_calloc((size_t)capacity, sizeof *d->slots);
    d->packet = av_packet_alloc();
    if (!d->slots || !d->packet) {
        vlai_decoder_destroy(d);
        return vlai_nomem(err, (size_t)capacity * sizeof *d->slots);
    }
    for (int i = 0; i < capacity; i++)
        d->slots[i].fd = -1;
    *out = d;
    return VLA_OK;
}

static void close_slot(slot *s)
{
    if (s->fd >= 0)
        close(s->fd);
    avcodec_free_context(&s->codec);
    av_frame_free(&s->picture);
    vlai_clip_close(s->clip);
    *s = (slot){.fd = -1};
}

void vlai_decoder_destroy(vlai_decoder *d)
{
    if (!d)
        return;
    for (int i = 0; d->slots && i < d->capacity; i++)
        close_slot(&d->slots[i]);
    vlai_free(d->slots);
    av_packet_free(&d->packet);
    sws_freeContext(d->sws);
    vlai_free(d->wide);
    vlai_free(d->buffer);
    vlai_free(d);
}

static vla_status open_codec(slot *s, vlai_clip *clip, vla_error *err)
{
    const AVCodec *codec = clip->codec == AV_CODEC_ID_NONE ? NULL : avcodec_find_decoder(clip->codec);
    if (!codec)
        return vlai_fail_hint(err, VLA_E_UNSUPPORTED, "re-encode the videos as AV1 or H.264",
                              "%s: no decoder for codec '%s'", clip->path, vlai_clip_codec(clip));
    s->codec = avcodec_alloc_context3(codec);
    s->picture = av_frame_alloc();
    if (!s->codec || !s->picture)
        return vlai_nomem(err, sizeof *s->codec);
    s->codec->thread_count = 1; /* parallel over samples and cameras, not inside one picture */
    s->codec->max_pixels = 1 << 26;
    s->codec->pkt_timebase = (AVRational){1, (int)clip->mp4.timescale};
    if (clip->codec == AV_CODEC_ID_AV1)
        s->codec->flags |= AV_CODEC_FLAG_LOW_DELAY; /* dav1d returns each picture at once */
    if (clip->mp4.config_size) {
        s->codec->extradata = av_mallocz(clip->mp4.config_size + AV_INPUT_BUFFER_PADDING_SIZE);
        if (!s->codec->extradata)
            return vlai_nomem(err, clip->mp4.config_size);
        memcpy(s->codec->extradata, clip->mp4.config, clip->mp4.config_size);
        s->codec->extradata_size = (int)clip->mp4.config_size;
    }
    int code = avcodec_open2(s->codec, codec, NULL);
    if (code < 0)
        return vlai_fail(err, VLA_E_CORRUPT, "%s: decoder '%s' refuses the stream (error %d)", clip->path, codec->name,
                         code);
    return VLA_OK;
}

/* A context that was made for one file decodes another whose configuration is the same: one file per episode (v2.x) then
 * costs an open() instead of a new codec. */
static bool same_stream(const vlai_clip *a, const vlai_clip *b)
{
    return a->codec == b->codec && a->mp4.config_size == b->mp4.config_size && a->mp4.width == b->mp4.width &&
           a->mp4.height == b->mp4.height &&
           (a->mp4.config_size == 0 || !memcmp(a->mp4.config, b->mp4.config, a->mp4.config_size));
}

static vla_status find_slot(vlai_decoder *d, vlai_clip *clip, slot **out, vla_error *err)
{
    slot *oldest = &d->slots[0];
    for (int i = 0; i < d->capacity; i++) {
        slot *s = &d->slots[i];
        if (s->clip == clip) {
            *out = s;
            return VLA_OK;
        }
        if (s->used < oldest->used)
            oldest = s;
    }
    int fd = open(clip->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return vlai_fail(err, VLA_E_IO, "%s: cannot open: %s", clip->path, strerror(errno));
    if (oldest->clip && same_stream(oldest->clip, clip)) {
        close(oldest->fd);
        avcodec_flush_buffers(oldest->codec);
        vlai_clip_close(oldest->clip);
    } else {
        close_slot(oldest);
        vla_status status = open_codec(oldest, clip, err);
        if (status != VLA_OK) {
            close_slot(oldest);
            close(fd);
            return status;
        }
        d->opened++;
    }
    oldest->fd = fd;
    oldest->clip = vlai_clip_share(clip);
    oldest->next = -1;
    oldest->at = -1;
    *out = oldest;
    return VLA_OK;
}

static vla_status read_sample(vlai_decoder *d, slot *s, int64_t sample, vla_error *err)
{
    const vlai_mp4_sample *m = &s->clip->mp4.samples[sample];
    size_t wanted = (size_t)m->size + AV_INPUT_BUFFER_PADDING_SIZE;
    if (wanted > d->buffer_size) {
        vlai_free(d->buffer);
        d->buffer_size = 0;
        d->buffer = vlai_alloc(wanted * 2);
        if (!d->buffer)
            return vlai_nomem(err, wanted * 2);
        d->buffer_size = wanted * 2;
    }
    for (size_t got = 0; got < m->size;) {
        ssize_t n = pread(s->fd, d->buffer + got, m->size - got, (off_t)(m->offset + got));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return vlai_fail(err, VLA_E_IO, "%s: cannot read sample %lld at %llu: %s", s->clip->path, (long long)sample,
                             (unsigned long long)m->offset, n < 0 ? strerror(errno) : "the file ends before");
        got += (size_t)n;
    }
    memset(d->buffer + m->size, 0, AV_INPUT_BUFFER_PADDING_SIZE);
    return VLA_OK;
}

/* Feeds samples, from key frame `key` on, until the picture with the wanted time comes out. */
static vla_status decode(vlai_decoder *d, slot *s, int64_t ordinal, int64_t key, vla_error *err)
{
    vlai_clip *clip = s->clip;
    int64_t target = clip->mp4.shown[ordinal], pts = clip->mp4.samples[target].pts;
    if (s->next < 0 || key > s->next || pts <= s->last) {
        avcodec_flush_buffers(s->codec);
        s->next = key;
        s->last = INT64_MIN;
        s->from = clip->mp4.samples[key].pts < pts ? clip->mp4.samples[key].pts : pts;
    }
    s->at = -1;
    bool draining = false;
    for (;;) {
        int code = avcodec_receive_frame(s->codec, s->picture);
        if (code == 0) {
            s->last = s->picture->pts;
            /* Its bytes are damaged and the decoder filled in something; what is predicted from it would not tell. */
            if (s->picture->decode_error_flags || (s->picture->flags & AV_FRAME_FLAG_CORRUPT)) {
                s->next = -1;
                return vlai_fail(err, VLA_E_CORRUPT, "%s: frame %lld cannot be decoded: the picture at %.4f s is damaged (codec %s)",
                                 clip->path, (long long)ordinal, (double)s->picture->pts / clip->mp4.timescale,
                                 vlai_clip_codec(clip));
            }
            if (s->picture->pts == pts) {
                s->at = ordinal;
                if (draining)
                    s->next = -1;
                return VLA_OK;
            }
            continue;
        }
        if (code != AVERROR(EAGAIN) || draining) {
            s->next = -1;
            return vlai_fail(err, VLA_E_CORRUPT, "%s: frame %lld cannot be decoded (codec %s, sample %lld)", clip->path,
                             (long long)ordinal, vlai_clip_codec(clip), (long long)target);
        }
        /* Past the target, pictures may be held back for reordering: one more sample of the same group pushes them out,
         * at the end of the group draining is cheaper than decoding the next key frame. */
        if (s->next > target && (s->next >= clip->mp4.count || clip->mp4.samples[s->next].key)) {
            draining = true;
            avcodec_send_packet(s->codec, NULL);
            continue;
        }
        if (clip->mp4.samples[s->next].pts < s->from) {
            s->next++;
            continue;
        }
        vla_status status = read_sample(d, s, s->next, err);
        if (status != VLA_OK) {
            s->next = -1;
            return status;
        }
        av_packet_unref(d->packet);
        d->packet->data = d->buffer;
        d->packet->size = (int)clip->mp4.samples[s->next].size;
        d->packet->pts = clip->mp4.samples[s->next].pts;
        d->packet->dts = AV_NOPTS_VALUE;
        d->packet->flags = clip->mp4.samples[s->next].key ? AV_PKT_FLAG_KEY : 0;
        code = avcodec_send_packet(s->codec, d->packet);
        d->packet->data = NULL;
        d->packet->size = 0;
        d->packets++;
        if (code < 0 && code != AVERROR(EAGAIN)) {
            int64_t sample = s->next;
            s->next = -1;
            return vlai_fail(err, VLA_E_CORRUPT, "%s: sample %lld cannot be decoded (codec %s, wanted frame %lld)",
                             clip->path, (long long)sample, vlai_clip_codec(clip), (long long)ordinal);
        }
        s->next++;
    }
}

vla_status vlai_decoder_read(vlai_decoder *d, vlai_clip *clip, int64_t ordinal, vlai_frame *out, vla_error *err)
{
    *out = (vlai_frame){0};
    if (ordinal < 0 || ordinal >= clip->mp4.shown_count)
        return vlai_fail(err, VLA_E_NOT_FOUND, "%s: frame %lld asked, the video has %lld", clip->path, (long long)ordinal,
                         (long long)clip->mp4.shown_count);
    slot *s = NULL;
    VLA_TRY(find_slot(d, clip, &s, err));
    s->used = ++d->clock;
    if (s->at != ordinal) {
        int64_t key = clip->key_of[clip->mp4.shown[ordinal]];
        vla_status status = decode(d, s, ordinal, key, err);
        /* H.264 keeps pictures back that follow an open group's key frame until that one has come out. */
        if (status == VLA_E_CORRUPT && key > 0)
            status = decode(d, s, ordinal, clip->key_of[key - 1], err);
        VLA_TRY(status);
    }
    const AVFrame *p = s->picture;
    out->width = p->width;
    out->height = p->height;
    for (int i = 0; i < 3; i++) {
        out->planes[i] = p->data[i];
        out->strides[i] = p->linesize[i];
    }
    out->pixel_format = av_get_pix_fmt_name((enum AVPixelFormat)p->format);
    if (!out->pixel_format)
        out->pixel_format = "unknown";
    if (p->colorspace != AVCOL_SPC_UNSPECIFIED && p->colorspace != AVCOL_SPC_RESERVED)
        out->matrix = av_color_space_name(p->colorspace);
    out->picture = s->picture;
    return VLA_OK;
}

vla_status vlai_decoder_rgb(vlai_decoder *d, const vlai_frame *frame, uint8_t *rgb, vla_error *err)
{
    const AVFrame *p = frame->picture;
    /* libswscale takes its general code for odd heights: that one interpolates chroma. */
    if (p->format == AV_PIX_FMT_YUV420P && p->color_range != AVCOL_RANGE_JPEG && p->height % 2 == 0) {
        vlai_yuv420_to_rgb(frame->planes, frame->strides, p->width, p->height, rgb);
        return VLA_OK;
    }
    d->sws = sws_getCachedContext(d->sws, p->width, p->height, (enum AVPixelFormat)p->format, p->width, p->height,
                                  AV_PIX_FMT_RGB24, SWS_BILINEAR, NULL, NULL, NULL);
    if (!d->sws)
        return vlai_fail(err, VLA_E_UNSUPPORTED, "pixel format %s cannot be converted to RGB", frame->pixel_format);
    /* Its fast code writes eight pixels at a time and leaves out the last ones where a row has no room for all eight. */
    int row = 3 * p->width, stride = 3 * ((p->width + 31) / 32 * 32);
    size_t bytes = (size_t)stride * (size_t)p->height;
    if (bytes > d->wide_size) {
        vlai_free(d->wide);
        d->wide_size = 0;
        d->wide = vlai_alloc_aligned(bytes, 64);
        if (!d->wide)
            return vlai_nomem(err, bytes);
        d->wide_size = bytes;
    }
    uint8_t *planes[4] = {d->wide, NULL, NULL, NULL};
    int strides[4] = {stride, 0, 0, 0};
    if (sws_scale(d->sws, (const uint8_t *const *)p->data, p->linesize, 0, p->height, planes, strides) != p->height)
        return vlai_fail(err, VLA_E_INTERNAL, "conversion of %s to RGB stopped early", frame->pixel_format);
    for (int y = 0; y < p->height; y++)
        memcpy(rgb + (size_t)y * (size_t)row, d->wide + (size_t)y * (size_t)stride, (size_t)row);
    return VLA_OK;
}

void vlai_decoder_counts(const vlai_decoder *d, int64_t *packets, int64_t *opened)
{
    *packets = d->packets;
    *opened = d->opened;
}
