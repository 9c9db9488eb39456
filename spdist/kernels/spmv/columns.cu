// columns.cu: y = A x with A in CSR and x a matrix of many columns: lanes take columns, and rows are cut into pieces.
#include "common.cuh"

// Consecutive columns of a row of x or y, which are read and written at once.
template <typename Vector, int COUNT>
struct __align__(sizeof(Vector) * COUNT) Columns { Vector of[COUNT]; };

// Multiply pieces of rows: LANES lanes with COUNT columns each, SLICES of them for the entries of a piece.
//
// Launch  block 256, grid (ceil_div(pieces, 256 / (LANES * SLICES)), ceil_div(columns, LANES * COUNT)).
// Pre     piece p has entries starts[p] up to starts[p + 1]; places[p] is its row, or -1 - slot of a row of several
//         pieces; places null where pieces are rows. COUNT divides `columns`; x, y, partial are aligned to COUNT numbers.
// Post    y of rows of one piece, and partial[slot * columns + column], written once; the same bits on every run.
template <typename Value, typename Vector, typename Index, typename Pointer, int LANES, int COUNT, int SLICES>
__global__ void __launch_bounds__(256)
columns_multiply(const i64 pieces, const i64 columns, const Pointer* starts, const int* __restrict__ places,
                 const Index* indices, const Value* data, const Vector* x, Vector* __restrict__ y,
                 Vector* __restrict__ partial) {
    constexpr int GROUP = LANES * SLICES, AT_ONCE = 4;
    typedef Columns<Vector, COUNT> Lane;
    take_turn();  // before the matrix is read: it may be the caller's, and just have changed
    const i64 piece = (i64)blockIdx.x * (256 / GROUP) + threadIdx.x / GROUP;
    const int slice = threadIdx.x % GROUP / LANES;
    const i64 column = ((i64)blockIdx.y * LANES + threadIdx.x % LANES) * COUNT;
    const bool active = piece < pieces && column < columns;
    const Pointer end = active ? starts[piece + 1] : 0;
    Lane sum;
#pragma unroll
    for (int c = 0; c < COUNT; ++c) sum.of[c] = Vector(0);
    if (active) x += column;
    for (Pointer k = active ? starts[piece] + slice : 0; k < end; k += AT_ONCE * SLICES) {
        Lane read[AT_ONCE];
        Vector value[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {  // the last entry instead of those behind it: loads wait for no branch
            const Pointer at = min(k + u * SLICES, end - 1);
            value[u] = Vector(data[at]);
            read[u] = *(const Lane*)(x + (i64)indices[at] * columns);
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            if (k + u * SLICES >= end) continue;
#pragma unroll
            for (int c = 0; c < COUNT; ++c) sum.of[c] += value[u] * read[u].of[c];
        }
    }
#pragma unroll
    for (int step = LANES; step < GROUP; step *= 2)
#pragma unroll
        for (int c = 0; c < COUNT; ++c) sum.of[c] += across(sum.of[c], step);
    if (!active || slice > 0) return;
    const i64 place = places ? places[piece] : piece;
    *(Lane*)(place >= 0 ? y + place * columns + column : partial + (-1 - place) * columns + column) = sum;
}

// Add up the pieces of each row of several, in order: threads of a column take every so-many-th piece.
//
// Launch  block 256, grid (rows, ceil_div(columns, 32)).
// Shared  the sums of all threads.
// Pre     pieces of row rows[i]: slots firsts[i] up to firsts[i + 1].
template <typename Vector>
__global__ void __launch_bounds__(256)
columns_add(const i64 columns, const int* __restrict__ rows, const int* __restrict__ firsts, const Vector* partial,
            Vector* __restrict__ y) {
    __shared__ Vector sums[8][32];
    take_turn();
    const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
    const i64 column = (i64)blockIdx.y * 32 + lane;
    Vector sum = Vector(0);
    if (column < columns)
#pragma unroll 4
        for (int slot = firsts[blockIdx.x] + part; slot < firsts[blockIdx.x + 1]; slot += 8)
            sum += partial[slot * columns + column];
    sums[part][lane] = sum;
    __syncthreads();
    if (part > 0 || column >= columns) return;
    for (int other = 1; other < 8; ++other) sum += sums[other][lane];
    y[rows[blockIdx.x] * columns + column] = sum;
}
