"""Words of lists of edges, as compiled code finds them: those that reading line by line finds."""

from __future__ import annotations

import io
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spdist.errors import MatrixError
from spdist.storage.formats import edge_list, edge_words
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
    source = Source("g.csv" if commas else "g.abc", io.BytesIO(text), len(text), "")
    with mock.patch.object(edge_list, "COMPILED_BYTES", -1 if large else 1 << 40):
        reader = edge_list.EdgeText(source, names=names)
    try:
        found = list(reader.edges())
    except MatrixError as error:
        return str(error)
    return b"".join(part.tobytes() for part in found), reader.vertices.listed(), reader.vertices.count


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
    words = edge_words.words_of(f"a b {word}\n".encode(), commas=False, numbers=False)
    assert words.weights.tolist() == [float(word)]


def test_many_names():
    rng = np.random.default_rng(3)
    pairs = rng.integers(0, 200_000, (300_000, 2))
    text = b"".join(b"v%d w%d\n" % (a, b) for a, b in pairs.tolist())
    assert edges_of(text, False, True, True) == edges_of(text, False, True, False)


def test_names_that_fall_in_one_place(monkeypatch):
    monkeypatch.setattr(edge_words, "BASIS", 1)
    table = edge_words.ManyNames()
    words = [b"%d" % i for i in range(500)]
    for size in (100, 500):
        keys = np.full(size, 5, np.uint64)
        text = b"".join(words[:size])
        lengths = np.fromiter(map(len, words[:size]), np.int64)
        found = table.number_all(edge_words.Words(text, np.cumsum(lengths) - lengths, lengths, keys, np.empty(0), 0))
        assert found.tolist() == list(range(size))
    assert table.listed() == b"".join(word + b"\n" for word in words)
