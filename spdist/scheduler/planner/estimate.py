"""How many entries the rows of C have: a sampled ratio, and the limits of a mask or top-n."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spdist.matrices.dtypes import Int64Array
from spdist.scheduler.planner.stored_rows import Lengths, mask_lengths, row_lengths
from spdist.storage.matrix import StoredMatrix
from spdist.storage.product_spec import StoredProductSpec


@dataclass(frozen=True)
class Estimate:
    """nnz(C) of a row from its products: a ratio for each power of two of the number of products, sampled."""

    ratio: npt.NDArray[np.float64]  # (64,) float64: nnz(C row) / products, for rows of ``2**i`` products
    # (2, n) float64: share of the products that are made, and share of the entries that C keeps, for n ranges of
    # equally many rows; less than 1 only for an upper triangle
    share: npt.NDArray[np.float64]
    row_products: float | None = None  # mean products of a row of the whole product; None if no row was sampled
    entry_products: float = 0.0  # mean products of an entry of A
    kept: float = 1.0  # uncut entries of C for each product

    def shares(self, nrows: int) -> npt.NDArray[np.float64]:
        """Return the shares of each of all rows, (2, nrows)."""
        return self.share[:, np.arange(nrows) * self.share.shape[1] // max(nrows, 1)]

    def row_ratios(self, products: Int64Array) -> npt.NDArray[np.float64]:
        """Return the ratio for each row from its number of products."""
        return self.ratio[np.log2(np.maximum(products, 1)).astype(np.int64)]


NO_COMPRESSION = Estimate(np.ones(64), np.ones((2, 1)))
"""Used when C was not sampled: each product is an entry."""


@dataclass(frozen=True)
class RowLimits:
    """Limits that a mask, top-n or a triangle put on the rows of C."""

    mask_lengths: Lengths  # (nrows,) integers, or (0,) without a mask: entries of the mask's rows
    inside: bool  # whether the mask says where C may have entries; otherwise it says where C has none
    top_n: int  # entries that are kept of each row; the columns of C if none are cut
    longest: int  # bound on the entries of a row before top-n cuts it; 0 if rows are neither masked nor cut
    upper: bool  # whether C is an upper triangle

    @property
    def longest_mask_row(self) -> int:
        """Entries of the mask's longest row."""
        return int(self.mask_lengths.max(initial=0))

    def entries(self, uncut: Int64Array, ncols: int) -> Int64Array:
        """Return the entries that the mask leaves of rows with `uncut` entries and `ncols` columns."""
        if not len(self.mask_lengths):
            return uncut
        lengths = self.mask_lengths.astype(np.int64)
        return np.minimum(uncut, lengths if self.inside else ncols - lengths)


def row_limits(spec: StoredProductSpec, a: StoredMatrix, b: StoredMatrix, b_lengths: Lengths) -> RowLimits:
    """Find how many entries the options leave of the rows of C.

    `spec`: its mask's row lengths are read.
    `a, b`: A's row lengths are read if the options are fused and no mask bounds the rows, unless A is B.
    `b_lengths`: (nrows of B,) integers: entries of the rows of B.
    Raises `MatrixError` if offsets that are read do not rise from 0 to the number of entries.
    """
    masked = mask_lengths(spec.mask)
    inside = spec.mask is not None and not spec.complement
    top_n = spec.per_row.top_n or max(b.ncols, 1)
    longest = 0
    if inside:
        longest = int(masked.max(initial=0))
    elif spec.fused:
        a_lengths = b_lengths if a == b else row_lengths(a)
        longest = min(b.ncols, int(a_lengths.max(initial=0)) * int(b_lengths.max(initial=0)))
    return RowLimits(masked, inside, top_n, longest, spec.per_row.triangle is not None)


@dataclass(frozen=True, eq=False)
class Survey:
    """Lengths and samples of rows: whichever engine multiplies, they are the same."""

    b_lengths: Lengths  # (nrows of B,) integers: entries of the rows of B
    limits: RowLimits
    estimate: Estimate
