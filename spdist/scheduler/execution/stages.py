"""Stages of a block on a worker: preprocess, multiply, merge, commit, join; or reduce. One function each.

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
import numpy.typing as npt

from spdist.errors import SpdistError
from spdist.kernels import reduction_spec
from spdist.kernels.cpu.reduce import reduce_rows
from spdist.kernels.engine import BlockFacts
from spdist.matrices.csr import CSR
from spdist.scheduler.execution.operands.of_block import read_operands
from spdist.scheduler.execution.records import BlockCounts, BlockOperands, BlockTask, ChunkFragment
from spdist.scheduler.execution.worker import PartialResult, WorkerContext, add_partial
from spdist.storage.atomic_replace import full_disk, is_full
from spdist.storage.chunked_array import compresses
from spdist.storage.writer import Layout


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
    return count(make(context, task, operands, piece), task)


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
        return count(compute(context, task, piece + 1), task)
    with context.telemetry.measure("merge", task.start) as add_bytes:
        spec = context.job.product.of_rows(task.start, task.stop, None)
        c = add_partial(result.c, partial.c, spec, is_last=piece == len(context.job.pieces) - 1)
        add_bytes(2 * c.nbytes)
    context.results[task.number] = PartialResult(piece, c)
    return count(c, task)


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


def commit(
    context: WorkerContext, task: BlockTask, rows: int, digest: bytes, target: CommitTarget
) -> list[ChunkFragment]:
    """Write the Zarr chunks that lie inside a block; return its fragments of chunks shared with other blocks.

    `rows, digest`: from the block's `BlockCounts`.
    Returns at most two: the head and the tail of the block. Fragments of chunks that are already written are left out.
    Raises `SpdistError` if the block had to be computed again and came out different.
    """
    layout, offset = target.layout, target.offset
    result = context.results.get(task.number)
    c = recompute(context, task, rows, digest) if result is None else result.c
    with context.telemetry.measure("commit", task.start) as add_bytes:
        first, last = -(-offset // layout.chunk), (offset + c.nnz) // layout.chunk
        first, last = max(first, target.done_chunks), max(last, target.done_chunks)
        if first < last:
            body = slice(first * layout.chunk - offset, last * layout.chunk - offset)
            layout.write_entries(first, c.indices[body], c.data[body])
            add_bytes((body.stop - body.start) * (c.indices.itemsize + c.data.itemsize))
    fragments = [
        ChunkFragment(offset + low, c.indices[low:high].copy(), c.data[low:high].copy())
        for low, high in shared_slices(offset, c.nnz, layout.chunk)
        if (offset + low) // layout.chunk >= target.done_chunks
    ]
    context.results.pop(task.number, None)
    return fragments


def recompute(context: WorkerContext, task: BlockTask, rows: int, digest: bytes) -> CSR:
    """Compute a block whose worker died, and check that it has the pattern it had before.

    `rows`: rows that the block had.
    `digest`: digest of their numbers of entries, from `BlockCounts`.
    Returns of `rows` rows.
    Raises `SpdistError` if the rows have other numbers of entries than before.
    """
    context.telemetry.announce(_computed_again(task))
    c = compute(context, task, context.job.pieces_of(task))
    c = c.rows(0, min(c.nrows, rows))
    if _digest(_row_lengths(c)) != digest:
        raise SpdistError(
            f"rows {task.start:,}-{task.stop:,} gave another pattern when computed again: A or B changed while "
            f"they were multiplied"
        )
    return c


def _computed_again(task: BlockTask) -> str:
    return f"rows {task.start:,} to {task.stop:,} are computed again, because the worker that had them was lost"


def join(context: WorkerContext, layout: Layout, k: int, *fragments: list[ChunkFragment]) -> None:
    """Write Zarr chunk `k` from the fragments of the blocks that share it.

    `k`: number of the Zarr chunk.
    `*fragments`: the results of the commits that share the chunk, in any order; fragments of other chunks are ignored.
    """
    with context.telemetry.measure("join", -1) as add_bytes:
        in_chunk = sorted(
            (fragment for of_block in fragments for fragment in of_block if fragment.offset // layout.chunk == k),
            key=lambda fragment: fragment.offset,
        )
        indices = np.concatenate([fragment.indices for fragment in in_chunk])
        data = np.concatenate([fragment.data for fragment in in_chunk])
        layout.write_entries(k, indices, data)
        add_bytes(indices.nbytes + data.nbytes)


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


def count(c: CSR, task: BlockTask) -> BlockCounts:
    """Return what the driver needs to find a block's position in C.

    `c`: the rows of C that were multiplied.
    `task`: only values of block 0 are compressed on trial.
    Returns row lengths are uint32 if they fit, otherwise int64.
    """
    lengths = _row_lengths(c)
    return BlockCounts(lengths, _digest(lengths), task.number == 0 and compresses(c.data))


def _row_lengths(c: CSR) -> npt.NDArray[Any]:
    """Return the number of entries of each row, as uint32 if they fit, otherwise int64."""
    lengths = np.diff(c.indptr)
    fits = len(lengths) == 0 or lengths.max() <= np.iinfo(np.uint32).max
    return lengths.astype(np.uint32) if fits else lengths


def _digest(lengths: npt.NDArray[Any]) -> bytes:
    """Return a digest of the number of entries of each row."""
    return hashlib.blake2b(lengths.data, digest_size=16).digest()


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
