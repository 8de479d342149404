/* Written video holds what went in: frame count, times, key frames, pictures; and the same input gives the same bytes. */
#include "test.h"

#include "base/io.h"
#include "base/memory.h"
#include "format/video_write.h"

#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <unistd.h>

enum { SIZE = 64, SEGMENTS = 3 };
static const int lengths[SEGMENTS] = {5, 1, 6};

static char folder[] = "/tmp/vla_video_write_XXXXXX";

/* A picture whose grey level tells the frame: 30, 50, 70 ... */
static int level(int frame)
{
    return 30 + frame * 15;
}

static void make_file(const vlai_video_format *format, const char *path)
{
    vla_error err = VLA_ERROR_INIT;
    static uint8_t rgb[SIZE * SIZE * 3];
    vlai_video *video = NULL;
    assert_ok(vlai_video_create(format, &video, &err), err);
    int frame = 0;
    for (int s = 0; s < SEGMENTS; s++) {
        vlai_encoder *encoder = NULL;
        vlai_segment segment;
        assert_ok(vlai_encoder_open(format, &encoder, &err), err);
        for (int i = 0; i < lengths[s]; i++) {
            memset(rgb, level(frame++), sizeof rgb);
            assert_ok(vlai_encoder_put(encoder, rgb, &err), err);
        }
        assert_ok(vlai_encoder_finish(encoder, &segment, &err), err);
        assert_ok(vlai_video_append(video, &segment, &err), err);
        vlai_segment_fini(&segment);
    }
    assert_int_equal(vlai_video_frames(video), frame);
    assert_ok(vlai_video_close(video, path, &err), err);
}

/* Packets and pictures of a file against what went in. */
static void read_file(const vlai_video_format *format, const char *path)
{
    AVFormatContext *in = NULL;
    assert_int_equal(avformat_open_input(&in, path, NULL, NULL), 0);
    assert_true(avformat_find_stream_info(in, NULL) >= 0);
    assert_int_equal(in->nb_streams, 1);
    AVStream *stream = in->streams[0];
    assert_int_equal(stream->nb_frames, 12);
    assert_int_equal(av_cmp_q(stream->avg_frame_rate, (AVRational){format->fps, 1}), 0);
    const AVCodec *codec = NULL;
    codec = format->codec == VLAI_CODEC_AV1 ? avcodec_find_decoder_by_name("libdav1d") : NULL;
    if (!codec)
        codec = avcodec_find_decoder(stream->codecpar->codec_id);
    assert_non_null(codec);
    AVCodecContext *decoder = avcodec_alloc_context3(codec);
    avcodec_parameters_to_context(decoder, stream->codecpar);
    assert_int_equal(avcodec_open2(decoder, codec, NULL), 0);
    AVPacket *packet = av_packet_alloc();
    AVFrame *frame = av_frame_alloc();
    int packets = 0, pictures = 0, segment = 0, inside = 0, more = 1;
    while (more) {
        more = av_read_frame(in, packet) >= 0;
        if (more) {
            int64_t tick = av_rescale_q(packets, (AVRational){1, format->fps}, stream->time_base);
            assert_int_equal(packet->pts, tick);
            assert_int_equal(packet->dts, tick);
            assert_int_equal((packet->flags & AV_PKT_FLAG_KEY) != 0, inside % format->gop == 0);
            packets++;
            if (++inside == lengths[segment])
                segment++, inside = 0;
        }
        assert_int_equal(avcodec_send_packet(decoder, more ? packet : NULL), 0);
        av_packet_unref(packet);
        while (avcodec_receive_frame(decoder, frame) == 0) {
            assert_int_equal(frame->width, SIZE);
            /* Grey v is stored as 16 + 219/255 v; lossy coding of a flat picture moves it by a few levels at most. */
            int wanted = 16 + level(pictures) * 219 / 255, found = frame->data[0][32 * frame->linesize[0] + 32];
            if (abs(found - wanted) > 4)
                fail_msg("%s frame %d: luma %d, wanted %d", path, pictures, found, wanted);
            pictures++;
        }
    }
    assert_int_equal(packets, 12);
    assert_int_equal(pictures, 12);
    av_frame_free(&frame);
    av_packet_free(&packet);
    avcodec_free_context(&decoder);
    avformat_close_input(&in);
}

static void check_codec(vlai_codec codec, int gop)
{
    vla_error err = VLA_ERROR_INIT;
    vlai_video_format format = VLAI_VIDEO_FORMAT_DEFAULT;
    format.codec = codec;
    format.width = format.height = SIZE;
    format.fps = 30;
    format.gop = gop;
    char a[256], b[256], *first, *second;
    snprintf(a, sizeof a, "%s/a.mp4", folder);
    snprintf(b, sizeof b, "%s/b.mp4", folder);
    make_file(&format, a);
    make_file(&format, b);
    read_file(&format, a);
    size_t first_size, second_size;
    assert_ok(vlai_read_file(a, 0, &first, &first_size, &err), err);
    assert_ok(vlai_read_file(b, 0, &second, &second_size, &err), err);
    assert_int_equal(first_size, second_size);
    assert_memory_equal(first, second, first_size);
    /* The index stands before the pictures. */
    char *moov = NULL, *mdat = NULL;
    for (size_t i = 0; i + 4 <= first_size; i++) {
        if (!moov && !memcmp(first + i, "moov", 4))
            moov = first + i;
        if (!mdat && !memcmp(first + i, "mdat", 4))
            mdat = first + i;
    }
    assert_non_null(moov);
    assert_true(moov < mdat);
    vlai_free(first);
    vlai_free(second);
}

static void test_av1(void **state)
{
    (void)state;
    check_codec(VLAI_CODEC_AV1, 2);
    check_codec(VLAI_CODEC_AV1, 4);
}

static void test_h264(void **state)
{
    (void)state;
    check_codec(VLAI_CODEC_H264, 2);
    check_codec(VLAI_CODEC_H264, 1);
    check_codec(VLAI_CODEC_H264, 250);
}

static void test_bad_formats(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_encoder *encoder = NULL;
    vlai_video *video = NULL;
    vlai_video_format f = VLAI_VIDEO_FORMAT_DEFAULT;
    f.codec = VLAI_CODEC_H264;
    f.width = 65, f.height = 64, f.fps = 10;
    assert_fails(vlai_encoder_open(&f, &encoder, &err), VLA_E_INVALID, err, "65x64");
    f.width = 8;
    assert_fails(vlai_encoder_open(&f, &encoder, &err), VLA_E_INVALID, err, "16 to 8192");
    f.width = 64, f.fps = 0;
    assert_fails(vlai_video_create(&f, &video, &err), VLA_E_INVALID, err, "0 frames per second");
    f.fps = 10, f.gop = 0;
    assert_fails(vlai_video_create(&f, &video, &err), VLA_E_INVALID, err, "every 0 frames");
    f.gop = 2, f.crf = 52;
    assert_fails(vlai_video_create(&f, &video, &err), VLA_E_INVALID, err, "crf 52");
    f.crf = 30;
    assert_ok(vlai_video_create(&f, &video, &err), err);
    char path[256];
    snprintf(path, sizeof path, "%s/empty.mp4", folder);
    assert_fails(vlai_video_close(video, path, &err), VLA_E_INVALID, err, "without a frame");
    assert_false(vlai_is_file(path));
}

/* Whichever write fails, an error comes back and no file stays. */
static void test_failed_writes(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    vlai_video_format f = VLAI_VIDEO_FORMAT_DEFAULT;
    f.codec = VLAI_CODEC_H264;
    f.width = f.height = SIZE, f.fps = 10;
    static uint8_t rgb[SIZE * SIZE * 3];
    char path[256];
    snprintf(path, sizeof path, "%s/failed.mp4", folder);
    int failures = 0;
    for (uint64_t n = 1;; n++) {
        vlai_encoder *encoder = NULL;
        vlai_segment segment;
        vlai_video *video = NULL;
        assert_ok(vlai_encoder_open(&f, &encoder, &err), err);
        assert_ok(vlai_encoder_put(encoder, rgb, &err), err);
        assert_ok(vlai_encoder_finish(encoder, &segment, &err), err);
        assert_ok(vlai_video_create(&f, &video, &err), err);
        assert_ok(vlai_video_append(video, &segment, &err), err);
        vlai_segment_fini(&segment);
        vlai_io_fail_nth(n);
        vla_status status = vlai_video_close(video, path, &err);
        vlai_io_fail_nth(0);
        assert_int_equal(vlai_is_file(path), status == VLA_OK);
        if (status == VLA_OK)
            break;
        failures++;
        assert_int_equal(status, VLA_E_IO);
        assert_non_null(strstr(err.message, "failed.mp4"));
    }
    assert_true(failures >= 3); /* create, write, sync */
}

static int set_up(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    vla_error err = VLA_ERROR_INIT;
    return vlai_remove_tree(folder, &err) == VLA_OK ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_av1),
        cmocka_unit_test(test_h264),
        cmocka_unit_test(test_bad_formats),
        cmocka_unit_test(test_failed_writes),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
