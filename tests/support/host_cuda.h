// host_cuda.h: CUDA kernels on the host, thread by thread: what g++ needs to compile a .cu file and run a launch.
//
// A thread block runs at a time; each of its threads is a coroutine, which goes on until it has to wait for its warp or for
// the block. Threads that wait for different barriers are an error. HOST_CUDA_ORDER=1 or 2 runs the threads between two
// barriers from the last to the first, or in an order that changes: the results must not. For x86-64.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

struct Dim { unsigned x = 0, y = 0, z = 0; };
enum Wait { NOTHING, WARP, BLOCK };
struct Thread {
    void* stack_pointer;
    char* stack = nullptr;
    Dim index;
    bool done;
    Wait waits;
};

// What the threads of a warp tell each other, in turn here and there: a thread has read the words of one turn before it
// waits in the next, and none writes over them before all wait there.
struct Warp {
    uint64_t words[2][32];
    unsigned turn;
    unsigned present;  // lanes that had not ended when the warp last went on
};

inline constexpr size_t STACK = 256 << 10;
inline Dim blockIdx, gridDim, blockDim;
inline std::vector<Thread> threads;
inline std::vector<Warp> warps;
inline Thread* current;
inline void* scheduler;
inline std::function<void()> kernel_call;
inline char* dynamic_shared;
inline bool any_of_block, any_before;

#define threadIdx (current->index)

// Save the registers that a call keeps, and go on where those at `to` were saved.
extern "C" void host_cuda_switch(void** from, void* to);
asm(R"(
.weak host_cuda_switch
host_cuda_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

inline void wait_for(const Wait what) {
    Thread* me = current;
    me->waits = what;
    host_cuda_switch(&me->stack_pointer, scheduler);
}

inline void run_thread() {
    kernel_call();
    current->done = true;
    wait_for(NOTHING);
    abort();
}

// Let threads [first, last) go on if all that are left wait for `what`.
inline bool pass(const unsigned first, const unsigned last, const Wait what) {
    bool some = false;
    for (unsigned i = first; i < last; ++i) {
        if (threads[i].done) continue;
        if (threads[i].waits != what) return false;
        some = true;
    }
    for (unsigned i = first; i < last; ++i) threads[i].waits = NOTHING;
    return some;
}

inline bool pass_warp(const unsigned first, const unsigned last) {
    if (!pass(first, last, WARP)) return false;
    Warp& warp = warps[first / 32];
    warp.turn ^= 1, warp.present = 0;
    for (unsigned i = first; i < last; ++i) warp.present |= unsigned(!threads[i].done) << (i - first);
    return true;
}

inline void start_threads(const unsigned count) {
    if (threads.size() < count) threads.resize(count);
    warps.assign((count + 31) / 32, Warp());
    for (unsigned i = 0; i < count; ++i) {
        Thread& thread = threads[i];
        if (thread.stack == nullptr) thread.stack = static_cast<char*>(aligned_alloc(64, STACK));
        void** top = reinterpret_cast<void**>(thread.stack + STACK - 64);
        *--top = nullptr;  // where run_thread would return to
        *--top = reinterpret_cast<void*>(run_thread);
        thread.stack_pointer = top - 6;
        thread.index.x = i, thread.done = false, thread.waits = NOTHING;
    }
}

inline void run_block(const unsigned count) {
    const char* text = getenv("HOST_CUDA_ORDER");
    const int order = text ? atoi(text) : 0;
    static uint64_t random = 88172645463325252ull;
    unsigned places = 32;  // a power of two, so that the changing order has every thread once
    while (places < count) places *= 2;
    start_threads(count);
    for (bool left = true; left;) {
        left = false;
        bool goes_on = false;
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;  // Marsaglia's xorshift
        for (unsigned n = 0; n < places; ++n) {
            const unsigned at = order == 1 ? places - 1 - n : order == 2 ? n ^ (random & (places - 1)) : n;
            if (at >= count) continue;
            Thread& thread = threads[at];
            left |= !thread.done;
            if (thread.done || thread.waits != NOTHING) continue;
            current = &thread;
            host_cuda_switch(&scheduler, thread.stack_pointer);
            goes_on = true;
        }
        for (unsigned first = 0; first < count; first += 32) goes_on |= pass_warp(first, std::min(first + 32, count));
        if (pass(0, count, BLOCK)) goes_on = true, any_before = any_of_block, any_of_block = false;
        if (left && !goes_on) {
            fprintf(stderr, "block %u: threads wait for different barriers\n", blockIdx.x);
            abort();
        }
    }
}

inline void __syncthreads() { wait_for(BLOCK); }
inline void __syncwarp(unsigned = ~0u) { wait_for(WARP); }  // groups of a warp wait for each other: that is stricter
inline void __threadfence() {}
inline int __syncthreads_or(const int holds) {
    any_of_block |= holds != 0;
    wait_for(BLOCK);
    return any_before;
}

// Tell the warp a word, and return the words of all its lanes, which stay as they are until this thread waits again.
inline const uint64_t* tell_warp(const uint64_t word) {
    Warp& warp = warps[current->index.x / 32];
    uint64_t* const words = warp.words[warp.turn];
    words[current->index.x % 32] = word;
    wait_for(WARP);
    return words;
}

// What lane `source` of the warp passes.
template <typename T> T exchange(T value, const int source) {
    static_assert(sizeof(T) <= 8);
    uint64_t word = 0;
    memcpy(&word, &value, sizeof(T));
    const uint64_t* const words = tell_warp(word);
    memcpy(&value, &words[source], sizeof(T));
    return value;
}

inline int lane() { return current->index.x % 32; }
template <typename T> T __shfl_sync(unsigned, const T value, const int source, const int width = 32) {
    return exchange(value, (lane() & ~(width - 1)) + (source & (width - 1)));
}
template <typename T> T __shfl_xor_sync(unsigned, const T value, const int step, const int width = 32) {
    const int other = lane() ^ step;
    return exchange(value, other / width > lane() / width ? lane() : other);
}
template <typename T> T __shfl_up_sync(unsigned, const T value, const int step, const int width = 32) {
    return exchange(value, (lane() & (width - 1)) >= step ? lane() - step : lane());
}

inline bool is_present(const int of) { return warps[current->index.x / 32].present >> of & 1; }
template <typename Fold> unsigned over_warp(const unsigned value, const unsigned start, const Fold fold) {
    const uint64_t* const words = tell_warp(value);
    unsigned result = start;
    for (int i = 0; i < 32; ++i)
        if (is_present(i)) result = fold(result, (unsigned)words[i]);
    return result;
}
inline unsigned __reduce_or_sync(unsigned, const unsigned x) { return over_warp(x, 0, [](unsigned a, unsigned b) { return a | b; }); }
inline unsigned __reduce_add_sync(unsigned, const unsigned x) { return over_warp(x, 0, [](unsigned a, unsigned b) { return a + b; }); }
inline int __reduce_min_sync(unsigned, const int x) { return over_warp(x, INT32_MAX, [](int a, int b) { return a < b ? a : b; }); }
inline int __reduce_max_sync(unsigned, const int x) { return over_warp(x, INT32_MIN, [](int a, int b) { return a > b ? a : b; }); }
inline unsigned __ballot_sync(const unsigned mask, const int holds) { return __reduce_or_sync(mask, holds ? 1u << lane() : 0u); }
inline unsigned __match_any_sync(unsigned, const int value) {
    const uint64_t* const words = tell_warp((unsigned)value);
    unsigned same = 0;
    for (int i = 0; i < 32; ++i) same |= unsigned(is_present(i) && words[i] == (unsigned)value) << i;
    return same;
}
inline int __any_sync(const unsigned mask, const int holds) { return __ballot_sync(mask, holds) != 0; }
inline int __all_sync(const unsigned mask, const int holds) { return __ballot_sync(mask, !holds) == 0; }

inline float __fmul_rn(const float x, const float y) { return x * y; }
inline float __fadd_rn(const float x, const float y) { return x + y; }
inline double __dmul_rn(const double x, const double y) { return x * y; }
inline double __dadd_rn(const double x, const double y) { return x + y; }
inline int __popc(const unsigned x) { return __builtin_popcount(x); }
inline int __popcll(const unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(const int x) { return __builtin_ffs(x); }
inline int __ffsll(const long long x) { return __builtin_ffsll(x); }
[[noreturn]] inline void __trap() { abort(); }

// Threads run one at a time, so that nothing comes between.
template <typename T, typename New> T put(T* at, const New value) {
    const T old = *at;
    *at = (T)value;
    return old;
}
template <typename T, typename U> T atomicAdd(T* at, const U x) { return put(at, *at + (T)x); }
template <typename T, typename U> T atomicOr(T* at, const U x) { return put(at, *at | (T)x); }
template <typename T, typename U> T atomicMin(T* at, const U x) { return put(at, std::min(*at, (T)x)); }
template <typename T, typename U> T atomicMax(T* at, const U x) { return put(at, std::max(*at, (T)x)); }
template <typename T, typename U, typename V> T atomicCAS(T* at, const U there, const V x) { return put(at, *at == (T)there ? (T)x : *at); }

template <typename A, typename B> std::common_type_t<A, B> min(const A a, const B b) { return std::min<std::common_type_t<A, B>>(a, b); }
template <typename A, typename B> std::common_type_t<A, B> max(const A a, const B b) { return std::max<std::common_type_t<A, B>>(a, b); }

template <typename To, typename From> To bits_of(const From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}
inline unsigned __float_as_uint(const float x) { return bits_of<unsigned>(x); }
inline int __float_as_int(const float x) { return bits_of<int>(x); }
inline float __int_as_float(const int x) { return bits_of<float>(x); }
inline long long __double_as_longlong(const double x) { return bits_of<long long>(x); }
inline double __longlong_as_double(const long long x) { return bits_of<double>(x); }
template <typename T> T __ldcs(const T* at) { return *at; }

// The tensor cores' instructions, one element of a row of a and of a column of b after the other.
inline double factor_of(const double x) { return x; }
inline float factor_of(const unsigned x) { return bits_of<float>(x); }
template <typename T, int OF_C, typename Factor, int OF_A, int OF_B>
void host_mma(T (&c)[OF_C], const Factor (&a)[OF_A], const Factor (&b)[OF_B]) {
    struct Factors { const Factor *a, *b; } mine = {a, b};
    const uint64_t* const words = tell_warp(reinterpret_cast<uint64_t>(&mine));
    const auto of = [=](const int source) { return reinterpret_cast<const Factors*>(words[source]); };
    for (int h = 0; h < OF_C; ++h)
        for (int k = 0; k < 4 * OF_B; ++k) {
            const Factor left = of(lane() / 4 * 4 + k % 4)->a[h / 2 + k / 4 * 2];
            const Factor right = of((2 * (lane() % 4) + h % 2) * 4 + k % 4)->b[k / 4];
            c[h] += factor_of(left) * factor_of(right);
        }
    wait_for(WARP);  // others read what lies on this thread's stack
}
inline unsigned host_tf32(const float x) { return (bits_of<unsigned>(x) + (1u << 12)) & ~((1u << 13) - 1); }
template <typename T> T __ldca(const T* at) { return *at; }

struct float2 { float x, y; };
struct double2 { double x, y; };
struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

// An argument from its eight bytes, of which it takes the lowest.
template <typename T> T argument(const int64_t* at) {
    T value;
    memcpy(static_cast<void*>(&value), at, std::min(sizeof(T), sizeof(int64_t)));
    return value;
}

template <typename... Types, size_t... Places>
void call(void (*kernel)(Types...), const int64_t* arguments, std::index_sequence<Places...>) {
    kernel(argument<std::remove_cv_t<Types>>(arguments + Places)...);
}

template <typename... Types>
constexpr size_t parameters(void (*)(Types...)) { return sizeof...(Types); }

template <typename... Types>
void launch(void (*kernel)(Types...), const Dim grid, const unsigned block, const size_t shared, const int64_t* arguments) {
    char* memory = dynamic_shared = static_cast<char*>(aligned_alloc(64, (shared + 64) & ~size_t(63)));
    gridDim = grid, blockDim = {block, 1, 1};
    kernel_call = [=] { call(kernel, arguments, std::index_sequence_for<Types...>()); };
    for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x; ++x) {
            memset(memory, 0xa5, shared);
            blockIdx = {x, y, 0};
            run_block(block);
        }
    free(memory);
}
