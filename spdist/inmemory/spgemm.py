"""Products in memory: SciPy matrices in and out, on the CPU; CuPy matrices in and out, on the GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from spdist.errors import InputError, MatrixError
from spdist.inmemory import block_operands, cupy_operands
from spdist.kernels.cpu.reduce import reduce_product
from spdist.kernels.product_spec import Epilogue, ProductSpec, is_by_columns
from spdist.kernels.reduction_spec import Reduction, check_values, diagonal_pattern, is_linear
from spdist.kernels.rowwise_gpu.multiply import Pattern
from spdist.kernels.semirings import Semiring, find, turned
from spdist.matrices.checks import check_mask_shape, check_product_shapes
from spdist.matrices.csr import CSR, from_scipy
from spdist.matrices.dtypes import IndexArray, Int64Array
from spdist.matrices.vbr import VBR
from spdist.units import check_count

METHODS = ("auto", "scipy", "numba", "cuda", "hyspmm")
ANSWERING = ("auto", "numba", "cuda")
"""Those that take semirings, masks, triangles, threshold and top-n."""


@dataclass(frozen=True)
class HostPattern:
    """The structure of C = A @ B in the host's memory.

    Attributes
    ----------
    indptr : (nrows + 1,) int64
    indices : (nnz,) int32 or int64
    shape : (nrows, ncols)
    """

    indptr: Int64Array
    indices: IndexArray
    shape: tuple[int, int]

    @property
    def nnz(self) -> int:
        """Entries of C."""
        return len(self.indices)


def spgemm(
    a: Any, b: Any, method: str = "auto", *, threads: int | None = None, deterministic: bool = False,
    memory_limit: int | None = None, semiring: str | Semiring = "plus_times", mask: Any = None,
    complement: bool = False, triangle: str | None = None, epilogue: Epilogue | None = None,
    threshold: float | None = None, top_n: int | None = None, axis: int = 1,
) -> Any:  # fmt: skip
    """Multiply two sparse matrices in memory: SciPy in, SciPy out; CuPy in, CuPy out.

    The product can be turned into an answer as its rows are made, so that C is never whole: by a semiring, then a mask
    or a triangle, an epilogue, a threshold, then the largest entries of each row. On the GPU CuPy's C is made before it
    is cut by values, and functions of one's own need expressions in C.

    Parameters
    ----------
    a, b : sparse matrix or array
        Both of SciPy's (dtypes: bool, integers, float32/64, complex64/128; through the GPU no integers of 8 or 16
        bits), or both of `cupyx.scipy.sparse` (bool, float32/64, complex64/128). Two-dimensional, any format; rows need
        not be sorted. Or both block matrices: SciPy's `bsr_array`, or `spdist.BSR` on the host or the GPU, with blocks
        of r x s and of s x t. These are multiplied block by block; where only one is in blocks, or theirs do not fit,
        entry by entry, which is logged. Or both `spdist.VBR`: blocks of many sizes, multiplied entry by entry.
    method : str
        For SciPy's matrices "auto", "scipy" or "numba": the CPU engine; "auto" picks from a cheap look at the operands.
        "cuda" sends blocks of rows, of block matrices too, through the GPU, which need not hold any of the three;
        "hyspmm" does so as Wu's hybrid of CPU and GPU. For CuPy's matrices "auto", "rowwise" (each row by the kernels
        that suit it) or "esc" (Polok's expansion, sorting, compression). For float32 blocks on the GPU "auto", or
        "tf32": blocks that fill tensor cores, as 8 x 8 and 16 x 16 do, have their values rounded to 11 significant bits
        first, so that each product is off by 2^-10 of itself at the most.
    threads : int, optional
        On the CPU; by default one per core.
    deterministic : bool
        On the GPU: the same bits on every run, products added in the order of A's entries. Without it, long rows are
        summed in any order. The CPU's results, and those of "esc", are always so.
    memory_limit : int, optional
        Bytes of the GPU's memory that "cuda" may take; by default 0.9 of what is free.
    semiring : str or Semiring
        What adds and multiplies: "plus_times", "min_plus", "max_plus", "max_times", "max_min", "or_and", "plus_pair",
        "plus_first", "plus_second", "any_pair", or a `spdist.Semiring`. "pair" is 1 wherever both factors are stored;
        "first" and "second" are A's and B's value; "any" is one of the products. The dtype is NumPy's result type, for
        "plus_first" A's and for "plus_second" B's; bool counts as int64. "or_and" and "any_pair" give bool,
        "plus_pair" int64; "plus_times" keeps bool. A NaN is neither smaller nor larger than anything: "min" and "max"
        pass it over.
    mask : sparse matrix or array, optional
        C has entries only where the mask stores one, whatever its value; other products are not made. Of C's shape; on
        the host or the GPU.
    complement : bool
        C has entries only where the mask stores none.
    triangle : {"upper"}, optional
        For a C that is known to be symmetric, or Hermitian, as ``a @ a.T`` is and ``a.conj().T @ a``: its entries on
        and above the diagonal alone. Products below are not made, nor is it checked that they would be the same. Not
        with what needs whole rows: `top_n`, and an epilogue that normalises. ``c + scipy.sparse.triu(c, 1).T`` is the
        whole, of Hermitian ones with ``.conj()``; of stored ones `symmetrize` writes it.
    epilogue : Epilogue, optional
        What becomes of the values of a row: scaling, a function of one's own, normalisation, zeros dropped.
    top_n : int, optional
        Entries to keep in each row: the largest, and of equal ones those in the smaller columns. Rows stay sorted by
        column.
    threshold : float, optional
        Entries ``>= threshold`` are kept, compared in the dtype of C, after its last product is added. Neither this nor
        `top_n` keeps a NaN.
    axis : {1, 0}
        Whether `top_n` and an epilogue's norm look at rows or, with 0, at columns. By columns the product is made as
        the transpose of ``b.T @ a.T``: of equal values those in smaller rows stay. Not with a semiring of one's own.

    Returns
    -------
    sparse matrix or array
        Of the kind of `a`, by columns if both are `csc`, in blocks of r x t if both are block matrices that fit, else
        by rows. Rows sorted, no duplicates; entries that cancel to zero are kept, so that the pattern is the structural
        product's, unless mask, threshold or top-n cut it. CuPy has no sparse matrices of whole numbers: where C has
        such values, as with "plus_pair", it comes as float64.

    Raises
    ------
    MatrixError
        If the shapes do not fit, or an operand is not a matrix spdist multiplies; or if values are complex and have to
        be compared.
    InputError
        If semiring, mask, threshold or top-n are wrong, or asked for of an engine that has them not.
    MemoryBoundError
        If the GPU has too little memory; says how much is needed.

    References
    ----------
    .. [1] L. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication on GPU", HPC 2015.
    .. [2] X. Wu, "Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform", thesis, Georgia
       State University, 2015.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> spgemm(sp.eye_array(3, format="csr"), sp.eye_array(3, format="csr")).nnz
    3

    Blocks stay blocks:

    >>> blocks = sp.bsr_array([[1, 1], [1, 1]], blocksize=(2, 2))
    >>> spgemm(blocks, blocks).data
    array([[[2, 2],
            [2, 2]]])

    Paths of two steps, and how many close a triangle:

    >>> a = sp.csr_array([[0, 1, 1], [1, 0, 1], [1, 1, 0]])
    >>> spgemm(a, a, semiring="plus_pair").sum(), spgemm(a, a, semiring="plus_pair", mask=a).sum()
    (np.int64(12), np.int64(6))

    Rows that share a column, each pair once:

    >>> spgemm(a, a.T, triangle="upper").toarray()
    array([[2, 1, 1],
           [0, 2, 1],
           [0, 0, 2]])
    """
    check_count("threads", threads, "one a core")
    if is_by_columns(axis, top_n, epilogue):
        wanted = {
            "method": method, "threads": threads, "deterministic": deterministic, "memory_limit": memory_limit,
            "complement": complement, "triangle": triangle, "threshold": threshold, "top_n": top_n,
        }  # fmt: skip
        return _by_columns(a, b, find(semiring), mask, epilogue, wanted)
    on_gpu = cupy_operands.is_cupyx(a) and cupy_operands.is_cupyx(b)
    spec = _options(semiring, mask, complement, triangle, epilogue, threshold, top_n, on_gpu)
    if isinstance(a, VBR) or isinstance(b, VBR):
        if not (isinstance(a, VBR) and isinstance(b, VBR) and spec.plain and method == "auto"):
            raise InputError("a VBR is multiplied by a VBR, with method='auto' and no options: else take its entries()")
        return block_operands.multiply_vbr(a, b, threads)
    if block_operands.is_blocked(a) or block_operands.is_blocked(b):
        if block_operands.fit(a, b) and spec.plain:
            return block_operands.spgemm(a, b, method, threads, memory_limit)
        options_need = "semirings, masks, triangles and cuts are for entries"
        reason = "blocks of the other do not fit" if spec.plain else options_need
        left = block_operands.expand(a, "A", reason)
        a, b = left, left if b is a else block_operands.expand(b, "B", reason)
    if _on_gpu(a, b):
        return cupy_operands.spgemm(a, b, method, deterministic, spec)
    if not spec.plain and method in METHODS and method not in ANSWERING:
        raise InputError(
            f"method={method!r} makes whole products by plus and times: for semirings, masks, triangles, epilogues, "
            f"threshold and top_n choose one of {', '.join(ANSWERING)}"
        )
    from spdist.kernels.cpu import multiply as cpu

    # With options the rows of C matter, and the order of the factors.
    by_columns = getattr(a, "format", "") == getattr(b, "format", "") == "csc"
    swapped = by_columns and spec.plain
    left, right = (from_scipy(b.T), from_scipy(a.T)) if swapped else (from_scipy(a), from_scipy(b))
    if method not in METHODS:
        raise InputError(f"method {method!r} is not one of {', '.join(METHODS)}, which matrices of SciPy's have")
    check_product_shapes(a.shape, b.shape)
    spec.check_square((left.nrows, right.ncols))
    if method in ("cuda", "hyspmm"):
        spec.check_device()
        c = cupy_operands.through_gpu(left, right, method, threads, memory_limit, deterministic, spec)
    else:
        c = cpu.multiply(left, right, engine=method, threads=threads or os.cpu_count() or 1, spec=spec)  # type: ignore[arg-type]
    out = like(a, c)
    if swapped:
        return out.T
    return out.tocsc() if by_columns else out


def _by_columns(
    a: Any, b: Any, semiring: Semiring, mask: Any, epilogue: Epilogue | None, wanted: dict[str, Any]
) -> Any:
    """Multiply two matrices as the transpose of the product of their transposes."""
    if not all(one is None or sp.issparse(one) or cupy_operands.is_cupyx(one) for one in (a, b, mask)):
        raise InputError("axis=0 is for SciPy's and CuPy's matrices")
    _check_columns(a, b, semiring, mask, epilogue, wanted)
    spec: dict[str, Any] = {
        "semiring": turned(semiring), "mask": None if mask is None else mask.T,
        "epilogue": None if epilogue is None else epilogue.turned(),
    }  # fmt: skip
    made = spgemm(b.T, a.T, **spec, **wanted)
    if sp.issparse(made) and isinstance(made, sp.sparray) != isinstance(a, sp.sparray):
        kind: Any = sp.csr_array if isinstance(a, sp.sparray) else sp.csr_matrix
        made = kind(made)
    return made.T.asformat("csc" if a.format == b.format == "csc" else "csr")


def _check_columns(
    a: Any, b: Any, semiring: Semiring, mask: Any, epilogue: Epilogue | None, wanted: dict[str, Any]
) -> None:
    """Refuse what does not fit by the names and shapes it was given with, which the transposes no longer have."""
    shapes = [m.shape for m in (a, b, mask) if m is not None]
    if any(len(shape) != 2 for shape in shapes):
        return  # as for rows
    check_product_shapes(a.shape, b.shape)
    shape = a.shape[0], b.shape[1]
    if mask is not None:
        check_mask_shape(mask.shape, shape)
    cuts = {name: wanted[name] for name in ("triangle", "threshold", "top_n")}
    ProductSpec(semiring, epilogue=epilogue, **cuts).check(shape, semiring.result_dtype(a.dtype, b.dtype))


def _options(
    semiring: str | Semiring, mask: Any, complement: bool, triangle: str | None, epilogue: Epilogue | None,
    threshold: float | None, top_n: int | None, on_gpu: bool = False,
) -> ProductSpec:  # fmt: skip
    if on_gpu and cupy_operands.is_cupyx(mask):
        return ProductSpec(
            find(semiring), cupy_operands.from_cupyx(mask), complement, top_n, threshold, epilogue, triangle
        )
    mask = mask.get() if cupy_operands.is_cupyx(mask) else mask
    if not (mask is None or hasattr(mask, "tocsr")):
        raise InputError(f"mask={mask!r} is no sparse matrix: where operands are in memory it is SciPy's or CuPy's")
    pattern = None if mask is None else from_scipy(mask.astype(np.bool_))
    return ProductSpec(find(semiring), pattern, complement, top_n, threshold, epilogue, triangle)


def reduce(
    a: Any, b: Any, what: Reduction, *, engine: str = "auto", memory_limit: int | None = None,
    threads: int | None = None, semiring: str | Semiring = "plus_times", mask: Any = None,
    complement: bool = False, triangle: str | None = None, epilogue: Epilogue | None = None,
    threshold: float | None = None, top_n: int | None = None,
) -> Any:  # fmt: skip
    """Return a reduction of a product of SciPy's matrices; `api.reduce` describes it."""
    left, right = from_scipy(a), from_scipy(b)
    check_product_shapes(a.shape, b.shape)
    spec = _options(semiring, mask, complement, triangle, epilogue, threshold, top_n)
    spec.check_square((left.nrows, right.ncols))
    dtype = spec.semiring.result_dtype(left.dtype, right.dtype)
    check_values(what, dtype)
    if engine == "cuda" and not is_linear(what, spec, dtype):
        spec.check_device()
        if what == "trace" and not spec.fused:
            spec = replace(spec, mask=diagonal_pattern(0, left.nrows, right.ncols))
        return cupy_operands.reduce_through_gpu(left, right, what, memory_limit, spec)
    return reduce_product(what, left, right, threads=threads or os.cpu_count() or 1, spec=spec)


def symbolic(a: Any, b: Any, *, deterministic: bool = False) -> Pattern | HostPattern:
    """Find the structure of ``a @ b``, for products of many values on one structure.

    Parameters
    ----------
    a, b : sparse matrix or array
        As for `spgemm`; the rows of B are sorted and free of duplicates.
    deterministic : bool
        As for `spgemm`; holds for every `numeric` with this pattern.

    Returns
    -------
    Pattern or HostPattern
        With indptr, indices, nnz and shape. On the GPU it also holds what the kernels found out about each row, so that
        `numeric` takes a part of the time of `spgemm`; on the CPU the time is the same.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> a = sp.eye_array(3, format="csr")
    >>> numeric(symbolic(a, a), 2 * a, a).data
    array([2., 2., 2.])
    """
    if _on_gpu(a, b):
        return cupy_operands.symbolic(a, b, deterministic)
    from spdist.kernels.cpu import multiply as cpu

    left, right = from_scipy(a), from_scipy(b)
    c = cpu.multiply(_ones(left), _ones(right), threads=os.cpu_count() or 1)
    return HostPattern(c.indptr, c.indices, c.shape)


def numeric(pattern: Pattern | HostPattern, a: Any, b: Any) -> Any:
    """Multiply operands of the structure that `symbolic` saw.

    Parameters
    ----------
    pattern : Pattern or HostPattern
        Of `symbolic`.
    a, b : sparse matrix or array
        With the structure and dtypes they had then.

    Returns
    -------
    sparse matrix or array
        The product; it shares indptr and indices with the pattern.

    Raises
    ------
    MatrixError
        If an operand has another shape, nnz or dtype than then.
    """
    if isinstance(pattern, Pattern):
        return cupy_operands.numeric(pattern, a, b)
    c = from_scipy(spgemm(a, b))
    same = c.shape == pattern.shape and c.nnz == pattern.nnz and np.array_equal(c.indices, pattern.indices)
    if not same or not np.array_equal(c.indptr, pattern.indptr):
        raise MatrixError(
            f"the product is {c.nrows:,} x {c.ncols:,} with {c.nnz:,} entries, not the pattern's "
            f"{pattern.shape[0]:,} x {pattern.shape[1]:,} with {pattern.nnz:,}, or they lie elsewhere: call symbolic "
            f"again"
        )
    return like(a, CSR(pattern.indptr, pattern.indices, c.data, pattern.shape))


def _ones(m: CSR) -> CSR:
    """Return the pattern of a matrix, as one of bools."""
    return CSR(m.indptr, m.indices, np.ones(m.nnz, np.bool_), m.shape)


def _on_gpu(a: Any, b: Any) -> bool:
    """Whether the operands are CuPy's; refuses one of each."""
    gpu = cupy_operands.is_cupyx(a), cupy_operands.is_cupyx(b)
    if gpu[0] != gpu[1]:
        kinds = [f"{type(m).__module__}.{type(m).__name__}" for m in (a, b)]
        raise MatrixError(f"A is a {kinds[0]}, B a {kinds[1]}: bring both to the GPU, or both to the host")
    return gpu[0]


def like(a: Any, c: CSR) -> Any:
    """Return C as SciPy's matrix, or array if `a` is one."""
    m: Any = c.to_scipy()
    if isinstance(a, sp.sparray):
        out = sp.csr_array(m.shape, dtype=m.dtype)
        out.indptr, out.indices, out.data = m.indptr, m.indices, m.data
        m = out
    m.has_canonical_format = True
    return m
