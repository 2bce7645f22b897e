// The memory of the stand-in's device: files in memory, which another process opens by CUDA's handles under the names that
// they have in /proc. What CUDA answers with an error gets one; what it leaves undefined ends the process with a word.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef WITH_HEADER
#include <cuda.h>
#include <cuda_runtime_api.h>
#else
typedef int cudaError_t, CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct { char reserved[64]; } cudaIpcMemHandle_t;
#define CUDAAPI
#define cuMemGetAddressRange cuMemGetAddressRange_v2
#endif

enum { INVALID_VALUE = 1, NO_MEMORY = 2, OF_THIS_PROCESS = 201, INVALID_HANDLE = 400, MOST = 4096 };

typedef struct { char *begin; size_t size; int file, opened; ino_t number; } Area;
typedef struct { char word[16]; pid_t process; int file; uint64_t size, number; } Named;

static pthread_mutex_t areas_lock = PTHREAD_MUTEX_INITIALIZER;
static Area areas[MOST];
static int refuse_opening, closing_microseconds, is_used;

static void end(const char *why) {
    fprintf(stderr, "the stand-in of CUDA: %s\n", why);
    fflush(stderr);
    abort();
}

static Area *area_at(const void *address, size_t size) {
    for (Area *each = areas; each < areas + MOST; each++)
        if (each->begin && each->begin <= (const char *)address && (const char *)address + size <= each->begin + each->size)
            return each;
    return 0;
}

static Area *kept(int file, size_t size, ino_t number, int opened) {
    Area *free_one = areas;
    while (free_one < areas + MOST && free_one->begin) free_one++;
    if (free_one == areas + MOST) return 0;
    char *begin = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (begin == MAP_FAILED) return 0;
    *free_one = (Area){begin, size, file, opened, number};
    is_used = 1;
    return free_one;
}

static void let_go(Area *area) {
    munmap(area->begin, area->size);
    close(area->file);
    memset(area, 0, sizeof *area);
}

// Of the streams: memory of a device from here on, which must be there still when it is copied, if any is of here.
void standInRequire(const void *address, size_t size) {
    pthread_mutex_lock(&areas_lock);
    if (is_used && !area_at(address, size)) end("a copy into memory that is closed, freed, or smaller");
    pthread_mutex_unlock(&areas_lock);
}

// Of the tests: how much memory is there, own or opened, what is answered to whoever opens some (0: as it is), and how
// long closing takes.
int standInAreas(int opened) {
    int found = 0;
    pthread_mutex_lock(&areas_lock);
    for (int i = 0; i < MOST; i++) found += areas[i].begin && !areas[i].opened == !opened;
    pthread_mutex_unlock(&areas_lock);
    return found;
}
void standInRefuse(int code) { refuse_opening = code; }
void standInSlowClosing(int microseconds) { closing_microseconds = microseconds; }

cudaError_t cudaMalloc(void **pointer, size_t size) {
    struct stat found;
    int file = memfd_create("stand-in", MFD_CLOEXEC);
    Area *area = 0;
    pthread_mutex_lock(&areas_lock);
    if (file >= 0 && !ftruncate(file, size) && !fstat(file, &found)) area = kept(file, size, found.st_ino, 0);
    if (area) *pointer = area->begin;
    else if (file >= 0) close(file);
    pthread_mutex_unlock(&areas_lock);
    return area ? 0 : NO_MEMORY;
}

cudaError_t cudaFree(void *pointer) {
    pthread_mutex_lock(&areas_lock);
    Area *area = area_at(pointer, 1);
    if (!area || area->begin != pointer || area->opened) end("memory is freed that was not made here");
    // A process that dies lets go of its files one after the other.
    for (int i = 0; flock(area->file, LOCK_EX | LOCK_NB); usleep(1000), i++)
        if (i == 200) end("memory is freed that another process has open");
    let_go(area);
    pthread_mutex_unlock(&areas_lock);
    return 0;
}

static Named name_of(const Area *area) {
    Named name = {"stand-in's CUDA", getpid(), area->file, area->size, area->number};
    return name;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    pthread_mutex_lock(&areas_lock);
    Area *area = area_at(pointer, 1);
    int is_known = area && area->begin == pointer && !area->opened;
    if (is_known) {
        Named name = name_of(area);
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &name, sizeof name);
    }
    pthread_mutex_unlock(&areas_lock);
    return is_known ? 0 : INVALID_VALUE;
}

cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned int flags) {
    Named name;
    struct stat found;
    char path[64];
    memcpy(&name, &handle, sizeof name);
    if (flags != 1) return INVALID_VALUE;
    if (refuse_opening) return refuse_opening;
    if (memcmp(name.word, "stand-in's CUDA", sizeof name.word)) return INVALID_HANDLE;
    if (name.process == getpid()) return OF_THIS_PROCESS;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", name.process, name.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return INVALID_HANDLE;
    Area *area = 0;
    pthread_mutex_lock(&areas_lock);
    if (!fstat(file, &found) && found.st_ino == name.number && (uint64_t)found.st_size == name.size) {
        for (int i = 0; i < MOST && !area; i++)
            if (areas[i].begin && areas[i].opened && areas[i].number == found.st_ino) area = areas + i;
        if (area) area->opened++, close(file);
        else if (!flock(file, LOCK_SH | LOCK_NB)) area = kept(file, name.size, found.st_ino, 1);
    }
    if (area) *pointer = area->begin; else close(file);
    pthread_mutex_unlock(&areas_lock);
    return area ? 0 : INVALID_HANDLE;
}

cudaError_t cudaIpcCloseMemHandle(void *pointer) {
    pthread_mutex_lock(&areas_lock);
    Area *area = area_at(pointer, 1);
    if (!area || area->begin != pointer || !area->opened) end("memory is closed that is not open");
    usleep(closing_microseconds);
    if (!--area->opened) let_go(area);
    pthread_mutex_unlock(&areas_lock);
    return 0;
}

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr *begin, size_t *size, CUdeviceptr address) {
    pthread_mutex_lock(&areas_lock);
    Area *area = area_at((void *)(uintptr_t)address, 1);
    if (area) *begin = (CUdeviceptr)(uintptr_t)area->begin, *size = area->size;
    pthread_mutex_unlock(&areas_lock);
    return area ? 0 : INVALID_VALUE;
}
