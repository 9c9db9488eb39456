"""Products in memory: SciPy matrices in and out, on the CPU; CuPy matrices in and out, on the GPU.

Each kind of operands has its module, whose ``METHODS`` say what implements each method: `host_operands` (SciPy's),
`cupy_operands` (CuPy's) and `block_operands` (block matrices on the host or the GPU). `torch_tensors` takes PyTorch's
for one of these. This module finds the kind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import scipy.sparse as sp

from spdist.errors import InputError
from spdist.foundation.other_objects import refuse_other_objects
from spdist.foundation.units import check_count
from spdist.inmemory import batches, block_operands, cupy_operands, host_operands, small, torch_tensors
from spdist.kernels.product_spec import ProductSpec, is_by_columns
from spdist.kernels.semirings import find, transposed
from spdist.matrices.checks import check_mask_shape, check_product_shapes
from spdist.matrices.csr import from_scipy
from spdist.matrices.vbr import VBR
from spdist.options import InMemoryOptions, ProductOptions, SpgemmKeywords, lists_keywords, options_of


@lists_keywords(SpgemmKeywords)
def spgemm(a: Any, b: Any, method: str = "auto", **keywords: Unpack[SpgemmKeywords]) -> Any:
    """Multiply two sparse matrices in memory: SciPy in, SciPy out; CuPy in, CuPy out; tensors in, tensors out.

    Options change the rows of C while they are computed, so that the whole product never exists. They apply in this
    order: semiring, mask and triangle, epilogue, threshold, top-n. On the GPU, the C of CuPy operands is computed whole
    before its rows are cut by value, and functions of your own also need expressions in C.

    Parameters
    ----------
    a, b : sparse matrix or array
        Two-dimensional, in any format; rows need not be sorted. Both of one kind:

        - SciPy's: bool, integers, float32/64, complex64/128; through the GPU no integers of 8 or 16 bits.
        - `cupyx.scipy.sparse`: bool, float32/64, complex64/128.
        - Sparse tensors of PyTorch: dtypes on the CPU as for SciPy's, on a GPU as for CuPy's. The mask may be a tensor
          too, and C is a tensor of layout `torch.sparse_csr`. Values that require gradients get them through C, with
          the patterns fixed; over plus_times, without an epilogue. `spdist.torch.spgemm` is this function.
        - Block matrices, SciPy's `bsr_array` or `spdist.BSR` on the host or the GPU, with blocks of r x s and s x t.
          They are multiplied block by block. If only one has blocks, or the blocks do not fit, they are multiplied
          entry by entry, and a line is logged.
        - `spdist.VBR`, blocks of many sizes: entries are multiplied.
        - Two lists of matrices, a batch: they are multiplied pair by pair, and C is a list. Small matrices of CuPy's in
          CSR are multiplied at once, without options; the arrays of their products are parts of common memory.
    method : str
        - SciPy's matrices: "auto", "scipy" or "numba" multiply on the CPU; "auto" chooses by the estimated number of
          products. "cuda" streams row blocks through the GPU, which need not hold any of the three matrices. "hyspmm"
          is the hybrid of CPU and GPU of [2]_.
        - CuPy's matrices: "auto" and "rowwise" multiply each row by the kernel that suits it; "esc" is expansion,
          sorting, compression [1]_.
        - Blocks on the host: "auto", "numba" or "cuda".
        - Blocks on the GPU: "auto", or "tf32" for float32. "tf32" rounds the values of blocks that fill tensor cores,
          as 8 x 8 and 16 x 16 do, to 11 significant bits: each product is off by at most 2^-10 of itself.
    threads : int, optional
        Threads on the CPU; by default one for each core.
    deterministic : bool
        Whether the GPU gives equal bits on every run: products are added in the order of A's entries. Otherwise long
        rows are summed in any order. The CPU and "esc" always give equal bits.
    memory_limit : int, optional
        Bytes of GPU memory that "cuda" may take; by default 0.9 of the free memory.
    semiring : str or Semiring
        How to multiply and add: "plus_times", "min_plus", "max_plus", "max_times", "max_min", "or_and", "plus_pair",
        "plus_first", "plus_second", "any_pair", or a `spdist.Semiring`. "pair" is 1 wherever both factors are stored;
        "first" and "second" are A's and B's value; "any" is one of the products. The dtype of C is NumPy's result type,
        for "plus_first" A's and for "plus_second" B's; bool counts as int64. "or_and" and "any_pair" give bool,
        "plus_pair" int64; "plus_times" keeps bool. NaN is neither smaller nor larger than any value: "min" and "max"
        skip it.
    mask : sparse matrix or array, optional
        C has entries only where the mask stores one, whatever its value; other products are not computed. The mask has
        the shape of C, and is on the host or the GPU.
    complement : bool
        C has entries only where the mask stores none.
    triangle : {"upper"}, optional
        Compute only the entries on and above the diagonal. Meant for a symmetric or Hermitian C, as ``a @ a.T`` and
        ``a.conj().T @ a`` are; symmetry is not checked. Excludes options that need whole rows: `top_n`, and an epilogue
        that normalises. ``c + scipy.sparse.triu(c, 1).T`` is the whole C, with ``.conj()`` for a Hermitian C;
        `symmetrize` writes the whole of a stored C.
    epilogue : Epilogue, optional
        Operations on the values of a finished row: scaling, a function of your own, normalisation, dropping zeros.
    threshold : float, optional
        Keep entries ``>= threshold``, compared in the dtype of C after the last product is added. Drops NaN.
    top_n : int, optional
        Keep the `top_n` largest entries of each row; of equal entries, those in smaller columns. Rows stay sorted by
        column. Drops NaN.
    axis : {1, 0}
        Whether `top_n` and an epilogue's norm apply to rows (1) or columns (0). For columns, the transpose of
        ``b.T @ a.T`` is computed: of equal values, those in smaller rows are kept. Not with a semiring of your own.
    sort : bool
        Whether rows of C must be sorted by column. If false, the CPU leaves the entries of a row in the order in which
        it makes them, where that is quicker. The order is the same for any number of threads; another method or version
        may have another one. Pattern and bits of values stay, and no column is there twice. Rows are sorted all the
        same under masks, epilogues, thresholds and top-n, on the GPU, in blocks, and in tensors of PyTorch.

    Returns
    -------
    sparse matrix or array, or list
        Of the kind of `a`: `csc` if both are `csc`, in blocks of r x t if both are block matrices that fit, else `csr`.
        Rows are free of duplicates, and sorted unless `sort` is false. Entries that cancel to zero are kept: C has the
        pattern of the structural product, unless options cut it. CuPy has no sparse matrices of integers: integer
        results, for instance of "plus_pair", are float64 there.

    Raises
    ------
    MatrixError
        If the shapes do not fit, an operand is not a matrix that spdist multiplies, or complex values would have to be
        compared.
    InputError
        If an option is wrong, or the method does not support it.
    MemoryBoundError
        If the GPU has too little memory; the message says how much is needed.

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

    A batch:

    >>> [c.nnz for c in spgemm([a, a], [a, a.T])]
    [9, 9]

    Rows that share a column, each pair once:

    >>> spgemm(a, a.T, triangle="upper").toarray()
    array([[2, 1, 1],
           [0, 2, 1],
           [0, 0, 2]])
    """
    if method == "auto" and not keywords:
        for multiply_at_once in small.multiply, cupy_operands.multiply_rows:
            if (c := multiply_at_once(a, b)) is not None:
                return c
    product, options = options_of(spgemm, {**keywords, "method": method}, ProductOptions, InMemoryOptions)
    if batches.is_batch(a, b):
        return batches.multiply(a, b, product, options, lambda x, y: spgemm(x, y, method, **keywords))
    return multiply(a, b, product, options)


def multiply(a: Any, b: Any, product: ProductOptions, options: InMemoryOptions) -> Any:
    """Multiply two matrices of one kind; `spgemm` describes it.

    Parameters
    ----------
    a, b : sparse matrix or array
    product : ProductOptions
    options : InMemoryOptions

    Returns
    -------
    sparse matrix or array
        As `spgemm`.

    Raises
    ------
    MatrixError, InputError, MemoryBoundError
        As `spgemm`.
    """
    check_count("threads", options.threads, "one per core")
    refuse_other_objects(a, b, product.mask)
    if torch_tensors.is_tensor(a) or torch_tensors.is_tensor(b):
        return torch_tensors.multiply(a, b, product, lambda a, b, product: multiply(a, b, product, options))
    if is_by_columns(product.axis, product.top_n, product.epilogue):
        return _multiply_by_columns(a, b, product, options)
    spec = spec_of(product, on_gpu=cupy_operands.is_cupyx(a) and cupy_operands.is_cupyx(b))
    if isinstance(a, VBR) or isinstance(b, VBR):
        return _multiply_vbr(a, b, spec, options)
    if block_operands.is_blocked(a) or block_operands.is_blocked(b):
        if block_operands.fit(a, b) and spec.plain:
            return block_operands.multiply(a, b, options)
        options_need = "semirings, masks, triangles and cuts are for entries"
        reason = "blocks of the other do not fit" if spec.plain else options_need
        left = block_operands.expand(a, "A", reason)
        a, b = left, left if b is a else block_operands.expand(b, "B", reason)
    if cupy_operands.are_on_gpu(a, b):
        return cupy_operands.multiply(a, b, spec, options)
    return host_operands.multiply(a, b, spec, options)


def spec_of(product: ProductOptions, *, on_gpu: bool = False) -> ProductSpec:
    """Return the options of a product, the semiring looked up and the mask converted.

    `on_gpu`: whether the operands are CuPy's: then a mask of CuPy's stays on the GPU.
    Returns its mask is a `CSR`, of bools unless it stays on the GPU.
    Raises `InputError` if the mask is no sparse matrix, or an option is wrong in itself.
    """
    mask = product.mask
    if cupy_operands.is_cupyx(mask):
        mask = cupy_operands.from_cupyx(mask) if on_gpu else from_scipy(mask.get().astype(np.bool_))
    elif mask is not None:
        if not hasattr(mask, "tocsr"):
            raise InputError(f"mask={mask!r} is no sparse matrix: where operands are in memory it is SciPy's or CuPy's")
        mask = from_scipy(mask.astype(np.bool_))
    spec = product.row_spec()
    if mask is None and not product.complement:
        return spec
    return replace(spec, mask=mask, complement=product.complement)


def _multiply_vbr(a: Any, b: Any, spec: ProductSpec, options: InMemoryOptions) -> VBR:
    if not (isinstance(a, VBR) and isinstance(b, VBR) and spec.plain and options.method == "auto"):
        raise InputError("a VBR is multiplied by a VBR, with method='auto' and no options: else take its entries()")
    return block_operands.multiply_vbr(a, b, options.threads)


# -- by columns --------------------------------------------------------------------------------------------------------


def _multiply_by_columns(a: Any, b: Any, product: ProductOptions, options: InMemoryOptions) -> Any:
    """Multiply two matrices as the transpose of the product of their transposes."""
    semiring, mask, epilogue = find(product.semiring), product.mask, product.epilogue
    if not all(one is None or sp.issparse(one) or cupy_operands.is_cupyx(one) for one in (a, b, mask)):
        raise InputError("axis=0 is for SciPy's and CuPy's matrices")
    _check_columns(a, b, product)
    swapped = replace(
        product,
        semiring=transposed(semiring),
        mask=None if mask is None else mask.T,
        epilogue=None if epilogue is None else epilogue.transposed(),
        axis=1,
    )
    c = multiply(b.T, a.T, swapped, options)
    if sp.issparse(c) and isinstance(c, sp.sparray) != isinstance(a, sp.sparray):
        as_array: Any = sp.csr_array if isinstance(a, sp.sparray) else sp.csr_matrix
        c = as_array(c)
    return c.T.asformat("csc" if a.format == b.format == "csc" else "csr")


def _check_columns(a: Any, b: Any, product: ProductOptions) -> None:
    """Check shapes and options before the operands are transposed, so that errors name A, B and C as given."""
    mask = product.mask
    if any(len(m.shape) != 2 for m in (a, b, mask) if m is not None):
        return  # the product of the transposes refuses it
    check_product_shapes(a.shape, b.shape)
    shape = a.shape[0], b.shape[1]
    if mask is not None:
        check_mask_shape(mask.shape, shape)
    spec = product.row_spec()
    spec.check(shape, spec.semiring.result_dtype(a.dtype, b.dtype))
