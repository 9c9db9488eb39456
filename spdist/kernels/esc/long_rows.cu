// long_rows.cu: rows of C with more products than a tile. A tile is as many products as a thread block sorts in shared memory.
// Sorted tiles are written to device memory (`sort_tiles`) and merged by ranges of columns, the buckets (`split_columns`,
// `merge_buckets`).
//
// L. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication on GPU", HPC 2015, sorts segments by merging. Compressed
// buckets are stored in a pool, and copied to C once its size is known (`copy_buckets`). Buckets that do not fit are only
// counted, and computed a second time then.
//
// The table of long rows, [5][rows + 1], holds for each the row of C, and the entries of A, the products, the tiles and the
// buckets before it. `first` and `last` name the rows of a slice; tiles are numbered within the slice.
#include "esc/slots.cuh"

enum Field { SPDIST_LONG_ROW_FIELD };
constexpr int SAMPLES = SPDIST_SPLITTER_SAMPLES;  // columns that the boundaries of a row's buckets are chosen from

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
// Shared  SAMPLES columns.
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
    const i64 every = (count + SAMPLES - 1) / SAMPLES, sampled = (count + every - 1) / every;
    const u32 each = (u32)min((i64)128, SAMPLES / sampled), samples = (u32)sampled * each;
    Unsigned keys[SAMPLES / 512];
#pragma unroll
    for (int i = 0; i < SAMPLES / 512; ++i) {
        const u32 number = i * 512 + threadIdx.x;
        keys[i] = ~(Unsigned)0;
        if (number < samples) {
            const i64 tile = number / each * every;
            const u32 at = (u32)(((u64)(2 * (number % each) + 1) * tile_size<TILE>(products, tile)) / (2 * each));
            keys[i] = (Unsigned)tile_columns[(tiles[r] - tiles[first] + tile) * TILE + at];
        }
    }
    sort_group<512, SAMPLES / 512>(keys, threadIdx.x, columns);
    store_keys<SAMPLES / 512>(columns, keys, threadIdx.x);
    __syncthreads();
    const i64 bucket = table[BUCKETS * width + r], buckets = table[BUCKETS * width + r + 1] - bucket;
    for (i64 b = threadIdx.x; b < buckets; b += 512)
        splitters[bucket + b] = b == 0 ? (Index)0 : (Index)columns[place<SAMPLES / 512, Unsigned>((int)(b * samples / buckets))];
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
