// rank_rows.cu: rows of C of many products. A thread block marks the columns of a row in a bit mask in shared memory;
// the bits before a column are its place in the row, so that values are added where they will lie in C, already sorted.
//
// Row by row: F. Gustavson, "Two fast algorithms for sparse matrices", ACM TOMS 4(3), 1978. Masks of columns: after HSMU-SpGEMM
// (2025), here without a mask matrix of B and with places from counts of bits instead of a search.
#include "common.cuh"

constexpr int STAGE = 256;  // entries of A that are looked up at once

// In shared memory: entries of A whose rows of B are visited next.
template <typename Value, typename Pointer>
struct Stage {
    Pointer first[STAGE], last[STAGE];
    Value factor[STAGE];
    int wide[STAGE], wides;  // entries whose row of B is long enough for the whole thread block
    u32 products;            // of the other entries
};

// First place in [first, last) whose column is not below `column`; most often the answer is `first` or `last`.
template <typename Index, typename Pointer>
__device__ __forceinline__ Pointer lower_bound(const Index* __restrict__ indices, Pointer first, Pointer last, const i64 column) {
    if (first == last || indices[first] >= column) return first;
    if (indices[last - 1] < column) return last;
    while (first < last) {
        const Pointer middle = first + (last - first) / 2;
        if (indices[middle] < column) first = middle + 1;
        else last = middle;
    }
    return first;
}

// Look up the rows of B of up to STAGE entries of A, cut to the columns [low, high).
template <int WARPS, bool VALUES, typename Value, typename Index, typename Pointer>
__device__ __forceinline__ void look_up(Stage<Value, Pointer>& stage, const Pointer at, const int entries, const i64 low,
                                        const i64 high, const Index* __restrict__ a_indices, const Value* __restrict__ a_data,
                                        const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices) {
    __syncthreads();
    if (threadIdx.x == 0) stage.wides = 0, stage.products = 0;
    __syncthreads();
    u32 products = 0;
    for (int i = threadIdx.x; i < entries; i += 32 * WARPS) {
        const Index k = a_indices[at + i];
        Pointer first = b_indptr[k], last = b_indptr[k + 1];
        first = lower_bound(b_indices, first, last, low);
        last = lower_bound(b_indices, first, last, high);
        stage.first[i] = first;
        stage.last[i] = last;
        if (VALUES) stage.factor[i] = a_data[at + i];
        if (last - first >= 32 * WARPS) stage.wide[atomicAdd(&stage.wides, 1)] = i;
        else products += (u32)(last - first);
    }
    products = __reduce_add_sync(FULL_WARP, products);
    if (threadIdx.x % 32 == 0 && products) atomicAdd(&stage.products, products);
    __syncthreads();
}

// Call visit(entry, place in B) for all products of the staged entries, in no order: long rows of B by the whole thread
// block, each of the others by about as many lanes as its mean has entries.
template <int WARPS, typename Value, typename Pointer, typename Visit>
__device__ __forceinline__ void visit_all(const Stage<Value, Pointer>& stage, const int entries, const Visit visit) {
    constexpr int THREADS = 32 * WARPS;
    for (int n = 0; n < stage.wides; ++n) {
        const int i = stage.wide[n];
        const Pointer last = stage.last[i];
        for (Pointer t = stage.first[i] + threadIdx.x; t < last; t += THREADS) visit(i, t);
    }
    const int shift = lanes_shift(stage.products, entries), lanes = 1 << shift;
    for (int i = threadIdx.x >> shift; i < entries; i += THREADS >> shift) {
        const Pointer first = stage.first[i], last = stage.last[i];
        if (last - first >= THREADS) continue;
        for (Pointer t = first + (threadIdx.x & (lanes - 1)); t < last; t += lanes) visit(i, t);
    }
}

// Mark the columns [low, high) of one row of C; mask[i] holds columns low + 64 i to low + 64 i + 63. The last entries of A
// stay staged, with their values if VALUES.
template <int WARPS, bool VALUES, typename Value, typename Index, typename Pointer>
__device__ __forceinline__ void mark(u64* mask, const int words, Stage<Value, Pointer>& stage, const Pointer begin,
                                     const Pointer end, const i64 low, const i64 high, const Index* __restrict__ a_indices,
                                     const Value* __restrict__ a_data, const Pointer* __restrict__ b_indptr,
                                     const Index* __restrict__ b_indices) {
    u32* halves = reinterpret_cast<u32*>(mask);
    for (int i = threadIdx.x; i < words; i += 32 * WARPS) mask[i] = 0;
    for (Pointer at = begin; at < end; at += STAGE) {
        const int entries = (int)min((i64)STAGE, (i64)(end - at));
        look_up<WARPS, VALUES>(stage, at, entries, low, high, a_indices, a_data, b_indptr, b_indices);
        visit_all<WARPS>(stage, entries, [&](const int, const Pointer t) {
            const u32 bit = (u32)(b_indices[t] - low);
            atomicOr(&halves[bit >> 5], 1u << (bit & 31));
        });
    }
    __syncthreads();
}

// Count the entries of the listed rows of C, or of a part of their columns.
//
// Launch  block 32 * WARPS, one per task.
// Shared  dynamic: window / 8 bytes of mask; static: the stage.
// Pre     tasks as `split_rows` leaves them, lengths of their rows zero; rows of B sorted; window a multiple of 256.
// Post    counts[task]; lengths[row] the sum over the tasks of a row.
template <typename Index, typename Pointer, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
rank_count(const u32* __restrict__ tasks, const i64 window, const i64* __restrict__ spans, const Pointer* __restrict__ a_indptr,
           const Index* __restrict__ a_indices, const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices,
           u32* __restrict__ counts, u32* __restrict__ lengths) {
    extern __shared__ __align__(16) u64 mask[];
    __shared__ Stage<float, Pointer> stage;
    __shared__ u32 scratch[WARPS];
    const i64 task = blockIdx.x;
    const u32 row = tasks[task];
    const i64 low = spans[2 * task], high = spans[2 * task + 1];
    u32 nnz = 0;
    for (i64 from = low; from < high; from += window) {
        const i64 to = min(from + window, high);
        const int words = (int)((to - from + 63) / 64);
        mark<WARPS, false>(mask, words, stage, a_indptr[row], a_indptr[row + 1], from, to, a_indices, (const float*)nullptr,
                           b_indptr, b_indices);
        for (int i = threadIdx.x; i < words; i += 32 * WARPS) nnz += __popcll(mask[i]);
        __syncthreads();
    }
    nnz = block_sum<WARPS>(nnz, scratch);
    if (threadIdx.x == 0) {
        counts[task] = nnz;
        if (nnz) atomicAdd(&lengths[row], nnz);
    }
}

// Place of the bit number `n` among those set in `word`.
__device__ __forceinline__ int select_bit(u64 word, int n) {
    int at = 0;
#pragma unroll
    for (int half = 32; half > 0; half /= 2) {
        const int below = __popcll(word & ((1ull << half) - 1));
        if (n >= below) n -= below, at += half, word >>= half;
    }
    return at;
}

// ranks[i] = bits set in mask[0 .. i); returns the sum. Every thread takes a run of words.
template <int WARPS>
__device__ __forceinline__ u32 rank_words(const u64* mask, u32* ranks, const int words, u32* scratch) {
    constexpr int THREADS = 32 * WARPS;
    // Rounds of THREADS words, so that neighbours in a warp read neighbours in shared memory.
    u32 base = 0;
    for (int first = 0; first < words; first += THREADS) {
        const int i = first + threadIdx.x;
        const u32 bits = i < words ? __popcll(mask[i]) : 0;
        const u32 inclusive = inclusive_sum<32>(bits, threadIdx.x % 32);
        u32 before = base + inclusive - bits, total = 0;
        if (WARPS > 1) {
            if (threadIdx.x % 32 == 31) scratch[threadIdx.x / 32] = inclusive;
            __syncthreads();
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) {
                if (warp < threadIdx.x / 32) before += scratch[warp];
                total += scratch[warp];
            }
            __syncthreads();
        } else total = __shfl_sync(FULL_WARP, inclusive, 31);
        if (i < words) ranks[i] = before;
        base += total;
    }
    if (threadIdx.x == 0) ranks[words] = base;
    __syncthreads();
    return base;
}

// Write the columns whose bits are set in the words [word, stop) to c_indices[0 ...], a warp 32 words at a time: each
// lane finds the word of its entry among them.
template <int WARPS, typename Index>
__device__ __forceinline__ void write_columns(const u64* mask, const u32* ranks, const int word, const int stop,
                                              const i64 low, Index* __restrict__ c_indices) {
    const int lane = threadIdx.x % 32;
    const u32 done = ranks[word];
    for (int base = word + threadIdx.x / 32 * 32; base < stop; base += 32 * WARPS) {
        const u32 ends = ranks[min(base + lane + 1, stop)];
        const u32 after = ranks[min(base + 32, stop)];
        for (u32 n = ranks[base]; n < after; n += 32) {
            const u32 wanted = n + lane;
            int which = 0;
#pragma unroll
            for (int step = 16; step > 0; step /= 2)
                if (take(ends, which + step - 1, 32) <= wanted) which += step;
            if (wanted >= after) continue;
            const int bit = select_bit(mask[base + which], (int)(wanted - ranks[base + which]));
            c_indices[wanted - done] = (Index)(low + 64ll * (base + which) + bit);
        }
    }
}

// Multiply the rows, or parts of rows, of the tasks.
//
// Launch  block 32 * WARPS, one per task; `parts` successive tasks make up a row.
// Shared  dynamic: window / 8 bytes of mask, window / 16 + 16 of ranks; ORDERED: `capacity` values; static: the stage.
// Pre     as `rank_count`, which gave counts; c_indptr from lengths; columns distinct within rows of B; ORDERED:
//         capacity >= 64.
// Post    the row of C, sorted. ORDERED: values are added in the order of A's entries, in shared memory: the same bits on
//         every run. Not ORDERED: values are added by atomics on C, in any order: the L2 cache adds floating-point numbers
//         itself, while an atomic in shared memory is a loop of compare and swap.
template <typename Value, typename Index, typename Pointer, int WARPS, bool ORDERED>
__global__ void __launch_bounds__(32 * WARPS)
rank_fill(const u32* __restrict__ tasks, const u32* __restrict__ counts, const int parts, const i64 window, const int capacity,
          const i64* __restrict__ spans, const Pointer* __restrict__ a_indptr, const Index* __restrict__ a_indices,
          const Value* __restrict__ a_data, const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices,
          const Value* __restrict__ b_data, const Pointer* __restrict__ c_indptr, Index* __restrict__ c_indices,
          Value* __restrict__ c_data) {
    constexpr int THREADS = 32 * WARPS;
    extern __shared__ __align__(16) u64 mask[];
    __shared__ __align__(16) char stage_bytes[sizeof(Stage<Value, Pointer>)];
    Stage<Value, Pointer>& stage = *reinterpret_cast<Stage<Value, Pointer>*>(stage_bytes);
    __shared__ u32 scratch[WARPS];
    u32* ranks = reinterpret_cast<u32*>(mask + window / 64);
    Value* sums = reinterpret_cast<Value*>(ranks + window / 64 + 4);
    const i64 task = blockIdx.x;
    const u32 row = tasks[task];
    const i64 low = spans[2 * task], high = spans[2 * task + 1];
    const Pointer begin = a_indptr[row], end = a_indptr[row + 1];
    if (counts[task] == 0) return;
    Pointer out = c_indptr[row];
    for (int part = (int)(task % parts); part > 0; --part) out += counts[task - part];
    for (i64 from = low; from < high; from += window) {
        const i64 to = min(from + window, high);
        const int words = (int)((to - from + 63) / 64);
        mark<WARPS, !ORDERED>(mask, words, stage, begin, end, from, to, a_indices, a_data, b_indptr, b_indices);
        const int nnz = (int)rank_words<WARPS>(mask, ranks, words, scratch);
        const auto rank = [&](const Pointer t) {
            const u32 bit = (u32)(b_indices[t] - from);
            return ranks[bit >> 6] + __popcll(mask[bit >> 6] & ((1ull << (bit & 63)) - 1));
        };
        if constexpr (!ORDERED) {
            for (int i = threadIdx.x; i < nnz; i += THREADS) c_data[out + i] = zero<Value>();
            write_columns<WARPS>(mask, ranks, 0, words, from, c_indices + out);
            __syncthreads();
            for (Pointer at = begin; at < end; at += STAGE) {
                const int entries = (int)min((i64)STAGE, (i64)(end - at));
                if (end - begin > STAGE) look_up<WARPS, true>(stage, at, entries, from, to, a_indices, a_data, b_indptr, b_indices);
                visit_all<WARPS>(stage, entries, [&](const int i, const Pointer t) {
                    atomic_fold(&c_data[out + rank(t)], product(stage.factor[i], b_data[t]));
                });
            }
            out += nnz;
            __syncthreads();
        } else for (int word = 0; word < words;) {
            const u32 done = ranks[word];
            int stop = words;
            if (nnz - done > capacity) {  // the last word whose bits all fit
                int fits = word + 1;
                while (fits < stop) {
                    const int middle = (fits + stop + 1) / 2;
                    if (ranks[middle] - done <= capacity) fits = middle;
                    else stop = middle - 1;
                }
                stop = fits;
            }
            const int here = (int)(ranks[stop] - done);
            const i64 first_column = from + 64ll * word, end_column = min(from + 64ll * stop, to);
            for (int i = threadIdx.x; i < here; i += THREADS) sums[i] = zero<Value>();
            for (Pointer at = begin; at < end; at += STAGE) {
                const int entries = (int)min((i64)STAGE, (i64)(end - at));
                look_up<WARPS, true>(stage, at, entries, first_column, end_column, a_indices, a_data, b_indptr, b_indices);
                for (int i = 0; i < entries; ++i) {
                    const Value factor = stage.factor[i];
                    const Pointer last = stage.last[i];
                    for (Pointer t = stage.first[i] + threadIdx.x; t < last; t += THREADS) add_to(sums[rank(t) - done], product(factor, b_data[t]));
                    __syncthreads();
                }
            }
            __syncthreads();
            for (int i = threadIdx.x; i < here; i += THREADS) c_data[out + i] = sums[i];
            write_columns<WARPS>(mask, ranks, word, stop, from, c_indices + out);
            out += here;
            word = stop;
            __syncthreads();
        }
    }
}

// Make `parts` tasks of each listed row: equal parts of the columns that its row of C spans.
//
// Launch  block 256, grid ceil_div(count, 8): a warp a row.
// Pre     rows of B sorted; every listed row has products.
// Post    tasks[parts * i + p] = list[i], spans {first, after last} of its columns, the first a multiple of 64;
//         lengths[list[i]] = 0; *widest, zero before: columns of the widest task.
template <typename Index, typename Pointer>
__global__ void __launch_bounds__(256)
split_rows(const u32 count, const u32* __restrict__ list, const int parts, const Pointer* __restrict__ a_indptr,
           const Index* __restrict__ a_indices, const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices,
           u32* __restrict__ tasks, i64* __restrict__ spans, u32* __restrict__ lengths, u64* __restrict__ widest) {
    const u32 number = blockIdx.x * 8 + threadIdx.x / 32;
    if (number >= count) return;
    const u32 row = list[number];
    const int lane = threadIdx.x % 32;
    i64 low, high;
    row_span(a_indptr[row], a_indptr[row + 1], a_indices, b_indptr, b_indices, low, high);
    low &= ~63ll;
    const i64 width = ((high + 1 - low + parts - 1) / parts + 63) & ~63ll;
    for (int part = lane; part < parts; part += 32) {
        const i64 task = (i64)number * parts + part, from = min(low + part * width, high + 1);
        tasks[task] = row;
        spans[2 * task] = from;
        spans[2 * task + 1] = min(from + width, high + 1);
    }
    if (lane == 0) {
        lengths[row] = 0;
        atomicMax(widest, (u64)min(width, high + 1 - low));
    }
}
