"""Ratios measured on the blocks of one multiplication, which predict later blocks."""

from __future__ import annotations

from spdist.kernels.streaming.layout import StagedBlock


class BlockHistory:
    """Ratios measured on earlier blocks of one multiplication.

    One history serves all calls for rows of the same C, so that only the first call multiplies a sample.

    `held_ratio`: entries of C that the device had to hold, per product. 1.0 if unknown: no compression.
    `kept_ratio`: entries of C that were kept, per product; with a triangle, estimated for whole rows.
    `b_ratio`: entries of B that were uploaded, per product; 0.0 if unknown.
    """

    def __init__(self) -> None:
        self.held_ratio, self.kept_ratio, self.b_ratio = 1.0, 1.0, 0.0
        self.is_known = False
        self._is_exact = False  # whether `held_ratio` was measured on the last block of this call

    def begin(self) -> None:
        """Begin a call; keep ratios if a block with entries was recorded."""
        self._is_exact = False
        if not self.is_known:
            self.held_ratio, self.kept_ratio, self.b_ratio = 1.0, 1.0, 0.0

    def record(self, block: StagedBlock, held: int, kept: float) -> None:
        """Record a block that was multiplied; a block without products is ignored.

        `held`: entries of C that the device had to hold.
        `kept`: entries of C that were kept.
        """
        if not block.products:
            return
        self.held_ratio, self.kept_ratio = held / block.products, kept / block.products
        if block.b is not None:
            self.b_ratio = block.b.nnz / block.products
        self.is_known = held > 0
        self._is_exact = True

    def assume(self, ratio: float) -> None:
        """Assume a ratio of entries of C to products, if the sample could not be multiplied."""
        self.held_ratio = self.kept_ratio = ratio

    def record_b(self, ratio: float) -> None:
        """Record the entries of B per product that a block needs; 0.0 makes the ratio unknown again."""
        self.b_ratio = ratio

    def distrust(self) -> None:
        """Stop predicting exact numbers of entries until the next block is recorded: the last one was too low."""
        self._is_exact = False

    def entries_of_c(self, products: int) -> float:
        """Predict the entries of C that the device must hold for a block."""
        return products * self.held_ratio

    def entries_of_b(self, products: int) -> float:
        """Predict the entries of B that a block uploads if B is not resident."""
        return (self.b_ratio or 1.0) * products

    def exact_entries(self, products: int) -> int:
        """Predict a block's entries of C from the previous block; 0 if there is no reliable ratio."""
        return int(self.held_ratio * products) if self._is_exact else 0
