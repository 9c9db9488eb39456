"""SELL-C-sigma, CSR-scalar, CSR-vector and reorderings on the GPU: SciPy is the oracle, the host's arrays another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import spdist
from spdist.errors import InputError
from spdist.kernels.cuda import module
from spdist.kernels.spmv import csr as csr_spmv
from spdist.kernels.spmv import reorder
from spdist.kernels.spmv.sell import layout, sell
from spdist.kernels.spmv.sell.format import Sell, row_lane_logs, to_host
from spdist.kernels.spmv.sell.layout import choose_window
from spdist.matrices.csr import CSR
from tests.conftest import random_matrix
from tests.kernels.spmv.test_sell import LISTS, any_csr, as_csr, blocks, collide, collide_on_gpu, dense, stencil

pytestmark = pytest.mark.gpu

OPTIONS = [
    {},
    {"height": 32},
    {"height": 8},
    {"height": 1},
    {"height": 32, "sigma": 1},
    {"sigma": 64},
    {"sigma": 1 << 20},
    {"index": "wide"},
    {"index": "narrow"},
    {"block": 2},
]
TYPES = [np.float32, np.float64, np.complex64, np.complex128]


def on_gpu(m: CSR) -> CSR:
    import cupy

    return CSR(*(cupy.asarray(array) for array in (m.indptr, m.indices, m.data)), m.shape)


def check(a, m: sp.csr_matrix, columns: int = 11) -> None:
    """Compare products with SciPy's: every number of columns up to 11 meets every width of kernel."""
    import cupy

    x = np.random.default_rng(1).standard_normal((m.shape[1], columns))
    np.testing.assert_allclose(sell.multiply(a, cupy.asarray(x)).get(), m @ x, rtol=1e-10, atol=1e-10)
    one = cupy.asarray(x[:, 0].copy())
    np.testing.assert_allclose(sell.multiply(a, one).get(), m @ x[:, 0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_product_and_back(options, data):
    import cupy

    dtype = data.draw(st.sampled_from(TYPES))
    m = data.draw(any_csr(dtype))
    a = sell.build(on_gpu(m), **options)
    x = (np.arange(m.ncols * 3).reshape(-1, 3) % 7 - 3).astype(dtype)
    y = cupy.full((m.nrows, 3), np.nan, dtype)
    np.testing.assert_array_equal(sell.multiply(a, cupy.asarray(x), y).get(), dense(m) @ x)
    np.testing.assert_array_equal(sell.to_csr(a).to_scipy().toarray(), dense(m))


@pytest.mark.parametrize("options", [{}, {"sigma": 1}, {"index": "wide"}, {"index": "narrow"}, {"sigma": 64}], ids=str)
@pytest.mark.parametrize("make", [stencil, lambda: blocks(1, 300, 2)])
def test_host_and_gpu_build_the_same(options, make):
    m = as_csr(make())
    host, gpu = sell.build(m, height=32, **options), to_host(sell.build(on_gpu(m), height=32, **options))
    for name in ("chunks", "values", "wide", "narrow"):
        np.testing.assert_array_equal(getattr(host, name), getattr(gpu, name))


def of_lengths(lengths, ncols=10_000, index=np.int32, pointer=np.int64) -> CSR:
    """Return a matrix of rows of so many entries, in columns all over."""
    rng, lengths = np.random.default_rng(7), np.asarray(lengths)
    columns = [np.sort(rng.choice(ncols, n, replace=False)) for n in lengths] or [np.empty(0)]
    indptr = np.append(0, np.cumsum(lengths)).astype(pointer)
    return CSR(indptr, np.concatenate(columns).astype(index), rng.random(indptr[-1]), (len(lengths), ncols))


def mixed_lengths(rows: int, *others: int) -> np.ndarray:
    """Return lengths of many short rows, and others among them."""
    rng = np.random.default_rng(6)
    return rng.permutation(np.append(rng.integers(0, 9, rows), others).astype(int))


LENGTHS = {
    "no rows": lambda: [],
    "one row": lambda: [3],
    "no entries": lambda: [0] * 77,
    "equal": lambda: [5] * 3000,
    "one short of a window": lambda: mixed_lengths(1023),
    "windows": lambda: np.random.default_rng(8).integers(0, 40, 5000),
    "windows of 2": lambda: [2, 30] * 2600,
    "powers": lambda: np.minimum(np.random.default_rng(9).pareto(1.0, 9000) * 3, 3000).astype(int),
    "tall": lambda: mixed_lengths(5000, 70, 130, 260, 520, 1030, 2040, 2047, 2048, 100, 100, 9, 10, 33, 65),
    "tall and long": lambda: mixed_lengths(5000, *[70, 130, 260, 520, 1030, 2040, 2050, 9000, 2048, 2049] * 2),
    "short and long": lambda: mixed_lengths(200, 2050, 9000),
    "only long": lambda: [2050, 3000, 2049],
    "only tall": lambda: [2040, 300, 300, 120, 900] * 7,
}
PLACES = [
    {},
    {"height": 32},
    {"height": 8},
    {"sigma": 1},
    {"sigma": 64},
    {"sigma": 1024},
    {"sigma": 1500},
    {"sigma": 1 << 20},
]


def longest_in_chunks(lengths):
    """Return the entries above which rows stay in CSR: so many that a GPU has an SM for each."""
    return next(long for long in (256, 512, 1024, 2048) if long == 2048 or (lengths > long).sum() <= 200)


def placed(lengths, height=0, sigma="auto"):
    """Return sigma, the row at each position, and the first position, lanes of a row and rows of each chunk."""
    nnz, high = int(lengths.sum()), height or 32
    skewed = lengths.max(initial=0) > min(2048, 4 * nnz / max(len(lengths), 1))
    below = [80_000, 4_000_000, 20_000_000] if skewed else [80_000, 500_000, 1_000_000, 4_000_000]
    most = [4, 8, 16, 64 if skewed else 32, 64][int(np.searchsorted(below, nnz, side="right"))]
    limit, longest = 2048 if height else most, 2048 if height else longest_in_chunks(lengths)
    rest, tall = np.flatnonzero(lengths <= limit), np.flatnonzero((lengths > limit) & (lengths <= longest))

    def ordered(window):
        return rest[np.lexsort((-lengths[rest], np.arange(len(rest)) // window))] if window > 1 else rest

    def slots(window):
        rows = ordered(window)
        return sum(int(lengths[rows[i : i + high]].max()) for i in range(0, len(rows), high))

    if sigma == "auto":
        sigma = choose_window(slots, int(lengths[rest].sum()), len(rest), high, 10, 4)
    tall = tall[np.argsort(-lengths[tall], kind="stable")]
    chunks = []
    for lanes in (32, 16, 8, 4, 2):  # of rows of more entries than `low`, and of at most twice as many
        low, above = most * lanes // 2, most * lanes if lanes < 32 else 2048
        some = np.flatnonzero((lengths[tall] > low) & (lengths[tall] <= above)) + len(rest)
        step = 32 // lanes
        chunks += [(some[i], 32 // step, len(some[i : i + step])) for i in range(0, len(some), step)]
    chunks += [(i, 32 // high, min(high, len(rest) - i)) for i in range(0, len(rest), high)]
    return sigma, np.append(ordered(sigma), tall), chunks


@pytest.mark.parametrize("options", PLACES, ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_rows_go_where_they_belong(name, options):
    for kinds in ((np.int32, np.int64), (np.int64, np.int32)):
        m = of_lengths(LENGTHS[name](), 10_000, *kinds)
        a = to_host(sell.build(on_gpu(m), **options))
        lengths = np.diff(m.indptr).astype(np.int64)
        sigma, rows, chunks = placed(lengths, **options)
        assert a.sigma == sigma
        np.testing.assert_array_equal(np.arange(m.nrows) if a.rows is None else a.rows, rows)
        lanes = 1 << row_lane_logs(a.chunks)
        first, rows = a.chunks[:, 2] & 0xFFFFFFFF, a.chunks[:, 3] >> 40 & 255
        found = np.stack([first, lanes, rows], axis=1)
        np.testing.assert_array_equal(found, np.reshape(chunks, (-1, 3)))
        long = np.flatnonzero(lengths > (2048 if options.get("height") else longest_in_chunks(lengths)))
        kept = m.to_scipy()[long]
        np.testing.assert_array_equal(a.long_rows, long)
        for array, wanted in (("long_indptr", kept.indptr), ("long_indices", kept.indices), ("long_data", kept.data)):
            np.testing.assert_array_equal(getattr(a, array), wanted)
        np.testing.assert_array_equal(np.isin(a.pieces[a.row_pieces], a.long_indptr), True)
        assert np.diff(a.pieces).max(initial=0) <= layout.WHOLE
        back = sell.to_csr(a)
        for array in ("indptr", "indices", "data"):
            np.testing.assert_array_equal(getattr(back, array), getattr(m, array))


@pytest.fixture
def collisions(tmp_path, monkeypatch):
    """Give a function that changes the hashes of lists, on the host and on the GPU."""

    def change(number, on_host, there):
        collide(monkeypatch, on_host)
        collide_on_gpu(monkeypatch, tmp_path / str(number), there)

    yield change
    monkeypatch.undo()
    module._module.cache_clear()


HASHES = [
    None,
    (lambda hashes: np.full_like(hashes, 5), "5"),
    (lambda hashes: hashes >> 20 << 20, "(i64)(d.hash >> 1) >> 20 << 20"),  # different ones in one place
]


@pytest.mark.parametrize("number", range(len(HASHES)))
@pytest.mark.parametrize("name", LISTS)
def test_lists_are_shared_as_on_the_host(collisions, name, number):
    m = as_csr(LISTS[name]())
    if HASHES[number]:
        collisions(number, *HASHES[number])
    for options in ({}, {"sigma": 64}, {"index": "narrow"}, {"dtype": np.float32}):
        host = sell.build(m, height=32, block=1, **options)
        gpu = to_host(sell.build(on_gpu(m), height=32, block=1, **options))
        for array in ("chunks", "values", "wide", "narrow"):
            np.testing.assert_array_equal(getattr(host, array), getattr(gpu, array))


@pytest.mark.parametrize("side", [2, 3, 4, 6])
def test_places_of_no_block_row_are_zero(side):
    """As they are where memory was zero before: the same arrays on every run."""
    m = sp.vstack([blocks(side, 61, 3), sp.random_array((side + 1, 61 * side), density=0.1, random_state=3)])
    first, again = (to_host(sell.build(on_gpu(as_csr(m)), block=side)) for _ in range(2))
    assert {"block_narrow", "narrow"} <= set(first.kind_counts())
    np.testing.assert_array_equal(first.narrow, again.narrow)
    read = np.zeros(len(first.narrow), bool)
    for place, index, at, code in zip(*(first.chunks[:, i] for i in range(4)), strict=True):
        del place
        width, kind = at >> 32, code >> 32 & 15
        places = 32 if kind < 3 else 32 // side if 32 % side == 0 else 32 // side + 2
        read[index : index + 2 * width] = True
        start = index + -(-width // 16) * 32
        read[start : start + width * places] = True
    assert not first.narrow[~read].any()


def to_gpu(a: Sell) -> Sell:
    import cupy

    return replace(a, **{name: cupy.asarray(x) for name, x in vars(a).items() if isinstance(x, np.ndarray)})


@pytest.mark.parametrize("threads", [1, 2, 4, 32])
def test_prepared_on_the_host_for_the_gpu(threads):
    m = stencil()
    check(to_gpu(sell.build(as_csr(m), height=32 // threads, lanes=32)), m)


@pytest.mark.parametrize(("side", "found"), [(2, 2), (3, 3), (4, 4), (6, 6), (5, 1)])
def test_dense_blocks_are_found(side, found):
    m = blocks(side, 61, side)
    a = sell.build(on_gpu(as_csr(m)))
    assert a.block == found
    check(a, m)


@pytest.mark.parametrize("least", [2048, 1 << 20])  # entries of a piece: rows of several, rows of one
def test_rows_of_all_lengths(monkeypatch, least):
    for name in ("PIECE", "WHOLE"):
        monkeypatch.setattr(layout, name, least)
    rng = np.random.default_rng(3)
    lengths = np.append(rng.integers(0, 9, 5000), [70, 130, 260, 520, 1030, 2040, 2050, 9000, 2048, 2049])
    rng.shuffle(lengths)
    columns = np.concatenate([rng.choice(10_000, n, replace=False) for n in lengths])
    m = sp.csr_matrix((rng.random(len(columns)), columns, np.append(0, np.cumsum(lengths))), (len(lengths), 10_000))
    a = sell.build(on_gpu(as_csr(m)))
    assert len(a.long_rows) == 8
    assert (len(a.pieces) > 9) == (least == 2048)
    check(a, m)
    assert abs(sell.to_csr(a).to_scipy() - m).max() == 0


def test_products_go_both_ways_to_the_same_bits():
    """By turns from the first chunk and from the last, the longest first either way; a row of many lanes among them."""
    import cupy

    rng = np.random.default_rng(4)
    lengths = np.append(rng.integers(0, 5, 40_000), [250, 200])
    rng.shuffle(lengths)
    columns = rng.integers(0, 10_000, lengths.sum())
    m = as_csr(sp.csr_matrix((rng.random(len(columns)), columns, np.append(0, np.cumsum(lengths))), (40_002, 10_000)))
    a = sell.build(on_gpu(m))
    assert len(a.chunks) > 1000
    assert row_lane_logs(a.chunks)[0].get() == 5  # 32 lanes a row
    x = cupy.asarray(rng.random(10_000))
    y = [sell.multiply(a, x).get() for _ in range(2)]
    assert [a.next_direction(), a.next_direction()] == [0, 1]  # of the third product, and of the fourth
    np.testing.assert_array_equal(*y)
    np.testing.assert_allclose(y[0], m.to_scipy() @ x.get(), rtol=1e-12)


def test_padding_is_not_multiplied():
    import cupy

    m = CSR(np.array([0, 2, 3]), np.array([1, 2, 3], np.int32), np.ones(3), (2, 4))
    memory = cupy.full(140_000, np.nan)  # as far as 16-bit offsets reach
    x = memory[70_000:70_004]
    x[...] = cupy.asarray(np.array([np.inf, 1.0, 1.0, 1.0]))
    for options in OPTIONS:
        np.testing.assert_array_equal(sell.multiply(sell.build(on_gpu(m), **options), x).get(), [2.0, 1.0])


@pytest.mark.parametrize("width", csr_spmv.WIDTHS)
@pytest.mark.parametrize("dtype", TYPES)
def test_csr_widths(width, dtype):
    import cupy

    m = as_csr(stencil())
    m = CSR(m.indptr, m.indices, m.data.astype(dtype), m.shape)
    x = np.random.default_rng(1).standard_normal((m.ncols, 3)).astype(dtype)
    y = csr_spmv.multiply(on_gpu(m), cupy.asarray(x), width=width).get()
    np.testing.assert_allclose(y, m.to_scipy() @ x, rtol=1e-4, atol=1e-4)


def test_csr_refuses_other_widths():
    with pytest.raises(InputError, match="choose one of 1, 2, 4, 8, 16, 32"):
        csr_spmv.multiply(on_gpu(as_csr(stencil(3))), None, width=3)


@pytest.mark.parametrize("order", [reorder.levels, reorder.popular])
@pytest.mark.parametrize("make", [stencil, lambda: sp.block_diag([stencil(5)] * 3 + [sp.eye(4)]).tocsr()])
def test_orders_are_permutations_and_keep_the_matrix(order, make):
    m = as_csr(make())
    places = order(on_gpu(m))
    np.testing.assert_array_equal(np.sort(places.get()), np.arange(m.nrows))
    moved = reorder.apply(on_gpu(m), places, places)
    back = CSR(moved.indptr.get(), moved.indices.get(), moved.data.get(), m.shape).to_scipy()
    host = places.get()
    assert abs(back - m.to_scipy()[host][:, host]).max() == 0


def test_levels_narrow_the_band():
    rng = np.random.default_rng(4)
    m = stencil(14)
    mixed = rng.permutation(m.shape[0])
    m = m[mixed][:, mixed].tocoo()
    place = reorder.inverse(reorder.levels(on_gpu(as_csr(m)))).get()
    assert abs(place[m.row] - place[m.col]).mean() < 0.25 * abs(m.row - m.col).mean()


@pytest.mark.parametrize("make", ["sell", "csr", "popular", "ehyb"])
@pytest.mark.parametrize("n", [40, 3000, 60_000])
def test_products_that_follow_each_other_wait_for_each_other(monkeypatch, make, n):
    """Launches that start early read the previous output and write over the previous input: the bits are equal."""
    import cupy
    import cupyx.scipy.sparse as cupyx_sparse

    from spdist.kernels.cuda import module

    m = random_matrix(n, n, 6.0, 2) + sp.eye_array(n)
    m = sp.csr_matrix(m / abs(m).sum(axis=1).max())
    product = spdist.operator(cupyx_sparse.csr_matrix(m), make).prepared
    start = cupy.asarray(np.random.default_rng(3).uniform(-1, 1, n))
    found = []
    for early in (module._early_launch, lambda: None):
        monkeypatch.setattr(module, "_early_launch", early)
        x, y = start.copy(), cupy.empty(n)
        for _ in range(50):
            product.multiply(x, y, 1)
            product.multiply(y, x, 1)
        found.append(x.get())
    np.testing.assert_array_equal(*found)


def test_early_products_wait_for_other_streams_in_a_graph_too():
    """Two products as on a partitioned matrix: one during an exchange, the next after it."""
    import cupy

    m = stencil(20)
    a = sell.build(on_gpu(as_csr(m)))
    x = cupy.asarray(np.random.default_rng(5).uniform(-1, 1, m.shape[0]))
    y, z, there = (cupy.zeros_like(x) for _ in range(3))
    stream, beside = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()

    def step():
        with stream:
            sell.multiply(a, x, y)
        beside.wait_event(stream.record())
        with beside:
            cupy.multiply(y, 3.0, out=z)
        with stream:
            sell.multiply(a, y, there)  # meanwhile
        stream.wait_event(beside.record())
        with stream:
            sell.multiply(a, z, y)

    step()
    stream.synchronize()
    expected = y.get()
    y.fill(0)
    z.fill(0)
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    step()
    graph = stream.end_capture()
    for _ in range(5):
        graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(y.get(), expected)
    np.testing.assert_allclose(expected, m @ (3 * (m @ x.get())), rtol=1e-12, atol=1e-10)
