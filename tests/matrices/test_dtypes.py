"""Dtypes of indices and of products."""

from __future__ import annotations

import numpy as np
import pytest

from spdist.errors import MatrixError
from spdist.matrices.dtypes import block_dtype, index_dtype, result_dtype

F4, F8, I4 = (np.dtype(name) for name in ("f4", "f8", "i4"))


def test_indices_are_as_short_as_the_last_column_allows():
    for ncols in (0, 1, 2**31 - 2, 2**31 - 1):
        assert index_dtype(ncols) == np.int32
    for ncols in (2**31, 2**31 + 1, 2**40):
        assert index_dtype(ncols) == np.int64


def test_products_of_blocks():
    assert result_dtype(F4, I4) == np.result_type(F4, I4)
    assert result_dtype(block_dtype(F4, (2, 3)), block_dtype(F8, (3, 5))) == block_dtype(F8, (2, 5))
    for left, right in (((2, 3), (2, 3)), ((3, 2), (3, 2)), ((2, 3), None), (None, (2, 3))):
        a, b = (F8 if size is None else block_dtype(F8, size) for size in (left, right))
        with pytest.raises(MatrixError, match="both need blocks"):
            result_dtype(a, b)
