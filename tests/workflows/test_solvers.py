"""Conjugate gradients and PageRank as jobs, on shipped matrices; refusals before anything is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from tests.conftest import WORKFLOWS
from tests.operators.test_partitioned import dense_pagerank

DATA = WORKFLOWS.parent / "data"


def matrix(name: str) -> sp.csr_matrix:
    return sp.load_npz(DATA / f"{name}.npz").tocsr()


@pytest.mark.parametrize("name", ["1138_bus", "bcsstk16"])
def test_solves_real_systems(run_job, name):
    m = matrix(name)
    spdist.save("A.zarr", m)
    b = np.random.default_rng(0).standard_normal(m.shape[0])
    np.save("b.npy", b)
    report = run_job("conjugate_gradient", a="A.zarr", b="b.npy", out="x.npy", rtol=1e-9)
    assert np.linalg.norm(m @ np.load("x.npy") - b) <= 1e-7 * np.linalg.norm(b)
    assert report["result"]["relative_residual"] < 1e-7


def test_on_workers_of_a_scheduler(run_job, scheduler):
    m = matrix("1138_bus")
    spdist.save("A.zarr", m)
    run_job("conjugate_gradient", a="A.zarr", out="x.npy", scheduler=scheduler)
    assert np.linalg.norm(m @ np.load("x.npy") - 1) <= 1e-6 * np.sqrt(m.shape[0])
    spdist.save("G.zarr", abs(m))
    run_job("pagerank", a="G.zarr", out="ranks.npy", scheduler=scheduler)
    np.testing.assert_allclose(np.load("ranks.npy"), dense_pagerank(abs(m), 0.85), atol=1e-8)


def test_ranks_packages(run_job):
    spdist.save("G.zarr", abs(matrix("debian_trixie_deps")))
    result = run_job("pagerank", a="G.zarr", out="ranks.npy", top=3)["result"]
    ranks = np.load("ranks.npy")
    assert abs(ranks.sum() - 1) < 1e-9
    assert [one["node"] for one in result["top"]] == np.argsort(-ranks, kind="stable")[:3].tolist()
    assert result["residual"] <= 1e-10


def test_not_converged(run_job):
    spdist.save("A.zarr", matrix("1138_bus"))
    report = run_job("conjugate_gradient", 1, a="A.zarr", out="x.npy", maxiter=2)
    assert report["state"] == "failed"
    assert "after 2 iterations; raise maxiter" in report["error"]
    assert (report["result"]["converged"], report["result"]["iterations"]) == (False, 2)


BEYOND = {"nan.zarr": np.nan, "inf.zarr": np.inf}
REFUSED = [
    ("conjugate_gradient", {"a": "bus.zarr", "rtol": 2}, "rtol: 2 is not a number from 0"),
    ("conjugate_gradient", {"a": "bus.zarr", "b": "job.yaml"}, "cannot be read"),
    ("conjugate_gradient", {"a": "bus.zarr", "b": "short.npy"}, "1,138 finite real numbers are needed"),
    ("conjugate_gradient", {"a": "bus.zarr", "memory_limit": "20KiB"}, "more than memory_limit=20KiB"),
    ("conjugate_gradient", {"a": "skew.zarr"}, "is not symmetric"),
    ("conjugate_gradient", {"a": "minus.zarr"}, "not positive definite"),
    ("conjugate_gradient", {"a": "nan.zarr"}, "infinite or no numbers"),
    ("conjugate_gradient", {"a": "bus.zarr", "b": "nan.npy"}, "1,138 finite real numbers are needed"),
    ("pagerank", {"a": "minus.zarr"}, "weights that are negative"),
    ("pagerank", {"a": "nan.zarr"}, "infinite or no numbers"),
    ("pagerank", {"a": "inf.zarr"}, "infinite or no numbers"),
    ("pagerank", {"a": "wide.zarr"}, "a square matrix is needed"),
]


@pytest.mark.parametrize(("name", "keys", "message"), REFUSED)
def test_refusals(run_job, capsys, name, keys, message):
    bus = matrix("1138_bus")
    kinds = {"bus.zarr": bus, "minus.zarr": -bus, "skew.zarr": sp.triu(bus).tocsr(), "wide.zarr": bus[:5]}
    kinds |= {name: abs(bus) + sp.csr_matrix(([value], ([0], [1])), bus.shape) for name, value in BEYOND.items()}
    spdist.save(keys["a"], kinds[keys["a"]])
    np.save("short.npy", np.ones(3))
    np.save("nan.npy", np.full(bus.shape[0], np.nan))
    run_job(name, 2, out="x.npy", **keys)
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.startswith("job.yaml: ")
    assert errors.count("\n") == 1
    assert not Path("x.npy").exists()
