// groups.cuh: a warp takes a row; the whole thread block takes a long row.
//
// Launch  block 32 * ROWS, grid ceil_div(nrows, ROWS).
#pragma once
#include "common.cuh"

constexpr int ROWS = SPDIST_GROUP_ROWS;  // rows that a thread block takes

// The threads that take a row: a warp, or the thread block.
template <int COUNT> struct Group {
    static constexpr int WARPS = COUNT, THREADS = 32 * COUNT;
    static __device__ __forceinline__ int thread() { return COUNT == 1 ? threadIdx.x % 32 : threadIdx.x; }
    static __device__ __forceinline__ void wait() {
        if (COUNT == 1) __syncwarp();
        else __syncthreads();
    }
};

// Call visit(group, row, begin, end) for the rows of this thread block; all its warps visit each row of more than `longest`
// entries, one row after the other.
template <typename Pointer, typename Visit>
__device__ __forceinline__ void for_rows(const i64 nrows, const Pointer* __restrict__ indptr, const i64 longest,
                                         const Visit visit) {
    const i64 first = (i64)blockIdx.x * ROWS, row = first + threadIdx.x / 32;
    const bool is_long = row < nrows && indptr[row + 1] - indptr[row] > longest;
    if (row < nrows && !is_long) visit(Group<1>(), row, indptr[row], indptr[row + 1]);
    if (!__syncthreads_or(is_long)) return;
    for (i64 r = first; r < min(first + ROWS, nrows); ++r)
        if (indptr[r + 1] - indptr[r] > longest) visit(Group<ROWS>(), r, indptr[r], indptr[r + 1]);
}

// Greatest value over the group, in every thread.
template <int WARPS>
__device__ __forceinline__ double block_max(double value, double* scratch) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = fmax(value, __shfl_xor_sync(FULL_WARP, value, step));
    if (WARPS == 1) return value;
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    for (int warp = 0; warp < WARPS; ++warp) value = fmax(value, scratch[warp]);
    return value;
}

// Turn a thread's sum over the threads before it in its warp, whose total is `own`, into one over its group; `total`: over all.
template <int WARPS, typename T>
__device__ __forceinline__ T across_warps(T before, const T own, T* scratch, T& total) {
    total = own;
    if (WARPS == 1) return before;
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = own;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        if (warp < threadIdx.x / 32) before += scratch[warp];
        total += scratch[warp];
    }
    return before;
}

// Threads of the group before this one for which `holds` is true; `total`: all of them.
template <int WARPS>
__device__ __forceinline__ u32 count_before(const bool holds, u32* scratch, u32& total) {
    const u32 votes = __ballot_sync(FULL_WARP, holds);
    return across_warps<WARPS>((u32)__popc(votes & ((1u << (threadIdx.x % 32)) - 1)), (u32)__popc(votes), scratch, total);
}

// Sum over the threads of the group before this one; `total`: over all of them.
template <int WARPS, typename T>
__device__ __forceinline__ T sum_of_earlier(const T value, T* scratch, T& total) {
    const T inclusive = inclusive_sum<32>(value, threadIdx.x % 32);
    return across_warps<WARPS>((T)(inclusive - value), (T)__shfl_sync(FULL_WARP, inclusive, 31), scratch, total);
}
