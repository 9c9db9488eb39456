"""What turns a product into an answer, row by row, so that C is never whole: semiring, mask, threshold, top-n."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from spdist.csr import CSR, Int64Array
from spdist.errors import InputError, MatrixError
from spdist.kernels.semirings import OR_AND, PLUS_TIMES, Semiring


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a product, applied in this order: semiring, mask, threshold, top-n.

    Attributes
    ----------
    semiring : Semiring
    mask : CSR, optional
        Canonical, with the rows of A and the columns of B. C has entries only where the mask holds one, whatever its
        value.
    complement : bool
        Entries only where the mask holds none.
    top_n : int, optional
        Entries kept of each row: the largest, of equal ones those in the smaller columns.
    threshold : float, optional
        Entries kept are ``>= threshold``, compared in the dtype of C.

    Raises
    ------
    InputError
        If `top_n` is below 1, `threshold` is NaN, or `complement` comes without a mask.
    """

    semiring: Semiring = PLUS_TIMES
    mask: CSR | None = None
    complement: bool = False
    top_n: int | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.top_n is not None and self.top_n < 1:
            raise InputError(f"top_n={self.top_n} must be at least 1")
        if self.threshold is not None and math.isnan(self.threshold):
            raise InputError("threshold is NaN, which no value reaches")
        if self.complement and self.mask is None:
            raise InputError("complement=True needs a mask")

    @property
    def inside(self) -> CSR | None:
        """The mask whose columns C is confined to."""
        return None if self.complement else self.mask

    @property
    def selects(self) -> bool:
        """Whether finished rows are cut."""
        return self.top_n is not None or self.threshold is not None

    @property
    def fused(self) -> bool:
        """Whether rows need more than their products: a mask, or to be cut."""
        return self.selects or self.mask is not None

    @property
    def plain(self) -> bool:
        """Whether C is the product as it is."""
        return self.semiring is PLUS_TIMES and not self.fused

    def ring(self, dtype: np.dtype[Any]) -> Semiring | None:
        """Return the semiring as kernels take it: None for plus and times, which bools have OR and AND for."""
        if self.semiring is not PLUS_TIMES:
            return self.semiring
        return OR_AND if dtype.kind == "b" else None

    def check(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
        """Check that they fit a C of this shape and dtype.

        Raises
        ------
        MatrixError
            If the mask has another shape, or rows of complex values are to be cut.
        InputError
            If no value of the dtype reaches the threshold.
        """
        if self.mask is not None and self.mask.shape != shape:
            raise MatrixError(
                f"the mask is {self.mask.nrows:,} x {self.mask.ncols:,}, but C is {shape[0]:,} x {shape[1]:,}"
            )
        if self.selects and dtype.kind == "c":
            raise MatrixError(f"values of dtype {dtype} have no order, which top_n and threshold need: pass real ones")
        if dtype.kind in "biu" and self.threshold is not None and self.threshold > _highest(dtype):
            raise InputError(f"threshold={self.threshold} is above every value of dtype {dtype}: lower it")

    def least(self, dtype: np.dtype[Any]) -> Any:
        """Return the smallest value of a real `dtype` that is kept: the threshold, or the lowest if there is none."""
        if dtype.kind == "f":
            return dtype.type(-math.inf if self.threshold is None else self.threshold)
        lowest = 0 if dtype.kind == "b" else int(np.iinfo(dtype).min)
        if self.threshold is None or self.threshold <= lowest:
            return dtype.type(lowest)
        return dtype.type(math.ceil(self.threshold))

    def row_entries(self, ncols: int) -> int:
        """Bound the entries of a row of C that has `ncols` columns."""
        bounds = [ncols] if self.top_n is None else [ncols, self.top_n]
        return min(bounds if self.inside is None else [*bounds, longest_row(self.inside)])


def longest_row(m: CSR) -> int:
    """Return the entries of the longest row."""
    lengths: Int64Array = m.indptr[1:] - m.indptr[:-1]
    return int(lengths.max(initial=0))


def _highest(dtype: np.dtype[Any]) -> int:
    return 1 if dtype.kind == "b" else int(np.iinfo(dtype).max)


PLAIN = Options()
