"""Multiply two blocks whose arrays are on the GPU: C = A @ B, row by row.

Each row of C goes to the kernel that suits its number of products: `sort_rows` where they fit in the registers of a
warp, `node_rows` where its columns lie near each other, `rank_rows` for the rest. A first pass counts the entries of each
row, a second writes them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from spdist.csr import CSR, INT32_MAX, result_dtype
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
    Sorted(4, 4, 4), Sorted(4, 8, 4), Sorted(8, 8, 4), Sorted(16, 8, 4), Sorted(32, 8, 4), Sorted(32, 16, 2), Sorted(32, 32, 1),
)  # fmt: skip
RANKED = (
    Ranked(4096, 4, 1), Ranked(16384, 8, 1), Ranked(65536, 8, 4), Ranked(262144, 16, 8), Ranked(2**63 - 1, 16, 16),
)  # fmt: skip
KINDS: tuple[Sorted | Ranked, ...] = (*SORTED, *RANKED)
FIRST_NODE, LAST_NODE = 6, 8
"""Classes among which nodes are looked for: 513 to 16,384 products."""
NODE_COLUMNS = 1 << 16
NODE_WARPS = 4
FEW_ROWS = 4096
"""Rows for which a launch of their own is not worth while: they join the next class."""
CLASSES = 16
FACTS = 8
SHARED_BYTES = 226 << 10
PRODUCTS, BAD_A, BAD_B, FALLS, FALLS_AT_ROWS, MAX_ROW_PRODUCTS = range(6)
TOTALS = FACTS + 2 * CLASSES
"""Where the counts of `find_nodes` start, 5 per class; those of `split_rows` follow."""
STATE = TOTALS + 5 * CLASSES + CLASSES


@functools.cache
def _limits(device: int) -> Any:
    """Return the greatest number of products of each class, class 0 holding the empty rows, on the device."""
    import cupy

    limits = [0, *(kind.most for kind in KINDS)]
    return cupy.asarray(np.array([*limits, *[2**64 - 1] * (CLASSES - len(limits))], np.uint64))


class Kernels:
    """The compiled kernels for one choice of types."""

    def __init__(self, value: str, index: str, pointer: str, key: str) -> None:
        self.vip, self.ip = f"{value},{index},{pointer}", f"{index},{pointer}"
        self.pointer, self.index, self.key = pointer, index, key

    @functools.cached_property
    def rows(self) -> Module:
        names = [f"check_columns<{self.index}>", "list_rows", f"offsets<{self.pointer}>"]
        return module("rows.cu", (*names, *(f"analyse_rows<{self.ip},{g}>" for g in (2, 8, 32))))

    @functools.cached_property
    def sort(self) -> Module:
        return module("sort_rows.cu", tuple(self.sort_name(k, n) for k in SORTED for n in (False, True)))

    @functools.cached_property
    def rank(self) -> Module:
        warps = sorted({kind.warps for kind in RANKED})
        counts = (f"rank_count<{self.ip},{w}>" for w in warps)
        fills = (f"rank_fill<{self.vip},{w},{o}>" for w in warps for o in ("false", "true"))
        return module("rank_rows.cu", (f"split_rows<{self.ip}>", *counts, *fills))

    @functools.cached_property
    def node(self) -> Module:
        names = [f"same_rows<{self.ip},8>", f"same_rows<{self.ip},32>", f"find_nodes<{self.ip}>"]
        return module(
            "node_rows.cu", (*names, f"node_count<{self.ip},{NODE_WARPS}>", f"node_fill<{self.vip},{NODE_WARPS}>")
        )

    def sort_name(self, kind: Sorted, numeric: bool) -> str:
        """Return the name of the sorting kernel of a class."""
        flag = "true" if numeric else "false"
        return f"sort_rows<{self.vip},{self.key},{kind.group},{kind.items},{kind.warps},{flag}>"


@functools.cache
def _kernels(device: int, value: str, index: str, pointer: str, key: str) -> Kernels:
    return Kernels(value, index, pointer, key)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass
class _Rows:
    """Rows of one kernel: a slice of a list of rows, and what the kernel knows of them."""

    kind: Sorted | Ranked | None
    rows: Any
    count: int
    slot: int = 0
    tasks: Any = None
    spans: Any = None
    counts: Any = None
    width: int = 0
    node_rows: int = 0


class _Multiply:
    def __init__(self, a: CSR, b: CSR, deterministic: bool) -> None:
        import cupy

        self.cupy, self.a, self.b, self.deterministic = cupy, a, b, deterministic
        device = cupy.cuda.runtime.getDevice()
        self.dtype = result_dtype(a.dtype, b.dtype)
        self.pointer = a.indptr.dtype
        key = np.uint32 if b.ncols <= 1 << 22 else np.uint64
        self.k = _kernels(device, c_type(self.dtype), c_type(a.indices.dtype), c_type(self.pointer), c_type(key))
        self.limits = _limits(device)
        self.nrows = a.nrows
        self.tiles = _cdiv(a.nrows, 2048)
        self.scratch = cupy.zeros(STATE + self.tiles + 1, np.uint64)
        self.lengths = cupy.empty(a.nrows, np.uint32)
        self.list = cupy.empty(a.nrows, np.uint32)
        self.operands = (a.indptr, a.indices, a.data, b.indptr, b.indices, b.data)
        self.pattern = (a.indptr, a.indices, b.indptr, b.indices)
        self.same_b: Any = None

    def at(self, slot: int) -> int:
        return int(self.scratch.data.ptr) + 8 * slot

    def analyse(self) -> Any:
        a, b, k = self.a, self.b, self.k
        k.rows(
            f"check_columns<{k.index}>", min(1056, _cdiv(max(b.nnz, 1), 256)), 256,
            (i64(b.nnz), i64(b.ncols), b.indices, self.at(0)),
        )  # fmt: skip
        group = 2 if a.nnz < 8 * a.nrows else 8 if a.nnz < 64 * a.nrows else 32
        sizes = i64(a.nrows), i64(a.nnz), i64(b.nrows), i64(b.nnz)
        k.rows(
            f"analyse_rows<{k.ip},{group}>", _cdiv(a.nrows, 256 // group), 256,
            (*sizes, *self.pattern, self.limits, self.lengths, self.at(0), self.at(FACTS)),
        )  # fmt: skip
        k.rows(
            "list_rows", _cdiv(a.nrows, 256), 256,
            (i64(a.nrows), self.lengths, self.limits, self.at(FACTS), self.at(FACTS + CLASSES), self.list),
        )  # fmt: skip
        return self.scratch[:STATE].get()

    def run(self) -> CSR:
        cupy, k = self.cupy, self.k
        host = self.analyse()
        if host[BAD_A] or host[BAD_B] or host[FALLS] != host[FALLS_AT_ROWS]:
            raise MatrixError("indices out of range, or rows of B not sorted")
        work = self.classes([int(n) for n in host[FACTS : FACTS + CLASSES]])
        work = self.nodes(work)
        self.count(work)
        indptr = cupy.empty(self.nrows + 1, self.pointer)
        k.rows(f"offsets<{k.pointer}>", self.tiles, 256, (i64(self.nrows), self.lengths, self.at(STATE), indptr))
        if any(w.kind is None for w in work):
            host = self.scratch[:STATE].get()
        nnz = int(indptr[-1])
        c = CSR(indptr, cupy.empty(nnz, self.a.indices.dtype), cupy.empty(nnz, self.dtype), (self.nrows, self.b.ncols))
        self.fill(work, host, c)
        return c

    def classes(self, counts: list[int]) -> list[_Rows]:
        work, begin = [], counts[0]
        start = begin
        for number, kind in enumerate(KINDS):
            start += counts[number + 1]
            small = isinstance(kind, Sorted) and start - begin < FEW_ROWS
            if start == begin or (small and any(counts[j + 1] for j in range(number + 1, len(SORTED)))):
                continue
            work.append(_Rows(kind, self.list[begin:], start - begin, number))
            begin = start
        return work

    def same(self, m: CSR) -> Any:
        same = self.cupy.empty(m.nrows, np.uint8)
        group = 8 if m.nnz < 64 * m.nrows else 32
        self.k.node(f"same_rows<{self.k.ip},{group}>", _cdiv(m.nrows, 256 // group), 256, (i64(m.nrows), m.indptr, m.indices, same))
        return same

    def nodes(self, work: list[_Rows]) -> list[_Rows]:
        cupy, k = self.cupy, self.k
        wide = [w for w in work if FIRST_NODE <= w.slot <= LAST_NODE]
        if wide:
            same_a = self.same(self.a)
            self.same_b = same_a if self.b is self.a or self.b.indices is self.a.indices else self.same(self.b)
        for w in wide:
            w.tasks, w.spans = cupy.empty((w.count, 2), np.uint32), cupy.empty(w.count, np.int64)
            w.counts = cupy.empty(w.count, np.uint32)  # the rest
            k.node(
                f"find_nodes<{k.ip}>", _cdiv(w.count, 8), 256,
                (u32(w.count), w.rows, i64(self.nrows), i64(NODE_COLUMNS), same_a, *self.pattern, w.tasks, w.spans, w.counts,
                 self.at(TOTALS + 5 * w.slot)),
            )  # fmt: skip
        ranked = [w for w in work if isinstance(w.kind, Ranked) and w not in wide]
        host = self.scratch[:STATE].get() if wide else None
        out = [w for w in work if w not in wide]
        for w in wide:
            found, rest, width, rows, _ = (int(x) for x in host[TOTALS + 5 * w.slot : TOTALS + 5 * w.slot + 5])
            if found:
                out.append(_Rows(None, None, found, w.slot, w.tasks, w.spans, None, width, rows))
            if rest:
                out.append(_Rows(w.kind, w.counts, rest, w.slot))
        ranked = [w for w in out if isinstance(w.kind, Ranked)]
        for w in ranked:
            n = w.count * w.kind.parts
            w.tasks, w.spans, w.counts = cupy.empty(n, np.uint32), cupy.empty(2 * n, np.int64), cupy.empty(n, np.uint32)
            k.rank(
                f"split_rows<{k.ip}>", _cdiv(w.count, 8), 256,
                (u32(w.count), w.rows, i32(w.kind.parts), *self.pattern, w.tasks, w.spans, self.lengths, self.at(TOTALS + 5 * CLASSES + w.slot)),
            )  # fmt: skip
        if ranked:
            host = self.scratch[:STATE].get()
            for w in ranked:
                w.width = int(host[TOTALS + 5 * CLASSES + w.slot])
        return sorted(out, key=lambda w: -w.slot)

    def count(self, work: list[_Rows]) -> None:
        k = self.k
        for w in work:
            if w.kind is None:
                words = _cdiv(w.width, 64)
                k.node(
                    f"node_count<{k.ip},{NODE_WARPS}>", _cdiv(w.count, NODE_WARPS), 32 * NODE_WARPS,
                    (u32(w.count), w.tasks, w.spans, i32(words), self.same_b, *self.pattern, self.lengths, self.at(TOTALS + 5 * w.slot + 4)),
                    NODE_WARPS * words * 8,
                )  # fmt: skip
            elif isinstance(w.kind, Ranked):
                window = min(_cdiv(w.width, 256) * 256, 1 << 20)
                k.rank(
                    f"rank_count<{k.ip},{w.kind.warps}>", w.count * w.kind.parts, 32 * w.kind.warps,
                    (w.tasks, i64(window), w.spans, *self.pattern, w.counts, self.lengths), window // 8,
                )  # fmt: skip
            else:
                self.sort(w, False, (self.lengths, 0, 0, 0))

    def fill(self, work: list[_Rows], host: Any, c: CSR) -> None:
        k = self.k
        size = self.dtype.itemsize
        target = (c.indptr, c.indices, c.data)
        for w in work:
            if w.kind is None:
                words = _cdiv(w.width, 64)
                most = int(host[TOTALS + 5 * w.slot + 4])
                capacity = min(most, max(64, (24 << 10) // (size * w.node_rows)))
                stride = _cdiv(size * (32 * w.node_rows + capacity * w.node_rows) + 12 * words + 16, 16) * 16
                stride = _cdiv(size * (32 * w.node_rows + capacity * w.node_rows), 16) * 16 + _cdiv(12 * words + 16, 16) * 16
                k.node(
                    f"node_fill<{k.vip},{NODE_WARPS}>", _cdiv(w.count, NODE_WARPS), 32 * NODE_WARPS,
                    (u32(w.count), w.tasks, w.spans, i32(words), i32(w.node_rows), i32(capacity), i32(stride), self.same_b, *self.operands, *target),
                    NODE_WARPS * stride,
                )  # fmt: skip
            elif isinstance(w.kind, Ranked):
                window = min(_cdiv(w.width, 256) * 256, 1 << 19)
                masks = window // 8 + window // 16 + 16
                bound = min(w.kind.most, w.width)
                room = SHARED_BYTES // (4 if w.kind.warps <= 4 else 2) - 8192 - masks
                capacity = max(min(bound, room // size), 64)
                flag = "true" if self.deterministic else "false"
                k.rank(
                    f"rank_fill<{k.vip},{w.kind.warps},{flag}>", w.count * w.kind.parts, 32 * w.kind.warps,
                    (w.tasks, w.counts, i32(w.kind.parts), i64(window), i32(capacity), w.spans, *self.operands, *target),
                    masks + capacity * size,
                )  # fmt: skip
            else:
                self.sort(w, True, (0, *target))

    def sort(self, w: _Rows, numeric: bool, out: tuple[Any, ...]) -> None:
        kind = w.kind
        assert isinstance(kind, Sorted)
        per_block = kind.warps * 32 // kind.group
        self.k.sort(self.k.sort_name(kind, numeric), _cdiv(w.count, per_block), 32 * kind.warps, (u32(w.count), w.rows, *self.operands, *out))


def multiply(a: CSR, b: CSR, *, deterministic: bool = False) -> CSR:
    """Return ``a @ b``; arrays of cupy in and out."""
    return _Multiply(a, b, deterministic).run()
