// rows.cu: analysis of C = A @ B before it is computed: products and class of each row, lists of rows by class, row offsets
// from row lengths, and the first entry needed of each row of B if only the upper triangle of C is wanted.
//
// Expansion size: L. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication on GPU", HPC 2015, equation 1, by rows.
#include "common.cuh"
#include "groups.cuh"

enum Fact { SPDIST_ROW_FACT };
constexpr int CLASSES = SPDIST_ROW_CLASSES;

// The lowest and the highest column of a row of C.
struct Span {
    i64 low = 0x7fffffffffffffffll, high = -1;

    template <typename Index> __device__ __forceinline__ void add(const Index* __restrict__ b_indices, const i64 first, const i64 last) {
        if (first == last) return;
        low = min(low, (i64)b_indices[first]);
        high = max(high, (i64)b_indices[last - 1]);
    }
};

// Length of the row of B of one entry of A; 0 if the entry or B's offsets are out of range. SPANS: add the row to `span`.
template <bool SPANS, typename Index, typename Pointer>
__device__ __forceinline__ u64 products_of(const Index k, const i64 nrows_b, const i64 nnz_b, const Pointer* __restrict__ b_indptr,
                                           const Index* __restrict__ b_indices, bool& bad, bool& bad_b, Span& span) {
    if (k < 0 || k >= nrows_b) {
        bad = true;
        return 0;
    }
    const i64 first = b_indptr[k], last = b_indptr[k + 1];
    const bool wrong = first < 0 || last < first || last > nnz_b;
    bad_b |= wrong;
    if (SPANS && !wrong) span.add(b_indices, first, last);
    return wrong ? 0 : last - first;
}

// Count the products of each row of C and the rows of each class; check A, and B if `checks_b`.
//
// Launch  block 256, any grid; GROUP lanes a row, rows of A longer than 32 * GROUP or LONG by the thread block.
// Shared  histogram of classes.
// Pre     facts and class_rows, which follow them, zero; limits[c] is the greatest number of products of class c,
//         ascending, the last ~0; very_long: room for nnz_a / VERY_LONG rows; host: page-locked.
// Post    products[row], at most 2^32 - 1; if the row of A has more than LONG entries, at least SHARED_FACTOR times these,
//         so that thread blocks share the row. class_rows[c]. host: a copy of facts and class_rows.
//         facts[PRODUCTS]; facts[MAX_ROW_A]; facts[BAD_A] and facts[BAD_B] not zero if offsets or columns are out of range.
//         checks_b: facts[FALLS] counts the entries of B whose column is not above the entry before, facts[FALLS_AT_ROWS]
//         such entries at the starts of rows: rows of B are sorted and free of duplicates if the two are equal.
//         ncols > NARROW: facts[WIDEST], the widest span of columns of rows of C of up to `sorted` products, if B's rows
//         are sorted; ncols if a thread block takes such a row.
//         very_long: the facts[VERY_LONG_ROWS] rows of A longer than VERY_LONG; their products are not counted, nor their
//         columns checked.
constexpr int LONG = 1024, VERY_LONG = SPDIST_VERY_LONG, SHARED_FACTOR = SPDIST_SHARED_FACTOR, NARROW = SPDIST_NARROW_COLUMNS;

template <typename Index, typename Pointer, int GROUP>
__global__ void __launch_bounds__(256)
analyse_rows(const i64 nrows, const i64 nnz_a, const i64 nrows_b, const i64 nnz_b, const i64 ncols, const u64 sorted, const bool checks_b,
             const Pointer* __restrict__ a_indptr, const Index* __restrict__ a_indices, const Pointer* __restrict__ b_indptr,
             const Index* __restrict__ b_indices, const u64* __restrict__ limits, u32* __restrict__ products,
             u64* __restrict__ facts, u64* __restrict__ class_rows, u32* __restrict__ very_long, u64* __restrict__ host) {
    __shared__ u64 scratch[8];
    __shared__ u32 histogram[CLASSES], waits;
    __shared__ bool last;
    __shared__ i64 waiting[256 / GROUP];
    if (threadIdx.x < CLASSES) histogram[threadIdx.x] = 0;
    if (threadIdx.x == 0) waits = 0;
    __syncthreads();
    const int lane = threadIdx.x % GROUP, warp_lane = threadIdx.x % 32;
    bool bad = false, bad_b = false;
    u64 total = 0, longest = 0, widest = 0;
    Span none;
    for (i64 first_row = (i64)blockIdx.x * (256 / GROUP); first_row < nrows; first_row += (i64)gridDim.x * (256 / GROUP)) {
        const i64 row = first_row + threadIdx.x / GROUP;
        i64 begin = 0, end = 0;
        if (row < nrows) {
            begin = a_indptr[row], end = a_indptr[row + 1];
            if (begin < 0 || end < begin || end > nnz_a) bad = true, begin = end = 0;
        }
        const bool is_long = end - begin > (32 * GROUP < LONG ? 32 * GROUP : LONG);
        u64 count = 0;
        Span span;
        if (!is_long && ncols > NARROW) {
            for (i64 at = begin + lane; at < end; at += GROUP)
                count += products_of<true>(a_indices[at], nrows_b, nnz_b, b_indptr, b_indices, bad, bad_b, span);
        } else if (!is_long) {
#pragma unroll 4
            for (i64 at = begin + lane; at < end; at += GROUP)
                count += products_of<false>(a_indices[at], nrows_b, nnz_b, b_indptr, b_indices, bad, bad_b, span);
        }
#pragma unroll
        for (int step = GROUP / 2; step > 0; step /= 2) {
            count += __shfl_xor_sync(FULL_WARP, count, step);
            if (ncols <= NARROW) continue;
            span.low = min(span.low, __shfl_xor_sync(FULL_WARP, span.low, step));
            span.high = max(span.high, __shfl_xor_sync(FULL_WARP, span.high, step));
        }
        if (count <= sorted && span.high >= 0) widest = max(widest, (u64)(span.high - span.low));
        int kind = -1;
        if (lane == 0 && row < nrows) {
            longest = max(longest, (u64)(end - begin));
            if (end - begin > VERY_LONG) {
                very_long[atomicAdd(&facts[VERY_LONG_ROWS], 1ull)] = (u32)row;
                products[row] = 0xffffffffu;
                atomicAdd(&histogram[CLASSES - 1], 1u);
            } else if (is_long) waiting[atomicAdd(&waits, 1u)] = row;
            else {
                products[row] = count > 0xffffffffull ? 0xffffffffu : (u32)count;
                kind = 0;
                while (count > limits[kind]) ++kind;
                total += count;
            }
        }
        for (u32 left = __ballot_sync(FULL_WARP, kind >= 0); left;) {  // one addition per class and warp
            const int leader = __ffs(left) - 1;
            const u32 same = __ballot_sync(FULL_WARP, kind == __shfl_sync(FULL_WARP, kind, leader));
            if (warp_lane == leader) atomicAdd(&histogram[kind], (u32)__popc(same));
            left &= ~same;
        }
        if (__syncthreads_or(is_long)) {
            for (u32 which = 0; which < waits; ++which) {
                const i64 from = a_indptr[waiting[which]], to = a_indptr[waiting[which] + 1];
                u64 part = 0;
#pragma unroll 8
                for (i64 at = from + threadIdx.x; at < to; at += 256)
                    part += products_of<false>(a_indices[at], nrows_b, nnz_b, b_indptr, b_indices, bad, bad_b, none);
                part = block_sum<8>(part, scratch);
                if (threadIdx.x > 0) continue;
                total += part;
                if (part <= sorted) widest = ncols;
                const u64 size = to - from > LONG ? max(part, (u64)SHARED_FACTOR * (to - from)) : part;
                products[waiting[which]] = size > 0xffffffffull ? 0xffffffffu : (u32)size;
                int kind_of = 0;
                while (size > limits[kind_of]) ++kind_of;
                atomicAdd(&histogram[kind_of], 1u);
            }
            __syncthreads();
            if (threadIdx.x == 0) waits = 0;
            __syncthreads();
        }
    }
    u64 falls = 0, falls_at_rows = 0;
    const i64 thread = (i64)blockIdx.x * 256 + threadIdx.x, threads = (i64)gridDim.x * 256;
#pragma unroll 4
    for (i64 at = thread; checks_b && at < nnz_b; at += threads) {
        const Index column = b_indices[at];
        bad_b |= column < 0 || column >= ncols;
        falls += at > 0 && column <= b_indices[at - 1];
    }
    for (i64 r = thread; checks_b && r < nrows_b; r += threads) {
        const i64 start = b_indptr[r];
        bad_b |= start < 0 || b_indptr[r + 1] < start || b_indptr[r + 1] > nnz_b;
        if (start > 0 && start < nnz_b && b_indptr[r + 1] > start) falls_at_rows += b_indices[start] <= b_indices[start - 1];
    }
    total = block_sum<8>(total, scratch);
    falls = block_sum<8>(falls, scratch);
    falls_at_rows = block_sum<8>(falls_at_rows, scratch);
    const bool any_bad = __syncthreads_or(bad), any_bad_b = __syncthreads_or(bad_b);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        longest = max(longest, __shfl_xor_sync(FULL_WARP, longest, step));
        widest = max(widest, __shfl_xor_sync(FULL_WARP, widest, step));
    }
    if (warp_lane == 0 && longest > *(volatile u64*)&facts[MAX_ROW_A]) atomicMax(&facts[MAX_ROW_A], longest);
    if (warp_lane == 0 && widest > *(volatile u64*)&facts[WIDEST]) atomicMax(&facts[WIDEST], widest);
    if (threadIdx.x == 0) {
        if (total) atomicAdd(&facts[PRODUCTS], total);
        if (falls) atomicAdd(&facts[FALLS], falls);
        if (falls_at_rows) atomicAdd(&facts[FALLS_AT_ROWS], falls_at_rows);
        if (any_bad) atomicAdd(&facts[BAD_A], 1ull);
        if (any_bad_b) atomicAdd(&facts[BAD_B], 1ull);
    }
    if (threadIdx.x < CLASSES && histogram[threadIdx.x]) atomicAdd(&class_rows[threadIdx.x], (u64)histogram[threadIdx.x]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&facts[BLOCKS_DONE], 1ull) == gridDim.x - 1;
    __syncthreads();
    if (last && threadIdx.x <= BLOCKS_DONE) host[threadIdx.x] = *(volatile u64*)&facts[threadIdx.x];
    if (last && threadIdx.x < CLASSES) host[BLOCKS_DONE + 1 + threadIdx.x] = *(volatile u64*)&class_rows[threadIdx.x];
}

// Do what `analyse_rows` leaves out: count the products of the listed rows of A, and check their columns.
//
// Launch  block 256, grid (any, rows).
// Post    facts[PRODUCTS] has grown; facts[BAD_A], facts[BAD_B] as of `analyse_rows`.
template <typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
analyse_long(const u32* __restrict__ list, const i64 nrows_b, const i64 nnz_b, const Pointer* __restrict__ a_indptr,
             const Index* __restrict__ a_indices, const Pointer* __restrict__ b_indptr, u64* __restrict__ facts) {
    __shared__ u64 scratch[8];
    const u32 row = list[blockIdx.y];
    const Pointer end = a_indptr[row + 1];
    const Index* const none = nullptr;
    bool bad = false, bad_b = false;
    Span span;
    u64 total = 0;
#pragma unroll 4
    for (i64 at = a_indptr[row] + (i64)blockIdx.x * 256 + threadIdx.x; at < end; at += (i64)gridDim.x * 256)
        total += products_of<false>(a_indices[at], nrows_b, nnz_b, b_indptr, none, bad, bad_b, span);
    total = block_sum<8>(total, scratch);
    const bool any_bad = __syncthreads_or(bad), any_bad_b = __syncthreads_or(bad_b);
    if (threadIdx.x > 0) return;
    atomicAdd(&facts[PRODUCTS], total);
    if (any_bad) atomicAdd(&facts[BAD_A], 1ull);
    if (any_bad_b) atomicAdd(&facts[BAD_B], 1ull);
}

// Find where the rows of B that A asks for reach the diagonal of C, and give each entry of A a row of its own.
//
// Launch  as of groups.cuh.
// Pre     rows of B sorted; offsets and indices in range; diagonal: the column of C's diagonal in the first row;
//         offsets[2 nnz(A) + 1] zero.
// Post    rows[p] = 2 p; offsets[2 p], offsets[2 p + 1]: the part, from the diagonal on, of the row of B that entry p of A
//         multiplies. Kernels take the two for where row 2 p begins and ends; nobody asks for the rows between.
template <typename Index, typename Pointer>
__global__ void __launch_bounds__(32 * ROWS)
enter_rows(const i64 nrows, const i64 diagonal, const Pointer* __restrict__ a_indptr, const Index* __restrict__ a_indices,
           const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices, Index* __restrict__ rows,
           Pointer* __restrict__ offsets) {
    for_rows(nrows, a_indptr, 2048, [&](auto group, const i64 row, const Pointer begin, const Pointer end) {
        using Threads = decltype(group);
        for (Pointer at = begin + Threads::thread(); at < end; at += Threads::THREADS) {
            const Index k = a_indices[at];
            const Pointer stop = b_indptr[k + 1];
            Pointer first = b_indptr[k], last = stop;
            while (first < last) {
                const Pointer middle = first + (last - first) / 2;
                if (b_indices[middle] < diagonal + row) first = middle + 1;
                else last = middle;
            }
            rows[at] = 2 * (Index)at;
            offsets[2 * (i64)at] = first;
            offsets[2 * (i64)at + 1] = stop;
        }
    });
}

// List the rows of each class, those of a lower class first.
//
// Launch  block 256, grid ceil_div(nrows, 256).
// Pre     class_rows as `analyse_rows` leaves it; taken[CLASSES] zero.
// Post    list: a permutation of the rows; within a class nearly in order, which may differ from run to run.
__global__ void __launch_bounds__(256)
list_rows(const i64 nrows, const u32* __restrict__ sizes, const u64* __restrict__ limits,
          const u64* __restrict__ class_rows, u64* __restrict__ taken, u32* __restrict__ list) {
    __shared__ u32 counts[CLASSES];
    __shared__ u64 bases[CLASSES];
    if (threadIdx.x < CLASSES) counts[threadIdx.x] = 0;
    __syncthreads();
    const i64 row = (i64)blockIdx.x * 256 + threadIdx.x;
    const u32 lane = threadIdx.x % 32;
    int kind = -1;
    u32 place = 0;
    if (row < nrows) {
        kind = 0;
        while (sizes[row] > limits[kind]) ++kind;
    }
    for (int c = 0; c < CLASSES; ++c) {
        const u32 same = __ballot_sync(FULL_WARP, kind == c);
        if (same == 0) continue;
        u32 base = 0;
        if (lane == __ffs(same) - 1) base = atomicAdd(&counts[c], (u32)__popc(same));
        base = __shfl_sync(FULL_WARP, base, __ffs(same) - 1);
        if (kind == c) place = base + __popc(same & ((1u << lane) - 1));
    }
    __syncthreads();
    if (threadIdx.x < CLASSES) {
        u64 before = 0;
        for (u32 c = 0; c < threadIdx.x; ++c) before += class_rows[c];
        bases[threadIdx.x] = before;
        if (counts[threadIdx.x]) bases[threadIdx.x] += atomicAdd(&taken[threadIdx.x], (u64)counts[threadIdx.x]);
    }
    __syncthreads();
    if (kind >= 0) list[bases[kind] + place] = (u32)row;
}

// Turn row lengths into row offsets.
//
// Launch  block 256, grid ceil_div(nrows, 256 * SCAN_ITEMS).
// Pre     state[grid + 1] zero: state[0] hands out tiles; nrows > 0. counted: null, or zero if nothing is to be done.
// Post    indptr[nrows + 1]; *total: the sum, which must fit Pointer.
constexpr int SCAN_ITEMS = SPDIST_SCAN_ROWS / 256;  // rows of a thread

template <typename Pointer>
__global__ void __launch_bounds__(256)
offsets(const i64 nrows, const u32* __restrict__ lengths, u64* __restrict__ state, Pointer* __restrict__ indptr,
        u64* __restrict__ total_nnz, const u64* __restrict__ counted) {
    __shared__ u64 warp_sums[8], before, tile_shared;
    if (counted != nullptr && !*counted) return;
    if (threadIdx.x == 0) tile_shared = atomicAdd(&state[0], 1ull);
    __syncthreads();
    const i64 tile = tile_shared;
    const i64 first = tile * 256 * SCAN_ITEMS + (i64)threadIdx.x * SCAN_ITEMS;
    u64 sums[SCAN_ITEMS], sum = 0;
#pragma unroll
    for (int i = 0; i < SCAN_ITEMS; ++i) {
        sum += first + i < nrows ? lengths[first + i] : 0u;
        sums[i] = sum;
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u64 inclusive = inclusive_sum<32>(sum, lane);
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    u64 base = inclusive - sum, total = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
        if (w < warp) base += warp_sums[w];
        total += warp_sums[w];
    }
    if (warp == 0) {
        const u64 sum_of_tiles = sum_before(state + 1, tile, total);
        if (lane == 0) before = sum_of_tiles;
    }
    __syncthreads();
    base += before;
    if (first == 0) indptr[0] = 0;
    if (tile == gridDim.x - 1 && threadIdx.x == 255) *total_nnz = base + sum;
#pragma unroll
    for (int i = 0; i < SCAN_ITEMS; ++i)
        if (first + i < nrows) indptr[first + i + 1] = (Pointer)(base + sums[i]);
}

// Copy facts to page-locked memory of the host: in the copy engine a short copy would wait behind a long one.
//
// Launch  block `count`, grid 1.
__global__ void publish(const u64* __restrict__ facts, u64* __restrict__ host) { host[threadIdx.x] = facts[threadIdx.x]; }
