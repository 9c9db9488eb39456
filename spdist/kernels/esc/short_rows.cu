// short_rows.cu: rows of C whose products fit in shared memory: expanded, sorted and compressed without leaving the chip.
//
// L. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication on GPU", HPC 2015. Compressed entries go to a pool, packed,
// and to C once its size is known (`copy_rows`). Rows that the pool cannot hold are only counted, and computed a second time.
#include "esc/slots.cuh"

// Multiply the listed rows, each of at most GROUP * ITEMS products.
//
// Launch  block 128 and 128 / GROUP rows a block where GROUP <= 32; else block GROUP, a row a block.
// Shared  a `Slots` per row.
// Pre     the columns of B fit in what bits_of(GROUP * ITEMS) leave of Key; offsets and indices in range. Neither A
//         nor B need be sorted.
// Post    c_indptr null: lengths[row] = nnz of the row of C, and places[row] says where in the pool it lies, -1 if it
//         did not fit. Else the rows with places[row] = -1 are written to C. Columns rise strictly, and values are
//         added in the order of A's entries: the same bits on every run.
template <typename Value, typename Index, typename Pointer, typename Key, int GROUP, int ITEMS>
__global__ void __launch_bounds__((GROUP <= 32 ? 128 : GROUP), (ITEMS > 8 ? 1024 : 1536) / (GROUP <= 32 ? 128 : GROUP))
esc_rows(const u32 count, const u32* __restrict__ list,
         const Pointer* __restrict__ a_indptr, const Index* __restrict__ a_indices, const Value* __restrict__ a_data,
         const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices, const Value* __restrict__ b_data,
         u32* __restrict__ lengths, i64* __restrict__ places, u64* taken, const u64 capacity,
         Index* __restrict__ pool_indices, Value* __restrict__ pool_data, const i64* __restrict__ c_indptr,
         Index* __restrict__ c_indices, Value* __restrict__ c_data) {
    constexpr int GROUPS = GROUP <= 32 ? 128 / GROUP : 1;
    extern __shared__ __align__(16) char memory[];
    __shared__ u32 scratch[GROUP <= 32 ? 1 : GROUP / 32];
    __shared__ u64 shared_base;
    const int lane = threadIdx.x % GROUP;
    auto& s = reinterpret_cast<Slots<Value, Pointer, Key, GROUP, ITEMS>*>(memory)[threadIdx.x / GROUP];
    const u32 number = blockIdx.x * GROUPS + threadIdx.x / GROUP;
    bool active = number < count;
    const u32 row = active ? list[number] : 0;
    const Operands<Value, Index, Pointer> m{a_indptr, a_indices, a_data, b_indptr, b_indices, b_data};
    if (c_indptr != nullptr) {
        active = active && places[row] < 0;
        if (!any_lane<GROUP>(active)) return;
    }
    const i64 first = active ? m.a_indptr[row] : 0, end = active ? m.a_indptr[row + 1] : 0;
    const u32 filled = expand(s, lane, first, end, 0u, (u32)(GROUP * ITEMS), m, scratch);
    Key keys[ITEMS];
    sort_slots(s, lane, filled, keys);
    const u32 nnz = find_heads(s, lane, filled, keys, scratch);
    if (c_indptr != nullptr) {
        if (active) write_sums(s, lane, filled, nnz, (Index)0, c_indices + c_indptr[row], c_data + c_indptr[row]);
        return;
    }
    const u64 base = reserve<GROUP>(taken, nnz, lane, &shared_base);
    const bool kept = base + nnz <= capacity;
    if (active && lane == 0) {
        lengths[row] = nnz;
        places[row] = kept ? (i64)base : -1;
    }
    if (kept) write_sums(s, lane, filled, nnz, (Index)0, pool_indices + base, pool_data + base);
}

// Copy rows from the pool to C: every thread block 2,048 entries of C, whatever the row lengths.
//
// Launch  block 256, grid ceil_div(nnz, 2048).
// Pre     indptr as `offsets` writes it; places[row] < 0 for rows that are not in the pool.
// Post    C's entries of the rows in the pool.
template <typename Value, typename Index>
__global__ void __launch_bounds__(256)
copy_rows(const i64 nrows, const i64 nnz, const i64* __restrict__ indptr, const i64* __restrict__ places,
          const Index* __restrict__ pool_indices, const Value* __restrict__ pool_data, Index* __restrict__ indices,
          Value* __restrict__ data) {
    __shared__ i64 ends[2];
    const i64 first = (i64)blockIdx.x * 2048, stop = min(first + 2048, nnz);
    if (threadIdx.x % 32 == 0 && threadIdx.x < 64)
        ends[threadIdx.x / 32] = find(indptr + 1, 0, nrows - 1, threadIdx.x ? stop - 1 : first);
    __syncthreads();
    i64 row = ends[0];
    for (i64 at = first + threadIdx.x; at < stop; at += 256) {
        i64 high = ends[1];
        while (row < high) {
            const i64 middle = (row + high) / 2;
            if (at < indptr[middle + 1]) high = middle;
            else row = middle + 1;
        }
        const i64 place = places[row];
        if (place < 0) continue;
        const i64 from = place + at - indptr[row];
        indices[at] = pool_indices[from];
        data[at] = pool_data[from];
    }
}
