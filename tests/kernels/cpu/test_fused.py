"""Semirings, masks, threshold and top-n on the CPU, against SuiteSparse:GraphBLAS and against rows cut in Python."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import graphblas as gb
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import spdist
from spdist.errors import InputError, MatrixError
from spdist.kernels.cpu import multiply as cpu
from spdist.kernels.cpu import numba_engine, product_counts
from spdist.kernels.cpu import workspace as cpu_sizes
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.semirings import PLUS_TIMES, SEMIRINGS, Semiring
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR, from_scipy
from tests.kernels.cpu.test_multiply import assert_same, random_csr
from tests.support.strategies import FLOATS, csr_matrices, csr_pairs

MANY = settings(max_examples=50, deadline=None)
FEW = settings(max_examples=15, deadline=None)
GRAPHBLAS = {"or_and": "lor_land"}
NUMBERS = [*((name, "f8") for name in sorted(SEMIRINGS) if name != "max_plus"), ("min_plus", "i8"), ("max_plus", "i8"),
           ("plus_pair", "i8"), ("any_pair", "i8"), ("or_and", "i8"), ("plus_times", "i8"), ("max_times", "i1"),
           ("min_plus", "u2"), ("min_plus", "?")]  # fmt: skip
"""Every semiring, every kind of number, and each way to add and to multiply it; all pairs would compile for minutes."""


def graphblas(m: CSR, dtype: Any) -> Any:
    return gb.Matrix.from_csr(m.indptr, m.indices, m.data.astype(dtype), nrows=m.nrows, ncols=m.ncols)


def oracle(a: CSR, b: CSR, name: str, mask: CSR | None = None, complement: bool = False) -> CSR:
    """GraphBLAS's product; it knows no matrix without rows or columns."""
    dtype = SEMIRINGS[name].result_dtype(a.dtype, b.dtype)
    shape = a.nrows, b.ncols
    if 0 in (*shape, a.ncols):
        return CSR(np.zeros(a.nrows + 1, np.int64), np.empty(0, np.int32), np.empty(0, dtype), shape)
    ring = getattr(gb.semiring, GRAPHBLAS.get(name, name))[dtype.name]
    product = graphblas(a, dtype).mxm(graphblas(b, dtype), ring)
    c = gb.Matrix(dtype.name, *shape)
    structure = graphblas(mask, np.bool_).S if mask is not None else None
    c(mask=~structure if complement else structure) << product if structure is not None else c << product
    indptr, indices, data = c.to_csr(dtype=dtype, sort=True)
    return CSR(indptr.astype(np.int64), indices.astype(np.int32), data, shape)


def cut(c: CSR, top_n: int | None, threshold: float | None) -> CSR:
    """Cut rows in Python: the slow twin of the epilogue."""
    rows = []
    for start, stop in zip(c.indptr[:-1], c.indptr[1:], strict=True):
        entries = [(v, j) for v, j in zip(c.data[start:stop], c.indices[start:stop], strict=True) if v == v]
        if threshold is not None:
            entries = [(v, j) for v, j in entries if v >= threshold]
        best = sorted(entries, key=lambda entry: (-float(entry[0]), entry[1]))[:top_n]
        rows.append(sorted((j, v) for v, j in best))
    indptr = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    indices = np.array([j for row in rows for j, _ in row], c.indices.dtype)
    return CSR(indptr, indices, np.array([v for row in rows for _, v in row], c.dtype), c.shape)


@st.composite
def masked_pairs(draw: Any, dtype: Any = np.float64) -> tuple[CSR, CSR, CSR]:
    a, b = draw(csr_pairs(dtypes=(dtype, dtype)))
    return a, b, draw(csr_matrices((a.nrows, b.ncols)))


def same_but_index_dtype(c: CSR, expected: CSR) -> None:
    """Equal but for the sign of a zero: of 0 and -0 either may be called the larger."""
    check_canonical(c)
    c, expected = (CSR(m.indptr, m.indices.astype(np.int64), m.data + m.dtype.type(0), m.shape) for m in (c, expected))
    assert_same(c, expected)


@pytest.mark.parametrize(("name", "kind"), NUMBERS)
@given(data=st.data())
@FEW
def test_semirings_equal_graphblas(name: str, kind: str, data: Any) -> None:
    dtype = np.dtype(kind)
    a, b = data.draw(csr_pairs(dtypes=(dtype, dtype)))
    same_but_index_dtype(cpu.multiply(a, b, spec=ProductSpec(SEMIRINGS[name])), oracle(a, b, name))


@pytest.mark.parametrize("name", ["plus_times", "min_plus"])
@pytest.mark.parametrize("complement", [False, True])
@given(drawn=masked_pairs())
@MANY
def test_masks_equal_graphblas(name: str, complement: bool, drawn: tuple[CSR, CSR, CSR]) -> None:
    a, b, mask = drawn
    options = ProductSpec(SEMIRINGS[name], mask, complement)
    same_but_index_dtype(cpu.multiply(a, b, spec=options), oracle(a, b, name, mask, complement))


SHAPES = {
    "dense": lambda: (random_csr(300, 200, 12, 1), random_csr(200, 400, 9, 2)),
    "wide": lambda: (random_csr(100, 300, 20, 1), random_csr(300, 400_000, 15, 2)),
    "scattered": lambda: (random_csr(500, 400, 5, 1), random_csr(400, 3_000_000, 5, 2)),
    "long": lambda: (random_csr(5, 300, 250, 1), random_csr(300, 900_000, 900, 2)),
    "copied": lambda: (from_scipy(sp.eye_array(300).tocsr()), random_csr(300, 500, 9, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_method_of_a_row_follows_semiring_and_mask(shape: str) -> None:
    """Of one semiring: the methods take sums and products from it, and compile for half a minute for each."""
    name = "min_plus"
    a, b = SHAPES[shape]()
    whole = cpu.multiply(a, b, spec=ProductSpec(SEMIRINGS[name]))
    same_but_index_dtype(whole, oracle(a, b, name))
    rng = np.random.default_rng(3)
    taken = np.flatnonzero(rng.random(whole.nnz) < 0.3)
    rows = np.repeat(np.arange(whole.nrows), np.diff(whole.indptr))[taken]
    other = rng.integers(0, b.ncols, 5 * a.nrows), np.repeat(np.arange(a.nrows), 5)
    places = np.concatenate([rows, other[1]]), np.concatenate([whole.indices[taken], other[0]])
    mask = from_scipy(sp.csr_matrix((np.ones(len(places[0]), bool), places), shape=whole.shape))
    for complement in (False, True):
        c = cpu.multiply(a, b, threads=2, spec=ProductSpec(SEMIRINGS[name], mask, complement))
        assert_same(c, confined(whole, mask, complement))


def confined(c: CSR, mask: CSR, complement: bool) -> CSR:
    """Take the entries of C that a mask allows, afterwards."""
    rows = [np.repeat(np.arange(m.nrows), np.diff(m.indptr)) * m.ncols + m.indices for m in (c, mask)]
    kept = np.isin(rows[0], rows[1], invert=complement)
    indptr = np.concatenate([[0], np.cumsum(kept)])[c.indptr]
    return CSR(indptr, c.indices[kept], c.data[kept], c.shape)


@pytest.mark.parametrize("rows", ["short mask, long rows of B", "long mask, short rows of B"])
def test_each_row_of_b_is_met_by_the_shorter_side(rows: str) -> None:
    b = random_csr(200, 50_000, 2_000 if rows.startswith("short") else 5)
    a = random_csr(50, 200, 8, 1)
    mask = random_csr(50, 50_000, 20 if rows.startswith("short") else 9_000, 4)
    whole = cpu.multiply(a, b)
    assert_same(cpu.multiply(a, b, spec=ProductSpec(mask=mask)), confined(whole, mask, False))


@pytest.mark.slow
def test_a_mask_of_very_wide_columns_in_a_pattern() -> None:
    b = random_csr(300, 4_000, 30)
    stretched = CSR(b.indptr, b.indices.astype(np.int64) << 40, b.data, (b.nrows, 1 << 52))
    a, mask = random_csr(40, 300, 20, 1), random_csr(40, 4_000, 100, 2)
    wide = CSR(mask.indptr, mask.indices.astype(np.int64) << 40, mask.data, (mask.nrows, 1 << 52))
    for complement in (False, True):
        c = cpu.multiply(a, stretched, spec=ProductSpec(mask=wide, complement=complement))
        expected = cpu.multiply(a, b, spec=ProductSpec(mask=mask, complement=complement))
        assert_array_equal(c.indices, expected.indices.astype(np.int64) << 40)
        assert_array_equal(c.data, expected.data)


@pytest.mark.parametrize("dtype", ["f8", "i1", "?"])
@given(data=st.data(), top_n=st.none() | st.integers(1, 25), threshold=st.none() | st.integers(-30, 60))
@MANY
def test_rows_are_cut(dtype: Any, data: Any, top_n: int | None, threshold: int | None) -> None:
    a, b = data.draw(csr_pairs(dtypes=(np.dtype(dtype),) * 2))
    if dtype == "?" and threshold is not None:
        threshold = min(threshold, 1)
    c = cpu.multiply(a, b, spec=ProductSpec(top_n=top_n, threshold=threshold))
    check_canonical(c)
    expected = cpu.multiply(a, b, engine="scipy")
    assert_same(c, expected if top_n is None and threshold is None else cut(expected, top_n, threshold))


@given(pair=csr_pairs(values=FLOATS), top_n=st.integers(1, 5))
@MANY
def test_nan_is_never_kept_and_infinity_is_the_largest(pair: tuple[CSR, CSR], top_n: int) -> None:
    with np.errstate(all="ignore"):
        c = cpu.multiply(*pair, spec=ProductSpec(top_n=top_n))
        assert_same(c, cut(cpu.multiply(*pair, engine="scipy"), top_n, None))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("top_n", [1, 10, 1_000, None])
def test_long_rows_are_cut_with_ties(threads: int, top_n: int | None) -> None:
    a, b = random_csr(800, 400, 15, 1), random_csr(400, 20_000, 40, 2)
    a, b = (CSR(m.indptr, m.indices, np.round(m.data * 2), m.shape) for m in (a, b))
    expected = cpu.multiply(a, b, engine="scipy")
    for threshold in (None, 3.0):
        c = cpu.multiply(a, b, threads=threads, spec=ProductSpec(top_n=top_n, threshold=threshold))
        assert_same(c, cut(expected, top_n, threshold) if top_n or threshold else expected)


@pytest.mark.parametrize("ncols", [2_000, 70_000])
@pytest.mark.parametrize("per_row", [1, 300])
@pytest.mark.parametrize("threshold", [None, 3.0])
def test_forbidden_columns_do_not_count_among_the_largest(ncols: int, per_row: int, threshold: float | None) -> None:
    a, b = random_csr(200, 300, 15, 1), random_csr(300, ncols, 400, 2)
    a, b = (CSR(m.indptr, m.indices, np.round(m.data * 2), m.shape) for m in (a, b))
    largest = cpu.multiply(a, b, spec=ProductSpec(top_n=per_row))
    left = cpu.multiply(a, b, spec=ProductSpec(mask=largest, complement=True))
    c = cpu.multiply(a, b, spec=ProductSpec(mask=largest, complement=True, top_n=5, threshold=threshold))
    assert_same(c, cut(left, 5, threshold))


@pytest.mark.parametrize(
    "options", [{"threshold": 0.5}, {"top_n": 3}, {"top_n": 2, "mask": 5}, {"mask": 5, "complement": True}], ids=str
)
@given(data=st.data(), capacity=st.integers(0, 40), threads=st.integers(1, 2))
@FEW
def test_blocks_of_rows_carry_the_options(options: dict[str, Any], data: Any, capacity: int, threads: int) -> None:
    a, b, mask = data.draw(masked_pairs())
    made = ProductSpec(**{**options, "mask": mask} if "mask" in options else options)
    whole = cpu.multiply(a, b, spec=made)
    start = 0
    while start < a.nrows:
        part = cpu.multiply_rows(a, b, start, capacity, threads=threads, spec=made)
        stop = start + part.nrows
        assert part.nnz <= capacity or part.nrows == 1
        assert stop == a.nrows or int(whole.indptr[stop + 1] - whole.indptr[start]) > capacity
        assert_same(part, whole.rows(start, stop))
        start = stop


@pytest.mark.parametrize("capacity", [30_000, 60_000])
def test_threads_stop_at_the_capacity_of_cut_rows(capacity: int) -> None:
    a, b = random_csr(6_000, 3_000, 15, 1), random_csr(3_000, 50_000, 12, 2)
    options = ProductSpec(top_n=10, threshold=0.1)
    whole = cpu.multiply(a, b, spec=options)
    part = cpu.multiply_rows(a, b, 0, capacity, threads=2, spec=options)
    fits = int(np.searchsorted(whole.indptr, capacity, side="right")) - 1
    assert_same(part, whole.rows(0, min(fits, a.nrows)))


def test_a_semiring_of_ones_own() -> None:
    a, b = random_csr(60, 50, 6, 1), random_csr(50, 70, 6, 2)
    hypot = Semiring(lambda x, y: math.sqrt(x * x + y * y), lambda x, y: abs(x) + abs(y), 0.0)
    x, y = a.to_scipy().toarray(), b.to_scipy().toarray()
    both = (x != 0)[:, :, None] & (y != 0)[None]
    expected = np.sqrt(np.where(both, (np.abs(x)[:, :, None] + np.abs(y)[None]) ** 2, 0).sum(axis=1))
    mask = a_mask(60, 70)
    c = cpu.multiply(a, b, spec=ProductSpec(hypot, mask=mask))
    np.testing.assert_allclose(c.to_scipy().toarray(), expected * mask.to_scipy().toarray())
    shifted = Semiring(lambda x, y: x if x > y else y, lambda x, y: x + y + 1, -math.inf, dtype=np.int16)
    c = cpu.multiply(
        *(CSR(m.indptr, m.indices, (m.data * 9).astype(int), m.shape) for m in (a, b)), spec=ProductSpec(shifted)
    )
    assert c.dtype == np.int16
    assert c.nnz == cpu.multiply(a, b).nnz


def a_mask(nrows: int, ncols: int) -> CSR:
    m = random_csr(nrows, ncols, 20, 7)
    return CSR(m.indptr, m.indices, np.ones(m.nnz, bool), m.shape)


def test_two_semirings_of_ones_own_do_not_share_a_kernel() -> None:
    a = random_csr(30, 30, 4)
    made = [
        cpu.multiply(a, a, spec=ProductSpec(Semiring(lambda x, y: x + y, lambda x, y, s=s: s * x * y))).data
        for s in (2.0, 3.0)
    ]
    plain = cpu.multiply(a, a).data
    np.testing.assert_allclose(made, [2 * plain, 3 * plain])


def test_pairs_read_no_values() -> None:
    a = random_csr(40, 40, 4)
    poisoned = CSR(a.indptr, a.indices, np.full(a.nnz, np.nan), a.shape)
    for name in ("plus_pair", "any_pair"):
        options = ProductSpec(SEMIRINGS[name])
        assert_same(cpu.multiply(poisoned, poisoned, spec=options), cpu.multiply(a, a, spec=options))


def test_min_passes_over_nan() -> None:
    a = CSR(np.array([0, 2]), np.array([0, 1], np.int32), np.array([np.nan, 1.0]), (1, 2))
    b = CSR(np.array([0, 1, 2]), np.array([0, 0], np.int32), np.array([1.0, 2.0]), (2, 1))
    assert cpu.multiply(a, b, spec=ProductSpec(SEMIRINGS["min_plus"])).data.tolist() == [3.0]


def test_spgemm_takes_options_for_any_format() -> None:
    a = sp.random_array((60, 60), density=0.1, format="csc", random_state=np.random.default_rng(0))
    mask = sp.random_array((60, 60), density=0.2, format="coo", random_state=np.random.default_rng(1))
    c = spdist.spgemm(a, a, mask=mask)
    assert c.format == "csc"
    np.testing.assert_allclose(c.toarray(), (a @ a).toarray() * (mask.toarray() != 0))
    c = spdist.spgemm(a, a, semiring="plus_first")
    assert c.format == "csc"
    np.testing.assert_allclose(c.toarray(), (a @ (a != 0).astype(float)).toarray())
    best = spdist.spgemm(a, a, top_n=1).toarray()
    assert_array_equal(best.max(axis=1), (a @ a).toarray().max(axis=1))
    assert ((best != 0).sum(axis=1) <= 1).all()


@pytest.mark.parametrize("name", ["min_plus", "plus_times"])
def test_short_masks_are_dropped_from_whole_rows(name: str) -> None:
    """A mask of a column or two a row, and rows of many products: as GraphBLAS, with and without cuts.

    Of one semiring with cuts: it changes how a row is made, and not how it is cut.
    """
    a, b = random_csr(200, 200, 12, 1), random_csr(200, 400, 9, 2)
    mask = from_scipy((sp.eye_array(200, 400) + sp.eye_array(200, 400, k=7)).tocsr())
    expected = oracle(a, b, name, mask, True)
    same_but_index_dtype(cpu.multiply(a, b, spec=ProductSpec(SEMIRINGS[name], mask, True)), expected)
    if name == "plus_times":
        options = ProductSpec(SEMIRINGS[name], mask, True, top_n=5, threshold=0.5)
        same_but_index_dtype(cpu.multiply(a, b, spec=options), cut(expected, 5, 0.5))


def test_forbidden_columns_that_the_product_lacks_are_passed_over() -> None:
    """Nine forbidden columns lie between the last two entries of a row, and the tenth is the last entry's."""
    a, b = random_csr(40, 50, 10, 1), random_csr(50, 4000, 12, 2)
    whole = oracle(a, b, "plus_times").to_scipy()
    last = whole.indices[whole.indptr[1:] - 1]
    rows = np.flatnonzero(last - whole.indices[whole.indptr[1:] - 2] > 10)
    assert len(rows) > 20
    places = np.repeat(rows, 10), (last[rows, None] - np.arange(10)).ravel()
    mask = from_scipy(sp.csr_array((np.ones(10 * len(rows)), places), shape=whole.shape))
    c = cpu.multiply(a, b, spec=ProductSpec(mask=mask, complement=True))
    assert c.nnz == whole.nnz - len(rows)
    same_but_index_dtype(c, oracle(a, b, "plus_times", mask, True))


def test_explicit_zeros_of_a_mask_count() -> None:
    a = random_csr(20, 20, 5)
    mask = a_mask(20, 20)
    zeros = CSR(mask.indptr, mask.indices, np.zeros(mask.nnz), mask.shape)
    c = spdist.spgemm(a.to_scipy(), a.to_scipy(), mask=zeros.to_scipy())
    assert_same(from_scipy(c), cpu.multiply(a, a, spec=ProductSpec(mask=mask)))


def test_wrong_options_are_refused() -> None:
    a = sp.eye_array(4, format="csr")
    for options, message in (
        ({"semiring": "times_plus"}, "is not one of plus_times"),
        ({"top_n": 0}, "top_n=0"),
        ({"threshold": math.nan}, "NaN"),
        ({"complement": True}, "needs a mask"),
        ({"top_n": 1, "method": "scipy"}, "auto, numba"),
        ({"mask": a, "method": "hyspmm"}, "auto, numba, cuda"),
    ):
        with pytest.raises(InputError, match=message):
            spdist.spgemm(a, a, **options)
    with pytest.raises(MatrixError, match="the mask is 3 x 3"):
        spdist.spgemm(a, a, mask=sp.eye_array(3))
    for options in ({"semiring": "min_plus"}, {"top_n": 1}):
        with pytest.raises(MatrixError, match="no order"):
            spdist.spgemm(a.astype(complex), a, **options)
    with pytest.raises(InputError, match="above every value of dtype int8"):
        spdist.spgemm(a.astype(np.int8), a.astype(np.int8), threshold=128)
    with pytest.raises(InputError, match="needs the dtype"):
        Semiring(max, max, reads="")
    with pytest.raises(InputError, match="knows no semirings"):
        cpu.multiply(from_scipy(a), from_scipy(a), engine="scipy", spec=ProductSpec(top_n=1))


@pytest.mark.parametrize(("threshold", "kept"), [(1.5, [2, 3]), (2, [2, 3]), (-1e9, [1, 2, 3]), (3.0, [3])])
def test_thresholds_of_integers_round_up(threshold: float, kept: list[int]) -> None:
    a = sp.csr_array(np.array([[1, 2, 3]], np.int8))
    c = spdist.spgemm(a, sp.eye_array(3, dtype=np.int8, format="csr"), threshold=threshold)
    assert c.data.tolist() == kept


def test_thresholds_of_unsigned_integers_begin_at_zero() -> None:
    for threshold, least in ((-30, 0), (None, 0), (0.5, 1), (255, 255)):
        assert ProductSpec(threshold=threshold).least(np.dtype("u1")) == least


def test_memory_grows_with_the_entries_kept() -> None:
    import tracemalloc

    a, b = random_csr(20_000, 500, 12, 1), random_csr(500, 50_000, 60, 2)
    options = ProductSpec(top_n=5)
    cpu.multiply(a, b, threads=2, spec=options)
    products = product_counts.row_products(a, np.diff(b.indptr))
    tracemalloc.start()
    c = cpu.multiply(a, b, threads=2, spec=options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    fixed = cpu_sizes.cpu_workspace("numba", 50_000, int(products.max()), 8, 4, 2)
    fixed += cpu_sizes.fused_workspace(min(50_000, int(products.max())), 0, 5, 8, 4, 2, b.nrows)
    counting = 4 * a.nrows * 8 + 2 * product_counts.SAMPLE * 24  # row_products
    assert peak <= c.nbytes + fixed + counting
    assert int(products.sum()) * 12 > 20 * (peak - 2 * cpu_sizes.SCRATCH_BYTES)


def test_the_interpreter_runs_meanwhile() -> None:
    a, b = random_csr(4_000, 500, 40, 1), random_csr(500, 50_000, 300, 2)
    options = ProductSpec(top_n=10, threshold=0.0)
    cpu.multiply(random_csr(5, 500, 3), b, spec=options)
    longest, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal longest
        before = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            longest, before = max(longest, time.perf_counter() - before), time.perf_counter()

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    cpu.multiply(a, b, spec=options)
    took = time.perf_counter() - start
    done.set()
    watcher.join()
    assert longest < 0.8 * took  # all of it, if the interpreter stood still; a busy machine makes both longer


def test_plus_times_is_found_by_name() -> None:
    assert SEMIRINGS["plus_times"] is PLUS_TIMES
    assert ProductSpec().plain


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("seed", range(4))
def test_products_that_cannot_reach_the_threshold_change_nothing(monkeypatch, dtype, seed):
    """Some columns are in most rows, by the law of Zipf, and weigh little; with NaN, infinity and negative values."""
    rng = np.random.default_rng(seed)
    columns = np.minimum(rng.zipf(1.3, 24_000), 3000) - 1
    m = sp.csr_matrix((rng.random(24_000), (rng.integers(0, 2000, 24_000), columns)), (2000, 3000))
    m.sum_duplicates()
    m.data *= np.log(2000 / np.bincount(m.indices, minlength=3000).clip(1))[m.indices]
    m = sp.csr_matrix(sp.diags(1 / np.sqrt(np.asarray(m.multiply(m).sum(axis=1)).ravel().clip(1e-9))) @ m).astype(dtype)
    if seed == 1:
        m.data[m.indptr[5] : m.indptr[5] + 2] = np.nan, np.inf
    if seed == 2:
        m.data[::3] *= -1
    a, b, entries = from_scipy(m), from_scipy(sp.csr_matrix(m.T)), []
    for threshold, top in ((0.05, 10), (0.3, None), (0.3, 3), (0.9, 10), (5.0, 10), (0.0, 10), (-1.0, 4)):
        spec = ProductSpec(top_n=top, threshold=threshold)
        with monkeypatch.context() as patch:
            patch.setattr(numba_engine, "PRODUCTS_OF_PEAKS", 1 << 40)
            whole = cpu.multiply(a, b, spec=spec)
        found = cpu.multiply(a, b, threads=2, spec=spec)
        for name in ("indptr", "indices", "data"):
            np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
        product = (m.astype(np.float64) @ m.T.astype(np.float64)).tocsr()
        if seed != 1 and top is None and dtype == np.float64:
            assert found.nnz == (product.data >= threshold).sum()
        entries.append(found.nnz)
    assert entries[0] > 0
    assert entries[4] == 0 or seed == 1  # infinity reaches any threshold
