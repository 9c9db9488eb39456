"""Applications on a GPU: what the engine of the CPU finds, in memory and stored."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from tests.applications.markov_clustering.test_markov_clustering import edges_of_genes
from tests.conftest import random_matrix

pytestmark = pytest.mark.gpu


def graph(dtype: str = "float64") -> sp.csr_array:
    m = abs(random_matrix(3_000, 3_000, 12, 7)).astype(dtype)
    return sp.csr_array(m)


def same(mine: sp.csr_array, theirs: sp.csr_array) -> bool:
    return mine.shape == theirs.shape and mine.dtype == theirs.dtype and abs(mine - theirs).max() <= 1e-6


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_similarity(stored, tmp_path, dtype):
    m, path = graph(dtype), tmp_path / "C.zarr"
    # without top_n: of equal values each engine may keep others
    expected = spdist.similarity(m, top_n=3_000, threshold=0.05, engine="numba")
    assert same(spdist.similarity(m, top_n=3_000, threshold=0.05, engine="cuda"), expected)
    spdist.similarity(stored("A", m), path, top_n=3_000, threshold=0.05, engine="cuda", check=True)
    assert same(spdist.open(path).to_scipy(), expected)


@pytest.mark.parametrize("measure", ["count", "pmi"])
def test_cooccurrence(stored, tmp_path, measure):
    m, path = graph(), tmp_path / "C.zarr"
    expected = spdist.cooccurrence(m, measure=measure, threshold=0, engine="numba")
    assert same(spdist.cooccurrence(m, measure=measure, threshold=0, engine="cuda"), expected)
    spdist.cooccurrence(stored("A", m), path, measure=measure, threshold=0, engine="cuda")
    assert same(spdist.open(path).to_scipy(), expected)


def test_triangles(stored, tmp_path):
    m = graph()
    expected = spdist.triangles(m, engine="numba")
    assert spdist.triangles(m, engine="cuda") == expected
    assert spdist.triangles(stored("A", m), folder=tmp_path, engine="cuda", memory_limit="256MiB") == expected


def test_shortest_paths(stored, tmp_path):
    m = graph()
    expected = spdist.shortest_paths(m, sources=[0, 5, 9], engine="numba")
    assert same(spdist.shortest_paths(m, sources=[0, 5, 9], engine="cuda"), expected)
    spdist.shortest_paths(stored("A", m), tmp_path / "D.zarr", sources=[0, 5, 9], engine="cuda")
    assert same(spdist.open(tmp_path / "D.zarr").to_scipy(), expected)


@pytest.mark.parametrize("workers", [None, 1])
def test_markov_clustering(tmp_path, workers):
    edges = tmp_path / "genes.abc"
    edges.write_text(edges_of_genes())
    expected = spdist.markov_clustering(edges, engine="numba")
    found = spdist.markov_clustering(edges, tmp_path / "clusters", engine="cuda", workers=workers)
    np.testing.assert_array_equal(found.labels, expected.labels)
    assert (expected.place, found.place) == ("host", "gpu" if workers is None else "storage")
