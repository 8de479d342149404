#define FAMILY "cpu/reduce.inc.h"
#include "cpu/instantiate.h"
