"""Read the rows of A and B that a block needs.

B's rows come from a resident B, or as a band (all rows between the first and the last that A's columns name), or one by
one. Bands and single rows are renumbered: B's first row that is read becomes row 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from spdist.kernels.streaming.layout import SubmatrixOffset
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import IndexArray, Int64Array, index_dtype
from spdist.scheduler.execution.records import BlockOperands, BlockTask
from spdist.scheduler.execution.worker import WorkerContext, check_rows

AddBytes = Callable[[int], None]
"""Takes bytes that were moved."""
RENUMBERING_BYTES = 8
"""Bytes an entry of A that renumbering would take; a band may use them instead."""
OFFSET_BYTES = 24
"""Bytes a row of B that a band takes for offsets, its renumbering included."""
DENSE_SPREAD = 8
"""Find the columns with a table, not a sort, if their span is at most this multiple of the number of entries.
"""
RANKED_SPREAD = 32
"""Number the columns with a bit for each in their span, not a search, if it is at most this multiple of the entries."""
WORD, LAST_BIT, ONE = np.uint64(6), np.uint64(63), np.uint64(1)
"""Numbers are 64 to a word: shift to the word, mask of the bit, and the first bit."""
PART = 1 << 16
"""Entries that are renumbered at once."""


def read_operands(context: WorkerContext, task: BlockTask, piece: int, add_bytes: AddBytes) -> BlockOperands:
    """Read A's rows of a block and the rows of B that they need; without the mask.

    `context`: its job names the matrices; it keeps the resident B and the last band of B.
    `piece`: which piece of a split block to read; other blocks have one piece, 0.
    `add_bytes`: called with the bytes that were read.
    Returns `b` is None if B is resident.
    Raises `MatrixError` if rows of A or B are not canonical.
    Raises `CorruptError` if a Zarr chunk is missing, truncated or altered.
    """
    job = context.job
    if job.resident and not task.split:
        return _with_resident_b(context, task, add_bytes)
    a = job.a.rows(task.start, task.stop, context.allocate)
    low, high = check_rows(a, job.a.url, task.start)
    if not task.split and (operands := _read_band(context, task, a, low, high)) is not None:
        add_bytes(operands.a.nbytes + (operands.b.nbytes if operands.b is not None else 0))
        return operands
    k0, k1, j0, j1 = job.pieces[piece] if task.split else (0, job.a.ncols, 0, job.b.ncols)
    if task.split:
        a = columns_between(a, k0, k1)
    a, needed = renumber(a)
    b = job.b.take(needed)
    check_rows(b, job.b.url)
    if j1 - j0 < job.b.ncols:
        b = columns_between(b, j0, j1)
    add_bytes(a.nbytes + b.nbytes)
    return BlockOperands(a, b)


def _with_resident_b(context: WorkerContext, task: BlockTask, add_bytes: AddBytes) -> BlockOperands:
    """Return A's rows alone; when A is B they are a view of the resident B."""
    job = context.job
    if job.a == job.b:
        b = context.resident_b().get(add_bytes)
        if b.dtype == job.a.dtype:
            return BlockOperands(b.rows(task.start, task.stop), None, offset_in_b=SubmatrixOffset(task.start))
    a = job.a.rows(task.start, task.stop, context.allocate)
    check_rows(a, job.a.url, task.start)
    context.resident_b().get(add_bytes)
    add_bytes(a.nbytes)
    return BlockOperands(a, None)


def _read_band(context: WorkerContext, task: BlockTask, a: CSR, low: int, high: int) -> BlockOperands | None:
    """Read B's rows ``[low:high)`` if they fit in the memory for this block's rows of B; else return None.

    A band needs no table of row numbers, and the bytes of that table make room for rows that no column names. Entries
    are copied, not read, when the previous block's band has them, or `a` does because A is B.
    """
    if not a.nnz:
        return None
    job = context.job
    room = task.b_bytes + RENUMBERING_BYTES * a.nnz - OFFSET_BYTES * (high - low)
    if room <= 0:
        return None
    offsets = job.b.read_indptr(low, high)
    first, last = int(offsets[0]), int(offsets[-1])
    if (last - first) * job.b.entry_nbytes > room:
        return None
    held = [context.last_band] if context.last_band is not None else []
    a_first = int(job.a.read_indptr(task.start, task.start)[0]) if job.a == job.b else -1
    if a_first >= 0:
        held.append((a_first, a))
    allocate = context.allocate or np.empty
    b = CSR(offsets - first, *job.b.entries(first, last, held, allocate), (high - low, job.b.ncols))
    check_rows(b, job.b.url, low)
    context.keep_band(first, b)
    is_inside = first <= a_first and a_first + a.nnz <= last
    data = b.data[a_first - first : a_first - first + a.nnz] if is_inside else a.data
    columns = np.subtract(a.indices, low, out=allocate(a.nnz, a.indices.dtype))
    renumbered = CSR(a.indptr, columns, data, (a.nrows, high - low))
    # The entries of A may lie in the band while its empty first or last rows do not.
    is_part = job.a == job.b and low <= task.start and task.stop <= high
    return BlockOperands(renumbered, b, offset_in_b=SubmatrixOffset(task.start - low, low) if is_part else None)


def columns_between(m: CSR, low: int, high: int) -> CSR:
    """Drop the entries with columns outside ``[low, high)``; the other columns keep their numbers.

    `low, high`: columns to keep, from `low` to `high` - 1.
    Returns of the shape of `m`.

    Examples
    --------
    >>> m = CSR(np.array([0, 2]), np.array([1, 5]), np.array([3.0, 4.0]), (1, 6))
    >>> columns_between(m, 2, 6).indices
    array([5])
    """
    keep = (m.indices >= low) & (m.indices < high)
    kept = np.concatenate([[0], np.cumsum(keep)])
    return CSR(kept[m.indptr], m.indices[keep], m.data[keep], m.shape)


def renumber(a: CSR) -> tuple[CSR, Int64Array]:
    """Renumber the columns of `a` to ``0, 1, ...`` in rising order.

    Returns `a`: with as many columns as occur.
    Returns `needed`: (ncols,) int64: the old number of each column.

    Examples
    --------
    >>> a, needed = renumber(CSR(np.array([0, 2]), np.array([4, 9]), np.array([1.0, 2.0]), (1, 10)))
    >>> a.indices, needed
    (array([0, 1]), array([4, 9]))
    """
    if not a.nnz:
        return CSR(a.indptr, a.indices, a.data, (a.nrows, 0)), np.empty(0, np.int64)
    low, span = int(a.indices.min()), int(a.indices.max()) - int(a.indices.min()) + 1
    if span <= DENSE_SPREAD * a.nnz:
        used = np.zeros(span, bool)
        for part in _parts(a.indices):
            used[part - low] = True
        needed = np.flatnonzero(used)
        del used
        needed += low
    else:
        needed = np.unique(a.indices).astype(np.int64)
    words, before = _ranks(needed, low, span) if span <= RANKED_SPREAD * a.nnz else (None, None)
    indices = np.empty_like(a.indices)
    for part, out in zip(_parts(a.indices), _parts(indices), strict=True):
        if words is None or before is None:
            out[:] = np.searchsorted(needed, part)
            continue
        places = (part - low).astype(np.uint64)
        at, below = places >> WORD, (ONE << (places & LAST_BIT)) - ONE
        out[:] = np.bitwise_count(words[at] & below)
        out += before[at]
    return CSR(a.indptr, indices, a.data, (a.nrows, len(needed))), needed


def _ranks(needed: Int64Array, low: int, span: int) -> tuple[npt.NDArray[np.uint64], IndexArray]:
    """Return a bit for each number of a span from `low` on, set if it is needed, and how many are before each word."""
    bits = (needed - low).view(np.uint64)
    bits &= LAST_BIT
    np.left_shift(ONE, bits, out=bits)
    at = needed - low
    at >>= 6
    firsts = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
    words, before = np.zeros(-(-span // 64), np.uint64), np.zeros(-(-span // 64), index_dtype(len(needed)))
    words[at[firsts]] = np.bitwise_or.reduceat(bits, firsts)
    before[at[firsts]] = firsts
    return words, before


def _parts(columns: IndexArray) -> Iterator[IndexArray]:
    """Yield views of `PART` columns."""
    return (columns[first : first + PART] for first in range(0, len(columns), PART))
