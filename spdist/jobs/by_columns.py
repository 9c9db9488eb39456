"""A product made by columns of C: the transpose of C is made by rows of ``B.T @ A.T``, and C is written from it."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace

from spdist.foundation import phases
from spdist.jobs.by_rows import multiply_by_rows, open_finished, other_product, product_facts
from spdist.jobs.check import verified
from spdist.jobs.report import Report
from spdist.jobs.request import ProductRequest
from spdist.jobs.target import Facts, check_target, replacement_path
from spdist.kernels.semirings import transposed
from spdist.storage import groups
from spdist.storage import transpose as transposition
from spdist.storage.foreign import versions
from spdist.storage.lock import TargetLock, hold_target, remove_remains
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.product_spec import StoredProductSpec
from spdist.storage.transpose import transposed_copy
from spdist.stores.registry import at

logger = logging.getLogger("spdist")


def multiply_by_columns(request: ProductRequest) -> Report:
    """Make C by columns; the transpose of C stays if the run fails, to be resumed.

    Returns its grid is C's: row and column blocks of the transpose are swapped back.
    Raises `InputError` if the request cannot be met; nothing has been written.
    Raises `SpdistError` if the run failed; durable blocks stay.
    Raises `VerificationError` if C was verified and found false.
    """
    output, target = request.output, request.target
    request.check_mode()
    check_target(target, overwrite=request.may_replace)
    request.check_apart()
    request.check_fit()
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(hold_target(target, steal=output.steal))
        check_target(target, overwrite=request.may_replace)  # another run may have written it in the meantime
        place, replaces = _place_of_transpose(held, resume=output.resume, overwrite=output.overwrite)
        swapped = _transposed_request(request, place, stack)
        facts = product_facts(swapped.a, swapped.b, swapped.spec)
        facts["product"]["axis"] = 0
        if output.resume and not replaces and at(target).exists():
            report = _finished(target, facts)
            if at(place).exists():
                at(place).remove()
                logger.warning("%s: removed the transpose that a killed run had left at %s", target, place)
            if not output.check:
                return report
            c = stack.enter_context(transposed_copy(open_matrix(target), f"{target}.spdist-transposed-c"))
            matrices = swapped.a, swapped.b, c
            return verified(report, matrices, swapped.spec, request.callbacks, target)
        report = multiply_by_rows(swapped, time.perf_counter())
        with phases.during("transpose"), versions.watched():  # the operands are read no more
            transposition.transpose(place, target, overwrite=output.overwrite or replaces, facts=facts)
        at(place).remove()
    return replace(report, grid=dict(zip(report.grid, reversed(report.grid.values()), strict=True)))


def _transposed_request(request: ProductRequest, place: str, stack: contextlib.ExitStack) -> ProductRequest:
    """Return the request for the transpose of C at `place`; the stack removes the transposed copies."""
    swapped = replace(
        request,
        a=request.b,
        b=request.a,
        transpose_a=not request.transpose_b,
        transpose_b=not request.transpose_a,
        names=request.names.T,
    )
    ready = stack.enter_context(swapped.transposed())
    spec, grid = request.spec, request.execution.grid
    mask = spec.mask
    if isinstance(mask, StoredMatrix):
        mask = stack.enter_context(transposed_copy(mask, f"{request.target}.spdist-transposed-mask"))
    return replace(
        ready,
        target=place,
        spec=replace(_transposed_spec(spec), mask=mask),
        execution=replace(request.execution, grid=grid and grid[::-1]),
        output=replace(request.output, overwrite=not request.output.resume),
    )


def _transposed_spec(spec: StoredProductSpec) -> StoredProductSpec:
    """Return the options that make the transpose of C out of ``B.T @ A.T``; the mask is not transposed."""
    epilogue = spec.per_row.epilogue
    per_row = replace(
        spec.per_row,
        semiring=transposed(spec.per_row.semiring),
        epilogue=None if epilogue is None else epilogue.transposed(),
    )
    return replace(spec, per_row=per_row)


def _place_of_transpose(held: TargetLock, *, resume: bool, overwrite: bool) -> tuple[str, bool]:
    """Return where the transpose of C is made, and whether C is to replace another matrix, which its name tells.

    Removes what other runs left.
    """
    target = held.target
    own, other = (f"{place}.spdist-columns" for place in (target, replacement_path(target)))
    replaces = at(other).exists() if resume else overwrite and at(target).exists()
    if resume:
        held.keep(other if replaces else own)
    remove_remains(target)
    return (other if replaces else own), replaces


def _finished(target: str, facts: Facts) -> Report:
    """Return the report of a product that is finished already; refuse another product."""
    if groups.read_facts(target).get("product") != facts["product"]:
        raise other_product(target)
    return Report(open_finished(target).nnz, 0, 0.0, "auto", 0, 0, {}, "already finished", {})
