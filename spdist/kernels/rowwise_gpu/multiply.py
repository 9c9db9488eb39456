"""Multiply two matrices whose arrays are on the GPU: C = A @ B, row by row.

A first kernel counts the products of every row of C. Each row then goes to the kernels that suit it (`gpu_rows`):
sorted in the registers of a warp, or less; added up in shared memory by a warp, for finite elements; added up in place
by thread blocks; or shared among thread blocks. These first count the entries of each row, and then write them.

Rows that are sorted need not be counted: where most products are in rows of much the same length, one kernel makes them
in their order. C has the room that a sample of them asks for; thread blocks tell each other how many entries they have.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spdist.errors import MatrixError, MemoryBoundError
from spdist.kernels.cuda.module import c_type, value_type
from spdist.kernels.rounding import ceil_div
from spdist.kernels.rowwise_gpu import row_classes, workspace
from spdist.kernels.rowwise_gpu.row_classes import (
    CLASSES,
    Facts,
    Kernels,
    LongRows,
    NodeRows,
    Operands,
    RankClass,
    RowClass,
    Rows,
    RowsAtOnce,
    SortClass,
    SortRows,
)
from spdist.kernels.semirings import PLUS_TIMES, Semiring
from spdist.matrices.checks import check_product_shapes
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, index_dtype, result_dtype
from spdist.units import format_bytes

NODE_PRODUCTS = 512, 16384
"""Products of the rows among which nodes are looked for: more than the first, up to the second."""
NODE_LEAST = 1 << 14
"""Rows below which a warp a row, as nodes have it, leaves most of the device idle."""
FEW_SLOTS = 1 << 21
"""Rows times products of the next class up to which rows join it: launches of their own would take longer."""
FEW_ROWS, FEW_ROWS_AT_ONCE = 1 << 14, 1 << 16
"""Rows up to which all that are sorted in registers join one class; and if one kernel then makes all of the product."""
FEW_SHORT_ROWS, JOINED_SLOTS = 1 << 13, 128
"""The same where rows have, in the mean, fewer products, rounded up to those of their classes."""
FEW_PARTS = 1 << 11
"""The same for rows that thread blocks share: rows times their parts."""
NARROW_COLUMNS = 1 << 22
"""Columns that fit in 32-bit sort keys beside the number of a product."""
ENTERED_ROWS = 8
"""Rows of a thread block of `enter_rows`, as in groups.cuh."""
STREAMS = 4
AT_ONCE_ROWS = 1 << 15
"""Rows that a product should have, unless it is small, for rows to be made without being counted."""
AT_ONCE_SHARE, AT_ONCE_FULL = 0.9, 0.6
"""Share of the products, rounded up to those of their classes, that is in these rows; and how full they are, in the
mean, for a kernel made for the longest."""


@dataclass(eq=False)
class Pattern:
    """The structure of C = A @ B, and what the kernels need to fill it again for new values.

    Attributes
    ----------
    indptr : (nrows + 1,) int32 or int64
    indices : (nnz,) int32 or int64
    shape : (nrows, ncols)
    """

    indptr: Any
    indices: Any
    shape: tuple[int, int]
    operands: Operands | None
    work: list[Rows]

    @property
    def nnz(self) -> int:
        """Entries of C."""
        return len(self.indices)


def multiply(
    a: CSR, b: CSR, *, deterministic: bool = False, semiring: Semiring = PLUS_TIMES, sound_b: bool = False,
    expected: int = 0, meanwhile: Callable[[], None] | None = None,
) -> CSR:  # fmt: skip
    """Return ``a @ b``.

    Parameters
    ----------
    a, b : CSR
        Arrays of cupy on the current device; float32, float64, complex64, complex128, bool, or whole numbers of 32 or
        64 bits; int32 or int64 indices. Rows of B are sorted and free of duplicates; those of A need not be.
    deterministic : bool
        Add the products of every entry in the order of A's entries, so that the bits are the same on every run. Without
        it, rows of more than 1,024 products that form no node are summed by atomics, in any order.
    semiring : Semiring
        With C expressions for the GPU.
    sound_b : bool
        Whether another product has found nothing wrong with B: to look at all of it takes time.
    expected : int
        About how many entries C has, if that is known: no rows are counted to find out then.
    meanwhile : callable, optional
        What the host may do while it would wait for the GPU; not always called.

    Returns
    -------
    CSR
        Canonical, with the structural pattern. Indices have the wider dtype of the two; indptr is int64 where nnz needs
        it. A small C is cut from buffers for all products, which it keeps: 32 MiB at most. One whose rows were not
        counted first is cut from buffers, too, an eighth of which it leaves unused at most.

    Raises
    ------
    MatrixError
        If shapes or dtypes do not fit, offsets or columns are out of range, or a row of B is not sorted.
    InputError
        If the semiring has no C expressions, or these do not compile.
    MemoryBoundError
        If the GPU has too little memory; says how much is needed.
    """
    product = _Product(a, b, deterministic, semiring, sound_b=sound_b)
    product.expected, product.meanwhile = expected, meanwhile
    c, _ = product.run()
    return c


def count(a: CSR, b: CSR) -> Any:
    """Return the entries of each row of ``a @ b``, (nrows,) uint32 on the device; nothing is multiplied.

    Arguments and errors as for `multiply`.
    """
    return _Product(a, b, False).count()


def checked(a: CSR, b: CSR, semiring: Semiring, *, sound_b: bool = False) -> Operands | None:
    """Return operands, checked as `multiply` checks them and ready for kernels; None where there is no product."""
    product = _Product(a, b, False, semiring, sound_b=sound_b)
    return None if 0 in (a.nnz, b.nnz, a.nrows, b.ncols) else product._analyse()


@dataclass(frozen=True, slots=True)
class Entered(CSR):
    """B, checked, with a row for each entry of A, ``2 p`` for entry p; rows overlap, and those between mean nothing."""


def enter(a: CSR, b: CSR, diagonal: int, semiring: Semiring = PLUS_TIMES, *, sound_b: bool = False) -> tuple[CSR, CSR]:
    """Return operands whose product is the part of ``a @ b`` on and above a diagonal; no other products are made.

    Parameters
    ----------
    a, b, semiring, sound_b
        As for `multiply`, with the same errors.
    diagonal : int
        The column of the diagonal in the first row of ``a @ b``; it is one more in each row after that.

    Returns
    -------
    a, b : CSR
        For `multiply`, `count` and `checked`. Entries of B are shared; 8 bytes or more for each of A's are new. Columns
        are of 64 bits where A has 2^30 entries or more.
    """
    import cupy

    columns = a.indices.astype(np.promote_types(a.indices.dtype, index_dtype(2 * a.nnz)), copy=False)
    x = checked(CSR(a.indptr, columns, a.data, a.shape), b, semiring, sound_b=sound_b)
    if x is None:
        return a, b
    rows, offsets = cupy.empty(a.nnz, x.a.indices.dtype), cupy.zeros(2 * a.nnz + 1, x.a.indptr.dtype)
    args = a.nrows, diagonal, *x.pattern, rows, offsets
    x.kernels.launch("rowwise_gpu/rows.cu", "enter", ceil_div(a.nrows, ENTERED_ROWS), 32 * ENTERED_ROWS, args)
    entered = Entered(offsets, x.b.indices, x.b.data, (2 * a.nnz, b.ncols))
    return CSR(x.a.indptr, rows, x.a.data, (a.nrows, 2 * a.nnz)), entered


def check_canonical(m: CSR, name: str) -> None:
    """Check a matrix on the device, for which it waits.

    Raises
    ------
    MatrixError
        If offsets fall, or a column is out of range; a `NotCanonicalError` if a row is not sorted or holds a duplicate.
    """
    import cupy

    device = cupy.cuda.runtime.getDevice()
    kernels = _kernels(device, "double", c_type(m.indices.dtype), c_type(m.indptr.dtype), False)
    numbers, mirror = cupy.zeros(row_classes.FACTS, np.uint64), _mirror(device, threading.get_ident())
    facts = Facts(numbers, *mirror, cupy.cuda.get_current_stream(), kernels)
    sizes = 0, 0, m.nrows, m.nnz, m.ncols, 0, 1  # as if it were B, and no row of A
    where = facts.at(0), facts.at(row_classes.COUNTS), None, facts.on_host(0)
    args = *sizes, None, None, m.indptr, m.indices, _limits(device), None, *where
    kernels.launch("rowwise_gpu/rows.cu", "analyse 2", min(ceil_div(m.nnz, 1024), 2112), 256, args)
    facts.wait()
    _check(facts, name)


def offsets(lengths: Any, dtype: np.dtype[Any]) -> tuple[Any, int]:
    """Return row offsets from row lengths, (nrows,) uint32, on the device; and their last, for which it waits."""
    import cupy

    nrows = len(lengths)
    device = cupy.cuda.runtime.getDevice()
    indptr, state = cupy.empty(nrows + 1, dtype), cupy.zeros(_scan_words(nrows), np.uint64)
    memory, address = _mirror(device, threading.get_ident())
    pointer = c_type(dtype)
    loaded = _kernels(device, "double", "int", pointer, False)
    total = address + 8 * row_classes.NNZ_C
    loaded.launch("rowwise_gpu/rows.cu", "offsets", _scan_tiles(nrows), 256, (nrows, lengths, state, indptr, total))
    cupy.cuda.get_current_stream().synchronize()
    return indptr, int(memory[row_classes.NNZ_C])


def multiply_counted(a: CSR, b: CSR) -> tuple[CSR, int, int]:
    """Return ``a @ b`` as `multiply` does, how many products it took, and the entries of the longest row of A."""
    c, product = _Product(a, b, False).run()
    x = product.operands
    return (c, 0, 0) if x is None else (c, x.facts[row_classes.PRODUCTS], x.longest_a)


def symbolic(a: CSR, b: CSR, *, deterministic: bool = False) -> Pattern:
    """Return the structure of ``a @ b`` for `numeric`; arguments as for `multiply`."""
    c, product = _Product(a, b, deterministic, counted=True).run()
    x = product.operands
    if x is not None:  # the structure is kept, the values are not
        a, b = (CSR(m.indptr, m.indices, m.data[:0], m.shape) for m in (x.a, x.b))
        x = replace(x, a=a, b=b)
    return Pattern(c.indptr, c.indices, c.shape, x, product.work)


def numeric(pattern: Pattern, a: CSR, b: CSR) -> CSR:
    """Return ``a @ b`` for operands of the structure that `pattern` was made from.

    Parameters
    ----------
    pattern : Pattern
        Of `symbolic`.
    a, b : CSR
        With the same structure as then, for a product of the same dtype; only the values may differ. That the columns
        are the same is not checked, only their number.

    Returns
    -------
    CSR
        It shares indptr and indices with the pattern.

    Raises
    ------
    MatrixError
        If shape or nnz of an operand, or the dtype of the product, is not what the pattern was made from.
    """
    import cupy

    x, dtype = pattern.operands, result_dtype(a.dtype, b.dtype)
    if x is None:
        return CSR(pattern.indptr, pattern.indices, cupy.empty(0, dtype), pattern.shape)
    for name, new, old in (("A", a, x.a), ("B", b, x.b)):
        if (new.shape, new.nnz, dtype) != (old.shape, old.nnz, old.dtype):
            raise MatrixError(
                f"{name} is {new.nrows:,} x {new.ncols:,} with {new.nnz:,} entries for a product of {dtype}, but the "
                f"pattern was made from {old.nrows:,} x {old.ncols:,} with {old.nnz:,} for one of {old.dtype}: call "
                f"symbolic again"
            )
    values = replace(x, a=_with_values(x.a, a), b=_with_values(x.b, b))
    data = cupy.empty(pattern.nnz, dtype)
    offsets = pattern.indptr.astype(x.a.indptr.dtype, copy=False)  # what the kernels were compiled for
    c = CSR(offsets, pattern.indices, data, pattern.shape)
    _side_by_side([functools.partial(rows.fill, values, c) for rows in pattern.work])
    return CSR(pattern.indptr, pattern.indices, data, pattern.shape)


def _with_values(old: CSR, new: CSR) -> CSR:
    """Return a matrix of the arrays that were checked, with new values in the dtype of the old ones."""
    return CSR(old.indptr, old.indices, new.data.astype(old.dtype, copy=False), old.shape)


def sources(value: str, index: str, pointer: str) -> dict[str, tuple[str, ...]]:
    """Return the name expressions of each .cu file, for C types such as ``"double"``, ``"int"``, ``"int"``."""
    kernels = Kernels(value, index, pointer)
    return (kernels.with_wide_keys() if index != "int" else kernels).sources()


def compile_kernels(dtype: np.dtype[Any], ncols: int, semiring: Semiring = PLUS_TIMES) -> None:
    """Compile what products of a dtype with `ncols` columns need, before the first of them.

    Raises
    ------
    MatrixError
        If the GPU's kernels do not multiply such values.
    InputError
        If the semiring has no C expressions, or these do not compile.
    """
    import cupy

    types = value_type(dtype), c_type(index_dtype(ncols)), "int"
    defines = semiring.defines(dtype)
    _kernels(cupy.cuda.runtime.getDevice(), *types, ncols > INT32_MAX, defines).compile()


def share_rows(counts: list[int], small: bool = False) -> list[tuple[int, int, int]]:
    """Share the rows of a product out to classes; classes of few rows join the next that has any.

    Parameters
    ----------
    counts : (SLOTS,) ints
        Rows of each class, the empty rows first.
    small : bool
        Whether one kernel makes the product if one class has all rows.

    Returns
    -------
    list of (number, first, count)
        Class, by its place in `CLASSES`, and the slice of the rows in ascending order of class.
    """
    shares = []
    first = start = counts[0]
    last_sorted = len(row_classes.SORT_CLASSES) - 1
    in_sorted = counts[1 : last_sorted + 2]
    if _may_join_all(in_sorted, small and sum(in_sorted) + counts[0] == sum(counts)):
        counts = [counts[0], *[0] * last_sorted, sum(in_sorted), *counts[last_sorted + 2 :]]
    present = [(number, rows) for number, rows in enumerate(counts[1:]) if rows]
    for place, (number, rows) in enumerate(present, 1):
        start += rows
        later = CLASSES[present[place][0]] if place < len(present) else None
        if not _may_join(start - first, CLASSES[number], later):
            shares.append((number, first, start - first))
            first = start
    return shares


def _may_join_all(counts: list[int], at_once: bool) -> bool:
    """Return whether the last sorted class should take all rows that are sorted: its kernel adapts to shorter ones."""
    rows, slots = sum(counts), sum(n * kind.most for n, kind in zip(counts, row_classes.SORT_CLASSES, strict=True))
    most = FEW_ROWS_AT_ONCE if at_once else FEW_ROWS
    return max(counts) < rows <= (most if slots >= JOINED_SLOTS * rows else FEW_SHORT_ROWS)


def _may_join(rows: int, kind: RowClass, later: RowClass | None) -> bool:
    """Return whether rows of a class take less time with those of the next than in launches of their own."""
    if isinstance(later, SortClass):
        return rows * later.most <= FEW_SLOTS
    if not isinstance(kind, RankClass) or not isinstance(later, RankClass):
        return False
    return later is not CLASSES[-1] and rows * later.parts <= FEW_PARTS


def at_once(counts: list[int], small: bool) -> int | None:
    """Return the class up to whose products rows are made without being counted; None if all are to be counted.

    Parameters
    ----------
    counts : (SLOTS,) ints
        Rows of each class, the empty rows first.
    small : bool
        Whether C may have room for all products: then all rows must be of that class.
    """
    if small:
        shares = share_rows(counts, True)
        least = shares[0][0] if len(shares) == 1 else len(CLASSES)
        return next((number for number in row_classes.AT_ONCE if number >= least), None)
    slots = [rows * kind.most for rows, kind in zip(counts[1:], CLASSES, strict=False)]
    for number in row_classes.AT_ONCE:
        rows, products = sum(counts[1 : number + 2]), sum(slots[: number + 1])
        if products >= AT_ONCE_SHARE * sum(slots):
            full = products >= AT_ONCE_FULL * rows * CLASSES[number].most
            return number if rows >= AT_ONCE_ROWS and full else None
    return None


class _Product:
    """One product on its way: facts about the rows, the families of rows, C."""

    def __init__(
        self, a: CSR, b: CSR, deterministic: bool, semiring: Semiring = PLUS_TIMES, counted: bool = False,
        sound_b: bool = False,
    ) -> None:  # fmt: skip
        import cupy

        check_product_shapes(a.shape, b.shape)
        self.cupy = cupy
        self.dtype = semiring.result_dtype(a.dtype, b.dtype)
        value_type(self.dtype)
        self.a, self.b = _alike(a, b, self.dtype)
        self.semiring, self.defines = semiring, semiring.defines(self.dtype)
        self.deterministic = deterministic or not semiring.has_atomics(self.dtype)
        self.counted, self.sound_b = counted, sound_b or isinstance(b, Entered)
        self.shape = (a.nrows, b.ncols)
        self.operands: Operands | None = None
        self.work: list[Rows] = []
        self.known_nnz = self.expected = 0
        self.meanwhile: Callable[[], None] | None = None

    def run(self) -> tuple[CSR, _Product]:
        """Multiply; a lack of memory says how much was needed."""
        try:
            return self._run(), self
        except self.cupy.cuda.memory.OutOfMemoryError as error:
            free = self.cupy.cuda.runtime.memGetInfo()[0] + self.cupy.get_default_memory_pool().free_bytes()
            size = self.dtype.itemsize + self.a.indices.itemsize
            known = f"C takes {format_bytes(self.known_nnz * size)}" if self.known_nnz else "C is not counted yet"
            raise MemoryBoundError(
                f"the GPU has {format_bytes(free)} free, too little for this product: {known}, and the last request "
                f"was: {error}. Multiply row blocks of A one after another, or use spdist.matmul on stored matrices"
            ) from None

    def _run(self) -> CSR:
        if 0 in (self.a.nnz, self.b.nnz, *self.shape):
            return _empty(self.shape, self.dtype, self.a)
        x = self.operands = self._analyse()
        facts = x.facts
        products = facts[row_classes.PRODUCTS]
        if products > INT32_MAX and x.a.indptr.dtype == np.int32:
            # nnz(C) may pass 2^31: begin again with 64-bit offsets.
            left = _wide(self.a)
            right = left if self.b is self.a else _wide(self.b)
            wide = _Product(left, right, self.deterministic, self.semiring, self.counted, self.sound_b)
            c = wide._run()
            self.operands, self.work = wide.operands, wide.work
            return CSR(c.indptr.astype(np.int32), c.indices, c.data, c.shape) if c.nnz <= INT32_MAX else c
        counts = facts.class_rows()
        indptr = self.cupy.empty(self.a.nrows + 1, x.a.indptr.dtype)
        number = None if self.counted else at_once(counts, self._is_small())
        if number is not None:
            return self._run_at_once(number, counts, indptr)
        self.work = self._prepare(self._families(counts))
        in_nodes = any(isinstance(rows, NodeRows) for rows in self.work)
        # C of a small product is cut from buffers for all products, so that the host need not wait for nnz(C) before.
        small = self._is_small() and not in_nodes
        _side_by_side([functools.partial(rows.count_entries, x) for rows in self.work])
        total = facts.at(row_classes.NNZ_C) if in_nodes else facts.on_host(row_classes.NNZ_C)
        args = self.a.nrows, x.lengths, facts.at(row_classes.FACTS), indptr, total
        x.kernels.launch("rowwise_gpu/rows.cu", "offsets", _scan_tiles(self.a.nrows), 256, args)
        c = self._allocate(indptr, products if small else self._count(in_nodes))
        _side_by_side([functools.partial(rows.fill, x, c) for rows in self.work])
        return self._cut(c) if small else c

    def count(self) -> Any:
        """Return the entries of each row of C."""
        if 0 in (self.a.nnz, self.b.nnz, *self.shape):
            return self.cupy.zeros(self.shape[0], np.uint32)
        x = self.operands = self._analyse()
        self.work = self._prepare(self._families(x.facts.class_rows()))
        _side_by_side([functools.partial(rows.count_entries, x) for rows in self.work])
        return x.lengths

    def _run_at_once(self, number: int, counts: list[int], indptr: Any) -> CSR:
        """Multiply without counting first, but for a sample of the rows, and rows of too many products."""
        x = self.operands
        assert x is not None
        rows, small = RowsAtOnce(number, x.lengths), self._is_small()
        capacity = x.facts[row_classes.PRODUCTS]
        if not small:
            capacity = min(capacity, self._expect(rows, counts))
        while True:
            c = self._allocate(indptr, capacity)
            rows.fill(x, c)
            self._go_on()
            x.facts.wait()
            self.known_nnz = nnz = x.facts[row_classes.NNZ_C]
            if nnz <= capacity:
                break
            capacity = nnz  # more than was expected
        _side_by_side([functools.partial(others.fill, x, c) for others in self.work])
        indices, data = c.indices[:nnz], c.data[:nnz]
        if not small and workspace.SPARE * (capacity - nnz) > capacity:
            indices, data = indices.copy(), data.copy()
        return CSR(indptr, indices, data, self.shape)

    def _go_on(self) -> None:
        """Have the host do what it has to while the GPU is busy; once."""
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()

    def _expect(self, rows: RowsAtOnce, counts: list[int]) -> int:
        """Count the rows that are not made at once, and some others; return the room that C should have."""
        x = self.operands
        assert x is not None
        first = rows.number + 2
        if self.expected and not sum(counts[first:]):
            return self.expected + self.expected // workspace.EXPECTED_MARGIN
        rows.sample(x)
        if sum(counts[first:]):
            families = self._families([sum(counts[:first]), *[0] * (first - 1), *counts[first:]])
            rows.lengths = x.lengths = self.cupy.empty(self.a.nrows, np.uint32)
            self.work = self._prepare(families)
            _side_by_side([functools.partial(others.count_entries, x) for others in self.work])
        x.facts.read()
        for others in self.work:
            others.counted(x)
        expected = rows.expected(x)
        return expected + expected // workspace.SAMPLE_MARGIN

    def _is_small(self) -> bool:
        """Whether buffers for all products are small."""
        x = self.operands
        assert x is not None
        entry = self.dtype.itemsize + x.a.indices.itemsize
        return x.facts[row_classes.PRODUCTS] * entry <= workspace.SMALL_BYTES and self.a.nrows <= workspace.SMALL_ROWS

    def _count(self, in_nodes: bool) -> int:
        """Wait for nnz(C), and for what `count_entries` has found about nodes."""
        x = self.operands
        assert x is not None
        self._go_on()
        x.facts.read() if in_nodes else x.facts.wait()
        for rows in self.work:
            rows.counted(x)
        self.known_nnz = x.facts[row_classes.NNZ_C]
        return self.known_nnz

    def _cut(self, c: CSR) -> CSR:
        """Wait for nnz(C), and return C without what its buffers have beyond it."""
        nnz = self._count(False)
        return CSR(c.indptr, c.indices[:nnz], c.data[:nnz], self.shape)

    def _allocate(self, indptr: Any, nnz: int) -> CSR:
        """Return C without its entries."""
        indices, data = self.cupy.empty(nnz, self.a.indices.dtype), self.cupy.empty(nnz, self.dtype)
        return CSR(indptr, indices, data, self.shape)

    def _analyse(self) -> Operands:
        """Count products and check the operands."""
        cupy, a, b = self.cupy, self.a, self.b
        device = cupy.cuda.runtime.getDevice()
        types = value_type(self.dtype), c_type(a.indices.dtype), c_type(a.indptr.dtype)
        kernels = _kernels(device, *types, b.ncols > INT32_MAX, self.defines)
        kernels.compile()
        numbers = cupy.zeros(row_classes.FACTS + _scan_words(a.nrows), np.uint64)
        mirror = _mirror(device, threading.get_ident())
        facts = Facts(numbers, *mirror, cupy.cuda.get_current_stream(), kernels)
        x = Operands(a, b, kernels, facts, cupy.empty(a.nrows, np.uint32), self.deterministic)
        most_long = min(a.nrows, a.nnz // row_classes.VERY_LONG)
        very_long = cupy.empty(most_long, np.uint32) if most_long else None
        mean = a.nnz / a.nrows
        group = 2 if mean < 3 else 4 if mean < 10 else 8 if mean < 64 else 32
        sizes = a.nrows, a.nnz, b.nrows, b.nnz, b.ncols, row_classes.SORT_CLASSES[-1].most, int(not self.sound_b)
        where = facts.at(0), facts.at(row_classes.COUNTS), very_long, facts.on_host(0)
        args = *sizes, *x.pattern, _limits(device), x.lengths, *where
        kernels.launch("rowwise_gpu/rows.cu", f"analyse {group}", min(ceil_div(a.nrows, 256 // group), 2112), 256, args)
        facts.wait()
        x.longest_a = facts[row_classes.MAX_ROW_A]
        if rows := facts[row_classes.VERY_LONG_ROWS]:
            args = very_long, b.nrows, b.nnz, a.indptr, a.indices, b.indptr, facts.at(0)
            kernels.launch("rowwise_gpu/rows.cu", "analyse long", (ceil_div(x.longest_a, 2048), rows), 256, args)
            facts.read()
        _check(facts)
        if b.ncols > NARROW_COLUMNS and facts[row_classes.WIDEST] >= NARROW_COLUMNS:
            x.kernels = _kernels(device, *types, True, self.defines)
            x.kernels.compile()
        return x

    def _families(self, counts: list[int]) -> list[Rows]:
        """Return the rows of each class, for the kernels that suit them."""
        x, nrows = self.operands, self.a.nrows
        assert x is not None
        shares = share_rows(counts, self._is_small())
        all_rows = counts[0] == x.facts.class_rows()[0] and len(shares) == 1
        if all_rows and isinstance(CLASSES[shares[0][0]], SortClass):
            return [SortRows(CLASSES[shares[0][0]], shares[0][0], 0, nrows)]  # all rows, the empty ones too
        rows = x.listed = self.cupy.empty(nrows, np.uint32)
        device = self.cupy.cuda.runtime.getDevice()
        args = nrows, x.lengths, _limits(device), x.facts.at(row_classes.COUNTS), x.facts.at(row_classes.TAKEN), rows
        x.kernels.launch("rowwise_gpu/rows.cu", "list", ceil_div(nrows, 256), 256, args)
        low, high = NODE_PRODUCTS
        in_nodes = sum(n for number, _, n in shares if low < CLASSES[number].most <= high) >= NODE_LEAST
        families: list[Rows] = []
        for number, first, count in shares:
            kind, listed = CLASSES[number], rows.data.ptr + 4 * first
            if in_nodes and low < kind.most <= high:
                families.append(NodeRows(kind, number, listed, count))
            elif kind is CLASSES[-1] and not self.deterministic and workspace.long_fits(count, self.b.ncols):
                families.append(LongRows(kind, number, listed, count))
            else:
                families.append(row_classes.rows_of(kind, number, listed, count))
        return families

    def _prepare(self, families: list[Rows]) -> list[Rows]:
        """Let the families look at their rows; those of many products come first, as they take longest."""
        x = self.operands
        assert x is not None
        self._look(families)
        others = [rest for rows in families if isinstance(rows, NodeRows) and (rest := rows.others(x))]
        self._look(others)
        return sorted((rows for rows in (*families, *others) if rows.count), key=lambda rows: -rows.number)

    def _look(self, families: list[Rows]) -> None:
        """Prepare families; read what they found where it matters."""
        x = self.operands
        assert x is not None
        for rows in families:
            rows.prepare(x)
        if any(rows.waits for rows in families):
            x.facts.read()
            for rows in families:
                rows.prepared(x)


def _check(facts: Facts, name_b: str = "B") -> None:
    """Refuse operands whose arrays are no CSR matrix, or whose B is not canonical."""
    for name, slot in (("A", row_classes.BAD_A), (name_b, row_classes.BAD_B)):
        if facts[slot]:
            raise MatrixError(
                f"{name}: offsets that fall, or a column outside of the matrix; nothing was read there. Rebuild the "
                f"matrix, or check it with spdist.matrices.checks.check_structure on the host"
            )
    if facts[row_classes.FALLS] != facts[row_classes.FALLS_AT_ROWS]:
        raise NotCanonicalError(f"{name_b}: a row is not sorted or holds a duplicate; call sum_duplicates() first")


class NotCanonicalError(MatrixError):
    """A row of B, or of a mask, is not sorted, or holds a duplicate."""


def _alike(a: CSR, b: CSR, dtype: np.dtype[Any]) -> tuple[CSR, CSR]:
    """Return the operands with values of `dtype`, and with indices and offsets of one dtype each."""
    index = np.promote_types(a.indices.dtype, b.indices.dtype)
    pointer = np.promote_types(a.indptr.dtype, b.indptr.dtype)
    left = _cast(a, dtype, index, pointer)
    return left, left if b is a else _cast(b, dtype, index, pointer)


def _cast(m: CSR, *wanted: np.dtype[Any]) -> CSR:
    """Return the matrix with values, indices and offsets of the wanted dtypes."""
    if (m.dtype, m.indices.dtype, m.indptr.dtype) == wanted:
        return m
    data, indices, indptr = (
        x.astype(t, copy=False) for x, t in zip((m.data, m.indices, m.indptr), wanted, strict=True)
    )
    return replace(m, indptr=indptr, indices=indices, data=data)


def _wide(m: CSR) -> CSR:
    """Return the matrix with 64-bit offsets."""
    return replace(m, indptr=m.indptr.astype(np.int64))


def _empty(shape: tuple[int, int], dtype: np.dtype[Any], like: CSR) -> CSR:
    """Return a matrix with no entries, on the device."""
    import cupy

    indptr = cupy.zeros(shape[0] + 1, like.indptr.dtype)
    return CSR(indptr, cupy.empty(0, like.indices.dtype), cupy.empty(0, dtype), shape)


def _side_by_side(launches: list[Callable[[], None]]) -> None:
    """Launch kernels that do not depend on each other, on streams of their own where there are several."""
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


def _scan_tiles(nrows: int) -> int:
    """Return the thread blocks of the kernel `offsets`."""
    return ceil_div(nrows, 2048)


def _scan_words(nrows: int) -> int:
    """Return the 64-bit words that `offsets` needs."""
    return 1 + _scan_tiles(nrows)


@functools.cache
def _kernels(
    device: int, value: str, index: str, pointer: str, wide_keys: bool, defines: tuple[str, ...] = ()
) -> Kernels:
    kernels = Kernels(value, index, pointer, defines)
    return kernels.with_wide_keys() if wide_keys else kernels


@functools.cache
def _limits(device: int) -> Any:
    """Return the greatest number of products of each class, the empty rows first, on the device."""
    import cupy

    limits = [0, *(kind.most for kind in CLASSES)]
    with cupy.cuda.using_allocator(None):  # whoever's turn it is to allocate: this stays
        return cupy.asarray(np.array([*limits, *[2**64 - 1] * (row_classes.SLOTS - len(limits))], np.uint64))


@functools.cache
def _mirror(device: int, thread: int) -> tuple[Any, int]:
    """Return page-locked host memory for the facts, and its address; each thread has its own."""
    import cupyx

    memory = cupyx.empty_pinned(row_classes.FACTS, np.uint64)
    return memory, memory.ctypes.data


@functools.cache
def _streams(device: int, thread: int) -> list[tuple[Any, Any]]:
    """Return the streams on which kernels run side by side, with an event for each; each thread has its own."""
    import cupy

    new = cupy.cuda.Stream, cupy.cuda.Event
    return [(new[0](non_blocking=True), new[1](disable_timing=True)) for _ in range(STREAMS)]
