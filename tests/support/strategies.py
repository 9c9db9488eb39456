"""Hypothesis strategies: canonical CSR matrices and pairs of them that can be multiplied."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from spdist.matrices.csr import CSR

SMALL_INTS = st.integers(-8, 8)  # exact in float32, so sums agree in any order; 0 gives explicit zeros
FLOATS = st.floats(allow_nan=True, allow_infinity=True, width=32)
INDEX_DTYPES = st.sampled_from([np.int32, np.int64])
DTYPES = [np.dtype(t) for t in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "c8", "c16")]


@st.composite
def csr_matrices(
    draw: Any, shape: tuple[int, int], values: st.SearchStrategy[Any] = SMALL_INTS, dtype: Any = np.float64
) -> CSR:
    """Draw a canonical CSR: empty, short and full rows, explicit zeros; of float64 int32 or int64 indices."""
    nrows, ncols = shape
    columns = st.integers(0, max(ncols - 1, 0))
    row = st.just([])
    if ncols:
        row |= st.lists(columns, max_size=3, unique=True).map(sorted)
    if 0 < ncols <= 64:
        row |= st.just(list(range(ncols)))
    rows = draw(st.lists(row, min_size=nrows, max_size=nrows))
    indptr = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    wide = ncols > np.iinfo(np.int32).max
    both = np.dtype(dtype) == np.float64  # each pair of index dtypes is a kernel to compile: of other values, one
    index_dtype = np.int64 if wide else draw(INDEX_DTYPES) if both else np.int32
    indices = np.array([j for r in rows for j in r], dtype=index_dtype)
    drawn = draw(st.lists(values, min_size=len(indices), max_size=len(indices)))
    return CSR(indptr, indices, np.array(drawn, dtype=np.int64 if values is SMALL_INTS else None).astype(dtype), shape)


@st.composite
def csr_pairs(
    draw: Any,
    values: st.SearchStrategy[Any] = SMALL_INTS,
    dtypes: tuple[Any, Any] = (np.float64, np.float64),
    ncols: st.SearchStrategy[int] | None = None,
) -> tuple[CSR, CSR]:
    """Draw A and B with as many columns of A as rows of B; each dimension may be 0."""
    nrows, inner = draw(st.integers(0, 12)), draw(st.integers(0, 12))
    columns = draw(st.integers(0, 20) if ncols is None else ncols)
    a = draw(csr_matrices((nrows, inner), values, dtypes[0]))
    return a, draw(csr_matrices((inner, columns), values, dtypes[1]))
