#define FAMILY "cpu/rows.inc.h"
#include "cpu/instantiate.h"
