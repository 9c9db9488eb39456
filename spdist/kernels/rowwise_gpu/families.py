"""Families of kernels that multiply rows of C: which rows each takes, and how it is launched.

Every family counts the entries of its rows, then writes them; rows that are sorted may also be made in a single pass.
All arrays are on the GPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.kernels.cuda.constants import LONG_SHARE, NodeFact, RowFact
from spdist.kernels.cuda.module import shared_memory
from spdist.kernels.rounding import ceil_div
from spdist.kernels.rowwise_gpu import row_kernels, workspace
from spdist.kernels.rowwise_gpu.analysis import AnalysedProduct
from spdist.kernels.rowwise_gpu.row_classes import (
    CLASSES,
    SORT_CLASSES,
    RankClass,
    RowClass,
    RowTuning,
    SortClass,
    share_rows,
)
from spdist.kernels.rowwise_gpu.row_kernels import NODE_WARPS
from spdist.matrices.csr import CSR

NODE_MEAN = 1.5
"""Mean rows of a node from which rows of too many products to be sorted are multiplied as nodes."""
STREAMS = 4
"""Streams on which independent kernels run side by side."""


@dataclass(eq=False)
class RowFamily:
    """Listed rows of one class."""

    row_class: Any
    number: int  # place of the class in `CLASSES`
    rows: Any  # on the device, or its address there; 0 means all rows
    count: int  # how many rows

    @property
    def needs_facts(self) -> bool:
        """Whether the facts must be read between `prepare` and `read_prepared`."""
        return False

    def prepare(self, x: AnalysedProduct) -> None:
        """Find out on the device what `count_entries` needs."""

    def read_prepared(self, x: AnalysedProduct) -> None:
        """Take what `prepare` found from the facts, which were read since."""

    def count_entries(self, x: AnalysedProduct) -> None:
        """Write the lengths of the rows of C."""

    def read_counts(self, x: AnalysedProduct) -> None:
        """Take what `count_entries` found from the facts, which were read since."""

    def fill(self, x: AnalysedProduct, c: CSR) -> None:
        """Write the rows of C."""
        raise NotImplementedError


class Unread(NamedTuple):
    """What the facts must say for the device to do what the host queued before it read them: unless that, nothing."""

    # `least`: a row has this class or a higher one, the rows without products first. `beyond`: none has this or above.
    least: int
    beyond: int


def _condition(x: AnalysedProduct, unread: Unread | None) -> tuple[int, int, int]:
    """Return a kernel's arguments for `allowed`."""
    return (0, 0, 0) if unread is None else (x.facts.at(0), *unread)


@dataclass(eq=False)
class SortRows(RowFamily):
    """Rows sorted in registers."""

    unread: Unread | None = None

    def count_entries(self, x: AnalysedProduct) -> None:
        """Write the lengths of the rows of C."""
        self._launch(x, "count", (*x.pattern, x.lengths, *_condition(x, self.unread)))

    def fill(self, x: AnalysedProduct, c: CSR) -> None:
        """Write the rows of C."""
        self._launch(x, "fill", (*x.arrays, c.indptr, c.indices, c.data, *[0] * 7))

    def _launch(self, x: AnalysedProduct, step: str, args: tuple[Any, ...]) -> None:
        grid = ceil_div(self.count, self.row_class.rows_per_block)
        args = (self.count, self.rows, *args)
        x.kernels.launch("rowwise_gpu/sort_rows.cu", f"{step} {self.number}", grid, 32 * self.row_class.warps, args)


@dataclass(eq=False)
class SinglePassRows:
    """Rows sorted in registers and written without being counted: all rows of a product but the longest.

    Thread blocks pass on how many entries they have, so C's offsets come from the same kernel.
    """

    number: int  # class of the longest rows made so; one of `SINGLE_PASS_CLASSES`
    sizes: Any  # (nrows,) uint32: products of each row
    # (nrows,) uint32, optional: entries of the rows of C that have too many products; None if none has
    lengths: Any = None
    # If it is set, the zeros after the facts are the state, so one such pass of a product is done.
    unread: Unread | None = None

    def sample(self, x: AnalysedProduct) -> None:
        """Count the entries of some rows of C."""
        step = max(1, x.a.nrows // workspace.SAMPLE_ROWS)
        count, most = x.a.nrows // step, SORT_CLASSES[self.number].max_products
        sums = x.facts.at(row_kernels.SAMPLED)
        self._launch(x, "sample", count, (step, most, self.sizes, *x.pattern, sums))

    def expected_nnz(self, x: AnalysedProduct) -> int:
        """Estimate nnz(C) from the sample; the facts were read since."""
        products, entries = x.facts[row_kernels.SAMPLED], x.facts[row_kernels.SAMPLED + 1]
        return ceil_div(x.products * entries, max(products, 1))

    def fill(self, x: AnalysedProduct, c: CSR) -> None:
        """Write the rows of C that fit, and all its offsets; nnz(C) goes to the host's facts."""
        import cupy

        count, state = x.a.nrows, x.facts.at(row_kernels.FACTS)
        if self.unread is None:
            state = cupy.zeros(pass_words(count, self.number), np.uint64)
        sizes = None if self.lengths is None else self.sizes
        out = c.indptr, c.indices, c.data, self.lengths, len(c.indices), state, x.facts.on_host(RowFact.NNZ_C)
        self._launch(x, "single pass", count, (sizes, *x.arrays, *out, *_condition(x, self.unread)))

    def _launch(self, x: AnalysedProduct, step: str, count: int, args: tuple[Any, ...]) -> None:
        row_class = SORT_CLASSES[self.number]
        grid, block = ceil_div(count, row_class.rows_per_block), 32 * row_class.warps
        x.kernels.launch("rowwise_gpu/sort_rows.cu", f"{step} {self.number}", grid, block, (count, *args))


@dataclass(eq=False)
class NodeRows(RowFamily):
    """Rows among which nodes were found: up to six successive rows of one pattern and a narrow span, a warp a node."""

    nodes: Any = None  # (rows, 2) uint32: first row and number of rows of each node
    starts: Any = None  # (rows,) int64: first column of each node
    rest: Any = None  # (rows,) uint32: rows that belong to no node
    width: int = 0  # columns that the widest node spans
    # rows of the largest node; entries of the longest row of C
    max_rows: int = 1
    max_entries: int = 0

    @property
    def needs_facts(self) -> bool:
        """Nodes are counted on the device."""
        return True

    def prepare(self, x: AnalysedProduct) -> None:
        """Find the nodes, and the rows that belong to none."""
        import cupy

        self.nodes, self.starts = cupy.empty((self.count, 2), np.uint32), cupy.empty(self.count, np.int64)
        self.rest = cupy.empty(self.count, np.uint32)
        if x.same_a is None:
            x.same_a = same_rows(x, x.a)
            x.same_b = x.same_a if x.b.indices is x.a.indices else same_rows(x, x.b)
        args = self.count, self.rows, x.a.nrows, workspace.NODE_COLUMNS, x.same_a, *x.pattern
        out = self.nodes, self.starts, self.rest, x.facts.at(self._fact(0))
        x.kernels.launch("rowwise_gpu/node_rows.cu", "find", ceil_div(self.count, 8), 256, (*args, *out))

    def _fact(self, fact: int) -> int:
        """Return the place of a fact about this class."""
        return row_kernels.NODES + len(NodeFact) * self.number + fact

    def read_prepared(self, x: AnalysedProduct) -> None:
        """Keep the size of the nodes."""
        self.width = x.facts[self._fact(NodeFact.WIDEST_NODE)]
        self.max_rows = x.facts[self._fact(NodeFact.MOST_NODE_ROWS)]

    def take_nodes(self, x: AnalysedProduct) -> RowFamily | None:
        """Keep the rows that belong to nodes, and return the others as a family; None if no row is left.

        All rows are returned if they are long, C is not too wide for ranks, and most nodes are single rows.
        """
        listed, nodes = self.count, x.facts[self._fact(NodeFact.NODES)]
        rest = x.facts[self._fact(NodeFact.OTHER_ROWS)]
        can_rank = isinstance(self.row_class, RankClass) and (
            x.b.ncols <= workspace.PART_COLUMNS * self.row_class.parts
        )
        if can_rank and NODE_MEAN * nodes > listed - rest:
            self.count = 0
            return rows_of(self.row_class, self.number, self.rows, listed)
        self.count = nodes
        return rows_of(self.row_class, self.number, self.rest, rest) if rest else None

    def count_entries(self, x: AnalysedProduct) -> None:
        """Write the lengths of the rows of C."""
        words = ceil_div(self.width, 32)
        args = self.count, self.nodes, self.starts, words, x.same_b, *x.pattern
        args = *args, x.lengths, x.facts.at(self._fact(NodeFact.MOST_ENTRIES))
        self._launch(x, "count", args, workspace.node_count_shared(words))

    def read_counts(self, x: AnalysedProduct) -> None:
        """Note the longest row."""
        self.max_entries = x.facts[self._fact(NodeFact.MOST_ENTRIES)]

    def fill(self, x: AnalysedProduct, c: CSR) -> None:
        """Write the rows of C."""
        words, rows, itemsize = ceil_div(self.width, 32), self.max_rows, c.dtype.itemsize
        *held, stride = workspace.node_fill_shared(words, rows, self.max_entries, itemsize, shared_memory())
        sizes = words, rows, *held, stride
        args = self.count, self.nodes, self.starts, *sizes, x.same_b, *x.arrays, c.indptr, c.indices, c.data
        self._launch(x, "fill single" if rows == 1 else "fill", args, stride)

    def _launch(self, x: AnalysedProduct, step: str, args: tuple[Any, ...], shared: int) -> None:
        grid = ceil_div(self.count, NODE_WARPS)
        x.kernels.launch("rowwise_gpu/node_rows.cu", step, grid, 32 * NODE_WARPS, args, NODE_WARPS * shared)


def pass_words(nrows: int, number: int) -> int:
    """Return the 64-bit words of zeros that a single pass of class `number` needs."""
    return 1 + ceil_div(nrows, SORT_CLASSES[number].rows_per_block)


def same_rows(x: AnalysedProduct, m: CSR) -> Any:
    """Return (nrows,) uint8: 1 for each row of A or B that has the columns of the row before."""
    import cupy

    same = cupy.empty(m.nrows, np.uint8)
    lanes = 8 if m.nnz < 64 * m.nrows else 32
    args = m.nrows, m.indptr, m.indices, same
    x.kernels.launch("rowwise_gpu/node_rows.cu", f"same {lanes}", ceil_div(m.nrows, 256 // lanes), 256, args)
    return same


@dataclass(eq=False)
class RankRows(RowFamily):
    """Rows cut into parts by columns; a part's columns are marked in a bit mask in shared memory."""

    parts: int = 1  # parts of each row: with a row it makes a task, and a thread block takes one
    memory: Any = None  # (3, tasks) uint64: spans of columns, rows and counts of the tasks
    width: int = 0  # columns of the widest part; 0 until it is known

    @property
    def needs_facts(self) -> bool:
        """Whether the widest part must be read, as no bound is narrow enough."""
        return self.width == 0

    def prepare(self, x: AnalysedProduct) -> None:
        """Cut the rows into tasks."""
        import cupy

        parts, columns = self.row_class.parts, workspace.PART_COLUMNS
        if not x.deterministic:
            parts = workspace.open_parts(parts, self.row_class.open_parts, self.count, x.a.dtype.itemsize)
            columns = workspace.OPEN_COLUMNS
        self.parts = workspace.rank_parts(parts, x.b.ncols, self.count, columns)
        self.width = workspace.rank_width(x.b.ncols, self.parts, columns)
        self.memory = cupy.empty((3, self.count * self.parts), np.uint64)
        spans, tasks, _ = self._tasks()
        args = self.count, self.rows, self.parts, *x.pattern
        out = tasks, spans, x.lengths, x.facts.at(row_kernels.WIDTHS + self.number)
        x.kernels.launch("rowwise_gpu/rank_rows.cu", "split", ceil_div(self.count, 8), 256, (*args, *out))

    def _tasks(self) -> tuple[int, int, int]:
        """Return the addresses of the tasks' spans of columns, rows and counts: 16, 4 and 4 bytes each."""
        base, tasks = self.memory.data.ptr, self.count * self.parts
        return base, base + 16 * tasks, base + 20 * tasks

    def read_prepared(self, x: AnalysedProduct) -> None:
        """Note the widest part."""
        self.width = self.width or x.facts[row_kernels.WIDTHS + self.number]

    def count_entries(self, x: AnalysedProduct) -> None:
        """Write the lengths of the rows of C."""
        window = workspace.rank_count_window(self.width, shared_memory())
        spans, tasks, counts = self._tasks()
        args = tasks, window, spans, *x.pattern, counts, x.lengths
        self._launch(x, f"count {self.row_class.warps}", args, window // 8)

    def fill(self, x: AnalysedProduct, c: CSR) -> None:
        """Write the rows of C."""
        window, capacity, shared = workspace.rank_fill_shared(
            self.width, self.row_class.max_products, c.dtype.itemsize, x.deterministic, shared_memory()
        )
        sizes = self.parts, window, capacity
        spans, tasks, counts = self._tasks()
        args = tasks, counts, *sizes, spans, *x.arrays, c.indptr, c.indices, c.data
        self._launch(x, f"fill {self.row_class.warps} {x.deterministic}", args, shared)

    def _launch(self, x: AnalysedProduct, step: str, args: tuple[Any, ...], shared: int) -> None:
        grid, block = self.count * self.parts, 32 * self.row_class.warps
        x.kernels.launch("rowwise_gpu/rank_rows.cu", step, grid, block, args, shared)


@dataclass(eq=False)
class LongRows(RowFamily):
    """Rows shared among thread blocks, summed by atomics in device memory."""

    masks: Any = None  # (rows, words) uint64: A bit for each column of each row
    ranks: Any = None  # (rows, words) uint32: bits set before each word of the row's mask

    def count_entries(self, x: AnalysedProduct) -> None:
        """Write the lengths of the rows of C."""
        import cupy

        words = ceil_div(x.b.ncols, 64)
        self.masks, self.ranks = cupy.zeros((self.count, words), np.uint64), cupy.empty((self.count, words), np.uint32)
        grid = ceil_div(x.longest_a, LONG_SHARE), self.count
        x.kernels.launch("rowwise_gpu/long_rows.cu", "mark", grid, 256, (self.rows, words, *x.pattern, self.masks))
        args = self.rows, words, self.masks, self.ranks, x.lengths
        x.kernels.launch("rowwise_gpu/long_rows.cu", "rank", self.count, 1024, args)

    def fill(self, x: AnalysedProduct, c: CSR) -> None:
        """Write the rows of C."""
        words = self.masks.shape[1]
        args = self.rows, words, self.masks, self.ranks
        grid = ceil_div(words, 64), self.count
        x.kernels.launch("rowwise_gpu/long_rows.cu", "columns", grid, 256, (*args, c.indptr, c.indices, c.data))
        grid = ceil_div(x.longest_a, LONG_SHARE), self.count
        x.kernels.launch("rowwise_gpu/long_rows.cu", "fill", grid, 256, (*args, *x.arrays, c.indptr, c.data))


def rows_of(row_class: RowClass, number: int, rows: int | npt.NDArray[np.uint32], count: int) -> RowFamily:
    """Return the rows of a class as the family made for it: sorted or ranked."""
    family = SortRows if isinstance(row_class, SortClass) else RankRows
    return family(row_class, number, rows, count)


def families_of(x: AnalysedProduct, counts: list[int], tuning: RowTuning) -> list[RowFamily]:
    """List the rows of C by class, and return a family for each class, by rising class; `prepared` must follow.

    `x.lengths` holds the products of each row. `counts`: (ROW_CLASSES,): rows of each class; rows that it counts as
    class 0 get no family.
    """
    shares = share_rows(counts, x.is_small, tuning)
    all_rows = counts[0] == x.facts.class_rows()[0] and len(shares) == 1
    if all_rows and isinstance(CLASSES[shares[0].number], SortClass):
        return [SortRows(CLASSES[shares[0].number], shares[0].number, 0, x.a.nrows)]  # with the empty rows
    base = x.list_rows().data.ptr
    low, high = tuning.node_products
    may_have_nodes = sum(n for number, _, n in shares if low < CLASSES[number].max_products <= high)
    families: list[RowFamily] = []
    for number, first, count in shares:
        row_class, listed = CLASSES[number], base + 4 * first
        if may_have_nodes >= tuning.node_least_rows and low < row_class.max_products <= high:
            families.append(NodeRows(row_class, number, listed, count))
        elif row_class is CLASSES[-1] and not x.deterministic and workspace.long_fits(count, x.b.ncols):
            families.append(LongRows(row_class, number, listed, count))
        else:
            families.append(rows_of(row_class, number, listed, count))
    return families


def prepared(x: AnalysedProduct, families: list[RowFamily]) -> list[RowFamily]:
    """Prepare families to count entries; rows of a class that belong to no node become a family of their own.

    The families come by falling class, as rows of many products take longest; without families that have no rows.
    """
    _prepare(x, families)
    others = [rest for rows in families if isinstance(rows, NodeRows) and (rest := rows.take_nodes(x))]
    _prepare(x, others)
    return sorted((rows for rows in (*families, *others) if rows.count), key=lambda rows: -rows.number)


def _prepare(x: AnalysedProduct, families: list[RowFamily]) -> None:
    """Prepare families; read the facts if a family needs them."""
    for rows in families:
        rows.prepare(x)
    if any(rows.needs_facts for rows in families):
        x.facts.read()
        for rows in families:
            rows.read_prepared(x)


def count_entries(x: AnalysedProduct, families: list[RowFamily]) -> None:
    """Queue the counts of the entries of all prepared families' rows; ``x.lengths`` gets them."""
    _side_by_side([functools.partial(rows.count_entries, x) for rows in families])


def fill(x: AnalysedProduct, c: CSR, families: list[RowFamily]) -> None:
    """Queue the kernels that write the rows of C of all families, whose entries were counted.

    `c`: with its offsets, and room for its entries.
    """
    _side_by_side([functools.partial(rows.fill, x, c) for rows in families])


def _side_by_side(launches: list[Callable[[], None]]) -> None:
    """Make independent launches, three or more of them on several streams."""
    if len(launches) < 3:
        for launch in launches:
            launch()
        return
    import cupy

    streams = _streams(cupy.cuda.runtime.getDevice(), threading.get_ident())[: len(launches)]
    current = cupy.cuda.get_current_stream()
    ready = streams[0][1]
    ready.record(current)
    for stream, _ in streams:
        stream.wait_event(ready)
    for number, (stream, _) in enumerate(streams):
        with stream:
            for launch in launches[number :: len(streams)]:
                launch()
    for stream, done in streams:
        done.record(stream)
        current.wait_event(done)


@functools.cache
def _streams(device: int, thread: int) -> list[tuple[Any, Any]]:
    """Return streams, with an event for each; each thread has its own."""
    import cupy

    new = cupy.cuda.Stream, cupy.cuda.Event
    return [(new[0](non_blocking=True), new[1](disable_timing=True)) for _ in range(STREAMS)]
