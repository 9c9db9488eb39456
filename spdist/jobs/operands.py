"""Operands of a call: open stored matrices, recognise matrices in memory, write transposed copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from spdist.errors import InputError
from spdist.foundation import phases
from spdist.foundation.other_objects import refuse_other_objects
from spdist.interop.dask_arrays import is_dask_array
from spdist.matrices.bsr import BSR, is_scipy_bsr
from spdist.matrices.bsr import from_scipy as bsr_from_scipy
from spdist.matrices.csr import CSR, from_scipy, is_scipy
from spdist.options import ProductOptions
from spdist.storage.foreign.checked import checked
from spdist.storage.matrix import StoredMatrix, Transposed, open_matrix
from spdist.storage.product_spec import StoredProductSpec
from spdist.storage.transpose import transposed_copy

MatrixLike = Any
"""A stored matrix: its path, its URL, the opened matrix; a `zarr.Group`, or the sparse dataset of a backed AnnData."""


def open_operand(matrix: MatrixLike) -> StoredMatrix:
    """Return a stored matrix, opened if it is a path or a URL.

    Raises `InputError` if the matrix is in memory.
    """
    refuse_other_objects(matrix)
    if isinstance(matrix, Transposed):
        raise InputError(
            f"the transpose of {matrix.matrix.url} is not stored: multiply, matmul and verify take it, or store it "
            f"with spdist.transpose(a, 'AT.zarr')"
        )
    if is_dask_array(matrix):
        raise InputError("a Dask array where a stored matrix is expected: spdist.from_dask(x, 'A.zarr') stores it")
    matrix = place_of(matrix)
    if not isinstance(matrix, StoredMatrix | str | Path):
        raise InputError(
            f"a matrix in memory ({type(matrix).__name__}) where a stored one is expected: spdist.save('A.zarr', m) "
            f"stores it, and spdist.matmul multiplies matrices in memory"
        )
    return matrix if isinstance(matrix, StoredMatrix) else open_matrix(matrix)


def place_of(matrix: Any) -> Any:
    """Return the path or URL of a Zarr group, or of what AnnData keeps in one; anything else as it is.

    Raises `InputError` if it is kept in HDF5, or in a store that other processes cannot open.
    """
    group = getattr(matrix, "group", matrix)  # AnnData's sparse dataset has one
    kind = type(group)
    if kind.__module__.split(".")[0] == "h5py":
        raise InputError(
            f"a matrix in HDF5 ({group.file.filename}) is imported first: spdist import {group.file.filename} A.zarr"
        )
    if not (kind.__module__.startswith("zarr.") and kind.__name__ == "Group"):
        return matrix
    place = str(group.store_path)
    if place.startswith("memory:"):
        raise InputError(f"{place} is a Zarr group in memory, which cannot be opened by its name: store it in a folder")
    return place.removeprefix("file://")


def resolved(operands: tuple[Any, Any], product: ProductOptions) -> tuple[tuple[Any, Any], ProductOptions]:
    """Replace views of transposes by their matrices, and set the options that transpose them instead.

    `operands`: (object, object): A and B as given.
    """
    a, b = operands
    flags = {"transpose_a": isinstance(a, Transposed), "transpose_b": isinstance(b, Transposed)}
    plain = tuple(m.matrix if isinstance(m, Transposed) else m for m in operands)
    changed = {name: getattr(product, name) != flag for name, flag in flags.items()}
    return (plain[0], plain[1]), replace(product, **changed)


def open_factors(a: MatrixLike, b: MatrixLike) -> tuple[StoredMatrix, StoredMatrix]:
    """Open two stored matrices; check a matrix that spdist did not write whole, unless it passed the check before.

    Raises `InputError` if a matrix is in memory, or not canonical.
    Raises `CorruptError` if a Zarr chunk of a matrix from elsewhere is missing or altered.
    """
    left, right = open_operand(a), open_operand(b)
    known = checked(left)
    return known, known if right == left else checked(right)


def are_in_memory(a: object, b: object, mask: object) -> bool:
    """Whether A, B and the mask, if there is one, are in memory.

    Returns false if all are stored.
    Raises `InputError` if some are in memory and others stored, or one is no matrix.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> a = sp.eye_array(3)
    >>> are_in_memory(a, a, None), are_in_memory("A.zarr", "B.zarr", None)
    (True, False)
    """
    refuse_other_objects(a, b, mask)
    a, b, mask = (place_of(m.matrix if isinstance(m, Transposed) else m) for m in (a, b, mask))
    for m in (a, b, mask):
        if not (m is None or isinstance(m, BSR | StoredMatrix | str | Path) or is_scipy(m)):
            raise InputError(
                f"a {type(m).__name__} where a matrix is expected: SciPy's, or the path of a stored one; CuPy's are "
                f"for spdist.spgemm"
            )
    in_memory = [is_scipy(m) or isinstance(m, BSR) for m in (a, b, mask) if m is not None]
    if any(in_memory) and not all(in_memory):
        what = "the operands" if mask is None else "the operands and the mask"
        raise InputError(f"some of {what} are in memory and others stored: store all with spdist.save, or open all")
    return all(in_memory)


def canonical_rows(matrix: object) -> CSR:
    """Return a matrix in memory as a canonical `CSR`; its values are dense blocks if the matrix is kept in blocks."""
    if isinstance(matrix, CSR):
        return matrix
    if isinstance(matrix, BSR) or is_scipy_bsr(matrix):
        return (matrix if isinstance(matrix, BSR) else bsr_from_scipy(matrix)).rows()
    return from_scipy(matrix)


def transposed(matrix: Any) -> Any:
    """Return the transpose of a matrix in memory."""
    return bsr_from_scipy(matrix.to_scipy().T) if isinstance(matrix, BSR) else matrix.T


def with_transposed_shape(matrix: StoredMatrix) -> StoredMatrix:
    """Return the matrix with the shape of its transpose, for checks; its arrays are not transposed."""
    return replace(matrix, shape=matrix.shape[::-1])


@contextlib.contextmanager
def transposed_copies(
    target: str, a: tuple[StoredMatrix, bool], b: tuple[StoredMatrix, bool]
) -> Iterator[tuple[StoredMatrix, StoredMatrix]]:
    """Yield A and B, each transposed if its flag says so; remove the transposed copies afterwards.

    `target`: A normalised path or URL; copies lie next to it.
    `a, b`: (StoredMatrix, bool): operand, and whether to transpose it.
    Yields (StoredMatrix, StoredMatrix): A and B, ready to be multiplied.
    """
    with contextlib.ExitStack() as stack:
        made = []
        for name, (matrix, transpose) in (("a", a), ("b", b)):
            if not transpose:
                made.append(matrix)
                continue
            with phases.during("transpose"):
                made.append(stack.enter_context(transposed_copy(matrix, f"{target}.spdist-transposed-{name}")))
        yield made[0], made[1]


def stored_spec(product: ProductOptions) -> StoredProductSpec:
    """Return the options of a stored product, its semiring looked up and its mask opened.

    Raises `InputError` if the mask is in memory, or an option is wrong in itself.
    """
    if is_scipy(product.mask):
        raise InputError("the mask of a stored product is stored too: spdist.save('M.zarr', mask)")
    per_row = product.row_spec()
    if per_row.epilogue is not None and per_row.epilogue.idle:
        per_row = replace(per_row, epilogue=None)
    mask = None if product.mask is None else checked(open_operand(product.mask))
    return StoredProductSpec(per_row, mask, product.complement)
