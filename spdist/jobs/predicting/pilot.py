"""A pilot of a product: some rows of C, made and thrown away, say how quick this machine makes the others.

What a product costs differs by a factor of twenty between matrices: by how long rows are, how scattered, how much they
share. Rates of other matrices say little about it; some milliseconds of the matrix itself do.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from spdist.kernels.engine import WorkerLimits, find_engine
from spdist.matrices.csr import CSR
from spdist.scheduler.execution.records import JobSpec
from spdist.scheduler.planner.plan import Plan, Rates
from spdist.scheduler.planner.stored_rows import Lengths, row_lengths
from spdist.storage.chunked_array import compresses


@dataclass(frozen=True)
class PilotTuning:
    """How large a pilot is."""

    products: int = 1 << 21  # products that are made, about: some milliseconds, beside which calls count little
    runs: int = 32  # runs of consecutive rows, spread evenly over A
    chunks: int = 1 << 10  # most Zarr chunks of B that are read: a second of decoding
    repeats: int = 2  # times that the product is made, besides a first time that loads the kernels; their mean counts


@dataclass(frozen=True)
class Pilot:
    """What the pilot of a product showed."""

    slowness: float  # CPU seconds, as a multiple of what the products and entries of C take at a core's given rates
    compresses: bool  # whether C's values are stored compressed


def pilot(job: JobSpec, plan: Plan, core: Rates, tuning: PilotTuning | None = None) -> Pilot | None:
    """Make some rows of C with one thread, in this process.

    `job`: of cores; their kernels are compiled.
    `core`: with which the pilot is compared.
    Returns none if the product is empty, or so scattered and large that the rows of B would take long to read.
    """
    tuning = tuning or PilotTuning()
    if not plan.expansion:
        return None
    lengths = row_lengths(job.b)
    a, mask = _sampled_rows(job, plan, lengths, tuning)
    needed, place = np.unique(a.indices, return_inverse=True)
    offsets = np.append(0, np.cumsum(lengths, dtype=np.int64))
    if len(np.unique(offsets[needed] // job.b.indices.chunk)) > tuning.chunks:
        return None
    products = int(lengths[a.indices].sum(dtype=np.int64))
    if not products:
        return None
    b = job.b.take(needed.astype(np.int64))
    a = CSR(a.indptr, place.astype(a.indices.dtype), a.data, (a.nrows, len(needed)))
    # The upper triangle of rows from all over A is another one: whole rows are made, and products counted alike.
    product = replace(job.product, per_row=replace(job.product.per_row, triangle=None))
    limits = WorkerLimits()
    engine = find_engine(job.engine).settled(job.a, job.b, job.product, (sys.maxsize,), limits).for_values(a.dtype)
    spec = product.of_rows(0, a.nrows, mask)
    multiplier = engine.begin(limits, lambda *_: None)
    c = multiplier.multiply_rows(a, b, products, 0, spec)
    begin = time.process_time()
    for _ in range(tuning.repeats):
        c = multiplier.multiply_rows(a, b, products, 0, spec)
    seconds = (time.process_time() - begin) / tuning.repeats
    return Pilot(seconds / (products / core.product + c.nnz / core.entry), bool(compresses(c.data)))


def _sampled_rows(job: JobSpec, plan: Plan, b_lengths: Lengths, tuning: PilotTuning) -> tuple[CSR, CSR | None]:
    """Return some rows of A, and of the mask; not those so long that one would be the whole pilot."""
    a = job.a
    wanted = max(1, round(tuning.products * a.nrows / plan.expansion))
    runs = min(tuning.runs, wanted, a.nrows)
    length = min(-(-wanted // runs), a.nrows // runs)
    starts = (np.arange(runs) * (a.nrows - length) // max(runs - 1, 1)).tolist()
    rows = _stacked([a.rows(start, start + length) for start in starts])
    products = np.diff(np.append(0, np.cumsum(b_lengths[rows.indices], dtype=np.int64))[rows.indptr])
    fits = products <= tuning.products // 4
    masks = [mask for start in starts if (mask := job.product.read_mask(start, start + length)) is not None]
    return _selected(rows, fits), _selected(_stacked(masks), fits) if masks else None


def _selected(m: CSR, rows: npt.NDArray[np.bool_]) -> CSR:
    """Return the rows of a matrix that are marked."""
    lengths = np.diff(m.indptr)
    entries = np.repeat(rows, lengths)
    return CSR(np.append(0, np.cumsum(lengths[rows])), m.indices[entries], m.data[entries], (int(rows.sum()), m.ncols))


def _stacked(parts: list[CSR]) -> CSR:
    """Return rows of one matrix one below the other."""
    lengths = np.concatenate([np.diff(part.indptr) for part in parts])
    indices, data = (np.concatenate([getattr(part, name) for part in parts]) for name in ("indices", "data"))
    return CSR(np.append(0, np.cumsum(lengths)), indices, data, (len(lengths), parts[0].ncols))
