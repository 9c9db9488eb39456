"""Recompute rows of C that vectors cannot check, and compare entry by entry, a bounded number of products at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray, index_dtype
from spdist.storage.chunked_array import ChunkedArray
from spdist.verification.operands import Operands, RowRange, read_rows
from spdist.verification.rounding_bounds import BoolArray, product_facts, wrong_values

TRUE = 1 << 21
"""Weight of a True in sums of bool products; a stored False weighs 1.

A sum of `Limits.bool_products`, 2^20, products that each contain a False is below ``TRUE * TRUE``.
"""


@dataclass(frozen=True)
class _EntryTerms:
    """Some entries of ``A @ B``."""

    # (n,) int64: ``row * ncols + column`` of each entry, rising; the row is counted from the first of these rows
    keys: Int64Array
    table: ValueArray  # (facts, n): A column of sums for each entry: the value, or `ProductFacts` of floats


def first_wrong_entry(operands: Operands, block: RowRange, rows: Int64Array) -> str | None:
    """Recompute rows of C and compare them entry by entry.

    `operands`: with the offsets of all rows of B.
    `block`: with offsets of A and of C.
    `rows`: (n,) int64: rows of the range to compute, counted from its start.
    Returns position of the first wrong entry, and what is wrong; None if all entries are right.
    """
    pieces = list(read_rows(operands.c, block.offsets[1], block.start, operands.dtype, operands.limits.entries))
    indices, data = (np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("indices", "data"))
    c = CSR(block.offsets[1] - block.offsets[1][0], indices, data, (block.nrows, operands.ncols))
    for part, terms in _expected(operands, block, rows):
        own = _take(c, part)
        keys = _entry_rows(own) * operands.ncols + own.indices
        found = _first_difference(operands, terms, keys, own.data)
        if found is not None:
            key, what = found
            row, column = divmod(key, operands.ncols)
            return f"row {block.start + int(part[row]):,}, column {column:,} of C: {what}"
    return None


def _expected(operands: Operands, block: RowRange, rows: Int64Array) -> Iterator[tuple[Int64Array, _EntryTerms]]:
    """Yield `rows` of ``A @ B`` in order, a bounded number of products at a time; parts of a long row are merged."""
    limits = operands.limits
    bools = operands.method == "recompute"
    limit, op = (limits.bool_products, np.maximum) if bools else (limits.products, np.add)
    held: tuple[slice, _EntryTerms] | None = None
    for piece in operands.read(operands.a, block, 0):
        a = _take(piece, rows)
        for chosen, cut in _cuts(a, operands.lengths_in_b(a), limit):
            terms = _bool_terms(operands, cut) if bools else _expand(operands, cut)
            if held and held[0] == chosen:
                both = np.concatenate([held[1].table, terms.table], axis=1)
                terms = _compress(np.concatenate([held[1].keys, terms.keys]), both, op)
            elif held:
                yield rows[held[0]], held[1]
            held = chosen, terms
    if held:
        yield rows[held[0]], held[1]


def _cuts(a: CSR, products: Int64Array, limit: int) -> Iterator[tuple[slice, CSR]]:
    """Cut `a` into groups of rows with at most `limit` products, or into parts of one row, of at least one entry."""
    running = sum_before(products)
    at_rows = running[a.indptr]
    row = 0
    while row < a.nrows:
        stop = int(np.searchsorted(at_rows, at_rows[row] + limit, side="right")) - 1
        if stop > row:
            yield slice(row, stop), a.rows(row, stop)
            row = stop
            continue
        at, last = int(a.indptr[row]), int(a.indptr[row + 1])
        while at < last:
            end = min(max(int(np.searchsorted(running, running[at] + limit, side="right")) - 1, at + 1), last)
            part = CSR(np.array([0, end - at]), a.indices[at:end], a.data[at:end], (1, a.ncols))
            yield slice(row, row + 1), part
            at = end
        row += 1


def sum_before(lengths: Int64Array) -> Int64Array:
    """Return the offsets of ranges with the given lengths: 0, then the running sums of the lengths.

    Examples
    --------
    >>> sum_before(np.array([2, 0, 3]))
    array([0, 2, 2, 5])
    """
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _positions_of(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """Return the numbers ``start, start + 1, ...`` of each range, one range after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    out: Int64Array = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return out


def _entry_rows(m: CSR) -> Int64Array:
    return np.repeat(np.arange(m.nrows), np.diff(m.indptr))


def _take(m: CSR, rows: Int64Array) -> CSR:
    """Return some rows of `m`."""
    if len(rows) == m.nrows:
        return m
    lengths = np.diff(m.indptr)[rows]
    at = _positions_of(m.indptr[rows], lengths)
    return CSR(sum_before(lengths), m.indices[at], m.data[at], (len(rows), m.ncols))


def _gather(operands: Operands, rows: IndexArray) -> CSR:
    """Return some rows of B, which must rise."""
    if operands.b_held is not None:
        return _take(operands.b_held, rows.astype(np.int64))
    b, starts = operands.b.matrix, operands.b_offsets[rows]
    lengths = operands.b_offsets[rows + 1] - starts
    at = _positions_of(starts, lengths)
    indices = _gather_array(b.indices, at).astype(index_dtype(b.ncols), copy=False)
    values = _gather_array(b.data, at).astype(operands.work, copy=False)
    return CSR(sum_before(lengths), indices, values, (len(rows), b.ncols))


def _gather_array(array: ChunkedArray, at: Int64Array) -> ValueArray:
    """Return the elements at rising positions, reading one Zarr chunk at a time."""
    out = np.empty(len(at), array.dtype)
    chunks = at // array.chunk
    for k in np.unique(chunks):
        lo, hi = np.searchsorted(chunks, k), np.searchsorted(chunks, k, side="right")
        first = int(k) * array.chunk
        out[lo:hi] = array.read(first, min(first + array.chunk, array.length))[at[lo:hi] - first]
    return out


def _bool_terms(operands: Operands, a: CSR) -> _EntryTerms:
    """Return the OR of ANDs: 2 for each True entry, 1 for each stored False.

    One product of integers computes it: True weighs 2^21 and a stored False 1, so that a sum of up to 2^20 products
    reaches 2^42 only with a True AND True. No sum is zero, so SciPy drops none.
    """
    touched, columns = np.unique(a.indices, return_inverse=True)
    b = _gather(operands, touched)
    left = sp.csr_matrix((_bool_weights(a.data), columns, a.indptr), shape=(a.nrows, len(touched)))
    names, own = (None, b.indices)
    if operands.ncols > 4 * operands.limits.bool_products:  # SciPy takes workspace for every column
        names, own = np.unique(b.indices, return_inverse=True)
    width = operands.ncols if names is None else len(names)
    out = (left @ sp.csr_matrix((_bool_weights(b.data), own, b.indptr), shape=(len(touched), width))).tocsr()
    out.sort_indices()
    found = out.indices if names is None else names[out.indices]
    rows = np.repeat(np.arange(a.nrows), np.diff(out.indptr))
    return _EntryTerms(rows * operands.ncols + found, np.where(out.data >= TRUE * TRUE, 2, 1).astype(np.int8)[None])


def _bool_weights(values: BoolArray) -> Int64Array:
    return np.where(values, TRUE, 1).astype(np.int64)


def _expand(operands: Operands, a: CSR) -> _EntryTerms:
    """Expand all products, sort them and add them up, so that entries whose sum is zero are kept."""
    touched, which = np.unique(a.indices, return_inverse=True)
    b = _gather(operands, touched)
    lengths = np.diff(b.indptr)[which]
    at = _positions_of(b.indptr[which], lengths)
    keys = np.repeat(_entry_rows(a), lengths) * operands.ncols + b.indices[at]
    left, right = np.repeat(a.data, lengths), b.data[at]
    table = (left * right)[None] if operands.work.kind == "u" else product_facts(left, right)
    return _compress(keys, table, np.add)


def _compress(keys: Int64Array, table: ValueArray, op: np.ufunc) -> _EntryTerms:
    """Sort columns of the table by key and combine columns with equal keys."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate([np.ones(min(len(keys), 1), np.bool_), keys[1:] != keys[:-1]]))
    if len(starts) == 0:
        return _EntryTerms(keys, table)
    return _EntryTerms(keys[starts], op.reduceat(table[:, order], starts, axis=1))


def _first_difference(
    operands: Operands, terms: _EntryTerms, keys: Int64Array, values: ValueArray
) -> tuple[int, str] | None:
    """Return the key of the first entry of C that differs from `terms`, and what is wrong with it."""
    if not np.array_equal(keys, terms.keys):
        key = int(np.setxor1d(keys, terms.keys, assume_unique=True)[0])
        return key, "this entry is missing" if key in terms.keys else "A @ B has no entry there"
    if operands.work.kind == "f" or operands.work.kind == "c":
        wanted, wrong = wrong_values(operands.dtype, terms.table, values.astype(operands.work))
    else:
        wanted = terms.table[0] == 2 if operands.work.kind == "b" else terms.table[0].astype(operands.dtype)
        wrong = wanted != values
    if not wrong.any():
        return None
    at = int(np.argmax(wrong))
    return int(keys[at]), f"C holds {values[at]}, A @ B gives {wanted[at]}"
