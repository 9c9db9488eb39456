"""Graphs of METIS and of mcl: readers in plain Python are the oracles, and pymetis takes the graphs as METIS does."""

import gzip
import io
import re

import numpy as np
import pymetis
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from spdist.errors import MatrixError
from spdist.storage.formats import text_numbers
from spdist.storage.formats.graphs import mci, metis
from spdist.storage.formats.source import Source
from spdist.storage.formats.text import TextFile
from spdist.storage.import_export import import_matrix
from spdist.storage.matrix import StoredMatrix

FIGURE = """% a graph of seven vertices
7 11
5 3 2
1 3 4
5 4 2 1
2 3 6 7
1 3 6
5 4 7
6 4
"""


def imported(tmp_path, text: str | bytes, name: str) -> StoredMatrix:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return import_matrix(tmp_path / name, tmp_path / "out.zarr", overwrite=True)


def dense(matrix: StoredMatrix) -> list:
    return matrix.rows(0, matrix.nrows).to_scipy().toarray().tolist()


def refused(tmp_path, text: str, name: str, what: str) -> None:
    with pytest.raises(MatrixError, match=what) as caught:
        imported(tmp_path, text, name)
    assert str(caught.value).isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def said(matrix: StoredMatrix) -> str:
    return matrix.facts["provenance"]["read"]


# -- METIS -------------------------------------------------------------------------------------------------------------


def metis_file(matrix: sp.csr_array, sizes: bool, weights: int, weighted: bool, comments: bool) -> str:
    """Write a graph as METIS' manual says, with sizes and weights that are no weights of edges."""
    digits = f"{int(sizes)}{int(weights > 0)}{int(weighted)}"
    first = f"{matrix.shape[0]} {matrix.nnz // 2 + matrix.nnz % 2}"
    first += f" {digits}" if digits != "000" else ""
    lines = [first + (f" {weights}" if weights > 1 else "")]
    for row in range(matrix.shape[0]):
        lines += ["% 1 2 3"] * (comments and row % 2)
        part = slice(matrix.indptr[row], matrix.indptr[row + 1])
        words = [77] * sizes + [88] * weights
        for column, value in zip(matrix.indices[part].tolist(), matrix.data[part].tolist(), strict=True):
            words += [column + 1, value] if weighted else [column + 1]
        lines.append(" ".join(map(str, words)) + " % 4" * (comments and bool(words)))
    return "\n".join(lines) + "\n"


def symmetric(n: int, density: float, seed: int, weighted: bool) -> sp.csr_array:
    rng = np.random.default_rng(seed)
    values = np.triu(rng.integers(1, 9, (n, n)) / 4 * (rng.random((n, n)) < density), 1)
    values = values if weighted else np.sign(values)
    return sp.csr_array(values + values.T)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 12), density=st.sampled_from([0.0, 0.2, 0.9]), seed=st.integers(0, 5), sizes=st.booleans(),
    weights=st.integers(0, 2), weighted=st.booleans(), comments=st.booleans(), piece=st.sampled_from([1, 9, 1 << 20]),
)  # fmt: skip
def test_metis_is_read_as_it_was_written(n, density, seed, sizes, weights, weighted, comments, piece):
    graph = symmetric(n, density, seed, weighted)
    raw = metis_file(graph, sizes, weights, weighted, comments).encode()
    text = TextFile(Source("a.graph", io.BytesIO(raw), len(raw), ""))
    lines = metis._Lines(metis._read_header(text, "a.graph"))
    defaults, text_numbers.pieces_of.__defaults__ = text_numbers.pieces_of.__defaults__, (piece,)
    try:
        parts = list(lines.entries(text))
    finally:
        text_numbers.pieces_of.__defaults__ = defaults
    rows, columns, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    got = sp.coo_array((values, (rows, columns)), shape=graph.shape)
    np.testing.assert_array_equal(got.toarray(), graph.toarray())
    assert got.nnz == graph.nnz


def test_a_graph_of_metis(tmp_path):
    """METIS' library takes the adjacency that was read."""
    matrix = imported(tmp_path, FIGURE, "a.graph")
    assert "11 edges" in said(matrix)
    rows = matrix.rows(0, 7)
    neighbours = [rows.indices[rows.indptr[i] : rows.indptr[i + 1]] for i in range(7)]
    assert [sorted(map(int, line.split())) for line in FIGURE.splitlines()[2:]] == [
        list(each + 1) for each in neighbours
    ]
    cut, parts = pymetis.part_graph(2, neighbours)
    assert (cut, len(set(parts))) == (3, 2)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("3 1\n2\n1\n\n", [[0, 1, 0], [1, 0, 0], [0, 0, 0]]),
        ("3 1\n2\n1\n", [[0, 1, 0], [1, 0, 0], [0, 0, 0]]),  # without the end of the last, empty line
        ("3 1\n\n3\n2", [[0, 0, 0], [0, 0, 1], [0, 1, 0]]),
        ("\ufeff3 1\r\n\r\n3\r\n2\r\n\r\n\r\n", [[0, 0, 0], [0, 0, 1], [0, 1, 0]]),
        ("% c\n\n2 1 % sizes\n% 2\n2 % after\n%\n1\n% end", [[0, 1], [1, 0]]),
        ("2 1 001\n2 2.5\n1 2.5\n", [[0, 2.5], [2.5, 0]]),
        ("2 1 1\n2 7\n1 7\n", [[0, 7], [7, 0]]),
        ("2 1 11\n5 2 7\n6 1 7\n", [[0, 7], [7, 0]]),
        ("2 1 010 3\n5 5 5 2\n6 6 6 1\n", [[0, 1], [1, 0]]),
        ("2 1 100\n9 2\n9 1\n", [[0, 1], [1, 0]]),
        ("2 2\n1 2\n1\n", [[1, 1], [1, 0]]),  # a loop, once
        ("1 1\n1 1\n", [[2]]),  # a loop, in both directions
        ("0 0\n", []),
    ],
)
def test_graphs_as_people_write_them(tmp_path, text, want):
    assert dense(imported(tmp_path, text, "a.graph")) == want
    assert dense(imported(tmp_path, gzip.compress(text.encode()), "a.metis.gz")) == want


def test_the_hash_is_splitmix64():
    """Its first numbers from seed 0, as published with the generator."""
    seeds = np.array([0, 0x9E3779B97F4A7C15], np.uint64)
    assert metis._mix(seeds).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_what_metis_has_more_is_said(tmp_path):
    assert "with weights" in said(imported(tmp_path, "2 1 111\n9 5 2 7\n9 6 1 7\n", "a.graph"))
    line = said(imported(tmp_path, "2 1 110\n9 5 2\n9 6 1\n", "a.graph"))
    assert line.endswith("left out: sizes of vertices, weights of vertices")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "line 1: the file ends before the numbers"),
        ("% c\n", "line 2: the file ends before the numbers"),
        ("x y\n", "line 1: expected the numbers of vertices and edges"),
        ("1 2 3\n", "line 1: expected the numbers"),
        ("1 0 0111\n", "line 1: expected the numbers"),
        ("1 0 10 5000\n", "line 1: expected the numbers"),
        ("3 1\n2\n", "line 2: the file ends after 1 of 3 vertices"),
        ("2 1\n2\n1\n\n1\n", "line 5: more than the 2 vertices that line 1 announces"),
        ("2 1\n0\n1\n", "line 2: neighbour 0 is outside 1 to 2"),
        ("% c\n2 1\n% d\n2\n3\n", "line 5: neighbour 3 is outside 1 to 2"),
        ("2 1\n1.5\n1\n", "line 2: neighbour 1.5 is outside"),
        ("2 1\n2 a\n1\n", "line 2: 'a' is not a number"),
        ("2 1\n2,1\n1\n", "line 2: '2,1' is not a number"),
        ("2 1\n2\n1-2\n", "line 3: '1-2' is not a number"),
        ("2 1 1\n2 nan\n1 nan\n", "line 2: 'nan' is not a number"),
        ("2 1 1\n2 1e400\n1 1\n", "line 2: '1e400' is not a number"),
        ("2 1 1\n2 7\n1\n", "line 3: 1 number of vertex 2, where 0 before the neighbours and 2 for each"),
        ("2 1 10\n\n1 1\n", "line 2: 0 numbers of vertex 1, where 1 before"),
        ("2 2\n2\n1\n", "line 1: 2 edges announced, but the lines have 2 neighbours"),
        ("3 2\n2 3\n1\n1 2\n", "line 1: 2 edges announced, but the lines have 5"),
        ("3 1\n2\n3\n\n", "an edge is in the line of only one of its vertices"),
        ("2 1 1\n2 7\n1 8\n", "an edge is in the line of only one of its vertices, or has two weights"),
        ("2 1000000\n2\n1\n", "do not fit into a file of 14 bytes"),
        ("1000000000000 0\n", "1,000,000,000,000 rows in a file"),
    ],
)
def test_metis_that_is_wrong(tmp_path, text, what):
    refused(tmp_path, text, "a.graph", what)


# -- mcl ---------------------------------------------------------------------------------------------------------------

HEAD = "(mclheader\nmcltype matrix\ndimensions {}x{}\n)\n"
BODY = "(mclmatrix\nbegin\n"


@pytest.mark.parametrize(
    ("text", "want"),
    [  # what `mcxdump -imx` of mcl 22-282 lists, as rows, columns and values
        ("0 1:1 2:2.5 $\n2 3:0.125 $\n3 3:4 $\n)\n", {(0, 1): 1, (0, 2): 2.5, (2, 3): 0.125, (3, 3): 4}),
        ("0 1:2 1:3 $\n)\n", {(0, 1): 2}),
        ("0 1:2 $\n0 2:3 $\n)\n", {(0, 1): 2, (0, 2): 3}),
        ("1 0 $ 0 2 1 $\n)\n", {(1, 0): 1, (0, 2): 1, (0, 1): 1}),
        ("0:5 1:2 $\n)\n", {(0, 1): 2}),
        ("0 1:-2 2:0 $\n)\n", {(0, 1): -2}),
        ("0 1:2\n 2:1e-3 # comment $ 3\n $\n)\n", {(0, 1): 2, (0, 2): 0.001}),
        (")\n", {}),
        ("0 1 : 2 $\n)\n", {(0, 1): 2}),
        ("0 $ 1 2:2$ )", {(1, 2): 2}),
        ("0 01 $ )\n\n", {(0, 1): 1}),
    ],
)
def test_matrices_of_mcl(tmp_path, text, want):
    matrix = imported(
        tmp_path, "# cline: mcl x\n\nA (graph) by mclx\n" + HEAD.format(4, 4) + "# domains\n" + BODY + text, "a.mci"
    )
    expected = np.zeros((4, 4))
    for place, value in want.items():
        expected[place] = value
    assert dense(matrix) == expected.tolist()
    assert matrix.nnz == len(want)
    assert "an arc from a to b is entry (a, b)" in said(matrix)


def test_mcl_in_one_line_and_packed(tmp_path):
    text = "(mclheader mcltype matrix dimensions 2x3 ) (mclmatrix begin 0 1 $ 2 0:7 $ )"
    assert dense(imported(tmp_path, gzip.compress(text.encode()), "a.mci.gz")) == [[0, 1], [0, 0], [7, 0]]


def test_mcl_with_domains(tmp_path):
    """Numbers of vertices that are not 0, 1, ... become names."""
    text = HEAD.format(3, 2) + "(mclcols\n 30 7 $\n)\n(mclrows\n0 1\n 2 $\n)\n" + BODY + "7 0 2:5 $\n30 1 $\n)\n"
    matrix = imported(tmp_path, text, "a.mci")
    assert dense(matrix) == [[1, 0, 5], [0, 1, 0]]
    assert matrix.names.rows.to_array().tolist() == ["7", "30"]
    assert matrix.names.columns is None
    matrix = imported(tmp_path, HEAD.format(2, 2) + "(mcldoms 4 9 $)\n" + BODY + "4 9:2 $\n)\n", "a.mci")
    assert dense(matrix) == [[0, 2], [0, 0]]
    assert [each.to_array().tolist() for each in matrix.names] == [["4", "9"]] * 2
    assert "names are mcl's numbers" in said(matrix)


def test_only_the_first_matrix_of_mcl_is_read(tmp_path):
    text = HEAD.format(2, 2) + BODY + "0 1:2 $\n)\n"
    matrix = imported(tmp_path, text + text.replace(":2", ":3"), "a.mci")
    assert dense(matrix) == [[0, 2], [0, 0]]
    assert said(matrix).endswith("left out: what follows the matrix")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no line with '\\(mclheader'; it is not a matrix in mcl's native format"),
        ("a b 1\n", "no line with '\\(mclheader'"),
        ("a b 1\n" * 10_001, "line 10,001: not a matrix in mcl's native format"),
        (HEAD.format(2, "x") + BODY + ")\n", "line 4: expected the header"),
        (HEAD.replace("matrix", "vector").format(2, 2) + BODY + ")\n", "line 4: expected the header"),
        ("(mclheader\n", "line 2: expected the header"),
        (HEAD.format(2, 2) + "(mclmatrix\n0 1 $\n)\n", "line 6: expected the word 'begin'"),
        (HEAD.format(2, 2) + "(mclfoo\n0 1 $\n)\n", "line 5: 'mclfoo' is not a section"),
        (HEAD.format(2, 2) + "(mclrows\n0 $\n)\n", "line 6: expected 2 different numbers"),
        (HEAD.format(2, 2) + "(mclrows\n0 0 $\n)\n", "line 7: expected 2 different numbers|line 6"),
        (HEAD.format(2, 2) + "(mclrows\n0 1 2 $\n)\n", "line 6: expected 2 numbers"),
        (HEAD.format(1, 2) + "(mclrows\n9007199254740992 $\n)\n", "line 6: vertex 9,007,199,254,740,992: numbers of"),
        (HEAD.format(2, 2) + "(mclrows\n0 x $\n)\n", "line 6: expected 2 numbers and a \\$, got 'x'"),
        (HEAD.format(2, 3) + "(mcldoms\n0 1 $\n)\n", "line 6: expected 3 different numbers"),
        (HEAD.format(2, 2) + BODY + "0 1:2 $\n", "the file ends before the matrix does"),
        (HEAD.format(2, 2) + BODY + "0 1:2 )\n", "line 7: a column ends without a \\$"),
        (HEAD.format(2, 2) + BODY + "0 1:2 $\n0 2:2 $ )\n", "line 8: row 2 is outside 0 to 1"),
        (HEAD.format(2, 2) + BODY + "2 1:2 $ )\n", "line 7: column 2 is outside 0 to 1"),
        (HEAD.format(2, 2) + BODY + "5 $ )\n", "line 7: column 5 is outside 0 to 1"),
        (HEAD.format(2, 2) + BODY + "0 1.5 $ )\n", "line 7: row 1.5 is outside"),
        (HEAD.format(2, 2) + BODY + "0 -1 $ )\n", "line 7: row -1 is outside"),
        (HEAD.format(2, 2) + "(mcldoms 4 9 $)\n" + BODY + "4 5 $ )\n", "line 8: row 5 is outside mcl's rows"),
        (HEAD.format(2, 2) + BODY + "0 1:2.5abc $ )\n", "line 7: '2.5abc' is not a number"),
        (HEAD.format(2, 2) + BODY + "0 1:nan $ )\n", "line 7: 'nan' is not a number"),
        (HEAD.format(2, 2) + BODY + "0 1::2 $ )\n", "line 7: a colon must stand between"),
        (HEAD.format(2, 2) + BODY + "0 1:2:3 $ )\n", "line 7: a colon must stand between"),
        (HEAD.format(2, 2) + BODY + "0 1: $ 1:2 $ )\n", "line 7: a colon must stand between"),
        (HEAD.format(2, 2) + BODY + ":1 $ )\n", "line 7: a colon must stand between"),
        (HEAD.format(2, 2) + BODY + "0 1:2 $ $ )\n", "line 7: a column without its number"),
        (HEAD.format(2, 10**12) + BODY + ")\n", "1,000,000,000,000 rows in a file"),
    ],
)
def test_mcl_that_is_wrong(tmp_path, text, what):
    refused(tmp_path, text, "a.mci", what)


def test_the_binary_format_of_mcl_is_refused_by_name(tmp_path):
    (tmp_path / "a.mci").write_bytes(mci.BINARY + bytes(range(60)))
    with pytest.raises(MatrixError, match=r"mcl's binary format.*mcx convert"):
        import_matrix(tmp_path / "a.mci", tmp_path / "out.zarr")


def mcl_entries(text: str) -> dict[tuple[int, int], float]:
    """Return the entries of the body of a matrix, by a list of words."""
    found: dict[tuple[int, int], float] = {}
    for column in re.sub(r"\s*:\s*", ":", re.sub("#.*", "", text)).split("$")[:-1]:
        source, *rest = column.split()
        for word in rest:
            row, _, value = word.partition(":")
            if float(value or 1) != 0:
                found.setdefault((int(source.partition(":")[0]), int(row)), float(value or 1))
    return found


WORD = st.builds(
    lambda row, value, space: f"{row}{value}{space}",
    st.integers(0, 5),
    st.sampled_from(["", ":1", ":2.5", ":-1e-3", ":0"]),
    st.sampled_from([" ", "  ", "\n  ", " # 1 $ x\n", "\t"]),
)


@settings(max_examples=100, deadline=None)
@given(columns=st.lists(st.tuples(st.integers(0, 5), st.lists(WORD, max_size=5)), max_size=6), piece=st.integers(1, 40))
def test_mcl_is_read_as_by_the_oracle(columns, piece):
    body = "".join(f"{source} {''.join(words)}$\n" for source, words in columns)
    raw = (body + ")\n").encode()
    text = TextFile(Source("a.mci", io.BytesIO(raw), len(raw), ""))

    class Head:
        line, rest, shape, domains = 1, b"", (6, 6), (None, None)

    class Job:
        path = "a.mci"

    found: dict[tuple[int, int], float] = {}
    defaults, text_numbers.pieces_of.__defaults__ = text_numbers.pieces_of.__defaults__, (piece,)
    try:
        for part in mci._Body(Job(), Head()).entries(text):
            for row, column, value in zip(*(each.tolist() for each in part), strict=True):
                found.setdefault((row, column), value)
    finally:
        text_numbers.pieces_of.__defaults__ = defaults
    assert found == mcl_entries(body)
