// csr.cu: y = A x with A in CSR: CSR-scalar (a thread a row) and CSR-vector (a group of lanes a row).
//
// F. Villa, "Efficient Sparse Matrix-Vector Multiplication on CUDA", Politecnico di Milano; widths below a warp are ours.
#include "common.cuh"

// Sum over a group of WIDTH lanes, in every lane.
template <int WIDTH, typename T>
__device__ __forceinline__ T group_sum(T value) {
#pragma unroll
    for (int step = WIDTH / 2; step > 0; step /= 2) value += across(value, step);
    return value;
}

// Multiply with column blockIdx.y of x; WIDTH lanes a row, 1 is CSR-scalar.
//
// Launch  block 256, grid (ceil_div(nrows, 256 / WIDTH), columns).
// Pre     x[column * stride + k], 0 <= columns < ncols; duplicates count twice.
// Post    y[row * stride + k] written once, the same bits on every run.
template <typename Value, typename Vector, typename Index, typename Pointer, int WIDTH>
__global__ void __launch_bounds__(256)
spmv_csr(const i64 nrows, const i64 stride, const Pointer* indptr, const Index* indices, const Value* data,
         const Vector* x, Vector* __restrict__ y) {
    take_turn();  // before the matrix is read: it may be the caller's, and just have changed
    const i64 row = (i64)blockIdx.x * (256 / WIDTH) + threadIdx.x / WIDTH;
    const int lane = threadIdx.x % WIDTH;
    const Pointer begin = row < nrows ? indptr[row] : 0, end = row < nrows ? indptr[row + 1] : 0;
    x += blockIdx.y;
    Vector sum = Vector(0);
#pragma unroll 4
    for (Pointer k = begin + lane; k < end; k += WIDTH) sum += Vector(data[k]) * x[(i64)indices[k] * stride];
    sum = group_sum<WIDTH>(sum);
    if (lane == 0 && row < nrows) y[row * stride + blockIdx.y] = sum;
}
