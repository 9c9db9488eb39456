"""Applications that are killed at one place and run again: the result of SciPy, no fault in it, nothing beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist import cli
from spdist.storage.lock import hold_target, remove_remains
from tests.conftest import random_matrix
from tests.support import kill_at

GRAPH = sp.csr_array(abs(random_matrix(30, 30, 3, 4)) * 9).ceil()
WHOLE = "spdist.storage.notes.remove_remains"
"""What a product calls when it is whole and still has its notes."""


def killed(where: str, number: int, when: str, *words: str | Path) -> None:
    """Run a command that kills itself at the call of a function."""
    command = [sys.executable, kill_at.__file__, where, str(number), when, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr


def same_lengths(place: Path) -> None:
    found = spdist.open(place).to_scipy().tocoo()
    dense = np.full(found.shape, np.inf)
    dense[found.row, found.col] = found.data
    edges = np.full(GRAPH.shape, np.inf)
    edges[GRAPH.nonzero()] = GRAPH[GRAPH.nonzero()]
    np.fill_diagonal(edges, 0)
    np.testing.assert_array_equal(dense, (edges[:, :, None] + edges).min(axis=1))


@pytest.mark.parametrize(
    ("where", "when", "again"),
    [
        (WHOLE, "before", "--resume"),
        ("spdist.storage.groups.add_facts", "after", ""),
        ("spdist.jobs.by_rows.replace_target", "after", "--resume"),
        ("spdist.jobs.by_rows.replace_target", "after", "--overwrite"),
    ],
)
def test_paths(stored, tmp_path, where, when, again):
    stored("G", GRAPH)
    command = ["shortest-paths", tmp_path / "G.zarr", tmp_path / "D.zarr", "--hops", "2"]
    killed(where, 1, when, *command)
    assert cli.main([*map(str, command), *again.split()]) == 0
    same_lengths(tmp_path / "D.zarr")
    assert cli.main(["check", str(tmp_path / "D.zarr")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["D.zarr", "G.zarr"]


@pytest.mark.parametrize("name", ["discard", "remove"])
def test_no_reader_meets_half_of_a_deleted_matrix(tmp_path, name):
    place = tmp_path / "D.zarr.spdist-step-1"
    spdist.save(place, GRAPH)
    script = f"""import os, shutil
from spdist.stores.registry import at
shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), 9)
at({str(place)!r}).{name}()"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert not place.exists()
    (left,) = tmp_path.iterdir()
    with hold_target(tmp_path / "D.zarr"):
        remove_remains(str(tmp_path / "D.zarr"))
    assert not left.exists()


def test_triangles_leave_nothing_in_their_folder(stored, tmp_path, capsys):
    stored("G", GRAPH)
    command = ["triangles", tmp_path / "G.zarr", "--folder", tmp_path / "shared", "--json"]
    for where in ("spdist.storage.external_sort.RowSorter.blocks", "spdist.stores.removal.shutil.rmtree"):
        killed(where, 1, "before", *command)
        assert list((tmp_path / "shared").iterdir())
    assert cli.main([*map(str, command)]) == 0
    edges = (GRAPH + GRAPH.T).toarray() > 0
    np.fill_diagonal(edges, False)
    assert (
        json.loads(capsys.readouterr().out)["triangles"] == np.trace(np.linalg.matrix_power(edges.astype(int), 3)) / 6
    )
    assert not list((tmp_path / "shared").iterdir())
