"""Rows in files without a name: blocks that wait for their place in C leave the memory to others.

The system deletes such a file when nobody maps it any more, also after a kill.
"""

from __future__ import annotations

import mmap
from typing import Any, BinaryIO, cast

import numpy as np

from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import ValueArray
from spdist.storage.atomic_replace import is_full
from spdist.stores.registry import at


def to_files(c: CSR, url: str, reserve: float) -> CSR | None:
    """Copy rows to files beside a matrix; None if it is in no files, or has no room for them and `reserve` bytes."""
    parts: list[Any] = []
    for array in (c.indptr, c.indices, c.data):
        file = at(url).unnamed_file(array.nbytes + reserve)
        if file is None:
            return None
        with file:
            try:
                parts.append(_mapped(array, file) if array.nbytes else array)
            except OSError as error:  # others write there, too
                if is_full(error):
                    return None
                raise
    indptr, indices, data = parts
    return CSR(indptr, indices, data, c.shape)


def _mapped(array: ValueArray, file: BinaryIO) -> Any:
    left = memoryview(cast(Any, np.ascontiguousarray(array).view(np.uint8)))
    while left:  # a write of more than 2 GiB is cut
        left = left[file.write(left) :]
    return np.memmap(file, array.dtype, "r", shape=array.shape)


def is_in_files(c: CSR) -> bool:
    """Whether `to_files` returned these rows."""
    return isinstance(c.indices, np.memmap)


def forget(c: CSR) -> None:
    """Give back the memory of rows in files that were read."""
    for array in (c.indptr, c.indices, c.data):
        if isinstance(array, np.memmap):
            cast(Any, array)._mmap.madvise(mmap.MADV_DONTNEED)
