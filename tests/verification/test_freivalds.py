"""Right products pass whatever the order of summation; one planted error of any kind does not."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spdist.errors import CorruptError, InputError
from spdist.matrices.csr import CSR, empty, from_scipy
from spdist.matrices.dtypes import index_dtype, result_dtype
from spdist.storage.matrix import open_matrix
from spdist.storage.writer import MatrixWriter
from spdist.verification import freivalds
from spdist.verification.freivalds import verify
from spdist.verification.operands import Limits
from spdist.verification.rounding_bounds import RowLengths, vector_error_factor
from tests.support.seals import without_seal

NAMES = itertools.count()
SHORT = Limits(entries=40, offsets=7, products=30, bool_products=30)
DTYPES = ["bool", "int8", "uint8", "int32", "int64", "uint64", "float32", "float64", "complex64", "complex128"]
FAST = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("verify")


@pytest.fixture
def short_blocks(monkeypatch):
    """Blocks so short that a few hundred entries take many of them and rows are longer than one."""
    monkeypatch.setattr(freivalds, "LIMITS", SHORT)


def store(folder, m, chunk=None):
    """Write a CSR unchanged, canonical or not."""
    writer = MatrixWriter(folder / f"m{next(NAMES)}.zarr", m.ncols, m.dtype, {})
    writer.layout = dataclasses.replace(writer.layout, chunk=chunk or 1 << 12)
    writer.append(m)
    return writer.close()


def values_of(rng, dtype, n):
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(n) < 0.6
    if dtype.kind in "iu":
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, n, dtype, endpoint=True)
    parts = rng.standard_normal((2, n))
    return (parts[0] + 1j * parts[1]).astype(dtype) if dtype.kind == "c" else parts[0].astype(dtype)


def random_csr(rng, shape, density, dtype, scale=0):
    """Some empty rows, one full row; values spread over `scale` decades to both sides of 1."""
    mask = rng.random(shape) < density
    if min(shape) > 2:
        mask[rng.integers(shape[0])] = True
        mask[rng.integers(shape[0], size=2)] = False
    indptr = np.concatenate([[0], np.cumsum(mask.sum(axis=1))])
    data = values_of(rng, dtype, indptr[-1])
    if scale:
        data = (data * 10.0 ** rng.uniform(-scale, scale, len(data))).astype(dtype)
    return CSR(indptr, np.nonzero(mask)[1].astype(index_dtype(shape[1])), data, shape)


def expand(a, b):
    """All products: row, column, and both operands."""
    lengths = np.diff(b.indptr)[a.indices]
    at = np.concatenate([np.arange(b.indptr[k], b.indptr[k + 1]) for k in a.indices] or [np.zeros(0, np.int64)])
    rows = np.repeat(np.repeat(np.arange(a.nrows), np.diff(a.indptr)), lengths)
    return rows, b.indices[at], np.repeat(a.data, lengths), b.data[at]


def shuffled_product(rng, a, b):
    """A @ B in the result's own arithmetic, products added up in random order; zeros stay."""
    dtype = result_dtype(a.dtype, b.dtype)
    rows, columns, left, right = expand(a, b)
    keys, which = np.unique(rows * b.ncols + columns, return_inverse=True)
    order = rng.permutation(len(rows))
    with np.errstate(all="ignore"):
        products = left.astype(dtype) * right.astype(dtype)
        data = np.zeros(len(keys), dtype)
        (np.logical_or if dtype.kind == "b" else np.add).at(data, which[order], products[order])
    indptr = np.searchsorted(keys, np.arange(a.nrows + 1) * b.ncols)
    return CSR(indptr, (keys % max(b.ncols, 1)).astype(index_dtype(b.ncols)), data, (a.nrows, b.ncols))


def split_product(rng, a, b):
    """A @ B with the inner dimension cut in two and the halves merged, by SciPy; kept to the structural pattern."""
    half = a.ncols // 2
    left, right = a.to_scipy().tocsc(), b.to_scipy()
    whole = left[:, :half].tocsr() @ right[:half] + left[:, half:].tocsr() @ right[half:]
    pattern = shuffled_product(rng, a, b)
    rows = np.repeat(np.arange(a.nrows), np.diff(pattern.indptr))
    data = np.asarray(whole[rows, pattern.indices]).ravel().astype(pattern.dtype)
    return CSR(pattern.indptr, pattern.indices, data, pattern.shape)


def replace(m, **arrays):
    old = {"indptr": m.indptr, "indices": m.indices, "data": m.data, "shape": m.shape}
    return CSR(**(old | arrays))


def assert_false(result, *words):
    assert not result.ok
    assert "\n" not in result.reason
    for word in words:
        assert word in result.reason
    json.dumps(result.to_json(), allow_nan=False)


# -- right products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", DTYPES)
def test_right_products_of_all_dtypes_pass(folder, left):
    rng = np.random.default_rng(1)
    a = random_csr(rng, (30, 20), 0.2, left)
    stored = store(folder, a)
    for right in DTYPES:
        b = random_csr(rng, (20, 25), 0.2, right)
        c = shuffled_product(rng, a, b)
        result = verify(stored, store(folder, b), store(folder, c))
        assert result.ok, (right, result.reason)
        assert (result.rows, result.nnz) == (30, c.nnz)
        json.dumps(result.to_json(), allow_nan=False)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("dtype", ["bool", "int16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("chunk", [None, 16])
def test_blocks_shorter_than_rows(folder, dtype, chunk):
    rng = np.random.default_rng(2)
    a, b = random_csr(rng, (20, 90), 0.05, dtype), random_csr(rng, (90, 300), 0.03, dtype)
    c = shuffled_product(rng, a, b)
    assert np.diff(a.indptr).max() > 80
    stored = [store(folder, m, chunk) for m in (a, b, c)]
    result = verify(*stored, threads=3)
    assert result.ok, result.reason
    at = int(np.argmax(np.diff(c.indptr)))  # the long row
    k = int(c.indptr[at]) + 150
    data = c.data.copy()
    data[k] = ~data[k] if dtype == "bool" else data[k] + 1
    wrong = store(folder, replace(c, data=data), chunk)
    assert_false(verify(*stored[:2], wrong), f"row {at:,}, column {c.indices[k]:,} ")


@pytest.mark.usefixtures("short_blocks")
def test_broken_structure_where_blocks_meet(folder):
    rng = np.random.default_rng(9)
    a, b = random_csr(rng, (20, 90), 0.05, "f8"), random_csr(rng, (90, 300), 0.03, "f8")
    c = shuffled_product(rng, a, b)
    stored = store(folder, a), store(folder, b)
    row = int(np.argmax(np.diff(c.indptr)))
    assert row > 0
    k = int(c.indptr[row]) + SHORT.entries
    cases = {"duplicate": (k, c.indices[k - 1]), "not sorted": (k, 0), "is outside": (k, 300)}
    for word, (at, column) in cases.items():
        indices = c.indices.copy()
        indices[at] = column
        assert_false(verify(*stored, store(folder, replace(c, indices=indices))), f"row {row} ", word)
    assert c.indptr[1] < c.indptr[-1] - 1
    indices[k], indices[-1] = c.indices[k], -1
    last = int(np.flatnonzero(np.diff(c.indptr))[-1])
    assert_false(verify(*stored, store(folder, replace(c, indices=indices))), f"row {last} is outside")


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("scale", [0, 30, 300])
@given(seed=st.integers(0, 2**32 - 1), sizes=st.tuples(*[st.integers(0, 25)] * 3), density=st.floats(0, 0.6))
@settings(FAST, max_examples=8)
def test_no_false_alarm(folder, dtype, scale, seed, sizes, density):
    """Values as wide as their dtype: overflow, underflow and cancellation are no errors."""
    scale = min(scale, 30) if dtype in ("float32", "complex64") else scale
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore", under="ignore"):
        a = random_csr(rng, sizes[:2], density, dtype, scale)
        b = random_csr(rng, sizes[1:], density, dtype, scale)
    result = verify(store(folder, a), store(folder, b), store(folder, shuffled_product(rng, a, b)), seed=seed)
    assert result.ok, result.reason


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_long_sums_pass_in_any_order(folder, dtype):
    rng = np.random.default_rng(3)
    a, b = random_csr(rng, (6, 20000), 0.5, dtype), random_csr(rng, (20000, 5), 0.6, dtype)
    a, b = replace(a, data=abs(a.data).astype(dtype)), replace(b, data=abs(b.data).astype(dtype))  # errors add up
    stored = store(folder, a), store(folder, b)
    for product in (shuffled_product, split_product):
        result = verify(*stored, store(folder, product(rng, a, b)))
        assert result.ok, result.reason


def test_subnormal_rows_of_b_times_large_values_of_a(folder):
    """B x loses bits below 2^-1022, and A lifts the loss to where C's values lie."""
    rng = np.random.default_rng(4)
    a, b = random_csr(rng, (30, 30), 0.4, "f8"), random_csr(rng, (30, 30), 0.4, "f8")
    a, b = replace(a, data=a.data * 1e300), replace(b, data=b.data * 3e-320)
    result = verify(store(folder, a), store(folder, b), store(folder, shuffled_product(rng, a, b)))
    assert result.ok, result.reason
    assert result.smallest_error > 1e-7  # and says that it sees less there


@settings(FAST, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(["float32", "float64", "complex128"]))
def test_nan_and_inf_follow_ieee(folder, seed, dtype):
    rng = np.random.default_rng(seed)
    a, b = random_csr(rng, (12, 10), 0.3, dtype), random_csr(rng, (10, 14), 0.3, dtype)
    for m in (a, b):
        strange = rng.random(m.nnz) < 0.1
        m.data[strange] = rng.choice([np.nan, np.inf, -np.inf, 0.0], strange.sum())
    c = shuffled_product(rng, a, b)
    stored = store(folder, a), store(folder, b)
    result = verify(*stored, store(folder, c))
    assert result.ok, result.reason
    if not c.nnz:
        return
    k = rng.integers(c.nnz)
    data = c.data.copy()
    data[k] = 1.0 if not np.isfinite(data[k]) else np.nan
    row, column = np.searchsorted(c.indptr, k, side="right") - 1, c.indices[k]
    assert_false(verify(*stored, store(folder, replace(c, data=data))), f"row {row}, column {column} ")


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0), (5, 4, 3)])
@pytest.mark.parametrize("dtype", ["bool", "int32", "float64"])
def test_empty_matrices(folder, shape, dtype):
    m, k, n = shape
    result = verify(*(store(folder, empty(s, dtype)) for s in ((m, k), (k, n), (m, n))))
    assert result.ok, result.reason


def test_cancelled_and_stored_zeros_are_entries(folder):
    a = CSR(np.array([0, 2, 3]), np.array([0, 1, 0], np.int32), np.array([1.0, -1.0, 0.0]), (2, 2))
    b = CSR(np.array([0, 1, 2]), np.array([0, 0], np.int32), np.array([2.0, 2.0]), (2, 1))
    c = CSR(np.array([0, 1, 2]), np.array([0, 0], np.int32), np.zeros(2), (2, 1))
    assert verify(store(folder, a), store(folder, b), store(folder, c)).ok
    assert_false(verify(store(folder, a), store(folder, b), store(folder, empty((2, 1), "f8"))), "row 0, column 0")


# -- planted errors ----------------------------------------------------------------------------------------------------


class Product:
    """A product of about 1e5 entries, and a function that damages it."""

    def __init__(self, folder, dtype="float64"):
        self.rng, self.folder = np.random.default_rng(5), folder
        n = 3000
        m = sp.random_array((n, n), density=6 / n, format="csr", rng=self.rng)
        self.a = from_scipy(m)
        self.a = replace(self.a, data=values_of(self.rng, dtype, self.a.nnz))
        self.c = shuffled_product(self.rng, self.a, self.a)
        self.left = store(folder, self.a)
        size = abs(self.a.to_scipy())
        self.sizes = np.asarray((size @ size).sum(axis=1)).ravel()

    def entry(self, row, k=0):
        """Return entry `k` of the first filled row from `row` on, and that row."""
        row += int(np.argmax(np.diff(self.c.indptr)[row:] > 2))
        return row, int(self.c.indptr[row]) + k

    def check(self, **arrays):
        return verify(self.left, self.left, store(self.folder, replace(self.c, **arrays)))

    def says(self, row, k):
        return f"row {row:,}, column {self.c.indices[k]:,} of C"


@pytest.fixture(scope="module")
def product(folder):
    out = Product(folder)
    assert out.c.nnz > 9e4
    assert out.check().ok
    return out


def test_one_value_wrong_by_a_millionth(product):
    rows = [0, *product.rng.integers(0, 2900, 12), product.c.nrows - 12]
    for row in rows:
        row, k = product.entry(int(row), 1)
        for sign in (1, -1):
            data = product.c.data.copy()
            data[k] += sign * 1e-6 * product.sizes[row]
            assert_false(product.check(data=data), product.says(row, k))


def test_first_and_last_value(product):
    for k in (0, product.c.nnz - 1):
        data = product.c.data.copy()
        data[k] *= 1 + 1e-6
        row = int(np.searchsorted(product.c.indptr, k, side="right")) - 1
        assert_false(product.check(data=data), f"row {row:,}, column {product.c.indices[k]:,} of C: C holds")


def test_smallest_error_is_caught(product):
    smallest = product.check().smallest_error
    assert 0 < smallest < 1e-12
    row, k = product.entry(1000)
    data = product.c.data.copy()
    data[k] += 1.001 * smallest * product.sizes[row]
    assert_false(product.check(data=data))
    result = product.check(data=np.where(np.arange(len(data)) == k, product.c.data * (1 + 2**-52), product.c.data))
    assert result.ok  # one unit in the last place is rounding


def test_entries_of_one_product_have_the_bound_of_one_product():
    """Nine products that are nine entries are not added up, however long the row of A is."""
    one, nine = np.array([1]), np.array([9])
    long, short = (vector_error_factor(np.dtype("f4"), RowLengths(a, nine, nine, nine)) for a in (nine, one))
    assert long == pytest.approx(short, rel=1e-6)


def test_missing_entry(product):
    row, k = product.entry(1700, 1)
    indptr = product.c.indptr - (np.arange(product.c.nrows + 1) > row)
    result = product.check(indptr=indptr, indices=np.delete(product.c.indices, k), data=np.delete(product.c.data, k))
    assert_false(result, product.says(row, k), "missing")


def test_extra_entry(product):
    row, k = product.entry(1800)
    column = np.setdiff1d(np.arange(product.c.indices[k + 1]), product.c.indices[k : k + 1])[-1]
    at = k + int(column > product.c.indices[k])
    indptr = product.c.indptr + (np.arange(product.c.nrows + 1) > row)
    arrays = {"indices": np.insert(product.c.indices, at, column), "data": np.insert(product.c.data, at, 0.5)}
    assert_false(product.check(indptr=indptr, **arrays), f"row {row:,}, column {column:,} of C", "no entry")


def test_duplicate_and_unsorted_rows(product):
    for what in ("duplicate", "not sorted"):
        row, k = product.entry(2000)
        indices = product.c.indices.copy()
        indices[k : k + 2] = indices[k] if what == "duplicate" else indices[k : k + 2][::-1].copy()
        assert_false(product.check(indices=indices), f"row {row:,} ", what)


def test_shuffled_row_with_its_values_is_not_canonical(product):
    row, k = product.entry(2000)
    indices, data = product.c.indices.copy(), product.c.data.copy()
    for array in (indices, data):
        array[k : k + 2] = array[k : k + 2][::-1].copy()
    assert_false(product.check(indices=indices, data=data), f"row {row:,} ", "not sorted")


@pytest.mark.parametrize("column", [-1, 3000])
def test_column_out_of_range(product, column):
    row, _ = product.entry(2500)
    indices = product.c.indices.copy()
    indices[product.c.indptr[row + 1] - 1] = column
    assert_false(product.check(indices=indices), f"column {column:,} in row {row:,} is outside")


def test_swapped_rows(product):
    order = np.arange(product.c.nrows)
    order[[400, 401]] = order[[401, 400]]
    m = product.c.to_scipy()[order]
    assert_false(product.check(indptr=m.indptr.astype(np.int64), indices=m.indices, data=m.data), "row 400, column")


def test_values_moved_within_a_row(product):
    row, k = product.entry(600)
    data = product.c.data.copy()
    data[k : k + 2] = data[k : k + 2][::-1].copy()
    assert_false(product.check(data=data), product.says(row, k))


def test_row_too_long_to_name_the_entry(product, monkeypatch):
    monkeypatch.setattr(freivalds, "LIMITS", Limits(named_products=0))
    row, k = product.entry(700)
    data = product.c.data.copy()
    data[k] += 1
    assert_false(product.check(data=data), f"row {row:,} of C: C x differs")
    lengths = np.diff(product.a.indptr)
    row = int(np.argmax((lengths == 1) & (np.diff(product.c.indptr) > 1)))
    k = int(product.c.indptr[row])
    indptr = product.c.indptr - (np.arange(product.c.nrows + 1) > row)
    arrays = {"indices": np.delete(product.c.indices, k), "data": np.delete(product.c.data, k)}
    most = lengths[product.a.indices[product.a.indptr[row]]]
    assert_false(product.check(indptr=indptr, **arrays), f"row {row:,} of C: {most - 1} entries", f"up to {most} ")


@pytest.mark.parametrize("shape", [(3000, 3001), (3001, 3000)])
def test_wrong_shape(product, shape):
    indptr = np.append(product.c.indptr, product.c.nnz) if shape[0] > 3000 else product.c.indptr
    assert_false(product.check(shape=shape, indptr=indptr), "3,001", "3,000 x 3,000")


def test_wrong_dtype(product):
    assert_false(product.check(data=product.c.data.astype(np.float32)), "float32", "float64")


def test_inputs_that_do_not_fit(folder, product):
    other = store(folder, empty((7, 7), "f8"))
    with pytest.raises(InputError, match="as many columns"):
        verify(product.left, other, other)
    with pytest.raises(InputError, match="vectors=0"):
        verify(other, other, other, vectors=0)
    unsorted = replace(product.a, indices=product.a.indices[::-1].copy())
    with pytest.raises(InputError, match=r"A .*not sorted|A .*duplicate"):
        verify(store(folder, unsorted), product.left, product.left)
    with pytest.raises(InputError, match=r"B .*not sorted|B .*duplicate"):
        verify(product.left, store(folder, unsorted), product.left)


def test_indptr_of_c(folder, product):
    cases = {"falls from": (1500, 0), "starts at": (0, 1), "reaches": (3000, product.c.nnz - 1)}
    for word, (at, value) in cases.items():
        stored = store(folder, product.c)
        without_seal(stored.url)["indptr"][at] = value
        assert_false(verify(product.left, product.left, open_matrix(stored.url)), word)


def test_index_that_would_wrap_into_range_is_not_cast(folder):
    eye = store(folder, from_scipy(sp.eye_array(3, format="csr")))
    stored = store(folder, from_scipy(sp.eye_array(3, format="csr")))
    group = without_seal(stored.url)
    group.create_array("indices", data=np.array([0, 1 + 2**32, 2]), overwrite=True)
    assert_false(verify(eye, eye, open_matrix(stored.url)), "column 4,294,967,297 in row 1")


@pytest.mark.parametrize("name", ["indptr", "indices", "data"])
def test_corrupt_chunks_raise(folder, product, name):
    stored = store(folder, product.c)
    path = next(p for p in sorted((Path(stored.url) / name).rglob("*")) if p.is_file() and p.name != "zarr.json")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptError, match=name):
        verify(product.left, product.left, stored)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32", "int64", "uint64"])
def test_integer_wrong_in_its_top_or_lowest_bit(folder, dtype):
    product = Product(folder, dtype)
    result = product.check()
    assert (result.ok, result.method, result.smallest_error) == (True, "modular", 0.0)
    bits = np.dtype(dtype).itemsize * 8
    for bit in (0, bits - 1):
        row, k = product.entry(int(product.rng.integers(2900)), 1)
        raw = product.c.data.copy().view(f"u{bits // 8}")
        raw[k] ^= np.array(1, raw.dtype) << np.array(bit, raw.dtype)
        assert_false(product.check(data=raw.view(dtype)), product.says(row, k))


def test_two_top_bits_of_one_row_are_seen_by_some_vector(folder):
    product = Product(folder, "int32")
    row, k = product.entry(100)
    data = product.c.data.copy()
    data[k : k + 2] ^= np.int32(-(2**31))
    wrong = store(folder, replace(product.c, data=data))
    assert_false(verify(product.left, product.left, wrong, vectors=20), f"row {row:,}")


def test_bool_flipped_missing_or_added(folder):
    product = Product(folder, "bool")
    result = product.check()
    assert (result.ok, result.method, result.vectors) == (True, "recompute", 0)
    assert 0.01 < product.c.data.mean() < 0.99
    for row in (0, 1234, 2990):
        row, k = product.entry(row, 1)
        data = product.c.data.copy()
        data[k] = ~data[k]
        assert_false(product.check(data=data), product.says(row, k))
        indptr = product.c.indptr - (np.arange(product.c.nrows + 1) > row)
        arrays = {"indices": np.delete(product.c.indices, k), "data": np.delete(product.c.data, k)}
        assert_false(product.check(indptr=indptr, **arrays), product.says(row, k), "missing")


def test_bool_with_more_columns_than_products(folder, monkeypatch):
    monkeypatch.setattr(freivalds, "LIMITS", Limits(bool_products=3))
    rng = np.random.default_rng(7)
    a, b = random_csr(rng, (9, 8), 0.3, "bool"), random_csr(rng, (8, 50), 0.2, "bool")
    c = shuffled_product(rng, a, b)
    assert verify(*(store(folder, m) for m in (a, b, c))).ok
    assert not verify(store(folder, a), store(folder, b), store(folder, replace(c, data=~c.data))).ok


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_planted_nan_and_inf(product, bad):
    row, k = product.entry(2222)
    data = product.c.data.copy()
    data[k] = bad
    assert_false(product.check(data=data), product.says(row, k), str(bad))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_inf_of_the_other_sign_and_overflow(folder, dtype):
    """Rows of A times (big, big): an Inf stays, 2 and 3 overflow, 4 and -4 too but to either side or to NaN."""
    inf, nan, big = np.inf, np.nan, np.finfo(dtype).max / 2
    values = np.array([inf, 1, 2, 3, 4, -4, inf, -4], dtype)
    a = CSR(np.arange(0, 9, 2), np.array([0, 1] * 4, np.int32), values, (4, 2))
    b = CSR(np.array([0, 1, 2]), np.zeros(2, np.int32), np.array([big, big], dtype), (2, 1))
    good = [[inf], [inf], [0, inf, -inf, nan], [inf, nan]]
    bad = [[-inf, nan, 1], [-inf, nan, big], [big], [-inf, 1]]
    right = [list(column) for column in itertools.product(*good)]
    wrong = [[*right[0][:row], value, *right[0][row + 1 :]] for row in range(4) for value in bad[row]]
    stored = store(folder, a), store(folder, b)
    for column, ok in [*((r, True) for r in right), *((w, False) for w in wrong)]:
        c = CSR(np.arange(5), np.zeros(4, np.int32), np.array(column, dtype), (4, 1))
        assert verify(*stored, store(folder, c)).ok is ok, column


def test_stored_zero_times_inf_is_nan(folder):
    a = from_scipy(sp.csr_array((np.array([0.0]), np.array([0]), np.array([0, 1])), shape=(1, 1)))
    b = from_scipy(sp.csr_array((np.array([np.inf]), np.array([0]), np.array([0, 1])), shape=(1, 1)))
    stored = store(folder, a), store(folder, b)
    assert verify(*stored, store(folder, replace(a, data=np.array([np.nan])))).ok
    assert_false(verify(*stored, store(folder, a)), "C holds 0.0, A @ B gives nan")


# -- the run -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_blocks")
def test_progress_and_threads(folder):
    rng = np.random.default_rng(8)
    a = random_csr(rng, (60, 60), 0.1, "f8")
    stored, c = store(folder, a), store(folder, shuffled_product(rng, a, a))
    seen = []
    results = [verify(stored, stored, c, threads=n, progress=lambda *step: seen.append(step)) for n in (1, 4)]
    assert all(r.ok for r in results)
    assert results[0].smallest_error == results[1].smallest_error
    total = 2 * a.nnz + c.nnz
    assert seen[-1] == (total, total)
    assert {t for _, t in seen} == {total}
    half = [done for done, _ in seen[: len(seen) // 2]]
    assert half == sorted(half)


def test_other_seeds_and_counts_of_vectors(product):
    c = store(product.folder, product.c)
    for seed, vectors in ((1, 1), (2, 3)):
        result = verify(product.left, product.left, c, seed=seed, vectors=vectors)
        assert result.ok
        assert result.vectors == vectors


def test_one_vector_finds_the_top_bit_of_an_integer(folder):
    """A vector of whole numbers that was even somewhere would lose an error of 2^63 there."""
    n = 20
    m = sp.csr_array(np.arange(1, n * n + 1, dtype=np.int64).reshape(n, n))
    a, c = store(folder, from_scipy(m)), from_scipy(m @ m)
    assert verify(a, a, store(folder, c), vectors=1).ok
    for at in range(n):
        data = c.data.copy()
        data[at] ^= np.int64(-1 << 63)
        wrong = store(folder, CSR(c.indptr, c.indices, data, c.shape))
        assert not verify(a, a, wrong, vectors=1, seed=at).ok
