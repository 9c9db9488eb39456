"""Products that follow their operands have the bits of products that are made anew."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist import cli
from spdist.applications import growth
from spdist.errors import InputError, MatrixError, SpdistError

KINDS = [
    (False, {}), (True, {}), (True, {"top_n": 5}), (True, {"threshold": 0.3}), (False, {"top_n": 3}),
    (True, {"semiring": "plus_pair", "top_n": 4}),  # with ties
    (False, {"semiring": "max_times"}), (True, {"semiring": "min_plus", "threshold": 0.4}),
]  # fmt: skip


def matrix(nrows, ncols, seed):
    return sp.random_array((nrows, ncols), density=0.15, format="csr", rng=np.random.default_rng(seed))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(a, b, options):
    """Compare C.zarr with the product made anew; nothing else may be left."""
    found = spdist.open("C.zarr")
    spdist.multiply(a, b, "N.zarr", overwrite=True, **options)
    same, wanted = found.to_scipy(), spdist.open("N.zarr").to_scipy()
    for name in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(same, name), getattr(wanted, name))
    assert spdist.check("C.zarr").ok
    assert spdist.multiply(a, b, "C.zarr", resume=True, **options).state == "already finished"


@pytest.mark.parametrize(("transpose_b", "options"), KINDS)
@pytest.mark.parametrize("is_same", [True, False])
def test_as_made_anew(here, transpose_b, options, is_same):
    options = {**options, "transpose_b": transpose_b}
    is_same = is_same and transpose_b
    a = spdist.save("A.zarr", matrix(60, 40, 1))
    b = a if is_same else spdist.save("B.zarr", matrix(50 if transpose_b else 40, 40, 2))
    spdist.multiply(a, b, "C.zarr", **options)
    for step in range(2):
        a = spdist.append("A.zarr", matrix(5 + step, 40, 3 + step))
        if transpose_b:
            b = a if is_same else spdist.append("B.zarr", matrix(3, 40, 7 + step))
        found = spdist.update("C.zarr")
        assert found.shape == (a.nrows, b.nrows if transpose_b else 40)
        check(a, b, options)
    kept = ["A.zarr", "C.zarr", "N.zarr"] if is_same else ["A.zarr", "B.zarr", "C.zarr", "N.zarr"]
    assert sorted(path.name for path in here.iterdir()) == kept


def test_only_what_is_new_is_computed(here, monkeypatch):
    a = spdist.save("A.zarr", matrix(300, 40, 1))
    spdist.multiply(a, a, "C.zarr", transpose_b=True)
    assert spdist.update("C.zarr").nrows == 300
    spdist.append("A.zarr", matrix(2, 40, 2))
    shapes, multiply = [], growth.api.multiply

    def noted(a, b, c, **options):
        shapes.append((a.nrows, b.nrows))
        return multiply(a, b, c, **options)

    monkeypatch.setattr(growth, "api", SimpleNamespace(multiply=noted))
    spdist.update("C.zarr")
    assert shapes == [(2, 302), (302, 2)]


def test_only_columns_are_new(here):
    a, b = spdist.save("A.zarr", matrix(30, 40, 1)), spdist.save("B.zarr", matrix(20, 40, 2))
    spdist.multiply(a, b, "C.zarr", transpose_b=True)
    b = spdist.append("B.zarr", matrix(4, 40, 3))
    assert spdist.update("C.zarr").shape == (30, 24)
    check(a, b, {"transpose_b": True})


def test_names_grow_too(here):
    a = spdist.save("A.zarr", matrix(3, 40, 1), row_names=list("abc"))
    spdist.multiply(a, a, "C.zarr", transpose_b=True)
    spdist.append("A.zarr", matrix(2, 40, 2), row_names=list("de"))
    c = spdist.update("C.zarr")
    assert c.row_names.tolist() == c.column_names.tolist() == list("abcde")


def test_command_and_operands_that_moved(here, capsys):
    spdist.save("A.zarr", matrix(30, 40, 1))
    assert cli.main(["multiply", "A.zarr", "A.zarr", "C.zarr", "--transpose-b"]) == 0
    (here / "A.zarr").rename("M.zarr")
    assert cli.main(["append", "M.zarr", "M.zarr"]) == 0
    capsys.readouterr()
    assert cli.main(["update", "C.zarr", "--json"]) == 2
    assert "A.zarr: there is no such matrix" in json.loads(capsys.readouterr().out)["error"]
    assert cli.main(["update", "C.zarr", "M.zarr", "--json"]) == 2
    assert "name A and B, or neither" in json.loads(capsys.readouterr().out)["error"]
    assert cli.main(["update", "C.zarr", "M.zarr", "M.zarr", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shape"] == [60, 60]
    check("M.zarr", "M.zarr", {"transpose_b": True})


def test_what_cannot_follow(here):
    a = spdist.save("A.zarr", matrix(40, 40, 1))
    spdist.save("S.zarr", matrix(40, 40, 1))
    with pytest.raises(InputError, match=r"S\.zarr is no product of"):
        spdist.update("S.zarr")
    for options in ({"mask": "S.zarr"}, {"transpose_a": True}, {"epilogue": spdist.Epilogue(normalize="l1")}):
        spdist.multiply(a, a, "C.zarr", overwrite=True, **options)
        with pytest.raises(InputError, match="was made with a mask, an epilogue"):
            spdist.update("C.zarr")
    spdist.multiply(a, a, "C.zarr", overwrite=True)
    spdist.append("A.zarr", matrix(2, 40, 2))
    with pytest.raises(InputError, match=r"A\.zarr got more rows, for which A has no columns"):
        spdist.update("C.zarr")
    spdist.save("A.zarr", matrix(42, 40, 9), overwrite=True)
    with pytest.raises(InputError, match=r"A\.zarr is not what C was made of"):
        spdist.update("C.zarr")
    with pytest.raises(MatrixError, match="there is no such matrix"):
        spdist.update("none.zarr")


def test_a_failure_leaves_c(here, monkeypatch):
    a = spdist.save("A.zarr", matrix(40, 40, 1))
    before = spdist.open(spdist.matmul(a, a.T, "C.zarr").url).fingerprint()
    spdist.append("A.zarr", matrix(2, 40, 2))

    def fail(*_):
        raise SpdistError("no more")

    monkeypatch.setattr(growth, "_write", fail)
    with pytest.raises(SpdistError, match="no more"):
        spdist.update("C.zarr")
    assert spdist.open("C.zarr").fingerprint() == before
    assert sorted(path.name for path in here.iterdir()) == ["A.zarr", "C.zarr"]
