"""Conjugate gradients and PageRank as batch jobs, on real matrices; refusals before anything is written."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import yaml

from spdist import api
from tests.test_parts import dense_pagerank

ROOT = Path(__file__).resolve().parent.parent
FOLDER, DATA = ROOT / "workflows", ROOT / "data"


def load(name: str):
    """Return a workflow as a module."""
    spec = importlib.util.spec_from_file_location(f"workflow_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a function that runs a workflow's job file in a folder of its own, in this process."""
    monkeypatch.chdir(tmp_path)

    def call(name: str, text: dict, *settings: str) -> int:
        Path("job.yaml").write_text(yaml.safe_dump(text))
        return load(name).main(["job.yaml", *(word for setting in settings for word in ("--set", setting))])

    return call


def matrix(name: str) -> sp.csr_matrix:
    return sp.load_npz(DATA / f"{name}.npz").tocsr()


@pytest.mark.parametrize("name", ["1138_bus", "bcsstk16"])
def test_solves_real_systems(job, name):
    m = matrix(name)
    api.save("A.zarr", m)
    b = np.random.default_rng(0).standard_normal(m.shape[0])
    np.save("b.npy", b)
    assert job("conjugate_gradient", {"a": "A.zarr", "b": "b.npy", "x": "x.npy", "rtol": 1e-9}) == 0
    x, report = np.load("x.npy"), json.loads(Path("job.report.json").read_text())
    assert np.linalg.norm(m @ x - b) <= 1e-7 * np.linalg.norm(b)
    assert report["state"] == "done"
    assert report["result"]["relative_residual"] < 1e-7
    assert report["job"]["rtol"] == 1e-9


def test_on_workers_of_a_scheduler(job, scheduler):
    m = matrix("1138_bus")
    api.save("A.zarr", m)
    text = {"a": "A.zarr", "x": "x.npy", "scheduler": scheduler}
    assert job("conjugate_gradient", text) == 0
    assert np.linalg.norm(m @ np.load("x.npy") - 1) <= 1e-6 * np.sqrt(m.shape[0])
    api.save("G.zarr", abs(m))
    assert job("pagerank", {"links": "G.zarr", "ranks": "ranks.npy", "scheduler": scheduler}) == 0
    np.testing.assert_allclose(np.load("ranks.npy"), dense_pagerank(abs(m), 0.85), atol=1e-8)


def test_ranks_packages(job, capsys):
    links = abs(matrix("debian_trixie_deps"))
    api.save("G.zarr", links)
    assert job("pagerank", {"links": "G.zarr", "ranks": "ranks.npy"}, "top=3") == 0
    ranks, report = np.load("ranks.npy"), json.loads(Path("job.report.json").read_text())
    assert abs(ranks.sum() - 1) < 1e-9
    assert [one["node"] for one in report["result"]["top"]] == np.argsort(-ranks, kind="stable")[:3].tolist()
    assert report["result"]["last_change"] <= 1e-10


def test_not_converged(job):
    api.save("A.zarr", matrix("1138_bus"))
    assert job("conjugate_gradient", {"a": "A.zarr", "x": "x.npy"}, "maxiter=2") == 1
    assert json.loads(Path("job.report.json").read_text())["state"] == "not converged"


REFUSED = [
    ("conjugate_gradient", {"x": "x.npy"}, "a is missing"),
    ("conjugate_gradient", {"a": "none.zarr", "x": "x.npy"}, "does not exist"),
    ("conjugate_gradient", {"a": "bus.zarr", "x": "x.npy", "size": 3}, "unknown key 'size'"),
    ("conjugate_gradient", {"a": "bus.zarr", "x": "x.npy", "rtol": 2}, "rtol: 2 is not a number from 0"),
    ("conjugate_gradient", {"a": "bus.zarr", "x": "x.npy", "b": "job.yaml"}, "cannot be read"),
    ("conjugate_gradient", {"a": "bus.zarr", "x": "x.txt"}, "does not end in .npy"),
    ("conjugate_gradient", {"a": "bus.zarr", "x": "no/x.npy"}, "is not a folder"),
    ("conjugate_gradient", {"a": "skew.zarr", "x": "x.npy"}, "is not symmetric"),
    ("conjugate_gradient", {"a": "minus.zarr", "x": "x.npy"}, "not positive definite"),
    (
        "conjugate_gradient",
        {"a": "bus.zarr", "x": "x.npy", "workers": 2, "scheduler": "tcp://x:1"},
        "exclude each other",
    ),
    ("pagerank", {"links": "minus.zarr", "ranks": "r.npy"}, "weights that are negative"),
    ("pagerank", {"links": "wide.zarr", "ranks": "r.npy"}, "a square matrix is needed"),
]


@pytest.mark.parametrize(("name", "text", "message"), REFUSED)
def test_refusals(job, capsys, name, text, message):
    bus = matrix("1138_bus")
    kinds = {"bus": bus, "minus": -bus, "skew": sp.triu(bus).tocsr(), "wide": bus[:5]}
    for kind in kinds:
        if f"{kind}.zarr" in text.values():
            api.save(f"{kind}.zarr", kinds[kind])
    assert job(name, text) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.startswith("job.yaml: ")
    assert errors.count("\n") == 1
    assert not Path("x.npy").exists()


@pytest.mark.parametrize("name", ["conjugate_gradient", "pagerank"])
def test_the_example_is_complete_and_true(name):
    workflow, example = load(name), yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    known = {**workflow.READERS, **sys.modules["vectors"].READERS}
    assert set(example) == set(known)
    defaults = workflow.Job()
    places = {"a", "x", "links", "ranks", "report"}
    assert {key: value for key, value in example.items() if key not in places} == {
        key: getattr(defaults, key) for key in example if key not in places
    }


def test_stopped_by_a_signal(job, monkeypatch, capsys):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("spdist.pagerank", stop)
    api.save("G.zarr", abs(matrix("1138_bus")))
    assert job("pagerank", {"links": "G.zarr", "ranks": "r.npy"}) == 75
    assert "stopped by a signal" in capsys.readouterr().out
    assert not Path("r.npy").exists()


def test_as_a_script(tmp_path):
    api.save(tmp_path / "A.zarr", matrix("1138_bus"))
    (tmp_path / "job.yaml").write_text("a: A.zarr\nx: x.npy\n")
    command = [sys.executable, str(FOLDER / "conjugate_gradient.py"), "job.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert '"converged": true' in done.stdout
