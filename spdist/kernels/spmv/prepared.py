"""The forms of a matrix for products with vectors, among which `spdist.operator` chooses.

Every form multiplies ``(ncols,)`` and ``(ncols, k)`` arrays in C order on the device of its own arrays.
"""

from __future__ import annotations

import functools
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import numpy as np
from scipy.sparse import _sparsetools

from spdist.errors import MatrixError
from spdist.foundation.units import counted
from spdist.kernels.spmv import bsr as bsr_spmv
from spdist.kernels.spmv import csr as csr_spmv
from spdist.kernels.spmv import cusparse, ehyb, reorder
from spdist.kernels.spmv.ehyb import Ehyb
from spdist.kernels.spmv.parallel import in_parallel, threads_for
from spdist.kernels.spmv.sell import multiply_gpu, sell
from spdist.kernels.spmv.sell.format import Sell
from spdist.matrices.bsr import BSR
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import DeviceArray, is_on_gpu

COLUMNS_AT_ONCE = 4
"""Columns of x that SciPy multiplies about as quickly as one."""


class PreparedMatrix(Protocol):
    """A matrix in a form that multiplies dense vectors."""

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of the matrix."""

    def multiply(self, x: DeviceArray, out: DeviceArray | None, threads: int) -> Any:
        """Return ``a @ x`` for x of shape (ncols,) or (ncols, k); `threads` are the host's."""

    def describe(self) -> str:
        """Describe the form, for people."""


class _OneMatrix:
    """A form that reads nothing but its matrix."""

    matrix: Any

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of the matrix."""
        return int(self.matrix.nbytes)


@dataclass(frozen=True, eq=False)
class PreparedSell:
    """SELL-C-sigma; if `columns` is set, it lists the matrix's columns in the order of the format."""

    matrix: Sell
    columns: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of the matrix."""
        return self.matrix.nbytes + (0 if self.columns is None else int(self.columns.nbytes))

    def multiply(self, x: DeviceArray, out: DeviceArray | None, threads: int) -> Any:
        """Return ``a @ x``."""
        if self.columns is not None:
            x = multiply_gpu.gather(x, self.columns) if is_on_gpu(x) else x[self.columns]
        return sell.multiply(self.matrix, x, out, threads=threads)

    def describe(self) -> str:
        """Describe the form, for people."""
        m = self.matrix
        kinds = ", ".join(f"{count:,} {name}" for name, count in m.kind_counts().items())
        blocks = f" in {m.block} x {m.block} blocks" if m.block > 1 else ""
        return f"SELL-{m.lanes}-{m.sigma}{blocks}, occupancy {m.beta:.3f}, chunks: {kinds or 'none'}"


@dataclass(frozen=True, eq=False)
class PreparedCsr(_OneMatrix):
    """The given CSR: CSR-scalar or CSR-vector on the GPU, SciPy's loops on the host."""

    matrix: CSR
    width: int = 0

    def multiply(self, x: DeviceArray, out: DeviceArray | None, threads: int) -> Any:
        """Return ``a @ x``."""
        if is_on_gpu(x):
            return csr_spmv.multiply(self.matrix, x, out, width=self.width or None)
        y = np.empty((self.matrix.nrows, *x.shape[1:]), x.dtype) if out is None else out
        m, columns = self._scipy, 1 if x.ndim == 1 else x.shape[1]

        # SciPy's operator would allocate y, which costs as much as a pass over it, and take one thread.
        def work(start: int, stop: int) -> None:
            part = y[start:stop]
            part[...] = 0
            shape, rows = (stop - start, m.shape[1]), m.indptr[start : stop + 1]
            if x.ndim == 1:
                _sparsetools.csr_matvec(*shape, rows, m.indices, m.data, x, part)
            else:
                _sparsetools.csr_matvecs(*shape, columns, rows, m.indices, m.data, x.ravel(), part.ravel())

        threads = threads_for(len(m.data) * max(1, columns // COLUMNS_AT_ONCE), threads)
        if threads == 1:
            work(0, len(y))
        else:
            in_parallel(work, m.indptr[1:], threads)
        return y

    @functools.cached_property
    def _scipy(self) -> Any:
        return self.matrix.to_scipy()

    def describe(self) -> str:
        """Describe the form, for people."""
        return f"CSR, {self.width} lanes a row" if self.width else "CSR"


@dataclass(frozen=True, eq=False)
class PreparedCusparse(_OneMatrix):
    """The given CSR, multiplied by cuSPARSE as it is, or with the row of each entry beside it (COO)."""

    matrix: CSR
    with_rows: bool = False

    def multiply(self, x: DeviceArray, out: DeviceArray | None, threads: int) -> Any:
        """Return ``a @ x``."""
        import cupy

        if x.ndim == 1 and x.dtype == self.matrix.dtype:
            y = cupy.empty(self.matrix.nrows, x.dtype) if out is None else out
            self._described.multiply(x, y)
            return y
        y = self._cupyx @ x
        if out is None:
            return cupy.ascontiguousarray(y)
        out[...] = y
        return out

    @functools.cached_property
    def _described(self) -> cusparse.Matrix:
        import cupy

        m = self.matrix
        if not self.with_rows:
            return cusparse.Matrix(m)
        rows = cupy.searchsorted(m.indptr, cupy.arange(m.nnz), side="right") - 1
        return cusparse.Matrix(m, rows.astype(m.indices.dtype))

    @functools.cached_property
    def _cupyx(self) -> Any:
        """The matrix as CuPy's, checked once: finding out whether it is canonical takes longer than a product."""
        import cupyx.scipy.sparse as csp

        m = self.matrix
        made = csp.csr_matrix((m.data, m.indices, m.indptr), shape=m.shape)
        made.sum_duplicates()
        return made

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of the matrix."""
        m = self.matrix
        return int(m.nbytes) + self.with_rows * (m.nnz * m.indices.itemsize - int(m.indptr.nbytes))

    def describe(self) -> str:
        """Describe the form, for people."""
        return f"{'COO' if self.with_rows else 'CSR'}, by cuSPARSE"


@dataclass(frozen=True, eq=False)
class PreparedEhyb(_OneMatrix):
    """EHYB, on the GPU."""

    matrix: Ehyb

    def multiply(self, x: DeviceArray, out: DeviceArray | None, threads: int) -> Any:
        """Return ``a @ x``."""
        return ehyb.multiply(self.matrix, x, out)

    def describe(self) -> str:
        """Describe the form, for people."""
        m = self.matrix
        parts = f"{counted(len(m.ends), 'part')} of up to {counted(m.most, 'row')}"
        return f"EHYB, {parts}, {m.outside:.1%} of the slots outside"


@dataclass(frozen=True, eq=False)
class PreparedBsr(_OneMatrix):
    """The given dense blocks, on the host."""

    matrix: BSR

    def multiply(self, x: DeviceArray, out: DeviceArray | None, threads: int) -> Any:
        """Return ``a @ x``."""
        return bsr_spmv.multiply(self.matrix, x, out, threads=threads)

    def describe(self) -> str:
        """Describe the form, for people."""
        r, s = self.matrix.blocksize
        return f"BSR, {counted(self.matrix.blocks, 'block')} of {r} x {s}"


FORMS: dict[str, type[Any]] = {
    "sell": PreparedSell,
    "csr": PreparedCsr,
    "cusparse": PreparedCusparse,
    "ehyb": PreparedEhyb,
    "bsr": PreparedBsr,
}
HOLDERS: dict[str, type[Any]] = {"Sell": Sell, "CSR": CSR, "Ehyb": Ehyb, "BSR": BSR}


def by_levels(a: CSR, **options: Any) -> PreparedSell:
    """Return a square matrix in SELL, rows and columns in the order of `reorder.levels`; options of `sell.build`."""
    order = reorder.levels(a)
    made = sell.build(reorder.apply(a, order, order), **options)
    return PreparedSell(_with_rows(made, order), order)


def by_popularity(a: CSR, **options: Any) -> PreparedSell:
    """Return a matrix in SELL, columns in the order of `reorder.popular`; options of `sell.build`."""
    order = reorder.popular(a)
    return PreparedSell(sell.build(reorder.apply(a, None, order), **options), order)


def _with_rows(m: Sell, order: DeviceArray) -> Sell:
    """Return a matrix that writes its rows in their order before this reordering."""
    rows = order if m.rows is None else order[m.rows]
    long = order[m.long_rows] if len(m.long_rows) else m.long_rows
    return replace(m, rows=rows.astype(np.int32, copy=False), long_rows=long.astype(np.int32, copy=False))


def to_arrays(value: Any, prefix: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a prepared matrix, or a dataclass in one, into its arrays and its other attributes, by dotted names.

    JSON can hold the other attributes.
    """
    arrays: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for field in fields(value):
        part, name = getattr(value, field.name), prefix + field.name
        if is_dataclass(part):
            inner = to_arrays(part, f"{name}.")
            arrays |= inner[0]
            facts |= {**inner[1], f"{name}.kind": type(part).__name__}
        elif hasattr(part, "dtype"):
            arrays[name] = part
        else:
            facts[name] = list(part) if isinstance(part, tuple) else part
    return arrays, facts


def from_arrays(kind: type[Any], arrays: dict[str, Any], facts: dict[str, Any], prefix: str = "") -> Any:
    """Put a prepared matrix of a class together from the results of `to_arrays`.

    Raises `MatrixError` if something is missing.
    """
    parts: dict[str, Any] = {}
    for field in fields(kind):
        name = prefix + field.name
        if f"{name}.kind" in facts:
            parts[field.name] = from_arrays(HOLDERS[facts[f"{name}.kind"]], arrays, facts, f"{name}.")
        elif name in arrays:
            parts[field.name] = arrays[name]
        elif name in facts:
            parts[field.name] = tuple(facts[name]) if isinstance(facts[name], list) else facts[name]
        elif field.default is MISSING:
            raise MatrixError(f"the stored operator has no {name}: prepare it again")
    return kind(**parts)
