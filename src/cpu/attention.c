#include "cpu/attention.h"
#include "cpu/gemm.h"

#define FAMILY "cpu/attention.inc.h"
#include "cpu/instantiate.h"
