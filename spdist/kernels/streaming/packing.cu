// packing.cu: pack C for the download: columns as differences of few bits, values as indices into a dictionary.
//
// Groups of differences in as many bits as the largest needs: D. Lemire, L. Boytsov, "Decoding billions of integers per
// second through vectorization", Software: Practice and Experience 45(1), 2015.
// Rows and entries cut into equal shares: D. Merrill, M. Garland, "Merge-Based Parallel Sparse Matrix-Vector
// Multiplication", SC 2016.
//
// Items   Each row has a mark, then its entries: the mark of row r is item indptr[r] + r, entry e of row r is item e + r + 1.
//         A unit has an equal number of items, at most 4096. If there is a mark among them, the unit starts at the first
//         mark, so only longer rows are cut. The part of a row in a unit is a piece. One warp packs a unit, and units
//         are unpacked independently.
// Columns Each piece has a head of one byte: bits 0 to 3 count the bytes of the difference, bits 4 and 5 the bytes of the
//         length, then come SAME and CONTINUES. Without SAME, the length of the piece follows, in 0 to 2 bytes. Then
//         follows the difference, signed, in 0 to 8 bytes: the piece's first column less the first column of the last
//         piece that has entries (0 at the start of the unit). Without SAME, groups of 32 columns follow, the last group
//         shorter: a byte with the width in bits, then each column less the previous column less 1, lowest bits first.
//         Each group starts at a byte. Widths above 56 are 64, so that 8 bytes from the first byte hold any difference.
// Values  Each piece with entries has a byte. 0: the values are those of the previous piece. 1 to 9: the values are indices
//         into the dictionary, of one bit less than this number. Else the values themselves, of this many bits. Values
//         are words of 4 or 8 bytes, one or two for each value.
#include "common.cuh"

constexpr int SAME = SPDIST_PACKED_SAME;            // the piece has the pattern of the previous piece, shifted
constexpr int CONTINUES = SPDIST_PACKED_CONTINUES;  // the piece starts inside its row
constexpr int AT_ONCE = 4;          // groups that are loaded at the same time
constexpr int WORDS = SPDIST_PACKED_WORDS;          // most words of the dictionary
constexpr int SLOTS = 1024;         // of its hash table, each number + 1, or 0 if free
constexpr int SAMPLE = SPDIST_PACKED_SAMPLE;        // words that are sampled

typedef unsigned char u8;
enum Number { SPDIST_PACKED_COUNT };  // bytes of the stream, bytes of its columns, words of the dictionary
enum Place { SPDIST_PACKED_PLACE, PLACES };  // of a unit: first mark and entry, and the places of its bytes

struct Unit { i64 row, entry, last_row, last_entry; };

// The first mark at or after item `item`; found by a warp.
template <typename Pointer>
__device__ __forceinline__ i64 row_from(const i64 item, const i64 nrows, const Pointer* __restrict__ indptr) {
    i64 low = 0, high = nrows;
    while (low < high) {
        const i64 step = (high - low + 31) / 32, row = low + step * (threadIdx.x % 32);
        const int before = __popc(__ballot_sync(FULL_WARP, row < high && indptr[row] + row < item));
        if (before == 0) break;
        high = min(high, low + step * before);
        low += step * (before - 1) + 1;
    }
    return low;
}

// Where unit `number` starts.
template <typename Pointer>
__device__ __forceinline__ void unit_start(const i64 number, const int unit_items, const i64 nrows,
                                           const Pointer* __restrict__ indptr, i64& row, i64& entry) {
    const i64 item = number * unit_items;
    row = row_from(item, nrows, indptr);
    entry = indptr[row];
    if (entry + row >= item + unit_items) entry = item - row;  // inside of a long row
}

template <typename Pointer>
__device__ __forceinline__ Unit find_unit(const i64 number, const i64 units, const int unit_items, const i64 nrows,
                                          const Pointer* __restrict__ indptr) {
    Unit unit;
    unit_start(number, unit_items, nrows, indptr, unit.row, unit.entry);
    if (number + 1 < units) unit_start(number + 1, unit_items, nrows, indptr, unit.last_row, unit.last_entry);
    else unit.last_row = nrows, unit.last_entry = indptr[nrows];
    return unit;
}

// Call visit(begin, end, continues) for each piece of a unit, in order, by a whole warp; entries count from the unit's first.
template <typename Pointer, typename Visit>
__device__ __forceinline__ void for_each_piece(const Unit unit, const Pointer* __restrict__ indptr, Visit visit) {
    const bool continues = unit.entry < indptr[unit.row];
    const i64 first_row = unit.row - continues;
    const int rows = (int)(max(unit.last_row, unit.row) - first_row), size = (int)(unit.last_entry - unit.entry);
    const int lane = threadIdx.x % 32;
    int begin = 0, ends = 0;
    for (int row = 0; row < rows; ++row) {
        if (row % 32 == 0) ends = (int)min((i64)size, indptr[first_row + min(row + lane, rows - 1) + 1] - unit.entry);
        const int end = take(ends, row % 32, 32);
        visit(begin, end, continues && row == 0);
        begin = end;
    }
}

// Whether words[first, last) equal the words `back` places before, plus `shift`.
template <typename Word>
__device__ __forceinline__ bool repeats(const Word* __restrict__ words, const int first, const int last, const int back,
                                        const Word shift) {
    for (int start = first; start < last; start += 32 * AT_ONCE) {
        bool same = true;
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int at = start + 32 * k + threadIdx.x % 32;
            if (at < last) same &= words[at] == words[at - back] + shift;
        }
        if (!__all_sync(FULL_WARP, same)) return false;
    }
    return true;
}

__device__ __forceinline__ u32 any_bits(const u32 word) { return __reduce_or_sync(FULL_WARP, word); }

__device__ __forceinline__ u64 any_bits(const u64 word) {
    return (u64)any_bits((u32)(word >> 32)) << 32 | any_bits((u32)word);
}

__device__ __forceinline__ int bit_length(const u32 word) { return 32 - __clz(word); }

__device__ __forceinline__ int bit_length(const u64 word) {
    const int bits = 64 - __clzll(word);
    return bits > 56 ? 64 : bits;
}

__device__ __forceinline__ int signed_bytes(const i64 number) {
    return number == 0 ? 0 : (72 - __clzll(number ^ (number >> 63))) / 8;
}

// Write `count` words, one of each lane, in `width` bits each; return the bytes. Each lane puts bytes together.
template <bool WRITE, typename Word>
__device__ __forceinline__ u32 put_bits(const Word word, const int count, const int width, u8* __restrict__ out) {
    const u32 bytes = (count * width + 7) / 8;
    if (!WRITE || bytes == 0) return bytes;
    const int lane = threadIdx.x % 32, meet = width < 8 ? 7 / width + 2 : 2;
    for (u32 first = 0; first < bytes; first += 32) {
        const u32 bit = 8 * (first + lane), source = bit / width;
        int shift = (int)(source * width) - (int)bit;
        u32 byte = 0;
        for (int k = 0; k < meet; ++k, shift += width) {
            const Word other = take(word, (source + k) % 32, 32);
            if (source + k < count && shift < 8) byte |= (u32)(shift < 0 ? other >> -shift : other << shift);
        }
        if (first + lane < bytes) out[first + lane] = (u8)byte;
    }
    return bytes;
}

// Write the columns of a unit; return their bytes.
template <bool WRITE, typename Index, typename Pointer>
__device__ u32 put_columns(const Unit unit, const Pointer* __restrict__ indptr, const Index* indices,
                           u8* __restrict__ out) {
    using Gap = typename Unsigned<sizeof(Index)>::Type;
    const int lane = threadIdx.x % 32;
    u32 at = 0;
    i64 base = 0;
    int before = 0;
    indices += unit.entry;
    for_each_piece(unit, indptr, [&](const int begin, const int end, const bool continues) {
        const int size = end - begin;
        const i64 column = size ? indices[begin] : base;
        const bool same = size && size == before && repeats<Index>(indices, begin, end, size, column - base);
        const int length_bytes = same ? 0 : (size > 0) + (size > 255), column_bytes = signed_bytes(column - base);
        if (WRITE) {
            u64 byte = column_bytes | length_bytes << 4 | (same ? SAME : 0) | (continues ? CONTINUES : 0);
            if (lane > length_bytes) byte = (column - base) >> 8 * (lane - 1 - length_bytes) % 64;
            else if (lane > 0) byte = (u32)size >> 8 * (lane - 1);
            if (lane <= length_bytes + column_bytes) out[at + lane] = (u8)byte;
        }
        at += 1 + length_bytes + column_bytes;
        base = column, before = size;
        for (int first = begin + 1; first < end && !same; first += 32 * AT_ONCE) {
            Gap gap[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                const int p = first + 32 * k + lane;
                gap[k] = p < end ? (Gap)(indices[p] - indices[p - 1] - 1) : 0;
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                const int left = end - first - 32 * k;
                if (left <= 0) break;
                const int width = bit_length(any_bits(gap[k]));
                if (WRITE && lane == 0) out[at] = (u8)width;
                at += 1 + put_bits<WRITE>(gap[k], min(left, 32), width, out + at + 1);
            }
        }
    });
    return at;
}

// Take `bytes` of the stream, by a warp; they may lie beyond its end.
__device__ __forceinline__ u64 take_bytes(const u32 bytes, u64* __restrict__ head) {
    u64 at = 0;
    if (threadIdx.x % 32 == 0) at = atomicAdd(&head[USED], (u64)bytes);
    return take(at, 0, 32);
}

// Pack the columns and lengths of rows.
//
// Launch  block 256, grid ceil_div(units, 8): a warp a unit.
// Pre     head zero; rows sorted, free of duplicates; directory[(units + 1) * PLACES].
// Post    head[USED] bytes of the stream are taken; they are all written if they are no more than `capacity`, and nothing is
//         beyond it. directory: start and place of each unit; after the last one, nrows and nnz. Which unit comes first in
//         the stream differs from run to run.
template <typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
pack_columns(const i64 units, const int unit_items, const i64 nrows, const u64 capacity, const Pointer* __restrict__ indptr,
             const Index* __restrict__ indices, u64* __restrict__ head, i64* __restrict__ directory, u8* __restrict__ stream) {
    const i64 number = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (number >= units) return;
    const Unit unit = find_unit(number, units, unit_items, nrows, indptr);
    const u32 bytes = put_columns<false>(unit, indptr, indices, stream);
    const u64 at = take_bytes(bytes, head);
    if (threadIdx.x % 32 == 0) {
        i64* entry = directory + number * PLACES;
        entry[ROW] = unit.row, entry[ENTRY] = unit.entry, entry[COLUMNS_AT] = at;
        if (number == units - 1) entry[PLACES + ROW] = unit.last_row, entry[PLACES + ENTRY] = unit.last_entry;
    }
    if (at + bytes <= capacity) put_columns<true>(unit, indptr, indices, stream + at);
}

__device__ __forceinline__ u32 slot_of(const u64 word) { return (u32)((word * 0x9e3779b97f4a7c15ull) >> 54); }

// The number of a word in the dictionary, or WORDS if it is not there.
template <typename Word>
__device__ __forceinline__ u32 find_word(const Word word, const Word* dictionary, const u32* slots) {
    for (u32 slot = slot_of(word);; slot = (slot + 1) % SLOTS) {
        const u32 number = slots[slot];
        if (number == 0) return WORDS;
        if (dictionary[number - 1] == word) return number - 1;
    }
}

// Make a dictionary of the words of a sample, in the order of the sample.
//
// Launch  block SAMPLE, grid 1; after pack_columns.
// Shared  the sample, the hash table.
// Post    head[COLUMNS] = head[USED]; head[DISTINCT] is how many words the sample has, 0 if more than WORDS; if not 0, the
//         dictionary has them and `table` is its hash table.
template <typename Word>
__global__ void __launch_bounds__(SAMPLE)
sample_values(const i64 count, const Word* __restrict__ words, u64* __restrict__ head, Word* __restrict__ dictionary,
              u32* __restrict__ table) {
    __shared__ Word sample[SAMPLE];
    __shared__ u32 slots[SLOTS], firsts[SAMPLE / 32];
    const int thread = threadIdx.x, size = (int)min(count, (i64)SAMPLE);
    if (thread < size) {
        const i64 share = count / SAMPLE;  // from anywhere within a thread's share: rows may be as long as shares
        sample[thread] = words[share ? thread * share + (thread * 2654435761ull >> 7) % share : thread];
    }
    slots[thread] = 0;
    __syncthreads();
    bool first = thread < size;
    for (int j = 0; j < thread && first; ++j) first = sample[j] != sample[thread];
    const u32 found = __ballot_sync(FULL_WARP, first);
    if (thread % 32 == 0) firsts[thread / 32] = __popc(found);
    __syncthreads();
    u32 number = __popc(found & ((1u << thread % 32) - 1)), total = 0;
    for (int warp = 0; warp < SAMPLE / 32; ++warp) {
        if (warp < thread / 32) number += firsts[warp];
        total += firsts[warp];
    }
    if (first && total <= WORDS) {
        dictionary[number] = sample[thread];
        u32 slot = slot_of(sample[thread]);
        while (atomicCAS(&slots[slot], 0u, number + 1)) slot = (slot + 1) % SLOTS;
    }
    __syncthreads();
    table[thread] = slots[thread];
    if (thread == 0) head[COLUMNS] = head[USED], head[DISTINCT] = total <= WORDS ? total : 0;
}

// Write the values of a unit; return their bytes.
template <bool WRITE, typename Word, typename Pointer>
__device__ u32 put_values(const Unit unit, const int parts, const int width, const Pointer* __restrict__ indptr,
                          const Word* words, const Word* dictionary, const u32* slots, u8* __restrict__ out) {
    const int lane = threadIdx.x % 32;
    u32 at = 0;
    int before = 0;
    words += unit.entry * parts;
    for_each_piece(unit, indptr, [&](const int first_entry, const int last_entry, bool) {
        const int begin = first_entry * parts, end = last_entry * parts, size = end - begin;
        const bool same = size == before && repeats<Word>(words, begin, end, size, 0);
        before = size;
        if (size == 0) return;
        bool known = true;
        for (int first = begin; first < end && known && !same; first += 32) {
            const bool found = first + lane >= end || find_word(words[first + lane], dictionary, slots) < WORDS;
            known = __all_sync(FULL_WARP, found);
        }
        const int bits = known ? width : 8 * (int)sizeof(Word);
        if (WRITE && lane == 0) out[at] = same ? 0 : known ? width + 1 : 8 * sizeof(Word);
        ++at;
        if (same) return;
        for (int first = begin; first < end; first += 32) {
            Word word = first + lane < end ? words[first + lane] : 0;
            if (WRITE && known && first + lane < end) word = find_word(word, dictionary, slots);
            at += put_bits<WRITE>(word, min(end - first, 32), bits, out + at);
        }
    });
    return at;
}

// Pack the values, if they repeat.
//
// Launch  block 256, grid ceil_div(units, 8): a warp a unit; after sample_values.
// Shared  the dictionary and its hash table.
// Pre     words[nnz * parts]: the values, each one word or two.
// Post    if head[DISTINCT] is not 0: head[USED] bytes of the stream are taken, and all written if they are no more than
//         `capacity`; directory[.., VALUES_AT] has the place of each unit's values. Else nothing is written.
template <typename Word, typename Pointer>
__global__ void __launch_bounds__(256)
pack_values(const i64 units, const int unit_items, const i64 nrows, const u64 capacity, const int parts,
            const Pointer* __restrict__ indptr, const Word* __restrict__ words, const Word* __restrict__ dictionary,
            const u32* __restrict__ table, u64* __restrict__ head, i64* __restrict__ directory, u8* __restrict__ stream) {
    __shared__ Word known[WORDS];
    __shared__ u32 slots[SLOTS];
    const u32 distinct = (u32)head[DISTINCT];
    if (distinct == 0) return;
    if (threadIdx.x < distinct) known[threadIdx.x] = dictionary[threadIdx.x];
    for (int slot = threadIdx.x; slot < SLOTS; slot += 256) slots[slot] = table[slot];
    __syncthreads();
    const i64 number = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (number >= units) return;
    const Unit unit = find_unit(number, units, unit_items, nrows, indptr);
    const int width = bit_length(distinct - 1);
    const u32 bytes = put_values<false>(unit, parts, width, indptr, words, known, slots, stream);
    const u64 at = take_bytes(bytes, head);
    if (threadIdx.x % 32 == 0) directory[number * PLACES + VALUES_AT] = at;
    if (at + bytes <= capacity) put_values<true>(unit, parts, width, indptr, words, known, slots, stream + at);
}
