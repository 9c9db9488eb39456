"""Classes of rows of C by their products, and how a product's rows are shared out to them. No GPU is needed here."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import NamedTuple

from spdist.kernels.cuda.constants import ROW_CLASSES
from spdist.kernels.rowwise_gpu import workspace


class SortClass(NamedTuple):
    """Rows of up to ``group * items`` products: `group` lanes a row, `items` a lane, `warps` a thread block."""

    group: int
    items: int
    warps: int

    @property
    def max_products(self) -> int:
        """Products of the longest row."""
        return self.group * self.items

    @property
    def rows_per_block(self) -> int:
        """Rows of a thread block."""
        return 32 * self.warps // self.group


class RankClass(NamedTuple):
    """Rows of up to `max_products` products, cut into parts by columns: a thread block of `warps` a part."""

    max_products: int
    warps: int
    # parts of a row when thread blocks hold the values of their part and add them in the order of A's entries
    parts: int
    # parts of a row with values of 16 bytes when products are added in C, in any order; smaller values take fewer
    # (`workspace.open_parts`)
    open_parts: int


RowClass = SortClass | RankClass

SORT_CLASSES = (
    SortClass(4, 4, 4),
    SortClass(4, 8, 4),
    SortClass(8, 8, 4),
    SortClass(16, 6, 4),
    SortClass(16, 8, 4),
    SortClass(32, 6, 4),
    SortClass(32, 8, 4),
    SortClass(32, 12, 4),
    SortClass(32, 16, 2),
    SortClass(32, 32, 1),
)
SINGLE_PASS_CLASSES = (0, 2, 4, 6, 7, 9)
"""Places in `SORT_CLASSES` of the classes with a kernel that makes all rows up to its size without counting first."""
RANK_CLASSES = (
    RankClass(4096, 4, 1, 1),
    RankClass(16384, 8, 2, 4),
    RankClass(65536, 8, 8, 8),
    RankClass(workspace.LONG_PRODUCTS, 8, 16, 16),
    RankClass(2**63 - 1, 8, 32, 32),
)
CLASSES: tuple[RowClass, ...] = (*SORT_CLASSES, *RANK_CLASSES)
"""Classes by rising products. On the device they are numbered from 1 on; class 0 holds the rows without products."""
assert len(CLASSES) < ROW_CLASSES
MOST_PRODUCTS = tuple(row_class.max_products for row_class in CLASSES)
"""Most products of a row of each class."""


@dataclass(frozen=True)
class RowTuning:
    """Thresholds, measured on an H100, by which rows are shared out to kernels."""

    # nodes are looked for among rows of more products than the first and at most the second
    node_products: tuple[int, int] = (512, 16384)
    # rows below which nodes are not looked for: a warp a row would leave most of the device idle
    node_least_rows: int = 1 << 14
    # A class joins the next sorted class if its rows times the next class's products are at most this: a separate
    # launch would take longer
    few_slots: int = 1 << 21
    # if there are at most this many sorted rows, they join one class; the second bound applies if one kernel then makes
    # the whole product
    few_rows: int = 1 << 14
    few_rows_single_pass: int = 1 << 16
    few_short_rows: int = 1 << 13  # replaces both bounds if rows have fewer than `joined_slots` products in the mean
    joined_slots: int = 128  # mean products of a row, each row counted with the most products of its class
    few_parts: int = 1 << 11  # rows times parts up to which a class of rows that thread blocks share joins the next
    # rows that a product should have, unless it is small, to be made without being counted first
    single_pass_rows: int = 1 << 15
    # least share of all products that the single pass makes, each row counted with the most products of its class
    single_pass_share: float = 0.9
    single_pass_fill: float = 0.6  # least mean share of the slots of the single pass's kernel that these rows fill

    early: bool = True  # whether work is queued before the rows of C are counted
    # classes that follow the one that rows of mean length have, and rows of C up to which they do
    early_rows: tuple[tuple[int, int], ...] = ((7, 1 << 16), (9, 1 << 14))


TUNING = RowTuning()


class ClassShare(NamedTuple):
    """Rows of the class `number`: places ``[first:first + rows)`` in the list of rows by rising class."""

    number: int
    first: int
    rows: int


def share_rows(counts: list[int], single_pass: bool = False, tuning: RowTuning = TUNING) -> list[ClassShare]:
    """Share the rows of a product out to classes; classes of few rows join the next class that has any.

    `counts`: (ROW_CLASSES,): rows of each class, the rows without products first. `single_pass`: whether one kernel
    makes the product if one class has all rows. Class numbers of the result are places in `CLASSES`.
    """
    shares = []
    first = start = counts[0]
    last_sorted = len(SORT_CLASSES) - 1
    in_sorted = counts[1 : last_sorted + 2]
    if _may_join_all(in_sorted, single_pass and sum(in_sorted) + counts[0] == sum(counts), tuning):
        counts = [counts[0], *[0] * last_sorted, sum(in_sorted), *counts[last_sorted + 2 :]]
    present = [(number, rows) for number, rows in enumerate(counts[1:]) if rows]
    for place, (number, rows) in enumerate(present, 1):
        start += rows
        later = CLASSES[present[place][0]] if place < len(present) else None
        if not _may_join(start - first, CLASSES[number], later, tuning):
            shares.append(ClassShare(number, first, start - first))
            first = start
    return shares


def _may_join_all(counts: list[int], single_pass: bool, tuning: RowTuning) -> bool:
    """Return whether the last sorted class should take all sorted rows: its kernel adapts to shorter ones."""
    rows = sum(counts)
    slots = sum(map(operator.mul, counts, MOST_PRODUCTS))
    most = tuning.few_rows_single_pass if single_pass else tuning.few_rows
    return max(counts) < rows <= (most if slots >= tuning.joined_slots * rows else tuning.few_short_rows)


def _may_join(rows: int, row_class: RowClass, later: RowClass | None, tuning: RowTuning) -> bool:
    """Return whether rows of a class take less time in one launch with the next class than in a separate launch."""
    if isinstance(later, SortClass):
        return rows * later.max_products <= tuning.few_slots
    if not isinstance(row_class, RankClass) or not isinstance(later, RankClass):
        return False
    return later is not CLASSES[-1] and rows * later.parts <= tuning.few_parts


def single_pass_class(counts: list[int], small: bool, tuning: RowTuning = TUNING) -> int | None:
    """Return the largest of `SINGLE_PASS_CLASSES` whose rows are made without being counted first; None to count all.

    `counts`: (ROW_CLASSES,): rows of each class, the rows without products first. `small`: whether C may have room for
    all products: then the class must hold all rows.
    """
    if small:
        shares = share_rows(counts, True, tuning)
        least = shares[0].number if len(shares) == 1 else len(CLASSES)
        return next((number for number in SINGLE_PASS_CLASSES if number >= least), None)
    slots = list(map(operator.mul, counts[1:], MOST_PRODUCTS))
    for number in SINGLE_PASS_CLASSES:
        rows, products = sum(counts[1 : number + 2]), sum(slots[: number + 1])
        if products >= tuning.single_pass_share * sum(slots):
            full = products >= tuning.single_pass_fill * rows * CLASSES[number].max_products
            return number if rows >= tuning.single_pass_rows and full else None
    return None


class EarlyClasses(NamedTuple):
    """Classes whose kernels are queued before the rows of C are counted: the first that may take all rows does."""

    numbers: tuple[int, ...]
    capacity: int  # entries of C if it is made in a single pass, 0 if its entries are counted first


def early_classes(nrows: int, products: int, itemsize: int, tuning: RowTuning = TUNING) -> EarlyClasses | None:
    """Return the classes that are likely to take all rows of a product that is not analysed yet; None if none is.

    `nrows`: of C. `products`: of all rows, if entries of A meet rows of B of mean length. `itemsize`: bytes of an entry
    of C.
    """
    room, last = workspace.SMALL_BYTES // itemsize, SINGLE_PASS_CLASSES[-1]
    if not tuning.early or nrows > workspace.SMALL_ROWS:
        return None
    if products > room:
        few = nrows <= (tuning.few_rows if products >= tuning.joined_slots * nrows else tuning.few_short_rows)
        return EarlyClasses((last,), 0) if few else None
    likely = 2 * products // nrows
    numbers = [next((n for n in SINGLE_PASS_CLASSES if MOST_PRODUCTS[n] >= likely), last)]
    if nrows <= tuning.few_short_rows:
        numbers = [last]
    numbers += [n for n, most in tuning.early_rows if n > numbers[-1] and nrows <= most]
    return EarlyClasses(tuple(numbers), min(2 * products + nrows, room))
