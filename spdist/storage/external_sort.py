"""Sort more (row, column, value) entries than fit in memory into rows: one external bucket sort.

Entries are spilled to one file for each range of rows, a bucket, as they are added. Each bucket is then loaded, sorted
and yielded as CSR. A bucket that is too large, because rows are unequal, is split again by rows. Duplicates are
combined in the order in which they were added, wherever buckets are cut, so that sums of floats have equal bits for
every bucket size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray, index_dtype

BUCKET_BYTES = 24 << 20
"""Bytes of the entries of one bucket; sorting a bucket takes about seven times as much memory."""

MAX_BUCKETS = 1024
"""Most buckets. Below 2^16: bucket numbers are uint16, which NumPy sorts by radix."""

MIN_SPLIT = 16
"""Fewest buckets into which a bucket that is too large is split."""

BLOCK_ROWS = 1 << 20
"""Most rows of a CSR that `RowSorter.blocks` yields; bounds the offsets if most rows are empty."""

COMPILED_KEYS = 1 << 18
"""Keys from which on compiled code sorts them: loading it takes as long as NumPy takes for as many."""

Duplicates = Literal["sum", "max", "min", "first"]
"""How entries in one position are combined."""

_COMBINE: dict[Duplicates, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class Entries(NamedTuple):
    """Entries of a matrix in any order: three arrays of one length."""

    rows: IndexArray
    columns: IndexArray
    values: ValueArray

    def take(self, selection: IndexArray | slice) -> Entries:
        """Return the entries that `selection`, an index array, Boolean mask or slice, selects."""
        return Entries(self.rows[selection], self.columns[selection], self.values[selection])


class RowSorter:
    """Collects entries in any order, then yields them as canonical rows, in bounded memory.

    The bound is about ten times `bucket_bytes`, or twenty times the longest row if that is more.

    `directory`: existing directory for spilled entries, used by nothing else; an entry takes 12 to 32 bytes there.
    `expected`: estimated number of entries; a wrong estimate costs time, not correctness.
    `bucket_bytes`: bytes of the entries of one bucket.
    `duplicates`: of entries in one position, their sum in the order in which they were added, the largest, the smallest
    or the first.
    `cuts`: first rows of the buckets, rising from 0; by default all buckets have as many rows.
    """

    def __init__(
        self,
        directory: Path,
        shape: tuple[int, int],
        dtype: np.dtype[Any],
        *,
        expected: int,
        bucket_bytes: int = BUCKET_BYTES,
        duplicates: Duplicates = "sum",
        cuts: IndexArray | None = None,
    ) -> None:
        self.directory, self.shape = directory, shape
        self.bucket_bytes, self.duplicates = bucket_bytes, duplicates
        row_dtype = np.dtype(np.uint32 if shape[0] < 1 << 32 else np.int64)
        self.dtypes = (row_dtype, index_dtype(shape[1]), np.dtype(dtype))
        self.entry_bytes = sum(each.itemsize for each in self.dtypes)
        nbuckets = max(1, min(-(-expected * self.entry_bytes // bucket_bytes), MAX_BUCKETS, shape[0]))
        if cuts is None:
            cuts = np.arange(nbuckets, dtype=np.int64) * -(-shape[0] // nbuckets)
            cuts = cuts[cuts < max(shape[0], 1)]
        self.cuts = cuts.astype(row_dtype)
        self.in_memory = expected * self.entry_bytes <= bucket_bytes and len(cuts) == 1
        self._in_memory: list[Entries] = []
        self._counts: list[list[int]] = [[] for _ in cuts]

    def add(self, entries: Entries) -> None:
        """Add entries, whose rows and columns must lie inside the shape."""
        entries = Entries(*(a.astype(t, copy=False) for a, t in zip(entries, self.dtypes, strict=True)))
        if self.in_memory:
            self._in_memory.append(entries)
            return
        bucket = (np.searchsorted(self.cuts, entries.rows, side="right") - 1).astype(np.uint16)
        ends = np.cumsum(np.bincount(bucket, minlength=len(self._counts)))
        entries = entries.take(np.argsort(bucket, kind="stable"))
        start = 0
        for k, end in enumerate(ends.tolist()):
            if end > start:
                with self._path(k).open("ab") as file:
                    for array in entries.take(slice(start, end)):
                        file.write(array.data)
                self._counts[k].append(end - start)
            start = end

    def blocks(self) -> Iterator[CSR]:
        """Yield all rows in order, as canonical CSR row blocks; frees each bucket when it is done."""
        ends = [*self.cuts[1:].tolist(), self.shape[0]]
        for k, (start, end) in enumerate(zip(self.cuts.tolist(), ends, strict=True)):
            if sum(self._counts[k]) * self.entry_bytes > 2 * self.bucket_bytes and end - start > 1:
                yield from self._split(k, start, end - start)
            else:
                yield from self._sorted(self._collect(k), start, end - start)
            self._path(k).unlink(missing_ok=True)

    def _path(self, k: int) -> Path:
        return self.directory / f"{k}.entries"

    def _load(self, k: int) -> Iterator[Entries]:
        """Yield the entries of bucket `k` in the order in which they were added."""
        yield from self._in_memory
        self._in_memory = []
        if not self._counts[k]:
            return
        with self._path(k).open("rb") as file:
            for count in self._counts[k]:
                rows, columns, values = (np.fromfile(file, dtype, count) for dtype in self.dtypes)
                yield Entries(rows, columns, values)

    def _split(self, k: int, start: int, nrows: int) -> Iterator[CSR]:
        """Sort a bucket that is too large with another sorter."""
        directory = self.directory / str(k)
        directory.mkdir()
        inner = RowSorter(
            directory,
            (nrows, self.shape[1]),
            self.dtypes[2],
            expected=sum(self._counts[k]),
            bucket_bytes=self.bucket_bytes,
            duplicates=self.duplicates,
            cuts=self._quantiles(k, start, nrows),
        )
        for entries in self._load(k):
            inner.add(entries._replace(rows=entries.rows - entries.rows.dtype.type(start)))
        self._path(k).unlink()
        yield from inner.blocks()
        directory.rmdir()

    def _quantiles(self, k: int, start: int, nrows: int) -> IndexArray:
        """Return the rows at which to split bucket `k` into equal numbers of entries; a very long row is alone."""
        count = sum(self._counts[k])
        step = max(count * self.entry_bytes // self.bucket_bytes, 1)  # a sample of about one bucket
        sample = np.sort(np.concatenate([entries.rows[::step] for entries in self._load(k)])).astype(np.int64) - start
        npieces = min(max(2 * step, MIN_SPLIT), MAX_BUCKETS // 2)
        rows = sample[np.arange(npieces) * len(sample) // npieces]
        cuts = np.unique(np.concatenate([np.zeros(1, np.int64), rows, rows[1:][rows[1:] == rows[:-1]] + 1]))
        return cuts[cuts < nrows]

    def _collect(self, k: int) -> Entries | None:
        """Load bucket `k`; combine duplicates while loading, so that many in one position take little memory."""
        parts: list[Entries] = []
        held, limit = 0, 2 * self.bucket_bytes // self.entry_bytes
        for entries in self._load(k):
            parts.append(entries)
            held += len(entries.rows)
            if held > limit:  # sums do not change: combined entries come first, and each position is summed in order
                parts = [sort_entries(_join(parts), self.shape[1], self.duplicates)]
                held = len(parts[0].rows)
                limit = max(limit, 2 * held)
        return _join(parts) if parts else None

    def _sorted(self, entries: Entries | None, start: int, nrows: int) -> Iterator[CSR]:
        """Yield rows ``[start:start + nrows)`` of one bucket, at most `BLOCK_ROWS` at a time."""
        if entries is not None:
            entries = sort_entries(entries, self.shape[1], self.duplicates)
        for at in range(start, start + nrows, BLOCK_ROWS):
            count = min(BLOCK_ROWS, start + nrows - at)
            if entries is None:
                nothing = np.empty(0, self.dtypes[1]), np.empty(0, self.dtypes[2])
                yield CSR(np.zeros(count + 1, np.int64), *nothing, (count, self.shape[1]))
                continue
            first, last = np.searchsorted(entries.rows, np.array([at, at + count], entries.rows.dtype)).tolist()
            piece = entries.take(slice(first, last))
            local = piece.rows - piece.rows.dtype.type(at)
            yield CSR(_offsets(local, count), piece.columns, piece.values, (count, self.shape[1]))


def sort_entries(entries: Entries, ncols: int, duplicates: Duplicates = "sum") -> Entries:
    """Sort entries by row, then column; combine duplicates in the order in which they are given.

    `ncols`: columns of the matrix.
    `duplicates`: of entries in one position, their sum, the largest, the smallest or the first.
    Returns one for each position.

    Examples
    --------
    >>> sort_entries(Entries(np.array([1, 0, 1]), np.array([2, 0, 2]), np.array([3.0, 1.0, 4.0])), 3).values
    array([1., 7.])
    """
    rows, columns, _ = entries
    if len(rows) and int(rows.max()) < (1 << 63) // max(ncols, 1):
        order = _stable_order((rows.astype(np.int64) - int(rows.min())) * ncols + columns)
    else:
        order = np.lexsort((columns, rows))
    entries = entries.take(order)
    new = np.ones(len(order), np.bool_)
    new[1:] = (entries.rows[1:] != entries.rows[:-1]) | (entries.columns[1:] != entries.columns[:-1])
    if new.all():
        return entries
    out = entries.take(new)
    if duplicates != "first":
        again = np.flatnonzero(~new)
        positions = np.cumsum(new)[again] - 1
        # one by one: reduceat would sum long runs pairwise
        _COMBINE[duplicates].at(out.values, positions, entries.values[again])
    return out


def _stable_order(keys: Int64Array) -> IndexArray:
    """Return the indices that sort keys of 0 and more, equal ones in their order; the keys may be overwritten."""
    if len(keys) < COMPILED_KEYS:
        return np.argsort(keys, kind="stable")
    from spdist.kernels.radix_sort import stable_order

    return stable_order(keys)


def canonical(block: CSR, duplicates: Duplicates = "sum") -> CSR:
    """Return a row block with each row sorted and its duplicates combined.

    `duplicates`: of entries in one position, their sum in the order of the row, the largest, the smallest or the first.

    Examples
    --------
    >>> canonical(CSR(np.array([0, 3]), np.array([2, 0, 2]), np.array([1, 2, 3]), (1, 3))).data
    array([2, 4])
    """
    rows = np.repeat(np.arange(block.nrows, dtype=np.int64), np.diff(block.indptr))
    entries = sort_entries(Entries(rows, block.indices, block.data), block.ncols, duplicates)
    return CSR(_offsets(entries.rows, block.nrows), entries.columns, entries.values, block.shape)


def _join(parts: list[Entries]) -> Entries:
    rows, columns, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Entries(rows, columns, values)


def _offsets(rows: IndexArray, nrows: int) -> Int64Array:
    """Return the offsets of rows, given the sorted row of each entry."""
    out = np.zeros(nrows + 1, np.int64)
    np.cumsum(np.bincount(rows.astype(np.int64, copy=False), minlength=nrows), out=out[1:])
    return out
