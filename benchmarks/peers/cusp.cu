// cusp.cu: time CUSP's product A A, by expansion, sorting and compression, on the GPU and from host to host.
//
//     nvcc -O3 -std=c++17 -arch=sm_90 -I cusplibrary -o cusp_esc cusp.cu
//     cusp_esc MATRIX RUNS
//
// MATRIX: int64 rows and entries, int32 offsets and columns, float64 values. Prints seconds on the GPU, seconds with A
// sent from page-locked memory and C brought back to such, medians of RUNS, entries of C and the sum of its values.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cusp/csr_matrix.h>
#include <cusp/multiply.h>
#include <thrust/reduce.h>

using Matrix = cusp::csr_matrix<int, double, cusp::device_memory>;

static double now() {
    cudaDeviceSynchronize();
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename T>
struct Locked {  // an array in page-locked memory, which grows
    T* data = nullptr;
    size_t room = 0;
    T* of(size_t count) {
        if (count > room) {
            cudaFreeHost(data);
            if (cudaMallocHost(&data, count * sizeof(T)) != cudaSuccess) std::exit(2);
            room = count;
        }
        return data;
    }
};

template <typename T, typename Vector>
static void send(Vector& to, const T* from) {
    cudaMemcpyAsync(thrust::raw_pointer_cast(to.data()), from, to.size() * sizeof(T), cudaMemcpyHostToDevice);
}

template <typename T, typename Vector>
static void bring(Locked<T>& to, const Vector& from) {
    cudaMemcpyAsync(to.of(from.size()), thrust::raw_pointer_cast(from.data()), from.size() * sizeof(T),
                    cudaMemcpyDeviceToHost);
}

static double median(std::vector<double> times) {
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

int main(int count, char** words) {
    if (count != 3) return 1;
    std::FILE* file = std::fopen(words[1], "rb");
    int64_t sizes[2];
    if (!file || std::fread(sizes, sizeof(int64_t), 2, file) != 2) return 1;
    const size_t rows = sizes[0], entries = sizes[1];
    Locked<int> offsets, columns, c_offsets, c_columns;
    Locked<double> values, c_values;
    if (std::fread(offsets.of(rows + 1), sizeof(int), rows + 1, file) != rows + 1) return 1;
    if (std::fread(columns.of(entries), sizeof(int), entries, file) != entries) return 1;
    if (std::fread(values.of(entries), sizeof(double), entries, file) != entries) return 1;
    std::fclose(file);

    Matrix a(rows, rows, entries);
    const auto upload = [&](Matrix& m) {
        send(m.row_offsets, offsets.data);
        send(m.column_indices, columns.data);
        send(m.values, values.data);
    };
    upload(a);
    std::vector<double> kernels, whole;
    size_t found = 0;
    double sum = 0;
    for (int run = 0; run <= std::atoi(words[2]); run++) {  // the first is not counted
        double begin = now();
        {
            Matrix c;
            cusp::multiply(a, a, c);
            if (run) kernels.push_back(now() - begin);
            found = c.num_entries;
            sum = thrust::reduce(c.values.begin(), c.values.end());
        }
        begin = now();
        {
            Matrix sent(rows, rows, entries), c;
            upload(sent);
            cusp::multiply(sent, sent, c);
            bring(c_offsets, c.row_offsets);
            bring(c_columns, c.column_indices);
            bring(c_values, c.values);
            if (run) whole.push_back(now() - begin);
        }
    }
    if (cudaGetLastError() != cudaSuccess) return 2;
    std::printf("{\"gpu_s\": %.6e, \"locked_s\": %.6e, \"nnz_c\": %zu, \"sum\": %.15e}\n", median(kernels), median(whole), found,
                sum);
    return 0;
}
