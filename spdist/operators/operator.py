"""Operators for iterative solvers: a matrix prepared once, multiplied with vectors many times.

SciPy's matrices are multiplied on the CPU, CuPy's on the GPU; nothing here imports CuPy before one of them is at hand.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from spdist.errors import InputError, MatrixError
from spdist.inmemory import cupy_operands
from spdist.kernels.spmv import cpu_gpu_split, ehyb, prepared, reorder, sell
from spdist.kernels.spmv import csr as csr_spmv
from spdist.kernels.spmv.cpu_gpu_split import HybridProduct
from spdist.kernels.spmv.prepared import BsrProduct, CsrProduct, CusparseProduct, EhybProduct, Product, SellProduct
from spdist.kernels.spmv.sell_format import LANES
from spdist.matrices.bsr import BSR, entries, is_scipy_bsr
from spdist.matrices.bsr import from_scipy as bsr_from_scipy
from spdist.matrices.csr import CSR, from_scipy
from spdist.matrices.dtypes import is_on_gpu
from spdist.storage import atomic_replace, groups
from spdist.units import check_count

CPU_LANES = 16
"""C on the CPU: the sums of a chunk fill two vector registers, and an addition waits for none of the other."""
MANY = 1000
"""Uses that a matrix is prepared for where none are given."""
TRIAL_USES = 50
"""Uses from which candidates are timed."""
TRIALS = 6
"""Products of a trial, after one that is not timed; as many each way, where they go to and fro through the matrix."""
GOOD_SHARE = 0.7
"""Share of the memory's bandwidth from which no other order is tried."""
REORDERING = 200
"""Products that a reordering takes, roughly; it must be won back."""
ENCODING = "spdist-operator"
HYBRID = "hybrid"
"""The method that is a choice for a matrix and a machine, not a form."""

log = logging.getLogger("spdist")


class Operator:
    """A matrix prepared for products with vectors and tall, skinny dense matrices.

    Takes part in ``@``, and SciPy's and CuPy's iterative solvers take it as it is (they look for `shape`, `dtype`,
    `matvec` and `rmatvec`). Made by `operator`, `sell` and `open_operator`.

    Attributes
    ----------
    shape : (nrows, ncols)
    dtype : dtype
        Of the operator: of the matrix it was made from, whatever its values are stored in.
    method : str
        How it multiplies, as the argument of `operator`.
    why : str
        How that came to be chosen.
    threads : int
        On the CPU; of "hybrid", those that multiply beside the GPU.
    """

    def __init__(
        self, product: Product, shape: tuple[int, int], dtype: Any, method: str, why: str, *, threads: int = 1,
        source: CSR | None = None,
    ) -> None:  # fmt: skip
        self.product, self.shape, self.dtype = product, shape, np.dtype(dtype)
        self.method, self.why, self.threads = method, why, threads
        self._source, self._adjoint = source, None

    def __repr__(self) -> str:
        return f"<Operator {self.shape[0]:,} x {self.shape[1]:,}, {self.dtype}: {self.product.describe()}; {self.why}>"

    @property
    def ndim(self) -> int:
        """2, as of a matrix."""
        return 2

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of the matrix."""
        return self.product.nbytes

    def matvec(self, x: Any, out: Any = None) -> Any:
        """Return ``A @ x``.

        Parameters
        ----------
        x : (ncols,) or (ncols, 1)
            Where the operator is: NumPy's on the CPU, CuPy's on the GPU.
        out : (nrows,) or (nrows, 1), optional
            Takes the result; of the result's dtype, C order, no part of x.
        """
        if x.shape not in ((self.shape[1],), (self.shape[1], 1)):
            raise MatrixError(f"A is {self.shape[0]:,} x {self.shape[1]:,}, x has shape {x.shape}")
        return self._multiply(x, out)

    def matmat(self, x: Any, out: Any = None) -> Any:
        """Return ``A @ X`` for a dense (ncols, k) matrix."""
        if x.ndim != 2 or x.shape[0] != self.shape[1]:
            raise MatrixError(f"A is {self.shape[0]:,} x {self.shape[1]:,}, X has shape {x.shape}")
        return self._multiply(x, out)

    def rmatvec(self, x: Any) -> Any:
        """Return the adjoint's product with a vector; the adjoint is prepared at the first call."""
        return self.adjoint().matvec(x)

    def rmatmat(self, x: Any) -> Any:
        """Return the adjoint's product with a dense matrix."""
        return self.adjoint().matmat(x)

    def __matmul__(self, x: Any) -> Any:
        if not hasattr(x, "ndim") or not hasattr(x, "dtype"):
            return NotImplemented
        return self.matvec(x) if x.ndim == 1 else self.matmat(x)

    def adjoint(self) -> Operator:
        """Return the operator of the conjugate transpose; made once, by the method of this one."""
        if self._adjoint is None:
            self._adjoint = cast(Any, self._turned())
        return cast(Operator, self._adjoint)

    def _turned(self) -> Operator:
        """Prepare the conjugate transpose."""
        if isinstance(self.product, BsrProduct):
            blocks = BsrProduct(bsr_from_scipy(self.product.matrix.to_scipy().conj().T))
            shape = self.shape[1], self.shape[0]
            return Operator(blocks, shape, self.dtype, self.method, "asked for", threads=self.threads)
        m = _adjoint_of(self._source if self._source is not None else self._fetched())
        if self.method == HYBRID:
            return _shared(m, self.dtype, self.dtype, MANY, self.threads)
        makers = _makers(m, self.threads, self.dtype)
        return _asked_for(m, self.method.split(" ")[0], self.threads, self.dtype, makers)

    @property
    def H(self) -> Operator:  # noqa: N802  (SciPy's name)
        """The conjugate transpose."""
        return self.adjoint()

    def to_csr(self) -> CSR:
        """Return the matrix as a canonical `CSR` in host memory; of the dtype that its values are stored in."""
        return _csr_of(self.product)

    def _fetched(self) -> CSR:
        """Return the matrix as a `CSR` where the operator is."""
        m = self.to_csr()
        if not _is_gpu_product(self.product):
            return m
        import cupy

        return CSR(cupy.asarray(m.indptr), cupy.asarray(m.indices), cupy.asarray(m.data), m.shape)

    def permuted(self) -> Operator:
        """Return an operator for vectors in the order that EHYB keeps rows in; `permute` brings a vector there.

        Raises
        ------
        InputError
            If the operator is not in EHYB.
        """
        made = EhybProduct(ehyb.permuted(self._ehyb()))
        return Operator(made, self.shape, self.dtype, self.method, "in the order of its parts")

    def permute(self, x: Any) -> Any:
        """Return the rows of x in the order of the parts."""
        return ehyb.permute(self._ehyb(), x)

    def unpermute(self, x: Any) -> Any:
        """Return the rows of x where they were before `permute`."""
        return ehyb.unpermute(self._ehyb(), x)

    def _ehyb(self) -> ehyb.Ehyb:
        if not isinstance(self.product, EhybProduct) or self.product.matrix.order is None:
            raise InputError("only an operator made by spdist.ehyb, and not yet permuted, has an order of its own")
        return self.product.matrix

    def save(self, url: str | Path, *, overwrite: bool = False) -> None:
        """Store the prepared operator in Zarr, for `open_operator`.

        Of "hybrid" the matrix is stored, and shared anew by the machine that opens it.

        Parameters
        ----------
        url : str or Path
            A path or fsspec URL.
        overwrite : bool
            Replace an operator or a matrix that is there, once the new one is whole.
        """
        shared = self.method == HYBRID  # by times of this machine
        arrays, facts = prepared.to_arrays(CsrProduct(self.to_csr()) if shared else self.product)
        arrays = {name: array.get() if is_on_gpu(array) else array for name, array in arrays.items()}
        form = HYBRID if shared else next(name for name, kind in prepared.FORMS.items() if type(self.product) is kind)
        facts |= {"form": form, "method": self.method, "why": self.why, "dtype": self.dtype.name}
        with atomic_replace.staged_matrix(url, overwrite=overwrite) as stage:
            groups.write_arrays(stage.url, arrays, {"encoding-type": ENCODING, "encoding-version": "0.1.0",
                                                     "shape": list(self.shape), "operator": facts})  # fmt: skip

    def _multiply(self, x: Any, out: Any) -> Any:
        """Multiply: x in the dtype that its products are summed in, C order; complex x of a real A as two columns."""
        if not hasattr(x, "flags"):
            raise MatrixError(
                f"x is a {type(x).__name__}, and operators multiply dense arrays: give x.toarray(), or multiply two "
                f"sparse matrices by spdist.spgemm"
            )
        xp_x, dtype = x, np.result_type(self.dtype, x.dtype)
        if is_on_gpu(x) != _is_gpu_product(self.product):
            raise MatrixError(f"the operator is not where x is: x is {type(x).__module__}.{type(x).__name__}")
        if dtype.kind == "c" and self.dtype.kind != "c":
            return self._multiply_parts(x, out, dtype)
        if x.dtype != dtype or not x.flags.c_contiguous:
            xp_x = x.astype(dtype, order="C")
        shape = self.shape[0], *x.shape[1:]
        if out is not None and (out.dtype != dtype or not out.flags.c_contiguous or out.shape != shape):
            raise MatrixError(f"out must be a C-ordered {dtype} array of shape {shape}")
        return self.product.multiply(xp_x, out, self.threads)

    def _multiply_parts(self, x: Any, out: Any, dtype: np.dtype[Any]) -> Any:
        """Multiply a real matrix with a complex x: its real and imaginary parts are columns of their own."""
        columns = x.astype(dtype, order="C", copy=False).reshape(len(x), math.prod(x.shape[1:]))
        part = np.dtype(f"f{dtype.itemsize // 2}")
        y = self._multiply(columns.view(part), None).view(dtype).reshape(self.shape[0], *x.shape[1:])
        if out is None:
            return y
        out[...] = y
        return out


def _csr_of(product: Product) -> CSR:
    """Return a prepared matrix as a canonical `CSR` in host memory."""
    if isinstance(product, HybridProduct):
        return cpu_gpu_split.to_csr(_csr_of(cast(Product, product.device)), _csr_of(product.host), product)
    if isinstance(product, SellProduct):
        m = sell.to_csr(product.matrix)
        if product.columns is None:
            return m
        columns = product.columns
        return reorder.apply(m, None, reorder.inverse(columns.get() if is_on_gpu(columns) else columns))
    kept = cast(Any, product).matrix
    if isinstance(kept, ehyb.Ehyb):
        return ehyb.to_csr(kept)
    if isinstance(kept, BSR):
        return entries(kept)
    if is_on_gpu(kept.data):
        kept = CSR(kept.indptr.get(), kept.indices.get(), kept.data.get(), kept.shape)
    return from_scipy(kept.to_scipy())


def _is_gpu_product(product: Any) -> bool:
    """Whether a product's arrays are on the GPU."""
    matrix = product.matrix
    return is_on_gpu(matrix.data if isinstance(matrix, (CSR, BSR)) else matrix.values)


def _adjoint_of(a: CSR) -> CSR:
    """Return the conjugate transpose, where the matrix is."""
    if is_on_gpu(a.data):
        return cupy_operands.from_cupyx(cupy_operands.to_cupyx_any(a).conj().T.tocsr())
    return from_scipy(a.to_scipy().conj().T.tocsr())


def operator(
    a: Any, method: str = "auto", *, uses: int = MANY, dtype: Any = None, threads: int | None = None
) -> Operator:
    """Prepare a sparse matrix for many products with vectors.

    Parameters
    ----------
    a : sparse matrix or array
        SciPy's: multiplied on the CPU; CuPy's: on the GPU; or a `spdist.BSR` of either. Booleans and integers are taken
        as float64.
    method : str
        "auto"; "sell": SELL-C-sigma; "csr": CSR-scalar or CSR-vector, on the GPU; "bsr": block matrices by their
        blocks, on the CPU; "scipy" and "cusparse": their products; "levels" and "popular": SELL-C-sigma in another
        order of rows and columns, hidden from the caller; "ehyb": parts cut by METIS, x cached in shared
        memory, on the GPU; "hybrid": the first rows on the GPU, as "auto" has them, the others by cores of this
        process, shared by the times of both, or the GPU alone where that is as quick; a CUDA graph does not hold it.
    uses : int
        Products that are to come. "auto" times its candidates if they are worth that, and reorders if the gain pays
        for it.
    dtype : dtype, optional
        In which values are stored: float32 halves their bytes, and products are still summed in the dtype of `a`.
    threads : int, optional
        On the CPU; by default one per core. For "hybrid", one per core that this process may use.

    Returns
    -------
    Operator

    Raises
    ------
    MatrixError
        If `a` is no matrix spdist multiplies, or has 2**31 rows or columns and the method none for so many.
    InputError
        If there is no such method for this matrix.

    References
    ----------
    .. [1] M. Kreutzer, G. Hager, G. Wellein, "A Unified Sparse Matrix Storage Format for Heterogeneous Systems".
    .. [2] F. Villa, "Efficient Sparse Matrix-Vector Multiplication on CUDA", Politecnico di Milano.
    .. [3] C. Chen, "Explicit caching HYB: a new high-performance SpMV framework on GPGPU", arXiv 2204.06666.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> a = operator(sp.eye_array(4, format="csr"))
    >>> a @ np.arange(4.0)
    array([0., 1., 2., 3.])
    """
    check_count("threads", threads, "one a core")
    m, wanted = read_matrix(a)
    stored = _stored_dtype(wanted, dtype)
    if method == HYBRID and is_on_gpu(m.data):
        return _shared(m, wanted, stored, uses, threads)
    count = threads or os.cpu_count() or 1
    makers = _makers(m, count, stored)
    if (isinstance(a, BSR) or is_scipy_bsr(a)) and not is_on_gpu(m.data):
        makers["bsr"] = lambda: BsrProduct(_blocks_of(a, stored))
    if method == "auto":
        return _choose(m, wanted, makers, uses, count)
    return _asked_for(m, method, count, wanted, makers)


def sell_operator(
    a: Any, C: int = LANES, sigma: int | Literal["auto"] = "auto", *, T: int | None = None,  # noqa: N803
    index: sell.Index = "auto", block: int | Literal["auto"] = "auto", dtype: Any = None, threads: int | None = None,
) -> Operator:  # fmt: skip
    """Prepare a sparse matrix in SELL-C-sigma.

    Parameters
    ----------
    a : sparse matrix or array
        SciPy's or CuPy's.
    C : int
        Rows of a chunk. On the GPU, a divisor of 32: T = 32 / C lanes share a row.
    sigma : int or "auto"
        Rows of the windows that are sorted by length; "auto" takes what moves fewest bytes.
    T : int, optional
        Lanes of a row, on the CPU too, so that a matrix can be prepared there for the GPU; a power of 2.
    index : {"auto", "narrow", "wide"}
        Column indices: the shortest form for each chunk, 16-bit offsets where they fit, or 32-bit numbers.
    block : int or "auto"
        Side of the dense blocks to look for; 1 for none.
    dtype, threads
        As for `operator`.

    Raises
    ------
    MatrixError
        If `a` is no matrix spdist multiplies, or a chunk would have more lanes than there are.
    InputError
        If a parameter is none of those.

    References
    ----------
    .. [1] M. Kreutzer, G. Hager, G. Wellein, "A Unified Sparse Matrix Storage Format for Heterogeneous Systems".

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> sell_operator(sp.eye_array(4, format="csr"), C=8, sigma=1) @ np.ones(4)
    array([1., 1., 1., 1.])
    """
    _check_format(C, sigma, T, index, block)
    m, wanted = read_matrix(a)
    lanes = C * T if T is not None else LANES if is_on_gpu(m.data) else C
    count = threads or os.cpu_count() or 1
    made = sell.build(m, height=int(C), lanes=int(lanes), sigma=sigma, index=index, block=block,
                      dtype=_stored_dtype(wanted, dtype), threads=count)  # fmt: skip
    return Operator(SellProduct(made), m.shape, wanted, "sell", "asked for", threads=count, source=m)


def _check_format(C: int, sigma: int | str, T: int | None, index: str, block: int | str) -> None:  # noqa: N803
    """Refuse what are no parameters of SELL-C-sigma."""
    for name, value in (("C", C), ("T", T), ("sigma", sigma), ("block", block)):
        if name in ("C", "T") or value != "auto":
            check_count(name, value, "the default")
    if index not in sell.ALLOWED:
        raise InputError(f"index={index!r} is not one of {', '.join(sell.ALLOWED)}")


def ehyb_operator(a: Any, *, part: Any = None, dtype: Any = None) -> Operator:
    """Prepare a square matrix of CuPy's in EHYB: parts whose share of x a thread block keeps in shared memory.

    Parameters
    ----------
    a : cupyx.scipy.sparse matrix
        Square.
    part : (nrows,) int, optional
        Part of each row; by METIS unless given, which needs pymetis.
    dtype : dtype, optional
        As for `operator`.

    Returns
    -------
    Operator
        Its `permuted` stays in the order of the parts, where x and y need not be brought back and forth.

    References
    ----------
    .. [1] C. Chen, "Explicit caching HYB: a new high-performance SpMV framework on GPGPU", arXiv 2204.06666.
    """
    m, wanted = read_matrix(a)
    product = EhybProduct(ehyb.build(m, part=part, dtype=_stored_dtype(wanted, dtype)))
    return Operator(product, m.shape, wanted, "ehyb", "asked for", source=m)


def open_operator(url: str | Path, *, on_gpu: bool = False, threads: int | None = None) -> Operator:
    """Open an operator that `Operator.save` stored.

    Parameters
    ----------
    url : str or Path
        A path or fsspec URL.
    on_gpu : bool
        Bring it to the current CUDA device.
    threads : int, optional
        On the CPU.

    Raises
    ------
    MatrixError
        If there is no operator.
    InputError
        If it is for the CPU only, and asked for on the GPU; or shared by both, and not asked for there.
    CorruptError
        If a Zarr chunk is missing, truncated or altered.
    """
    arrays, attributes = groups.read_arrays(url)
    if attributes.get("encoding-type") != ENCODING:
        raise MatrixError(f"{url}: not an operator, but {attributes.get('encoding-type')}")
    facts = attributes["operator"]
    if on_gpu and facts["form"] == "bsr":
        raise InputError(f"{url}: the operator multiplies blocks on the CPU: prepare one from the matrix on the GPU")
    if on_gpu:
        import cupy

        arrays = {name: cupy.asarray(array) for name, array in arrays.items()}
    if facts["form"] == HYBRID:
        return _shared_again(url, arrays, facts, on_gpu, threads)
    product = prepared.from_arrays(prepared.FORMS[facts["form"]], arrays, facts)
    shape = (int(attributes["shape"][0]), int(attributes["shape"][1]))
    count = threads or os.cpu_count() or 1
    return Operator(product, shape, facts["dtype"], facts["method"], facts["why"], threads=count)


def _shared_again(
    url: str | Path, arrays: dict[str, Any], facts: dict[str, Any], on_gpu: bool, threads: int | None
) -> Operator:
    """Share the rows of a stored matrix between the GPU and the cores of this machine."""
    if not on_gpu:
        raise InputError(f"{url}: the operator's rows are shared by a GPU and cores: open it with on_gpu=True")
    m, wanted = prepared.from_arrays(CsrProduct, arrays, facts).matrix, np.dtype(facts["dtype"])
    whole = CSR(m.indptr, m.indices, m.data.astype(wanted), m.shape)
    return _shared(whole, wanted, np.dtype(m.dtype), MANY, threads)


def read_matrix(a: Any) -> tuple[CSR, np.dtype[Any]]:
    """Return a matrix of SciPy's or CuPy's, or in blocks, as a `CSR` of floats or complex numbers, and its dtype."""
    if isinstance(a, BSR):
        return _of_floats(entries(a))
    return _of_floats(cupy_operands.from_cupyx(a) if cupy_operands.is_cupyx(a) else from_scipy(a))


def _of_floats(m: CSR) -> tuple[CSR, np.dtype[Any]]:
    """Return a matrix as one of floats or complex numbers, and its dtype."""
    if m.dtype.kind in "biu":
        m = CSR(m.indptr, m.indices, m.data.astype(np.float64), m.shape)
    return m, np.dtype(m.dtype)


def _stored_dtype(wanted: np.dtype[Any], dtype: Any) -> np.dtype[Any]:
    try:
        stored = wanted if dtype is None else np.dtype(dtype)
    except TypeError:
        raise InputError(f"dtype={dtype!r} is none of NumPy's: write for instance dtype='float32'") from None
    if (
        stored.kind != wanted.kind
        or stored.itemsize > wanted.itemsize
        or stored.kind not in "fc"
        or stored.itemsize < 4
    ):
        raise InputError(f"values of dtype {wanted} cannot be stored as {stored}")
    return stored


def _blocks_of(a: Any, stored: np.dtype[Any]) -> BSR:
    """Return a block matrix of the host, values as they are to be stored."""
    m = a if isinstance(a, BSR) else bsr_from_scipy(a)
    return BSR(m.indptr, m.indices, m.data.astype(stored, copy=False), m.shape)


def _asked_for(
    m: CSR, method: str, threads: int, wanted: np.dtype[Any], makers: dict[str, Callable[[], Product]]
) -> Operator:
    """Return the operator of a method that was asked for."""
    make = makers.get(method)
    if make is None:
        gpu = is_on_gpu(m.data)
        where, suited = "GPU" if gpu else "CPU", ", ".join(["auto", *makers, *([HYBRID] if gpu else [])])
        if method == HYBRID:
            suited += "; or give a matrix of CuPy's, whose rows a GPU and the cores can share"
        raise InputError(f"method {method!r} is not for this matrix on the {where}: choose one of {suited}")
    return Operator(make(), m.shape, wanted, method, "asked for", threads=threads, source=m)


def _makers(m: CSR, threads: int, stored: np.dtype[Any]) -> dict[str, Callable[[], Product]]:
    """Return the methods that suit a matrix where it is."""
    gpu, square = is_on_gpu(m.data), m.nrows == m.ncols
    options: dict[str, Any] = {"lanes": LANES if gpu else CPU_LANES, "dtype": stored, "threads": threads}
    kept = m if stored == m.dtype else CSR(m.indptr, m.indices, m.data.astype(stored), m.shape)
    made: dict[str, Callable[[], Product]] = {"sell": lambda: SellProduct(sell.build(m, **options))}
    if square:
        made["levels"] = lambda: prepared.by_levels(m, **options)
    made["popular"] = lambda: prepared.by_popularity(m, **options)
    if gpu:
        if square:
            made["ehyb"] = lambda: EhybProduct(ehyb.build(m, dtype=stored))
        made["csr"] = lambda: CsrProduct(kept, csr_spmv.row_width(m.nrows, m.nnz))
        if stored == m.dtype:
            made["cusparse"] = lambda: CusparseProduct(m)
    else:
        made["scipy"] = lambda: CsrProduct(kept)
    return made


# -- the choice --------------------------------------------------------------------------------------------------------


@dataclass
class _Trial:
    """Candidates that have been prepared and timed."""

    m: CSR
    dtype: np.dtype[Any]
    threads: int
    found: dict[str, tuple[float, Product]]

    def add(self, name: str, make: Callable[[], Product]) -> float:
        """Prepare and time a candidate; return its seconds."""
        product = make()
        seconds = (_gpu_seconds if is_on_gpu(self.m.data) else _cpu_seconds)(product, self.m, self.dtype, self.threads)
        self.found[name] = seconds, product
        return seconds

    def best(self) -> tuple[str, Product]:
        """Return the quickest."""
        name = min(self.found, key=lambda key: self.found[key][0])
        return name, self.found[name][1]

    def told(self) -> str:
        """Return all times, for people."""
        ordered = sorted(self.found.items(), key=lambda item: item[1][0])
        return ", ".join(f"{name} {1e6 * seconds:,.1f} us" for name, (seconds, _) in ordered)


def _choose(
    m: CSR, wanted: np.dtype[Any], makers: dict[str, Callable[[], Product]], uses: int, threads: int
) -> Operator:
    """Prepare the form that suits a matrix: SELL by the model, others by trial where there are uses enough."""
    if uses < TRIAL_USES or not m.nnz:
        name = "sell" if max(m.shape) < 2**31 else "csr" if is_on_gpu(m.data) else "scipy"
        product, why = makers[name](), f"auto: the model's choice for {uses:,} uses"
    else:
        trial = _Trial(m, wanted, threads, {})
        (_try_on_gpu if is_on_gpu(m.data) else _try_on_cpu)(trial, makers, uses)
        name, product = trial.best()
        why = f"auto: quickest of {trial.told()}"
    log.debug("%s: %s", name, why)
    return Operator(product, m.shape, wanted, name, why, threads=threads, source=m)


def _shared(m: CSR, wanted: np.dtype[Any], stored: np.dtype[Any], uses: int, threads: int | None) -> Operator:
    """Prepare a matrix of the GPU's for it and the cores together; for the GPU alone where that is as quick."""
    count = threads or len(os.sched_getaffinity(0))

    def on_gpu(rows: CSR) -> Product:
        return _choose(rows, wanted, _makers(rows, count, stored), uses, count).product

    def on_host(rows: CSR) -> Product:
        return _makers(rows, count, stored)["sell"]()

    whole = on_gpu(m)

    def alone() -> float:
        return _gpu_seconds(whole, m, wanted, count)

    found, why = cpu_gpu_split.prepare(m, cpu_gpu_split.Forms(on_gpu, on_host, alone, wanted, count))
    log.info("hybrid: %s", why)
    return Operator(found or whole, m.shape, wanted, HYBRID, f"{HYBRID}: {why}", threads=count, source=m)


def _try_on_cpu(trial: _Trial, makers: dict[str, Callable[[], Product]], uses: int) -> None:
    for name in ("scipy", "sell", "bsr"):
        if name in makers:
            trial.add(name, makers[name])


def _try_on_gpu(trial: _Trial, makers: dict[str, Callable[[], Product]], uses: int) -> None:
    """Time what needs no other order; then one that may help, where x is read so badly that it may pay."""
    m = trial.m
    seconds = trial.add("sell", makers["sell"])
    if m.nrows < LANES * sell.SPREAD_ROWS:
        dtype = cast(SellProduct, trial.found["sell"][1]).matrix.dtype
        trial.add("sell of one lane a row", lambda: SellProduct(sell.build(m, height=LANES, dtype=dtype)))
    for name in ("csr", "cusparse"):
        if name in makers:
            trial.add(name, makers[name])
    made = cast(SellProduct, trial.found["sell"][1])
    moved = made.nbytes + trial.dtype.itemsize * sum(m.shape)
    floor = moved / _bandwidth(_device())
    worth = uses * (seconds - floor) > REORDERING * seconds
    name = "popular" if len(made.matrix.long_rows) else "levels"  # a few rows that reach everywhere leave no levels
    if worth and seconds * GOOD_SHARE > floor and moved > _cache(_device()) and name in makers:
        trial.add(name, makers[name])


def _cpu_seconds(product: Product, m: CSR, dtype: np.dtype[Any], threads: int) -> float:
    x = np.ones(m.ncols, dtype)
    product.multiply(x, None, threads)
    times = []
    for _ in range(TRIALS):
        begin = time.perf_counter()
        product.multiply(x, None, threads)
        times.append(time.perf_counter() - begin)
    return min(times)


def _gpu_seconds(product: Product, m: CSR, dtype: np.dtype[Any], threads: int) -> float:
    """Return the time of a product among others on the GPU, without that of launching it where a graph can hold it."""
    import cupy

    x, y = cupy.ones(m.ncols, dtype), cupy.empty(m.nrows, dtype)
    stream, begin, end = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(), cupy.cuda.Event()

    def all_of_them() -> None:
        for _ in range(TRIALS):
            product.multiply(x, y, threads)

    cupy.cuda.get_current_stream().synchronize()
    with stream:
        product.multiply(x, y, threads)
        launch: Callable[[], Any] = all_of_them
        if not isinstance(product, CusparseProduct):
            stream.begin_capture()
            all_of_them()
            launch = stream.end_capture().launch
        launch()
        begin.record(stream)
        launch()
        end.record(stream)
        end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3 / TRIALS


def _device() -> int:
    import cupy

    return int(cupy.cuda.runtime.getDevice())


@functools.cache
def _bandwidth(number: int) -> float:
    """Return the bytes a second that a device's memory moves, by its clock and width."""
    import cupy

    attribute = cupy.cuda.runtime.deviceGetAttribute
    clock_khz, bits = (attribute(which, number) for which in (36, 37))  # memory clock, bus width
    return float(2e3 * clock_khz * bits / 8)


@functools.cache
def _cache(number: int) -> int:
    """Return the bytes of a device's L2 cache."""
    import cupy

    return int(cupy.cuda.runtime.deviceGetAttribute(38, number))
