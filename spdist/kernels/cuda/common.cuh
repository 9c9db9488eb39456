// common.cuh: shared by all kernels: complex values, semirings, group shuffles and scans. Every .cu file includes it first.
//
// Kernels are templates over Value (float, double, Complex<float>, Complex<double>; kernels of products also bool, int,
// long long, u32, u64), Index (column indices: int or long long) and Pointer (row offsets: int or long long). Counts of
// products are 64-bit throughout.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define FULL_WARP 0xffffffffu

template <int BYTES> struct Unsigned { using Type = u32; };
template <> struct Unsigned<8> { using Type = u64; };

template <typename T>
struct __align__(2 * sizeof(T)) Complex {
    T re, im;
    __device__ Complex() {}
    __device__ Complex(T real, T imag = T(0)) : re(real), im(imag) {}
    template <typename U> __device__ explicit Complex(const Complex<U>& z) : re(T(z.re)), im(T(z.im)) {}
};

template <typename T>
__device__ __forceinline__ Complex<T> operator*(const Complex<T> x, const Complex<T> y) {
    return Complex<T>(x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re);
}

template <typename T>
__device__ __forceinline__ Complex<T> operator+(const Complex<T> x, const Complex<T> y) {
    return Complex<T>(x.re + y.re, x.im + y.im);
}

template <typename T>
__device__ __forceinline__ Complex<T>& operator+=(Complex<T>& x, const Complex<T> y) {
    x.re += y.re;
    x.im += y.im;
    return x;
}

// The value that lane `lane ^ step` of the warp holds.
template <typename T>
__device__ __forceinline__ T across(const T value, const int step) {
    return __shfl_xor_sync(FULL_WARP, value, step);
}

template <typename T>
__device__ __forceinline__ Complex<T> across(const Complex<T> value, const int step) {
    return Complex<T>(across(value.re, step), across(value.im, step));
}

// The value that lane `source` of the group of `width` lanes holds.
template <typename T>
__device__ __forceinline__ T take(const T value, const int source, const int width) {
    return __shfl_sync(FULL_WARP, value, source, width);
}

template <typename T>
__device__ __forceinline__ Complex<T> take(const Complex<T> value, const int source, const int width) {
    return Complex<T>(take(value.re, source, width), take(value.im, source, width));
}

// Wait until the launches before this one have ended, and let the next one begin. Every thread block of a kernel that is
// launched early (`Module`) calls it before it reads results of earlier launches, and before it writes.
__device__ __forceinline__ void take_turn() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Load a value that is used once, so that it does not drive others out of the caches.
template <typename T> __device__ __forceinline__ T stream(const T* at) { return __ldcs(at); }
template <> __device__ __forceinline__ Complex<float> stream(const Complex<float>* at) {
    const float2 v = __ldcs((const float2*)at);
    return Complex<float>(v.x, v.y);
}
template <> __device__ __forceinline__ Complex<double> stream(const Complex<double>* at) {
    const double2 v = __ldcs((const double2*)at);
    return Complex<double>(v.x, v.y);
}

// L2 cache policy of a load: normal if the data `stays`; if not, the data is evicted first.
__device__ __forceinline__ u64 l2_policy(const bool stays) {
    u64 policy = 0;
#ifdef __CUDA_ARCH__
    if (stays) asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    else asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}

// Load by a cache policy; no thread writes the data during the launch, and no other thread reads it.
template <typename T> __device__ __forceinline__ T load(const T* at, const u64 policy) {
#ifdef __CUDA_ARCH__
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "of 2 to 16 bytes");
    T found;
    if constexpr (sizeof(T) == 2) {
        u16 word;
        asm("ld.global.nc.L1::no_allocate.L2::cache_hint.b16 %0, [%1], %2;" : "=h"(word) : "l"(at), "l"(policy));
        memcpy(&found, &word, sizeof(T));
    } else if constexpr (sizeof(T) == 4) {
        u32 word;
        asm("ld.global.nc.L1::no_allocate.L2::cache_hint.b32 %0, [%1], %2;" : "=r"(word) : "l"(at), "l"(policy));
        memcpy(&found, &word, sizeof(T));
    } else if constexpr (sizeof(T) == 8) {
        u64 word;
        asm("ld.global.nc.L1::no_allocate.L2::cache_hint.b64 %0, [%1], %2;" : "=l"(word) : "l"(at), "l"(policy));
        memcpy(&found, &word, sizeof(T));
    } else {
        ulonglong2 words;
        asm("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.b64 {%0, %1}, [%2], %3;"
            : "=l"(words.x), "=l"(words.y) : "l"(at), "l"(policy));
        memcpy(&found, &words, sizeof(T));
    }
    return found;
#else
    return *at;
#endif
}

// Sum over this lane and those before it in its group of GROUP lanes.
template <int GROUP, typename T>
__device__ __forceinline__ T inclusive_sum(T value, const int lane) {
#pragma unroll
    for (int step = 1; step < GROUP; step *= 2) {
        const T other = __shfl_up_sync(FULL_WARP, value, step, GROUP);
        if (lane >= step) value += other;
    }
    return value;
}

// Sum over the thread block, in every thread. `scratch` holds one element per warp; the block must be whole warps.
template <int WARPS, typename T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(FULL_WARP, value, step);
    if (WARPS == 1) return value;
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    T total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += scratch[warp];
    return total;
}

// Sum of the totals of the tiles before this one, by one warp; `tiles`, zero at first, has a word for each. Tiles start in
// ascending order, so that those before this one are done or on their way.
//
// Scan: D. Merrill, M. Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", NVIDIA NVR-2016-002.
__device__ __forceinline__ u64 sum_before(volatile u64* tiles, const i64 tile, const u64 total) {
    constexpr u64 AGGREGATE = 1ull << 62, PREFIX = 2ull << 62, VALUE = AGGREGATE - 1;
    const int lane = threadIdx.x % 32;
    u64 before = 0;
    if (lane == 0) tiles[tile] = (tile == 0 ? PREFIX : AGGREGATE) | total;
    for (i64 back = tile - 1; tile > 0; back -= 32) {
        const i64 mine = back - lane;
        u64 word = PREFIX;
        if (mine >= 0)
            do word = tiles[mine];
            while (word == 0);
        const u32 ends = __ballot_sync(FULL_WARP, word >= PREFIX);
        const int stop = ends ? __ffs(ends) - 1 : 31;
        u64 part = lane <= stop ? word & VALUE : 0;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) part += __shfl_xor_sync(FULL_WARP, part, step);
        before += part;
        if (ends) break;
    }
    if (lane == 0 && tile > 0) tiles[tile] = PREFIX | (before + total);
    return before;
}

// Logarithm of the lanes that visit a row together: about as many as the rows have entries in the mean, 4 to 32.
__device__ __forceinline__ int lanes_shift(const u32 entries, const int rows) {
    return entries <= 4u * rows ? 2 : entries <= 8u * rows ? 3 : entries <= 16u * rows ? 4 : 5;
}

// Add to memory that other threads add to; the parts of a complex number one by one.
template <typename T>
__device__ __forceinline__ void atomic_add(T* target, const T value) { atomicAdd(target, value); }

template <typename T>
__device__ __forceinline__ void atomic_add(Complex<T>* target, const Complex<T> value) {
    atomicAdd(&target->re, value.re);
    atomicAdd(&target->im, value.im);
}

__device__ __forceinline__ void atomic_add(i64* target, const i64 value) { atomicAdd((u64*)target, (u64)value); }

// The semiring: plus and times, or C expressions given to the compiler: SPDIST_ADD and SPDIST_MULTIPLY are expressions of
// x and y, SPDIST_ZERO is the identity of SPDIST_ADD. One of SPDIST_ATOMIC_ADD, _MIN, _MAX, _OR says which instruction adds to
// memory that other threads add to, SPDIST_CAS that there is none.
#ifndef SPDIST_ADD

template <typename T> __device__ __forceinline__ T zero() { return T(0); }
template <typename T> __device__ __forceinline__ T product(const T x, const T y) { return x * y; }
template <typename T> __device__ __forceinline__ void add_to(T& sum, const T value) { sum += value; }
template <typename T> __device__ __forceinline__ void atomic_fold(T* target, const T value) { atomic_add(target, value); }

#else

template <typename T> __device__ __forceinline__ T zero() { return T(SPDIST_ZERO); }
template <typename T> __device__ __forceinline__ T product(const T x, const T y) { return T(SPDIST_MULTIPLY); }
template <typename T> __device__ __forceinline__ T sum_of(const T x, const T y) { return T(SPDIST_ADD); }
template <typename T> __device__ __forceinline__ void add_to(T& sum, const T value) { sum = sum_of(sum, value); }

// The word that holds a byte, and how far from its lowest bit.
__device__ __forceinline__ u32* word_of(void* target, int& shift) {
    shift = 8 * (int)((u64)target & 3);
    return reinterpret_cast<u32*>((u64)target & ~3ull);
}

#if defined(SPDIST_ATOMIC_ADD)
template <typename T> __device__ __forceinline__ void atomic_fold(T* target, const T value) { atomic_add(target, value); }
#elif defined(SPDIST_ATOMIC_OR)
template <typename T> __device__ __forceinline__ void atomic_fold(T* target, const T value) {
    if constexpr (sizeof(T) == 1) {
        int shift;
        u32* word = word_of(target, shift);
        if (value) atomicOr(word, 1u << shift);
    } else {
        using Word = typename Unsigned<sizeof(T)>::Type;
        atomicOr(reinterpret_cast<Word*>(target), (Word)value);
    }
}
#elif defined(SPDIST_ATOMIC_MIN) || defined(SPDIST_ATOMIC_MAX)
#ifdef SPDIST_ATOMIC_MIN
#define SPDIST_FIRST atomicMin
#define SPDIST_LAST atomicMax
#else
#define SPDIST_FIRST atomicMax
#define SPDIST_LAST atomicMin
#endif
template <typename T> __device__ __forceinline__ void fold_bits(T* target, const T value) { SPDIST_FIRST(target, value); }

// The bits of floats are in the order of the floats as numbers with a sign where the sign is +, in the reverse order as
// numbers without where it is -.
__device__ __forceinline__ void fold_bits(float* target, const float value) {
    const int bits = __float_as_int(value);
    if (bits >= 0) SPDIST_FIRST((int*)target, bits);
    else SPDIST_LAST((u32*)target, (u32)bits);
}
__device__ __forceinline__ void fold_bits(double* target, const double value) {
    const i64 bits = __double_as_longlong(value);
    if (bits >= 0) SPDIST_FIRST((i64*)target, bits);
    else SPDIST_LAST((u64*)target, (u64)bits);
}
template <typename T> __device__ __forceinline__ void atomic_fold(T* target, const T value) {
    if (sum_of(zero<T>(), value) == value) fold_bits(target, value);  // NaN changes nothing
}
#else
template <typename T> __device__ __forceinline__ void atomic_fold(T* target, const T value) {
    if constexpr (sizeof(T) == 4 || sizeof(T) == 8) {
        using Word = typename Unsigned<sizeof(T)>::Type;
        Word* word = reinterpret_cast<Word*>(target);
        Word there = *(volatile Word*)word, seen;
        do {
            seen = there;
            T sum = *reinterpret_cast<const T*>(&seen);
            add_to(sum, value);
            const Word wanted = *reinterpret_cast<const Word*>(&sum);
            there = wanted == seen ? seen : atomicCAS(word, seen, wanted);
        } while (there != seen);
    } else if constexpr (sizeof(T) == 1) {
        int shift;
        u32* word = word_of(target, shift);
        u32 there = *(volatile u32*)word, seen;
        do {
            seen = there;
            T sum = T(seen >> shift & 1);
            add_to(sum, value);
            const u32 wanted = (seen & ~(255u << shift)) | (u32)sum << shift;
            there = wanted == seen ? seen : atomicCAS(word, seen, wanted);
        } while (there != seen);
    } else __trap();  // the host adds these in order
}
#endif
#endif

// First and last column of a row of C, found by a warp from its row of A; B's rows are sorted. high < low if there is none.
template <typename Index, typename Pointer>
__device__ __forceinline__ void row_span(const Pointer begin, const Pointer end, const Index* __restrict__ a_indices,
                                         const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices, i64& low,
                                         i64& high) {
    low = 0x7fffffffffffffffll, high = -1;
    for (Pointer at = begin + threadIdx.x % 32; at < end; at += 32) {
        const Pointer first = b_indptr[a_indices[at]], last = b_indptr[a_indices[at] + 1];
        if (first == last) continue;
        low = min(low, (i64)b_indices[first]);
        high = max(high, (i64)b_indices[last - 1]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        low = min(low, __shfl_xor_sync(FULL_WARP, low, step));
        high = max(high, __shfl_xor_sync(FULL_WARP, high, step));
    }
}
