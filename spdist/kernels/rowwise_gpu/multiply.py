"""Multiply two matrices whose arrays are on the GPU: C = A @ B, row by row.

1. `analysis` counts the products of each row of C, which puts it into a class (`row_classes`), and checks the operands.
2. Each class goes to the family of kernels that suits it (`families`): rows are sorted in the registers of a warp or
   less; added up in shared memory by a warp, for finite elements; added up in place by thread blocks; or shared among
   thread blocks.
3. The families count the entries of their rows, then C is allocated, then they write their rows.

If most products are in sorted rows of much the same length, one kernel makes these rows in a single pass, without
counting: a sample of the rows gives an estimate of the room that C needs. If a product is likely to be small, or
to have few rows that one class takes, its pass or its count is queued behind the analysis, and the device leaves it out
if the analysis forbids it: the host waits once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from spdist.errors import MatrixError, MemoryBoundError
from spdist.foundation.units import format_bytes
from spdist.kernels.cuda.constants import NARROW_COLUMNS, RowFact
from spdist.kernels.cuda.module import c_type, value_type
from spdist.kernels.rowwise_gpu import families, row_classes, row_kernels, workspace
from spdist.kernels.rowwise_gpu.analysis import (
    AnalysedProduct,
    RowwiseProduct,
    analyse,
    kernels_of,
    requested,
    scan_blocks,
)
from spdist.kernels.rowwise_gpu.families import (
    NodeRows,
    RowFamily,
    SinglePassRows,
    SortRows,
    Unread,
    families_of,
    prepared,
)
from spdist.kernels.rowwise_gpu.row_classes import CLASSES, EarlyClasses, early_classes, single_pass_class
from spdist.kernels.semirings import PLUS_TIMES, Semiring
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, IndexArray, index_dtype, result_dtype

TUNING = row_classes.TUNING
"""Thresholds of every row-by-row product."""


@dataclass(eq=False)
class Pattern:
    """The structure of C = A @ B, and what the kernels need to fill it again for new values."""

    indptr: Any  # (nrows + 1,) int32 or int64
    indices: Any  # (nnz,) int32 or int64
    shape: tuple[int, int]  # (nrows, ncols)
    analysed: AnalysedProduct | None  # operands without their values; None if there are no products
    families: list[RowFamily]  # the rows, as they were counted

    @property
    def nnz(self) -> int:
        """Entries of C."""
        return len(self.indices)


class MadeProduct(NamedTuple):
    """C, its analysed operands and its families of rows; None and no families if there are no products."""

    c: CSR
    analysed: AnalysedProduct | None
    families: list[RowFamily]


class HostSide:
    """Estimate of nnz(C), 0 if unknown, and work for the host, done at most once while it would wait for the GPU.

    `nnz`: entries of C; 0 until they are counted.
    """

    def __init__(self, expected: int = 0, meanwhile: Callable[[], None] | None = None) -> None:
        self.expected, self.nnz = expected, 0
        self._meanwhile = meanwhile

    def use_time(self) -> None:
        """Call `meanwhile`, unless it was called before."""
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()

    def wait_nnz(self, x: AnalysedProduct, *, publishes: bool = False) -> int:
        """Wait for nnz(C), which a kernel writes to the host; or, if `publishes`, to the device's facts."""
        self.use_time()
        x.facts.read() if publishes else x.facts.wait()
        self.nnz = x.facts[RowFact.NNZ_C]
        return self.nnz


def multiply(
    a: CSR, b: CSR, *, deterministic: bool = False, semiring: Semiring = PLUS_TIMES, sound_b: bool = False,
    expected: int = 0, meanwhile: Callable[[], None] | None = None,
) -> CSR:  # fmt: skip
    """Return ``a @ b``; arrays of CuPy on the current device. Rows of B are canonical, rows of A need not be.

    A small C is cut from buffers for all products, or for as many entries as are likely, which it keeps: 32 MiB at
    most. A larger C made in a single pass is cut from buffers too, and leaves at most an eighth of them unused.
    `deterministic`: add the products of every entry in the order of A's entries, so that the bits are the same on every
    run. Without it, rows of more than 1,024 products that form no node are summed by atomics, in any order.
    `sound_b`: whether another product has checked B already: a check reads all of B. `expected`: estimate of nnz(C),
    with which no rows are sampled; 0 if unknown. `meanwhile`: work for the host while it would wait for the GPU; not
    always called.
    Raises `MatrixError` if shapes or dtypes do not fit, offsets or columns are out of range, or a row of B is not
    sorted; `InputError` if the semiring has no C expressions, or these do not compile; `MemoryBoundError` with the
    bytes needed if the GPU has too little memory.
    """
    product = requested(a, b, semiring, deterministic=deterministic, b_is_sound=sound_b)
    return _made(product, HostSide(expected, meanwhile)).c


def count(a: CSR, b: CSR) -> Any:
    """Count the entries of each row of ``a @ b``, (nrows,) uint32 on the device; nothing is multiplied.

    Raises `MatrixError` as `multiply` does.
    """
    import cupy

    product = requested(a, b)
    if product.is_empty:
        return cupy.zeros(product.shape[0], np.uint32)
    x = analyse(product)
    families.count_entries(x, prepared(x, families_of(x, x.facts.class_rows(), TUNING)))
    return x.lengths


def multiply_counted(a: CSR, b: CSR) -> tuple[CSR, int, int]:
    """Return ``a @ b``, the products of all rows, and the entries of A's longest row; 0 if there are no products.

    Operands and errors as for `multiply`.
    """
    c, x, _ = _made(requested(a, b))
    return (c, 0, 0) if x is None else (c, x.products, x.longest_a)


def symbolic(a: CSR, b: CSR, *, deterministic: bool = False) -> Pattern:
    """Return the structure of ``a @ b`` for `numeric`; operands and errors as for `multiply`."""
    c, x, rows = _made(requested(a, b, deterministic=deterministic), count_first=True)
    if x is not None:  # keep the structure, not the values
        a, b = (CSR(m.indptr, m.indices, m.data[:0], m.shape) for m in (x.a, x.b))
        x = replace(x, a=a, b=b)
    return Pattern(c.indptr, c.indices, c.shape, x, rows)


def numeric(pattern: Pattern, a: CSR, b: CSR) -> CSR:
    """Return ``a @ b`` for operands of the structure that `pattern` was made from; C shares indptr and indices with it.

    Columns are not checked to be the same, only their number is. Raises `MatrixError` if shape or nnz of an operand, or
    the dtype of the product, differs from the pattern's.
    """
    import cupy

    x, dtype = pattern.analysed, result_dtype(a.dtype, b.dtype)
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
    offsets = pattern.indptr.astype(x.a.indptr.dtype, copy=False)  # the dtype that the kernels were compiled for
    families.fill(values, CSR(offsets, pattern.indices, data, pattern.shape), pattern.families)
    return CSR(pattern.indptr, pattern.indices, data, pattern.shape)


def _with_values(old: CSR, new: CSR) -> CSR:
    """Return a matrix of the arrays that were checked, with new values in the dtype of the old ones."""
    return CSR(old.indptr, old.indices, new.data.astype(old.dtype, copy=False), old.shape)


def compile_kernels(dtype: np.dtype[Any], ncols: int, semiring: Semiring = PLUS_TIMES) -> None:
    """Compile the kernels of products of a dtype before the first of them is made. Errors as for `requested`."""
    import cupy

    types = value_type(dtype), c_type(index_dtype(ncols)), "int"
    defines = semiring.defines(dtype)
    kernels_of(cupy.cuda.runtime.getDevice(), *types, ncols > INT32_MAX, defines).compile()


def _made(product: RowwiseProduct, host: HostSide | None = None, count_first: bool = False) -> MadeProduct:
    """Make a product; if memory runs out, say how much was needed."""
    import cupy

    host = host or HostSide()
    try:
        return _made_unbounded(product, host, count_first)
    except cupy.cuda.memory.OutOfMemoryError as error:
        free = cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()
        size = product.a.dtype.itemsize + product.a.indices.itemsize
        known = f"C takes {format_bytes(host.nnz * size)}" if host.nnz else "C is not counted yet"
        raise MemoryBoundError(
            f"the GPU has {format_bytes(free)} free, too little for this product: {known}, and the last request "
            f"was: {error}. Multiply row blocks of A one after another, or use spdist.matmul on stored matrices"
        ) from None


def _made_unbounded(product: RowwiseProduct, host: HostSide, count_first: bool) -> MadeProduct:
    """Make a product, in a single pass if that takes less time."""
    import cupy

    if product.is_empty:
        return MadeProduct(_empty(product), None, [])
    early = None if count_first or host.expected else _EarlyProduct.likely(product, host)
    x = analyse(product) if early is None else analyse(product, early.queue, early.words)
    if early is not None and (made := early.read(x)):
        return made
    early = None  # its memory
    if x.products > INT32_MAX and x.a.indptr.dtype == np.int32:
        # nnz(C) may pass 2^31: begin again with 64-bit offsets.
        made = _made_unbounded(product.with_wide_offsets(), HostSide(), count_first)
        c = made.c
        if c.nnz <= INT32_MAX:
            c = CSR(c.indptr.astype(np.int32), c.indices, c.data, c.shape)
        return made._replace(c=c)
    counts = x.facts.class_rows()
    indptr = cupy.empty(x.a.nrows + 1, x.a.indptr.dtype)
    number = None if count_first else single_pass_class(counts, x.is_small, TUNING)
    if number is not None:
        return _in_single_pass(x, number, counts, indptr, host)
    return _counted_first(x, counts, indptr, host)


class _EarlyProduct:
    """A product whose work is queued before the host has read its analysis; the device leaves out what that forbids."""

    def __init__(self, plan: EarlyClasses, nrows: int, host: HostSide) -> None:
        self.plan, self.nrows, self.host = plan, nrows, host
        self.words = max(families.pass_words(nrows, number) for number in plan.numbers)
        self.c: CSR | None = None

    @classmethod
    def likely(cls, product: RowwiseProduct, host: HostSide) -> _EarlyProduct | None:
        """Return one if it may suit the product."""
        a, b = product.a, product.b
        if b.ncols > NARROW_COLUMNS:  # keys of 64 bits may be needed
            return None
        plan = early_classes(a.nrows, a.nnz * b.nnz // b.nrows, a.dtype.itemsize + a.indices.itemsize, TUNING)
        return None if plan is None else cls(plan, a.nrows, host)

    def queue(self, x: AnalysedProduct) -> None:
        """Queue single passes, or the count of C's entries."""
        import cupy

        indptr = cupy.empty(self.nrows + 1, x.a.indptr.dtype)
        self.c = _allocated(x, indptr, self.plan.capacity)
        least = 0
        for number in self.plan.numbers:
            unread = Unread(least, number + 2)
            if self.plan.capacity:
                SinglePassRows(number, x.lengths, unread=unread).fill(x, self.c)
            else:
                self._counted(unread).count_entries(x)
                _queue_offsets(x, indptr, x.facts.on_host(RowFact.NNZ_C), x.facts.at(RowFact.COUNTED))
            least = unread.beyond
        self.host.use_time()

    def _counted(self, unread: Unread | None = None) -> SortRows:
        """Return the rows that are counted first."""
        (number,) = self.plan.numbers
        return SortRows(CLASSES[number], number, 0, self.nrows, unread)

    def read(self, x: AnalysedProduct) -> MadeProduct | None:
        """Return C if the analysis allows what was queued; in a single pass it may have had too little room."""
        c, nnz = self.c, x.facts[RowFact.NNZ_C]
        if c is None or not nnz:
            return None
        self.host.nnz = nnz
        if nnz > self.plan.capacity:
            c = _allocated(x, c.indptr, nnz)
            if self.plan.capacity:
                SinglePassRows(self.plan.numbers[-1], x.lengths).fill(x, c)
            else:
                self._counted().fill(x, c)
        return MadeProduct(CSR(c.indptr, c.indices[:nnz], c.data[:nnz], c.shape), x, [])


def _queue_offsets(x: AnalysedProduct, indptr: IndexArray, total: int, counted: int = 0) -> None:
    """Queue C's offsets; `total`, `counted`: addresses of nnz(C), and of whether C's row lengths were counted."""
    args = x.a.nrows, x.lengths, x.facts.at(row_kernels.FACTS), indptr, total, counted
    x.kernels.launch("rowwise_gpu/rows.cu", "offsets", scan_blocks(x.a.nrows), 256, args)


def _counted_first(x: AnalysedProduct, counts: list[int], indptr: IndexArray, host: HostSide) -> MadeProduct:
    """Count the entries of all rows, allocate C, and write the rows."""
    rows = prepared(x, families_of(x, counts, TUNING))
    in_nodes = any(isinstance(family, NodeRows) for family in rows)
    # C of a small product is cut from buffers for all products, so that the host need not wait for nnz(C) before.
    small = x.is_small and not in_nodes
    families.count_entries(x, rows)
    total = x.facts.at(RowFact.NNZ_C) if in_nodes else x.facts.on_host(RowFact.NNZ_C)
    _queue_offsets(x, indptr, total)
    c = _allocated(x, indptr, x.products if small else _read_counts(x, rows, host, in_nodes))
    families.fill(x, c, rows)
    if small:
        nnz = _read_counts(x, rows, host)
        c = CSR(c.indptr, c.indices[:nnz], c.data[:nnz], c.shape)
    return MadeProduct(c, x, rows)


def _read_counts(x: AnalysedProduct, rows: list[RowFamily], host: HostSide, in_nodes: bool = False) -> int:
    """Wait for nnz(C), and for what `count_entries` has found about nodes."""
    nnz = host.wait_nnz(x, publishes=in_nodes)
    for family in rows:
        family.read_counts(x)
    return nnz


def _in_single_pass(
    x: AnalysedProduct, number: int, counts: list[int], indptr: IndexArray, host: HostSide
) -> MadeProduct:
    """Multiply without counting first, but for a sample of the rows, and rows of too many products."""
    single_pass = SinglePassRows(number, x.lengths)
    rows: list[RowFamily] = []
    capacity = x.products
    if not x.is_small:
        expected, rows = _expected_nnz(x, single_pass, counts, host)
        capacity = min(capacity, expected)
    while True:
        c = _allocated(x, indptr, capacity)
        single_pass.fill(x, c)
        nnz = host.wait_nnz(x)
        if nnz <= capacity:
            break
        capacity = nnz  # more than was expected
    families.fill(x, c, rows)
    indices, data = c.indices[:nnz], c.data[:nnz]
    if not x.is_small and workspace.SPARE * (capacity - nnz) > capacity:
        indices, data = indices.copy(), data.copy()
    return MadeProduct(CSR(indptr, indices, data, c.shape), x, rows)


def _expected_nnz(
    x: AnalysedProduct, single_pass: SinglePassRows, counts: list[int], host: HostSide
) -> tuple[int, list[RowFamily]]:
    """Count the rows that the single pass leaves out, and a sample of the others.

    Returns the entries that C should have room for, and the rows left out.
    """
    import cupy

    first = single_pass.number + 2
    rows: list[RowFamily] = []
    if host.expected and not sum(counts[first:]):
        return host.expected + host.expected // workspace.EXPECTED_MARGIN, rows
    single_pass.sample(x)
    if sum(counts[first:]):
        rows = families_of(x, [sum(counts[:first]), *[0] * (first - 1), *counts[first:]], TUNING)
        single_pass.lengths = x.lengths = cupy.empty(x.a.nrows, np.uint32)  # the single pass needs the products too
        rows = prepared(x, rows)
        families.count_entries(x, rows)
    x.facts.read()
    for family in rows:
        family.read_counts(x)
    expected = single_pass.expected_nnz(x)
    return expected + expected // workspace.SAMPLE_MARGIN, rows


def _allocated(x: AnalysedProduct, indptr: IndexArray, nnz: int) -> CSR:
    """Return C with room for its entries."""
    import cupy

    indices, data = cupy.empty(nnz, x.a.indices.dtype), cupy.empty(nnz, x.a.dtype)
    return CSR(indptr, indices, data, (x.a.nrows, x.b.ncols))


def _empty(product: RowwiseProduct) -> CSR:
    """Return a matrix with no entries, on the device."""
    import cupy

    a = product.a
    indptr = cupy.zeros(a.nrows + 1, a.indptr.dtype)
    return CSR(indptr, cupy.empty(0, a.indices.dtype), cupy.empty(0, a.dtype), product.shape)
