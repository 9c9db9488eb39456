// long_rows.cu: the few rows of C of very many products. Many thread blocks share a row: they mark its columns in a bit mask
// in device memory, small enough for the L2 cache, and add products to C by atomics.
//
// Shares of nnz(A) rather than rows: M. Winter et al., "Adaptive Sparse Matrix-Matrix Multiplication on the GPU", PPoPP 2019.
#include "common.cuh"

constexpr int SHARE = SPDIST_LONG_SHARE;  // entries of A that a thread block takes

// Call visit(place in A, place in B) for the products of SHARE entries of A: long rows of B by all warps, each of the others
// by about as many lanes as its mean has entries.
template <int WARPS, typename Index, typename Pointer, typename Visit>
__device__ __forceinline__ void visit_share(const Pointer begin, const Pointer end, const Index* __restrict__ a_indices,
                                            const Pointer* __restrict__ b_indptr, const Visit visit) {
    constexpr int WIDE = 256, THREADS = 32 * WARPS;
    __shared__ Pointer starts[SHARE], ends[SHARE];
    __shared__ u32 scratch[WARPS];
    const int entries = (int)(end - begin);
    u32 products = 0;
    for (int i = threadIdx.x; i < entries; i += THREADS) {
        starts[i] = b_indptr[a_indices[begin + i]];
        ends[i] = b_indptr[a_indices[begin + i] + 1];
        if (ends[i] - starts[i] <= WIDE) products += (u32)(ends[i] - starts[i]);
    }
    const int shift = lanes_shift(block_sum<WARPS>(products, scratch), entries), lanes = 1 << shift;
    for (int i = threadIdx.x >> shift; i < entries; i += THREADS >> shift) {
        const Pointer first = starts[i], last = ends[i];
        if (last - first > WIDE) continue;
        for (Pointer t = first + (threadIdx.x & (lanes - 1)); t < last; t += lanes) visit(begin + i, t);
    }
    for (int i = 0; i < entries; ++i) {
        const Pointer first = starts[i], last = ends[i];
        if (last - first <= WIDE) continue;
        for (Pointer t = first + threadIdx.x; t < last; t += THREADS) visit(begin + i, t);
    }
}

// Mark the columns of the listed rows.
//
// Launch  block 256, grid (ceil_div(longest row of A, SHARE), rows).
// Pre     masks zero, `words` words of 64 columns for each row; words * 64 >= columns of C.
template <typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
long_mark(const u32* __restrict__ list, const i64 words, const Pointer* __restrict__ a_indptr, const Index* __restrict__ a_indices,
          const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices, u64* __restrict__ masks) {
    const u32 row = list[blockIdx.y];
    const Pointer begin = a_indptr[row] + (Pointer)blockIdx.x * SHARE, end = min(begin + SHARE, a_indptr[row + 1]);
    if (begin >= end) return;
    u32* halves = reinterpret_cast<u32*>(masks + words * blockIdx.y);
    visit_share<8>(begin, end, a_indices, b_indptr, [&](const Pointer, const Pointer t) {
        const i64 column = b_indices[t];
        const u32 bit = 1u << (column & 31);
        // Most bits of a long row are set already: look before the atomic. What the first-level cache says may be old.
        if (!(__ldca(&halves[column >> 5]) & bit)) atomicOr(&halves[column >> 5], bit);
    });
}

// ranks[i]: bits of a row's mask before its word i.
//
// Launch  block 1024, grid rows.
// Post    ranks, of `words` a row; lengths[row].
__global__ void __launch_bounds__(1024)
long_rank(const u32* __restrict__ list, const i64 words, const u64* __restrict__ masks, u32* __restrict__ ranks,
          u32* __restrict__ lengths) {
    __shared__ u32 sums[32];
    const u64* mask = masks + words * blockIdx.x;
    u32* out = ranks + words * blockIdx.x;
    u32 base = 0;
    for (i64 first = 0; first < words; first += 1024) {
        const i64 i = first + threadIdx.x;
        const u32 bits = i < words ? __popcll(mask[i]) : 0;
        u32 inclusive = inclusive_sum<32>(bits, threadIdx.x % 32);
        if (threadIdx.x % 32 == 31) sums[threadIdx.x / 32] = inclusive;
        __syncthreads();
        u32 before = base, total = 0;
        for (int warp = 0; warp < 32; ++warp) {
            if (warp < threadIdx.x / 32) before += sums[warp];
            total += sums[warp];
        }
        __syncthreads();
        if (i < words) out[i] = before + inclusive - bits;
        base += total;
    }
    if (threadIdx.x == 0) lengths[list[blockIdx.x]] = base;
}

// Write the columns of the listed rows of C, and zeros for their values.
//
// Launch  block 256, grid (any, rows): a warp a word.
template <typename Value, typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
long_columns(const u32* __restrict__ list, const i64 words, const u64* __restrict__ masks, const u32* __restrict__ ranks,
             const Pointer* __restrict__ c_indptr, Index* __restrict__ c_indices, Value* __restrict__ c_data) {
    const u64* mask = masks + words * blockIdx.y;
    const Pointer base = c_indptr[list[blockIdx.y]];
    const int lane = threadIdx.x % 32;
    for (i64 i = ((i64)blockIdx.x * 256 + threadIdx.x) / 32; i < words; i += (i64)gridDim.x * 8) {
        const u64 word = mask[i];
        const Pointer first = base + ranks[words * blockIdx.y + i];
#pragma unroll
        for (int bit = lane; bit < 64; bit += 32) {
            if (!(word >> bit & 1)) continue;
            const Pointer out = first + __popcll(word & ((1ull << bit) - 1));
            c_indices[out] = (Index)(64 * i + bit);
            c_data[out] = zero<Value>();
        }
    }
}

constexpr int KEPT = 512;  // columns of C that a thread block adds up before it adds to C

// Add the products of the listed rows.
//
// Launch  as `long_mark`.
// Shared  sums of KEPT columns, the first that come for their slots: if many rows of B have an entry in the same few columns,
//         thread blocks would wait for each other at these entries of C.
// Pre     masks, ranks, c_indptr; c_data zero.
// Post    values summed by atomics, in any order.
template <typename Value, typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
long_fill(const u32* __restrict__ list, const i64 words, const u64* __restrict__ masks, const u32* __restrict__ ranks,
          const Pointer* __restrict__ a_indptr, const Index* __restrict__ a_indices, const Value* __restrict__ a_data,
          const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices, const Value* __restrict__ b_data,
          const Pointer* __restrict__ c_indptr, Value* __restrict__ c_data) {
    const u32 row = list[blockIdx.y];
    const Pointer begin = a_indptr[row] + (Pointer)blockIdx.x * SHARE, end = min(begin + SHARE, a_indptr[row + 1]);
    if (begin >= end) return;
    using Column = typename Unsigned<sizeof(Index)>::Type;
    constexpr Column NONE = ~(Column)0;
    __shared__ Column columns[KEPT];
    __shared__ __align__(16) char sum_bytes[KEPT * sizeof(Value)];
    Value* sums = reinterpret_cast<Value*>(sum_bytes);
    for (int i = threadIdx.x; i < KEPT; i += 256) columns[i] = NONE, sums[i] = zero<Value>();
    const u64* mask = masks + words * blockIdx.y;
    const u32* rank = ranks + words * blockIdx.y;
    Value* out = c_data + c_indptr[row];
    const auto entry = [&](const Column column) {
        return out + rank[column >> 6] + __popcll(mask[column >> 6] & ((1ull << (column & 63)) - 1));
    };
    __syncthreads();
    visit_share<8>(begin, end, a_indices, b_indptr, [&](const Pointer at, const Pointer t) {
        const Column column = (Column)b_indices[t];
        const u32 place = ((u32)column * 2654435761u) / (0xffffffffu / KEPT + 1);
        Column there = *(volatile Column*)&columns[place];
        if (there == NONE) there = atomicCAS(&columns[place], NONE, column);
        if (there == NONE || there == column) atomic_fold(sums + place, product(a_data[at], b_data[t]));
        else atomic_fold(entry(column), product(a_data[at], b_data[t]));
    });
    __syncthreads();
    for (int i = threadIdx.x; i < KEPT; i += 256)
        if (columns[i] != NONE) atomic_fold(entry(columns[i]), sums[i]);
}
