"""Products of PyTorch's sparse tensors: those of SciPy's matrices; by PyTorch itself where it is installed."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.errors import InputError, MatrixError
from spdist.inmemory import torch_tensors
from spdist.options import ProductOptions
from tests.conftest import has_gpu, random_matrix
from tests.support import stand_in_torch

INSTALLED = importlib.util.find_spec("torch") is not None
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.fixture(params=["stand-in", *["torch"][:INSTALLED]])
def torch(request, monkeypatch):
    if request.param == "stand-in":
        monkeypatch.setitem(sys.modules, "torch", stand_in_torch.module())
    return __import__("torch")


def tensor(torch, m, index: str = "int64", device: str = "cpu"):
    m = sp.csr_array(m)
    parts = [torch.from_numpy(part) for part in (m.indptr.astype(index), m.indices.astype(index), m.data)]
    return torch.sparse_csr_tensor(*parts, size=m.shape, device=device, check_invariants=False)


A, B = random_matrix(40, 30, 4.0, 1), random_matrix(30, 50, 4.0, 2)


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool", "complex64"])
def test_products_are_scipys(torch, dtype, index):
    a, b = A.astype(dtype), B.astype(dtype)
    c = spdist.spgemm(tensor(torch, a, index), tensor(torch, b, index))
    assert c.layout == torch.sparse_csr
    assert c.col_indices().dtype == c.crow_indices().dtype == getattr(torch, index)
    np.testing.assert_allclose(c.to_dense().numpy(), (a @ b).toarray(), rtol=1e-5)


def test_options_and_other_layouts(torch):
    c = spdist.spgemm(tensor(torch, A).to_sparse_csr(), tensor(torch, B), top_n=2)
    assert np.diff(c.crow_indices().numpy()).max() == 2
    inside = tensor(torch, random_matrix(40, 50, 3.0, 3))
    c = spdist.spgemm(tensor(torch, A), tensor(torch, B), semiring="plus_pair", mask=inside)
    expected = spdist.spgemm(A, B, semiring="plus_pair", mask=random_matrix(40, 50, 3.0, 3))
    np.testing.assert_array_equal(c.to_dense().numpy(), expected.toarray())
    if not isinstance(inside, stand_in_torch.Sparse):
        c = spdist.spgemm(tensor(torch, A).to_sparse_coo(), tensor(torch, B).to_sparse_csc())
        np.testing.assert_allclose(c.to_dense().numpy(), (A @ B).toarray())


def test_memory_is_shared(torch):
    m = A.copy()
    t = tensor(torch, m)
    assert np.shares_memory(t.values().numpy(), m.data)
    before = m.data.copy()
    spdist.spgemm(t, tensor(torch, A.T))
    np.testing.assert_array_equal(m.data, before)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda t: (t, B), "B is a csr_.*not a tensor of PyTorch"),
        (lambda t: (A, t), "A is a csr_.*not a tensor of PyTorch"),
        (lambda t: (t.to_dense(), t), r"layout torch.strided and shape \(40, 30\).*to_sparse_csr"),
        (lambda t: (t, t), "shapes do not fit: A is 40 x 30"),
    ],
)
def test_what_is_no_operand(torch, make, says):
    with pytest.raises(MatrixError, match=says):
        spdist.spgemm(*make(tensor(torch, A)))


def test_a_dtype_that_numpy_lacks(torch):
    t = tensor(torch, A)
    t = t.to(torch.bfloat16) if hasattr(t, "to") else tensor(torch, A.astype(np.longdouble))
    with pytest.raises(MatrixError, match=r"is not multiplied \(Got unsupported ScalarType BFloat16\)"):
        spdist.spgemm(t, t)


MASK = random_matrix(40, 50, 9.0, 5)
CUTS = [{}, {"mask": MASK}, {"mask": MASK, "complement": True}, {"top_n": 3}, {"threshold": 0.5}]


@pytest.mark.parametrize("options", CUTS)
def test_gradients_are_products_at_the_entries(options):
    """The change of a weighted sum of C's values, which is linear in A and in B."""
    a, b = (sp.csr_array(m).astype(float) for m in (A, B))
    product = ProductOptions(**options)
    task = torch_tensors._Task(a, b, product, spgemm_of(product), "cpu")
    weights = np.random.default_rng(0).standard_normal(len(task.forward()))
    kept = task.c.copy()
    kept.data = weights
    for grown, found in (
        (lambda change: type(a)((change, a.indices, a.indptr), shape=a.shape) @ b, task.gradient_of_left(weights)),
        (lambda change: a @ type(b)((change, b.indices, b.indptr), shape=b.shape), task.gradient_of_right(weights)),
    ):
        change = np.random.default_rng(1).standard_normal(len(found))
        assert found @ change == pytest.approx((kept * grown(change)).sum())
        assert np.count_nonzero(found) > 9


def spgemm_of(product):
    """Multiply as `spdist.spgemm` does, with options as it hands them on."""

    def made_by(a, b, product):
        return spdist.spgemm(a, b, mask=product.mask, complement=product.complement, top_n=product.top_n,
                             threshold=product.threshold)  # fmt: skip

    return made_by


@pytest.mark.skipif(not INSTALLED, reason="needs PyTorch")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", CUTS[:3])
def test_gradients_pass_gradcheck(device, options):
    import torch

    from spdist.torch import spgemm

    a, b = (tensor(torch, sp.csr_array(m).astype(float), device=device) for m in (A[:9, :8], B[:8, :7]))
    options = {name: value[:9, :7] if name == "mask" else value for name, value in options.items()}
    if "mask" in options:
        options["mask"] = tensor(torch, options["mask"].tocsr(), device=device)

    def values_of_c(x, y):
        left, right = (
            torch.sparse_csr_tensor(m.crow_indices(), m.col_indices(), values, m.shape)
            for m, values in ((a, x), (b, y))
        )
        return spgemm(left, right, **options).values()

    values = [m.values().clone().requires_grad_() for m in (a, b)]
    assert torch.autograd.gradcheck(values_of_c, values)
    for kind in (torch.float32, torch.float64):
        left, right = (m.detach().to(kind).requires_grad_() for m in (a, b))
        c = spgemm(left, right)
        assert c.requires_grad
        c.values().sum().backward()
        wanted = torch.ones(9, 7, dtype=kind, device=device) @ b.to(kind).to_dense().T
        there = a.to_dense() != 0
        found = left.grad.to_dense()
        torch.testing.assert_close(found[there], wanted[there])


@pytest.mark.skipif(not INSTALLED, reason="needs PyTorch")
def test_products_without_a_gradient():
    import torch

    a, b = (tensor(torch, sp.csr_array(m).astype(float)).requires_grad_() for m in (A, B))
    with pytest.raises(InputError, match=r"gradients are of products over plus_times.*a\.detach\(\)"):
        spdist.spgemm(a, b, semiring="max_times")
    assert not spdist.spgemm(a.detach(), b.detach(), semiring="max_times").requires_grad
    parts = (torch.tensor(part) for part in ([0, 2], [1, 0], [1.0, 2.0]))
    unsorted = torch.sparse_csr_tensor(*parts, size=(1, 40), dtype=torch.float64).requires_grad_()
    with pytest.raises(MatrixError, match="A has rows that are not sorted, or duplicates"):
        spdist.spgemm(unsorted, a)


@pytest.mark.skipif(not (INSTALLED and has_gpu()), reason="needs PyTorch, CuPy and a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_tensors_on_a_gpu(index):
    import torch

    a, b = (tensor(torch, m, index).to("cuda") for m in (A, B))
    c = spdist.spgemm(a, b)
    assert c.is_cuda
    assert c.col_indices().dtype == getattr(torch, index)
    np.testing.assert_allclose(c.to_dense().cpu().numpy(), (A @ B).toarray())
    with pytest.raises(MatrixError, match="A is on cuda:0, B on cpu"):
        spdist.spgemm(a, b.cpu())
