"""As much of PyTorch as `spdist` asks of it, on arrays of NumPy: PyTorch itself is too large for tests."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import scipy.sparse as sp


class Dense:
    """A dense tensor."""

    is_cuda, requires_grad, layout, device = False, False, "torch.strided", "cpu"
    __module__ = "torch"

    def __init__(self, array: Any) -> None:
        self.array, self.dtype, self.shape = array, f"torch.{array.dtype}", array.shape

    def numpy(self) -> Any:
        if self.array.dtype == np.longdouble:  # stands for bfloat16
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array

    def dim(self) -> int:
        return self.array.ndim


class Sparse(Dense):
    """A sparse tensor, in CSR or in another layout."""

    __module__ = "torch"

    def __init__(self, crow: Dense, col: Dense, values: Dense, size: tuple[int, int], layout: str) -> None:
        self.crow, self.col, self.data, self.shape, self.layout = crow, col, values, size, layout
        self.dtype = values.dtype

    def dim(self) -> int:
        return 2

    def to_sparse_csr(self) -> Sparse:
        return Sparse(self.crow, self.col, self.data, self.shape, "torch.sparse_csr")

    def to_sparse_csc(self) -> Sparse:
        return Sparse(self.crow, self.col, self.data, self.shape, "torch.sparse_csc")

    def to_dense(self) -> Dense:
        parts = self.data.array, self.col.array, self.crow.array
        return Dense(sp.csr_array(parts, shape=self.shape).toarray())

    def crow_indices(self) -> Dense:
        return self.crow

    def col_indices(self) -> Dense:
        return self.col

    def values(self) -> Dense:
        return self.data

    def requires_grad_(self) -> Sparse:
        self.requires_grad = True
        return self


def module() -> Any:
    """Return the module that is imported as `torch`."""
    torch: Any = ModuleType("torch")
    torch.strided, torch.sparse_csr, torch.sparse_csc = "torch.strided", "torch.sparse_csr", "torch.sparse_csc"
    torch.int32, torch.int64 = "torch.int32", "torch.int64"
    torch.from_numpy = torch.from_dlpack = Dense

    def sparse_csr_tensor(
        crow: Dense, col: Dense, values: Dense, *, size: Any, device: str, check_invariants: bool
    ) -> Any:
        return Sparse(crow, col, values, size, "torch.sparse_csr")

    torch.sparse_csr_tensor = sparse_csr_tensor
    return torch
