"""Rows appended to stored matrices: the content is SciPy's, files are shared, nothing is lost."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import spdist
from spdist import cli
from spdist.errors import CorruptError, InputError, MatrixError
from spdist.storage import groups, writer
from spdist.storage.writer import MatrixWriter
from tests.conftest import random_matrix


def same(stored, m):
    found = stored.to_scipy()
    assert found.shape == m.shape
    assert found.dtype == m.dtype
    assert found.nnz == m.nnz
    assert not (found != m).nnz
    assert spdist.check(stored.url).ok


@pytest.mark.parametrize("chunk", [4, 64, 1 << 17])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "?", "c16"])
def test_rows_follow_each_other(tmp_path, monkeypatch, chunk, dtype):
    monkeypatch.setattr(writer, "chunk_of", lambda _: chunk)
    parts = [sp.csr_array(random_matrix(n, 30, 4, n)).astype(dtype) for n in (20, 1, 33, 40)]
    spdist.save(tmp_path / "A.zarr", parts[0])
    for count in range(2, 5):
        grown = spdist.append(tmp_path / "A.zarr", parts[count - 1])
        same(grown, sp.vstack(parts[:count], format="csr"))
    assert grown.data.chunk == chunk
    assert [before["rows"] for before in groups.read_facts(grown.url)["appended"]] == [20, 21, 54]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=4), st.integers(0, 6), st.integers(0, 99))
def test_any_shape(lengths, ncols, seed):
    parts = [sp.csr_array(random_matrix(max(n, 1), max(ncols, 1), 2, seed + n))[:n, :ncols] for n in lengths]
    stored = spdist.save("memory://append.zarr", parts[0], overwrite=True)
    for part in parts[1:]:
        stored = spdist.append("memory://append.zarr", part)
    same(stored, sp.vstack(parts, format="csr"))


def test_full_chunks_are_shared_and_the_old_version_stays_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "chunk_of", lambda _: 16)
    a, more = (sp.csr_array(random_matrix(n, 30, 4, n)) for n in (50, 9))
    old = spdist.save(tmp_path / "A.zarr", a)
    full = tmp_path / "A.zarr/data/c/0"
    number, reader = full.stat().st_ino, old.rows(0, 50)
    grown = spdist.append(tmp_path / "A.zarr", more)
    assert full.stat().st_ino == number
    np.testing.assert_array_equal(reader.data, a.data)
    last = tmp_path / f"A.zarr/data/c/{grown.data.nchunks - 1}"
    assert last.stat().st_nlink == full.stat().st_nlink == 1


def test_files_are_copied_where_links_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "chunk_of", lambda _: 16)
    monkeypatch.setattr("os.link", refuse)
    a, more = (sp.csr_array(random_matrix(n, 30, 4, n)) for n in (50, 9))
    spdist.save(tmp_path / "A.zarr", a)
    same(spdist.append(tmp_path / "A.zarr", more), sp.vstack([a, more], format="csr"))


def refuse(*_):
    raise PermissionError("no links here")


def fill_the_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_other_forms_are_written_anew(tmp_path, monkeypatch):
    a = sp.csr_array(random_matrix(50, 30, 4, 1))
    spdist.save(tmp_path / "A.zarr", a)
    monkeypatch.setattr(writer, "_has_form", lambda *_: False)
    same(spdist.append(tmp_path / "A.zarr", a), sp.vstack([a, a], format="csr"))


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, more = (sp.csr_array(random_matrix(n, 3, 2, n)) for n in (4, 2))
    spdist.save("A.zarr", a, row_names=list("abcd"), column_names=list("xyz"))
    spdist.save("B.zarr", more, row_names=["e", "f"], column_names=list("xyz"))
    spdist.save("C.zarr", more, row_names=["e", "f"], column_names=list("xzy"))
    grown = spdist.append("A.zarr", "B.zarr")
    assert grown.row_names.tolist() == list("abcdef")
    assert grown.column_names.tolist() == list("xyz")
    assert spdist.append("A.zarr", more, row_names=["g", "h"]).row_names.tolist() == list("abcdefgh")
    with pytest.raises(InputError, match=r"A\.zarr has names of rows, and the new rows have none: pass row_names"):
        spdist.append("A.zarr", more)
    with pytest.raises(InputError, match=r"column 1 is 'y' in .*A\.zarr, and 'z' in .*C\.zarr"):
        spdist.append("A.zarr", "C.zarr")
    with pytest.raises(MatrixError, match="row_names"):
        spdist.append("A.zarr", more, row_names=["g"])
    spdist.save("D.zarr", a)
    with pytest.raises(InputError, match=r"the new rows have names, and rows of .*D\.zarr have none"):
        spdist.append("D.zarr", "B.zarr")
    assert spdist.open("A.zarr").nrows == 8


def test_a_matrix_doubles_itself(tmp_path, capsys):
    a = sp.csr_array(random_matrix(50, 30, 4, 1))
    place = str(tmp_path / "A.zarr")
    spdist.save(place, a)
    assert cli.main(["append", place, place]) == 0
    assert "100 x 30" in capsys.readouterr().out
    same(spdist.open(place), sp.vstack([a, a], format="csr"))


@pytest.mark.parametrize(
    ("rows", "error", "match"),
    [
        (sp.csr_array((2, 4)), MatrixError, "has 3 columns, and the new rows 4"),
        (sp.csr_array((2, 3), dtype=complex), MatrixError, "holds float64, and the new rows complex128"),
        (sp.bsr_array(np.eye(3), blocksize=(3, 3)), InputError, "are in blocks"),
        ("none.zarr", MatrixError, "there is no such matrix"),
    ],
)
def test_what_is_not_appended(tmp_path, monkeypatch, rows, error, match):
    monkeypatch.chdir(tmp_path)
    before = spdist.save("A.zarr", sp.eye_array(3, format="csr")).fingerprint()
    with pytest.raises(error, match=match):
        spdist.append("A.zarr", rows)
    assert spdist.open("A.zarr").fingerprint() == before
    assert [path.name for path in tmp_path.iterdir()] == ["A.zarr"]


def test_a_failure_leaves_the_old_matrix(tmp_path, monkeypatch):
    a = sp.csr_array(random_matrix(50, 30, 4, 1))
    before = spdist.save(tmp_path / "A.zarr", a).fingerprint()
    monkeypatch.setattr(MatrixWriter, "close", fill_the_disk)
    with pytest.raises(spdist.SpdistError, match="the disk is full"):
        spdist.append(tmp_path / "A.zarr", a)
    assert spdist.open(tmp_path / "A.zarr").fingerprint() == before
    assert [path.name for path in tmp_path.iterdir()] == ["A.zarr"]


def test_a_damaged_matrix_does_not_grow(tmp_path):
    a = sp.csr_array(random_matrix(50, 30, 4, 1))
    spdist.save(tmp_path / "A.zarr", a)
    chunk = tmp_path / "A.zarr/data/c/0"
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\0")
    with pytest.raises(CorruptError):
        spdist.append(tmp_path / "A.zarr", a)
