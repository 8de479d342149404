/* Reading video: every frame by ordinal, in any order, equal to the frame that decoding from the start gives; files that
 * are cut, empty or bent anywhere give errors. */
#include "test.h"

#include "base/io.h"
#include "base/memory.h"
#include "format/video.h"
#include "format/video_write.h"

#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <unistd.h>

enum { SIDE = 64, FRAMES = 25 };

static char path[256];

static void write_clip(vlai_codec codec, int gop)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_video_format format = VLAI_VIDEO_FORMAT_DEFAULT;
    format.codec = codec;
    format.width = format.height = SIDE;
    format.fps = 10;
    format.gop = gop;
    vlai_video *video;
    assert_ok(vlai_video_create(&format, &video, &err), err);
    static uint8_t rgb[SIDE * SIDE * 3];
    for (int part = 0; part < 2; part++) {
        vlai_encoder *encoder;
        vlai_segment segment = {0};
        assert_ok(vlai_encoder_open(&format, &encoder, &err), err);
        for (int i = 0; i < (part ? FRAMES - 12 : 12); i++) {
            int number = part * 12 + i;
            for (int p = 0; p < SIDE * SIDE; p++) { /* the frame number in eight bars of bits */
                int bar = p % SIDE / 8, level = number >> bar & 1 ? 220 : 30;
                rgb[3 * p] = (uint8_t)level, rgb[3 * p + 1] = (uint8_t)(255 - level), rgb[3 * p + 2] = 100;
            }
            assert_ok(vlai_encoder_put(encoder, rgb, &err), err);
        }
        assert_ok(vlai_encoder_finish(encoder, &segment, &err), err);
        assert_ok(vlai_video_append(video, &segment, &err), err);
        vlai_segment_fini(&segment);
    }
    assert_ok(vlai_video_close(video, path, &err), err);
}

static int number_in(const uint8_t *rgb)
{
    int number = 0;
    for (int bar = 0; bar < 8; bar++)
        number |= (rgb[3 * (SIDE * 32 + bar * 8 + 4)] > 128) << bar;
    return number;
}

static void any_order(void **state)
{
    (void)state;
    static const struct {
        vlai_codec codec;
        int gop;
    } cases[] = {{VLAI_CODEC_AV1, 2}, {VLAI_CODEC_H264, 2}, {VLAI_CODEC_AV1, 10}, {VLAI_CODEC_H264, 12}};
    static uint8_t rgb[SIDE * SIDE * 3], all[FRAMES][SIDE * SIDE * 3];
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        if (!vlai_encoder_name(cases[c].codec))
            continue;
        write_clip(cases[c].codec, cases[c].gop);
        vla_error err = VLA_ERROR_INIT;
        vlai_clip *clip;
        vlai_decoder *decoder;
        vlai_frame frame;
        assert_ok(vlai_clip_open(path, &clip, &err), err);
        assert_ok(vlai_decoder_create(2, &decoder, &err), err);
        assert_int_equal(vlai_clip_frames(clip), FRAMES);
        assert_true(vlai_clip_gop(clip) <= cases[c].gop);
        assert_float_equal(vlai_clip_fps(clip), 10, 1e-9);
        for (int i = 0; i < FRAMES; i++) {
            assert_float_equal(vlai_clip_time(clip, i), i / 10.0, 1e-9);
            assert_int_equal(vlai_clip_nearest(clip, i / 10.0 + 0.049), i);
            assert_ok(vlai_decoder_read(decoder, clip, i, &frame, &err), err);
            assert_int_equal(frame.width, SIDE);
            assert_ok(vlai_decoder_rgb(decoder, &frame, all[i], &err), err);
            assert_int_equal(number_in(all[i]), i);
        }
        int at = 7;
        for (int k = 0; k < 200; k++) {
            at = (at * 11 + 3 + k) % FRAMES;
            assert_ok(vlai_decoder_read(decoder, clip, at, &frame, &err), err);
            assert_ok(vlai_decoder_rgb(decoder, &frame, rgb, &err), err);
            assert_memory_equal(rgb, all[at], sizeof rgb);
        }
        assert_fails(vlai_decoder_read(decoder, clip, FRAMES, &frame, &err), VLA_E_NOT_FOUND, err, "has 25");
        assert_fails(vlai_decoder_read(decoder, clip, -1, &frame, &err), VLA_E_NOT_FOUND, err, path);
        vlai_decoder_destroy(decoder);
        vlai_clip_close(clip);
    }
    unlink(path);
}

/* FRAMES pictures that show their number, by any encoder of libavcodec. `movflags`: of the muxer, NULL for a plain file. False:
 * there is no such encoder. */
static bool write_foreign(const char *name, enum AVPixelFormat format, const char *option, const char *value, const char *movflags)
{
    const AVCodec *codec = avcodec_find_encoder_by_name(name);
    if (!codec)
        return false;
    AVFormatContext *file;
    AVDictionary *options = NULL;
    assert_int_equal(avformat_alloc_output_context2(&file, NULL, "mp4", path), 0);
    AVCodecContext *encoder = avcodec_alloc_context3(codec);
    encoder->width = encoder->height = SIDE;
    encoder->pix_fmt = format;
    encoder->time_base = (AVRational){1, 10};
    encoder->gop_size = 6;
    encoder->max_b_frames = codec->id == AV_CODEC_ID_MJPEG ? 0 : 2;
    encoder->thread_count = 1;
    encoder->color_range = format == AV_PIX_FMT_YUVJ420P ? AVCOL_RANGE_JPEG : AVCOL_RANGE_MPEG;
    encoder->flags |= AV_CODEC_FLAG_GLOBAL_HEADER;
    if (option)
        av_dict_set(&options, option, value, 0);
    assert_int_equal(avcodec_open2(encoder, codec, &options), 0);
    av_dict_free(&options);
    AVStream *stream = avformat_new_stream(file, NULL);
    stream->time_base = encoder->time_base;
    assert_true(avcodec_parameters_from_context(stream->codecpar, encoder) >= 0);
    assert_true(avio_open(&file->pb, path, AVIO_FLAG_WRITE) >= 0);
    if (movflags)
        av_dict_set(&options, "movflags", movflags, 0);
    assert_true(avformat_write_header(file, &options) >= 0);
    av_dict_free(&options);
    AVPacket *packet = av_packet_alloc();
    AVFrame *frame = av_frame_alloc();
    for (int i = 0; i <= FRAMES; i++) {
        av_frame_unref(frame);
        frame->width = frame->height = SIDE;
        frame->format = format;
        frame->pts = i;
        if (i < FRAMES) {
            assert_int_equal(av_frame_get_buffer(frame, 0), 0);
            for (int y = 0; y < SIDE; y++)
                for (int x = 0; x < SIDE; x++)
                    frame->data[0][y * frame->linesize[0] + x] = i >> x / 8 & 1 ? 220 : 30;
            for (int y = 0; y < SIDE / 2; y++)
                for (int plane = 1; plane < 3; plane++)
                    memset(frame->data[plane] + y * frame->linesize[plane], 128, SIDE / 2);
        }
        assert_int_equal(avcodec_send_frame(encoder, i < FRAMES ? frame : NULL), 0);
        while (avcodec_receive_packet(encoder, packet) == 0) {
            packet->duration = 1;
            av_packet_rescale_ts(packet, encoder->time_base, stream->time_base);
            assert_int_equal(av_interleaved_write_frame(file, packet), 0);
        }
    }
    assert_true(av_write_trailer(file) >= 0);
    avio_closep(&file->pb);
    avformat_free_context(file);
    avcodec_free_context(&encoder);
    av_frame_free(&frame);
    av_packet_free(&packet);
    return true;
}

/* Each frame by a decoder that has read nothing before, and all in one decoder: open groups, whose first pictures in time
 * refer to the group before, and JPEG under the name of MPEG-4. */
static void foreign_streams(void **state)
{
    (void)state;
    static const struct {
        const char *encoder;
        enum AVPixelFormat format;
        const char *option, *value;
    } cases[] = {{"libx264", AV_PIX_FMT_YUV420P, "x264-params", "open-gop=1:scenecut=0:b-adapt=0"},
                 {"libx265", AV_PIX_FMT_YUV420P, "x265-params",
                  "log-level=none:open-gop=1:bframes=3:keyint=6:min-keyint=6:scenecut=0:pools=none:frame-threads=1"},
                 {"mpeg4", AV_PIX_FMT_YUV420P, NULL, NULL},
                 {"mjpeg", AV_PIX_FMT_YUVJ420P, NULL, NULL}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        if (!write_foreign(cases[c].encoder, cases[c].format, cases[c].option, cases[c].value, NULL))
            continue;
        vla_error err = VLA_ERROR_INIT;
        vlai_clip *clip;
        vlai_decoder *shared, *fresh;
        vlai_frame frame;
        static uint8_t rgb[SIDE * SIDE * 3];
        assert_ok(vlai_clip_open(path, &clip, &err), err);
        assert_int_equal(vlai_clip_frames(clip), FRAMES);
        assert_ok(vlai_decoder_create(1, &shared, &err), err);
        for (int k = 0; k < FRAMES; k++) {
            int i = (k * 7 + 3) % FRAMES; /* every frame once: 7 and 25 share no factor */
            assert_ok(vlai_decoder_create(1, &fresh, &err), err);
            for (int d = 0; d < 2; d++) {
                vlai_decoder *decoder = d ? shared : fresh;
                assert_ok(vlai_decoder_read(decoder, clip, i, &frame, &err), err);
                assert_ok(vlai_decoder_rgb(decoder, &frame, rgb, &err), err);
                assert_int_equal(number_in(rgb), i);
            }
            vlai_decoder_destroy(fresh);
        }
        vlai_decoder_destroy(shared);
        vlai_clip_close(clip);
    }
    unlink(path);
}

/* Times, key frames and bytes of each sample, in decoding order, as libavformat finds them. */
static int64_t demux(vlai_mp4_sample *out, AVRational *base)
{
    AVFormatContext *file = NULL;
    assert_int_equal(avformat_open_input(&file, path, NULL, NULL), 0);
    AVPacket *packet = av_packet_alloc();
    int64_t n = 0;
    for (; av_read_frame(file, packet) == 0; av_packet_unref(packet))
        out[n++] = (vlai_mp4_sample){(uint64_t)packet->pos, (uint32_t)packet->size, packet->flags & AV_PKT_FLAG_KEY, packet->pts};
    *base = file->streams[0]->time_base;
    av_packet_free(&packet);
    avformat_close_input(&file);
    return n;
}

/* A file in fragments is read as a plain one: the same samples as libavformat's demuxer has, every frame by its number. Where
 * pictures are shown before they are decoded, libavformat moves all of them to later. */
static void fragments(void **state)
{
    (void)state;
    static const char *const flags[] = {"frag_keyframe+empty_moov", "frag_every_frame+empty_moov+default_base_moof",
                                        "frag_keyframe", "frag_keyframe+delay_moov+omit_tfhd_offset",
                                        "empty_moov+default_base_moof+frag_every_frame+negative_cts_offsets"};
    static const char *const encoders[] = {"libx264", "mpeg4"};
    for (size_t c = 0; c < 10; c++) {
        bool open_groups = c % 2 == 0;
        if (!write_foreign(encoders[c % 2], AV_PIX_FMT_YUV420P, open_groups ? "x264-params" : NULL, "open-gop=1:scenecut=0:b-adapt=0",
                           flags[c / 2]))
            continue;
        static vlai_mp4_sample want[FRAMES + 1];
        AVRational base;
        vlai_mp4 mp4;
        vla_error err = VLA_ERROR_INIT;
        assert_int_equal(demux(want, &base), FRAMES);
        assert_ok(vlai_mp4_read(path, &mp4, &err), err);
        assert_int_equal(mp4.count, FRAMES);
        assert_int_equal(mp4.shown_count, FRAMES);
        assert_int_equal(mp4.timescale, base.den);
        for (int i = 0; i < FRAMES; i++) {
            assert_int_equal(mp4.samples[i].offset, want[i].offset);
            assert_int_equal(mp4.samples[i].size, want[i].size);
            assert_int_equal(mp4.samples[i].key, want[i].key);
            assert_int_equal(mp4.samples[i].pts - (c / 2 == 4 ? mp4.samples[0].pts - want[0].pts : 0), want[i].pts);
        }
        vlai_mp4_fini(&mp4);
        vlai_clip *clip;
        vlai_decoder *decoder;
        vlai_frame frame;
        static uint8_t rgb[SIDE * SIDE * 3];
        assert_ok(vlai_clip_open(path, &clip, &err), err);
        assert_true(vlai_clip_gop(clip) <= 7);
        assert_float_equal(vlai_clip_fps(clip), 10, 1e-9);
        assert_ok(vlai_decoder_create(1, &decoder, &err), err);
        for (int k = 0; k < FRAMES; k++) {
            int i = (k * 7 + 3) % FRAMES;
            assert_ok(vlai_decoder_read(decoder, clip, i, &frame, &err), err);
            assert_ok(vlai_decoder_rgb(decoder, &frame, rgb, &err), err);
            assert_int_equal(number_in(rgb), i);
        }
        vlai_decoder_destroy(decoder);
        vlai_clip_close(clip);
        char *data;
        size_t size;
        assert_ok(vlai_read_file(path, 0, &data, &size, &err), err);
        for (size_t cut = 0; cut < size; cut += 13) { /* cut short: the last fragment lacks samples, or says nothing of them */
            uint8_t *part = malloc(cut ? cut : 1);
            memcpy(part, data, cut);
            if (vlai_mp4_parse(part, cut, "cut", &mp4, &err) == VLA_OK) {
                assert_true(mp4.count < FRAMES || size - cut < 400); /* behind the fragments there is only an index */
                vlai_mp4_fini(&mp4);
            }
            free(part);
        }
        vlai_free(data);
    }
    unlink(path);
}

static void damage(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    write_clip(vlai_encoder_name(VLAI_CODEC_AV1) ? VLAI_CODEC_AV1 : VLAI_CODEC_H264, 2);
    char *data;
    size_t size;
    assert_ok(vlai_read_file(path, 0, &data, &size, &err), err);
    vlai_mp4 mp4;
    for (size_t cut = 0; cut < size; cut += cut < 2048 ? 1 : 97)
        assert_int_not_equal(vlai_mp4_parse((const uint8_t *)data, cut, "cut", &mp4, &err), VLA_OK);
    for (size_t i = 0; i < size && i < 4096; i++) { /* header bytes bent: an error or a table inside the file */
        for (int value = 0; value < 256; value += 51) {
            char saved = data[i];
            data[i] = (char)value;
            if (vlai_mp4_parse((const uint8_t *)data, size, "bent", &mp4, &err) == VLA_OK) {
                for (int64_t s = 0; s < mp4.count; s++)
                    assert_true(mp4.samples[s].offset + mp4.samples[s].size <= size);
                vlai_mp4_fini(&mp4);
            }
            data[i] = saved;
        }
    }
    /* Bent samples: frames come or are refused. */
    vlai_decoder *decoder;
    assert_ok(vlai_decoder_create(1, &decoder, &err), err);
    for (size_t i = 0; i < size; i += 61) {
        data[i] ^= 0x55;
        FILE *f = fopen(path, "wb");
        fwrite(data, 1, size, f);
        fclose(f);
        data[i] ^= 0x55;
        vlai_clip *clip;
        if (vlai_clip_open(path, &clip, &err) != VLA_OK)
            continue;
        vlai_frame frame;
        for (int64_t k = 0; k < vlai_clip_frames(clip); k += 3)
            (void)vlai_decoder_read(decoder, clip, k, &frame, &err);
        vlai_clip_close(clip);
    }
    vlai_decoder_destroy(decoder);
    vlai_free(data);
    static const struct {
        const char *text;
        vla_status status;
        const char *part;
    } cases[] = {{"", VLA_E_FORMAT, "empty"},
                 {"version https://git-lfs.github.com/spec/v1\n", VLA_E_FORMAT, "Git-LFS"},
                 {"not a video at all, only words", VLA_E_CORRUPT, "not an mp4"}};
    for (size_t i = 0; i < 3; i++) {
        FILE *f = fopen(path, "wb");
        fputs(cases[i].text, f);
        fclose(f);
        vlai_clip *clip;
        assert_fails(vlai_clip_open(path, &clip, &err), cases[i].status, err, cases[i].part);
    }
    unlink(path);
}

/* Bytes inside samples are wrong: the decoder of H.264 tells of most such pictures, and then neither they nor what is
 * predicted from them are given; the groups around are as before. Of AV1 nothing like that can be asked. */
static void damaged_pictures(void **state)
{
    (void)state;
    enum { GOP = 6 };
    if (!write_foreign("libx264", AV_PIX_FMT_YUV420P, "x264-params", "scenecut=0:b-adapt=0:bframes=0:keyint=6:min-keyint=6", NULL)) {
        skip();
        return;
    }
    vla_error err = VLA_ERROR_INIT;
    char *data;
    size_t size;
    vlai_mp4 mp4;
    static uint8_t good[FRAMES][SIDE * SIDE * 3], rgb[SIDE * SIDE * 3];
    assert_ok(vlai_read_file(path, 0, &data, &size, &err), err);
    assert_ok(vlai_mp4_read(path, &mp4, &err), err);
    int refused = 0, damages = 0;
    for (int bad = -1; bad < FRAMES; bad++) {
        int64_t middle = bad < 0 ? 0 : (int64_t)mp4.samples[bad].offset + mp4.samples[bad].size / 2;
        int span = bad < 0 ? 0 : (int)mp4.samples[bad].size / 2 - 1;
        for (int i = 0; i < span; i++)
            data[middle + i] ^= (char)(0x5a + 3 * i);
        FILE *f = fopen(path, "wb");
        assert_non_null(f);
        assert_int_equal(fwrite(data, 1, size, f), size);
        fclose(f);
        for (int i = 0; i < span; i++)
            data[middle + i] ^= (char)(0x5a + 3 * i);
        vlai_clip *clip;
        vlai_decoder *decoder;
        vlai_frame frame;
        assert_ok(vlai_clip_open(path, &clip, &err), err);
        assert_ok(vlai_decoder_create(1, &decoder, &err), err);
        bool seen = false;
        for (int k = 0; k < FRAMES; k++) {
            int i = (k * 7 + 3) % FRAMES;
            vla_status status = vlai_decoder_read(decoder, clip, i, &frame, &err);
            if (status != VLA_OK) {
                assert_int_equal(status, VLA_E_CORRUPT);
                assert_non_null(strstr(err.message, path));
                assert_true(bad >= 0 && i >= bad && i / GOP == bad / GOP); /* it, or what follows from it */
                seen |= i == bad;
                continue;
            }
            assert_ok(vlai_decoder_rgb(decoder, &frame, bad < 0 ? good[i] : rgb, &err), err);
            if (bad >= 0 && (i < bad || i / GOP != bad / GOP))
                assert_memory_equal(rgb, good[i], sizeof rgb);
        }
        damages += bad >= 0;
        refused += seen;
        vlai_decoder_destroy(decoder);
        vlai_clip_close(clip);
    }
    print_message("%d of %d damaged pictures refused\n", refused, damages);
    assert_true(2 * refused > damages);
    vlai_mp4_fini(&mp4);
    vlai_free(data);
    unlink(path);
}

/* The conversion rule on its corners: grey, saturation on both sides, odd sizes. */
static void colours(void **state)
{
    (void)state;
    static const struct {
        uint8_t y, u, v, rgb[3];
    } cases[] = {{16, 128, 128, {0, 0, 0}},       {235, 128, 128, {254, 254, 254}}, {255, 255, 255, {255, 125, 255}},
                 {0, 0, 0, {0, 135, 0}},          {81, 90, 240, {253, 0, 0}},       {128, 128, 128, {130, 130, 130}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint8_t y[15], u[6], v[6], rgb[45];
        memset(y, cases[i].y, sizeof y), memset(u, cases[i].u, sizeof u), memset(v, cases[i].v, sizeof v);
        const uint8_t *const planes[3] = {y, u, v};
        static const int strides[3] = {5, 3, 3};
        vlai_yuv420_to_rgb(planes, strides, 5, 3, rgb);
        int luma = ((8 * cases[i].y - 128) * 9539) >> 16, du = 8 * cases[i].u - 1024, dv = 8 * cases[i].v - 1024;
        int want[3] = {luma + ((dv * 13075) >> 16), luma + ((du * -3209) >> 16) + ((dv * -6660) >> 16),
                       luma + ((du * 16525) >> 16)};
        for (int p = 0; p < 15; p++)
            for (int c = 0; c < 3; c++) {
                assert_int_equal(rgb[3 * p + c], want[c] < 0 ? 0 : want[c] > 255 ? 255 : want[c]);
                assert_in_range(rgb[3 * p + c] + 2 - cases[i].rgb[c], 0, 4); /* BT.601 by hand, within rounding */
            }
    }
}

/* What the rule of 4:2:0 does not cover: the expected numbers are PyAV 15.1's (FFmpeg 7.1), `frame.to_rgb()`. */
static void other_conversions(void **state)
{
    (void)state;
    static const uint8_t odd[3][18] = {
        {165, 18, 0, 178, 31, 0, 210, 28, 0, 223, 41, 0, 255, 39, 16, 255, 52, 28},
        {96, 83, 137, 109, 96, 150, 143, 94, 189, 155, 107, 202, 188, 103, 240, 201, 116, 253},
        {139, 126, 180, 152, 139, 193, 186, 137, 232, 198, 150, 245, 231, 146, 255, 244, 159, 255}};
    vla_error err = VLA_ERROR_INIT;
    vlai_decoder *decoder;
    assert_ok(vlai_decoder_create(1, &decoder, &err), err);
    AVFrame *picture = av_frame_alloc();
    vlai_frame frame = {.picture = picture};
    picture->width = 6, picture->height = 3, picture->format = AV_PIX_FMT_YUV420P;
    assert_int_equal(av_frame_get_buffer(picture, 0), 0);
    for (int i = 0; i < 3; i++) {
        frame.planes[i] = picture->data[i], frame.strides[i] = picture->linesize[i];
        for (int y = 0; y < (i ? 2 : 3); y++)
            for (int x = 0; x < (i ? 3 : 6); x++)
                picture->data[i][y * picture->linesize[i] + x] =
                    (uint8_t)(i == 0 ? 60 + 37 * y + 11 * x : i == 1 ? 60 + 90 * y + 13 * x : 200 - 70 * y + 13 * x);
    }
    uint8_t rgb[66 * 4 * 3];
    assert_ok(vlai_decoder_rgb(decoder, &frame, rgb, &err), err); /* an odd height */
    assert_memory_equal(rgb, odd, sizeof odd);
    static const enum AVPixelFormat formats[] = {AV_PIX_FMT_YUVJ420P, AV_PIX_FMT_YUV422P, AV_PIX_FMT_YUV444P};
    for (size_t f = 0; f < 3; f++) { /* rows that are no multiple of eight pixels: grey to the last column */
        av_frame_unref(picture);
        picture->width = 66, picture->height = 4, picture->format = formats[f];
        assert_int_equal(av_frame_get_buffer(picture, 0), 0);
        for (int i = 0; i < 3; i++) {
            frame.planes[i] = picture->data[i], frame.strides[i] = picture->linesize[i];
            memset(picture->data[i], 128, (size_t)(picture->linesize[i] * (i && f == 0 ? 2 : 4)));
        }
        memset(rgb, 0, sizeof rgb);
        assert_ok(vlai_decoder_rgb(decoder, &frame, rgb, &err), err);
        for (size_t i = 0; i < sizeof rgb; i++)
            assert_in_range(rgb[i], f == 0 ? 127 : 129, f == 0 ? 129 : 131); /* full range: 128; limited: 130 */
    }
    av_frame_free(&picture);
    vlai_decoder_destroy(decoder);
}

int main(void)
{
    snprintf(path, sizeof path, "/tmp/vla-test-video-%d.mp4", (int)getpid());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_order),
        cmocka_unit_test(foreign_streams),
        cmocka_unit_test(fragments),
        cmocka_unit_test(damage),
        cmocka_unit_test(damaged_pictures),
        cmocka_unit_test(colours),
        cmocka_unit_test(other_conversions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
