"""Files of another user in the way of a target: refused before any work, by owner, and nothing is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import scipy.sparse as sp

import spdist
from spdist.stores import removal
from spdist.stores.local import LocalLocation

ROOT = Path(__file__).parents[2]
IS_ROOT = os.geteuid() == 0
SOMEONE = 1001 if IS_ROOT else 0
"""The user who runs commands; 0 for this one, whose right to write is taken away instead."""
REMAINS = "new", "old", "begin", "columns", "scratch-ab"


def as_someone(folder: Path, *commands: list[str]) -> list[tuple[int, str]]:
    """Run commands as another user, if this one is root; return exit code and stderr of each."""
    words = [sys.executable, ROOT / "tests/support/as_user.py", SOMEONE, folder, json.dumps(commands)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    found: list[tuple[int, str]] = json.loads(done.stdout)
    return found


def make(folder: Path, mode: int, name: str) -> Path:
    """Make a folder of a mode, and in it a folder with a file that the other user may not remove; return the latter."""
    folder.mkdir()
    place = folder / name
    place.mkdir()
    (place / "x").touch()
    folder.chmod(mode)
    place.chmod(0o755 if IS_ROOT else 0o555)
    return place


@pytest.fixture
def open_folder():
    """Yield a folder that everybody can reach and write to, which pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="spdist-users-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder
        for path in folder.rglob("*"):
            if path.is_dir():
                path.chmod(0o755)


def test_what_another_user_left_is_refused_by_owner(open_folder):
    matrix = open_folder / "A.zarr"
    spdist.save(matrix, sp.eye_array(9, format="csr"))
    modes = [0o777, 0o1777] if IS_ROOT else [0o777]
    left = [make(open_folder / f"{mode:o}-{name}", mode, f"C.zarr.spdist-{name}") for mode in modes for name in REMAINS]
    targets = [str(place.parent / "C.zarr") for place in left]
    multiply = [["multiply", str(matrix), str(matrix), c, "--engine", "scipy", "--json"] for c in targets]
    transpose = [["transpose", str(matrix), c, "--overwrite"] for c in targets]
    found = as_someone(open_folder, *multiply, *transpose)
    for place, (code, said) in zip(left + left, found, strict=True):
        assert code == 2, (place, said)
        assert said.startswith(f"spdist: {place}, of user {place.owner()}, cannot be removed"), said
        assert said.count("\n") == 1
        assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_the_matrix_of_another_user_is_not_replaced(open_folder):
    matrix, target = open_folder / "A.zarr", open_folder / "C.zarr"
    for place in (matrix, target):
        spdist.save(place, sp.eye_array(9, format="csr"))
    closed = open_folder / "closed"
    closed.mkdir()
    for folder in (target / "data" / "c", closed):
        folder.chmod(0o755 if IS_ROOT else 0o555)
    operands = ["multiply", str(matrix), str(matrix)]
    found = as_someone(
        open_folder,
        [*operands, str(target), "--overwrite", "--engine", "scipy"],
        ["transpose", str(matrix), str(target), "--overwrite"],
        [*operands, str(closed / "C.zarr"), "--engine", "scipy"],
        ["transpose", str(matrix), str(closed / "C.zarr")],
    )
    assert [code for code, _ in found] == [2, 2, 2, 2], found
    assert all("ask its owner to remove it" in said for _, said in found[:2]), found
    assert all("may not be written to" in said for _, said in found[2:]), found
    assert (spdist.open(target).to_scipy() != sp.eye_array(9)).nnz == 0
    assert not list(open_folder.glob("C.zarr.*"))


def test_what_the_system_does_not_remove_is_refused_too(tmp_path, monkeypatch):
    """As NFS does for root: permissions look right, and the removal fails."""
    monkeypatch.setattr(LocalLocation, "discard", lambda self: None)
    spdist.save(tmp_path / "A.zarr", sp.eye_array(3, format="csr"))
    (tmp_path / "C.zarr.spdist-new").mkdir()
    with pytest.raises(spdist.InputError, match=r"C\.zarr\.spdist-new, of user .*, cannot be removed"):
        spdist.multiply(tmp_path / "A.zarr", tmp_path / "A.zarr", tmp_path / "C.zarr")
    assert not (tmp_path / "C.zarr").exists()


def test_owners_without_names(tmp_path):
    assert removal.owner_of(tmp_path / "none") == "unknown"
    assert removal.owner_of(tmp_path) == tmp_path.owner()
