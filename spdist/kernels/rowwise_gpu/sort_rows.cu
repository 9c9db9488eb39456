// sort_rows.cu: rows of C of few products. A group of lanes expands a row into shared memory, sorts it in registers and
// adds what falls on one column.
//
// Expansion with every lane busy whatever the row lengths of B, then sort and compress: L. Polok, V. Ila, P. Smrz, "Fast
// Sparse Matrix Multiplication on GPU", HPC 2015, here for one row of C at a time and without leaving the chip.
#include "common.cuh"
#include "sort.cuh"

enum Fact { SPDIST_ROW_FACT };

// Whether what `analyse_rows` found allows work that was queued before anyone had read it: sound operands, no row of class
// `beyond` or above, and one of class `least` or above. facts null: always. All threads of the block must call it.
__device__ __forceinline__ bool allowed(const u64* facts, const int least, const int beyond) {
    if (facts == nullptr) return true;
    const int t = threadIdx.x;
    const bool has_rows = t < SPDIST_ROW_CLASSES && facts[BLOCKS_DONE + 1 + t];
    const bool sound = t > 0 || !(facts[BAD_A] || facts[BAD_B] || facts[FALLS] != facts[FALLS_AT_ROWS] || !facts[PRODUCTS]);
    const bool needed = __syncthreads_or(has_rows && t >= least);
    return !__syncthreads_or(!sound || (has_rows && t >= beyond)) && needed;
}

// Expand one row of C with GROUP lanes, all of them busy whatever the lengths of B's rows.
//
// Call visit(number, place in B, factor) for the products of the row, numbered in the order of A's entries; return
// how many there are. All lanes of the warp must call it; lanes without a row pass begin == end.
template <int GROUP, bool VALUES, typename Value, typename Index, typename Pointer, typename Visit>
__device__ __forceinline__ int expand(const Pointer begin, const Pointer end, const Index* __restrict__ a_indices,
                                      const Value* __restrict__ a_data, const Pointer* __restrict__ b_indptr, const Visit visit) {
    const int lane = threadIdx.x % GROUP, warp_lane = threadIdx.x % 32, group_base = warp_lane - lane;
    const u32 group_lanes = GROUP == 32 ? FULL_WARP : ((1u << (GROUP % 32)) - 1) << group_base;
    const u32 up_to_me = group_lanes & (FULL_WARP >> (31 - warp_lane));
    int total = 0;
    for (Pointer at = begin + lane; __any_sync(FULL_WARP, at - lane < end); at += GROUP) {
        Pointer start = 0;
        int length = 0;
        Value factor = Value(0);
        if (at < end) {
            const Index k = a_indices[at];
            start = b_indptr[k];
            length = (int)(b_indptr[k + 1] - start);
            if (VALUES) factor = a_data[at];
        }
        const int ends = inclusive_sum<GROUP>(length, lane), first_of = ends - length;
        const Pointer shift = start - first_of;
        const int here = take(ends, GROUP - 1, GROUP);
        int most = here;
#pragma unroll
        for (int step = GROUP; step < 32; step *= 2) most = max(most, __shfl_xor_sync(FULL_WARP, most, step));
        const u32 filled = (__ballot_sync(FULL_WARP, length > 0) & group_lanes) >> group_base;
        if (__all_sync(FULL_WARP, (filled & (filled + 1)) == 0)) {  // no empty row of B but at the end
            int entries = -1;  // entries of A that begin before this round, less one
#pragma unroll 2
            for (int first = 0; first < most; first += GROUP) {
                const int offset = first_of - first;
                const u32 bit = length > 0 && offset >= 0 && offset < GROUP ? 1u << (group_base + offset) : 0;
                const u32 heads = __reduce_or_sync(FULL_WARP, bit);
                const int entry = max(entries + __popc(heads & up_to_me), 0);
                entries += __popc(heads & group_lanes);
                const Pointer from = take(shift, entry, GROUP) + first + lane;
                const Value scale = VALUES ? take(factor, entry, GROUP) : Value(0);
                if (first + lane < here) visit(total + first + lane, from, scale);
            }
        } else {
            for (int first = 0; first < most; first += GROUP) {
                int entry = 0;  // the first entry of A whose products end after this one
#pragma unroll
                for (int step = GROUP / 2; step > 0; step /= 2)
                    if (take(ends, entry + step - 1, GROUP) <= first + lane) entry += step;
                const Pointer from = take(shift, entry, GROUP) + first + lane;
                const Value scale = VALUES ? take(factor, entry, GROUP) : Value(0);
                if (first + lane < here) visit(total + first + lane, from, scale);
            }
        }
        total += here;
    }
    return total;
}

// Count the entries of a row of C, of at most SLOTS products, by hashing their columns into `table` of 2 * SLOTS columns.
//
// All lanes of the warp must call it; lanes without a row pass begin == end.
template <int GROUP, int SLOTS, typename Column, typename Index, typename Pointer>
__device__ __forceinline__ int count_row(Column* table, const Pointer begin, const Pointer end, const Index* __restrict__ a_indices,
                                         const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices) {
    constexpr int TABLE = 2 * SLOTS;
    constexpr Column EMPTY = ~(Column)0;
    for (int i = threadIdx.x % GROUP; i < TABLE; i += GROUP) table[i] = EMPTY;
    __syncwarp();
    int found = 0;
    expand<GROUP, false>(begin, end, a_indices, (const float*)nullptr, b_indptr, [&](const int, const Pointer from, const float) {
        const Column column = (Column)b_indices[from];
        u32 slot = ((u32)column * 2654435761u) >> 16;  // Knuth's multiplicative hash
        while (true) {
            slot &= TABLE - 1;
            const Column old = atomicCAS(&table[slot], EMPTY, column);
            found += old == EMPTY;
            if (old == EMPTY || old == column) break;
            ++slot;
        }
    });
#pragma unroll
    for (int step = GROUP / 2; step > 0; step /= 2) found += __shfl_xor_sync(FULL_WARP, found, step);
    return found;
}

// Count the entries of the listed rows of C, each of at most SLOTS products.
//
// Launch  block 32 * WARPS, grid ceil_div(count, 32 * WARPS / GROUP).
// Shared  a table of 2 * SLOTS columns per row.
// Pre     SLOTS a power of two; list null: all rows; offsets and indices in range. Neither A nor B need be sorted.
//         facts, least, beyond: nothing is done unless `allowed`.
// Post    lengths[row]; facts[COUNTED] 1.
template <typename Index, typename Pointer, int GROUP, int SLOTS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
count_rows(const u32 count, const u32* __restrict__ list, const Pointer* __restrict__ a_indptr,
           const Index* __restrict__ a_indices, const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices,
           u32* __restrict__ lengths, u64* __restrict__ facts, const int least, const int beyond) {
    constexpr int GROUPS = 32 * WARPS / GROUP;
    using Column = typename Unsigned<sizeof(Index)>::Type;
    __shared__ Column tables[GROUPS * 2 * SLOTS];
    if (!allowed(facts, least, beyond)) return;
    if (facts != nullptr && blockIdx.x == 0 && threadIdx.x == 0) facts[COUNTED] = 1;
    const int group = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    const u32 number = blockIdx.x * GROUPS + group;
    const bool active = number < count;
    const u32 row = !active ? 0 : list == nullptr ? number : list[number];
    const int found = count_row<GROUP, SLOTS>(tables + group * 2 * SLOTS, active ? a_indptr[row] : Pointer(0),
                                              active ? a_indptr[row + 1] : Pointer(0), a_indices, b_indptr, b_indices);
    if (active && lane == 0) lengths[row] = found;
}

// Count the entries of `count` sample rows, spread over all rows of C; rows of more than `most` products are left out.
//
// Launch  block 32 * WARPS, grid ceil_div(count, 32 * WARPS / GROUP).
// Shared  as `count_rows`.
// Pre     as `count_rows`; most <= SLOTS; count * step <= rows of A; sizes: products of each row.
// Post    sums[0] has grown by the products of these rows, sums[1] by their entries.
template <typename Index, typename Pointer, int GROUP, int SLOTS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
sample_rows(const u32 count, const u32 step, const u32 most, const u32* __restrict__ sizes, const Pointer* __restrict__ a_indptr,
            const Index* __restrict__ a_indices, const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices,
            u64* __restrict__ sums) {
    constexpr int GROUPS = 32 * WARPS / GROUP;
    using Column = typename Unsigned<sizeof(Index)>::Type;
    __shared__ Column tables[GROUPS * 2 * SLOTS];
    __shared__ u32 here[2];
    if (threadIdx.x < 2) here[threadIdx.x] = 0;
    const int group = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    const u32 number = blockIdx.x * GROUPS + group;
    // One row out of `step` neighbours, any of them: a period of the matrix must not meet one of the sample.
    const u32 row = number * step + (u32)((u64)(number * 2654435761u) * step >> 32);
    const u32 products = number < count ? sizes[row] : 0;
    const bool active = number < count && products <= most;
    __syncthreads();
    const int found = count_row<GROUP, SLOTS>(tables + group * 2 * SLOTS, active ? a_indptr[row] : Pointer(0),
                                              active ? a_indptr[row + 1] : Pointer(0), a_indices, b_indptr, b_indices);
    if (active && lane == 0) atomicAdd(&here[0], products), atomicAdd(&here[1], (u32)found);
    __syncthreads();
    if (threadIdx.x < 2 && here[threadIdx.x]) atomicAdd(&sums[threadIdx.x], (u64)here[threadIdx.x]);
}

// Make sort keys of the first `total` products, at most GROUP * ITEMS: the column less `low`, then the product's number.
// `low` is the lowest column for 32-bit keys; 0 for 64-bit keys, which have room for any column.
template <int GROUP, int ITEMS, int BITS, typename Key>
__device__ __forceinline__ void make_keys(const Key* slots, Key (&keys)[ITEMS], const int total, const int lane, Key& low) {
    low = sizeof(Key) == 4 ? ~(Key)0 : 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        keys[i] = i * GROUP + lane < total ? slots[i * GROUP + lane] : ~(Key)0;
        low = min(low, keys[i]);
    }
    if (sizeof(Key) == 4) {
#pragma unroll
        for (int step = GROUP / 2; step > 0; step /= 2) low = min(low, __shfl_xor_sync(FULL_WARP, low, step));
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (i * GROUP + lane < total) keys[i] = (keys[i] - low) << BITS | (i * GROUP + lane);
}

// Sort the first `total` products, at most GROUP * ITEMS, by column, and find where columns begin, as `store_columns` leaves
// them. ADAPTS: if fewer items a lane hold all products, sort only so many; a group is a warp.
template <int GROUP, int ITEMS, int LIKE, int BITS, bool ADAPTS, typename Key>
__device__ __forceinline__ int sort_row(Key* slots, unsigned short* heads, const int total, const int lane, Key& low) {
    if constexpr (ADAPTS && ITEMS > 1) {
        constexpr int FEWER = ITEMS == 12 ? 8 : ITEMS / 2;
        if (total <= GROUP * FEWER) return sort_row<GROUP, FEWER, LIKE, BITS, true>(slots, heads, total, lane, low);
    }
    Key keys[ITEMS];
    make_keys<GROUP, ITEMS, BITS>(slots, keys, total, lane, low);
    sort_keys<GROUP, ITEMS>(keys, lane);
    return store_columns<GROUP, ITEMS, BITS, Key, LIKE>(slots, heads, keys, total, lane);
}

// Return where the group's row starts in C, and write the row offsets. The thread block has the rows from number
// `tile` * GROUPS on, one for each group of lanes; `tiles` as for `sum_before`.
template <int GROUPS, typename Pointer>
__device__ __forceinline__ Pointer place_rows(const int nnz, const int group, const int lane, const i64 tile, const u32 count,
                                              u64* tiles, Pointer* indptr, u64* total_nnz) {
    __shared__ u32 ends[GROUPS];
    __shared__ u64 base;
    if (lane == 0) ends[group] = nnz;
    __syncthreads();
    if (threadIdx.x < 32) {
        const u32 through = inclusive_sum<32>(threadIdx.x < GROUPS ? ends[threadIdx.x] : 0u, threadIdx.x);
        if (threadIdx.x < GROUPS) ends[threadIdx.x] = through;
        const u64 before = sum_before(tiles, tile, take(through, 31, 32));
        if (threadIdx.x == 0) base = before;
    }
    __syncthreads();
    const u64 end = base + ends[group];
    const i64 number = tile * GROUPS + group;
    if (lane == 0 && number < count) indptr[number + 1] = (Pointer)end;
    if (lane == 0 && number == count - 1) *total_nnz = end;
    if (threadIdx.x == 0 && tile == 0) indptr[0] = 0;
    return (Pointer)(end - nnz);
}

// Multiply the listed rows, each of at most GROUP * ITEMS products; SINGLE_PASS: all such rows, none of them counted before.
//
// Launch  block 32 * WARPS, grid ceil_div(count, WARPS * 32 / GROUP).
// Shared  per slot: a key, a value and a 16-bit position.
// Pre     list null: all rows; columns of B fit in Key; the bits of Key above log2(GROUP * ITEMS) hold the span of the
//         columns of any row of C; offsets and indices in range. Neither A nor B need be sorted.
//         SINGLE_PASS: list: products of each of all `count` rows of C, null if none has too many; lengths: entries of rows
//         that have too many; state: (grid + 1) zeros; total_nnz may lie in page-locked host memory; facts,
//         least, beyond: nothing is done unless `allowed`.
//         Not SINGLE_PASS: c_indptr from `count_rows`.
// Post    columns rise strictly; values are added in the order of A's entries: the same bits on every run.
//         SINGLE_PASS: c_indptr and *total_nnz; rows without too many products are written if they end within `capacity`.
template <typename Value, typename Index, typename Pointer, typename Key, int GROUP, int ITEMS, int WARPS, bool SINGLE_PASS>
__global__ void __launch_bounds__(32 * WARPS)
sort_rows(const u32 count, const u32* __restrict__ list, const Pointer* __restrict__ a_indptr,
          const Index* __restrict__ a_indices, const Value* __restrict__ a_data, const Pointer* __restrict__ b_indptr,
          const Index* __restrict__ b_indices, const Value* __restrict__ b_data, Pointer* __restrict__ c_indptr,
          Index* __restrict__ c_indices, Value* __restrict__ c_data, const u32* __restrict__ lengths, const i64 capacity,
          u64* __restrict__ state, u64* __restrict__ total_nnz, const u64* __restrict__ facts, const int least, const int beyond) {
    constexpr int SLOTS = GROUP * ITEMS, GROUPS = WARPS * 32 / GROUP;
    constexpr int STRIDE = GROUP == 32 ? SLOTS : SLOTS + GROUP;  // groups of one warp start at different banks
    constexpr int BITS = SLOTS <= 16 ? 4 : SLOTS <= 32 ? 5 : SLOTS <= 64 ? 6 : SLOTS <= 128 ? 7 : SLOTS <= 256 ? 8
                       : SLOTS <= 512 ? 9 : 10;
    static_assert(SLOTS <= 1 << BITS, "at most 1024 slots");
    constexpr bool ADAPTS = GROUP == 32 && (SINGLE_PASS || ITEMS == 32);  // a warp a row: shorter rows are sorted as such
    constexpr u32 SLOT = (1u << BITS) - 1;
    __shared__ __align__(16) Key all_keys[GROUPS * STRIDE];
    __shared__ __align__(16) char all_values[GROUPS * STRIDE * sizeof(Value)];
    __shared__ unsigned short all_heads[GROUPS * STRIDE];
    const int group = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    Key* slots = all_keys + group * STRIDE;
    Value* values = reinterpret_cast<Value*>(all_values) + group * STRIDE;
    unsigned short* heads = all_heads + group * STRIDE;

    if (SINGLE_PASS && !allowed(facts, least, beyond)) return;
    i64 tile = blockIdx.x;
    if (SINGLE_PASS) {  // in the order in which thread blocks start, whatever that is: else one could wait for a later one
        __shared__ i64 my_tile;
        if (threadIdx.x == 0) my_tile = atomicAdd(&state[0], 1ull);
        __syncthreads();
        tile = my_tile;
    }
    const u32 number = (u32)tile * GROUPS + group;
    bool active = number < count;
    const u32 row = !active ? 0 : SINGLE_PASS || list == nullptr ? number : list[number];
    int nnz = 0;
    if (SINGLE_PASS && list != nullptr && active && list[row] > SLOTS) active = false, nnz = lengths[row];
    const int total = expand<GROUP, true>(
        active ? a_indptr[row] : Pointer(0), active ? a_indptr[row + 1] : Pointer(0), a_indices, a_data, b_indptr,
        [&](const int slot, const Pointer from, const Value scale) {
            slots[slot] = (Key)b_indices[from];
            values[slot] = product(scale, b_data[from]);
        });
    __syncwarp();
    Key low;
    const int columns = sort_row<GROUP, ITEMS, ITEMS, BITS, ADAPTS>(slots, heads, total, lane, low);
    if (active) nnz = columns;
    Pointer base = 0;
    if (SINGLE_PASS) {
        base = place_rows<GROUPS>(nnz, group, lane, tile, count, state + 1, c_indptr, total_nnz);
        active = active && base + nnz <= capacity;
    } else if (active) base = c_indptr[row];
    if (!active) return;
    for (int out = lane; out < nnz; out += GROUP) {
        const int first = heads[out], stop = out + 1 < nnz ? heads[out + 1] : total;
        const Key key = slots[place<ITEMS, Key>(first)];
        Value sum = zero<Value>();
        add_to(sum, values[key & SLOT]);
        for (int i = first + 1; i < stop; ++i) add_to(sum, values[slots[place<ITEMS, Key>(i)] & SLOT]);
        c_indices[base + out] = (Index)((key >> BITS) + low);
        c_data[base + out] = sum;
    }
}
