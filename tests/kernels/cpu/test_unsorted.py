"""Products whose rows need not be sorted: the sorted product, but for the order of entries, which no thread changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from spdist.errors import InputError
from spdist.kernels.cpu import multiply as cpu
from spdist.kernels.cpu import workspace as cpu_sizes
from spdist.kernels.product_spec import PLAIN, Epilogue, ProductSpec
from spdist.kernels.semirings import SEMIRINGS
from spdist.matrices.csr import CSR, from_scipy
from tests.conftest import random_matrix
from tests.kernels.cpu.test_multiply import ENGINES, assert_same, random_csr
from tests.support.strategies import DTYPES, FLOATS, csr_pairs

MANY = settings(max_examples=60, deadline=None)
FEW = settings(max_examples=15, deadline=None)
UNSORTED = ProductSpec(sort=False)


def in_order(c: CSR) -> CSR:
    """Return the matrix with its rows sorted, by a stable sort of NumPy's."""
    rows = np.repeat(np.arange(c.nrows), np.diff(c.indptr))
    order = np.lexsort((c.indices, rows))
    return CSR(c.indptr, c.indices[order], c.data[order], c.shape)


def is_sorted(c: CSR) -> bool:
    """Whether the columns of each row rise."""
    rows = np.repeat(np.arange(c.nrows), np.diff(c.indptr))
    return bool(((np.diff(c.indices) > 0) | (np.diff(rows) > 0)).all())


def made_of(*matrices: Any) -> CSR:
    """Return matrices of SciPy's below each other."""
    return from_scipy(sp.vstack(matrices, format="csr"))


SHAPES: dict[str, Any] = {
    "window": lambda dtype: (random_csr(300, 200, 12, 1, dtype), random_csr(200, 400, 9, 2, dtype)),
    "repeats": lambda dtype: (random_csr(300, 80, 30, 1, dtype), random_csr(80, 100, 25, 2, dtype)),
    "hash": lambda dtype: (random_csr(400, 600, 8, 1, dtype), random_csr(600, 200_000, 8, 2, dtype)),
    "hash with repeats": lambda dtype: (random_csr(400, 60, 20, 1, dtype), random_csr(60, 3_000_000, 20, 2, dtype)),
    "large table": lambda dtype: (random_csr(60, 300, 100, 1, dtype), random_csr(300, 900_000, 100, 2, dtype)),
    "strips": lambda dtype: (random_csr(5, 300, 250, 1, dtype), random_csr(300, 900_000, 900, 2, dtype)),
    "very wide": lambda dtype: (random_csr(40, 60, 8, 1, dtype), spread(random_csr(60, 5_000, 8, 2, dtype))),
}


def spread(m: CSR) -> CSR:
    """Return the matrix with its columns far apart: their differences fit into no key of a sort."""
    return CSR(m.indptr, m.indices.astype(np.int64) << 46, m.data, (m.nrows, m.ncols << 46))


@pytest.mark.parametrize("engine", ENGINES)
@given(pair=csr_pairs())
@MANY
def test_sorted_afterwards_it_is_the_sorted_product(engine: Any, pair: tuple[CSR, CSR]) -> None:
    c = cpu.multiply(*pair, engine=engine, spec=UNSORTED)
    assert_same(in_order(c), cpu.multiply(*pair, engine=engine))


@pytest.mark.parametrize(
    ("shape", "dtype"), [("window", t) for t in ("f4", "c16")] + [(s, "f8") for s in SHAPES], ids=str
)
def test_each_method_gives_the_bits_of_the_sorted_product(shape: str, dtype: Any) -> None:
    a, b = SHAPES[shape](dtype)
    c = cpu.multiply(a, b, engine="numba", spec=UNSORTED)
    assert_same(in_order(c), cpu.multiply(a, b, engine="numba"))
    assert is_sorted(c) == (shape == "strips")


def test_an_entry_comes_where_its_column_is_met_first() -> None:
    """Whichever method makes the row: in the table, and in the window that follows a row with repeats."""
    for shape in ("window", "repeats", "hash", "hash with repeats", "large table"):
        a, b = SHAPES[shape]("f8")
        c = cpu.multiply(a, b, engine="numba", spec=UNSORTED)
        for row in range(a.nrows // 50, a.nrows, 7):  # the rows before are longer
            met = [b.rows(int(k), int(k) + 1).indices for k in a.rows(row, row + 1).indices]
            columns = np.concatenate([np.zeros(0, np.int32), *met])
            _, first = np.unique(columns, return_index=True)
            assert_array_equal(c.rows(row, row + 1).indices, columns[np.sort(first)])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@FEW
def test_dtypes(engine: Any, dtype: Any, data: Any) -> None:
    a, b = data.draw(csr_pairs(dtypes=(dtype, dtype)))
    assert_same(in_order(cpu.multiply(a, b, engine=engine, spec=UNSORTED)), cpu.multiply(a, b, engine=engine))


@pytest.mark.parametrize("engine", ENGINES)
@given(pair=csr_pairs(values=FLOATS))
@MANY
def test_nan_inf_and_signed_zero(engine: Any, pair: tuple[CSR, CSR]) -> None:
    with np.errstate(all="ignore"):
        c, expected = cpu.multiply(*pair, engine=engine, spec=UNSORTED), cpu.multiply(*pair, engine=engine)
    assert_same(in_order(c), expected)


@given(pair=csr_pairs(ncols=st.sampled_from([10**9, 2**31 - 1, 2**31, 10**12, 2**60])))
@FEW
def test_wide_matrices(pair: tuple[CSR, CSR]) -> None:
    assert_same(in_order(cpu.multiply(*pair, engine="numba", spec=UNSORTED)), cpu.multiply(*pair, engine="numba"))


@pytest.mark.parametrize("engine", ENGINES)
def test_cancelled_and_stored_zeros_are_kept(engine: Any) -> None:
    a = CSR(np.array([0, 2, 3]), np.array([0, 1, 1], np.int32), np.array([1.0, -1.0, 0.0]), (2, 2))
    b = CSR(np.array([0, 1, 3]), np.array([2, 0, 2], np.int32), np.array([5.0, np.inf, 5.0]), (2, 3))
    c = in_order(cpu.multiply(a, b, engine=engine, spec=UNSORTED))
    assert_array_equal(c.indices, [0, 2, 0, 2])
    assert_array_equal(c.data, [-np.inf, 0.0, np.nan, 0.0])


@pytest.mark.parametrize("semiring", ["min_plus", "or_and", "plus_pair"])
def test_semirings(semiring: str) -> None:
    ring = SEMIRINGS[semiring]
    for shape in ("window", "hash"):
        a, b = SHAPES[shape]("f8")
        c = cpu.multiply(a, b, spec=ProductSpec(ring, sort=False))
        assert_same(in_order(c), cpu.multiply(a, b, spec=ProductSpec(ring)))
        assert not is_sorted(c)


def test_a_triangle() -> None:
    a = random_csr(500, 500, 8)
    c = cpu.multiply(a, a, spec=ProductSpec(triangle="upper", sort=False))
    assert_same(in_order(c), cpu.multiply(a, a, spec=ProductSpec(triangle="upper")))
    assert not is_sorted(c)


@pytest.mark.parametrize(
    "options",
    [
        {"top_n": 3},
        {"threshold": 0.5},
        {"epilogue": Epilogue(normalize="l2")},
        {"mask": True},
        {"mask": True, "complement": True},
    ],
    ids=lambda options: " ".join(options),
)
def test_options_that_go_by_the_order_of_columns_sort_all_the_same(options: dict[str, Any]) -> None:
    a = random_csr(500, 500, 8)
    if "mask" in options:
        options = {**options, "mask": random_csr(500, 500, 20, 3)}
    c = cpu.multiply(a, a, spec=ProductSpec(**options, sort=False))
    assert_same(c, cpu.multiply(a, a, spec=ProductSpec(**options)))
    assert is_sorted(c)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_order_does_not_depend_on_threads(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small slices and little scratch memory, so that slices wait, and are made in place."""
    monkeypatch.setattr(cpu_sizes, "SLICE_PRODUCTS", 300)
    monkeypatch.setattr(cpu_sizes, "SCRATCH_BYTES", 700 * 12)
    monkeypatch.setattr(cpu, "PARALLEL_PRODUCTS", 1)
    long = random_matrix(100, 1000, 400, 2)
    a = made_of(random_matrix(500, 1000, 6, 1), long, random_matrix(400, 1000, 3, 3))
    for b in (a, from_scipy(random_matrix(1000, 300_000, 6, 4))):
        one = cpu.multiply(a, b, engine=engine, threads=1, spec=UNSORTED)
        assert not is_sorted(one)
        for threads in (2, 5, 16):
            assert_same(cpu.multiply(a, b, engine=engine, threads=threads, spec=UNSORTED), one)


@pytest.mark.parametrize("engine", ENGINES)
@given(pair=csr_pairs(), capacity=st.integers(0, 60), threads=st.integers(1, 2))
@MANY
def test_rows_stop_at_the_capacity(engine: Any, pair: Any, capacity: int, threads: int) -> None:
    whole, start, parts = cpu.multiply(*pair, engine=engine, spec=UNSORTED), 0, []
    while start < whole.nrows:
        c = cpu.multiply_rows(*pair, start, capacity, engine=engine, threads=threads, spec=UNSORTED)
        assert c.nrows == 1 or c.nnz <= capacity
        assert_same(in_order(c), in_order(whole.rows(start, start + c.nrows)))
        start += c.nrows
        parts.append(c)
    assert sum(part.nnz for part in parts) == whole.nnz


def test_unsorted_kernels_are_chosen_and_compiled_apart() -> None:
    assert PLAIN.sorts
    assert not UNSORTED.sorts
    assert ProductSpec(sort=False, threshold=1.0).sorts
    assert UNSORTED.plain
    with pytest.raises(InputError, match="sort='no' is neither True nor False"):
        ProductSpec(sort="no")  # type: ignore[arg-type]
