// epilogue.cu: steps after C's products are added: scale, map and normalize values; select the largest entries of each row;
// or reduce C to sums or to a histogram.
//
// The n-th largest value of a row is found digit by digit from the highest: radix selection, T. Alabi, J. Blanchard,
// B. Gordon, R. Steinbach, "Fast k-selection algorithms for graphics processing units", ACM JEA 17, 2012.
#include "common.cuh"
#include "groups.cuh"

#ifndef SPDIST_APPLY
#define SPDIST_APPLY x
#endif

enum Norm { SPDIST_ROW_NORM };
constexpr int LONG = 2048;  // entries above which the whole thread block takes a row
constexpr int BINS = 2048;  // of a histogram that a thread block counts into shared memory, at the most
constexpr u32 ALL = SPDIST_ALL_TIES;    // of the entries that are equal to the smallest that is kept

// Numbers of the parts of a value.
template <typename T> struct Real { using Type = T; };
template <typename T> struct Real<Complex<T>> { using Type = T; };

// Sum of complex values over the group, in every thread.
template <int WARPS, typename T>
__device__ __forceinline__ Complex<T> block_sum(const Complex<T> value, T* scratch) {
    return Complex<T>(block_sum<WARPS>(value.re, scratch), block_sum<WARPS>(value.im, scratch));
}

template <typename T> __device__ __forceinline__ double magnitude(const T x) { return fabs((double)x); }
template <typename T> __device__ __forceinline__ double magnitude(const Complex<T> x) { return hypot((double)x.re, (double)x.im); }

template <typename T> __device__ __forceinline__ T divided(const T x, const double size) { return T((double)x / size); }
template <typename T> __device__ __forceinline__ Complex<T> divided(const Complex<T> x, const double size) {
    return Complex<T>(T(x.re / size), T(x.im / size));
}

// Scale the values of C by row and by column, map them, and divide rows by their norm.
//
// Launch  block 32 * ROWS, grid ceil_div(nrows, ROWS).
// Pre     rows, columns: factors, or null for none; SPDIST_APPLY: an expression of x; norm: NO_NORM, L1 (sum of
//         magnitudes), L2 (root of the sum of squares) or GREATEST (magnitude).
// Post    values in place; rows of norm 0 are not divided.
template <typename Value, typename Index, typename Pointer>
__global__ void __launch_bounds__(32 * ROWS)
finish_rows(const i64 nrows, const Pointer* __restrict__ indptr, const Index* __restrict__ indices, Value* data,
            const Value* __restrict__ rows, const Value* __restrict__ columns, const int norm) {
    __shared__ double scratch[ROWS];
    for_rows(nrows, indptr, LONG, [&](auto group, const i64 row, const Pointer begin, const Pointer end) {
        using Threads = decltype(group);
        double size = 0;
        for (Pointer at = begin + Threads::thread(); at < end; at += Threads::THREADS) {
            Value x = data[at];
            if (rows != nullptr) x = Value(x * rows[row]);
            if (columns != nullptr) x = Value(x * columns[indices[at]]);
            x = Value(SPDIST_APPLY);
            data[at] = x;
            const double part = norm == NO_NORM ? 0 : magnitude(x);
            size = norm == GREATEST ? fmax(size, part) : size + (norm == L2 ? part * part : part);
        }
        if (norm == NO_NORM) return;
        size = norm == GREATEST ? block_max<Threads::WARPS>(size, scratch) : block_sum<Threads::WARPS>(size, scratch);
        if (norm == L2) size = sqrt(size);
        for (Pointer at = begin + Threads::thread(); size > 0 && at < end; at += Threads::THREADS)
            data[at] = divided(data[at], size);
    });
}

// Unsigned keys in the order of the values; -0 equals 0. NaN and complex values have no order.
__device__ __forceinline__ u32 key_of(const float x) {
    const u32 bits = __float_as_uint(x == 0 ? 0.0f : x);
    return bits ^ (bits >> 31 ? ~0u : 1u << 31);
}
__device__ __forceinline__ u64 key_of(const double x) {
    const u64 bits = (u64)__double_as_longlong(x == 0 ? 0.0 : x);
    return bits ^ (bits >> 63 ? ~0ull : 1ull << 63);
}
__device__ __forceinline__ u32 key_of(const int x) { return (u32)x ^ 1u << 31; }
__device__ __forceinline__ u64 key_of(const i64 x) { return (u64)x ^ 1ull << 63; }
__device__ __forceinline__ u32 key_of(const u32 x) { return x; }
__device__ __forceinline__ u64 key_of(const u64 x) { return x; }
__device__ __forceinline__ u32 key_of(const bool x) { return x; }
template <typename T> __device__ __forceinline__ u32 key_of(const Complex<T>) { return 0; }

// Whether a value is kept, if it is among the largest of its row.
template <typename Value> struct Keep {
    typename Real<Value>::Type least;
    int selects, drops;  // values from `least` up alone; no zeros
    __device__ __forceinline__ bool operator()(const Value x) const {
        return !(drops && x == Value(0)) && (!selects || x >= least);
    }
};
template <typename T> struct Keep<Complex<T>> {
    T least;
    int selects, drops;
    __device__ __forceinline__ bool operator()(const Complex<T> x) const { return !(drops && x.re == 0 && x.im == 0); }
};

// Find the smallest key among the `top` largest of a row; `ties`: how many entries of this key to keep, ALL for all of them.
//
// Pre     more than `top` of its values may be kept, top > 0; bins: 256 words of this group.
template <typename Threads, typename Value, typename Pointer, typename Key>
__device__ __forceinline__ void find_cut(const Pointer begin, const Pointer end, const Value* __restrict__ data,
                                         const Keep<Value> keep, u32 top, u32* bins, Key& cut, u32& ties) {
    const int lane = threadIdx.x % 32;
    Key known = 0;
    cut = 0;
    for (int shift = 8 * sizeof(Key) - 8; shift >= 0; shift -= 8) {
        Threads::wait();
        for (int i = Threads::thread(); i < 256; i += Threads::THREADS) bins[i] = 0;
        Threads::wait();
        for (Pointer at = begin + Threads::thread(); at < end; at += Threads::THREADS) {
            const Key key = key_of(data[at]);
            if (((key ^ cut) & known) == 0 && keep(data[at])) atomicAdd(&bins[255 - (int)(key >> shift & 255)], 1u);
        }
        Threads::wait();
        u32 here = 0;  // every warp for itself: the lane, then the digit, in which entry number `top` lies
#pragma unroll
        for (int i = 0; i < 8; ++i) here += bins[8 * lane + i];
        u32 before = inclusive_sum<32>(here, lane) - here;
        const bool mine = before < top && before + here >= top;
        int digit = 8 * lane;
        if (mine)
            while (before + bins[digit] < top) before += bins[digit++];
        const int owner = __ffs(__ballot_sync(FULL_WARP, mine)) - 1;
        digit = take(digit, owner, 32);
        top -= take(before, owner, 32);
        cut |= (Key)(255 - digit) << shift;
        known |= (Key)255 << shift;
        if (bins[digit] == top) {
            ties = ALL;
            return;
        }
    }
    ties = top;
}

// Find the smallest entry kept of each row, and the number of entries kept.
//
// Launch  as `finish_rows`.
// Shared  256 counts a warp.
// Pre     top: entries to keep, ALL for no bound.
// Post    lengths[row]: entries kept; cuts[row], ties[row]: as of `find_cut`.
template <typename Value, typename Pointer, typename Key>
__global__ void __launch_bounds__(32 * ROWS)
cut_rows(const i64 nrows, const Pointer* __restrict__ indptr, const Value* __restrict__ data,
         const typename Real<Value>::Type least, const int selects, const int drops, const u32 top, Key* __restrict__ cuts,
         u32* __restrict__ ties, u32* __restrict__ lengths) {
    __shared__ u32 bins[ROWS][256], scratch[ROWS];
    const Keep<Value> keep{least, selects, drops};
    for_rows(nrows, indptr, LONG, [&](auto group, const i64 row, const Pointer begin, const Pointer end) {
        using Threads = decltype(group);
        u32 count = 0, equal = ALL;
        Key cut = 0;
        for (Pointer at = begin + Threads::thread(); at < end; at += Threads::THREADS) count += keep(data[at]);
        count = block_sum<Threads::WARPS>(count, scratch);
        if (count > top) {
            find_cut<Threads>(begin, end, data, keep, top, bins[Threads::WARPS == 1 ? threadIdx.x / 32 : 0], cut, equal);
            count = top;
        }
        if (Threads::thread() == 0) cuts[row] = cut, ties[row] = equal, lengths[row] = count;
    });
}

// Copy the entries kept of each row; of entries equal to the smallest one kept, those in the smaller columns.
//
// Launch  as `finish_rows`.
// Pre     as `cut_rows`, which gave cuts and ties; kept_indptr from its lengths.
template <typename Value, typename Index, typename Pointer, typename Key>
__global__ void __launch_bounds__(32 * ROWS)
keep_rows(const i64 nrows, const Pointer* __restrict__ indptr, const Index* __restrict__ indices,
          const Value* __restrict__ data, const typename Real<Value>::Type least, const int selects, const int drops,
          const Key* __restrict__ cuts, const u32* __restrict__ ties, const Pointer* __restrict__ kept_indptr,
          Index* __restrict__ kept_indices, Value* __restrict__ kept_data) {
    __shared__ u32 scratch[ROWS];
    const Keep<Value> keep{least, selects, drops};
    for_rows(nrows, indptr, LONG, [&](auto group, const i64 row, const Pointer begin, const Pointer end) {
        using Threads = decltype(group);
        const Key cut = cuts[row];
        const u32 most = ties[row];
        u32 tied = 0, here;
        Pointer out = kept_indptr[row];
        for (Pointer base = begin; base < end; base += Threads::THREADS) {
            const Pointer at = base + Threads::thread();
            bool larger = false, equal = false;
            if (at < end && keep(data[at])) {
                const Key key = key_of(data[at]);
                larger = key > cut, equal = key == cut;
            }
            if (most != ALL) {
                equal = tied + count_before<Threads::WARPS>(equal, scratch, here) < most && equal;
                tied += here;
            }
            const u32 place = count_before<Threads::WARPS>(larger || equal, scratch, here);
            if (larger || equal) kept_indices[out + place] = indices[at], kept_data[out + place] = data[at];
            out += here;
        }
    });
}

// Add up values, or the squares of their magnitudes.
//
// Launch  block 256, any grid.
// Post    parts[grid]: a sum for each thread block, the same on every run.
template <typename Value, typename Wide, bool SQUARES>
__global__ void __launch_bounds__(256)
sum_all(const i64 nnz, const Value* __restrict__ data, Wide* __restrict__ parts) {
    __shared__ typename Real<Wide>::Type scratch[8];
    Wide sum = Wide(0);
#pragma unroll 4
    for (i64 at = (i64)blockIdx.x * 256 + threadIdx.x; at < nnz; at += (i64)gridDim.x * 256) {
        if constexpr (SQUARES) {
            const double size = magnitude(data[at]);
            sum += size * size;
        } else sum += Wide(data[at]);
    }
    sum = block_sum<8>(sum, scratch);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// Add up the values of each row.
//
// Launch  as `finish_rows`.
template <typename Value, typename Pointer, typename Wide>
__global__ void __launch_bounds__(32 * ROWS)
sum_rows(const i64 nrows, const Pointer* __restrict__ indptr, const Value* __restrict__ data, Wide* __restrict__ sums) {
    __shared__ typename Real<Wide>::Type scratch[ROWS];
    for_rows(nrows, indptr, LONG, [&](auto group, const i64 row, const Pointer begin, const Pointer end) {
        using Threads = decltype(group);
        Wide sum = Wide(0);
        for (Pointer at = begin + Threads::thread(); at < end; at += Threads::THREADS) sum += Wide(data[at]);
        sum = block_sum<Threads::WARPS>(sum, scratch);
        if (Threads::thread() == 0) sums[row] = sum;
    });
}

// Add the values of each column to its sum.
//
// Launch  block 256, any grid.
// Post    sums[column] have grown, by atomics, in any order.
template <typename Value, typename Index, typename Wide>
__global__ void __launch_bounds__(256)
sum_columns(const i64 nnz, const Index* __restrict__ indices, const Value* __restrict__ data, Wide* __restrict__ sums) {
#pragma unroll 4
    for (i64 at = (i64)blockIdx.x * 256 + threadIdx.x; at < nnz; at += (i64)gridDim.x * 256)
        atomic_add(&sums[indices[at]], Wide(data[at]));
}

// Add up the diagonal; row 0 here is row `first` of C.
//
// Launch  block 256, any grid.
// Post    parts[grid], as of `sum_all`.
template <typename Value, typename Index, typename Pointer, typename Wide>
__global__ void __launch_bounds__(256)
sum_diagonal(const i64 nrows, const i64 first, const Pointer* __restrict__ indptr, const Index* __restrict__ indices,
             const Value* __restrict__ data, Wide* __restrict__ parts) {
    __shared__ typename Real<Wide>::Type scratch[8];
    Wide sum = Wide(0);
    for (i64 row = (i64)blockIdx.x * 256 + threadIdx.x; row < nrows; row += (i64)gridDim.x * 256) {
        Pointer low = indptr[row], high = indptr[row + 1];
        while (low < high) {
            const Pointer middle = low + (high - low) / 2;
            if (indices[middle] < row + first) low = middle + 1;
            else high = middle;
        }
        if (low < indptr[row + 1] && indices[low] == row + first) sum += Wide(data[low]);
    }
    sum = block_sum<8>(sum, scratch);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// Count values by bins: value x falls into the bin with edges[bin] <= x < edges[bin + 1], the last edge into the last.
//
// Launch  block 256, any grid.
// Shared  BINS counts; if there are more bins, they are counted in device memory.
// Pre     edges[bins + 1] finite and rising; values are compared as doubles.
// Post    counts[bin] have grown, by atomics; values outside of all bins, and NaN, are not counted.
template <typename Value>
__global__ void __launch_bounds__(256)
count_by_bins(const i64 nnz, const Value* __restrict__ data, const int bins, const double* __restrict__ edges, i64* counts) {
    __shared__ u32 here[BINS];
    const bool shares = bins <= BINS;
    for (int bin = threadIdx.x; shares && bin < bins; bin += 256) here[bin] = 0;
    __syncthreads();
    const double first = edges[0], last = edges[bins];
    for (i64 at = (i64)blockIdx.x * 256 + threadIdx.x; at < nnz; at += (i64)gridDim.x * 256) {
        const double x = (double)data[at];
        if (!(x >= first && x <= last)) continue;
        int low = 0, high = bins;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (edges[middle] <= x) low = middle;
            else high = middle;
        }
        if (shares) atomicAdd(&here[low], 1u);
        else atomic_add(&counts[low], (i64)1);
    }
    __syncthreads();
    for (int bin = threadIdx.x; shares && bin < bins; bin += 256)
        if (here[bin]) atomic_add(&counts[bin], (i64)here[bin]);
}
