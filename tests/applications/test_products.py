"""Similarity, co-occurrence, triangles and shortest paths: against dense NumPy, in memory and stored."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import shortest_path
from sklearn.metrics.pairwise import cosine_similarity

import spdist
from spdist import cli
from spdist.applications.steps import kept_workers
from spdist.scheduler.execution import worker_process
from tests.conftest import random_matrix
from tests.support.strategies import SMALL_INTS, csr_matrices


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


ANY = settings(max_examples=40, deadline=None)


@st.composite
def matrices(draw, square: bool = False, values: st.SearchStrategy = SMALL_INTS, dtype: object = np.float64):
    rows = draw(st.integers(1 if square else 0, 10))
    shape = (rows, rows if square else draw(st.integers(0, 12)))
    return draw(csr_matrices(shape, values, dtype)).to_scipy()


def dense_cosines(m) -> np.ndarray:
    dense = m.toarray().astype(float)
    lengths = np.sqrt((dense**2).sum(axis=1))
    unit = dense / np.where(lengths > 0, lengths, 1)[:, None]
    found = unit @ unit.T
    np.fill_diagonal(found, 0)
    return found


@ANY
@given(matrices(), st.integers(1, 4), st.sampled_from([0.0, 0.3]))
def test_cosines_in_memory(m, top_n, threshold):
    found, expected = spdist.similarity(m, top_n=top_n, threshold=threshold), dense_cosines(m)
    assert found.shape == expected.shape
    best = -np.sort(-np.where(expected >= max(threshold, 1e-300), expected, 0), axis=1)[:, :top_n]
    mine = -np.sort(-found.toarray(), axis=1)[:, :top_n]
    np.testing.assert_allclose(mine, best, atol=1e-12)
    assert (np.diff(found.indptr) <= top_n).all()
    assert (found.diagonal() == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8", "bool"])
def test_cosines_of_a_dtype(stored, tmp_path, dtype):
    m = abs(random_matrix(60, 40, 5, 3)).astype(dtype)
    spdist.similarity(stored("A", m), tmp_path / "C.zarr", top_n=5, check=True)
    c = spdist.open(tmp_path / "C.zarr")
    assert c.dtype == (np.float32 if dtype == "float32" else np.float64)
    in_memory = spdist.similarity(m, top_n=5)
    assert abs(c.to_scipy() - in_memory).max() < 1e-6
    assert names_in(tmp_path) == ["A.zarr", "C.zarr"]


def test_inner_products(stored, tmp_path):
    m = random_matrix(50, 30, 4, 5, dtype="int64").astype(np.float32)
    expected = (m @ m.T).toarray()
    np.fill_diagonal(expected, 0)
    found = spdist.similarity(m, top_n=50, metric="inner_product")
    np.testing.assert_array_equal(found.toarray(), np.where(expected > 0, expected, 0))
    assert found.dtype == np.float32
    spdist.similarity(stored("A", m), tmp_path / "C.zarr", top_n=50, metric="inner_product")
    assert abs(spdist.open(tmp_path / "C.zarr").to_scipy() - found).max() == 0


@ANY
@given(matrices(), st.sampled_from([None, 2]))
def test_counts_in_memory(m, top_n):
    pattern = sp.csr_array((np.ones(m.nnz, np.int64), m.indices, m.indptr), m.shape)  # zeros that are stored count
    expected = (pattern.T @ pattern).toarray()
    np.fill_diagonal(expected, 0)
    found = spdist.cooccurrence(m, top_n=top_n)
    if top_n is None:
        np.testing.assert_array_equal(found.toarray(), expected)
    best = -np.sort(-expected, axis=1)[:, : top_n or m.shape[1]]
    np.testing.assert_array_equal(-np.sort(-found.toarray(), axis=1)[:, : top_n or m.shape[1]], best)


def test_mutual_information_is_the_same_stored(stored, tmp_path):
    m = random_matrix(60, 25, 5, 3)
    report = spdist.cooccurrence(stored("A", m), tmp_path / "C.zarr", measure="pmi", threshold=0, check=True)
    assert report.verification["ok"]
    assert (
        abs(spdist.open(tmp_path / "C.zarr").to_scipy() - spdist.cooccurrence(m, measure="pmi", threshold=0)).max()
        < 1e-12
    )


def dense_triangles(m) -> int:
    a = np.zeros(m.shape, np.int64)
    a[np.repeat(np.arange(m.shape[0]), np.diff(m.indptr)), m.indices] = 1
    a = ((a + a.T) > 0).astype(np.int64)
    np.fill_diagonal(a, 0)
    return int(np.trace(a @ a @ a)) // 6


@ANY
@given(matrices(square=True))
def test_triangles_in_memory(m):
    found = spdist.triangles(m)
    assert (found.triangles, found.vertices) == (dense_triangles(m), m.shape[0])


@pytest.mark.parametrize("metric", ["cosine", "inner_product"])
def test_similarity_to_a_corpus(metric, stored, tmp_path):
    """Row i of the corpus is not left out for query i."""
    queries, corpus = abs(random_matrix(30, 40, 6, 1)), abs(random_matrix(50, 40, 6, 2))
    found = spdist.similarity(queries, corpus, top_n=60, metric=metric)
    every = cosine_similarity(queries, corpus) if metric == "cosine" else (queries @ corpus.T).toarray()
    np.testing.assert_allclose(found.toarray(), every, atol=1e-12)
    assert abs(spdist.similarity(queries, corpus=corpus, top_n=3, metric=metric)).nnz <= 90
    places = stored("Q", queries), stored("B", corpus)
    spdist.similarity(places[0], tmp_path / "C.zarr", corpus=places[1], top_n=60, metric=metric, check=True)
    np.testing.assert_allclose(spdist.open(tmp_path / "C.zarr").to_scipy().toarray(), every, atol=1e-12)


@pytest.mark.parametrize("memory_limit", [None, "64MiB"])
def test_triangles_of_a_stored_graph(stored, tmp_path, memory_limit):
    m = random_matrix(300, 300, 8, 2)
    found = spdist.triangles(stored("A", m), folder=tmp_path, memory_limit=memory_limit)
    assert found == spdist.triangles(m)
    assert found.triangles == dense_triangles(m) > 0
    assert names_in(tmp_path) == ["A.zarr"]


@ANY
@given(matrices(square=True, values=st.integers(0, 9)), st.sampled_from([None, [0]]))
def test_paths_in_memory(m, sources):
    lengths = np.full(m.shape, np.inf)
    lengths[np.repeat(np.arange(m.shape[0]), np.diff(m.indptr)), m.indices] = m.data
    np.fill_diagonal(lengths, 0)
    for k in range(len(lengths)):  # Floyd and Warshall; SciPy takes a length of 0 for no edge
        lengths = np.minimum(lengths, lengths[:, k : k + 1] + lengths[k])
    found = spdist.shortest_paths(m, sources=sources)
    dense = np.full(found.shape, np.inf)
    dense[np.repeat(np.arange(found.shape[0]), np.diff(found.indptr)), found.indices] = found.data
    np.testing.assert_array_equal(dense, lengths if sources is None else lengths[sources])


def lengths_within(m, hops: int) -> np.ndarray:
    """Return the lengths of shortest paths of at most some edges: a step for each edge."""
    edges = np.full(m.shape, np.inf)
    edges[m.nonzero()] = m[m.nonzero()]
    found = np.where(np.eye(len(edges)), 0, np.inf)
    for _ in range(hops):
        found = np.minimum(found, (found[:, :, None] + edges).min(axis=1))
    return found


@pytest.mark.parametrize("sources", [None, [3, 7]], ids=str)
@pytest.mark.parametrize("hops", [1, 2, 3, 5, None], ids=str)
@pytest.mark.parametrize("is_stored", [False, True])
def test_paths_of_at_most_some_hops(stored, tmp_path, sources, hops, is_stored):
    m = sp.csr_array(abs(random_matrix(30, 30, 2, 4)) * 9).ceil()
    expected = lengths_within(m, hops or 30)
    assert (expected != lengths_within(m, hops + 1 if hops else 29)).any() == (hops is not None)
    options = {"sources": sources, "hops": hops}
    if is_stored:
        found = spdist.shortest_paths(stored("A", m), tmp_path / "D.zarr", **options).to_scipy().tocoo()
        assert names_in(tmp_path) == ["A.zarr", "D.zarr"]
    else:
        found = spdist.shortest_paths(m, **options).tocoo()
    dense = np.full(found.shape, np.inf)
    dense[found.row, found.col] = found.data
    np.testing.assert_array_equal(dense, expected if sources is None else expected[sources])
    if hops is None:
        assert found.nnz == np.isfinite(shortest_path(m)[slice(None) if sources is None else sources]).sum()


def test_workers_serve_all_steps(stored, tmp_path):
    m = abs(random_matrix(40, 40, 3, 4))
    found = spdist.shortest_paths(stored("A", m), tmp_path / "D.zarr", workers=2)
    assert (found.to_scipy() != spdist.shortest_paths(m)).nnz == 0


def test_one_gpu_works_in_this_process(monkeypatch):
    monkeypatch.setattr(worker_process, "count_gpus", lambda: 1)
    with kept_workers({"engine": "cuda", "memory_limit": "1GiB"}) as where:
        assert where == {"engine": "cuda", "memory_limit": "1GiB"}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m, out: spdist.similarity(m, out, corpus=sp.eye_array(4)), "are not both stored"),
        (lambda m, out: spdist.similarity(m, out, corpus="none.zarr"), "there is no such matrix"),
        (lambda m, out: spdist.similarity(m, out, metric="jaccard"), "metric='jaccard' is not one of cosine"),
        (lambda m, out: spdist.similarity(m, out, top_n=0), "top_n"),
        (lambda m, out: spdist.similarity(m), "say where"),
        (lambda m, out: spdist.similarity(m, out, engine="gpu"), "engine 'gpu'"),
        (lambda m, out: spdist.cooccurrence(m, out, measure="lift"), "measure='lift'"),
        (lambda m, out: spdist.cooccurrence(m, out, triangle="lower"), "triangle='lower'"),
        (lambda m, out: spdist.shortest_paths(m, out, sources=[9]), "vertex 9 of a graph of 4"),
        (lambda m, out: spdist.shortest_paths(m, out, hops=0), "hops"),
        (lambda m, out: spdist.triangles(m, workers=0), "workers"),
    ],
)
def test_what_cannot_be_is_refused_before_work(stored, tmp_path, call, says):
    m = stored("A", sp.eye_array(4).tocsr())
    with pytest.raises(spdist.InputError, match=says):
        call(m, tmp_path / "C.zarr")
    assert names_in(tmp_path) == ["A.zarr"]


@pytest.mark.parametrize("call", [spdist.similarity, spdist.cooccurrence, spdist.shortest_paths])
def test_results_are_not_replaced_unasked(stored, tmp_path, call):
    m, there = stored("A", sp.eye_array(4).tocsr()), stored("C", sp.eye_array(2))
    with pytest.raises(spdist.InputError, match="exists"):
        call(m, there.url)
    assert spdist.open(there.url).nnz == 2
    call(m, there.url, overwrite=True)
    assert spdist.open(there.url).shape == (4, 4)
    assert names_in(tmp_path) == ["A.zarr", "C.zarr"]


COMMANDS = {
    "similarity A.zarr C.zarr --top-n 3 --verify": ("nnz", 147),
    "similarity A.zarr C.zarr --metric inner_product --engine numba": ("state", "computed"),
    "cooccurrence A.zarr C.zarr --triangle upper": ("engine", "auto"),
    "triangles A.zarr": ("vertices", 50),
    "shortest-paths A.zarr C.zarr --sources 0,7 --hops 4": ("vertices", 50),
    "pagerank A.zarr C.npy --damping 0.5": ("converged", True),
    "markov-clustering A.zarr -o C.txt": ("converged", True),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(stored, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    m = abs(random_matrix(50, 50, 8, 6)) + sp.eye_array(50, k=1)
    stored("A", sp.csr_matrix(m))
    assert cli.main([*command.split(), "--json"]) == 0
    name, value = COMMANDS[command]
    assert json.loads(capsys.readouterr().out)[name] == value
    if "triangles" not in command:
        assert cli.main(command.split()) == 2
        assert "exists" in capsys.readouterr().err
        assert cli.main([*command.split(), "--overwrite"]) == 0
        assert capsys.readouterr().out


def test_a_limit_of_the_host_is_for_gpus(tmp_path, capsys):
    """It was accepted and had no effect."""
    a = spdist.save(tmp_path / "A.zarr", sp.csr_array(np.ones((3, 3))))
    with pytest.raises(spdist.InputError, match="host_limit=1GiB is for GPUs"):
        spdist.triangles(a, host_limit="1GiB")
    for words in (["triangles", a.url], ["reduce", "sum", a.url, a.url, "--semiring", "min_plus"]):
        assert cli.main([*words, "--host-limit", "1GiB"]) == 2
        assert "host_limit=1GiB is for GPUs" in capsys.readouterr().err
