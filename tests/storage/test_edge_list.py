"""Graphs as lists of edges: numbers and names, weights, comments, compression, and lines that are no edges."""

from __future__ import annotations

import bz2
import gzip
import json

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import spdist
from spdist import cli
from spdist.errors import InputError
from spdist.storage.formats.edges import edge_list

PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}


def written(folder, name: str, text: str):
    path = folder / name
    packed = next(ending for ending in (".gz", ".bz2", "") if name.endswith(ending))
    path.write_bytes(PACK[packed](text.encode()))
    return path


def dense(matrix) -> list[list[float]]:
    matrix.check()
    return matrix.to_scipy().toarray().tolist()


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize(
    ("kind", "between"), [("abc", "\t"), ("abc", "  "), ("tsv", "\t"), ("csv", ","), ("csv", ", ")]
)
def test_names_are_numbered_as_they_come(tmp_path, kind, between, packed):
    edges = [("cat", "hat", "0.2"), ("hat", "bat", "0.5"), ("cat", "hat", "1"), ("bat", "bat", "-2e-1")]
    text = "# a comment\n\n" + "".join(between.join(edge) + "\n" for edge in edges) + between.join(("hat", "cat"))
    source = written(tmp_path, f"graph.{kind}{packed}", text)
    m = spdist.import_matrix(source, tmp_path / "A.zarr", labels=tmp_path / "names.txt")
    assert (tmp_path / "names.txt").read_text() == "cat\nhat\nbat\n"
    assert m.row_names.tolist() == m.column_names.tolist() == ["cat", "hat", "bat"]
    assert dense(m) == [[0, 1.2, 0], [1, 0, 0.5], [0, 0, -0.2]]
    assert m.dtype == np.float64


def test_numbers_are_rows(tmp_path):
    m = spdist.import_matrix(written(tmp_path, "g.tsv", "% x\n0 2\n5\t1\t3\n"), tmp_path / "A.zarr")
    assert m.shape == (6, 6)
    assert m.to_scipy().nnz == 2
    assert m[5, 1] == 3


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(-5, 5)), max_size=60))
def test_edges_in_one_place_are_added_up(tmp_path_factory, edges):
    folder = tmp_path_factory.mktemp("edges")
    m = spdist.import_matrix(
        written(folder, "g.abc", "".join(f"{a} {b} {w}\n" for a, b, w in edges)), folder / "A.zarr"
    )
    n = max((max(a, b) + 1 for a, b, _ in edges), default=0)
    rows, columns, weights = np.array(edges or np.zeros((0, 3)), int).T
    assert m.shape == (n, n)
    assert np.array_equal(m.to_scipy().toarray(), sp.coo_array((weights, (rows, columns)), shape=(n, n)).toarray())


def test_text_in_pieces(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 200, (3000, 2))
    text = "".join(f"v{a} v{b} {i}\n" for i, (a, b) in enumerate(edges))
    whole = spdist.import_matrix(written(tmp_path, "g.abc", text), tmp_path / "A.zarr", labels=tmp_path / "1")
    monkeypatch.setattr(edge_list, "TEXT_BYTES", 100)
    monkeypatch.setattr(edge_list, "ENTRIES", 7)
    parts = spdist.import_matrix(tmp_path / "g.abc", tmp_path / "B.zarr", labels=tmp_path / "2")
    assert (whole.to_scipy() != parts.to_scipy()).nnz == 0
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert whole.row_names.tolist() == parts.row_names.tolist() == (tmp_path / "1").read_text().split()


def test_a_first_line_may_name_the_columns(tmp_path):
    m = spdist.import_matrix(written(tmp_path, "g.csv", 'from,to,weight\n"a, b",c,2\n'), tmp_path / "A.zarr",
                             labels=tmp_path / "names")  # fmt: skip
    assert dense(m) == [[0, 2], [0, 0]]
    assert (tmp_path / "names").read_text() == "a, b\nc\n"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("g.abc", "a b\n", r"line 1: the vertex 'a' is no number.*--names"),
        ("g.abc", "0 1\n0 -1\n", "line 2: the vertex '-1'"),
        ("g.abc", "0 1 x\n", "line 1: the weight 'x'"),
        ("g.csv", "0,1,2\n0,1,x\n", "line 2: the weight 'x'"),
        ("g.tsv", "0\n", "line 1: 1 field "),
        ("g.tsv", "0 1 2\n0 1 2 3\n", "line 2: 4 fields where line 1 has 3"),
        ("g.tsv", f"0 {1 << 62}\n", "offsets"),
        ("g.tsv", "0 1" * (1 << 20), "no list of edges"),
        ("g.abc.gz", "0 1\n" * 3, "damaged, truncated"),
    ],
)
def test_lines_that_are_no_edges(tmp_path, capsys, name, text, says):
    source = written(tmp_path, name, text)
    if "truncated" in says:
        source.write_bytes(source.read_bytes()[:-9])
    assert cli.main(["import", str(source), str(tmp_path / "A.zarr")]) in (1, 2)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    with pytest.raises(spdist.MatrixError, match=says):
        spdist.import_matrix(source, tmp_path / "A.zarr")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_names_without_a_file(tmp_path, capsys):
    source = str(written(tmp_path, "g.abc", "x x\nx y\ny x\ny y\nz z\nz w\nw z\nw w\n"))
    assert cli.main(["import", source, str(tmp_path / "A.zarr"), "--names", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["row_names"] is facts["column_names"] is True
    assert spdist.open(tmp_path / "A.zarr").row_names.tolist() == list("xyzw")
    m = spdist.import_matrix(source, tmp_path / "B.zarr", names=True, block_size=(2, 2))
    assert m.column_names.tolist() == list("xyzw")
    assert cli.main(["info", str(tmp_path / "B.zarr")]) == 0
    assert "row names     yes" in capsys.readouterr().out
    spdist.import_matrix(written(tmp_path, "n.abc", "0 1"), tmp_path / "C.zarr")
    assert cli.main(["info", str(tmp_path / "C.zarr"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["row_names"] is False
    sp.save_npz(tmp_path / "m.npz", sp.eye_array(3).tocsr())
    with pytest.raises(spdist.InputError, match=r"names=True: .* has no names"):
        spdist.import_matrix(tmp_path / "m.npz", tmp_path / "D.zarr", names=True)


def test_bytes_that_are_no_utf_8_stay(tmp_path):
    (tmp_path / "g.abc").write_bytes(b"caf\xe9 b\n")
    m = spdist.import_matrix(tmp_path / "g.abc", tmp_path / "A.zarr", labels=tmp_path / "names")
    assert (tmp_path / "names").read_bytes() == b"caf\xe9\nb\n"
    assert [name.encode("utf-8", "surrogateescape") for name in m.row_names] == [b"caf\xe9", b"b"]
    c = spdist.matmul(m, m, tmp_path / "C.zarr")
    assert c.row_names.tolist() == m.row_names.tolist()


def test_labels_on_the_command_line(tmp_path, capsys):
    source, names = str(written(tmp_path, "g.abc", "x y 2\n")), str(tmp_path / "names")
    assert cli.main(["import", source, str(tmp_path / "A.zarr"), "--labels", names, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shape"] == [2, 2]
    assert cli.main(["import", source, str(tmp_path / "B.zarr"), "--labels", names]) == 2
    assert "exists" in capsys.readouterr().err
    assert not (tmp_path / "B.zarr").exists()
    assert cli.main(["import", source, str(tmp_path / "A.zarr"), "--labels", names, "--overwrite", "--json"]) == 0
    sp.save_npz(tmp_path / "m.npz", sp.eye_array(3).tocsr())
    assert cli.main(["import", str(tmp_path / "m.npz"), str(tmp_path / "C.zarr"), "--labels", f"{names}2"]) == 2
    assert "has no names of vertices" in capsys.readouterr().err


def test_names_in_capitals_and_archives(tmp_path):
    m = spdist.import_matrix(written(tmp_path, "G.CSV", "0,1,2\n"), tmp_path / "A.zarr")
    assert dense(m) == [[0, 2], [0, 0]]
    (tmp_path / "G.TSV.GZ").write_bytes(gzip.compress(b"0\t1\n"))
    assert spdist.import_matrix(tmp_path / "G.TSV.GZ", tmp_path / "B.zarr").nnz == 1
    for name in ("bcsstk01.tar.gz", "g.zip"):
        with pytest.raises(InputError, match="an archive of files; unpack it"):
            spdist.import_matrix(written(tmp_path, name, ""), tmp_path / "C.zarr")
