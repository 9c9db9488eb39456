// bsr.cu: the blocks of C = A B, whose pattern is known, for matrices of dense blocks of r x s and of s x t.
//
// Expansion of pointers to the operands, whose products are made while they are compressed: L. Polok, V. Ila, P. Smrz,
// "Fast Sparse Matrix Multiplication on GPU", HPC 2015. Here the expansion of a task lies in shared memory alone.
#include "sort.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int SHARE = 1536;     // pairs of blocks between the starts of two tasks
constexpr int ROOM_BITS = 11, ROOM = 1 << ROOM_BITS;  // pairs that are held at a time

template <typename Value>
struct Operands {
    const Value *a, *b;
    Value* c;
    int r, s, t;
};

// Expansion of a task. `keys` hold the number of a pair's block of C, then the pair's own.
template <typename Index, typename Pointer>
struct Expansion {
    u32 keys[ROOM], left[ROOM], right[ROOM];
    Index columns[SHARE];
    unsigned short begin[SHARE], end[SHARE];
    Pointer start[THREADS];                // of the entries of A at hand: the first place in B,
    u32 through[THREADS], scratch[WARPS];  // pairs up to and with this entry,
    unsigned short low[THREADS], high[THREADS];  // the blocks of C in its row
};

// First place in [first, last) whose value is not below `value`.
template <typename Place, typename Values, typename Value>
__device__ __forceinline__ Place lower_bound(const Values& values, Place first, Place last, const Value value) {
    while (first < last) {
        const Place middle = first + (last - first) / 2;
        if (values[middle] < value) first = middle + 1;
        else last = middle;
    }
    return first;
}

// N values that lie side by side, loaded at once where they are aligned to their size.
template <typename Value, int N> struct __align__(sizeof(Value) * N) Run { Value values[N]; };

template <int N, typename Value>
__device__ __forceinline__ void load(Value (&to)[N], const Value* from) {
    constexpr bool WHOLE = (N & (N - 1)) == 0 && N * sizeof(Value) <= 16;
    constexpr int RUN = WHOLE ? N : 1;
#pragma unroll
    for (int i = 0; i < N; i += RUN) {
        const Run<Value, RUN> run = *reinterpret_cast<const Run<Value, RUN>*>(from + i);
#pragma unroll
        for (int j = 0; j < RUN; ++j) to[i + j] = run.values[j];
    }
}

// Blocks of sizes that are known: a group of lanes each, every lane TR x TC values.
template <typename Value, int R, int S, int T, int TR, int TC>
struct Tiles {
    static constexpr int ACROSS = T / TC, LANES = R / TR * ACROSS, GROUPS = 32 / LANES;
    static_assert(R % TR == 0 && T % TC == 0 && LANES <= 32, "whole tiles, in one warp");

    template <typename Shared>
    static __device__ void multiply(const Operands<Value>& x, const Shared& pairs, const i64 first, const int blocks,
                                    const bool fresh) {
        const int lane = threadIdx.x % 32, unit = lane % LANES;
        const int i = unit / ACROSS * TR, j = unit % ACROSS * TC;
        if (lane / LANES >= GROUPS) return;
        for (int block = threadIdx.x / 32 * GROUPS + lane / LANES; block < blocks; block += WARPS * GROUPS) {
            const int begin = pairs.begin[block], end = pairs.end[block];
            if (begin == end && !fresh) continue;
            Value* out = x.c + (first + block) * (R * T) + i * T + j;
            Value sum[TR][TC];
#pragma unroll
            for (int m = 0; m < TR; ++m)
#pragma unroll
                for (int n = 0; n < TC; ++n) sum[m][n] = fresh ? Value(0) : out[m * T + n];
#pragma unroll 2
            for (int e = begin; e < end; ++e) {
                const u32 pair = pairs.keys[e] % ROOM;
                const Value* a = x.a + (i64)pairs.left[pair] * (R * S) + i * S;
                const Value* b = x.b + (i64)pairs.right[pair] * (S * T) + j;
#pragma unroll
                for (int k = 0; k < S; ++k) {
                    Value row[TC];
                    load(row, b + k * T);
#pragma unroll
                    for (int m = 0; m < TR; ++m) {
                        const Value factor = a[m * S + k];
#pragma unroll
                        for (int n = 0; n < TC; ++n) sum[m][n] += factor * row[n];
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < TR; ++m)
#pragma unroll
                for (int n = 0; n < TC; ++n) out[m * T + n] = sum[m][n];
        }
    }
};

// c += a b on the tensor cores. Lane l has row l / 4, column l % 4 of a, 8 x 4; row l % 4, column l / 4 of b, 4 x 8; row
// l / 4, columns 2 (l % 4) and the next of c.
__device__ __forceinline__ void mma(double (&c)[2], const double a, const double b) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(c[0]), "+d"(c[1]) : "d"(a), "d"(b));
}

// Blocks of double on the tensor cores, a warp each; filled up with zeros to multiples of 8, 4 and 8.
template <int R, int S, int T>
struct Tensor {
    static constexpr int DOWN = (R + 7) / 8, STEPS = (S + 3) / 4, ACROSS = (T + 7) / 8;

    template <typename Shared>
    static __device__ void multiply(const Operands<double>& x, const Shared& pairs, const i64 first, const int blocks,
                                    const bool fresh) {
        const int lane = threadIdx.x % 32, major = lane / 4, minor = lane % 4;
        for (int block = threadIdx.x / 32; block < blocks; block += WARPS) {
            const int begin = pairs.begin[block], end = pairs.end[block];
            if (begin == end && !fresh) continue;
            double* out = x.c + (first + block) * (R * T);
            double sum[DOWN][ACROSS][2];
#pragma unroll
            for (int m = 0; m < DOWN; ++m)
#pragma unroll
                for (int n = 0; n < ACROSS; ++n)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int i = 8 * m + major, j = 8 * n + 2 * minor + h;
                        sum[m][n][h] = fresh || i >= R || j >= T ? 0.0 : out[i * T + j];
                    }
#pragma unroll (R * T <= 64 ? 2 : 1)
            for (int e = begin; e < end; ++e) {
                const u32 pair = pairs.keys[e] % ROOM;
                const double* a = x.a + (i64)pairs.left[pair] * (R * S);
                const double* b = x.b + (i64)pairs.right[pair] * (S * T);
                double left[DOWN][STEPS], right[STEPS][ACROSS];
#pragma unroll
                for (int k = 0; k < STEPS; ++k) {
                    const int inner = 4 * k + minor;
#pragma unroll
                    for (int m = 0; m < DOWN; ++m) {
                        const int i = 8 * m + major;
                        left[m][k] = i < R && inner < S ? a[i * S + inner] : 0.0;
                    }
#pragma unroll
                    for (int n = 0; n < ACROSS; ++n) {
                        const int j = 8 * n + major;
                        right[k][n] = j < T && inner < S ? b[inner * T + j] : 0.0;
                    }
                }
#pragma unroll
                for (int k = 0; k < STEPS; ++k)
#pragma unroll
                    for (int m = 0; m < DOWN; ++m)
#pragma unroll
                        for (int n = 0; n < ACROSS; ++n) mma(sum[m][n], left[m][k], right[k][n]);
            }
#pragma unroll
            for (int m = 0; m < DOWN; ++m)
#pragma unroll
                for (int n = 0; n < ACROSS; ++n) {
                    const int i = 8 * m + major, j = 8 * n + 2 * minor;
                    if (T % 2 == 0) {
                        if (i < R && j < T) *reinterpret_cast<double2*>(out + i * T + j) = make_double2(sum[m][n][0], sum[m][n][1]);
                    } else {
                        if (i < R && j < T) out[i * T + j] = sum[m][n][0];
                        if (i < R && j + 1 < T) out[i * T + j + 1] = sum[m][n][1];
                    }
                }
        }
    }
};

// Blocks of any size, a warp each, a value at a time.
template <typename Value>
struct AnySize {
    template <typename Shared>
    static __device__ void multiply(const Operands<Value>& x, const Shared& pairs, const i64 first, const int blocks,
                                    const bool fresh) {
        const int size = x.r * x.t;
        for (int block = threadIdx.x / 32; block < blocks; block += WARPS) {
            const int begin = pairs.begin[block], end = pairs.end[block];
            if (begin == end && !fresh) continue;
            Value* out = x.c + (first + block) * size;
            for (int at = threadIdx.x % 32; at < size; at += 32) {
                const int i = at / x.t, j = at % x.t;
                Value sum = fresh ? Value(0) : out[at];
                for (int e = begin; e < end; ++e) {
                    const u32 pair = pairs.keys[e] % ROOM;
                    const Value* a = x.a + (i64)pairs.left[pair] * x.r * x.s + (i64)i * x.s;
                    const Value* b = x.b + (i64)pairs.right[pair] * x.s * x.t + j;
                    for (int k = 0; k < x.s; ++k) sum += a[k] * b[(i64)k * x.t];
                }
                out[at] = sum;
            }
        }
    }
};

// Sort the pairs by their blocks of C, in each by their own number, and note where each block's pairs lie.
template <int ITEMS, typename Shared>
__device__ __forceinline__ void sort_pairs(Shared& x, const int pairs) {
    u32 keys[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int at = i * THREADS + threadIdx.x;
        keys[i] = at < pairs ? x.keys[at] : ~0u;
    }
    __syncthreads();
    sort_group<THREADS, ITEMS>(keys, threadIdx.x, x.keys);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) x.keys[threadIdx.x * ITEMS + i] = keys[i];
}

template <typename Shared>
__device__ __forceinline__ void group_pairs(Shared& x, const int pairs, const int blocks) {
    for (int i = threadIdx.x; i < blocks; i += THREADS) x.begin[i] = x.end[i] = 0;
    __syncthreads();
    if (pairs <= 2 * THREADS) sort_pairs<2>(x, pairs);
    else if (pairs <= 4 * THREADS) sort_pairs<4>(x, pairs);
    else sort_pairs<8>(x, pairs);
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
        const u32 block = x.keys[i] >> ROOM_BITS;
        if (i == 0 || x.keys[i - 1] >> ROOM_BITS != block) x.begin[block] = i;
        if (i == pairs - 1 || x.keys[i + 1] >> ROOM_BITS != block) x.end[block] = i + 1;
    }
    __syncthreads();
}

// Look up an entry of A: where the row of B starts that it asks for, cut to the task's blocks of C, and its pairs.
template <typename Index, typename Pointer, typename Shared>
__device__ __forceinline__ u32 look_up(Shared& x, const i64 p, const i64 row, const i64 first, const int blocks,
                                       const Index* __restrict__ a_indices, const Pointer* __restrict__ b_indptr,
                                       const Index* __restrict__ b_indices, const Pointer* __restrict__ c_indptr) {
    const i64 low = (i64)c_indptr[row] - first, high = (i64)c_indptr[row + 1] - first;
    const int from = (int)max(low, (i64)0), to = (int)min(high, (i64)blocks);
    if (from >= to) return 0;
    const Index k = a_indices[p];
    Pointer start = b_indptr[k], stop = b_indptr[k + 1];
    if (low < 0) start = lower_bound(b_indices, start, stop, x.columns[from]);
    if (high > blocks) stop = lower_bound(b_indices, start, stop, x.columns[to - 1] + 1);
    x.start[threadIdx.x] = start;
    x.low[threadIdx.x] = from;
    x.high[threadIdx.x] = to;
    return (u32)(stop - start);
}

// Write the blocks of C.
//
// Launch  block 256, grid tasks.
// Shared  about 40 KiB, static.
// Pre     firsts[tasks + 1]: the first block of C of each task, such that the pairs of blocks before it are the least not
//         below SHARE times the task's number; rows[2 * task], rows[2 * task + 1]: block rows of a task's first and last
//         block, any where it has none. Rows of B and C rise strictly, those of C are the structural product's. Fewer than
//         2^32 blocks in A and in B. Values are aligned to 16 bytes.
// Post    each block of C written; a block of more than ROOM - SHARE pairs may be read and written again, by the same
//         threads. Pairs are added in the order of A's entries: no atomics, the same bits on every run.
template <typename Value, typename Index, typename Pointer, typename Method>
__global__ void __launch_bounds__(THREADS)
bsr_multiply(const i64* __restrict__ firsts, const i64* __restrict__ rows, const int r, const int s, const int t,
             const Pointer* __restrict__ a_indptr, const Index* __restrict__ a_indices, const Value* __restrict__ a_data,
             const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices, const Value* __restrict__ b_data,
             const Pointer* __restrict__ c_indptr, const Index* __restrict__ c_indices, Value* __restrict__ c_data) {
    __shared__ Expansion<Index, Pointer> x;
    const i64 first = firsts[blockIdx.x];
    const int blocks = (int)(firsts[blockIdx.x + 1] - first);
    if (blocks == 0) return;
    const Operands<Value> values{a_data, b_data, c_data, r, s, t};
    const i64 first_row = rows[2 * blockIdx.x], last_row = rows[2 * blockIdx.x + 1];
    for (int i = threadIdx.x; i < blocks; i += THREADS) x.columns[i] = c_indices[first + i];
    const i64 end = a_indptr[last_row + 1];
    int held = 0;
    bool fresh = true;
    for (i64 stage = a_indptr[first_row]; stage < end; stage += THREADS) {
        __syncthreads();
        const i64 p = stage + threadIdx.x;
        u32 mine = 0, total;
        if (p < end) {
            const i64 row = lower_bound(a_indptr, first_row, last_row + 1, (Pointer)(p + 1)) - 1;
            mine = look_up(x, p, row, first, blocks, a_indices, b_indptr, b_indices, c_indptr);
        }
        x.through[threadIdx.x] = group_sum<THREADS>(mine, threadIdx.x, x.scratch, total);
        __syncthreads();
        for (u32 done = 0; done < total;) {
            const u32 taken = min(total - done, (u32)(ROOM - held));
            for (u32 i = threadIdx.x; i < taken; i += THREADS) {
                const u32 number = done + i;
                const int entry = lower_bound(x.through, 0, THREADS, number + 1);
                const i64 q = (i64)x.start[entry] + (number - (entry ? x.through[entry - 1] : 0));
                const u32 block = lower_bound(x.columns, (int)x.low[entry], (int)x.high[entry], b_indices[q]);
                x.keys[held + i] = block << ROOM_BITS | (held + i);
                x.left[held + i] = (u32)(stage + entry);
                x.right[held + i] = (u32)q;
            }
            done += taken;
            held += taken;
            if (held < ROOM) continue;
            __syncthreads();
            group_pairs(x, held, blocks);
            Method::multiply(values, x, first, blocks, fresh);
            __syncthreads();
            held = 0;
            fresh = false;
        }
    }
    __syncthreads();
    if (held == 0 && !fresh) return;
    group_pairs(x, held, blocks);
    Method::multiply(values, x, first, blocks, fresh);
}
