"""Which variable of a MATLAB file is the matrix."""

from __future__ import annotations

from spdist.storage.formats.hdf5.description import RefusedError, listed

FORMAT = "a MATLAB file"

ABOUT = frozenset({"A", "name", "title", "id", "date", "author", "ed", "kind", "notes", "Zeros"})
"""Fields of SuiteSparse's struct ``Problem`` that hold the matrix, or say what it is."""

NUMERIC = frozenset(
    {"double", "single", "logical", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
)
"""MATLAB's classes of arrays of numbers."""


def choose(sparse: list[str], dense: list[str], others: list[str]) -> str:
    """Return the only sparse variable, or the only dense one; refuse a file that has several or none."""
    if len(sparse) > 1:
        raise RefusedError(f"it holds several sparse matrices: {listed(sparse)}; name one, as in FILE.mat::{sparse[0]}")
    if sparse:
        return sparse[0]
    if len(dense) > 1:
        raise RefusedError(
            f"it holds no sparse matrix, but dense ones: {listed(dense)}; name one, as in FILE.mat::{dense[0]}, with "
            f"--dense (dense=True)"
        )
    if dense:
        return dense[0]
    if not others:
        raise RefusedError("it holds no variables")
    raise RefusedError(
        f"none of its variables is a matrix of numbers; there is {listed(others)}; a field of a struct is named as in "
        f"FILE.mat::STRUCT.FIELD"
    )


def fields_left_out(fields: list[str]) -> list[str]:
    """Return what SuiteSparse's struct ``Problem`` holds besides its matrix."""
    found = ["explicit zeros (Problem.Zeros)"] if "Zeros" in fields else []
    return found + [f"Problem.{name}" for name in fields if name not in ABOUT]
