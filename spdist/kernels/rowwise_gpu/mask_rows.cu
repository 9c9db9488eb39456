// mask_rows.cu: products confined to a mask: sums lie at the mask's entries, and a product outside of the mask costs one test
// of a bit. And the complement: entries of C inside the mask are dropped.
//
// Masked accumulators: S. Milakovic, O. Selvitopi, I. Nisa, Z. Budimlic, A. Buluc, "Parallel Algorithms for Masked Sparse
// Matrix-Matrix Products", ICPP 2022. Here a Bloom filter of one hash says which columns may be in the mask's row (B. Bloom,
// "Space/Time Trade-offs in Hash Coding with Allowable Errors", CACM 13(7), 1970). Most are not. Those that may
// be are queued until a warp has 32 of them, which all lanes then search for in the mask's row.
#include "common.cuh"
#include "groups.cuh"

constexpr int WARP_BITS = 14, BLOCK_BITS = 17;  // logarithms of the filters' bits
constexpr int BLOCKS = 5, WIDE_BLOCKS = 3;      // on a multiprocessor: with more a thread has too few registers
constexpr int AT_ONCE = 4;                      // columns that a lane reads before it looks at the first
constexpr int WAITING = 32 * (AT_ONCE + 1);     // products that may be queued: fewer than a warp takes, and a step's
constexpr int VERY_LONG = SPDIST_VERY_LONG;     // entries of a row of A above which its products are not known
constexpr int SHARED_FACTOR = SPDIST_SHARED_FACTOR;  // products that each of these entries counts for
constexpr i64 MOST_SEARCHED = 1 << 30;
static_assert(ROWS << WARP_BITS == 1 << BLOCK_BITS, "the filters of a thread block's warps are its own");

enum Counter { SPDIST_MASK_COUNTER };

// How rows are shared out to warps and thread blocks: `MaskTuning` in masked.py.
struct Shares {
    i64 search_gain;    // a row of B so many times as long as the row of the mask is searched for the columns of the latter
    i64 row_products;   // of the rows that a warp takes, at most
    i64 mask_entries;   // the same
    i64 task_products;  // of a longer row that a thread block takes at a time, about

    // Products of a row from which it is searched for the mask's columns.
    __device__ __forceinline__ i64 limit(const i64 columns) const { return min(search_gain * columns, MOST_SEARCHED); }

    // Tasks for thread blocks that a row is cut into; 0 if a warp takes it, or nobody.
    __device__ __forceinline__ u32 parts(const i64 entries, const i64 columns, const i64 products) const {
        if (entries == 0 || columns == 0) return 0;
        const i64 known = entries > VERY_LONG ? SHARED_FACTOR * entries : products, cost = min(known, entries * limit(columns));
        if (cost <= row_products && columns <= mask_entries) return 0;
        const i64 size = max(task_products, 4 * columns);  // every task marks all columns
        return (u32)min((cost + size - 1) / size, entries);
    }
};

// Set sums to zero and hits to 0; list the tasks for thread blocks.
//
// Launch  block 256, any grid.
// Pre     products of each row as of `analyse_rows`; counters zero.
// Post    sums, hits, for each entry of the mask; counters[TASKS] tasks: row, part. Their order is not the same on every run.
template <typename Value, typename Pointer>
__global__ void __launch_bounds__(32 * ROWS)
prepare_rows(const i64 nrows, const i64 search_gain, const i64 row_products, const i64 mask_entries, const i64 task_products,
             const Pointer* __restrict__ a_indptr, const Pointer* __restrict__ mask_indptr, const u32* __restrict__ products,
             Value* __restrict__ sums, unsigned char* __restrict__ hits, u64* __restrict__ counters, uint2* __restrict__ tasks) {
    __shared__ u64 scratch[ROWS], base;
    const Shares shares{search_gain, row_products, mask_entries, task_products};
    const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    const i64 entries = mask_indptr[nrows];
    for (i64 at = thread; at < entries; at += threads) sums[at] = zero<Value>(), hits[at] = 0;
    for (i64 first = (i64)blockIdx.x * blockDim.x; first < nrows; first += threads) {
        const i64 row = first + threadIdx.x;
        u32 parts = 0;
        if (row < nrows)
            parts = shares.parts(a_indptr[row + 1] - a_indptr[row], mask_indptr[row + 1] - mask_indptr[row], products[row]);
        u64 total;
        const u64 before = sum_of_earlier<ROWS>((u64)parts, scratch, total);
        if (threadIdx.x == 0 && total) base = atomicAdd(&counters[TASKS], total);
        __syncthreads();
        for (u32 part = 0; part < parts; ++part) tasks[base + before + part] = make_uint2((u32)row, part);
    }
}

// Bloom filter of a mask row's columns: it has false positives, no false negatives.
template <typename Threads> struct Filter {
    static constexpr int BITS = Threads::WARPS == 1 ? WARP_BITS : BLOCK_BITS, WORDS = (1 << BITS) / 32;
    u32* words;

    // As many of the lowest bits as there is room for, so that neighbours share a word; mixed with those above.
    template <typename Index> static __device__ __forceinline__ u32 bit_of(const Index column) {
        return ((u32)column ^ (u32)(column >> BITS)) & ((1u << BITS) - 1);
    }
    template <typename Index> __device__ __forceinline__ bool holds(const Index column) const {
        const u32 bit = bit_of(column);
        return words[bit / 32] >> (bit % 32) & 1;
    }
    template <typename Index> __device__ __forceinline__ void mark(const Index* columns, const i64 count) {
        for (i64 i = Threads::thread(); i < count; i += Threads::THREADS) {
            const u32 bit = bit_of(columns[i]);
            atomicOr(&words[bit / 32], 1u << (bit % 32));
        }
        Threads::wait();
    }
    // Undo `mark`.
    template <typename Index> __device__ __forceinline__ void clear(const Index* columns, const i64 count) {
        Threads::wait();
        for (i64 i = Threads::thread(); i < min(count, (i64)WORDS); i += Threads::THREADS)
            words[count < WORDS ? bit_of(columns[i]) / 32 : i] = 0;
        Threads::wait();
    }
};

// First place in [first, last) whose column is not below `column`.
template <typename Index, typename Pointer>
__device__ __forceinline__ Pointer lower_bound(const Index* __restrict__ indices, Pointer first, Pointer last, const Index column) {
    while (first < last) {
        const Pointer middle = first + ((last - first) >> 1);
        if (indices[middle] < column) first = middle + 1;
        else last = middle;
    }
    return first;
}

// A product whose column may be in the mask: places in A and in B.
template <typename Pointer> struct Waiting { Pointer p, q; };

// Entries of A that a group of threads multiplies at a time; entries without products are left out.
template <typename Pointer> struct Batch {
    i64* before;  // products of the entries before each, and after the last of all
    Pointer *starts, *stops;  // of the rows of B
    u16* places;  // in A, from the first of the batch
};

// The arrays of A, B and the mask, and the sums.
template <typename Value, typename Index, typename Pointer> struct Operands {
    const Pointer* a_indptr;
    const Index* a_indices;
    const Value* a_data;
    const Pointer* b_indptr;
    const Index* b_indices;
    const Value* b_data;
    const Pointer* mask_indptr;
    const Index* mask_indices;
    Value* sums;
    unsigned char* hits;
};

// One row, or a part of it, and the threads that multiply it.
template <typename Value, typename Index, typename Pointer, typename Threads, bool ORDERED> struct MaskedRow {
    const Operands<Value, Index, Pointer>& m;
    Filter<Threads> filter;
    Batch<Pointer> batch;
    Waiting<Pointer>* waiting;  // of the warp
    i64* scratch;
    Pointer first, last;  // of the mask's row
    Pointer limit;        // as of `Shares`
    int count;            // of those waiting

    // Add the products of entries [begin, end) of A.
    __device__ __forceinline__ void multiply(const Pointer begin, const Pointer end) {
        count = 0;
        filter.mark(m.mask_indices + first, last - first);
        if (ORDERED) in_order(begin, end);
        else {
            for (i64 chunk = begin; chunk < end; chunk += Threads::THREADS) {
                const int entries = gather(chunk, end);
                const i64 total = batch.before[entries];
                const i64 own = (total + Threads::THREADS - 1) / Threads::THREADS * 32, from = Threads::thread() / 32 * own;
                walk((Pointer)chunk, entries, from, min(from + own, total));
                Threads::wait();
            }
            take_all();
        }
        filter.clear(m.mask_indices + first, last - first);
    }

    // One entry of A after the other, all threads at one: their products are in different columns.
    __device__ __forceinline__ void in_order(const Pointer begin, const Pointer end) {
        const int lane = threadIdx.x % 32, warp = Threads::thread() / 32;
        for (Pointer p = begin; p < end; ++p) {
            const Index k = m.a_indices[p];
            const Pointer start = m.b_indptr[k], stop = m.b_indptr[k + 1];
            const bool searched = stop - start > limit;
            const Pointer products = searched ? last - first : stop - start;
            for (Pointer t = 32 * warp; t < products; t += Threads::THREADS) {
                look(t + lane < products, searched, start, stop, t + lane, p);
                while (count >= 32) take(32);
            }
            take_all();
            Threads::wait();  // the next row of B may add to the same sums
        }
    }

    // Look at entries of A from `chunk` on, one a thread; return how many have products.
    __device__ __forceinline__ int gather(const i64 chunk, const i64 end) {
        const i64 p = chunk + Threads::thread();
        Pointer start = 0, stop = 0;
        if (p < end) start = m.b_indptr[m.a_indices[p]], stop = m.b_indptr[m.a_indices[p] + 1];
        const i64 products = stop - start > limit ? last - first : stop - start;
        i64 total;
        u32 entries;
        const i64 before = sum_of_earlier<Threads::WARPS>(products, scratch, total);
        const u32 place = count_before<Threads::WARPS>(products > 0, reinterpret_cast<u32*>(scratch), entries);
        if (products > 0) {
            batch.before[place] = before, batch.starts[place] = start, batch.stops[place] = stop;
            batch.places[place] = (u16)Threads::thread();
        }
        if (Threads::thread() == 0) batch.before[entries] = total;
        Threads::wait();
        return entries;
    }

    // Look at products [at, until) of the batch, by a warp.
    __device__ __forceinline__ void walk(const Pointer chunk, const int entries, i64 at, const i64 until) {
        if (at >= until) return;
        const int lane = threadIdx.x % 32;
        int e = 0;
        for (int high = entries; high - e > 1;) {  // the entry that has product `at`
            const int middle = (e + high) / 2;
            if (batch.before[middle] <= at) e = middle;
            else high = middle;
        }
        while (at < until) {
            while (count >= 32) take(32);
            const i64 here = min(batch.before[e + 1], until) - at;
            if (here >= 32 && batch.stops[e] - batch.starts[e] <= limit) {
                read(batch.starts[e] + (Pointer)(at - batch.before[e]), (int)(here / 32), chunk + batch.places[e]);
                at += here / 32 * 32;
            } else {
                // Which of the next products are the first of their entries? Every entry here has some.
                const int other = e + 1 + lane;
                const i64 ahead = other < entries ? batch.before[other] - at : 32;
                const u32 firsts = __reduce_or_sync(FULL_WARP, ahead < 32 ? 1u << ahead : 0);
                const int own = e + __popc(firsts & ((2u << lane) - 1));
                const Pointer start = batch.starts[own], stop = batch.stops[own];
                const Pointer t = (Pointer)(at + lane - batch.before[own]);
                look(at + lane < until, stop - start > limit, start, stop, t, chunk + batch.places[own]);
                at += 32, e += __popc(firsts);
            }
            if (at < until && batch.before[e + 1] <= at) ++e;
        }
    }

    // Look at 32 * steps columns of B from place `q` on, by a warp; p: the entry of A.
    __device__ __forceinline__ void read(Pointer q, int steps, const Pointer p) {
        q += threadIdx.x % 32;
        for (; steps > 0; steps -= AT_ONCE) {
            while (count >= 32) take(32);
            Index columns[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (i < steps) columns[i] = m.b_indices[q + 32 * i];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i, q += 32) keep(i < steps && filter.holds(columns[i]), p, q);
        }
    }

    // Look at product `t` of a lane's entry of A, of which B's row is [start, stop): its column, or a column of the mask.
    __device__ __forceinline__ void look(const bool is_any, const bool searched, const Pointer start, const Pointer stop,
                                         const Pointer t, const Pointer p) {
        Pointer q = start + t;
        bool found = false;
        if (is_any && searched) {
            const Index column = m.mask_indices[first + t];
            q = lower_bound(m.b_indices, start, stop, column);
            found = q < stop && m.b_indices[q] == column;
        } else if (is_any) found = filter.holds(m.b_indices[q]);
        keep(found, p, q);
    }

    // Let products wait whose columns may be in the mask.
    __device__ __forceinline__ void keep(const bool found, const Pointer p, const Pointer q) {
        const u32 votes = __ballot_sync(FULL_WARP, found);
        if (found) waiting[count + __popc(votes & ((1u << (threadIdx.x % 32)) - 1))] = {p, q};
        count += __popc(votes);
    }

    __device__ __forceinline__ void take_all() {
        while (count > 0) take(min(count, 32));
    }

    // Add the last `number` of those waiting, 32 at most, as far as the mask has their columns.
    __device__ __forceinline__ void take(const int number) {
        __syncwarp();
        count -= number;
        if (threadIdx.x % 32 < number) {
            const Waiting<Pointer> one = waiting[count + threadIdx.x % 32];
            const Index column = m.b_indices[one.q];
            const Pointer at = lower_bound(m.mask_indices, first, last, column);
            if (at < last && m.mask_indices[at] == column) {
                const Value value = product(m.a_data[one.p], m.b_data[one.q]);
                if (ORDERED) add_to(m.sums[at], value);
                else atomic_fold(&m.sums[at], value);
                if (!__ldca(&m.hits[at])) m.hits[at] = 1;  // what the first-level cache says may be old
            }
        }
        __syncwarp();
    }
};

// Multiply rows of A, confined to the mask: thread blocks take the tasks, then warps take the other rows, `rows` at a time.
//
// Launch  block 32 * ROWS; any grid, best a few for each multiprocessor.
// Shared  a filter for each warp, or one for the thread block; entries of A; queued products.
// Pre     rows of B and of the mask sorted and free of duplicates; offsets and indices in range; rows <= 32. sums, hits,
//         counters and tasks as of `prepare_rows`, with the same shares. ORDERED: one task a row at most.
// Post    sums and hits, for each entry of the mask: its sum, and whether there is any product. ORDERED adds products in the
//         order of A's entries, so that the bits are the same on every run; otherwise by atomics, in any order.
template <typename Value, typename Index, typename Pointer, bool ORDERED>
__global__ void __launch_bounds__(32 * ROWS, sizeof(Pointer) == 4 ? BLOCKS : WIDE_BLOCKS)
masked_rows(const i64 nrows, const i64 search_gain, const i64 row_products, const i64 mask_entries, const i64 task_products,
            const int rows, const u32* __restrict__ products, const Pointer* __restrict__ a_indptr,
            const Index* __restrict__ a_indices, const Value* __restrict__ a_data, const Pointer* __restrict__ b_indptr,
            const Index* __restrict__ b_indices, const Value* __restrict__ b_data, const Pointer* __restrict__ mask_indptr,
            const Index* __restrict__ mask_indices, Value* sums, unsigned char* hits, u64* __restrict__ counters,
            const uint2* __restrict__ tasks) {
    constexpr int ENTRIES = 33 * ROWS;  // one more for each warp
    __shared__ u32 filters[(1 << BLOCK_BITS) / 32];
    __shared__ i64 before[ENTRIES], scratch[ROWS];
    __shared__ Pointer starts[ENTRIES], stops[ENTRIES];
    __shared__ u16 places[ENTRIES];
    __shared__ Waiting<Pointer> waiting[ROWS * WAITING];
    __shared__ u64 taken;
    const Shares shares{search_gain, row_products, mask_entries, task_products};
    const Operands<Value, Index, Pointer> m{a_indptr, a_indices, a_data, b_indptr, b_indices,
                                            b_data, mask_indptr, mask_indices, sums, hits};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto multiply = [&](auto group, const i64 row, const Pointer begin, const Pointer end) {
        using Threads = decltype(group);
        const int own = Threads::WARPS == 1 ? warp : 0;
        const Batch<Pointer> batch{before + 33 * own, starts + 33 * own, stops + 33 * own, places + 33 * own};
        const Filter<Threads> filter{filters + own * Filter<Threads>::WORDS};
        const Pointer first = mask_indptr[row], last = mask_indptr[row + 1];
        MaskedRow<Value, Index, Pointer, Threads, ORDERED>{
            m, filter, batch, waiting + warp * WAITING, scratch, first, last, (Pointer)shares.limit(last - first), 0}.multiply(begin, end);
    };
    for (int i = threadIdx.x; i < (1 << BLOCK_BITS) / 32; i += 32 * ROWS) filters[i] = 0;
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) taken = atomicAdd(&counters[NEXT_TASK], 1ull);
        __syncthreads();
        if (taken >= counters[TASKS]) break;
        const i64 row = tasks[taken].x, part = tasks[taken].y, begin = a_indptr[row], entries = a_indptr[row + 1] - begin;
        const i64 parts = shares.parts(entries, mask_indptr[row + 1] - mask_indptr[row], products[row]);
        multiply(Group<ROWS>(), row, (Pointer)(begin + entries * part / parts), (Pointer)(begin + entries * (part + 1) / parts));
    }
    for (;;) {
        i64 base = 0;
        if (lane == 0) base = (i64)atomicAdd(&counters[NEXT_ROW], (u64)rows);
        base = __shfl_sync(FULL_WARP, base, 0);
        if (base >= nrows) break;
        bool mine = lane < rows && base + lane < nrows;
        if (mine) {
            const i64 row = base + lane, entries = a_indptr[row + 1] - a_indptr[row], columns = mask_indptr[row + 1] - mask_indptr[row];
            mine = products[row] > 0 && columns > 0 && shares.parts(entries, columns, products[row]) == 0;
        }
        for (u32 left = __ballot_sync(FULL_WARP, mine); left; left &= left - 1) {
            const i64 row = base + __ffs(left) - 1;
            multiply(Group<1>(), row, a_indptr[row], a_indptr[row + 1]);
        }
    }
}

// Set hits[at] to whether entry `at` of C is outside the mask.
//
// Launch  as groups.cuh says.
template <typename Index, typename Pointer>
__global__ void __launch_bounds__(32 * ROWS)
outside_rows(const i64 nrows, const Pointer* __restrict__ indptr, const Index* __restrict__ indices,
             const Pointer* __restrict__ mask_indptr, const Index* __restrict__ mask_indices, unsigned char* __restrict__ hits) {
    for_rows(nrows, indptr, 2048, [&](auto group, const i64 row, const Pointer begin, const Pointer end) {
        using Threads = decltype(group);
        const Pointer last = mask_indptr[row + 1];
        for (Pointer at = begin + Threads::thread(); at < end; at += Threads::THREADS) {
            const Pointer found = lower_bound(mask_indices, mask_indptr[row], last, indices[at]);
            hits[at] = found == last || mask_indices[found] != indices[at];
        }
    });
}

// Count the entries of each row whose `hits` is set.
//
// Launch  as groups.cuh says.
template <typename Pointer>
__global__ void __launch_bounds__(32 * ROWS)
count_hits(const i64 nrows, const Pointer* __restrict__ indptr, const unsigned char* __restrict__ hits, u32* __restrict__ lengths) {
    __shared__ u32 scratch[ROWS];
    for_rows(nrows, indptr, 2048, [&](auto group, const i64 row, const Pointer begin, const Pointer end) {
        using Threads = decltype(group);
        u32 count = 0;
        for (Pointer at = begin + Threads::thread(); at < end; at += Threads::THREADS) count += hits[at];
        count = block_sum<Threads::WARPS>(count, scratch);
        if (Threads::thread() == 0) lengths[row] = count;
    });
}

// Copy the entries of each row whose `hits` is set.
//
// Launch  as groups.cuh says.
// Pre     kept_indptr from the lengths of `count_hits`.
template <typename Value, typename Index, typename Pointer>
__global__ void __launch_bounds__(32 * ROWS)
keep_hits(const i64 nrows, const Pointer* __restrict__ indptr, const Index* __restrict__ indices, const Value* __restrict__ data,
          const unsigned char* __restrict__ hits, const Pointer* __restrict__ kept_indptr, Index* __restrict__ kept_indices,
          Value* __restrict__ kept_data) {
    __shared__ u32 scratch[ROWS];
    for_rows(nrows, indptr, 2048, [&](auto group, const i64 row, const Pointer begin, const Pointer end) {
        using Threads = decltype(group);
        Pointer out = kept_indptr[row];
        for (Pointer base = begin; base < end; base += Threads::THREADS) {
            const Pointer at = base + Threads::thread();
            const bool hit = at < end && hits[at];
            u32 here;
            const u32 place = count_before<Threads::WARPS>(hit, scratch, here);
            if (hit) kept_indices[out + place] = indices[at], kept_data[out + place] = data[at];
            out += here;
        }
    });
}
