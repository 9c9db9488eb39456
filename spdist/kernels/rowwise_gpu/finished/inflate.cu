// inflate.cu: the rows of a stochastic matrix, sharpened: values raised to a power, rows scaled to sum 1 again.
#include "common.cuh"
#include "groups.cuh"

constexpr int LONG = 2048;  // entries above which the whole thread block takes a row

// Inflate rows, in place.
//
// Launch  block 32 * ROWS, grid ceil_div(nrows, ROWS).
// Pre     values are not negative.
// Post    chaos[row]: (max - sum of squares) * entries of the row as it was; rows without a positive value stay.
template <typename Value, typename Pointer>
__global__ void __launch_bounds__(32 * ROWS)
inflate_rows(const i64 nrows, const Pointer* __restrict__ indptr, Value* data, const double power, double* __restrict__ chaos) {
    __shared__ double scratch[ROWS];
    for_rows(nrows, indptr, LONG, [&](auto group, const i64 row, const Pointer begin, const Pointer end) {
        using Threads = decltype(group);
        double largest = 0, squares = 0, total = 0;
        for (Pointer at = begin + Threads::thread(); at < end; at += Threads::THREADS) {
            const double value = data[at];
            largest = fmax(largest, value), squares += value * value;
        }
        largest = block_max<Threads::WARPS>(largest, scratch), squares = block_sum<Threads::WARPS>(squares, scratch);
        if (Threads::thread() == 0) chaos[row] = largest > 0 ? (largest - squares) * (end - begin) : 0;
        if (!(largest > 0)) return;
        const double scale = 1 / largest;  // else a high power would leave nothing of a row of small values
        for (Pointer at = begin + Threads::thread(); at < end; at += Threads::THREADS) {
            const double value = data[at] * scale, raised = power == 2 ? value * value : pow(value, power);
            total += raised;
            data[at] = Value(raised);
        }
        const double share = 1 / block_sum<Threads::WARPS>(total, scratch);
        for (Pointer at = begin + Threads::thread(); at < end; at += Threads::THREADS) data[at] = Value(data[at] * share);
    });
}
