"""Markov clustering: the clusters of the program mcl, of a plain implementation in NumPy, in memory and stored."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import spdist
from spdist import cli
from spdist.applications.markov_clustering import host_walks, stored_walks, walks
from spdist.applications.markov_clustering.attractors import strongest
from spdist.applications.markov_clustering.pruning import Pruning
from spdist.applications.markov_clustering.rows import stacked
from spdist.matrices.csr import from_scipy
from spdist.storage.external_sort import Entries

DATA = Path(__file__).resolve().parents[3] / "data"
EXPECTED = json.loads((Path(__file__).parent / "clusters_of_mcl.json").read_text())
"""What mcl 22-282 wrote of the graph of `edges_of_genes`, by its options."""


def edges_of_genes() -> str:
    """Return a list of edges: each gene and the genes whose terms are most like its own, no two weights equal."""
    m = sp.csr_array(sp.load_npz(DATA / "human_gene_GO.npz"))[:400].astype(float)
    unit = m / np.sqrt(m.power(2).sum(axis=1))[:, None]
    cosines = (unit @ unit.T).toarray()
    np.fill_diagonal(cosines, 0)
    pairs = [
        (i, j, round(row[j], 3))
        for i, row in enumerate(cosines)
        for j in np.sort(np.argsort(-row, kind="stable")[:12])
        if row[j] >= 0.2
    ]
    return "".join(f"gene{i}\tgene{j}\t{x * (1 + (i * 37 + j * 11) % 101 / 500):.6g}\n" for i, j, x in pairs)


@pytest.fixture(scope="module")
def genes(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("genes") / "genes.abc"
    path.write_text(edges_of_genes())
    return path


@pytest.mark.parametrize("options", EXPECTED)
def test_clusters_are_those_of_mcl(genes, tmp_path, options):
    out = tmp_path / "clusters"
    assert cli.main(["markov-clustering", str(genes), "-o", str(out), *options.split(), "--json"]) == 0
    assert out.read_text().splitlines() == EXPECTED[options]


@pytest.mark.parametrize("options", ["-I 2", "-I 2 -P 60 -S 8 -R 14 -pct 90"])
@pytest.mark.parametrize("rows", [1 << 20, 90], ids=["one part", "parts"])
def test_stored_walks_make_the_same_clusters(genes, tmp_path, options, rows, monkeypatch, capsys):
    def in_parts(m):
        return ((start, m.rows(start, min(start + rows, m.nrows))) for start in range(0, m.nrows, rows))

    monkeypatch.setattr(walks, "COPIES", 1 << 40)  # nothing fits in memory
    monkeypatch.setattr(stored_walks, "parts", in_parts)
    out = tmp_path / "clusters"
    assert cli.main(["markov-clustering", str(genes), "-o", str(out), *options.split(), "--json"]) == 0
    assert out.read_text().splitlines() == EXPECTED[options]
    assert json.loads(capsys.readouterr().out)["place"] == "storage"
    assert [path.name for path in tmp_path.iterdir()] == ["clusters"]


def edges_of(graph: sp.csr_array) -> Entries:
    coo = graph.tocoo()
    return Entries(coo.row, coo.col, coo.data)


def pruned(row: np.ndarray, rules: Pruning) -> np.ndarray:
    """Return a row as the rules of mcl leave it."""
    order = np.argsort(-row, kind="stable")
    kept = order[row[order] >= rules.least] if rules.prune else order[row[order] > 0]
    chosen = kept[: rules.select] if rules.select else kept
    if rules.recover and row[kept].sum() < rules.recover_percent / 100 and len(kept) < rules.recover:
        chosen = order[: rules.recover]
    elif rules.recover > len(chosen) and row[chosen].sum() < rules.recover_percent / 100:
        chosen = kept[: rules.recover]
    out = np.zeros_like(row)
    out[chosen] = row[chosen]
    return out


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), n=st.integers(1, 40), density=st.floats(0.02, 0.5),
    prune=st.sampled_from([0, 5, 20, 100]), select=st.sampled_from([0, 2, 6]), recover=st.sampled_from([0, 3, 9]),
)  # fmt: skip
def test_a_step_keeps_what_the_rules_say(seed, n, density, prune, select, recover):
    graph = sp.random_array((n, n), density=density, format="csr", rng=np.random.default_rng(seed))
    seen = []
    rules = Pruning(prune, select, recover, 90.0)
    numbers = {"prune": prune, "select": select, "recover": recover}
    spdist.markov_clustering(graph, maxiter=1, on_step=lambda step, facts: seen.append(facts), **numbers)
    first = host_walks.first_walks(edges_of(graph), n, None).to_scipy().toarray().astype(float)
    rows = [pruned(row, rules) for row in first @ first]
    expected = sum(max(int((row > 0).sum()), 1) for row in rows)
    assert abs(seen[0]["entries"] - expected) <= 0.02 * expected + 1  # ties and rounding


def test_parts_of_the_first_walks_are_those_of_the_whole():
    """The heaviest edge of a vertex is its loop; weights of loops that the graph has are not looked at."""
    graph = np.triu(np.random.default_rng(1).integers(0, 4, (40, 40)))
    graph = graph + graph.T
    rows, edges = from_scipy(sp.csr_array(graph.astype(float))), graph.astype(float)
    np.fill_diagonal(edges, 0)
    np.fill_diagonal(edges, edges.max(axis=1))
    ends = [0, 7, 8, 30, 40]
    parts = [walks.stochastic(i, rows.rows(i, j), None) for i, j in itertools.pairwise(ends)]
    found = stacked(parts).to_scipy().toarray()
    np.testing.assert_allclose(found, edges / edges.sum(axis=1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize(("n", "entries"), [(1, 1), (30, 900), (31, 930), (400, 12_000)])
def test_what_walks_take_at_most(n, entries):
    """Of 30 values a row at most; three matrices with float32 values and int32 columns at a time."""
    for pruning in (Pruning(select=30, recover=20), Pruning(select=20, recover=30)):
        assert pruning.most_entries(n) == entries
        assert walks.most_bytes(pruning, n) == 3 * 8 * entries
    assert Pruning(select=0, recover=0).most_entries(n) == n * n


def test_a_vertex_belongs_where_its_walk_goes_most():
    """Row 0 has no loop: values stay from the mean of four on, where there are three. Row 1 keeps to its loop."""
    rows = from_scipy(sp.csr_array([[0.0, 0.5, 0.2505, 0.2495], [0.0, 0.7, 0.2, 0.1]]))
    kept = strongest(0, rows).to_scipy().toarray()
    assert kept.tolist() == [[0.0, 0.5, 0.2505, 0.0], [0.0, 0.7, 0.0, 0.0]]


def test_samples_do_not_change_clusters(genes, monkeypatch):
    found = []
    for share in (0.0, 1.0):
        monkeypatch.setattr(host_walks, "MANY", share)
        found.append(spdist.markov_clustering(genes, prune=60, select=8, recover=14).labels)
    np.testing.assert_array_equal(*found)


def test_graphs_without_edges():
    found = spdist.markov_clustering(sp.csr_array((3, 3)))
    assert found.labels.tolist() == [0, 1, 2]
    assert [list(each) for each in found.clusters()] == [[0], [1], [2]]
    with pytest.raises(spdist.MatrixError, match="0 x 0"):
        spdist.markov_clustering(sp.csr_array((0, 0)))


def test_the_heaviest_of_several_edges_counts(tmp_path):
    (tmp_path / "g.abc").write_text("a b 1\nb c 9\na b 9\nb a 2\nc a 9\nc d 1\nd e 9\ne f 9\nf d 9\n")
    found = spdist.markov_clustering(tmp_path / "g.abc")
    assert [sorted(each) for each in found.clusters()] == [["a", "b", "c"], ["d", "e", "f"]]
    found.write(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "a\tb\tc\nd\te\tf\n"
    with pytest.raises(spdist.InputError, match="exists"):
        found.write(tmp_path / "out")


def test_names_of_a_stored_graph(tmp_path, genes):
    spdist.import_matrix(genes, tmp_path / "G.zarr", labels=tmp_path / "names", duplicates="max")
    spdist.markov_clustering(tmp_path / "G.zarr", tmp_path / "out", labels=tmp_path / "names")
    assert (tmp_path / "out").read_text().splitlines() == EXPECTED["-I 2"]
    spdist.markov_clustering(tmp_path / "G.zarr", tmp_path / "own")
    assert (tmp_path / "own").read_text() == (tmp_path / "out").read_text()
    (tmp_path / "names").write_text("one\ntwo\n")
    with pytest.raises(spdist.InputError, match=r"has 2 lines, and .*G\.zarr 400 vertices"):
        spdist.markov_clustering(tmp_path / "G.zarr", labels=tmp_path / "names")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"inflation": 1.0}, "inflation=1.0 sharpens nothing"),
        ({"pre_inflation": 0}, "pre_inflation=0 must be a number above 0"),
        ({"prune": -1}, "prune=-1 must be"),
        ({"select": 2.5}, "select=2.5 must be"),
        ({"recover_percent": 101}, "recover_percent=101 must lie"),
        ({"engine": "gpu"}, "engine 'gpu'"),
        ({"maxiter": 0}, "maxiter"),
    ],
)
def test_what_cannot_be_is_refused_before_work(tmp_path, options, says):
    with pytest.raises(spdist.InputError, match=says):
        spdist.markov_clustering(sp.eye_array(3).tocsr(), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys, spdist
from spdist.applications.markov_clustering import stored_walks, walks
walks.COPIES = 1 << 40
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def on_step(step, facts):
    if step == 4 and sys.argv[3] == "after":
        kill()
    if step == 3 and sys.argv[3] == "in":
        stored_walks.MatrixWriter.close = kill
spdist.markov_clustering(sys.argv[1], sys.argv[2], on_step=on_step)
"""


@pytest.mark.parametrize(("when", "first"), [("after", 5), ("in", 4)])
def test_a_killed_run_goes_on_with_its_step(tmp_path, genes, monkeypatch, when, first):
    spdist.import_matrix(genes, tmp_path / "G.zarr", labels=tmp_path / "names", duplicates="max")
    killed = [sys.executable, "-c", KILLED, str(tmp_path / "G.zarr"), str(tmp_path / "out"), when]
    assert subprocess.run(killed, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(walks, "COPIES", 1 << 40)
    steps: list[int] = []
    again = {"labels": tmp_path / "names", "on_step": lambda step, facts: steps.append(step)}
    spdist.markov_clustering(tmp_path / "G.zarr", tmp_path / "out", resume=True, **again)
    assert steps[0] == first
    assert (tmp_path / "out").read_text().splitlines() == EXPECTED["-I 2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["G.zarr", "names", "out"]


def test_workers_cluster_what_they_are_asked_to(tmp_path, genes):
    spdist.import_matrix(genes, tmp_path / "G.zarr", labels=tmp_path / "names", duplicates="max")
    spdist.markov_clustering(tmp_path / "G.zarr", tmp_path / "out", labels=tmp_path / "names", workers=2, maxiter=3)
    assert len((tmp_path / "out").read_text().split()) == 400


def test_one_cpu(tmp_path, genes):
    command = [sys.executable, "-m", "spdist", "markov-clustering", str(genes), "-o", str(tmp_path / "out"), "-te", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONHASHSEED": "1"})
    assert f"{len(EXPECTED['-I 2'])} clusters after" in done.stdout
    assert "steps in memory, in " in done.stdout
