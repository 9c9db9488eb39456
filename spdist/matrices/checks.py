"""Checks of matrices, each written once: structure, canonical form, and shapes that must fit."""

from __future__ import annotations

import numpy as np

from spdist.errors import MatrixError
from spdist.matrices.pattern import PatternFacts, RowArrays, Shape, pattern_facts


def check_product_shapes(a: Shape, b: Shape, names: tuple[str, str] = ("A", "B")) -> None:
    """Check that the operands of a product fit: A is n x k and B is k x m.

    `a, b`: (nrows, ncols).
    `names`: what the message calls the operands.
    Raises `MatrixError` if A does not have as many columns as B has rows; states both shapes, and how to multiply by
    the transpose if they are equal.

    Examples
    --------
    >>> check_product_shapes((2, 3), (4, 5))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    spdist.errors.MatrixError: shapes do not fit: A is 2 x 3 and B is 4 x 5; A must have as many columns ...
    """
    if a[1] == b[0]:
        return
    hint = "; for A @ A.T multiply by A.T, or pass transpose_b (--transpose-b) where the matrices are stored"
    raise MatrixError(
        f"shapes do not fit: {names[0]} is {a[0]:,} x {a[1]:,} and {names[1]} is {b[0]:,} x {b[1]:,}; {names[0]} "
        f"must have as many columns as {names[1]} has rows{hint if tuple(a) == tuple(b) else ''}"
    )


def check_mask_shape(mask: Shape, c: Shape) -> None:
    """Check that a mask has the shape of the product that it selects from.

    `mask, c`: (nrows, ncols).
    Raises `MatrixError` if the shapes differ; names both.

    Examples
    --------
    >>> check_mask_shape((2, 3), (2, 4))
    Traceback (most recent call last):
    spdist.errors.MatrixError: the mask is 2 x 3, but C is 2 x 4
    """
    if tuple(mask) != tuple(c):
        raise MatrixError(f"the mask is {mask[0]:,} x {mask[1]:,}, but C is {c[0]:,} x {c[1]:,}")


def check_structure(
    m: RowArrays, name: str = "the matrix", first_row: int = 0, threads: int | None = None
) -> PatternFacts:
    """Check that the arrays fit together and that every column is in range.

    `m`: A matrix, or a row block of one.
    `first_row`: number of the first row in messages.
    `threads`: most threads that look at a large matrix; by default one a CPU.
    Raises `MatrixError`; names the matrix, the row and the value.

    Examples
    --------
    >>> from spdist.matrices.csr import CSR
    >>> _ = check_structure(CSR(np.array([0, 1]), np.array([7]), np.ones(1), (1, 4)), "A")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    spdist.errors.MatrixError: A: column 7 in row 0 is outside [0, 4); rebuild the matrix ...
    """
    nrows, ncols = m.shape
    if m.indptr.shape != (nrows + 1,) or m.indptr[0] != 0:
        raise MatrixError(f"{name}: indptr must hold {nrows + 1:,} offsets that start at 0")
    if int(m.indptr[-1]) != len(m.indices) or len(m.indices) != len(m.data):
        raise MatrixError(
            f"{name}: indptr ends at {int(m.indptr[-1]):,}, but there are {len(m.indices):,} indices and "
            f"{len(m.data):,} values"
        )
    facts = pattern_facts(m, threads)
    if not facts.offsets_rise:
        row = int(np.argmax(np.diff(m.indptr) < 0))
        raise MatrixError(f"{name}: indptr falls after row {first_row + row:,}; offsets must not decrease")
    if facts.low < 0 or facts.high >= ncols:
        at = int(np.argmax((m.indices < 0) | (m.indices >= ncols)))
        row = int(np.searchsorted(m.indptr, at, side="right")) - 1
        raise MatrixError(
            f"{name}: column {int(m.indices[at]):,} in row {first_row + row:,} is outside [0, {ncols:,}); "
            f"rebuild the matrix or correct its shape"
        )
    return facts


def is_canonical(m: RowArrays) -> bool:
    """Whether the columns of every row rise strictly: sorted and free of duplicates.

    Examples
    --------
    >>> from spdist.matrices.csr import CSR
    >>> is_canonical(CSR(np.array([0, 2]), np.array([3, 1]), np.ones(2), (1, 4)))
    False
    """
    return pattern_facts(m).is_canonical


def check_canonical(
    m: RowArrays, name: str = "the matrix", first_row: int = 0, threads: int | None = None
) -> PatternFacts:
    """Check structure and canonical form.

    Raises `MatrixError`; names the first row that is not sorted or holds a duplicate.
    """
    facts = check_structure(m, name, first_row, threads)
    if facts.is_canonical:
        return facts
    falls = np.diff(m.indices) <= 0
    starts = m.indptr[1:-1]
    falls[starts[(starts > 0) & (starts < len(m.indices))] - 1] = False
    at = int(np.argmax(falls))
    row = int(np.searchsorted(m.indptr, at, side="right")) - 1
    what = "holds a duplicate" if m.indices[at] == m.indices[at + 1] else "is not sorted"
    raise MatrixError(
        f"{name}: row {first_row + row:,} {what} at column {int(m.indices[at + 1]):,}; rewrite the matrix in canonical "
        f"form, for instance with spdist.save(path, matrix) after sum_duplicates()"
    )
