// multiply.cu: y = A x with A in SELL-C-sigma (`sell.cuh` has the format).
//
// Products are launched early: thread blocks begin while the launch before ends. x is not `__restrict__`, because the
// launch before may write it.
#include "spmv/sell/sell.cuh"

constexpr int LEADING = 512;  // chunks that products begin with whichever way they go: rows of several lanes are first

// Add one entry's products with K columns of x.
template <int K, typename Value, typename Vector>
__device__ __forceinline__ void add(Vector* sum, const Value value, const Vector* x) {
#pragma unroll
    for (int k = 0; k < K; ++k) sum[k] += Vector(value) * x[k];
}

// Add slots [slot, slot + AT_ONCE) of those below width: all loads of a kind before the first that depends on them.
// `bases` is not read where columns are no offsets.
template <int K, int AT_ONCE, typename Value, typename Index, typename Vector>
__device__ __forceinline__ void add_entries(const int slot, const int width, const u64 policy, const Value* values,
                                            const int* bases, const Index* index, const Vector* x, const i64 stride,
                                            Vector* sum) {
    Index column[AT_ONCE];
    Value value[AT_ONCE];
    int4 base[AT_ONCE / 4];
#pragma unroll
    for (int u = 0; u < AT_ONCE / 4; ++u)
        base[u] = sizeof(Index) == 2 && slot + 4 * u < width ? ((const int4*)(bases + slot))[u] : make_int4(0, 0, 0, 0);
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
        column[u] = slot + u < width ? load(index + (slot + u) * 32, policy) : (Index)PADDING;
        value[u] = slot + u < width ? load(values + (slot + u) * 32, policy) : Value(0);
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
        const int4 four = base[u / 4];
        const int low = u % 4 == 0 ? four.x : u % 4 == 1 ? four.y : u % 4 == 2 ? four.z : four.w;
        if (column[u] != (Index)PADDING) add<K>(sum, value[u], x + (low + (int)column[u]) * stride);
    }
}

// Diagonals are padded with some that no lane has.
template <int K, int AT_ONCE, typename Value, typename Vector>
__device__ __forceinline__ void add_diagonals(const int slot, const int width, const u64 policy, const Value* values,
                                              const int4* pairs, const Vector* x, const i64 stride, Vector* sum) {
    int4 pair[AT_ONCE / 2];
    Value value[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE / 2; ++u)
        pair[u] = slot + 2 * u < width ? pairs[slot / 2 + u] : make_int4(0, 0, 0, 0);
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) value[u] = slot + u < width ? load(values + (slot + u) * 32, policy) : Value(0);
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
        const int diagonal = u % 2 ? pair[u / 2].z : pair[u / 2].x, mask = u % 2 ? pair[u / 2].w : pair[u / 2].y;
        if ((u32)mask >> threadIdx.x % 32 & 1) add<K>(sum, value[u], x + diagonal * stride);
    }
}

template <int K, int AT_ONCE, int BLOCK, typename Value, typename Index, typename Vector>
__device__ __forceinline__ void add_blocks(const int slot, const int width, const u64 policy, const Value* values,
                                           const int* bases, const Index* index, const Vector* x, const i64 stride,
                                           Vector* sum) {
    Index column[AT_ONCE];
    int base[AT_ONCE];
    Value value[AT_ONCE][BLOCK];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
        column[u] = slot + u < width ? index[(slot + u) * block_rows<BLOCK>()] : (Index)PADDING;
        base[u] = sizeof(Index) == 2 && slot + u < width ? bases[slot + u] : 0;
#pragma unroll
        for (int e = 0; e < BLOCK; ++e)
            value[u][e] = slot + u < width ? load(values + ((slot + u) * BLOCK + e) * 32, policy) : Value(0);
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
        if (column[u] == (Index)PADDING) continue;
#pragma unroll
        for (int e = 0; e < BLOCK; ++e) add<K>(sum, value[u][e], x + ((base[u] + (i64)column[u]) * BLOCK + e) * stride);
    }
}

// The sums of a lane's slots.
template <int K, int BLOCK, typename Value, typename Vector>
__device__ __forceinline__ void add_chunk(const Chunk& c, const u64 policy, const Value* values, const int* wide,
                                          const u16* narrow, const Vector* x, const i64 stride, Vector* sum) {
    constexpr int N = K > 2 ? 4 : 8, NB = BLOCK * K >= 6 ? 1 : BLOCK * K >= 4 ? 2 : BLOCK * K >= 3 ? 3 : 4;
    const int lane = threadIdx.x % 32, place = (c.first % BLOCK + lane) / BLOCK;
    values += c.values + lane;
    const int* bases = (const int*)(narrow + c.index);
    const u16* offsets = narrow + c.index + base_room(c.width);
    if (c.kind() == DIAGONAL) {
        const Vector* from = x + (i64)(c.first + lane) * stride;
        for (int s = 0; s < c.width; s += N) add_diagonals<K, N>(s, c.width, policy, values, (const int4*)(wide + c.index), from, stride, sum);
    } else if (c.kind() == NARROW) {
        for (int s = 0; s < c.width; s += N) add_entries<K, N>(s, c.width, policy, values, bases, offsets + lane, x, stride, sum);
    } else if (c.kind() == WIDE) {
        for (int s = 0; s < c.width; s += N) add_entries<K, N>(s, c.width, policy, values, bases, wide + c.index + lane, x, stride, sum);
    } else if (BLOCK > 1 && c.kind() == BLOCK_NARROW) {
        for (int s = 0; s < c.width; s += NB) add_blocks<K, NB, BLOCK>(s, c.width, policy, values, bases, offsets + place, x, stride, sum);
    } else if (BLOCK > 1) {
        for (int s = 0; s < c.width; s += NB) add_blocks<K, NB, BLOCK>(s, c.width, policy, values, bases, wide + c.index + place, x, stride, sum);
    }
}

// The sums of a piece of a long row, by the thread block.
template <int K, typename Value, typename Vector>
__device__ __forceinline__ void add_piece(const i64 begin, const i64 end, const Value* data, const int* indices,
                                          const Vector* x, const i64 stride, Vector* partial) {
    __shared__ Vector sums[WARPS];
    Vector sum[K];
#pragma unroll
    for (int k = 0; k < K; ++k) sum[k] = Vector(0);
#pragma unroll (K > 2 ? 4 : 8)
    for (i64 at = begin + threadIdx.x; at < end; at += 32 * WARPS)
        add<K>(sum, stream(data + at), x + (i64)stream(indices + at) * stride);
#pragma unroll
    for (int k = 0; k < K; ++k) {
        for (int step = 16; step > 0; step /= 2) sum[k] += across(sum[k], step);
        __syncthreads();
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum[k];
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int warp = 1; warp < WARPS; ++warp) sum[k] += sums[warp];
            partial[k] = sum[k];
        }
    }
}

// Multiply K columns: y[row * stride + k] for every row but long ones of several pieces, partial sums of these.
//
// Launch  block 256: npieces thread blocks for the long rows, then a warp a chunk; the last `kept` of these are to
//         stay in the L2 cache; `backwards`: from the last chunk on, but for the LEADING ones.
// Shared  a sum for each warp.
// Pre     0 <= columns < ncols; x[column * stride + k]; stride 1 where UNIT; rows null where positions are rows; if no long
//         row has several pieces, there are as many pieces as long rows.
// Post    every y of a row in a chunk, or of one piece, written once; else partial[piece * K + k]; x is not read for padding
//         (0 * inf is NaN); no atomics, the same bits on every run.
template <typename Value, typename Vector, int BLOCK, int K, bool UNIT>
__global__ void __launch_bounds__(256, K == 1 ? 5 : 0)
sell_multiply(const int npieces, const int nlong, const int kept, const int backwards, const int nchunks, const i64 any_stride,
              const Chunk* __restrict__ chunks, const Value* __restrict__ values, const int* __restrict__ wide,
              const u16* __restrict__ narrow, const int* __restrict__ rows, const i64* __restrict__ pieces,
              const int* __restrict__ long_rows, const int* __restrict__ long_indices, const Value* __restrict__ long_data,
              const Vector* x, Vector* __restrict__ y, Vector* __restrict__ partial) {
    const i64 stride = UNIT ? 1 : any_stride;  // known to be 1, it costs neither registers nor multiplications
    if (blockIdx.x < npieces) {
        take_turn();
        const i64 piece = blockIdx.x;
        Vector* to = npieces == nlong ? y + long_rows[piece] * stride : partial + piece * K;
        add_piece<K>(pieces[piece], pieces[piece + 1], long_data, long_indices, x, stride, to);
        return;
    }
    const int warp = (blockIdx.x - npieces) * WARPS + threadIdx.x / 32;
    if (warp >= nchunks) return;
    const Chunk c = chunks[backwards && warp >= LEADING ? nchunks - 1 + LEADING - warp : warp];
    const int lane = threadIdx.x % 32, threads = 1 << c.log_threads(), r = lane >> c.log_threads();
    const i64 row = r < c.rows() && rows ? stream(rows + c.first + r) : c.first + r;
    Vector sum[K];
#pragma unroll
    for (int k = 0; k < K; ++k) sum[k] = Vector(0);
    take_turn();
    add_chunk<K, BLOCK>(c, l2_policy(warp >= nchunks - kept), values, wide, narrow, x, stride, sum);
#pragma unroll
    for (int k = 0; k < K; ++k) {
        for (int step = threads / 2; step > 0; step /= 2) sum[k] += across(sum[k], step);
        if (r < c.rows() && lane % threads == 0) y[row * stride + k] = sum[k];
    }
}

// Add up the partial sums of the long rows, in order.
//
// Launch  block 256, a thread a long row.
// Pre     pieces of long row i: row_pieces[i] up to row_pieces[i + 1].
template <typename Vector, int K>
__global__ void __launch_bounds__(256)
sell_long_rows(const int nlong, const i64 stride, const int* __restrict__ row_pieces, const int* __restrict__ long_rows,
               const Vector* partial, Vector* __restrict__ y) {
    take_turn();
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= nlong) return;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        Vector sum = Vector(0);
        for (int piece = row_pieces[i]; piece < row_pieces[i + 1]; ++piece) sum += partial[(i64)piece * K + k];
        y[(i64)long_rows[i] * stride + k] = sum;
    }
}

// Bring the rows of x into the order of the matrix's columns: out[i] = x[order[i]].
//
// Launch  block 256, an element a thread; `stride` elements a row.
template <typename Vector>
__global__ void __launch_bounds__(256)
sell_gather(const i64 elements, const i64 stride, const int* __restrict__ order, const Vector* x,
            Vector* __restrict__ out) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= elements) return;
    const i64 from = stride == 1 ? order[i] : order[i / stride] * stride + i % stride;
    take_turn();
    out[i] = x[from];
}
