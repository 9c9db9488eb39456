// hyspmm.cu: the GPU stages of hySpMM on one prepared pair of blocks: multiply, partial sort, compress.
//
// X. Wu, "Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform", thesis, Georgia State
// University, 2015, section 3. The products of a row of C are neighbours, because the CPU has put the rows of A in order,
// so only columns are sorted, one row at a time, with one sort for each group of rows:
//   sort_registers  up to 1024 products: a sorting network in the registers of 4 to 32 lanes;
//   sort_shared     more products in a narrow span of columns: a distribution sort, one bit a column in shared memory;
//   sort_global     the rest: a radix sort in device memory by a thread block.
// Each multiplies, sorts and compresses its rows; `gather_rows` then closes the gaps between them.
//
// A prepared block: entries of row r at [row_entries[r], row_entries[r + 1]), its products numbered from row_products[r].
// Entry t takes row a_rows[t] of the block of B, or row t if a_rows is null (B duplicated: products and entries of B have
// equal numbers, and the products overwrite B's columns and values). Row k of B starts at b_starts[k].
// The products of an entry of C are added in the order of A's entries to a zero, with one rounding each, so every variant
// and every cut into blocks gives equal bits.
#include "sort.cuh"

enum Group { SPDIST_SORT_GROUP, GROUPS };
enum Status { SPDIST_BLOCK_STATUS };  // the first is written by `offsets` of rows.cu
constexpr int NARROW_COLUMNS = SPDIST_SHARED_NARROW, WIDE_COLUMNS = SPDIST_SHARED_WIDE, REGISTERS = 512, ACCUMULATOR_BYTES = 4096;

__device__ __forceinline__ float times(const float x, const float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double times(const double x, const double y) { return __dmul_rn(x, y); }
__device__ __forceinline__ float plus(const float x, const float y) { return __fadd_rn(x, y); }
__device__ __forceinline__ double plus(const double x, const double y) { return __dadd_rn(x, y); }
template <typename T>
__device__ __forceinline__ Complex<T> times(const Complex<T> x, const Complex<T> y) {
    return Complex<T>(plus(times(x.re, y.re), -times(x.im, y.im)), plus(times(x.re, y.im), times(x.im, y.re)));
}
template <typename T>
__device__ __forceinline__ Complex<T> plus(const Complex<T> x, const Complex<T> y) {
    return Complex<T>(plus(x.re, y.re), plus(x.im, y.im));
}

template <typename Pointer>
__device__ __forceinline__ i64 row_of_b(const u32* __restrict__ a_rows, const Pointer entry) {
    return a_rows == nullptr ? (i64)entry : (i64)a_rows[entry];
}

// Check that the columns of each row of the block of B rise strictly and lie in [0, ncols).
//
// Launch  block 256, 8 lanes a row, grid ceil_div(nrows, 32).
// Post    status[NOT_CANONICAL] not 0 if a row fails the check.
template <typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
check_rows(const i64 nrows, const i64 ncols, const Pointer* __restrict__ b_starts, const Index* __restrict__ columns,
           i64* __restrict__ status) {
    const i64 row = (i64)blockIdx.x * 32 + threadIdx.x / 8;
    if (row >= nrows) return;
    const Pointer first = b_starts[row], end = b_starts[row + 1];
    bool bad = false;
    for (Pointer at = first + threadIdx.x % 8; at < end; at += 8) {
        const Index column = columns[at];
        bad |= column < 0 || column >= ncols || (at > first && columns[at - 1] >= column);
    }
    if (bad) status[NOT_CANONICAL] = 1;
}

// Put each row on the list of its group.
//
// Launch  block 256, a thread a row, grid ceil_div(nrows, 256); rows whose columns must be looked at, a warp each.
// Pre     counts[GROUPS] zero; lists[GROUPS * nrows].
// Post    lists[g * nrows ...] holds counts[g] rows in no particular order; lengths[row] = 0 if a row has no products.
template <typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
group_rows(const i64 nrows, const Pointer* __restrict__ row_entries, const Pointer* __restrict__ row_products,
           const u32* __restrict__ a_rows, const Pointer* __restrict__ b_starts, const Index* __restrict__ columns,
           u32* __restrict__ counts, u32* __restrict__ lists, u32* __restrict__ lengths) {
    __shared__ u32 histogram[GROUPS], bases[GROUPS];
    if (threadIdx.x < GROUPS) histogram[threadIdx.x] = 0;
    __syncthreads();
    const i64 row = (i64)blockIdx.x * 256 + threadIdx.x;
    const int lane = threadIdx.x % 32;
    const i64 products = row < nrows ? (i64)row_products[row + 1] - row_products[row] : 0;
    int group = -1;
    if (row < nrows && products == 0) lengths[row] = 0;
    if (products > 0)
        group = products <= 16 ? R16 : products <= 32 ? R32 : products <= 64 ? R64 : products <= 128 ? R128
              : products <= 256 ? R256 : products <= 384 ? R384 : products <= 512 ? R512 : R1024;
    for (u32 left = __ballot_sync(FULL_WARP, products > REGISTERS); left; left &= left - 1) {
        const int owner = __ffs(left) - 1;
        const i64 r = __shfl_sync(FULL_WARP, row, owner);
        i64 low = 0x7fffffffffffffffll, high = -1;
        for (Pointer at = row_entries[r] + lane; at < row_entries[r + 1]; at += 32) {
            const i64 k = row_of_b(a_rows, at);
            const Pointer first = b_starts[k], end = b_starts[k + 1];
            if (first == end) continue;
            low = min(low, (i64)columns[first]);
            high = max(high, (i64)columns[end - 1]);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            low = min(low, __shfl_xor_sync(FULL_WARP, low, step));
            high = max(high, __shfl_xor_sync(FULL_WARP, high, step));
        }
        if (lane == owner)
            group = high - low < NARROW_COLUMNS ? NARROW : high - low < WIDE_COLUMNS ? WIDE
                  : products <= 1024 ? R1024 : GLOBAL;
    }
    const u32 place = group < 0 ? 0 : atomicAdd(&histogram[group], 1u);
    __syncthreads();
    if (threadIdx.x < GROUPS && histogram[threadIdx.x] > 0)
        bases[threadIdx.x] = atomicAdd(&counts[threadIdx.x], histogram[threadIdx.x]);
    __syncthreads();
    if (group >= 0) lists[group * nrows + bases[group] + place] = (u32)row;
}

// Rows of up to GROUP * ITEMS products: expand into shared memory, sort in registers, add equal columns.
//
// Launch  block 32 * WARPS, 32 * WARPS / GROUP rows at a time, any grid.
// Shared  per product: a key, a value, a 16-bit position.
// Pre     the bits of Key above log2(GROUP * ITEMS), rounded up, hold a column.
// Post    lengths[row] entries of C from row_products[row] on; all of the row's products are read before.
template <typename Value, typename Index, typename Pointer, typename Key, int GROUP, int ITEMS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
sort_registers(const u32* __restrict__ count, const u32* __restrict__ list, const Pointer* __restrict__ row_entries,
               const Pointer* __restrict__ row_products, const u32* __restrict__ a_rows,
               const Value* __restrict__ a_values, const Pointer* __restrict__ b_starts, const Index* b_columns,
               const Value* b_values, Index* columns, Value* values_out, u32* __restrict__ lengths) {
    constexpr int SLOTS = GROUP * ITEMS, ROWS = WARPS * 32 / GROUP;
    constexpr int BITS = SLOTS <= 16 ? 4 : SLOTS <= 32 ? 5 : SLOTS <= 64 ? 6 : SLOTS <= 128 ? 7 : SLOTS <= 256 ? 8
                       : SLOTS <= 512 ? 9 : 10;
    constexpr u32 SLOT = (1u << BITS) - 1;
    __shared__ __align__(16) Key all_keys[ROWS * SLOTS];
    __shared__ __align__(16) char all_values[ROWS * SLOTS * sizeof(Value)];
    __shared__ unsigned short all_heads[ROWS * SLOTS];
    const int group = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    Key* slots = all_keys + group * SLOTS;
    Value* values = reinterpret_cast<Value*>(all_values) + group * SLOTS;
    unsigned short* heads = all_heads + group * SLOTS;

    for (u32 base = blockIdx.x * ROWS; base < *count; base += gridDim.x * ROWS) {
        const bool active = base + group < *count;
        const u32 row = active ? list[base + group] : 0;
        Pointer at = active ? row_entries[row] : 0;
        const Pointer end = active ? row_entries[row + 1] : 0;
        int total = 0;
        for (at += lane; __any_sync(FULL_WARP, at - lane < end); at += GROUP) {
            Pointer start = 0;
            int length = 0;
            Value factor = Value(0);
            if (at < end) {
                const i64 k = row_of_b(a_rows, at);
                start = b_starts[k];
                length = (int)(b_starts[k + 1] - start);
                factor = a_values[at];
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
                const Value scale = take(factor, entry, GROUP);
                if (product < here) {
                    slots[total + product] = (Key)b_columns[from] << BITS | (u32)(total + product);
                    values[total + product] = times(scale, b_values[from]);
                }
            }
            total += here;
        }
        __syncwarp();
        Key keys[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) keys[i] = i * GROUP + lane < total ? slots[i * GROUP + lane] : ~(Key)0;
        sort_keys<GROUP, ITEMS>(keys, lane);

        const int nnz = store_columns<GROUP, ITEMS, BITS>(slots, heads, keys, total, lane);
        if (active && lane == 0) lengths[row] = nnz;
        const Pointer target = active ? row_products[row] : 0;
        for (int out = lane; active && out < nnz; out += GROUP) {
            const int first = heads[out], stop = out + 1 < nnz ? heads[out + 1] : total;
            const Key key = slots[place<ITEMS, Key>(first)];
            Value sum = Value(0);
            for (int i = first; i < stop; ++i) sum = plus(sum, values[(u32)slots[place<ITEMS, Key>(i)] & SLOT]);
            columns[target + out] = (Index)(key >> BITS);
            values_out[target + out] = sum;
        }
        __syncwarp();
    }
}

// Rows of many products in a span of COLUMNS columns: each column that occurs sets a bit; the number of bits before it is the
// place of its entry, where its products are added. Sort and compression are one step.
//
// Launch  block 32 * WARPS, a warp a row, any grid.
// Shared  per warp: COLUMNS bits, a 16-bit place per 32 of them, accumulators of ACCUMULATOR_BYTES; longer rows of C add
//         in `spare`.
// Pre     rows of B sorted and free of duplicates; spare is not b_values.
// Post    as sort_registers; a row of B has no column twice, and the warp waits between rows of B, so that the order is kept.
template <typename Value, typename Index, typename Pointer, int COLUMNS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
sort_shared(const u32* __restrict__ count, const u32* __restrict__ list, const Pointer* __restrict__ row_entries,
            const Pointer* __restrict__ row_products, const u32* __restrict__ a_rows,
            const Value* __restrict__ a_values, const Pointer* __restrict__ b_starts, const Index* b_columns,
            const Value* b_values, Index* columns, Value* values, Value* spare, u32* __restrict__ lengths) {
    constexpr int WORDS = COLUMNS / 32, ROOM = ACCUMULATOR_BYTES / sizeof(Value), AHEAD = 4;
    __shared__ u32 all_bits[WARPS * WORDS];
    __shared__ unsigned short all_places[WARPS * WORDS];
    __shared__ __align__(16) char all_sums[WARPS * ACCUMULATOR_BYTES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32* bits = all_bits + warp * WORDS;
    unsigned short* places = all_places + warp * WORDS;

    for (u32 number = blockIdx.x * WARPS + warp; number < *count; number += gridDim.x * WARPS) {
        const u32 row = list[number];
        const Pointer begin = row_entries[row], end = row_entries[row + 1];
        i64 low = 0x7fffffffffffffffll, high = -1;
        for (Pointer at = begin + lane; at < end; at += 32) {
            const i64 k = row_of_b(a_rows, at);
            const Pointer first = b_starts[k], stop = b_starts[k + 1];
            if (first == stop) continue;
            low = min(low, (i64)b_columns[first]);
            high = max(high, (i64)b_columns[stop - 1]);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            low = min(low, __shfl_xor_sync(FULL_WARP, low, step));
            high = max(high, __shfl_xor_sync(FULL_WARP, high, step));
        }
        const int words = (int)((high - low) / 32) + 1;
        for (int w = lane; w < words; w += 32) bits[w] = 0;
        __syncwarp();
        for (Pointer at = begin; at < end; at += 32) {
            Pointer start = 0;
            int length = 0;
            if (at + lane < end) {
                const i64 k = row_of_b(a_rows, at + lane);
                start = b_starts[k];
                length = (int)(b_starts[k + 1] - start);
            }
            const int entries = (int)min((i64)32, (i64)(end - at));
            for (int entry = 0; entry < entries; entry += AHEAD) {
                int column[AHEAD];
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {  // loads of several rows of B under way at once
                    const Pointer from = __shfl_sync(FULL_WARP, start, entry + i);
                    column[i] = lane < __shfl_sync(FULL_WARP, length, entry + i) ? (int)(b_columns[from + lane] - low) : -1;
                }
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    const Pointer from = __shfl_sync(FULL_WARP, start, entry + i);
                    const int stop = __shfl_sync(FULL_WARP, length, entry + i);
                    for (int j = lane; j < stop; j += 32) {
                        const int c = j == lane ? column[i] : (int)(b_columns[from + j] - low);
                        if (!(*(volatile u32*)&bits[c / 32] >> c % 32 & 1)) atomicOr(&bits[c / 32], 1u << c % 32);
                    }
                }
            }
        }
        __syncwarp();
        int nnz = 0;
        for (int first = 0; first < words; first += 32) {
            const int mine = first + lane < words ? __popc(bits[first + lane]) : 0;
            const int through = inclusive_sum<32>(mine, lane);
            if (first + lane < words) places[first + lane] = (unsigned short)(nnz + through - mine);
            nnz += take(through, 31, 32);
        }
        const Pointer target = row_products[row];
        Value* sums = nnz <= ROOM ? reinterpret_cast<Value*>(all_sums) + warp * ROOM : spare + target;
        for (int i = lane; i < nnz; i += 32) sums[i] = Value(0);
        __syncwarp();
        for (Pointer at = begin; at < end; at += 32) {
            Pointer start = 0;
            int length = 0;
            Value factor = Value(0);
            if (at + lane < end) {
                const i64 k = row_of_b(a_rows, at + lane);
                start = b_starts[k];
                length = (int)(b_starts[k + 1] - start);
                factor = a_values[at + lane];
            }
            const int entries = (int)min((i64)32, (i64)(end - at));
            for (int entry = 0; entry < entries; entry += AHEAD) {
                int column[AHEAD];
                Value value[AHEAD];
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    const Pointer from = __shfl_sync(FULL_WARP, start, entry + i);
                    const bool has = lane < __shfl_sync(FULL_WARP, length, entry + i);
                    column[i] = has ? (int)(b_columns[from + lane] - low) : -1;
                    value[i] = has ? b_values[from + lane] : Value(0);
                }
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    const Pointer from = __shfl_sync(FULL_WARP, start, entry + i);
                    const int stop = __shfl_sync(FULL_WARP, length, entry + i);
                    const Value scale = take(factor, entry + i, 32);
                    for (int j = lane; j < stop; j += 32) {
                        const int c = j == lane ? column[i] : (int)(b_columns[from + j] - low);
                        const Value product = times(scale, j == lane ? value[i] : b_values[from + j]);
                        Value& sum = sums[places[c / 32] + __popc(bits[c / 32] & ((1u << c % 32) - 1))];
                        sum = plus(sum, product);
                    }
                    __syncwarp();
                }
            }
        }
        for (int w = lane; w < words; w += 32) {
            Pointer out = target + places[w];
            for (u32 left = bits[w]; left; left &= left - 1) columns[out++] = (Index)(low + w * 32 + __ffs(left) - 1);
        }
        for (int i = lane; i < nnz; i += 32) values[target + i] = sums[i];
        if (lane == 0) lengths[row] = nnz;
        __syncwarp();
    }
}

// Sum over the threads before this one in a thread block of 256, and over all of them.
template <typename T>
__device__ __forceinline__ T exclusive_sum(const T value, T* scratch, T& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const T through = inclusive_sum<32>(value, lane);
    __syncthreads();
    if (lane == 31) scratch[warp] = through;
    __syncthreads();
    T before = through - value;
    total = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
        if (w < warp) before += scratch[w];
        total += scratch[w];
    }
    return before;
}

// One stable pass of a radix sort by 8 bits of (column - low), from one pair of arrays to another.
template <typename Value, typename Index>
__device__ void radix_pass(const i64 size, const Index low, const int shift, const Index* from_columns,
                           const Value* from_values, Index* to_columns, Value* to_values, u64* bases, u32* counts,
                           u64* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    bases[threadIdx.x] = 0;
    __syncthreads();
    for (i64 at = threadIdx.x; at < size; at += 256)
        atomicAdd(&bases[(u64)((i64)from_columns[at] - low) >> shift & 255], 1ull);
    __syncthreads();
    u64 total;
    const u64 before = exclusive_sum<u64>(bases[threadIdx.x], scratch, total);
    bases[threadIdx.x] = before;  // where the next product of this digit goes
    for (i64 first = 0; first < size; first += 256) {
        for (int w = 0; w < 8; ++w) counts[w * 256 + threadIdx.x] = 0;
        __syncthreads();
        const i64 at = first + threadIdx.x;
        Index column = 0;
        if (at < size) column = from_columns[at];
        const u32 digit = at < size ? (u32)((u64)((i64)column - low) >> shift & 255) : 256;
        const u32 peers = __match_any_sync(FULL_WARP, digit);
        const u32 rank = __popc(peers & ((1u << lane) - 1));
        if (rank == 0 && digit < 256) counts[warp * 256 + digit] = __popc(peers);
        __syncthreads();
        u32 sum = 0;
        for (int w = 0; w < 8; ++w) {
            const u32 mine = counts[w * 256 + threadIdx.x];
            counts[w * 256 + threadIdx.x] = sum;
            sum += mine;
        }
        __syncthreads();
        if (at < size) {
            const i64 to = bases[digit] + counts[warp * 256 + digit] + rank;
            to_columns[to] = column;
            to_values[to] = from_values[at];
        }
        __syncthreads();
        bases[threadIdx.x] += sum;
    }
    __syncthreads();
}

// The longest rows: multiply into device memory, radix sort there, compress.
//
// Launch  block 256, a thread block a row, any grid.
// Shared  256 64-bit places, 8 * 256 counts, 256 entries of A.
// Pre     columns and values hold the products of the block, and so do spare_columns and spare_values; the rows of B sorted.
// Post    as sort_registers. The spare arrays are overwritten.
template <typename Value, typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
sort_global(const u32* __restrict__ count, const u32* __restrict__ list, const Pointer* __restrict__ row_entries,
            const Pointer* __restrict__ row_products, const u32* __restrict__ a_rows,
            const Value* __restrict__ a_values, const Pointer* __restrict__ b_starts, const Index* b_columns,
            const Value* b_values, Index* columns, Value* values, Index* spare_columns, Value* spare_values,
            u32* __restrict__ lengths) {
    __shared__ u64 bases[256], scratch[8];
    __shared__ u32 counts[8 * 256];
    __shared__ i64 places[256], starts[256], sizes[256];
    __shared__ i64 lowest, highest;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (u32 number = blockIdx.x; number < *count; number += gridDim.x) {
        const u32 row = list[number];
        const Pointer begin = row_entries[row], end = row_entries[row + 1], target = row_products[row];
        const i64 size = row_products[row + 1] - target;
        Index *from_columns = columns + target, *to_columns = spare_columns + target;
        Value *from_values = values + target, *to_values = spare_values + target;
        if (threadIdx.x == 0) lowest = 0x7fffffffffffffffll, highest = -1;
        i64 placed = 0, low = 0x7fffffffffffffffll, high = -1;
        for (Pointer first = begin; first < end; first += 256) {
            const Pointer at = first + threadIdx.x;
            u64 length = 0, total;
            if (at < end) {
                const i64 k = row_of_b(a_rows, at);
                starts[threadIdx.x] = b_starts[k];
                length = b_starts[k + 1] - b_starts[k];
            }
            const u64 before = exclusive_sum<u64>(length, scratch, total);
            places[threadIdx.x] = placed + before;
            sizes[threadIdx.x] = length;
            __syncthreads();
            const int entries = (int)min((i64)256, (i64)(end - first));
            for (int entry = warp; entry < entries; entry += 8) {
                const Value scale = a_values[first + entry];
                for (i64 j = lane; j < sizes[entry]; j += 32) {
                    const Index column = b_columns[starts[entry] + j];
                    from_columns[places[entry] + j] = column;
                    from_values[places[entry] + j] = times(scale, b_values[starts[entry] + j]);
                    low = min(low, (i64)column), high = max(high, (i64)column);
                }
            }
            placed += total;
            __syncthreads();
        }
        atomicMin(&lowest, low), atomicMax(&highest, high);
        __syncthreads();
        const i64 least = lowest, span = highest - least;
        for (int shift = 0; shift < 64 && span >> shift > 0; shift += 8) {
            radix_pass<Value, Index>(size, (Index)least, shift, from_columns, from_values, to_columns, to_values, bases, counts, scratch);
            Index* other_columns = from_columns;
            Value* other_values = from_values;
            from_columns = to_columns, to_columns = other_columns;
            from_values = to_values, to_values = other_values;
        }
        u64 nnz = 0;
        for (i64 first = 0; first < size; first += 256) {
            const i64 at = first + threadIdx.x;
            const bool head = at < size && (at == 0 || from_columns[at] != from_columns[at - 1]);
            u64 heads;
            const u64 out = nnz + exclusive_sum<u64>(head, scratch, heads);
            if (head) {
                Value sum = Value(0);
                for (i64 i = at; i < size && from_columns[i] == from_columns[at]; ++i) sum = plus(sum, from_values[i]);
                to_columns[out] = from_columns[at];
                to_values[out] = sum;
            }
            nnz += heads;
        }
        __syncthreads();
        if (to_columns != columns + target)
            for (i64 at = threadIdx.x; at < nnz; at += 256) {
                columns[target + at] = to_columns[at];
                values[target + at] = to_values[at];
            }
        if (threadIdx.x == 0) lengths[row] = (u32)nnz;
        __syncthreads();
    }
}

// Close the gaps that compression left between rows.
//
// Launch  block 256, GROUP lanes a row, grid ceil_div(nrows, 256 / GROUP).
// Pre     c_indptr[nrows + 1]: offsets of the rows' lengths; columns and values are not c_columns and c_values.
// Post    the block of C.
template <typename Value, typename Index, typename Pointer, int GROUP>
__global__ void __launch_bounds__(256)
gather_rows(const i64 nrows, const Pointer* __restrict__ row_products, const Pointer* __restrict__ c_indptr,
            const Index* __restrict__ columns, const Value* __restrict__ values, Index* __restrict__ c_columns,
            Value* __restrict__ c_values) {
    const i64 row = (i64)blockIdx.x * (256 / GROUP) + threadIdx.x / GROUP;
    if (row >= nrows) return;
    const Pointer from = row_products[row], to = c_indptr[row];
    const i64 length = c_indptr[row + 1] - to;
    for (i64 at = threadIdx.x % GROUP; at < length; at += GROUP) {
        c_columns[to + at] = columns[from + at];
        c_values[to + at] = values[from + at];
    }
}
