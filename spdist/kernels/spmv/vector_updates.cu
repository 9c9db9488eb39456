// vector_updates.cu: in-place updates of a solver's vectors, each with the sums it needs in one launch.
//
// Conjugate gradients: M. R. Hestenes, E. Stiefel, "Methods of Conjugate Gradients for Solving Linear Systems", J. Res.
// NBS 49(6), 1952. PageRank: L. Page, S. Brin, R. Motwani, T. Winograd, "The PageRank Citation Ranking: Bringing Order to
// the Web", 1999.
// Launch  block 256, a grid of any size; each thread takes elements that lie a grid apart.
// Shared  a double for each warp, static.
// Pre     vectors of n elements that do not overlap; partial: [2 * gridDim.x]; *arrived is 0; no other launch with these
//         arrays runs at the same time.
// Post    every element written once. The thread block that ends last adds up the sums of all thread blocks in order and
//         writes them: equal bits on every run with an equal grid. *arrived is 0 again.
// Launched early: inputs may be outputs of the previous launch, so they are not `__restrict__`.
#include "common.cuh"

constexpr int THREADS = SPDIST_UPDATE_THREADS, WARPS = THREADS / 32;
enum { SPDIST_CONJUGATE_GRADIENT_SUM };  // the sums of conjugate gradients
enum { SPDIST_PAGE_RANK_SUM };  // the sums of PageRank

template <typename T> struct Real { using Type = T; };
template <typename T> struct Real<Complex<T>> { using Type = T; };

template <typename T> __device__ __forceinline__ double real_part(const T x) { return x; }
template <typename T> __device__ __forceinline__ double real_part(const Complex<T> x) { return x.re; }

// The real part of conj(x) y.
template <typename T> __device__ __forceinline__ double real_dot(const T x, const T y) { return double(x) * y; }
template <typename T> __device__ __forceinline__ double real_dot(const Complex<T> x, const Complex<T> y) {
    return double(x.re) * y.re + double(x.im) * y.im;
}

__device__ __forceinline__ double ratio(const double above, const double below) { return below == 0 ? above : above / below; }

__device__ __forceinline__ i64 first_element() { return (i64)blockIdx.x * THREADS + threadIdx.x; }
__device__ __forceinline__ i64 elements_apart() { return (i64)gridDim.x * THREADS; }

// Add up the sums of all threads; true in the thread block that ends last, whose `sums` are the totals.
template <int COUNT>
__device__ __forceinline__ bool add_up(double (&sums)[COUNT], volatile double* partial, u32* arrived) {
    __shared__ double scratch[WARPS];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) sums[k] = block_sum<WARPS>(sums[k], scratch);
    int last = 0;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) partial[(i64)k * gridDim.x + blockIdx.x] = sums[k];
        __threadfence();
        last = atomicAdd(arrived, 1u) == gridDim.x - 1;
        __threadfence();
    }
    if (!__syncthreads_or(last)) return false;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        sums[k] = 0;
        for (u32 b = threadIdx.x; b < gridDim.x; b += THREADS) sums[k] += partial[(i64)k * gridDim.x + b];
        sums[k] = block_sum<WARPS>(sums[k], scratch);
    }
    if (threadIdx.x == 0) *arrived = 0;
    return true;
}

// *out = Re (x, y); the sum of x where y is null.
template <typename Value>
__global__ void __launch_bounds__(THREADS)
update_dot(const i64 n, const Value* x, const Value* y, double* out, double* partial, u32* arrived) {
    take_turn();
    double sums[1] = {0};
#pragma unroll 4
    for (i64 i = first_element(); i < n; i += elements_apart()) sums[0] += y ? real_dot(x[i], y[i]) : real_part(x[i]);
    if (add_up(sums, partial, arrived) && threadIdx.x == 0) *out = sums[0];
}

// x += step p and r -= step q, where step = RZ / PQ; q = scale r unless scale is null. BEFORE = RZ, RZ = (r, scale r),
// RR = (r, r), the last two of these elements alone.
template <typename Value>
__global__ void __launch_bounds__(THREADS)
update_advance(const i64 n, const Value* scale, const Value* p, Value* __restrict__ q,
               Value* __restrict__ x, Value* __restrict__ r, double* sums, double* partial, u32* arrived) {
    take_turn();
    const double before = sums[RZ];
    const Value step = Value(typename Real<Value>::Type(ratio(before, sums[PQ])));
    const Value back = Value(typename Real<Value>::Type(-ratio(before, sums[PQ])));
    double found[2] = {0, 0};
#pragma unroll 4
    for (i64 i = first_element(); i < n; i += elements_apart()) {
        x[i] = x[i] + step * p[i];
        const Value left = r[i] + back * q[i];
        const Value z = scale ? scale[i] * left : left;
        r[i] = left;
        if (scale) q[i] = z;
        found[0] += real_dot(left, z);
        found[1] += real_dot(left, left);
    }
    if (!add_up(found, partial, arrived) || threadIdx.x != 0) return;
    sums[BEFORE] = before;
    sums[RZ] = found[0];
    sums[RR] = found[1];
}

// p = z + (RZ / BEFORE) p.
template <typename Value>
__global__ void __launch_bounds__(THREADS)
update_direction(const i64 n, const Value* z, Value* __restrict__ p, const double* sums) {
    take_turn();
    const Value factor = Value(typename Real<Value>::Type(ratio(sums[RZ], sums[BEFORE])));
#pragma unroll 4
    for (i64 i = first_element(); i < n; i += elements_apart()) p[i] = z[i] + factor * p[i];
}

// ranks = damping moved + equal shares of the remaining rank; CHANGED = sum of the changes of ranks.
template <typename Value>
__global__ void __launch_bounds__(THREADS)
update_ranks(const i64 n, const double damping, const double nodes, const Value* moved,
              Value* __restrict__ ranks, double* sums, double* partial, u32* arrived) {
    take_turn();
    const double share = (1 - damping * sums[KEPT]) / nodes;
    double found[1] = {0};
#pragma unroll 4
    for (i64 i = first_element(); i < n; i += elements_apart()) {
        const Value rank = Value(damping * moved[i] + share);
        const double change = double(rank) - ranks[i];
        ranks[i] = rank;
        found[0] += change < 0 ? -change : change;
    }
    if (add_up(found, partial, arrived) && threadIdx.x == 0) sums[CHANGED] = found[0];
}
