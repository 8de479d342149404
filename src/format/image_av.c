/* BMP and WebP through libavcodec; what they hold becomes RGB as Pillow's convert("RGB") has it. TIFF is not among them:
 * libavcodec takes its YCbCr for RGB, and in LeRobot sets it is depth. */
#include "format/image_impl.h"

#include "base/fail.h"
#include "base/memory.h"

#include <libavcodec/avcodec.h>
#include <libavutil/imgutils.h>
#include <libavutil/pixdesc.h>
#include <stdbool.h>
#include <string.h>

static const struct {
    enum AVCodecID codec;
    const char *name;
} kinds[] = {
    [VLAI_STILL_BMP] = {AV_CODEC_ID_BMP, "BMP"},
    [VLAI_STILL_WEBP] = {AV_CODEC_ID_WEBP, "WebP"},
};

static void palette_to_rgb(const AVFrame *p, uint8_t *rgb)
{
    for (int y = 0; y < p->height; y++)
        for (int x = 0; x < p->width; x++, rgb += 3) {
            uint32_t colour; /* alpha, red, green, blue from the highest byte down */
            memcpy(&colour, p->data[1] + 4 * p->data[0][(int64_t)y * p->linesize[0] + x], 4);
            rgb[0] = (uint8_t)(colour >> 16);
            rgb[1] = (uint8_t)(colour >> 8);
            rgb[2] = (uint8_t)colour;
        }
}

/* Grey or colours of up to 8 bits, which are spread over 0..255, with alpha or without. `line`: room for a row. */
static void components_to_rgb(const AVFrame *p, const AVPixFmtDescriptor *d, uint16_t *line, uint8_t *rgb)
{
    for (int y = 0; y < p->height; y++)
        for (int c = 0; c < 3; c++) {
            int from = d->nb_components < 3 ? 0 : c, most = (1 << d->comp[from].depth) - 1;
            av_read_image_line(line, (const uint8_t **)p->data, p->linesize, d, 0, y, from, p->width, 0);
            uint8_t *out = rgb + (int64_t)y * p->width * 3 + c;
            for (int x = 0; x < p->width; x++)
                out[3 * x] = (uint8_t)(line[x] * 255 / most);
        }
}

static vla_status frame_to_rgb(const AVFrame *p, vlai_still kind, const char *name, vlai_image *image, vla_error *err)
{
    const AVPixFmtDescriptor *d = av_pix_fmt_desc_get((enum AVPixelFormat)p->format);
    bool planes = kind == VLAI_STILL_WEBP && (p->format == AV_PIX_FMT_YUV420P || p->format == AV_PIX_FMT_YUVA420P);
    bool components = d && d->comp[0].depth <= 8 && (p->format == AV_PIX_FMT_GRAY8 || (d->flags & AV_PIX_FMT_FLAG_RGB));
    if (!planes && !components && p->format != AV_PIX_FMT_PAL8)
        return vlai_fail_hint(err, VLA_E_UNSUPPORTED, "write it as PNG", "%s: a %s picture of kind '%s', which is not read", name,
                              kinds[kind].name, d ? d->name : "unknown");
    VLA_TRY(vlai_image_room(image, p->width, p->height, name, err));
    if (planes) {
        vlai_webp_rgb((const uint8_t *const *)p->data, p->linesize, p->width, p->height, image->data);
    } else if (p->format == AV_PIX_FMT_PAL8) {
        palette_to_rgb(p, image->data);
    } else {
        uint16_t *line = vlai_array((size_t)p->width, sizeof *line);
        if (!line)
            return vlai_nomem(err, (size_t)p->width * sizeof *line);
        components_to_rgb(p, d, line, image->data);
        vlai_free(line);
    }
    return VLA_OK;
}

static uint32_t le32(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* True when rows without compression are not all there: libavcodec takes a few missing bytes for rows without padding, and
 * gives a sheared picture. */
static bool bmp_is_short(const uint8_t *bytes, size_t size)
{
    enum { HEADER = 14, INFO = 40, BITFIELDS = 3 };
    if (size < HEADER + INFO || le32(bytes + HEADER) < INFO)
        return false;
    uint32_t compression = le32(bytes + HEADER + 16), bits = bytes[HEADER + 14], high = le32(bytes + HEADER + 8);
    uint64_t row = ((uint64_t)le32(bytes + HEADER + 4) * bits + 31) / 32 * 4, rows = high >> 31 ? -high : high; /* top down */
    return (compression == 0 || compression == BITFIELDS) && rows &&
           (le32(bytes + 10) > size || row > (size - le32(bytes + 10)) / rows);
}

vla_status vlai_image_av(vlai_still kind, const uint8_t *bytes, size_t size, const char *name, vlai_image *image,
                         vla_error *err)
{
    const AVCodec *decoder = avcodec_find_decoder(kinds[kind].codec);
    if (!decoder)
        return vlai_fail_hint(err, VLA_E_UNSUPPORTED, "install the full libavcodec, or write the pictures as PNG",
                              "%s: a %s picture, and this libavcodec has no decoder for it", name, kinds[kind].name);
    if (kind == VLAI_STILL_BMP && bmp_is_short(bytes, size))
        return vlai_fail(err, VLA_E_CORRUPT, "%s: damaged BMP: it ends before its picture (%zu bytes)", name, size);
    enum { FLAGS = 20, ANIMATION = 2 }; /* of the extended header */
    if (kind == VLAI_STILL_WEBP && size > FLAGS && !memcmp(bytes + 12, "VP8X", 4) && (bytes[FLAGS] & ANIMATION))
        return vlai_fail_hint(err, VLA_E_UNSUPPORTED, "write its first picture as PNG", "%s: a WebP animation, where one picture is wanted",
                              name);
    if (size > INT32_MAX - AV_INPUT_BUFFER_PADDING_SIZE)
        return vlai_fail(err, VLA_E_CORRUPT, "%s: %s of %zu bytes is refused", name, kinds[kind].name, size);
    av_log_set_level(AV_LOG_FATAL); /* errors are returned */
    AVCodecContext *codec = avcodec_alloc_context3(decoder);
    AVPacket *packet = av_packet_alloc();
    AVFrame *frame = av_frame_alloc();
    vla_status status = VLA_OK;
    if (!codec || !packet || !frame || av_new_packet(packet, (int)size) < 0) {
        status = vlai_nomem(err, size);
        goto done;
    }
    memcpy(packet->data, bytes, size); /* it reads past the end of its input */
    codec->thread_count = 1;
    codec->max_pixels = VLAI_IMAGE_PIXEL_LIMIT;
    codec->err_recognition = AV_EF_EXPLODE; /* half a picture is none */
    int code = avcodec_open2(codec, decoder, NULL);
    if (code >= 0)
        code = avcodec_send_packet(codec, packet);
    if (code >= 0)
        code = avcodec_receive_frame(codec, frame);
    if (code == AVERROR(ENOMEM))
        status = vlai_nomem(err, size);
    else if (code == AVERROR_PATCHWELCOME || code == AVERROR(ENOSYS))
        status = vlai_fail_hint(err, VLA_E_UNSUPPORTED, "write it as PNG",
                                "%s: a %s picture of a kind that libavcodec does not read", name, kinds[kind].name);
    else if (code < 0 || frame->decode_error_flags || (frame->flags & AV_FRAME_FLAG_CORRUPT))
        status = vlai_fail(err, VLA_E_CORRUPT, "%s: damaged %s (%zu bytes)", name, kinds[kind].name, size);
    else
        status = frame_to_rgb(frame, kind, name, image, err);
done:
    av_frame_free(&frame);
    av_packet_free(&packet);
    avcodec_free_context(&codec);
    return status;
}
