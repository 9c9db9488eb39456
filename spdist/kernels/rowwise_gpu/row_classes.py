"""Rows of C that one family of CUDA kernels multiplies: which types it is compiled for, and how it is launched.

Every family counts the entries of its rows, then writes them. All arrays are on the GPU.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from spdist.kernels.cuda.module import Module, module
from spdist.kernels.rounding import ceil_div
from spdist.kernels.rowwise_gpu import workspace
from spdist.matrices.csr import CSR


class SortClass(NamedTuple):
    """Rows of up to ``group * items`` products: `group` lanes a row, `items` products a lane, `warps` a block."""

    group: int
    items: int
    warps: int

    @property
    def most(self) -> int:
        """Products of the longest row."""
        return self.group * self.items

    @property
    def rows_per_block(self) -> int:
        """Rows of a thread block."""
        return 32 * self.warps // self.group


class RankClass(NamedTuple):
    """Rows of up to `most` products: `parts` thread blocks a row, each of `warps`.

    They hold the values, and add them in the order of A's entries; where the order does not matter they add in C, and
    for values of 16 bytes a row has `open_parts`, for smaller ones fewer: `workspace.open_parts`.
    """

    most: int
    warps: int
    parts: int
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
AT_ONCE = (0, 2, 4, 6, 7, 9)
"""Places, in these, of the classes whose kernels can make all rows of up to their products without counting first."""
RANK_CLASSES = (
    RankClass(4096, 4, 1, 1),
    RankClass(16384, 8, 2, 4),
    RankClass(65536, 8, 8, 8),
    RankClass(workspace.LONG_PRODUCTS, 8, 16, 16),
    RankClass(2**63 - 1, 8, 32, 32),
)
CLASSES: tuple[RowClass, ...] = (*SORT_CLASSES, *RANK_CLASSES)
"""In ascending order of products; number 0 on the device is the empty rows, so that these start at 1."""

SLOTS = 16
"""Classes that the device counts: these and the empty rows."""
PRODUCTS, BAD_A, BAD_B, FALLS, FALLS_AT_ROWS, MAX_ROW_A, NNZ_C, VERY_LONG_ROWS, WIDEST, BLOCKS_DONE = range(10)
COUNTS = 10
TAKEN = COUNTS + SLOTS
NODES = TAKEN + SLOTS
"""Where the figures of `find_nodes` start, `NODE_FACTS` per class."""
NODE_FACTS = 5
WIDTHS = NODES + NODE_FACTS * SLOTS
SAMPLED = WIDTHS + SLOTS
"""Where the products and the entries of `sample_rows` are."""
FACTS = SAMPLED + 2

VERY_LONG = 8192
"""Entries of rows of A above which thread blocks share their analysis, as in rows.cu."""
SHARED_FACTOR = 256
"""Products that an entry of a row of more than 1,024 counts for at least, as in rows.cu."""
NODE_MEAN = 1.5
"""Rows that nodes have in the mean where those of more products than are sorted are multiplied as nodes."""
NODE_WARPS = 2
SHARE = 128
"""Entries of A that a thread block takes of a long row, as in long_rows.cu."""


class Kernels:
    """The compiled kernels for one choice of types, by their C names; compiled on first use, file by file.

    `defines` are the compiler's options for a semiring, for the files that multiply.
    """

    def __init__(self, value: str, index: str, pointer: str, defines: tuple[str, ...] = ()) -> None:
        ip, vip = f"{index},{pointer}", f"{value},{index},{pointer}"
        self.types, self.defines = (value, index, pointer), defines
        self.names = {
            "rowwise_gpu/rows.cu": {
                "list": "list_rows",
                "offsets": f"offsets<{pointer}>",
                "publish": "publish",
                "enter": f"enter_rows<{ip}>",
                **{f"analyse {g}": f"analyse_rows<{ip},{g}>" for g in (2, 4, 8, 32)},
                "analyse long": f"analyse_long<{ip}>",
            },
            "rowwise_gpu/sort_rows.cu": {
                **{
                    f"count {n}": f"count_rows<{ip},{s.group},{_power(s.most)},{s.warps}>"
                    for n, s in enumerate(SORT_CLASSES)
                },
                **{
                    f"fill {n}": f"sort_rows<{vip},u32,{s.group},{s.items},{s.warps},false>"
                    for n, s in enumerate(SORT_CLASSES)
                },
                **{
                    f"sample {n}": f"sample_rows<{ip},{s.group},{_power(s.most)},{s.warps}>"
                    for n, s in enumerate(SORT_CLASSES)
                    if n in AT_ONCE
                },
                **{
                    f"at once {n}": f"sort_rows<{vip},u32,{s.group},{s.items},{s.warps},true>"
                    for n, s in enumerate(SORT_CLASSES)
                    if n in AT_ONCE
                },
            },
            "rowwise_gpu/node_rows.cu": {
                **{f"same {g}": f"same_rows<{ip},{g}>" for g in (8, 32)},
                "find": f"find_nodes<{ip}>",
                "count": f"node_count<{ip},{NODE_WARPS}>",
                "fill": f"node_fill<{vip},{NODE_WARPS},false>",
                "fill single": f"node_fill<{vip},{NODE_WARPS},true>",
            },
            "rowwise_gpu/rank_rows.cu": {
                "split": f"split_rows<{ip}>",
                **{f"count {w}": f"rank_count<{ip},{w}>" for w in (4, 8)},
                **{f"fill {w} {o}": f"rank_fill<{vip},{w},{str(o).lower()}>" for w in (4, 8) for o in (False, True)},
            },
            "rowwise_gpu/long_rows.cu": {
                "mark": f"long_mark<{ip}>",
                "rank": "long_rank",
                "columns": f"long_columns<{vip}>",
                "fill": f"long_fill<{vip}>",
            },
        }

    def with_wide_keys(self) -> Kernels:
        """Return the kernels for rows whose columns are further apart than 32-bit sort keys have room for."""
        wide = Kernels(*self.types, self.defines)
        sort = wide.names["rowwise_gpu/sort_rows.cu"]
        for name in sort:
            sort[name] = sort[name].replace(",u32,", ",u64,")
        return wide

    def sources(self) -> dict[str, tuple[str, ...]]:
        """Return the name expressions to compile of each file."""
        return {file: tuple(names.values()) for file, names in self.names.items()}

    @functools.cached_property
    def _modules(self) -> dict[str, Module]:
        return {}

    def compile(self) -> None:
        """Compile all kernels now, side by side; what was compiled before comes from the cache on disk.

        A product that compiled what it comes to, file by file, would wait for the sum instead of the longest.
        """
        if len(self._modules) == len(self.names):
            return
        import cupy

        modules = {file: self._module(file) for file in self.names}
        with ThreadPoolExecutor(len(modules), initializer=cupy.cuda.Device().use) as pool:
            list(pool.map(lambda loaded: loaded.compile(), modules.values()))
        self._modules.update(modules)

    def launch(self, file: str, name: str, grid: Any, block: int, args: tuple[Any, ...], shared: int = 0) -> None:
        """Launch a kernel of `file` by our name for it, on the current stream."""
        loaded = self._modules.get(file)
        if loaded is None:
            loaded = self._modules[file] = self._module(file)
        loaded(self.names[file][name], grid, block, args, shared)

    def _module(self, file: str) -> Module:
        defines = () if file == "rowwise_gpu/rows.cu" else self.defines  # nothing is multiplied there
        return module(file, tuple(self.names[file].values()), defines)


def _power(count: int) -> int:
    """Return the least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


@dataclass(eq=False)
class Facts:
    """What kernels find out about a product, in device memory, and its copy in pinned host memory.

    Attributes
    ----------
    device : (FACTS + n,) uint64
        The numbers above, then the state of the scan.
    host : (FACTS,) uint64
        As of the last `read`, or as a kernel has left it; the next product on this thread overwrites it.
    """

    device: Any
    host: Any
    host_base: int
    stream: Any
    kernels: Kernels
    base: int = field(init=False)

    def __post_init__(self) -> None:
        self.base = self.device.data.ptr

    def at(self, slot: int) -> int:
        """Return the device address of a number."""
        return self.base + 8 * slot

    def on_host(self, slot: int) -> int:
        """Return the host's address of a number; kernels can write there."""
        return self.host_base + 8 * slot

    def read(self) -> None:
        """Wait for the device and copy its numbers."""
        self.kernels.launch("rowwise_gpu/rows.cu", "publish", 1, FACTS, (self.base, self.host_base))
        self.stream.synchronize()

    def wait(self) -> None:
        """Wait for the device; its kernels have written to the host what is asked for next."""
        self.stream.synchronize()

    def __getitem__(self, slot: int) -> int:
        return int(self.host[slot])

    def class_rows(self) -> list[int]:
        """Return the rows of each class, the empty rows first."""
        return [int(count) for count in self.host[COUNTS : COUNTS + SLOTS].tolist()]


def address(array: Any) -> int:
    """Return where an array of CuPy starts."""
    return int(array.data.ptr)


@dataclass(eq=False)
class Operands:
    """A product's operands, kernels and what its families of rows share."""

    a: CSR
    b: CSR
    kernels: Kernels
    facts: Facts
    lengths: Any
    deterministic: bool
    listed: Any = None
    same_b: Any = None
    longest_a: int = 0

    @functools.cached_property
    def pattern(self) -> tuple[int, ...]:
        """The arguments of kernels that count."""
        return tuple(address(array) for m in (self.a, self.b) for array in (m.indptr, m.indices))

    @functools.cached_property
    def arrays(self) -> tuple[int, ...]:
        """The arguments of kernels that multiply."""
        return tuple(address(array) for m in (self.a, self.b) for array in (m.indptr, m.indices, m.data))


@dataclass(eq=False)
class Rows:
    """Listed rows of one class.

    Attributes
    ----------
    kind : RowClass
    number : int
        Its place in `CLASSES`.
    rows : int or (count,) uint32
        On the device, or the address there; 0 means all rows.
    """

    kind: Any
    number: int
    rows: Any
    count: int

    @property
    def waits(self) -> bool:
        """Whether the facts must be read between `prepare` and `prepared`."""
        return False

    def prepare(self, x: Operands) -> None:
        """Find out on the device what `count_entries` needs; the facts are read afterwards."""

    def prepared(self, x: Operands) -> None:
        """Take what `prepare` found from the facts."""

    def count_entries(self, x: Operands) -> None:
        """Write the lengths of the rows of C."""

    def counted(self, x: Operands) -> None:
        """Take what `count_entries` found from the facts."""

    def fill(self, x: Operands, c: CSR) -> None:
        """Write the rows of C."""
        raise NotImplementedError


class SortRows(Rows):
    """Rows sorted in registers."""

    def count_entries(self, x: Operands) -> None:
        """Write the lengths of the rows of C."""
        self._launch(x, "count", (*x.pattern, x.lengths))

    def fill(self, x: Operands, c: CSR) -> None:
        """Write the rows of C."""
        self._launch(x, "fill", (*x.arrays, c.indptr, c.indices, c.data, 0, 0, 0, 0))

    def _launch(self, x: Operands, step: str, args: tuple[Any, ...]) -> None:
        grid = ceil_div(self.count, self.kind.rows_per_block)
        args = (self.count, self.rows, *args)
        x.kernels.launch("rowwise_gpu/sort_rows.cu", f"{step} {self.number}", grid, 32 * self.kind.warps, args)


@dataclass(eq=False)
class RowsAtOnce:
    """Rows sorted in registers that are made without being counted: all of a product, but for the longest.

    Attributes
    ----------
    number : int
        Of the class of the longest that are made so; one of `AT_ONCE`.
    sizes : (nrows,) uint32
        Products of each row.
    lengths : (nrows,) uint32, optional
        Lengths of the rows of C that have too many products; None if none has.
    """

    number: int
    sizes: Any
    lengths: Any = None

    def sample(self, x: Operands) -> None:
        """Count the entries of some rows of C."""
        step = max(1, x.a.nrows // workspace.SAMPLE_ROWS)
        count, most = x.a.nrows // step, SORT_CLASSES[self.number].most
        self._launch(x, "sample", count, (step, most, self.sizes, *x.pattern, x.facts.at(SAMPLED)))

    def expected(self, x: Operands) -> int:
        """Return nnz(C) as far as the facts tell, which have been read after `sample`."""
        products, entries = x.facts[SAMPLED], x.facts[SAMPLED + 1]
        return ceil_div(x.facts[PRODUCTS] * entries, max(products, 1))

    def fill(self, x: Operands, c: CSR) -> None:
        """Write the rows of C as far as they fit, and its offsets; nnz(C) goes to the host's facts."""
        import cupy

        count = x.a.nrows
        state = cupy.zeros(1 + ceil_div(count, SORT_CLASSES[self.number].rows_per_block), np.uint64)
        sizes = None if self.lengths is None else self.sizes
        out = c.indptr, c.indices, c.data, self.lengths, len(c.indices), state, x.facts.on_host(NNZ_C)
        self._launch(x, "at once", count, (sizes, *x.arrays, *out))

    def _launch(self, x: Operands, step: str, count: int, args: tuple[Any, ...]) -> None:
        kind = SORT_CLASSES[self.number]
        grid = ceil_div(count, kind.rows_per_block)
        x.kernels.launch("rowwise_gpu/sort_rows.cu", f"{step} {self.number}", grid, 32 * kind.warps, (count, *args))


@dataclass(eq=False)
class NodeRows(Rows):
    """Rows among which nodes were found: up to six rows of one pattern, of narrow span, a warp each."""

    nodes: Any = None
    starts: Any = None
    rest: Any = None
    width: int = 0
    most_rows: int = 1
    most_entries: int = 0

    @property
    def waits(self) -> bool:
        """Nodes are counted on the device."""
        return True

    def prepare(self, x: Operands) -> None:
        """Find the nodes, and the rows that are none."""
        import cupy

        self.nodes, self.starts = cupy.empty((self.count, 2), np.uint32), cupy.empty(self.count, np.int64)
        self.rest = cupy.empty(self.count, np.uint32)
        same_a = same_rows(x, x.a)
        if x.same_b is None:
            x.same_b = same_a if x.b.indices is x.a.indices else same_rows(x, x.b)
        args = self.count, self.rows, x.a.nrows, workspace.NODE_COLUMNS, same_a, *x.pattern
        out = self.nodes, self.starts, self.rest, x.facts.at(self._facts)
        x.kernels.launch("rowwise_gpu/node_rows.cu", "find", ceil_div(self.count, 8), 256, (*args, *out))

    @property
    def _facts(self) -> int:
        return NODES + NODE_FACTS * self.number

    def prepared(self, x: Operands) -> None:
        """Keep the nodes."""
        self.width, self.most_rows = x.facts[self._facts + 2], x.facts[self._facts + 3]

    def others(self, x: Operands) -> Rows | None:
        """Return the rows in no node: all, where they are long, most nodes single rows, and C is not too wide."""
        listed, nodes, rest = self.count, x.facts[self._facts], x.facts[self._facts + 1]
        ranked = isinstance(self.kind, RankClass) and x.b.ncols <= workspace.PART_COLUMNS * self.kind.parts
        if ranked and NODE_MEAN * nodes > listed - rest:
            self.count = 0
            return rows_of(self.kind, self.number, self.rows, listed)
        self.count = nodes
        return rows_of(self.kind, self.number, self.rest, rest) if rest else None

    def count_entries(self, x: Operands) -> None:
        """Write the lengths of the rows of C."""
        words = ceil_div(self.width, 32)
        args = self.count, self.nodes, self.starts, words, x.same_b, *x.pattern
        args = *args, x.lengths, x.facts.at(self._facts + 4)
        self._launch(x, "count", args, workspace.node_count_shared(words))

    def counted(self, x: Operands) -> None:
        """Note the longest row."""
        self.most_entries = x.facts[self._facts + 4]

    def fill(self, x: Operands, c: CSR) -> None:
        """Write the rows of C."""
        words, rows = ceil_div(self.width, 32), self.most_rows
        *held, stride = workspace.node_fill_shared(words, rows, self.most_entries, c.dtype.itemsize)
        sizes = words, rows, *held, stride
        args = self.count, self.nodes, self.starts, *sizes, x.same_b, *x.arrays, c.indptr, c.indices, c.data
        self._launch(x, "fill single" if rows == 1 else "fill", args, stride)

    def _launch(self, x: Operands, step: str, args: tuple[Any, ...], shared: int) -> None:
        grid = ceil_div(self.count, NODE_WARPS)
        x.kernels.launch("rowwise_gpu/node_rows.cu", step, grid, 32 * NODE_WARPS, args, NODE_WARPS * shared)


def same_rows(x: Operands, m: CSR) -> Any:
    """Return, for each row of a matrix, whether it has the columns of the row before; (nrows,) uint8."""
    import cupy

    same = cupy.empty(m.nrows, np.uint8)
    group = 8 if m.nnz < 64 * m.nrows else 32
    args = m.nrows, m.indptr, m.indices, same
    x.kernels.launch("rowwise_gpu/node_rows.cu", f"same {group}", ceil_div(m.nrows, 256 // group), 256, args)
    return same


@dataclass(eq=False)
class RankRows(Rows):
    """Rows whose columns are marked in a bit mask in shared memory, in parts by columns."""

    parts: int = 1
    memory: Any = None
    width: int = 0

    @property
    def waits(self) -> bool:
        """Whether the widest task must be known: where no bound is narrow enough."""
        return self.width == 0

    def prepare(self, x: Operands) -> None:
        """Make the tasks: parts of rows."""
        import cupy

        parts, columns = self.kind.parts, workspace.PART_COLUMNS
        if not x.deterministic:
            parts = workspace.open_parts(parts, self.kind.open_parts, self.count, x.a.dtype.itemsize)
            columns = workspace.OPEN_COLUMNS
        self.parts = workspace.rank_parts(parts, x.b.ncols, self.count, columns)
        self.width = workspace.rank_width(x.b.ncols, self.parts, columns)
        self.memory = cupy.empty((3, self.count * self.parts), np.uint64)
        spans, tasks, _ = self._tasks()
        args = self.count, self.rows, self.parts, *x.pattern
        out = tasks, spans, x.lengths, x.facts.at(WIDTHS + self.number)
        x.kernels.launch("rowwise_gpu/rank_rows.cu", "split", ceil_div(self.count, 8), 256, (*args, *out))

    def _tasks(self) -> tuple[int, int, int]:
        """Return the addresses of the tasks' spans of columns, rows and counts: 16, 4 and 4 bytes each."""
        base, tasks = self.memory.data.ptr, self.count * self.parts
        return base, base + 16 * tasks, base + 20 * tasks

    def prepared(self, x: Operands) -> None:
        """Note the widest task."""
        self.width = self.width or x.facts[WIDTHS + self.number]

    def count_entries(self, x: Operands) -> None:
        """Write the lengths of the rows of C."""
        window = workspace.rank_count_window(self.width)
        spans, tasks, counts = self._tasks()
        args = tasks, window, spans, *x.pattern, counts, x.lengths
        self._launch(x, f"count {self.kind.warps}", args, window // 8)

    def fill(self, x: Operands, c: CSR) -> None:
        """Write the rows of C."""
        window, capacity, shared = workspace.rank_fill_shared(
            self.width, self.kind.most, c.dtype.itemsize, x.deterministic
        )
        sizes = self.parts, window, capacity
        spans, tasks, counts = self._tasks()
        args = tasks, counts, *sizes, spans, *x.arrays, c.indptr, c.indices, c.data
        self._launch(x, f"fill {self.kind.warps} {x.deterministic}", args, shared)

    def _launch(self, x: Operands, step: str, args: tuple[Any, ...], shared: int) -> None:
        x.kernels.launch("rowwise_gpu/rank_rows.cu", step, self.count * self.parts, 32 * self.kind.warps, args, shared)


@dataclass(eq=False)
class LongRows(Rows):
    """Rows shared among thread blocks, summed by atomics in device memory."""

    masks: Any = None
    ranks: Any = None

    def count_entries(self, x: Operands) -> None:
        """Write the lengths of the rows of C."""
        import cupy

        words = ceil_div(x.b.ncols, 64)
        self.masks, self.ranks = cupy.zeros((self.count, words), np.uint64), cupy.empty((self.count, words), np.uint32)
        grid = ceil_div(x.longest_a, SHARE), self.count
        x.kernels.launch("rowwise_gpu/long_rows.cu", "mark", grid, 256, (self.rows, words, *x.pattern, self.masks))
        args = self.rows, words, self.masks, self.ranks, x.lengths
        x.kernels.launch("rowwise_gpu/long_rows.cu", "rank", self.count, 1024, args)

    def fill(self, x: Operands, c: CSR) -> None:
        """Write the rows of C."""
        words = self.masks.shape[1]
        args = self.rows, words, self.masks, self.ranks
        grid = ceil_div(words, 64), self.count
        x.kernels.launch("rowwise_gpu/long_rows.cu", "columns", grid, 256, (*args, c.indptr, c.indices, c.data))
        grid = ceil_div(x.longest_a, SHARE), self.count
        x.kernels.launch("rowwise_gpu/long_rows.cu", "fill", grid, 256, (*args, *x.arrays, c.indptr, c.data))


def rows_of(kind: RowClass, number: int, rows: Any, count: int) -> Rows:
    """Return the rows of a class for its own kernel."""
    family = SortRows if isinstance(kind, SortClass) else RankRows
    return family(kind, number, rows, count)
