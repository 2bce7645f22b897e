// A stand-in for those functions of CUDA's runtime that `cuda_calls` calls, without a GPU: a thread for each stream does
// what is asked of it, one after the other and late, as CUDA's documents of streams and events have it. Memory of the device
// is a file in memory, whose name in /proc/PID/maps lets tests count it. What CUDA leaves undefined ends the process with a
// word. Where CUDA's own header is at hand (WITH_HEADER), the compiler checks that the functions are as there.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifdef WITH_HEADER
#include <cuda_runtime_api.h>
#else
typedef int cudaError_t;
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
enum cudaMemcpyKind { cudaMemcpyHostToHost };
#endif

enum { COPY, RECORD, WAIT, CALL, END };
enum { NO_MEMORY = 2, NOT_READY = 600, MOST_AREAS = 4096, MOST_STREAMS = 1024 };

struct CUevent_st { long recorded, reached; };

typedef struct Work {
    struct Work *next;
    int kind;
    void *target;
    const void *source;
    size_t size;
    cudaEvent_t event;
    long number;
    void (*function)(void *);
} Work;

struct CUstream_st { Work *first, **last; pthread_t thread; int started, doing, begun; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct CUstream_st null_stream;
static cudaStream_t streams[MOST_STREAMS];
static int slow_microseconds = 2000, busy_at_most, failing, meets, met;

static int busy(void) {
    int found = null_stream.doing;
    for (int i = 0; i < MOST_STREAMS; i++) found += streams[i] && streams[i]->doing;
    return found;
}

// The third work of the first stream, the second of the NULL stream and the first of the second one wait for each other.
static void meet(cudaStream_t stream) {
    struct timespec end;
    int number = stream == &null_stream ? 2 : stream == streams[0] ? 3 : 1;
    if (!meets || stream->begun != number) return;
    met++;
    pthread_cond_broadcast(&changed);
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 60;
    while (met < 3 && !pthread_cond_timedwait(&changed, &lock, &end));
}

static void copy(const Work *work) {
    size_t half = work->size / 2;
    usleep(rand() % (slow_microseconds + 1));
    memcpy(work->target, work->source, half);
    usleep(rand() % (slow_microseconds + 1));
    memcpy((char *)work->target + half, (const char *)work->source + half, work->size - half);
}

static void perform(const Work *work) {
    if (work->kind == COPY) copy(work);
    if (work->kind == CALL) work->function(work->target);
}

static void *run(void *argument) {
    cudaStream_t stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first) pthread_cond_wait(&changed, &lock);
        Work *work = stream->first;
        while (work->kind == WAIT && work->event->reached < work->number) pthread_cond_wait(&changed, &lock);
        if (work->kind == COPY || work->kind == CALL) {
            stream->doing = 1;
            stream->begun++;
            meet(stream);
            if (busy() > busy_at_most) busy_at_most = busy();
            pthread_mutex_unlock(&lock);
            perform(work);
            pthread_mutex_lock(&lock);
            stream->doing = 0;
        } else if (work->kind == RECORD && work->event->reached < work->number) {
            work->event->reached = work->number;
        }
        int kind = work->kind;
        stream->first = work->next;
        if (!stream->first) stream->last = &stream->first;
        free(work);
        pthread_cond_broadcast(&changed);
        if (kind == END) break;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

static int add(cudaStream_t stream, Work given) {
    Work *work = malloc(sizeof(Work));
    *work = given;
    work->next = 0;
    pthread_mutex_lock(&lock);
    if (!stream) stream = &null_stream;
    if (!stream->started) {
        stream->started = 1;
        stream->last = &stream->first;
        pthread_create(&stream->thread, 0, run, stream);
    }
    if (work->kind == RECORD) work->number = ++work->event->recorded;
    if (work->kind == WAIT) work->number = work->event->recorded;
    *stream->last = work;
    stream->last = &work->next;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return 0;
}

// Of the tests: a kernel, how long half a copy takes at most, `meet`, how many streams worked at once, and failure.
void standInLaunch(void (*function)(void *)) { add(0, (Work){.kind = CALL, .function = function}); }
void standInSlow(int microseconds) { slow_microseconds = microseconds; }
void standInMeet(void) { meets = 1; }
int standInBusy(void) { return busy_at_most; }
void standInFail(int code) { failing = code; }

const char *cudaGetErrorString(cudaError_t error) { return "an illegal memory access was encountered"; }
cudaError_t cudaMallocHost(void **pointer, size_t size) { return posix_memalign(pointer, 4096, size); }
cudaError_t cudaFreeHost(void *pointer) { memset(pointer, 255, 1); free(pointer); return 0; }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
    int number = 0;
    if (flags != 1) return 1;
    pthread_mutex_lock(&lock);
    while (streams[number]) number++;
    *stream = streams[number] = calloc(1, sizeof(struct CUstream_st));
    pthread_mutex_unlock(&lock);
    return 0;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (stream->started) {
        add(stream, (Work){.kind = END});
        pthread_join(stream->thread, 0);
    }
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST_STREAMS; i++) if (streams[i] == stream) streams[i] = 0;
    pthread_mutex_unlock(&lock);
    free(stream);
    return 0;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    *event = calloc(1, sizeof(struct CUevent_st));
    return flags != 3;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) { return 0; }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return add(stream, (Work){.kind = RECORD, .event = event});
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    pthread_mutex_lock(&lock);
    long number = event->recorded;
    while (event->reached < number) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return failing;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    pthread_mutex_lock(&lock);
    int is_reached = event->reached >= event->recorded;
    pthread_mutex_unlock(&lock);
    return failing ? failing : is_reached ? 0 : NOT_READY;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    return flags ? 1 : add(stream, (Work){.kind = WAIT, .event = event});
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (kind != 1 && kind != 2) return 1;
    return add(stream, (Work){.kind = COPY, .target = target, .source = source, .size = size});
}

// Of the stand-in of NCCL.
int standInCall(cudaStream_t stream, void (*function)(void *), void *argument) {
    return add(stream, (Work){.kind = CALL, .function = function, .target = argument});
}

static const char *bus = "0000:3b:00.0";
void standInAt(const char *at) { bus = strdup(at); }
const char *standInBus(void) { return bus; }

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    strncpy(text, standInBus(), length);
    return device;
}

static pthread_mutex_t areas_lock = PTHREAD_MUTEX_INITIALIZER;
static struct { char *begin; size_t size; } areas[MOST_AREAS];

static void end(const char *why) {
    fprintf(stderr, "the stand-in of CUDA: %s\n", why);
    fflush(stderr);
    abort();
}

// Of the stand-in of NCCL: this memory of the device is there.
void standInRequire(const void *address, size_t size) {
    int found = 0;
    pthread_mutex_lock(&areas_lock);
    for (int i = 0; i < MOST_AREAS; i++)
        found |= areas[i].begin && areas[i].begin <= (const char *)address &&
                 (const char *)address + size <= areas[i].begin + areas[i].size;
    pthread_mutex_unlock(&areas_lock);
    if (!found) end("a transfer of memory that is freed, or smaller");
}

int standInAreas(void) {
    int found = 0;
    pthread_mutex_lock(&areas_lock);
    for (int i = 0; i < MOST_AREAS; i++) found += areas[i].begin != 0;
    pthread_mutex_unlock(&areas_lock);
    return found;
}

cudaError_t cudaMalloc(void **pointer, size_t size) {
    int file = memfd_create("stand-in", MFD_CLOEXEC), place = 0;
    if (file < 0 || ftruncate(file, size)) end("there is no file in memory");
    *pointer = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (*pointer == MAP_FAILED) return NO_MEMORY;
    pthread_mutex_lock(&areas_lock);
    while (place < MOST_AREAS && areas[place].begin) place++;
    if (place == MOST_AREAS) end("there is more memory than tests need");
    areas[place].begin = *pointer, areas[place].size = size;
    pthread_mutex_unlock(&areas_lock);
    return 0;
}

cudaError_t cudaFree(void *pointer) {
    int place = 0;
    pthread_mutex_lock(&areas_lock);
    while (place < MOST_AREAS && areas[place].begin != pointer) place++;
    if (place == MOST_AREAS) end("memory is freed that was not made here");
    munmap(areas[place].begin, areas[place].size);
    areas[place].begin = 0;
    pthread_mutex_unlock(&areas_lock);
    return 0;
}
