#include "vendor/nvrtc.h"

#include "base/fail.h"
#include "base/memory.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nvrtc.h>
#include <stdio.h>

/* The functions that are used, found by name in the library. */
#define FUNCTIONS(X)                                                                                          \
    X(nvrtcVersion) X(nvrtcCreateProgram) X(nvrtcCompileProgram) X(nvrtcDestroyProgram) X(nvrtcGetCUBINSize)  \
    X(nvrtcGetCUBIN) X(nvrtcGetProgramLogSize) X(nvrtcGetProgramLog) X(nvrtcGetErrorString)

static struct {
    bool tried, there;
#define MEMBER(name) __typeof__(name) *name;
    FUNCTIONS(MEMBER)
#undef MEMBER
} lib;

bool vlai_nvrtc_available(void)
{
    if (lib.tried)
        return lib.there;
    lib.tried = true;
    char name[32];
    snprintf(name, sizeof name, "libnvrtc.so.%d", CUDART_VERSION / 1000);
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return false;
    lib.there = true;
#define FIND(name) lib.there = (*(void **)&lib.name = dlsym(handle, #name)) != NULL && lib.there;
    FUNCTIONS(FIND)
#undef FIND
    return lib.there;
}

int vlai_nvrtc_version(void)
{
    int major = 0, minor = 0;
    return vlai_nvrtc_available() && lib.nvrtcVersion(&major, &minor) == NVRTC_SUCCESS ? major * 1000 + minor : 0;
}

static vla_status compile_failed(nvrtcProgram program, nvrtcResult code, vla_error *err)
{
    char log[512] = "";
    size_t size = 0;
    if (lib.nvrtcGetProgramLogSize(program, &size) == NVRTC_SUCCESS && size > 1) {
        char *all = vlai_alloc(size);
        if (all && lib.nvrtcGetProgramLog(program, all) == NVRTC_SUCCESS)
            snprintf(log, sizeof log, ": %s", all);
        vlai_free(all);
    }
    return vlai_fail(err, VLA_E_CUDA, "NVRTC: %s%s", lib.nvrtcGetErrorString(code), log);
}

vla_status vlai_nvrtc_compile(const char *source, int arch, void **code, size_t *size, vla_error *err)
{
    char target[48];
    nvrtcProgram program;
    *code = NULL;
    *size = 0;
    if (!vlai_nvrtc_available())
        return vlai_fail(err, VLA_E_UNSUPPORTED, "NVRTC is not on this machine");
    snprintf(target, sizeof target, "--gpu-architecture=sm_%d", arch);
    const char *options[] = {target, "--std=c++17", "--fmad=false"};
    nvrtcResult result = lib.nvrtcCreateProgram(&program, source, "chain.cu", 0, NULL, NULL);
    if (result != NVRTC_SUCCESS)
        return vlai_fail(err, VLA_E_CUDA, "NVRTC: %s", lib.nvrtcGetErrorString(result));
    result = lib.nvrtcCompileProgram(program, sizeof options / sizeof *options, options);
    vla_status status = result == NVRTC_SUCCESS ? VLA_OK : compile_failed(program, result, err);
    if (status == VLA_OK && (lib.nvrtcGetCUBINSize(program, size) != NVRTC_SUCCESS || *size == 0))
        status = vlai_fail(err, VLA_E_CUDA, "NVRTC gives no machine code for sm_%d", arch);
    if (status == VLA_OK && !(*code = vlai_alloc(*size)))
        status = vlai_nomem(err, *size);
    if (status == VLA_OK && lib.nvrtcGetCUBIN(program, *code) != NVRTC_SUCCESS) {
        vlai_free(*code);
        *code = NULL;
        status = vlai_fail(err, VLA_E_CUDA, "NVRTC gives no machine code for sm_%d", arch);
    }
    lib.nvrtcDestroyProgram(&program);
    return status;
}
