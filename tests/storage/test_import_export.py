"""Files of other programs: SciPy, AnnData and the text of the format itself are the oracles."""

import bz2
import errno
import gzip
import io
import json
import os
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import anndata
import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from spdist.errors import InputError, MatrixError, SpdistError
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR, from_scipy
from spdist.storage import external_sort
from spdist.storage.external_sort import Entries, RowSorter
from spdist.storage.formats import matrix_market
from spdist.storage.import_export import export_matrix, import_matrix
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.writer import MatrixWriter
from spdist.stores.registry import at
from tests.support.pieces import take_pieces

pytestmark = pytest.mark.filterwarnings("ignore:zarr v3 autosharding")

DTYPES = ["?", "i1", "u1", "i4", "i8", "u8", "f4", "f8", "c8", "c16"]
FORMATS = ["csr", "csc", "coo", "bsr", "dia"]


def sample(nrows=30, ncols=20, dtype="f8", seed=0, density=0.2) -> sp.coo_matrix:
    """Unsorted, with explicit zeros and empty rows."""
    rng = np.random.default_rng(seed)
    n = int(nrows * ncols * density)
    places = rng.permutation(nrows * ncols)[:n]
    values = (
        rng.integers(0, 5, n).astype(dtype) if np.dtype(dtype).kind != "f" else rng.standard_normal(n).astype(dtype)
    )
    if np.dtype(dtype).kind == "c":
        values = (values + 1j * rng.integers(0, 5, n)).astype(dtype)
    return sp.coo_matrix((values, (places // ncols, places % ncols)), shape=(nrows, ncols))


def sample_text() -> bytes:
    buffer = io.BytesIO()
    scipy.io.mmwrite(buffer, sample())
    return buffer.getvalue()


def whole(matrix: StoredMatrix) -> CSR:
    block = matrix.rows(0, matrix.nrows)
    check_canonical(block)
    return block


def assert_equals(got: CSR, want) -> None:
    """Equal pattern, stored zeros included, and equal bits."""
    expected = from_scipy(want)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got.indptr, expected.indptr)
    np.testing.assert_array_equal(got.indices, expected.indices)
    np.testing.assert_array_equal(got.data, expected.data)


def text_file(tmp_path: Path, text: str, name: str = "a.mtx") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def import_text(tmp_path: Path, text: str) -> CSR:
    target = tmp_path / "out.zarr"
    return whole(import_matrix(text_file(tmp_path, text), target, overwrite=True))


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "spdist" in path.name)


# -- the external sort -------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    nrows=st.sampled_from([1, 3, 40, 1 << 20, (1 << 32) + 5]),
    ncols=st.sampled_from([1, 7, 1 << 31, 1 << 45]),
    bucket=st.sampled_from([64, 500, 1 << 20]),
    duplicates=st.sampled_from(["sum", "max", "min", "first"]),
    dtype=st.sampled_from(["f8", "f4", "?", "u1", "c16"]),
    seed=st.integers(0, 5),
)
def test_sorter_equals_a_dictionary(tmp_path_factory, nrows, ncols, bucket, duplicates, dtype, seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, 300))
    rows, columns = rng.integers(0, min(nrows, 50), n), rng.integers(0, ncols, n) % 11 * (ncols // 11)
    rows[: n // 8] = min(nrows - 1, 60_000)
    values = (rng.standard_normal(n) * 3).astype(dtype) if dtype != "u1" else rng.integers(0, 256, n).astype(dtype)
    want: dict[tuple[int, int], object] = {}
    for row, column, value in zip(rows.tolist(), columns.tolist(), values, strict=True):
        if (row, column) not in want:
            want[row, column] = value
        elif duplicates != "first":
            combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}[duplicates]
            want[row, column] = combine(want[row, column], value)
    directory = tmp_path_factory.mktemp("sort")
    sorter = RowSorter(
        directory, (nrows, ncols), np.dtype(dtype), expected=n, bucket_bytes=bucket, duplicates=duplicates
    )
    with np.errstate(over="ignore"):
        for start in range(0, n, 37):
            sorter.add(Entries(rows[start : start + 37], columns[start : start + 37], values[start : start + 37]))
        got, done = {}, 0
        for block in sorter.blocks():
            check_canonical(block)
            places = np.repeat(np.arange(done, done + block.nrows), np.diff(block.indptr))
            got |= dict(zip(zip(places.tolist(), block.indices.tolist(), strict=True), block.data, strict=True))
            done += block.nrows
            if done > 1 << 21:
                break
    assert got == want
    assert done == nrows or nrows > 1 << 21


def test_sorter_leaves_nothing(tmp_path):
    sorter = RowSorter(tmp_path, (1000, 10), np.dtype("f8"), expected=4000, bucket_bytes=100)
    sorter.add(Entries(np.full(4000, 7), np.arange(4000) % 10, np.ones(4000)))
    assert sum(block.nnz for block in sorter.blocks()) == 10
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rows", ["one", "hub", "powers"])
def test_sorter_with_unequal_rows(tmp_path, rows):
    """A hub, or rows that halve: buckets are cut by entries, and duplicates folded as they come."""
    rng, n = np.random.default_rng(0), 20_000
    row = {"one": np.zeros(n, np.int64), "hub": rng.integers(0, 1000, n), "powers": rng.zipf(1.3, n) % 1000}[rows]
    row[::3] = 5 if rows == "hub" else row[::3]
    columns, values = rng.integers(0, 50, n), rng.standard_normal(n)
    nrows = 1 if rows == "one" else 1000
    got = []
    for bucket in (1 << 10, 1 << 30):
        (tmp_path / str(bucket)).mkdir()
        sorter = RowSorter(tmp_path / str(bucket), (nrows, 50), np.dtype("f8"), expected=n, bucket_bytes=bucket)
        for start in range(0, n, 300):
            part = slice(start, start + 300)
            sorter.add(Entries(row[part], columns[part], values[part]))
        blocks = [block.to_scipy() for block in sorter.blocks()]
        got.append(sp.vstack(blocks, "csr"))
    np.testing.assert_array_equal(got[0].toarray(), got[1].toarray())
    np.testing.assert_allclose(got[0].toarray(), sp.coo_array((values, (row, columns)), shape=(nrows, 50)).toarray())


@pytest.mark.parametrize("duplicates", ["sum", "max", "min", "first"])
def test_duplicates_are_combined_while_they_are_loaded(tmp_path, duplicates):
    """A row of 400,000 entries in ten positions, 6.4 MB, within some buckets of 64 KiB."""
    rng, n, bucket = np.random.default_rng(0), 400_000, 1 << 16
    columns, values = rng.integers(0, 10, n), rng.integers(-9, 9, n).astype(float)
    sorter = RowSorter(tmp_path, (1, 10), np.dtype("f8"), expected=n, bucket_bytes=bucket, duplicates=duplicates)
    for start in range(0, n, 1000):
        part = slice(start, start + 1000)
        sorter.add(Entries(np.zeros(1000, np.int64), columns[part], values[part]))
    tracemalloc.start()
    (block,) = sorter.blocks()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * bucket  # with what is imported on the way
    choose = {"sum": np.sum, "max": np.max, "min": np.min, "first": lambda of: of[0]}[duplicates]
    assert block.data.tolist() == [choose(values[columns == j]) for j in range(10)]


# -- Matrix Market: what SciPy reads -----------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(["i8", "u8", "f8", "c16"]),
    shape=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    symmetry=st.sampled_from(["general", "symmetric", "skew-symmetric", "hermitian"]),
    bucket=st.sampled_from([200, 1 << 20]),
    seed=st.integers(0, 9),
)
def test_text_equals_scipy(tmp_path_factory, dtype, shape, symmetry, bucket, seed):
    folder = tmp_path_factory.mktemp("mtx")
    a = sample(*shape, dtype, seed)
    if symmetry != "general":
        a = sp.tril(sample(shape[0], shape[0], dtype, seed), -1 if symmetry == "skew-symmetric" else 0)
    if a.nnz == 0 or (dtype == "u8" and symmetry == "skew-symmetric"):
        return
    buffer = io.BytesIO()
    scipy.io.mmwrite(buffer, a, symmetry="general")
    text = buffer.getvalue().decode().replace("general", symmetry, 1)
    path = text_file(folder, text)
    got = import_matrix(path, folder / "a.zarr", bucket_bytes=bucket)
    assert_equals(whole(got), scipy.io.mmread(path))
    assert left_over(folder) == []


@settings(max_examples=20, deadline=None)
@given(
    dtype=st.sampled_from(["i8", "f8", "c16"]),
    n=st.integers(1, 12),
    m=st.integers(1, 12),
    symmetry=st.sampled_from(["general", "symmetric", "skew-symmetric", "hermitian"]),
)
def test_dense_text_equals_scipy(tmp_path_factory, dtype, n, m, symmetry):
    folder = tmp_path_factory.mktemp("mtx")
    dense = sample(n, m if symmetry == "general" else n, dtype, n, 0.7).toarray()
    if symmetry == "skew-symmetric":
        dense = np.tril(dense, -1) - np.tril(dense, -1).T
    elif symmetry != "general":
        lower = np.tril(dense, -1)
        dense = lower + (lower.conj().T if symmetry == "hermitian" else lower.T) + np.diag(np.diag(dense).real)
    scipy.io.mmwrite(folder / "a.mtx", dense.astype(dtype), symmetry=symmetry)
    got = whole(import_matrix(folder / "a.mtx", folder / "a.zarr"))
    want = sp.csr_matrix(scipy.io.mmread(folder / "a.mtx"))
    want.eliminate_zeros()
    np.testing.assert_array_equal(got.to_scipy().toarray(), want.toarray())
    assert got.nnz == want.nnz
    assert got.dtype == want.dtype


def test_pattern_is_ones_of_float64(tmp_path):
    got = import_text(tmp_path, "%%MatrixMarket matrix coordinate pattern symmetric\n3 3 2\n1 1\n3 1\n")
    np.testing.assert_array_equal(got.to_scipy().toarray(), [[1, 0, 1], [0, 0, 0], [1, 0, 0]])
    assert got.dtype == np.float64


NUMBERS = [
    "1", "-1", "+1", "1.", ".5", "-.5", "1e5", "1E+5", "1.5e-5", "0", "-0.0", "nan", "NaN", "-nan", "inf", "-Inf",
    "INFINITY", "1e400", "-1e400", "1e-400", "5e-324", "2.4703282292062328e-324", "1.7976931348623157e308",
    "0.1000000000000000055511151231257827021181583404541015625", "9007199254740993", "123456789012345678901234567890",
    "2.2250738585072011e-308", "8.5e-323", "00012.50",
]  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS)
def test_floats_are_what_python_reads(tmp_path, number):
    got = import_text(tmp_path, f"%%MatrixMarket matrix coordinate real general\n1 1 1\n1 1 {number}\n")
    np.testing.assert_array_equal(got.data, [float(number)])
    assert np.signbit(got.data[0]) == np.signbit(float(number))


@settings(max_examples=20, deadline=None)
@given(
    values=st.lists(st.floats(), min_size=1, max_size=50),
    style=st.sampled_from(["{!r}", "{:.17g}", "{:.25e}", "{:.3f}"]),
)
def test_any_float(values, style):
    words = [style.format(value) for value in values]
    text = "".join(f"1 1 {word}\n" for word in words).encode()
    header = matrix_market.Header("a.mtx", False, "real", "general", (1, 1), len(words), 2)
    got = np.concatenate([piece.values for piece in matrix_market.read_entries(io.BytesIO(text), header, 64)])
    np.testing.assert_array_equal(got, [float(word) for word in words])


def test_comments_blank_lines_spaces_and_no_last_newline(tmp_path):
    text = (
        "%%matrixmarket MATRIX Coordinate Real General\r\n% about\n\n  % more\n 2\t2  3 \n\n1 1  1.5\r\n"
        "% between\n\n  1 2 2e0\n   \n2 2 -3"
    )
    np.testing.assert_array_equal(import_text(tmp_path, text).to_scipy().toarray(), [[1.5, 2], [0, -3]])


def test_duplicates_are_summed_in_file_order(tmp_path):
    values = [1e16, 1.0, -1e16, 1.0, 3.0]
    lines = "".join(f"1 1 {value}\n" for value in values)
    got = import_text(tmp_path, f"%%MatrixMarket matrix coordinate real general\n1 1 5\n{lines}")
    assert got.data.tolist() == [sum(values)]


def test_zeros_and_empty_shapes(tmp_path):
    top = "%%MatrixMarket matrix coordinate real general\n"
    assert import_text(tmp_path, top + "2 2 1\n1 2 0\n").nnz == 1
    for shape in ((0, 5), (5, 0), (0, 0), (5, 5)):
        got = import_text(tmp_path, top + f"{shape[0]} {shape[1]} 0\n")
        assert (got.shape, got.nnz) == (shape, 0)


def test_columns_beyond_32_bits(tmp_path):
    text = f"%%MatrixMarket matrix coordinate integer general\n3 {1 << 40} 2\n3 {1 << 40} -7\n1 {1 << 31} 4\n"
    got = import_text(tmp_path, text)
    assert got.indices.dtype == np.int64
    assert got.indices.tolist() == [(1 << 31) - 1, (1 << 40) - 1]
    export_matrix(tmp_path / "out.zarr", tmp_path / "b.mtx")
    assert (tmp_path / "b.mtx").read_text().splitlines()[1:] == [f"3 {1 << 40} 2", f"1 {1 << 31} 4", f"3 {1 << 40} -7"]


@pytest.mark.parametrize(("name", "opener"), [("a.mtx.gz", gzip.open), ("a.mtx.bz2", bz2.open)])
def test_compressed_text(tmp_path, name, opener):
    with opener(tmp_path / name, "wb") as file:
        file.write(sample_text())
    assert_equals(whole(import_matrix(tmp_path / name, tmp_path / "a.zarr")), sample())


def test_pieces_of_any_length_give_the_same(tmp_path):
    buffer = io.BytesIO()
    scipy.io.mmwrite(buffer, sample())
    for length in (1, 2, 7, 50, 1000):
        buffer.seek(0)
        header = matrix_market.read_header(buffer, "a.mtx")
        parts = [np.stack(piece) for piece in matrix_market.read_entries(buffer, header, length)]
        np.testing.assert_array_equal(np.concatenate(parts, 1), np.stack([sample().row, sample().col, sample().data]))


TOP = "%%MatrixMarket matrix coordinate real general\n"


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("", 1, "not a Matrix Market file"),
        ("hello\n", 1, "not a Matrix Market file"),
        ("%%MatrixMarket vector coordinate real general\n", 1, "not a Matrix Market file"),
        ("%%MatrixMarket matrix coordinate quaternion general\n", 1, "'quaternion' is none of"),
        ("%%MatrixMarket matrix coordinate real odd\n", 1, "'odd' is none of"),
        ("%%MatrixMarket matrix array pattern general\n1 1\n", 1, "pattern"),
        (TOP, 2, "ends before"),
        (TOP + "% only this\n", 3, "ends before"),
        (TOP + "2 2\n", 2, "expected the numbers of rows, columns, entries"),
        (TOP + "2 2 x\n", 2, "expected the numbers"),
        (TOP + "2 -2 1\n", 2, "expected the numbers"),
        (TOP + f"2 {1 << 70} 1\n", 2, "64-bit"),
        (TOP + f"2 {'9' * 5000} 1\n", 2, "expected the numbers"),
        (TOP + f"2 2 1\n1 {'9' * 5000} 1\n", 3, "is not a column number"),
        (TOP + f"2 2 1\n1 {'9' * 50} 1\n", 3, "outside 1 to 2"),
        (TOP.replace("general", "symmetric") + "2 3 1\n1 1 1\n", 2, "square"),
        (TOP + "2 2 2\n1 1 1\n", 3, "after 1 of 2 entries"),
        (TOP + "2 2 2\n", 2, "after 0 of 2 entries"),
        (TOP + "2 2 1\n1 1 1\n\n% c\n2 2 1\n", 6, "more than the 1 entry that"),
        (TOP + "2 2 0\n1 1 1\n", 3, "more than the 0 entries"),
        (TOP + "2 2 1\n0 1 1\n", 3, "row 0 is outside 1 to 2"),
        (TOP + "2 2 2\n1 1 1\n1 3 1\n", 4, "column 3 is outside 1 to 2"),
        (TOP + "2 2 1\n-1 1 1\n", 3, "row -1 is outside"),
        (TOP + "2 2 1\n1.0 1 1\n", 3, "'1.0' is not a row number"),
        (TOP + "2 2 1\n1 1 abc\n", 3, "'abc' is not a number"),
        (TOP + "2 2 1\n1 1 1,5\n", 3, "'1,5' is not a number"),
        (TOP + "2 2 1\n1 1 2.5.3\n", 3, "'2.5.3' is not a number"),
        (TOP + "2 2 1\n1 1 0x10\n", 3, "'0x10' is not a number"),
        (TOP + "2 2 1\n1 1 1_0\n", 3, "'1_0' is not a number"),
        (TOP + "2 2 1\n1 1 1e\n", 3, "'1e' is not a number"),
        (TOP + "2 2 1\n1 1\n", 3, "expected 3 numbers"),
        (TOP + "2 2 1\n1 1 1 1\n", 3, "expected 3 numbers"),
        (TOP + "2 2 2\n1 1 1\n1 2 1 2 2\n", 4, "expected 3 numbers"),
        (TOP.replace("real", "complex") + "2 2 1\n1 1 1\n", 3, "expected 4 numbers"),
        (TOP.replace("real", "pattern") + "2 2 1\n1 1.5\n", 3, "'1.5' is not a column"),
        (TOP.replace("real", "integer") + "2 2 1\n1 1 1.5\n", 3, "'1.5' is not a number of type integer"),
        (TOP.replace("real", "integer") + f"2 2 1\n1 1 {1 << 63}\n", 3, "does not fit int64"),
        (TOP.replace("real", "unsigned-integer") + "2 2 1\n1 1 -1\n", 3, "does not fit uint64"),
        (TOP.replace("coordinate", "array") + "2 2\n1\n2\n3\n", 5, "after 3 of 4"),
        (TOP.replace("coordinate", "array") + "2 1\n1\n2\n3\n", 5, "more than the 2"),
        (TOP.replace("coordinate", "array") + "2 1\n1 2\n", 3, "expected 1 number,"),
    ],
)
def test_bad_text_names_the_line(tmp_path, text, line, what):
    path = text_file(tmp_path, text)
    with pytest.raises(MatrixError, match=what) as caught:
        import_matrix(path, tmp_path / "a.zarr")
    assert f"a.mtx, line {line}:" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.mtx"]


def test_bad_line_far_into_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix_market.read_entries, "__defaults__", (1000,))
    lines = ["1 1 1\n"] * 2000
    lines[1500] = "1 1 one\n"
    with pytest.raises(MatrixError, match="line 1,503: 'one' is not a number"):
        import_matrix(text_file(tmp_path, TOP + "1 1 2000\n" + "".join(lines)), tmp_path / "a.zarr")


def test_one_endless_line(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix_market, "MAX_LINE", 1000)
    monkeypatch.setattr(matrix_market.read_entries, "__defaults__", (500,))
    with pytest.raises(MatrixError, match="longer than 1,000 bytes"):
        import_matrix(text_file(tmp_path, TOP + "1 1 1\n" + "1" * 5000), tmp_path / "a.zarr")


# -- binary files ------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(FORMATS),
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(30, 20), (20, 30), (1, 1), (12, 12)]),
    compressed=st.booleans(),
    array=st.booleans(),
    bucket=st.sampled_from([100, 1 << 20]),
)
@pytest.mark.filterwarnings("ignore::scipy.sparse.SparseEfficiencyWarning")
def test_npz_equals_scipy(tmp_path_factory, kind, dtype, shape, compressed, array, bucket):
    folder = tmp_path_factory.mktemp("npz")
    a = sample(*shape, dtype).asformat(kind)
    a = getattr(sp, f"{kind}_array")(a) if array else a
    sp.save_npz(folder / "a.npz", a, compressed=compressed)
    got = import_matrix(folder / "a.npz", folder / "a.zarr", bucket_bytes=bucket)
    assert_equals(whole(got), a.tocsr())


def test_npz_blocks_duplicates_and_fortran_order(tmp_path, monkeypatch):
    take_pieces(monkeypatch, 16)
    bsr = sp.random(12, 18, 0.3, random_state=np.random.default_rng(0)).tobsr((2, 3))
    dia = sp.dia_matrix((np.asfortranarray(np.arange(24.0).reshape(3, 8)), [-2, 0, 5]), shape=(7, 9))
    data, indices = np.arange(1.0, 41), np.arange(40)[::-1] % 6
    messy = sp.csr_matrix((data, indices, np.array([0, 0, 17, 17, 40])), shape=(4, 6))
    for number, a in enumerate((bsr, dia, messy, messy.T, messy.tocoo())):
        sp.save_npz(tmp_path / "a.npz", a)
        got = whole(import_matrix(tmp_path / "a.npz", tmp_path / f"{number}.zarr", bucket_bytes=200))
        np.testing.assert_array_equal(got.to_scipy().toarray(), a.toarray())


def test_npz_other_byte_order_and_int64(tmp_path):
    a = sample().tocsr()
    arrays = {"data": a.data.astype(">f8"), "indices": a.indices.astype(">i8"), "indptr": a.indptr.astype("u8")}
    np.savez(tmp_path / "a.npz", format="csr", shape=a.shape, **arrays)
    assert_equals(whole(import_matrix(tmp_path / "a.npz", tmp_path / "a.zarr")), a)


def corrupt_npz(path: Path, **changes) -> None:
    a = sample().tocsr()
    a.sort_indices()
    arrays = {"format": b"csr", "shape": a.shape, "data": a.data, "indices": a.indices, "indptr": a.indptr} | changes
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"format": None}, "no array 'format'"),
        ({"format": b"lil"}, "'lil' is not read"),
        ({"indices": None}, "no array 'indices'"),
        ({"shape": (30, 20, 2)}, "two dimensions"),
        ({"shape": (31, 20)}, "does not fit"),
        ({"shape": (30, 5)}, "outside"),
        ({"data": np.ones(3)}, "does not fit"),
        ({"data": np.array([None] * 120)}, "Python objects"),
        ({"data": np.ones(120, "f2")}, "float16"),
        ({"indptr": np.arange(31)[::-1]}, "indptr starts at 30"),
        ({"indptr": np.r_[0, 50, 40, np.full(28, 120)]}, "does not rise"),
        ({"indptr": np.r_[np.zeros(30, int), 119]}, "ends at 119"),
    ],
)
def test_bad_npz(tmp_path, changes, what):
    corrupt_npz(tmp_path / "a.npz", **changes)
    with pytest.raises(MatrixError, match=what):
        import_matrix(tmp_path / "a.npz", tmp_path / "a.zarr")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.npz"]


@pytest.mark.parametrize("name", ["a.npz", "a.mtx.gz", "a.mtx.bz2", "a.h5ad"])
@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.95])
def test_truncated_files(tmp_path, name, keep):
    path = tmp_path / name
    if name.endswith("npz"):
        sp.save_npz(path, sample())
    elif name.endswith("h5ad"):
        anndata.AnnData(sample().tocsr()).write_h5ad(path)
    else:
        with (gzip if name.endswith("gz") else bz2).open(path, "wb") as file:
            file.write(sample_text())
    raw = path.read_bytes()
    path.write_bytes(raw[: int(keep * len(raw)) if keep < 1 else keep])
    with pytest.raises(MatrixError, match=name):
        import_matrix(path, tmp_path / "a.zarr")
    assert sorted(each.name for each in tmp_path.iterdir()) == [name]


def test_flipped_bit_in_npz(tmp_path):
    sp.save_npz(tmp_path / "a.npz", sample().tocsr(), compressed=False)
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        at = archive.getinfo("data.npy").header_offset + 400
    raw = bytearray((tmp_path / "a.npz").read_bytes())
    raw[at] ^= 1
    (tmp_path / "a.npz").write_bytes(bytes(raw))
    with pytest.raises(MatrixError, match="damaged"):
        import_matrix(tmp_path / "a.npz", tmp_path / "a.zarr")


@pytest.mark.parametrize("kind", ["csr", "csc"])
def test_h5ad(tmp_path, kind, monkeypatch):
    take_pieces(monkeypatch, 50)
    a = sample(dtype="f4").asformat(kind)
    b = sample(dtype="i8", seed=1).asformat(kind)
    file = tmp_path / "cells.h5ad"
    anndata.AnnData(a, layers={"counts": b, "dense": b.toarray()}).write_h5ad(file)
    assert_equals(whole(import_matrix(file, tmp_path / "x.zarr")), a)
    assert_equals(whole(import_matrix(f"{file}::layers/counts", tmp_path / "c.zarr", bucket_bytes=100)), b)
    for inner in ("layers/dense", "layers/none", "obs"):
        with pytest.raises(MatrixError, match="sparse in this file: X, layers/counts"):
            import_matrix(f"{file}::{inner}", tmp_path / "d.zarr")


def test_h5ad_without_anndata(tmp_path, monkeypatch):
    anndata.AnnData(sample().tocsr()).write_h5ad(tmp_path / "a.h5ad")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(InputError, match=r"pip install '\.\[h5ad\]' in its checkout"):
        import_matrix(tmp_path / "a.h5ad", tmp_path / "a.zarr")


# -- targets -----------------------------------------------------------------------------------------------------------


def test_unknown_and_missing_sources(tmp_path):
    with pytest.raises(InputError, match="there is no such file"):
        import_matrix(tmp_path / "none.mtx", tmp_path / "new" / "a.zarr")
    with pytest.raises(InputError, match=r"a\.doc: there is no such file"):
        import_matrix(tmp_path / "a.doc", tmp_path / "new" / "a.zarr")
    with pytest.raises(InputError, match=r"not from csr_matrix: spdist\.save"):
        import_matrix(sample().tocsr(), tmp_path / "a.zarr")
    with pytest.raises(InputError, match=r"scipy\.sparse\.csr_array\(x\)"):
        import_matrix([[1]], tmp_path / "a.zarr")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.doc").touch()
    with pytest.raises(InputError, match=r"cannot tell the format.*\.mtx"):
        import_matrix(tmp_path / "a.doc", tmp_path / "a.zarr")


def test_existing_targets(tmp_path):
    good, bad = text_file(tmp_path, TOP + "1 1 1\n1 1 5\n"), text_file(tmp_path, TOP + "1 1 1\n1 1 x\n", "bad.mtx")
    import_matrix(good, tmp_path / "a.zarr")
    with pytest.raises(InputError, match=r"already exists.*--overwrite") as caught:
        import_matrix(good, tmp_path / "a.zarr")
    assert caught.value.exit_code == 2
    with pytest.raises(MatrixError, match="'x' is not a number"):
        import_matrix(bad, tmp_path / "a.zarr", overwrite=True)
    assert whole(open_matrix(tmp_path / "a.zarr")).data.tolist() == [5]
    for precious in ("notes", "file.txt"):
        (tmp_path / precious).mkdir() if precious == "notes" else (tmp_path / precious).write_text("mine")
        with pytest.raises(InputError, match="is not a matrix, so it is not replaced"):
            import_matrix(good, tmp_path / precious, overwrite=True)
    assert (tmp_path / "notes").is_dir()
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), MemoryError()]
)
@pytest.mark.parametrize("where", ["read", "sort", "close"])
@pytest.mark.parametrize("url", ["local", "memory://interchange-test/a.zarr"])
def test_failure_leaves_nothing(tmp_path, monkeypatch, error, where, url):
    sp.save_npz(tmp_path / "a.npz", sample(200, 200).tocsc())
    target = tmp_path / "a.zarr" if url == "local" else url

    def fail(*_):
        raise error

    owner, name = {
        "read": (RowSorter, "add"),
        "sort": (external_sort, "sort_entries"),
        "close": (MatrixWriter, "close"),
    }[where]
    monkeypatch.setattr(owner, name, fail)
    full = isinstance(error, OSError)
    with pytest.raises(SpdistError if full else type(error), match="the disk is full" if full else None):
        import_matrix(tmp_path / "a.npz", target, bucket_bytes=1000)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.npz"]
    assert not at(str(target)).exists()


def test_progress_rises_to_its_total(tmp_path):
    scipy.io.mmwrite(tmp_path / "a.mtx", sample(200, 200))
    calls: list[tuple[int, int]] = []
    import_matrix(tmp_path / "a.mtx", tmp_path / "a.zarr", bucket_bytes=500, progress=lambda *call: calls.append(call))
    done, totals = zip(*calls, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]}
    assert len(calls) > 5
    calls.clear()
    for name in ("b.mtx", "b.npz"):
        export_matrix(tmp_path / "a.zarr", tmp_path / name, progress=lambda *call: calls.append(call))
        assert calls[-1][0] == calls[-1][1] > 0


def test_memory_urls(tmp_path):
    import fsspec

    with fsspec.open("memory://interchange-test/in.mtx", "wb") as file:
        scipy.io.mmwrite(file, sample())
    for _ in range(2):
        got = import_matrix("memory://interchange-test/in.mtx", "memory://interchange-test/b.zarr", overwrite=True)
    assert_equals(whole(got), sample())
    export_matrix("memory://interchange-test/b.zarr", tmp_path / "b.npz")
    assert_equals(from_scipy(sp.load_npz(tmp_path / "b.npz")), sample())
    export_matrix("memory://interchange-test/b.zarr", "memory://interchange-test/s.zarr", format="binsparse")
    with pytest.raises(InputError, match="local paths only"):
        export_matrix("memory://interchange-test/b.zarr", "memory://interchange-test/b.npz")


# -- export ------------------------------------------------------------------------------------------------------------


def stored(path: Path, matrix) -> StoredMatrix:
    block = from_scipy(matrix)
    writer = MatrixWriter(path, block.ncols, block.dtype, {})
    writer.append(block)
    return writer.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["b.mtx", "b.mtx.gz", "b.mtx.bz2"])
def test_exported_text_reads_back_exactly(tmp_path, monkeypatch, dtype, name):
    take_pieces(monkeypatch, 30)
    a = sample(dtype=dtype)
    stored(tmp_path / "a.zarr", a)
    export_matrix(tmp_path / "a.zarr", tmp_path / name)
    wide = a.astype({"f": "f8", "c": "c16"}.get(np.dtype(dtype).kind, "u8" if dtype == "u8" else "i8"))
    assert_equals(from_scipy(scipy.io.mmread(tmp_path / name)), wide)
    assert_equals(whole(import_matrix(tmp_path / name, tmp_path / "c.zarr")), wide)


def test_exported_special_values(tmp_path):
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324, 0.1, 1 / 3, 1.7976931348623157e308, 1e22])
    stored(tmp_path / "a.zarr", sp.csr_matrix((values, np.arange(9), [0, 9]), shape=(1, 9)))
    export_matrix(tmp_path / "a.zarr", tmp_path / "b.mtx")
    got = whole(import_matrix(tmp_path / "b.mtx", tmp_path / "b.zarr")).data
    np.testing.assert_array_equal(got, values)
    assert np.signbit(got[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(30, 20), (1, 1), (50, 1)])
def test_exported_npz(tmp_path, monkeypatch, dtype, shape):
    take_pieces(monkeypatch, 30)
    a = sample(*shape, dtype=dtype)
    stored(tmp_path / "a.zarr", a)
    export_matrix(tmp_path / "a.zarr", tmp_path / "b.npz")
    got = sp.load_npz(tmp_path / "b.npz")
    assert got.indices.dtype == got.indptr.dtype == np.int32
    assert_equals(from_scipy(got), a)


@pytest.mark.parametrize("name", ["b.mtx", "b.npz"])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (4, 1 << 33)])
def test_export_of_odd_shapes(tmp_path, name, shape):
    stored(tmp_path / "a.zarr", sp.csr_matrix(shape))
    export_matrix(tmp_path / "a.zarr", tmp_path / name)
    got = import_matrix(tmp_path / name, tmp_path / "b.zarr")
    assert (got.shape, got.nnz) == (shape, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_binsparse_layout(tmp_path, monkeypatch, dtype):
    """The layout of Binsparse 0.1 as its reference reader, binsparse 0.1.4, takes it."""
    take_pieces(monkeypatch, 30)
    a = sample(dtype=dtype)
    stored(tmp_path / "a.zarr", a)
    for _ in range(2):
        export_matrix(tmp_path / "a.zarr", tmp_path / "b.zarr", format="binsparse", overwrite=True)
    group = zarr.open_group(tmp_path / "b.zarr", mode="r")
    description = json.loads((tmp_path / "b.zarr" / "zarr.json").read_text())["attributes"]["binsparse"]["binsparse"]
    values = {"?": "bint8", "c8": "complex[float32]", "c16": "complex[float64]"}.get(dtype, np.dtype(dtype).name)
    assert description == {
        "version": "0.1.0",
        "format": "CSR",
        "shape": [30, 20],
        "number_of_stored_values": a.nnz,
        "data_types": {"pointers_to_1": "int64", "indices_1": "int32", "values": values},
    }
    arrays = [group[name][:] for name in ("values", "indices_1", "pointers_to_1")]
    arrays[0] = arrays[0].view(dtype)
    assert_equals(from_scipy(sp.csr_matrix(tuple(arrays), shape=a.shape)), a)


def test_binsparse_reader(tmp_path):
    binsparse = pytest.importorskip("binsparse")
    conversions = pytest.importorskip("binsparse.conversions.scipy")
    stored(tmp_path / "a.zarr", sample())
    export_matrix(tmp_path / "a.zarr", tmp_path / "b.zarr", format="binsparse")
    assert_equals(from_scipy(conversions.to_scipy(binsparse.load_binsparse(tmp_path / "b.zarr"))), sample())


def test_binsparse_sorts_what_others_wrote(tmp_path):
    messy = sp.csr_matrix((np.arange(1.0, 6), np.array([3, 1, 3, 0, 0]), np.array([0, 3, 5])), shape=(2, 4))
    anndata.io.write_elem(zarr.open_group(tmp_path / "a.zarr", mode="w"), "/", messy)
    export_matrix(tmp_path / "a.zarr", tmp_path / "b.zarr", format="binsparse")
    group = zarr.open_group(tmp_path / "b.zarr", mode="r")
    assert group["indices_1"][:].tolist() == [1, 3, 0]
    assert group["values"][:].tolist() == [2, 4, 9]
    assert group["pointers_to_1"][:].tolist() == [0, 2, 3]


def test_export_refusals(tmp_path):
    stored(tmp_path / "a.zarr", sample())
    with pytest.raises(InputError, match="cannot tell the format"):
        export_matrix(tmp_path / "a.zarr", tmp_path / "b.txt")
    with pytest.raises(InputError, match="'hdf' is not written"):
        export_matrix(tmp_path / "a.zarr", tmp_path / "b.txt", format="hdf")
    (tmp_path / "b.mtx").write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        export_matrix(tmp_path / "a.zarr", tmp_path / "b.mtx")
    (tmp_path / "c.npz").mkdir()
    with pytest.raises(InputError, match="is a directory"):
        export_matrix(tmp_path / "a.zarr", tmp_path / "c.npz", overwrite=True)
    os.mkfifo(tmp_path / "d.npz")
    with pytest.raises(InputError, match="is no ordinary file"):
        export_matrix(tmp_path / "a.zarr", tmp_path / "d.npz", overwrite=True)
    export_matrix(tmp_path / "a.zarr", tmp_path / "b.mtx", overwrite=True)
    assert (tmp_path / "b.mtx").read_text() != "mine"
    assert left_over(tmp_path) == []


def test_export_of_a_damaged_matrix_leaves_the_old_file(tmp_path):
    matrix = stored(tmp_path / "a.zarr", sample())
    (tmp_path / "b.npz").write_text("old")
    (Path(matrix.url) / matrix.data.key(0)).unlink()
    with pytest.raises(SpdistError, match="chunk 0 of array 'data'"):
        export_matrix(tmp_path / "a.zarr", tmp_path / "b.npz", overwrite=True)
    assert (tmp_path / "b.npz").read_text() == "old"
    assert left_over(tmp_path) == []


# -- memory ------------------------------------------------------------------------------------------------------------

MEASURE = """
import resource, sys
from pathlib import Path
from spdist.storage.import_export import import_matrix
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small, large, target = map(Path, sys.argv[1:])
import_matrix(small, target / "small.zarr", bucket_bytes=1 << 20)
before = peak()
matrix = import_matrix(large, target / "large.zarr", bucket_bytes=1 << 20)
print(peak() - before, matrix.nbytes // 1024)
"""


def test_import_is_bounded_in_memory(tmp_path):
    """60 MB of text are 73 MB as arrays; the import takes far less memory beyond an import of one entry."""
    text_file(tmp_path, TOP + "1 1 1\n1 1 1\n", "small.mtx")
    rng, n = np.random.default_rng(0), 3_400_000
    with (tmp_path / "large.mtx").open("wb") as file:
        rows, columns = rng.integers(0, 10**6, n), rng.integers(0, 10**6, n)
        values = rng.integers(0, 100, n) / 8
        scipy.io.mmwrite(file, sp.coo_array((values, (rows, columns)), shape=(10**6, 10**6)))
    assert (tmp_path / "large.mtx").stat().st_size > 60e6
    arguments = [str(tmp_path / "small.mtx"), str(tmp_path / "large.mtx"), str(tmp_path)]
    run = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True)
    grown, whole_arrays = map(int, run.stdout.split())
    assert grown < 0.75 * whole_arrays


def test_a_folder_that_may_not_be_written_to_is_named(tmp_path, monkeypatch):
    """And not what would have been made in it."""
    stored(tmp_path / "a.zarr", sample())

    def refuse(**wanted):
        raise PermissionError(13, "Permission denied", f"{wanted['dir']}/{wanted['prefix']}x")

    monkeypatch.setattr("spdist.storage.atomic_replace.tempfile.mkdtemp", refuse)
    with pytest.raises(
        InputError, match=rf"b.npz: {tmp_path} may not be written to \(Permission denied\); choose another"
    ):
        export_matrix(tmp_path / "a.zarr", tmp_path / "b.npz")
