"""Matrices in Zarr that other programs wrote, imported: AnnData's encodings, Binsparse, dense arrays; and refusals."""

from __future__ import annotations

import json
import os
import warnings

import anndata
import binsparse
import numcodecs
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from binsparse.conversions import scipy as conversions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spdist
from spdist.errors import CorruptError, InputError, MatrixError
from spdist.storage.formats import dense_rows, zarr_groups
from spdist.storage.import_export import export_matrix, import_matrix
from tests.conftest import random_matrix
from tests.support.pieces import take_pieces

CELLS = [f"cell {i}" for i in range(30)]
GENES = [f"gene {i}" for i in range(20)]


def sample(dtype: str = "f8"):
    return sp.csr_matrix(random_matrix(30, 20, 3, 1)).astype(dtype)


def write_cells(place, version: int = 3, **options) -> None:
    """Write cells x genes as AnnData does: X by columns, layers by rows and dense."""
    x = sample()
    layers = {"csr": x, "dense": x.toarray(), "fortran": np.asfortranarray(x.toarray().astype("f4"))}
    with warnings.catch_warnings(), anndata.settings.override(zarr_write_format=version, auto_shard_zarr_v3=False):
        warnings.simplefilter("ignore")
        cells = anndata.AnnData(sp.csc_matrix(x), layers=layers, obsm={"pca": x.toarray()[:, :2]})
        cells.obs_names, cells.var_names = CELLS, GENES
        cells.write_zarr(place, **options)


def names(m):
    return tuple(None if found is None else found.tolist() for found in (m.row_names, m.column_names))


def dense(m):
    return m.to_scipy().toarray()


# -- AnnData -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("member", ["", "::X", "/X", "::layers/csr", "::layers/dense", "/layers/fortran", "::obsm/pca"])
def test_members_are_imported_with_names(tmp_path, version, member):
    write_cells(tmp_path / "cells.zarr", version, chunks=(7, 9))
    m = import_matrix(f"{tmp_path}/cells.zarr{member}", tmp_path / "A.zarr", dense=True)
    expected = sample().toarray()[:, :2] if "obsm" in member else sample().toarray()
    np.testing.assert_array_equal(dense(m), expected.astype(m.dtype))
    assert m.dtype == ("f4" if "fortran" in member else "f8")
    assert names(m) == (CELLS, None if "obsm" in member else GENES)
    assert m.is_known_canonical
    assert (dense(m) != 0).sum() == m.nnz


def test_what_was_read_is_said(tmp_path, caplog):
    write_cells(tmp_path / "cells.zarr")
    caplog.set_level("WARNING", "spdist")
    m = import_matrix(tmp_path / "cells.zarr", tmp_path / "A.zarr")
    line = "read as Zarr; matrix X; csc_matrix; names of rows and columns; left out: layers/csr"
    assert m.facts["provenance"]["read"] == line
    assert line in caplog.text


def test_an_import_into_an_anndata(tmp_path):
    write_cells(tmp_path / "cells.zarr")
    import_matrix(tmp_path / "cells.zarr/X", tmp_path / "cells.zarr/layers/rows")
    found = anndata.read_zarr(tmp_path / "cells.zarr").layers["rows"]
    assert (found != sample()).nnz == 0


def test_from_a_url(tmp_path):
    zarr.save("memory://zarr-groups/dense.zarr", sample().toarray())
    m = import_matrix("memory://zarr-groups/dense.zarr", tmp_path / "A.zarr", dense=True)
    np.testing.assert_array_equal(dense(m), sample().toarray())
    spdist.save("memory://zarr-groups/own.zarr", sample(), overwrite=True)
    export_matrix("memory://zarr-groups/own.zarr", "memory://zarr-groups/b.zarr", format="binsparse", overwrite=True)
    m = import_matrix("memory://zarr-groups/b.zarr", tmp_path / "B.zarr")
    np.testing.assert_array_equal(dense(m), sample().toarray())


@pytest.mark.parametrize("kind", [sp.csr_matrix, sp.csc_matrix])
def test_unsorted_rows_and_duplicates(tmp_path, kind, monkeypatch):
    take_pieces(monkeypatch, 2)
    arrays = np.arange(1.0, 6), np.array([3, 1, 3, 0, 0]), np.array([0, 3, 5])
    messy = kind(arrays, shape=(2, 4) if kind is sp.csr_matrix else (4, 2))
    with anndata.settings.override(auto_shard_zarr_v3=False):
        anndata.io.write_elem(zarr.open_group(tmp_path / "a.zarr", mode="w"), "/", messy)
    m = import_matrix(tmp_path / "a.zarr", tmp_path / "A.zarr")
    np.testing.assert_array_equal(dense(m), messy.toarray())
    assert m.nnz == 3
    assert names(m) == (None, None)


@pytest.mark.parametrize("kind", ["csr", "csc"])
@pytest.mark.parametrize(("shape", "count"), [((5, 1), 5), ((1, 5), 5), ((4, 3), 0)])
def test_zarr_chunks_of_zeros_that_anndata_leaves_out(tmp_path, kind, shape, count):
    """Those of a matrix without entries, or of a single row or column."""
    x = sp.csr_array(np.ones(shape) if count else shape).asformat(kind)
    with anndata.settings.override(auto_shard_zarr_v3=False):
        anndata.io.write_elem(zarr.open_group(tmp_path / "a.zarr", mode="w"), "/", x)
    m = import_matrix(tmp_path / "a.zarr", tmp_path / "A.zarr")
    np.testing.assert_array_equal(dense(m), x.toarray())


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(["?", "i1", "u4", "<f4", ">f4", ">i8", "c16"]), shape=st.tuples(*[st.integers(0, 9)] * 2),
    kind=st.sampled_from(["csr", "csc", "dense"]), chunk=st.integers(1, 5), version=st.sampled_from([2, 3]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_encoding_reads_as_anndata_reads_it(tmp_path_factory, dtype, shape, kind, chunk, version, seed):
    folder = tmp_path_factory.mktemp("any")
    rng = np.random.default_rng(seed)
    values = (rng.integers(0, 3, shape) * (1 + 1j if dtype == "c16" else 1)).astype(dtype)
    group = zarr.open_group(folder / "a.zarr", mode="w", zarr_format=version)
    if kind == "dense":
        array = group.create_array("x", shape=shape, dtype=values.dtype, chunks=(chunk, 2 * chunk))
        array[:] = values
    else:
        m = getattr(sp, f"{kind}_matrix")(values.astype(values.dtype.newbyteorder("=")))
        part = group.create_group("x", attributes={"encoding-type": f"{kind}_matrix", "encoding-version": "0.1.0",
                                                   "shape": list(shape)})  # fmt: skip
        for name in ("indptr", "indices", "data"):
            stored = getattr(m, name).astype(dtype) if name == "data" else getattr(m, name)
            array = part.create_array(name, shape=stored.shape, dtype=stored.dtype, chunks=(chunk,),
                                      config={"write_empty_chunks": True})  # fmt: skip
            array[:] = stored
    found = import_matrix(folder / "a.zarr::x", folder / "A.zarr", dense=True)
    np.testing.assert_array_equal(dense(found), values)
    assert found.dtype == values.dtype.newbyteorder("=")


# -- dense -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [(30, 20), (1, 20), (30, 1), (7, 6)])
@pytest.mark.parametrize("rectangle", [40, 1 << 20])
def test_dense_arrays_rectangle_by_rectangle(tmp_path, monkeypatch, chunks, rectangle):
    take_pieces(monkeypatch, rectangle)
    monkeypatch.setattr(dense_rows, "WHOLE_ROWS", rectangle)
    array = zarr.create_array(tmp_path / "d.zarr", shape=(30, 20), dtype="f8", chunks=chunks)
    array[:] = sample().toarray()
    np.testing.assert_array_equal(dense(import_matrix(tmp_path / "d.zarr", tmp_path / "A.zarr", dense=True)),
                                  sample().toarray())  # fmt: skip


def test_the_largest_zarr_chunk_of_a_dense_array(tmp_path, monkeypatch):
    zarr.create_array(tmp_path / "d.zarr", shape=(30, 20), dtype="f8", chunks=(30, 20))[:] = sample().toarray()
    monkeypatch.setattr(zarr_groups, "CHUNK_BYTES", 4800)
    np.testing.assert_array_equal(dense(import_matrix(tmp_path / "d.zarr", tmp_path / "A.zarr", dense=True)),
                                  sample().toarray())  # fmt: skip
    monkeypatch.setattr(zarr_groups, "CHUNK_BYTES", 4799)
    with pytest.raises(MatrixError, match=r"Zarr chunks of .*: write smaller ones"):
        import_matrix(tmp_path / "d.zarr", tmp_path / "B.zarr", dense=True)


def test_a_missing_zarr_chunk_of_a_dense_array_holds_the_fill_value(tmp_path):
    zarr.create_array(tmp_path / "d.zarr", shape=(4, 6), dtype="f8", chunks=(2, 3))[:2] = 1
    assert not (tmp_path / "d.zarr/c/1/0").exists()
    assert import_matrix(tmp_path / "d.zarr", tmp_path / "A.zarr", dense=True).nnz == 12
    zarr.create_array(tmp_path / "n.zarr", shape=(4, 6), dtype="f8", chunks=(2, 3), fill_value=np.nan)[:2] = 1
    assert import_matrix(tmp_path / "n.zarr", tmp_path / "B.zarr", dense=True).nnz == 24


def test_dense_arrays_are_refused_without_dense(tmp_path):
    write_cells(tmp_path / "cells.zarr")
    with pytest.raises(InputError, match=r"--dense.*sparse in this file: .*cells.zarr::X, .*cells.zarr::layers/csr"):
        import_matrix(f"{tmp_path}/cells.zarr::layers/dense", tmp_path / "A.zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["cells.zarr"]


def test_operands_name_the_import(tmp_path):
    write_cells(tmp_path / "cells.zarr")
    with pytest.raises(MatrixError, match=r"csc_matrix.*spdist import .*cells.zarr/X A.zarr"):
        spdist.open(tmp_path / "cells.zarr/X")
    with pytest.raises(MatrixError, match=r"dense array.*spdist import --dense .*layers/dense A.zarr"):
        spdist.open(tmp_path / "cells.zarr/layers/dense")


@pytest.mark.parametrize(("dtype", "message"), [
    ("f2", "float16"), ("M8[s]", "must hold numbers"), ("S3", "must hold numbers"), ("U3", "must hold numbers"),
])  # fmt: skip
def test_other_dtypes(tmp_path, dtype, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.create_array(tmp_path / "d.zarr", shape=(2, 3), dtype=dtype)
    with pytest.raises(MatrixError, match=message):
        import_matrix(tmp_path / "d.zarr", tmp_path / "A.zarr", dense=True)


def test_other_dimensions(tmp_path):
    zarr.save(tmp_path / "d.zarr", np.ones((2, 3, 4)))
    with pytest.raises(MatrixError, match=r"two dimensions, this has shape \(2, 3, 4\)"):
        import_matrix(tmp_path / "d.zarr", tmp_path / "A.zarr", dense=True)


# -- Binsparse ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["?", "i2", "f4", "c8", "c16"])
@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_binsparse(tmp_path, monkeypatch, dtype, kind):
    take_pieces(monkeypatch, 7)
    binsparse.save_binsparse(conversions.from_scipy(sample(dtype).asformat(kind)), tmp_path / "b.zarr")
    m = import_matrix(tmp_path / "b.zarr", tmp_path / "A.zarr")
    assert m.dtype == dtype
    np.testing.assert_array_equal(dense(m), sample(dtype).toarray())


@pytest.mark.parametrize("dtype", ["?", "f4", "c16"])
def test_an_export_reads_back(tmp_path, dtype):
    spdist.save(tmp_path / "A.zarr", sample(dtype))
    export_matrix(tmp_path / "A.zarr", tmp_path / "b.zarr", format="binsparse")
    m = import_matrix(tmp_path / "b.zarr", tmp_path / "B.zarr")
    assert m.dtype == dtype
    np.testing.assert_array_equal(dense(m), sample(dtype).toarray())
    assert names(m) == (None, None)


def test_binsparse_by_columns(tmp_path):
    """The first indices of COOC are columns, as its levels say: those of COOR with the axes exchanged."""
    x = sample().tocsc().tocoo()
    x = binsparse.COOCMatrix(x.shape, x.nnz, indices_0=x.col, indices_1=x.row, values=x.data)
    binsparse.save_binsparse(x, tmp_path / "b.zarr")
    np.testing.assert_array_equal(dense(import_matrix(tmp_path / "b.zarr", tmp_path / "A.zarr")), sample().toarray())
    change(tmp_path / "b.zarr", format="COOR", shape=[20, 30])
    np.testing.assert_array_equal(dense(import_matrix(tmp_path / "b.zarr", tmp_path / "B.zarr")), sample().toarray().T)


def test_binsparse_that_is_not_sorted(tmp_path, monkeypatch):
    x = sample().tocsc().tocoo()
    x = binsparse.COORMatrix(x.shape, x.nnz, indices_0=x.row, indices_1=x.col, values=x.data)
    binsparse.save_binsparse(x, tmp_path / "b.zarr")
    for entries in (1 << 20, 1):
        take_pieces(monkeypatch, entries)
        with pytest.raises(MatrixError, match="COOR is sorted by rows, and this is not; rows and columns may be"):
            import_matrix(tmp_path / "b.zarr", tmp_path / "A.zarr")


@pytest.mark.parametrize(("value", "read"), [(0.0, True), (1.0, False)])
def test_binsparse_with_a_fill_value(tmp_path, value, read):
    tensor = conversions.from_scipy(sample())
    tensor.fill, tensor.fill_value = True, value
    binsparse.save_binsparse(tensor, tmp_path / "b.zarr")
    if read:
        assert import_matrix(tmp_path / "b.zarr", tmp_path / "A.zarr").nnz == sample().nnz
        return
    with pytest.raises(MatrixError, match="another value than 0"):
        import_matrix(tmp_path / "b.zarr", tmp_path / "A.zarr")


def test_binsparse_of_odd_parts_and_of_other_bytes(tmp_path):
    binsparse.save_binsparse(conversions.from_scipy(sample("c16")), tmp_path / "b.zarr")
    values = zarr.open_group(tmp_path / "b.zarr", mode="a")["values"]
    values.resize((values.shape[0] + 1,))
    with pytest.raises(MatrixError, match="an odd number"):
        import_matrix(tmp_path / "b.zarr", tmp_path / "A.zarr")
    binsparse.save_binsparse(conversions.from_scipy(sample("?")), tmp_path / "c.zarr")
    zarr.open_group(tmp_path / "c.zarr", mode="a")["values"][:] = 7
    m = import_matrix(tmp_path / "c.zarr", tmp_path / "A.zarr")
    np.testing.assert_array_equal(m.data.read(0, m.nnz).view("u1"), 1)


def change(place, **changes):
    group = zarr.open_group(place, mode="a")
    header = dict(group.attrs["binsparse"])["binsparse"]
    group.attrs["binsparse"] = {"binsparse": {**header, **changes}}


def test_binsparse_whose_descriptor_is_text(tmp_path):
    """As HDF5 has to keep it."""
    binsparse.save_binsparse(conversions.from_scipy(sample()), tmp_path / "b.zarr")
    group = zarr.open_group(tmp_path / "b.zarr", mode="a")
    group.attrs["binsparse"] = json.dumps(dict(group.attrs["binsparse"]))
    np.testing.assert_array_equal(dense(import_matrix(tmp_path / "b.zarr", tmp_path / "A.zarr")), sample().toarray())
    group.attrs["binsparse"] = "{"
    with pytest.raises(MatrixError, match="metadata that cannot be read"):
        import_matrix(tmp_path / "b.zarr", tmp_path / "B.zarr")


def test_binsparse_of_one_value_for_all(tmp_path):
    x = sample()
    x.data[:] = 2
    binsparse.save_binsparse(conversions.from_scipy(x), tmp_path / "b.zarr")
    group = zarr.open_group(tmp_path / "b.zarr", mode="a")
    del group["values"]
    group.create_array("values", data=np.array([2.0]))
    types = dict(dict(group.attrs["binsparse"])["binsparse"]["data_types"])
    change(tmp_path / "b.zarr", data_types={**types, "values": "iso[float64]"})
    assert (conversions.to_scipy(binsparse.load_binsparse(tmp_path / "b.zarr")) != x).nnz == 0
    np.testing.assert_array_equal(dense(import_matrix(tmp_path / "b.zarr", tmp_path / "A.zarr")), x.toarray())


@pytest.mark.parametrize(("changes", "message"), [
    ({"format": "DCSR"}, "format DCSR is not read"), ({"format": [1]}, "is not read"), ({"fill": True}, "'fill_value'"),
    ({"structure": "symmetric_lower"}, "structure symmetric_lower"), ({"version": "0.2.0"}, "version 0.2.0"),
    ({"number_of_stored_values": 3}, "states 3 values"), ({"shape": [30, True]}, "two dimensions"),
    ({"shape": 7}, "two dimensions"), ({"shape": [30, 5]}, "column"), ({"shape": [31, 20]}, "does not fit"),
    ({"data_types": {"values": "int8"}}, "of type int8"), ({"data_types": {"values": "iso[float64]"}}, "not one"),
    ({"data_types": 3}, "is not read"),
])  # fmt: skip
def test_binsparse_that_is_refused(tmp_path, changes, message):
    binsparse.save_binsparse(conversions.from_scipy(sample()), tmp_path / "b.zarr")
    change(tmp_path / "b.zarr", **changes)
    with pytest.raises(MatrixError, match=message):
        import_matrix(tmp_path / "b.zarr", tmp_path / "A.zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["b.zarr"]


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_needs_no_import_or_is_no_matrix(tmp_path):
    write_cells(tmp_path / "cells.zarr")
    spdist.save(tmp_path / "own.zarr", sample())
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.zarr").mkdir()
    for source, message in {
        "own.zarr": "needs no import", "folder": "is a folder and not", "empty.zarr": "a group of Zarr without",
        "missing.zarr": "there is no such", "cells.zarr::obs": "encoding-type dataframe.*cells.zarr::X",
        "cells.zarr::nope": "nothing is at nope.*::layers/csr", "cells.zarr::../own.zarr": "no path inside",
        "cells.zarr::obs/_index": "two dimensions",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=message):
            import_matrix(f"{tmp_path}/{source}", tmp_path / "A.zarr")
    assert not (tmp_path / "A.zarr").exists()


def test_an_option_of_another_format(tmp_path):
    write_cells(tmp_path / "cells.zarr")
    with pytest.raises(InputError, match=r"separator='tab'.*is Zarr and has no"):
        import_matrix(tmp_path / "cells.zarr", tmp_path / "A.zarr", separator="tab")


def test_damaged_arrays_are_refused(tmp_path):
    write_cells(tmp_path / "cells.zarr")
    place = tmp_path / "cells.zarr/X"
    chunk = place / "data/c/0"
    raw = chunk.read_bytes()
    chunk.unlink()
    with pytest.raises(CorruptError, match=r"array 'data'.*missing"):
        import_matrix(place, tmp_path / "A.zarr")
    chunk.write_bytes(raw[:-9])
    with pytest.raises(CorruptError, match="array 'data'"):
        import_matrix(place, tmp_path / "A.zarr")
    chunk.write_bytes(numcodecs.Zstd().encode(bytes(200 << 20)))
    with pytest.raises(CorruptError, match="decodes to"):
        import_matrix(place, tmp_path / "A.zarr")
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(CorruptError, match="no regular file"):
        import_matrix(place, tmp_path / "A.zarr")
    assert not (tmp_path / "A.zarr").exists()


def test_damaged_dense_arrays_are_refused(tmp_path):
    write_cells(tmp_path / "cells.zarr", chunks=(30, 20))
    place = tmp_path / "cells.zarr/layers/dense"
    chunk = place / "c/0/0"
    raw = chunk.read_bytes()
    for content, message in ((raw[:-9], "damaged|truncated"), (b"", "damaged|truncated"),
                             (numcodecs.Zstd().encode(bytes(200 << 20)), "decodes to")):  # fmt: skip
        chunk.write_bytes(content)
        with pytest.raises(spdist.SpdistError, match=message):
            import_matrix(place, tmp_path / "A.zarr", dense=True)
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(CorruptError, match="no regular file"):
        import_matrix(place, tmp_path / "A.zarr", dense=True)
    assert not (tmp_path / "A.zarr").exists()


@pytest.mark.parametrize(("changes", "message"), [
    ({"shape": [10**15, 10**3]}, "over the limit"), ({"shape": [1 << 30, 1]}, "over the limit|free"),
    ({"shape": [3000000, 3000000]}, "over the limit"),
    ({"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 20, 1 << 20]}}}, "Zarr chunks of"),
])  # fmt: skip
def test_claims_of_dense_arrays_are_bounded(tmp_path, changes, message):
    zarr.save(tmp_path / "d.zarr", np.ones((4, 4)))
    document = json.loads((tmp_path / "d.zarr/zarr.json").read_text())
    (tmp_path / "d.zarr/zarr.json").write_text(json.dumps({**document, **changes}))
    with pytest.raises(MatrixError, match=message):
        import_matrix(tmp_path / "d.zarr", tmp_path / "A.zarr", dense=True)
