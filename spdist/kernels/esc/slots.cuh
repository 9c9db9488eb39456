// slots.cuh: expand, sort and compress the products of a row in shared memory, by a group of lanes.
//
// L. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication on GPU", HPC 2015: every lane expands the same number of
// products, found by interpolation search in the prefix of products; the segments, which are rows of C here, are sorted; a
// segmented reduction adds the products of each column.
#pragma once
#include "common.cuh"
#include "sort.cuh"

// What a group of lanes keeps in shared memory: products, sort keys and, one after the other, the entries of A at hand
// with the end of each one's products, and the positions where a new column begins.
template <typename Value, typename Pointer, typename Key, int GROUP, int ITEMS>
struct Slots {
    Value values[GROUP * ITEMS];
    Key keys[GROUP * ITEMS];
    union {
        unsigned short heads[GROUP * ITEMS];
        struct {
            u32 ends[GROUP];
            Pointer shifts[GROUP];
            Value factors[GROUP];
        };
    };
};

// Bits of a product's number in its sort key: the rest is the column.
__host__ __device__ constexpr int bits_of(const int slots) { return slots <= 2 ? 1 : 1 + bits_of((slots + 1) / 2); }

// The arrays of A and B.
template <typename Value, typename Index, typename Pointer>
struct Operands {
    const Pointer* __restrict__ a_indptr;
    const Index* __restrict__ a_indices;
    const Value* __restrict__ a_data;
    const Pointer* __restrict__ b_indptr;
    const Index* __restrict__ b_indices;
    const Value* __restrict__ b_data;
};

// The first of the rising `ends[low..high]` that is greater than `number`; ends[high] must be. Interpolates while the
// interval is long, halving it every other step so that no distribution makes the search slow.
template <typename T>
__device__ __forceinline__ i64 find(const T* __restrict__ ends, i64 low, i64 high, const i64 number) {
    i64 below = low > 0 ? (i64)ends[low - 1] : 0, above = (i64)ends[high];
    for (bool halve = false; high - low > 16; halve = !halve) {
        i64 middle = (low + high) / 2;
        if (!halve) {
            const float part = (float)(number - below) / (float)(above - below);
            middle = min(high - 1, max(low, low + (i64)(part * (float)(high - low))));
        }
        const i64 end = (i64)ends[middle];
        if (number < end) high = middle, above = end;
        else low = middle + 1, below = end;
    }
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (number < (i64)ends[middle]) high = middle;
        else low = middle + 1;
    }
    return low;
}

// `find` in the GROUP ends of the entries at hand.
template <int GROUP>
__device__ __forceinline__ u32 find_entry(const u32* ends, const u32 number) {
    u32 entry = 0;
#pragma unroll
    for (u32 step = GROUP / 2; step > 0; step /= 2)
        if (ends[entry + step - 1] <= number) entry += step;
    return entry;
}

// Expansion: write products and keys of the entries [first, end) of A to the slots, from number `skip` of the first
// entry's products on, at most `room`. Returns how many.
template <int GROUP, int ITEMS, typename Value, typename Index, typename Pointer, typename Key>
__device__ __forceinline__ u32 expand(Slots<Value, Pointer, Key, GROUP, ITEMS>& s, const int lane, const i64 first,
                                      const i64 end, const u32 skip, const u32 room,
                                      const Operands<Value, Index, Pointer>& m, u32* scratch) {
    constexpr int BITS = bits_of(GROUP * ITEMS);
    u32 filled = 0;
    for (i64 base = first; any_lane<GROUP>(base < end && filled < room); base += GROUP) {
        const i64 at = base + lane;
        Pointer start = 0;
        u32 length = 0;
        Value factor = Value(0);
        if (at < end && filled < room) {
            const Index k = m.a_indices[at];
            start = m.b_indptr[k];
            length = (u32)(m.b_indptr[k + 1] - start);
            factor = m.a_data[at];
            if (at == first) start += skip, length -= skip;
        }
        u32 here;
        const u32 through = group_sum<GROUP>(length, lane, scratch, here);
        s.ends[lane] = through;
        s.shifts[lane] = start - (Pointer)(through - length);
        s.factors[lane] = factor;
        here = min(here, room - filled);
        wait<GROUP>();
#pragma unroll 4
        for (u32 number = lane; number < here; number += GROUP) {
            const u32 entry = find_entry<GROUP>(s.ends, number);
            const Pointer from = s.shifts[entry] + (Pointer)number;
            s.keys[filled + number] = (Key)m.b_indices[from] << BITS | (filled + number);
            s.values[filled + number] = s.factors[entry] * m.b_data[from];
        }
        wait<GROUP>();
        filled += here;
    }
    return filled;
}

// Sort the keys in the slots.
template <int GROUP, int ITEMS, typename Value, typename Pointer, typename Key>
__device__ __forceinline__ void sort_slots(Slots<Value, Pointer, Key, GROUP, ITEMS>& s, const int lane,
                                           const u32 filled, Key (&keys)[ITEMS]) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) keys[i] = i * GROUP + lane < filled ? s.keys[i * GROUP + lane] : ~(Key)0;
    wait<GROUP>();
    sort_group<GROUP, ITEMS>(keys, lane, s.keys);
    store_keys<ITEMS>(s.keys, keys, lane);
    wait<GROUP>();
}

// Compression, first half: note where the columns of the sorted slots begin, and return how many there are.
template <int GROUP, int ITEMS, typename Value, typename Pointer, typename Key>
__device__ __forceinline__ u32 find_heads(Slots<Value, Pointer, Key, GROUP, ITEMS>& s, const int lane, const u32 filled,
                                          const Key (&keys)[ITEMS], u32* scratch) {
    constexpr int BITS = bits_of(GROUP * ITEMS);
    Key before = lane > 0 ? s.keys[place<ITEMS, Key>(lane * ITEMS - 1)] : (Key)0;
    u32 mine = 0, is_head = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const u32 number = lane * ITEMS + i;
        const bool head = number < filled && (number == 0 || before >> BITS != keys[i] >> BITS);
        is_head |= (u32)head << i;
        mine += head;
        before = keys[i];
    }
    u32 nnz;
    u32 head = group_sum<GROUP>(mine, lane, scratch, nnz) - mine;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (is_head >> i & 1) s.heads[head++] = (unsigned short)(lane * ITEMS + i);
    wait<GROUP>();
    return nnz;
}

// Compression, second half: add the products of each column in the order of A's entries and write the entries of C.
template <int GROUP, int ITEMS, typename Value, typename Index, typename Pointer, typename Key>
__device__ __forceinline__ void write_sums(const Slots<Value, Pointer, Key, GROUP, ITEMS>& s, const int lane,
                                           const u32 filled, const u32 nnz, const Index first_column,
                                           Index* __restrict__ indices, Value* __restrict__ data) {
    constexpr int BITS = bits_of(GROUP * ITEMS);
    constexpr u32 NUMBER = (1u << BITS) - 1;
    for (u32 out = lane; out < nnz; out += GROUP) {
        const u32 first = s.heads[out], stop = out + 1 < nnz ? s.heads[out + 1] : filled;
        const Key key = s.keys[place<ITEMS, Key>(first)];
        Value sum = Value(0);
        sum += s.values[(u32)key & NUMBER];
        for (u32 i = first + 1; i < stop; ++i) sum += s.values[(u32)s.keys[place<ITEMS, Key>(i)] & NUMBER];
        indices[out] = first_column + (Index)(key >> BITS);
        data[out] = sum;
    }
}

// Take `count` entries of the pool for each group; one addition per warp, or per thread block where that is the group.
template <int GROUP>
__device__ __forceinline__ u64 reserve(u64* taken, const u64 count, const int lane, u64* shared) {
    if (GROUP <= 32) {
        const u64 through = inclusive_sum<32>(lane == 0 ? count : 0ull, threadIdx.x % 32);
        u64 base = 0;
        if (threadIdx.x % 32 == 31 && through) base = atomicAdd(taken, through);
        base = __shfl_sync(FULL_WARP, base, 31);
        return base + __shfl_sync(FULL_WARP, through - (lane == 0 ? count : 0ull), 0, GROUP < 32 ? GROUP : 32);
    }
    __syncthreads();
    if (lane == 0) *shared = atomicAdd(taken, count);
    __syncthreads();
    return *shared;
}
