"""The step of bundle adjustment on a small problem of its form; what is none is refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from tests.conftest import load_workflow


@pytest.fixture
def step(tmp_path, monkeypatch):
    """Return a function that makes a step in a fresh folder, where J.npz has 4 cameras; it gives the exit code."""
    monkeypatch.chdir(tmp_path)
    rng, cameras, points, observations = np.random.default_rng(1), 4, 60, 300
    seen = rng.integers(0, cameras, observations), np.arange(observations) % points
    indptr = np.arange(observations + 1)
    parts = (
        sp.bsr_array(
            (rng.standard_normal((observations, 2, width)), which, indptr), shape=(2 * observations, width * n)
        )
        for which, width, n in zip(seen, (9, 3), (cameras, points), strict=True)
    )
    sp.save_npz("J.npz", sp.csr_array(sp.hstack(list(parts))))
    return load_workflow("bundle_adjustment").main


def test_a_step_solves_the_normal_equations(step, capsys):
    assert step(["J.npz", "--cameras", "4", "--damping", "1e-2"]) == 0
    assert "equal: True" in capsys.readouterr().out


REFUSED = [
    (["none.npz"], "none.npz: cannot be read: "),
    (["text.npz"], "text.npz: is no sparse matrix: name a file"),
    (["line.npz"], "line.npz: has 1 dimension, not 2"),
    (["far.npz"], "far.npz: is no sparse matrix: name a file"),
    (["broken.npz"], "broken.npz: is no sparse matrix: name a file"),
    (["nan.npz", "--cameras", "4"], "nan.npz: holds float64, not all of it finite"),
    (["odd.npz", "--cameras", "4"], "odd.npz: is 599 x 216, which are no 2 rows an observation"),
    (["J.npz", "--cameras", "0"], "9 columns for each of 0 cameras and 3 for each point: give as many as J has"),
    (["J.npz", "--cameras", "24"], "each of 24 cameras"),
    (["J.npz", "--cameras", "3"], " has 0 cameras where it is of one: give as many as J has"),
    (["J.npz", "--cameras", "5"], "with 5 cameras, observation 0 has 2 cameras where it is of one"),
    (["J.npz", "--cameras", "4", "--damping", "-1"], "--damping -1.0 is no finite number of 0 and more"),
    (["J.npz", "--cameras", "4", "--damping", "nan"], "--damping nan is no finite number of 0 and more"),
    (["J.npz", "--cameras", "many"], "invalid int value: 'many'"),
]


def break_values(place: str, out: str) -> None:
    """Copy an archive whose values do not begin as what is compressed does."""
    with zipfile.ZipFile(place) as archive:
        at = archive.getinfo("data.npy").header_offset
    content = bytearray(Path(place).read_bytes())
    name, extra = (int.from_bytes(content[at + i : at + i + 2], "little") for i in (26, 28))
    content[at + 30 + name + extra] = 0x07
    Path(out).write_bytes(content)


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=lambda one: " ".join(one) if list is type(one) else "")
def test_refusals(step, capsys, arguments, message):
    j = sp.load_npz("J.npz")
    sp.save_npz("nan.npz", j * np.nan)
    sp.save_npz("odd.npz", j[1:])
    Path("text.npz").write_text("no archive")
    sp.save_npz("line.npz", sp.coo_array(np.ones(9)))
    far = j.copy()
    far.indices[5] = 10**6
    sp.save_npz("far.npz", far)
    break_values("J.npz", "broken.npz")
    try:
        code = step(arguments)
    except SystemExit as error:  # of an option
        code = error.code
    errors = capsys.readouterr()
    assert (code, errors.out) == (2, "")
    assert message in errors.err
    assert errors.err.count("\n") == 1


def test_equations_that_are_singular_ask_for_damping(step, capsys):
    j = sp.load_npz("J.npz")
    j.data[:] = 1024.0  # the three columns of a point are the same
    sp.save_npz("flat.npz", j)
    assert step(["flat.npz", "--cameras", "4", "--damping", "0"]) == 1
    assert capsys.readouterr().err.endswith("raise --damping\n")
