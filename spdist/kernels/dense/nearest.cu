// nearest.cu: keep the least scores of each query, and order them by distances in float64.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int STEP = 4 * THREADS;   // scores that a thread block compares at once
constexpr int LIST = 2 * STEP;      // candidates that it holds
#define NONE __int_as_float(0x7f800000)

// Candidates in shared memory: a key and a column each. Of equal keys the first column comes first.
template <typename Key>
struct Candidates {
    Key* keys;
    int* columns;

    __device__ bool falls(const int low, const int high) const {
        return keys[low] > keys[high] || (keys[low] == keys[high] && columns[low] > columns[high]);
    }
    __device__ void swap(const int low, const int high) const {
        const Key key = keys[low];
        const int column = columns[low];
        keys[low] = keys[high], columns[low] = columns[high];
        keys[high] = key, columns[high] = column;
    }
};

// Sort `count` candidates; whole thread block, room for the next power of two.
//
// K. Batcher, "Sorting networks and their applications", AFIPS 1968, in the form whose comparisons all ascend.
template <typename Key>
__device__ void sort_candidates(const Candidates<Key> list, const int count) {
    int size = 1;
    while (size < count) size *= 2;
    for (int i = count + threadIdx.x; i < size; i += THREADS) list.keys[i] = NONE, list.columns[i] = 0x7fffffff;
    __syncthreads();
    for (int run = 2; run <= size; run *= 2) {
        for (int step = run / 2; step > 0; step /= 2) {
            for (int i = threadIdx.x; i < size / 2; i += THREADS) {
                const int low = i / step * 2 * step + i % step;
                const int high = step == run / 2 ? low - low % run + run - 1 - low % run : low + step;
                if (list.falls(low, high)) list.swap(low, high);
            }
            __syncthreads();
        }
    }
}

// Add the scores of queries for `columns` rows of the corpus to the candidates; the least are the best.
//
// Launch  block 256, a thread block a query.
// Pre     scores (queries, columns), finite; 2 * kept <= STEP; best_scores, best_columns (queries, 2 * kept).
// Post    bounds: all scores that were dropped are at least this; infinite if none was. counts <= 2 * kept.
__global__ void __launch_bounds__(THREADS)
dense_keep(const float* __restrict__ scores, const i64 columns, const i64 first, const int kept,
           float* __restrict__ best_scores, int* __restrict__ best_columns, int* __restrict__ counts,
           float* __restrict__ bounds) {
    __shared__ float keys[LIST];
    __shared__ int places[LIST];
    __shared__ int held;
    const Candidates<float> list = {keys, places};
    const i64 query = blockIdx.x, out = query * 2 * kept;
    const float* mine = scores + query * columns;
    float bound = bounds[query];
    const int before = counts[query];
    for (int i = threadIdx.x; i < before; i += THREADS) keys[i] = best_scores[out + i], places[i] = best_columns[out + i];
    if (threadIdx.x == 0) held = before;
    __syncthreads();
    for (i64 start = 0; start < columns; start += STEP) {
        float found[4];
        bool hits = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const i64 j = start + i * THREADS + threadIdx.x;
            found[i] = j < columns ? mine[j] : NONE;
            hits |= found[i] < bound;
        }
        if (!__syncthreads_or(hits)) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (found[i] < bound) {
                const int at = atomicAdd(&held, 1);
                keys[at] = found[i], places[at] = (int)(first + start + i * THREADS + threadIdx.x);
            }
        }
        __syncthreads();
        const int count = held;
        if (count <= (start + STEP < columns ? STEP : 2 * kept)) continue;
        sort_candidates(list, count);
        bound = keys[kept];
        if (threadIdx.x == 0) held = kept;
        __syncthreads();
    }
    int count = held;
    if (count > 2 * kept) {  // the last steps had no hits
        sort_candidates(list, count);
        bound = keys[kept], count = kept;
    }
    for (int i = threadIdx.x; i < count; i += THREADS) best_scores[out + i] = keys[i], best_columns[out + i] = places[i];
    if (threadIdx.x == 0) counts[query] = count, bounds[query] = bound;
}

// Order the candidates of queries by their distances in float64, and keep the nearest.
//
// Launch  block 256, a thread block a query.
// Pre     counts <= 2 * kept <= STEP, and at least `nearest`. slack (queries,): to add to a bound.
// Post    columns, distances (queries, nearest). A query whose last distance is not below its bound is doubtful.
template <typename Value>
__global__ void __launch_bounds__(THREADS)
dense_decide(const Value* __restrict__ queries, const Value* __restrict__ corpus, const int size, const int euclidean,
             const int* __restrict__ best_columns, const int* __restrict__ counts, const float* __restrict__ bounds,
             const double* __restrict__ slack, const double squared_scale, const int kept, const int nearest,
             i64* __restrict__ columns, double* __restrict__ distances, unsigned char* __restrict__ doubtful) {
    __shared__ double keys[LIST];
    __shared__ int places[LIST];
    const i64 query = blockIdx.x;
    const int count = counts[query];
    const Value* x = queries + query * size;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const int column = best_columns[query * 2 * kept + i];
        const Value* y = corpus + (i64)column * size;
        double total = 0;
        for (int k = 0; k < size; ++k) {  // rounded as the CPU rounds: no fused operations
            const double change = __dadd_rn(x[k], -(double)y[k]);
            total = __dadd_rn(total, euclidean ? __dmul_rn(change, change) : -__dmul_rn(x[k], y[k]));
        }
        keys[i] = euclidean ? total / 2 : total, places[i] = column;
    }
    __syncthreads();
    sort_candidates(Candidates<double>{keys, places}, count);
    for (int i = threadIdx.x; i < nearest; i += THREADS) {
        columns[query * nearest + i] = places[i];
        distances[query * nearest + i] = euclidean ? sqrt(2 * keys[i]) : keys[i];
    }
    if (threadIdx.x == 0) {
        const double allowed = __dmul_rn(__dadd_rn(bounds[query], slack[query]), squared_scale);
        doubtful[query] = !(keys[nearest - 1] < allowed);
    }
}
