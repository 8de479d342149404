#include "format/video_write.h"

#include "base/fail.h"
#include "base/io.h"
#include "base/memory.h"

#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/imgutils.h>
#include <libavutil/opt.h>
#include <libswscale/swscale.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* One row per encoder library, in order of preference within a codec. */
static const struct {
    vlai_codec codec;
    const char *name;
    int smallest; /* side in pixels */
    int worst;    /* largest crf */
} encoders[] = {
    {VLAI_CODEC_AV1, "libsvtav1", 64, 63},
    {VLAI_CODEC_AV1, "libaom-av1", 16, 63},
    {VLAI_CODEC_H264, "libx264", 16, 51},
};
enum { ENCODER_COUNT = sizeof encoders / sizeof *encoders, LARGEST_SIDE = 8192 };

struct vlai_encoder {
    vlai_video_format format;
    AVCodecContext *codec;
    struct SwsContext *scale;
    AVFrame *frame;
    AVPacket *packet;
    vlai_segment segment;
    int64_t frames;
};

/* The file under construction. libavformat writes and seeks in it as in a file. */
typedef struct {
    uint8_t *data;
    size_t size, capacity, position;
} memory_file;

struct vlai_video {
    vlai_video_format format;
    memory_file file;
    AVFormatContext *container;
    AVPacket *packet;
    int64_t frames;
    size_t bytes;
    bool started;
};

static vla_status fail_av(vla_error *err, int code, const char *what)
{
    char text[AV_ERROR_MAX_STRING_SIZE] = "";
    av_strerror(code, text, sizeof text);
    return vlai_fail(err, code == AVERROR(ENOMEM) ? VLA_E_NOMEM : VLA_E_IO, "video: %s failed: %s", what, text);
}

static int find_encoder(vlai_codec codec)
{
    for (int i = 0; i < ENCODER_COUNT; i++)
        if (encoders[i].codec == codec && avcodec_find_encoder_by_name(encoders[i].name))
            return i;
    return -1;
}

const char *vlai_encoder_name(vlai_codec codec)
{
    int i = find_encoder(codec);
    return i < 0 ? NULL : encoders[i].name;
}

const char *vlai_codec_name(vlai_codec codec)
{
    return codec == VLAI_CODEC_AV1 ? "av1" : "h264";
}

vla_status vlai_video_format_check(const vlai_video_format *format, vla_error *err)
{
    int which = find_encoder(format->codec);
    if (which < 0)
        return vlai_fail_hint(err, VLA_E_UNSUPPORTED,
                              "use a libavcodec built with libsvtav1 and libx264 (Debian's is), or store images",
                              "this libavcodec has no encoder for %s", vlai_codec_name(format->codec));
    if (format->width % 2 || format->height % 2)
        return vlai_fail_hint(err, VLA_E_INVALID, "choose even sides, or store images",
                              "video pictures of %dx%d: both sides must be even", format->width, format->height);
    if (format->width < encoders[which].smallest || format->height < encoders[which].smallest ||
        format->width > LARGEST_SIDE || format->height > LARGEST_SIDE)
        return vlai_fail_hint(err, VLA_E_INVALID, "choose another size or codec, or store images",
                              "video pictures of %dx%d: %s takes sides of %d to %d", format->width, format->height,
                              encoders[which].name, encoders[which].smallest, LARGEST_SIDE);
    if (format->fps < 1 || format->fps > 1000)
        return vlai_fail(err, VLA_E_INVALID, "video at %d frames per second: wanted 1 to 1000", format->fps);
    if (format->gop < 1 || format->gop > 100000)
        return vlai_fail(err, VLA_E_INVALID, "a key frame every %d frames: wanted 1 to 100000", format->gop);
    if (format->crf < 0 || format->crf > encoders[which].worst)
        return vlai_fail(err, VLA_E_INVALID, "crf %d: %s takes 0 to %d", format->crf, encoders[which].name,
                         encoders[which].worst);
    if (format->preset < 0 || format->preset > 13)
        return vlai_fail(err, VLA_E_INVALID, "preset %d: wanted 0 to 13", format->preset);
    return VLA_OK;
}

/* ---- encoding ---- */

/* What these libraries have to say comes back as error codes; on their own they print to stderr. SVT-AV1 prints a banner
 * unless its variable says otherwise; a user's setting of that wins. */
static void quieten(void)
{
    av_log_set_level(AV_LOG_QUIET);
    setenv("SVT_LOG", "1", 0);
}
static pthread_once_t quiet = PTHREAD_ONCE_INIT;

/* SVT-AV1 1.4 keeps a list of its allocations in a global of the process: making or ending two encoders at once crashes
 * in svt_av1_enc_init_handle. Encoding at once is safe. */
static pthread_mutex_t birth_and_death = PTHREAD_MUTEX_INITIALIZER;

/* The options of each encoder library. One thread, so that a segment's bytes depend on its pictures alone. */
static int set_options(const vlai_video_format *format, const char *name, AVCodecContext *codec)
{
    int r = av_opt_set_int(codec->priv_data, "crf", format->crf, 0);
    if (r == 0 && !strcmp(name, "libsvtav1")) {
        r = av_opt_set_int(codec->priv_data, "preset", format->preset, 0);
        if (r == 0)
            r = av_opt_set(codec->priv_data, "svtav1-params", "lp=1", 0);
    } else if (r == 0 && !strcmp(name, "libaom-av1")) {
        r = av_opt_set(codec->priv_data, "usage", "realtime", 0);
        if (r == 0)
            r = av_opt_set_int(codec->priv_data, "cpu-used", 8, 0);
    } else if (r == 0 && !strcmp(name, "libx264")) {
        /* Key frames only where gop puts them. */
        r = av_opt_set(codec->priv_data, "x264-params", "scenecut=0:sliced-threads=0", 0);
    }
    return r;
}

vla_status vlai_encoder_open(const vlai_video_format *format, vlai_encoder **out, vla_error *err)
{
    *out = NULL;
    pthread_once(&quiet, quieten);
    VLA_TRY(vlai_video_format_check(format, err));
    const char *name = vlai_encoder_name(format->codec);
    const AVCodec *codec = avcodec_find_encoder_by_name(name);
    vlai_encoder *e = vlai_calloc(1, sizeof *e);
    if (!e)
        return vlai_nomem(err, sizeof *e);
    vla_status status = VLA_OK;
    e->format = *format;
    e->codec = avcodec_alloc_context3(codec);
    e->frame = av_frame_alloc();
    e->packet = av_packet_alloc();
    if (!e->codec || !e->frame || !e->packet) {
        status = vlai_nomem(err, sizeof *e->codec);
        goto failed;
    }
    e->codec->width = format->width;
    e->codec->height = format->height;
    e->codec->pix_fmt = AV_PIX_FMT_YUV420P;
    e->codec->time_base = (AVRational){1, format->fps};
    e->codec->framerate = (AVRational){format->fps, 1};
    e->codec->gop_size = format->gop;
    e->codec->max_b_frames = 0; /* so that dts = pts, and a reader needs no look-ahead */
    e->codec->thread_count = 1;
    e->codec->flags |= AV_CODEC_FLAG_GLOBAL_HEADER | AV_CODEC_FLAG_BITEXACT;
    int r = set_options(format, name, e->codec);
    if (r == 0) {
        pthread_mutex_lock(&birth_and_death);
        r = avcodec_open2(e->codec, codec, NULL);
        pthread_mutex_unlock(&birth_and_death);
    }
    if (r < 0) {
        status = vlai_prefix(err, fail_av(err, r, "opening the encoder"), "%s %dx%d", name, format->width, format->height);
        goto failed;
    }
    /* LeRobot encodes through libav's default conversion: BT.601, limited range, not tagged. */
    e->scale = sws_getContext(format->width, format->height, AV_PIX_FMT_RGB24, format->width, format->height,
                              AV_PIX_FMT_YUV420P, SWS_BILINEAR, NULL, NULL, NULL);
    e->frame->width = format->width;
    e->frame->height = format->height;
    e->frame->format = AV_PIX_FMT_YUV420P;
    if (!e->scale || av_frame_get_buffer(e->frame, 0) < 0) {
        status = vlai_nomem(err, (size_t)format->width * (size_t)format->height * 3);
        goto failed;
    }
    *out = e;
    return VLA_OK;
failed:
    vlai_encoder_destroy(e);
    return status;
}

static vla_status keep_packet(vlai_segment *s, const AVPacket *packet, vla_error *err)
{
    size_t end;
    if (packet->size <= 0 || !vlai_add_size(s->size, (size_t)packet->size, &end))
        return vlai_fail(err, VLA_E_INTERNAL, "video: the encoder gave a packet of %d bytes", packet->size);
    if (end > s->capacity) {
        size_t capacity = end + end / 2 + 4096;
        uint8_t *data = vlai_grow(s->data, s->capacity, capacity);
        if (!data)
            return vlai_nomem(err, capacity);
        s->data = data;
        s->capacity = capacity;
    }
    VLA_TRY(vlai_reserve((void **)&s->ends, &s->end_capacity, s->frames, sizeof *s->ends, err));
    VLA_TRY(vlai_reserve((void **)&s->keys, &s->key_capacity, s->frames, sizeof *s->keys, err));
    memcpy(s->data + s->size, packet->data, (size_t)packet->size);
    s->size = end;
    s->ends[s->frames] = end;
    s->keys[s->frames] = (packet->flags & AV_PKT_FLAG_KEY) != 0;
    s->frames++;
    return VLA_OK;
}

/* Sends one frame, or NULL to drain, and keeps the packets that are ready. */
static vla_status send(vlai_encoder *e, const AVFrame *frame, vla_error *err)
{
    int r = avcodec_send_frame(e->codec, frame);
    if (r < 0)
        return fail_av(err, r, "encoding");
    while ((r = avcodec_receive_packet(e->codec, e->packet)) >= 0) {
        vla_status status = VLA_OK;
        if (e->packet->pts != (int64_t)e->segment.frames)
            status = vlai_fail(err, VLA_E_INTERNAL, "video: the encoder reordered frame %zu", e->segment.frames);
        if (status == VLA_OK)
            status = keep_packet(&e->segment, e->packet, err);
        av_packet_unref(e->packet);
        if (status != VLA_OK)
            return status;
    }
    if (r != AVERROR(EAGAIN) && r != AVERROR_EOF)
        return fail_av(err, r, "encoding");
    return VLA_OK;
}

vla_status vlai_encoder_put(vlai_encoder *e, const uint8_t *rgb, vla_error *err)
{
    int r = av_frame_make_writable(e->frame);
    if (r < 0)
        return fail_av(err, r, "preparing a frame");
    const uint8_t *rows[4] = {rgb};
    const int strides[4] = {e->format.width * 3};
    sws_scale(e->scale, rows, strides, 0, e->format.height, e->frame->data, e->frame->linesize);
    e->frame->pts = e->frames++;
    return send(e, e->frame, err);
}

vla_status vlai_encoder_finish(vlai_encoder *e, vlai_segment *out, vla_error *err)
{
    *out = (vlai_segment){0};
    vla_status status = send(e, NULL, err);
    if (status == VLA_OK && (int64_t)e->segment.frames != e->frames)
        status = vlai_fail(err, VLA_E_INTERNAL, "video: %lld frames went in, %zu came out", (long long)e->frames,
                           e->segment.frames);
    if (status == VLA_OK && e->codec->extradata_size > 0) {
        e->segment.header = vlai_alloc((size_t)e->codec->extradata_size);
        if (e->segment.header) {
            memcpy(e->segment.header, e->codec->extradata, (size_t)e->codec->extradata_size);
            e->segment.header_size = (size_t)e->codec->extradata_size;
        } else {
            status = vlai_nomem(err, e->codec->extradata_size);
        }
    }
    if (status == VLA_OK) {
        *out = e->segment;
        e->segment = (vlai_segment){0};
    }
    vlai_encoder_destroy(e);
    return status;
}

void vlai_encoder_destroy(vlai_encoder *e)
{
    if (!e)
        return;
    sws_freeContext(e->scale);
    av_frame_free(&e->frame);
    av_packet_free(&e->packet);
    pthread_mutex_lock(&birth_and_death);
    avcodec_free_context(&e->codec);
    pthread_mutex_unlock(&birth_and_death);
    vlai_segment_fini(&e->segment);
    vlai_free(e);
}

void vlai_segment_fini(vlai_segment *s)
{
    vlai_free(s->data);
    vlai_free(s->ends);
    vlai_free(s->keys);
    vlai_free(s->header);
    *s = (vlai_segment){0};
}

/* ---- the container ---- */

#if LIBAVFORMAT_VERSION_MAJOR >= 61
typedef const uint8_t sink_byte;
#else
typedef uint8_t sink_byte;
#endif

static int file_write(void *opaque, sink_byte *data, int size)
{
    memory_file *f = opaque;
    size_t end;
    if (size < 0 || !vlai_add_size(f->position, (size_t)size, &end))
        return AVERROR(EINVAL);
    if (end > f->capacity) {
        size_t capacity = end + end / 2 + 65536;
        uint8_t *grown = vlai_grow(f->data, f->capacity, capacity);
        if (!grown)
            return AVERROR(ENOMEM);
        f->data = grown;
        f->capacity = capacity;
    }
    if (f->position > f->size)
        memset(f->data + f->size, 0, f->position - f->size);
    memcpy(f->data + f->position, data, (size_t)size);
    f->position = end;
    if (end > f->size)
        f->size = end;
    return size;
}

static int64_t move(size_t size, size_t *position, int64_t offset, int whence)
{
    int64_t base = whence == SEEK_CUR ? (int64_t)*position : whence == SEEK_END ? (int64_t)size : 0;
    if (whence == AVSEEK_SIZE)
        return (int64_t)size;
    if (base + offset < 0)
        return AVERROR(EINVAL);
    *position = (size_t)(base + offset);
    return base + offset;
}

static int64_t file_seek(void *opaque, int64_t offset, int whence)
{
    memory_file *f = opaque;
    return move(f->size, &f->position, offset, whence & ~AVSEEK_FORCE);
}

/* libavformat reads back what it wrote when it moves the index to the front: a second position in the same bytes. */
typedef struct {
    const memory_file *file;
    size_t position;
} memory_view;

static int view_read(void *opaque, uint8_t *data, int size)
{
    memory_view *v = opaque;
    if (v->position >= v->file->size || size <= 0)
        return AVERROR_EOF;
    size_t n = v->file->size - v->position < (size_t)size ? v->file->size - v->position : (size_t)size;
    memcpy(data, v->file->data + v->position, n);
    v->position += n;
    return (int)n;
}

static int64_t view_seek(void *opaque, int64_t offset, int whence)
{
    memory_view *v = opaque;
    return move(v->file->size, &v->position, offset, whence & ~AVSEEK_FORCE);
}

enum { IO_BUFFER = 65536 };

static int view_open(AVFormatContext *container, AVIOContext **out, const char *url, int flags, AVDictionary **options)
{
    (void)url, (void)options;
    if (flags & AVIO_FLAG_WRITE)
        return AVERROR(ENOSYS);
    memory_view *v = vlai_calloc(1, sizeof *v);
    uint8_t *buffer = av_malloc(IO_BUFFER);
    *out = v && buffer ? avio_alloc_context(buffer, IO_BUFFER, 0, v, view_read, NULL, view_seek) : NULL;
    if (!*out) {
        vlai_free(v);
        av_free(buffer);
        return AVERROR(ENOMEM);
    }
    v->file = container->opaque;
    return 0;
}

static int view_close(AVFormatContext *container, AVIOContext *io)
{
    (void)container;
    vlai_free(io->opaque);
    av_freep(&io->buffer);
    avio_context_free(&io);
    return 0;
}

vla_status vlai_video_create(const vlai_video_format *format, vlai_video **out, vla_error *err)
{
    *out = NULL;
    pthread_once(&quiet, quieten);
    VLA_TRY(vlai_video_format_check(format, err));
    vlai_video *v = vlai_calloc(1, sizeof *v);
    if (!v)
        return vlai_nomem(err, sizeof *v);
    v->format = *format;
    v->packet = av_packet_alloc();
    uint8_t *buffer = av_malloc(IO_BUFFER);
    if (!v->packet || !buffer || avformat_alloc_output_context2(&v->container, NULL, "mp4", "memory.mp4") < 0)
        goto nomem;
    v->container->pb = avio_alloc_context(buffer, IO_BUFFER, 1, &v->file, NULL, file_write, file_seek);
    if (!v->container->pb)
        goto nomem;
    buffer = NULL;
    v->container->opaque = &v->file;
    v->container->io_open = view_open;
    v->container->io_close2 = view_close;
    v->container->flags |= AVFMT_FLAG_CUSTOM_IO | AVFMT_FLAG_BITEXACT;
    AVStream *stream = avformat_new_stream(v->container, NULL);
    if (!stream)
        goto nomem;
    stream->time_base = (AVRational){1, format->fps};
    stream->avg_frame_rate = stream->r_frame_rate = (AVRational){format->fps, 1};
    stream->codecpar->codec_type = AVMEDIA_TYPE_VIDEO;
    stream->codecpar->codec_id = format->codec == VLAI_CODEC_AV1 ? AV_CODEC_ID_AV1 : AV_CODEC_ID_H264;
    stream->codecpar->format = AV_PIX_FMT_YUV420P;
    stream->codecpar->width = format->width;
    stream->codecpar->height = format->height;
    *out = v;
    return VLA_OK;
nomem:
    av_free(buffer);
    vlai_video_destroy(v);
    return vlai_nomem(err, IO_BUFFER);
}

/* The file's header needs the first segment's codec record. */
static vla_status start(vlai_video *v, const vlai_segment *s, vla_error *err)
{
    AVCodecParameters *parameters = v->container->streams[0]->codecpar;
    if (s->header_size) {
        parameters->extradata = av_mallocz(s->header_size + AV_INPUT_BUFFER_PADDING_SIZE);
        if (!parameters->extradata)
            return vlai_nomem(err, s->header_size);
        memcpy(parameters->extradata, s->header, s->header_size);
        parameters->extradata_size = (int)s->header_size;
    }
    AVDictionary *options = NULL;
    int r = av_dict_set(&options, "movflags", "+faststart", 0);
    if (r >= 0)
        r = avformat_write_header(v->container, &options);
    av_dict_free(&options);
    if (r < 0)
        return fail_av(err, r, "starting the mp4 file");
    v->started = true;
    return VLA_OK;
}

vla_status vlai_video_append(vlai_video *v, const vlai_segment *s, vla_error *err)
{
    AVStream *stream = v->container->streams[0];
    if (s->frames == 0 || !s->keys[0])
        return vlai_fail(err, VLA_E_INTERNAL, "video: a segment of %zu frames does not start with a key frame", s->frames);
    if (!v->started)
        VLA_TRY(start(v, s, err));
    /* One record serves the whole file, so the segments must agree on it. */
    if (s->header_size != (size_t)stream->codecpar->extradata_size ||
        (s->header_size && memcmp(s->header, stream->codecpar->extradata, s->header_size) != 0))
        return vlai_fail(err, VLA_E_INTERNAL, "video: segments of different encoder settings in one file");
    for (size_t k = 0; k < s->frames; k++) {
        size_t begin = k ? s->ends[k - 1] : 0;
        v->packet->data = s->data + begin;
        v->packet->size = (int)(s->ends[k] - begin);
        v->packet->stream_index = 0;
        v->packet->flags = s->keys[k] ? AV_PKT_FLAG_KEY : 0;
        v->packet->pts = v->packet->dts = v->frames;
        v->packet->duration = 1;
        av_packet_rescale_ts(v->packet, (AVRational){1, v->format.fps}, stream->time_base);
        int r = av_write_frame(v->container, v->packet);
        av_packet_unref(v->packet);
        if (r < 0)
            return fail_av(err, r, "writing a frame");
        v->frames++;
    }
    v->bytes += s->size;
    return VLA_OK;
}

int64_t vlai_video_frames(const vlai_video *video)
{
    return video->frames;
}

size_t vlai_video_bytes(const vlai_video *video)
{
    return video->bytes;
}

vla_status vlai_video_close(vlai_video *v, const char *path, vla_error *err)
{
    vla_status status = VLA_OK;
    vlai_writer writer = {.fd = -1};
    if (!v->started)
        status = vlai_fail(err, VLA_E_INVALID, "%s: a video without a frame", path);
    if (status == VLA_OK) {
        int r = av_write_trailer(v->container);
        if (r < 0)
            status = fail_av(err, r, "ending the mp4 file");
    }
    if (status == VLA_OK)
        status = vlai_writer_open(&writer, path, err);
    if (status == VLA_OK)
        status = vlai_writer_put(&writer, v->file.data, v->file.size, err);
    if (status == VLA_OK)
        status = vlai_writer_close(&writer, err);
    vlai_video_destroy(v);
    return status;
}

void vlai_video_destroy(vlai_video *v)
{
    if (!v)
        return;
    if (v->container) {
        if (v->container->pb) {
            av_freep(&v->container->pb->buffer);
            avio_context_free(&v->container->pb);
        }
        avformat_free_context(v->container);
    }
    av_packet_free(&v->packet);
    vlai_free(v->file.data);
    vlai_free(v);
}
