"""`check` names everything that is wrong with one stored matrix."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import anndata
import fsspec
import numpy as np
import pytest
import scipy.sparse as sp
import zarr

from spdist import cli
from spdist.api import products as api
from spdist.errors import MatrixError
from spdist.matrices.csr import CSR, from_scipy
from spdist.storage import groups
from spdist.storage.checksums import NOTE
from spdist.storage.groups import ARRAYS
from spdist.storage.matrix import StoredMatrix
from spdist.storage.writer import MatrixWriter
from spdist.verification.stored_matrix import LISTED
from tests.conftest import random_matrix


@pytest.fixture
def matrix(tmp_path) -> StoredMatrix:
    writer = MatrixWriter(tmp_path / "a.zarr", 150, np.dtype("f8"), {})
    writer.layout = replace(writer.layout, chunk=16)
    writer.append(from_scipy(random_matrix(200, 150, 6, 1)))
    return writer.close()


@pytest.mark.filterwarnings("ignore:zarr v3 autosharding", "ignore::anndata.OldFormatWarning")
def test_sound_matrices(tmp_path, matrix):
    blocks = sp.bsr_array(sp.kron(sp.eye_array(20), np.ones((3, 3))), blocksize=(3, 3))
    api.save(tmp_path / "b.zarr", blocks)
    anndata.io.write_elem(zarr.open_group(tmp_path / "f.zarr", mode="w"), "/", random_matrix(40, 30, 5, 2))
    for name, sealed in (("a", True), ("b", True), ("f", False)):
        found = api.check(tmp_path / f"{name}.zarr")
        assert found.ok, found.problems
        assert found.sealed == sealed
    assert api.check(matrix.url).nnz == matrix.nnz


def test_a_zarr_chunk_in_anothers_place_on_a_remote_storage(matrix):
    fs = fsspec.filesystem("memory")
    fs.put(matrix.url, "/misplaced.zarr", recursive=True)
    assert api.check("memory://misplaced.zarr").ok
    fs.copy("/misplaced.zarr/data/c/5", "/misplaced.zarr/data/c/6")
    found = api.check("memory://misplaced.zarr")
    assert found.count == 1
    assert "data/c/6" in found.problems[0]
    assert "chunk 5" in found.problems[0]
    fs.rm("/misplaced.zarr", recursive=True)


def test_a_damaged_table_of_checksums_is_one_problem(matrix):
    table = Path(matrix.url) / "data" / NOTE
    raw = table.read_bytes()
    table.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    found = api.check(matrix.url)
    assert found.count == 1
    assert "data" in found.problems[0]


def test_everything_wrong_is_named(tmp_path, matrix):
    root = Path(matrix.url)
    raw = (root / "data/c/4").read_bytes()
    (root / "data/c/4").write_bytes(raw[:9] + bytes([raw[9] ^ 1]) + raw[10:])
    (root / "indices/c/2").unlink()
    shutil.copy(root / "indices/c/5", root / "indices/c/6")
    (root / "indptr/c/1").unlink()
    os.mkfifo(root / "indptr/c/1")
    (root / "data/c/7777").write_bytes(b"x")
    (root / "spdist-journal").write_bytes(b"x")
    (tmp_path / "a.zarr.spdist-new").mkdir()
    found = api.check(matrix.url)
    wanted = [
        r"a.zarr.spdist-new: left by",
        r"Zarr chunk 1 of array 'indptr' (indptr/c/1) is no regular file",
        r"Zarr chunk 2 of array 'indices' (indices/c/2) is missing",
        r"Zarr chunk 6 of array 'indices' (indices/c/6) is in another's place: it is Zarr chunk 5",
        r"Zarr chunk 4 of array 'data' (data/c/4) is truncated or altered",
        r"data/c/7777: is no file of array 'data'",
        r"spdist-journal: left by",
    ]
    assert len(found.problems) == found.count == len(wanted)
    for line in wanted:
        assert any(line in problem for problem in found.problems), (line, found.problems)
    assert not any("\n" in problem for problem in found.problems)


def test_many_problems_are_counted(matrix):
    for k in range(40):
        (Path(matrix.url) / f"data/c/{k}").unlink()
    found = api.check(matrix.url)
    assert found.count == 40
    assert len(found.problems) == LISTED + 1
    assert "10 more" in found.problems[-1]


def test_edited_metadata_and_tables(matrix):
    for name in ARRAYS[:2]:
        path = Path(matrix.url) / name / "zarr.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"fill_value": 3}))
    found = api.check(matrix.url)
    assert [problem.split(": ")[0][-18:] for problem in found.problems] == ["r/indptr/zarr.json", "/indices/zarr.json"]


@pytest.mark.filterwarnings("ignore:zarr v3 autosharding", "ignore::anndata.OldFormatWarning")
def test_structure_of_a_matrix_from_elsewhere(tmp_path):
    bad = sp.csr_matrix((np.ones(3), np.array([2, 1, 0], np.int32), np.array([0, 0, 3, 3])), shape=(3, 10))
    anndata.io.write_elem(zarr.open_group(tmp_path / "f.zarr", mode="w"), "/", bad)
    found = api.check(tmp_path / "f.zarr")
    assert found.count == 1
    assert "row 1 is not sorted" in found.problems[0]
    del zarr.open_group(tmp_path / "f.zarr", mode="r+")["indices"]
    with pytest.raises(MatrixError, match="not a Zarr group"):
        api.check(tmp_path)


def test_exit_codes(tmp_path, matrix, capsys):
    assert cli.main(["check", matrix.url]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    (Path(matrix.url) / "data/c/3").unlink()
    assert cli.main(["check", matrix.url, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert "Zarr chunk 3 of array 'data'" in found["problems"][0]
    groups.begin(str(tmp_path / "u.zarr"), {})
    assert cli.main(["check", str(tmp_path / "u.zarr")]) == 1
    assert "unfinished" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "none", tmp_path / "none/none"):
        assert cli.main(["check", str(place)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_damaged_values_do_not_hide_what_is_wrong_with_the_structure(tmp_path):
    rows = CSR(np.array([0, 2, 3]), np.array([4, 1, 0], np.int32), np.ones(3), (2, 5))
    writer = MatrixWriter(tmp_path / "a.zarr", 5, np.dtype("f8"), {})
    writer.append(rows)
    writer.close()
    (tmp_path / "a.zarr/data/c/0").unlink()
    problems = api.check(tmp_path / "a.zarr").problems
    assert ["is missing" in problems[0], "row 0 is not sorted" in problems[-1]] == [True, True]
