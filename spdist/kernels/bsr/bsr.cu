// bsr.cu: the blocks of C = A B, whose pattern is known, for matrices of dense blocks of r x s and of s x t.
//
// Expansion of pointers to the operands, whose products are made while they are compressed: L. Polok, V. Ila, P. Smrz,
// "Fast Sparse Matrix Multiplication on GPU", HPC 2015. Here the expansion of a task lies in shared memory alone.
#include "sort.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int SHARE = SPDIST_TASK_PAIRS;  // pairs of blocks from the start of one task to that of the next
constexpr int ITEMS = 6, ROOM = ITEMS * THREADS;  // pairs that are held at a time
constexpr int NUMBER_BITS = 11;       // of a pair that is held
constexpr int FEW = 64;               // pairs of a block of C that one thread sorts
constexpr int ROW_THREADS = SPDIST_ROW_THREADS;  // of the kernel that takes rows of C whole
static_assert(ROOM <= 1 << NUMBER_BITS && 2 * SHARE <= ROOM, "a task of whole rows fits");

template <typename Value>
struct Operands {
    const Value *a, *b;
    Value* c;
    int r, s, t;
};

// Expansion of a task: pair number `order[e]`, for e from begin[block] to begin[block + 1], is of this block of C.
template <typename Index, typename Pointer>
struct Expansion {
    Index columns[ROOM];          // of the blocks of C
    Pointer start[THREADS];       // of the entries of A at hand: the first place in B,
    u32 through[THREADS];         // pairs up to and with this entry,
    u16 low[THREADS], high[THREADS];  // the blocks of C in its row
    u32 left[ROOM], right[ROOM];  // blocks of A and B, in the order of A's entries
    u32 keys[ROOM];               // block of C, then how many of its pairs were there before
    u32 begin[ROOM + 1], scratch[WARPS];
    u16 order[ROOM];
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

// N neighbouring values, aligned to N values; up to 16 bytes are loaded at once.
template <typename Value, int N> struct __align__(sizeof(Value) * N) Run { Value values[N]; };

__host__ __device__ constexpr int run_of(const int count, const int bytes) {
    int run = 16 / bytes;
    while (count % run) run /= 2;
    return run;
}

template <int N, typename Value>
__device__ __forceinline__ void load(Value (&to)[N], const Value* from) {
    constexpr int RUN = run_of(N, sizeof(Value));
#pragma unroll
    for (int i = 0; i < N; i += RUN) {
        const Run<Value, RUN> run = *reinterpret_cast<const Run<Value, RUN>*>(from + i);
#pragma unroll
        for (int j = 0; j < RUN; ++j) to[i + j] = run.values[j];
    }
}

// Multiply blocks of sizes known to the compiler: a group of lanes a block, TR x TC values a lane.
template <typename Value, int R, int S, int T, int TR, int TC>
struct Tiles {
    static constexpr int ACROSS = T / TC, LANES = R / TR * ACROSS, GROUPS = 32 / LANES;
    static constexpr int RESIDENT = 4;  // thread blocks on a multiprocessor: registers for the loads of several pairs
    static constexpr int AHEAD = S * (TR + TC) * sizeof(Value) <= 128 ? 4 : 2;
    static constexpr int STEP = S % 2 == 0 && 2 * sizeof(Value) <= 16 ? 2 : 1;  // values of a row of A loaded at once
    static_assert(R % TR == 0 && T % TC == 0 && LANES <= 32, "whole tiles, in one warp");

    template <typename Shared>
    static __device__ void multiply(const Operands<Value>& x, const Shared& pairs, const i64 first, const int blocks,
                                    const bool fresh) {
        const int lane = threadIdx.x % 32, unit = lane % LANES;
        const int i = unit / ACROSS * TR, j = unit % ACROSS * TC;
        if (lane / LANES >= GROUPS) return;
        for (int block = threadIdx.x / 32 * GROUPS + lane / LANES; block < blocks; block += WARPS * GROUPS) {
            const int begin = pairs.begin[block], end = pairs.begin[block + 1];
            if (begin == end && !fresh) continue;
            Value* out = x.c + (first + block) * (R * T) + i * T + j;
            Value sum[TR][TC];
#pragma unroll
            for (int m = 0; m < TR; ++m)
#pragma unroll
                for (int n = 0; n < TC; ++n) sum[m][n] = fresh ? Value(0) : out[m * T + n];
#pragma unroll AHEAD
            for (int e = begin; e < end; ++e) {
                const int pair = pairs.order[e];
                const Value* a = x.a + (i64)pairs.left[pair] * (R * S) + i * S;
                const Value* b = x.b + (i64)pairs.right[pair] * (S * T) + j;
#pragma unroll
                for (int k = 0; k < S; k += STEP) {
                    Value factors[TR][STEP];
#pragma unroll
                    for (int m = 0; m < TR; ++m) load(factors[m], a + m * S + k);
#pragma unroll
                    for (int h = 0; h < STEP; ++h) {
                        Value row[TC];
                        load(row, b + (k + h) * T);
#pragma unroll
                        for (int m = 0; m < TR; ++m)
#pragma unroll
                            for (int n = 0; n < TC; ++n) sum[m][n] += factors[m][h] * row[n];
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

// One tensor core instruction: c += a b, a of M x K, b of K x 8. Lane l has of a, as element e, row l / 4 +
// 8 (e % 2), column l % 4 + 4 (e / 2); of b row l % 4 + 4 e, column l / 4; of c row l / 4 + 8 (e / 2), column
// 2 (l % 4) + e % 2.
struct Double {
    using Value = double;
    using Factor = double;
    static constexpr int M = 8, K = 4;
    static __device__ __forceinline__ Factor factor(const double x) { return x; }
    static __device__ __forceinline__ void multiply(double (&c)[2], const double (&a)[1], const double (&b)[1]) {
        asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+d"(c[0]), "+d"(c[1]) : "d"(a[0]), "d"(b[0]));
    }
};

// Single precision: factors are rounded to 11 significant bits, sums have all 24.
struct Rounded {
    using Value = float;
    using Factor = u32;
    static constexpr int M = 16, K = 8;
    static __device__ __forceinline__ Factor factor(const float x) {
        Factor rounded;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
        return rounded;
    }
    static __device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
};

// Multiply blocks on the tensor cores, a warp a block; blocks are padded with zeros to multiples of M, K and 8.
template <typename Core, int R, int S, int T>
struct Tensor {
    using Value = typename Core::Value;
    static constexpr int M = Core::M, K = Core::K, OF_A = M * K / 32, OF_B = K / 4, OF_C = M / 4;  // elements of a lane
    static constexpr int DOWN = (R + M - 1) / M, STEPS = (S + K - 1) / K, ACROSS = (T + 7) / 8;
    static constexpr int RESIDENT = DOWN * ACROSS == 1 ? 6 : 2;

    template <typename Shared>
    static __device__ void multiply(const Operands<Value>& x, const Shared& pairs, const i64 first, const int blocks,
                                    const bool fresh) {
        const int lane = threadIdx.x % 32, major = lane / 4, minor = lane % 4;
        for (int block = threadIdx.x / 32; block < blocks; block += WARPS) {
            const int begin = pairs.begin[block], end = pairs.begin[block + 1];
            if (begin == end && !fresh) continue;
            Value* out = x.c + (first + block) * (R * T);
            Value sum[DOWN][ACROSS][OF_C];
#pragma unroll
            for (int m = 0; m < DOWN; ++m)
#pragma unroll
                for (int n = 0; n < ACROSS; ++n)
#pragma unroll
                    for (int h = 0; h < OF_C; ++h) {
                        const int i = M * m + major + h / 2 * 8, j = 8 * n + 2 * minor + h % 2;
                        sum[m][n][h] = fresh || i >= R || j >= T ? Value(0) : out[i * T + j];
                    }
#pragma unroll (R * T <= 64 ? 2 : 1)
            for (int e = begin; e < end; ++e) {
                const int pair = pairs.order[e];
                const Value* a = x.a + (i64)pairs.left[pair] * (R * S);
                const Value* b = x.b + (i64)pairs.right[pair] * (S * T);
                typename Core::Factor left[DOWN][STEPS][OF_A], right[STEPS][ACROSS][OF_B];
#pragma unroll
                for (int k = 0; k < STEPS; ++k) {
#pragma unroll
                    for (int m = 0; m < DOWN; ++m)
#pragma unroll
                        for (int h = 0; h < OF_A; ++h) {
                            const int i = M * m + major + h % 2 * 8, inner = K * k + minor + h / 2 * 4;
                            left[m][k][h] = Core::factor(i < R && inner < S ? a[i * S + inner] : Value(0));
                        }
#pragma unroll
                    for (int n = 0; n < ACROSS; ++n)
#pragma unroll
                        for (int h = 0; h < OF_B; ++h) {
                            const int inner = K * k + minor + h * 4, j = 8 * n + major;
                            right[k][n][h] = Core::factor(j < T && inner < S ? b[inner * T + j] : Value(0));
                        }
                }
#pragma unroll
                for (int k = 0; k < STEPS; ++k)
#pragma unroll
                    for (int m = 0; m < DOWN; ++m)
#pragma unroll
                        for (int n = 0; n < ACROSS; ++n) Core::multiply(sum[m][n], left[m][k], right[k][n]);
            }
#pragma unroll
            for (int m = 0; m < DOWN; ++m)
#pragma unroll
                for (int n = 0; n < ACROSS; ++n)
#pragma unroll
                    for (int h = 0; h < OF_C; h += 2) {
                        const int i = M * m + major + h / 2 * 8, j = 8 * n + 2 * minor;
                        if (T % 2 == 0) {
                            if (i < R && j < T)
                                *reinterpret_cast<Run<Value, 2>*>(out + i * T + j) = {{sum[m][n][h], sum[m][n][h + 1]}};
                        } else {
                            if (i < R && j < T) out[i * T + j] = sum[m][n][h];
                            if (i < R && j + 1 < T) out[i * T + j + 1] = sum[m][n][h + 1];
                        }
                    }
        }
    }
};

// Multiply blocks of any size, a warp a block, a value at a time.
template <typename Value>
struct AnySize {
    static constexpr int RESIDENT = 4;

    template <typename Shared>
    static __device__ void multiply(const Operands<Value>& x, const Shared& pairs, const i64 first, const int blocks,
                                    const bool fresh) {
        const int size = x.r * x.t;
        for (int block = threadIdx.x / 32; block < blocks; block += WARPS) {
            const int begin = pairs.begin[block], end = pairs.begin[block + 1];
            if (begin == end && !fresh) continue;
            Value* out = x.c + (first + block) * size;
            for (int at = threadIdx.x % 32; at < size; at += 32) {
                const int i = at / x.t, j = at % x.t;
                Value sum = fresh ? Value(0) : out[at];
                for (int e = begin; e < end; ++e) {
                    const int pair = pairs.order[e];
                    const Value* a = x.a + (i64)pairs.left[pair] * x.r * x.s + (i64)i * x.s;
                    const Value* b = x.b + (i64)pairs.right[pair] * x.s * x.t + j;
                    for (int k = 0; k < x.s; ++k) sum += a[k] * b[(i64)k * x.t];
                }
                out[at] = sum;
            }
        }
    }
};

// Turn counts of pairs in blocks of C into places; returns whether a block has more than FEW. Two barriers.
template <typename Shared>
__device__ __forceinline__ bool scan_counts(Shared& x, const int blocks, const int pairs) {
    u32 counts[ITEMS], sum = 0, total, most = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int block = threadIdx.x * ITEMS + i;
        counts[i] = block < blocks ? x.begin[block] : 0;
        sum += counts[i];
        most = max(most, counts[i]);
    }
    u32 before = group_sum<THREADS>(sum, threadIdx.x, x.scratch, total) - sum;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (threadIdx.x * ITEMS + i < blocks) x.begin[threadIdx.x * ITEMS + i] = before;
        before += counts[i];
    }
    if (threadIdx.x == 0) x.begin[blocks] = pairs;
    return __syncthreads_or(most > FEW);
}

// Order the pairs by their blocks of C, and the pairs of one block by A's entries.
template <typename Shared>
__device__ __forceinline__ void group_pairs(Shared& x, const int pairs, const int blocks) {
    __syncthreads();
    if (scan_counts(x, blocks, pairs)) {
        u32 keys[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int at = i * THREADS + threadIdx.x;
            keys[i] = at < pairs ? x.keys[at] >> NUMBER_BITS << NUMBER_BITS | at : ~0u;
        }
        __syncthreads();
        sort_group<THREADS, ITEMS>(keys, threadIdx.x, x.keys);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) x.order[threadIdx.x * ITEMS + i] = keys[i] & ((1 << NUMBER_BITS) - 1);
    } else {
        for (int i = threadIdx.x; i < pairs; i += THREADS)
            x.order[x.begin[x.keys[i] >> NUMBER_BITS] + (x.keys[i] & ((1 << NUMBER_BITS) - 1))] = i;
        __syncthreads();
        // They came about in order, but for the race of the warps.
        for (int block = threadIdx.x; block < blocks; block += THREADS) {
            const int begin = x.begin[block], end = x.begin[block + 1];
            for (int e = begin + 1; e < end; ++e) {
                const u16 pair = x.order[e];
                int place = e;
                for (; place > begin && x.order[place - 1] > pair; --place) x.order[place] = x.order[place - 1];
                x.order[place] = pair;
            }
        }
    }
    __syncthreads();
}

// Look up an entry of A: the start of the row of B that it multiplies, cut to the task's blocks of C, and its pairs.
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

// Cut the blocks of C into tasks.
//
// Launch  one thread per task: block 256, grid ceil_div(tasks, 256).
// Pre     ends[blocks]: pairs up to and with each block of C, one at least in each; (tasks - 1) * SHARE < ends[blocks - 1]
//         <= tasks * SHARE.
// Post    firsts[tasks + 1]: the first block of each task. That is the first before which there are SHARE pairs times the
//         task's number, or the start of the next row if its row has so few pairs that it is not cut. rows[2 * task],
//         rows[2 * task + 1]: block rows of the task's first and last block. Some tasks may have none.
template <typename Pointer>
__global__ void __launch_bounds__(THREADS)
bsr_cut(const i64 tasks, const i64 blocks, const i64 nrows, const i64* __restrict__ ends, const Pointer* __restrict__ c_indptr,
        i64* __restrict__ firsts, i64* __restrict__ rows) {
    const i64 task = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (task >= tasks) return;
    i64 side[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        i64 first = task + i ? min(lower_bound(ends, (i64)0, blocks, (task + i) * SHARE) + 1, blocks) : 0;
        const i64 row = lower_bound(c_indptr, (i64)0, nrows, (Pointer)(first + 1)) - 1;
        const i64 begin = c_indptr[row], end = c_indptr[row + 1];
        if (begin < first && first < end && ends[end - 1] - (begin ? ends[begin - 1] : 0) <= ROOM - SHARE) first = end;
        side[i] = first;
    }
    firsts[task] = side[0];
    if (task == tasks - 1) firsts[tasks] = side[1];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        rows[2 * task + i] = lower_bound(c_indptr, (i64)0, nrows, (Pointer)(max(side[i] - i, (i64)0) + 1)) - 1;
}

// Write the blocks of C.
//
// Launch  block 256, grid tasks.
// Shared  36 to 43 KiB, static.
// Pre     firsts and rows of bsr_cut. Block columns rise strictly in rows of B and C; C has the structural product's pattern. Fewer than
//         2^32 blocks in A and in B. Values are aligned to 16 bytes.
// Post    each block of C written; a block of more than ROOM - SHARE pairs may be read and written again, by the same
//         threads. Pairs are added in the order of A's entries: no atomics, the same bits on every run.
template <typename Value, typename Index, typename Pointer, typename Method>
__global__ void __launch_bounds__(THREADS, Method::RESIDENT)
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
    for (int i = threadIdx.x; i < blocks; i += THREADS) x.columns[i] = c_indices[first + i], x.begin[i] = 0;
    const i64 end = a_indptr[last_row + 1];
    i64 stage = a_indptr[first_row];
    u32 done = 0, total = 0;
    for (bool fresh = true, all = false; !all; fresh = false) {
        int held = 0;
        while (held < ROOM) {
            if (done == total) {
                all = stage >= end;
                if (all) break;
                __syncthreads();
                const i64 p = stage + threadIdx.x;
                u32 mine = 0;
                if (p < end) {
                    const i64 row = lower_bound(a_indptr, first_row, last_row + 1, (Pointer)(p + 1)) - 1;
                    mine = look_up(x, p, row, first, blocks, a_indices, b_indptr, b_indices, c_indptr);
                }
                x.through[threadIdx.x] = group_sum<THREADS>(mine, threadIdx.x, x.scratch, total);
                __syncthreads();
                done = 0;
                stage += THREADS;
            }
            const u32 taken = min(total - done, (u32)(ROOM - held));
            for (u32 i = threadIdx.x; i < taken; i += THREADS) {
                const u32 number = done + i;
                const int entry = lower_bound(x.through, 0, THREADS, number + 1);
                const i64 q = (i64)x.start[entry] + (number - (entry ? x.through[entry - 1] : 0));
                const u32 block = lower_bound(x.columns, (int)x.low[entry], (int)x.high[entry], b_indices[q]);
                x.keys[held + i] = block << NUMBER_BITS | atomicAdd(&x.begin[block], 1u);
                x.left[held + i] = (u32)(stage - THREADS + entry);
                x.right[held + i] = (u32)q;
            }
            done += taken;
            held += taken;
        }
        if (held == 0 && !fresh) break;
        group_pairs(x, held, blocks);
        Method::multiply(values, x, first, blocks, fresh);
        if (all) break;
        __syncthreads();
        for (int i = threadIdx.x; i < blocks; i += THREADS) x.begin[i] = 0;
        __syncthreads();
    }
}

// Write the blocks of C row by row, for short rows: they are added up in shared memory, with nothing expanded.
//
// Launch  block ROW_THREADS, grid ceil_div(nrows, ROW_THREADS / GROUP): a group of lanes for each block row of C, a lane for
//         each pair.
// Shared  ROW_THREADS / GROUP * room * (R * T * sizeof(Value) + sizeof(Index)), dynamic.
// Pre     as for bsr_multiply; room > 0. A row of C of more than `room` blocks is made in so many parts.
// Post    each block of C written once. Blocks of a row of B meet different blocks of C, and rows of B are taken in the
//         order of A's entries: no atomics, the same bits on every run, and those of bsr_multiply with Tiles.
template <typename Value, typename Index, typename Pointer, int R, int S, int T, int GROUP>
__global__ void __launch_bounds__(ROW_THREADS)
bsr_rows(const i64 nrows, const int room, const Pointer* __restrict__ a_indptr, const Index* __restrict__ a_indices,
         const Value* __restrict__ a_data, const Pointer* __restrict__ b_indptr, const Index* __restrict__ b_indices,
         const Value* __restrict__ b_data, const Pointer* __restrict__ c_indptr, const Index* __restrict__ c_indices,
         Value* __restrict__ c_data) {
    constexpr int GROUPS = ROW_THREADS / GROUP;
    extern __shared__ __align__(16) unsigned char memory[];
    const int lane = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
    const u32 lanes = (GROUP == 32 ? FULL_WARP : (1u << GROUP % 32) - 1) << threadIdx.x % 32 / GROUP * GROUP;
    const i64 row = (i64)blockIdx.x * GROUPS + group;
    if (row >= nrows) return;
    Value* all_sums = reinterpret_cast<Value*>(memory);
    Value* sums = all_sums + (i64)group * room * (R * T);  // value w of block e at w * room + e
    Index* columns = reinterpret_cast<Index*>(all_sums + (i64)GROUPS * room * (R * T)) + (i64)group * room;
    const Pointer end = a_indptr[row + 1];
    const i64 row_end = c_indptr[row + 1];
    for (i64 first = c_indptr[row]; first < row_end; first += room) {
        const int blocks = (int)min(row_end - first, (i64)room);
        const bool whole = first == c_indptr[row] && first + blocks == row_end;
        for (int e = lane; e < blocks; e += GROUP) {
            columns[e] = c_indices[first + e];
#pragma unroll
            for (int w = 0; w < R * T; ++w) sums[w * room + e] = Value(0);
        }
        __syncwarp(lanes);
        for (Pointer base = a_indptr[row]; base < end; base += GROUP) {
            Pointer start = 0, stop = 0;
            if (base + lane < end) {
                const Index k = a_indices[base + lane];
                start = b_indptr[k], stop = b_indptr[k + 1];
                if (!whole) {
                    start = lower_bound(b_indices, start, stop, columns[0]);
                    stop = lower_bound(b_indices, start, stop, columns[blocks - 1] + 1);
                }
            }
            const int entries = (int)min(end - base, (Pointer)GROUP);
            for (int entry = 0; entry < entries; ++entry) {
                const Pointer last = __shfl_sync(lanes, stop, entry, GROUP);
                Value left[R * S];
                load(left, a_data + (i64)(base + entry) * (R * S));
                int at = 0;
                for (Pointer q = __shfl_sync(lanes, start, entry, GROUP) + lane; q < last; q += GROUP) {
                    at = lower_bound(columns, at, blocks, b_indices[q]);
                    Value right[S * T];
                    load(right, b_data + (i64)q * (S * T));
#pragma unroll
                    for (int i = 0; i < R; ++i)
#pragma unroll
                        for (int j = 0; j < T; ++j) {
                            Value& sum = sums[(i * T + j) * room + at];
                            Value total = sum;
#pragma unroll
                            for (int h = 0; h < S; ++h) total += left[i * S + h] * right[h * T + j];
                            sum = total;
                        }
                }
                __syncwarp(lanes);
            }
        }
        for (int v = lane; v < blocks * (R * T); v += GROUP)
            c_data[first * (R * T) + v] = sums[v % (R * T) * room + v / (R * T)];
        __syncwarp(lanes);
    }
}
