"""Words of lists of edges, as compiled code finds them: those that reading line by line finds."""

from __future__ import annotations

import io
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spdist.errors import MatrixError
from spdist.storage.formats.edges import edge_list, many_names, words
from spdist.storage.formats.edges.dialect import Dialect
from spdist.storage.formats.edges.doubts import no_doubts
from spdist.storage.formats.edges.fields import SPACE
from spdist.storage.formats.reading import Reading, ReadOptions
from spdist.storage.formats.source import Source

NAMES = st.one_of(
    st.integers(0, 40).map(str), st.text('ab#%."é-', min_size=1, max_size=6), st.sampled_from(["7" * 19, "x y", "0x1"])
)
WEIGHTS = st.one_of(
    st.floats().map(repr), st.floats(0, 100).map("{:.6g}".format), st.integers(-9, 10**20).map(str),
    st.sampled_from(["1e5", "1E-22", "1e-23", "+.5", "-5.", "1e", "--1", "1_0", "nan", "-inf", ".", "1.2.3", ""]),
)  # fmt: skip
LINES = st.one_of(
    st.tuples(NAMES, NAMES), st.tuples(NAMES, NAMES, WEIGHTS), st.tuples(NAMES), st.just(()), st.tuples(st.just("# x"))
)


def edges_of(text: bytes, commas: bool, names: bool, large: bool):
    """Return the edges and names of a text, or the error message."""
    name = "g.csv" if commas else "g.abc"
    source, reading = Source(name, io.BytesIO(text), len(text), "", name[1:]), Reading(name, "")
    try:
        with mock.patch.object(edge_list, "COMPILED_BYTES", -1 if large else 1 << 40):
            reader = edge_list.EdgeText(source, ReadOptions(names=names), reading)
        found = list(reader.edges())
    except MatrixError as error:
        return str(error)
    return b"".join(part.tobytes() for part in found), reader.vertices.listed(), reader.vertices.count, reading


@settings(max_examples=400, deadline=None)
@given(
    st.lists(LINES, max_size=8), st.booleans(), st.booleans(), st.sampled_from(["\n", "\r\n", " \n", "\n\n"]),
    st.booleans(), st.sampled_from([100, 1 << 20]),
)  # fmt: skip
def test_words_are_those_of_single_lines(lines, commas, names, ends, last, piece):
    text = ends.join(("," if commas else "\t").join(words) for words in lines) + (ends if last else "")
    with mock.patch.object(edge_list, "TEXT_BYTES", piece):
        found = [edges_of(text.encode(), commas, names, large) for large in (False, True)]
    assert found[0] == found[1]


@pytest.mark.parametrize("word", ["0.1", "123456.789", "1e22", "9007199254740993", "1e-22", "4.35", "-2.5E+3", "007"])
def test_weights_are_rounded_correctly(word):
    found = words.words_of(f"a b {word}\n".encode(), Dialect(SPACE, False, (0, 1, 2), 3), numbers=False)
    assert found.weights.tolist() == [float(word)]


def test_many_names():
    rng = np.random.default_rng(3)
    pairs = rng.integers(0, 200_000, (300_000, 2))
    text = b"".join(b"v%d w%d\n" % (a, b) for a, b in pairs.tolist())
    assert edges_of(text, False, True, True) == edges_of(text, False, True, False)


def test_names_that_fall_in_one_place(monkeypatch):
    monkeypatch.setattr(many_names, "BASIS", 1)
    table = many_names.ManyNames()
    names = [b"%d" % i for i in range(500)]
    for size in (100, 500):
        keys = np.full(size, 5, np.uint64)
        text = b"".join(names[:size])
        lengths = np.fromiter(map(len, names[:size]), np.int64)
        begins = np.cumsum(lengths) - lengths
        found = table.number_all(words.Words(text, begins, lengths, keys, np.empty(0), 0, no_doubts()))
        assert found.tolist() == list(range(size))
    assert table.listed() == b"".join(name + b"\n" for name in names)
