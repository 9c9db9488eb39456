// mask_rows.cu: rows of C confined to the rows of a mask, whose entries are where sums lie: a product outside of them is
// looked up, and neither added, sorted nor stored. And rows of C of which what is inside a mask is dropped.
//
// Masked accumulators: S. Milakovic, O. Selvitopi, I. Nisa, Z. Budimlic, A. Buluc, "Parallel Algorithms for Masked Sparse
// Matrix-Matrix Products", ICPP 2022. Here the mask's row is in a hash table in shared memory, some columns at a time.
#include "common.cuh"
#include "groups.cuh"

constexpr int SLOTS = 512;         // of the table of a warp; a thread block has ROWS times as many
constexpr int SEARCH_GAIN = 32;    // a row of B so many times as long as the columns of the mask is searched for these
constexpr int LONG_A = 64;         // entries of A above which a thread block takes a row
constexpr u32 EMPTY = ~0u;

// First place in [first, last) whose column is not below `column`.
template <typename Index, typename Pointer>
__device__ __forceinline__ Pointer lower_bound(const Index* __restrict__ indices, Pointer first, Pointer last, const i64 column) {
    while (first < last) {
        const Pointer middle = first + (last - first) / 2;
        if (indices[middle] < column) first = middle + 1;
        else last = middle;
    }
    return first;
}

// Columns of a row of the mask, from the first of them, and their places.
template <typename Threads> struct Table {
    static constexpr int MOST = Threads::WARPS * SLOTS / 2;  // columns
    u32* keys;
    u16* places;
    int bits;

    __device__ __forceinline__ u32 slot_of(const u32 key) const { return (key * 2654435761u) >> (32 - bits); }  // Knuth's

    // Enter `count` columns from mask[0] on; no wider than 32 bits from the first of them.
    template <typename Index> __device__ __forceinline__ void fill(const Index* __restrict__ mask, const int count) {
        bits = 4;
        while ((1 << bits) < 2 * count) ++bits;
        Threads::wait();
        for (int i = Threads::thread(); i < 1 << bits; i += Threads::THREADS) keys[i] = EMPTY;
        Threads::wait();
        for (int i = Threads::thread(); i < count; i += Threads::THREADS) {
            const u32 key = (u32)(mask[i] - mask[0]);
            u32 slot = slot_of(key);
            while (atomicCAS(&keys[slot], EMPTY, key) != EMPTY) slot = (slot + 1) & ((1u << bits) - 1);
            places[slot] = (u16)i;
        }
        Threads::wait();
    }

    // Place of a column, or -1.
    __device__ __forceinline__ int find(const u32 key) const {
        u32 slot = slot_of(key);
        while (keys[slot] != key) {
            if (keys[slot] == EMPTY) return -1;
            slot = (slot + 1) & ((1u << bits) - 1);
        }
        return places[slot];
    }
};

// Multiply rows of A, confined to the mask.
//
// Launch  as of groups.cuh.
// Shared  the tables.
// Pre     rows of B and of the mask sorted and free of duplicates; offsets and indices in range. ORDERED: longest is beyond
//         any row of A.
// Post    sums and hits, for each entry of the mask: its sum, and whether there is any product. Where a warp takes the row,
//         products are added in the order of A's entries; else by atomics, in any order.
template <typename Value, typename Index, typename Pointer, bool ORDERED>
__global__ void __launch_bounds__(32 * ROWS)
masked_rows(const i64 nrows, const Pointer* __restrict__ a_indptr, const Index* __restrict__ a_indices,
            const Value* __restrict__ a_data, const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices,
            const Value* __restrict__ b_data, const Pointer* __restrict__ mask_indptr, const Index* __restrict__ mask_indices,
            Value* sums, unsigned char* hits) {
    __shared__ u32 keys[ROWS * SLOTS];
    __shared__ u16 places[ROWS * SLOTS];
    const i64 longest = ORDERED ? 0x7fffffffffffffffll : LONG_A;
    for_rows(nrows, a_indptr, longest, [&](auto group, const i64 row, const Pointer begin, const Pointer end) {
        using Threads = decltype(group);
        const int own = Threads::WARPS == 1 ? threadIdx.x / 32 * SLOTS : 0, lane = threadIdx.x % 32;
        Table<Threads> table{keys + own, places + own, 0};
        const Pointer first = mask_indptr[row], last = mask_indptr[row + 1];
        for (Pointer at = first + Threads::thread(); at < last; at += Threads::THREADS) sums[at] = zero<Value>(), hits[at] = 0;
        const auto add = [&](const Pointer at, const Value value) {
            if (Threads::WARPS == 1) add_to(sums[at], value);
            else atomic_fold(&sums[at], value);
            hits[at] = 1;
        };
        Pointer to = first;
        for (Pointer from = first; from < last; from = to) {
            to = min(from + table.MOST, last);
            const i64 low = mask_indices[from];
            while (mask_indices[to - 1] - low >= (i64)EMPTY) to = from + (to - from) / 2;
            const i64 high = mask_indices[to - 1];
            const int count = (int)(to - from);
            table.fill(mask_indices + from, count);
            for (Pointer p = begin + (Threads::WARPS == 1 ? 0 : threadIdx.x / 32); p < end; p += Threads::WARPS) {
                const Index k = a_indices[p];
                const Value factor = a_data[p];
                Pointer start = b_indptr[k], stop = b_indptr[k + 1];
                if (from > first) start = lower_bound(b_indices, start, stop, low);
                if (to < last) stop = lower_bound(b_indices, start, stop, high + 1);
                if (stop - start > SEARCH_GAIN * count) {
                    for (int t = lane; t < count; t += 32) {
                        const Pointer q = lower_bound(b_indices, start, stop, (i64)mask_indices[from + t]);
                        if (q < stop && b_indices[q] == mask_indices[from + t]) add(from + t, product(factor, b_data[q]));
                    }
                } else {
                    for (Pointer q = start + lane; q < stop; q += 32) {
                        const i64 column = b_indices[q];
                        if (column < low || column > high) continue;
                        const int place = table.find((u32)(column - low));
                        if (place >= 0) add(from + place, product(factor, b_data[q]));
                    }
                }
                __syncwarp();  // the next row of B may add to the same sums
            }
        }
    });
}

// hits[at]: whether an entry of C is outside the mask.
//
// Launch  as of groups.cuh.
template <typename Index, typename Pointer>
__global__ void __launch_bounds__(32 * ROWS)
outside_rows(const i64 nrows, const Pointer* __restrict__ indptr, const Index* __restrict__ indices,
             const Pointer* __restrict__ mask_indptr, const Index* __restrict__ mask_indices, unsigned char* __restrict__ hits) {
    for_rows(nrows, indptr, 2048, [&](auto group, const i64 row, const Pointer begin, const Pointer end) {
        using Threads = decltype(group);
        const Pointer last = mask_indptr[row + 1];
        for (Pointer at = begin + Threads::thread(); at < end; at += Threads::THREADS) {
            const Pointer found = lower_bound(mask_indices, mask_indptr[row], last, (i64)indices[at]);
            hits[at] = found == last || mask_indices[found] != indices[at];
        }
    });
}

// Count the entries of each row that were hit.
//
// Launch  as of groups.cuh.
template <typename Pointer>
__global__ void __launch_bounds__(32 * ROWS)
count_hits(const i64 nrows, const Pointer* __restrict__ indptr, const unsigned char* __restrict__ hits, u32* __restrict__ lengths) {
    __shared__ u32 scratch[ROWS];
    for_rows(nrows, indptr, 2048, [&](auto group, const i64 row, const Pointer begin, const Pointer end) {
        using Threads = decltype(group);
        u32 count = 0;
        for (Pointer at = begin + Threads::thread(); at < end; at += Threads::THREADS) count += hits[at];
        count = block_sum<Threads::WARPS>(count, scratch);
        if (Threads::thread() == 0) lengths[row] = count;
    });
}

// Copy the entries of each row that were hit.
//
// Launch  as of groups.cuh.
// Pre     kept_indptr from the lengths of `count_hits`.
template <typename Value, typename Index, typename Pointer>
__global__ void __launch_bounds__(32 * ROWS)
keep_hits(const i64 nrows, const Pointer* __restrict__ indptr, const Index* __restrict__ indices, const Value* __restrict__ data,
          const unsigned char* __restrict__ hits, const Pointer* __restrict__ kept_indptr, Index* __restrict__ kept_indices,
          Value* __restrict__ kept_data) {
    __shared__ u32 scratch[ROWS];
    for_rows(nrows, indptr, 2048, [&](auto group, const i64 row, const Pointer begin, const Pointer end) {
        using Threads = decltype(group);
        Pointer out = kept_indptr[row];
        for (Pointer base = begin; base < end; base += Threads::THREADS) {
            const Pointer at = base + Threads::thread();
            const bool hit = at < end && hits[at];
            u32 here;
            const u32 place = count_before<Threads::WARPS>(hit, scratch, here);
            if (hit) kept_indices[out + place] = indices[at], kept_data[out + place] = data[at];
            out += here;
        }
    });
}
