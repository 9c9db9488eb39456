"""Graphs of nearest dense rows against scikit-learn's brute force, whatever holds the rows and however they are cut."""

from __future__ import annotations

import json

import anndata
import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.neighbors import kneighbors_graph as brute_force

import spdist
from spdist import cli
from spdist.applications import nearest_rows
from spdist.errors import InputError, MatrixError, MemoryBoundError
from spdist.kernels.dense.by_blocks import RowBlocks, block_rows, nearest_by_blocks
from spdist.kernels.dense.nearest import nearest


def rows_of(count=70, ncols=6, dtype="f4"):
    return np.random.default_rng(count).standard_normal((count, ncols)).astype(dtype)


def expected(x, count=4, metric="euclidean"):
    graph = brute_force(x.astype("f8"), count, mode="distance", metric=metric, include_self=False)
    return graph.toarray()


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4"])
def test_as_brute_force(metric, dtype):
    x = rows_of(ncols=9) if dtype != "i4" else np.random.default_rng(0).integers(-99, 99, (70, 9)).astype(dtype)
    graph = spdist.kneighbors_graph(x.astype(dtype), n_neighbors=4, metric=metric)
    assert (np.diff(graph.indptr) == 4).all()
    assert graph.has_canonical_format
    np.testing.assert_allclose(graph.toarray(), expected(x, metric=metric), atol=1e-6)


def test_largest_inner_products():
    x = rows_of()
    graph = spdist.kneighbors_graph(x, n_neighbors=2, metric="inner_product", corpus=x[:20]).toarray()
    every = x.astype("f8") @ x[:20].T.astype("f8")
    np.testing.assert_allclose(np.sort(graph, axis=1)[:, -2:][graph.max(axis=1) > 0, 1],
                               every.max(axis=1)[graph.max(axis=1) > 0], rtol=1e-12)  # fmt: skip
    assert graph.shape == (70, 20)


@pytest.mark.parametrize("metric", ["euclidean", "cosine", "inner_product"])
@pytest.mark.parametrize("rows", [3, 16, 40, 70, 100])
def test_blocks_change_no_bit(metric, rows):
    x = rows_of()
    x[3] = x[7]
    x[60:] = x[50:60]
    whole = nearest(x[:50], x, 5, metric)
    blocks = RowBlocks((50, 6), lambda i, j: x[i:j]), RowBlocks((70, 6), lambda i, j: x[i:j])
    found = list(nearest_by_blocks(*blocks, 5, metric, rows, nearest))
    assert [part.start for part in found] == list(range(0, 50, rows))
    np.testing.assert_array_equal(np.concatenate([part.columns for part in found]), whole[0])
    np.testing.assert_array_equal(np.concatenate([part.distances for part in found]), whole[1])


def test_the_limit_bounds_blocks():
    assert block_rows(50, 15, 2, 1 << 28) < block_rows(50, 15, 2, 1 << 29)
    with pytest.raises(MemoryBoundError, match=r"memory_limit=1\.00 MiB is less than the .* MiB of the smallest"):
        spdist.kneighbors_graph(rows_of(), memory_limit="1MiB")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The same rows wherever they may lie, by a name for each place."""
    monkeypatch.chdir(tmp_path)
    x = rows_of()
    np.save("x.npy", x)
    cells = anndata.AnnData(sp.csr_matrix((70, 5), dtype="f4"))
    cells.obsm["X_pca"] = x
    cells.write_h5ad("cells.h5ad")
    with anndata.settings.override(zarr_write_format=3, auto_shard_zarr_v3=True):
        cells.write_zarr("cells.zarr")
    spdist.save("stored.zarr", sp.csr_array(x))
    return {
        "x.npy": "x.npy", "cells.h5ad": "cells.h5ad::obsm/X_pca", "cells.zarr": "cells.zarr::obsm/X_pca",
        "a member": "cells.zarr/obsm/X_pca", "stored.zarr": "stored.zarr", "sparse": sp.csr_array(x), "array": x,
        "opened": spdist.open("stored.zarr"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["x.npy", "cells.h5ad", "cells.zarr", "a member", "stored.zarr", "sparse", "array", "opened"]
)
def test_rows_lie_anywhere(places, name):
    graph = spdist.kneighbors_graph(places[name], "graph.zarr", n_neighbors=4)
    assert graph.url.endswith("graph.zarr")
    np.testing.assert_allclose(graph.to_scipy().toarray(), expected(rows_of()), atol=1e-6)
    again = spdist.kneighbors_graph(places[name], n_neighbors=4, corpus=places["opened"])
    assert (again.toarray() == 0).sum(axis=1).min() == 70 - 3  # each row finds itself, at distance 0
    if name == "cells.h5ad":
        assert graph.row_names.tolist() == [str(i) for i in range(70)]


def test_command(places, capsys):
    assert cli.main(["neighbors", "x.npy", "graph.zarr", "--n-neighbors", "4", "--memory-limit", "256MiB"]) == 0
    assert "4 neighbours of each of 70 rows; the graph is in graph.zarr" in capsys.readouterr().out
    np.testing.assert_allclose(spdist.open("graph.zarr").to_scipy().toarray(), expected(rows_of()), atol=1e-6)
    words = [
        "neighbors",
        "x.npy",
        "graph.zarr",
        "--overwrite",
        "--json",
        "--corpus",
        "stored.zarr",
        "--metric",
        "cosine",
    ]
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out) == {"rows": 70, "neighbors": 15}


@pytest.mark.parametrize(
    ("x", "options", "error", "match"),
    [
        (np.ones(3), {}, InputError, r"an array of shape \(3,\)"),
        (np.full((3, 2), np.nan), {}, MatrixError, "not finite real numbers"),
        (np.ones((3, 2), complex), {}, MatrixError, "not finite real numbers"),
        (np.ones((3, 2)), {"n_neighbors": 3}, InputError, "n_neighbors=3: there are 3 rows to search"),
        (np.ones((3, 2)), {"n_neighbors": 0}, InputError, "n_neighbors=0 must be a whole number"),
        (np.ones((3, 2)), {"metric": "manhattan"}, InputError, "metric='manhattan' is not one of euclidean"),
        (
            np.ones((3, 2)),
            {"engine": "hybrid"},
            InputError,
            "engine='hybrid' does not search dense rows: name",
        ),
        (np.ones((3, 2)), {"corpus": np.ones((9, 3)), "n_neighbors": 1}, InputError, "rows of 2 columns have no"),
        (np.ones((3, 2)), {"dense": True}, InputError, "dense=True: the operand is no file"),
        ("none.npy", {}, InputError, "there is no such file"),
    ],
)
def test_what_has_no_neighbours(x, options, error, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=match):
        spdist.kneighbors_graph(x, "graph.zarr", **options)
    assert not list(tmp_path.iterdir())


def test_a_graph_that_exists_is_kept(places):
    spdist.kneighbors_graph("x.npy", "graph.zarr", n_neighbors=2)
    with pytest.raises(InputError, match=r"graph\.zarr exists"):
        spdist.kneighbors_graph("x.npy", "graph.zarr")
    assert spdist.open("graph.zarr").nnz == 140
    assert spdist.kneighbors_graph("x.npy", "graph.zarr", n_neighbors=3, overwrite=True).nnz == 210


def test_engines_of_cores_are_one(monkeypatch):
    """A GPU is not looked for where it would not pay, and its limits are told before it is."""
    x, asked = rows_of(), []
    monkeypatch.setattr(nearest_rows.worker_process, "gpu_name", lambda: asked.append("gpu"))
    monkeypatch.setattr(nearest_rows.worker_process, "count_gpus", lambda: 1)
    graphs = [spdist.kneighbors_graph(x, n_neighbors=4, engine=name) for name in ("auto", "numba", "scipy")]
    assert all((graph != graphs[0]).nnz == 0 for graph in graphs)
    assert not asked
    monkeypatch.setattr(nearest_rows, "GPU_WORK", 1)
    spdist.kneighbors_graph(x, n_neighbors=4)
    assert asked == ["gpu"]
    with pytest.raises(InputError, match="finds 496 neighbours at most, not 601"):
        spdist.kneighbors_graph(rows_of(700), n_neighbors=600, engine="cuda")
