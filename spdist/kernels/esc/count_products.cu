// count_products.cu: the products of each row of C, its class, and a check of A and B.
//
// L. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication on GPU", HPC 2015, the size of the expansion, by rows.
#include "common.cuh"

enum Fact { SPDIST_ESC_FACT };
constexpr int CLASSES = SPDIST_ROW_CLASSES;  // `list_rows` of rows.cu takes the same classes
constexpr int MANY = 512;                    // entries of a row of A above which the thread block counts its products

// The length of row `k` of B; 0, and `bad`, where it or B's offsets are out of range.
template <typename Index, typename Pointer>
__device__ __forceinline__ u64 row_length(const Index k, const i64 nrows, const i64 nnz,
                                          const Pointer* __restrict__ indptr, bool& bad) {
    const bool inside = k >= 0 && k < nrows;
    const i64 first = inside ? indptr[k] : 0, last = inside ? indptr[k + 1] : -1;
    const bool wrong = first < 0 || last < first || last > nnz;
    bad |= wrong;
    return wrong ? 0 : last - first;
}

// Setup: count the products of each row of C and the rows of each class; check A and B.
//
// Launch  block 256, any grid; GROUP lanes a row, rows of A longer than MANY by the thread block.
// Pre     facts and class_rows zero; limits[c]: the most products of class c, rising, the last ~0.
// Post    products[row], at most 2^32 - 1; facts[ALL_PRODUCTS], the expansion size; facts[LONGEST], the products of the
//         longest row; facts[BAD_A], facts[BAD_B] not zero if an offset or a column is out of range; class_rows[c].
template <typename Index, typename Pointer, int GROUP>
__global__ void __launch_bounds__(256)
count_products(const i64 nrows, const i64 nnz_a, const i64 nrows_b, const i64 nnz_b, const i64 ncols,
               const Pointer* __restrict__ a_indptr, const Index* __restrict__ a_indices,
               const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices,
               const u64* __restrict__ limits, u32* __restrict__ products, u64* __restrict__ facts,
               u64* __restrict__ class_rows) {
    constexpr int ROWS = 256 / GROUP;
    __shared__ u64 scratch[8];
    __shared__ i64 begins[ROWS], ends[ROWS];
    __shared__ u32 histogram[CLASSES];
    if (threadIdx.x < CLASSES) histogram[threadIdx.x] = 0;
    __syncthreads();
    const int lane = threadIdx.x % GROUP, own = threadIdx.x / GROUP;
    bool bad = false, bad_b = false;
    u64 total = 0, longest = 0;
    const auto note = [&](const i64 row, const u64 count) {  // returns the class
        products[row] = (u32)min(count, 0xffffffffull);
        total += count;
        longest = max(longest, count);
        int kind = 0;
        while (count > limits[kind]) ++kind;
        return kind;
    };
    for (i64 first_row = (i64)blockIdx.x * ROWS; first_row < nrows; first_row += (i64)gridDim.x * ROWS) {
        const i64 row = first_row + own;
        i64 begin = 0, end = 0;
        if (row < nrows) {
            begin = a_indptr[row], end = a_indptr[row + 1];
            if (begin < 0 || end < begin || end > nnz_a) bad = true, begin = end = 0;
        }
        const bool many = end - begin > MANY;
        u64 count = 0;
        if (!many)
#pragma unroll 4
            for (i64 at = begin + lane; at < end; at += GROUP)
                count += row_length(a_indices[at], nrows_b, nnz_b, b_indptr, bad);
#pragma unroll
        for (int step = GROUP / 2; step > 0; step /= 2) count += __shfl_xor_sync(FULL_WARP, count, step);
        const int kind = lane == 0 && row < nrows && !many ? note(row, count) : -1;
        const u32 same = __match_any_sync(FULL_WARP, kind);  // one addition per class and warp
        if (kind >= 0 && threadIdx.x % 32 == __ffs(same) - 1) atomicAdd(&histogram[kind], (u32)__popc(same));
        if (!__syncthreads_or(many)) continue;
        if (lane == 0) begins[own] = begin, ends[own] = end;
        __syncthreads();
        for (int which = 0; which < ROWS; ++which) {
            if (ends[which] - begins[which] <= MANY) continue;
            u64 part = 0;
#pragma unroll 4
            for (i64 at = begins[which] + threadIdx.x; at < ends[which]; at += 256)
                part += row_length(a_indices[at], nrows_b, nnz_b, b_indptr, bad);
            part = block_sum<8>(part, scratch);
            if (threadIdx.x == 0) atomicAdd(&histogram[note(first_row + which, part)], 1u);
        }
        __syncthreads();
    }
#pragma unroll 4
    for (i64 at = (i64)blockIdx.x * 256 + threadIdx.x; at < nnz_b; at += (i64)gridDim.x * 256) {
        const Index column = b_indices[at];
        bad_b |= column < 0 || column >= ncols;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) longest = max(longest, __shfl_xor_sync(FULL_WARP, longest, step));
    if (threadIdx.x % 32 == 0 && longest > *(volatile u64*)&facts[LONGEST]) atomicMax(&facts[LONGEST], longest);
    total = block_sum<8>(total, scratch);
    const bool any_bad = __syncthreads_or(bad), any_bad_b = __syncthreads_or(bad_b);
    if (threadIdx.x == 0 && total) atomicAdd(&facts[ALL_PRODUCTS], total);
    if (threadIdx.x == 0 && any_bad) facts[BAD_A] = 1;
    if (threadIdx.x == 0 && any_bad_b) facts[BAD_B] = 1;
    if (threadIdx.x < CLASSES && histogram[threadIdx.x])
        atomicAdd(&class_rows[threadIdx.x], (u64)histogram[threadIdx.x]);
}
