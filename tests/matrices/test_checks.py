"""Checks of matrices: structure, canonical form and shapes, against rules written out entry by entry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spdist.errors import InputError, MatrixError
from spdist.matrices.checks import (
    check_canonical,
    check_mask_shape,
    check_product_shapes,
    check_structure,
    is_canonical,
)
from spdist.matrices.csr import CSR


@given(st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=4))
def test_canonical_rows_rise_strictly(rows):
    indptr = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    indices = np.array([column for row in rows for column in row], np.int32)
    m = CSR(indptr, indices, np.ones(len(indices)), (len(rows), 5))
    broken = [number for number, row in enumerate(rows) if row != sorted(set(row))]
    assert is_canonical(m) == (not broken)
    if broken:
        with pytest.raises(MatrixError, match=rf"^M: row {broken[0] + 1000:,} (is not sorted|holds a duplicate)"):
            check_canonical(m, "M", 1000)
    else:
        check_canonical(m, "M", 1000)


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([1, 2], [0], "indptr must hold 2 offsets that start at 0"),
        ([0, 2], [0], "indptr ends at 2, but there are 1 indices and 1 values"),
        ([0, 2, 1], [0], "indptr falls after row 8; offsets must not decrease"),
        ([0, 1], [3], r"column 3 in row 7 is outside \[0, 3\)"),
        ([0, 0, 1], [-1], r"column -1 in row 8 is outside \[0, 3\)"),
    ],
)
def test_broken_structure_is_named(indptr, indices, message):
    m = CSR(np.array(indptr), np.array(indices), np.ones(len(indices)), (len(indptr) - 1, 3))
    with pytest.raises(MatrixError, match=f"^M: {message}"):
        check_structure(m, "M", 7)


def test_shapes_that_do_not_fit():
    check_product_shapes((2, 3), (3, 0))
    with pytest.raises(InputError, match=r"A is 1,000 x 3 and B is 4 x 5; A must have as many columns as B has rows"):
        check_product_shapes((1000, 3), (4, 5))
    with pytest.raises(MatrixError, match="shapes do not fit: left is 2 x 3 and right is 4 x 5"):
        check_product_shapes((2, 3), (4, 5), ("left", "right"))
    with pytest.raises(MatrixError, match=r"has rows; for A @ A\.T multiply by A\.T, or pass transpose_b"):
        check_product_shapes((2, 3), (2, 3))
    with pytest.raises(MatrixError, match=r"has rows$"):
        check_product_shapes((2, 3), (2, 4))
    check_mask_shape((2, 3), (2, 3))
    with pytest.raises(MatrixError, match="the mask is 3 x 2, but C is 2 x 3"):
        check_mask_shape((3, 2), (2, 3))
