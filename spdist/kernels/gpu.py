"""Multiply two blocks whose arrays are on the GPU: C = A @ B, row by row.

Each row of C goes to the kernel that suits its number of products: `sort_rows` where they fit in the registers of a
warp, `node_rows` where its columns lie near each other, `long_rows` for the very longest, `rank_rows` for the rest. A first
pass counts the entries of each row, a second writes them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from spdist.csr import CSR, result_dtype
from spdist.errors import MatrixError
from spdist.kernels.module import Module, c_type, module

i64, u32, i32 = np.int64, np.uint32, np.int32


class Sorted(NamedTuple):
    """Rows of up to ``group * items`` products, for `sort_rows`: `group` lanes a row, `items` products a lane."""

    group: int
    items: int
    warps: int

    @property
    def most(self) -> int:
        """Products of the longest row."""
        return self.group * self.items


class Ranked(NamedTuple):
    """Rows of up to `most` products, for `rank_rows`: thread blocks of `warps`, `parts` of them a row."""

    most: int
    warps: int
    parts: int


SORTED = (
    Sorted(4, 4, 4), Sorted(4, 8, 4), Sorted(8, 8, 4), Sorted(16, 6, 4), Sorted(16, 8, 4), Sorted(32, 6, 4),
    Sorted(32, 8, 4), Sorted(32, 12, 4), Sorted(32, 16, 2), Sorted(32, 32, 1),
)  # fmt: skip
RANKED = (
    Ranked(4096, 4, 1), Ranked(16384, 8, 2), Ranked(65536, 8, 8), Ranked(262144, 8, 16), Ranked(2**63 - 1, 8, 32),
)  # fmt: skip
KINDS: tuple[Sorted | Ranked, ...] = (*SORTED, *RANKED)
NODE_FROM, NODE_TO = 512, 16384
"""Products of rows among which nodes are looked for."""
NODE_COLUMNS = 1 << 16
NODE_LEAST = 1 << 14
"""Rows below which a warp a row leaves most of the device idle."""
NODE_WARPS = 4
PART_COLUMNS = 1 << 16
LONG_ROW = 262144
"""Products from which a row is shared among thread blocks, unless the order of its sums matters."""
LONG_WORKSPACE = 128 << 20
FEW_SLOTS = 1 << 21
"""Slots of the next class up to which rows join it: launches of their own would take longer."""
STREAMS = 4
SMALL_PRODUCTS = 1 << 18
CLASSES = 16
FACTS = 8
SHARED_BYTES = 226 << 10
PRODUCTS, BAD_A, BAD_B, FALLS, FALLS_AT_ROWS, MAX_ROW_PRODUCTS, MAX_ROW_A, NNZ_C = range(8)
TAKEN = FACTS + CLASSES
NODES = TAKEN + CLASSES
"""Where the counts of `find_nodes` start, 5 per class; the widths of `split_rows` follow."""
WIDTHS = NODES + 5 * CLASSES
STATE = WIDTHS + CLASSES


@functools.cache
def _limits(device: int) -> Any:
    """Return the greatest number of products of each class, class 0 holding the empty rows, on the device."""
    import cupy

    limits = [0, *(kind.most for kind in KINDS)]
    return cupy.asarray(np.array([*limits, *[2**64 - 1] * (CLASSES - len(limits))], np.uint64))


@functools.cache
def _mirror(device: int) -> Any:
    """Return pinned host memory that the device's facts are copied to."""
    import cupyx

    return cupyx.empty_pinned(STATE, np.uint64)


@functools.cache
def _streams(device: int) -> list[Any]:
    """Return the streams on which kernels run side by side."""
    import cupy

    return [cupy.cuda.Stream(non_blocking=True) for _ in range(STREAMS)]


class Kernels:
    """The compiled kernels for one choice of types."""

    def __init__(self, value: str, index: str, pointer: str, key: str) -> None:
        self.vip, self.ip = f"{value},{index},{pointer}", f"{index},{pointer}"
        self.pointer, self.index, self.key = pointer, index, key
        self.offsets = f"offsets<{pointer}>"
        self.analyse = {g: f"analyse_rows<{self.ip},{g}>" for g in (2, 4, 8, 32)}
        self.counting = {s: f"count_rows<{self.ip},{s.group},{1 << (s.most - 1).bit_length()},{s.warps}>" for s in SORTED}
        self.sorting = {s: f"sort_rows<{self.vip},{key},{s.group},{s.items},{s.warps}>" for s in SORTED}

    @functools.cached_property
    def rows(self) -> Module:
        return module("rows.cu", ("list_rows", self.offsets, *self.analyse.values()))

    @functools.cached_property
    def sort(self) -> Module:
        return module("sort_rows.cu", (*self.counting.values(), *self.sorting.values()))

    @functools.cached_property
    def rank(self) -> Module:
        warps = sorted({kind.warps for kind in RANKED})
        counts = (f"rank_count<{self.ip},{w}>" for w in warps)
        fills = (f"rank_fill<{self.vip},{w},{o}>" for w in warps for o in ("false", "true"))
        return module("rank_rows.cu", (f"split_rows<{self.ip}>", *counts, *fills))

    @functools.cached_property
    def long(self) -> Module:
        return module(
            "long_rows.cu",
            (f"long_mark<{self.ip}>", "long_rank", f"long_columns<{self.vip}>", f"long_fill<{self.vip}>"),
        )

    @functools.cached_property
    def node(self) -> Module:
        names = [f"same_rows<{self.ip},8>", f"same_rows<{self.ip},32>", f"find_nodes<{self.ip}>"]
        return module(
            "node_rows.cu", (*names, f"node_count<{self.ip},{NODE_WARPS}>", *(f"node_fill<{self.vip},{NODE_WARPS},{s}>" for s in ("false", "true")))
        )


@functools.cache
def _kernels(device: int, value: str, index: str, pointer: str, key: str) -> Kernels:
    return Kernels(value, index, pointer, key)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass
class _Rows:
    """Rows of one kernel: a slice of a list of rows, and what the kernel knows of them."""

    kernel: str
    kind: Any
    rows: Any
    count: int
    slot: int = 0
    parts: int = 1
    tasks: Any = None
    spans: Any = None
    counts: Any = None
    width: int = 0
    node_rows: int = 0


class _Multiply:
    def __init__(self, a: CSR, b: CSR, deterministic: bool) -> None:
        import cupy

        self.cupy, self.a, self.b, self.deterministic = cupy, a, b, deterministic
        self.device = cupy.cuda.runtime.getDevice()
        self.stream = cupy.cuda.get_current_stream()
        self.dtype = result_dtype(a.dtype, b.dtype)
        self.pointer = a.indptr.dtype
        key = "u32" if b.ncols <= 1 << 22 else "u64"
        self.k = _kernels(self.device, c_type(self.dtype), c_type(a.indices.dtype), c_type(self.pointer), key)
        self.nrows = a.nrows
        self.tiles = _cdiv(a.nrows, 2048)
        self.scratch = cupy.zeros(STATE + self.tiles + 1, np.uint64)
        self.base = int(self.scratch.data.ptr)
        self.lengths = cupy.empty(a.nrows, np.uint32)
        self.operands = (a.indptr, a.indices, a.data, b.indptr, b.indices, b.data)
        self.pattern = (a.indptr, a.indices, b.indptr, b.indices)
        self.same_b: Any = None

    def at(self, slot: int) -> int:
        return self.base + 8 * slot

    def read(self) -> Any:
        """Wait for the device and return its facts; the array is used again by the next call."""
        mirror = _mirror(self.device)
        self.cupy.cuda.runtime.memcpyAsync(mirror.ctypes.data, self.base, mirror.nbytes, 2, self.stream.ptr)
        self.stream.synchronize()
        return mirror

    def run(self) -> CSR:
        cupy, k, a, b = self.cupy, self.k, self.a, self.b
        mean = a.nnz / max(a.nrows, 1)
        group = 2 if mean < 3 else 4 if mean < 10 else 8 if mean < 64 else 32
        grid = min(_cdiv(a.nrows, 256 // group), 2112)
        sizes = i64(a.nrows), i64(a.nnz), i64(b.nrows), i64(b.nnz), i64(b.ncols)
        k.rows(k.analyse[group], grid, 256, (*sizes, *self.pattern, _limits(self.device), self.lengths, self.base, self.at(FACTS)))
        host = self.read()
        if host[BAD_A] or host[BAD_B] or host[FALLS] != host[FALLS_AT_ROWS]:
            raise MatrixError("indices out of range, or rows of B not sorted")
        self.longest, products = int(host[MAX_ROW_A]), int(host[PRODUCTS])
        work = self.classes([int(n) for n in host[FACTS : FACTS + CLASSES]])
        work = self.prepare(work)
        self.each([functools.partial(getattr(self, f"count_{w.kernel}"), w) for w in work])
        indptr = cupy.empty(self.nrows + 1, self.pointer)
        k.rows(k.offsets, self.tiles, 256, (i64(self.nrows), self.lengths, self.at(STATE), indptr, self.at(NNZ_C)))
        # A small product does not wait for nnz(C): its buffers hold all products, and are cut afterwards.
        small = products <= SMALL_PRODUCTS and all(w.kernel == "sort" for w in work)
        nnz = products if small else self.nnz()
        c = CSR(indptr, cupy.empty(nnz, a.indices.dtype), cupy.empty(nnz, self.dtype), (self.nrows, b.ncols))
        self.each([functools.partial(getattr(self, f"fill_{w.kernel}"), w, c) for w in work])
        nnz = self.nnz() if small else nnz
        return CSR(indptr, c.indices[:nnz], c.data[:nnz], c.shape)

    def each(self, launches: list[Any]) -> None:
        """Launch kernels that do not depend on each other, side by side where there are several."""
        if len(launches) < 3:
            for launch in launches:
                launch()
            return
        streams = _streams(self.device)
        ready = self.stream.record()
        for stream in streams[: len(launches)]:
            stream.wait_event(ready)
        for number, launch in enumerate(launches):
            with streams[number % STREAMS]:
                launch()
        for stream in streams[: len(launches)]:
            self.stream.wait_event(stream.record())

    def nnz(self) -> int:
        self.host = self.read()
        return int(self.host[NNZ_C])

    def classes(self, counts: list[int]) -> list[_Rows]:
        """Share the rows out to classes; small classes join the next that has rows."""
        work = []
        first = start = counts[0]
        for number, kind in enumerate(KINDS):
            start += counts[number + 1]
            following = [k for k, n in zip(SORTED[number + 1 :], counts[number + 2 :], strict=False) if n]
            if start == first or (following and (start - first) * following[0].most <= FEW_SLOTS):
                continue
            work.append((kind, first, start - first, number))
            first = start
        if len(work) == 1 and isinstance(work[0][0], Sorted):
            kind, _, _, number = work[0]
            return [_Rows("sort", kind, 0, self.nrows, number)]
        self.list = self.cupy.empty(self.nrows, np.uint32)
        self.k.rows(
            "list_rows", _cdiv(self.nrows, 256), 256,
            (i64(self.nrows), self.lengths, _limits(self.device), self.at(FACTS), self.at(TAKEN), self.list),
        )  # fmt: skip
        return [_Rows(self.suited(kind, n), kind, self.list[f:], n, number) for kind, f, n, number in work]

    def suited(self, kind: Sorted | Ranked, count: int) -> str:
        if count >= NODE_LEAST and NODE_FROM < kind.most <= NODE_TO:
            return "node"
        if isinstance(kind, Sorted):
            return "sort"
        return "long" if kind.most > LONG_ROW and not self.deterministic else "rank"

    def same(self, m: CSR) -> Any:
        same = self.cupy.empty(m.nrows, np.uint8)
        group = 8 if m.nnz < 64 * m.nrows else 32
        self.k.node(f"same_rows<{self.k.ip},{group}>", _cdiv(m.nrows, 256 // group), 256, (i64(m.nrows), m.indptr, m.indices, same))
        return same

    def prepare(self, work: list[_Rows]) -> list[_Rows]:
        cupy, k = self.cupy, self.k
        nodes = [w for w in work if w.kernel == "node"]
        if nodes:
            same_a = self.same(self.a)
            self.same_b = same_a if self.b.indices is self.a.indices else self.same(self.b)
        for w in nodes:
            w.tasks, w.spans = cupy.empty((w.count, 2), np.uint32), cupy.empty(w.count, np.int64)
            w.counts = cupy.empty(w.count, np.uint32)  # the rest
            k.node(
                f"find_nodes<{k.ip}>", _cdiv(w.count, 8), 256,
                (u32(w.count), w.rows, i64(self.nrows), i64(NODE_COLUMNS), same_a, *self.pattern, w.tasks, w.spans, w.counts,
                 self.at(NODES + 5 * w.slot)),
            )  # fmt: skip
        if nodes:
            host = self.read()
            work = [w for w in work if w.kernel != "node"]
            for w in nodes:
                found, rest, width, rows, _ = (int(x) for x in host[NODES + 5 * w.slot : NODES + 5 * w.slot + 5])
                if found:
                    work.append(_Rows("node", None, None, found, w.slot, 1, w.tasks, w.spans, None, width, rows))
                if rest:
                    work.append(_Rows("sort" if isinstance(w.kind, Sorted) else "rank", w.kind, w.counts, rest, w.slot))
        ranked = [w for w in work if w.kernel == "rank"]
        for w in ranked:
            w.parts = max(w.kind.parts, min(16, _cdiv(self.b.ncols, PART_COLUMNS)))
            n = w.count * w.parts
            w.tasks, w.spans, w.counts = cupy.empty(n, np.uint32), cupy.empty(2 * n, np.int64), cupy.empty(n, np.uint32)
            k.rank(
                f"split_rows<{k.ip}>", _cdiv(w.count, 8), 256,
                (u32(w.count), w.rows, i32(w.parts), *self.pattern, w.tasks, w.spans, self.lengths, self.at(WIDTHS + w.slot)),
            )  # fmt: skip
        if ranked:
            host = self.read()
            for w in ranked:
                w.width = int(host[WIDTHS + w.slot])
        return sorted(work, key=lambda w: -w.slot)

    def count_sort(self, w: _Rows) -> None:
        name, grid, block = self.k.counting[w.kind], _cdiv(w.count, w.kind.warps * 32 // w.kind.group), 32 * w.kind.warps
        self.k.sort(name, grid, block, (u32(w.count), w.rows, *self.pattern, self.lengths))

    def fill_sort(self, w: _Rows, c: CSR) -> None:
        name, grid, block = self.k.sorting[w.kind], _cdiv(w.count, w.kind.warps * 32 // w.kind.group), 32 * w.kind.warps
        self.k.sort(name, grid, block, (u32(w.count), w.rows, *self.operands, c.indptr, c.indices, c.data))

    def count_node(self, w: _Rows) -> None:
        words = _cdiv(w.width, 32)
        self.k.node(
            f"node_count<{self.k.ip},{NODE_WARPS}>", _cdiv(w.count, NODE_WARPS), 32 * NODE_WARPS,
            (u32(w.count), w.tasks, w.spans, i32(words), self.same_b, *self.pattern, self.lengths, self.at(NODES + 5 * w.slot + 4)),
            NODE_WARPS * words * 4,
        )  # fmt: skip

    def fill_node(self, w: _Rows, c: CSR) -> None:
        size = self.dtype.itemsize
        words = _cdiv(w.width, 32)
        most = int(self.host[NODES + 5 * w.slot + 4])
        capacity = min(most, max(64, (24 << 10) // (size * w.node_rows)))
        stride = _cdiv(size * (32 + capacity) * w.node_rows, 16) * 16 + _cdiv(8 * words + 4 * capacity, 16) * 16
        self.k.node(
            f"node_fill<{self.k.vip},{NODE_WARPS},{'true' if w.node_rows == 1 else 'false'}>", _cdiv(w.count, NODE_WARPS), 32 * NODE_WARPS,
            (u32(w.count), w.tasks, w.spans, i32(words), i32(w.node_rows), i32(capacity), i32(stride), self.same_b,
             *self.operands, c.indptr, c.indices, c.data),
            NODE_WARPS * stride,
        )  # fmt: skip

    def count_rank(self, w: _Rows) -> None:
        window = min(_cdiv(w.width, 256) * 256, 1 << 20)
        self.k.rank(
            f"rank_count<{self.k.ip},{w.kind.warps}>", w.count * w.parts, 32 * w.kind.warps,
            (w.tasks, i64(window), w.spans, *self.pattern, w.counts, self.lengths), window // 8,
        )  # fmt: skip

    def fill_rank(self, w: _Rows, c: CSR) -> None:
        size = self.dtype.itemsize
        window = min(_cdiv(w.width, 256) * 256, 1 << 19)
        masks = window // 8 + window // 16 + 16
        capacity = max(min(w.kind.most, w.width, (32 << 10) // size, (SHARED_BYTES - 8192 - masks) // size), 64)
        flag = "true" if self.deterministic else "false"
        self.k.rank(
            f"rank_fill<{self.k.vip},{w.kind.warps},{flag}>", w.count * w.parts, 32 * w.kind.warps,
            (w.tasks, w.counts, i32(w.parts), i64(window), i32(capacity), w.spans, *self.operands, c.indptr, c.indices, c.data),
            masks + capacity * size,
        )  # fmt: skip

    def count_long(self, w: _Rows) -> None:
        words = _cdiv(self.b.ncols, 64)
        shares = _cdiv(self.longest, 128)
        w.tasks = self.cupy.zeros((w.count, words), np.uint64)
        w.spans = self.cupy.empty((w.count, words), np.uint32)
        self.k.long(f"long_mark<{self.k.ip}>", (shares, w.count), 256, (w.rows, i64(words), *self.pattern, w.tasks))
        self.k.long("long_rank", w.count, 1024, (w.rows, i64(words), w.tasks, w.spans, self.lengths))

    def fill_long(self, w: _Rows, c: CSR) -> None:
        words = _cdiv(self.b.ncols, 64)
        shares = _cdiv(self.longest, 128)
        self.k.long(
            f"long_columns<{self.k.vip}>", (_cdiv(words, 256), w.count), 256,
            (w.rows, i64(words), w.tasks, w.spans, c.indptr, c.indices, c.data),
        )  # fmt: skip
        self.k.long(
            f"long_fill<{self.k.vip}>", (shares, w.count), 256,
            (w.rows, i64(words), w.tasks, w.spans, *self.operands, c.indptr, c.data),
        )  # fmt: skip


def multiply(a: CSR, b: CSR, *, deterministic: bool = False) -> CSR:
    """Return ``a @ b``; arrays of cupy in and out."""
    return _Multiply(a, b, deterministic).run()
