"""The epilogue of a block of C on the GPU: scale, map, normalize and select its entries, or reduce it to numbers.

A block goes through it before the download, so that less is downloaded: the largest entries of each row, a number for
each row, or a few numbers for the block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from spdist.kernels.cuda.constants import ALL_TIES, ALLOCATION, GROUP_ROWS, RowNorm
from spdist.kernels.cuda.module import Module, c_type, module, value_type
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.reduction_spec import Histogram, PartialReduction, Reduction, sum_dtype
from spdist.kernels.rounding import ceil_div, round_up
from spdist.kernels.rowwise_gpu import analysis, triangle
from spdist.kernels.rowwise_gpu import masked as masked_gpu
from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import ValueArray

FILE = "rowwise_gpu/epilogue.cu"
PARTIAL_SUMS = 1024
"""Most thread blocks that add up a block of C; each leaves one partial sum, which the host adds."""
NORM_CODES = {None: RowNorm.NO_NORM, "l1": RowNorm.L1, "l2": RowNorm.L2, "max": RowNorm.GREATEST}


def _more_types(value: str) -> tuple[str, str]:
    """Return the types of the sort keys and of the sums of values."""
    if value.startswith("Complex"):
        return "u32", "Complex<double>"
    sums = {"float": "double", "double": "double", "u32": "u64", "u64": "u64"}.get(value, "long long")
    return "u64" if value in ("double", "long long", "u64") else "u32", sums


def kernel_names(value: str, index: str, pointer: str) -> dict[str, str]:
    """Return the name expressions of the kernels by our names for them."""
    key, wide = _more_types(value)
    ordered = {} if value.startswith("Complex") else {"histogram": f"count_by_bins<{value}>"}
    return {
        "finish": f"finish_rows<{value},{index},{pointer}>",
        "cut": f"cut_rows<{value},{pointer},{key}>",
        "keep": f"keep_rows<{value},{index},{pointer},{key}>",
        "sum": f"sum_all<{value},{wide},false>",
        "frobenius": f"sum_all<{value},double,true>",
        "row_sums": f"sum_rows<{value},{pointer},{wide}>",
        "column_sums": f"sum_columns<{value},{index},{wide}>",
        "trace": f"sum_diagonal<{value},{index},{pointer},{wide}>",
        **ordered,
    }


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which the kernels add up values."""
    return np.dtype({"f": np.float64, "c": np.complex128, "u": np.uint64}.get(dtype.kind, np.int64))


class BlockEpilogue:
    """Multiply blocks of one product on the GPU, and apply its epilogue to each; or download a reduction alone.

    `spec`: with the mask on the host; or on the device, if the product is made as one block. `shape, dtype`: of C.
    `counts`: whether the rows of C need only be counted. `factors`: on the host: factors of rows, factors of columns,
    edges of a histogram's bins; None if not wanted. `on_device`: factors of rows and of columns. `edges, sums`: edges
    of bins; sums of columns.
    """

    def __init__(
        self, spec: ProductSpec, reduction: Reduction | None, shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> None:
        self.spec, self.reduction, self.shape, self.dtype = spec, reduction, shape, dtype
        self.counts = reduction in ("nnz", "row_nnz") and not spec.fused
        epilogue = spec.epilogue
        given = (None, None) if epilogue is None or self.counts else (epilogue.rows, epilogue.columns)
        edges = np.array(reduction.edges) if isinstance(reduction, Histogram) else None
        self.factors = *(None if one is None else np.ascontiguousarray(one, dtype) for one in given), edges
        self.on_device: tuple[Any, Any] = (None, None)
        self.edges: Any = None
        self.sums: Any = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Device bytes held for the whole product: factors of rows and of columns, edges of bins, sums of columns."""
        sums = wide_dtype(self.dtype).itemsize * self.shape[1] if self.reduction == "column_sums" else 0
        factors = [0 if one is None else one.nbytes for one in self.factors]
        return tuple(round_up(size, ALLOCATION) for size in (*factors, sums))

    @property
    def sums_of_columns(self) -> Any:
        """Zeros for the sums of columns, on the host; None for other reductions."""
        return np.zeros(self.shape[1], wide_dtype(self.dtype)) if self.reduction == "column_sums" else None

    def take(self, arrays: list[Any]) -> None:
        """Keep the device's copies of `factors` and `sums_of_columns`: four arrays, None for each that is None."""
        rows, columns, self.edges, self.sums = arrays
        self.on_device = rows, columns

    def send(self) -> None:
        """Copy the factors to the device; for a product that is made as one block there."""
        import cupy

        self.take([None if one is None else cupy.asarray(one) for one in (*self.factors, self.sums_of_columns)])

    def make(self, a: CSR, b: CSR, first: int, deterministic: bool, **known: Any) -> tuple[Any, int]:
        """Multiply a block of rows of A on the GPU and apply the epilogue; `first` is the block's first row in C.

        `**known`: `sound_b`, `expected` and `meanwhile`, as for `rowwise_gpu.multiply.multiply`.
        Returns the block of C, or its row lengths if `counts`; and the entries that were allocated, C included.
        """
        if self.spec.diagonal is None:
            return self._make(a, b, first, deterministic, **known)
        diagonal, sound_b = self.spec.diagonal + first, known.get("sound_b", False)
        entered = triangle.enter(a, b, diagonal, self.spec.semiring, sound_b=sound_b)
        known["expected"] = 0  # rows of the block before had more entries
        made, held = self._make(*entered, first, deterministic, **known)
        taken = entered[0].indices.nbytes + entered[1].indptr.nbytes
        held += ceil_div(taken, a.indices.itemsize + self.dtype.itemsize)
        if not self.counts and made.indices.dtype != (index := np.promote_types(a.indices.dtype, b.indices.dtype)):
            made = CSR(made.indptr, made.indices.astype(index), made.data, made.shape)
        return made, held

    def _make(self, a: CSR, b: CSR, first: int, deterministic: bool, **known: Any) -> tuple[Any, int]:
        """Multiply and apply the epilogue, with B's rows as they are given; columns of C have the dtype of A's."""
        if self.counts:
            return rowwise_gpu.count(a, b), 0
        mask, semiring = self.spec.mask, self.spec.semiring
        if mask is None:
            c = rowwise_gpu.multiply(a, b, deterministic=deterministic, semiring=semiring, **known)
            held = c.nnz
        else:
            rows = mask if a.nrows == mask.nrows else mask.rows(first, first + a.nrows)
            c, held = masked_gpu.multiply(
                a, b, rows, complement=self.spec.complement, semiring=semiring, deterministic=deterministic,
                sound_b=known.get("sound_b", False),
            )  # fmt: skip
        made = finish(c, self.spec, *self.on_device, first)
        return made, held if made is c else held + made.nnz

    def room(self, c: Any) -> Any:
        """Return device memory for the result of `reduce` on a block."""
        import cupy

        wide = wide_dtype(self.dtype)
        if self.reduction == "row_sums":
            return cupy.empty(c.nrows, wide)
        if isinstance(self.reduction, Histogram):
            return cupy.zeros(len(self.reduction.edges) - 1, np.int64)
        parts = {"sum": wide, "trace": wide, "frobenius": np.dtype(np.float64)}
        if self.reduction in parts:
            entries = c.nrows if self.reduction == "trace" else c.nnz
            return cupy.empty(min(ceil_div(entries, 1024), PARTIAL_SUMS), parts[self.reduction])
        if self.counts or self.reduction == "row_nnz":
            return c if self.counts else c.indptr
        return c.indptr[-1:] if self.reduction == "nnz" else c.indptr[:0]

    def reduce(self, c: CSR, first: int, out: ValueArray) -> None:
        """Queue the reduction of a block into `out`; its first row is row `first` of the product."""
        what = self.reduction
        if what in ("nnz", "row_nnz") or (what != "column_sums" and not len(out)):
            return
        launch = functools.partial(_kernels(c, self.spec), "histogram" if isinstance(what, Histogram) else what)
        if isinstance(what, Histogram):
            launch(min(ceil_div(c.nnz, 1024), PARTIAL_SUMS), 256, (c.nnz, c.data, len(out), self.edges, out))
        elif what == "row_sums":
            launch(ceil_div(c.nrows, GROUP_ROWS), 32 * GROUP_ROWS, (c.nrows, c.indptr, c.data, out))
        elif what == "column_sums":
            launch(min(ceil_div(c.nnz, 1024), 2112), 256, (c.nnz, c.indices, c.data, self.sums))
        elif what == "trace":
            launch(len(out), 256, (c.nrows, first, c.indptr, c.indices, c.data, out))
        else:
            launch(len(out), 256, (c.nnz, c.data, out))

    def part(self, found: ValueArray) -> PartialReduction:
        """Return a block's share of the reduction, from a copy on the host of the result of `reduce`."""
        what, kind = self.reduction, sum_dtype(self.dtype)
        if what in ("nnz", "row_nnz"):
            found = found.astype(np.int64)
            if what == "row_nnz":
                return PartialReduction(found if self.counts else np.diff(found))
            return PartialReduction(np.add.reduce(found, keepdims=True))
        if isinstance(what, Histogram):
            return PartialReduction(found)
        if what == "row_sums":
            return PartialReduction(found.astype(kind))
        if what == "column_sums":
            return PartialReduction(found.astype(kind), np.arange(len(found)))
        kind = np.dtype(np.float64) if what == "frobenius" else kind
        return PartialReduction(np.array([np.add.reduce(found)]).astype(kind))


def finish(c: CSR, spec: ProductSpec, rows: Any = None, columns: ValueArray | None = None, first: int = 0) -> CSR:
    """Scale, map, normalize and select the entries of a canonical C: values change in place, selected ones are copied.

    Semiring and mask were applied already. `rows, columns`: factors in the dtype of C. `first`: C's first row in the
    product.
    Raises `InputError` if the C expression of the epilogue does not compile.
    """
    if not spec.finishes or not c.nnz:
        return c
    epilogue = spec.epilogue
    launch = _kernels(c, spec)
    grid = ceil_div(c.nrows, GROUP_ROWS), 32 * GROUP_ROWS
    norm = NORM_CODES[None if epilogue is None else epilogue.normalize].value
    drops = epilogue is not None and epilogue.drop_zeros
    if epilogue is not None and (norm or epilogue.apply or rows is not None or columns is not None):
        scale = 0 if rows is None else rows.data.ptr + first * c.dtype.itemsize
        launch("finish", *grid, (c.nrows, c.indptr, c.indices, c.data, scale, columns, norm))
    return _cut(c, spec, drops, launch, grid) if drops or spec.selects else c


def _cut(c: CSR, spec: ProductSpec, drops: bool, launch: Callable[..., None], grid: tuple[int, int]) -> CSR:
    """Return the selected entries of C in new arrays."""
    import cupy

    real = np.dtype(c.dtype.char.lower()) if c.dtype.kind == "c" else c.dtype
    least = spec.least(real) if spec.selects else real.type(0)
    if real.kind == "u":
        least = least.view(np.dtype(f"i{real.itemsize}"))  # the same bytes
    cuts = cupy.empty(c.nrows, np.uint64 if real.itemsize == 8 and c.dtype.kind != "c" else np.uint32)
    ties, lengths = cupy.empty(c.nrows, np.uint32), cupy.empty(c.nrows, np.uint32)
    keep = least, int(spec.selects), int(drops)
    top = min(spec.top_n or ALL_TIES, ALL_TIES)
    launch("cut", *grid, (c.nrows, c.indptr, c.data, *keep, top, cuts, ties, lengths))
    indptr, nnz = analysis.offsets(lengths, c.indptr.dtype)
    indices, data = cupy.empty(nnz, c.indices.dtype), cupy.empty(nnz, c.dtype)
    args = c.nrows, c.indptr, c.indices, c.data, *keep, cuts, ties, indptr, indices, data
    launch("keep", *grid, args)
    return CSR(indptr, indices, data, c.shape)


def _kernels(c: CSR, spec: ProductSpec) -> Any:
    """Return a function that launches the kernels for a matrix by our names for them."""
    epilogue = spec.epilogue
    defines = () if epilogue is None or epilogue.cuda is None else (f"-DSPDIST_APPLY={epilogue.cuda}",)
    types = value_type(c.dtype), c_type(c.indices.dtype), c_type(c.indptr.dtype)
    names, loaded = _module(*types, defines)

    def launch(name: str, grid: int, block: int, args: tuple[Any, ...]) -> None:
        loaded(names[name], grid, block, args)

    return launch


def _module(value: str, index: str, pointer: str, defines: tuple[str, ...]) -> tuple[dict[str, str], Module]:
    names = kernel_names(value, index, pointer)
    return names, module(FILE, tuple(names.values()), defines)
