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


def spoilt(place):
    """Write cells x genes, and a matrix of too few rows beside it, as a program without checks does."""
    _, var = named(place)
    x = sp.csr_matrix(random_matrix(5, 4, 2, 1))
    with anndata.settings.override(zarr_write_format=3, auto_shard_zarr_v3=False):
        anndata.io.write_elem(zarr.open_group(place / "layers", mode="a"), "short", x)
    return x, var


def test_an_index_that_cannot_be_carried_costs_the_names(tmp_path, caplog):
    x, var = spoilt(tmp_path / "cells.zarr")
    short = spdist.open(tmp_path / "cells.zarr/layers/short")
    with pytest.raises(spdist.MatrixError, match="obs/_index: 6 names where 5 are needed"):
        _ = short.row_names
    caplog.set_level("WARNING", "spdist")
    c = spdist.matmul(short, short, tmp_path / "C.zarr", transpose_b=True)
    assert names(c) == (None, None)
    assert abs(c.to_scipy() - x @ x.T).max() < 1e-12
    assert all("6 names where 5" in one and "no names of" in one for one in caplog.messages)
    assert len(caplog.messages) == 2  # of rows and of columns of C
    assert names(spdist.transpose(short, tmp_path / "T.zarr")) == (var, None)
    assert names(spdist.ewise_add(short, short, tmp_path / "E.zarr")) == (None, var)
    spdist.similarity(short, tmp_path / "S.zarr", top_n=2)
    assert names(spdist.open(tmp_path / "S.zarr")) == (None, None)


def test_no_names_on_purpose(tmp_path, caplog):
    spoilt(tmp_path / "cells.zarr")
    short, x = str(tmp_path / "cells.zarr/layers/short"), str(tmp_path / "cells.zarr/X")
    for command in ("multiply", "similarity"):
        operands = (short, short) if command == "multiply" else (short,)
        flags = ("--transpose-b",) if command == "multiply" else ()
        assert cli.main([command, *operands, str(tmp_path / f"{command}.zarr"), *flags, "--no-names", "--json"]) == 0
        assert names(spdist.open(tmp_path / f"{command}.zarr")) == (None, None)
    caplog.set_level("WARNING", "spdist")
    spdist.cooccurrence(x, tmp_path / "N.zarr", names=False)
    c = spdist.multi_matmul([x, spdist.transpose(x, tmp_path / "T.zarr"), x], tmp_path / "C.zarr", names=False)
    added = spdist.ewise_add(x, x, tmp_path / "E.zarr", names=False)
    assert names(spdist.open(tmp_path / "N.zarr")) == names(c) == names(added) == (None, None)
    assert "names" not in caplog.text


@pytest.mark.parametrize("kind", ["group", "categorical", "line break", "one name", "missing"])
def test_an_index_that_is_not_read_costs_the_names(tmp_path, caplog, kind):
    _, var = named(tmp_path / "cells.zarr")
    frame = zarr.open_group(tmp_path / "cells.zarr/obs", mode="a")
    frame.attrs["_index"] = "other"
    if kind == "group":
        frame.create_group("other", attributes={"encoding-type": "unheard-of"})
    elif kind == "categorical":
        with anndata.settings.override(auto_shard_zarr_v3=False):
            anndata.io.write_elem(frame, "other", pd.Categorical(list("abcdef")))
    elif kind == "line break":
        frame.create_array("other", shape=(6,), dtype=str)[:] = np.array(["a\nb", *"cdefg"], dtype=object)
    elif kind == "one name":
        frame.create_array("other", shape=(), dtype=str)
    x = spdist.open(tmp_path / "cells.zarr/X")
    caplog.set_level("WARNING", "spdist")
    assert names(spdist.transpose(x, tmp_path / "T.zarr")) == (var, None)
    assert "no names of columns" in caplog.text
    assert ("names in a categorical are not read" in caplog.text) == (kind == "categorical")


# -- axes --------------------------------------------------------------------------------------------------------------


CELLS, GENES = 40, 25
WRITERS = {
    "multiply": lambda x, out: spdist.multiply(x, x, out, transpose_b=True),
    "by columns": lambda x, out: spdist.multiply(x, x, out, transpose_b=True, axis=0, top_n=3),
    "in memory": lambda x, out: spdist.matmul(x.to_scipy(), x.to_scipy().T, out),
    "similarity": lambda x, out: spdist.similarity(x, out, top_n=2),
    "similarity in memory": lambda x, out: spdist.similarity(x.to_scipy(), out, top_n=2),
    "cooccurrence": lambda x, out: spdist.cooccurrence(x, out),
    "chain": lambda x, out: spdist.multi_matmul([x.to_scipy(), x.to_scipy().T], out),
    "stored chain": lambda x, out: spdist.multi_matmul([x, spdist.open(f"{out}/../../../T.zarr")], out),
    "save": lambda x, out: spdist.save(out, sp.eye_array(CELLS)),
    "from_dask": lambda x, out: spdist.from_dask(spdist.save("memory://E.zarr", sp.eye_array(CELLS), overwrite=True)
                                                 .to_dask(10), out),
    "shortest paths": lambda x, out: spdist.shortest_paths(sp.eye_array(CELLS).tocsr(), out),
    "generate": lambda x, out: spdist.generate("banded", out, n=CELLS, bandwidth=1),
    "import": lambda x, out: spdist.import_matrix(f"{out}/../../../eye.npz", out),
    "symmetrize": lambda x, out: spdist.symmetrize(spdist.save("memory://E.zarr", sp.eye_array(CELLS), overwrite=True),
                                                   out),
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_a_result_that_does_not_fit_is_refused_before_work(tmp_path, cells, writer):
    x = spdist.open(tmp_path / "cells.zarr/X")
    spdist.transpose(x, tmp_path / "T.zarr")
    sp.save_npz(tmp_path / "eye.npz", sp.eye_array(CELLS))
    if writer == "cooccurrence":
        wrong, right, size = "obsp", "varp", "25 x 25"
    else:
        wrong, right, size = "varp", "obsp", "40 x 40"
    folder = tmp_path / "cells.zarr" / wrong
    with pytest.raises(spdist.InputError, match=f"{size} does not fit {wrong}.* 40 x 25 observations.* in {right}$"):
        WRITERS[writer](x, str(folder / "C"))
    assert [path.name for path in folder.iterdir()] == ["zarr.json"]
    WRITERS[writer](x, str(tmp_path / "cells.zarr" / right / "C"))
    found = anndata.read_zarr(tmp_path / "cells.zarr")
    assert getattr(found, right)["C"].shape == {"obsp": (CELLS, CELLS), "varp": (GENES, GENES)}[right]


def test_where_a_result_belongs_is_said(tmp_path, cells):
    x = spdist.open(tmp_path / "cells.zarr/X")
    root = tmp_path / "cells.zarr"
    with pytest.raises(spdist.InputError, match=r"40 x 25 does not fit obsp.*belongs in X or layers$"):
        spdist.ewise_add(x, x, root / "obsp/C")
    with pytest.raises(spdist.InputError, match=r"25 x 40 does not fit X, .*belongs in varm$"):
        spdist.transpose(x, root / "X", overwrite=True)
    with pytest.raises(spdist.InputError, match=r"3 x 3 does not fit layers.*write it outside the AnnData$"):
        spdist.save(root / "layers/C", sp.eye_array(3))
    with pytest.raises(spdist.InputError, match="AnnData reads no bsr_matrix"):
        spdist.save(root / "obsp/C", sp.bsr_array(np.eye(40), blocksize=(4, 4)))
    spdist.save(root / "uns/C", sp.eye_array(3))
    spdist.transpose(x, root / "varm/C")
    spdist.multiply(x, spdist.transpose(x, tmp_path / "T.zarr"), root / "obsm/C")
    assert anndata.read_zarr(root).obsm["C"].shape == (40, 40)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_result_beside_x_is_refused(tmp_path, cells, writer):
    x = spdist.open(tmp_path / "cells.zarr/X")
    outside = tmp_path.parent  # WRITERS look for their operands three folders above a result
    spdist.transpose(x, outside / "T.zarr", overwrite=True)
    sp.save_npz(outside / "eye.npz", sp.eye_array(CELLS))
    before = sorted(path.name for path in (tmp_path / "cells.zarr").iterdir())
    with pytest.raises(spdist.InputError, match=r"cells.zarr/C: AnnData cannot read .*write it to obsp"):
        WRITERS[writer](x, f"{tmp_path}/cells.zarr/C")
    assert sorted(path.name for path in (tmp_path / "cells.zarr").iterdir()) == before
    assert anndata.read_zarr(tmp_path / "cells.zarr").n_obs == CELLS


def test_matrices_of_raw(tmp_path):
    cells = anndata.AnnData(sp.csr_matrix(random_matrix(6, 4, 2, 1)))
    cells.raw = cells.copy()
    with anndata.settings.override(zarr_write_format=3, auto_shard_zarr_v3=False):
        cells[:, :3].copy().write_zarr(tmp_path / "cells.zarr")
    place = tmp_path / "cells.zarr/raw/X"
    assert names(spdist.open(place)) == (list("012345"), list("0123"))
    with pytest.raises(spdist.InputError, match=r"6 x 3 does not fit raw/X, which holds observations x variables of"):
        spdist.save(place, sp.eye_array(6, 3), overwrite=True)
    spdist.save(place, sp.eye_array(6, 4), overwrite=True)
    with pytest.raises(spdist.InputError, match=r"AnnData cannot read .*raw with"):
        spdist.save(tmp_path / "cells.zarr/raw/C", sp.eye_array(6, 4))
    assert anndata.read_zarr(tmp_path / "cells.zarr").raw.X.nnz == 4


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
    named(tmp_path / "other.zarr")
    m = spdist.import_matrix(f"{tmp_path}/cells.h5ad", tmp_path / "other.zarr/layers/more")
    assert not list((tmp_path / "other.zarr/layers/more").glob("spdist-*"))


def test_names_of_a_damaged_h5ad(tmp_path, caplog):
    _, var = named(tmp_path / "cells.h5ad")
    with h5py.File(tmp_path / "cells.h5ad", "a") as file:
        del file["obs/_index"]
        file["obs/_index"] = ["a", "b"]
    with pytest.raises(spdist.MatrixError, match="names of rows: 2 names where 6 are needed"):
        spdist.import_matrix(tmp_path / "cells.h5ad", tmp_path / "A.zarr")
    with h5py.File(tmp_path / "cells.h5ad", "a") as file:
        del file["obs/_index"]
        file["obs/_index"] = ["a", "b\nc", *"defg"]
    found = spdist.import_matrix(tmp_path / "cells.h5ad", tmp_path / "L.zarr")
    assert names(found) == (None, var)
    assert "a name has a line break; names must have none (the result has no names of rows)" in caplog.text
    assert found.facts["provenance"]["read"].endswith("; names of columns")
    with h5py.File(tmp_path / "cells.h5ad", "a") as file:
        del file["obs/_index"]
        file["obs/_index"] = h5py.ExternalLink("other.h5", "/x")
    with pytest.raises(spdist.MatrixError, match="link to another place"):
        spdist.import_matrix(tmp_path / "cells.h5ad", tmp_path / "A.zarr")
    with h5py.File(tmp_path / "cells.h5ad", "a") as file:
        del file["obs"]
        file["obs"] = np.arange(6)
    assert names(spdist.import_matrix(tmp_path / "cells.h5ad", tmp_path / "A.zarr"))[0] is None
