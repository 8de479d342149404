#include "optim/rounding.h"
#include "vla/run.h"

#define FAMILY "cpu/optim.inc.h"
#include "cpu/instantiate.h"
