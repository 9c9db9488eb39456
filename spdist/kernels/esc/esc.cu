// esc.cu: C = A @ B by expansion, sorting and compression, in slices that fit the memory given.
//
// L. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication on GPU", HPC 2015, by rows instead of columns: every
// lane expands the same number of products, found by interpolation search in the prefix of products; segments, the
// rows of C, are sorted by merging; a segmented reduction adds what falls on one column. Here a row whose products
// fit in shared memory goes through the three stages without leaving the chip (`esc_rows`). The products of a longer
// one go to memory as sorted tiles (`sort_tiles`), which are merged by ranges of columns, the buckets
// (`split_columns`, `merge_buckets`).
//
// Compressed entries go to a pool, packed, and from there to C once its size is known (`copy_rows`, `copy_buckets`).
// What the pool cannot hold is only counted, and done again when C is there.
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

// What the device tells the host, and how many classes of rows there are; `list_rows` of rows.cu takes the same
// classes.
enum Fact { ALL_PRODUCTS, BAD_A, BAD_B, LONGEST };
constexpr int CLASSES = 16;

// The length of row `k` of B; 0, and `bad`, where it or B's offsets are out of range.
template <typename Index, typename Pointer>
__device__ __forceinline__ u64 row_length(const Index k, const i64 nrows, const i64 nnz,
                                          const Pointer* __restrict__ indptr, bool& bad) {
    const bool inside = k >= 0 && k < nrows;
    const i64 first = inside ? indptr[k] : 0, last = inside ? indptr[k + 1] : -1;
    const bool wrong = first < 0 || last < first || last > nnz;
    bad |= wrong;
    return wrong ? 0 : last - first;
}

// Setup: count the products of each row of C and the rows of each class; check A and B.
//
// Launch  block 256, any grid; GROUP lanes a row, rows of A longer than MANY by the thread block.
// Pre     facts and class_rows zero; limits[c]: the most products of class c, rising, the last ~0.
// Post    products[row], at most 2^32 - 1; facts[ALL_PRODUCTS], the expansion size; facts[LONGEST], the products of the
//         longest row; facts[BAD_A], facts[BAD_B] not zero if an offset or a column is out of range; class_rows[c].
constexpr int MANY = 512;

template <typename Index, typename Pointer, int GROUP>
__global__ void __launch_bounds__(256)
count_products(const i64 nrows, const i64 nnz_a, const i64 nrows_b, const i64 nnz_b, const i64 ncols,
               const Pointer* __restrict__ a_indptr, const Index* __restrict__ a_indices,
               const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices,
               const u64* __restrict__ limits, u32* __restrict__ products, u64* __restrict__ facts,
               u64* __restrict__ class_rows) {
    constexpr int ROWS = 256 / GROUP;
    __shared__ u64 scratch[8];
    __shared__ i64 begins[ROWS], ends[ROWS];
    __shared__ u32 histogram[CLASSES];
    if (threadIdx.x < CLASSES) histogram[threadIdx.x] = 0;
    __syncthreads();
    const int lane = threadIdx.x % GROUP, own = threadIdx.x / GROUP;
    bool bad = false, bad_b = false;
    u64 total = 0, longest = 0;
    const auto note = [&](const i64 row, const u64 count) {  // returns the class
        products[row] = (u32)min(count, 0xffffffffull);
        total += count;
        longest = max(longest, count);
        int kind = 0;
        while (count > limits[kind]) ++kind;
        return kind;
    };
    for (i64 first_row = (i64)blockIdx.x * ROWS; first_row < nrows; first_row += (i64)gridDim.x * ROWS) {
        const i64 row = first_row + own;
        i64 begin = 0, end = 0;
        if (row < nrows) {
            begin = a_indptr[row], end = a_indptr[row + 1];
            if (begin < 0 || end < begin || end > nnz_a) bad = true, begin = end = 0;
        }
        const bool many = end - begin > MANY;
        u64 count = 0;
        if (!many)
#pragma unroll 4
            for (i64 at = begin + lane; at < end; at += GROUP)
                count += row_length(a_indices[at], nrows_b, nnz_b, b_indptr, bad);
#pragma unroll
        for (int step = GROUP / 2; step > 0; step /= 2) count += __shfl_xor_sync(FULL_WARP, count, step);
        const int kind = lane == 0 && row < nrows && !many ? note(row, count) : -1;
        const u32 same = __match_any_sync(FULL_WARP, kind);  // one addition per class and warp
        if (kind >= 0 && threadIdx.x % 32 == __ffs(same) - 1) atomicAdd(&histogram[kind], (u32)__popc(same));
        if (!__syncthreads_or(many)) continue;
        if (lane == 0) begins[own] = begin, ends[own] = end;
        __syncthreads();
        for (int which = 0; which < ROWS; ++which) {
            if (ends[which] - begins[which] <= MANY) continue;
            u64 part = 0;
#pragma unroll 4
            for (i64 at = begins[which] + threadIdx.x; at < ends[which]; at += 256)
                part += row_length(a_indices[at], nrows_b, nnz_b, b_indptr, bad);
            part = block_sum<8>(part, scratch);
            if (threadIdx.x == 0) atomicAdd(&histogram[note(first_row + which, part)], 1u);
        }
        __syncthreads();
    }
#pragma unroll 4
    for (i64 at = (i64)blockIdx.x * 256 + threadIdx.x; at < nnz_b; at += (i64)gridDim.x * 256) {
        const Index column = b_indices[at];
        bad_b |= column < 0 || column >= ncols;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) longest = max(longest, __shfl_xor_sync(FULL_WARP, longest, step));
    if (threadIdx.x % 32 == 0 && longest > *(volatile u64*)&facts[LONGEST]) atomicMax(&facts[LONGEST], longest);
    total = block_sum<8>(total, scratch);
    const bool any_bad = __syncthreads_or(bad), any_bad_b = __syncthreads_or(bad_b);
    if (threadIdx.x == 0 && total) atomicAdd(&facts[ALL_PRODUCTS], total);
    if (threadIdx.x == 0 && any_bad) facts[BAD_A] = 1;
    if (threadIdx.x == 0 && any_bad_b) facts[BAD_B] = 1;
    if (threadIdx.x < CLASSES && histogram[threadIdx.x])
        atomicAdd(&class_rows[threadIdx.x], (u64)histogram[threadIdx.x]);
}

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

// Rows longer than a tile. Their table, [5][rows + 1], holds for each the row of C, and the entries of A, the
// products, the tiles and the buckets before it. `first` and `last` name the rows of a slice; tiles are numbered
// within the slice.
enum Field { ROW, ENTRIES, PRODUCTS, TILES, BUCKETS };

// The table's first three columns, not yet summed, for listed rows in any order; their place in the pool is none.
//
// Launch  block 256, grid ceil_div(count, 256).
template <typename Pointer>
__global__ void __launch_bounds__(256)
describe_rows(const u32 count, const u32* __restrict__ list, const Pointer* __restrict__ a_indptr,
              const u32* __restrict__ products, i64* __restrict__ table, i64* __restrict__ places) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= count) return;
    const u32 row = list[i];
    table[i] = row;
    table[count + 1 + i] = (i64)a_indptr[row + 1] - a_indptr[row];
    table[2 * (count + 1) + i] = products[row];
    places[row] = -1;
}

// Setup: the products of each entry of A and of those before it in its row.
//
// Launch  block 256, grid one per row of the table.
// Post    ends[ENTRIES of the row + i]: products of the row's entries 0 to i.
template <typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
sum_products(const i64 rows, const i64* __restrict__ table, const Pointer* __restrict__ a_indptr,
             const Index* __restrict__ a_indices, const Pointer* __restrict__ b_indptr, u32* __restrict__ ends) {
    __shared__ u32 scratch[8];
    const i64* entries = table + ENTRIES * (rows + 1) + blockIdx.x;
    const i64 count = entries[1] - entries[0], first = a_indptr[table[blockIdx.x]];
    u32 before = 0;
    for (i64 base = 0; base < count; base += 256) {
        const i64 at = base + threadIdx.x;
        u32 length = 0, total;
        if (at < count) {
            const Index k = a_indices[first + at];
            length = (u32)(b_indptr[k + 1] - b_indptr[k]);
        }
        const u32 through = group_sum<256>(length, threadIdx.x, scratch, total);
        if (at < count) ends[entries[0] + at] = before + through;
        before += total;
    }
}

// Expansion of long rows, and the first part of their sort: every thread block takes as many products, but for the
// last of a row.
//
// Launch  block GROUP, grid one per tile of the slice.
// Shared  `Slots`.
// Pre     as `esc_rows`; ends as `sum_products` leaves them.
// Post    tile t: products t * GROUP * ITEMS on of the row, sorted by column, those of one column in the order of A.
template <typename Value, typename Index, typename Pointer, typename Key, int GROUP, int ITEMS>
__global__ void __launch_bounds__(GROUP)
sort_tiles(const i64 rows, const i64 first, const i64 last, const i64* __restrict__ table, const u32* __restrict__ ends,
           const Pointer* __restrict__ a_indptr, const Index* __restrict__ a_indices, const Value* __restrict__ a_data,
           const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices, const Value* __restrict__ b_data,
           Index* __restrict__ tile_columns, Value* __restrict__ tile_data) {
    constexpr int SLOTS = GROUP * ITEMS, BITS = bits_of(SLOTS);
    extern __shared__ __align__(16) char memory[];
    __shared__ u32 scratch[GROUP / 32];
    auto& s = *reinterpret_cast<Slots<Value, Pointer, Key, GROUP, ITEMS>*>(memory);
    const int lane = threadIdx.x;
    const i64* tiles = table + TILES * (rows + 1);
    const i64 tile = tiles[first] + blockIdx.x;
    const i64 r = find(tiles + 1, first, last - 1, tile);
    const i64* entries = table + ENTRIES * (rows + 1) + r;
    const i64 begin = (tile - tiles[r]) * SLOTS;
    const i64 entry = find(ends + entries[0], 0, entries[1] - entries[0] - 1, begin);
    const u32 skip = (u32)(begin - (entry > 0 ? (i64)ends[entries[0] + entry - 1] : 0));
    const Operands<Value, Index, Pointer> m{a_indptr, a_indices, a_data, b_indptr, b_indices, b_data};
    const i64 row = table[r], at = m.a_indptr[row] + entry;
    const u32 filled = expand(s, lane, at, (i64)m.a_indptr[row + 1], skip, (u32)SLOTS, m, scratch);
    Key keys[ITEMS];
    sort_slots(s, lane, filled, keys);
    const i64 target = (i64)blockIdx.x * SLOTS;
    for (u32 i = lane; i < filled; i += GROUP) {
        const Key key = s.keys[place<ITEMS, Key>(i)];
        tile_columns[target + i] = (Index)(key >> BITS);
        tile_data[target + i] = s.values[(u32)key & (SLOTS - 1)];
    }
}

// The products of tile `tile` of a row of `products`.
template <int TILE>
__device__ __forceinline__ u32 tile_size(const i64 products, const i64 tile) {
    return (u32)min((i64)TILE, products - tile * TILE);
}

// Choose the columns at which the buckets of each long row begin, from samples of its sorted tiles.
//
// Launch  block 512, grid one per row of the slice.
// Shared  8,192 columns.
// Post    splitters[bucket]: its first column, not falling within a row; 0 for the first.
template <typename Index, typename Unsigned, int TILE>
__global__ void __launch_bounds__(512)
split_columns(const i64 rows, const i64 first, const i64* __restrict__ table, const Index* __restrict__ tile_columns,
              Index* __restrict__ splitters) {
    extern __shared__ __align__(16) char memory[];
    Unsigned* columns = reinterpret_cast<Unsigned*>(memory);
    const i64 r = first + blockIdx.x, width = rows + 1;
    const i64 products = table[PRODUCTS * width + r + 1] - table[PRODUCTS * width + r];
    const i64* tiles = table + TILES * width;
    const i64 count = tiles[r + 1] - tiles[r];
    const i64 every = (count + 8191) / 8192, sampled = (count + every - 1) / every;
    const u32 each = (u32)min((i64)128, 8192 / sampled), samples = (u32)sampled * each;
    Unsigned keys[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const u32 number = i * 512 + threadIdx.x;
        keys[i] = ~(Unsigned)0;
        if (number < samples) {
            const i64 tile = number / each * every;
            const u32 at = (u32)(((u64)(2 * (number % each) + 1) * tile_size<TILE>(products, tile)) / (2 * each));
            keys[i] = (Unsigned)tile_columns[(tiles[r] - tiles[first] + tile) * TILE + at];
        }
    }
    sort_group<512, 16>(keys, threadIdx.x, columns);
    store_keys<16>(columns, keys, threadIdx.x);
    __syncthreads();
    const i64 bucket = table[BUCKETS * width + r], buckets = table[BUCKETS * width + r + 1] - bucket;
    for (i64 b = threadIdx.x; b < buckets; b += 512)
        splitters[bucket + b] = b == 0 ? (Index)0 : (Index)columns[place<16, Unsigned>((int)(b * samples / buckets))];
}

// The first of the `size` rising columns that is not less than `column`.
template <typename Index>
__device__ __forceinline__ u32 lower_bound(const Index* __restrict__ columns, u32 size, const Index column) {
    u32 low = 0;
    while (size > 0) {
        const u32 half = size / 2;
        if (columns[low + half] < column) low += half + 1, size -= half + 1;
        else size = half;
    }
    return low;
}

// The piece of each tile with columns in [low, stop): where it starts, and the sum of the sizes through it. Returns
// the sum.
template <int GROUP, int TILE, typename Index>
__device__ __forceinline__ u32 find_pieces(const i64 products, const i64 tiles, const Index* __restrict__ columns,
                                           const Index low, const Index stop, u32* ends, unsigned short* starts,
                                           u32* scratch) {
    u32 total = 0;
    __syncthreads();
    for (i64 base = 0; base < tiles; base += GROUP) {
        const i64 tile = base + threadIdx.x;
        u32 size = 0, sum;
        if (tile < tiles) {
            const Index* own = columns + tile * TILE;
            const u32 most = tile_size<TILE>(products, tile), start = lower_bound(own, most, low);
            size = lower_bound(own + start, most - start, stop);
            starts[tile] = (unsigned short)start;
        }
        const u32 through = group_sum<GROUP>(size, threadIdx.x, scratch, sum);
        if (tile < tiles) ends[tile] = total + through;
        total += sum;
    }
    __syncthreads();
    return total;
}

// Merge the buckets of long rows: the columns of [splitter, next splitter), which all tiles of the row have a piece
// of, are sorted and compressed. A bucket that holds more products than slots is done by parts of its range; a column
// that does, by adding its products as they come, for the tiles hold them in the order of A.
//
// Launch  block GROUP, grid one per bucket of the slice.
// Shared  `Slots`, then u32 ends and 16-bit starts for as many tiles as the longest row of the slice has.
// Pre     tiles as `sort_tiles` leaves them, of `TILE` products; bits as `esc_rows`.
// Post    starts null: lengths[bucket], and places[bucket] in the pool, -1 if it did not fit. Else, starts[bucket]
//         being the bucket's place in the row of C, its entries are written to C.
template <typename Value, typename Index, typename Pointer, typename Key, int GROUP, int ITEMS, int TILE>
__global__ void __launch_bounds__(GROUP)
merge_buckets(const i64 rows, const i64 first, const i64 last, const i64* __restrict__ table, const i64 ncols,
              const i64 most_tiles, const Index* __restrict__ splitters, const Index* __restrict__ tile_columns,
              const Value* __restrict__ tile_data, u32* __restrict__ lengths, i64* __restrict__ places,
              u64* taken, const u64 capacity, Index* __restrict__ pool_indices,
              Value* __restrict__ pool_data, const i64* __restrict__ starts, const i64* __restrict__ c_indptr,
              Index* __restrict__ c_indices, Value* __restrict__ c_data) {
    constexpr u32 SLOTS = GROUP * ITEMS;
    constexpr int BITS = bits_of(SLOTS);
    extern __shared__ __align__(16) char memory[];
    __shared__ u32 scratch[GROUP / 32];
    __shared__ u64 shared_base;
    auto& s = *reinterpret_cast<Slots<Value, Pointer, Key, GROUP, ITEMS>*>(memory);
    u32* ends = reinterpret_cast<u32*>(memory + sizeof(s));
    unsigned short* piece_starts = reinterpret_cast<unsigned short*>(ends + most_tiles);
    const int lane = threadIdx.x;
    const i64 width = rows + 1;
    const i64 *tiles_before = table + TILES * width, *buckets = table + BUCKETS * width;
    const i64 bucket = buckets[first] + blockIdx.x;
    const i64 r = find(buckets + 1, first, last - 1, bucket);
    const i64 products = table[PRODUCTS * width + r + 1] - table[PRODUCTS * width + r];
    const i64 tiles = tiles_before[r + 1] - tiles_before[r];
    const Index* columns = tile_columns + (tiles_before[r] - tiles_before[first]) * TILE;
    const Value* data = tile_data + (tiles_before[r] - tiles_before[first]) * TILE;
    const Index high = bucket + 1 < buckets[r + 1] ? splitters[bucket + 1] : (Index)ncols;
    Index low = splitters[bucket];
    bool reserved = starts != nullptr;
    i64 base = reserved ? c_indptr[table[r]] + starts[bucket] : -1;
    Index* const out_indices = reserved ? c_indices : pool_indices;
    Value* const out_data = reserved ? c_data : pool_data;
    u32 done = 0;
    while (low < high) {
        Index stop = high;
        u32 total = find_pieces<GROUP, TILE>(products, tiles, columns, low, stop, ends, piece_starts, scratch);
        if (total > SLOTS && !reserved) {  // several parts: room for all before the first is compressed
            const u64 most = min((u64)total, (u64)(high - low));
            const u64 place = reserve<GROUP>(taken, most, lane, &shared_base);
            base = place + most <= capacity ? (i64)place : -1;
            reserved = true;
        }
        while (total > SLOTS && stop - low > 1) {
            stop = low + (stop - low) / 2;
            total = find_pieces<GROUP, TILE>(products, tiles, columns, low, stop, ends, piece_starts, scratch);
        }
        u32 nnz = total > 0;
        Value sum = Value(0);
        for (u32 from = 0; from < total; from += SLOTS) {
            const u32 filled = min(SLOTS, total - from);
            __syncthreads();
#pragma unroll 4
            for (u32 i = lane; i < filled; i += GROUP) {
                const i64 tile = find(ends, 0, tiles - 1, from + i);
                const i64 at = tile * TILE + piece_starts[tile] + (from + i - (tile > 0 ? ends[tile - 1] : 0u));
                s.keys[i] = (Key)(columns[at] - low) << BITS | i;
                s.values[i] = data[at];
            }
            __syncthreads();
            if (total > SLOTS) {
                for (u32 i = 0; lane == 0 && i < filled; ++i) sum += s.values[i];
                continue;
            }
            Key keys[ITEMS];
            sort_slots(s, lane, filled, keys);
            nnz = find_heads(s, lane, filled, keys, scratch);
            if (!reserved) {
                const u64 place = reserve<GROUP>(taken, nnz, lane, &shared_base);
                base = place + nnz <= capacity ? (i64)place : -1;
                reserved = true;
            }
            if (base >= 0) write_sums(s, lane, filled, nnz, low, out_indices + base + done, out_data + base + done);
        }
        if (total > SLOTS && lane == 0 && base >= 0) {
            out_indices[base + done] = low;
            out_data[base + done] = sum;
        }
        done += nnz;
        low = stop;
    }
    if (starts != nullptr || lane != 0) return;
    lengths[bucket] = done;
    places[bucket] = done > 0 ? base : 0;
}

// Add up the buckets of each long row.
//
// Launch  block 256, grid one per row of the slice.
// Post    starts[bucket] within its row of C; row_lengths[row]; *missing not zero if a bucket is not in the pool.
__global__ void __launch_bounds__(256)
sum_buckets(const i64 rows, const i64 first, const i64* __restrict__ table, const u32* __restrict__ lengths,
            const i64* __restrict__ places, i64* __restrict__ starts, u32* __restrict__ row_lengths,
            u64* __restrict__ missing) {
    __shared__ u32 scratch[8];
    const i64* buckets = table + BUCKETS * (rows + 1) + first + blockIdx.x;
    u32 before = 0;
    bool misses = false;
    for (i64 base = buckets[0]; base < buckets[1]; base += 256) {
        const i64 bucket = base + threadIdx.x;
        const u32 length = bucket < buckets[1] ? lengths[bucket] : 0;
        u32 total;
        const u32 through = group_sum<256>(length, threadIdx.x, scratch, total);
        if (bucket < buckets[1]) {
            starts[bucket] = before + through - length;
            misses |= places[bucket] < 0;
        }
        before += total;
    }
    if (misses) *missing = 1;
    if (threadIdx.x == 0) row_lengths[table[first + blockIdx.x]] = before;
}

// Copy buckets from the pool to C.
//
// Launch  block 128, grid one per bucket of the table.
// Post    C's entries of the buckets in the pool.
template <typename Value, typename Index>
__global__ void __launch_bounds__(128)
copy_buckets(const i64 rows, const i64* __restrict__ table, const u32* __restrict__ lengths,
             const i64* __restrict__ places, const i64* __restrict__ starts, const i64* __restrict__ indptr,
             const Index* __restrict__ pool_indices, const Value* __restrict__ pool_data,
             Index* __restrict__ indices, Value* __restrict__ data) {
    const i64 bucket = blockIdx.x, from = places[bucket];
    if (from < 0) return;
    const i64 r = find(table + BUCKETS * (rows + 1) + 1, 0, rows - 1, bucket);
    const i64 to = indptr[table[r]] + starts[bucket];
    for (u32 i = threadIdx.x; i < lengths[bucket]; i += 128) {
        indices[to + i] = pool_indices[from + i];
        data[to + i] = pool_data[from + i];
    }
}
