"""Rows in files without a name: as they were, and gone with the last array."""

from __future__ import annotations

import os

import numpy as np
import pytest

from spdist.matrices.csr import CSR, from_scipy
from spdist.storage.spill import forget, is_in_files, to_files
from spdist.stores import local
from tests.conftest import random_matrix


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128", "int64", "bool", "int8"])
@pytest.mark.parametrize("shape", [(40, 30), (3, 100_000), (5, 7)])
def test_rows_are_as_they_were(tmp_path, dtype, shape):
    c = from_scipy(random_matrix(*shape, 3, 1, dtype))
    found = to_files(c, str(tmp_path), 0)
    assert is_in_files(found)
    assert not is_in_files(c)
    assert not list(tmp_path.iterdir())
    for _ in range(2):
        for name in ("indptr", "indices", "data"):
            mine, theirs = getattr(found, name), getattr(c, name)
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)
        forget(found)
    assert found.shape == c.shape
    assert found.nbytes == c.nbytes


def test_rows_without_entries(tmp_path):
    c = CSR(np.zeros(4, np.int64), np.empty(0, np.int32), np.empty(0), (3, 9))
    found = to_files(c, str(tmp_path), 0)
    assert found.indptr.tolist() == [0, 0, 0, 0]
    assert not found.nnz
    forget(found)


def test_a_write_that_the_system_cuts(tmp_path, monkeypatch):
    """As it does beyond 2 GiB."""
    c, write = from_scipy(random_matrix(50, 40, 5, 1)), os.write

    class Cut:
        def __init__(self, file):
            self.file = file

        def write(self, content):
            return write(self.file.fileno(), content[:33])

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

    make = local.tempfile.TemporaryFile
    monkeypatch.setattr(local.tempfile, "TemporaryFile", lambda **keywords: Cut(make(**keywords)))
    found = to_files(c, str(tmp_path), 0)
    np.testing.assert_array_equal(found.data, c.data)
    np.testing.assert_array_equal(found.indices, c.indices)


def test_a_disk_that_others_fill_meanwhile(tmp_path, monkeypatch):
    def full(array, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spdist.storage.spill._mapped", full)
    assert to_files(from_scipy(random_matrix(50, 40, 5, 1)), str(tmp_path), 0) is None


def test_nothing_is_copied_where_there_is_no_room(tmp_path):
    c = from_scipy(random_matrix(50, 40, 5, 1))
    assert to_files(c, "memory://C.zarr", 0) is None
    assert to_files(c, str(tmp_path), 1 << 62) is None
