// A stand-in for those functions of CUDA's runtime that `cuda_calls` and `cuda_graphs` call, without a GPU: a thread for
// each stream does what is asked of it, one after the other and late, as CUDA's documents of streams, events and graphs
// have it, also of what may not be done while a stream is recorded. "Device" memory is the host's; `cuda_memory.c` has
// what other processes may open, `cuda_machine.c` the rest of a GPU. Where CUDA's own header is at hand (WITH_HEADER), the
// compiler checks that the functions are as there.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifdef WITH_HEADER
#include <cuda_runtime_api.h>
#else
typedef int cudaError_t;
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
enum cudaMemcpyKind { cudaMemcpyHostToHost };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };
#endif

enum { COPY, RECORD, WAIT, CALL, CALL_WITH, FILL, KERNEL, GRAPH, END };
enum { NOT_READY = 600 };
enum { UNSUPPORTED = 900, INVALIDATED = 901, IMPLICIT = 906, WRONG_THREAD = 908 };
enum { PARAMETERS = 48 };

void standInRequire(const void *address, size_t size);

struct CUevent_st { long recorded, reached; };

typedef struct Work {
    struct Work *next;
    int kind;
    void *target;
    const void *source;
    size_t size;
    cudaEvent_t event;
    int between;
    long number;
    void (*function)(void);
    void (*function_with)(void *);
    int value;
    const char *(*kernel)(void **values, const int *extents, int backwards);
    void *values[PARAMETERS];
    int extents[6];
    cudaGraphExec_t graph;
} Work;

struct CUgraph_st { Work *first, **last; };
struct CUgraphExec_st { Work *first; int destroyed; };

struct CUstream_st {
    Work *first, **last;
    pthread_t thread, recorder;
    int started, doing, begun, blocking, broken;
    enum cudaStreamCaptureMode mode;
    cudaGraph_t recording;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct CUstream_st null_stream;
static cudaStream_t streams[64];
static int slow_microseconds = 2000, busy_at_most, failing, meets, met, graphs, launched, kernels, last_error, call_error;
static char failing_call[64];
static pthread_mutex_t kernel_lock = PTHREAD_MUTEX_INITIALIZER;

static int told(int code) { return code ? last_error = code : 0; }
static int failed(const char *function) { return strcmp(function, failing_call) ? 0 : told(call_error); }

// What is not recorded, such as to allocate, may not be done by a thread that records, and by none while one records in
// the global mode: that recording has ended then.
static int forbidden(void) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 64; i++) {
        cudaStream_t each = streams[i];
        if (!each || !each->recording || each->mode == cudaStreamCaptureModeRelaxed) continue;
        if (each->mode == cudaStreamCaptureModeThreadLocal && !pthread_equal(each->recorder, pthread_self())) continue;
        each->broken = found = 1;
    }
    pthread_mutex_unlock(&lock);
    return told(found ? UNSUPPORTED : 0);
}

static int busy(void) {
    int found = null_stream.doing;
    for (int i = 0; i < 64; i++) found += streams[i] && streams[i]->doing;
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
    if (work->between) standInRequire(work->target, work->size);
    memcpy(work->target, work->source, half);
    usleep(rand() % (slow_microseconds + 1));
    if (work->between) standInRequire(work->target, work->size);
    memcpy((char *)work->target + half, (const char *)work->source + half, work->size - half);
}

static void perform(const Work *work) {
    if (work->kind == COPY) copy(work);
    if (work->kind == CALL) work->function();
    if (work->kind == CALL_WITH) work->function_with(work->target);
    if (work->kind == FILL) memset(work->target, work->value, work->size);
    if (work->kind == KERNEL) {
        pthread_mutex_lock(&kernel_lock);
        const char *problem = work->kernel((void **)work->values, work->extents, 0);
        pthread_mutex_unlock(&kernel_lock);
        if (problem) fprintf(stderr, "a kernel fails: %s\n", problem), failing = 719;
    }
    if (work->kind == GRAPH) {
        for (const Work *each = work->graph->first; each; each = each->next) perform(each);
    }
}

static int does(const Work *work) { return work->kind != RECORD && work->kind != WAIT && work->kind != END; }

static void *run(void *argument) {
    cudaStream_t stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first) pthread_cond_wait(&changed, &lock);
        Work *work = stream->first;
        while (work->kind == WAIT && work->event->reached < work->number) pthread_cond_wait(&changed, &lock);
        if (does(work)) {
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
    int implicit = 0;
    Work *work = malloc(sizeof(Work));
    *work = given;
    work->next = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 64 && !stream; i++)
        if (streams[i] && streams[i]->recording && streams[i]->blocking) streams[i]->broken = implicit = 1;
    if (!stream) stream = &null_stream;
    if (implicit || (stream->recording && !does(work))) {
        stream->broken = 1;
        free(work);
        pthread_mutex_unlock(&lock);
        return told(implicit ? IMPLICIT : UNSUPPORTED);
    }
    if (stream->recording) {
        *stream->recording->last = work;
        stream->recording->last = &work->next;
        pthread_mutex_unlock(&lock);
        return 0;
    }
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

// Of the tests: a kernel, how long half a copy takes at most, `meet`, how many streams worked at once, and failure, of
// what is waited for or of one function; how many graphs there are, and were launched, and how many kernels were.
void standInLaunch(void (*function)(void)) { add(0, (Work){.kind = CALL, .function = function}); }
int standInLaunchOn(cudaStream_t stream, void (*function)(void)) {
    return add(stream, (Work){.kind = CALL, .function = function});
}
// Of the stand-in of NCCL.
int standInCall(cudaStream_t stream, void (*function)(void *), void *argument) {
    return add(stream, (Work){.kind = CALL_WITH, .function_with = function, .target = argument});
}
void standInFailIn(const char *function, int code) { strcpy(failing_call, function), call_error = code; }
int standInGraphs(void) { return graphs; }
int standInLaunched(void) { return launched; }
int standInKernels(void) { return kernels; }
void standInSlow(int microseconds) { slow_microseconds = microseconds; }
void standInMeet(void) { meets = 1; }
int standInBusy(void) { return busy_at_most; }
void standInFail(int code) { failing = code; }

const char *cudaGetErrorString(cudaError_t error) {
    if ((int)error == UNSUPPORTED) return "operation not permitted when stream is capturing";
    if ((int)error == INVALIDATED) return "operation failed due to a previous error during capture";
    return "an illegal memory access was encountered";
}
cudaError_t cudaGetLastError(void) { int found = last_error; last_error = 0; return found; }

static struct { char *start, *end; } locked[4096];

static int is_locked(const void *pointer) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 4096; i++) found |= (char *)pointer >= locked[i].start && (char *)pointer < locked[i].end;
    pthread_mutex_unlock(&lock);
    return found;
}

cudaError_t cudaMallocHost(void **pointer, size_t size) {
    int place = 0;
    if (forbidden()) return UNSUPPORTED;
    if (posix_memalign(pointer, 4096, size)) return 2;
    pthread_mutex_lock(&lock);
    while (locked[place].start) place++;
    locked[place].start = *pointer, locked[place].end = (char *)*pointer + size;
    pthread_mutex_unlock(&lock);
    return 0;
}

cudaError_t cudaFreeHost(void *pointer) {
    if (forbidden()) return UNSUPPORTED;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 4096; i++) if (locked[i].start == pointer) locked[i].start = locked[i].end = 0;
    pthread_mutex_unlock(&lock);
    memset(pointer, 255, 1);
    free(pointer);
    return 0;
}

static cudaStream_t new_stream(int blocking) {
    int number = 0;
    pthread_mutex_lock(&lock);
    while (streams[number]) number++;
    cudaStream_t stream = streams[number] = calloc(1, sizeof(struct CUstream_st));
    stream->blocking = blocking;
    pthread_mutex_unlock(&lock);
    return stream;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
    if (flags != 1) return 1;
    if (failed(__func__)) return call_error;
    *stream = new_stream(0);
    return 0;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (stream->started) {
        add(stream, (Work){.kind = END});
        pthread_join(stream->thread, 0);
    }
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 64; i++) if (streams[i] == stream) streams[i] = 0;
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

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    struct CUevent_st here = {0, 0};
    if (failed(__func__)) return call_error;
    int code = add(stream, (Work){.kind = RECORD, .event = &here});
    return code ? code : cudaEventSynchronize(&here);
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    struct CUevent_st done = {0, 0};
    if (kind < 1 || kind > 3) return 1;
    if (failed(__func__)) return call_error;
    int code = add(stream, (Work){.kind = COPY, .target = target, .source = source, .size = size, .between = kind == 3});
    if (code || kind != 2 || is_locked(target)) return code;
    // Into memory that is not page-locked: it returns when that is done.
    code = add(stream, (Work){.kind = RECORD, .event = &done});
    return code ? code : cudaEventSynchronize(&done);
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t size, cudaStream_t stream) {
    return failed(__func__) ? call_error : add(stream, (Work){.kind = FILL, .target = target, .value = value, .size = size});
}

const char *standInBus(void) {
    const char *given = getenv("STAND_IN_BUS");
    return given ? given : "0000:3b:00.0";
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    strncpy(text, standInBus(), length);
    return device;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    if (failed(__func__)) return call_error;
    if (!stream || stream->recording) return told(UNSUPPORTED);
    cudaGraph_t graph = calloc(1, sizeof(struct CUgraph_st));
    graph->last = &graph->first;
    pthread_mutex_lock(&lock);
    stream->recorder = pthread_self(), stream->mode = mode, stream->broken = 0, stream->recording = graph;
    pthread_mutex_unlock(&lock);
    return 0;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = 0;
    pthread_mutex_lock(&lock);
    int wrong = !pthread_equal(stream->recorder, pthread_self()) ? WRONG_THREAD : stream->broken ? INVALIDATED : 0;
    if (!wrong) *graph = stream->recording;
    stream->recording = 0;
    pthread_mutex_unlock(&lock);
    return wrong ? told(wrong) : failed(__func__) ? call_error : 0;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    if (failed(__func__)) return call_error;
    *executable = calloc(1, sizeof(struct CUgraphExec_st));
    Work **last = &(*executable)->first;
    for (Work *each = graph->first; each; each = each->next, last = &(*last)->next) {
        *last = malloc(sizeof(Work));
        **last = *each;
        (*last)->next = 0;
    }
    graphs++;
    return flags != 0;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    for (Work *each = graph->first, *next; each; each = next) next = each->next, free(each);
    free(graph);
    return 0;
}

// What is under way goes on, as cuGraphExecDestroy's document has it.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    executable->destroyed = 1;
    graphs--;
    return 0;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    if (failed(__func__)) return call_error;
    if (executable->destroyed) fprintf(stderr, "a graph that is destroyed is launched\n"), abort();
    launched++;
    return add(stream, (Work){.kind = GRAPH, .graph = executable});
}
