#define FAMILY "cpu/optim.inc.h"
#include "cpu/instantiate.h"
