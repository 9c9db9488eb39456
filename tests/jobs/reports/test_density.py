"""Pictures of where entries lie."""

from __future__ import annotations

import json
import struct
import zlib
from xml.etree import ElementTree

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import spdist
from spdist import cli
from spdist.jobs.reports import density
from tests.conftest import random_matrix


def expected(m: sp.csr_array, height: int, width: int) -> np.ndarray:
    found = np.zeros((height, width))
    coo = m.tocoo()
    np.add.at(found, (coo.row.astype(int) * height // m.shape[0], coo.col.astype(int) * width // m.shape[1]), 1)
    return found


def pixels(png: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Decode a PNG as the standard says: the pixels' colours by their numbers, and the palette."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, position = {}, 8
    while position < len(png):
        (length,) = struct.unpack(">I", png[position : position + 4])
        kind, content = png[position + 4 : position + 8], png[position + 8 : position + 8 + length]
        assert struct.unpack(">I", png[position + 8 + length : position + 12 + length]) == (zlib.crc32(kind + content),)
        chunks[kind] = content
        position += 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, colour) == (8, 3)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:], np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)


@settings(max_examples=25, deadline=None)
@given(nrows=st.integers(1, 700), ncols=st.integers(1, 700), each=st.integers(0, 6), seed=st.integers(0, 99))
def test_every_entry_is_in_its_cell(nrows, ncols, each, seed):
    m = random_matrix(nrows, ncols, min(each, ncols), seed)
    found = spdist.spy(spdist.save("memory://density.zarr", m, overwrite=True))
    assert found.counts.shape == (min(nrows, 256), min(ncols, 256))
    assert np.array_equal(found.counts, expected(sp.csr_array(m), *found.counts.shape))
    assert (found.entries, found.entries_read) == (m.nnz, m.nnz)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_a_matrix_of_no_rows_or_columns(stored, shape):
    found = spdist.spy(stored("M", sp.csr_array(shape)))
    assert found.counts.sum() == 0
    ElementTree.fromstring(found._repr_html_())


def test_a_large_matrix_is_drawn_from_samples(stored, monkeypatch):
    m = random_matrix(20_000, 20_000, 40, 3)
    m = sp.csr_matrix(sp.vstack([m[:19_000], sp.csr_matrix((1_000, 20_000))]))  # cells without entries, too
    a = stored("M", m)
    whole = spdist.spy(a)
    monkeypatch.setattr(density, "MOST_ENTRIES", 200_000)
    found = spdist.spy(a)
    assert found.entries_read <= 200_000 < found.entries
    assert found.counts.sum() == pytest.approx(m.nnz)
    assert np.allclose(found.counts.sum(axis=1), whole.counts.sum(axis=1))
    assert "drawn from" in found.caption
    monkeypatch.setattr(density, "WHOLE_OFFSETS", 0)  # each offset that is needed by itself
    assert np.array_equal(spdist.spy(a).counts, found.counts)
    assert density.density_map(a, 300_000).entries_read > found.entries_read


def test_darker_is_more_and_clear_is_none(stored):
    m = sp.csr_array(np.array([[1.0, 0.0], [1.0, 1.0]]))
    levels, palette = pixels(spdist.spy(stored("M", m)).to_png())
    assert levels[0, 1] == 0
    assert levels[0, 0] == 255
    assert palette[255].sum() < palette[1].sum()


def test_blocks_count_once(stored):
    m = sp.bsr_array((np.ones((2, 3, 3)), [0, 1], [0, 1, 2]))
    found = spdist.spy(stored("M", m))
    assert (found.shape, found.counts.tolist()) == ((6, 6), [[1, 0], [0, 1]])


def test_the_command_writes_a_picture(stored, tmp_path, capsys):
    a = stored("A", random_matrix(50, 50, 3, 1))
    assert cli.main(["info", a.url, "--spy", str(tmp_path / "A.svg"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["picture"] == str(tmp_path / "A.svg")
    root = ElementTree.fromstring((tmp_path / "A.svg").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert cli.main(["info", a.url, "--spy", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
