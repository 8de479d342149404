/* Pictures to patch rows: y = (x - 255 mean) / (255 std), columns in the order channel, frame, row, column; the one frame
 * stands for all of them. A patch that does not lie inside `pixels` becomes NaN, never a stray read. */

static void L(patchify_tile)(void *context, int64_t tile, int thread)
{
    (void)thread;
    const vlai_cpu_call *call = context;
    const vla_patchify_options *options = &call->node->attrs.patchify;
    const uint8_t *pixels = call->in[0].data;
    const int32_t *patches = call->in[1].data;
    int64_t side = options->patch, area = side * side, cols = vlai_cols(&call->out[0]);
    vlai_span span = vlai_span_of(tile, vlai_tile_rows(2 * cols), vlai_rows(&call->out[0]));
    for (int64_t row = span.first; row < span.end; row++) {
        int64_t first = patches[3 * row], stride = patches[3 * row + 1];
        real *y = (real *)call->out[0].data + row * cols;
        if (first < 0 || stride < 3 * side || first + (side - 1) * stride + 3 * side > call->in[0].elements) {
            for (int64_t i = 0; i < cols; i++)
                y[i] = (real)NAN;
            continue;
        }
        for (int channel = 0; channel < 3; channel++) {
            real mean = (real)options->mean[channel] * 255, deviation = (real)options->std[channel] * 255;
            real *frame = y + channel * options->temporal * area;
            for (int64_t i = 0; i < side; i++)
                for (int64_t j = 0; j < side; j++)
                    frame[i * side + j] = ((real)pixels[first + i * stride + 3 * j + channel] - mean) / deviation;
            for (int copy = 1; copy < options->temporal; copy++)
                memcpy(frame + copy * area, frame, (size_t)area * sizeof(real));
        }
    }
}

void FN(patchify)(const vlai_cpu_call *call)
{
    if (call->out[0].data)
        vlai_run(call, vlai_tiles(vlai_rows(&call->out[0]), vlai_tile_rows(2 * vlai_cols(&call->out[0]))),
                 L(patchify_tile));
}
