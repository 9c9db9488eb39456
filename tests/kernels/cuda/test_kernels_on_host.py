"""Kernels of products and answers, run thread by thread on the host: their tests for the GPU, some of each."""

from __future__ import annotations

import numpy as np
import pytest

from spdist.kernels.bsr import multiply_gpu as bsr_gpu
from spdist.kernels.esc import multiply as esc
from spdist.kernels.esc import product as esc_product
from spdist.kernels.semirings import SEMIRINGS
from spdist.kernels.spmv.sell import build_cpu, build_gpu, layout, sell
from tests.kernels.batch_gpu import test_multiply as batches
from tests.kernels.bsr import test_multiply_gpu as blocks_on_gpu
from tests.kernels.bsr.test_multiply_cpu import block_matrix
from tests.kernels.dense import test_nearest_gpu as dense_rows
from tests.kernels.esc import test_multiply_gpu as sorted_products
from tests.kernels.hyspmm import test_multiply_gpu as from_host
from tests.kernels.rowwise_gpu import test_epilogue as answers
from tests.kernels.rowwise_gpu import test_multiply as products
from tests.kernels.spmv import test_columns as many_columns
from tests.kernels.spmv import test_sell_gpu as rows_in_chunks
from tests.kernels.spmv.test_sell import as_csr, blocks
from tests.support import host_cupy

pytestmark = pytest.mark.skipif(not host_cupy.CAN_RUN, reason="needs g++ on x86-64")
everywhere = answers.everywhere
"""Every family of kernels at small sizes, and as they are chosen."""
collisions = rows_in_chunks.collisions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def on_host(monkeypatch, folder):
    with host_cupy.installed(monkeypatch, folder):
        yield


@pytest.mark.parametrize(("ring", "dtype"), [
    (SEMIRINGS["plus_times"], np.float64), (SEMIRINGS["min_plus"], np.float64), (SEMIRINGS["or_and"], np.bool_),
    (answers.OWN, np.float32),
], ids=lambda one: getattr(one, "name", None))  # fmt: skip
def test_semirings(everywhere, ring, dtype):
    answers.test_semirings_equal_numpy(None, ring, dtype)


@pytest.mark.parametrize("name", ["min_plus", "or_and", "least product"])
def test_rows_that_thread_blocks_share(name):
    answers.test_rows_that_thread_blocks_share(name)


def test_minus_zero_infinities_and_nan():
    answers.test_minus_zero_infinities_and_nan()


@pytest.mark.parametrize("dtype", ["f8", "f4", "u8", "?"])
def test_cuts(dtype):
    for options in answers.CUTS:
        answers.test_cuts_equal_numpy(options, dtype)


def test_values_that_differ_in_their_last_bits_and_nan():
    answers.test_values_that_differ_in_their_last_bits_and_nan()


@pytest.mark.parametrize("dtype", ["f8", "c8"])
def test_epilogues(dtype):
    for norm in (None, "l1", "l2", "max"):
        answers.test_epilogues_equal_numpy(dtype, norm)


@pytest.mark.parametrize("dtype", ["f4", "c16", "i4", "?"])
def test_reductions(dtype):
    ordered = dtype != "c16"
    for what in answers.REDUCTIONS if ordered else answers.reduction_spec.REDUCTIONS:
        answers.test_reductions_equal_numpy(dtype, what)


@pytest.mark.parametrize(("name", "kinds"), [
    ("plus_times", "longrow sparse"), ("or_and", "skew skew"), ("plus_first", "sparse sparse"),
    ("least product", "skew skew"),
])  # fmt: skip
@pytest.mark.parametrize("shares", answers.SHARES)
def test_masks(monkeypatch, shares, name, kinds):
    answers.test_masks_equal_numpy(monkeypatch, shares, name, kinds)


@pytest.mark.parametrize(("shares", "order"), [*((one, "0") for one in answers.SHARES), ("tasks", "1"), ("tasks", "2")])
def test_masks_of_hubs_and_columns_far_apart(monkeypatch, shares, order):
    monkeypatch.setenv("HOST_CUDA_ORDER", order)
    answers.test_hubs_inside_masks(monkeypatch, shares)
    answers.test_masks_of_columns_far_apart(monkeypatch, shares)


def test_masks_that_are_long_or_wrong():
    answers.test_masks_longer_than_filters()
    for shape in ((0, 5, 5), (5, 0, 5), (5, 5, 0), (1, 1, 1)):
        answers.test_masks_of_no_rows_or_columns(shape)
    answers.test_masks_that_are_not_canonical()


@pytest.mark.parametrize("share", [0.01, 3.0])
def test_what_is_expected_of_c_may_be_wrong(monkeypatch, share):
    products.test_what_is_expected_of_c_may_be_wrong(monkeypatch, share)


@pytest.mark.parametrize("columns", [900, 2000])
def test_work_queued_before_rows_are_counted(monkeypatch, columns):
    for small, queued in ((32 << 20, "pass"), (0, "count")):
        with monkeypatch.context() as patch:
            products.test_work_queued_before_rows_are_counted(patch, columns, small, queued, columns < 1024)


@pytest.mark.parametrize("spread", [products.NARROW_COLUMNS - 1, products.NARROW_COLUMNS])
def test_wide_matrices_of_rows_that_are_not(spread):
    for entries in (1, 80, 300):
        products.test_wide_matrices_of_rows_that_are_not(spread, entries)


@pytest.mark.parametrize("kind", ["skew", "longrow", "block"])
def test_triangles(everywhere, kind):
    for name in ("plus_times", "or_and"):
        answers.test_triangles_equal_numpy(None, kind, name)


def test_triangles_of_wide_columns(monkeypatch):
    answers.test_triangles_of_as_many_entries_as_pass_their_columns(monkeypatch)


@pytest.mark.parametrize("entries", [1025, 8193])
def test_long_rows(entries):
    for deterministic in (False, True):
        m = products.long_row(entries, 10_000)
        c = products.rowwise_gpu.multiply(products.to_gpu(m), products.to_gpu(m), deterministic=deterministic)
        products.assert_product(c, m, m)


@pytest.mark.parametrize("share", [None, 0.0, 1.0])
def test_products(share):
    """Rows that are counted first, and rows that are made at once, of every family."""
    equals_scipy = products.test_equals_scipy.hypothesis.inner_test
    for seed in range(7):
        rng = np.random.default_rng(seed)
        shape, kinds = rng.choice([1, 7, 100, 300, 700], 3).tolist(), rng.choice(products.KINDS, 2).tolist()
        for everywhere, deterministic in ((False, False), (True, False), (True, True)):
            equals_scipy(seed, tuple(shape), kinds, products.TYPES[0], deterministic, everywhere, share)


def test_products_with_many_columns():
    for types in many_columns.TYPES[:2]:
        for count in (5, 8, 32):
            many_columns.test_products_are_scipys(types, count)
    many_columns.test_little_matrices((0, 5))
    many_columns.test_little_matrices((5, 5))


@pytest.mark.parametrize("order", ["0", "1"])
def test_batches(monkeypatch, order):
    monkeypatch.setenv("HOST_CUDA_ORDER", order)
    for types in products.TYPES[:2]:
        batches.test_each_product_is_scipys(types)
    for side in (0, 1):
        for spoil in ("column", "offset", "start", "end"):
            batches.test_arrays_that_do_not_fit_are_noticed(side, spoil)


@pytest.mark.parametrize("limit", [None, 2])
def test_expansion_sorting_compression(monkeypatch, limit):
    """Rows of all classes, and long ones in several slices, of which the pool does not hold all."""
    monkeypatch.setattr(esc_product, "SHARED_RESERVED", (227 - 24) << 10)  # tiles of few products
    lengths = np.concatenate([[0, 1, 3, 40, 700], np.arange(30) % 7, [9000, 4000, 0, 2000]])
    a = sorted_products.random_rows(len(lengths), 400, lengths, 1)
    b = sorted_products.random_rows(400, 20_000, np.arange(400) % 7, 2)
    product = esc.product_of(sorted_products.to_gpu(a), sorted_products.to_gpu(b))
    assert product.tile.max_products < lengths.max()
    c = esc.multiply(product.a, product.b, workspace_limit=None if limit is None else limit << 20)
    sorted_products.assert_product(sorted_products.to_host(c), a, b)


@pytest.mark.parametrize("variant", from_host.VARIANTS)
def test_operands_and_result_on_the_host(variant):
    """Rows of every group of lengths, in several blocks of which three are on the device at once."""
    for sizes in ({"ncols": 500, "long": 3}, {"ncols": 60_000}, {"ncols": 3_000_000}):
        a, b = from_host.ragged(150, 120, seed=1, **sizes)
        whole = from_host.hyspmm.multiply(a, b, variant=variant, memory_limit=1 << 28, threads=2)
        from_host.assert_product(whole, a, b)
        c = from_host.hyspmm.multiply(a, b, variant=variant, memory_limit=1 << 20, pairs=3, threads=2)
        from_host.assert_product(c, a, b)


def test_rows_of_b_that_the_gpu_refuses():
    from_host.test_b_out_of_order_is_refused("distinct")


def test_columns_that_esc_refuses():
    sorted_products.test_refuses_columns_out_of_range()


@pytest.fixture
def tensor_cores(monkeypatch):
    monkeypatch.setattr(bsr_gpu, "_has_tensor_cores", lambda device: True)


@pytest.mark.parametrize(("side", "dtype"), [(2, "f8"), (3, "c16"), (4, "f4"), (6, "f8"), (8, "f8"), (16, "f8")])
def test_blocks(tensor_cores, side, dtype):
    a = block_matrix(60, 60, 5.0, (side, side), side, dtype)
    blocks_on_gpu.assert_multiplies(a, a)


@pytest.mark.parametrize("sides", [(17, 3, 5), (7, 7, 7), (16, 12, 8), (2, 9, 3)])
def test_blocks_of_other_sizes(tensor_cores, sides):
    blocks_on_gpu.test_any_sizes(sides)


@pytest.mark.parametrize("sides", [(8, 8, 8), (16, 16, 16), (15, 7, 16), (6, 6, 6)])
def test_blocks_rounded_for_tensor_cores(tensor_cores, sides, caplog):
    blocks_on_gpu.test_tf32(sides, caplog)


@pytest.mark.parametrize("side", [2, 8])
def test_many_pairs_in_few_blocks(tensor_cores, side):
    blocks_on_gpu.test_many_pairs_in_few_blocks(side)


@pytest.mark.parametrize("order", ["1", "2"])
def test_blocks_whatever_the_order_of_threads(tensor_cores, monkeypatch, order):
    monkeypatch.setenv("HOST_CUDA_ORDER", order)
    for side in (2, 8):
        a = block_matrix(60, 60, 5.0, (side, side), side)
        blocks_on_gpu.assert_multiplies(a, a)


@pytest.mark.parametrize("order", ["1", "2"])
def test_products_whatever_the_order_of_threads(monkeypatch, order):
    monkeypatch.setenv("HOST_CUDA_ORDER", order)
    equals_scipy = products.test_equals_scipy.hypothesis.inner_test
    for seed, kind in enumerate(products.KINDS):
        for share in (None, 1.0):
            equals_scipy(seed, (300, 100, 300), (kind, kind), products.TYPES[0], False, True, share)


@pytest.fixture
def sell_on_gpu(monkeypatch):
    """Build matrices whose offsets are `HostArray` with the steps for the GPU."""
    import cupy

    def builder(a, lanes, height, threads):
        if isinstance(a.indptr, host_cupy.HostArray):
            return build_gpu.Builder(a, lanes, height)
        return build_cpu.Builder(a, lanes, height, threads)

    monkeypatch.setattr(sell, "_builder", builder)
    of = layout.module_of
    monkeypatch.setattr(layout, "module_of", lambda x: cupy if isinstance(x, host_cupy.HostArray) else of(x))


@pytest.mark.parametrize("options", rows_in_chunks.PLACES, ids=str)
@pytest.mark.parametrize("name", rows_in_chunks.LENGTHS)
def test_rows_go_where_they_belong(sell_on_gpu, name, options):
    rows_in_chunks.test_rows_go_where_they_belong(name, options)


@pytest.mark.parametrize("order", ["1", "2"])
@pytest.mark.parametrize("name", ["tall and long", "powers"])
def test_rows_go_where_they_belong_whatever_the_order_of_threads(sell_on_gpu, monkeypatch, name, order):
    monkeypatch.setenv("HOST_CUDA_ORDER", order)
    for options in ({}, {"height": 32}):
        rows_in_chunks.test_rows_go_where_they_belong(name, options)


@pytest.mark.parametrize("order", ["0", "2"])
@pytest.mark.parametrize("number", range(len(rows_in_chunks.HASHES)))
@pytest.mark.parametrize("name", rows_in_chunks.LISTS)
def test_lists_are_shared_as_on_the_host(sell_on_gpu, collisions, monkeypatch, name, number, order):
    monkeypatch.setenv("HOST_CUDA_ORDER", order)
    rows_in_chunks.test_lists_are_shared_as_on_the_host(collisions, name, number)


@pytest.mark.parametrize(("side", "found"), [(2, 2), (3, 3), (4, 4), (6, 6), (5, 1)])
def test_dense_blocks_are_found(side, found):
    m = rows_in_chunks.on_gpu(as_csr(blocks(side, 61, side)))
    assert build_gpu.Builder(m, 32, 0).find_block() == found


@pytest.mark.parametrize("side", [2, 3, 4, 6])
def test_places_of_no_block_row_are_zero(sell_on_gpu, side):
    rows_in_chunks.test_places_of_no_block_row_are_zero(side)


def test_nearest_of_dense_rows(monkeypatch):
    for metric, dtype in (("euclidean", np.float32), ("cosine", np.float64)):
        dense_rows.test_same_bits_as_on_the_cpu(monkeypatch, metric, dtype, (7, 1500))
    dense_rows.test_worse_rows_are_dropped_again_and_again(monkeypatch)
    dense_rows.test_equal_rows_and_rows_that_float32_does_not_tell_apart("inner_product")
