// sort.cuh: sort the keys of a group of lanes in registers; lanes of a warp trade keys by shuffles, warps through
// shared memory.
//
// K. Batcher, "Sorting networks and their applications", AFIPS 1968, in the form whose comparisons all ascend.
#pragma once
#include "common.cuh"

template <typename Key>
__device__ __forceinline__ void order(Key& low, Key& high) {
    const Key x = low, y = high;
    low = x < y ? x : y;
    high = x < y ? y : x;
}

// Sort every run of LENGTH keys that first rise and then fall, or the reverse.
template <int ITEMS, int LENGTH, typename Key>
__device__ __forceinline__ void merge_lane(Key (&keys)[ITEMS]) {
    if constexpr (LENGTH == 3) {
#pragma unroll
        for (int i = 0; i < ITEMS; i += 3) {
            order(keys[i], keys[i + 1]);
            order(keys[i + 1], keys[i + 2]);
            order(keys[i], keys[i + 1]);
        }
    } else if constexpr (LENGTH > 1) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (i % LENGTH < LENGTH / 2) order(keys[i], keys[i + LENGTH / 2]);
        merge_lane<ITEMS, LENGTH / 2>(keys);
    }
}

// Sort the keys of one lane; ITEMS is a power of two, or three times one.
template <int ITEMS, int SIZE, typename Key>
__device__ __forceinline__ void sort_lane(Key (&keys)[ITEMS]) {
    if constexpr (SIZE == 3) merge_lane<ITEMS, 3>(keys);
    else if constexpr (SIZE > 1) {
        sort_lane<ITEMS, SIZE / 2>(keys);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (i % SIZE < SIZE / 2) order(keys[i], keys[i - i % SIZE + SIZE - 1 - i % SIZE]);
        merge_lane<ITEMS, SIZE / 2>(keys);
    }
}

// Sort GROUP * ITEMS keys; afterwards item i of lane l is number l * ITEMS + i.
template <int GROUP, int ITEMS, typename Key>
__device__ __forceinline__ void sort_keys(Key (&keys)[ITEMS], const int lane) {
    sort_lane<ITEMS, ITEMS>(keys);
#pragma unroll
    for (int lanes = 2; lanes <= GROUP; lanes *= 2) {
        const bool keeps_low = (lane & (lanes / 2)) == 0;
        Key others[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) others[i] = __shfl_xor_sync(FULL_WARP, keys[ITEMS - 1 - i], lanes - 1);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) keys[i] = keeps_low ? min(keys[i], others[i]) : max(keys[i], others[i]);
#pragma unroll
        for (int step = lanes / 4; step > 0; step /= 2) {
            const bool low = (lane & step) == 0;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const Key other = __shfl_xor_sync(FULL_WARP, keys[i], step);
                keys[i] = low ? min(keys[i], other) : max(keys[i], other);
            }
        }
        merge_lane<ITEMS, ITEMS>(keys);
    }
}

// Where the sorted key number `at` lies: pieces of 16 bytes are permuted so that lanes that write runs of ITEMS keys,
// and lanes that read neighbours, touch different banks.
template <int ITEMS, typename Key>
__device__ __forceinline__ int place(const int at) {
    constexpr int PIECE = 16 / sizeof(Key);
    if (ITEMS < 2 * PIECE || ITEMS % PIECE) return at;
    const int piece = at / PIECE;
    return (piece ^ ((piece >> 3) & 7)) * PIECE + at % PIECE;
}

// Write sorted keys to where `place` says for LIKE items a lane.
template <int ITEMS, typename Key, int LIKE = ITEMS>
__device__ __forceinline__ void store_keys(Key* slots, const Key (&keys)[ITEMS], const int lane) {
    constexpr int PIECE = 16 / sizeof(Key);
    if constexpr (ITEMS % PIECE == 0) {
#pragma unroll
        for (int i = 0; i < ITEMS; i += PIECE) {
            Key* piece = slots + place<LIKE, Key>(lane * ITEMS + i);
            if constexpr (PIECE == 4)
                *reinterpret_cast<uint4*>(piece) = make_uint4(keys[i], keys[i + 1], keys[i + 2], keys[i + 3]);
            else *reinterpret_cast<ulonglong2*>(piece) = make_ulonglong2(keys[i], keys[i + 1]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) slots[place<LIKE, Key>(lane * ITEMS + i)] = keys[i];
    }
}

// Wait for the group: lanes of one warp, or the whole thread block, which is then the group.
template <int GROUP>
__device__ __forceinline__ void wait() {
    if (GROUP <= 32) __syncwarp();
    else __syncthreads();
}

// Whether it holds for any lane of the warp (GROUP <= 32) or of the thread block.
template <int GROUP>
__device__ __forceinline__ bool any_lane(const bool holds) {
    return GROUP <= 32 ? __any_sync(FULL_WARP, holds) : __syncthreads_or(holds);
}

// Sum over this lane and those before it in its group; `total` is that of the group. `scratch`: GROUP / 32 elements.
template <int GROUP>
__device__ __forceinline__ u32 group_sum(const u32 value, const int lane, u32* scratch, u32& total) {
    constexpr int WIDTH = GROUP < 32 ? GROUP : 32;
    u32 through = inclusive_sum<WIDTH>(value, lane % WIDTH);
    if (GROUP <= 32) {
        total = take(through, WIDTH - 1, WIDTH);
        return through;
    }
    __syncthreads();
    if (lane % 32 == 31) scratch[lane / 32] = through;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int warp = 0; warp < GROUP / 32; ++warp) {
        const u32 sum = scratch[warp];
        if (warp < lane / 32) through += sum;
        total += sum;
    }
    return through;
}

// Keep the lower or the greater of each pair of keys that lanes l and l ^ `across` hold, in other warps; the items of
// the other lane in reverse order where `mirrored`.
template <int GROUP, int ITEMS, typename Key>
__device__ __forceinline__ void trade(Key (&keys)[ITEMS], const int lane, const int across, const bool low,
                                      const bool mirrored, Key* slots) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) slots[i * GROUP + lane] = keys[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const Key other = slots[(mirrored ? ITEMS - 1 - i : i) * GROUP + (lane ^ across)];
        keys[i] = low ? min(keys[i], other) : max(keys[i], other);
    }
    __syncthreads();
}

// `sort_keys` for groups of any power of two of lanes; beyond a warp `slots` holds GROUP * ITEMS keys that are free.
template <int GROUP, int ITEMS, typename Key>
__device__ __forceinline__ void sort_group(Key (&keys)[ITEMS], const int lane, Key* slots) {
    sort_keys<(GROUP < 32 ? GROUP : 32), ITEMS>(keys, lane % 32);
#pragma unroll 1
    for (int lanes = 64; lanes <= GROUP; lanes *= 2) {
        trade<GROUP>(keys, lane, lanes - 1, (lane & (lanes / 2)) == 0, true, slots);
#pragma unroll 1
        for (int step = lanes / 4; step >= 32; step /= 2)
            trade<GROUP>(keys, lane, step, (lane & step) == 0, false, slots);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            const bool low = (lane & step) == 0;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const Key other = __shfl_xor_sync(FULL_WARP, keys[i], step);
                keys[i] = low ? min(keys[i], other) : max(keys[i], other);
            }
        }
        merge_lane<ITEMS, ITEMS>(keys);
    }
}

// Store sorted keys, of which the first `total` count, and where each column begins; returns the number of columns.
//
// Every lane of the warp takes part. BITS low bits of a key are the number of its product. Afterwards key number i lies at
// slots[place(i)], as for LIKE items a lane, and the keys of column c are those from number heads[c] on.
template <int GROUP, int ITEMS, int BITS, typename Key, int LIKE = ITEMS>
__device__ __forceinline__ int store_columns(Key* slots, unsigned short* heads, const Key (&keys)[ITEMS], const int total,
                                             const int lane) {
    int mine = 0;
    u32 is_head = 0;
    const Key last = __shfl_up_sync(FULL_WARP, keys[ITEMS - 1], 1, GROUP);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int number = lane * ITEMS + i;
        const Key before = i == 0 ? last : keys[i > 0 ? i - 1 : 0];
        const bool head = number < total && (number == 0 || (before >> BITS) != (keys[i] >> BITS));
        is_head |= (u32)head << i;
        mine += head;
    }
    const int through = inclusive_sum<GROUP>(mine, lane);
    const int columns = take(through, GROUP - 1, GROUP);
    __syncwarp();  // all keys are in registers: the slots can be written again
    store_keys<ITEMS, Key, LIKE>(slots, keys, lane);
    int head = through - mine;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (is_head >> i & 1) heads[head++] = (unsigned short)(lane * ITEMS + i);
    __syncwarp();
    return columns;
}
