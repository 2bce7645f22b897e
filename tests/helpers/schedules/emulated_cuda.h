// Runs CUDA source on a CPU: included before a source that TVM made, and compiled with it as plain C++.
//
// The threads of a block are coroutines on one core. Each runs to its next barrier before another does, and blocks run
// one after another: both first to last or last to first, so that what is not ordered comes out different. Shared
// memory is a section of the library; it and the threads' stacks are filled with a byte before every block. Instructions
// of a warp exchange their operands through memory of the warp. The layout of wmma's fragments is private to them, and
// so it is here: element i of 256 is with lane i % 32.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#include <ucontext.h>

#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shared_memory")))
// The section exists in libraries without shared memory, too.
static __attribute__((section("shared_memory"), used)) char emulated_section[64];
extern "C" char __start_shared_memory[], __stop_shared_memory[];

namespace emulated {

constexpr int WARP = 32;
constexpr size_t STACK_BYTES = 64 << 10;
constexpr size_t FILLED_BYTES = 8 << 10;  // of a stack: larger than what a kernel keeps there
enum class State { READY, AT_BLOCK, AT_WARP, DONE };

struct Thread {
  ucontext_t context;
  dim3 at;
  int number;
  State state;
  const char* waits_for;
  int exchanged;
  std::vector<char> stack;
};

// Two halves, used in turns: a lane may write its next operand while others still read the last.
struct Exchange {
  alignas(64) char bytes[2][3 * WARP * 64];
};

inline dim3 block, grid, threads;
inline std::vector<Thread> all;
inline std::vector<Exchange> exchanges;
inline Thread* current;
inline ucontext_t scheduler;
inline std::string failure;
inline void (*body)(void*);
inline void* body_argument;

inline void wait(State state, const char* what) {
  current->state = state;
  current->waits_for = what;
  Thread* self = current;
  swapcontext(&self->context, &scheduler);
}

inline void fail(const std::string& what) {
  failure = what;
  wait(State::AT_BLOCK, "");
}

inline int lane() { return current->number % WARP; }

inline void warp_barrier(const char* what) { wait(State::AT_WARP, what); }

// Every lane's value, for the lanes of this warp: valid until the next exchange but one.
template <typename T>
const T* all_lanes(const T& value, const char* what) {
  static_assert(sizeof(T) <= 192);
  int turn = current->exchanged++ & 1;
  T* values = reinterpret_cast<T*>(exchanges[current->number / WARP].bytes[turn]);
  values[lane()] = value;
  warp_barrier(what);
  return values;
}

inline void run_thread() {
  body(body_argument);
  current->state = State::DONE;
  swapcontext(&current->context, &scheduler);
}

inline void start(Thread& thread, int byte) {
  thread.state = State::READY;
  thread.exchanged = 0;
  thread.stack.resize(STACK_BYTES);
  memset(thread.stack.data() + STACK_BYTES - FILLED_BYTES, byte, FILLED_BYTES);
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack.data();
  thread.context.uc_stack.ss_size = STACK_BYTES;
  thread.context.uc_link = nullptr;
  makecontext(&thread.context, run_thread, 0);
}

// Lets those go on of whom all that are not done wait for the same; whether there were any.
inline bool release(size_t first, size_t end, State state) {
  const char* what = nullptr;
  for (size_t i = first; i < end; ++i) {
    if (all[i].state == State::DONE) continue;
    if (all[i].state != state || (what && strcmp(what, all[i].waits_for))) return false;
    what = all[i].waits_for;
  }
  for (size_t i = first; i < end; ++i)
    if (all[i].state == state) all[i].state = State::READY;
  return what != nullptr;
}

inline bool run_block(bool backwards, int byte) {
  memset(__start_shared_memory, byte, __stop_shared_memory - __start_shared_memory);
  for (auto& thread : all) start(thread, byte);
  for (;;) {
    for (size_t i = 0; i < all.size(); ++i) {
      Thread& thread = all[backwards ? all.size() - 1 - i : i];
      if (thread.state != State::READY) continue;
      current = &thread;
      swapcontext(&scheduler, &thread.context);
      if (!failure.empty()) return false;
    }
    bool released = false, done = true;
    for (size_t first = 0; first < all.size(); first += WARP)
      released |= release(first, std::min(first + WARP, all.size()), State::AT_WARP);
    released |= release(0, all.size(), State::AT_BLOCK);
    for (auto& thread : all) done &= thread.state == State::DONE;
    if (done) return true;
    if (!released) {
      failure = "threads of a block wait for different things:";
      for (auto& thread : all)
        if (thread.state != State::DONE) failure += std::string(" ") + std::to_string(thread.number) + " " + thread.waits_for;
      return false;
    }
  }
}

template <typename T>
T as(void* value) {
  if constexpr (std::is_pointer_v<T>) return static_cast<T>(value);
  else return static_cast<T>(reinterpret_cast<intptr_t>(value));
}

template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** values, std::index_sequence<I...>) {
  kernel(as<A>(values[I])...);
}

// Extents: of the grid's three axes, then of the block's. What went wrong, or null.
template <typename... A>
const char* launch(void (*kernel)(A...), void** values, const int* extents, int backwards, int byte) {
  struct Argument { void (*kernel)(A...); void** values; } argument{kernel, values};
  failure.clear();
  body_argument = &argument;
  body = [](void* given) {
    auto* it = static_cast<Argument*>(given);
    call(it->kernel, it->values, std::index_sequence_for<A...>());
  };
  grid = dim3(extents[0], extents[1], extents[2]);
  threads = dim3(extents[3], extents[4], extents[5]);
  all.resize(threads.x * threads.y * threads.z);
  exchanges.resize((all.size() + WARP - 1) / WARP);
  for (size_t i = 0; i < all.size(); ++i) {
    all[i].number = i;
    all[i].at = dim3(i % threads.x, i / threads.x % threads.y, i / (threads.x * threads.y));
  }
  size_t blocks = size_t(grid.x) * grid.y * grid.z;
  for (size_t i = 0; i < blocks; ++i) {
    size_t at = backwards ? blocks - 1 - i : i;
    block = dim3(at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y);
    if (!run_block(backwards, byte)) return failure.c_str();
  }
  return nullptr;
}

}  // namespace emulated

#define threadIdx (emulated::current->at)
#define blockIdx (emulated::block)
#define blockDim (emulated::threads)
#define gridDim (emulated::grid)

inline void __syncthreads() { emulated::wait(emulated::State::AT_BLOCK, "__syncthreads"); }
inline void __syncwarp(unsigned = ~0u) { emulated::warp_barrier("__syncwarp"); }
inline unsigned __activemask() { return ~0u; }

// A lane beyond its part of `width` keeps its own value.
template <typename T>
T emulated_shuffle(T value, int from, int width, const char* what) {
  int lane = emulated::lane(), first = lane / width * width;
  const T* values = emulated::all_lanes(value, what);
  return from >= first && from < first + width ? values[from] : value;
}
template <typename T> T __shfl_sync(unsigned, T value, int from, int width = 32) {
  return emulated_shuffle(value, emulated::lane() / width * width + from % width, width, "__shfl_sync");
}
template <typename T> T __shfl_down_sync(unsigned, T value, int by, int width = 32) {
  return emulated_shuffle(value, emulated::lane() + by, width, "__shfl_down_sync");
}
template <typename T> T __shfl_up_sync(unsigned, T value, int by, int width = 32) {
  return emulated_shuffle(value, emulated::lane() - by, width, "__shfl_up_sync");
}
template <typename T> T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
  return emulated_shuffle(value, emulated::lane() ^ mask, width, "__shfl_xor_sync");
}

// After what is declared above: between a storage class and a type, C++ takes the attribute only.
#define alignas(bytes) __attribute__((aligned(bytes)))

inline float max(float x, float y) { return fmaxf(x, y); }
inline float min(float x, float y) { return fminf(x, y); }
inline double max(double x, double y) { return fmax(x, y); }
inline double min(double x, double y) { return fmin(x, y); }
template <typename T> std::enable_if_t<std::is_integral_v<T>, T> max(T x, T y) { return x > y ? x : y; }
template <typename T> std::enable_if_t<std::is_integral_v<T>, T> min(T x, T y) { return x < y ? x : y; }
// CUDA promotes integers of different sizes.
template <typename T, typename U>
using promoted = std::enable_if_t<std::is_integral_v<T> && std::is_integral_v<U> && !std::is_same_v<T, U>, std::common_type_t<T, U>>;
template <typename T, typename U> promoted<T, U> max(T x, U y) { return x > y ? x : y; }
template <typename T, typename U> promoted<T, U> min(T x, U y) { return x < y ? x : y; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __int_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
template <typename T> T __ldg(const T* at) { return *at; }

namespace nvcuda::wmma {
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major };

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
  static_assert(M == 16 && N == 16 && K == 16);
  T own[8];
};

inline int place(int index, unsigned row_length) {
  int element = index * emulated::WARP + emulated::lane();
  return element / 16 * row_length + element % 16;
}

inline int place_in_columns(int index, unsigned column_length) {
  int element = index * emulated::WARP + emulated::lane();
  return element % 16 * column_length + element / 16;
}

inline void check_alignment(const void* at, size_t row_bytes) {
  if (reinterpret_cast<uintptr_t>(at) % 32 || row_bytes % 16) emulated::fail("a fragment begins where none may");
}

template <typename Use, typename T, typename L>
void fill_fragment(fragment<Use, 16, 16, 16, T, L>& fragment, float value) {
  for (auto& each : fragment.own) each = T(value);
}

// The instructions are of a whole warp: none begins before all lanes are there.
template <typename Use, typename T, typename L>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, L>& fragment, const T* from, unsigned row_length) {
  emulated::warp_barrier("load_matrix_sync");
  check_alignment(from, row_length * sizeof(T));
  for (int i = 0; i < 8; ++i)
    fragment.own[i] = from[std::is_same_v<L, col_major> ? place_in_columns(i, row_length) : place(i, row_length)];
}

template <typename T>
void store_matrix_sync(T* to, const fragment<accumulator, 16, 16, 16, T>& fragment, unsigned row_length, layout_t) {
  emulated::warp_barrier("store_matrix_sync");
  check_alignment(to, row_length * sizeof(T));
  for (int i = 0; i < 8; ++i) to[place(i, row_length)] = fragment.own[i];
}

template <typename T, typename L, typename R>
void mma_sync(fragment<accumulator, 16, 16, 16, float>& result, const fragment<matrix_a, 16, 16, 16, T, L>& left,
              const fragment<matrix_b, 16, 16, 16, T, R>& right,
              const fragment<accumulator, 16, 16, 16, float>& total) {
  struct Operands { T left[8], right[8]; } operands;
  memcpy(operands.left, left.own, sizeof(left.own));
  memcpy(operands.right, right.own, sizeof(right.own));
  const Operands* lanes = emulated::all_lanes(operands, "mma_sync");
  for (int i = 0; i < 8; ++i) {
    int element = i * emulated::WARP + emulated::lane(), row = element / 16, column = element % 16;
    float sum = total.own[i];
    for (int k = 0; k < 16; ++k) {
      int in_left = row * 16 + k, in_right = k * 16 + column;
      sum += float(lanes[in_left % 32].left[in_left / 32]) * float(lanes[in_right % 32].right[in_right / 32]);
    }
    result.own[i] = sum;
  }
}
}  // namespace nvcuda::wmma

// What CUDA's headers have for devices alone, rounded once.
#define EMULATED_FUNCTION(name, value) \
  inline half name(half given) { float x = float(given); return half(value); } \
  inline nv_bfloat16 name(nv_bfloat16 given) { float x = float(given); return nv_bfloat16(value); }
EMULATED_FUNCTION(hexp, expf(x))
EMULATED_FUNCTION(hlog, logf(x))
EMULATED_FUNCTION(hsqrt, sqrtf(x))
EMULATED_FUNCTION(hrsqrt, 1.0f / sqrtf(x))
