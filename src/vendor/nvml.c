#include "vendor/nvml.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

/* The functions as libnvidia-ml.so.1 exports them; results are 0 for success, devices opaque pointers. Clock 1 is the
 * multiprocessors', sensor 0 the chip's. */
typedef struct {
    int (*init)(void);
    int (*by_bus)(const char *bus, void **device);
    int (*clock)(void *device, int which, unsigned *mhz);
    int (*power)(void *device, unsigned *milliwatts);
    int (*limit)(void *device, unsigned *milliwatts);
    int (*temperature)(void *device, int sensor, unsigned *celsius);
    int (*version)(char *text, unsigned size);
} functions;

static int load(functions *f)
{
    static const char *const names[] = {"nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetClockInfo", "nvmlDeviceGetPowerUsage",
                                        "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetTemperature", "nvmlSystemGetDriverVersion"};
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL), *symbols[sizeof names / sizeof *names];
    _Static_assert(sizeof symbols == sizeof *f, "one function per name");
    if (!library)
        return -1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(symbols[i] = dlsym(library, names[i])))
            return -1;
    memcpy(f, symbols, sizeof *f); /* POSIX: a symbol's address is a function's */
    return f->init();
}

void vlai_nvml_read(const char *bus, vlai_nvml_reading *out)
{
    static functions f;
    static int state; /* 0: not tried; 1: there; -1: not there */
    *out = (vlai_nvml_reading){0};
    if (state == 0)
        state = load(&f) == 0 ? 1 : -1;
    void *device;
    unsigned value;
    if (state < 0 || f.by_bus(bus, &device))
        return;
    if (!f.clock(device, 1, &value))
        out->mhz = (int)value;
    if (!f.power(device, &value))
        out->watts = value * 1e-3;
    if (!f.limit(device, &value))
        out->limit = value * 1e-3;
    if (!f.temperature(device, 0, &value))
        out->celsius = (int)value;
    if (f.version(out->driver, sizeof out->driver))
        out->driver[0] = 0;
}
