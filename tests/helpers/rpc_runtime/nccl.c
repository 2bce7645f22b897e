// A stand-in for NCCL on the stand-in of CUDA's runtime, for communicators of two ranks that do not block: two processes
// find each other by a socket that the unique id names, and what is sent passes there, from one stream's thread to the
// other's, when both have begun it. As NCCL, it connects by the first transfer, tells of a peer's death only in
// ncclCommGetAsyncError, and its kernels then stay until the communicator is aborted. What NCCL leaves undefined, and two
// transfers at once on one GPU, ends the process with a word. Where NCCL's own header is at hand (WITH_HEADER), the compiler
// checks that the functions are as there.
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <poll.h>
#include <unistd.h>

#ifdef WITH_HEADER
#include <nccl.h>
#else
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { size_t size; unsigned int magic, version; int blocking, cgaClusterSize, minCTAs, maxCTAs; const char *netName; } ncclConfig_t;
typedef struct ncclComm *ncclComm_t;
typedef int ncclResult_t, ncclDataType_t;
typedef struct CUstream_st *cudaStream_t;
#endif

enum { SUCCESS, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
enum { NAME_BYTES = 48, BUS_BYTES = 32, MOST = 64 };

struct ncclComm {
    int file, state, rank, aborted, gone, pending, connected;
    char name[NAME_BYTES], bus[BUS_BYTES];
    pthread_t thread;
    int has_thread;
};
typedef struct { ncclComm_t comm; int sends; char *address; size_t size; void *stream; } Transfer;

int standInCall(void *stream, void (*function)(void *), void *argument);
void standInRequire(const void *address, size_t size);
const char *standInBus(void);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { char name[NAME_BYTES]; int file; } doors[MOST];
static int under_way, made;

static void end(const char *why) {
    fprintf(stderr, "the stand-in of CUDA: NCCL: %s\n", why);
    fflush(stderr);
    abort();
}

static struct sockaddr_un address_of(const char *name, socklen_t *size) {
    struct sockaddr_un found = {.sun_family = AF_UNIX};
    strncpy(found.sun_path + 1, name, NAME_BYTES - 1);
    *size = offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name);
    return found;
}

// Whether all bytes have passed; not if the peer has died, or it was aborted meanwhile.
static int pass(ncclComm_t comm, void *bytes, size_t size, int sends) {
    for (size_t done = 0; done < size;) {
        struct pollfd one = {.fd = comm->file, .events = sends ? POLLOUT : POLLIN};
        if (comm->aborted) return 0;
        if (!poll(&one, 1, 1)) continue;
        ssize_t now = sends ? send(comm->file, (char *)bytes + done, size - done, MSG_NOSIGNAL | MSG_DONTWAIT)
                            : recv(comm->file, (char *)bytes + done, size - done, MSG_DONTWAIT);
        if (now <= 0) {
            comm->state = REMOTE;
            while (!comm->aborted) usleep(200);
            return 0;
        }
        done += now;
    }
    return 1;
}

static void *join(void *argument) {
    ncclComm_t comm = argument;
    char others[BUS_BYTES] = {0};
    socklen_t size;
    struct sockaddr_un address = address_of(comm->name, &size);
    if (comm->rank == 0) {
        int door = -1;
        pthread_mutex_lock(&lock);
        for (int i = 0; i < MOST; i++) if (!strcmp(doors[i].name, comm->name)) door = doors[i].file, doors[i].name[0] = 0;
        pthread_mutex_unlock(&lock);
        if (door < 0) end("rank 0 has not made the unique id");
        struct pollfd one = {.fd = door, .events = POLLIN};
        while (!comm->aborted && !poll(&one, 1, 1));
        if (!comm->aborted) comm->file = accept4(door, 0, 0, SOCK_CLOEXEC);
        close(door);
    } else {
        comm->file = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        while (!comm->aborted && connect(comm->file, (void *)&address, size)) usleep(1000);
    }
    if (comm->aborted) return 0;
    if (!pass(comm, comm->bus, BUS_BYTES, 1) || !pass(comm, others, BUS_BYTES, 0)) return 0;
    comm->state = strcmp(comm->bus, others) ? SUCCESS : INVALID_USAGE;
    return 0;
}

static void transfer(void *argument) {
    Transfer *it = argument;
    ncclComm_t comm = it->comm;
    size_t size = it->size, half = it->size / 2;
    char go = 1;
    if (__sync_fetch_and_add(&under_way, 1)) end("two transfers are under way on one GPU");
    usleep(rand() % 2000);
    if (it->sends) {
        if (pass(comm, &go, 1, 0) && pass(comm, &size, sizeof size, 1) && pass(comm, it->address, half, 1)) {
            usleep(rand() % 2000);
            pass(comm, it->address + half, size - half, 1);
        }
    } else {
        standInRequire(it->address, it->size);
        if (pass(comm, &go, 1, 1) && pass(comm, &size, sizeof size, 0)) {
            if (size != it->size) end("one end sends other than the other one receives");
            standInRequire(it->address, size);
            if (pass(comm, it->address, half, 0)) {
                usleep(rand() % 2000);
                standInRequire(it->address, size);
                pass(comm, it->address + half, size - half, 0);
            }
        }
        standInRequire(it->address, it->size);
    }
    __sync_fetch_and_sub(&under_way, 1);
    __sync_fetch_and_sub(&comm->pending, 1);
    free(it);
}

static void *connect_and_begin(void *argument) {
    Transfer *it = argument;
    ncclComm_t comm = it->comm;
    char own = it->sends, others = 0;
    if (!pass(comm, &own, 1, 1) || !pass(comm, &others, 1, 0)) {
        __sync_fetch_and_sub(&comm->pending, 1);
        return 0;
    }
    if (own == others) end("both ends send, or both receive");
    standInCall(it->stream, transfer, it);
    comm->state = SUCCESS;
    return 0;
}

static void stop_thread(ncclComm_t comm) {
    if (comm->has_thread) pthread_join(comm->thread, 0);
    comm->has_thread = 0;
}

static int begin(ncclComm_t comm, int sends, const void *address, size_t size, int type, int peer, void *stream) {
    if (comm->gone) end("a communicator is used that was aborted");
    if (comm->state == IN_PROGRESS) end("a communicator is used while what was asked before goes on behind");
    if (type || peer != 1 - comm->rank || !stream) return INVALID_ARGUMENT;
    if (comm->state) return comm->state;
    Transfer *it = malloc(sizeof *it);
    *it = (Transfer){comm, sends, (char *)address, size, stream};
    __sync_fetch_and_add(&comm->pending, 1);
    if (comm->connected) return standInCall(stream, transfer, it);
    comm->connected = 1;
    comm->state = IN_PROGRESS;
    stop_thread(comm);
    comm->has_thread = 1;
    pthread_create(&comm->thread, 0, connect_and_begin, it);
    return IN_PROGRESS;
}

const char *ncclGetErrorString(ncclResult_t code) {
    return (int)code == REMOTE ? "remote process exited or there was a network error" : "invalid usage";
}
const char *ncclGetLastError(ncclComm_t comm) { return comm ? "" : "the stand-in says no more"; }

ncclResult_t ncclGetVersion(int *version) {
    *version = 22703;
    return 0;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    socklen_t size;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, NAME_BYTES, "stand-in-of-nccl-%d-%d", getpid(), __sync_add_and_fetch(&made, 1));
    struct sockaddr_un address = address_of(id->internal, &size);
    int file = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), place = 0;
    if (file < 0 || bind(file, (void *)&address, size) || listen(file, 1)) return 2;
    pthread_mutex_lock(&lock);
    while (doors[place].name[0]) place++;
    strcpy(doors[place].name, id->internal);
    doors[place].file = file;
    pthread_mutex_unlock(&lock);
    return 0;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    if (ranks != 2 || rank < 0 || rank > 1 || memcmp(id.internal, "stand-in-of-nccl-", 17)) return INVALID_ARGUMENT;
    if (config->size != offsetof(ncclConfig_t, netName) + sizeof config->netName || config->magic != 0xcafebeef || config->version != 21700) return INVALID_ARGUMENT;
    if (config->blocking || config->maxCTAs != -2147483647 - 1 || config->netName) return INVALID_ARGUMENT;
    *comm = calloc(1, sizeof **comm);
    (*comm)->file = -1;
    (*comm)->rank = rank;
    (*comm)->state = IN_PROGRESS;
    memcpy((*comm)->name, id.internal, NAME_BYTES - 1);
    strncpy((*comm)->bus, standInBus(), BUS_BYTES - 1);
    (*comm)->has_thread = 1;
    pthread_create(&(*comm)->thread, 0, join, *comm);
    return IN_PROGRESS;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state) {
    if (comm->gone) end("a communicator is asked that was aborted");
    *state = comm->state;
    return 0;
}

ncclResult_t ncclSend(const void *address, size_t size, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return begin(comm, 1, address, size, type, peer, stream);
}

ncclResult_t ncclRecv(void *address, size_t size, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return begin(comm, 0, address, size, type, peer, stream);
}

// What it was is kept, so that whoever uses it again is found out.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (comm->gone) end("a communicator is aborted twice");
    comm->aborted = 1;
    stop_thread(comm);
    while (comm->pending) usleep(200);
    comm->gone = 1;
    if (comm->file >= 0) close(comm->file);
    return 0;
}
