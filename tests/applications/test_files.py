"""Files as operands of applications, against networkx and SciPy: lists of edges with names, and other formats."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections import Counter
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
import yaml

import spdist
from spdist import cli, options
from spdist.storage.formats.reading import ReadOptions

EDGES = [
    (f"v{i}", f"v{j}", float(w))
    for i, j, w in np.random.default_rng(4).integers((0, 0, 1), (30, 30, 9), (150, 3)).tolist()
]
"""Edges from one vertex to another, some several times, of other weights; some are loops."""


def text(separator: str) -> str:
    return "".join(f"{u}{separator}{v}{separator}{w}\n" for u, v, w in EDGES)


@pytest.fixture(params=["graph.csv", "graph.abc", "graph.tsv.gz"])
def graph(request, tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    content = text("," if ".csv" in request.param else "\t").encode()
    Path(request.param).write_bytes(gzip.compress(content) if request.param.endswith(".gz") else content)
    return request.param


def left() -> set[str]:
    return {path.name for path in Path().iterdir()}


def by_names(url: str) -> dict[tuple[str, str], float]:
    """Return the entries of a stored matrix by the names of their rows and columns."""
    m = spdist.open(url)
    coo = m.to_scipy().tocoo()
    ends = m.row_names[coo.row].tolist(), m.column_names[coo.col].tolist()
    return dict(zip(zip(*ends, strict=True), coo.data.tolist(), strict=True))


def test_triangles(graph):
    simple = nx.Graph([(u, v) for u, v, _ in EDGES if u != v])
    found = spdist.triangles(graph)
    assert found.triangles == sum(nx.triangles(simple).values()) // 3
    assert (found.vertices, found.edges) == (len({*simple} | {u for u, _, _ in EDGES}), simple.number_of_edges())
    assert spdist.triangles(graph, folder=".") == found
    assert left() == {graph}


def test_pagerank(graph, capsys):
    weights = Counter()
    for u, v, w in EDGES:
        weights[u, v] += w
    links = nx.DiGraph()
    links.add_weighted_edges_from((u, v, w) for (u, v), w in weights.items())
    expected = nx.pagerank(links, tol=1e-12, max_iter=1000)
    found = spdist.pagerank(graph)
    assert dict(zip(found.names, found.x, strict=True)) == pytest.approx(expected, abs=1e-9)
    assert cli.main(["pagerank", graph, "ranks.npy", "--labels", "names", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["top"][0]
    assert first["name"] == max(expected, key=expected.get)
    names = Path("names").read_text().splitlines()
    assert dict(zip(names, np.load("ranks.npy"), strict=True)) == pytest.approx(expected, abs=1e-9)
    assert cli.main(["pagerank", graph, "others.npy"]) == 0
    out = capsys.readouterr().out
    assert "in the order of the names that --labels FILE lists" in out
    assert out.splitlines()[1].split()[2] == first["name"]
    assert left() == {graph, "ranks.npy", "names", "others.npy"}


def test_shortest_paths(graph, capsys):
    roads = nx.MultiDiGraph()
    roads.add_weighted_edges_from(EDGES)
    expected = {
        (u, v): length
        for u, lengths in nx.all_pairs_dijkstra_path_length(roads)
        for v, length in lengths.items()
    }  # fmt: skip
    spdist.shortest_paths(graph, "D.zarr")
    assert by_names("D.zarr") == expected
    assert cli.main(["shortest-paths", graph, "F.zarr", "--sources", "v7,v3"]) == 0
    assert spdist.open("F.zarr").row_names.tolist() == ["v7", "v3"]
    assert by_names("F.zarr") == {ends: length for ends, length in expected.items() if ends[0] in ("v7", "v3")}
    assert cli.main(["shortest-paths", graph, "G.zarr", "--sources", "v7,nobody"]) == 2
    assert "'nobody' is the name of no vertex" in capsys.readouterr().err
    assert left() == {graph, "D.zarr", "F.zarr"}


@pytest.mark.parametrize("metric", ["cosine", "inner_product"])
def test_similarity(graph, metric):
    names = list(dict.fromkeys(name for u, v, _ in EDGES for name in (u, v)))
    ends = [[names.index(edge[k]) for edge in EDGES] for k in (0, 1)]
    rows = sp.csr_array(([w for _, _, w in EDGES], ends), shape=(len(names),) * 2)  # adds up several edges
    spdist.similarity(graph, "S.zarr", top_n=40, metric=metric, check=True)
    found, expected = spdist.open("S.zarr"), spdist.similarity(rows, top_n=40, metric=metric)
    assert found.row_names.tolist() == found.column_names.tolist() == names
    assert abs(found.to_scipy() - expected).max() < 1e-12
    assert left() == {graph, "S.zarr"}


def test_clusters(graph):
    expected = {frozenset(each) for each in spdist.markov_clustering(graph).clusters()}
    spdist.import_matrix(graph, "G.zarr", names=True, duplicates="max")
    assert {frozenset(each) for each in spdist.markov_clustering("G.zarr").clusters()} == expected
    with pytest.raises(spdist.InputError, match="names in the list; leave it out"):
        spdist.markov_clustering(graph, labels="names")


def test_the_shortest_of_several_edges_is_taken(tmp_path):
    (tmp_path / "roads.csv").write_text("0,1,7\n1,2,1\n0,1,3\n0,1,5\n")
    found = {rule: spdist.import_matrix(tmp_path / "roads.csv", tmp_path / rule, duplicates=rule)
             for rule in ("sum", "max", "min", "first")}  # fmt: skip
    assert {rule: m.to_scipy()[0, 1] for rule, m in found.items()} == {"sum": 15, "max": 7, "min": 3, "first": 7}


@pytest.mark.parametrize("name", ["graph.mtx", "graph.mtx.gz", "graph.npz"])
def test_other_files_are_imported_too(stored, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    m = sp.random_array((40, 40), density=0.1, rng=np.random.default_rng(1), format="csr")
    stored("A", m)
    if ".mtx" in name:
        content = Path("plain.mtx")
        scipy.io.mmwrite(content, m)
        Path(name).write_bytes(gzip.compress(content.read_bytes()) if name.endswith("gz") else content.read_bytes())
    else:
        sp.save_npz(name, m)
    before = left()
    assert spdist.triangles(name) == spdist.triangles("A.zarr")
    np.testing.assert_array_equal(spdist.pagerank(name).x, spdist.pagerank("A.zarr").x)
    np.testing.assert_array_equal(spdist.markov_clustering(name).labels, spdist.markov_clustering("A.zarr").labels)
    spdist.shortest_paths(name, "D.zarr", sources=[5])
    spdist.similarity(name, "S.zarr")
    assert (spdist.open("D.zarr").to_scipy() != spdist.shortest_paths(m, sources=[5])).nnz == 0
    assert abs(spdist.open("S.zarr").to_scipy() - spdist.similarity(m)).max() < 1e-12
    assert left() == before | {"D.zarr", "S.zarr"}


def test_how_a_file_is_read_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("edges").write_text("a b\nb c\nc a\n")
    for call in (spdist.triangles, spdist.pagerank, spdist.markov_clustering):
        with pytest.raises(spdist.InputError, match="cannot tell the format from the name"):
            call("edges")
    assert spdist.triangles("edges", format="abc").triangles == 1
    assert len(spdist.pagerank("edges", format="abc").x) == 3
    assert spdist.markov_clustering("edges", format="abc").names == ["a", "b", "c"]
    assert cli.main(["markov-clustering", "edges", "--abc", "-o", "clusters"]) == 0
    assert cli.main(["similarity", "edges", "S.zarr", "--format", "abc"]) == 0
    assert cli.main(["shortest-paths", "edges", "D.zarr", "--format", "abc", "--sources", "a"]) == 0


def test_keywords_of_files_are_those_of_import():
    read = ReadOptions()
    own = {name: value for name, value in dataclasses.asdict(options.FileOptions()).items() if name != "format"}
    assert own == {name: getattr(read, name) for name in own}
    assert set(own) == set(vars(read)) - {"names", "duplicates"}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: spdist.triangles("A.zarr", header=True), "header=True: A.zarr is no file to be read"),
        (lambda: spdist.similarity(sp.eye_array(3), dense=True), "dense=True: the operand is no file to be read"),
        (lambda: spdist.triangles("bad.csv"), r"bad\.csv, line 2"),
        (lambda: spdist.triangles("none.csv"), r"none\.csv: there is no such file"),
        (lambda: spdist.triangles("none.zarr"), "there is no such matrix"),
        (lambda: spdist.triangles("A.mtx", columns=(1, 2)), "columns to choose from"),
        (lambda: spdist.similarity("good.csv"), "the similarities of a file are stored: say where"),
        (lambda: spdist.similarity("good.csv", "A.zarr"), "exists"),
        (lambda: spdist.similarity("good.csv", "none/S.zarr"), "is not a folder"),
        (lambda: spdist.similarity("wide.mtx", "S.zarr", format="npz"), "damaged, truncated or not what its name says"),
        (lambda: spdist.shortest_paths("wide.mtx", "D.zarr"), r"^wide\.mtx is 1 x 2; a square matrix"),
        (lambda: spdist.shortest_paths("minus.csv", "D.zarr"), r"^minus\.csv holds -2\.0 in row 0 \('a'\), column 1"),
        (lambda: spdist.shortest_paths("A.zarr", "D.zarr", sources=["a"]), "'a' is the name of no vertex"),
        (lambda: spdist.shortest_paths("good.csv", "D.zarr", sources=[3]), "vertex 3 of a graph of 3"),
        (lambda: spdist.pagerank("minus.csv"), r"^minus\.csv holds -2\.0 in row 0 \('a'\), column 1 \('b'\); finite"),
        (lambda: spdist.pagerank("wide.mtx"), r"^wide\.mtx is 1 x 2; a square matrix"),
        (lambda: spdist.markov_clustering("minus.csv"), "weight -2.0 between 'a' and 'b'"),
    ],
)  # fmt: skip
def test_what_cannot_be_names_the_file_and_leaves_nothing(tmp_path, monkeypatch, call, says):
    monkeypatch.chdir(tmp_path)
    spdist.save("A.zarr", sp.eye_array(3))
    Path("good.csv").write_text("a,b,1\nb,c,1\n")
    Path("bad.csv").write_text("a,b,1\na,b,c,d,e\n")
    Path("minus.csv").write_text("a,b,-2\n")
    Path("A.mtx").write_text("%%MatrixMarket matrix coordinate real general\n1 1 1\n1 1 1\n")
    Path("wide.mtx").write_text("%%MatrixMarket matrix coordinate real general\n1 2 1\n1 2 1\n")
    before = left()
    with pytest.raises(spdist.InputError, match=says):
        call()
    assert left() == before


def test_labels_need_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    spdist.save("A.zarr", sp.eye_array(3))
    assert cli.main(["pagerank", "A.zarr", "r.npy", "--labels", "names"]) == 2
    assert "have no names" in capsys.readouterr().err
    assert left() == {"A.zarr"}


class StoppedError(Exception):
    pass


def test_paths_of_a_file_go_on_where_they_were(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("line.csv").write_text("".join(f"{i},{i + 1},1\n" for i in range(20)))
    steps = []

    def stop(step, facts):
        steps.append(step)
        if step == 3:
            raise StoppedError

    with pytest.raises(StoppedError):
        spdist.shortest_paths("line.csv", "D.zarr", on_step=stop)
    assert not [name for name in left() if "spdist-file" in name]
    spdist.shortest_paths("line.csv", "D.zarr", resume=True, on_step=lambda step, facts: steps.append(step))
    assert steps == [1, 2, 3, 4, 5, 6]
    assert by_names("D.zarr")["0", "20"] == 20
    assert left() == {"line.csv", "D.zarr"}


def test_similarities_of_a_file_go_on_where_they_were(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("graph.csv").write_text(text(","))

    def stop(now):
        raise StoppedError

    where = {"metric": "inner_product", "engine": "numba"}
    with pytest.raises(StoppedError):
        spdist.similarity("graph.csv", "S.zarr", callbacks=spdist.Callbacks(progress=stop), **where)
    with pytest.raises(spdist.InputError, match="unfinished product; continue it with --resume"):
        spdist.similarity("graph.csv", "S.zarr", **where)
    Path("other.csv").write_text("a,b,1\n")
    with pytest.raises(spdist.ResumeError, match="other matrices"):
        spdist.similarity("other.csv", "S.zarr", resume=True, **where)
    spdist.similarity("graph.csv", "S.zarr", resume=True, **where)
    assert spdist.open("S.zarr").row_names.tolist()[0] == EDGES[0][0]
    assert left() == {"graph.csv", "other.csv", "S.zarr"}


JOBS = {
    "triangles": ("triangles.json", {}),
    "shortest_paths": ("D.zarr", {"sources": ["a"]}),
    "similarity": ("S.zarr", {}),
    "markov_clustering": ("clusters.txt", {}),
    "pagerank": ("ranks.npy", {}),
}


@pytest.mark.parametrize("name", JOBS)
def test_jobs_take_files(run_job, name):
    Path("edges").write_text("a b 1\nb c 2\nc a 3\nd a 1\n")
    out, keys = JOBS[name]
    report = run_job(name, a="edges", out=out, read={"format": "abc"}, **keys)
    assert report["state"] == "done"
    if name == "pagerank":
        assert report["result"]["top"][0]["name"] == "a"
    assert left() == {"job.yaml", "job.report.json", "edges", out}
    assert run_job(name, 2, a="edges", out=f"new-{out}", read={"formt": "abc"}, **keys) == {}
    assert yaml.safe_load(Path("job.yaml").read_text())["read"] == {"formt": "abc"}
