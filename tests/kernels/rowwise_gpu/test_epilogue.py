"""Semirings, epilogues, cuts and reductions on a GPU, against NumPy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.errors import InputError, MatrixError
from spdist.kernels import reduction_spec
from spdist.kernels.cpu.reduce import reduce_rows
from spdist.kernels.product_spec import Epilogue, ProductSpec
from spdist.kernels.rowwise_gpu import analysis, triangle, workspace
from spdist.kernels.rowwise_gpu import epilogue as gpu_epilogue
from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
from spdist.kernels.semirings import SEMIRINGS, Semiring
from spdist.kernels.streaming import pipeline
from spdist.matrices.csr import CSR, from_scipy
from tests.conftest import pattern_product, random_matrix, upper
from tests.kernels.esc.test_multiply_gpu import poisoned as poisoned_pool
from tests.kernels.rowwise_gpu.test_multiply import EVERYWHERE, a_matrix, to_gpu

pytestmark = pytest.mark.gpu

ON_ARRAYS = {
    "min_plus": (np.minimum, np.add),
    "max_plus": (np.maximum, np.add),
    "max_times": (np.maximum, np.multiply),
    "max_min": (np.maximum, np.minimum),
    "or_and": (np.bitwise_or, np.bitwise_and),
    "plus_pair": (np.add, lambda x, y: np.ones(len(x), np.int64)),
    "plus_first": (np.add, lambda x, y: x),
    "plus_second": (np.add, lambda x, y: y),
    "any_pair": (np.bitwise_or, lambda x, y: np.ones(len(x), np.bool_)),
    "plus_times": (np.add, np.multiply),
    "least product": (np.minimum, np.multiply),
}
OWN = Semiring(
    lambda x, y: y if y < x else x, lambda x, y: x * y, np.inf, name="least product",
    cuda=("x < y ? x : y", "x * y"),  # no sum that the GPU has an instruction for
)  # fmt: skip


def rings():
    yield from ((SEMIRINGS[name], np.float64) for name in ("min_plus", "max_plus", "max_times", "max_min"))
    yield from ((SEMIRINGS[name], np.float64) for name in ("plus_first", "plus_second", "plus_pair", "any_pair"))
    yield from ((OWN, dtype) for dtype in (np.float64, np.float32, np.int32))
    yield from ((SEMIRINGS["or_and"], np.bool_), (SEMIRINGS["plus_times"], np.bool_))
    yield from ((SEMIRINGS["plus_times"], dtype) for dtype in (np.int64, np.uint32))
    yield from ((SEMIRINGS["min_plus"], dtype) for dtype in (np.float32, np.int64))
    yield from ((SEMIRINGS["max_times"], np.uint64), (SEMIRINGS["plus_first"], np.complex128))


def by_hand(a: sp.csr_matrix, b: sp.csr_matrix, ring: Semiring) -> CSR:
    """Multiply by expanding all products."""
    dtype = ring.result_dtype(a.dtype, b.dtype)
    add, multiply = ON_ARRAYS["or_and" if ring.name == "plus_times" and dtype.kind == "b" else ring.name]
    lengths = np.diff(b.indptr)[a.indices]
    left = np.repeat(np.arange(a.nnz), lengths)
    right = (
        np.arange(len(left))
        - np.repeat(np.cumsum(lengths) - lengths, lengths)
        + np.repeat(b.indptr[a.indices], lengths)
    )
    x, y = (m.data[at].astype(dtype) for m, at in ((a, left), (b, right)))
    rows = np.repeat(np.arange(a.shape[0]), np.diff(a.indptr))[left]
    keys, at = np.unique(rows.astype(np.int64) * b.shape[1] + b.indices[right], return_inverse=True)
    out = np.full(len(keys), ring.zero_of(dtype), dtype)
    add.at(out, at, multiply(x, y))
    indptr = np.searchsorted(keys, np.arange(a.shape[0] + 1, dtype=np.int64) * b.shape[1])
    return CSR(indptr, keys % max(b.shape[1], 1), out, (a.shape[0], b.shape[1]))


def finished(c: CSR, options: ProductSpec) -> CSR:
    """Change and cut the rows of a product."""
    epilogue, pieces, lengths = options.epilogue or Epilogue(), [], []
    for row in range(c.nrows):
        own = slice(c.indptr[row], c.indptr[row + 1])
        columns, x = c.indices[own], c.data[own]
        for factors in (epilogue.rows, epilogue.columns):
            if factors is not None:
                x = (x * (factors[row] if factors is epilogue.rows else factors[columns])).astype(c.dtype)
        x = x if epilogue.apply is None else epilogue.apply(x).astype(c.dtype)
        if epilogue.normalize is not None and len(x):
            size = np.linalg.norm(x.astype(complex), {"l1": 1, "l2": 2, "max": np.inf}[epilogue.normalize])
            x = (x / size).astype(c.dtype) if size > 0 else x
        keep = x != 0 if epilogue.drop_zeros else np.ones(len(x), bool)
        if options.selects:
            keep &= x >= options.least(c.dtype)
            order = np.flatnonzero(keep)
            rank = np.unique(x[order], return_inverse=True)[1] if len(order) else order
            kept = order[np.lexsort((order, -rank))[: options.top_n]]
            keep = np.isin(np.arange(len(x)), kept)
        pieces.append((columns[keep], x[keep]))
        lengths.append(int(keep.sum()))
    indices, data = (np.concatenate([c.indices[:0] if not k else c.data[:0], *(p[k] for p in pieces)]) for k in (0, 1))
    return CSR(np.concatenate([[0], np.cumsum(lengths)]), indices, data, c.shape)


def assert_same(c, d: CSR, rtol: float = 0) -> None:
    found = [np.asarray(x.get() if hasattr(x, "get") else x) for x in (c.indptr, c.indices, c.data)]
    assert (c.shape, c.dtype) == (d.shape, d.dtype)
    np.testing.assert_array_equal(found[0], d.indptr)
    np.testing.assert_array_equal(found[1], d.indices)
    np.testing.assert_allclose(found[2], d.data, rtol=rtol)


@pytest.fixture(autouse=True)
def poisoned():
    """Allocate from a pool of its own, whose bytes are all 0xa5 before they are written."""
    with poisoned_pool() as pool:
        yield pool


@pytest.fixture(params=[False, True], ids=["", "everywhere"])
def everywhere(request, monkeypatch):
    """Send rows to every family of kernels at small sizes too."""
    if request.param:
        monkeypatch.setattr(rowwise_gpu, "TUNING", EVERYWHERE)
        monkeypatch.setattr(workspace, "SMALL_BYTES", 0)


def operand(kind: str, seed: int, dtype, n: int = 0) -> sp.csr_matrix:
    n = n or (150 if kind == "dense" else 400)
    m = a_matrix(kind, n, n, np.random.default_rng(seed))
    values = np.random.default_rng(seed).integers(0 if np.dtype(dtype).kind == "u" else -3, 6, m.nnz)
    m.data = values.astype(dtype)
    return m


@pytest.mark.parametrize(("ring", "dtype"), list(rings()), ids=lambda one: getattr(one, "name", None))
def test_semirings_equal_numpy(everywhere, ring, dtype):
    for seed, kind in enumerate(("sparse", "dense", "skew", "longrow", "block")):
        a, b = operand(kind, seed, dtype), operand("skew" if kind == "longrow" else kind, seed + 9, dtype)
        for deterministic in (False, True):
            c = rowwise_gpu.multiply(to_gpu(a, dtype), to_gpu(b, dtype), deterministic=deterministic, semiring=ring)
            assert_same(c, by_hand(a, b, ring))


def confined(c: CSR, mask: CSR, complement: bool) -> CSR:
    """Return the entries of C that are inside a mask, or outside."""
    keys, marked = (
        np.repeat(np.arange(m.nrows), np.diff(m.indptr)) * m.ncols + m.indices.astype(np.int64) for m in (c, mask)
    )
    keep = np.isin(keys, marked) != complement
    indptr = np.concatenate([[0], np.cumsum(keep)])[c.indptr]
    return CSR(indptr, c.indices[keep], c.data[keep], c.shape)


SHARES = {
    "as chosen": {},
    "tasks": {"search_gain": 1 << 30, "row_products": 16, "row_mask": 8, "task_products": 64, "rows_per_turn": 1},
    "searched": {"search_gain": 1, "row_products": 200, "task_products": 500, "rows_per_turn": 100},
    "warps": {"row_products": 1 << 40, "row_mask": 1 << 40},
}
"""How rows are shared out: small tasks, tasks and warps that search, and warps alone."""


def masked(
    a: CSR, b: CSR, mask: CSR, ring: Semiring = SEMIRINGS["plus_times"], rtol: float = 0.0, outside: bool = True
) -> None:
    """Compare products inside of a mask, and outside, with NumPy's, with sums in any order and in order."""
    from spdist.kernels.rowwise_gpu import masked as masked_gpu

    whole_c = by_hand(a.to_scipy(), b.to_scipy(), ring)
    for complement in (False, True) if outside else (False,):
        for deterministic in (False, True):
            there = masked_gpu.on_device(mask, mask.indices.dtype, mask.indptr.dtype)
            wanted = {"complement": complement, "deterministic": deterministic, "semiring": ring}
            operands = on_gpu(a, a.indptr.dtype), on_gpu(b, b.indptr.dtype), there
            c, made = masked_gpu.multiply(*operands, **wanted)
            assert_same(c, confined(whole_c, mask, complement), rtol)  # NumPy rounds each product, the GPU only the sum
            assert made >= c.nnz
            if deterministic:
                again = masked_gpu.multiply(*operands, **wanted)[0]
                assert c.data.get().tobytes() == again.data.get().tobytes()


@pytest.mark.parametrize("name", ["plus_times", "min_plus", "or_and", "plus_first", "least product"])
@pytest.mark.parametrize("kinds", ["sparse dense", "skew skew", "longrow sparse", "dense dense", "sparse sparse"])
@pytest.mark.parametrize("shares", SHARES)
def test_masks_equal_numpy(monkeypatch, shares, name, kinds):
    """Rows that warps and thread blocks take, of masks that are searched for, and looked up."""
    from spdist.kernels.rowwise_gpu import masked as masked_gpu

    monkeypatch.setattr(masked_gpu, "TUNING", masked_gpu.MaskTuning(**SHARES[shares]))
    kind, of_mask = kinds.split()
    ring = OWN if name == "least product" else SEMIRINGS[name]
    dtype = {"or_and": np.bool_, "plus_first": np.complex128}.get(name, np.float64)
    n = 150 if kind == "dense" else 400
    a, b = operand(kind, 3, dtype, n), operand("skew" if kind == "longrow" else kind, 4, dtype, n)
    mask = operand(of_mask, 5, np.float64, n)
    if kind == "longrow":
        b = sp.hstack([b] * 15).tocsr()
        mask = sp.random(n, b.shape[1], density=0.8, random_state=1, format="csr")
    masked(rows_of(a.astype(dtype)), rows_of(b.astype(dtype)), rows_of(from_scipy(mask).to_scipy()), ring)


def rows_of(m: sp.csr_matrix, pointer=np.int32) -> CSR:
    """Return the arrays of a matrix of SciPy's."""
    return CSR(m.indptr.astype(pointer), m.indices.astype(np.int32), m.data, m.shape)


@pytest.mark.parametrize("shares", SHARES)
def test_hubs_inside_masks(monkeypatch, shares):
    """Rows of A that are very long, as a whole and in their B; sums in order have the same bits again."""
    from spdist.kernels.rowwise_gpu import masked as masked_gpu

    monkeypatch.setattr(masked_gpu, "TUNING", masked_gpu.MaskTuning(**SHARES[shares]))
    rng = np.random.default_rng(7)
    lengths = [9000, 0, 1, 1500, 3, 40]
    rows, columns = np.repeat(np.arange(6), lengths), np.concatenate([rng.choice(9000, n, False) for n in lengths])
    # No value below zero: sums that cancel have no relative bound, whatever the order in which atomics add.
    a = sp.csr_matrix((rng.random(len(rows)), (rows, columns)), (6, 9000))
    b = sp.random(9000, 3000, density=0.0005, format="csr", random_state=1)
    b = sp.vstack([sp.random(4, 3000, density=0.9, random_state=2), b[4:]]).tocsr()
    mask = sp.vstack([sp.random(1, 3000, density=d, random_state=3) for d in (0.5, 0.5, 0.1, 0.9, 0.9, 0.002)]).tocsr()
    for pointer in (np.int32, np.int64):
        masked(rows_of(a, pointer), rows_of(b), rows_of(mask), rtol=1e-12, outside=False)


@pytest.mark.parametrize("shares", SHARES)
def test_masks_of_columns_far_apart(monkeypatch, shares):
    """Columns that share their bits in the filters, with whole numbers of 64 bits; masks that are long, or empty."""
    from spdist.kernels.rowwise_gpu import masked as masked_gpu

    monkeypatch.setattr(masked_gpu, "TUNING", masked_gpu.MaskTuning(**SHARES[shares]))
    rng = np.random.default_rng(8)
    ncols = 1 << 45
    of = np.array([0, 1, 31, 1 << 14, 1 << 17, 70_000])
    places = np.unique(np.concatenate([of + (k << 36) for k in range(40)] + [of + (k << 28) for k in range(40)]))

    def matrix(lengths: list[int], pointer=np.int64) -> CSR:
        columns = [np.sort(rng.choice(places, n, False)) for n in lengths]
        data = rng.integers(-8, 9, sum(lengths)).astype(np.float64)
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(pointer)
        return CSR(indptr, np.concatenate(columns).astype(np.int64), data, (len(lengths), ncols))

    b, mask = matrix([200, 0, 400, 1, 100, 300] * 4, np.int32), matrix([200, 0, 3, 1, 100, 350, 400, 17])
    a = rows_of(sp.random(8, 24, density=0.5, format="csr", random_state=1))
    for left in (a, CSR(a.indptr, a.indices.astype(np.int64), a.data, a.shape)):
        exact = CSR(left.indptr, left.indices, np.round(8 * left.data), left.shape)
        masked(exact, b, mask, outside=False)  # the kernels of whole products count such columns for a very long time
    masked(exact, b, CSR(np.zeros(9, np.int64), mask.indices[:0], mask.data[:0], mask.shape), outside=False)


def test_masks_longer_than_filters():
    n = 1 << 18
    rng = np.random.default_rng(9)
    a = sp.csr_matrix(np.array([[1.0, 2.0, 0.0], [0.0, 0.0, 3.0], [0.0, 1.0, 0.0]]))
    b = sp.csr_matrix((rng.integers(1, 9, 5000).astype(float), (np.arange(5000) % 3, rng.integers(0, n, 5000))), (3, n))
    mask = sp.csr_matrix(
        (np.ones(150_004), (np.repeat([0, 2], [150_000, 4]), [*range(7, 150_007), 3, 5, 9, n - 1])), (3, n)
    )
    masked(rows_of(a), rows_of(b), rows_of(mask))


@pytest.mark.parametrize("shape", [(0, 5, 5), (5, 0, 5), (5, 5, 0), (1, 1, 1)])
def test_masks_of_no_rows_or_columns(shape):
    n, k, m = shape
    a, b, mask = (sp.csr_matrix(np.ones(size)) for size in ((n, k), (k, m), (n, m)))
    masked(rows_of(a), rows_of(b), rows_of(mask))


def test_masks_that_are_not_canonical():
    m = rows_of(operand("sparse", 1, np.float64))
    analysis.check_canonical(on_gpu(m), "the mask")
    twice, outside = m.indices.copy(), m.indices.copy()
    row = int(np.argmax(np.diff(m.indptr)))
    twice[m.indptr[row] + 1], outside[-1] = twice[m.indptr[row]], m.ncols
    for columns, message in (
        (twice, "the mask: a row is not sorted"),
        (outside, "the mask: offsets that fall, or a col"),
    ):
        with pytest.raises(MatrixError, match=message):
            analysis.check_canonical(on_gpu(CSR(m.indptr, columns, m.data, m.shape)), "the mask")


def twice(m: sp.csr_matrix) -> sp.csr_matrix:
    """Return a matrix whose rows hold each entry twice, once in rising and once in falling order."""
    at = [np.arange(first, last) for first, last in zip(m.indptr[:-1], m.indptr[1:], strict=True)]
    at = np.concatenate([m.indptr[:0], *(x for row in at for x in (row, row[::-1]))])
    return sp.csr_matrix((m.data[at], m.indices[at], 2 * m.indptr), m.shape)


@pytest.mark.parametrize("name", ["plus_times", "min_plus", "or_and", "plus_first"])
@pytest.mark.parametrize("kind", ["sparse", "dense", "skew", "longrow", "block"])
def test_triangles_equal_numpy(everywhere, kind, name):
    """Of all rows and of the last, of rows that hold a column twice; counted, and inside and outside of a mask."""
    from spdist.kernels.rowwise_gpu.epilogue import BlockEpilogue

    ring, dtype = SEMIRINGS[name], np.dtype({"or_and": "?", "plus_first": "c16"}.get(name, "f8"))
    a, b = twice(operand(kind, 1, dtype)), operand("skew" if kind == "longrow" else kind, 2, dtype)
    mask = from_scipy(operand("dense" if kind == "dense" else "skew", 3, np.float64))
    for base, first in ((0, 0), (10, 30)):
        at = int(a.indptr[first])
        rows = sp.csr_matrix((a.data[at:], a.indices[at:], a.indptr[first:] - at), (a.shape[0] - first, a.shape[1]))
        expected = upper(by_hand(rows, b, ring), first)
        left, right = to_gpu(rows, dtype), to_gpu(b, dtype)
        for masked in ({}, {"mask": mask}, {"mask": mask, "complement": True}):
            options = ProductSpec(ring, triangle="upper", **masked).of_rows(base, a.shape[0])
            of_mask = mask.rows(first, mask.nrows)
            made = confined(expected, of_mask, options.complement) if masked else expected
            for deterministic in (False, True):
                work = BlockEpilogue(options, None, (a.shape[0] - base, b.shape[1]), dtype)
                c, held = work.make(left, right, first - base, deterministic)
                assert_same(c, made)
                assert held >= c.nnz
        counted = BlockEpilogue(ProductSpec(triangle="upper", first_row=base), "row_nnz", expected.shape, dtype)
        lengths, _ = counted.make(left, right, first - base, False)
        np.testing.assert_array_equal(lengths.get(), np.diff(expected.indptr))


def test_triangles_of_as_many_entries_as_pass_their_columns(monkeypatch):
    from spdist.kernels.rowwise_gpu.epilogue import BlockEpilogue

    monkeypatch.setattr(triangle, "index_dtype", lambda columns: np.dtype(np.int64))
    a, b = operand("skew", 1, np.float64), operand("skew", 2, np.float64)
    work = BlockEpilogue(ProductSpec(triangle="upper"), None, a.shape, np.dtype(np.float64))
    c, _ = work.make(to_gpu(a), to_gpu(b), 0, True)
    assert c.indices.dtype == np.int32
    assert_same(c, upper(by_hand(a, b, SEMIRINGS["plus_times"])))


@pytest.mark.parametrize("name", ["min_plus", "or_and", "plus_times", "least product"])
def test_rows_that_thread_blocks_share(name):
    ring = OWN if name == "least product" else SEMIRINGS[name]
    dtype = {"or_and": np.bool_, "plus_times": np.int64}.get(name, np.float64)
    rng = np.random.default_rng(3)
    a = sp.csr_matrix((rng.integers(-4, 5, 3000), (np.repeat([2, 5], 1500), np.tile(np.arange(1500), 2))), (8, 1500))
    b = operand("dense", 7, dtype, 1500)[:, :1501]
    c = rowwise_gpu.multiply(to_gpu(a.astype(dtype), dtype), to_gpu(b, dtype), semiring=ring)
    assert_same(c, by_hand(a.astype(dtype), b, ring))


def test_minus_zero_infinities_and_nan():
    values = np.array([np.nan, -0.0, 0.0, np.inf, -np.inf, 2.5, -2.5, 1e-310])
    a = sp.csr_matrix(np.ones((4, 4000)))
    b = sp.csr_matrix((np.tile(values, 4000), (np.repeat(np.arange(4000), 8), np.tile(np.arange(8), 4000))), (4000, 8))
    for name, add in (("min_plus", np.fmin), ("max_times", np.fmax)):
        c = rowwise_gpu.multiply(to_gpu(a), to_gpu(b), semiring=SEMIRINGS[name])
        found = c.data.get().reshape(4, 8)
        expected = values + 1 if name == "min_plus" else values
        zero = float(SEMIRINGS[name].zero)
        np.testing.assert_array_equal(found, np.tile(add(expected, zero), (4, 1)))


def mixed(seed: int, dtype=np.float64) -> CSR:
    """Return a matrix with short, long and empty rows whose values repeat."""
    rng = np.random.default_rng(seed)
    lengths = np.concatenate([[0, 1, 2, 31, 33, 2048, 2049, 9000, 0, 5], rng.integers(0, 300, 60)])
    columns = [np.sort(rng.choice(10_000, n, replace=False)) for n in lengths]
    data = rng.integers(-40, 41, lengths.sum())
    data = np.abs(data) if np.dtype(dtype).kind in "ub" else data
    indices = np.concatenate(columns).astype(np.int32)
    return CSR(np.concatenate([[0], np.cumsum(lengths)]), indices, data.astype(dtype), (len(lengths), 10_000))


def on_gpu(c: CSR, pointer=np.int32) -> CSR:
    import cupy

    return CSR(cupy.asarray(c.indptr.astype(pointer)), cupy.asarray(c.indices), cupy.asarray(c.data), c.shape)


CUTS = [
    ProductSpec(top_n=1), ProductSpec(top_n=7), ProductSpec(top_n=2048), ProductSpec(threshold=3.0),
    ProductSpec(threshold=0.0, top_n=40),
    ProductSpec(epilogue=Epilogue(drop_zeros=True)),
    ProductSpec(epilogue=Epilogue(drop_zeros=True), top_n=100, threshold=-5.0),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8", "u4", "u8", "?"])
@pytest.mark.parametrize("options", CUTS, ids=[f"cut {number}" for number in range(len(CUTS))])
def test_cuts_equal_numpy(options, dtype):
    from spdist.kernels.rowwise_gpu import epilogue as gpu_epilogue

    c = mixed(1, dtype)
    for pointer in (np.int32, np.int64) if dtype == "f8" else (np.int32,):
        found = gpu_epilogue.finish(on_gpu(c, pointer), options)
        assert_same(found, finished(c, options))


def test_values_that_differ_in_their_last_bits_and_nan():
    from spdist.kernels.rowwise_gpu import epilogue as gpu_epilogue

    c = mixed(2)
    rng = np.random.default_rng(1)
    data = 1 + rng.integers(-3, 4, c.nnz) * np.finfo(float).eps
    data[rng.random(c.nnz) < 0.1] = np.nan
    data[rng.random(c.nnz) < 0.1] = -0.0
    data[rng.random(c.nnz) < 0.1] = 0.0
    data[rng.random(c.nnz) < 0.05] = -np.inf
    c = CSR(c.indptr, c.indices, data, c.shape)
    for options in (ProductSpec(top_n=50), ProductSpec(top_n=1500, threshold=0.0), ProductSpec(threshold=-np.inf)):
        assert_same(gpu_epilogue.finish(on_gpu(c), options), finished(c, options))


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("norm", [None, "l1", "l2", "max"])
def test_epilogues_equal_numpy(dtype, norm):
    c = mixed(3, dtype)
    if norm is None and dtype[0] == "c":
        c = CSR(c.indptr, c.indices, (c.data * (1 + 2j)).astype(dtype), c.shape)
    rng = np.random.default_rng(4)
    epilogue = Epilogue(
        rows=rng.integers(-2, 3, c.nrows) / 2, columns=rng.integers(-2, 3, c.ncols) / 4, apply=lambda x: x * x,
        cuda="x * x", normalize=norm, drop_zeros=norm != "l2",
    )  # fmt: skip
    options = ProductSpec(epilogue=epilogue, top_n=20 if dtype[0] == "f" and norm is None else None)
    work = gpu_epilogue.BlockEpilogue(options, None, c.shape, c.dtype)
    work.send()
    found = gpu_epilogue.finish(on_gpu(c), options, *work.on_device)
    assert_same(found, finished(c, options), 1e-5 if dtype in ("f4", "c8") else 1e-13)


REDUCTIONS = [
    *reduction_spec.REDUCTIONS, reduction_spec.Histogram((-2.0, 0.0, 1.0, 3.0)),
    reduction_spec.Histogram(tuple(np.linspace(-1.0, 2.0, 3001))),  # more bins than a thread block counts for itself
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "what"), [
    (dtype, what) for dtype in ("f4", "f8", "c16", "i4", "u8", "?") for what in REDUCTIONS
    if dtype != "c16" or not isinstance(what, reduction_spec.Histogram)  # complex values have no order
], ids=lambda one: str(one)[:20])  # fmt: skip
def test_reductions_equal_numpy(dtype, what):
    from spdist.kernels.rowwise_gpu.epilogue import BlockEpilogue

    c = mixed(5, dtype)
    c = CSR(c.indptr, c.indices % 70 if what == "trace" else c.indices, c.data, c.shape)
    if what == "trace":
        m = c.to_scipy().tocsr()
        m.sum_duplicates()
        c = CSR(m.indptr, m.indices, m.data.astype(dtype), c.shape)
    work = BlockEpilogue(ProductSpec(top_n=2**20), what, c.shape, c.dtype)  # else rows are only counted
    work.send()
    there = on_gpu(c)
    room = work.room(there)
    work.reduce(there, 3, room)
    found = reduction_spec.final_value(what, work.part((work.sums if what == "column_sums" else room).get()), c.ncols)
    expected = reduction_spec.final_value(what, reduce_rows(what, c, 3), c.ncols)
    np.testing.assert_allclose(found, expected, rtol=1e-5 if dtype == "f4" else 1e-13)
    assert np.asarray(found).dtype == np.asarray(expected).dtype


def whole(m: sp.csr_matrix) -> sp.csr_matrix:
    m.data = np.random.default_rng(1).integers(-3, 7, m.nnz).astype(float)
    return m


@pytest.mark.parametrize("megabytes", [8, 1024])
def test_blocks_become_answers_within_the_limit(megabytes):
    from spdist.kernels.streaming.gpu_device import Gpu

    m = whole(random_matrix(4_000, 4_000, 10.0, 3))
    a, device = from_scipy(m), Gpu(megabytes << 20)
    rows, columns = np.arange(4_000) % 5 - 2.0, np.arange(4_000) % 3 + 1.0
    product = by_hand(m, m, SEMIRINGS["plus_times"])
    for options in (
        ProductSpec(top_n=5, threshold=2.0),
        ProductSpec(epilogue=Epilogue(rows=rows, columns=columns, drop_zeros=True), top_n=5),
        ProductSpec(epilogue=Epilogue(normalize="l1"), threshold=0.1),
    ):
        seen: list[pipeline.Stage] = []
        c = pipeline.multiply(a, a, device, spec=options, report=seen.append)
        assert_same(c, finished(product, options), 1e-13)
        assert device.peak <= megabytes << 20
        if options.top_n:
            assert sum(stage.nbytes for stage in seen if stage.name == "download") < 4 * c.nnz * 12
    for complement in (False, True):
        c = pipeline.multiply(a, a, device, spec=ProductSpec(mask=a, complement=complement, top_n=9))
        assert_same(c, finished(confined(product, a, complement), ProductSpec(top_n=9)))
    assert pipeline.reduce(a, a, "nnz", device, spec=ProductSpec(mask=a)).values[0] == confined(product, a, False).nnz
    ring = dataclasses.replace(ProductSpec(), semiring=SEMIRINGS["min_plus"])
    assert_same(pipeline.multiply(a, a, device, spec=ring), by_hand(m, m, SEMIRINGS["min_plus"]))
    for what in ("trace", "frobenius", "nnz", "row_nnz", "column_sums"):
        found = pipeline.reduce(a, a, what, device)
        expected = reduce_rows(what, product, 0)
        one, other = (reduction_spec.final_value(what, part, product.ncols) for part in (found, expected))
        np.testing.assert_allclose(one, other, rtol=1e-12, err_msg=what)
    assert device.peak <= megabytes << 20


def test_public_calls():
    import cupyx.scipy.sparse as csp

    m = whole(random_matrix(3000, 3000, 8.0, 5))
    wanted = {"semiring": "max_times", "top_n": 4, "threshold": 1.0}
    expected = finished(
        by_hand(m, m, SEMIRINGS["max_times"]), ProductSpec(SEMIRINGS["max_times"], top_n=4, threshold=1.0)
    )
    assert_same(from_scipy(spdist.matmul(m, m, engine="cuda", memory_limit="64MiB", **wanted)), expected)
    on_device = csp.csr_matrix(m)
    assert_same(from_scipy(spdist.spgemm(on_device, on_device, **wanted).get()), expected)
    backwards = csp.csr_matrix((on_device.data, on_device.indices, on_device.indptr), on_device.shape)
    backwards.indices, backwards.data = backwards.indices.copy(), backwards.data.copy()
    for row in np.flatnonzero(np.diff(m.indptr) > 1)[:50]:
        own = slice(m.indptr[row], m.indptr[row + 1])
        for array in (backwards.indices, backwards.data):
            array[own] = array[own][::-1].copy()
    inside = confined(by_hand(m, m, SEMIRINGS["plus_times"]), from_scipy(m), False)
    for right, mask in ((on_device, on_device), (on_device, m), (on_device, backwards), (backwards, backwards)):
        assert_same(from_scipy(spdist.spgemm(on_device, right, mask=mask).get()), inside)
    pairs = confined(by_hand(m, m, SEMIRINGS["plus_pair"]), from_scipy(m), False)
    found = spdist.spgemm(on_device, on_device, semiring="plus_pair", mask=on_device).get()
    assert_same(from_scipy(found), CSR(pairs.indptr, pairs.indices, pairs.data.astype(np.float64), pairs.shape))
    np.testing.assert_allclose(spdist.reduce(m, m, "trace", engine="cuda"), (m @ m).diagonal().sum())
    expected = spdist.spgemm(m, m, **wanted, axis=0)
    for found in (
        spdist.matmul(m, m, engine="cuda", memory_limit="64MiB", **wanted, axis=0),
        spdist.spgemm(on_device, on_device, **wanted, axis=0).get(),
    ):
        assert abs(found - expected).nnz == 0
    half = upper(by_hand(m, m, SEMIRINGS["plus_times"]))
    assert_same(from_scipy(spdist.spgemm(on_device, on_device, triangle="upper").get()), half)
    assert_same(from_scipy(spdist.matmul(m, m, engine="cuda", memory_limit="64MiB", triangle="upper")), half)
    assert spdist.reduce(m, m, "nnz", engine="cuda", triangle="upper") == half.nnz
    with pytest.raises(InputError, match="esc"):
        spdist.spgemm(on_device, on_device, "esc", top_n=3)
    with pytest.raises(InputError, match="does not compile"):
        spdist.spgemm(on_device, on_device, epilogue=Epilogue(apply=abs, cuda="no_such_thing(x)"))
    with pytest.raises(MatrixError, match="no order"):
        spdist.spgemm(on_device.astype(np.complex128), on_device, top_n=3)


def test_answers_from_storage(stored, tmp_path):
    m = whole(random_matrix(20_000, 20_000, 8.0, 6))
    a = stored("A", m)
    options = {"engine": "cuda", "memory_limit": "64MiB", "top_n": 3}
    report = spdist.multiply(a, a, tmp_path / "C.zarr", grid=(3, 1, 1), check=True, **options)
    assert report.verification["ok"]
    assert spdist.reduce(a, a, "nnz", **options) == report.nnz
    half = {"engine": "cuda", "memory_limit": "64MiB", "triangle": "upper"}
    report = spdist.multiply(a, a, tmp_path / "U.zarr", grid=(3, 1, 1), check=True, **half)
    assert report.verification["ok"]
    assert report.nnz == upper(from_scipy(pattern_product(m, m))).nnz == spdist.reduce(a, a, "nnz", **half)
    np.testing.assert_allclose(
        spdist.reduce(a, a, "frobenius", engine="cuda", memory_limit="64MiB"), np.sqrt(((m @ m).data ** 2).sum())
    )
