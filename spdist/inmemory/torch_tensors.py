"""Sparse tensors of PyTorch in, sparse tensors out: their memory is shared, on the host and on the GPU.

Nothing here imports PyTorch before there is a tensor of its.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from spdist.errors import InputError, MatrixError, install
from spdist.matrices.dtypes import INT32_MAX
from spdist.options import ProductOptions


def is_tensor(matrix: object) -> bool:
    """Whether a matrix is a tensor of PyTorch."""
    return type(matrix).__module__.partition(".")[0] == "torch"


def multiply(a: Any, b: Any, product: ProductOptions, made_by: Callable[[Any, Any, ProductOptions], Any]) -> Any:
    """Multiply two sparse tensors; see `spdist.spgemm`.

    Parameters
    ----------
    a, b : torch.Tensor
        Sparse, of two dimensions, on one device. Gradients are not tracked.
    product : ProductOptions
        The mask may be a tensor too.
    made_by : callable
        Multiplies matrices of SciPy's, or of CuPy's.

    Returns
    -------
    torch.Tensor
        Of layout `torch.sparse_csr`, on that device; its columns have the dtype of A's.

    Raises
    ------
    MatrixError
        If only one is a tensor, one is not sparse or needs a gradient, or they lie on different devices.
    """
    for name, one in (("A", a), ("B", b)):
        if not is_tensor(one):
            raise MatrixError(
                f"{name} is a {type(one).__name__}, and not a tensor of PyTorch as the other: convert one"
            )
    if a.device != b.device:
        raise MatrixError(f"A is on {a.device}, B on {b.device}: move both to one device")
    tensors = [_by_rows(one, name) for one, name in ((a, "A"), (b, "B"))]
    with _on_device(a):
        left = _matrix_of(tensors[0])
        right = left if b is a else _matrix_of(tensors[1])
        if is_tensor(product.mask):
            product = replace(product, mask=_matrix_of(_by_rows(product.mask, "the mask")))
        product = replace(product, sort=True)  # PyTorch demands sorted rows of `torch.sparse_csr`
        return _tensor_of(made_by(left, right, product), tensors[0])


def _by_rows(tensor: Any, name: str) -> Any:
    """Return a sparse tensor in CSR."""
    import torch

    if tensor.layout == torch.strided or tensor.dim() != 2:
        raise MatrixError(
            f"{name} is a tensor of layout {tensor.layout} and shape {tuple(tensor.shape)}: spdist multiplies sparse "
            f"tensors of two dimensions; convert it with .to_sparse_csr()"
        )
    if tensor.requires_grad:
        raise MatrixError(f"{name} needs a gradient, which spdist's products do not have: pass {name}.detach()")
    return tensor if tensor.layout == torch.sparse_csr else tensor.to_sparse_csr()


def _on_device(tensor: Any) -> AbstractContextManager[Any]:
    """Let CuPy work on the GPU of a tensor."""
    if not tensor.is_cuda:
        return nullcontext()
    try:
        import cupy
    except ImportError as error:
        raise InputError(f"tensors on a GPU need CuPy ({error}): {install('cu13')}") from None
    device: AbstractContextManager[Any] = cupy.cuda.Device(tensor.device.index)
    return device


def _matrix_of(tensor: Any) -> Any:
    """Return SciPy's or CuPy's matrix on the memory of a tensor in CSR."""
    parts = tensor.values(), tensor.col_indices(), tensor.crow_indices()
    try:
        if tensor.is_cuda:
            import cupy
            import cupyx.scipy.sparse as csp

            return csp.csr_matrix(tuple(map(cupy.from_dlpack, parts)), shape=tuple(tensor.shape))
        return sp.csr_array(tuple(part.numpy() for part in parts), shape=tuple(tensor.shape))
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise MatrixError(f"a tensor of {tensor.dtype} is not multiplied ({error}): convert it with .to(...)") from None


def _tensor_of(matrix: Any, like: Any) -> Any:
    """Return a tensor on the memory of a matrix in CSR, with columns in the dtype of another tensor's columns."""
    import torch

    c = matrix.tocsr()
    kind = np.int32 if like.col_indices().dtype == torch.int32 and c.nnz <= INT32_MAX else np.int64
    parts = [torch.from_dlpack(part) for part in (c.indptr.astype(kind), c.indices.astype(kind), c.data)]
    return torch.sparse_csr_tensor(*parts, size=tuple(c.shape), device=like.device, check_invariants=False)
