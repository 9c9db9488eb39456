// reorder.cu: orders in which products with vectors read x more from the caches, and a matrix brought into one.
//
// Order by levels: E. Cuthill, J. McKee, "Reducing the bandwidth of sparse symmetric matrices", ACM 1969, a level at a
// time, children in the order of their first parent.
#include "common.cuh"

constexpr int UNSEEN = SPDIST_REORDER_UNSEEN;
constexpr int SORTED_ROW = 96;  // rows up to this length are sorted by insertion

// Find the neighbours of a level that no level has: the next one, each with the place of its first parent.
//
// Launch  block 256, a warp a row of the level, any grid.
// Pre     order[first ... last): rows of the level; place[row] UNSEEN where no level has it, parent[row] UNSEEN there;
//         *found zero.
// Post    next[0 ... *found): the new rows, in any order; parent[row]: least place of a parent.
template <typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
next_level(const int first, const int last, const Pointer* __restrict__ indptr, const Index* __restrict__ indices,
           const int* __restrict__ order, const int* __restrict__ place, int* __restrict__ parent, int* __restrict__ next,
           int* __restrict__ found) {
    for (int at = first + (int)(blockIdx.x * 8 + threadIdx.x / 32); at < last; at += gridDim.x * 8) {
        const int row = order[at];
        for (Pointer k = indptr[row] + threadIdx.x % 32; k < indptr[row + 1]; k += 32) {
            const int column = (int)indices[k];
            if (place[column] != UNSEEN) continue;
            if (atomicMin(parent + column, at) == UNSEEN) next[atomicAdd(found, 1)] = column;
        }
    }
}

// Make the sort keys of a level: by parent, then by row.
//
// Launch  block 256, a thread a row.
template <typename Index>
__global__ void __launch_bounds__(256)
level_keys(const int count, const int* __restrict__ next, const int* __restrict__ parent, i64* __restrict__ keys) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < count) keys[i] = (i64)parent[next[i]] << 32 | (u32)next[i];
}

// Give the rows of a level their places.
//
// Launch  block 256, a thread a row.
// Pre     keys sorted.
// Post    order[start + i] and place[row].
template <typename Index>
__global__ void __launch_bounds__(256)
number_level(const int count, const int start, const i64* __restrict__ keys, int* __restrict__ order,
             int* __restrict__ place) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= count) return;
    const int row = (int)(keys[i] & 0xffffffff);
    order[start + i] = row;
    place[row] = start + i;
}

// Copy a row by a thread, sorted by insertion.
template <typename Value, typename Index, typename Pointer>
__device__ __forceinline__ void copy_sorted(const Pointer begin, const Pointer length, const Index* __restrict__ indices,
                                            const Value* __restrict__ data, const int* __restrict__ place,
                                            Index* out_indices, Value* out_data) {
    for (Pointer k = 0; k < length; ++k) {
        const Index column = place ? (Index)place[indices[begin + k]] : indices[begin + k];
        Pointer at = k;
        for (; at > 0 && out_indices[at - 1] > column; --at) {
            out_indices[at] = out_indices[at - 1];
            out_data[at] = out_data[at - 1];
        }
        out_indices[at] = column;
        out_data[at] = data[begin + k];
    }
}

// Copy rows in a new order, columns renumbered, short rows sorted by them.
//
// Launch  block 256, a thread a row, a warp a row of more than SORTED_ROW entries.
// Pre     out_indptr: offsets of the rows in the new order; order null where rows stay, place null where columns stay.
// Post    row i of the result is row order[i] of the matrix; column c is place[c]. Long rows are left in their old order.
template <typename Value, typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
reorder_rows(const i64 nrows, const Pointer* __restrict__ indptr, const Index* __restrict__ indices,
             const Value* __restrict__ data, const int* __restrict__ order, const int* __restrict__ place,
             const Pointer* __restrict__ out_indptr, Index* __restrict__ out_indices, Value* __restrict__ out_data) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    const i64 row = i < nrows ? (order ? order[i] : i) : 0;
    const Pointer begin = indptr[row], length = i < nrows ? indptr[row + 1] - begin : 0, to = i < nrows ? out_indptr[i] : 0;
    if (length <= SORTED_ROW) copy_sorted(begin, length, indices, data, place, out_indices + to, out_data + to);
    for (u32 waiting = __ballot_sync(FULL_WARP, length > SORTED_ROW); waiting; waiting &= waiting - 1) {
        const int lane = __ffs(waiting) - 1;
        const Pointer from = take(begin, lane, 32), count = take(length, lane, 32), target = take(to, lane, 32);
        for (Pointer k = threadIdx.x % 32; k < count; k += 32) {
            out_indices[target + k] = place ? (Index)place[indices[from + k]] : indices[from + k];
            out_data[target + k] = data[from + k];
        }
    }
}
