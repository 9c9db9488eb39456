"""Stages of a block on a worker: preprocess, multiply, merge, spill, commit, join; or reduce. One function each.

To add a stage, write a function that takes a `WorkerContext` and the task's arguments, time it with
`context.telemetry.measure`, enter it in `STAGES`, and submit it by name (`Executor.submit`).

A stage returns a small value (counts, fragments of Zarr chunks). Blocks themselves stay in the worker's context until
they are committed, so that the worker frees their memory as soon as they are written. If a block is missing when it is
to be committed, because its worker died, the commit computes it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spdist.errors import SpdistError
from spdist.kernels import reduction_spec
from spdist.kernels.cpu.reduce import reduce_rows
from spdist.kernels.engine import BlockFacts
from spdist.matrices.csr import CSR
from spdist.scheduler.execution.operands.of_block import read_operands
from spdist.scheduler.execution.records import BlockCounts, BlockOperands, BlockTask, ChunkFragment, Committed
from spdist.scheduler.execution.worker import PartialResult, WorkerContext, add_partial
from spdist.storage.atomic_replace import full_disk, is_full
from spdist.storage.checksums import WrittenChunks
from spdist.storage.chunked_array import compresses
from spdist.storage.spill import forget, is_in_files, to_files
from spdist.storage.writer import Layout

SPILLED_CHUNKS = 8
"""Zarr chunks of a spilled block that are read from its files at a time."""


@dataclass(frozen=True)
class CommitTarget:
    """Where a block goes in C."""

    layout: Layout
    offset: int  # position of the block's first entry in C
    done_chunks: int  # Zarr chunks that are already written, from the first one on


def preprocess(context: WorkerContext, task: BlockTask, piece: int = 0) -> BlockOperands:
    """Read the rows of A, B and the mask that a block, or one piece of it, needs.

    `piece`: which piece of a split block to read.
    Raises `MatrixError` if rows of A or B are not canonical.
    Raises `CorruptError` if a Zarr chunk is missing, truncated or altered.
    """
    with context.telemetry.measure("preprocess", task.start) as add_bytes:
        mask = context.job.product.read_mask(task.start, task.stop)
        return replace(read_operands(context, task, piece, add_bytes), mask=mask)


def multiply(context: WorkerContext, task: BlockTask, operands: BlockOperands, piece: int = 0) -> BlockCounts:
    """Multiply as `make` does, and return the counts of the rows that fitted."""
    return count(context, task, make(context, task, operands, piece))


def make(context: WorkerContext, task: BlockTask, operands: BlockOperands, piece: int = 0) -> CSR:
    """Multiply as many rows as fit the block's capacity; the result stays in the context.

    `context`: gets the rows of C: piece 0 in `results`, a later piece in `partial_results`.
    `operands`: from `preprocess`, for the same piece.
    Returns the rows that fitted.
    """
    job = context.job
    with context.telemetry.measure("multiply", task.start) as add_bytes:
        b = context.resident_b().get() if operands.b is None else operands.b
        spec = job.product.of_rows(task.start, task.stop, operands.mask, partial=job.pieces_of(task) > 1)
        c = context.multiplier.multiply_rows(operands.a, b, task.capacity, task.start, spec, _facts(task, operands))
        add_bytes(c.nbytes)
    if piece:
        context.partial_results[task.number] = PartialResult(piece, c)
    else:
        context.results[task.number] = PartialResult(0, c)
    return c


def _facts(task: BlockTask, operands: BlockOperands) -> BlockFacts:
    return BlockFacts(operands.offset_in_b, 0 if task.split else task.products)


def merge(context: WorkerContext, task: BlockTask, piece: int) -> BlockCounts:
    """Add the partial product of `piece` to the sum of the pieces before it.

    `context`: holds both summands, unless a worker has died; the block is then computed again up to `piece`.
    `task`: A split block.
    `piece`: at least 1.
    Returns of the sum.
    """
    result, partial = context.results.get(task.number), context.partial_results.pop(task.number, None)
    if result is None or partial is None or (result.piece, partial.piece) != (piece - 1, piece):
        context.telemetry.announce(_computed_again(task))  # a worker died in between
        return count(context, task, compute(context, task, piece + 1))
    with context.telemetry.measure("merge", task.start) as add_bytes:
        spec = context.job.product.of_rows(task.start, task.stop, None)
        c = add_partial(result.c, partial.c, spec, is_last=piece == len(context.job.pieces) - 1)
        add_bytes(2 * c.nbytes)
    context.results[task.number] = PartialResult(piece, c)
    return count(context, task, c)


def compute(context: WorkerContext, task: BlockTask, pieces: int) -> CSR:
    """Run the stages up to the commit one after the other; the result stays in the context, too.

    `pieces`: how many pieces to multiply and merge, from the first one on; 1 for a block that is not split.
    Returns the rows of C that fitted the block's capacity.
    """
    for piece in range(pieces):
        make(context, task, preprocess(context, task, piece), piece)
        if piece:
            merge(context, task, piece)
    return context.results[task.number].c


def commit(context: WorkerContext, task: BlockTask, rows: int, digest: bytes, target: CommitTarget) -> Committed:
    """Write the Zarr chunks that lie inside a block; return its fragments of chunks shared with other blocks.

    `rows, digest`: from the block's `BlockCounts`.
    Returns without fragments of chunks that are already written.
    Raises `SpdistError` if the block had to be computed again and came out different.
    """
    layout, offset = target.layout, target.offset
    result = context.results.get(task.number)
    c = recompute(context, task, rows, digest) if result is None else result.c
    length = layout.chunk
    with context.telemetry.measure("commit", task.start) as add_bytes:
        first, last = max(-(-offset // length), target.done_chunks), (offset + c.nnz) // length
        written: list[WrittenChunks] = []
        at_once = SPILLED_CHUNKS if is_in_files(c) else max(last - first, 1)
        for k in range(first, last, at_once):
            body = slice(k * length - offset, min(k + at_once, last) * length - offset)
            written += layout.write_entries(k, c.indices[body], c.data[body])
            add_bytes((body.stop - body.start) * (c.indices.itemsize + c.data.itemsize))
            forget(c)
        rows_of_chunk = context.job.offsets_chunk
        first, last = (k * rows_of_chunk for k in offsets_inside(task.start, c.nrows, rows_of_chunk))
        ends = c.indptr[first - task.start : last - task.start]
        written += layout.write("indptr", first // rows_of_chunk, offset + ends)
        add_bytes(ends.nbytes)
    fragments = [
        ChunkFragment(offset + low, np.array(c.indices[low:high]), np.array(c.data[low:high]))
        for low, high in shared_slices(offset, c.nnz, length)
        if (offset + low) // length >= target.done_chunks
    ]
    context.results.pop(task.number, None)
    return Committed(fragments, written)


def spill(context: WorkerContext, task: BlockTask, url: str, reserve: float) -> bool:
    """Move a block that waits for its place in C from memory to files beside C.

    `reserve`: bytes that must stay free there.
    Returns whether it takes no memory any more.
    """
    result = context.results.get(task.number)
    if result is None:
        return True  # its worker died: the commit computes it again
    with context.telemetry.measure("spill", task.start) as add_bytes:
        spilled = to_files(result.c, url, reserve)
        if spilled is None:
            return False
        add_bytes(spilled.nbytes)
    context.results[task.number] = PartialResult(result.piece, spilled)
    return True


def recompute(context: WorkerContext, task: BlockTask, rows: int, digest: bytes) -> CSR:
    """Compute a block whose worker died, and check that it has the pattern it had before.

    `rows`: rows that the block had.
    `digest`: of where they end, from `BlockCounts`.
    Returns of `rows` rows.
    Raises `SpdistError` if the rows have other numbers of entries than before.
    """
    context.telemetry.announce(_computed_again(task))
    c = compute(context, task, context.job.pieces_of(task))
    c = c.rows(0, min(c.nrows, rows))
    if _digest(c) != digest:
        raise SpdistError(
            f"rows {task.start:,}-{task.stop:,} gave another pattern when computed again: A or B changed while "
            f"they were multiplied"
        )
    return c


def _computed_again(task: BlockTask) -> str:
    return f"rows {task.start:,} to {task.stop:,} are computed again, because the worker that had them was lost"


def join(context: WorkerContext, layout: Layout, k: int, *commits: Committed) -> list[WrittenChunks]:
    """Write Zarr chunk `k` from the fragments of the blocks that share it.

    `k`: number of the Zarr chunk.
    `*commits`: of the blocks that share the chunk, in any order; fragments of other chunks are ignored.
    Returns the chunk, and those that the commits wrote: their results stay with the workers, because of the fragments.
    """
    with context.telemetry.measure("join", -1) as add_bytes:
        in_chunk = sorted(
            (one for commit in commits for one in commit.fragments if one.offset // layout.chunk == k),
            key=lambda fragment: fragment.offset,
        )
        indices = np.concatenate([fragment.indices for fragment in in_chunk])
        data = np.concatenate([fragment.data for fragment in in_chunk])
        written = layout.write_entries(k, indices, data)
        add_bytes(indices.nbytes + data.nbytes)
    return [*written, *(one for commit in commits for one in commit.written)]


def reduce(context: WorkerContext, task: BlockTask, what: reduction_spec.Reduction) -> reduction_spec.PartialReduction:
    """Compute a block, as many rows at a time as fit its capacity, and return its reduction.

    Parameters
    ----------
    context : WorkerContext
    task : BlockTask
    what : Reduction

    Returns
    -------
    PartialReduction
        Of the rows of the block. On the CPU its parts are combined in the order of rows.
    """
    if context.on_gpu and not task.split:
        operands = preprocess(context, task)
        b = context.resident_b().get() if operands.b is None else operands.b
        with context.telemetry.measure("reduce", task.start):
            spec = context.job.product.of_rows(task.start, task.stop, operands.mask)
            return context.multiplier.reduce(operands.a, b, what, task.start, spec, _facts(task, operands))
    parts: list[reduction_spec.PartialReduction] = []
    while task.start < task.stop or not parts:
        c = compute(context, task, context.job.pieces_of(task))
        del context.results[task.number]
        with context.telemetry.measure("reduce", task.start) as add_bytes:
            parts.append(reduce_rows(what, c, task.start))
            add_bytes(c.nbytes)
        task = replace(task, start=task.start + c.nrows)
    return reduction_spec.combine(what, parts)


STAGES: dict[str, Callable[..., Any]] = {
    "preprocess": preprocess,
    "multiply": multiply,
    "merge": merge,
    "spill": spill,
    "commit": commit,
    "join": join,
    "reduce": reduce,
}
"""Stages by name, as tasks call them."""


def stage_failure(what: str, error: BaseException) -> Exception:
    """Return the exception to raise if a stage failed.

    `what`: names the stage.
    `error`: what the stage raised.
    """
    if isinstance(error, SpdistError):
        return error
    if is_full(error):
        return full_disk("C", error)
    return SpdistError(f"stage {what} failed: {type(error).__name__}: {error}; continue with --resume")


def count(context: WorkerContext, task: BlockTask, c: CSR) -> BlockCounts:
    """Return what the driver needs to find a block's position in C.

    `task`: only values of block 0 are compressed on trial.
    `c`: the rows of C that were multiplied.
    """
    chunk, compressed = context.job.offsets_chunk, task.number == 0 and compresses(c.data)
    first, last = offsets_inside(task.start, c.nrows, chunk)
    head, tail = (first * chunk, last * chunk) if first < last else (task.start + c.nrows + 1,) * 2
    parts = c.indptr[1 : head - task.start].copy(), c.indptr[tail - task.start :].copy()
    return BlockCounts(c.nrows, c.nnz, *parts, _digest(c), compressed)


def _digest(c: CSR) -> bytes:
    """Return a digest of where rows end."""
    return hashlib.blake2b(c.indptr.data, digest_size=16).digest()


def offsets_inside(start: int, rows: int, chunk: int) -> tuple[int, int]:
    """Return which Zarr chunks of C's row offsets lie inside a block: the first one, and the one after the last.

    `start, rows`: of the block, which has the offsets from row `start` + 1 on.
    `chunk`: offsets of a Zarr chunk.

    Examples
    --------
    >>> offsets_inside(0, 29, 10), offsets_inside(29, 11, 10), offsets_inside(5, 3, 10)
    ((1, 3), (3, 4), (1, 1))
    """
    first = -(-(start + 1) // chunk)
    return first, max(first, (start + rows + 1) // chunk)


def shared_slices(offset: int, nnz: int, chunk: int) -> list[tuple[int, int]]:
    """Return the head and the tail of a block, which do not fill a Zarr chunk.

    `offset`: position of the block's first entry in C.
    `nnz`: entries of the block.
    `chunk`: entries of a Zarr chunk.
    Returns ranges of entries, counted from the block's first; at most two.

    Examples
    --------
    >>> shared_slices(90, 130, 100)
    [(0, 10), (110, 130)]
    >>> shared_slices(110, 20, 100)
    [(0, 20)]
    """
    head = min(-offset % chunk, nnz)
    tail = (offset + nnz) % chunk
    if head == nnz:
        return [(0, nnz)] if nnz else []
    return [(0, head)] * (head > 0) + [(nnz - tail, nnz)] * (tail > 0)
