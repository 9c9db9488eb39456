"""Functions of kernels that are plain arithmetic or small enough to follow by hand, at values worked out by hand."""

from __future__ import annotations

import numpy as np

from spdist.kernels import radix_sort, reduction_spec, rounding, sources
from spdist.kernels.bsr import multiply_gpu as bsr
from spdist.kernels.cpu import pattern_scan, product_counts, reduce
from spdist.kernels.cpu import workspace as cpu_workspace
from spdist.kernels.cpu.finished.histogram import histogram
from spdist.kernels.cpu.finished.inflate import inflate, sums_of_rows
from spdist.kernels.cpu.multiply import multiply
from spdist.kernels.cuda import constants, pinned
from spdist.kernels.cuda.module import c_type, value_type
from spdist.kernels.engine import find_engine
from spdist.kernels.esc import long_rows, row_classes
from spdist.kernels.esc import workspace as esc_workspace
from spdist.kernels.esc.product import count_kernels
from spdist.kernels.hyspmm import workspace as hyspmm_workspace
from spdist.kernels.rowwise_gpu import row_classes as rowwise_classes
from spdist.kernels.rowwise_gpu import workspace as rowwise_workspace
from spdist.kernels.spmv import cpu_gpu_split, ehyb, parallel
from spdist.kernels.spmv.sell import layout as sell_layout
from spdist.kernels.spmv.sell import multiply_gpu as sell_gpu
from spdist.kernels.streaming import layout, multiplication, packing, partition
from spdist.kernels.streaming import workspace as streaming_workspace
from spdist.matrices.csr import CSR

ONE_ENTRY = CSR(np.array([0, 1]), np.array([0], np.int32), np.array([2.0], np.float32), (1, 1))


def test_blocks():
    assert bsr.whole_rows(4, 4.0, 10.0, (2, 2, 2), value=4, index=4) == bsr.WholeRows(group=4, room=19, shared=12160)
    assert bsr.whole_rows(4, 4.0, 10.0, (6, 6, 6), value=4, index=4) is None
    assert bsr.method_of("double", (8, 8, 8), tensor_cores=True) == "Tensor<Double,8,8,8>"
    assert bsr.method_of("double", (32, 32, 32), tensor_cores=True) == "AnySize<double>"
    assert bsr.kernels("float", "int", "int", "AnySize<float>") == (
        "bsr_cut<int>",
        "bsr_multiply<float,int,int,AnySize<float>>",
    )
    assert bsr.row_kernel("float", "int", "int", (2, 2, 2), 4) == "bsr_rows<float,int,int,2,2,2,4>"
    assert (bsr.best_tile(4, 4), bsr.best_tile(32, 32)) == ((1, 2), None)


def test_rows_on_the_cpu():
    assert histogram(np.array([0.5, 1.0, 2.0, 7.0]), np.array([0.0, 1.0, 2.0])).tolist() == [1, 2]
    rows = CSR(np.array([0, 2]), np.array([0, 1], np.int32), np.array([0.25, 0.75]), (1, 2))
    assert sums_of_rows(rows).tolist() == [1.0]
    assert inflate(rows, 2.0) == 0.25
    assert np.allclose(rows.data, [0.1, 0.9])
    swap = CSR(np.array([0, 1, 2]), np.array([1, 0], np.int32), np.array([2.0, 3.0]), (2, 2))
    assert multiply(swap, swap).data.tolist() == [6.0, 6.0]
    assert pattern_scan.columns(np.array([0, 2, 3]), np.array([1, 3, 0], np.int32), 0, 3) == (0, 3, True)
    assert not pattern_scan.offsets_rise(np.array([0, 2, 1]), 0, 3)
    a = CSR(np.array([0, 2, 2]), np.array([0, 1], np.int32), np.ones(2), (2, 2))
    assert product_counts.row_products(a, np.array([3, 1])).tolist() == [4, 0]
    assert product_counts.estimate_products(a, a) == 2
    c = CSR(np.array([0, 2, 3]), np.array([0, 1, 1], np.int32), np.array([1.0, 2.0, 4.0]), (2, 2))
    assert reduce.reduce_rows("row_sums", c, 0).values.tolist() == [3.0, 4.0]
    assert reduce.reduce_rows("trace", c, 0).values.tolist() == [5.0]


def test_workspace_on_the_cpu():
    assert cpu_workspace.cpu_workspace("numba", 10**9, 10**6, 8, 4) < 5 * 2**20
    assert cpu_workspace.cpu_workspace("scipy", 10**9, 10**6, 8, 4) > 10**10
    assert cpu_workspace.fused_workspace(10**6, 0, 10, 8, 4) < 13 * 10**6
    assert cpu_workspace.slice_products(1 << 30, 4) == cpu_workspace.SLICE_PRODUCTS
    assert (cpu_workspace.cast_bytes(100, 4, 8), cpu_workspace.cast_bytes(100, 8, 8)) == (800, 0)


def test_what_all_families_share():
    assert constants.defines("rowwise_gpu/long_rows.cu") == ("-DSPDIST_LONG_SHARE=128",)
    assert constants.defines("rowwise_gpu/node_rows.cu")[0].startswith("-DSPDIST_NODE_FACT=NODES = 0, OTHER_ROWS = ")
    assert (c_type(np.dtype("complex64")), c_type(np.dtype("int64"))) == ("Complex<float>", "long long")
    assert (value_type(np.dtype("uint32")), value_type(np.dtype("float64"))) == ("u32", "double")
    assert pinned.pinned_bytes(1_000_000) == 1048576
    assert pinned.array_at(np.arange(8, dtype=np.uint8), 4, 2, np.uint16).nbytes == 4
    assert not find_engine("numba").uses_gpu
    assert "sources.py" in [name for name, _, _ in sources.kernel_sources()]
    assert radix_sort.stable_order(np.array([3, 1, 3, 0])).tolist() == [3, 1, 0, 2]
    assert [rounding.ceil_div(n, 3) for n in (7, 6, 0)] == [3, 2, 0]
    assert [rounding.round_up(n, 3) for n in (7, 6)] == [9, 6]


def test_reductions():
    assert reduction_spec.reduction_of("histogram", [0, 0.5, 1]) == reduction_spec.Histogram(edges=(0.0, 0.5, 1.0))
    parts = [reduction_spec.PartialReduction(np.array([value])) for value in (2.0, 3.0)]
    assert reduction_spec.combine("sum", parts).values.tolist() == [5.0]
    assert reduction_spec.diagonal_pattern(1, 3, 2).indptr.tolist() == [0, 1, 1]


def test_esc():
    assert long_rows.slices(np.array([0, 2, 4, 9, 10]), 4) == [(0, 2), (2, 3), (3, 4)]
    assert count_kernels("int", "int")[0] == "count_products<int,int,2>"
    assert row_classes.classes_that_fit(225 << 10, value=16, pointer=8)[-1].max_products == 8192
    sizes = esc_workspace.EscSizes(1000, 1000, products=50_000, max_row_products=60, value_itemsize=8, index_itemsize=4)
    assert esc_workspace.esc_workspace(sizes, tile=8192).pool_entries == 50_000
    assert esc_workspace.esc_workspace(sizes, tile=8192, limit=2**18).pool_entries < 50_000


def test_hyspmm():
    types = hyspmm_workspace.ItemBytes(8, 4, 4)
    block = hyspmm_workspace.BlockSizes(rows=10, entries=30, products=90, b_rows=7, b_entries=21, distinct=True)
    bound = hyspmm_workspace.block_cost(types).bytes(10, 30, 90)
    assert hyspmm_workspace.block_layout(block, types).end <= bound
    assert hyspmm_workspace.host_bytes(6400, threads=2) == 2424


def test_rowwise():
    shares = rowwise_classes.share_rows([0, 10**7, 20, *[0] * 13])
    assert shares == [(0, 0, 10**7), (1, 10**7, 20)]
    assert (rowwise_workspace.long_fits(100, 10**6), rowwise_workspace.long_fits(1000, 10**6)) == (True, False)
    assert [rowwise_workspace.open_parts(16, 16, 10_000, size) for size in (4, 8, 16)] == [4, 8, 16]
    assert rowwise_workspace.open_parts(16, 16, 100, 4) == 10
    parts = [rowwise_workspace.rank_parts(2, *sizes) for sizes in ((1000, 10_000), (1000, 16), (2**20, 10_000))]
    assert parts == [2, 16, 16]
    assert (rowwise_workspace.rank_width(100_000, 2), rowwise_workspace.rank_width(10**9, 16)) == (50048, 0)
    windows = [rowwise_workspace.rank_count_window(*sizes) for sizes in ((1000, 99 << 10), (10**7, 99 << 10))]
    assert windows == [1024, 524288]
    assert rowwise_workspace.rank_count_window(10**7, 227 << 10) == 1048576
    counts = [0, 10**6, *[0] * 14]
    assert rowwise_workspace.rowwise_workspace(10**6, 10**6, 10**6, 10**8, counts, 8, 4) < 192 * 2**20


def test_products_with_vectors():
    assert cpu_gpu_split.wins([1.0, 1.1, 1.2], [2.0, 2.1, 2.2])
    assert ehyb.part_count(1_000_000, 8, 132, 100_000) == (132, 7576)
    assert ehyb.part_count(4_000_000, 8, 132, 100_000) == (396, 10102)
    assert [parallel.threads_for(entries, 16) for entries in (1_000, 2_000_000, 2_000_000_000)] == [1, 7, 16]
    assert sell_layout.chunk_occupancy(np.array([4, 1, 4, 1]), 2) == 0.625
    assert sell_layout.chunk_occupancy(np.array([4, 1, 4, 1]), 2, sigma=4) == 1.0
    assert sell_layout.code_balance(1.0, 1 / 8, 8.0) == 7.5
    assert sell_gpu.multiply_name("float", "double", 1, 2, False) == "sell_multiply<float, double, 1, 2, false>"


def test_streaming():
    dtypes = layout.device_dtypes(ONE_ENTRY, ONE_ENTRY)
    assert dtypes.value == np.float32
    assert layout.lay_out(ONE_ENTRY.shape, 1, ONE_ENTRY.dtype, dtypes, begin=512).data == 512
    assert layout.share_entries(ONE_ENTRY, ONE_ENTRY)
    m = CSR(np.array([0, 2, 3]), np.array([0, 1, 1]), np.array([5.0, 6.0, 7.0]), (2, 2))
    assert multiplication.gather_rows(m, np.array([1, 0])).data.tolist() == [7.0, 5.0, 6.0]
    assert str(partition.bad_row_error(1_000, 5)) == "row 1,000 of A: offsets or columns out of range; A has 5 columns"
    assert streaming_workspace.device_shares(1 << 30, 8 << 30).total == 4294967296
    assert streaming_workspace.device_shares(7 << 30, 8 << 30).kept == 0
    assert streaming_workspace.staging_bytes(8 << 30) == 1 << 30


def test_packing():
    words = packing.words_of(np.array([1.0], np.float32))
    assert (words.tolist(), words.dtype) == ([1065353216], np.uint32)
    random = packing.Sizes(nrows=60_000, nnz=16_000_000, nbytes=192_240_000, values=128_000_000)
    assert packing.seconds(random, 28_000_000, 128_000_000, threads=8) < random.nbytes / 55e9
    assert [packing.choose(random, 28_000_000, 0, threads) for threads in (4, 8)] == ["plain", "columns"]
    assert streaming_workspace.packed_unit(1_000, 100_000) == 512
    assert streaming_workspace.packed_unit(500_000, 128_000_000) == 4096
    assert streaming_workspace.packed_units(1_000, 100_000) == 198
    assert streaming_workspace.packed_start(1_000, 100_000) == 12576
    assert streaming_workspace.packed_bound((500_000, 500_000), 128_000_000, 4) / 128_000_000 < 2.6
