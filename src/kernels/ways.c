#include "kernels/ways.h"

vlai_cuda_ways vlai_cuda_way = {.norm_backward = 0, .rope_sums = 0, .totals = 0, .gelu = 0, .scatter = 0};
