"""One part of a product that several runs make, each its rows: C is whole when the last part is."""

from __future__ import annotations

import re
from dataclasses import replace

from spdist.errors import InputError
from spdist.jobs.by_rows import multiply_by_rows, other_product, product_facts
from spdist.jobs.report import Report
from spdist.jobs.request import ProductRequest
from spdist.storage import groups
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.names.anndata_frames import frames_around
from spdist.storage.names.names import NO_NAMES
from spdist.storage.parts.rows import part_rows, rows_of
from spdist.storage.parts.whole import join_parts, part_name
from spdist.stores.registry import at

MOST_PARTS = 10_000
"""Parts of a product at most: each is opened to read C."""


def part_of(value: object) -> tuple[int, int]:
    """Return which part of how many an option means: ``"3/8"`` or ``(3, 8)``."""
    pair = value if isinstance(value, tuple | list) else re.findall(r"\d+", str(value))
    is_text = isinstance(value, str) and re.fullmatch(r"\s*\d+\s*/\s*\d+\s*", value) is not None
    numbers = [int(one) for one in pair] if is_text or all(type(one) is int for one in pair) else []
    if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1] <= MOST_PARTS:
        raise InputError(
            f"part={value!r}: write K/N, part K of N, with K from 1 to N and N up to {MOST_PARTS:,}: for instance 3/8"
        )
    return numbers[0], numbers[1]


def multiply_part(request: ProductRequest, begin: float) -> Report:
    """Make one part of C; if it is the last that was missing, make C whole.

    `begin`: seconds of `time.perf_counter` at which the call began.
    Raises `InputError` if the request cannot be met in parts; nothing has been written.
    Errors besides as of `multiply_by_rows`.
    """
    number, count = part_of(request.output.part)
    _refuse_what_needs_all(request)
    request = replace(request, a=_known(request.a), b=_known(request.b))
    request.spec.check(request.a, request.b, request.execution.engine)
    request.check_apart()
    product = product_facts(request.a, request.b, request.spec)
    earlier = groups.read_facts(request.target)
    if earlier and earlier.get("product") != product["product"]:
        raise other_product(request.target)
    if not at(request.target).exists():
        at(request.target).check_parent()
    part = _request_of(request, number, count)
    at(part.target).make_parent()
    report = multiply_by_rows(part, begin)
    urls = [f"{request.target}/{part_name(k, count)}" for k in range(1, count + 1)]
    found = [groups.read_facts(url) for url in urls]
    missing = [k for k, facts in enumerate(found, 1) if facts.get("state") != "complete"]
    if not missing and "parts" not in earlier:
        for k, facts in enumerate(found, 1):
            one = _request_of(request, k, count)
            if facts.get("product") != product_facts(one.a, one.b, one.spec)["product"]:
                raise other_product(one.target)
        join_parts(request.target, [open_matrix(url) for url in urls], product, request.names)
    return replace(report, part=f"{number}/{count}", missing=missing)


def _refuse_what_needs_all(request: ProductRequest) -> None:
    """Refuse options of a product that need more of A than the rows of one part."""
    reasons = {
        "transposes the whole of A or B in each part: store the transpose with `spdist transpose`": (
            request.transpose_a or request.transpose_b
        ),
        "needs all rows: leave out triangle": request.spec.per_row.triangle is not None,
        "replaces no C: remove it first, or pass --resume (resume=True)": request.output.overwrite,
        "cannot lie in an AnnData, which reads no matrix in parts": frames_around(request.target) is not None,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise InputError(f"part={request.output.part!r}: a product in parts {reason}")


def _known(m: StoredMatrix) -> StoredMatrix:
    """Return a matrix whose fingerprint is read once."""
    return replace(m, known=m.fingerprint())


def _request_of(request: ProductRequest, number: int, count: int) -> ProductRequest:
    """Return the request for one part: some rows of A and of the mask, and a target in C's folder."""
    start, stop = part_rows(request.a, number, count)
    mask = request.spec.mask
    rows = replace(
        request.spec,
        per_row=request.spec.per_row.of_rows(start, stop),
        mask=rows_of(mask, start, stop) if isinstance(mask, StoredMatrix) else mask,
    )
    target = f"{request.target}/{part_name(number, count)}"
    return replace(request, a=rows_of(request.a, start, stop), spec=rows, target=target, names=NO_NAMES)
