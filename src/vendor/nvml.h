/* What the driver's management library says of a GPU: clock, power, version. It is loaded when it is first asked for; where it
 * is missing every answer is 0 or empty.
 *
 *     vlai_nvml_reading r;
 *     vlai_nvml_read(info.bus, &r);      // r.mhz 0: not known */
#ifndef VLAI_NVML_H
#define VLAI_NVML_H

#include "vla/api.h"

VLA_BEGIN_DECLS

typedef struct vlai_nvml_reading {
    int mhz;         /* of the multiprocessors, now */
    double watts;    /* of the board; the driver's mean over the last second on current boards */
    int celsius;
    double limit;    /* watts that the board may take */
    char driver[96];
} vlai_nvml_reading;

/* `bus`: PCI address of the device, "0000:1b:00.0", as vlai_device_info has it. */
void vlai_nvml_read(const char *bus, vlai_nvml_reading *out);

VLA_END_DECLS

#endif
