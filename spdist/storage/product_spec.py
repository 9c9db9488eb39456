"""What a stored product is turned into: the options of its rows, with a mask that is stored too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spdist.engines import GPU_ENGINES
from spdist.errors import InputError
from spdist.kernels.product_spec import PLAIN, ProductSpec
from spdist.kernels.reduction_spec import diagonal
from spdist.matrices.checks import check_canonical, check_mask_shape
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, result_dtype
from spdist.storage.matrix import StoredMatrix, refuse_blocks


@dataclass(frozen=True)
class Diagonal:
    """The pattern of an identity, read as a stored mask is."""

    shape: tuple[int, int]
    url: str = "the diagonal"
    ours: bool = True

    def rows_indices(self, start: int, stop: int) -> CSR:
        """Return rows ``[start:stop)``."""
        return diagonal(start, stop, self.shape[1])

    def lengths(self) -> Int64Array:
        """Return the entries of each row."""
        return np.diff(diagonal(0, *self.shape).indptr)

    def fingerprint(self) -> str:
        """Return what tells it from other masks."""
        return self.url


@dataclass(frozen=True)
class StoredProductSpec:
    """What is asked for instead of C.

    Attributes
    ----------
    per_row : ProductSpec
        What is made of each row, without a mask.
    mask : StoredMatrix or Diagonal, optional
        C has entries only where it stores one.
    complement : bool
        Only where it stores none.
    """

    per_row: ProductSpec = PLAIN
    mask: StoredMatrix | Diagonal | None = None
    complement: bool = False

    def __post_init__(self) -> None:
        if self.complement and self.mask is None:
            raise InputError("complement=True needs a mask")

    @property
    def plain(self) -> bool:
        """Whether C is wanted as it is."""
        return self.per_row.plain and self.mask is None

    @property
    def fused(self) -> bool:
        """Whether rows need more than their products: a mask, or to be cut."""
        return self.per_row.fused or self.mask is not None

    def dtype(self, a: StoredMatrix, b: StoredMatrix) -> np.dtype[Any]:
        """Return the dtype of C."""
        if self.plain:
            return result_dtype(a.dtype, b.dtype)
        return self.per_row.semiring.result_dtype(a.dtype, b.dtype)

    def check(self, a: StoredMatrix, b: StoredMatrix, engine: str) -> None:
        """Check that it can be had of A, B and the engine.

        Raises
        ------
        InputError
            If the engine has no such options, no value reaches the threshold, or Numba does not compile a function.
        MatrixError
            If the mask has another shape, C has a triangle and is not square, or values are complex and have to be
            compared.
        """
        if not self.plain and engine in GPU_ENGINES:
            self.per_row.check_device()
        elif not self.plain and engine not in ("auto", "numba"):
            raise InputError(
                f"engine={engine!r} makes whole products by plus and times: for semirings, masks, triangles, top_n and "
                f"threshold choose engine='auto' or 'numba'"
            )
        if not self.plain:
            refuse_blocks("semirings, masks, triangles, epilogues, threshold and top_n", a, b, self.mask)
        shape = a.nrows, b.ncols
        self.per_row.check_square(shape)
        self.per_row.check(shape, self.dtype(a, b))
        if self.per_row.functions and engine != "cuda":  # which takes expressions in C
            from spdist.kernels.cpu import numba_compile

            numba_compile.check_functions(self.per_row.functions, self.dtype(a, b))
        if self.mask is not None:
            check_mask_shape(self.mask.shape, shape)

    def arguments(self) -> dict[str, Any]:
        """Return it as the public calls take it."""
        own = ("semiring", "triangle", "epilogue", "threshold", "top_n")
        spec = {name: getattr(self.per_row, name) for name in own}
        return {**spec, "mask": self.mask, "complement": self.complement}

    def facts(self) -> dict[str, Any]:
        """Return what tells it from others, as JSON can hold it: a product is resumed only with the same."""
        epilogue, triangle = self.per_row.epilogue, self.per_row.triangle
        return {
            "semiring": self.per_row.semiring.identity(),
            "mask": None if self.mask is None else self.mask.fingerprint(),
            "complement": self.complement,
            "top_n": self.per_row.top_n,
            "threshold": self.per_row.threshold,
            **({} if epilogue is None else {"epilogue": epilogue.identity()}),
            **({} if triangle is None else {"triangle": triangle}),
        }

    def read_mask(self, start: int, stop: int) -> CSR | None:
        """Read the mask's rows ``[start:stop)``."""
        if self.mask is None:
            return None
        rows = self.mask.rows_indices(start, stop)
        if not self.mask.ours:
            check_canonical(rows, self.mask.url, start)
        return rows

    def of_rows(self, start: int, stop: int, mask: CSR | None, *, partial: bool = False) -> ProductSpec:
        """Return the options for some rows, whose rows of the mask are given; without what follows partial products."""
        complement = self.complement and mask is not None
        spec = replace(self.per_row.of_rows(start, stop), mask=mask, complement=complement)
        return spec.unfinished if partial else spec


WHOLE = StoredProductSpec()
"""C as it is."""
