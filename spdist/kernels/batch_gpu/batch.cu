// batch.cu: put matrices along the diagonal of one, and take the product of two such matrices apart.
#include "common.cuh"

// A matrix, and where its rows, entries and columns begin in the matrix that holds all.
template <typename Value, typename Index, typename Pointer>
struct Member {
    const Pointer* indptr;
    const Index* indices;
    const Value* data;
    i64 rows, columns, entries, row, column, entry;
};

// Copy each matrix to its place.
//
// Launch  block 256, a thread block a matrix.
// Pre     indptr, indices and data have room for all matrices; bad zero.
// Post    columns out of range are 0 and offsets out of range the nearest in range, and bad is 1 then.
template <typename Value, typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
batch_join(const Member<Value, Index, Pointer>* __restrict__ members, Pointer* __restrict__ indptr,
           Index* __restrict__ indices, Value* __restrict__ data, u64* bad) {
    const Member<Value, Index, Pointer> m = members[blockIdx.x];
    for (i64 r = threadIdx.x; r <= m.rows; r += 256) {
        const i64 found = m.indptr[r], wanted = r == 0 ? 0 : r == m.rows ? m.entries : min(max(found, (i64)0), m.entries);
        if (found != wanted) *bad = 1;
        if (r < m.rows || blockIdx.x == gridDim.x - 1) indptr[m.row + r] = (Pointer)(m.entry + wanted);
    }
    for (i64 k = threadIdx.x; k < m.entries; k += 256) {
        const i64 column = m.indices[k];
        const bool inside = column >= 0 && column < m.columns;
        if (!inside) *bad = 1;
        indices[m.entry + k] = (Index)(m.column + (inside ? column : 0));
        data[m.entry + k] = m.data[k];
    }
}

// A matrix of the product: its rows and where they begin, and its first column; where its offsets and entries go.
struct Share {
    i64 rows, row, column, offsets, entries;
};

// Copy each matrix of a product to its own arrays.
//
// Launch  block 256, a thread block a matrix.
template <typename Value, typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
batch_part(const Share* __restrict__ shares, const Pointer* __restrict__ indptr, const Index* __restrict__ indices,
           const Value* __restrict__ data, Pointer* __restrict__ to_indptr, Index* __restrict__ to_indices,
           Value* __restrict__ to_data) {
    const Share s = shares[blockIdx.x];
    const i64 begin = indptr[s.row], end = indptr[s.row + s.rows];
    for (i64 r = threadIdx.x; r <= s.rows; r += 256) to_indptr[s.offsets + r] = (Pointer)(indptr[s.row + r] - begin);
    for (i64 k = threadIdx.x; k < end - begin; k += 256) {
        to_indices[s.entries + k] = (Index)(indices[begin + k] - s.column);
        to_data[s.entries + k] = data[begin + k];
    }
}
