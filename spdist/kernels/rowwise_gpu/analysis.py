"""Analyse a product on the GPU before multiplying: check its operands, count the products of each row of C."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.errors import MatrixError
from spdist.kernels.cuda import pinned
from spdist.kernels.cuda.constants import NARROW_COLUMNS, ROW_CLASSES, SCAN_ROWS, VERY_LONG, RowFact
from spdist.kernels.cuda.module import c_type, value_type
from spdist.kernels.rounding import ceil_div
from spdist.kernels.rowwise_gpu import row_kernels, workspace
from spdist.kernels.rowwise_gpu.row_classes import MOST_PRODUCTS, SORT_CLASSES
from spdist.kernels.rowwise_gpu.row_kernels import ProductFacts, RowKernels
from spdist.kernels.semirings import PLUS_TIMES, Semiring
from spdist.matrices.checks import check_product_shapes
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, IndexArray

MOST_BLOCKS = 2112
"""Thread blocks of `analyse_rows` at most: 16 on each of the 132 multiprocessors of an H100."""


class NotCanonicalError(MatrixError):
    """A row of B, or of a mask, is not sorted or holds a duplicate."""


@dataclass(frozen=True, slots=True)
class EnteredRows(CSR):
    """B with a row for each entry of A: row ``2 p`` for entry p. Its rows overlap; odd rows mean nothing.

    It was checked when it was made (`triangle.enter`).
    """


@dataclass(frozen=True, eq=False)
class RowwiseProduct:
    """A product to make: operands whose values have C's dtype, and whose indices and offsets have one dtype each."""

    a: CSR
    b: CSR
    defines: tuple[str, ...]  # compiler options of the semiring
    deterministic: bool  # whether products are added in the order of A's entries
    b_is_sound: bool  # whether another product has checked B already

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of C."""
        return self.a.nrows, self.b.ncols

    @property
    def is_empty(self) -> bool:
        """Whether there are no products, or no entries of C."""
        return 0 in (self.a.nnz, self.b.nnz, *self.shape)

    def with_wide_offsets(self) -> RowwiseProduct:
        """Return the product with 64-bit offsets."""
        left = _with_wide_offsets(self.a)
        return replace(self, a=left, b=left if self.b is self.a else _with_wide_offsets(self.b))


def requested(
    a: CSR, b: CSR, semiring: Semiring = PLUS_TIMES, *, deterministic: bool = False, b_is_sound: bool = False
) -> RowwiseProduct:
    """Return the product of two matrices on the GPU, in the dtypes that kernels take. Needs no GPU if dtypes agree.

    `deterministic`: whether to add products in the order of A's entries. `b_is_sound`: whether another product has
    checked B already.
    Raises `MatrixError` if the shapes do not fit, or the GPU does not multiply the dtype; `InputError` if the semiring
    has no C expressions.
    """
    check_product_shapes(a.shape, b.shape)
    dtype = semiring.result_dtype(a.dtype, b.dtype)
    value_type(dtype)
    left, right = _alike(a, b, dtype)
    ordered = deterministic or not semiring.has_atomics(dtype)
    return RowwiseProduct(left, right, semiring.defines(dtype), ordered, b_is_sound or isinstance(b, EnteredRows))


@dataclass(eq=False)
class AnalysedProduct:
    """A product's checked operands, its kernels, and what its families of rows share."""

    a: CSR
    b: CSR
    kernels: RowKernels
    facts: ProductFacts
    lengths: Any  # (nrows,) uint32: products of each row of C; the kernels that count overwrite them with its entries
    deterministic: bool  # whether products are added in the order of A's entries
    listed: Any = None  # (nrows,) uint32: all rows by rising class, once they are listed
    # (nrows,) uint8: whether each row of A, and of B, has the columns of the row before, once nodes are looked for
    same_a: Any = None
    same_b: Any = None
    longest_a: int = 0  # entries of A's longest row
    arrays: tuple[int, ...] = field(init=False)  # arguments of kernels that multiply: addresses of A's and B's arrays
    pattern: tuple[int, ...] = field(init=False)  # arguments of kernels that count: without the values

    def __post_init__(self) -> None:
        self.arrays = (*_addresses(self.a), *_addresses(self.b))
        self.pattern = (*self.arrays[:2], *self.arrays[3:5])

    @property
    def products(self) -> int:
        """Products of all rows."""
        return self.facts[RowFact.PRODUCTS]

    @functools.cached_property
    def is_small(self) -> bool:
        """Whether buffers for all products are small."""
        entry = self.a.dtype.itemsize + self.a.indices.itemsize
        return self.products * entry <= workspace.SMALL_BYTES and self.a.nrows <= workspace.SMALL_ROWS

    def list_rows(self) -> Any:
        """Queue the list of all rows by rising class, and return it."""
        import cupy

        nrows, facts = self.a.nrows, self.facts
        rows = self.listed = cupy.empty(nrows, np.uint32)
        limits = class_limits(cupy.cuda.runtime.getDevice())
        args = nrows, self.lengths, limits, facts.at(row_kernels.COUNTS), facts.at(row_kernels.TAKEN), rows
        self.kernels.launch("rowwise_gpu/rows.cu", "list", ceil_div(nrows, 256), 256, args)
        return rows


def analyse(
    product: RowwiseProduct, meanwhile: Callable[[AnalysedProduct], None] = lambda _: None, words: int = 0
) -> AnalysedProduct:
    """Count the products of each row of C, which is not empty, and check the operands; waits for the GPU.

    `meanwhile`: called before the wait, when nothing of the product is known yet. `words`: zeros after the facts, 64
    bits each, at least.
    Raises `MatrixError` if offsets fall, columns are out of range, or rows of B are not canonical; `InputError` if C
    expressions of the semiring do not compile.
    """
    import cupy

    a, b = product.a, product.b
    device = cupy.cuda.runtime.getDevice()
    types = value_type(a.dtype), c_type(a.indices.dtype), c_type(a.indptr.dtype)
    kernels = kernels_of(device, *types, b.ncols > INT32_MAX, product.defines)
    kernels.compile()
    numbers = cupy.zeros(row_kernels.FACTS + max(scan_words(a.nrows), words), np.uint64)
    facts = ProductFacts(numbers, *_mirror(device, threading.get_ident()), cupy.cuda.get_current_stream(), kernels)
    x = AnalysedProduct(a, b, kernels, facts, cupy.empty(a.nrows, np.uint32), product.deterministic)
    _count_products(x, not product.b_is_sound, meanwhile)
    _check(facts)
    if b.ncols > NARROW_COLUMNS and facts[RowFact.WIDEST] >= NARROW_COLUMNS:
        x.kernels = kernels_of(device, *types, True, product.defines)
        x.kernels.compile()
    return x


def analysed(a: CSR, b: CSR, semiring: Semiring, *, b_is_sound: bool = False) -> AnalysedProduct | None:
    """Check a product's operands and count its products, ready for kernels; None without products. Waits for the GPU.

    Arguments and errors as for `requested` and `analyse`.
    """
    product = requested(a, b, semiring, b_is_sound=b_is_sound)
    return None if product.is_empty else analyse(product)


def _count_products(x: AnalysedProduct, checks_b: bool, meanwhile: Callable[[AnalysedProduct], None]) -> None:
    """Launch the kernels that count products and check operands, and wait for what they find; meanwhile make a call."""
    import cupy

    a, b, facts = x.a, x.b, x.facts
    most_long = min(a.nrows, a.nnz // VERY_LONG)
    very_long = cupy.empty(most_long, np.uint32) if most_long else None
    mean = a.nnz / a.nrows
    lanes = 2 if mean < 3 else 4 if mean < 10 else 8 if mean < 64 else 32
    sizes = a.nrows, a.nnz, b.nrows, b.nnz, b.ncols, SORT_CLASSES[-1].max_products, int(checks_b)
    out = facts.at(0), facts.at(row_kernels.COUNTS), very_long, facts.on_host(0)
    args = *sizes, *x.pattern, class_limits(cupy.cuda.runtime.getDevice()), x.lengths, *out
    grid = min(ceil_div(a.nrows, 256 // lanes), MOST_BLOCKS)
    x.kernels.launch("rowwise_gpu/rows.cu", f"analyse {lanes}", grid, 256, args)
    meanwhile(x)
    facts.wait()
    x.longest_a = facts[RowFact.MAX_ROW_A]
    if rows := facts[RowFact.VERY_LONG_ROWS]:
        args = very_long, b.nrows, b.nnz, a.indptr, a.indices, b.indptr, facts.at(0)
        x.kernels.launch("rowwise_gpu/rows.cu", "analyse long", (ceil_div(x.longest_a, 2048), rows), 256, args)
        facts.read()


def check_canonical(m: CSR, name: str) -> None:
    """Check a matrix on the GPU, for which it waits; values do not count.

    Raises `NotCanonicalError` if a row is not sorted or holds a duplicate, `MatrixError` if offsets fall, or a column
    is out of range.
    """
    import cupy

    device = cupy.cuda.runtime.getDevice()
    kernels = kernels_of(device, "double", c_type(m.indices.dtype), c_type(m.indptr.dtype), False)
    numbers, mirror = cupy.zeros(row_kernels.FACTS, np.uint64), _mirror(device, threading.get_ident())
    facts = ProductFacts(numbers, *mirror, cupy.cuda.get_current_stream(), kernels)
    sizes = 0, 0, m.nrows, m.nnz, m.ncols, 0, 1  # as if it were B, and A had no rows
    out = facts.at(0), facts.at(row_kernels.COUNTS), None, facts.on_host(0)
    args = *sizes, None, None, m.indptr, m.indices, class_limits(device), None, *out
    kernels.launch("rowwise_gpu/rows.cu", "analyse 2", min(ceil_div(m.nnz, 1024), MOST_BLOCKS), 256, args)
    facts.wait()
    _check(facts, name)


def offsets(lengths: npt.NDArray[np.uint32], dtype: np.dtype[Any]) -> tuple[IndexArray, int]:
    """Turn (nrows,) row lengths on the GPU into (nrows + 1,) row offsets; return also their sum, for which it waits."""
    import cupy

    nrows = len(lengths)
    device = cupy.cuda.runtime.getDevice()
    indptr, state = cupy.empty(nrows + 1, dtype), cupy.zeros(scan_words(nrows), np.uint64)
    memory, mirror = _mirror(device, threading.get_ident())
    kernels = kernels_of(device, "double", "int", c_type(dtype), False)
    args = nrows, lengths, state, indptr, mirror + 8 * RowFact.NNZ_C, None
    kernels.launch("rowwise_gpu/rows.cu", "offsets", scan_blocks(nrows), 256, args)
    cupy.cuda.get_current_stream().synchronize()
    return indptr, int(memory[RowFact.NNZ_C])


def _check(facts: ProductFacts, name_b: str = "B") -> None:
    """Refuse operands whose arrays are no CSR matrix, or whose B is not canonical."""
    for name, slot in (("A", RowFact.BAD_A), (name_b, RowFact.BAD_B)):
        if facts[slot]:
            raise MatrixError(
                f"{name}: offsets that fall, or a column outside of the matrix; nothing was read there. Rebuild the "
                f"matrix, or check it with spdist.matrices.checks.check_structure on the host"
            )
    if facts[RowFact.FALLS] != facts[RowFact.FALLS_AT_ROWS]:
        raise NotCanonicalError(f"{name_b}: a row is not sorted or holds a duplicate; call sum_duplicates() first")


def address(array: Any) -> int:
    """Return the address at which a CuPy array starts."""
    return int(array.data.ptr)


def _addresses(m: CSR) -> tuple[int, int, int]:
    """Return the addresses of offsets, columns and values."""
    return address(m.indptr), address(m.indices), address(m.data)


def scan_blocks(nrows: int) -> int:
    """Return the thread blocks of the kernel `offsets`."""
    return ceil_div(nrows, SCAN_ROWS)


def scan_words(nrows: int) -> int:
    """Return the 64-bit words of zeros that `offsets` needs."""
    return 1 + scan_blocks(nrows)


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


def _with_wide_offsets(m: CSR) -> CSR:
    return replace(m, indptr=m.indptr.astype(np.int64))


@functools.cache
def kernels_of(
    device: int, value: str, index: str, pointer: str, wide_keys: bool, defines: tuple[str, ...] = ()
) -> RowKernels:
    """Return the kernels of a device for C types and a semiring's options; later calls return the same object.

    `wide_keys`: whether sort keys have 64 bits.
    """
    kernels = RowKernels(value, index, pointer, defines)
    return kernels.with_wide_keys() if wide_keys else kernels


@functools.cache
def class_limits(device: int) -> Any:
    """Return the most products of a row of each class, the rows without products first, on the device."""
    import cupy

    limits = [0, *MOST_PRODUCTS]
    with cupy.cuda.using_allocator(None):  # kept for ever, so not from the caller's pool
        return cupy.asarray(np.array([*limits, *[2**64 - 1] * (ROW_CLASSES - len(limits))], np.uint64))


@functools.cache
def _mirror(device: int, thread: int) -> tuple[Any, int]:
    """Return page-locked host memory for the facts, and its address; each thread has its own."""
    memory = pinned.numbers(row_kernels.FACTS)
    return memory, memory.ctypes.data
