"""The costs by which "auto" chooses, on the CPU, and on a GPU without one."""

import math

import numpy as np
import pytest

from spdist.kernels.spmv.sell.build_gpu import Survey
from spdist.kernels.spmv.sell.format import GPU_LONG
from spdist.kernels.spmv.sell.layout import Sharing, share
from spdist.matrices.csr import CSR
from spdist.operators import estimates
from spdist.operators.estimates import Costs


def counts_of(lengths):
    return np.bincount(np.minimum(lengths, GPU_LONG + 1), minlength=GPU_LONG + 2)


def costs_of(lengths, monkeypatch):
    monkeypatch.setattr(estimates, "device", lambda: 0)
    monkeypatch.setattr(estimates, "bandwidth", lambda number: 3.35e12)
    nnz = int(sum(lengths))
    m = CSR(np.append(0, np.cumsum(lengths)), np.zeros(nnz, np.int32), np.ones(nnz), (len(lengths), 1))
    counts = counts_of(lengths)
    survey = Survey(counts, 0, np.zeros(4, np.int64), 32, share(counts, nnz))
    return estimates.on_gpu(m, survey, 8)


def best(costs, uses):
    return min(costs, key=lambda name: costs[name].total(uses))


def test_few_uses_are_left_as_they_are_and_many_prepared(monkeypatch):
    even = costs_of(np.full(10_000, 5), monkeypatch)
    assert [best(even, uses) for uses in (10, 100, 10_000)] == ["csr", "csr", "sell"]
    skewed = costs_of(np.append(np.full(10_000, 5), np.full(20, 2000)), monkeypatch)
    assert [best(skewed, uses) for uses in (10, 100, 10_000)] == ["cusparse", "cusparse_coo", "sell"]
    assert costs_of(np.append(np.full(10_000, 5), 5000), monkeypatch)["csr"].product > 1e-3


@pytest.mark.parametrize(("lengths", "shared"), [
    (np.full(1000, 5), Sharing(4, 256)),
    (np.full(30_000, 5), Sharing(8, 256)),
    (np.full(60_000, 10), Sharing(16, 256)),
    (np.full(60_000, 30), Sharing(32, 256)),
    (np.full(200_000, 30), Sharing(64, 256)),
    (np.append(np.full(30_000, 5), np.full(150, 3000)), Sharing(8, 256)),
    (np.append(np.full(60_000, 10), np.full(201, 400)), Sharing(8, 512)),
    (np.append(np.full(1_000_000, 5), np.full(201, 2000)), Sharing(16, 2048)),
    (np.append(np.full(5_000_000, 5), np.full(9, 2000)), Sharing(64, 256)),
    (np.zeros(7, int), Sharing(4, 256)),
])  # fmt: skip
def test_lanes_are_shared_by_lengths(lengths, shared):
    assert share(counts_of(lengths), int(lengths.sum())) == shared


@pytest.mark.parametrize(("nnz", "threads", "uses", "form"), [
    (1000, 16, 1_000_000, "scipy"), (1 << 20, 16, 1, "scipy"), (1 << 20, 16, 300, "sell"), (1 << 20, 1, 300, "scipy"),
    (1 << 20, 16, 30, "scipy"), (1 << 20, 1, 100_000, "sell"), (0, 1, 1, "scipy"),
])  # fmt: skip
def test_threads_and_uses_repay_a_conversion_on_the_cpu(nnz, threads, uses, form):
    assert best(estimates.on_cpu(nnz, threads), uses) == form


def test_what_repays_a_preparation():
    assert estimates.repaid_after(Costs(2.0, 1.0), Costs(1.0, 3.0)) == 0.5
    assert estimates.repaid_after(Costs(2.0, 3.0), Costs(1.0, 3.0)) == math.inf
    assert estimates.repaid_after(Costs(1.0, 3.0), Costs(2.0, 1.0)) == 0.0
    told = estimates.compared("sell", {"sell": Costs(1e-3, 1e-6), "csr": Costs(0.0, 2e-6)}, 5000)
    assert told == "sell 1.0 us, csr 2.0 us; its preparation is repaid after 1,000 products"
