"""Products of sparse tensors of PyTorch, differentiable: `spgemm` is `spdist.spgemm`, which takes them."""

from spdist.inmemory.spgemm import spgemm

__all__ = ["spgemm"]
