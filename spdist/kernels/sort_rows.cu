// sort_rows.cu: rows of C of few products. A group of lanes expands a row into shared memory, sorts it in registers and
// adds what falls on one column.
//
// Expansion with every lane busy whatever the row lengths of B, then sort and compress: L. Polok, V. Ila, P. Smrz, "Fast
// Sparse Matrix Multiplication on GPU", HPC 2015, here for one row of C at a time and without leaving the chip.
#include "common.cuh"
#include "sort.cuh"

// Walk the products of one row of C with GROUP lanes, all of them busy whatever the lengths of B's rows.
//
// Calls visit(number, place in B, factor) for the products of the row, numbered in the order of A's entries, and returns
// how many there are. All lanes of the warp must call it, those without a row with begin == end.
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

// Count the entries of the listed rows of C, each of at most SLOTS products, by hashing their columns.
//
// Launch  block 32 * WARPS, grid ceil_div(count, 32 * WARPS / GROUP).
// Shared  a table of 2 * SLOTS columns per row.
// Pre     SLOTS a power of two; list null: all rows; offsets and indices in range. Neither A nor B need be sorted.
// Post    lengths[row].
template <typename Index, typename Pointer, int GROUP, int SLOTS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
count_rows(const u32 count, const u32* __restrict__ list, const Pointer* __restrict__ a_indptr,
           const Index* __restrict__ a_indices, const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices,
           u32* __restrict__ lengths) {
    constexpr int GROUPS = 32 * WARPS / GROUP, TABLE = 2 * SLOTS;
    using Column = typename Unsigned<sizeof(Index)>::Type;
    constexpr Column EMPTY = ~(Column)0;
    __shared__ Column tables[GROUPS * TABLE];
    const int group = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    Column* table = tables + group * TABLE;
    for (int i = lane; i < TABLE; i += GROUP) table[i] = EMPTY;
    __syncwarp();
    const u32 number = blockIdx.x * GROUPS + group;
    const bool active = number < count;
    const u32 row = !active ? 0 : list == nullptr ? number : list[number];
    int found = 0;
    expand<GROUP, false>(active ? a_indptr[row] : Pointer(0), active ? a_indptr[row + 1] : Pointer(0), a_indices,
                         (const float*)nullptr, b_indptr, [&](const int, const Pointer from, const float) {
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
    if (active && lane == 0) lengths[row] = found;
}

// Multiply the listed rows, each of at most GROUP * ITEMS products.
//
// Launch  block 32 * WARPS, grid ceil_div(count, WARPS * 32 / GROUP).
// Shared  per slot: a key, a value and a 16-bit position.
// Pre     list null: all rows; columns of B fit in what is left of Key after log2(GROUP * ITEMS) bits, rounded up;
//         offsets and indices in range; c_indptr from `count_rows`. Neither A nor B need be sorted.
// Post    columns rise strictly; values are added in the order of A's entries: the same bits on every run.
template <typename Value, typename Index, typename Pointer, typename Key, int GROUP, int ITEMS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
sort_rows(const u32 count, const u32* __restrict__ list, const Pointer* __restrict__ a_indptr,
          const Index* __restrict__ a_indices, const Value* __restrict__ a_data, const Pointer* __restrict__ b_indptr,
          const Index* __restrict__ b_indices, const Value* __restrict__ b_data, const Pointer* __restrict__ c_indptr,
          Index* __restrict__ c_indices, Value* __restrict__ c_data) {
    constexpr int SLOTS = GROUP * ITEMS, GROUPS = WARPS * 32 / GROUP;
    constexpr int STRIDE = GROUP == 32 ? SLOTS : SLOTS + GROUP;  // groups of one warp start at different banks
    constexpr int BITS = SLOTS <= 16 ? 4 : SLOTS <= 32 ? 5 : SLOTS <= 64 ? 6 : SLOTS <= 128 ? 7 : SLOTS <= 256 ? 8
                       : SLOTS <= 512 ? 9 : 10;
    static_assert(SLOTS <= 1 << BITS, "at most 1024 slots");
    constexpr u32 SLOT = (1u << BITS) - 1;
    __shared__ __align__(16) Key all_keys[GROUPS * STRIDE];
    __shared__ __align__(16) char all_values[GROUPS * STRIDE * sizeof(Value)];
    __shared__ unsigned short all_heads[GROUPS * STRIDE];
    const int group = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    Key* slots = all_keys + group * STRIDE;
    Value* values = reinterpret_cast<Value*>(all_values) + group * STRIDE;
    unsigned short* heads = all_heads + group * STRIDE;

    const u32 number = blockIdx.x * GROUPS + group;
    const bool active = number < count;
    const u32 row = !active ? 0 : list == nullptr ? number : list[number];
    const int total = expand<GROUP, true>(
        active ? a_indptr[row] : Pointer(0), active ? a_indptr[row + 1] : Pointer(0), a_indices, a_data, b_indptr,
        [&](const int slot, const Pointer from, const Value scale) {
            slots[slot] = (Key)b_indices[from] << BITS | slot;
            values[slot] = scale * b_data[from];
        });
    __syncwarp();
    Key keys[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) keys[i] = i * GROUP + lane < total ? slots[i * GROUP + lane] : ~(Key)0;
    sort_keys<GROUP, ITEMS>(keys, lane);

    const int nnz = store_columns<GROUP, ITEMS, BITS>(slots, heads, keys, total, lane);
    if (!active) return;
    const Pointer base = c_indptr[row];
    for (int out = lane; out < nnz; out += GROUP) {
        const int first = heads[out], stop = out + 1 < nnz ? heads[out + 1] : total;
        const Key key = slots[place<ITEMS, Key>(first)];
        Value sum = Value(0);
        sum += values[key & SLOT];
        for (int i = first + 1; i < stop; ++i) sum += values[slots[place<ITEMS, Key>(i)] & SLOT];
        c_indices[base + out] = (Index)(key >> BITS);
        c_data[base + out] = sum;
    }
}
