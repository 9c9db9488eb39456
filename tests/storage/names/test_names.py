"""Names of rows and columns: stored with a matrix, and carried to what is made of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anndata
import numpy as np
import pytest
import scipy.sparse as sp
import zarr

import spdist
from spdist.storage.names import names as names_module
from spdist.storage.names.names import AxisNames, given_names
from tests.conftest import random_matrix

ROOT = Path(__file__).resolve().parents[3]
ROWS = ["cat", "", "日本", "a b\tc", "Ünïcode 🐈", "\udcff"]
COLUMNS = ["x", "y", "y", ""]


def named(place, rows=ROWS, columns=COLUMNS, seed=1) -> spdist.storage.matrix.StoredMatrix:
    return spdist.save(place, random_matrix(len(rows), len(columns), 2, seed), row_names=rows, column_names=columns)


def names(m) -> tuple[list[str] | None, list[str] | None]:
    return tuple(None if found is None else found.tolist() for found in (m.row_names, m.column_names))


@pytest.mark.parametrize("place", ["A.zarr", "memory://names/A.zarr"])
def test_names_are_kept(tmp_path, place):
    m = named(place if "://" in place else tmp_path / place)
    assert names(m) == names(spdist.open(m.url)) == (ROWS, COLUMNS)
    assert m.row_names.dtype == object
    assert spdist.check(m.url).ok
    spdist.save(m.url, sp.eye_array(2), overwrite=True)
    assert names(spdist.open(m.url)) == (None, None)


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (0, 0)])
def test_of_an_empty_matrix(tmp_path, shape):
    rows, columns = (["" for _ in range(n)] for n in shape)
    m = spdist.save(tmp_path / "A.zarr", sp.csr_array(shape), row_names=rows, column_names=columns)
    assert names(m) == (rows, columns)
    assert spdist.check(m.url).ok
    assert names(spdist.transpose(m, tmp_path / "T.zarr")) == (columns, rows)


def test_other_programs_read_the_matrix(tmp_path):
    m = named(tmp_path / "A.zarr")
    group = zarr.open_group(m.url, mode="r")
    assert abs(anndata.io.read_elem(group) - m.to_scipy()).max() == 0
    assert bytes(group["spdist-columns"][:]) == "".join(f"{name}\n" for name in COLUMNS).encode()


def test_text_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("spdist.storage.writer.PIECE_BYTES", 1 << 10)
    many = [f"vertex number {i}é" for i in range(5000)]
    m = spdist.save(tmp_path / "A.zarr", sp.eye_array(5000), row_names=many)
    assert len(list((tmp_path / "A.zarr/spdist-rows/c").iterdir())) > 80
    assert m.row_names.tolist() == many
    assert names(spdist.transpose(m, tmp_path / "T.zarr")) == (None, many)


@pytest.mark.parametrize(("given", "message"), [
    (["a", "b"], "row_names: 2 names where 3 are needed"),
    (["a", "b", "c", "d"], "4 names where 3"),
    (["a", "b\nc", "d"], "line break"),
    (["a", "b", "\ud800"], "UTF-8 cannot write"),
])  # fmt: skip
def test_wrong_names_are_refused(tmp_path, given, message):
    with pytest.raises(spdist.MatrixError, match=message):
        spdist.save(tmp_path / "A.zarr", sp.eye_array(3), row_names=given)
    assert not list(tmp_path.iterdir())


def test_damage_is_found(tmp_path):
    m = named(tmp_path / "A.zarr")
    file = tmp_path / "A.zarr/spdist-rows/c/0"
    file.write_bytes(file.read_bytes()[:-5] + b"12345")
    assert any("spdist-rows" in line for line in spdist.check(m.url).problems)
    with pytest.raises(spdist.CorruptError, match="spdist-rows"):
        _ = m.row_names
    with pytest.raises(spdist.CorruptError, match="spdist-rows"):
        spdist.multiply(m, m, tmp_path / "C.zarr", transpose_b=True)
    assert not (tmp_path / "C.zarr").exists()
    assert names(spdist.matmul(m, m, tmp_path / "C.zarr", transpose_b=True, names=False)) == (None, None)
    spdist.similarity(m, tmp_path / "S.zarr", top_n=2, names=False)
    assert names(spdist.open(tmp_path / "S.zarr")) == (None, None)


def test_names_of_columns_alone(tmp_path):
    m = spdist.save(tmp_path / "A.zarr", sp.eye_array(2), column_names=["a", "b"])
    assert names(m) == (None, ["a", "b"])
    assert m.names.filled(AxisNames(given_names("xy", "rows", 2), None)).rows is not None
    assert m.names.filled(names_module.NO_NAMES).columns is not None


# -- carried to what is made -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [None, 0])
def test_a_product_has_names_of_its_operands(tmp_path, axis):
    a, b = named(tmp_path / "A.zarr"), named(tmp_path / "B.zarr", COLUMNS, ["p", "q", "r"], 2)
    options = {} if axis is None else {"axis": axis, "top_n": 2}
    spdist.multiply(a, b, tmp_path / "C.zarr", **options)
    assert names(spdist.open(tmp_path / "C.zarr")) == (ROWS, ["p", "q", "r"])
    spdist.multiply(a, a, tmp_path / "D.zarr", transpose_a=True, **options)
    assert names(spdist.open(tmp_path / "D.zarr")) == (COLUMNS, COLUMNS)
    spdist.multiply(a, a, tmp_path / "D.zarr", transpose_b=True, overwrite=True, **options)
    assert names(spdist.open(tmp_path / "D.zarr")) == (ROWS, ROWS)
    assert spdist.check(tmp_path / "D.zarr").ok


def test_a_product_has_the_names_that_there_are(tmp_path):
    a, plain = named(tmp_path / "A.zarr"), spdist.save(tmp_path / "B.zarr", random_matrix(4, 3, 2, 2))
    assert names(spdist.matmul(a, plain, tmp_path / "C.zarr")) == (ROWS, None)
    assert names(spdist.matmul(plain.T, a.T, tmp_path / "D.zarr")) == (None, ROWS)


def test_workers_write_the_product(tmp_path):
    a = named(tmp_path / "A.zarr")
    spdist.multiply(a, a, tmp_path / "C.zarr", transpose_b=True, workers=1)
    assert names(spdist.open(tmp_path / "C.zarr")) == (ROWS, ROWS)


@pytest.mark.parametrize("function", [
    "spdist.storage.groups.finish_group", "spdist.storage.writer.write_names", "spdist.storage.notes.sync_metadata",
])  # fmt: skip
def test_a_resumed_product_has_names(tmp_path, function):
    a = named(tmp_path / "A.zarr")
    b = spdist.transpose(a, tmp_path / "B.zarr")
    target = str(tmp_path / "C.zarr")
    command = [sys.executable, "-m", "tests.support.kill_at", function, "1", "after"]
    ended = subprocess.run([*command, "multiply", a.url, b.url, target], cwd=ROOT, capture_output=True, timeout=300)
    assert ended.returncode < 0, ended.stderr
    spdist.multiply(a, b, target, resume=True)
    assert names(spdist.open(target)) == (ROWS, ROWS)
    assert spdist.check(target).ok


def test_copies_keep_names(tmp_path):
    a, plain = named(tmp_path / "A.zarr"), spdist.save(tmp_path / "B.zarr", random_matrix(6, 4, 2, 2))
    assert names(spdist.transpose(a, tmp_path / "T.zarr")) == (COLUMNS, ROWS)
    assert names(spdist.ewise_add(a, plain, tmp_path / "sum.zarr")) == (ROWS, COLUMNS)
    assert names(spdist.ewise_mult(plain, a, tmp_path / "product.zarr")) == (ROWS, COLUMNS)
    assert names(spdist.apply(a, tmp_path / "cut.zarr", top_n=1)) == (ROWS, COLUMNS)
    c = spdist.matmul(a, a.T, tmp_path / "C.zarr", triangle="upper")
    assert names(spdist.symmetrize(c, tmp_path / "S.zarr")) == (ROWS, ROWS)


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_a_chain_has_names_of_its_ends(tmp_path, share):
    from spdist.api.chain import multiply_chain
    from spdist.options import ExecutionOptions, OutputOptions

    a = named(tmp_path / "A.zarr", COLUMNS, list("abcd"))
    c = multiply_chain([a, a, spdist.transpose(a, tmp_path / "T.zarr")], tmp_path / "C.zarr", ExecutionOptions(),
                       OutputOptions(), share)  # fmt: skip
    assert names(c) == (COLUMNS, COLUMNS)


def test_applications_keep_names(tmp_path):
    a = named(tmp_path / "A.zarr")
    spdist.similarity(a, tmp_path / "S.zarr", top_n=2)
    assert names(spdist.open(tmp_path / "S.zarr")) == (ROWS, ROWS)
    spdist.cooccurrence(a, tmp_path / "N.zarr")
    assert names(spdist.open(tmp_path / "N.zarr")) == (COLUMNS, COLUMNS)
    ring = spdist.save(
        tmp_path / "R.zarr", sp.csr_array(np.roll(np.eye(4), 1, 0)), row_names="abcd", column_names="abcd"
    )
    found = spdist.shortest_paths(ring, tmp_path / "D.zarr", sources=[2, 0])
    assert names(found) == (["c", "a"], list("abcd"))


def test_blocks_have_names_of_single_rows(tmp_path):
    m = sp.bsr_array(np.ones((4, 6)), blocksize=(2, 3))
    rows, columns = list("abcd"), list("uvwxyz")
    a = spdist.save(tmp_path / "A.zarr", m, row_names=rows, column_names=columns)
    assert names(a) == (rows, columns)
    b = spdist.save(tmp_path / "B.zarr", sp.bsr_array(np.ones((6, 4)), blocksize=(3, 2)), column_names=rows)
    assert names(spdist.matmul(a, b, tmp_path / "C.zarr")) == (rows, rows)
