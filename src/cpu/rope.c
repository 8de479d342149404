#define FAMILY "cpu/rope.inc.h"
#include "cpu/instantiate.h"
