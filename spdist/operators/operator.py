"""A matrix prepared once and multiplied with vectors many times, which iterative solvers accept.

SciPy's matrices are multiplied on the CPU, CuPy's on the GPU; CuPy is imported only for a matrix of CuPy's.
"""

from __future__ import annotations

import functools
import importlib
import math
import numbers
from pathlib import Path
from typing import Any, cast

import numpy as np

from spdist.errors import InputError, MatrixError
from spdist.foundation.display import Displayed, Part, Table
from spdist.foundation.units import format_bytes
from spdist.inmemory import cupy_operands
from spdist.kernels.spmv import columns, columns_cpu, cpu_gpu_split, ehyb, prepared, reorder
from spdist.kernels.spmv.cpu_gpu_split import PreparedSplit
from spdist.kernels.spmv.prepared import (
    PreparedBsr,
    PreparedCsr,
    PreparedCusparse,
    PreparedEhyb,
    PreparedMatrix,
    PreparedSell,
)
from spdist.kernels.spmv.sell import sell
from spdist.matrices.bsr import BSR, entries
from spdist.matrices.bsr import from_scipy as bsr_from_scipy
from spdist.matrices.csr import CSR, from_scipy
from spdist.matrices.dtypes import DeviceArray, is_on_gpu
from spdist.operators import choice
from spdist.operators.choice import HYBRID, Choice
from spdist.storage import atomic_replace, groups

MANY_COLUMNS, MANY_REORDERED = 5, 16
"""Columns of x from which lanes of the GPU take columns; of a matrix in another order, which reads x well."""
MANY_ON_CPU = 2
"""Columns of x from which the CPU sums several at a time."""
ENCODING = "spdist-operator"
"""``encoding-type`` of a stored operator."""


class Operator(Displayed):
    """A matrix prepared for products with vectors and tall, skinny dense matrices.

    It is a `scipy.sparse.linalg.LinearOperator`, and on the GPU one of `cupyx.scipy.sparse.linalg`: their solvers take
    it, and ``@``, ``2 * a``, ``a + b``, ``a @ b``, ``a ** 2``, ``-a``, ``a.T`` and ``a.H`` give linear operators. The
    functions of `prepare` return it.

    Attributes
    ----------
    shape : (nrows, ncols)
    dtype : dtype
        Dtype of the original matrix; stored values may have another.
    method : str
        As the argument of `operator`.
    why : str
        Why the method was chosen.
    threads : int
        Threads on the CPU; for "hybrid", threads that multiply next to the GPU.
    prepared : PreparedMatrix
        The form that multiplies.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, spdist
    >>> a = spdist.operator(sp.eye_array(3, format="csr"), "scipy")
    >>> a @ np.ones(3), a.shape
    (array([1., 1., 1.]), (3, 3))
    >>> (2 * a + a.T) @ np.ones(3)
    array([3., 3., 3.])
    """

    def __new__(cls, chosen: Choice, *rest: Any, **more: Any) -> Operator:
        """Return an object that is also a linear operator of the library whose arrays it multiplies."""
        kind = _linear_class(_multiplies_on_gpu(chosen.prepared)) if cls is Operator else cls
        return object.__new__(kind)

    def __init__(self, chosen: Choice, shape: tuple[int, int], dtype: np.dtype[Any], source: CSR | None = None) -> None:
        self.prepared, self.method, self.why, self.threads = chosen
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._source = source
        self._on_gpu = _multiplies_on_gpu(self.prepared)
        self._prepared_adjoint: Operator | None = None
        self._made_for_columns: columns.Pieces | columns_cpu.Rows | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        made = Choice(self.prepared, self.method, self.why, self.threads)
        return Operator, (made, self.shape, self.dtype, self._source)

    def __repr__(self) -> str:
        return f"<Operator {self.shape[0]:,} x {self.shape[1]:,}, {self.dtype}: {self.prepared.describe()}; {self.why}>"

    def description(self) -> list[Part]:
        """Return a table of the operator's shape, form and the reason for its choice."""
        facts = {
            "operator": f"{self.shape[0]:,} x {self.shape[1]:,}", "dtype": str(self.dtype),
            "form": self.prepared.describe(), "reads": f"{format_bytes(self.nbytes)} a product",
            "threads": str(self.threads), "chosen": self.why,
        }  # fmt: skip
        return [Table((), tuple(facts.items()))]

    @property
    def ndim(self) -> int:
        """2, as for a matrix."""
        return 2

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of the matrix."""
        return self.prepared.nbytes

    def matvec(self, x: DeviceArray, out: DeviceArray | None = None) -> Any:
        """Return ``A @ x``.

        Parameters
        ----------
        x : (ncols,) or (ncols, 1)
            An array of NumPy for an operator on the CPU, of CuPy for one on the GPU.
        out : (nrows,) or (nrows, 1), optional
            Array for the result: of the result's dtype, in C order, not overlapping x.
        """
        if x.shape not in ((self.shape[1],), (self.shape[1], 1)):
            raise MatrixError(f"A is {self.shape[0]:,} x {self.shape[1]:,}, x has shape {x.shape}")
        return self._multiply(x, out)

    def matmat(self, x: DeviceArray, out: DeviceArray | None = None) -> Any:
        """Return ``A @ X`` for a dense matrix.

        Parameters
        ----------
        x : (ncols, k)
        out : (nrows, k), optional
            As for `matvec`.
        """
        if x.ndim != 2 or x.shape[0] != self.shape[1]:
            raise MatrixError(f"A is {self.shape[0]:,} x {self.shape[1]:,}, X has shape {x.shape}")
        return self._multiply(x, out)

    def rmatvec(self, x: DeviceArray) -> Any:
        """Return the adjoint's product with a vector; the adjoint is prepared at the first call."""
        return self.adjoint().matvec(x)

    def rmatmat(self, x: DeviceArray) -> Any:
        """Return the adjoint's product with a dense matrix."""
        return self.adjoint().matmat(x)

    def dot(self, x: Any) -> Any:
        """Return the product with an array, a number or a linear operator; of these two, it is a linear operator."""
        if isinstance(x, numbers.Number) or hasattr(x, "matvec"):
            return cast(Any, super()).dot(x)
        x = np.asarray(x) if isinstance(x, list | tuple) else x
        return self.matvec(x) if x.ndim == 1 else self.matmat(x)

    def __matmul__(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):  # soon: a product of a small matrix takes microseconds
            return self.matvec(x) if x.ndim == 1 else self.matmat(x)
        if isinstance(x, numbers.Number):
            raise InputError(f"a matrix times a number, {x!r}, is written with *")
        if not isinstance(x, list | tuple) and not (hasattr(x, "ndim") and hasattr(x, "dtype")):
            return NotImplemented
        return self.dot(x)

    def adjoint(self) -> Operator:
        """Return the operator of the conjugate transpose; prepared once, by this operator's method."""
        if self._prepared_adjoint is None:
            self._prepared_adjoint = self._prepare_adjoint()
        return self._prepared_adjoint

    def transpose(self) -> Any:
        """Return the transpose: a linear operator by the adjoint, which is it for real values."""
        return self.adjoint() if self.dtype.kind != "c" else cast(Any, super())._transpose()

    @property
    def T(self) -> Any:  # noqa: N802  (SciPy's name)
        """The transpose."""
        return self.transpose()

    # What linear operators call of each other
    _matvec, _matmat, _rmatvec, _rmatmat, _adjoint = matvec, matmat, rmatvec, rmatmat, adjoint

    def _prepare_adjoint(self) -> Operator:
        """Prepare the conjugate transpose."""
        if isinstance(self.prepared, PreparedBsr):
            blocks = PreparedBsr(bsr_from_scipy(self.prepared.matrix.to_scipy().conj().T))
            shape = self.shape[1], self.shape[0]
            return Operator(Choice(blocks, self.method, choice.BY_CALLER, self.threads), shape, self.dtype)
        m = _adjoint_of(self._source if self._source is not None else _on_device(self.prepared))
        if self.method == HYBRID:
            found = choice.split(m, self.dtype, self.dtype, choice.DEFAULT_USES, self.threads)
        else:
            makers = choice.makers_for(m, self.threads, self.dtype)
            found = choice.prepare_by(m, self.method.split(" ")[0], self.threads, makers)
        return Operator(found, m.shape, self.dtype, m)

    @property
    def H(self) -> Operator:  # noqa: N802  (SciPy's name)
        """The conjugate transpose."""
        return self.adjoint()

    def to_csr(self) -> CSR:
        """Return the matrix as a canonical `CSR` in host memory, with the dtype of the stored values."""
        return csr_of(self.prepared)

    def permuted(self) -> Operator:
        """Return an operator for vectors in EHYB's order of rows, which `permute` brings vectors to.

        Raises
        ------
        InputError
            If the operator is not in EHYB.
        """
        made = PreparedEhyb(ehyb.permuted(_ehyb_of(self.prepared)))
        return Operator(Choice(made, self.method, "in the order of its parts", 1), self.shape, self.dtype)

    def permute(self, x: DeviceArray) -> Any:
        """Return the rows of x in the order of the parts."""
        return ehyb.permute(_ehyb_of(self.prepared), x)

    def unpermute(self, x: DeviceArray) -> Any:
        """Return the rows of x in the order before `permute`."""
        return ehyb.unpermute(_ehyb_of(self.prepared), x)

    def save(self, url: str | Path, *, overwrite: bool = False, steal: bool = False) -> None:
        """Store the prepared operator in Zarr, for `open_operator`.

        For "hybrid", the matrix is stored, and the machine that opens it splits it by its own timings.

        Parameters
        ----------
        url : str or Path
            A path or fsspec URL.
        overwrite : bool
            Whether to replace an operator or a matrix at `url` once the new one is whole.
        steal : bool
            As in `multiply`.
        """
        shared = self.method == HYBRID  # by times of this machine
        arrays, facts = prepared.to_arrays(PreparedCsr(self.to_csr()) if shared else self.prepared)
        arrays = {name: array.get() if is_on_gpu(array) else array for name, array in arrays.items()}
        form = HYBRID if shared else next(name for name, kind in prepared.FORMS.items() if type(self.prepared) is kind)
        facts |= {"form": form, "method": self.method, "why": self.why, "dtype": self.dtype.name}
        with atomic_replace.staged_matrix(url, overwrite=overwrite, steal=steal) as stage:
            groups.write_arrays(stage.url, arrays, {"encoding-type": ENCODING, "encoding-version": "0.1.0",
                                                     "shape": list(self.shape), "operator": facts})  # fmt: skip

    def _multiply(self, x: DeviceArray, out: DeviceArray | None) -> Any:
        """Convert x to the dtype of sums and C order, and multiply; a complex x and a real A as two real columns."""
        if not hasattr(x, "flags"):
            raise MatrixError(
                f"x is a {type(x).__name__}, and operators multiply dense arrays: give x.toarray(), or multiply two "
                f"sparse matrices by spdist.spgemm"
            )
        xp_x, dtype = x, self.dtype if x.dtype == self.dtype else np.result_type(self.dtype, x.dtype)
        if is_on_gpu(x) != self._on_gpu:
            raise MatrixError(f"the operator is not where x is: x is {type(x).__module__}.{type(x).__name__}")
        if dtype.kind == "c" and self.dtype.kind != "c":
            return self._multiply_parts(x, out, dtype)
        if x.dtype != dtype or not x.flags.c_contiguous:
            xp_x = x.astype(dtype, order="C")
        shape = self.shape[0], *x.shape[1:]
        if out is not None and (out.dtype != dtype or not out.flags.c_contiguous or out.shape != shape):
            raise MatrixError(f"out must be a C-ordered {dtype} array of shape {shape}")
        for_columns = self._for_columns(xp_x)
        if for_columns is not None:
            return for_columns.multiply(xp_x, out, self.threads)
        return self.prepared.multiply(xp_x, out, self.threads)

    def _for_columns(self, x: DeviceArray) -> columns.Pieces | columns_cpu.Rows | None:
        """Return the matrix in a form for the columns of x if they are many; made once, and not in a CUDA graph."""
        if x.ndim == 1 or x.shape[1] < self._many:
            return None
        if self._made_for_columns is None:
            self._made_for_columns = self._make_for_columns(is_on_gpu(x))
        return self._made_for_columns

    @functools.cached_property
    def _many(self) -> float:
        """Columns of x from which another form multiplies them, whatever form suits a vector."""
        if self.method == HYBRID or (self._source is not None and self._source.dtype != self.dtype):
            return math.inf
        if not self._on_gpu:
            suits = isinstance(self.prepared, PreparedSell) and self.prepared.matrix.dtype == self.dtype
            return MANY_ON_CPU if suits and self.dtype.kind == "f" else math.inf
        return MANY_REORDERED if self.method in ("levels", "popular") else MANY_COLUMNS

    def _make_for_columns(self, on_gpu: bool) -> columns.Pieces | columns_cpu.Rows | None:
        if not on_gpu:
            return columns_cpu.Rows(csr_of(self.prepared) if self._source is None else self._source)
        source = self._source
        if source is None and isinstance(self.prepared, PreparedCsr | PreparedCusparse):
            source = self.prepared.matrix
        import cupy

        if source is None or source.dtype != self.dtype or cupy.cuda.get_current_stream().is_capturing():
            return None
        return columns.cut(source)

    def _multiply_parts(self, x: DeviceArray, out: DeviceArray | None, dtype: np.dtype[Any]) -> Any:
        """Multiply a real matrix with a complex x: its real and imaginary parts are columns of their own."""
        numbers_of_x = x.astype(dtype, order="C", copy=False).reshape(len(x), math.prod(x.shape[1:]))
        part = np.dtype(f"f{dtype.itemsize // 2}")
        y = self._multiply(numbers_of_x.view(part), None).view(dtype).reshape(self.shape[0], *x.shape[1:])
        if out is None:
            return y
        out[...] = y
        return out


def csr_of(matrix: PreparedMatrix) -> CSR:
    """Return a prepared matrix as a canonical `CSR` in host memory."""
    if isinstance(matrix, PreparedSplit):
        return cpu_gpu_split.to_csr(csr_of(cast(PreparedMatrix, matrix.device)), csr_of(matrix.host), matrix)
    if isinstance(matrix, PreparedSell):
        m, columns = sell.to_csr(matrix.matrix), matrix.columns
        if columns is None:
            return m
        return reorder.apply(m, None, reorder.inverse(columns.get() if is_on_gpu(columns) else columns))
    held = cast(Any, matrix).matrix
    if isinstance(held, ehyb.Ehyb):
        return ehyb.to_csr(held)
    if isinstance(held, BSR):
        return entries(held)
    if is_on_gpu(held.data):
        held = CSR(held.indptr.get(), held.indices.get(), held.data.get(), held.shape)
    return from_scipy(held.to_scipy())


@functools.cache
def _linear_class(on_gpu: bool) -> type[Operator]:
    """Return the class of operators that are linear operators of SciPy's or CuPy's."""
    library = importlib.import_module("cupyx.scipy.sparse.linalg" if on_gpu else "scipy.sparse.linalg")
    return type("Operator", (Operator, library.LinearOperator), {"__doc__": Operator.__doc__})


def _multiplies_on_gpu(prepared_matrix: Any) -> bool:
    """Whether x and y of a prepared matrix are on the GPU."""
    held = prepared_matrix.matrix
    return is_on_gpu(held.data if isinstance(held, CSR | BSR) else held.values)


def _adjoint_of(a: CSR) -> CSR:
    """Return the conjugate transpose, on the device of the matrix."""
    if is_on_gpu(a.data):
        return cupy_operands.from_cupyx(cupy_operands.to_cupyx_any(a).conj().T.tocsr())
    return from_scipy(a.to_scipy().conj().T.tocsr())


def _on_device(matrix: PreparedMatrix) -> CSR:
    """Return a prepared matrix as a `CSR`, on the device that multiplies it."""
    m = csr_of(matrix)
    if not _multiplies_on_gpu(matrix):
        return m
    import cupy

    return CSR(cupy.asarray(m.indptr), cupy.asarray(m.indices), cupy.asarray(m.data), m.shape)


def _ehyb_of(matrix: PreparedMatrix) -> ehyb.Ehyb:
    """Return the matrix in EHYB; refuse other forms, and one that is permuted already."""
    if not isinstance(matrix, PreparedEhyb) or matrix.matrix.order is None:
        raise InputError("only an operator made by spdist.ehyb, and not yet permuted, has an order of its own")
    return matrix.matrix
