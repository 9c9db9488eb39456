"""nnz(C) estimated from some hundred rows from all over A, whose entries of C are counted exactly.

Of an upper triangle the sample also says which share of the rows, from the first to the last, lies in it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.foundation.cpus import count_cpus
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray, index_dtype
from spdist.scheduler.planner.estimate import Estimate
from spdist.scheduler.planner.plan import even_bounds
from spdist.scheduler.planner.remote_readers import RemoteReaders, raise_first_error, results_or_errors
from spdist.scheduler.planner.stored_rows import Lengths, check_rows
from spdist.scheduler.planner.tuning import SampleTuning
from spdist.storage.matrix import StoredMatrix

COUNTED_AT_ONCE = 1 << 16
"""Entries of the row of A, and of the rows of B, whose columns `count_row` reads at once."""


class SampledRows(NamedTuple):
    """Rows of A, entry by entry."""

    sample: Int64Array  # (entries,) int64: number of the sampled row, counted from 0
    columns: Lengths  # (entries,) integers: column of the entry: a row of B
    rows: Int64Array  # (samples,) int64: row of A of each sample
    row_products: float  # mean products of all rows from which the samples were chosen
    entry_products: float  # mean products of an entry of these rows
    by_size: npt.NDArray[np.float64]  # (64,) float64: products of all these rows that have ``2**i`` to ``2**(i + 1)``


class ExpandedRows(NamedTuple):
    """Sampled rows, and the pattern of the rows of B that they need."""

    sampled: SampledRows
    lengths: Int64Array  # (entries,) int64: products of each entry
    starts: Int64Array  # (entries,) int64: where each entry's row of B begins in `b_columns`
    b_columns: ValueArray  # columns of the rows of B
    shape: tuple[int, int]  # shape of C


def sample_rows(
    a: StoredMatrix,
    b: StoredMatrix,
    b_lengths: Lengths,
    *,
    triangle: bool = False,
    readers: RemoteReaders | None = None,
    tuning: SampleTuning | None = None,
) -> Estimate:
    """Estimate how much products are compressed, from the exact nnz(C) of a sample of rows.

    `b_lengths`: (nrows of B,) integers.
    `triangle`: whether C is an upper triangle, whose share of products and entries is estimated too.
    `readers`: processes that read rows of large matrices. The estimate is the same with and without them.
    Returns the same on every machine.
    Raises `MatrixError` if a row of the sample has a column that is out of range.
    """
    tuning = tuning or SampleTuning()
    sampled = _sampled_rows(a, b_lengths, readers, tuning)
    lengths = b_lengths[sampled.columns].astype(np.int64)
    products = np.bincount(sampled.sample, lengths, minlength=1).astype(np.int64)
    needed, place = np.unique(sampled.columns, return_inverse=True)
    pattern = _patterns(b, needed.astype(np.int64), readers, tuning)
    expanded = ExpandedRows(sampled, lengths, pattern.indptr[place], pattern.indices, (a.nrows, b.ncols))
    ranges = tuning.row_ranges if triangle else 0
    bounds = even_bounds(products, min(tuning.parts, len(products)))
    with ThreadPoolExecutor(_threads(tuning)) as threads:
        count = functools.partial(_count_samples, expanded, ranges)
        nnz, in_triangle = zip(*threads.map(count, bounds[:-1], bounds[1:]), strict=True)
    share = np.stack([_upper_share(*both) for both in sum(in_triangle)]) if triangle else np.ones((2, 1))
    ratio = _pooled_ratio(np.concatenate(nnz), products)
    kept = float(ratio @ sampled.by_size / max(sampled.by_size.sum(), 1.0)) if len(products) else 1.0
    return Estimate(ratio, share, sampled.row_products, sampled.entry_products, kept)


def _count_samples(expanded: ExpandedRows, ranges: int, low: int, high: int) -> tuple[Int64Array, Int64Array]:
    """Count the entries of C of samples ``[low:high)``; with row ranges, products and entries in the triangle too.

    Returns `nnz`: (high - low,) int64.
    Returns `in_triangle`: (2, 2, ranges) int64: of products and of entries, in each range of rows: all, and those on
    and above the diagonal.
    """
    sample, rows, (nrows, ncols) = expanded.sampled.sample, expanded.sampled.rows, expanded.shape
    part = slice(*np.searchsorted(sample, (low, high)).tolist())
    own, lengths = sample[part] - low, expanded.lengths[part]
    entries = np.repeat(expanded.starts[part] - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))
    samples, columns = np.repeat(own, lengths), expanded.b_columns[entries]
    places = np.sort(samples * ncols + columns)
    first = np.append(True, places[1:] != places[:-1])[: len(places)]  # several times quicker than np.unique
    entry_samples = samples[first]
    nnz = np.bincount(entry_samples, minlength=high - low)
    if not ranges:
        return nnz, np.empty((2, 2, 0), np.int64)
    both = (samples, columns), (entry_samples, places[first] - entry_samples * ncols)
    return nnz, np.stack([_count_upper(rows[low + one], found, nrows, ranges) for one, found in both])


def _pooled_ratio(nnz: Int64Array, products: Int64Array) -> npt.NDArray[np.float64]:
    """Return nnz(C) / products for each power of two of products, from the samples of that size."""
    bins = np.zeros(len(products), np.int64)
    bins[products > 0] = np.log2(products[products > 0]).astype(np.int64)
    return _fill_gaps(*(np.bincount(bins, counts, 64).astype(np.float64) for counts in (nnz, products)))


def _fill_gaps(nnz: npt.NDArray[np.float64], products: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the ratio for each power of two, interpolated between those that were sampled."""
    known = np.flatnonzero(products)
    ratio = nnz[known] / products[known]
    if not len(known) or known[0] > 0:  # a row of one product has one entry
        known, ratio = np.append(0, known), np.append(1.0, ratio)
    return np.interp(np.arange(64), known, ratio)


def _patterns(b: StoredMatrix, rows: Int64Array, readers: RemoteReaders | None, tuning: SampleTuning) -> CSR:
    """Return the columns of some rows of B, read by threads, or by remote readers if B is large."""
    take = functools.partial(results_or_errors, functools.partial(b.take, values=False))
    if readers is None or b.nnz <= tuning.read_whole_entries:
        found = take(np.array_split(rows, _threads(tuning)), _threads(tuning))
    else:
        found = readers.map(take, np.array_split(rows, readers.processes * readers.threads))
    parts = list(raise_first_error(found))
    lengths = np.concatenate([np.diff(part.indptr) for part in parts])
    indices = np.concatenate([part.indices for part in parts])
    return CSR(np.append(0, np.cumsum(lengths)), indices, indices, (len(rows), b.ncols))


def _threads(tuning: SampleTuning) -> int:
    return min(tuning.threads, count_cpus())


def _count_upper(rows: Int64Array, columns: Lengths, nrows: int, ranges: int) -> Int64Array:
    """Count places in each range of rows: all of them, and those on and above the diagonal; (2, ranges)."""
    at = rows * ranges // max(nrows, 1)
    return np.stack([np.bincount(places, minlength=ranges) for places in (at, at[columns >= rows])])


def _upper_share(whole: Int64Array, upper: Int64Array) -> npt.NDArray[np.float64]:
    """Return the share on and above the diagonal in each range of rows, interpolated where nothing was sampled."""
    known = np.flatnonzero(whole)
    middle = (np.arange(len(whole)) + 0.5) / len(whole)
    return np.interp(middle, middle[known], upper[known] / whole[known]) if len(known) else 1 - middle


def _sampled_rows(
    a: StoredMatrix, b_lengths: Lengths, readers: RemoteReaders | None, tuning: SampleTuning
) -> SampledRows:
    """Choose rows from all over A.

    Each power of two of the number of products has a budget of its own: a few long rows would use up a common one.
    """
    budget = [tuning.products // 16] * 64
    sample, columns = [np.empty(0, np.int64)], [np.empty(0, index_dtype(a.ncols))]
    rows: list[int] = []
    by_size = np.zeros(64)
    seen = entries = total = 0
    for start, block in candidate_runs(a, readers, tuning):
        places = np.append(0, np.cumsum(b_lengths[block.indices], dtype=np.int64))
        seen, entries, total = seen + block.nrows, entries + block.nnz, total + int(places[-1])
        products = np.diff(places[block.indptr])
        by_size += np.bincount(np.log2(np.maximum(products, 1)).astype(np.int64), products, 64)
        for row, count in enumerate(products.tolist()):
            bin_ = count.bit_length() - 1
            if 0 < count <= tuning.products and budget[bin_] > 0:
                budget[bin_] -= max(count, tuning.products // 16 // tuning.rows_per_bin)
                found = block.indices[block.indptr[row] : block.indptr[row + 1]]
                sample.append(np.full(len(found), len(rows)))
                columns.append(found.copy())  # a view would keep all that was read with it in memory
                rows.append(start + row)
    means = total / max(seen, 1), total / max(entries, 1)
    return SampledRows(np.concatenate(sample), np.concatenate(columns), np.array(rows, np.int64), *means, by_size)


def candidate_runs(
    a: StoredMatrix, readers: RemoteReaders | None = None, tuning: SampleTuning | None = None
) -> Iterator[tuple[int, CSR]]:
    """Yield runs of consecutive rows from all over A; any first runs are spread evenly.

    `readers`: processes that read the runs of a large A, if all runs together are small enough to be held.
    Yields `run`: the pattern of the rows: its values are its columns.
    Raises `MatrixError` if offsets or columns of a run are out of range, or its rows are not sorted; the order of rows
    that spdist wrote is not checked.
    """
    tuning = tuning or SampleTuning()
    if not a.nrows:
        return
    runs = max(1, min(tuning.runs, a.nrows // tuning.run_rows))
    rows = (np.arange(runs) * a.nrows // runs)[:, None] + np.arange(min(tuning.run_rows, a.nrows))
    with ThreadPoolExecutor(_threads(tuning)) as threads:
        parts = list(threads.map(a.offsets_of, np.array_split(rows.ravel(), _threads(tuning))))
        starts, stops = (np.concatenate(ends).reshape(rows.shape) for ends in zip(*parts, strict=True))
        whole = a.read_indices(0, a.nnz) if a.nnz <= tuning.read_whole_entries else None
        order = [(int(rows[run, 0]), np.append(starts[run], stops[run, -1:])) for run in spread_evenly(runs)]
        read = functools.partial(_read_run, a, whole)
        if readers is not None and whole is None and int((stops - starts).sum()) <= tuning.read_whole_entries:
            found = readers.map(functools.partial(results_or_errors, read), order)
            yield from zip((start for start, _ in order), raise_first_error(found), strict=True)
            return
        for at in range(0, runs, tuning.threads):  # no more at once: rows may be long
            some = order[at : at + tuning.threads]
            yield from zip((start for start, _ in some), threads.map(read, some), strict=True)


def _read_run(a: StoredMatrix, whole: ValueArray | None, run: tuple[int, Int64Array]) -> CSR:
    """Return the pattern of consecutive rows, from the number of the first and their offsets."""
    start, offsets = run
    columns = whole[offsets[0] : offsets[-1]] if whole is not None else a.read_indices(*offsets[[0, -1]].tolist())
    found = CSR(offsets - offsets[0], columns, columns, (len(offsets) - 1, a.ncols))
    check_rows(a, found, start, canonical=not a.is_known_canonical)
    return found


def spread_evenly(count: int) -> list[int]:
    """Return ``range(count)`` in bit-reversed order: any first part of it is spread evenly.

    Examples
    --------
    >>> spread_evenly(6)
    [0, 4, 2, 1, 5, 3]
    """
    bits = max(count - 1, 0).bit_length()
    order = [int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(1 << bits)]
    return [i for i in order if i < count]


def count_row(a: StoredMatrix, b: StoredMatrix, b_lengths: Lengths, row: int) -> int:
    """Count the entries of one row of the product without a mask, with one byte for each column of B."""
    columns, hit = a.rows_indices(row, row + 1).indices, np.zeros(b.ncols, bool)
    for first in range(0, len(columns), COUNTED_AT_ONCE):
        part = columns[first : first + COUNTED_AT_ONCE].astype(np.int64)
        ends = np.cumsum(b_lengths[part], dtype=np.int64)
        cuts = np.searchsorted(ends, np.arange(COUNTED_AT_ONCE, int(ends[-1]), COUNTED_AT_ONCE))
        for needed in np.split(part, np.unique(cuts)):
            hit[b.take(needed, values=False).indices] = True
    return int(np.count_nonzero(hit))
