"""Check a product for the CPU, choose its engine, and convert its operands to the dtypes that the engines compile for.

Importing this module does not import Numba.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from spdist.errors import InputError
from spdist.kernels.cpu.product_counts import SAMPLE, estimate_products
from spdist.kernels.cpu.workspace import NUMBA, SCIPY, SMALL_PRODUCTS, WINDOW, cpu_workspace
from spdist.kernels.engine import MatrixSizes
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.semirings import Semiring
from spdist.matrices.checks import check_product_shapes
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, IndexArray, Int64Array, ValueArray, index_dtype, result_dtype

_loaded: set[tuple[Any, ...]] = set()
"""Specialisations whose plain kernels this process has loaded; `mark_loaded` adds to them."""
_left_to_scipy: Counter[tuple[Any, ...]] = Counter()
"""Estimated products that ``engine="auto"`` has left to SciPy in this process, by specialisation."""


class RowBuffers(NamedTuple):
    """Where an engine writes rows of C."""

    indices: IndexArray  # (capacity + 1,): one spare entry takes what does not fit
    data: ValueArray  # (capacity + 1,)
    ends: Int64Array  # (rows,): ``ends[i]`` becomes the number of entries in the first i + 1 rows
    capacity: int  # entries


class RowsOfProduct(Protocol):
    """Consecutive rows of a product, ready to be made by an engine."""

    bound: int  # bound on their entries

    def make(self, out: RowBuffers) -> tuple[int, int]:
        """Make the rows; return how many fit, and the entries of these rows and of the first that did not fit."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedProduct:
    """A checked product with converted operands."""

    # values of `dtype`, indices of `index_dtype` of their matrix
    a: CSR
    b: CSR
    dtype: np.dtype[Any]  # dtype of C
    threads: int  # most threads to use
    engine: str  # SCIPY or NUMBA
    spec: ProductSpec
    longest: int  # bound on the entries of a row of C

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """Dtype of the column indices of C."""
        return index_dtype(self.b.ncols)

    @property
    def ring(self) -> Semiring | None:
        """The semiring that kernels take; None means plus and times. Bools have OR and AND for these."""
        return self.spec.ring(self.dtype)

    @property
    def kernel_dtype(self) -> np.dtype[Any]:
        """The dtype that kernels compute in: unsigned if the bits are the same, so that fewer kernels are compiled."""
        named = self.ring is None or self.ring.named
        unsigned = (self.dtype.kind == "b" and named) or (self.dtype.kind == "i" and self.spec.plain)
        return np.dtype(f"u{self.dtype.itemsize}") if unsigned else self.dtype


def prepare(
    a: CSR, b: CSR, engine: str, threads: int, workspace_limit: int | None, spec: ProductSpec
) -> PreparedProduct:
    """Check a product, choose its engine, and convert its operands; raises as `multiply.multiply` does."""
    check_product_shapes(a.shape, b.shape)
    if engine not in ("auto", SCIPY, NUMBA):
        raise InputError(f"engine={engine!r} is not one of auto, scipy, numba")
    if threads < 1:
        raise InputError(f"threads={threads} must be at least 1")
    if engine == SCIPY and not spec.plain:
        raise InputError("engine 'scipy' knows no semirings, masks, triangles or cuts of rows: use 'numba' or 'auto'")
    dtype = spec.semiring.result_dtype(a.dtype, b.dtype)
    spec.check((a.nrows, b.ncols), dtype)
    if spec.functions:
        from spdist.kernels.cpu import numba_compile

        numba_compile.check_functions(spec.functions, dtype)
    chosen = NUMBA if not spec.plain or engine == NUMBA else SCIPY
    if spec.plain and engine == "auto":
        chosen = choose(a, b, threads=threads, workspace_limit=workspace_limit, sort=spec.sort)[0]
        if chosen == SCIPY:
            _left_to_scipy[_specialisation(a, b, spec.sort)] += estimate_products(a, b)
    reads, longest = spec.semiring.reads, spec.row_entries(b.ncols)
    left, right = _convert(a, dtype, "a" in reads), _convert(b, dtype, "b" in reads)
    return PreparedProduct(left, right, dtype, threads, chosen, spec, longest)


def _convert(m: CSR, dtype: np.dtype[Any], read: bool) -> CSR:
    """Return the matrix with values of `dtype` and `index_dtype` of its shape, so that few kernels are compiled.

    Values that the semiring does not read stay undefined: an array that nobody touches takes no memory.
    """
    indices = m.indices.astype(index_dtype(m.ncols), copy=False)
    data = m.data.astype(dtype, copy=False) if read else np.empty(m.nnz, dtype)
    return CSR(m.indptr, indices, data, m.shape)


def choose(
    a: MatrixSizes,
    b: MatrixSizes,
    *,
    threads: int = 1,
    workspace_limit: int | None = None,
    sort: bool = True,
    products: int | None = None,
) -> tuple[str, str]:
    """Choose the engine for ``a @ b`` by time and memory; return it, and the reason for people.

    Products that this process has left to SciPy count too: a caller of many small ones gets the quicker kernels.
    `workspace_limit`: bytes allowed beyond operands and result. `sort`: whether rows of C must be sorted; kernels that
    do not sort are compiled apart. `products`: by default estimated, for which both must be a `CSR`.
    """
    kernels = _specialisation(a, b, sort)
    if kernels in _loaded:
        return NUMBA, "its kernels are loaded, and quicker than SciPy for every shape measured"
    if products is None:
        assert isinstance(a, CSR)
        assert isinstance(b, CSR)
        products = estimate_products(a, b)
    earlier = _left_to_scipy[kernels]
    if products + earlier > SMALL_PRODUCTS:
        more = f", and {earlier:,} before them," if earlier else ""
        return NUMBA, f"about {products:,} products{more} repay loading its kernels"
    if b.ncols > max(4 * products, SAMPLE):
        return NUMBA, f"SciPy would clear {b.ncols:,} columns for about {products:,} products"
    if b.nnz > INT32_MAX or a.nnz > INT32_MAX:
        return NUMBA, "SciPy would need a copy of the indices in int64"
    sizes = result_dtype(a.dtype, b.dtype).itemsize, index_dtype(b.ncols).itemsize
    needed = cpu_workspace(SCIPY, b.ncols, min(products, b.ncols), *sizes, threads)
    if workspace_limit is not None and needed > workspace_limit:
        return NUMBA, f"SciPy may need {needed:,} bytes of workspace, and {workspace_limit:,} are allowed"
    return SCIPY, f"about {products:,} products are done before Numba's kernels would be loaded"


def mark_loaded(product: PreparedProduct) -> None:
    """Note that this process has loaded the plain kernels for a product's dtypes."""
    _loaded.add(_specialisation(product.a, product.b, product.spec.sort))


def kernels_are_loaded(dtype: np.dtype[Any], inner: int, ncols: int) -> bool:
    """Whether this process has loaded the plain kernels that sort, for the columns of A and B and a dtype of both."""
    return (dtype, index_dtype(inner), index_dtype(ncols), ncols > WINDOW, True) in _loaded


def _specialisation(a: MatrixSizes, b: MatrixSizes, sort: bool) -> tuple[Any, ...]:
    """Return what a compiled kernel depends on: dtypes, the width, and whether it sorts."""
    return result_dtype(a.dtype, b.dtype), index_dtype(a.ncols), index_dtype(b.ncols), b.ncols > WINDOW, bool(sort)
