"""Matrices inside an AnnData: as operands where they lie, and as products that AnnData finds."""

from __future__ import annotations

import json
import os
import shutil
import warnings

import anndata
import h5py
import numcodecs
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr

import spdist
from spdist import cli
from tests.conftest import random_matrix


def written(place, version: int, consolidated: bool = True, sharded: bool = False):
    """Write cells x genes as AnnData does."""
    x = sp.csr_matrix(random_matrix(40, 25, 4, 1))
    with warnings.catch_warnings(), anndata.settings.override(zarr_write_format=version, auto_shard_zarr_v3=sharded):
        warnings.simplefilter("ignore")
        cells = anndata.AnnData(x, layers={"counts": x * 2})
        cells.write_zarr(place)
        if consolidated:
            zarr.consolidate_metadata(place)
    return x


@pytest.fixture
def cells(tmp_path):
    return written(tmp_path / "cells.zarr", 3)


@pytest.mark.parametrize(("version", "sharded"), [(2, False), (3, False), (3, True)])
def test_members_are_operands_where_they_lie(tmp_path, version, sharded):
    x = written(tmp_path / "cells.zarr", version, sharded=sharded)
    c = spdist.matmul(tmp_path / "cells.zarr/X", tmp_path / "cells.zarr/layers/counts", tmp_path / "C.zarr",
                      transpose_b=True)  # fmt: skip
    assert abs(c.to_scipy() - 2 * x @ x.T).max() < 1e-9


def test_groups_and_backed_matrices_are_operands(tmp_path, cells):
    group = zarr.open_group(tmp_path / "cells.zarr", mode="r")
    backed = anndata.io.sparse_dataset(group["X"])
    c = spdist.matmul(group["X"], backed, tmp_path / "C.zarr", transpose_b=True)
    assert abs(c.to_scipy() - cells @ cells.T).max() < 1e-12
    spdist.multiply(c, backed, tmp_path / "D.zarr", mask=None)
    with pytest.raises(spdist.InputError, match="in memory"):
        spdist.plan(zarr.create_group(zarr.storage.MemoryStore()), c)


@pytest.mark.parametrize("consolidated", [True, False])
def test_anndata_finds_a_product(tmp_path, consolidated):
    x = written(tmp_path / "cells.zarr", 3, consolidated)
    a, target = tmp_path / "cells.zarr/X", tmp_path / "cells.zarr/obsp/similarity"
    spdist.multiply(a, a, target, transpose_b=True)
    found = anndata.read_zarr(tmp_path / "cells.zarr")
    assert abs(found.obsp["similarity"] - x @ x.T).max() < 1e-12
    spdist.multiply(a, a, target, transpose_b=True, top_n=2, overwrite=True)
    again = anndata.read_zarr(tmp_path / "cells.zarr").obsp["similarity"]
    assert np.diff(again.indptr).max() == 2
    assert not [path for path in target.parent.iterdir() if path.name not in ("similarity", "zarr.json")]


def test_lazily_read_anndata_holds_a_stored_matrix(tmp_path, cells):
    group = zarr.open_group(tmp_path / "cells.zarr", mode="r")
    lazy = anndata.experimental.read_elem_lazy(group["X"])
    stored = spdist.from_dask(lazy, tmp_path / "X.zarr")
    assert abs(stored.to_scipy() - cells).max() == 0
    again = anndata.AnnData(stored.to_dask(10))
    assert abs(again[3:12].X.compute() - cells[3:12]).max() == 0


def test_matrices_on_the_way_are_not_named_afterwards(tmp_path):
    """Those of the command itself, and of another product that is on its way."""
    written(tmp_path / "cells.zarr", 3)
    shutil.copytree(tmp_path / "cells.zarr/X", tmp_path / "cells.zarr/layers/other.spdist-new")
    spdist.similarity(tmp_path / "cells.zarr/X", tmp_path / "cells.zarr/obsp/similarity", top_n=2)
    shutil.rmtree(tmp_path / "cells.zarr/layers/other.spdist-new")
    cells = anndata.read_zarr(tmp_path / "cells.zarr")
    assert cells.obsp["similarity"].shape == (cells.n_obs, cells.n_obs)
    assert "other.spdist-new" not in cells.layers


def test_a_group_of_version_2_is_refused_before_work(tmp_path, capsys):
    written(tmp_path / "cells.zarr", 2)
    a, target = str(tmp_path / "cells.zarr/X"), str(tmp_path / "cells.zarr/obsp/similarity")
    assert cli.main(["multiply", a, a, target, "--transpose-b", "--json"]) == 2
    assert "version 2" in capsys.readouterr().err
    with pytest.raises(spdist.InputError, match="version 2"):
        spdist.save(target, sp.eye_array(3))
    assert [path.name for path in (tmp_path / "cells.zarr/obsp").iterdir() if "similarity" in path.name] == []


def test_import_names_the_matrices(tmp_path, cells, capsys):
    assert cli.main(["import", str(tmp_path / "cells.zarr"), str(tmp_path / "A.zarr")]) == 2
    said = capsys.readouterr().err
    assert "cells.zarr/X" in said
    assert "cells.zarr/layers/counts" in said


def test_hdf5_is_imported_first(tmp_path, cells):
    anndata.AnnData(cells).write_h5ad(tmp_path / "cells.h5ad")
    backed = anndata.read_h5ad(tmp_path / "cells.h5ad", backed="r")
    with pytest.raises(spdist.InputError, match="spdist import"):
        spdist.multiply(backed.X, backed.X, tmp_path / "C.zarr", transpose_b=True)


# -- names -------------------------------------------------------------------------------------------------------------


def named(place, version: int = 3):
    """Write cells x genes with names that are no numbers, and matrices of pairs; an .h5ad if the name says so."""
    rng = np.random.default_rng(0)
    x = sp.csr_matrix(random_matrix(6, 4, 2, 1))
    obs = pd.DataFrame(index=[f"cell {i} é" for i in range(6)])
    var = pd.DataFrame(index=pd.Index(["Actb", "", "日本", "x"], name="gene"))
    pairs = {n: sp.csr_matrix(rng.integers(0, 2, (n, n)).astype(float)) for n in (4, 6)}
    with warnings.catch_warnings(), anndata.settings.override(zarr_write_format=version, auto_shard_zarr_v3=False):
        warnings.simplefilter("ignore")
        cells = anndata.AnnData(x, obs, var, layers={"X": x * 2}, obsp={"near": pairs[6]}, varp={"like": pairs[4]},
                                obsm={"part": sp.csr_matrix(x[:, :2])})  # fmt: skip
        cells.write_h5ad(place) if place.suffix == ".h5ad" else cells.write_zarr(place)
    return obs.index.tolist(), var.index.tolist()


def names(m):
    return tuple(None if found is None else found.tolist() for found in (m.row_names, m.column_names))


@pytest.mark.parametrize("version", [2, 3])
def test_matrices_have_the_names_of_the_frames(tmp_path, version, capsys):
    obs, var = named(tmp_path / "cells.zarr", version)
    members = {"X": (obs, var), "layers/X": (obs, var), "obsp/near": (obs, obs), "varp/like": (var, var),
               "obsm/part": (obs, None)}  # fmt: skip
    for member, expected in members.items():
        assert names(spdist.open(tmp_path / "cells.zarr" / member)) == expected, member
    assert cli.main(["info", str(tmp_path / "cells.zarr/obsm/part"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["row_names"], facts["column_names"]) == (True, False)


@pytest.mark.parametrize("version", [2, 3])
def test_a_product_elsewhere_keeps_the_names_of_the_frames(tmp_path, version):
    obs, var = named(tmp_path / "cells.zarr", version)
    x = tmp_path / "cells.zarr/X"
    assert names(spdist.matmul(x, x, tmp_path / "C.zarr", transpose_b=True)) == (obs, obs)
    spdist.similarity(x, tmp_path / "S.zarr", top_n=2)
    assert names(spdist.open(tmp_path / "S.zarr")) == (obs, obs)
    assert names(spdist.transpose(x, tmp_path / "T.zarr")) == (var, obs)


def test_a_product_in_an_anndata_has_no_names_of_its_own(tmp_path):
    obs, _ = named(tmp_path / "cells.zarr")
    x, target = tmp_path / "cells.zarr/X", tmp_path / "cells.zarr/obsp/similarity"
    for options in ({}, {"overwrite": True}, {"overwrite": True, "axis": 0, "top_n": 2}):
        spdist.multiply(x, x, target, transpose_b=True, **options)
        assert not list(target.glob("spdist-*"))
        assert names(spdist.open(target)) == (obs, obs)
    spdist.save(target, sp.eye_array(6), row_names=list("abcdef"), overwrite=True)
    spdist.ewise_add(target, target, tmp_path / "cells.zarr/obsp/sum")
    assert not list((tmp_path / "cells.zarr/obsp").glob("*/spdist-*"))
    assert anndata.read_zarr(tmp_path / "cells.zarr").obsp["sum"].nnz == 6


def test_frames_that_do_not_fit_are_refused(tmp_path):
    named(tmp_path / "cells.zarr")
    spdist.save(tmp_path / "cells.zarr/layers/short", random_matrix(5, 4, 2, 1))
    short = spdist.open(tmp_path / "cells.zarr/layers/short")
    with pytest.raises(spdist.MatrixError, match="obs/_index: 6 names where 5 are needed"):
        _ = short.row_names
    with pytest.raises(spdist.MatrixError, match="6 names where 5"):
        spdist.multiply(short, short, tmp_path / "C.zarr", transpose_b=True)
    assert not (tmp_path / "C.zarr").exists()


def test_frames_without_names(tmp_path):
    named(tmp_path / "cells.zarr")
    document = json.loads((tmp_path / "cells.zarr/obs/zarr.json").read_text())
    del document["attributes"]["_index"]
    (tmp_path / "cells.zarr/obs/zarr.json").write_text(json.dumps(document))
    x = spdist.open(tmp_path / "cells.zarr/X")
    assert x.row_names is None
    assert len(x.column_names) == 4


def test_a_folder_that_is_no_anndata(tmp_path):
    (tmp_path / "layers").mkdir()
    m = spdist.save(tmp_path / "layers/X", sp.eye_array(2), row_names=["a", "b"])
    assert names(m) == (["a", "b"], None)


@pytest.mark.parametrize("version", [2, 3])
def test_names_of_a_hostile_file_are_refused(tmp_path, version):
    named(tmp_path / "cells.zarr", version)
    chunk = tmp_path / "cells.zarr/obs/_index" / ("0" if version == 2 else "c/0")
    x = spdist.open(tmp_path / "cells.zarr/X")
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(spdist.CorruptError, match="no regular file"):
        _ = x.row_names
    chunk.unlink()
    assert x.row_names.tolist() == [""] * 6  # as Zarr leaves empty ones out
    raw = (4_000_000_000).to_bytes(4, "little") + bytes(100)
    codec = numcodecs.Blosc() if version == 2 else numcodecs.Zstd()
    chunk.write_bytes(codec.encode(raw))
    with pytest.raises(spdist.CorruptError, match="4,000,000,000 strings"):
        _ = x.row_names
    chunk.write_bytes(codec.encode(raw)[:-3])
    with pytest.raises(spdist.CorruptError, match="truncated"):
        _ = x.row_names
    chunk.write_bytes(b"no names")
    with pytest.raises(spdist.CorruptError, match="array '_index'"):
        _ = x.row_names


def test_names_that_inflate_are_refused(tmp_path):
    named(tmp_path / "cells.zarr")
    long = np.array(["x" * (100 << 20)] + [""] * 5, dtype=object)
    zarr.create_array(tmp_path / "cells.zarr/obs/long", shape=(6,), dtype=str, chunks=(6,))[:] = long
    document = json.loads((tmp_path / "cells.zarr/obs/zarr.json").read_text())
    document["attributes"]["_index"] = "long"
    (tmp_path / "cells.zarr/obs/zarr.json").write_text(json.dumps(document))
    with pytest.raises(spdist.CorruptError, match="decodes to 104,857,6"):
        _ = spdist.open(tmp_path / "cells.zarr/X").row_names


def test_names_of_an_array_with_missing_values(tmp_path):
    named(tmp_path / "cells.zarr")
    place = tmp_path / "cells.zarr/obs/strings"
    group = zarr.create_group(place, attributes={"encoding-type": "nullable-string-array"})
    group.create_array("values", shape=(6,), dtype=str)[:] = np.array(list("abcdef"), dtype=object)
    document = json.loads((tmp_path / "cells.zarr/obs/zarr.json").read_text())
    document["attributes"]["_index"] = "strings"
    (tmp_path / "cells.zarr/obs/zarr.json").write_text(json.dumps(document))
    assert spdist.open(tmp_path / "cells.zarr/X").row_names.tolist() == list("abcdef")


def test_an_import_of_an_h5ad_keeps_names(tmp_path):
    obs, var = named(tmp_path / "cells.h5ad")
    members = {"": (obs, var), "::layers/X": (obs, var), "::obsp/near": (obs, obs), "::varp/like": (var, var),
               "::obsm/part": (obs, None)}  # fmt: skip
    for inner, expected in members.items():
        m = spdist.import_matrix(f"{tmp_path}/cells.h5ad{inner}", tmp_path / "A.zarr", overwrite=True)
        assert names(m) == expected, inner
    written(tmp_path / "other.zarr", 3)
    m = spdist.import_matrix(f"{tmp_path}/cells.h5ad", tmp_path / "other.zarr/layers/more")
    assert not list((tmp_path / "other.zarr/layers/more").glob("spdist-*"))


def test_names_of_a_damaged_h5ad(tmp_path):
    named(tmp_path / "cells.h5ad")
    with h5py.File(tmp_path / "cells.h5ad", "a") as file:
        del file["obs/_index"]
        file["obs/_index"] = ["a", "b"]
    with pytest.raises(spdist.MatrixError, match="names of rows: 2 names where 6 are needed"):
        spdist.import_matrix(tmp_path / "cells.h5ad", tmp_path / "A.zarr")
    with h5py.File(tmp_path / "cells.h5ad", "a") as file:
        del file["obs/_index"]
        file["obs/_index"] = ["a", "b\nc", *"defg"]
    with pytest.raises(spdist.MatrixError, match="line break"):
        spdist.import_matrix(tmp_path / "cells.h5ad", tmp_path / "A.zarr")
    with h5py.File(tmp_path / "cells.h5ad", "a") as file:
        del file["obs/_index"]
        file["obs/_index"] = h5py.ExternalLink("other.h5", "/x")
    with pytest.raises(spdist.MatrixError, match="link to another place"):
        spdist.import_matrix(tmp_path / "cells.h5ad", tmp_path / "A.zarr")
    with h5py.File(tmp_path / "cells.h5ad", "a") as file:
        del file["obs"]
        file["obs"] = np.arange(6)
    assert names(spdist.import_matrix(tmp_path / "cells.h5ad", tmp_path / "A.zarr"))[0] is None
