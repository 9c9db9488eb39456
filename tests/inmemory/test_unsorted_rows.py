"""Products in memory with ``sort=False``: what SciPy takes them for, which calls take the keyword, and which refuse."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.errors import InputError
from spdist.inmemory import through_gpu
from tests.conftest import random_matrix
from tests.inmemory.test_torch_tensors import tensor
from tests.support import stand_in_torch
from tests.support.host_device import HostDevice

METHODS = ["auto", "numba", "scipy"]


def same(c: Any, d: Any) -> bool:
    """Whether two matrices have the same bits."""
    return all(getattr(c, part).tobytes() == getattr(d, part).tobytes() for part in ("indptr", "indices", "data"))


def unsorted_operand(nrows: int, ncols: int, index: Any, least: int) -> Any:
    """Return a matrix with duplicates, empty rows, rows that are not sorted, and values from `least` to 3."""
    rng = np.random.default_rng(7)
    indptr = np.append(0, np.cumsum(rng.integers(0, 9, nrows))).astype(index)
    indices = rng.integers(0, max(ncols, 1), indptr[-1]).astype(index)
    data = rng.integers(least, 4, indptr[-1]).astype(np.float64)
    m = sp.csr_array((data, indices, indptr), shape=(nrows, ncols))
    m.indptr, m.indices = indptr, indices
    return m


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("least", [1, -3])
def test_scipy_goes_on_with_unsorted_rows(method, index, least):
    a, b = unsorted_operand(200, 150, index, least), unsorted_operand(150, 300, index, least)
    c, expected = spdist.spgemm(a, b, method, sort=False), spdist.spgemm(a, b, method)
    if method == "numba" or least > 0:  # SciPy leaves out zeros, and rows that get them back are sorted
        assert not c.has_sorted_indices
        assert not c.has_canonical_format
    assert expected.has_sorted_indices
    assert expected.has_canonical_format
    assert (c != expected).nnz == 0
    assert same((c + c).sorted_indices(), (expected + expected).sorted_indices())
    assert c[17, 40] == expected[17, 40]
    np.testing.assert_array_equal(c[3:90, [5, 1, 7]].toarray(), expected[3:90, [5, 1, 7]].toarray())
    np.testing.assert_array_equal(c.toarray(), (a @ b).toarray())
    summed = c.copy()
    summed.sum_duplicates()
    assert same(summed, expected)
    c.sort_indices()
    assert same(c, expected)
    assert c.has_sorted_indices


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(0, 0, 0), (0, 3, 4), (4, 3, 0), (4, 0, 5)])
def test_shapes_without_entries(method, shape):
    a, b = (sp.csr_array(one) for one in itertools.pairwise(shape))
    c = spdist.spgemm(a, b, method, sort=False)
    assert c.shape == (shape[0], shape[2])
    assert c.nnz == 0
    assert c.has_canonical_format


@pytest.mark.parametrize("form", ["csr", "csc"])
def test_threads_and_formats(form):
    a = random_matrix(3000, 3000, 20.0, 1).asformat(form)
    c, expected = spdist.spgemm(a, a, "numba", threads=1, sort=False), spdist.spgemm(a, a, "numba")
    assert c.format == form
    assert not c.has_sorted_indices
    for threads in (2, 5):
        assert same(spdist.spgemm(a, a, "numba", threads=threads, sort=False), c)
    c.sort_indices()
    assert same(c, expected)


@pytest.mark.parametrize(
    "options", [{"mask": True}, {"top_n": 3}, {"top_n": 3, "axis": 0}, {"threshold": 0.5}], ids=str
)
def test_options_that_sort_all_the_same(options):
    a = random_matrix(300, 300, 8.0, 1)
    options = {**options, **({"mask": random_matrix(300, 300, 20.0, 2)} if "mask" in options else {})}
    c = spdist.spgemm(a, a, **options, sort=False)
    assert c.has_sorted_indices
    assert same(c, spdist.spgemm(a, a, **options))


def test_blocks_and_the_gpu_sort_all_the_same(monkeypatch):
    monkeypatch.setattr(through_gpu, "check_gpu", lambda method: None)
    monkeypatch.setattr(through_gpu, "_gpu", lambda limit, deterministic=False: HostDevice(limit))
    a = random_matrix(300, 300, 8.0, 1)
    assert same(spdist.spgemm(a, a, "cuda", memory_limit=1 << 20, sort=False), spdist.spgemm(a, a))
    blocks = sp.bsr_array(random_matrix(300, 300, 3.0, 1), blocksize=(3, 3))
    assert same(spdist.spgemm(blocks, blocks, sort=False), spdist.spgemm(blocks, blocks))


def test_tensors_have_sorted_rows(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", stand_in_torch.module())
    import torch

    a = random_matrix(300, 300, 8.0, 1)
    c = spdist.spgemm(tensor(torch, a), tensor(torch, a), sort=False)
    np.testing.assert_array_equal(c.col_indices().numpy(), spdist.spgemm(a, a).indices)


def test_matmul_takes_it_in_memory_and_refuses_it_for_a_stored_product(tmp_path):
    a = random_matrix(300, 300, 8.0, 1)
    assert same(spdist.matmul(a, a, sort=False), spdist.spgemm(a, a, sort=False))
    spdist.save(tmp_path / "A.zarr", a)
    for operand in (a, tmp_path / "A.zarr"):
        with pytest.raises(InputError, match="sort=False: rows of a stored matrix are sorted; leave sort out, or"):
            spdist.matmul(operand, operand, tmp_path / "C.zarr", sort=False)
    assert not (tmp_path / "C.zarr").exists()
    assert same(spdist.matmul(a, a, tmp_path / "C.zarr", sort=True).to_scipy(), spdist.spgemm(a, a))


def test_what_is_no_bool_is_refused():
    a = random_matrix(30, 30, 3.0, 1)
    with pytest.raises(InputError, match="sort='column' is neither True nor False"):
        spdist.spgemm(a, a, sort="column")
