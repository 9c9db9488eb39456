// build.cu: convert a matrix to SELL-C-sigma (`sell.cuh` has the format): survey and sort rows, cut chunks, fill them.
#include "sort.cuh"
#include "spmv/sell/sell.cuh"

enum Allowed { MAY_BE_NARROW = 1, MAY_BE_DIAGONAL = 2, MAY_BE_WIDE = 4 };
constexpr int NO_DIAGONAL = SPDIST_SELL_NO_DIAGONAL, DIAGONALS = SPDIST_SELL_DIAGONALS, MOST_FULL = SPDIST_SELL_MOST_FULL;
constexpr int LONG = SPDIST_SELL_LONG, WINDOW = SPDIST_SELL_WINDOW;  // entries above which a row stays in CSR; rows sorted together
constexpr u32 NARROW_PADDING = SPDIST_SELL_NARROW_PADDING;

// 32-bit numbers of a chunk's diagonals, padded so that four can be read at a time.
__device__ __forceinline__ i64 diagonal_room(const int width) { return 2 * round_up(width, DIAGONALS); }

// The row that a lane serves.
template <typename Pointer>
struct Served {
    bool valid;
    i64 position, row;
    Pointer begin, end;

    __device__ Served(const Chunk& c, const int lane, const int* __restrict__ rows, const Pointer* __restrict__ indptr) {
        const int r = lane >> c.log_threads();
        valid = r < c.rows();
        position = c.first + r;
        row = valid ? (rows ? rows[position] : position) : 0;
        begin = valid ? indptr[row] : 0;
        end = valid ? indptr[row + 1] : 0;
    }
};

// The least diagonal among the next entries of all lanes; NO_DIAGONAL once all rows have ended.
template <typename Index>
__device__ __forceinline__ int next_diagonal(const bool more, const Index* __restrict__ at, const i64 position, int& mine) {
    mine = more ? (int)(*at - position) : NO_DIAGONAL;
    return __reduce_min_sync(FULL_WARP, mine);
}

// Whether a row is one of BLOCK equal ones made of aligned runs of BLOCK columns.
template <int BLOCK, typename Index, typename Pointer>
__device__ __forceinline__ bool is_blocked(const i64 row, const i64 nrows, const Pointer* __restrict__ indptr,
                                           const Index* __restrict__ indices) {
    const i64 leader = row - row % BLOCK;
    const Pointer begin = indptr[row], length = indptr[row + 1] - begin, lead = indptr[leader];
    if (leader + BLOCK > nrows || length % BLOCK != 0 || indptr[leader + 1] - lead != length) return false;
    for (Pointer k = 0; k < length; k += BLOCK) {
        const Index column = indices[lead + k];
        if (column % BLOCK != 0) return false;
        for (int e = 0; e < BLOCK; ++e)
            if (indices[begin + k + e] != column + e) return false;
    }
    return true;
}

// Lowest block column of a slot, NO_DIAGONAL where all rows have ended, and the highest.
template <typename Index>
__device__ __forceinline__ int slot_span(const bool more, const Index* __restrict__ at, const int unit, int& high) {
    const int column = more ? (int)(*at / unit) : NO_DIAGONAL;
    high = __reduce_max_sync(FULL_WARP, more ? column : -1);
    return __reduce_min_sync(FULL_WARP, column);
}

// Whether the columns of each slot lie within 16 bits.
template <typename Index, typename Pointer>
__device__ __forceinline__ bool spans_fit(const int width, const int unit, const int threads, const Served<Pointer>& s,
                                          const Index* __restrict__ indices) {
    Pointer k = s.begin + threadIdx.x % threads * unit;
    for (int slot = 0, high; slot < width; ++slot, k += threads * unit) {
        const int low = slot_span(k < s.end, indices + k, unit, high);
        if (high - low >= (int)NARROW_PADDING) return false;
    }
    return true;
}

constexpr int PROBED = 512;  // entries of the longest row that one thread looks through

// Count a row where it is blocked, for each side of blocks; a longer one than PROBED is not.
template <typename Index, typename Pointer>
__device__ __forceinline__ void probe(const i64 row, const i64 nrows, const Pointer* __restrict__ indptr,
                                      const Index* __restrict__ indices, i64* found) {
    const Pointer length = indptr[row + 1] - indptr[row];
    if (length == 0 || length > PROBED) return;
    if (is_blocked<2>(row, nrows, indptr, indices)) atomic_add(found, (i64)1);
    if (is_blocked<3>(row, nrows, indptr, indices)) atomic_add(found + 1, (i64)1);
    if (is_blocked<4>(row, nrows, indptr, indices)) atomic_add(found + 2, (i64)1);
    if (is_blocked<6>(row, nrows, indptr, indices)) atomic_add(found + 3, (i64)1);
}

// The greatest among `height` neighbouring lanes.
__device__ __forceinline__ int widest(int length, const int height) {
    for (int step = 1; step < height; step *= 2) length = max(length, __shfl_xor_sync(FULL_WARP, length, step));
    return length;
}

// Count the rows of each length, and in a sample which rows are blocked.
//
// Launch  block 256: ceil_div(samples, 256) thread blocks for the sample, whose i-th row is i * stride, then any number.
// Shared  a count for each length.
// Pre     found zero; height a power of two, up to 32.
// Post    found: rows of each length up to LONG; rows of more; slots of chunks of `height` rows as they are, if no row is
//         of more; blocked rows, for blocks of 2, 3, 4, 6.
template <typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
sell_survey(const i64 samples, const i64 stride, const i64 nrows, const int height, const Pointer* __restrict__ indptr,
            const Index* __restrict__ indices, i64* __restrict__ found) {
    __shared__ int counts[LONG + 2];
    __shared__ i64 sums[WARPS];
    const int probes = (int)((samples + 255) / 256);
    if (blockIdx.x < probes) {
        const i64 sample = (i64)blockIdx.x * 256 + threadIdx.x;
        if (sample < samples) probe(sample * stride, nrows, indptr, indices, found + LONG + 3);
        return;
    }
    for (int l = threadIdx.x; l < LONG + 2; l += 256) counts[l] = 0;
    __syncthreads();
    i64 slots = 0;
    for (i64 first = (i64)(blockIdx.x - probes) * 256; first < nrows; first += (i64)(gridDim.x - probes) * 256) {
        const i64 row = first + threadIdx.x;
        const i64 entries = row < nrows ? indptr[row + 1] - indptr[row] : 0;
        const int length = (int)max((i64)0, min(entries, (i64)(LONG + 1)));
        if (row < nrows) atomicAdd(&counts[length], 1);
        const int width = widest(length, height);
        if (threadIdx.x % height == 0) slots += width;
    }
    slots = block_sum<WARPS>(slots, sums);  // all have counted
    for (int l = threadIdx.x; l < LONG + 2; l += 256)
        if (counts[l] > 0) atomic_add(found + l, (i64)counts[l]);
    if (threadIdx.x == 0) atomic_add(found + LONG + 2, slots);
}

// Sum over the threads before this one, of this thread block and of those that took a tile before; `state` is zero at first:
// the next tile, and `tiles` as `sum_before` has them. `tile` is this thread block's.
__device__ __forceinline__ u64 scan(const u64 mine, const i64 tile, u64* state) {
    __shared__ u64 sums[32], base;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u64 through = inclusive_sum<32>(mine, lane);
    if (lane == 31) sums[warp] = through;
    __syncthreads();
    if (warp == 0) {
        const u64 sum = lane < blockDim.x / 32 ? sums[lane] : 0, upto = inclusive_sum<32>(sum, lane);
        const u64 before = sum_before(state + 1, tile, take(upto, 31, 32));
        sums[lane] = upto - sum;
        if (lane == 0) base = before;
    }
    __syncthreads();
    return base + sums[warp] + through - mine;
}

__device__ __forceinline__ i64 take_tile(u64* state) {
    __shared__ i64 tile;
    if (threadIdx.x == 0) tile = (i64)atomicAdd(state, (u64)1);
    __syncthreads();
    return tile;
}

// Divide the rows: rows of up to `limit` entries, tall rows of more, and long rows of more than `most`, which stay in CSR.
//
// Launch  block 1024, a thread a row.
// Shared  a sum for each warp.
// Pre     state zero: a word, and one for each thread block; nrest and nlong: numbers of the first rows and of long rows.
// Post    rows: rows of up to `limit` entries, then tall rows; long_rows; bounds: the start of each long row, then its
//         number of entries; all in ascending order.
template <typename Pointer>
__global__ void __launch_bounds__(1024)
sell_part(const i64 nrows, const int limit, const int most, const i64 nrest, const i64 nlong,
          const Pointer* __restrict__ indptr, u64* state, int* __restrict__ rows, int* __restrict__ long_rows, i64* __restrict__ bounds) {
    constexpr int HALF = 31;  // two sums in a word: rows of up to `limit` entries, and tall rows
    const i64 tile = take_tile(state), row = tile * 1024 + threadIdx.x;
    const bool valid = row < nrows;
    const i64 begin = valid ? indptr[row] : 0, length = valid ? indptr[row + 1] - begin : 0;
    const u64 before = scan(!valid || length > most ? 0 : length > limit ? 1ull << HALF : 1, tile, state);
    if (!valid) return;
    const i64 rest = before & ((1ull << HALF) - 1), tall = before >> HALF, i = row - rest - tall;
    if (length > most) long_rows[i] = (int)row, bounds[i] = begin, bounds[nlong + i] = length;
    else rows[length > limit ? nrest + tall : rest] = (int)row;
}

// Sort rows by length in windows, longest first; rows of equal length keep their order.
//
// Launch  block 256, a window each.
// Shared  a key for each row of the window.
// Pre     rows of up to LONG entries, null where positions are rows; height a power of two, up to 32.
// Post    ordered: the row at each position; slots[0] += widths of chunks of `height` rows before sorting, slots[1] after.
template <typename Pointer>
__global__ void __launch_bounds__(256)
sell_sort(const i64 nrows, const int height, const Pointer* __restrict__ indptr, const int* __restrict__ rows,
          int* __restrict__ ordered, i64* __restrict__ slots) {
    constexpr int ITEMS = WINDOW / 256;
    __shared__ __align__(16) u32 room[WINDOW];
    __shared__ i64 sums[WARPS];
    const i64 start = (i64)blockIdx.x * WINDOW;
    u32 keys[ITEMS];
    i64 before = 0, after = 0;
    for (int i = 0; i < ITEMS; ++i) {
        const int number = i * 256 + threadIdx.x;
        const bool valid = start + number < nrows;
        const i64 row = !valid ? 0 : rows ? rows[start + number] : start + number;
        const int length = valid ? (int)(indptr[row + 1] - indptr[row]) : 0, width = widest(length, height);
        keys[i] = valid ? (u32)(LONG - length) * WINDOW + number : ~0u;
        if (number % height == 0) before += width;
    }
    sort_group<256, ITEMS>(keys, threadIdx.x, room);
    for (int i = 0; i < ITEMS; ++i) room[threadIdx.x * ITEMS + i] = keys[i];
    __syncthreads();
    for (int number = threadIdx.x; number < WINDOW && start + number < nrows; number += 256) {
        const i64 from = start + room[number] % WINDOW;
        ordered[start + number] = rows ? rows[from] : (int)from;
        if (number % height == 0) after += LONG - room[number] / WINDOW;
    }
    before = block_sum<WARPS>(before, sums);
    after = block_sum<WARPS>(after, sums);
    if (threadIdx.x == 0) atomic_add(slots, before), atomic_add(slots + 1, after);
}

// What rows are sorted by, longest first: LONG less their entries.
//
// Launch  block 256, a thread a row.
// Pre     rows of up to LONG entries, null where positions are rows.
template <typename Pointer>
__global__ void __launch_bounds__(256)
sell_keys(const i64 nrows, const Pointer* __restrict__ indptr, const int* __restrict__ rows, u16* __restrict__ keys) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= nrows) return;
    const i64 row = rows ? rows[i] : i;
    keys[i] = (u16)(LONG - (int)(indptr[row + 1] - indptr[row]));
}

// Cut positions [first, first + count) into chunks of `height` rows.
//
// Launch  block 256, a thread a chunk.
// Pre     height divides 32.
// Post    first, threads and rows of each chunk set, the rest zero.
__global__ void __launch_bounds__(256)
sell_cut(const int first, const int count, const int height, Chunk* __restrict__ chunks) {
    const i64 at = (i64)blockIdx.x * 256 + threadIdx.x, start = at * height;
    if (start >= count) return;
    Chunk c = {0, 0, (int)(first + start), 0, 0, (__ffs(32 / height) - 1) << 4 | (int)min((i64)height, count - start) << 8};
    chunks[at] = c;
}

// Copy the rows that stay in CSR.
//
// Launch  block 256, a piece each.
// Pre     pieces, row_pieces and long_indptr of `nlong` rows; starts: where each of these starts in the matrix.
template <typename Value, typename Stored, typename Index>
__global__ void __launch_bounds__(256)
sell_copy(const int nlong, const i64* __restrict__ pieces, const int* __restrict__ row_pieces, const i64* __restrict__ long_indptr,
          const i64* __restrict__ starts, const Index* __restrict__ indices, const Value* __restrict__ data,
          int* __restrict__ long_indices, Stored* __restrict__ long_data) {
    const i64 piece = blockIdx.x;
    int row = 0;
    for (int end = nlong; end - row > 1;) {  // row_pieces[row] <= piece < row_pieces[end]
        const int middle = (row + end) / 2;
        if (row_pieces[middle] <= piece) row = middle;
        else end = middle;
    }
    const i64 shift = starts[row] - long_indptr[row];
    for (i64 at = pieces[piece] + threadIdx.x; at < pieces[piece + 1]; at += 256) {
        long_indices[at] = (int)indices[shift + at];
        long_data[at] = Stored(data[shift + at]);
    }
}

// The diagonals that a chunk's rows meet, from the least on: how many, and the hash of their list.
template <typename Index, typename Pointer>
struct Diagonals {
    Pointer k;
    int count = 0;
    u64 hash = 0;

    __device__ Diagonals(const Served<Pointer>& s) : k(s.begin) {}

    // Go on until all rows have ended, or there are more than `most`; whether they have.
    __device__ bool end_within(const int most, const Served<Pointer>& s, const Index* __restrict__ indices) {
        for (int mine; count <= most; ++count) {
            const int diagonal = next_diagonal(k < s.end, indices + k, s.position, mine);
            if (diagonal == NO_DIAGONAL) return true;
            hash = (hash ^ ((u64)__ballot_sync(FULL_WARP, mine == diagonal) << 32 | (u32)diagonal)) * 0x9e3779b97f4a7c15ull;
            hash ^= hash >> 32;
            k += mine == diagonal;
        }
        return false;
    }
};

// Find each chunk's width and the kind that takes fewest bytes.
//
// Launch  block 256, a warp a chunk.
// Pre     first and code (threads and rows) of each chunk set; rows null where positions are rows; nplaces a power of two,
//         found zero for each place.
// Post    width and kind set; sizes[k * nchunks + chunk]: elements of `values`, `wide` and `narrow`, k = 0, 1, 2; for k = 3
//         the hash of its list of diagonals, -1 if it has none. found: at the place of each hash nchunks less the first of
//         the chunks that have it there.
template <typename Index, typename Pointer, int BLOCK>
__global__ void __launch_bounds__(256)
sell_analyse(const i64 nchunks, const i64 nrows, const int value_bytes, const int allowed, const i64 nplaces,
             const Pointer* __restrict__ indptr, const Index* __restrict__ indices, const int* __restrict__ rows,
             Chunk* __restrict__ chunks, i64* __restrict__ sizes, int* __restrict__ found) {
    const i64 at = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (at >= nchunks) return;
    Chunk c = chunks[at];
    const Served<Pointer> s(c, lane, rows, indptr);
    const int threads = 1 << c.log_threads();
    c.width = __reduce_max_sync(FULL_WARP, (int)((s.end - s.begin + threads - 1) / threads));
    int unit = 1;
    if (BLOCK > 1 && threads == 1) {
        const bool blocked = !s.valid || (s.position % BLOCK == s.row % BLOCK && is_blocked<BLOCK>(s.row, nrows, indptr, indices));
        if (__all_sync(FULL_WARP, blocked)) unit = BLOCK, c.width /= BLOCK;
    }
    // as many diagonals as cost no more bytes than the slots otherwise would
    const bool may_be_diagonal = (allowed & MAY_BE_DIAGONAL) && unit == 1 && threads == 1;
    const auto most = [&](const int index_bytes) { return c.width * 32 * (value_bytes + index_bytes) / (32 * value_bytes + 8); };
    Diagonals<Index, Pointer> d(s);
    bool near = false, diagonal = may_be_diagonal && d.end_within(most(2), s, indices);
    if (!diagonal) {
        near = (allowed & MAY_BE_NARROW) && spans_fit(c.width, unit, threads, s, indices);
        diagonal = may_be_diagonal && !near && d.end_within(most(4), s, indices);
    }
    if (diagonal) c.width = d.count;
    const int kind = diagonal ? DIAGONAL : unit > 1 ? (near ? BLOCK_NARROW : BLOCK_WIDE) : (near ? NARROW : WIDE);
    const int least = __reduce_min_sync(FULL_WARP, (int)(s.end - s.begin) / (threads * unit));
    c.code = kind | (c.code & 0xfff0) | min(least, MOST_FULL) << 16;
    if (lane == 0) {
        chunks[at] = c;
        const i64 places = c.width * (i64)(unit > 1 ? block_rows<BLOCK>() : 32);
        const bool narrow = kind == NARROW || kind == BLOCK_NARROW;
        sizes[at] = (i64)c.width * 32 * unit;
        sizes[nchunks + at] = kind == DIAGONAL ? diagonal_room(c.width) : narrow ? 0 : round_up(places, 4);
        sizes[2 * nchunks + at] = narrow ? base_room(c.width) + round_up(places, 2 * BASES) : 0;
        const i64 hash = diagonal ? (i64)(d.hash >> 1) : -1;
        sizes[3 * nchunks + at] = hash;
        if (diagonal) atomicMax(found + (hash & (nplaces - 1)), (int)(nchunks - at));
    }
}

// Compute the start of each chunk's arrays, and find chunks whose lists of diagonals have equal hashes.
//
// Launch  block 256, grid (ceil_div(nchunks, 256), 4): a row of starts each.
// Shared  a sum for each warp.
// Pre     sizes and found as sell_analyse leaves them; states zero: for each row a word, and one for each tile; totals zero.
// Post    owners: the first chunk with the list of each, itself where it has none, or where another list's hash took its
//         place. starts: sums of the sizes of the chunks before, of `values`, `wide` and `narrow`, and of `wide` where lists
//         are shared; totals: of all chunks, then how many have lists.
__global__ void __launch_bounds__(256)
sell_starts(const i64 nchunks, const i64 nplaces, const i64* __restrict__ sizes, const int* __restrict__ found,
            u64* states, int* __restrict__ owners, i64* __restrict__ starts, i64* __restrict__ totals) {
    __shared__ i64 sums[WARPS];
    const int k = blockIdx.y;
    u64* state = states + k * (i64)(gridDim.x + 1);
    const i64 tile = take_tile(state), at = tile * 256 + threadIdx.x;
    const bool valid = at < nchunks;
    i64 size = valid ? sizes[(k < 3 ? k : 1) * nchunks + at] : 0;
    if (k == 3) {
        const i64* hashes = sizes + 3 * nchunks;
        const i64 hash = valid ? hashes[at] : -1, first = hash < 0 ? at : nchunks - found[hash & (nplaces - 1)];
        const i64 owner = hash < 0 || hashes[first] != hash ? at : first;
        if (valid) owners[at] = (int)owner;
        if (owner != at) size = 0;
        const i64 listed = block_sum<WARPS>((i64)(hash >= 0), sums);
        if (threadIdx.x == 0) atomic_add(totals + 4, listed);
    }
    const i64 start = (i64)scan((u64)size, tile, state);
    if (!valid) return;
    starts[k * nchunks + at] = start;
    if (at == nchunks - 1) totals[k] = start + size;
}

// A list that is `shared` has been written; whether it is this chunk's too.
template <typename Value, typename Stored, typename Index, typename Pointer>
__device__ __forceinline__ bool fill_diagonals(const Chunk& c, const Served<Pointer>& s, const Index* __restrict__ indices,
                                               const Value* __restrict__ data, Stored* values, int* wide,
                                               const bool shared) {
    const int lane = threadIdx.x % 32;
    int2* list = (int2*)(wide + c.index);
    bool same = true;
    Pointer k = s.begin;
    for (int slot = 0, mine; slot < c.width; ++slot) {
        const int diagonal = next_diagonal(k < s.end, indices + k, s.position, mine);
        const bool has = mine == diagonal && k < s.end;
        const u32 mask = __ballot_sync(FULL_WARP, has);
        values[c.values + (i64)slot * 32 + lane] = has ? Stored(data[k]) : Stored(0);
        if (shared) same &= list[slot].x == diagonal && list[slot].y == (int)mask;
        else if (lane == 0) list[slot] = make_int2(diagonal, (int)mask);
        k += has;
    }
    if (!shared && lane < diagonal_room(c.width) / 2 - c.width) list[c.width + lane] = make_int2(0, 0);
    return same;
}

template <int BLOCK, typename Value, typename Stored, typename Index, typename Pointer, typename Narrowed>
__device__ __forceinline__ void fill_entries(const Chunk& c, const Served<Pointer>& s, const Index* __restrict__ indices,
                                             const Value* __restrict__ data, Stored* values, Narrowed* index) {
    const int lane = threadIdx.x % 32, threads = 1 << c.log_threads();
    const int places = BLOCK == 1 ? 32 : block_rows<BLOCK>();
    const int place = BLOCK == 1 ? lane : (c.first % BLOCK + lane) / BLOCK;
    const bool writes = BLOCK == 1 || lane == 0 || (c.first + lane) % BLOCK == 0, narrow = sizeof(Narrowed) == 2;
    int* bases = (int*)(index + c.index);
    index += c.index + (narrow ? base_room(c.width) : 0);
    if (narrow && lane < base_room(c.width) / 2 - c.width) bases[c.width + lane] = 0;
    if (BLOCK > 1) {  // some places may be no block row's
        for (i64 i = lane; i < round_up((i64)c.width * places, narrow ? 2 * BASES : 4); i += 32) index[i] = 0;
        __syncwarp();
    }
    Pointer k = s.begin + (Pointer)(lane % threads) * BLOCK;
    for (int slot = 0, high; slot < c.width; ++slot, k += (Pointer)threads * BLOCK) {
        const bool more = k < s.end;
        const int base = narrow ? slot_span(more, indices + k, BLOCK, high) : 0;
        if (narrow && lane == 0) bases[slot] = base;
        if (writes) index[slot * places + place] = more ? (Narrowed)(indices[k] / BLOCK - base) : (Narrowed)PADDING;
        for (int e = 0; e < BLOCK; ++e)
            values[c.values + ((i64)slot * BLOCK + e) * 32 + lane] = more ? Stored(data[k + e]) : Stored(0);
    }
}

// Write values and indices of each chunk: of those that own their indices, in a second launch of the others (`shared`).
//
// Launch  block 256, a warp a chunk.
// Pre     chunks as sell_analyse leaves them; starts and owners as sell_starts does; owners null where all have their own.
// Post    places of the first slots in chunks; *differ set if a list differs from its owner's.
template <typename Value, typename Stored, typename Index, typename Pointer, int BLOCK>
__global__ void __launch_bounds__(256)
sell_fill(const i64 nchunks, const Pointer* __restrict__ indptr, const Index* __restrict__ indices,
          const Value* __restrict__ data, const int* __restrict__ rows, const i64* __restrict__ starts,
          const int* __restrict__ owners, const int shared, Chunk* __restrict__ chunks, Stored* __restrict__ values,
          int* __restrict__ wide, u16* __restrict__ narrow, i64* __restrict__ differ) {
    const i64 at = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (at >= nchunks) return;
    const i64 owner = owners ? owners[at] : at;
    if ((owner != at) != shared) return;
    Chunk c = chunks[at];
    const bool as_wide = !shared || chunks[owner].width == c.width;
    const int which = c.kind() == NARROW || c.kind() == BLOCK_NARROW ? 2 : owners ? 3 : 1;
    c.values = starts[at];
    c.index = starts[which * nchunks + owner];
    __syncwarp();
    if (threadIdx.x % 32 == 0) chunks[at] = c;
    const Served<Pointer> s(c, threadIdx.x % 32, rows, indptr);
    if (c.kind() == DIAGONAL) {
        const bool same = as_wide && fill_diagonals(c, s, indices, data, values, wide, shared);
        if (!same && threadIdx.x % 32 == 0) *differ = 1;
    } else if (c.kind() == WIDE) fill_entries<1>(c, s, indices, data, values, wide);
    else if (c.kind() == NARROW) fill_entries<1>(c, s, indices, data, values, narrow);
    else if (c.kind() == BLOCK_WIDE) fill_entries<BLOCK>(c, s, indices, data, values, wide);
    else fill_entries<BLOCK>(c, s, indices, data, values, narrow);
}
