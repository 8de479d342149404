#define FAMILY "cpu/norm.inc.h"
#include "cpu/instantiate.h"
