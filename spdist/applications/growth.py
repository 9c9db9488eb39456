"""A stored product that follows its operands: when these got more rows, only what is new is computed.

New rows of A give new rows of C, ``new A @ B``. Of ``A @ B.T``, new rows of B also give new columns, ``A @ new B.T``.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import scipy.sparse as sp

from spdist.api import products as api
from spdist.applications.operands import scratch
from spdist.errors import InputError
from spdist.inmemory.spgemm import spgemm
from spdist.jobs.operands import open_operand
from spdist.jobs.report import Callbacks
from spdist.matrices.csr import CSR, from_scipy
from spdist.options import ExecutionOptions, WhereKeywords, lists_keywords, options_of, select
from spdist.storage import groups
from spdist.storage.atomic_replace import staged_matrix
from spdist.storage.foreign import versions
from spdist.storage.lock import hold_target
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.names.names import NO_NAMES, AxisNames
from spdist.storage.names.of_matrix import names_for
from spdist.storage.writer import MatrixWriter

PART_ENTRIES = 1 << 20
"""Entries of C that are read at a time."""
OPTIONS = {"semiring", "top_n", "threshold", "mask", "complement"}
"""Options of a product that can follow its operands; without a mask."""


@lists_keywords(WhereKeywords)
@versions.watched()
def update(
    c: str | Path | StoredMatrix,
    a: Any = None,
    b: Any = None,
    *,
    steal: bool = False,
    callbacks: Callbacks | None = None,
    **keywords: Unpack[WhereKeywords],
) -> StoredMatrix:
    """Bring a stored product up to date after `append` gave its operands more rows; only what is new is computed.

    C is the one that `multiply` made, and has the same bits as if it were made anew: rows of A that were appended
    become rows of C, and with `transpose_b`, rows of B become columns. C is read and written once for new columns, and
    not at all for new rows. It keeps its threshold and its top-n.

    Parameters
    ----------
    c : path, URL or StoredMatrix
        Made by `multiply` without a mask, an epilogue, `transpose_a` or `axis=0`.
    a, b : path, URL or StoredMatrix, optional
        By default where they were when C was made.
    steal : bool
        As in `multiply`.
    callbacks, engine, memory_limit, host_limit, workers, scheduler, security
        As in `multiply`.

    Returns
    -------
    StoredMatrix
        C, opened again.

    Raises
    ------
    InputError
        If C is no such product, or A or B is not what it was with rows appended. Nothing has been written.
    SpdistError
        If a product failed; C is as it was.

    Examples
    --------
    >>> import scipy.sparse as sp, spdist
    >>> a = spdist.save("memory://a.zarr", sp.eye_array(3), overwrite=True)
    >>> report = spdist.multiply(a, a, "memory://c.zarr", transpose_b=True, overwrite=True)
    >>> a = spdist.append("memory://a.zarr", sp.eye_array(1, 3))
    >>> update("memory://c.zarr").to_scipy().toarray().astype(int)
    array([[1, 0, 0, 1],
           [0, 1, 0, 0],
           [0, 0, 1, 0],
           [1, 0, 0, 1]])
    """
    (execution,) = options_of(update, keywords, ExecutionOptions)
    execution.check()
    old = open_operand(c)
    with hold_target(old.url, steal=steal), ExitStack() as stack:
        old = open_matrix(old.url)
        made = _Made.read(old, a, b)
        rows, columns = made.a.nrows - made.rows, made.b.nrows - made.columns if made.transpose_b else 0
        if not rows and not columns:
            return old
        places = stack.enter_context(scratch(old.url, "new-a", "new-b", "new-rows", "new-columns"))
        options = {**made.options, "transpose_b": made.transpose_b, "names": False, "callbacks": callbacks}
        options |= select(keywords, WhereKeywords)
        api.multiply(_tail(made.a, made.rows, places[0]), made.b, places[2], **options)
        below, beside = open_matrix(places[2]), None
        if columns:
            api.multiply(made.a, _tail(made.b, made.columns, places[1]), places[3], **options)
            beside = open_matrix(places[3])
        _write(old, below, beside, made, steal)
    return open_matrix(old.url)


class _Made(NamedTuple):
    """How C was made."""

    a: StoredMatrix
    b: StoredMatrix
    transpose_b: bool
    options: dict[str, Any]
    rows: int  # of A, then
    columns: int  # of C then, if B is transposed
    facts: dict[str, Any]  # that C carries

    @classmethod
    def read(cls, c: StoredMatrix, a: Any, b: Any) -> _Made:
        """Read it from C; find the versions of A and B.

        Raises `InputError` if C cannot follow its operands.
        """
        facts = groups.read_facts(c.url)
        product, factors = facts.get("product"), facts.get("made_of")
        if product is None or factors is None:
            raise InputError(
                f"{c.url} is no product of `spdist multiply` that says what it was made of: multiply again, with "
                f"overwrite=True"
            )
        transpose_b, options = bool(factors[1]["transposed"]), product.get("options", {})
        is_cut = options.keys() - OPTIONS or options.get("mask") is not None
        if factors[0]["transposed"] or c.blocksize is not None or is_cut:
            raise InputError(
                f"{c.url} was made with a mask, an epilogue, in blocks, by columns or of the transpose of A: multiply "
                f"again, with overwrite=True"
            )
        places = facts["provenance"]["a"], facts["provenance"]["b"]
        found = [open_operand(place if given is None else given) for given, place in zip((a, b), places, strict=True)]
        lengths = [_rows_then(m, one["fingerprint"]) for m, one in zip(found, factors, strict=True)]
        if not transpose_b and lengths[1] != found[1].nrows:
            raise InputError(f"{found[1].url} got more rows, for which A has no columns: multiply again")
        kept = {name: value for name, value in options.items() if name not in ("mask", "complement")}
        return cls(found[0], found[1], transpose_b, kept, lengths[0], lengths[1], facts)


def _rows_then(m: StoredMatrix, known: str) -> int:
    """Return how many rows a matrix had when its fingerprint was the known one."""
    before = [*groups.read_facts(m.url).get("appended", []), {"rows": m.nrows, "fingerprint": m.fingerprint()}]
    found = next((int(one["rows"]) for one in before if one["fingerprint"] == known), None)
    if found is None:
        raise InputError(
            f"{m.url} is not what C was made of, with rows appended to it: multiply again, with overwrite=True"
        )
    return found


def _tail(m: StoredMatrix, first: int, place: str) -> StoredMatrix:
    """Store the rows of a matrix from `first` on."""
    writer = MatrixWriter(place, m.ncols, m.dtype, {})
    for start, stop, _ in m.row_blocks(PART_ENTRIES, first):
        writer.append(m.rows(start, stop))
    return writer.close()


def _write(old: StoredMatrix, below: StoredMatrix, beside: StoredMatrix | None, made: _Made, steal: bool) -> None:
    """Replace C by one with more rows, and more columns."""
    ncols, nrows = below.ncols, old.nrows + below.nrows
    product = groups.read_facts(below.url)["product"] | {"a": made.a.fingerprint()}
    known = product["a"], made.b.fingerprint() if made.transpose_b else product["b"]
    factors = [
        one | {"fingerprint": fingerprint} for one, fingerprint in zip(made.facts["made_of"], known, strict=True)
    ]
    provenance = made.facts["provenance"] | {"a": made.a.url, "b": made.b.url}
    facts = {"provenance": provenance, "product": product, "made_of": factors}
    named = old.names.rows is not None or old.names.columns is not None
    names = AxisNames(made.a.names.rows, made.b.names.rows if made.transpose_b else made.b.names.columns)
    with staged_matrix(old.url, overwrite=True, steal=steal, shape=(nrows, ncols)) as stage:
        carried = names_for(stage.target, names if named else NO_NAMES)
        if beside is None:
            writer = MatrixWriter.continuing(old, stage.url, facts, carried)
        else:
            writer = MatrixWriter(stage.url, ncols, below.dtype, facts, carried)
            for start, stop, _ in old.row_blocks(PART_ENTRIES):
                writer.append(_joined(old.rows(start, stop), beside.rows(start, stop), made.options.get("top_n")))
        for start, stop, _ in below.row_blocks(PART_ENTRIES):
            writer.append(below.rows(start, stop))
        writer.close()


def _joined(left: CSR, right: CSR, top_n: int | None) -> CSR:
    """Return rows of C with new columns, cut to top-n again."""
    m = sp.csr_array(sp.hstack([left.to_scipy(), right.to_scipy()], format="csr"))
    if top_n is not None:
        m = spgemm(sp.eye_array(m.shape[0], dtype=m.dtype, format="csr"), m, top_n=top_n)
    return from_scipy(m)
