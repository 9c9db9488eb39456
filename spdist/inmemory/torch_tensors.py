"""Sparse tensors of PyTorch in, sparse tensors out: their memory is shared, on the host and on the GPU.

Gradients are of the values, with the patterns fixed: the gradient of A is ``dC @ B.T`` where A has entries, and the
gradient of B is ``A.T @ dC`` where B has some; each a product under a mask. Nothing here imports PyTorch before there
is a tensor of its.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from spdist.errors import InputError, MatrixError, install
from spdist.matrices.dtypes import INT32_MAX, module_of
from spdist.options import ProductOptions


def is_tensor(matrix: object) -> bool:
    """Whether a matrix is a tensor of PyTorch."""
    return type(matrix).__module__.partition(".")[0] == "torch"


def multiply(a: Any, b: Any, product: ProductOptions, made_by: Callable[[Any, Any, ProductOptions], Any]) -> Any:
    """Multiply two sparse tensors; see `spdist.spgemm`.

    Parameters
    ----------
    a, b : torch.Tensor
        Sparse, of two dimensions, on one device. If one needs a gradient, the product is a node of PyTorch's graph.
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
        If only one is a tensor, one is not sparse, or they lie on different devices.
    InputError
        If one needs a gradient that the product does not have: of a semiring, or cut by top-n, for instance.
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
        if any(tensor.requires_grad for tensor in tensors):
            return _with_gradients(tensors, left, right, product, made_by)
        return _tensor_of(made_by(left, right, product), tensors[0])


def _with_gradients(
    tensors: list[Any],
    left: Any,
    right: Any,
    product: ProductOptions,
    made_by: Callable[[Any, Any, ProductOptions], Any],
) -> Any:
    """Multiply tensors, at least one with a gradient; see `multiply`."""
    if product.semiring != "plus_times" or product.epilogue is not None:
        raise InputError(
            "gradients are of products over plus_times without an epilogue: leave these out, or pass a.detach()"
        )
    for name, matrix in (("A", left), ("B", right)):
        keys = _keys(matrix)
        if not bool((keys[1:] > keys[:-1]).all()):
            raise MatrixError(f"{name} has rows that are not sorted, or duplicates: .to_sparse_coo().coalesce() first")
    a, b = tensors
    task = _Task(left, right, product, made_by, a.device)
    values = _function().apply(a.values(), b.values(), task)
    c = task.c
    kind = _index_kind(c, a)
    import torch

    parts = (torch.from_dlpack(part.astype(kind)) for part in (c.indptr, c.indices))
    return torch.sparse_csr_tensor(*parts, values, size=tuple(c.shape), device=a.device, check_invariants=False)


class _Task:
    """A product whose values are differentiated, with matrices on the memory of tensors.

    `c`: the product, once it is made.
    """

    def __init__(
        self, left: Any, right: Any, product: ProductOptions, made_by: Callable[..., Any], device: Any
    ) -> None:
        self.left, self.right, self.product, self.made_by, self.device = left, right, product, made_by, device
        self.c: Any = None

    def forward(self) -> Any:
        """Multiply; return the values of C."""
        self.c = self.made_by(self.left, self.right, self.product).tocsr()
        return self.c.data

    def gradient_of_left(self, change: Any) -> Any:
        """Return the gradient of A's values; `change`: of C's values."""
        return self._at(self.left, self._changed(change), self.right.T.conj().tocsr())

    def gradient_of_right(self, change: Any) -> Any:
        """Return the gradient of B's values; `change`: of C's values."""
        return self._at(self.right, self.left.T.conj().tocsr(), self._changed(change))

    def _changed(self, change: Any) -> Any:
        return type(self.c)((change, self.c.indices, self.c.indptr), shape=self.c.shape)

    def _at(self, pattern: Any, x: Any, y: Any) -> Any:
        """Return the values of ``x @ y`` at the entries of a matrix, in their order; 0 where there is no product."""
        found = self.made_by(x, y, ProductOptions(mask=pattern, sort=True)).tocsr()
        values = module_of(pattern.data).zeros(len(pattern.data), pattern.data.dtype)
        values[_keys(pattern).searchsorted(_keys(found))] = found.data
        return values


def _keys(m: Any) -> Any:
    """Return a number for each entry of a CSR, ascending in a matrix with sorted rows."""
    xp = module_of(m.data)
    rows = xp.searchsorted(m.indptr[1:], xp.arange(len(m.indices)), side="right")
    return rows.astype(np.int64) * m.shape[1] + m.indices


@functools.cache
def _function() -> Any:
    """Return the function of PyTorch's that computes values of C, and gradients of A's and B's values."""
    import torch
    from torch.autograd.function import once_differentiable

    class Product(torch.autograd.Function):  # type: ignore[misc]
        """C's values by A's and B's."""

        @staticmethod
        def forward(ctx: Any, a: Any, b: Any, task: _Task) -> Any:
            ctx.task = task
            with _on_device(a):
                return torch.from_dlpack(task.forward())

        @staticmethod
        @once_differentiable  # type: ignore[untyped-decorator]
        def backward(ctx: Any, change: Any) -> tuple[Any, Any, None]:
            task, wanted = ctx.task, ctx.needs_input_grad
            with _on_device(change):
                given = _array_of(change.contiguous())
                a = torch.from_dlpack(task.gradient_of_left(given)) if wanted[0] else None
                b = torch.from_dlpack(task.gradient_of_right(given)) if wanted[1] else None
            return a, b, None

    return Product


def _by_rows(tensor: Any, name: str) -> Any:
    """Return a sparse tensor in CSR."""
    import torch

    if tensor.layout == torch.strided or tensor.dim() != 2:
        raise MatrixError(
            f"{name} is a tensor of layout {tensor.layout} and shape {tuple(tensor.shape)}: spdist multiplies sparse "
            f"tensors of two dimensions; convert it with .to_sparse_csr()"
        )
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
    values = tensor.values()
    parts = values.detach() if tensor.requires_grad else values, tensor.col_indices(), tensor.crow_indices()
    try:
        if tensor.is_cuda:
            import cupyx.scipy.sparse as csp

            return csp.csr_matrix(tuple(map(_array_of, parts)), shape=tuple(tensor.shape))
        return sp.csr_array(tuple(map(_array_of, parts)), shape=tuple(tensor.shape))
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise MatrixError(f"a tensor of {tensor.dtype} is not multiplied ({error}): convert it with .to(...)") from None


def _array_of(tensor: Any) -> Any:
    """Return the array of NumPy or CuPy on the memory of a dense tensor."""
    if not tensor.is_cuda:
        return tensor.numpy()
    import cupy

    return cupy.from_dlpack(tensor)


def _index_kind(c: Any, like: Any) -> Any:
    """Return the dtype of the indices of C: as another tensor's columns have it, if it is wide enough."""
    import torch

    return np.int32 if like.col_indices().dtype == torch.int32 and c.nnz <= INT32_MAX else np.int64


def _tensor_of(matrix: Any, like: Any) -> Any:
    """Return a tensor on the memory of a matrix in CSR, with columns in the dtype of another tensor's columns."""
    import torch

    c = matrix.tocsr()
    kind = _index_kind(c, like)
    parts = [torch.from_dlpack(part) for part in (c.indptr.astype(kind), c.indices.astype(kind), c.data)]
    return torch.sparse_csr_tensor(*parts, size=tuple(c.shape), device=like.device, check_invariants=False)
