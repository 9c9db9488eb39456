"""A product made by rows of C: prepare or resume it, run it, finish C, verify it."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from spdist.errors import CorruptError, InputError, ResumeError
from spdist.foundation.units import format_bytes, parse_bytes
from spdist.jobs.check import verified
from spdist.jobs.planning import PlanSource, request_of
from spdist.jobs.predicting.run_time import expectation
from spdist.jobs.report import Callbacks, Report, recorder, run_callbacks
from spdist.jobs.request import ProductRequest
from spdist.jobs.starting.start import ready_to_run
from spdist.jobs.status import durable_part
from spdist.jobs.target import (
    Facts,
    check_target,
    find_earlier_product,
    remove_useless_remains,
    reserve_target,
)
from spdist.kernels.engine import find_engine
from spdist.matrices.dtypes import blocksize
from spdist.options import DEFAULT_MEMORY_LIMIT, ExecutionOptions
from spdist.scheduler.execution import worker_process
from spdist.scheduler.execution.driver import execute
from spdist.scheduler.execution.records import Outcome
from spdist.scheduler.execution.unfinished import JOURNAL, PLAN, has_plan_of, read_plan, write_plan
from spdist.scheduler.planner import planner
from spdist.scheduler.planner.plan import Plan
from spdist.scheduler.planner.request import PlanRequest
from spdist.storage import groups, notes
from spdist.storage.atomic_replace import clear_of_full_disks, full_disk
from spdist.storage.foreign import versions
from spdist.storage.lock import check_held, hold_target
from spdist.storage.lock import replace as replace_target
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.names.names import AxisNames
from spdist.storage.names.of_matrix import names_for
from spdist.storage.product_spec import StoredProductSpec
from spdist.storage.writer import Layout, finish_matrix
from spdist.stores.registry import at
from spdist.verification.stored_matrix import check

logger = logging.getLogger("spdist")


@dataclass(frozen=True)
class StoredProductJob:
    """A product that is about to run."""

    planning: PlanSource  # where the plan comes from
    target: str  # where C is to be
    unfinished: str  # path or URL of the unfinished C to continue; empty for a new C
    overwrite: bool  # whether a new C may replace the matrix at `target`
    facts: Facts  # the record that C carries
    names: AxisNames  # names of the rows and columns of C

    def run(self, execution: ExecutionOptions, callbacks: Callbacks) -> tuple[Plan, Outcome]:
        """Plan, run the plan, and put the finished C at the target.

        Returns (Plan, Outcome).
        """
        source, expects = self.planning, expectation(self.planning.request, execution)
        with ready_to_run(source, execution, callbacks, self.target) as (executor, plan, supervisor):
            reports = run_callbacks(callbacks, expects, supervisor)
            with self._begun(plan) as begun:
                outcome, layout, checksums = execute(executor, source.draft(), plan, begun, reports)
        place = layout.url
        check_held(self.target)
        finish_matrix(layout, self.planning.request.a.nrows, outcome.nnz, self.facts, checksums, self.names)
        put_in_place(place, self.target)
        return plan, outcome

    @contextlib.contextmanager
    def _begun(self, plan: Plan) -> Iterator[Layout]:
        """Begin C, unless it was begun before; yield its layout, and remove C if an operand was rewritten meanwhile."""
        request = self.planning.request
        place = self.unfinished or self._begin(plan)
        try:
            yield Layout(place, request.b.ncols, request.spec.dtype(request.a, request.b), plan.chunk)
        except Exception as error:  # which may come of what was rewritten
            with contextlib.suppress(OSError, InputError):  # the first error matters
                self._check_operands(place, error)
            raise
        self._check_operands(place)

    def _check_operands(self, place: str, cause: Exception | None = None) -> None:
        """Raise if an operand or the mask was rewritten; nobody shall go on with rows that were made of both."""
        try:
            versions.check()
        except CorruptError as changed:
            check_held(self.target)
            notes.remove_note(place, JOURNAL)
            at(place).discard()
            raise changed from cause

    def _begin(self, plan: Plan) -> str:
        """Create an unfinished C with its plan; return its place.

        If C cannot be created, remove the remains, which could be neither resumed nor replaced.
        """
        place = reserve_target(self.target, overwrite=self.overwrite)
        try:
            groups.begin(place, self.facts)
        except BaseException:
            if at(place).exists():
                at(place).remove()
            raise
        write_plan(place, plan, self.facts["product"])
        return place


def put_in_place(place: str, target: str) -> None:
    """Remove the notes by which a finished C at `place` is resumed; move C to `target` if that is another place.

    `place, target`: normalised paths or URLs. A matrix at `target` is replaced.
    """
    notes.sync_metadata(place)  # before the notes go
    notes.remove_remains(place)
    if place != target:
        at(place).sync_disk()
        replace_target(place, target)


def multiply_by_rows(request: ProductRequest, begin: float) -> Report:
    """Make C by rows.

    `begin`: seconds of `time.perf_counter` at which the call began.
    Raises `InputError` if the request cannot be met; nothing has been written.
    Raises `SpdistError` if the run failed; durable blocks stay.
    Raises `VerificationError` if C was verified and found false.
    """
    if request.transpose_a or request.transpose_b:
        request.check_fit()
    at(request.target).check_parent()
    with hold_target(request.target, steal=request.output.steal):
        remove_useless_remains(request.target)
        return _multiply_held(request, begin)


def _multiply_held(request: ProductRequest, begin: float) -> Report:
    """Make C by rows; the target is held."""
    with request.transposed() as ready:
        job = prepare(ready)
        report = job if isinstance(job, Report) else _run(job, ready, begin)
        if not ready.output.check:
            return report
        return verified(report, (ready.a, ready.b, open_matrix(ready.target)), ready.spec, ready.callbacks)


def _run(job: StoredProductJob, request: ProductRequest, begin: float) -> Report:
    """Run a job and report on it."""
    if job.planning.request.on_gpu and request.execution.scheduler is None:
        worker_process.count_gpus()  # refuses before a plan is made
    if job.unfinished:
        request.callbacks.resumed(durable_part(job.unfinished))
    full = functools.partial(full_disk, job.target)  # for this process; workers say it for themselves
    with recorder(request.output.record, request.callbacks) as callbacks, clear_of_full_disks(full):
        plan, outcome = job.run(request.execution, callbacks)
    return Report(
        nnz=outcome.nnz,
        blocks=outcome.blocks,
        seconds=time.perf_counter() - begin,
        engine=plan.engine,
        peak_memory=outcome.peak_device_memory if plan.on_gpu else outcome.peak_host_memory,
        memory_limit=plan.memory_limit,
        grid=plan.grid,
        state="resumed" if job.unfinished else "computed",
        stages=outcome.stages,
        peak_host_memory=outcome.peak_host_memory,
        workers=outcome.workers,
        block_size=blocksize(request.spec.dtype(request.a, request.b)),
    )


# -- prepare -----------------------------------------------------------------------------------------------------------


def prepare(request: ProductRequest) -> StoredProductJob | Report:
    """Check the request before work starts; return the job, or the report of a C that is finished already.

    Raises `InputError` if the request cannot be met; nothing has been written.
    """
    a, b, spec, execution = request.a, request.b, request.spec, request.execution
    spec.check(a, b, execution.engine)
    request.check_mode()
    request.check_apart()
    facts = product_facts(a, b, spec)
    if request.origin is not None:
        facts["provenance"] |= {name: place for name, (place, _) in zip("ab", request.origin, strict=True)}
        facts["made_of"] = [
            {"fingerprint": known or facts["product"][name], "transposed": bool(known)}
            for name, (_, known) in zip("ab", request.origin, strict=True)
        ]
    if request.output.resume and (earlier := find_earlier_product(request.target)) is not None:
        continued = _continue(request, facts, *earlier)
        if continued is not None:
            return continued
    planner.check_operands(a, b, execution.grid)
    find_engine(execution.engine).check_values(spec.dtype(a, b))
    planning = replace(request_of(a, b, spec, execution), to_objects=at(request.target).transfers_chunks)
    check_target(request.target, overwrite=request.output.overwrite)
    return StoredProductJob(PlanSource(planning), request.target, "", request.output.overwrite, facts, _names(request))


def _names(request: ProductRequest) -> AxisNames:
    """Return the names of C; they are read once, since C is to be made before they are copied."""
    names = names_for(request.target, request.names)
    names.check()
    return names


def _continue(request: ProductRequest, facts: Facts, place: str, earlier: Facts) -> StoredProductJob | Report | None:
    """Return the job that continues an earlier product, or the report of a finished one.

    None if the earlier run ended before it stored a plan, and there is no older C; its remains are removed.
    """
    if earlier.get("product") != facts["product"]:
        if has_plan_of(place, facts["product"]):
            raise CorruptError(f"{place}/zarr.json: its facts about the product were altered; use --overwrite")
        raise other_product(place)
    execution = request.execution
    if earlier.get("state") == "complete":
        _complete_replacement(place, request.target)
        m = open_finished(request.target)
        limit = parse_bytes(execution.memory_limit or DEFAULT_MEMORY_LIMIT)  # nothing runs within it
        return Report(m.nnz, 0, 0.0, execution.engine, 0, limit, {}, "already finished", {}, block_size=m.blocksize)
    plan = read_plan(place, facts["product"])
    if plan is None and place != request.target:
        raise ResumeError(
            f"{place}, which was to replace {request.target}, has lost its plan ({place}/{PLAN}) or never had one, and "
            f"cannot be resumed: start again with --overwrite (overwrite=True); {request.target} is unchanged"
        )
    if plan is None:
        logger.warning("%s: a run ended before it had stored its plan; its files are removed", place)
        at(place).remove()
        return None
    if plan.on_gpu and execution.memory_limit is not None:
        plan = plan.through_gpu(parse_bytes(execution.memory_limit))
    _check_still_fits(plan, place, execution)
    planning = PlanRequest(request.a, request.b, plan.engine, plan.memory_limit, plan.host_limit, spec=request.spec)
    return StoredProductJob(PlanSource(planning, plan), request.target, place, False, facts, _names(request))


def _complete_replacement(place: str, target: str) -> None:
    """Do what a run that was killed after C was whole left undone: remove its notes, put C in its place."""
    if removed := notes.remove_remains(place):
        logger.warning("%s: removed what a run left that was killed when C was whole: %s", place, ", ".join(removed))
    if place != target:
        _check_whole(place, target)
        put_in_place(place, target)
        logger.warning("%s: replaced by the C that a killed run had finished at %s", target, place)


def _check_whole(place: str, target: str) -> None:
    """Read a finished C whole before it replaces another matrix: power may have failed before it was on the disk."""
    if not at(place).has_files:
        return
    found = check(place)
    if not found.ok:
        raise ResumeError(
            f"{place}, which was to replace {target}, was finished and is damaged: {found.problems[0]}. Begin anew "
            f"with --overwrite (overwrite=True); {target} is as it was before"
        )


def open_finished(target: str) -> StoredMatrix:
    """Open a C that is finished already; on a file system see that all its Zarr chunks reached the disk.

    Raises `CorruptError` Names a Zarr chunk that was lost, as when power fails.
    """
    m = open_matrix(target)
    if at(target).has_files:
        m.fingerprint()
    return m


def _check_still_fits(plan: Plan, place: str, execution: ExecutionOptions) -> None:
    """Refuse to continue by a stored plan that exceeds a limit of host memory given now."""
    name = "host_limit" if plan.on_gpu else "memory_limit"
    limit = execution.host_limit if plan.on_gpu else execution.memory_limit
    if limit is not None and parse_bytes(limit) < plan.projected_host_memory:
        raise ResumeError(
            f"{place} was begun with blocks that take up to {format_bytes(plan.projected_host_memory)} on a worker, "
            f"more than {name}={limit}: resume with as much, or start again with --overwrite"
        )


def product_facts(a: StoredMatrix, b: StoredMatrix, spec: StoredProductSpec) -> dict[str, Any]:
    """Return the record that C carries: where it comes from, and fingerprints of operands and options.

    Returns ``provenance`` and ``product``. A product is resumed only if ``product`` is equal.
    """
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


def other_product(place: str) -> ResumeError:
    """Return the error to raise if the product at `place` has other operands or options."""
    return ResumeError(
        f"{place} is a product of other matrices or options: A, B, the mask or an option changed; use --overwrite"
    )
