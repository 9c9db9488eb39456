"""Matrices of PETSc, written here after the description of ``MatView`` and ``MatLoad``."""

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from spdist.errors import InputError, MatrixError
from spdist.storage.import_export import import_matrix
from tests.support.pieces import take_pieces

MAT, VEC = 1211216, 1211214


def petsc_file(matrix: sp.csr_array, index: str = ">i4", value: str = ">f8") -> bytes:
    """Return a matrix as PETSc stores it."""
    head = [MAT, *matrix.shape, matrix.nnz, *np.diff(matrix.indptr), *matrix.indices]
    return np.array(head, index).tobytes() + matrix.data.astype(value).tobytes()


def vector(length: int, index: str = ">i4", value: str = ">f8") -> bytes:
    return np.array([VEC, length], index).tobytes() + np.arange(length).astype(value).tobytes()


def dense_file(values: np.ndarray, index: str = ">i4") -> bytes:
    return np.array([MAT, *values.shape, -1], index).tobytes() + values.astype(">f8").tobytes()


def sample(nrows: int, ncols: int, density: float, seed: int, dtype: str = "f8") -> sp.csr_array:
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 9, (nrows, ncols)) * (rng.random((nrows, ncols)) < density)
    return sp.csr_array(values.astype(dtype) * (1 + 2j if np.dtype(dtype).kind == "c" else 1))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 9), st.integers(0, 9)), density=st.sampled_from([0.0, 0.3, 1.0]),
    index=st.sampled_from([">i4", ">i8"]), value=st.sampled_from([">f8", ">c16", ">f4"]),
    after=st.sampled_from([None, 0, 3, 9]), seed=st.integers(0, 3),
)  # fmt: skip
def test_each_build_of_petsc(tmp_path_factory, shape, density, index, value, after, seed):
    folder = tmp_path_factory.mktemp("petsc")
    matrix = sample(*shape, density, seed, np.dtype(value).newbyteorder("=").name)
    raw = petsc_file(matrix, index, value) + (b"" if after is None else vector(after, index, value))
    (folder / "a.petsc").write_bytes(raw)
    got = import_matrix(folder / "a.petsc", folder / "a.zarr")
    rows = got.rows(0, got.nrows)
    np.testing.assert_array_equal(rows.to_scipy().toarray(), matrix.toarray())
    line = got.facts["provenance"]["read"]
    assert f"indices of {32 if index == '>i4' else 64} bits" in line
    assert (got.dtype == matrix.dtype) or not matrix.nnz
    assert ("left out: the vector after the matrix" in line) == (after is not None)


def test_a_vector_behind_real_values_is_not_taken_for_complex_values(tmp_path):
    """Five complex values take as many bytes as five real ones and a vector of four."""
    matrix = sp.csr_array(([1.0, 2, 3, 4, 5], ([0, 1, 2, 3, 3], [0, 1, 2, 2, 3])), shape=(4, 4))
    assert len(petsc_file(matrix) + vector(4)) == len(petsc_file(matrix, value=">c16"))
    (tmp_path / "a.petsc").write_bytes(petsc_file(matrix) + vector(4))
    got = import_matrix(tmp_path / "a.petsc", tmp_path / "a.zarr")
    np.testing.assert_array_equal(got.rows(0, 4).to_scipy().toarray(), matrix.toarray())


def test_pieces_and_unsorted_columns(tmp_path, monkeypatch):
    take_pieces(monkeypatch, 3)
    matrix = sample(20, 7, 0.6, 0)
    turned = sp.csr_array((matrix.data.copy(), matrix.indices.copy(), matrix.indptr), shape=matrix.shape)
    for start, stop in zip(matrix.indptr, matrix.indptr[1:], strict=False):
        turned.indices[start:stop] = matrix.indices[start:stop][::-1]
        turned.data[start:stop] = matrix.data[start:stop][::-1]
    (tmp_path / "a.petsc").write_bytes(petsc_file(turned))
    got = import_matrix(tmp_path / "a.petsc", tmp_path / "a.zarr")
    np.testing.assert_array_equal(got.rows(0, 20).to_scipy().toarray(), matrix.toarray())


@pytest.mark.parametrize("index", [">i4", ">i8"])
def test_dense(tmp_path, index, monkeypatch):
    take_pieces(monkeypatch, 4)
    values = sample(5, 3, 0.5, 1).toarray()
    (tmp_path / "a.dat").write_bytes(dense_file(values, index))
    with pytest.raises(InputError, match="a dense matrix of 5 x 3; pass --dense"):
        import_matrix(tmp_path / "a.dat", tmp_path / "a.zarr", format="petsc")
    got = import_matrix(tmp_path / "a.dat", tmp_path / "a.zarr", format="petsc", dense=True)
    np.testing.assert_array_equal(got.rows(0, 5).to_scipy().toarray(), values)
    assert got.nnz == np.count_nonzero(values)
    assert "dense, nonzeros kept" in got.facts["provenance"]["read"]


def header(*numbers: int) -> bytes:
    return np.array(numbers, ">i4").tobytes()


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "ends within its header"),
        (b"%%MatrixMarket matrix", "not a matrix in PETSc's binary format; it must begin with the number 1211216"),
        (vector(3), "not a matrix in PETSc's"),
        (np.array([MAT, 2, 2, 0, 0, 0], "<i4").tobytes(), "not a matrix in PETSc's"),
        (header(MAT, 2, 2), "ends within its header"),
        (header(MAT, 2, -2, 0), "shape"),
        (header(MAT, 2, 2, -3), "-3 entries"),
        (petsc_file(sample(4, 4, 1, 0))[:-1], r"223 bytes, where 16 values of PETSc's binary format need 224"),
        (petsc_file(sample(4, 4, 1, 0)) + b"1234", "228 bytes, where 16 values"),
        (header(MAT, 2, 2, 2, 3, -1, 0, 0) + bytes(16), "row 0 of 3 entries in a matrix of 2"),
        (header(MAT, 2, 2, 2, 2, -1, 0, 0) + bytes(16), "row 1 of -1 entries in a matrix of 2"),
        (header(MAT, 2, 2, 2, 1, 0, 0, 0) + bytes(16), "indptr ends at 1, but there are 2 entries"),
        (header(MAT, 2, 2, 2, 2, 1, 0, 0) + bytes(16), "does not rise from 0 to 2"),
        (header(MAT, 2, 2, 2, 1, 1, 0, 2) + bytes(16), "column"),
        (header(MAT, 2, 2, 2, 1, 1, 0, -1) + bytes(16), "column"),
        (header(MAT, 1 << 30, 2, 0), "1,073,741,824 rows in a file of 16 B"),
        (np.array([MAT, 2, 2, 1 << 62], ">i8").tobytes(), "values of PETSc's binary format need"),
    ],
)  # fmt: skip
def test_files_that_are_wrong(tmp_path, raw, what):
    (tmp_path / "a.petsc").write_bytes(raw)
    with pytest.raises(MatrixError, match=what) as caught:
        import_matrix(tmp_path / "a.petsc", tmp_path / "a.zarr")
    assert str(caught.value).isprintable()
    assert [path.name for path in tmp_path.iterdir()] == ["a.petsc"]
