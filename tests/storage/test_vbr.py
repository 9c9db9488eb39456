"""Matrices of dense blocks of many sizes in Zarr."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.errors import InputError, MatrixError
from spdist.matrices import vbr
from tests.matrices.test_vbr import bounds, matrix


def test_saved_and_opened(tmp_path):
    rng = np.random.default_rng(1)
    m = matrix(200, 300, 1, bounds(rng, 200), bounds(rng, 300))
    m.save(tmp_path / "m.zarr")
    again = spdist.open_vbr(tmp_path / "m.zarr")
    for name in ("row_bounds", "column_bounds", "indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(again, name), getattr(m, name))
        assert getattr(again, name).dtype == getattr(m, name).dtype
    with pytest.raises(InputError, match="already exists"):
        m.save(tmp_path / "m.zarr")
    with pytest.raises(MatrixError, match="expected a Zarr group with encoding-type csr_matrix, got vbr_matrix"):
        spdist.open(tmp_path / "m.zarr")
    spdist.save(tmp_path / "s.zarr", sp.eye_array(3, format="csr"))
    with pytest.raises(MatrixError, match="not in blocks of many sizes, but csr_matrix"):
        spdist.open_vbr(tmp_path / "s.zarr")


def test_a_process_that_never_multiplied_saves(tmp_path):
    """The method finds its function in storage, which nothing in this process has imported before."""
    (tmp_path / "m").write_bytes(pickle.dumps(vbr.from_scipy(sp.eye_array(3, format="csr"))))
    program = "import pickle, sys; m = pickle.load(open(sys.argv[1], 'rb')); print('zarr' in sys.modules); "
    program += "m.save(sys.argv[1] + '.zarr')"
    command = [sys.executable, "-c", program, str(tmp_path / "m")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
    assert spdist.open_vbr(tmp_path / "m.zarr").nnz == 3
