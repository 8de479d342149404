#define FAMILY "cpu/image.inc.h"
#include "cpu/instantiate.h"
