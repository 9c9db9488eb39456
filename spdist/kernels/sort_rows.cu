// sort_rows.cu: rows of C of few products. A group of lanes expands a row into shared memory, sorts it in registers and
// adds what falls on one column.
//
// Expansion with every lane busy whatever the row lengths of B, then sort and compress: L. Polok, V. Ila, P. Smrz, "Fast
// Sparse Matrix Multiplication on GPU", HPC 2015, here for one row of C at a time and without leaving the chip.
#include "sort_keys.cuh"

// Multiply the listed rows, each of at most GROUP * ITEMS products.
//
// Launch  block 32 * WARPS, grid ceil_div(count, WARPS * 32 / GROUP).
// Shared  per slot: a key; with NUMERIC also a value and a 16-bit position.
// Pre     list null: all rows; columns of B fit in what is left of Key after log2(GROUP * ITEMS) bits, rounded up;
//         offsets and indices in range. Neither A nor B need be sorted.
// Post    count pass: lengths[row] = nnz of the row of C. NUMERIC: columns rise strictly, values are added in the order
//         of A's entries, so the bits are the same on every run; c_indptr says where the row goes.
template <typename Value, typename Index, typename Pointer, typename Key, int GROUP, int ITEMS, int WARPS, bool NUMERIC>
__global__ void __launch_bounds__(32 * WARPS)
sort_rows(const u32 count, const u32* __restrict__ list, const Pointer* __restrict__ a_indptr,
          const Index* __restrict__ a_indices, const Value* __restrict__ a_data, const Pointer* __restrict__ b_indptr,
          const Index* __restrict__ b_indices, const Value* __restrict__ b_data, u32* __restrict__ lengths,
          const Pointer* __restrict__ c_indptr, Index* __restrict__ c_indices, Value* __restrict__ c_data) {
    constexpr int SLOTS = GROUP * ITEMS, GROUPS = WARPS * 32 / GROUP;
    constexpr int BITS = SLOTS <= 16 ? 4 : SLOTS <= 32 ? 5 : SLOTS <= 64 ? 6 : SLOTS <= 128 ? 7 : SLOTS <= 256 ? 8
                       : SLOTS <= 512 ? 9 : 10;
    static_assert(SLOTS <= 1 << BITS, "at most 1024 slots");
    constexpr u32 SLOT = (1u << BITS) - 1;
    __shared__ __align__(16) Key all_keys[GROUPS * SLOTS];
    __shared__ __align__(16) char all_values[NUMERIC ? GROUPS * SLOTS * sizeof(Value) : 16];
    __shared__ unsigned short all_heads[NUMERIC ? GROUPS * SLOTS : 1];
    const int group = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    Key* slots = all_keys + group * SLOTS;
    Value* values = reinterpret_cast<Value*>(all_values) + (NUMERIC ? group * SLOTS : 0);
    unsigned short* heads = all_heads + (NUMERIC ? group * SLOTS : 0);

    const u32 number = blockIdx.x * GROUPS + group;
    const bool active = number < count;
    const u32 row = !active ? 0 : list == nullptr ? number : list[number];
    Pointer at = active ? a_indptr[row] : 0;
    const Pointer end = active ? a_indptr[row + 1] : 0;
    int total = 0;
    for (at += lane; __any_sync(FULL_WARP, at - lane < end); at += GROUP) {
        Pointer start = 0;
        int length = 0;
        Value factor = Value(0);
        if (at < end) {
            const Index k = a_indices[at];
            start = b_indptr[k];
            length = (int)(b_indptr[k + 1] - start);
            if (NUMERIC) factor = a_data[at];
        }
        const int ends = inclusive_sum<GROUP>(length, lane);
        const Pointer shift = start - (ends - length);
        const int here = take(ends, GROUP - 1, GROUP);
        int most = here;
#pragma unroll
        for (int step = GROUP; step < 32; step *= 2) most = max(most, __shfl_xor_sync(FULL_WARP, most, step));
#pragma unroll 4
        for (int first = 0; first < most; first += GROUP) {
            const int product = first + lane;
            int entry = 0;  // the first entry of A whose products end after this one
#pragma unroll
            for (int step = GROUP / 2; step > 0; step /= 2)
                if (take(ends, entry + step - 1, GROUP) <= product) entry += step;
            const Pointer from = take(shift, entry, GROUP) + product;
            const Value scale = NUMERIC ? take(factor, entry, GROUP) : Value(0);
            if (product < here) {
                const int slot = total + product;
                slots[slot] = (Key)b_indices[from] << BITS | slot;
                if (NUMERIC) values[slot] = scale * b_data[from];
            }
        }
        total += here;
    }
    __syncwarp();
    Key keys[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) keys[i] = i * GROUP + lane < total ? slots[i * GROUP + lane] : ~(Key)0;
    sort_keys<GROUP, ITEMS>(keys, lane);

    int mine = 0;
    u32 is_head = 0;
    const Key last = __shfl_up_sync(FULL_WARP, keys[ITEMS - 1], 1, GROUP);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int number_of = lane * ITEMS + i;
        const Key before = i == 0 ? last : keys[i > 0 ? i - 1 : 0];
        const bool head = number_of < total && (number_of == 0 || (before >> BITS) != (keys[i] >> BITS));
        is_head |= (u32)head << i;
        mine += head;
    }
    const int through = inclusive_sum<GROUP>(mine, lane);
    const int nnz = take(through, GROUP - 1, GROUP);
    if (!NUMERIC) {
        if (active && lane == 0) lengths[row] = nnz;
        return;
    }
    __syncwarp();  // all keys are in registers: the slots can be written again
    int head = through - mine;
    store_keys<ITEMS>(slots, keys, lane);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (is_head >> i & 1) heads[head++] = (unsigned short)(lane * ITEMS + i);
    __syncwarp();
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
