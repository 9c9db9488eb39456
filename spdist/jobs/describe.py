"""Describe a stored matrix: the facts of `spdist.api.products.info`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spdist.matrices.dtypes import number_dtype
from spdist.shown import without_secrets
from spdist.storage import groups
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.stores.registry import at, normalise

if TYPE_CHECKING:
    from spdist.jobs.operands import MatrixLike


def info(matrix: MatrixLike) -> dict[str, Any]:
    """Describe a stored matrix; `spdist.api.products.info` lists the facts."""
    url = matrix.url if isinstance(matrix, StoredMatrix) else normalise(matrix)
    facts = groups.read_facts(url)
    if facts.get("state") == "unfinished":
        from spdist.jobs.status import durable_part  # loads plans and journals

        return {
            "matrix": url,
            "state": "unfinished",
            "durable": durable_part(url),
            "remedy": "finish it with spdist multiply --resume",
        }
    m = matrix if isinstance(matrix, StoredMatrix) else open_matrix(url)
    size, names = m.blocksize, m.names
    return {
        "matrix": url,
        "shape": list(m.full_shape),
        "dtype": str(number_dtype(m.dtype)),
        "nnz": m.nnz * (1 if size is None else size[0] * size[1]),
        **({} if size is None else {"blocks": m.nnz, "block_size": list(size)}),
        "rows": _row_lengths(m),
        "row_names": names.rows is not None,
        "column_names": names.columns is not None,
        "bytes": {"memory": m.nbytes, "stored": at(url).stored_bytes()},
        "state": "complete",
        "provenance": without_secrets(facts.get("provenance", {})),
    }


def _row_lengths(m: StoredMatrix) -> dict[str, float]:
    """Return the least, mean and most entries of a row, and the number of empty rows."""
    low, high, empty = m.nnz, 0, 0
    for _, _, offsets in m.row_blocks(4 * m.indices.chunk):
        lengths = np.diff(offsets)
        low, high = min(low, int(lengths.min())), max(high, int(lengths.max()))
        empty += int((lengths == 0).sum())
    return {"min": low if m.nrows else 0, "mean": m.nnz / max(m.nrows, 1), "max": high, "empty": empty}
