"""The grammar of lists of edges: the reader in Python, the compiled one, Python's csv and pandas read the same edges.

``EDGE_LISTS=10000 pytest tests/storage/test_edge_grammar.py`` generates more lists than the few hundred of each run.
"""

from __future__ import annotations

import csv
import io
import os
import re
from dataclasses import dataclass, field
from unittest import mock

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spdist.errors import InputError, MatrixError
from spdist.storage.formats.edges import edge_list
from spdist.storage.formats.edges.header import doubt_of, is_header
from spdist.storage.formats.reading import Reading, ReadOptions
from spdist.storage.formats.source import Source

LISTS = int(os.environ.get("EDGE_LISTS", "250"))
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "space": " "}

Edges = list[tuple[str, str, float]]


def read(text: bytes, ending: str, options: ReadOptions, *, compiled: bool) -> tuple[Edges, Reading] | str:
    """Return the edges of a text by the names of their vertices, and what was read; or the error."""
    name = f"g{ending}"
    source, reading = Source(name, io.BytesIO(text), len(text), "", ending), Reading(name, "")
    try:
        with mock.patch.object(edge_list, "COMPILED_BYTES", -1 if compiled else 1 << 40):
            reader = edge_list.EdgeText(source, options, reading)
            parts = list(reader.edges())
    except MatrixError as error:
        return str(error)
    names = reader.vertices.listed().decode("utf-8", "surrogateescape").split("\n")
    edges = [edge for part in parts for edge in part.tolist()]
    if not options.names:
        return [(str(a), str(b), w) for a, b, w in edges], reading
    return [(names[a], names[b], w) for a, b, w in edges], reading


def read_alike(text: bytes, ending: str, options: ReadOptions, piece: int = 1 << 20) -> tuple[Edges, Reading] | str:
    """Return what both readers find, which must be the same."""
    with mock.patch.object(edge_list, "TEXT_BYTES", piece):
        slow, fast = (read(text, ending, options, compiled=compiled) for compiled in (False, True))
    assert slow == fast or (str(slow).count("nan") and str(slow) == str(fast))
    return slow


# -- lists that are written here ---------------------------------------------------------------------------------------


@dataclass
class Written:
    """A list of edges, as text and as the edges that it says."""

    ending: str
    options: ReadOptions
    text: str
    edges: Edges = field(default_factory=list)
    encoding: str = "utf-8"

    @property
    def raw(self) -> bytes:
        return self.text.encode(self.encoding)


LETTERS = st.text("abcXYZ0189_.:/-é日'", min_size=1, max_size=5)
SPACED = st.text("ab c'-", min_size=1, max_size=6).map(str.strip).filter(bool)
QUOTED = st.text('ab ,;"#%\t', min_size=1, max_size=6).map(str.strip).filter(bool)
WEIGHTS = st.one_of(
    st.integers(-99, 10**17).map(str), st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(["0", "1.", ".5", "-0.0", "+3", "1e5", "2.5E-3", "007", "inf", "1e-400", "0.1000000000000000055"]),
)  # fmt: skip


@st.composite
def lists(draw, kinds=("comma", "semicolon", "tab", "space")) -> Written:
    """Draw a list of edges: separator, quotes, header, further columns, comments, blank lines, line ends."""
    kind = draw(st.sampled_from(kinds))
    ending = draw(st.sampled_from([".csv"] if kind in ("comma", "semicolon") else [".tsv", ".abc", ".txt", ".edges"]))
    quotes = ending != ".abc" and kind != "space" and draw(st.booleans())
    names = QUOTED if quotes else LETTERS if kind == "space" else SPACED
    plain = st.one_of(LETTERS, names)
    further = draw(st.integers(0, 2)) if draw(st.booleans()) else -1  # -1: no weights
    rows, edges = [], []
    for _ in range(draw(st.integers(1, 8))):
        a, b, w = draw(plain), draw(plain), draw(WEIGHTS)
        rest = ["x" + draw(LETTERS) for _ in range(further)]
        rows.append([a, b] if further < 0 else [a, b, w.replace(".", ",") if kind == "semicolon" else w, *rest])
        edges.append((a, b, 1.0 if further < 0 else float(w)))
    header = draw(st.sampled_from([None, True]))
    if header:
        rows.insert(0, ["source", "target", "weight", "x", "y"][: len(rows[0])])
    elif doubt_of(*((fields[0], fields[1:]) if (fields := [[each.encode() for each in row] for row in rows]) else ())):
        header = False
    text = io.StringIO()
    ends = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    style = csv.QUOTE_MINIMAL if not draw(st.booleans()) else csv.QUOTE_ALL
    quoting = {"quoting": style, "quotechar": '"'} if quotes else {"quoting": csv.QUOTE_NONE, "quotechar": None}
    writer = csv.writer(text, delimiter=SEPARATORS[kind], lineterminator="\n", **quoting)
    for row in rows:
        if draw(st.integers(0, 9)) == 0:
            text.write(draw(st.sampled_from(["# a comment\n", "\n", "  % one\n", "   \n"])))
        if quotes and any(each[:1] in "#%" for each in row[:1]):
            text.write(SEPARATORS[kind].join('"' + each.replace('"', '""') + '"' for each in row) + "\n")
        else:
            writer.writerow(row)
    whole = text.getvalue().removesuffix("\n" if draw(st.booleans()) else "\0").replace("\n", ends)
    options = ReadOptions(names=True, header=header, quotes=None if quotes else False if ending != ".abc" else None,
                          separator=kind if kind in ("comma", "semicolon") else None)  # fmt: skip
    return Written(ending, options, whole, edges, draw(st.sampled_from(["utf-8", "utf-8-sig"])))


def same(found: Edges, wanted: Edges) -> bool:
    return str([(a, b, w) for a, b, w in found]) == str([(a.strip() if a.strip() else a, b, w) for a, b, w in wanted])


@settings(max_examples=LISTS, deadline=None)
@given(lists(), st.sampled_from([300, 1 << 20]))
def test_lists_say_what_was_written(written, piece):
    found = read_alike(written.raw, written.ending, written.options, piece)
    assert not isinstance(found, str), found
    assert found[0] == written.edges


MUTATIONS = st.lists(
    st.tuples(st.sampled_from(["insert", "drop", "double"]), st.integers(0, 10**6),
              st.sampled_from([",", ";", "\t", " ", '"', "\n", "\r", "#", "x", "1", ".", "\0", "nan", "NA", "", "é"])),
    min_size=1, max_size=3,
)  # fmt: skip


def mutated(text: str, changes: list[tuple[str, int, str]]) -> str:
    for how, where, what in changes:
        at = where % (len(text) + 1)
        text = {"insert": text[:at] + what + text[at:], "drop": text[:at] + text[at + 1 :], "double": text[:at] * 2}[
            how
        ]
    return text


def by_csv(text: str, options: ReadOptions, delimiter: str, *, weighted: bool) -> Edges | None:
    """Return the edges that Python's csv finds in a text of full lines; None if it makes no edges of it."""
    lines = re.sub("\r\n?", "\n", text).removeprefix("\ufeff").split("\n")
    kept = "\n".join(line for line in lines if line.strip() and line.lstrip()[0] not in "#%")
    quoting = csv.QUOTE_MINIMAL if options.quotes is None else csv.QUOTE_NONE
    try:
        rows = list(
            csv.reader(io.StringIO(kept), delimiter=delimiter, quoting=quoting, skipinitialspace=True, strict=True)
        )
        rows = [[each.strip() for each in row] for row in rows if row]
        has_header = (
            is_header([each.encode() for each in rows[0]]) if options.header is None and rows else options.header
        )
        rows = rows[1:] if has_header else rows
        edges = []
        for row in rows:
            word = row[2] if weighted and len(row) > 2 else "1"
            word = word.replace(",", ".") if delimiter == ";" else word
            edges.append((row[0], row[1], float(word)))
    except (csv.Error, ValueError, IndexError):
        return None
    return edges


PLAIN = re.compile(r"(commas|semicolons|tabs|spaces) separate.*columns 1\b.* and 2\b.*(no weights|from column 3\b)")
"""What is said of a list whose header does not choose columns."""


@settings(max_examples=LISTS, deadline=None)
@given(lists(("comma", "semicolon")), MUTATIONS, st.sampled_from([300, 1 << 20]))
def test_mutated_lists_are_read_as_by_csv_or_refused_by_line(written, changes, piece):
    text = mutated(written.text, changes).replace("\t", " ")  # csv skips spaces before a quote, and no tabs
    found = read_alike(text.encode(), written.ending, written.options, piece)
    if isinstance(found, str):
        assert re.search(r"line [\d,]+:|separator|UTF-16|its first record has", found), found
        return
    said = "; ".join(found[1].found)
    if found[0] and not PLAIN.match(said):
        return
    stripped = [(a.strip(), b.strip(), w) for a, b, w in found[0]]
    # a header whose third column has no name says that it holds no weights
    separator, weighted = SEPARATORS[written.options.separator or "comma"], "no weights" not in said
    wanted = by_csv(text, written.options, separator, weighted=weighted)
    if wanted is None:
        assert re.search(r'" +(,|;|\n|\r|$)', text)  # csv takes no spaces after a closing quote
        return
    assert str(stripped) == str(wanted)


@settings(max_examples=LISTS, deadline=None)
@example(Written(".tsv", ReadOptions(header=True, quotes=False), "a\tb\t   \na\tb\t", [], "utf-8"), [], True, 300)
@given(lists(("tab", "space")), MUTATIONS, st.booleans(), st.sampled_from([300, 1 << 20]))
def test_mutated_lists_by_tabs_and_spaces(written, changes, names, piece):
    """No oracle splits by tabs in some lines and spaces in others: here each line is split by hand."""
    text = mutated(written.text, changes)
    options = ReadOptions(names=names, header=written.options.header, quotes=written.options.quotes)
    found = read_alike(text.encode(), written.ending, options, piece)
    if isinstance(found, str):
        assert re.search(r"line [\d,]+:|separator|UTF-16", found), found
    elif '"' not in text and re.match(r"tabs|spaces", said := "; ".join(found[1].found)) and PLAIN.match(said):
        lines = [each for each in re.sub("\r\n?", "\n", text).removeprefix("\ufeff").split("\n") if each.strip()]
        lines = [each for each in lines if each.lstrip()[0] not in "#%"]
        rows = [[word.strip() for word in each.split("\t")] if "\t" in each else each.split() for each in lines]
        has_header = options.header or (options.header is None and rows and is_header([w.encode() for w in rows[0]]))
        # a header whose third column has no name says that it holds no weights
        width = 3 if "no weights" not in said else 2
        edges = [(row[0], row[1], float(row[2]) if len(row[:width]) > 2 else 1.0) for row in rows[bool(has_header) :]]
        wanted = edges if names else [(str(int(a)), str(int(b)), w) for a, b, w in edges]
        assert str(found[0]) == str(wanted)


@settings(max_examples=50, deadline=None)
@given(lists(("comma", "semicolon", "tab")))
def test_lists_are_what_pandas_reads(written):
    separator = SEPARATORS[written.options.separator or "tab"]
    lines = [each for each in re.split("\r\n|\r|\n", written.text) if each.strip() and each.lstrip()[0] not in "#%"]
    frame = pd.read_csv(io.StringIO("\n".join(lines)), sep=separator, header=0 if written.options.header else None,
                        dtype=str, keep_default_na=False, quoting=csv.QUOTE_NONE if written.options.quotes is False
                        or written.ending == ".abc" else csv.QUOTE_MINIMAL)  # fmt: skip
    found = read_alike(written.raw, written.ending, written.options)
    assert not isinstance(found, str), found
    assert [edge[:2] for edge in found[0]] == [tuple(row) for row in frame.iloc[:, :2].to_numpy().tolist()]


# -- single cases ------------------------------------------------------------------------------------------------------


NAMED = ReadOptions(names=True)


@pytest.mark.parametrize(
    ("ending", "text", "edges"),
    [
        (".csv", "source,target\na,b\n", [("a", "b", 1)]),
        (".csv", "\n# x\nfrom;to;weight\na;b;1,5\n", [("a", "b", 1.5)]),
        (".csv", "a\tb\t2\n", [("a", "b", 2)]),
        (".csv", 'Source,Target,Type,Weight\na,b,"un,directed",2\n', [("a", "b", 2)]),
        (".csv", 'a,b,1,"two\nlines"\nc,d,2,x\n', [("a", "b", 1), ("c", "d", 2)]),
        (".csv", '"a",b,"1"\n  "c" , d ,2\n', [("a", "b", 1), ("c", "d", 2)]),
        (".csv", '5" pipe,b\n', [('5" pipe', "b", 1)]),
        (".csv", '"#a",b\n', [("#a", "b", 1)]),
        (".csv", "a|x,b;y,1\n", [("a|x", "b;y", 1)]),
        (".tsv", "gene A\tgene B\t0.5\ngene B\tgene C\n", [("gene A", "gene B", 0.5), ("gene B", "gene C", 1)]),
        (".tsv", '"gene A"\t"b"\t1\n', [("gene A", "b", 1)]),
        (".abc", '"a"\tb\n', [('"a"', "b", 1)]),
        (".txt", "protein1 protein2 combined_score\n9606.A 9606.B 490\n", [("9606.A", "9606.B", 490)]),
        (".txt", "node1 node2\nnode2 node3\n", [("node1", "node2", 1), ("node2", "node3", 1)]),
        (".txt", "a,b,1\nc,d,2\n", [("a", "b", 1), ("c", "d", 2)]),
        (".edges", "% sym\n1, 2\n3, 4\n", [("1", "2", 1), ("3", "4", 1)]),
        (".txt", "a b 1 2009\nb c 2 2010\n", [("a", "b", 1), ("b", "c", 2)]),
        (".tsv", '"from" "to" "weight"\n"1" "a" "b" 0.5\n"2" "b" "c" 2\n', [("a", "b", 0.5), ("b", "c", 2)]),
        (".tsv", "from\tto\n1\ta\tb\n2\tb\tc\n", [("a", "b", 1), ("b", "c", 1)]),
        (".csv", ",source,target\n0,a,b\n1,b,c\n", [("a", "b", 1), ("b", "c", 1)]),
        (".csv", "Id,Source,Target\n0,a,b\n", [("a", "b", 1)]),
        (".csv", "Source,Target,Type\na,b,Directed\n", [("a", "b", 1)]),
        (".csv", "source,target,rating,time\na,b,5,1082040961\n", [("a", "b", 5)]),
        (".csv", "source,target,papers\na,b,5\n", [("a", "b", 5)]),
        (".txt", "protein1 protein2 fusion combined_score\n9.A 9.B 0 490\n", [("9.A", "9.B", 490)]),
        (".tsv", "#node1\tnode2\tnode1_id\tcombined_score\na\tb\t9.A\t0.9\n", [("a", "b", 0.9)]),
        (".txt", "# id source target weight\n1 a b 2\n", [("a", "b", 2)]),
        (".csv", "sep=;\na;b;1,5\n", [("a", "b", 1.5)]),
        (".csv", '"sep=,"\nsource,target,weight\na,b,1\n', [("a", "b", 1)]),
        (".csv", "a,b,1,1082040961\n", [("a", "b", 1)]),
        (".csv", "source,target,weight,note\na,b,1\nb,c,2,x\n", [("a", "b", 1), ("b", "c", 2)]),
        (".tsv", "x\tNA\t1\nnull\tnan\t2\n", [("x", "NA", 1), ("null", "nan", 2)]),
        (".edgelist", "007 7\n", [("007", "7", 1)]),
    ],
)  # fmt: skip
def test_files_as_people_have_them(ending, text, edges):
    for ends in ("\n", "\r\n", "\r"):
        found = read_alike(text.replace("\n", ends).encode(), ending, NAMED)
        assert not isinstance(found, str), found
        assert found[0] == edges


@pytest.mark.parametrize(
    ("ending", "text", "says"),
    [
        (".csv", "a,b,NA\nb,c,2\n", r"line 1: the weight 'NA' is no number; .*--header"),
        (".csv", '0,1,"1,000"\n', "line 1: the weight '1,000' is no number"),
        (".csv", "a,b,nan\n", "line 1: the weight 'nan' is NaN; pass --allow-nan"),
        (".csv", "a,b,1e999\n", "line 1: the weight '1e999' is too large for float64"),
        (".csv", "a,b,1_0\n", "line 1: the weight '1_0' is no number"),
        (".csv", "a,b,\n", "line 1: the weight '' is empty"),
        (".csv", '"a\nx",b,1\n', r"line 1: the name 'a\\nx' has a line break"),
        (".csv", 'a,b,1\n"a"x,b,1\n', "line 2: text follows a closing quote"),
        (".csv", 'a,b,1\n"a,b,1\nc,d,1\n', "line 2: a quote is opened and not closed"),
        (".csv", "a,b\n,b\n", "line 2: a vertex has an empty name"),
        (".csv", "gene1,gene2\nTP53,MDM2\n", r"line 1: 'gene1 gene2' may name columns or vertices; pass --header"),
        (".csv", "a;b,c\n", "commas and semicolons could both separate"),
        (".csv", "a;b;1,5\na;b;1.5\n", "line 2: a decimal point, and in line 1 a decimal comma"),
        (".csv", "a b 1\n", "line 1: 1 field where .*--separator space"),
        (".tsv", "a,b,1\n", "commas end|line 1: 1 field .*--separator comma"),
        (".abc", "a, b, 1\n", "commas end the words of its lines; say what separates: --separator comma"),
        (".tsv", "\tb\t1\n", "line 1: a vertex has an empty name"),
        (".tsv", "x y\tb\t1\na b 1\n", "line 2: it has no tab, but in line 1 tabs separate"),
        (".tsv", "a\tb\t1\tz\na\tb\t1\n", "line 2: 3 fields where line 1 has 4"),
        (".tsv", "a\tb\n\0\tb\n", "line 2: a zero byte"),
        (".tsv", "V1\tV2\na\tb\n", "line 1: 'V1 V2' may name columns or vertices; pass --header or --no-header"),
        (".tsv", "TF\ttarget\nMYC\tTP53\n", "line 1: 'TF target' may name"),
        (".csv", "u,v\n1,2\n2,3\n", "line 1: 'u v' may name"),
        (".csv", "0,1\na,b\n", "line 1: '0 1' may number the columns"),
        (".tsv", "V1\tV2\n1\t5\t6\n2\t6\t7\n", "line 1: it has 2 fields, and the lines after it have 3"),
        (".txt", "4 4 3\n0 1\n1 2\n", "line 1: it has 3 fields, and the lines after it have 2"),
        (".txt", "// a\nb c\n", "line 1: '// a' may be a comment"),
        (".txt", "a b {'weight': 1}\n", "line 1: the weight \"{'weight':\" is no number; networkx.write_weighted"),
        (".csv", "a,b,1,000\nb,c,2,000\n", "line 1: '1,000' may be one number or two fields"),
        (".csv", "a;b;1.000,5\n", "commas and semicolons could both separate"),
        (".csv", "source,target,type,weight\na,b,x,1\nb,c,y,1,000\n", "line 3: 5 fields where line 1 has 4"),
        (".csv", "source,target,weight\na,b,1,\n", "line 1: the header has 3 names, and the lines after it have 4 f"),
        (".csv", "0,1,0\n1,0,1\n0,1,0\n", "line 1: it may be the first row of an adjacency matrix"),
        (".csv", ",u,v\n0,5,6\n1,6,7\n", "line 1: ' u' may name columns or vertices"),
        (".csv", ":START_ID,:END_ID\na,b\n", "line 1: ':START_ID :END_ID' may name"),
        (".tsv", "from\tto\n7\ta\tb\n9\tb\tc\n", "line 1: the header has 2 names, and the lines after it have 3"),
        (".csv", "source,target,papers,authors\na,b,1,2\n", "line 1: it names 4 columns, and not clearly"),
        (".tsv", "#ID\tGene A\tGene B\tname\n1\t2\t3\tx\n", "line 1: it names 4 columns, and not clearly"),
        (".csv", "source,target\na,b\nsource,target\n", "line 3: the header of line 1 again"),
        (".csv", "a,b\n\ufeffb,c\n", "line 2: a byte order mark inside the text"),
        (".csv", "#cats,#dogs\n", "line 1: a comment, and no line is an edge; .*put them in quotes"),
        (".edges", "%%MatrixMarket matrix coordinate pattern general\n3 3 1\n2 1\n", "line 1: .*--format mtx"),
        (".txt", "c x\np sp 3 2\na 1 2 5\n", "line 2: this is a file of DIMACS"),
        (".tsv", "version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "line 1: this is a pointer of Git LFS"),
        (".csv", "<!DOCTYPE html>\n<title>a, b</title>\n", "line 1: this is HTML"),
        (".txt", '{"nodes": []}\n', "line 1: this is JSON"),
    ],
)  # fmt: skip
def test_lines_that_are_named(ending, text, says):
    found = read_alike(text.encode(), ending, NAMED)
    assert isinstance(found, str)
    assert re.search(says, found), found


def test_columns_are_chosen_by_number_or_by_name():
    text = b"id,a,b,kind,w\n1,x,y,k,0.5\n2,y,z,k,2\n"
    for columns in ((2, 3, 5), ("a", "b", "w")):
        found = read_alike(text, ".csv", ReadOptions(names=True, columns=columns, header=True))
        assert not isinstance(found, str), found
        assert found[0] == [("x", "y", 0.5), ("y", "z", 2)]
        assert found[1].left_out == ["columns 1 (id), 4 (kind)"]
    found = read_alike(text, ".csv", ReadOptions(names=True, columns=(2, 3), header=True))
    assert found[0] == [("x", "y", 1), ("y", "z", 1)]
    assert "no column 'c' in its header" in read_alike(text, ".csv", ReadOptions(names=True, columns=("a", "c")))
    assert "has 5 fields, and column 6" in read_alike(text, ".csv", ReadOptions(names=True, columns=(2, 6)))
    for wrong in ((1,), (0, 1), (1, 1), "12", (1, 2, 3, 4)):
        with pytest.raises(InputError, match="name the columns"):
            ReadOptions(columns=wrong)


def test_options_say_what_lines_do_not():
    assert read_alike(b"a,b\nc,d\n", ".csv", ReadOptions(names=True, header=True))[0] == [("c", "d", 1)]
    assert read_alike(b"from,to\n", ".csv", ReadOptions(names=True, header=False))[0] == [("from", "to", 1)]
    assert read_alike(b"a,b c\n", ".tsv", ReadOptions(names=True, separator="comma"))[0] == [("a", "b c", 1)]
    assert read_alike(b"a\tb c 1\n", ".tsv", ReadOptions(names=True, separator="space"))[1] is not None
    assert read_alike(b'"a",b\n', ".csv", ReadOptions(names=True, quotes=False))[0] == [('"a"', "b", 1)]
    nan = read_alike(b"a,b,nan\n", ".csv", ReadOptions(names=True, allow_nan=True))[0][0][2]
    assert nan != nan


def test_rare_doubts_are_named():
    lines = [f"a{i}\tb{i}\t1" for i in range(2000)]
    lines[700], lines[900], lines[1500] = "a b 2", "a\tb", "#x\ty\t1"
    found = read_alike("\n".join(lines).encode(), ".tsv", NAMED)
    assert not isinstance(found, str), found
    assert "tabs separate, spaces in line 701" in found[1].found
    assert "line 901 without a weight, taken as 1" in found[1].found
    assert found[1].left_out == ["1 comment (after the first edge in line 1,501)"]
    padded = read_alike(b"a, b,1\nc,d,2\n", ".csv", NAMED)
    assert padded[0] == [("a", "b", 1), ("c", "d", 2)]
    assert padded[1].left_out == ["spaces around names in line 1"]


def test_what_was_read_is_true():
    """Weights are named only if there are any; odd names are."""
    assert read_alike(b"a\tb\n", ".tsv", NAMED)[1].found[-1] == "vertices from columns 1 and 2, no weights"
    assert read_alike(b"", ".tsv", NAMED)[1].found == ["no edges"]
    assert read_alike(b"from,to\n", ".csv", NAMED)[1].found == ["no edges", "line 1 is the header"]
    assert read_alike(b"% bip\n1 2\n", ".tsv", NAMED)[1].found[0].startswith("line 1 says bipartite")
    odd = read_alike("M\xfcller\tb\n".encode("latin-1"), ".tsv", NAMED)[1].found[-1]
    assert odd == "1 name not UTF-8, kept as written (first: b'M\\xfcller')"
    odd = read_alike("a\xa0\tb\né\tc d\n".encode(), ".tsv", NAMED)[1].found[-1]
    assert odd == "1 name with a no-break space or the like around, kept as written (first: 'a\\xa0')"


def test_columns_of_a_commented_header_are_chosen_by_name():
    text = b"#id\tGene A\tGene B\tscore\n1\tx\ty\t7\n"
    found = read_alike(text, ".tsv", ReadOptions(names=True, columns=("Gene A", "Gene B", "score")))
    assert not isinstance(found, str), found
    assert found[0] == [("x", "y", 7)]
    assert "line 1, a comment, names the columns" in found[1].found


def test_names_of_columns_are_not_shifted():
    """R's header has no name for the first column; whether another one lacks it cannot be known."""
    text = b"from\tto\tw\n7\ta\tb\t1\n9\tb\tc\t2\n"
    index = read_alike(b",u,v\n0,5,6\n1,6,7\n", ".csv", ReadOptions(names=True, header=True))
    assert "line 1: it names 3 columns, and not clearly those of vertices" in index
    by_name = read_alike(text, ".tsv", ReadOptions(names=True, header=True, columns=("from", "to")))
    assert "the header has 3 names, and the lines after it have 4 fields" in by_name
    found = read_alike(text, ".tsv", ReadOptions(names=True, header=True, columns=(2, 3, 4)))
    assert found[0] == [("a", "b", 1), ("b", "c", 2)]
