"""Prepare matrices for many products with vectors: the public functions that make an `Operator`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from spdist.errors import InputError, MatrixError
from spdist.foundation.cpus import count_cpus
from spdist.foundation.units import check_count
from spdist.inmemory import cupy_operands
from spdist.kernels.spmv import ehyb, prepared
from spdist.kernels.spmv.prepared import PreparedBsr, PreparedCsr, PreparedEhyb, PreparedSell
from spdist.kernels.spmv.sell import sell
from spdist.kernels.spmv.sell.format import LANES
from spdist.matrices.bsr import BSR, entries, is_scipy_bsr
from spdist.matrices.bsr import from_scipy as bsr_from_scipy
from spdist.matrices.csr import CSR, from_scipy
from spdist.matrices.dtypes import IndexArray, is_on_gpu
from spdist.operators import choice
from spdist.operators.choice import DEFAULT_USES, HYBRID, Choice, Dtypes
from spdist.operators.operator import ENCODING, Operator
from spdist.storage.groups import read_arrays


def operator(
    a: Any, method: str = "auto", *, uses: int = DEFAULT_USES, dtype: npt.DTypeLike | None = None,
    threads: int | None = None,
) -> Operator:  # fmt: skip
    """Prepare a sparse matrix for many products with vectors.

    Parameters
    ----------
    a : sparse matrix or array
        SciPy's, to multiply on the CPU; CuPy's, to multiply on the GPU; or a `spdist.BSR` of either. Booleans and
        integers are converted to float64.
    method : str
        "auto"; "sell": SELL-C-sigma; "csr": CSR-scalar or CSR-vector, on the GPU; "bsr": block matrices by their
        blocks, on the CPU; "scipy", "cusparse" and "cusparse_coo": the loops of these libraries (SciPy's by threads
        that share the rows), the last with the row of each entry beside it; cuSPARSE's last bits may differ from run to
        run; "levels" and "popular": SELL-C-sigma in another order of rows and columns, which the caller does not see;
        "ehyb": parts cut by METIS, x cached in shared memory, on the GPU; "hybrid": the first rows on the GPU, in the
        form that "auto" chooses, the others on cores of this process, split by measured times, or the GPU alone if that
        is as fast. A CUDA graph cannot capture "hybrid".
    uses : int
        Expected products. "auto" takes the form whose preparation and products take least: on the GPU by a model of
        both, which nothing is built for; it times candidates, and tries a reordering, only if the number repays that.
    dtype : dtype, optional
        Dtype of stored values: float32 halves their bytes; products are still summed in the dtype of `a`.
    threads : int, optional
        On the CPU; by default one per core. For "hybrid", one per core that this process may use.

    Returns
    -------
    Operator

    Raises
    ------
    MatrixError
        If `a` is no matrix that spdist multiplies, or has 2**31 rows or columns, which the method does not support.
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
    check_count("threads", threads, "one per core")
    m, wanted = read_matrix(a)
    stored = _stored_dtype(wanted, dtype)
    if method == HYBRID and is_on_gpu(m.data):
        return Operator(choice.split(m, wanted, stored, uses, threads), m.shape, wanted, m)
    count = threads or count_cpus()
    makers = choice.makers_for(m, count, stored)
    if (isinstance(a, BSR) or is_scipy_bsr(a)) and not is_on_gpu(m.data):
        makers["bsr"] = lambda: PreparedBsr(_blocks_of(a, stored))
    if method == "auto":
        return Operator(choice.choose(m, Dtypes(wanted, stored), makers, uses, count), m.shape, wanted, m)
    return Operator(choice.prepare_by(m, method, count, makers), m.shape, wanted, m)


def sell_operator(
    a: Any, C: int = LANES, sigma: int | Literal["auto"] = "auto", *, T: int | None = None,  # noqa: N803
    index: sell.Index = "auto", block: int | Literal["auto"] = "auto", dtype: npt.DTypeLike | None = None,
    threads: int | None = None,
) -> Operator:  # fmt: skip
    """Prepare a sparse matrix in SELL-C-sigma.

    `a`: SciPy's or CuPy's.
    `C`: rows of a SELL chunk. On the GPU, a divisor of 32: T = 32 / C lanes share a row.
    `sigma`: rows of the windows that are sorted by length; "auto" chooses the value that moves fewest bytes.
    `T`: lanes of a row, a power of 2. On the CPU too, so that a matrix can be prepared there for the GPU.
    `index`: column indices: the shortest form for each SELL chunk, 16-bit offsets if they fit, or 32-bit numbers.
    `block`: side of the dense blocks to detect; 1 for none.
    `dtype, threads`: as for `operator`.
    Raises `MatrixError` if `a` is no matrix that spdist multiplies, or a SELL chunk would have more than 32 lanes on
    the GPU.
    Raises `InputError` if a parameter has none of the values above.

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
    count = threads or count_cpus()
    made = sell.build(m, height=int(C), lanes=int(lanes), sigma=sigma, index=index, block=block,
                      dtype=_stored_dtype(wanted, dtype), threads=count)  # fmt: skip
    return Operator(Choice(PreparedSell(made), "sell", choice.BY_CALLER, count), m.shape, wanted, m)


def _check_format(C: int, sigma: int | str, T: int | None, index: str, block: int | str) -> None:  # noqa: N803
    """Refuse values that are no parameters of SELL-C-sigma."""
    for name, value in (("C", C), ("T", T), ("sigma", sigma), ("block", block)):
        if name in ("C", "T") or value != "auto":
            check_count(name, value, "the default")
    if index not in sell.ALLOWED:
        raise InputError(f"index={index!r} is not one of {', '.join(sell.ALLOWED)}")


def ehyb_operator(a: Any, *, part: IndexArray | None = None, dtype: npt.DTypeLike | None = None) -> Operator:
    """Prepare a square matrix of CuPy's in EHYB: parts whose share of x a thread block keeps in shared memory.

    `a`: square.
    `part`: (nrows,) int, optional: part of each row; by default METIS chooses, which needs pymetis.
    `dtype`: as for `operator`.
    Returns its `permuted` works in the order of the parts, so that x and y are not reordered for each product.
    Raises `MatrixError` if `a` is not square, not on the GPU, or `part` does not fit.
    Raises `InputError` if `part` is missing and pymetis is not installed.

    References
    ----------
    .. [1] C. Chen, "Explicit caching HYB: a new high-performance SpMV framework on GPGPU", arXiv 2204.06666.

    Examples
    --------
    >>> x = cupy.ones(a.shape[1])  # doctest: +SKIP
    >>> spdist.ehyb(a) @ x  # doctest: +SKIP
    """
    m, wanted = read_matrix(a)
    made = PreparedEhyb(ehyb.build(m, part=part, dtype=_stored_dtype(wanted, dtype)))
    return Operator(Choice(made, "ehyb", choice.BY_CALLER, 1), m.shape, wanted, m)


def open_operator(url: str | Path, *, on_gpu: bool = False, threads: int | None = None) -> Operator:
    """Open an operator that `Operator.save` stored.

    Parameters
    ----------
    url : str or Path
        A path or fsspec URL.
    on_gpu : bool
        Whether to copy it to the current CUDA device.
    threads : int, optional
        On the CPU.

    Returns
    -------
    Operator

    Raises
    ------
    MatrixError
        If there is no operator.
    InputError
        If the operator is for the CPU only and `on_gpu` is set, or needs a GPU and `on_gpu` is not set.
    CorruptError
        If a Zarr chunk is missing, truncated or altered.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> sell_operator(sp.eye_array(4, format="csr"), C=8, sigma=1).save("memory://operator.zarr", overwrite=True)
    >>> open_operator("memory://operator.zarr").method
    'sell'
    """
    arrays, attributes = read_arrays(url)
    if attributes.get("encoding-type") != ENCODING:
        raise MatrixError(f"{url}: not an operator, but {attributes.get('encoding-type')}")
    facts = attributes["operator"]
    if on_gpu and facts["form"] == "bsr":
        raise InputError(f"{url}: the operator multiplies blocks on the CPU: prepare one from the matrix on the GPU")
    if on_gpu:
        import cupy

        arrays = {name: cupy.asarray(array) for name, array in arrays.items()}
    if facts["form"] == HYBRID:
        return _split_again(url, arrays, facts, on_gpu, threads)
    made = prepared.from_arrays(prepared.FORMS[facts["form"]], arrays, facts)
    shape = (int(attributes["shape"][0]), int(attributes["shape"][1]))
    count = threads or count_cpus()
    return Operator(Choice(made, facts["method"], facts["why"], count), shape, np.dtype(facts["dtype"]))


def _split_again(
    url: str | Path, arrays: dict[str, Any], facts: dict[str, Any], on_gpu: bool, threads: int | None
) -> Operator:
    """Share the rows of a stored matrix between the GPU and the cores of this machine."""
    if not on_gpu:
        raise InputError(f"{url}: the operator's rows are shared by a GPU and cores: open it with on_gpu=True")
    m, wanted = prepared.from_arrays(PreparedCsr, arrays, facts).matrix, np.dtype(facts["dtype"])
    whole = CSR(m.indptr, m.indices, m.data.astype(wanted), m.shape)
    found = choice.split(whole, wanted, np.dtype(m.dtype), choice.DEFAULT_USES, threads)
    return Operator(found, whole.shape, wanted, whole)


def read_matrix(a: Any) -> tuple[CSR, np.dtype[Any]]:
    """Return a matrix of SciPy's or CuPy's, or a block matrix, as a `CSR` of floats or complex numbers; its dtype."""
    if isinstance(a, BSR):
        return _of_floats(entries(a))
    return _of_floats(cupy_operands.from_cupyx(a) if cupy_operands.is_cupyx(a) else from_scipy(a))


def _of_floats(m: CSR) -> tuple[CSR, np.dtype[Any]]:
    """Return a matrix as one of floats or complex numbers, and its dtype."""
    if m.dtype.kind in "biu":
        m = CSR(m.indptr, m.indices, m.data.astype(np.float64), m.shape)
    return m, np.dtype(m.dtype)


def _stored_dtype(wanted: np.dtype[Any], dtype: npt.DTypeLike | None) -> np.dtype[Any]:
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
    """Return a block matrix of the host, with values in the dtype to store."""
    m = a if isinstance(a, BSR) else bsr_from_scipy(a)
    return BSR(m.indptr, m.indices, m.data.astype(stored, copy=False), m.shape)
