"""The specification of a stored product: semiring, mask, triangle, epilogue and selection of entries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spdist.errors import InputError
from spdist.kernels.engine import find_engine
from spdist.kernels.product_spec import PLAIN, ProductSpec
from spdist.kernels.reduction_spec import diagonal_pattern
from spdist.matrices.checks import check_canonical, check_mask_shape
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, result_dtype
from spdist.storage.matrix import StoredMatrix, refuse_blocks


@dataclass(frozen=True)
class Diagonal:
    """The pattern of an identity matrix, as a mask that needs no storage; has the methods of a stored mask."""

    shape: tuple[int, int]
    url: str = "the diagonal"

    def rows_indices(self, start: int, stop: int) -> CSR:
        """Return rows ``[start:stop)``."""
        return diagonal_pattern(start, stop, self.shape[1])

    def lengths(self) -> Int64Array:
        """Return the number of entries in each row."""
        return np.diff(diagonal_pattern(0, *self.shape).indptr)

    def fingerprint(self) -> str:
        """Return text that differs from every other mask's."""
        return self.url


@dataclass(frozen=True)
class StoredProductSpec:
    """What to compute from stored A and B, and which entries of it to store as C.

    Raises `InputError` if `complement` is set without a mask.
    """

    per_row: ProductSpec = PLAIN  # the specification of each row, without a mask
    mask: StoredMatrix | Diagonal | None = None  # C has entries only in positions where the mask stores one
    complement: bool = False  # C has entries only in positions where the mask stores none

    def __post_init__(self) -> None:
        if self.complement and self.mask is None:
            raise InputError("complement=True needs a mask")

    @property
    def plain(self) -> bool:
        """Whether C is the whole product by plus and times."""
        return self.per_row.plain and self.mask is None

    @property
    def fused(self) -> bool:
        """Whether rows are masked, cut or changed while they are computed."""
        return self.per_row.fused or self.mask is not None

    def dtype(self, a: StoredMatrix, b: StoredMatrix) -> np.dtype[Any]:
        """Return the dtype of C."""
        if self.plain:
            return result_dtype(a.dtype, b.dtype)
        return self.per_row.semiring.result_dtype(a.dtype, b.dtype)

    def check(self, a: StoredMatrix, b: StoredMatrix, engine: str) -> None:
        """Check that the engine can compute this product of A and B.

        Raises `InputError` if the engine lacks an option, no value reaches the threshold, or Numba does not compile a
        function.
        Raises `MatrixError` if the mask has another shape than C, a triangle is asked of a C that is not square, or
        complex values would have to be compared.
        """
        multiplies = find_engine(engine)
        if not self.plain:
            multiplies.check_options(self.per_row)
            refuse_blocks("semirings, masks, triangles, epilogues, threshold and top_n", a, b, self.mask)
        shape = a.nrows, b.ncols
        self.per_row.check_square(shape)
        self.per_row.check(shape, self.dtype(a, b))
        if self.per_row.functions and multiplies.uses_cpus:  # a GPU takes expressions in C instead
            from spdist.kernels.cpu import numba_compile

            numba_compile.check_functions(self.per_row.functions, self.dtype(a, b))
        if self.mask is not None:
            check_mask_shape(self.mask.shape, shape)

    def facts(self) -> dict[str, Any]:
        """Return what identifies the specification, as JSON can hold it: a product resumes only with equal facts."""
        mask = None if self.mask is None else self.mask.fingerprint()
        return {**self.per_row.facts(), "mask": mask, "complement": self.complement}

    def read_mask(self, start: int, stop: int) -> CSR | None:
        """Read rows ``[start:stop)`` of the mask; None without a mask."""
        if self.mask is None:
            return None
        rows = self.mask.rows_indices(start, stop)
        check_canonical(rows, self.mask.url, start)  # kernels write to the places that a mask names
        return rows

    def of_rows(self, start: int, stop: int, mask: CSR | None, *, partial: bool = False) -> ProductSpec:
        """Return the specification of rows ``[start:stop)``, given the mask's rows.

        With `partial`, for a partial product along the inner dimension, without the steps that need the whole sum.
        """
        complement = self.complement and mask is not None
        spec = replace(self.per_row.of_rows(start, stop), mask=mask, complement=complement)
        return spec.unfinished if partial else spec


WHOLE = StoredProductSpec()
"""The whole product by plus and times."""
