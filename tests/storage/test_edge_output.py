"""Lists of edges that are written: they read back as the same matrix, or are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import spdist
from spdist.storage.formats.edges import edge_output
from tests.support.pieces import take_pieces
from tests.support.strategies import DTYPES, csr_matrices


def exported(tmp_path: Path, m, name: str = "out.abc", names: list[str] | None = None) -> Path:
    spdist.save(tmp_path / "A.zarr", m, row_names=names, column_names=names)
    spdist.export_matrix(tmp_path / "A.zarr", tmp_path / name)
    return tmp_path / name


def vertices(m) -> int:
    """Return the vertices that a list of edges shows."""
    coo = m.tocoo()
    return int(max(coo.row.max(initial=-1), coo.col.max(initial=-1))) + 1


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(0, 9), st.sampled_from([d for d in DTYPES if d.kind != "c"]))
def test_what_is_written_reads_back(tmp_path_factory, data, n, dtype):
    folder = tmp_path_factory.mktemp("edges")
    floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
    m = data.draw(csr_matrices((n, n), floats if dtype.kind == "f" else st.integers(0, 100), dtype)).to_scipy()
    back = spdist.import_matrix(exported(folder, m), folder / "B.zarr").to_scipy()
    k = vertices(m)
    assert back.shape == (k, k)
    expected = m[:k, :k].astype(np.float64)
    assert back.nnz == expected.nnz
    assert (back != expected).nnz == 0


@pytest.mark.parametrize("name", ["g.abc", "g.tsv", "g.abc.gz", "g.tsv.bz2", "g.tsv.xz"])
def test_parts_and_packings(tmp_path, monkeypatch, name):
    take_pieces(monkeypatch, 50)
    monkeypatch.setattr(edge_output, "LINES", 7)
    m = sp.random_array((40, 40), density=0.1, rng=np.random.default_rng(3), format="csr") + sp.eye_array(40)
    path = exported(tmp_path, sp.csr_array(m), name, [f"gene{i}" for i in range(40)])
    back = spdist.import_matrix(path, tmp_path / "B.zarr", names=True)
    order = [int(each.removeprefix("gene")) for each in back.row_names]
    assert sorted(order) == list(range(40))
    assert (back.to_scipy() != sp.csr_array(m)[order][:, order]).nnz == 0


def test_lines(tmp_path):
    m = sp.csr_array(([True, True], ([0, 2], [2, 1])), shape=(3, 3))
    assert exported(tmp_path, m).read_text() == "0\t2\t1\n2\t1\t1\n"
    spdist.save(tmp_path / "A.zarr", m * 0.1, overwrite=True, row_names="abc", column_names="abc")
    spdist.export_matrix(tmp_path / "A.zarr", tmp_path / "named.tsv")
    assert (tmp_path / "named.tsv").read_text() == "a\tc\t0.1\nc\tb\t0.1\n"


def test_names_with_blanks_commas_and_bytes_that_are_not_utf8(tmp_path):
    names = ["gene A", "b,c;d", "caf\udce9", 'say "x"']
    path = exported(tmp_path, sp.eye_array(4, k=1).tocsr(), "g.tsv", names)
    first = [line.split(b"\t") for line in path.read_bytes().splitlines()]
    assert [each[0] for each in first] == [b"gene A", b"b,c;d", b"caf\xe9"]
    assert [each[1] for each in first] == [b"b,c;d", b"caf\xe9", b'say "x"']


@pytest.mark.parametrize(
    ("m", "names", "says"),
    [
        (sp.eye_array(5), None, ""),
        (sp.csr_array(([1.0], ([1], [2])), shape=(9, 9)), None, "left out the last 6 vertices without an edge"),
        (sp.csr_array(([1.0], ([1], [2])), shape=(4, 4)), list("abcd"), "left out 2 vertices without an edge"),
        (sp.csr_array((1, 1)), ["a"], "left out 1 vertex without an edge"),
    ],
)
def test_vertices_that_are_left_out_are_said(tmp_path, caplog, m, names, says):
    exported(tmp_path, m.tocsr(), names=names)
    assert says in caplog.text
    assert bool(caplog.text) == bool(says)


@pytest.mark.parametrize("name", ["", "a\tb", "#a", "%", " a", "a ", "a\rb", "\0", "\ufeffa", '"a"'])
def test_names_that_cannot_be_read_back_are_refused(tmp_path, name):
    spdist.save(tmp_path / "A.zarr", sp.eye_array(2), row_names=["x", name], column_names=["x", name])
    with pytest.raises(spdist.MatrixError, match=r"A\.zarr: the name .* cannot be written to a list of edges"):
        spdist.export_matrix(tmp_path / "A.zarr", tmp_path / "g.tsv")
    assert [path.name for path in tmp_path.iterdir()] == ["A.zarr"]


def test_a_quote_is_part_of_a_name_in_abc(tmp_path):
    assert exported(tmp_path, sp.eye_array(1).tocsr(), names=['"a"']).read_text() == '"a"\t"a"\t1.0\n'


@pytest.mark.parametrize(
    ("m", "rows", "columns", "says"),
    [
        (sp.eye_array(2, 3), None, None, "is 2 x 3: rows and columns of a list of edges are the same"),
        (sp.eye_array(2), ["a", "b"], ["b", "a"], "names of rows and of columns differ"),
        (sp.eye_array(2), ["a", "b"], None, "names of rows and of columns differ"),
        (sp.eye_array(2), ["a", "a"], ["a", "a"], "several rows have one name"),
        (sp.eye_array(2, dtype=complex), None, None, "holds complex128: a list of edges has real values"),
    ],
)
def test_matrices_that_are_no_graphs_are_refused(tmp_path, m, rows, columns, says):
    spdist.save(tmp_path / "A.zarr", m.tocsr(), row_names=rows, column_names=columns)
    with pytest.raises(spdist.MatrixError, match=says):
        spdist.export_matrix(tmp_path / "A.zarr", tmp_path / "g.abc")
    assert [path.name for path in tmp_path.iterdir()] == ["A.zarr"]
