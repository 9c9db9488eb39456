"""Sizes of a product, streamed: from two stored matrices to a `Plan` in bounded memory.

Three passes, none of which holds a matrix: the row lengths of B (4 bytes a row), nnz(C) of a sample of rows, and one
walk over A's columns that counts products and distinct rows of B and cuts a block whenever the bound is reached. Of an
upper triangle the sample says how much of the rows, from the first to the last, lies in it. Where GPUs reduce C, which
does not leave them then, there is no sample, and entries of C bound nothing.

Parts of A of as many entries each are walked over by themselves: by threads, or by other processes (`RemoteReaders`),
since reads take the interpreter. The parts, and with them the plan, are the same.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spdist.engines import GPU_ENGINES
from spdist.errors import InputError, MatrixError, MemoryBoundError, SpdistError
from spdist.kernels.cpu import workspace as cpu_sizes
from spdist.matrices.checks import check_canonical, check_product_shapes
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray, blocksize, index_dtype, number_dtype, result_dtype
from spdist.scheduler.planner import memory
from spdist.scheduler.planner.plan import (
    DEFAULT_HOST_LIMIT,
    GPU_BLOCK_BYTES,
    GPU_BLOCK_PRODUCTS,
    GPU_MOST_PRODUCTS,
    MAX_BLOCK_PRODUCTS,
    RESIDENT_SHARE,
    SMALL_SHARE,
    Block,
    Operand,
    Plan,
    even_bounds,
    gpu_staging,
)
from spdist.storage.chunked_array import CHUNK_LENGTH
from spdist.storage.locations import in_process
from spdist.storage.matrix import READ_CHUNKS, StoredMatrix
from spdist.storage.product_spec import WHOLE, Diagonal, StoredProductSpec
from spdist.units import format_bytes

if TYPE_CHECKING:
    from spdist.scheduler.planner.cut_rows import Costs, Cutter

Lengths = npt.NDArray[Any]

SAMPLE_RUNS, RUN, SAMPLE_ROWS = 256, 8, 64
"""Runs of so many rows looked at, and rows of each power of two of products whose nnz(C) is counted, at the most."""

WHOLE_ENTRIES = 1 << 22
"""Entries up to which a matrix is read at once for its sample, and not run by run: each read takes the interpreter
about a millisecond."""

SAMPLE_PRODUCTS = 1 << 21
"""Products of the sample in all, at the most."""

SAMPLE_PARTS = 16
"""Parts of the sample that are counted by themselves: in the caches, and side by side."""

READERS = 8
"""Threads that read the sample, at the most."""

WALKS, WALK_ENTRIES = 32, 1 << 22
"""Parts of A that are walked over by themselves, at the most, and entries of each at the least: blocks end where parts
do, on every machine alike. As many threads as there are cores walk, or as helpers have, and each takes 4 bytes for a
row of B."""

WALK_PIECE = 1 << 22
"""Entries of A that are read at once, two Zarr chunks at the least; each walk holds two such pieces."""

WALK_BYTES = 2 << 30
"""Of all these in one process, but for one thread."""

MAX_PAIRS = 2
"""Block pairs in flight on a worker: one is multiplied while the other waits for its place in C or is written."""

READ_COPIES = 3
"""Times a Zarr chunk is in memory while it is read: encoded, decoded, and where its entries go."""

MOST_PAIRS = 8
"""Block pairs in flight at the most, where they are small."""

KEPT_SHARE, KEPT_MOST = 12, 16 << 20
"""What a worker's allocator keeps for reuse beside what is in use: this part of the limit, and no more than that."""

GPU_CHUNK_LENGTH, MANY_CHUNKS = 1 << 19, 64
"""Elements of C's Zarr chunks where GPUs multiply and C has so many of them: the interpreter takes some 50 us for each
chunk, which was most of a run. Whoever reads that C block by block holds some MiB more."""

B_ROW_BYTES, START_BYTES = 24, 8
"""Bytes that a row of B takes beside its entries; and once more where kernels enter it at the diagonal."""

C_ROW_BYTES = 8
"""Bytes that a row of C takes beside its entries."""

BANDS, BAND_OVER, MOST_JOINED = 4, 0.5, 3
"""For a GPU's B not to be read whole: blocks at the least, bytes of B that they read again as a share of B, and blocks
that are joined for that at the most."""

GLANCES = 8
"""Zarr chunks of A that are looked at before there is a plan."""

REMAP_BYTES = 12
"""Bytes an entry of A takes beside itself while its column is renumbered for the block's rows of B."""

NUMBERS = 8
"""Of a block, as `cut_rows.cut` returns them."""

SMALL_NNZ, SMALL_PRODUCTS = 1 << 17, 1 << 22
"""Entries of A and products up to which a product is one block if it fits: a few milliseconds of work."""

PLACES = 16
"""Ranges of rows of an upper triangle that are estimated apart: rows grow shorter from the first to the last."""

MARGIN = 1.08
"""Factor on the estimated nnz(C) of a block, so that few blocks turn out longer than planned."""

TAPER = 32
"""Parts of the products that are left, one of which a joined block may have: some for each of many GPUs."""


def row_lengths(matrix: StoredMatrix) -> Lengths:
    """Return the entries of each row, 4 bytes a row (8 where a row is longer than 2^32), streamed."""
    lengths = np.empty(matrix.nrows, np.uint32)
    for start, offsets in _offsets(matrix):
        found = np.diff(offsets)
        if found.max() > np.iinfo(lengths.dtype).max:
            lengths = lengths.astype(np.int64)
        lengths[start : start + len(found)] = found
    return lengths


def even_rows(matrix: StoredMatrix, parts: int, lengths: Lengths | None = None) -> list[int]:
    """Return rows that cut a matrix into parts of about as many entries, from 0 to its number of rows; streamed.

    Fewer parts than asked for where rows are longer than a part. Without the row lengths, offsets are read.
    """
    first, wanted = np.zeros(parts, np.int64), np.arange(parts) * matrix.nnz // parts
    for start, offsets in _offsets(matrix) if lengths is None else _summed(lengths):
        inside = (offsets[0] < wanted) & (wanted <= offsets[-1])
        first[inside] = start + np.searchsorted(offsets, wanted[inside])
    return [int(row) for row in np.unique(np.append(first, matrix.nrows))]


def _summed(lengths: Lengths) -> Iterator[tuple[int, Int64Array]]:
    """Yield what `_offsets` does, from row lengths."""
    end = 0
    for start in range(0, len(lengths), CHUNK_LENGTH):
        offsets = np.cumsum(np.append(end, lengths[start : start + CHUNK_LENGTH]), dtype=np.int64)
        end = int(offsets[-1])
        yield start, offsets


def _offsets(matrix: StoredMatrix) -> Iterator[tuple[int, Int64Array]]:
    """Yield all offsets by ranges of rows, with the first row; refuses them if they do not rise to the entries."""
    step, end = 4 * matrix.indptr.chunk, 0
    for start in range(0, matrix.nrows, step):
        offsets = matrix.read_indptr(start, min(start + step, matrix.nrows))
        if offsets[0] != end or np.any(offsets[1:] < offsets[:-1]):
            raise _bad_offsets(matrix)
        end = int(offsets[-1])
        yield start, offsets
    if end != matrix.nnz:
        raise _bad_offsets(matrix)


def _check_ends(matrix: StoredMatrix) -> None:
    """Refuse offsets that leave entries out, first or last: of A no more than its rows is looked at."""
    ends = [int(matrix.read_indptr(row, row)[0]) for row in (0, matrix.nrows)]
    if ends != [0, matrix.nnz]:
        raise _bad_offsets(matrix)


def _bad_offsets(matrix: StoredMatrix) -> MatrixError:
    return MatrixError(
        f"{matrix.url}: indptr does not rise from 0 to the {matrix.nnz:,} entries there are: restore it from a copy or "
        f"write the matrix again"
    )


# -- side by side ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteReaders:
    """Processes beside this one that see the matrices, and read parts of them for a plan.

    Attributes
    ----------
    executor : Executor
        Runs functions there: of Dask ``client.get_executor(pure=False)``.
    processes : int
        How many there are: each is given one task, so that what all of its parts need is read once.
    threads : int
        That read and walk in each, at the most.
    """

    executor: Executor
    processes: int
    threads: int

    def map(self, function: Callable[[Sequence[Any], int], list[Any]], items: Sequence[Any]) -> list[Any]:
        """Return what a function makes of items; each process is given every n-th of them, and how many threads."""
        count = min(self.processes, len(items))
        found: list[Any] = [None] * len(items)
        tasks = [self.executor.submit(function, items[i::count], self.threads) for i in range(count)]
        try:
            for i, task in enumerate(tasks):
                found[i::count] = task.result()
        finally:
            for task in tasks:
                task.cancel()
        return found


def plan_parts(function: Callable[[Any], Any], items: Sequence[Any], threads: int) -> list[Any]:
    """Return what a function makes of each item, or what is wrong with it; None after the first that is not sound."""
    wrong: list[int] = []

    def attempt(i: int, item: Any) -> Any:
        if any(before < i for before in wrong):
            return None
        try:
            return function(item)
        except SpdistError as error:
            wrong.append(i)
            return error

    with ThreadPoolExecutor(max(1, min(len(items), threads))) as pool:
        return list(pool.map(attempt, range(len(items)), items))


def _sound(found: Iterable[Any]) -> Iterator[Any]:
    """Yield what `plan_parts` found; raises what is wrong when it comes to it."""
    for part in found:
        if isinstance(part, SpdistError):
            raise part
        yield part


# -- nnz(C) by sampling ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """nnz(C) of a row from its products: a ratio for each power of two of the number of products, sampled.

    Attributes
    ----------
    ratio : (64,) float64
        nnz(C row) / products, for rows of ``2**i`` products.
    share : (2, 1) or (2, PLACES) float64
        Products that are made, and entries, of all there are; for as many ranges of rows of one length.
    """

    ratio: npt.NDArray[np.float64]
    share: npt.NDArray[np.float64]

    def shares(self, nrows: int) -> npt.NDArray[np.float64]:
        """Return the shares of each of all rows, (2, nrows)."""
        return self.share[:, np.arange(nrows) * self.share.shape[1] // max(nrows, 1)]


UNKNOWN = Estimate(np.ones(64), np.ones((2, 1)))
"""That of a C nobody looked at: an entry for each product."""


def sample_rows(
    a: StoredMatrix,
    b: StoredMatrix,
    b_lengths: Lengths,
    triangle: str | None = None,
    helpers: RemoteReaders | None = None,
) -> Estimate:
    """Estimate the compression from the exact nnz(C) of some hundred rows from all over A; deterministic."""
    rows, columns, numbers = _sampled(a, b_lengths, helpers)
    lengths = b_lengths[columns].astype(np.int64)
    products = np.bincount(rows, lengths, minlength=1).astype(np.int64)
    needed, place = np.unique(columns, return_inverse=True)
    found = _patterns(b, needed.astype(np.int64), helpers)
    starts = found.indptr[place]

    def count(low: int, high: int) -> tuple[Int64Array, Int64Array | None]:
        """Count entries of some samples, and of a triangle what is in it."""
        part = slice(*np.searchsorted(rows, (low, high)).tolist())
        of, long = rows[part] - low, lengths[part]
        entries = np.repeat(starts[part] - np.cumsum(long) + long, long) + np.arange(int(long.sum()))
        samples, reached = np.repeat(of, long), found.indices[entries]
        places = np.sort(samples * b.ncols + reached)
        first = np.append(True, places[1:] != places[:-1])[: len(places)]  # several times quicker than np.unique
        of_entry = samples[first]
        nnz = np.bincount(of_entry, minlength=high - low)
        if triangle is None:
            return nnz, None
        both = (samples, reached), (of_entry, places[first] - of_entry * b.ncols)
        return nnz, np.stack([_count_upper(numbers[low + own], reaches, a.nrows) for own, reaches in both])

    bounds = even_bounds(products, min(SAMPLE_PARTS, len(products)))
    with ThreadPoolExecutor(_readers()) as threads:
        nnz, counts = zip(*threads.map(count, bounds[:-1], bounds[1:]), strict=True)
    share = np.ones((2, 1)) if triangle is None else np.stack([_upper_share(*both) for both in sum(counts)])
    bins = np.zeros(len(products), np.int64)
    bins[products > 0] = np.log2(products[products > 0]).astype(np.int64)
    pooled = [np.bincount(bins, counts, 64).astype(np.float64) for counts in (np.concatenate(nnz), products)]
    return Estimate(_fill_gaps(*pooled), share)


def _patterns(b: StoredMatrix, rows: Int64Array, helpers: RemoteReaders | None) -> CSR:
    """Return the columns of some rows, read by several threads, or by helpers where they lie in many Zarr chunks."""
    take = functools.partial(plan_parts, functools.partial(b.take, values=False))
    if helpers is None or b.nnz <= WHOLE_ENTRIES:
        parts = list(_sound(take(np.array_split(rows, _readers()), _readers())))
    else:
        parts = list(_sound(helpers.map(take, np.array_split(rows, helpers.processes * helpers.threads))))
    lengths = np.concatenate([np.diff(part.indptr) for part in parts])
    indices = np.concatenate([part.indices for part in parts])
    return CSR(np.append(0, np.cumsum(lengths)), indices, indices, (len(rows), b.ncols))


def _readers() -> int:
    return min(READERS, os.cpu_count() or 1)


def _count_upper(rows: Int64Array, columns: Lengths, nrows: int) -> Int64Array:
    """Count in each of `PLACES` ranges of rows what there is, and what of it is on and above the diagonal."""
    at = rows * PLACES // max(nrows, 1)
    return np.stack([np.bincount(places, minlength=PLACES) for places in (at, at[columns >= rows])])


def _upper_share(whole: Int64Array, upper: Int64Array) -> npt.NDArray[np.float64]:
    """Return how much is on and above the diagonal in each range of rows, from what was counted in some."""
    known = np.flatnonzero(whole)
    middle = (np.arange(PLACES) + 0.5) / PLACES
    return np.interp(middle, middle[known], upper[known] / whole[known]) if len(known) else 1 - middle


def _sampled(
    a: StoredMatrix, b_lengths: Lengths, helpers: RemoteReaders | None
) -> tuple[Int64Array, Lengths, Int64Array]:
    """Return the entries of the sampled rows, the number of the sample and the column; and each sample's row of A.

    Rows are taken from all over A, and each power of two of the number of products has a budget of its own: a few long
    rows would use up a common one.
    """
    budget = [SAMPLE_PRODUCTS // 16] * 64
    rows, columns, numbers = [np.empty(0, np.int64)], [np.empty(0, index_dtype(a.ncols))], []
    for number, block in _candidates(a, helpers):
        places = np.append(0, np.cumsum(b_lengths[block.indices], dtype=np.int64))
        for row, count in enumerate(np.diff(places[block.indptr]).tolist()):
            bin_ = count.bit_length() - 1
            if 0 < count <= SAMPLE_PRODUCTS and budget[bin_] > 0:
                budget[bin_] -= max(count, SAMPLE_PRODUCTS // 16 // SAMPLE_ROWS)
                found = block.indices[block.indptr[row] : block.indptr[row + 1]]
                rows.append(np.full(len(found), len(rows) - 1))
                columns.append(found.copy())  # not a view: it would keep all that was read with it
                numbers.append(number + row)
    return np.concatenate(rows), np.concatenate(columns), np.array(numbers, np.int64)


def _candidates(a: StoredMatrix, helpers: RemoteReaders | None = None) -> Iterator[tuple[int, CSR]]:
    """Yield runs of 8 rows from all over A, with the number of the first, in an order that is spread evenly."""
    if not a.nrows:
        return
    runs = max(1, min(SAMPLE_RUNS, a.nrows // RUN))
    rows = (np.arange(runs) * a.nrows // runs)[:, None] + np.arange(min(RUN, a.nrows))
    with ThreadPoolExecutor(_readers()) as threads:
        parts = list(threads.map(a.offsets_of, np.array_split(rows.ravel(), _readers())))
        starts, stops = (np.concatenate(ends).reshape(rows.shape) for ends in zip(*parts, strict=True))
        whole = a.read_indices(0, a.nnz) if a.nnz <= WHOLE_ENTRIES else None
        order = [(int(rows[run, 0]), np.append(starts[run], stops[run, -1:])) for run in _spread(runs)]
        read = functools.partial(_read_run, a, whole)
        if helpers is not None and whole is None and int((stops - starts).sum()) <= WHOLE_ENTRIES:
            found = helpers.map(functools.partial(plan_parts, read), order)
            yield from zip((start for start, _ in order), _sound(found), strict=True)
            return
        for first in range(0, runs, READERS):  # no more of them at once, however long rows are
            some = order[first : first + READERS]
            yield from zip((start for start, _ in some), threads.map(read, some), strict=True)


def _read_run(a: StoredMatrix, whole: ValueArray | None, run: tuple[int, Int64Array]) -> CSR:
    """Return the pattern of successive rows, from the number of the first and their offsets."""
    start, offsets = run
    columns = whole[offsets[0] : offsets[-1]] if whole is not None else a.read_indices(*offsets[[0, -1]].tolist())
    found = CSR(offsets - offsets[0], columns, columns, (len(offsets) - 1, a.ncols))
    _check_rows(a, found, start, check=not a.ours)
    return found


def _spread(count: int) -> list[int]:
    """Return ``range(count)`` in bit-reversed order: any first part of it is spread evenly."""
    bits = max(count - 1, 0).bit_length()
    order = [int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(1 << bits)]
    return [i for i in order if i < count]


def _fill_gaps(nnz: npt.NDArray[np.float64], products: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    known = np.flatnonzero(products)
    ratio = nnz[known] / products[known]
    if not len(known) or known[0] > 0:  # a row of one product has one entry
        known, ratio = np.append(0, known), np.append(1.0, ratio)
    return np.interp(np.arange(64), known, ratio)


# -- cutting -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cuts:
    """What bounds the rows of C, and what bounding them takes.

    Attributes
    ----------
    mask : (nrows,) integers, or (0,) without a mask
        Entries of the mask's rows.
    inside : bool
        Whether C is confined to the mask; else it is kept out of it.
    top_n : int
        Entries of a row that are kept.
    longest : int
        Bound on the entries of a row before it is cut; 0 where none is.
    upper : bool
        Whether C is an upper triangle.
    """

    mask: Lengths
    inside: bool
    top_n: int
    longest: int
    upper: bool

    @property
    def longest_mask(self) -> int:
        """Entries of the mask's longest row."""
        return int(self.mask.max(initial=0))


def cuts_of(spec: StoredProductSpec, a: StoredMatrix, b: StoredMatrix, b_lengths: Lengths) -> Cuts:
    """Return what an answer leaves of rows, from the row lengths of the matrices."""
    mask = _mask_lengths(spec.mask)
    inside = spec.mask is not None and not spec.complement
    top_n = spec.per_row.top_n or max(b.ncols, 1)
    longest = 0
    if inside:
        longest = int(mask.max(initial=0))
    elif spec.fused:
        a_lengths = b_lengths if a == b else row_lengths(a)
        longest = min(b.ncols, int(a_lengths.max(initial=0)) * int(b_lengths.max(initial=0)))
    return Cuts(mask, inside, top_n, longest, spec.per_row.triangle is not None)


def _mask_lengths(mask: StoredMatrix | Diagonal | None) -> Lengths:
    """Return the entries of each row of a mask; (0,) without one."""
    if mask is None:
        return np.empty(0, np.uint32)
    return mask.lengths() if isinstance(mask, Diagonal) else row_lengths(mask)


class _Reader:
    """Reads the columns of successive rows of a matrix, each Zarr chunk once, into two buffers by turns."""

    def __init__(self, a: StoredMatrix) -> None:
        self.a = a
        empty: ValueArray = np.empty(0, a.indices.dtype)
        self.buffers, self.rest, self.end = [empty, empty], empty, 0

    def read(self, offsets: Int64Array) -> ValueArray:
        """Return the columns of the rows after those of the last call: good until the next but one."""
        a, first, last = self.a, int(offsets[0]), int(offsets[-1])
        if a.indices.dtype != index_dtype(a.ncols) or not 0 <= first <= last <= a.nnz:
            return a.read_indices(first, last)  # converts, or says what is wrong
        rest = self.rest if first + len(self.rest) == self.end else self.rest[:0]
        begin = first + len(rest)
        end = max(begin, min(-(-last // a.indices.chunk) * a.indices.chunk, a.nnz))
        out = self._buffer(end - first)
        out[: len(rest)] = rest  # what the last Zarr chunk had beyond the rows before
        a.indices.read_into(out[len(rest) :], begin)
        self.rest, self.end = out[last - first :], end
        return out[: last - first]

    def _buffer(self, size: int) -> ValueArray:
        """Return the other of the two buffers, made larger if it has to be: new memory takes longer than to decode."""
        if len(self.buffers[0]) < size:
            self.buffers[0] = np.empty(size, self.a.indices.dtype)
        self.buffers.reverse()
        return self.buffers[1][:size]


def _columns(a: StoredMatrix, first: int, last: int) -> Iterator[tuple[int, int, Int64Array, ValueArray]]:
    """Yield ranges of rows of [first, last), their offsets and, until the next but one, their columns."""
    reader = _Reader(a)
    with ThreadPoolExecutor(1) as thread:
        before: tuple[tuple[int, int, Int64Array], Future[ValueArray]] | None = None
        for rows in a.row_blocks(max(WALK_PIECE, 2 * a.indices.chunk), first, last):
            coming = thread.submit(reader.read, rows[2])
            if before is not None:
                yield *before[0], before[1].result()
            before = rows, coming
        if before is not None:
            yield *before[0], before[1].result()


@dataclass(frozen=True)
class _Walk:
    """What is walked over, and what is counted: a few kilobytes, which travel."""

    a: StoredMatrix
    b: StoredMatrix
    mask: StoredMatrix | Diagonal | None
    costs: Costs
    estimate: Estimate
    forced: Int64Array
    check: bool

    def run(self, bounds: Sequence[int], known: tuple[Lengths, Lengths], helpers: RemoteReaders | None) -> Int64Array:
        """Return the blocks of all parts between these rows; of B and the mask the row lengths are `known` here."""
        parts = list(itertools.pairwise(bounds))
        if helpers is None or len(parts) == 1:
            found = walk_parts(self, parts, os.cpu_count() or 1, known)
        else:
            found = helpers.map(functools.partial(walk_parts, self), parts)
        return np.concatenate([np.empty((0, NUMBERS), np.int64), *_sound(found)])


def walk_parts(
    walk: _Walk, parts: Sequence[tuple[int, int]], threads: int, known: tuple[Lengths, Lengths] | None = None
) -> list[Any]:
    """Walk over ranges of rows, several at once; return the blocks of each, or what is wrong with it.

    Row lengths that are not known are read, and let go of in the end.
    """
    from spdist.scheduler.planner.cut_rows import Cutter

    lengths, masked = known or (row_lengths(walk.b), _mask_lengths(walk.mask))

    def blocks(part: tuple[int, int]) -> Int64Array:
        estimate = walk.estimate.ratio, walk.estimate.share
        fixed = walk.costs, *estimate, lengths, walk.b.indices.nchunks, walk.forced, masked
        return _walk_rows(walk.a, Cutter(*fixed, part[0]), *part, check=walk.check)

    return plan_parts(blocks, parts, min(threads, WALK_BYTES // (4 * max(walk.a.ncols, 1))))


def _walk_rows(a: StoredMatrix, cutter: Cutter, low: int, high: int, *, check: bool) -> Int64Array:
    closed = []
    for start, stop, offsets, indices in _columns(a, low, high):
        rows = CSR(offsets - int(offsets[0]), indices, indices, (stop - start, a.ncols))
        _check_rows(a, rows, start, check=check)
        closed.append(cutter.feed(offsets, indices))
    closed.append(cutter.close())
    return np.concatenate(closed)


def _check_rows(a: StoredMatrix, rows: CSR, start: int, *, check: bool) -> None:
    """Refuse rows, the first of them `start`, that would be read wrongly; if asked to, those not canonical too."""
    falls = len(rows.indices) != rows.indptr[-1] or np.any(rows.indptr[1:] < rows.indptr[:-1])
    if check or falls or (rows.nnz and (rows.indices.min() < 0 or rows.indices.max() >= a.ncols)):
        check_canonical(rows, a.url, start)


# -- the plan ----------------------------------------------------------------------------------------------------------


def operand(matrix: StoredMatrix) -> Operand:
    """Return what a plan needs to know of `matrix`."""
    longest = matrix.indices.chunk_nbytes + matrix.data.chunk_nbytes
    return Operand(matrix.shape, matrix.nnz, matrix.dtype.itemsize, longest, matrix.blocksize or (1, 1))


def make_plan(
    a: StoredMatrix,
    b: StoredMatrix,
    *,
    engine: str,
    memory_limit: int,
    host_limit: int | None = None,
    grid: tuple[int, int, int] | None = None,
    spec: StoredProductSpec = WHOLE,
    stored: bool = True,
    helpers: RemoteReaders | None = None,
) -> Plan:
    """Cut A @ B so that every worker stays within `memory_limit` bytes.

    Parameters
    ----------
    a, b : StoredMatrix
    engine : str
        What multiplies a block.
    memory_limit : int
        Bytes a worker may use; of the GPU's memory where one multiplies.
    host_limit : int, optional
        Bytes of the host's memory that a worker with a GPU may use; `DEFAULT_HOST_LIMIT` if not given.
    grid : (int, int, int), optional
        Forces the number of row, inner and column blocks.
    spec : StoredProductSpec
        What becomes of the product: C has no more entries than mask and top-n leave. What a threshold leaves is not
        known.
    stored : bool
        Whether C is written, and not reduced where it is made.
    helpers : Helpers, optional
        Processes that take part of the work where A is large; the plan is the same. They must have started, and nothing
        is asked of them where a matrix is in the memory of this one.

    Raises
    ------
    MemoryBoundError
        If the smallest block does not fit; says how much is needed.
    InputError
        If the shapes do not fit, or the grid has more blocks than there are rows or columns.
    """
    check_operands(a, b, grid)
    on_gpu = engine in GPU_ENGINES
    host = host_limit or DEFAULT_HOST_LIMIT if on_gpu else memory_limit
    if any(in_process(m.url) for m in (a, b, spec.mask) if m is not None):
        helpers = None
    parts = max(1, min(WALKS, a.nnz // WALK_ENTRIES)) if grid is None else 1
    lengths = row_lengths(b)
    _check_ends(a)
    if not b.ours:
        b.check()
    cuts = cuts_of(spec, a, b, lengths)
    dtype = spec.dtype(a, b)
    casts = _casts(a, b, spec, dtype) if engine != "cuda" else (0, 0)
    triangle = spec.per_row.triangle

    def drafted(estimate: Estimate, bounds: list[int], held: bool) -> Plan:
        walks = _Walks(spec.mask, bounds, helpers)
        plan = _Draft(a, b, engine, host, grid, lengths, estimate, dtype, cuts, casts, walks, stored, held).plan()
        return plan.through_gpu(memory_limit) if on_gpu else plan

    with ThreadPoolExecutor(1) as aside:
        coming = aside.submit(even_rows, a, parts, lengths if a == b else None) if parts > 1 else None
        if not stored and engine == "cuda" and triangle is None:
            with contextlib.suppress(MemoryBoundError):  # the plan by a sample fits, or says what does not
                plan = drafted(UNKNOWN, [0, a.nrows] if coming is None else coming.result(), False)
                if not any(block.split for block in plan.blocks):  # partial products are added on the host
                    return plan
        estimate = sample_rows(a, b, lengths, triangle, helpers if parts > 1 else None)
        return drafted(estimate, [0, a.nrows] if coming is None else coming.result(), True)


def stays(
    a: StoredMatrix,
    b: StoredMatrix,
    *,
    engine: str,
    memory_limit: int,
    host_limit: int | None = None,
    grid: tuple[int, int, int] | None = None,
    spec: StoredProductSpec = WHOLE,
) -> bool:
    """Whether B will as good as surely stay with the workers, as `make_plan` with the same arguments is to decide.

    It is small, and where GPUs multiply some Zarr chunks of A each ask for so much of B that bands of it would not pay.
    """
    on_gpu = engine in GPU_ENGINES
    limit = host_limit or DEFAULT_HOST_LIMIT if on_gpu else memory_limit
    cast = _casts(a, b, spec, spec.dtype(a, b))[1] if engine != "cuda" else 0
    whole = grid is None or grid[1] == grid[2] == 1
    if not whole or operand(b).nbytes + b.nnz * cast > SMALL_SHARE * limit:
        return False
    try:
        return not on_gpu or _reach(a, b) > (1 + BAND_OVER * MOST_JOINED) / BANDS
    except SpdistError:
        return False  # as the plan will say


def _reach(a: StoredMatrix, b: StoredMatrix) -> float:
    """Return the share of B's Zarr chunks that one of A's asks for, the mean of some from all over A."""
    rows = max(1, -(-b.nrows // max(b.indices.nchunks, 1)))
    asked = np.zeros((GLANCES, b.nrows // rows + 1), bool)
    for glance, k in enumerate(np.arange(GLANCES) * a.indices.nchunks // GLANCES):
        columns = a.read_indices(int(k) * a.indices.chunk, min(int(k + 1) * a.indices.chunk, a.nnz))
        asked[glance, np.clip(columns // rows, 0, asked.shape[1] - 1)] = True
    return float(asked.sum(axis=1).mean()) / max(b.indices.nchunks, 1)


def _casts(a: StoredMatrix, b: StoredMatrix, spec: StoredProductSpec, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the bytes that an entry of A and of B takes once more, in the dtype of C, while it is multiplied."""
    reads = spec.per_row.semiring.reads
    left, right = (
        0 if number_dtype(m.dtype) == number_dtype(dtype) or name not in reads else dtype.itemsize
        for name, m in (("a", a), ("b", b))
    )
    return left, right


def check_operands(a: StoredMatrix, b: StoredMatrix, grid: tuple[int, int, int] | None) -> None:
    """Refuse operands whose shapes do not fit, or a grid of more blocks than there are rows or columns.

    Raises
    ------
    InputError
    MatrixError
        If one is stored in blocks and the other is not, or in blocks that do not fit.
    """
    if {blocksize(a.dtype), blocksize(b.dtype)} != {None}:
        result_dtype(a.dtype, b.dtype)
    check_product_shapes(a.shape, b.shape)
    if grid is None:
        return
    for count, size, what in zip(grid, (a.nrows, a.ncols, b.ncols), ("row", "inner", "column"), strict=True):
        if count < 1 or count > max(size, 1):
            raise InputError(f"grid {grid}: {count} {what} blocks of {size:,} {what}s; ask for 1 to {max(size, 1):,}")


@dataclass(frozen=True)
class _Walks:
    """What walks over A need beside bounds on blocks: the stored mask, the rows at which parts begin, and helpers."""

    mask: StoredMatrix | Diagonal | None
    bounds: list[int]
    helpers: RemoteReaders | None


@dataclass(frozen=True)
class _Sizes:
    """Cuts of the inner dimension and of B's columns, and bytes of B and C of each block under them."""

    inner: tuple[int, ...]
    columns: tuple[int, ...]
    split: npt.NDArray[np.bool_]
    b_bytes: Int64Array
    c_bytes: Int64Array

    def needed(self, rows: Int64Array) -> Int64Array:
        """Return the bytes of each block: `Block.needed`."""
        return rows[:, 4] + self.b_bytes + self.c_bytes


class _Draft:
    """One attempt after another at a plan that fits: two pairs in flight, then one, then a cut inner dimension."""

    def __init__(
        self,
        a: StoredMatrix,
        b: StoredMatrix,
        engine: str,
        memory_limit: int,
        grid: tuple[int, int, int] | None,
        lengths: Lengths,
        estimate: Estimate,
        dtype: np.dtype[Any],
        cuts: Cuts,
        casts: tuple[int, int],
        walks: _Walks,
        stored: bool,
        held: bool,
    ) -> None:
        self.a, self.b, self.engine, self.memory_limit, self.grid = a, b, engine, memory_limit, grid
        self.lengths, self.estimate, self.dtype, self.cuts, self.casts = lengths, estimate, dtype, cuts, casts
        self.walks, self.stored, self.held = walks, stored, held  # C is written; is on the host at all
        self.oa, self.ob = operand(a), operand(b)
        self.c_entry = index_dtype(b.ncols).itemsize + self.dtype.itemsize
        self.c_held = self.c_entry if held else 0
        usable = memory.pair_budget(memory_limit, 0, 1)
        whole = grid is None or grid[1] == grid[2] == 1
        self.can_be_resident = whole and self._resident_bytes <= RESIDENT_SHARE * usable
        self.block_products = GPU_BLOCK_PRODUCTS if engine in GPU_ENGINES else MAX_BLOCK_PRODUCTS
        self.resident = False
        self.asked = np.empty((0, NUMBERS), np.int64)  # what blocks would read of B, if it did not stay
        self.chunk = self._chunk_length(usable)
        self.checked = a.ours

    def _chunk_length(self, usable: int) -> int:
        """Return the length of C's Zarr chunks: a power of two, shorter where the limit is small."""
        most = max(usable // (16 * MAX_PAIRS) // self.c_entry, 1)
        many = self.engine in GPU_ENGINES and self._expected() >= MANY_CHUNKS * GPU_CHUNK_LENGTH
        longest = GPU_CHUNK_LENGTH if many else CHUNK_LENGTH
        return int(min(longest, max(1 << (most.bit_length() - 1), 1 << 10)))

    def _expected(self) -> float:
        """Return about how many entries C has, before products are counted."""
        products = self.a.nnz * self.b.nnz / max(self.b.nrows, 1)
        of_a_row = products / max(self.a.nrows, 1)
        ratio = self.estimate.ratio[int(math.log2(max(of_a_row, 1)))]
        return float(min(products * ratio, self.a.nrows * min(self.cuts.top_n, self.b.ncols)))

    @property
    def _resident_bytes(self) -> int:
        """Bytes of a B that stays, and of its copy in the dtype of C while that is made."""
        return self.ob.nbytes + self.b.nnz * self.casts[1]

    def reserved(self, pairs: int) -> int:
        """Return the bytes a worker holds throughout: resident B, workspace, read buffers, pieces of Zarr chunks."""
        reading = READ_COPIES * (self.oa.read_bytes + (0 if self.resident else READ_CHUNKS * self.ob.read_bytes))
        pieces = 2 * pairs * self.chunk * self.c_entry
        resident = self._resident_bytes if self.resident else 0
        kept = min(self.memory_limit // KEPT_SHARE, KEPT_MOST)
        kernels = [gpu_staging(self.memory_limit)] if self.engine in GPU_ENGINES else []
        kernels += [self._cpu_workspace()] if self.engine != "cuda" else []
        return kept + resident + max(kernels) + reading + pieces

    def _cpu_workspace(self) -> int:
        """Return the bytes that a kernel of the CPU takes beside its operands and C."""
        if self.a.blocksize is not None:
            blocks = self.memory_limit // min(self.a.entry_nbytes, self.b.entry_nbytes, self.c_entry)
            return cpu_sizes.block_workspace(self.b.ncols, blocks)
        kernel = cpu_sizes.cpu_workspace(
            "scipy" if self.engine == "scipy" else "numba",
            self.b.ncols,
            min(int(self.lengths.sum(dtype=np.int64)), self.b.ncols),
            self.dtype.itemsize,
            index_dtype(self.b.ncols).itemsize,
        )
        if self.cuts.longest:
            top = min(self.cuts.top_n, self.cuts.longest)
            sizes = self.dtype.itemsize, index_dtype(self.b.ncols).itemsize
            kernel += cpu_sizes.fused_workspace(self.cuts.longest, self.cuts.longest_mask, top, *sizes)
        return kernel + (START_BYTES * self.b.nrows if self.cuts.upper and self.resident else 0)

    def plan(self) -> Plan:
        """Return the plan of least predicted time, with B on the worker for good or its rows read block by block."""
        plans: list[Plan] = []
        refusals: list[tuple[int, str]] = []
        for resident in (True, False) if self.can_be_resident else (False,):
            self.resident = resident
            plan, refused = self._attempt()
            if resident and (banded := self._in_bands()) is not None:
                return banded
            if plan is not None:
                plans.append(plan)
            refusals.append(refused)
            if plans and self._resident_bytes <= SMALL_SHARE * self.memory_limit:
                break
        if not plans:
            raise MemoryBoundError(min(refusals)[1].format(needed=self._enough() // 2**20))
        return min(plans, key=lambda plan: plan.seconds(1))

    def _in_bands(self) -> Plan | None:
        """Return a plan of the same blocks that each read their own rows of B, for GPUs and if these are neighbours.

        All of B is not much less to read; but it is read by every worker, while its GPU waits. Neighbours that would
        read much of each other's rows again are joined.
        """
        over = int(self.asked[:, 6].sum()) * self.ob.read_bytes / max(self.ob.nbytes, 1) - 1
        joins = max(1, math.ceil(over / BAND_OVER))
        if self.engine not in GPU_ENGINES or len(self.asked) < BANDS * joins or joins > MOST_JOINED or over <= -1:
            return None
        self.resident = False
        reserved = self.reserved(MAX_PAIRS)
        budget = memory.pair_budget(self.memory_limit, reserved, MAX_PAIRS)
        rows = self._joined(self.asked, budget, joins)
        rows[:, 6] = rows[:, 6] * (1 + over * len(rows) / len(self.asked)) / (1 + over)
        sizes = self._sizes(rows, budget)
        if sizes.split.any() or sizes.needed(rows).max() > budget:
            return None
        return self._widen(self._assemble(rows, MAX_PAIRS, reserved, budget))

    def _enough(self) -> int:
        """Return a limit, in whole MiB, that is enough: the least of a doubling, then of halvings of the last step."""
        low = high = -(-self.memory_limit // 2**20)
        fits = False
        while not fits:
            low, high = high, 2 * high
            fits = self._at(high << 20)
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            low, high = (low, middle) if self._at(middle << 20) else (middle, high)
        return high << 20

    def _at(self, memory_limit: int) -> bool:
        """Whether a plan under another limit fits."""
        known = self.lengths, self.estimate, self.dtype, self.cuts, self.casts, self.walks, self.stored
        draft = _Draft(self.a, self.b, self.engine, memory_limit, self.grid, *known, self.held)
        draft.checked = True
        if draft._attempt()[0] is not None:
            return True
        draft.resident = draft.can_be_resident
        return draft.resident and draft._attempt()[0] is not None

    def _attempt(self) -> tuple[Plan | None, tuple[int, str]]:
        """Return a plan that fits; or None, with the bytes it takes, and the refusal with a place for the limit."""
        for pairs in (MAX_PAIRS, 1):
            reserved = self.reserved(pairs)
            budget = memory.pair_budget(self.memory_limit, reserved, pairs)
            rows = self._cut(max(budget, 1))
            needed = self._sizes(rows, budget).needed(rows)
            if not len(rows) or needed.max() <= budget:
                plan = self._assemble(self._tapered(rows, budget), pairs, reserved, budget)
                return self._fewer_reads(self._widen(plan), rows), (0, "")
            at = int(needed.argmax())  # of all the blocks of a refused plan, this one alone is made
            worst = self._assemble(rows, pairs, reserved, budget, slice(at, at + 1)).blocks[0]
        one = worst.stop == worst.start + 1
        limit = "host_limit" if self.engine in GPU_ENGINES else "memory_limit"
        what = f"row {worst.start:,}" if one else f"the block of rows {worst.start:,} to {worst.stop:,}"
        held = "buffers, workspace and B" if self.resident else "buffers and workspace"
        return None, (
            reserved + worst.needed,
            f"{what} of A expands to {worst.products:,} products and needs {format_bytes(worst.needed)}, but "
            f"{limit}={format_bytes(self.memory_limit)} leaves {format_bytes(max(budget, 0))} for a block after "
            f"{format_bytes(reserved)} for {held}: raise {limit} to at least {{needed}}MiB"
            + (", or ask for a finer grid" if self.grid else ""),
        )

    def _fewer_reads(self, plan: Plan, rows: Int64Array) -> Plan:
        """Put one block pair in flight, twice as large, where most of the time goes into reading B again and again."""
        if self.grid is not None or plan.pairs != MAX_PAIRS or not plan.rereads:
            return plan
        reserved = self.reserved(1)
        budget = memory.pair_budget(self.memory_limit, reserved, 1)
        single = self._assemble(self._joined(rows, budget), 1, reserved, budget)
        return min(plan, single, key=lambda made: made.seconds(1))

    def _tapered(self, rows: Int64Array, budget: int) -> Int64Array:
        """Join blocks that a GPU only reduces, into ever smaller ones, so that all GPUs end at about one time.

        A GPU has nothing to do from the end of a block to the beginning of the next.
        """
        if self.stored or self.engine != "cuda" or not self.resident or self.grid is not None:
            return rows
        left = np.cumsum(rows[::-1, 2])[::-1]
        return self._joined(rows, budget, products=np.clip(left // TAPER, self.block_products, GPU_MOST_PRODUCTS))

    def _joined(
        self, rows: Int64Array, budget: int, most: int | None = None, products: Int64Array | None = None
    ) -> Int64Array:
        """Join neighbouring blocks while they fit a larger budget: no second walk, if a row of B may count twice.

        So many at the `most`, by default any number, and of so many `products` where one of them is the last.
        """
        joined: list[Int64Array] = []
        count = 0
        bounds = np.full(len(rows), self.block_products) if products is None else products
        for row, bound in zip(rows, bounds, strict=True):
            both = joined[-1] + row if joined else row
            start = joined[-1][0] if joined else row[0]
            nbytes = both[4] + both[5] + both[3] * self.c_held + (row[1] - start) * C_ROW_BYTES
            fits = nbytes * MARGIN <= budget and both[2] <= bound
            count += 1
            if joined and fits and (most is None or count <= most):
                chunks = min(both[6], self.b.indices.nchunks)
                joined[-1] = np.array([joined[-1][0], row[1], *both[2:6], chunks, both[7]], np.int64)
            else:
                joined.append(row)
                count = 1
        return np.array(joined, np.int64).reshape(-1, NUMBERS)

    def _widen(self, plan: Plan) -> Plan:
        """Put more block pairs in flight where blocks are small for other reasons than the limit: hides latency."""
        if not plan.blocks:
            return plan
        usable = memory.pair_budget(self.memory_limit, 0, 1)
        worst = max(plan.blocks, key=lambda block: block.needed)
        for pairs in range(plan.pairs + 1, MOST_PAIRS + 1):
            reserved = self.reserved(pairs)
            if reserved + pairs * worst.needed > usable:
                break
            plan = replace(plan, pairs=pairs, reserved_memory=reserved)
        return plan

    def _cut(self, budget: int) -> Int64Array:
        products = self.block_products
        forced = np.empty(0, np.int64)
        if self.grid is not None:
            forced = np.array(even_bounds(self._row_products(), self.grid[0])[1:-1], np.int64)
            if not len(forced):
                forced = np.array([self.a.nrows], np.int64)
        elif (one := self._one_block(budget)) is not None:
            return one
        from spdist.scheduler.planner.cut_rows import Costs  # loads Numba

        if self.resident and self.stored and self.engine in GPU_ENGINES:
            budget = min(budget, GPU_BLOCK_BYTES)
        b_entry = self.ob.entry_bytes + self.casts[1]
        a_entry = self.oa.entry_bytes + self.casts[0] + REMAP_BYTES
        costs = Costs(
            a_entry, b_entry, B_ROW_BYTES + (START_BYTES if self.cuts.upper else 0), self.c_held, C_ROW_BYTES,
            self.a.nrows, self.b.ncols, int(budget / MARGIN), products, index_dtype(self.b.ncols).itemsize,
            self.cuts.inside, self.cuts.top_n, self.resident,
        )  # fmt: skip
        walk = _Walk(self.a, self.b, self.walks.mask, costs, self.estimate, forced, not self.checked)
        rows = walk.run(self.walks.bounds, (self.lengths, self.cuts.mask), self.walks.helpers)
        self.checked = True
        if self.resident:
            self.asked = rows.copy()
            rows[:, 5:7] = 0
        return rows

    def _one_block(self, budget: int) -> Int64Array | None:
        """Return the one block of a small product; None if it is not small. Needs no compiled walk."""
        if self.a.nnz > SMALL_NNZ or not self.a.nrows or not self.resident:
            return None
        a = self.a.rows_indices(0, self.a.nrows)
        check_canonical(a, self.a.url)
        places = np.concatenate([[0], np.cumsum(self.lengths[a.indices], dtype=np.int64)])
        products = np.diff(places[a.indptr])
        ratio = self.estimate.ratio[np.log2(np.maximum(products, 1)).astype(np.int64)]
        whole = np.minimum(np.minimum(np.ceil(products * ratio), products), self.b.ncols).astype(np.int64)
        a_bytes = a.nnz * (self.oa.entry_bytes + self.casts[0] + REMAP_BYTES) + 16 * a.nrows
        if len(mask := self.cuts.mask.astype(np.int64)):
            whole = np.minimum(whole, mask if self.cuts.inside else self.b.ncols - mask)
            a_bytes += int(mask.sum()) * index_dtype(self.b.ncols).itemsize + 8 * a.nrows
        products, whole = np.ceil(self.estimate.shares(self.a.nrows) * (products, whole)).astype(np.int64)
        nnz = int(np.minimum(whole, self.cuts.top_n).sum())
        nbytes = a_bytes + nnz * self.c_held + self.a.nrows * C_ROW_BYTES
        if int(products.sum()) > SMALL_PRODUCTS or nbytes * MARGIN > budget:
            return None
        return np.array([[0, a.nrows, products.sum(), nnz, a_bytes, 0, 0, whole.sum()]], np.int64)

    def _row_products(self) -> Int64Array:
        """Return the products of every row that are made; only a forced grid needs them all at once."""
        out = np.empty(self.a.nrows, np.int64)
        for start, stop, offsets in self.a.row_blocks(8 * self.a.indices.chunk):
            indices = self.a.read_indices(int(offsets[0]), int(offsets[-1]))
            rows = CSR(offsets - int(offsets[0]), indices, indices, (stop - start, self.a.ncols))
            _check_rows(self.a, rows, start, check=False)
            total = np.concatenate([[0], np.cumsum(self.lengths[indices], dtype=np.int64)])
            out[start:stop] = np.diff(total[offsets - offsets[0]])
        made: Int64Array = np.ceil(out * self.estimate.shares(self.a.nrows)[0]).astype(np.int64)
        return made

    def _sizes(self, rows: Int64Array, budget: int) -> _Sizes:
        """Return what each block takes under the cuts that the worst of them needs."""
        inner, columns = self._bounds(rows, budget)
        pieces = (len(inner) - 1) * (len(columns) - 1)
        a_bytes, b_bytes = rows[:, 4], rows[:, 5]
        c_bytes = self._c_bytes(rows, 3)
        split = (a_bytes + b_bytes + c_bytes > budget) | (self.grid is not None)
        split &= pieces > 1
        # One slice of B at a time, but the sum so far, the partial product and their sum together, none of them cut.
        uncut = 3 * self._c_bytes(rows, 7)
        b_bytes, c_bytes = np.where(split, -(-b_bytes // pieces), b_bytes), np.where(split, uncut, c_bytes)
        return _Sizes(inner, columns, split, b_bytes, c_bytes)

    def _c_bytes(self, rows: Int64Array, nnz: int) -> Int64Array:
        """Return the bytes of each block's C by one of the counts of entries in `rows`."""
        entries: Int64Array = (rows[:, nnz] * self.c_held * MARGIN).astype(np.int64)
        return entries + C_ROW_BYTES * (rows[:, 1] - rows[:, 0])

    def _assemble(
        self,
        rows: Int64Array,
        pairs: int,
        reserved: int,
        budget: int,
        which: slice = slice(None),
    ) -> Plan:
        """Return the plan of blocks of these rows, or of some of them."""
        sizes = self._sizes(rows, budget)
        blocks = []
        chosen = zip(*(x[which].tolist() for x in (rows, sizes.split, sizes.b_bytes, sizes.c_bytes)), strict=True)
        for (start, stop, products, nnz, a_bytes, _, b_chunks, uncut), split, b_bytes, nnz_bytes in chosen:
            room = (budget - a_bytes - b_bytes) // (3 if split else 1) - C_ROW_BYTES * (stop - start)
            capacity = max(room // self.c_entry, int((uncut if split else nnz) * MARGIN))
            most = (stop - start) * self.b.ncols  # of a triangle products are not counted, but estimated
            capacity = max(1, min(capacity, most if self.cuts.upper else min(products, most)))
            read = b_chunks * self.ob.read_bytes
            blocks.append(Block(start, stop, split, products, nnz, capacity, a_bytes, b_bytes, nnz_bytes, read))
        c_nnz = sum(block.nnz for block in blocks)
        c = Operand(
            (self.a.nrows, self.b.ncols),
            c_nnz,
            self.dtype.itemsize,
            self.chunk * self.c_entry,
            blocksize(self.dtype) or (1, 1),
        )
        expansion = sum(block.products for block in blocks)
        return Plan(
            self.oa, self.ob, c, self.engine, self.memory_limit, reserved, pairs, self.resident, self.chunk,
            sizes.inner, sizes.columns, tuple(blocks), expansion, self.memory_limit, counted=not self.cuts.upper,
        )  # fmt: skip

    def _bounds(self, rows: Int64Array, budget: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the cuts of the inner dimension and of B's columns: forced, or as many as the worst row needs."""
        if self.grid is not None:
            inner = even_bounds(self.lengths + 1, self.grid[1]) if self.grid[1] > 1 else (0, self.a.ncols)
            columns = tuple(i * self.b.ncols // self.grid[2] for i in range(self.grid[2] + 1))
            return inner, columns
        whole = (0, self.a.ncols), (0, self.b.ncols)
        rest = rows[:, 4] + 3 * self._c_bytes(rows, 7)
        over = (rows[:, 4] + rows[:, 5] + self._c_bytes(rows, 3) > budget) & (rest < budget)
        if not over.any():
            return whole
        parts = int(np.max(-(-rows[over, 5] // np.maximum(budget - rest[over], 1)))) + 1
        return even_bounds(self.lengths + 1, min(parts, self.a.ncols)), whole[1]
