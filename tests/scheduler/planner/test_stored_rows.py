"""Parts of a matrix of equally many entries, and rows that are refused."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from spdist.errors import MatrixError
from spdist.scheduler.planner.stored_rows import check_rows, even_rows, row_lengths
from tests.conftest import random_matrix


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("parts", [1, 2, 7, 32])
def test_parts_have_as_many_entries(stored, monkeypatch, seed, parts):
    """But for one row, the longest at the most; where rows are longer than a part, there are fewer of them."""
    monkeypatch.setattr("spdist.storage.writer.chunk_of", lambda dtype: 50)
    m = random_matrix(400, 300, 5, seed)
    m = sp.vstack([m, np.ones((seed % 3, 300)), m[:: -(seed % 2) or 1]], format="csr")
    a = stored("A", m)
    bounds = even_rows(a, parts)
    assert bounds == even_rows(a, parts, row_lengths(a))
    entries = np.diff(m.indptr[bounds])
    assert (bounds[0], bounds[-1]) == (0, m.shape[0])
    assert len(bounds) <= parts + 1
    assert min(np.diff(bounds)) > 0
    assert entries.max() <= m.nnz / parts + np.diff(m.indptr).max() + 1
    assert parts > 7 or len(bounds) == parts + 1


@pytest.mark.parametrize("column", [-1, 30])
def test_columns_out_of_range_are_refused_whoever_wrote_the_rows(stored, column):
    a = stored("A", random_matrix(20, 30, 3, 1))
    rows = a.rows_indices(0, 20)
    check_rows(a, rows, 0, canonical=False)
    rows.indices[rows.nnz // 2] = column
    with pytest.raises(MatrixError, match=rf"A.zarr: column {column} in row \d+ is outside \[0, 30\)"):
        check_rows(a, rows, 0, canonical=False)
