"""NumPy's files: dense arrays of numpy.save, and sparse arrays as pydata/sparse saves them."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spdist.errors import InputError, MatrixError
from spdist.storage.formats import dense_rows
from spdist.storage.import_export import import_matrix
from tests.conftest import random_matrix
from tests.support.pieces import take_pieces

DENSE = random_matrix(30, 20, 3, 1).toarray()


def dense(m):
    return m.to_scipy().toarray()


# -- .npy --------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(["?", "i1", ">u2", "<f4", ">f8", "c8", ">c16"]), seed=st.integers(0, 99),
    shape=st.tuples(*[st.integers(0, 12)] * 2), order=st.sampled_from("CF"), entries=st.integers(1, 40),
)  # fmt: skip
def test_dense_arrays_read_as_numpy_reads_them(tmp_path_factory, dtype, seed, shape, order, entries):
    folder, rng = tmp_path_factory.mktemp("npy"), np.random.default_rng(seed)
    values = np.asarray(rng.integers(0, 3, shape).astype(dtype), order=order)
    np.save(folder / "a.npy", values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_rows, "ENTRIES", entries)
        patch.setattr(dense_rows, "WHOLE_ROWS", entries)
        m = import_matrix(folder / "a.npy", folder / "A.zarr", dense=True)
    np.testing.assert_array_equal(dense(m), np.load(folder / "a.npy"))
    assert m.dtype == values.dtype.newbyteorder("=")
    assert m.nnz == np.count_nonzero(values)


def test_nan_and_negative_zero(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[np.nan, -0.0], [0.0, -1.0]]))
    m = import_matrix(tmp_path / "a.npy", tmp_path / "A.zarr", dense=True)
    assert m.nnz == 2
    assert m.facts["provenance"]["read"].startswith(
        "read as an array of numpy.save; float64 in C order; no names; left"
    )


def test_a_dense_array_at_a_url(tmp_path):
    import fsspec

    with fsspec.open("memory://numpy-files/a.npy", "wb") as file:
        np.save(file, np.asfortranarray(DENSE))
    m = import_matrix("memory://numpy-files/a.npy", tmp_path / "A.zarr", dense=True)
    np.testing.assert_array_equal(dense(m), DENSE)


@pytest.mark.parametrize(("values", "message"), [
    (np.ones(3), "two dimensions"), (np.ones((2, 2, 2)), "two dimensions"), (np.ones((2, 2), "f2"), "float16"),
    (np.array([[None]]), "Python objects"), (np.array([["a"]]), "must hold numbers"),
    (np.zeros((2, 2), [("a", "f8")]), "must hold numbers"),
])  # fmt: skip
def test_other_arrays_are_refused(tmp_path, values, message):
    np.save(tmp_path / "a.npy", values, allow_pickle=True)
    with pytest.raises(MatrixError, match=message):
        import_matrix(tmp_path / "a.npy", tmp_path / "A.zarr", dense=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]


def test_dense_must_be_asked_for(tmp_path):
    np.save(tmp_path / "a.npy", DENSE)
    with pytest.raises(InputError, match=r"a.npy is a dense array: pass --dense \(dense=True\)"):
        import_matrix(tmp_path / "a.npy", tmp_path / "A.zarr")


@pytest.mark.parametrize("keep", [0, 5, 20, 100, 200, -1])
def test_truncated_arrays(tmp_path, keep):
    np.save(tmp_path / "a.npy", DENSE)
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:keep])
    with pytest.raises(MatrixError, match="truncated"):
        import_matrix(tmp_path / "a.npy", tmp_path / "A.zarr", dense=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]


def test_arrays_of_savez(tmp_path):
    np.savez(tmp_path / "a.npz", DENSE)
    with pytest.raises(MatrixError, match=r"arrays of numpy.savez \(arr_0\) and no sparse matrix.*--dense"):
        import_matrix(tmp_path / "a.npz", tmp_path / "A.zarr")


# -- pydata/sparse -----------------------------------------------------------------------------------------------------


def nodes(kind: str, newer: bool = True, dtype: str = "f8", **changes):
    """Return what ``sparse.save_npz`` of 0.19 (newer) and 0.15 writes of a COO or GCXS array."""
    values = DENSE.astype(dtype)
    rows, columns = np.nonzero(DENSE)
    found = {"shape": np.array(DENSE.shape), "data": values[rows, columns], "fill_value": np.zeros((), dtype)}
    if kind == "coo":
        found |= {"coords": np.array([rows, columns])}
    else:
        axis = int(kind[-1])
        if axis:
            order = np.lexsort((rows, columns))
            rows, columns = rows[order], columns[order]
            found["data"] = values[rows, columns]
        first, second = (columns, rows) if axis else (rows, columns)
        counts = np.bincount(first, minlength=DENSE.shape[axis])
        found |= {"indices": second, "indptr": np.r_[0, np.cumsum(counts)], "compressed_axes": np.array([axis])}
    found |= {"format": np.array(kind[:4])} if newer else {}
    return {name: value for name, value in (found | changes).items() if value is not None}


@pytest.mark.parametrize("kind", ["coo", "gcxs0", "gcxs1"])
@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize("dtype", ["?", "f4", ">f8", "c16"])
def test_sparse_arrays(tmp_path, monkeypatch, kind, newer, dtype):
    take_pieces(monkeypatch, 7)
    (np.savez_compressed if newer else np.savez)(tmp_path / "a.npz", **nodes(kind, newer, dtype))
    m = import_matrix(tmp_path / "a.npz", tmp_path / "A.zarr")
    np.testing.assert_array_equal(dense(m), DENSE.astype(dtype))
    assert m.dtype == np.dtype(dtype).newbyteorder("=")
    read = {"coo": "COO", "gcxs0": "GCXS by rows", "gcxs1": "GCXS by columns"}[kind]
    assert m.facts["provenance"]["read"] == f"read as a file of sparse.save_npz; {read}; no names"


def test_coordinates_in_fortran_order(tmp_path, monkeypatch):
    take_pieces(monkeypatch, 7)
    np.savez(tmp_path / "a.npz", **nodes("coo", coords=np.asfortranarray(np.array(np.nonzero(DENSE)))))
    np.testing.assert_array_equal(dense(import_matrix(tmp_path / "a.npz", tmp_path / "A.zarr")), DENSE)


@pytest.mark.parametrize(("kind", "changes", "message"), [
    ("coo", {"fill_value": np.array(1.0)}, "another value than 0"),
    ("coo", {"fill_value": np.array(np.nan)}, "another value than 0"),
    ("coo", {"fill_value": np.zeros(2)}, "another value than 0"), ("coo", {"fill_value": None}, "no array 'fill_val"),
    ("coo", {"shape": np.array([2, 3, 4])}, "two dimensions"), ("coo", {"shape": np.array([30, 5])}, "outside"),
    ("coo", {"coords": np.zeros((3, 7), int)}, r"\(2, entries\)"), ("coo", {"coords": np.zeros((2, 3), int)}, "fit"),
    ("coo", {"coords": np.zeros((2, 3))}, "whole numbers"), ("coo", {"data": None}, "no array 'data'"),
    ("gcxs0", {"compressed_axes": np.array([0, 1])}, "compressed_axes"),
    ("gcxs0", {"compressed_axes": np.array([2])}, "compressed_axes"),
    ("gcxs0", {"compressed_axes": np.array([1])}, "does not fit"), ("gcxs0", {"indptr": None}, "no array 'indptr'"),
])  # fmt: skip
def test_sparse_arrays_that_are_refused(tmp_path, kind, changes, message):
    np.savez(tmp_path / "a.npz", **nodes(kind, **changes))
    with pytest.raises(MatrixError, match=message):
        import_matrix(tmp_path / "a.npz", tmp_path / "A.zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_an_encrypted_archive_is_refused(tmp_path):
    sp.save_npz(tmp_path / "a.npz", sp.csr_array(DENSE))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    for header, flags in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        at = content.find(header)
        while at >= 0:
            content[at + flags] |= 1
            at = content.find(header, at + 1)
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(MatrixError, match="is encrypted; save the matrix again without a password"):
        import_matrix(tmp_path / "a.npz", tmp_path / "A.zarr")


@pytest.mark.parametrize("block", [(0, 2), (2, 0)])
def test_blocks_without_rows_or_columns_are_refused(tmp_path, block):
    np.savez(tmp_path / "a.npz", format=b"bsr", shape=(4, 4), data=np.ones((1, *block)), indices=[0], indptr=[0, 1, 1])
    with pytest.raises(MatrixError, match="are not read"):
        import_matrix(tmp_path / "a.npz", tmp_path / "A.zarr")
