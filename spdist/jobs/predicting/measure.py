"""Measure this machine: products, reading and writing in this process, and whole commands of a small product."""

from __future__ import annotations

import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from spdist.errors import InputError, SpdistError
from spdist.foundation.cpus import count_cpus
from spdist.jobs.compiling.ahead import compile_kernels
from spdist.jobs.planning import planned_request
from spdist.jobs.predicting.machine import (
    PACES,
    TRUSTED_PACES,
    TYPICAL_CORE,
    TYPICAL_GPU,
    Machine,
    remember,
    this_machine,
)
from spdist.jobs.predicting.run_time import seen_in
from spdist.jobs.report import Report
from spdist.kernels.cpu.engine import NUMBA
from spdist.kernels.cpu.multiply import multiply
from spdist.kernels.cuda.pinned import array_at, pinned
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
from spdist.kernels.streaming.engine import CUDA
from spdist.matrices.csr import CSR
from spdist.options import ExecutionOptions, ProductOptions
from spdist.scheduler.execution import worker_process
from spdist.scheduler.planner.plan import Rates
from spdist.scheduler.planner.planner import make_plan
from spdist.storage import groups
from spdist.storage.generators import generate
from spdist.storage.matrix import StoredMatrix
from spdist.storage.writer import Layout, finish_matrix

SIDE = 44
"""Of the grid whose 27-point operator is multiplied: 85,184 rows, 58 M products, 10 M entries of C."""
SCATTERED_ROWS, SCATTERED_LENGTH = 1 << 17, 7
"""Rows of a matrix whose entries are anywhere, and entries of each: 6 M products, each with an entry of its own."""
STORED_ENTRIES = 1 << 23
"""Entries, 100 MB, that are written and read."""
COMMAND_SIDE = 90
"""Of the grid that whole commands multiply: 729,000 rows, 90 M entries of C, some 300 MB as they are stored."""
BUS_BYTES = 256 << 20
"""Bytes that are copied to a GPU and back."""
PATIENCE = 120.0
"""Seconds that a command may take."""
BUSY = 1.3
"""Seconds by the clock for a CPU second of one thread, from which on other programs have the CPUs."""


@dataclass
class ElapsedTime:
    """Seconds of a ``with`` block: of all CPUs together, and by the clock."""

    cpu: float = 0.0
    wall: float = 0.0

    @property
    def gain(self) -> float:
        """How many CPUs were busy; those that other programs had are no loss of this one's."""
        return min(max(self.cpu / self.wall, 1.0), float(count_cpus()))


@contextmanager
def _measure_elapsed() -> Iterator[ElapsedTime]:
    found, cpu, wall = ElapsedTime(), time.process_time(), time.perf_counter()
    yield found
    found.cpu, found.wall = time.process_time() - cpu, time.perf_counter() - wall


def measure_machine(
    folder: str | Path | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> Machine:
    """Measure this machine and keep what was found for predictions.

    `folder`: where matrices of some 500 MB are written meanwhile: choose the kind of storage that products use. By
    default the folder for temporary files.
    `progress`: called as ``progress(done, total)``.
    Raises `InputError` if nothing can be written there.
    Raises `SpdistError` if a command fails.
    """
    gpu_name = worker_process.gpu_name()
    steps, done = 5 if gpu_name is not None else 3, 0
    try:
        temporary = tempfile.TemporaryDirectory(prefix="spdist-machine-", dir=folder)
    except OSError as error:
        raise InputError(f"folder={folder} cannot be written to ({error.strerror}): choose another one") from None
    with temporary as place:
        a = generate("poisson", Path(place) / "A.zarr", dims=(SIDE,) * 3, points=27)
        before = this_machine()
        found = replace(before, core=TYPICAL_CORE, measured=datetime.datetime.now(datetime.UTC).date().isoformat())
        matrices = a.rows(0, a.nrows), _scattered()
        found = _with_products(found, matrices)
        progress(done := done + 1, steps)
        found = _with_storage(found, Path(place) / "B.zarr")
        progress(done := done + 1, steps)
        if gpu_name is not None:
            found = replace(found, gpu=_gpu_rates(matrices), gpu_name=gpu_name)
            progress(done := done + 1, steps)
        a = generate("poisson", Path(place) / "A.zarr", dims=(COMMAND_SIDE,) * 3, points=27, overwrite=True)
        for engine in (NUMBA, CUDA)[: 1 if gpu_name is None else 2]:
            found = _with_command(found, a, Path(place), engine.name)
            progress(done := done + 1, steps)
    if found.is_busy:
        found = replace(found, gains=before.gains, strain=before.strain, seen=before.seen)
    remember(found)
    return found


def _scattered() -> CSR:
    """Return a matrix whose rows have their entries anywhere."""
    rng = np.random.default_rng(0)
    n, length = SCATTERED_ROWS, SCATTERED_LENGTH
    columns = np.sort(rng.integers(0, n // length, (n, length)) * length + np.arange(length), axis=1).astype(np.int32)
    return CSR(np.arange(n + 1) * length, columns.ravel(), rng.random(n * length), (n, n))


def _typical_seconds(m: CSR, c_nnz: int, rates: Rates) -> float:
    return float(np.diff(m.indptr)[m.indices].sum()) / rates.product + c_nnz / rates.entry


def _with_products(machine: Machine, matrices: tuple[CSR, ...]) -> Machine:
    """Add the rates of products and of entries of C, from squares with many and with few products an entry of C."""
    slowness, gain, strain, is_busy = 1.0, 1.0, 1.0, False
    for m in matrices:
        one_entry = CSR(np.array([0, 1]), np.zeros(1, m.indices.dtype), np.ones(1), (1, 1))
        compile_kernels(one_entry, m.rows(0, 1), ProductSpec(), NUMBA)  # and notes that the cache has them
        multiply(m, m, engine=NUMBA.name, threads=machine.cpus)  # loads the kernels
        with _measure_elapsed() as one:
            c = multiply(m, m, engine=NUMBA.name)
        with _measure_elapsed() as all_cpus:
            multiply(m, m, engine=NUMBA.name, threads=machine.cpus)
        slowness *= one.cpu / _typical_seconds(m, c.nnz, machine.core)
        gain *= max(1.0, one.cpu / all_cpus.wall)
        strain *= max(1.0, all_cpus.cpu / one.cpu)
        is_busy |= one.wall > BUSY * one.cpu
    core, slowness = machine.core, slowness**0.5
    core = replace(core, product=core.product / slowness, entry=core.entry / slowness)
    gains = {**machine.gains, "multiply": gain**0.5}
    return replace(machine, core=core, gains=gains, strain=strain**0.5, is_busy=is_busy)


def _with_storage(machine: Machine, place: Path) -> Machine:
    """Add the rates of reading and writing, through the codecs that C has, of values that do not compress."""
    rng, count = np.random.default_rng(0), STORED_ENTRIES
    indices = np.cumsum(rng.integers(1, 200, count), dtype=np.int64)
    indices, values = (indices % (1 << 20)).astype(np.int32), rng.random(count)
    layout = Layout(str(place), 1 << 20, values.dtype)
    groups.begin(layout.url, {})
    layout.write_entries(0, indices[: layout.chunk], values[: layout.chunk])  # the first write loads libraries
    with _measure_elapsed() as writing:
        layout.write_entries(0, indices, values)
    layout.array("indptr").write_chunks(0, np.array([0, count], np.int64))
    stored = finish_matrix(layout, 1, count, {})
    nbytes = indices.nbytes + values.nbytes
    with _measure_elapsed() as reading:
        stored.rows(0, 1)
    core = replace(machine.core, read=nbytes / reading.cpu, decode=nbytes / reading.cpu, write=nbytes / writing.cpu)
    return replace(machine, core=core, gains={**machine.gains, "read": reading.gain, "write": writing.gain})


def _with_command(machine: Machine, a: StoredMatrix, folder: Path, engine: str) -> Machine:
    """Add the waits of a command, and the pace of its run."""
    target = folder / f"{engine}.zarr"
    report = _run(a, target, engine)
    if report.phases.get("compile"):
        report = _run(a, target, engine)
    made = make_plan(planned_request(a, a, ProductOptions(), ExecutionOptions(engine=engine)))
    found = seen_in(report, made, machine)
    for _ in range(TRUSTED_PACES - 1):  # a known product on an idle machine is worth as many
        machine = machine.with_seen({name: found[name] for name in PACES if name in found})
    return machine.with_seen(found)


def _run(a: StoredMatrix, target: Path, engine: str) -> Report:
    """Square a matrix by a command in a fresh process; return its report."""
    words = [sys.executable, "-m", "spdist", "multiply", a.url, a.url, str(target)]
    words += ["--engine", engine, "--overwrite", "--json"]
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        raise SpdistError(f"a small product with engine={engine!r} took longer than {PATIENCE:.0f} s") from None
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise SpdistError(f"a small product with engine={engine!r} failed: {last.removeprefix('spdist: ')}")
    return Report(**json.loads(done.stdout))


def _gpu_rates(matrices: tuple[CSR, ...]) -> Rates:
    """Return the rates of the current GPU: of copies from and to page-locked memory, and of squares in its memory."""
    import cupy

    host = array_at(pinned(BUS_BYTES), 0, BUS_BYTES, np.uint8)
    device = cupy.empty(BUS_BYTES, np.uint8)
    up = _gpu_seconds(lambda: device.set(host))
    down = _gpu_seconds(lambda: device.get(out=host))
    slowness = 1.0
    for m in matrices:
        indptr, indices, data = map(cupy.asarray, (m.indptr.astype(np.int32), m.indices, m.data))
        square = functools.partial(rowwise_gpu.multiply, *(CSR(indptr, indices, data, m.shape),) * 2)
        slowness *= _gpu_seconds(square) / _typical_seconds(m, square().nnz, TYPICAL_GPU)
    gpu, slowness = TYPICAL_GPU, slowness**0.5
    return replace(
        gpu, read=BUS_BYTES / up, write=BUS_BYTES / down, product=gpu.product / slowness, entry=gpu.entry / slowness
    )


def _gpu_seconds(work: Callable[[], object], trials: int = 5) -> float:
    """Return the median seconds of `work` on the current stream, after a first time."""
    import cupy

    took = []
    for _ in range(trials + 1):
        begun = time.perf_counter()
        work()
        cupy.cuda.get_current_stream().synchronize()
        took.append(time.perf_counter() - begun)
    return statistics.median(took[1:])
