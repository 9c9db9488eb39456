"""Dask arrays from stored matrices, and stored ones from Dask arrays."""

from __future__ import annotations

import subprocess
import sys

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
from distributed import Client

import spdist
from tests.conftest import random_matrix

DTYPES = [np.float64, np.float32, np.int64, np.int8, np.complex64, bool]


@pytest.fixture(autouse=True)
def threads():
    """Compute in threads of this process, whatever client another test has open."""
    with dask.config.set(scheduler="threads"):
        yield


def equal(found: sp.csr_array, expected) -> bool:
    return found.shape == expected.shape and np.array_equal(found.toarray(), expected.toarray())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [None, 1, 7, 1000])
def test_there_and_back(stored, tmp_path, dtype, rows):
    m = random_matrix(50, 30, 4, 1).astype(dtype)
    lazy = spdist.to_dask(stored("A", m), rows)
    assert lazy.shape == (50, 30)
    assert lazy.dtype == dtype
    assert isinstance(lazy._meta, sp.csr_array)
    assert equal(lazy.compute(), m)
    assert equal(spdist.from_dask(lazy, tmp_path / "B.zarr").to_scipy(), m)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_matrices_of_nothing(stored, tmp_path, shape):
    lazy = stored("A", sp.csr_array(shape)).to_dask()
    assert lazy.shape == shape
    assert spdist.from_dask(lazy, tmp_path / "B.zarr").full_shape == shape


def test_blocks_are_lazy_and_slices_read_their_own(stored, monkeypatch):
    m = random_matrix(1000, 100, 5, 2)
    lazy = stored("A", m).to_dask(rows=10)
    assert lazy.numblocks == (100, 1)
    assert equal(lazy[15:35].compute(), m[15:35])
    sums = lazy.map_blocks(lambda rows: (rows @ np.ones(100))[:, None], chunks=(lazy.chunks[0], (1,)), dtype=float)
    assert np.allclose(sums.compute()[:, 0], m @ np.ones(100))


def test_blocks_of_any_kind_are_stored(tmp_path):
    dense = np.where(np.arange(120).reshape(12, 10) % 3 == 0, np.arange(120).reshape(12, 10), 0)
    unsorted = sp.csr_array(([1, 2, 3], [4, 0, 4], [0, 3] + [3] * 11), shape=(12, 10))  # two entries in one place
    for name, x, expected in (
        ("dense", da.from_array(dense, chunks=(5, 4)), dense),
        ("coo", da.from_array(dense, chunks=(5, 10)).map_blocks(sp.coo_array), dense),
        ("csc", da.from_array(dense, chunks=(5, 3)).map_blocks(sp.csc_matrix), dense),
        ("unsorted", da.map_blocks(lambda: unsorted, chunks=((12,), (10,)), dtype=np.int64, meta=sp.csr_array((0, 0))),
         unsorted.toarray()),
    ):  # fmt: skip
        found = spdist.from_dask(x, tmp_path / name)
        found.check()
        assert found.dtype == expected.dtype
        assert np.array_equal(found.to_scipy().toarray(), expected), name


def test_rows_of_unknown_number(tmp_path):
    x = da.from_array(np.eye(20), chunks=(6, 20))
    found = spdist.from_dask(x[(x.sum(axis=1) > 0) & (da.arange(20) % 2 == 0)], tmp_path / "A.zarr")
    assert np.array_equal(found.to_scipy().toarray(), np.eye(20)[::2])
    with pytest.raises(spdist.InputError, match="compute_chunk_sizes"):
        spdist.from_dask(x[:, x.sum(axis=0).compute_chunk_sizes() > 0], tmp_path / "B.zarr")


def test_products_of_dask_arrays(stored, tmp_path):
    m, other = random_matrix(60, 40, 4, 1), random_matrix(40, 50, 4, 2)
    x, y = stored("A", m).to_dask(9), stored("B", other)
    c = spdist.matmul(x, y, tmp_path / "C.zarr")
    assert abs(c.to_scipy() - m @ other).max() < 1e-12
    squared = spdist.matmul(x, x, tmp_path / "D.zarr", transpose_b=True)
    assert abs(squared.to_scipy() - m @ m.T).max() < 1e-12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["A.zarr", "B.zarr", "C.zarr", "D.zarr"]
    with pytest.raises(spdist.InputError, match="out="):
        spdist.matmul(x, y)
    with pytest.raises(spdist.InputError, match=r"spdist\.from_dask"):
        spdist.plan(x, y)


def test_a_failure_leaves_the_old_matrix(tmp_path):
    spdist.save(tmp_path / "A.zarr", sp.eye_array(3))
    bad = da.map_blocks(lambda: 1 / 0, chunks=((2, 2), (4,)), dtype=float, meta=sp.csr_array((0, 0)))
    with pytest.raises(ZeroDivisionError):
        spdist.from_dask(bad, tmp_path / "A.zarr", overwrite=True)
    assert spdist.open(tmp_path / "A.zarr").nnz == 3
    assert [path.name for path in tmp_path.iterdir()] == ["A.zarr"]


def test_what_is_no_array_of_two_dimensions(tmp_path, stored):
    for wrong in (np.eye(3), da.ones(3), sp.eye_array(3)):
        with pytest.raises(spdist.InputError, match="two dimensions"):
            spdist.from_dask(wrong, tmp_path / "A.zarr")
    lying = da.map_blocks(lambda: sp.eye_array(3, format="csr"), chunks=((3,), (5,)), dtype=float)
    with pytest.raises(spdist.MatrixError, match="3 columns; its chunks say 5"):
        spdist.from_dask(lying, tmp_path / "A.zarr")
    for rows in (0, -1, 2.5):
        with pytest.raises(spdist.InputError, match="rows="):
            spdist.to_dask(stored(f"M{rows}", sp.eye_array(3)), rows)


def test_blocks_are_read_by_workers(stored, scheduler):
    m = random_matrix(100, 80, 4, 3)
    with Client(scheduler), dask.config.set(scheduler=None):
        assert equal(stored("A", m).to_dask(30).compute(), m)


def test_nothing_of_dask_is_loaded_without_need():
    product = "spdist.matmul(sp.eye_array(3), sp.eye_array(3))"
    code = f"import sys, spdist, scipy.sparse as sp; {product}; print('dask.array', *sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split().count("dask.array") == 1
