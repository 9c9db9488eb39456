"""The workflows on shipped matrices, each against another way to the same answer."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import yaml
from scipy.sparse.csgraph import connected_components, shortest_path

import spdist
from spdist.options import FileKeywords
from spdist.scheduler.executors.clients import local_cluster
from tests.conftest import WORKFLOWS, load_workflow
from tests.scheduler.execution.test_driver import read

DATA = WORKFLOWS.parent / "data"
NAMES = ("similarity", "cooccurrence", "triangles", "galerkin", "shortest_paths", "markov_clustering")


def genes(rows: int = 1_500) -> sp.csr_array:
    """Return some genes x the terms they have."""
    m = sp.csr_array(sp.load_npz(DATA / "human_gene_GO.npz"))[:rows]
    return m[:, np.flatnonzero(np.diff(m.tocsc().indptr) > 5)]


def left_beside(*names: str) -> None:
    """Check that a job left nothing but these."""
    assert {path.name for path in Path().iterdir()} == {"job.yaml", "job.report.json", *names}


@pytest.mark.parametrize("name", [*NAMES, "conjugate_gradient", "pagerank"])
def test_examples_name_every_key(name):
    workflow = load_workflow(name)
    example = yaml.safe_load((WORKFLOWS / f"{name}.yaml").read_text())
    fields = dataclasses.fields(workflow.Job)
    assert set(example) == {one.name for one in fields}
    defaults = {one.name: one.default for one in fields if one.default is not dataclasses.MISSING}
    assert {key: value for key, value in example.items() if key in defaults} == defaults


def test_examples_explain_a_key_in_the_same_words():
    found: dict[str, set[str]] = {}
    for name in (*NAMES, "multiply"):
        for key, words in re.findall(r"^(\w+):[^#\n]*# (.*)$", (WORKFLOWS / f"{name}.yaml").read_text(), re.MULTILINE):
            found.setdefault(key, set()).add(words)
    same = ("memory_limit", "host_limit", "workers", "scheduler", "scheduler_file", "read", "steal", "overwrite")
    assert {key: len(found[key]) for key in same} == dict.fromkeys(same, 1)


@pytest.mark.parametrize("name", ["similarity", "cooccurrence", "shortest_paths", "markov_clustering", "pagerank"])
def test_keys_have_the_defaults_of_calls(name):
    parameters = inspect.signature(getattr(spdist, name)).parameters
    keys = [one for one in dataclasses.fields(load_workflow(name).Job) if one.default is not dataclasses.MISSING]
    shared = {one.name: one.default for one in keys if one.name in parameters}
    assert {key for key, default in shared.items() if default != parameters[key].default} <= {"resume"}
    assert set(sys.modules["job_file"].READING) == set(FileKeywords.__annotations__)


def test_similarity_of_genes(run_job):
    m = genes()
    spdist.save("A.zarr", m)
    report = run_job("similarity", a="A.zarr", out="C.zarr", top_n=5, threshold=0.4)
    assert report["result"]["verification"]["ok"]
    left_beside("A.zarr", "C.zarr")
    unit = m / np.sqrt(m.power(2).sum(axis=1))[:, None]
    cosines = (unit @ unit.T).toarray()
    np.fill_diagonal(cosines, -1)
    found = read("C.zarr").to_scipy().toarray()
    best = -np.sort(-cosines, axis=1)[:, :5]
    np.testing.assert_allclose(-np.sort(-found, axis=1)[:, :5], np.where(best >= 0.4, best, 0), atol=1e-12)
    np.testing.assert_allclose(found[found > 0], cosines[found > 0], rtol=1e-12)


def test_similarity_by_inner_products(run_job):
    m = genes(300)
    spdist.save("A.zarr", m)
    run_job("similarity", a="A.zarr", out="C.zarr", top_n=m.shape[0], metric="inner_product")
    expected = (m @ m.T).toarray()
    np.fill_diagonal(expected, 0)
    np.testing.assert_allclose(read("C.zarr").to_scipy().toarray(), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("similarity", {}), ("cooccurrence", {}), ("galerkin", {"p": "A.zarr"}), ("shortest_paths", {}),
        ("markov_clustering", {}),
    ],
)  # fmt: skip
def test_jobs_pass_steal_on(run_job, monkeypatch, name, keys):
    given = []

    def call(*matrices, **options):
        given.append(options["steal"])
        raise spdist.SpdistError("far enough")

    monkeypatch.setattr(spdist, "multi_matmul" if name == "galerkin" else name, call)
    spdist.save("A.zarr", sp.eye_array(4).tocsr())
    for steal in (False, True):
        run_job(name, code=1, a="A.zarr", out="C", steal=steal, **keys)
    assert given == [False, True]


@pytest.mark.parametrize("measure", ["count", "pmi"])
def test_terms_that_occur_together(run_job, measure):
    m = genes(600)
    spdist.save("A.zarr", m)
    keys = {"threshold": 0.5} if measure == "pmi" else {"top_n": 20}
    report = run_job("cooccurrence", a="A.zarr", out="C.zarr", measure=measure, **keys)
    assert report["result"]["verification"]["ok"]
    left_beside("A.zarr", "C.zarr")
    shared = (m.T @ m).toarray()
    own = shared.diagonal().copy()
    np.fill_diagonal(shared, 0)
    found = read("C.zarr").to_scipy().toarray()
    if measure == "count":
        best = -np.sort(-shared, axis=1)[:, :20]
        np.testing.assert_array_equal(-np.sort(-found, axis=1)[:, :20], best)
        return
    with np.errstate(divide="ignore"):
        pmi = np.log(shared * m.shape[0] / np.outer(own, own))
    np.testing.assert_allclose(found, np.where(pmi >= 0.5, pmi, 0), atol=1e-12)


def test_triangles_of_a_mesh(run_job):
    a = sp.csr_array(sp.load_npz(DATA / "brack2.npz"))
    spdist.save("A.zarr", a)
    report = run_job("triangles", a="A.zarr", out="triangles.json")
    a = (a - sp.diags_array(a.diagonal())).tocsr()  # a pattern of ones
    assert json.loads(Path("triangles.json").read_text()) == report["result"]
    assert report["result"]["triangles"] == (a @ a).multiply(a).sum() // 6
    left_beside("A.zarr", "triangles.json")


@pytest.mark.parametrize("given", [False, True])
def test_galerkin_product_of_a_mesh(run_job, given):
    graph = sp.csr_array(sp.load_npz(DATA / "brack2.npz"))
    a = sp.csr_array(sp.diags_array(graph.sum(axis=1)) - graph)
    n = a.shape[0]
    p = sp.csr_array((np.ones(n), np.arange(n) // 8, np.arange(n + 1)), shape=(n, -(-n // 8)))
    spdist.save("A.zarr", a), spdist.save("P.zarr", p)
    keys = {}
    if given:
        spdist.save("R.zarr", p.T)
        keys["r"] = "R.zarr"
    report = run_job("galerkin", a="A.zarr", p="P.zarr", out="C.zarr", **keys)
    assert abs(read("C.zarr").to_scipy() - p.T @ a @ p).max() == 0
    assert report["result"]["rows"] == p.shape[1]
    left_beside("A.zarr", "P.zarr", "C.zarr", *(["R.zarr"] if given else []))


@pytest.mark.parametrize("keys", [{}, {"sources": [3, 400]}, {"hops": 3}, {"hops": 5, "sources": [0]}], ids=str)
def test_shortest_paths_of_a_power_network(run_job, keys):
    m = sp.csr_array(abs(sp.load_npz(DATA / "1138_bus.npz")))
    m = m[:500, :500]
    m.data = 1 + np.floor(m.data % 97)  # whole lengths: the same in any order
    spdist.save("A.zarr", m)
    run_job("shortest_paths", a="A.zarr", out="C.zarr", **keys)
    found = read("C.zarr").to_scipy()
    dense = np.full(found.shape, np.inf)
    dense[np.repeat(np.arange(found.shape[0]), np.diff(found.indptr)), found.indices] = found.data
    rows = keys.get("sources", range(m.shape[0]))
    np.testing.assert_array_equal(dense, hops_of(m, keys["hops"])[rows] if "hops" in keys else shortest_path(m)[rows])
    left_beside("A.zarr", "C.zarr")


def hops_of(m: sp.csr_array, hops: int) -> np.ndarray:
    """Return lengths of shortest paths of at most some hops: one relaxation of all edges after another."""
    best = np.where(np.eye(m.shape[0]) > 0, 0, np.inf)
    entries = m.tocoo()
    for _ in range(hops):
        after = best.copy()
        for i, j, length in zip(entries.row, entries.col, entries.data, strict=True):
            after[:, j] = np.minimum(after[:, j], best[:, i] + length)
        best = after
    return best


def test_markov_clusters_of_a_power_network(run_job):
    m = sp.csr_array(sp.load_npz(DATA / "1138_bus.npz"))[:400, :400]
    m.data[:] = 1
    spdist.save("A.zarr", m)
    report = run_job("markov_clustering", a="A.zarr", out="clusters.txt")
    labels = labels_in("clusters.txt", 400)
    left_beside("A.zarr", "clusters.txt")
    walks = m.toarray()
    walks /= walks.sum(axis=1)[:, None]
    for _ in range(report["result"]["steps"]):
        walks = walks @ walks
        walks[walks < 1e-4] = 0
        walks **= 2
        walks /= walks.sum(axis=1)[:, None]
    count, expected = connected_components(sp.csr_array(walks), directed=False)
    assert report["result"]["clusters"] == count
    assert len({*zip(labels, expected, strict=True)}) == count


def labels_in(file: str, n: int) -> np.ndarray:
    """Return the line on which each vertex is."""
    labels = np.full(n, -1)
    for number, line in enumerate(Path(file).read_text().splitlines()):
        labels[[int(vertex) for vertex in line.split("\t")]] = number
    assert (labels >= 0).all()
    return labels


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shortest_paths", "similarity"])
def test_workers_start_once_for_all_steps(run_job, monkeypatch, name):
    spdist.save("A.zarr", abs(sp.csr_array(sp.load_npz(DATA / "1138_bus.npz"))[:100, :100]))
    alone = run_job(name, a="A.zarr", out="alone")
    started, start = [], local_cluster.local_cluster
    monkeypatch.setattr(local_cluster, "local_cluster", lambda *args: started.append(args) or start(*args))
    assert run_job(name, a="A.zarr", out="C", workers=2)["state"] == alone["state"]
    assert [count for count, *_ in started] == [2]
    np.testing.assert_array_equal(*(read(out).data for out in ("alone", "C")))


def test_markov_clusters_after_too_few_steps(run_job, capsys):
    spdist.save("A.zarr", abs(sp.csr_array(sp.load_npz(DATA / "1138_bus.npz"))[:100, :100]))
    report = run_job("markov_clustering", code=1, a="A.zarr", out="clusters.txt", steps=2)
    assert (report["state"], report["result"]["converged"], report["result"]["steps"]) == ("failed", False, 2)
    assert "not converged: the last chaos is" in capsys.readouterr().out
    labels_in("clusters.txt", 100)
    left_beside("A.zarr", "clusters.txt")
    report = run_job("markov_clustering", a="A.zarr", out="clusters.txt")  # the clusters are its own
    assert report["result"]["converged"]


@pytest.mark.parametrize("name", ["triangles", "markov_clustering", "shortest_paths"])
@pytest.mark.parametrize("shape", [(5, 9), (9, 5)])
def test_graphs_are_square(run_job, capsys, name, shape):
    spdist.save("A.zarr", sp.random_array(shape, density=0.5, format="csr", random_state=0))
    run_job(name, code=2, a="A.zarr", out="C")
    errors = capsys.readouterr().err
    assert errors.startswith("job.yaml: ")
    assert errors.count("\n") == 1
    assert f"{shape[0]} x {shape[1]}; a square matrix is needed" in errors
    assert {path.name for path in Path().iterdir()} == {"A.zarr", "job.yaml"}


@pytest.mark.parametrize(("keys", "message"), [({"p": "wide.zarr"}, "5"), ({"r": "wide.zarr"}, "9")], ids=str)
def test_a_chain_that_does_not_fit_is_refused(run_job, capsys, keys, message):
    a, p = sp.eye_array(9).tocsr(), sp.csr_array(np.ones((9, 2)))
    spdist.save("A.zarr", a), spdist.save("P.zarr", p), spdist.save("wide.zarr", sp.csr_array(np.ones((9, 5))[:5]))
    run_job("galerkin", code=2, **({"a": "A.zarr", "p": "P.zarr", "out": "C.zarr"} | keys))
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert message in errors


def test_a_stopped_job_goes_on_with_its_step(run_job, monkeypatch):
    m = sp.csr_array(abs(sp.load_npz(DATA / "1138_bus.npz")))[:300, :300]
    spdist.save("A.zarr", m)
    multiply, calls = spdist.multiply, []

    def stopping(*args, **options):
        calls.append(args[2])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return multiply(*args, **options)

    application = importlib.import_module("spdist.applications.shortest_paths")
    monkeypatch.setattr(application, "api", SimpleNamespace(multiply=stopping, save=spdist.save))
    assert run_job("shortest_paths", code=75, a="A.zarr", out="C.zarr")["state"] == "stopped"
    assert Path("C.zarr.spdist-step-2").exists()
    states = []
    noting = lambda *a, **k: states.append((done := multiply(*a, **k)).state) or done  # noqa: E731
    monkeypatch.setattr(application, "api", SimpleNamespace(multiply=noting, save=spdist.save))
    run_job("shortest_paths", a="A.zarr", out="C.zarr")
    assert states[0] == "computed"
    assert len(states) < len(calls) + 2  # two steps were there
    left_beside("A.zarr", "C.zarr")
    assert read("C.zarr").nnz == np.isfinite(shortest_path(m)).sum()


@pytest.mark.parametrize("name", ["triangles", "markov_clustering", "shortest_paths", "conjugate_gradient", "pagerank"])
def test_a_file_of_others_is_not_replaced(run_job, capsys, name):
    spdist.save("A.zarr", sp.eye_array(4).tocsr())
    if name == "shortest_paths":  # replaces matrices alone
        spdist.save("x", sp.eye_array(7).tocsr())
    else:
        Path("x").write_text("mine")
    run_job(name, code=2, a="A.zarr", out="x")
    assert "job.report.json does not say that this job wrote it" in capsys.readouterr().err
    assert spdist.open("x").nnz == 7 if Path("x").is_dir() else Path("x").read_text() == "mine"
    run_job(name, a="A.zarr", out="x", overwrite=True)
    run_job(name, a="A.zarr", out="x")  # its own now
    assert spdist.open("x").nnz == 4 if Path("x").is_dir() else Path("x").read_bytes() != b"mine"
    run_job(name, code=2, a="A.zarr", out="x", resume=False)
    assert "out: 'x' exists" in capsys.readouterr().err


def test_a_report_replaces_nothing_but_a_report(run_job, capsys):
    spdist.save("A.zarr", sp.eye_array(4).tocsr())
    np.save("b.npy", np.ones(4))
    for report, message in (
        ("job.yaml", "report: 'job.yaml' exists and is no report of a job; name another file"),
        ("b.npy", "report: 'b.npy' exists and is no report"),
        ("x.npy", "report: 'x.npy' is what out names; name another file"),
    ):
        run_job("conjugate_gradient", code=2, a="A.zarr", b="b.npy", out="x.npy", report=report)
        errors = capsys.readouterr().err
        assert message in errors
        assert errors.count("\n") == 1
    assert Path("job.yaml").read_text().startswith("a: A.zarr")
    assert {path.name for path in Path().iterdir()} == {"A.zarr", "b.npy", "job.yaml"}


def test_wrong_jobs_are_refused(run_job, capsys):
    spdist.save("A.zarr", -sp.eye_array(4).tocsr() + sp.eye_array(4, k=1))
    for name, keys, message in (
        ("similarity", {"top_n": 0}, "top_n"),
        ("similarity", {"metric": "angle"}, "metric: 'angle' is no metric; write cosine or inner_product"),
        ("cooccurrence", {"measure": "lift"}, "measure: 'lift' is no measure"),
        ("markov_clustering", {"inflation": 1}, "no power that sharpens"),
        ("shortest_paths", {"sources": [9]}, "vertex 9 of a graph of 4 vertices"),
        ("shortest_paths", {"sources": 3}, "no list of vertices"),
        ("triangles", {"sources": 3}, "unknown key 'sources'"),
        ("galerkin", {}, "p is missing"),
    ):
        run_job(name, code=2, a="A.zarr", out="C.zarr", **keys)
        assert message in capsys.readouterr().err


VALUES_REFUSED = [
    ("markov_clustering", -1.0, "finite weights of 0 and more"),
    ("markov_clustering", np.inf, "finite weights of 0 and more"),
    ("markov_clustering", np.nan, "finite weights of 0 and more"),
    ("markov_clustering", 1j, "finite weights of 0 and more"),
    ("shortest_paths", -1.0, "lengths of 0 and more"),
    ("shortest_paths", np.nan, "lengths of 0 and more"),
    ("shortest_paths", 1j, "lengths of 0 and more"),
    ("similarity", np.nan, "finite real values"),
    ("similarity", -np.inf, "finite real values"),
    ("similarity", 1j, "finite real values"),
]


@pytest.mark.parametrize(("name", "value", "needed"), VALUES_REFUSED)
def test_values_that_mean_nothing_are_refused(run_job, capsys, name, value, needed):
    m = sp.eye_array(4, dtype=np.result_type(value), format="lil")
    m[3, 2] = value
    spdist.save("A.zarr", m.tocsr())
    run_job(name, code=2, a="A.zarr", out="C")
    errors = capsys.readouterr().err
    held = "complex128" if value == 1j else f"{value} in row 3, column 2"
    assert f"A.zarr holds {held}; {needed} are needed" in errors
    assert errors.count("\n") == 1
    assert {path.name for path in Path().iterdir()} == {"A.zarr", "job.yaml"}


@pytest.mark.parametrize("name", ["markov_clustering", "shortest_paths", "similarity"])
def test_matrices_in_blocks_are_refused(run_job, capsys, name):
    spdist.save("A.zarr", sp.bsr_array(np.eye(4), blocksize=(2, 2)))
    run_job(name, code=2, a="A.zarr", out="C")
    assert "stored in blocks" in capsys.readouterr().err
