"""A table with one record for each row block, as the scan over A cuts them and the search joins them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

BlockTable = npt.NDArray[np.void]
"""One-dimensional array of `BLOCK_RECORD`."""


class BlockRecord(NamedTuple):
    """Rows ``[start:stop)`` of A and the sums over them."""

    start: int
    stop: int
    products: int  # multiply-adds
    nnz: int  # expected entries of C
    a_bytes: int  # bytes of A's rows and of the mask's rows
    b_bytes: int  # bytes of the distinct rows of B that A's columns name; 0 if B is resident
    b_chunks: int  # Zarr chunks of B in which those rows lie; 0 if B is resident
    uncut_nnz: int  # expected entries of C before top-n cuts its rows
    longest: int  # most entries that a row of C may have before top-n cuts it, whatever was expected


BLOCK_RECORD = np.dtype([(name, np.int64) for name in BlockRecord._fields])
"""`BlockRecord` as a structured dtype."""


def block_table(records: Iterable[BlockRecord] = ()) -> BlockTable:
    """Return a table of these records.

    Examples
    --------
    >>> records = BlockRecord(0, 2, 5, 4, 64, 0, 0, 4, 3), BlockRecord(2, 3, 1, 1, 32, 0, 0, 1, 1)
    >>> table = block_table(records)
    >>> table["products"].tolist()
    [5, 1]
    """
    return np.array([tuple(record) for record in records], BLOCK_RECORD)


def block_records(table: BlockTable) -> list[BlockRecord]:
    """Return the records of a table as tuples of Python integers.

    Examples
    --------
    >>> block_records(block_table([BlockRecord(0, 2, 5, 4, 64, 0, 0, 4, 3)]))[0].products
    5
    """
    rows: list[tuple[Any, ...]] = table.tolist()
    return [BlockRecord(*row) for row in rows]


def joined_records(first: BlockRecord, second: BlockRecord) -> BlockRecord:
    """Join two neighbouring blocks into one.

    `first, second`: `second` begins at the row where `first` ends.
    Returns with the sums of both, and the longer of their longest rows. Rows and Zarr chunks of B that both blocks need
    count twice.

    Examples
    --------
    >>> joined_records(BlockRecord(0, 2, 5, 4, 64, 0, 0, 4, 3), BlockRecord(2, 3, 1, 1, 32, 0, 0, 1, 1))[:4]
    (0, 3, 6, 5)
    """
    sums = BlockRecord(*(sum(both) for both in zip(first, second, strict=True)))
    return sums._replace(start=first.start, stop=second.stop, longest=max(first.longest, second.longest))
