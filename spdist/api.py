"""The public calls: open -> plan -> run -> verify; the only file that knows all the others."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from spdist.engines import ENGINES, GPU_ENGINES, Engine
from spdist.errors import InputError, ResumeError, VerificationError
from spdist.inmemory import spgemm as inmemory
from spdist.inmemory.spgemm import spgemm
from spdist.kernels.cpu.reduce import reduce_linear
from spdist.kernels.product_spec import Epilogue, ProductSpec, is_by_columns
from spdist.kernels.reduction_spec import Reduction, check_values, is_linear, reduction_of, spec_for
from spdist.kernels.semirings import Semiring, find, turned
from spdist.matrices.bsr import BSR, is_scipy_bsr
from spdist.matrices.bsr import from_scipy as bsr_from_scipy
from spdist.matrices.csr import CSR, from_scipy
from spdist.matrices.dtypes import blocksize, number_dtype
from spdist.scheduler.planner.plan import DEFAULT_HOST_LIMIT, GPU_BLOCK_PRODUCTS, MAX_BLOCK_PRODUCTS, Plan
from spdist.storage import groups, locations
from spdist.storage.atomic_replace import clear_of_full_disks, full_disk, is_ours, staged_matrix
from spdist.storage.matrix import StoredMatrix, open_matrix, refuse_blocks
from spdist.storage.product_spec import Diagonal, StoredProductSpec
from spdist.storage.writer import Layout, MatrixWriter, finish_matrix
from spdist.units import check_count, format_bytes, parse_bytes

if TYPE_CHECKING:
    from spdist.scheduler.execution.records import JobSpec
    from spdist.scheduler.planner.remote_readers import RemoteReaders

logger = logging.getLogger("spdist")
DEFAULT_MEMORY_LIMIT = "2GiB"
MatrixLike = str | Path | StoredMatrix
PLAN_NOTE = "plan"


@dataclass(frozen=True)
class Report:
    """What a multiplication did.

    Attributes
    ----------
    nnz : int
        Entries of C; dense blocks, where it is stored in such.
    blocks : int
    seconds : float
        Wall time, planning and the start of the workers included.
    engine : str
    peak_memory : int
        Most bytes of the limited memory that a worker took: of the GPU's with "cuda" and "hybrid", else of the host's
        beyond what it held idle.
    peak_host_memory : int
        Of the host's in any case.
    workers : int
    state : str
        ``"computed"``, ``"resumed"`` or ``"already finished"``.
    stages : dict
        Seconds, bytes and tasks by stage, over all workers.
    verification : dict or None
        What `verify` found.
    block_size : (int, int) or None
        Of C's dense blocks.
    """

    nnz: int
    blocks: int
    seconds: float
    engine: str
    peak_memory: int
    memory_limit: int
    grid: dict[str, int]
    state: str
    stages: dict[str, dict[str, float]]
    peak_host_memory: int = 0
    workers: int = 0
    verification: dict[str, Any] | None = None
    block_size: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as ``spdist multiply --json`` prints it."""
        return asdict(self)


def save(url: str | Path, matrix: Any, *, overwrite: bool = False) -> StoredMatrix:
    """Store a SciPy sparse matrix or array as a matrix in Zarr.

    Parameters
    ----------
    url : str or Path
        A path or fsspec URL.
    matrix : scipy.sparse matrix or array
        Rows are sorted and duplicates summed first. A `bsr_array` is stored in its blocks.
    overwrite : bool
        Replace what is there, once the new matrix is whole.

    Raises
    ------
    InputError
        If something is there already, without `overwrite`.
    """
    m = _rows_of(matrix)
    with staged_matrix(url, overwrite=overwrite) as stage:
        writer = MatrixWriter(stage.url, m.ncols, m.dtype, {"provenance": {"command": "save"}})
        writer.append(m)
        writer.close()
    return open_matrix(url)


def _rows_of(matrix: Any) -> CSR:
    """Return any matrix in memory as a canonical `CSR`, of blocks where it has such."""
    if isinstance(matrix, CSR):
        return matrix
    if isinstance(matrix, BSR) or is_scipy_bsr(matrix):
        return (matrix if isinstance(matrix, BSR) else bsr_from_scipy(matrix)).rows()
    return from_scipy(matrix)


def claim(target: str, *, overwrite: bool) -> str:
    """Return where to write a new matrix: at `target`, or beside it where a whole one is to be replaced at the end."""
    _check_target(target, overwrite=overwrite)
    if not locations.exists(target):
        return target
    if groups.read_facts(target).get("state") == "unfinished":
        locations.remove(target)
        return target
    place = beside(target)
    if locations.exists(place):
        locations.remove(place)
    return place


def _check_target(target: str, *, overwrite: bool) -> None:
    if not locations.exists(target):
        _check_parent(target)
    elif not overwrite:
        if "product" in (facts := groups.read_facts(target)) and facts["state"] == "unfinished":
            raise InputError(
                f"{target} is an unfinished product; continue it with --resume (resume=True), or begin anew with "
                f"--overwrite (overwrite=True)"
            )
        raise InputError(f"{target} exists; choose another name or pass --overwrite (overwrite=True)")
    elif not is_ours(target):
        raise InputError(f"{target} exists and is not a matrix, so it is not replaced; remove it yourself")


def _check_mode(resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise InputError("--resume continues C and --overwrite replaces it: choose one")


def _check_apart(target: str, *operands: str) -> None:
    """Refuse a C that is an operand, lies in one, or has one in it."""
    for operand in operands:
        if f"{target}/".startswith(f"{operand}/") or f"{operand}/".startswith(f"{target}/"):
            raise InputError(f"C may not be A or B, or the mask, nor lie in one or around one: {target} and {operand}")


def _check_parent(target: str) -> None:
    if locations.is_local(target):
        parent = locations.local_path(target).parent
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            problem = "may not be written to; ask for access" if parent.is_dir() else "is not a folder; create it"
            raise InputError(f"{target}: {parent} {problem} or choose another place")


def beside(target: str) -> str:
    """Return the name under which a replacement of `target` is written."""
    return f"{target}.spdist-new"


# -- stored ------------------------------------------------------------------------------------------------------------


def plan(
    a: MatrixLike,
    b: MatrixLike,
    *,
    engine: Engine = "auto",
    memory_limit: int | str | None = None,
    host_limit: int | str | None = None,
    grid: tuple[int, int, int] | None = None,
    semiring: str | Semiring = "plus_times",
    mask: MatrixLike | None = None,
    complement: bool = False,
    triangle: str | None = None,
    epilogue: Epilogue | None = None,
    threshold: float | None = None,
    top_n: int | None = None,
) -> Plan:
    """Plan A @ B for workers of `memory_limit` bytes; runs nothing.

    Parameters
    ----------
    a, b : path, URL or StoredMatrix
    engine : {"auto", "scipy", "numba", "cuda", "hybrid"}
    memory_limit, host_limit : int or str, optional
        As in `multiply`: bytes, as a number or for instance ``"512MiB"``.
    grid : (int, int, int), optional
        Force the number of row, inner and column blocks.
    semiring, mask, complement, triangle, epilogue, threshold, top_n
        As in `multiply`. C is planned for what mask, triangle and top-n leave; of a threshold the plan knows nothing.
        How many products a triangle takes is estimated.

    Returns
    -------
    Plan
        A frozen value, the same on every machine.

    Raises
    ------
    MemoryBoundError
        If the smallest block does not fit; says how much is needed.
    InputError
        If A or B is not a matrix, their shapes do not fit, or the engine does not multiply their values; or if there is
        no GPU here to say what is free, and no `memory_limit`.
    """
    from spdist.scheduler.planner.planner import check_operands, make_plan
    from spdist.scheduler.planner.request import PlanRequest

    _check_grid(grid)
    _check_engine(engine)
    spec = stored_spec(semiring, mask, complement, triangle, epilogue, threshold, top_n)
    left, right = _stored(a), _stored(b)
    check_operands(left, right, grid)
    spec.check(left, right, engine)
    _check_values(engine, spec.dtype(left, right))
    memory, host = _limits(engine, memory_limit, host_limit)
    return make_plan(PlanRequest(left, right, engine, memory, host, grid, spec))


def matmul(
    a: Any,
    b: Any,
    out: str | Path | None = None,
    *,
    engine: Engine = "auto",
    memory_limit: int | str | None = None,
    host_limit: int | str | None = None,
    grid: tuple[int, int, int] | None = None,
    workers: int | None = None,
    scheduler: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    semiring: str | Semiring = "plus_times",
    mask: Any = None,
    complement: bool = False,
    triangle: str | None = None,
    epilogue: Epilogue | None = None,
    threshold: float | None = None,
    top_n: int | None = None,
    axis: int = 1,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Any:
    """Multiply two sparse matrices: in memory, or stored ones whose product is stored at `out`.

    Parameters
    ----------
    a, b : scipy.sparse matrix or array; or path, URL or StoredMatrix
        Both of the same sort.
    out : str or Path, optional
        Where to store C; required for stored operands.
    engine, memory_limit, host_limit, grid, workers, scheduler, resume, overwrite
        As in `multiply`.
    semiring, mask, complement, triangle, epilogue, threshold, top_n, axis
        As in `spgemm`; a mask is of the same sort as the operands.
    transpose_a, transpose_b : bool
        Multiply by the transpose of A or B: ``matmul(a, a, transpose_b=True)`` is ``A @ A.T``.

    Returns
    -------
    scipy.sparse matrix or array, or StoredMatrix
        As the operands.
    """
    wanted: dict[str, Any] = {
        "semiring": semiring, "mask": mask, "complement": complement, "triangle": triangle, "epilogue": epilogue,
        "threshold": threshold, "top_n": top_n, "axis": axis,
    }  # fmt: skip
    _check_engine(engine)
    if _all_in_memory(a, b, mask):
        left, right = _turned(a) if transpose_a else a, _turned(b) if transpose_b else b
        c = _in_memory(left, right, engine, memory_limit, wanted)
        return c if out is None else save(out, c, overwrite=overwrite)
    if out is None:
        raise InputError("the product of stored matrices is stored too: say where, with out='C.zarr'")
    multiply(
        a, b, out, engine=engine, memory_limit=memory_limit, host_limit=host_limit, grid=grid, workers=workers,
        scheduler=scheduler, resume=resume, overwrite=overwrite, transpose_a=transpose_a, transpose_b=transpose_b,
        **wanted,
    )  # fmt: skip
    return open_matrix(out)


@dataclass(frozen=True)
class Callbacks:
    """What a caller may want to hear of a run: where it resumes, the plan, the dashboard's link, how far it is."""

    resumed: Callable[[str], None] = lambda durable: None
    planned: Callable[[Plan], None] = lambda plan: None
    started: Callable[[str], None] = lambda link: None
    progress: Callable[[Any], None] | None = None
    verifying: Callable[[int, int], None] | None = None
    timed: Callable[[list[dict[str, Any]]], None] | None = None


def multiply(
    a: MatrixLike,
    b: MatrixLike,
    c: str | Path,
    *,
    engine: Engine = "auto",
    memory_limit: int | str | None = None,
    host_limit: int | str | None = None,
    grid: tuple[int, int, int] | None = None,
    workers: int | None = None,
    scheduler: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    check: bool = False,
    record: str | Path | None = None,
    callbacks: Callbacks | None = None,
    semiring: str | Semiring = "plus_times",
    mask: MatrixLike | None = None,
    complement: bool = False,
    triangle: str | None = None,
    epilogue: Epilogue | None = None,
    threshold: float | None = None,
    top_n: int | None = None,
    axis: int = 1,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Report:
    """Multiply two stored matrices and store the product, each possibly larger than memory.

    Parameters
    ----------
    a, b : path, URL or StoredMatrix
    c : str or Path
        Where C goes; not A or B.
    engine : {"auto", "scipy", "numba", "cuda", "hybrid"}
        What multiplies a block: "auto" picks one of the two of the CPU for each block; "cuda" is a GPU for each worker,
        for all values but integers of 8 or 16 bits. Matrices stored in dense blocks have one kernel on the CPU, and one
        on the GPU, the latter for float and complex values. "hybrid" is "cuda", with workers of one core each beside
        those of the GPUs: they take blocks so far ahead that no GPU should wait for them.
    memory_limit : int or str, optional
        Bytes on each worker. With the engines of the CPU: what blocks, buffers and waiting results may take beyond what
        the worker holds idle, 2GiB by default. With GPUs: of the GPU's memory, by default 0.9 of what is free.
    host_limit : int or str, optional
        Bytes that blocks, and those on their way to the GPU, may take of the host's memory on each worker of an engine
        with GPUs; 8GiB by default.
    grid : (int, int, int), optional
        Force the number of row, inner and column blocks.
    workers : int, optional
        Processes on this machine; by default one a core, or one a GPU.
    scheduler : str, optional
        Address of a running Dask scheduler to use instead. With "hybrid", its workers that see no GPU are cores.
    resume : bool
        Continue an unfinished C by its stored plan; start afresh where there is none, do nothing on a finished one.
        With GPUs, `memory_limit` may be another than before.
    overwrite : bool
        Replace an old C, once the new one is whole.
    check : bool
        Verify C at the end.
    record : str or Path, optional
        Where to write what each stage of each block took: one JSON object a line.
    semiring, mask, complement, triangle, epilogue, threshold, top_n
        What becomes of each row while it is made, as in `spgemm`, with a stored mask; for all engines but "scipy".
        Where the inner dimension is cut, partial products are added by the semiring before rows are cut. `check` then
        looks at every row and makes some of them again: `Report.verification` says how many.
    axis : {1, 0}
        Whether `top_n` and an epilogue's norm look at rows or, with 0, at columns, as in `spgemm`. By columns
        transposed copies of A, B and the mask lie beside C, then the transpose of C, from which C is written in the
        end.
    transpose_a, transpose_b : bool
        Multiply by the transpose of A or B. A transposed copy lies beside C while the product runs, and takes the space
        and the time to write it; it is made again to resume.

    Returns
    -------
    Report

    Raises
    ------
    InputError
        If something is wrong with what was asked; nothing has been written.
    SpdistError
        If the run failed; what is durable stays, for `resume`.
    VerificationError
        If `check` found C false.
    """
    begin = time.perf_counter()
    check_count("workers", workers, "one a core or a GPU")
    _check_grid(grid)
    callbacks = callbacks or Callbacks()
    if is_by_columns(axis, top_n, epilogue):
        wanted: dict[str, Any] = {
            "engine": engine, "memory_limit": memory_limit, "host_limit": host_limit, "grid": grid and grid[::-1],
            "workers": workers, "scheduler": scheduler, "resume": resume, "check": check, "record": record,
            "callbacks": callbacks,
        }  # fmt: skip
        spec = stored_spec(semiring, mask, complement, triangle, epilogue, threshold, top_n)
        report = _multiply_by_columns((a, transpose_a), (b, transpose_b), c, spec, overwrite, wanted)
        return replace(report, seconds=time.perf_counter() - begin) if report.blocks else report
    limits = {"memory_limit": memory_limit, "host_limit": host_limit}
    spec = stored_spec(semiring, mask, complement, triangle, epilogue, threshold, top_n)
    if transpose_a or transpose_b:
        _check_fit((a, transpose_a), (b, transpose_b), spec, engine, grid, limits)
    with _operands(a, b, c, transpose_a, transpose_b, resume or overwrite) as (left, right):
        job = _prepare(left, right, c, engine, limits, grid, spec, resume=resume, overwrite=overwrite)
        if isinstance(job, Report):
            return _verified(job, left, right, c, spec, callbacks) if check else job
        if job.draft.engine in GPU_ENGINES and scheduler is None:
            from spdist.scheduler.execution.cluster import count_gpus

            count_gpus()  # or it is said now, before a plan is made
        if job.unfinished:
            callbacks.resumed(info(job.unfinished)["durable"])
        # where it is not a worker that finds it full
        with _timings(record, c) as timed, clear_of_full_disks(functools.partial(full_disk, job.target)):
            made, outcome = job.run(workers, scheduler, replace(callbacks, timed=timed))
        report = Report(
            outcome.nnz, outcome.blocks, time.perf_counter() - begin, made.engine,
            outcome.peak_device_memory if made.on_gpu else outcome.peak_host_memory, made.memory_limit, made.grid,
            "resumed" if job.unfinished else "computed", outcome.stages, outcome.peak_host_memory, outcome.workers,
            block_size=blocksize(spec.dtype(left, right)),
        )  # fmt: skip
        return _verified(report, left, right, c, spec, callbacks) if check else report


def _multiply_by_columns(
    a: tuple[MatrixLike, bool],
    b: tuple[MatrixLike, bool],
    c: str | Path,
    spec: StoredProductSpec,
    overwrite: bool,
    wanted: dict[str, Any],
) -> Report:
    """Make the transpose of C out of transposes, and write C from it. It stays if the run fails, to be resumed.

    A and B come with whether to multiply by their transposes.
    """
    from spdist.storage.transpose import transpose, transposed_copy

    target, mask, epilogue = locations.normalise(c), spec.mask, spec.per_row.epilogue
    resume, check = wanted["resume"], wanted["check"]
    _check_mode(resume, overwrite)
    _check_target(target, overwrite=resume or overwrite)
    masks = [] if mask is None else [mask.url]
    _check_apart(target, _stored(a[0]).url, _stored(b[0]).url, *masks)
    limits = {name: wanted[name] for name in ("memory_limit", "host_limit")}
    _check_fit(a, b, spec, wanted["engine"], wanted["grid"] and wanted["grid"][::-1], limits)
    place, replaces = _place_of_columns(target, resume=resume, overwrite=overwrite)
    options = spec.arguments() | {
        "semiring": turned(spec.per_row.semiring), "epilogue": None if epilogue is None else epilogue.turned(),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        copies = _operands(b[0], a[0], c, not b[1], not a[1], resume or overwrite)
        left, right = stack.enter_context(copies)
        if isinstance(mask, StoredMatrix):
            options["mask"] = stack.enter_context(transposed_copy(mask, f"{target}.spdist-transposed-mask"))
        facts = _facts(left, right, stored_spec(**options))
        facts["product"]["axis"] = 0
        if resume and not replaces and locations.exists(target):
            report = _finished(target, facts)
            if not check:
                return report
            turned_c = stack.enter_context(transposed_copy(open_matrix(target), f"{target}.spdist-transposed-c"))
            return _verified(report, left, right, turned_c, stored_spec(**options), wanted["callbacks"], target)
        report = multiply(left, right, place, overwrite=not resume, **options, **wanted)
        transpose(place, target, overwrite=overwrite or replaces, facts=facts)
    locations.remove(place)
    return replace(report, grid=dict(zip(report.grid, reversed(report.grid.values()), strict=True)))


def _check_grid(grid: Any) -> None:
    """Refuse what is no number of row, inner and column blocks."""
    if grid is not None and (not isinstance(grid, tuple | list) or len(grid) != 3):
        raise InputError(f"grid={grid!r}: write the numbers of row, inner and column blocks, for instance (10, 1, 1)")


def _check_fit(
    a: tuple[MatrixLike, bool], b: tuple[MatrixLike, bool], spec: StoredProductSpec, engine: str,
    grid: tuple[int, int, int] | None, limits: dict[str, Any],
) -> None:  # fmt: skip
    """Refuse what does not fit before transposes are made, by the names and shapes it was given with."""
    from spdist.scheduler.planner.planner import check_operands

    left, right = (
        replace(stored, shape=stored.shape[::-1]) if turned else stored
        for stored, turned in ((_stored(m), turned) for m, turned in (a, b))
    )
    _check_engine(engine)
    check_operands(left, right, grid)
    spec.check(left, right, engine)
    if engine not in GPU_ENGINES:
        _limits(engine, **limits)


def _place_of_columns(target: str, *, resume: bool, overwrite: bool) -> tuple[str, bool]:
    """Return where the transpose of C is made, and whether that C replaces another, which a name of its own tells."""
    own, other = (f"{at}.spdist-columns" for at in (target, beside(target)))
    replaces = locations.exists(other) if resume else overwrite and locations.exists(target)
    for place in () if resume else (own, other):  # of runs that nobody will resume
        if is_ours(place):
            locations.remove(place)
    return (other if replaces else own), replaces


def _finished(target: str, facts: dict[str, Any]) -> Report:
    """Return the report of a product that is there already; refuse to resume another."""
    if groups.read_facts(target).get("product") != facts["product"]:
        raise ResumeError(
            f"{target} is a product of other matrices or options: A or B changed, or the mask, or what was asked for; "
            f"use --overwrite"
        )
    return Report(open_matrix(target).nnz, 0, 0.0, "auto", 0, 0, {}, "already finished", {})


@dataclass(frozen=True)
class _Job:
    """A product about to run: what is known of it, what gives its plan, and where C goes.

    Attributes
    ----------
    draft : JobSpec
        Its engine is that of the stored plan, where that is continued.
    plan : callable
        Makes the plan, or restores the stored one.
    target, unfinished : str
        Where C is to be; and where the C lies that is to be continued, empty for a new one.
    overwrite : bool
        Whether a new C may replace what lies at `target`.
    stays : callable, optional
        Tells whether B will stay with the workers, before there is a plan.
    """

    draft: JobSpec
    plan: Callable[[RemoteReaders | None], Plan]
    target: str
    unfinished: str
    overwrite: bool
    facts: dict[str, Any]
    stays: Callable[[], bool] | None = None

    def run(self, workers: int | None, scheduler: str | None, callbacks: Callbacks) -> tuple[Plan, Any]:
        """Plan, run the plan and finish C."""
        from spdist.scheduler.execution.driver import execute
        from spdist.scheduler.execution.journal import JOURNAL
        from spdist.scheduler.execution.telemetry import RunCallbacks

        where = {"workers": workers, "scheduler": scheduler}
        with _ready(self.draft, self.plan, self.stays, where, callbacks, self.target) as (client, made, name):
            place = self.unfinished or claim(self.target, overwrite=self.overwrite)
            if not self.unfinished:
                self._begin(place)
                groups.write_note(place, PLAN_NOTE, made.to_json().encode())
            a, b, spec = self.draft.a, self.draft.b, self.draft.product
            layout = Layout(place, b.ncols, spec.dtype(a, b), made.chunk)
            told = RunCallbacks(callbacks.started, callbacks.progress, callbacks.timed)
            outcome, layout = execute(client, name, self.draft, made, layout, told)
        finish_matrix(layout, a.nrows, outcome.nnz, self.facts)
        for note in (PLAN_NOTE, JOURNAL):
            groups.remove_note(place, note)
        if place != self.target:
            locations.move(place, self.target)
        return made, outcome

    def _begin(self, place: str) -> None:
        """Create C, or nothing: what is not even begun could be neither resumed nor replaced."""
        try:
            groups.begin(place, self.facts)
        except BaseException:
            if locations.exists(place):
                locations.remove(place)
            raise


def _draft(
    a: StoredMatrix, b: StoredMatrix, engine: str, memory_limit: int, host_limit: int | None, spec: StoredProductSpec
) -> JobSpec:
    """Return a product as far as it is known before there is a plan."""
    from spdist.scheduler.execution.records import JobSpec

    host = host_limit or DEFAULT_HOST_LIMIT if engine in GPU_ENGINES else memory_limit
    bounds = (0, a.ncols), (0, b.ncols)
    return JobSpec(a, b, engine, False, *bounds, memory_limit=memory_limit, host_limit=host, product=spec)


@contextlib.contextmanager
def _ready(
    draft: JobSpec,
    plan: Callable[[RemoteReaders | None], Plan],
    stays: Callable[[], bool] | None,
    where: dict[str, Any],
    callbacks: Callbacks,
    target: str = "",
) -> Iterator[tuple[Any, Plan, str]]:
    """Give the workers' client, the plan, and a name for the product.

    Where workers are there and B is not small, or they are sure to have blocks for all and so start meanwhile, they
    load what the product needs while the plan is made, and begin to read B if it `stays`; those that are there help to
    plan. There is nothing to wait for, and no `stays`, where the plan is one that was stored.
    """
    from spdist.scheduler.execution.cluster import connect, count_gpus, remote_readers, shared_name
    from spdist.scheduler.execution.plugins import prefetch
    from spdist.scheduler.execution.shared_operand import SHARING

    name, a, b, mask = uuid.uuid4().hex[:8], draft.a, draft.b, draft.product.mask
    local = any(locations.in_process(url) for url in (a.url, b.url, target, "" if mask is None else mask.url))
    if local and where["scheduler"] is not None:
        raise InputError("a memory:// matrix is seen by this process alone: a scheduler's workers cannot read it")
    where = where | {"processes": not local, "engine": draft.engine}
    on_gpu, most = draft.engine in GPU_ENGINES, 0
    at_once = where["scheduler"] is not None and b.nbytes >= SHARING.least_bytes
    if where["scheduler"] is None and not (local or draft.engine == "hybrid"):
        most = where["workers"] or (count_gpus() if on_gpu else os.cpu_count() or 1)
        products = a.nnz * b.nnz // max(b.nrows, 1)  # as if rows of B were of one length
        at_once = products >= most * (GPU_BLOCK_PRODUCTS if on_gpu else MAX_BLOCK_PRODUCTS)
    if stays is None or not at_once:
        made = plan(None)
        callbacks.planned(made)
        with connect(**where, blocks=len(made.blocks), host_bytes=made.projected_host_memory) as client:
            yield client, made, name
        return
    # A single block would need no process of its own; there are many.
    starting = connect(**where, blocks=max(most, 2))
    planning = None if where["scheduler"] else _in_background(plan, None)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(starting)
        planning = planning or _in_background(plan, remote_readers(client))
        draft = replace(draft, resident=stays(), shared_name=shared_name(client))
        stack.enter_context(prefetch(client, name, draft))
        made = planning.result()
        callbacks.planned(made)
        yield client, made, name


def _in_background(function: Callable[[RemoteReaders | None], Plan], helpers: RemoteReaders | None) -> Future[Plan]:
    """Call a function in a thread that nobody waits for if the program is interrupted."""
    future: Future[Plan] = Future()

    def call() -> None:
        try:
            future.set_result(function(helpers))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def _prepare(
    a: MatrixLike,
    b: MatrixLike,
    c: str | Path,
    engine: Engine,
    limits: dict[str, int | str | None],
    grid: tuple[int, int, int] | None,
    spec: StoredProductSpec,
    *,
    resume: bool,
    overwrite: bool,
) -> _Job | Report:
    """Check what can be checked before work starts; return the job, or the report of a finished one."""
    from spdist.scheduler.planner.planner import check_operands, make_plan, will_be_resident
    from spdist.scheduler.planner.request import PlanRequest

    _check_engine(engine)
    left, right, target = _stored(a), _stored(b), locations.normalise(c)
    spec.check(left, right, engine)
    _check_mode(resume, overwrite)
    masks = [] if spec.mask is None else [spec.mask.url]
    _check_apart(target, left.url, right.url, *masks)
    facts = _facts(left, right, spec)
    if resume and (found := _unfinished(target)) is not None:
        if found[1].get("product") != facts["product"]:
            raise ResumeError(
                f"{found[0]} is a product of other matrices or options: A or B changed, or the mask, or what was asked "
                f"for; use --overwrite"
            )
        if found[1]["state"] == "complete":
            m = open_matrix(target)
            limit = parse_bytes(limits["memory_limit"] or DEFAULT_MEMORY_LIMIT)  # of no run
            return Report(m.nnz, 0, 0.0, engine, 0, limit, {}, "already finished", {}, block_size=m.blocksize)
        content = groups.read_note(found[0], PLAN_NOTE)
        if content is not None:
            stored = Plan.from_json(content)
            if stored.on_gpu and limits["memory_limit"] is not None:
                stored = stored.through_gpu(parse_bytes(limits["memory_limit"]))
            _check_still_fits(stored, found[0], limits)
            draft = _draft(left, right, stored.engine, stored.memory_limit, stored.host_limit, spec)
            return _Job(draft, lambda helpers: stored, target, found[0], False, facts)
        locations.remove(found[0])
    check_operands(left, right, grid)
    _check_values(engine, spec.dtype(left, right))
    memory, host = _limits(engine, **limits)
    _check_target(target, overwrite=overwrite)
    request = PlanRequest(left, right, engine, memory, host, grid, spec)
    make, stay = functools.partial(make_plan, request), functools.partial(will_be_resident, request)
    draft = _draft(left, right, engine, memory, host, spec)
    return _Job(draft, make, target, "", overwrite, facts, stay)


def _facts(a: StoredMatrix, b: StoredMatrix, spec: StoredProductSpec) -> dict[str, Any]:
    """Return what C's record says: what it is a product of, and what was asked for."""
    own = a.fingerprint()
    return {
        "provenance": {"command": "multiply", "a": a.url, "b": b.url},
        "product": {
            "a": own,
            "b": own if b == a else b.fingerprint(),
            "dtype": str(spec.dtype(a, b)),
            **({} if spec.plain else {"options": spec.facts()}),
        },
    }


def reduce(
    a: Any,
    b: Any,
    what: str,
    *,
    bins: Any = None,
    engine: Engine = "auto",
    memory_limit: int | str | None = None,
    workers: int | None = None,
    scheduler: str | None = None,
    semiring: str | Semiring = "plus_times",
    mask: Any = None,
    complement: bool = False,
    triangle: str | None = None,
    epilogue: Epilogue | None = None,
    threshold: float | None = None,
    top_n: int | None = None,
    callbacks: Callbacks | None = None,
) -> Any:
    """Return a number or a vector of a product that is never whole, in memory or in storage.

    Parameters
    ----------
    a, b : scipy.sparse matrix or array; or path, URL or StoredMatrix
        Both of the same sort, and a mask too.
    what : str
        "sum", "row_sums", "column_sums", "trace", "nnz" (entries, zeros included), "row_nnz" (of each row),
        "frobenius" (the root of the sum of squares), or "histogram".
    bins : sequence of float, optional
        The edges of a histogram, finite and rising, at least two. Entries, zeros included, are counted where
        ``edge <= value < next edge``, those equal to the last edge in the last bin; values outside, and NaN, are not
        counted. Compared as float64, to which whole numbers beyond 2^53 are rounded. Not of complex values.
    engine, memory_limit, workers, scheduler, callbacks
        As in `multiply`; the engine is "auto", "numba" or, with C never leaving the GPU, "cuda" or "hybrid". In memory,
        workers and scheduler do not count, and `memory_limit` only with GPUs.
    semiring, mask, complement, triangle, epilogue, threshold, top_n
        What becomes of the product before, as in `spgemm`.

    Returns
    -------
    number or (nrows,), (ncols,) or (bins,) array
        Values are added by plus, whatever the semiring; integers and bools as NumPy adds them, as int64 or uint64.
        Counts are int64.

    Notes
    -----
    Sums of a whole product by plus and times are products with vectors, ``A (B 1)``. For the others C is made some rows
    at a time; of a "trace" no more than its diagonal.

    Examples
    --------
    The triangles of a graph, each seen from its three corners in both directions:

    >>> import scipy.sparse as sp
    >>> a = sp.csr_array([[0, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 1, 0]])
    >>> int(reduce(a, a, "sum", semiring="plus_pair", mask=a)) // 6
    2
    """
    from spdist.scheduler.planner.planner import check_operands

    reduction = reduction_of(what, bins)
    wanted: dict[str, Any] = {
        "semiring": semiring, "mask": mask, "complement": complement, "triangle": triangle, "epilogue": epilogue,
        "threshold": threshold, "top_n": top_n,
    }  # fmt: skip
    _check_engine(engine)
    check_count("workers", workers, "one a core or a GPU")
    if engine == "scipy":
        raise InputError("engine='scipy' has no reductions: choose engine='auto', 'numba', 'cuda' or 'hybrid'")
    if _all_in_memory(a, b, mask):
        limit = None if memory_limit is None else parse_bytes(memory_limit)
        return inmemory.reduce(a, b, reduction, engine=_in_memory_engine(engine), memory_limit=limit, **wanted)
    left, right, spec = _stored(a), _stored(b), stored_spec(**wanted)
    check_operands(left, right, None)
    refuse_blocks("reductions", left, right, spec.mask)
    spec.check(left, right, engine)
    dtype = spec.dtype(left, right)
    check_values(reduction, dtype)
    if is_linear(reduction, spec.per_row, dtype) and spec.mask is None:
        return reduce_linear(reduction, _blocks(left), _blocks(right), (left.shape, right.shape), dtype)
    _check_values(engine, dtype)
    if what == "trace" and not spec.fused:
        spec = replace(spec, mask=Diagonal((left.nrows, right.ncols)))
    spec = replace(spec, per_row=spec_for(reduction, spec.per_row))
    where = {"workers": workers, "scheduler": scheduler}
    return _reduce_stored(left, right, reduction, spec, engine, memory_limit, where, callbacks or Callbacks())


def _reduce_stored(
    a: StoredMatrix,
    b: StoredMatrix,
    what: Reduction,
    spec: StoredProductSpec,
    engine: Engine,
    memory_limit: int | str | None,
    where: dict[str, Any],
    callbacks: Callbacks,
) -> Any:
    from spdist.scheduler.execution.reduction import execute_reduction
    from spdist.scheduler.execution.telemetry import RunCallbacks
    from spdist.scheduler.planner.planner import make_plan, will_be_resident
    from spdist.scheduler.planner.request import PlanRequest

    memory, _ = _limits(engine, memory_limit, None)
    request = PlanRequest(a, b, engine, memory, spec=spec, writes_c=False)
    make, stay = functools.partial(make_plan, request), functools.partial(will_be_resident, request)
    draft = _draft(a, b, engine, memory, None, spec)
    with _ready(draft, make, stay, where, callbacks) as (client, made, name):
        told = RunCallbacks(callbacks.started, callbacks.progress)
        return execute_reduction(client, name, draft, made, what, told)


def _blocks(m: StoredMatrix) -> Iterator[CSR]:
    """Yield successive rows of a stored matrix."""
    for start, stop, _ in m.row_blocks(4 * m.indices.chunk):
        yield m.rows(start, stop)


@contextlib.contextmanager
def _operands(
    a: MatrixLike, b: MatrixLike, c: str | Path, transpose_a: bool, transpose_b: bool, may_exist: bool
) -> Iterator[tuple[StoredMatrix, StoredMatrix]]:
    """Give the operands, transposed where asked; the copies go in the end."""
    from spdist.storage.transpose import transposed_copy

    target = locations.normalise(c)
    if transpose_a or transpose_b:
        _check_target(target, overwrite=may_exist)  # before the copies are made
    with contextlib.ExitStack() as stack:
        made = []
        for name, m, transposed in (("a", a, transpose_a), ("b", b, transpose_b)):
            place = f"{target}.spdist-transposed-{name}"
            made.append(stack.enter_context(transposed_copy(_stored(m), place)) if transposed else _stored(m))
        yield made[0], made[1]


def _unfinished(target: str) -> tuple[str, dict[str, Any]] | None:
    """Return the place and facts of the product to resume: a replacement in progress goes before a finished C."""
    for place in (beside(target), target):
        facts = groups.read_facts(place)
        if "product" in facts:
            return place, facts
    if locations.exists(target):
        raise InputError(f"{target} exists and is no product of spdist: choose another name or pass --overwrite")
    return None


def info(matrix: MatrixLike) -> dict[str, Any]:
    """Describe a stored matrix.

    Returns
    -------
    dict
        ``shape``, ``dtype``, ``nnz``; of a block matrix ``blocks`` and ``block_size``; ``rows`` with min, mean and max
        entries of a row and the number of empty rows, of a block matrix in blocks; ``bytes`` in memory and as stored;
        ``state``: ``complete``, or ``unfinished`` with what is known of it; ``provenance``.
    """
    url = matrix.url if isinstance(matrix, StoredMatrix) else locations.normalise(matrix)
    facts = groups.read_facts(url)
    if facts.get("state") == "unfinished":
        return _unfinished_info(url)
    m = _stored(matrix)
    low, high, empty = m.nnz, 0, 0
    for _, _, offsets in m.row_blocks(4 * m.indices.chunk):
        lengths = np.diff(offsets)
        low, high, empty = (
            min(low, int(lengths.min())),
            max(high, int(lengths.max())),
            empty + int((lengths == 0).sum()),
        )
    size = m.blocksize
    return {
        "matrix": url,
        "shape": list(m.full_shape),
        "dtype": str(number_dtype(m.dtype)),
        "nnz": m.nnz * (1 if size is None else size[0] * size[1]),
        **({} if size is None else {"blocks": m.nnz, "block_size": list(size)}),
        "rows": {"min": low if m.nrows else 0, "mean": m.nnz / max(m.nrows, 1), "max": high, "empty": empty},
        "bytes": {"memory": m.nbytes, "stored": locations.stored_bytes(url)},
        "state": "complete",
        "provenance": facts.get("provenance", {}),
    }


def _unfinished_info(url: str) -> dict[str, Any]:
    from spdist.scheduler.execution.journal import read_journal

    front, _ = read_journal(url)
    content = groups.read_note(url, PLAN_NOTE)
    plan = None if content is None else Plan.from_json(content)
    of = f" of {plan.a.shape[0]:,}" if plan else ""
    rows, entries = ("rows", "entries") if plan is None or plan.c.block == (1, 1) else ("block rows", "dense blocks")
    return {
        "matrix": url,
        "state": "unfinished",
        "durable": f"{front.row:,}{of} {rows}, {front.nnz:,} {entries}",
        "remedy": "finish it with spdist multiply --resume",
    }


def verify(
    a: MatrixLike,
    b: MatrixLike,
    c: MatrixLike,
    *,
    semiring: str | Semiring = "plus_times",
    mask: MatrixLike | None = None,
    complement: bool = False,
    triangle: str | None = None,
    epilogue: Epilogue | None = None,
    threshold: float | None = None,
    top_n: int | None = None,
    **options: Any,
) -> Any:
    """Check out of core that C is A @ B (Freivalds' check, row by row), or what was made of it.

    Parameters
    ----------
    a, b, c : path, URL or StoredMatrix
    semiring, mask, complement, triangle, epilogue, threshold, top_n
        As C was made by `multiply`. Where any of them is given, rows drawn at random are made again, and all rows
        looked at for what mask, threshold and top-n demand; `reason` says how many.
    **options
        As `spdist.verification.freivalds.verify` takes them, or `spdist.verification.recompute_sample.verify_answer`.

    Returns
    -------
    Verification
        `ok` says whether C is A @ B, `reason` why.

    Raises
    ------
    InputError
        If C was made by columns, with an axis of 0.
    """
    spec = stored_spec(semiring, mask, complement, triangle, epilogue, threshold, top_n)
    product = _stored(c)
    if product.facts.get("product", {}).get("axis") == 0:
        raise InputError(
            f"{product.url} was made by columns, with axis=0, and here rows are made again: verify it by the call that "
            f"made it, with --axis 0 --resume --verify (resume=True, check=True), which computes nothing anew"
        )
    return _verify(_stored(a), _stored(b), product, spec, **options)


def _verify(a: StoredMatrix, b: StoredMatrix, c: StoredMatrix, spec: StoredProductSpec, **options: Any) -> Any:
    if spec.plain:
        from spdist.verification.freivalds import verify as check

        return check(a, b, c, **options)
    from spdist.verification.recompute_sample import verify_by_recomputing

    return verify_by_recomputing(a, b, c, spec, **options)


def _verified(
    report: Report,
    a: MatrixLike,
    b: MatrixLike,
    c: MatrixLike,
    spec: StoredProductSpec,
    callbacks: Callbacks,
    name: str = "",
) -> Report:
    found = _verify(_stored(a), _stored(b), _stored(c), spec, progress=callbacks.verifying)
    if not found.ok:
        raise VerificationError(f"{name or c} is not A @ B: {found.reason}; it is kept for inspection")
    return replace(report, verification=found.to_json())


def stored_spec(
    semiring: str | Semiring,
    mask: MatrixLike | None,
    complement: bool,
    triangle: str | None,
    epilogue: Epilogue | None,
    threshold: float | None,
    top_n: int | None,
) -> StoredProductSpec:
    """Return what is asked for of a stored product."""
    if sp.issparse(mask):
        raise InputError("the mask of a stored product is stored too: spdist.save('M.zarr', mask)")
    epilogue = None if getattr(epilogue, "idle", False) else epilogue
    options = ProductSpec(find(semiring), top_n=top_n, threshold=threshold, epilogue=epilogue, triangle=triangle)
    return StoredProductSpec(options, None if mask is None else _stored(mask), complement)


def _stored(m: MatrixLike) -> StoredMatrix:
    if not isinstance(m, StoredMatrix | str | Path):
        raise InputError(
            f"a matrix in memory ({type(m).__name__}) where a stored one is expected: spdist.save('A.zarr', m) stores "
            f"it, and spdist.matmul multiplies matrices in memory"
        )
    return m if isinstance(m, StoredMatrix) else open_matrix(m)


def _limits(engine: str, memory_limit: int | str | None, host_limit: int | str | None) -> tuple[int, int | None]:
    """Return the limits in bytes, those that were not given by default."""
    if engine not in GPU_ENGINES:
        if host_limit is not None:
            raise InputError(f"host_limit={host_limit} is for GPUs: engine={engine!r} has its memory_limit on the host")
        return parse_bytes(DEFAULT_MEMORY_LIMIT if memory_limit is None else memory_limit), None
    host = None if host_limit is None else parse_bytes(host_limit)
    if memory_limit is not None:
        return parse_bytes(memory_limit), host
    from spdist.kernels.streaming.gpu_device import free_memory
    from spdist.scheduler.execution.cluster import count_gpus

    try:
        count_gpus()
    except InputError as error:
        raise InputError(
            f"{error}; where the GPUs are on other machines, say what each may take with memory_limit"
        ) from None
    return free_memory(), host


def _check_values(engine: str, dtype: np.dtype[Any]) -> None:
    """Refuse values that the engine does not multiply."""
    if engine == "scipy" and blocksize(dtype) is not None:
        raise InputError(f"engine={engine!r} does not multiply block matrices: choose engine='auto'")
    number = number_dtype(dtype)
    if engine in GPU_ENGINES and blocksize(dtype) is not None and number.kind not in "fc":
        raise InputError(
            f"engine={engine!r} multiplies float and complex values, not {number}, in blocks: choose 'auto'"
        )
    if engine in GPU_ENGINES and number.kind in "iu" and number.itemsize < 4:
        raise InputError(
            f"engine={engine!r} multiplies floats, complex values, bools, and whole numbers of 32 or 64 bits, not "
            f"{number}: choose engine='auto'"
        )


def _turned(m: Any) -> Any:
    """Return the transpose of a matrix in memory."""
    return bsr_from_scipy(m.to_scipy().T) if isinstance(m, BSR) else m.T


def _all_in_memory(a: Any, b: Any, mask: Any) -> bool:
    """Whether all are SciPy's or block matrices, and not stored; refuses some of each."""
    for m in (a, b, mask):
        if not (m is None or sp.issparse(m) or isinstance(m, BSR | StoredMatrix | str | Path)):
            raise InputError(
                f"a {type(m).__name__} where a matrix is expected: SciPy's, or the path of a stored one; CuPy's are "
                f"for spdist.spgemm"
            )
    in_memory = [sp.issparse(m) or isinstance(m, BSR) for m in (a, b, mask) if m is not None]
    if any(in_memory) and not all(in_memory):
        what = "the operands" if mask is None else "the operands and the mask"
        raise InputError(f"some of {what} are in memory and others stored: store all with spdist.save, or open all")
    return all(in_memory)


def _in_memory(a: Any, b: Any, engine: str, memory_limit: int | str | None, wanted: dict[str, Any]) -> Any:
    """Multiply matrices of SciPy's."""
    if engine not in GPU_ENGINES:
        return spgemm(a, b, engine, **wanted)
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    return spgemm(a, b, _in_memory_engine(engine), memory_limit=limit, **wanted)


def _in_memory_engine(engine: str) -> str:
    """Return the engine for matrices in memory."""
    if engine == "hybrid":
        logger.info("engine hybrid: matrices in memory are multiplied by the GPU alone")
    return "cuda" if engine == "hybrid" else engine


@contextlib.contextmanager
def _timings(record: str | Path | None, c: str | Path) -> Iterator[Callable[[list[dict[str, Any]]], None] | None]:
    """Give what writes timings, a JSON object a line; nothing where no record is wanted."""
    if record is None:
        yield None
        return
    if Path(record) == Path(c):
        raise InputError(f"record={record} is where C goes: choose another name")
    try:
        Path(record).write_text("")
    except OSError as error:
        raise InputError(f"record={record} cannot be written ({error.strerror}): choose another name") from None
    with Path(record).open("w") as file:

        def write(timings: list[dict[str, Any]]) -> None:
            file.writelines(json.dumps(timing) + "\n" for timing in timings)

        yield write


def _check_still_fits(plan: Plan, place: str, limits: dict[str, int | str | None]) -> None:
    """Refuse to resume a product by its stored plan under a limit of the host's memory that this does not keep."""
    name = "host_limit" if plan.on_gpu else "memory_limit"
    limit = limits[name]
    if limit is not None and parse_bytes(limit) < plan.projected_host_memory:
        raise ResumeError(
            f"{place} was begun with blocks that take up to {format_bytes(plan.projected_host_memory)} on a worker, "
            f"more than {name}={limit}: resume with as much, or begin anew with --overwrite"
        )


def _check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise InputError(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
