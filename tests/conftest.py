"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from spdist import api
from spdist.storage import StoredMatrix

SETTINGS_DIR = Path(__file__).parent


def random_matrix(nrows: int, ncols: int, per_row: float, seed: int, dtype: str = "float64") -> sp.csr_matrix:
    """Return a canonical matrix with rows of very different lengths, some of them empty."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.poisson(per_row * rng.exponential(1.0, nrows)), ncols)
    rows = np.repeat(np.arange(nrows), lengths)
    columns = rng.integers(0, max(ncols, 1), len(rows))
    values = (rng.integers(1, 9, len(rows)) if np.dtype(dtype).kind in "iub" else rng.standard_normal(len(rows)))
    m = sp.coo_matrix((values.astype(dtype), (rows, columns)), shape=(nrows, ncols)).tocsr()
    m.sum_duplicates()
    return m


@pytest.fixture
def stored(tmp_path):
    """Return a function that stores a matrix under a name in a fresh folder."""

    def store(name: str, matrix: sp.csr_matrix) -> StoredMatrix:
        return api.save(tmp_path / f"{name}.zarr", matrix)

    return store
