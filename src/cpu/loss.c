#define FAMILY "cpu/loss.inc.h"
#include "cpu/instantiate.h"
