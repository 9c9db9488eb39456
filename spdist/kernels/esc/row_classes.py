"""Classes of rows of C in ESC by their products, and the launch shape for each class. Runs without a GPU."""

from __future__ import annotations

from typing import NamedTuple


class EscClass(NamedTuple):
    """Rows of up to ``group * items`` products: `group` lanes a row, `items` products a lane."""

    group: int
    items: int

    @property
    def max_products(self) -> int:
        """Products of the longest row."""
        return self.group * self.items

    @property
    def rows_per_block(self) -> int:
        """Rows of a thread block."""
        return max(128 // self.group, 1) if self.group <= 32 else 1

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return max(self.group, 128) if self.group <= 32 else self.group

    def key_type(self, ncols: int) -> str:
        """Return the C type of a sort key: a column below `ncols`, then the product's number."""
        return "u32" if max(ncols - 1, 1).bit_length() + (self.max_products - 1).bit_length() <= 32 else "u64"

    def key_bytes(self, ncols: int) -> int:
        """Return the bytes of a sort key."""
        return 4 if self.key_type(ncols) == "u32" else 8

    def shared_bytes(self, value: int, pointer: int, key: int) -> int:
        """Return the bytes of a thread block's shared memory: a ``Slots`` of `slots.cuh` for each row.

        `value, pointer, key`: bytes of a value, of a row offset and of a sort key.
        """
        entries = self.group * (4 + pointer + value)
        return self.rows_per_block * (self.max_products * (value + key) + max(2 * self.max_products, entries))


ESC_CLASSES = tuple(
    EscClass(group, items)
    for group, items in (
        (4, 4), (4, 8), (8, 8), (16, 8), (32, 6), (32, 8), (32, 12), (32, 16),
        (64, 16), (128, 12), (128, 16), (256, 12), (256, 16), (512, 16),
    )
)  # fmt: skip
"""Classes by rising products; the device numbers them from 1 on: class 0 holds the rows without products."""
FEW_ROWS = 2048
"""Rows below which a class of a warp or less joins the next class, as a separate launch would take longer."""


class RowShare(NamedTuple):
    """Rows of one launch: places ``[first:first + rows)`` in the list of rows by rising class."""

    row_class: EscClass
    first: int
    rows: int


def classes_that_fit(shared: int, value: int, pointer: int, key: int = 8) -> tuple[EscClass, ...]:
    """Return the classes whose rows fit in `shared` bytes; other arguments as for `EscClass.shared_bytes`.

    The last class is also the shape of a tile of a long row, the second last the shape of a bucket.
    """
    return tuple(c for c in ESC_CLASSES if c.shared_bytes(value, pointer, key) <= shared)


def share_rows(counts: list[int], classes: tuple[EscClass, ...]) -> list[RowShare]:
    """Distribute the listed rows over launches of one row at least; small classes of up to a warp join the next class.

    `counts`: rows of each class, the rows without products first.
    """
    out, start = [], counts[0]
    first = start
    for number, row_class in enumerate(classes):
        start += counts[number + 1]
        may_join = any(counts[j + 1] for j in range(number + 1, len(classes)) if classes[j].group <= 32)
        if start > first and not (start - first < FEW_ROWS and may_join):
            out.append(RowShare(row_class, first, start - first))
            first = start
    return out
