// ehyb.cu: EHYB, y = A x with each part's share of x cached in shared memory: conversion of a matrix, and its products.
//
// C. Chen, "Explicit caching HYB: a new high-performance SpMV framework on GPGPU", arXiv 2204.06666. In the paper a second
// pass adds the entries outside of the parts (ER) to y; here they follow the others in the same slice, and y is written once.
//
// A slice is 32 rows of one part, a lane each. Its slots hold first the inner entries, whose column is in the part, as 16-bit
// places there, then the outer entries, as 32-bit columns. In each part, rows without outer entries come first, longest
// first, then the other rows, by falling number of outer entries.
#include "common.cuh"

constexpr u32 NO_PLACE = SPDIST_EHYB_NO_PLACE;
constexpr int PADDING = -1, WARPS = SPDIST_EHYB_THREADS / 32, AT_ONCE = 8;

enum SliceWord { SPDIST_EHYB_SLICE, SLICE_WORDS };

struct __align__(16) Slice {
    i64 word[SLICE_WORDS];
    __device__ i64 values() const { return word[VALUES_AT]; }  // place of the first slot in `values`
    __device__ i64 outer() const { return word[OUTER_AT]; }    // place of the first column in `columns`
    __device__ i64 inner() const { return word[INNER_AT]; }    // place of the first slot in `places`
    __device__ int first() const { return (int)word[ROWS]; }   // position of the first row
    __device__ int near() const { return (int)(word[ROWS] >> 32) & 0xFFFF; }  // slots of either kind
    __device__ int far() const { return (int)((u64)word[ROWS] >> 48); }
    __device__ int rows(const int end) const { return min(32, end - first()); }
};

// Count each row's entries in its own part.
//
// Launch  block 256, a warp a row.
template <typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
ehyb_count(const i64 nrows, const Pointer* __restrict__ indptr, const Index* __restrict__ indices,
           const int* __restrict__ part, int* __restrict__ inside) {
    const i64 row = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= nrows) return;
    int count = 0;
    for (Pointer k = indptr[row] + threadIdx.x % 32; k < indptr[row + 1]; k += 32) count += part[indices[k]] == part[row];
    for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(FULL_WARP, count, step);
    if (threadIdx.x % 32 == 0) inside[row] = count;
}

// Write the entries of each slice.
//
// Launch  block 256, a warp a slice.
// Pre     slices complete; owner[slice]: its part; order[position]: row; place[row]: position; ends[part]: positions that
//         slices of the part end before; starts[part]: its first position.
// Post    values, places, columns, padding marked.
template <typename Value, typename Stored, typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
ehyb_fill(const i64 nslices, const Pointer* __restrict__ indptr, const Index* __restrict__ indices,
          const Value* __restrict__ data, const int* __restrict__ part, const int* __restrict__ order,
          const int* __restrict__ place, const int* __restrict__ starts, const int* __restrict__ ends,
          const int* __restrict__ owner, const Slice* __restrict__ slices, Stored* __restrict__ values,
          u16* __restrict__ places, int* __restrict__ columns) {
    const i64 at = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (at >= nslices) return;
    const Slice s = slices[at];
    const int mine = owner[at];
    const bool valid = lane < s.rows(ends[mine]);
    const i64 row = valid ? order[s.first() + lane] : 0;
    int near = 0, far = 0;
    for (Pointer k = valid ? indptr[row] : 0; valid && k < indptr[row + 1]; ++k) {
        const Index column = indices[k];
        const bool inside = part[column] == mine;
        const i64 slot = inside ? near++ : s.near() + far++;
        values[s.values() + slot * 32 + lane] = Stored(data[k]);
        if (inside) places[s.inner() + slot * 32 + lane] = (u16)(place[column] - starts[mine]);
        else columns[s.outer() + (slot - s.near()) * 32 + lane] = (int)column;
    }
    for (; near < s.near(); ++near) {
        values[s.values() + near * 32 + lane] = Stored(0);
        places[s.inner() + near * 32 + lane] = (u16)NO_PLACE;
    }
    for (; far < s.far(); ++far) {
        values[s.values() + (s.near() + far) * 32 + lane] = Stored(0);
        columns[s.outer() + far * 32 + lane] = PADDING;
    }
}

// Add `width` slots whose x is found by `Index`, several loads ahead of their use.
template <typename Value, typename Index, typename Vector>
__device__ __forceinline__ Vector add_slots(Vector sum, const int width, const Value* values, const Index* index,
                                            const Vector* x, const i64 stride) {
    for (int slot = 0; slot < width; slot += AT_ONCE) {
        Index found[AT_ONCE];
        Value value[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            found[u] = slot + u < width ? stream(index + (slot + u) * 32) : (Index)PADDING;
            value[u] = slot + u < width ? stream(values + (slot + u) * 32) : Value(0);
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u)
            if (found[u] != (Index)PADDING) sum += Vector(value[u]) * x[found[u] * stride];
    }
    return sum;
}

// Multiply with one column of x.
//
// Launch  block 1024, one thread block a part; its warps take slice after slice.
// Shared  the part's x: at least the longest part times sizeof(Vector).
// Pre     x[column * stride], stride 1 where UNIT; order null where x and y are in the order of the parts. Rows kept elsewhere are in no slice.
// Post    y[row * stride] of every row in a slice written once, the same bits on every run; x not read for padding.
template <typename Value, typename Vector, bool UNIT>
__global__ void __launch_bounds__(32 * WARPS)
ehyb_multiply(const i64 any_stride, const int* __restrict__ starts, const int* __restrict__ ends,
              const int* __restrict__ first_slices, const int* __restrict__ order, const Slice* __restrict__ slices,
              const Value* __restrict__ values, const u16* __restrict__ places, const int* __restrict__ columns,
              const Vector* x, Vector* __restrict__ y) {
    extern __shared__ double2 memory[];  // aligned for any Vector
    __shared__ int next;
    Vector* cached = (Vector*)memory;
    const i64 stride = UNIT ? 1 : any_stride;
    const int part = blockIdx.x, start = starts[part], end = ends[part], lane = threadIdx.x % 32;
    if (threadIdx.x == 0) next = first_slices[part];
    take_turn();
    for (int i = start + threadIdx.x; i < starts[part + 1]; i += 32 * WARPS)
        cached[i - start] = x[(order ? order[i] : i) * stride];
    __syncthreads();
    for (;;) {
        int at = lane == 0 ? atomicAdd(&next, 1) : 0;
        at = __shfl_sync(FULL_WARP, at, 0);
        if (at >= first_slices[part + 1]) return;
        const Slice s = slices[at];
        Vector sum = add_slots(Vector(0), s.near(), values + s.values() + lane, places + s.inner() + lane, cached, 1);
        sum = add_slots(sum, s.far(), values + s.values() + s.near() * 32 + lane, columns + s.outer() + lane, x, stride);
        if (lane < s.rows(end)) y[(order ? order[s.first() + lane] : s.first() + lane) * stride] = sum;
    }
}
