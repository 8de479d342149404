#define FAMILY "cpu/elementwise.inc.h"
#include "cpu/instantiate.h"
