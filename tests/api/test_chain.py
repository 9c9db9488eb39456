"""Chains: the same product in the order of fewest products, in memory and stored; what is estimated, what stays."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.api.chain import multiply_chain
from spdist.errors import InputError, SpdistError
from spdist.jobs.chain_order import plan_chain
from spdist.matrices.csr import from_scipy
from spdist.options import ExecutionOptions, OutputOptions
from spdist.scheduler.execution import stages
from tests.conftest import random_matrix
from tests.scheduler.execution.test_driver import read
from tests.scheduler.execution.test_product_spec import assert_same, whole_numbers


def galerkin(dtype: str = "float64") -> list[sp.csr_matrix]:
    """Return R, A and P of a level of multigrid with aggregates of 8 points."""
    n = 16
    one = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
    eye = sp.eye_array(n)
    a = sp.kron(sp.kron(one, eye), eye) + sp.kron(sp.kron(eye, one), eye) + sp.kron(sp.kron(eye, eye), one)
    half = sp.kron(sp.eye_array(n // 2), np.ones((2, 1)))
    p = sp.kron(sp.kron(half, half), half)
    return [sp.csr_matrix(m.astype(dtype)) for m in (p.T, a, p)]


def multiply_stored(places, target, scheduler, in_memory_share=0.0, **output):
    """Multiply a stored chain, in memory up to a share of the memory limit."""
    return multiply_chain(
        places, target, ExecutionOptions(scheduler=scheduler), OutputOptions(**output), in_memory_share
    )


def products(a: sp.csr_matrix, b: sp.csr_matrix) -> int:
    return int(np.diff(a.tocsc().indptr) @ np.diff(b.tocsr().indptr))


def test_two_orders_are_told_apart():
    narrow, wide = random_matrix(2_000, 20, 3, 1), random_matrix(20, 2_000, 200, 2)
    assert plan_chain([from_scipy(m) for m in (narrow, wide, narrow)]).order == (0, (1, 2))
    assert plan_chain([from_scipy(m) for m in (wide, narrow, wide)]).order == ((0, 1), 2)


@pytest.mark.parametrize("seed", range(3))
def test_estimates_are_near(seed):
    a, b, c = (random_matrix(3_000, 3_000, 3, seed + i) for i in range(3))
    ones = [sp.csr_matrix((np.ones(m.nnz), m.indices, m.indptr), m.shape) for m in (a, b, c)]
    left, right = ones[0] @ ones[1], ones[1] @ ones[2]
    found = plan_chain([from_scipy(m) for m in (a, b, c)])
    for part, exact in (((0, 1), left), ((1, 2), right), ((0, 2), left @ ones[2])):
        assert found.nnz[part] == pytest.approx(exact.nnz, rel=0.1)
    orders = {
        ((0, 1), 2): products(a, b) + products(left, c),
        (0, (1, 2)): products(b, c) + products(a, right),
    }
    assert found.products == pytest.approx(orders[found.order], rel=0.1)
    assert orders[found.order] <= 1.1 * min(orders.values())


def test_in_memory():
    r, a, p = galerkin()
    assert_same(from_scipy(spdist.multi_matmul([r, a, p])), spdist.spgemm(spdist.spgemm(r, a), p))
    four = [whole_numbers(30, 30, 4, seed) for seed in range(4)]
    expected = four[0] @ four[1] @ four[2] @ four[3]
    assert (spdist.multi_matmul(four) != expected).nnz == 0
    assert (spdist.multi_matmul(four[:2]) != four[0] @ four[1]).nnz == 0


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_stored(stored, tmp_path, scheduler, share):
    """Multiply in memory if the chain fits, else from storage to storage; leave nothing but the product."""
    matrices = galerkin()
    for name, m in zip("RAP", matrices, strict=True):
        stored(name, m)
    places = [tmp_path / f"{name}.zarr" for name in "RAP"]
    c = multiply_stored(places, tmp_path / "C.zarr", scheduler, share)
    assert_same(c.rows(0, c.nrows), spdist.multi_matmul(matrices))
    assert {path.name for path in tmp_path.iterdir()} == {"R.zarr", "A.zarr", "P.zarr", "C.zarr"}
    with pytest.raises(InputError, match="exists"):
        multiply_stored(places, tmp_path / "C.zarr", scheduler, share)
    multiply_stored(places, tmp_path / "C.zarr", scheduler, share, overwrite=True)


def test_what_was_finished_is_not_made_again(stored, tmp_path, scheduler, monkeypatch):
    places = [stored(name, m) for name, m in zip("RAP", galerkin(), strict=True)]
    commit, calls = stages.commit, []

    def failing(context, task, *rest):
        calls.append(context.job.a.url)
        if len(calls) > 1:
            raise OSError(5, "the disk is gone")
        return commit(context, task, *rest)

    monkeypatch.setitem(stages.STAGES, "commit", failing)
    with pytest.raises(SpdistError, match="the disk is gone"):
        multiply_stored(places, tmp_path / "C.zarr", scheduler)
    monkeypatch.setitem(
        stages.STAGES, "commit", lambda context, *rest: calls.append(context.job.a.url) or commit(context, *rest)
    )
    calls.clear()
    multiply_stored(places, tmp_path / "C.zarr", scheduler, resume=True)
    assert len(calls) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"R.zarr", "A.zarr", "P.zarr", "C.zarr"}
    assert_same(read(tmp_path / "C.zarr"), spdist.multi_matmul(galerkin()))


def test_refusals(stored, tmp_path):
    m, other = random_matrix(9, 8, 3, 1), random_matrix(9, 9, 3, 1)
    a = stored("A", m)
    with pytest.raises(InputError, match="pass two at least"):
        spdist.multi_matmul([m])
    with pytest.raises(InputError, match="matrix 1 is 9 x 8 and matrix 2 is 9 x 9"):
        spdist.multi_matmul([other, m, other])
    with pytest.raises(InputError, match="some matrices are in memory"):
        spdist.multi_matmul([m, a], tmp_path / "C.zarr")
    with pytest.raises(InputError, match="say where"):
        spdist.multi_matmul([a, a])
