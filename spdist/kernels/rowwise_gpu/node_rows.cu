// node_rows.cu: rows of C whose columns lie near each other, as in finite elements; a warp a node. Successive rows of A of
// one pattern (the unknowns of a node) are multiplied together, and so are successive rows of B of one pattern: a column is
// looked up once for up to MOST_ROWS x 3 products.
//
// Row by row: F. Gustavson, "Two fast algorithms for sparse matrices", ACM TOMS 4(3), 1978. An entry's place in its row of C
// is the number of bits before its column, like in rank_rows.cu.
#include "common.cuh"

enum NodeFact { SPDIST_NODE_FACT };
constexpr int MOST_ROWS = 6;  // rows of C that are multiplied together
constexpr int AHEAD = 4;      // pieces of rows of B that are loaded at once

// Find the rows that have the columns of the row before.
//
// Launch  block 256, GROUP lanes a row, grid ceil_div(nrows, 256 / GROUP).
// Post    same[row] = 1 if row > 0 and its columns are those of row - 1, else 0; rows without entries: 0.
template <typename Index, typename Pointer, int GROUP>
__global__ void __launch_bounds__(256)
same_rows(const i64 nrows, const Pointer* __restrict__ indptr, const Index* __restrict__ indices, unsigned char* __restrict__ same) {
    const i64 row = (i64)blockIdx.x * (256 / GROUP) + threadIdx.x / GROUP;
    const int lane = threadIdx.x % GROUP;
    Pointer before = 0, begin = 0, end = 0;
    bool differs = true;
    if (row > 0 && row < nrows) {
        before = indptr[row - 1], begin = indptr[row], end = indptr[row + 1];
        differs = begin == end || begin - before != end - begin;
    }
    for (Pointer at = lane; !differs && at < end - begin; at += GROUP) differs = indices[begin + at] != indices[before + at];
    const u32 votes = __ballot_sync(FULL_WARP, differs);
    const u32 mine = GROUP == 32 ? FULL_WARP : ((1u << (GROUP % 32)) - 1) << (threadIdx.x % 32 / GROUP * GROUP);
    if (lane == 0 && row < nrows) same[row] = (votes & mine) == 0;
}

// Whether a row starts a node, if `back` rows before it have its pattern. A run of rows of one pattern is cut every MOST_ROWS
// rows; beyond the first RUN rows, which nobody looks back through, at row numbers that MOST_ROWS divides.
constexpr int RUN = 8 * MOST_ROWS;
__device__ __forceinline__ bool leads_node(const i64 row, const int back) {
    return back <= RUN ? back % MOST_ROWS == 0 : row % MOST_ROWS == 0;
}

// Part the listed rows: into nodes of up to MOST_ROWS successive rows of one pattern, and rows of C whose columns span more
// than `widest`.
//
// Launch  block 256, grid ceil_div(count, 8): a warp a row.
// Pre     rows of B sorted; every listed row has products; of successive rows of one pattern all are listed or none; totals zero.
// Post    nodes[0 .. totals[NODES]): {row, rows}, low[...] first column, a multiple of 64; rest[0 .. totals[OTHER_ROWS]);
//         totals[WIDEST_NODE] columns of the widest node; totals[MOST_NODE_ROWS] rows of the largest.
template <typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
find_nodes(const u32 count, const u32* __restrict__ list, const i64 nrows, const i64 widest,
           const unsigned char* __restrict__ same, const Pointer* __restrict__ a_indptr,
           const Index* __restrict__ a_indices, const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices,
           uint2* __restrict__ nodes, i64* __restrict__ spans, u32* __restrict__ rest, u64* __restrict__ totals) {
    __shared__ u32 found[2];
    __shared__ u64 places[2], widths[8];
    if (threadIdx.x < 2) found[threadIdx.x] = 0;
    __syncthreads();
    const u32 number = blockIdx.x * 8 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const u32 row = list[min(number, count - 1)];
    i64 low, high;
    row_span(a_indptr[row], a_indptr[row + 1], a_indices, b_indptr, b_indices, low, high);
    low &= ~63ll;
    const u64 columns = high + 1 - low;
    int back = 0;  // rows of this pattern before this one, as far as it matters
    while (back <= RUN && row >= back + 1 && same[row - back]) ++back;
    const bool leads = leads_node(row, back);
    const int kind = number >= count ? 2 : columns > widest ? 1 : leads ? 0 : 2;  // a node, one of the rest, nothing
    u32 rows = 1;
    while (kind == 0 && row + rows < nrows && same[row + rows] && !leads_node(row + rows, back + rows)) ++rows;
    u64 at = 0;
    if (lane == 0) {
        if (kind < 2) at = atomicAdd(&found[kind], 1u);
        widths[threadIdx.x / 32] = kind == 0 ? columns : 0;
    }
    __syncthreads();
    if (threadIdx.x < 2 && found[threadIdx.x]) places[threadIdx.x] = atomicAdd(&totals[threadIdx.x], (u64)found[threadIdx.x]);
    if (threadIdx.x == 0) {
        u64 most = 0;
        for (int warp = 0; warp < 8; ++warp) most = max(most, widths[warp]);
        if (most > *(volatile u64*)&totals[WIDEST_NODE]) atomicMax(&totals[WIDEST_NODE], most);
    }
    __syncthreads();
    if (lane > 0 || kind == 2) return;
    at += places[kind];
    if (kind == 1) rest[at] = row;
    else {
        nodes[at] = make_uint2(row, rows);
        spans[at] = low;
        if (rows > *(volatile u64*)&totals[MOST_NODE_ROWS]) atomicMax(&totals[MOST_NODE_ROWS], (u64)rows);
    }
}

// Mark the columns of a row of C, by a warp; word i of 32 columns lies at mask[STRIDE * i]. A row of B with the
// pattern of the row before is skipped.
template <int STRIDE, typename Index, typename Pointer>
__device__ __forceinline__ void mark_node(u32* mask, const int words, const i64 low, const Pointer begin, const Pointer end,
                                          const unsigned char* __restrict__ same, const Index* __restrict__ a_indices,
                                          const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices) {
    const int lane = threadIdx.x % 32;
    for (int i = lane; i < STRIDE * words; i += 32) mask[i] = 0;
    __syncwarp();
    for (Pointer at = begin; at < end; at += 32) {
        Pointer first = 0;
        int length = 0;
        if (at + lane < end) {
            const Index k = a_indices[at + lane];
            const bool repeats = at + lane > begin && a_indices[at + lane - 1] == k - 1 && same[k];
            first = b_indptr[k];
            length = repeats ? 0 : (int)(b_indptr[k + 1] - first);
        }
        u32 left = __ballot_sync(FULL_WARP, length > 0);
        while (left) {  // AHEAD rows of B at a time, so that their loads are under way together
            Pointer from[AHEAD];
            int columns[AHEAD];
            u32 bits[AHEAD];
#pragma unroll
            for (int n = 0; n < AHEAD; ++n) {
                const int entry = left ? __ffs(left) - 1 : 0;
                from[n] = take(first, entry, 32);
                columns[n] = left ? take(length, entry, 32) : 0;
                left &= left - 1;
                if (lane < columns[n]) bits[n] = (u32)(b_indices[from[n] + lane] - low);
            }
#pragma unroll
            for (int n = 0; n < AHEAD; ++n) {
                if (lane < columns[n]) atomicOr(&mask[STRIDE * (bits[n] >> 5)], 1u << (bits[n] & 31));
                for (int t = lane + 32; t < columns[n]; t += 32) {
                    const u32 bit = (u32)(b_indices[from[n] + t] - low);
                    atomicOr(&mask[STRIDE * (bit >> 5)], 1u << (bit & 31));
                }
            }
        }
    }
    __syncwarp();
}

// Count the entries of the rows of C of each node.
//
// Launch  block 32 * WARPS, grid ceil_div(count, WARPS): a warp a node.
// Shared  dynamic, per warp: 4 * words bytes.
// Pre     nodes, spans from `find_nodes`; no node wider than 32 * words columns; same: of B's rows.
// Post    lengths[row] for every row of a node; *most, zero before: entries of the longest row.
template <typename Index, typename Pointer, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
node_count(const u32 count, const uint2* __restrict__ nodes, const i64* __restrict__ spans, const int words,
           const unsigned char* __restrict__ same, const Pointer* __restrict__ a_indptr, const Index* __restrict__ a_indices,
           const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices, u32* __restrict__ lengths,
           u64* __restrict__ most) {
    extern __shared__ __align__(16) u32 masks[];
    const u32 number = blockIdx.x * WARPS + threadIdx.x / 32;
    if (number >= count) return;
    const int lane = threadIdx.x % 32;
    u32* mask = masks + (threadIdx.x / 32) * words;
    const uint2 node = nodes[number];
    mark_node<1>(mask, words, spans[number], a_indptr[node.x], a_indptr[node.x + 1], same, a_indices, b_indptr, b_indices);
    int nnz = 0;
    for (int i = lane; i < words; i += 32) nnz += __popc(mask[i]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) nnz += __shfl_xor_sync(FULL_WARP, nnz, step);
    if (lane < node.y) lengths[node.x + lane] = nnz;
    if (lane == 0 && nnz > *(volatile u64*)most) atomicMax(most, (u64)nnz);
}

constexpr int RUNS = 3;  // successive rows of B of one pattern that are multiplied together

// Add the products of one step to the sums of ROWS rows of C.
template <int ROWS, int RUN, typename Value>
__device__ __forceinline__ void add_step(const Value (&b)[RUNS], Value* sums, const int stride, const Value* factors) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        Value sum = sums[r * stride];
#pragma unroll
        for (int n = 0; n < RUN; ++n) add_to(sum, product(factors[r * 32 + n], b[n]));
        sums[r * stride] = sum;
    }
}

template <int ROWS, typename Value>
__device__ __forceinline__ void add_run(const int run, const Value (&b)[RUNS], Value* sums, const int stride, const Value* factors) {
    if (run == 3) add_step<ROWS, 3>(b, sums, stride, factors);
    else if (run == 2) add_step<ROWS, 2>(b, sums, stride, factors);
    else add_step<ROWS, 1>(b, sums, stride, factors);
}

template <typename Value>
__device__ __forceinline__ void add_rows(const int rows, const int run, const Value (&b)[RUNS], Value* sums, const int stride,
                                         const Value* factors) {
    switch (rows) {
        case 1: return add_run<1>(run, b, sums, stride, factors);
        case 2: return add_run<2>(run, b, sums, stride, factors);
        case 3: return add_run<3>(run, b, sums, stride, factors);
        case 4: return add_run<4>(run, b, sums, stride, factors);
        case 5: return add_run<5>(run, b, sums, stride, factors);
        default: return add_run<6>(run, b, sums, stride, factors);
    }
}

// Multiply the rows of each node.
//
// Launch  as `node_count`.
// Shared  dynamic, per warp: 32 * rows factors, rows * held sums, 8 * words bytes of masks and ranks, 4 * most of
//         columns; `stride` bytes in all, a multiple of 16.
// Pre     as `node_count`; rows the most of any node, 1 if SINGLE; 0 < held <= most <= rows * held; c_indptr from its
//         lengths.
// Post    the rows of C, sorted. Values are added in the order of A's entries: the same bits on every run.
template <typename Value, typename Index, typename Pointer, int WARPS, bool SINGLE>
__global__ void __launch_bounds__(32 * WARPS)
node_fill(const u32 count, const uint2* __restrict__ nodes, const i64* __restrict__ spans, const int words, const int rows,
          const int held, const int most, const int stride, const unsigned char* __restrict__ same, const Pointer* __restrict__ a_indptr,
          const Index* __restrict__ a_indices, const Value* __restrict__ a_data, const Pointer* __restrict__ b_indptr,
          const Index* __restrict__ b_indices, const Value* __restrict__ b_data, const Pointer* __restrict__ c_indptr,
          Index* __restrict__ c_indices, Value* __restrict__ c_data) {
    extern __shared__ __align__(16) char shared[];
    const u32 number = blockIdx.x * WARPS + threadIdx.x / 32;
    if (number >= count) return;
    const int lane = threadIdx.x % 32;
    Value* factors = reinterpret_cast<Value*>(shared + (threadIdx.x / 32) * stride);
    Value* sums = factors + 32 * rows;
    uint2* places = reinterpret_cast<uint2*>(sums + rows * held);  // 32 columns, and entries before them
    u32* columns_of = reinterpret_cast<u32*>(places + words);
    const uint2 node = nodes[number];
    const int capacity = SINGLE ? held : min(most, rows * held / (int)node.y);
    const i64 low = spans[number];
    const Pointer begin = a_indptr[node.x], end = a_indptr[node.x + 1];
    mark_node<2>(&places[0].x, words, low, begin, end, same, a_indices, b_indptr, b_indices);
    int nnz = 0;
    for (int first = 0; first < words; first += 32) {
        const int bits = first + lane < words ? __popc(places[first + lane].x) : 0;
        if (!__any_sync(FULL_WARP, bits)) continue;
        const int through = inclusive_sum<32>(bits, lane);
        if (first + lane < words) places[first + lane].y = nnz + through - bits;
        nnz += take(through, 31, 32);
    }
    __syncwarp();
    const Pointer length = end - begin;
    for (int done = 0; done < nnz; done += capacity) {
        const int here = min(capacity, nnz - done);
        for (int r = 0; r < node.y; ++r)
            for (int i = lane; i < here; i += 32) sums[r * capacity + i] = zero<Value>();
        for (Pointer at = begin; at < end; at += 32) {
            Index k = -2;
            Pointer first = 0;
            int columns = 0;
            __syncwarp();
            if (at + lane < end) {
                k = a_indices[at + lane];
                first = b_indptr[k];
                columns = (int)(b_indptr[k + 1] - first);
                for (int r = 0; r < node.y; ++r) factors[r * 32 + lane] = a_data[at + lane + r * length];
            }
            const Index before = __shfl_up_sync(FULL_WARP, k, 1);
            const u32 repeats = __ballot_sync(FULL_WARP, lane > 0 && columns > 0 && before == k - 1 && same[k]);
            const int entries = (int)min((i64)32, (i64)(end - at));
            __syncwarp();
            int entry = 0, run = 0, t = 0, width = 0;
            Pointer from = 0;
            bool more = true;
            while (more) {
                constexpr int MOST_RUN = SINGLE ? 1 : RUNS;
                int entry_of[AHEAD], run_of[AHEAD];
                u32 bits[AHEAD];
                Value b[AHEAD][RUNS];
#pragma unroll
                for (int step = 0; step < AHEAD; ++step) {
                    while (t >= width && entry + run < entries) {  // the next row of B, with those that repeat its columns
                        entry += run;
                        const u32 following = repeats >> entry >> 1;
                        run = SINGLE || !(following & 1) ? 1 : following & 2 ? 3 : 2;
                        from = take(first, entry, 32);
                        width = take(columns, entry, 32);
                        t = 0;
                    }
                    entry_of[step] = entry;
                    run_of[step] = t < width ? run : 0;
                    bits[step] = 0xffffffffu;
                    if (t + lane < width) {
                        bits[step] = (u32)(b_indices[from + t + lane] - low);
#pragma unroll
                        for (int n = 0; n < MOST_RUN; ++n)
                            if (SINGLE || n < run) b[step][n] = b_data[from + t + lane + (Pointer)n * width];
                    }
                    t += 32;
                }
                more = t < width || entry + run < entries;
#pragma unroll
                for (int step = 0; step < AHEAD; ++step) {
                    if (run_of[step] == 0) break;
                    if (bits[step] != 0xffffffffu) {
                        const uint2 word = places[bits[step] >> 5];
                        const int rank = (int)word.y + __popc(word.x & ((1u << (bits[step] & 31)) - 1)) - done;
                        if (rank >= 0 && rank < here) {
                            columns_of[rank] = bits[step];
                            if (SINGLE) add_to(sums[rank], product(factors[entry_of[step]], b[step][0]));
                            else add_rows(node.y, run_of[step], b[step], sums + rank, capacity, factors + entry_of[step]);
                        }
                    }
                    __syncwarp();
                }
            }
        }
        __syncwarp();
        for (int r = 0; r < node.y; ++r) {
            const Pointer out = c_indptr[node.x + r] + done;
            for (int i = lane; i < here; i += 32) {
                c_data[out + i] = sums[r * capacity + i];
                c_indices[out + i] = (Index)(low + columns_of[i]);
            }
        }
        __syncwarp();
    }
}
