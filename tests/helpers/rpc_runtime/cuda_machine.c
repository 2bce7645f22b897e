// The rest of a GPU that TVM's library for GPUs asks for, beyond `cuda_streams.c`: memory, which begins as NaN,
// attributes, and the driver's functions, by which kernels are launched. A module's code is the path of a library that
// `emulated_library` has made of its source, and its kernels run on the host, one at a time, in the threads of streams.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <cuda.h>
#define WITH_HEADER
#include "cuda_streams.c"
#define cudaMalloc area_made
#define cudaFree area_freed
#include "cuda_memory.c"
#undef cudaMalloc
#undef cudaFree

struct CUfunc_st { const char *(*launch)(void **, const int *, int); int parameters; };

static int is_busy(void) {
    for (int i = 0; i < 64; i++) if (streams[i] && streams[i]->first) return 1;
    return 0;
}

cudaError_t cudaMalloc(void **pointer, size_t size) {
    if (forbidden()) return UNSUPPORTED;
    if (failed(__func__)) return call_error;
    int code = area_made(pointer, size + !size);
    if (!code) memset(*pointer, 255, size);
    return code;
}

// As the real one, it waits for all that is under way.
cudaError_t cudaFree(void *pointer) {
    if (forbidden()) return UNSUPPORTED;
    pthread_mutex_lock(&lock);
    while (null_stream.first || is_busy()) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return pointer ? area_freed(pointer) : 0;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = (size_t)8 << 30; return 0; }
cudaError_t cudaSetDevice(int device) { return device; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return 0; }
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return 0; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 8 : 0;
    return device;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof(*properties));
    properties->totalGlobalMem = (size_t)8 << 30;
    return device;
}
const char *cudaGetErrorName(cudaError_t error) { return "cudaErrorOfTheStandIn"; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaMemcpyPeerAsync(void *to, int on, const void *from, int at, size_t size, cudaStream_t stream) {
    return cudaErrorNotSupported;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { *stream = new_stream(1); return 0; }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 3); }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) { return cudaErrorNotSupported; }

CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
CUresult cuDeviceGetName(char *name, int length, CUdevice device) { strncpy(name, "stand-in", length); return 0; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return 0; }
CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = (int)error == UNSUPPORTED ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" : "CUDA_ERROR_OF_THE_STAND_IN";
    return 0;
}
CUresult cuGetErrorString(CUresult error, const char **words) { *words = "the stand-in fails"; return 0; }
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *extents, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    if (forbidden()) return UNSUPPORTED;
    *module = dlopen(image, RTLD_NOW | RTLD_LOCAL);
    if (!*module) fprintf(stderr, "%s\n", dlerror());
    return *module ? 0 : CUDA_ERROR_INVALID_IMAGE;
}

CUresult cuModuleUnload(CUmodule module) { dlclose(module); return 0; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    char symbol[512];
    *function = malloc(sizeof(struct CUfunc_st));
    snprintf(symbol, sizeof(symbol), "launch_%s", name);
    *(void **)&(*function)->launch = dlsym(module, symbol);
    snprintf(symbol, sizeof(symbol), "parameters_%s", name);
    int *parameters = dlsym(module, symbol);
    if (!(*function)->launch || !parameters || *parameters > PARAMETERS) return CUDA_ERROR_NOT_FOUND;
    (*function)->parameters = *parameters;
    return 0;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *given, CUfunction function, void **parameters, void **extra) {
    Work work = {.kind = KERNEL, .kernel = function->launch};
    unsigned int extents[6] = {given->gridDimX, given->gridDimY, given->gridDimZ,
                               given->blockDimX, given->blockDimY, given->blockDimZ};
    memcpy(work.extents, extents, sizeof(extents));
    for (int i = 0; i < function->parameters; i++) work.values[i] = *(void **)parameters[i];
    kernels++;
    return add(given->hStream, work);
}
