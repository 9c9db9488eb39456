"""HDF5 files of AnnData (old, dense, raw), 10x Genomics and binsparse; others are refused by what they hold."""

import json
import shutil
import subprocess
import sys
import warnings

import anndata
import binsparse
import h5py
import numpy as np
import pytest
import scipy.sparse as sp
from binsparse import tensor
from binsparse.conversions.scipy import from_scipy

from spdist.errors import InputError, MatrixError
from spdist.storage.import_export import import_matrix
from spdist.storage.matrix import StoredMatrix
from tests.support.pieces import take_pieces

A = sp.random(30, 20, 0.2, "csr", random_state=0).astype("f4")
CELLS = [f"cell {i}" for i in range(30)]
GENES = [f"gene {i}" for i in range(20)]


def read(source, tmp_path, **options):
    """Import a file; return its matrix as SciPy's, the names of rows and columns, and what was said of it."""
    shutil.rmtree(tmp_path / "out.zarr", ignore_errors=True)
    matrix = import_matrix(source, tmp_path / "out.zarr", **options)
    block = matrix.rows(0, matrix.nrows)
    attributes = json.loads((tmp_path / "out.zarr" / "zarr.json").read_text())["attributes"]
    said = attributes["spdist"]["provenance"]["read"]
    return sp.csr_array((block.data, block.indices, block.indptr), shape=matrix.shape), names_of(matrix), said


def names_of(matrix: StoredMatrix):
    return tuple(None if each is None else each.tolist() for each in (matrix.row_names, matrix.column_names))


def assert_same(found, expected):
    expected = expected if sp.issparse(expected) else sp.csr_array(expected)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.toarray(), expected.toarray())


def refused(source, tmp_path, what, **options):
    with pytest.raises(InputError, match=what) as caught:
        import_matrix(source, tmp_path / "none.zarr", **options)
    assert str(caught.value).isprintable()
    assert not (tmp_path / "none.zarr").exists()


# -- AnnData before 0.7 ------------------------------------------------------------------------------------------------


def put_old(group, name, matrix):
    """Write a sparse matrix as AnnData before 0.7 did."""
    made = group.create_group(name)
    made.attrs["h5sparse_format"] = matrix.format
    made.attrs["h5sparse_shape"] = np.array(matrix.shape)
    for array in ("data", "indices", "indptr"):
        made[array] = getattr(matrix, array)


def table(names, column="index"):
    """Return a data frame as AnnData before 0.7 stored it: a table whose first column is the index."""
    longest = max(len(each.encode()) for each in names)
    rows = [(each.encode(), 0.5) for each in names]
    return np.array(rows, [(column, f"S{longest}"), ("counts", "f4")])


def old_cells(path):
    distances = sp.random(30, 30, 0.1, "csr", random_state=1)
    with h5py.File(path, "w") as file:
        file.create_dataset("X", data=A.toarray(), chunks=(4, 6), compression="gzip")
        put_old(file, "raw.X", sp.hstack([A, A]).tocsc())
        put_old(file.create_group("layers"), "counts", A)
        put_old(file.create_group("uns/neighbors"), "distances", distances)
        file["obs"] = table(CELLS)
        file["var"] = table(GENES, "Symbol")
        file["raw.var"] = table([f"raw {i}" for i in range(40)])
        file["obsm"] = np.array([(np.arange(3) + i,) for i in range(30)], [("X_pca", "f4", (3,))])
    return distances


def test_anndata_before_07(tmp_path):
    path = tmp_path / "old.h5ad"
    distances = old_cells(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = anndata.read_h5ad(path)
    lists = "sparse in this file: layers/counts, raw.X, uns/neighbors/distances$"
    refused(path, tmp_path, rf"old\.h5ad::X is a dense array: pass --dense .*; {lists}")
    refused(f"{path}::layers/none", tmp_path, f"there is no matrix layers/none; {lists}")
    refused(f"{path}::obs", tmp_path, rf"stored as an array of shape \(30,\), not sparse; {lists}")
    refused(f"{path}::obsm/X_umap", tmp_path, "there is no matrix obsm/X_umap")
    found, names, said = read(path, tmp_path, dense=True)
    assert_same(found, oracle.X)
    assert names == (oracle.obs_names.tolist(), oracle.var_names.tolist()) == (CELLS, GENES)
    assert said == "read as an AnnData file; X; names of rows and columns; left out: zeros of a dense array"
    found, names, said = read(f"{path}::raw.X", tmp_path)
    assert_same(found, oracle.raw.X)
    assert names == (CELLS, oracle.raw.var_names.tolist())
    assert said == "read as an AnnData file; raw.X; names of rows and columns"
    found, names, _ = read(f"{path}::layers/counts", tmp_path)
    assert_same(found, A)
    assert names == (CELLS, GENES)
    found, names, _ = read(f"{path}::uns/neighbors/distances", tmp_path)
    assert_same(found, distances)
    assert names == (CELLS, CELLS)
    found, names, _ = read(f"{path}::obsm/X_pca", tmp_path, dense=True)
    assert_same(found, oracle.obsm["X_pca"])
    assert names == (CELLS, None)


def test_names_of_old_tables_that_are_no_strings(tmp_path):
    with h5py.File(tmp_path / "old.h5ad", "w") as file:
        put_old(file, "X", A)
        file["obs"] = np.zeros(30, [("index", "i4"), ("counts", "f4")])
        file["var"] = table(GENES[:19])
    refused(tmp_path / "old.h5ad", tmp_path, "names of columns: 19 names where 20 are needed")
    with h5py.File(tmp_path / "old.h5ad", "a") as file:
        del file["var"]
    _, names, said = read(tmp_path / "old.h5ad", tmp_path)
    assert names == (None, None)
    assert said == "read as an AnnData file; X; no names; left out: names of rows: obs has no index of strings"


# -- AnnData today -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "u1", "?"])
@pytest.mark.parametrize("options", [{}, {"chunks": (7, 20)}, {"chunks": (7, 3), "compression": "gzip"}])
def test_dense(tmp_path, dtype, options, monkeypatch):
    take_pieces(monkeypatch, 50)
    values = (10 * A.toarray()).astype(dtype)
    if dtype == "f8":
        values[2, 3] = np.nan
    cells = anndata.AnnData(values, layers={"more": A})
    cells.obs_names, cells.var_names = CELLS, GENES
    cells.write_h5ad(tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "a") as file:
        kept = dict(file["X"].attrs)
        del file["X"]
        file.create_dataset("X", data=values, **options).attrs.update(kept)
    refused(tmp_path / "a.h5ad", tmp_path, "X is a dense array: pass --dense .*; sparse in this file: layers/more$")
    found, names, _ = read(tmp_path / "a.h5ad", tmp_path, dense=True)
    assert_same(found, values)
    assert found.nnz == np.count_nonzero(values)
    assert names == (CELLS, GENES)


def test_raw_and_obsm(tmp_path):
    cells = anndata.AnnData(sp.hstack([A, A]).tocsr(), obsm={"X_pca": np.eye(30, 4), "hot": A})
    cells.obs_names, cells.var_names = CELLS, [f"raw {i}" for i in range(40)]
    cells.raw = cells
    cells = cells[:, :20].copy()
    cells.write_h5ad(tmp_path / "a.h5ad")
    found, names, said = read(f"{tmp_path}/a.h5ad::raw/X", tmp_path)
    assert_same(found, cells.raw.X)
    assert names == (CELLS, cells.raw.var_names.tolist())
    assert said == "read as an AnnData file; raw/X; names of rows and columns"
    assert read(tmp_path / "a.h5ad", tmp_path)[1] == (CELLS, cells.var_names.tolist())
    found, names, _ = read(f"{tmp_path}/a.h5ad::obsm/X_pca", tmp_path, dense=True)
    assert_same(found, np.eye(30, 4))
    assert names == (CELLS, None)
    refused(f"{tmp_path}/a.h5ad::obs", tmp_path, "stored as dataframe, not sparse; .*: X, obsm/hot, raw/X$")


def test_mudata(tmp_path):
    """Of a .h5mu, which holds several AnnData, a path names the matrix and its AnnData the rows."""
    cells = anndata.AnnData(A)
    cells.obs_names, cells.var_names = CELLS, GENES
    with h5py.File(tmp_path / "a.h5mu", "w") as file:
        file.attrs["encoding-type"] = "MuData"
        anndata.io.write_elem(file, "mod/rna", cells)
    refused(tmp_path / "a.h5mu", tmp_path, "there is no matrix X; sparse in this file: mod/rna/X")
    found, names, _ = read(f"{tmp_path}/a.h5mu::mod/rna/X", tmp_path)
    assert_same(found, A)
    assert names == (CELLS, GENES)


def test_filters_that_h5py_lacks(tmp_path):
    """As hdf5plugin's zstd; here it is optional, so that h5py writes the file."""
    with h5py.File(tmp_path / "a.h5ad", "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((5, 5))
        plist.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (3,))
        space = h5py.h5s.create_simple((30, 20))
        h5py.h5d.create(file.id, b"X", h5py.h5t.IEEE_F32LE, space, plist)
    refused(tmp_path / "a.h5ad", tmp_path, r"array 'X' needs the filter .* \(32015\), which is not read", dense=True)


def test_many_and_odd_names(tmp_path):
    """Lists of what a file holds stay short, and in one line."""
    with h5py.File(tmp_path / "a.mat", "w") as file:
        file.create_group("a\x1b[2J").attrs["MATLAB_sparse"] = np.uint64(1)
        file["a\x1b[2J/jc"] = np.zeros(3, "u8")
        for k in range(200):
            file.create_group(f"{k:0500}")
    _, _, said = read(tmp_path / "a.mat", tmp_path)
    assert said.startswith("read as a MATLAB file; a\\x1b[2J; no names; left out: variable 000")
    assert len(said) < 1000
    assert said.isprintable()


MEASURE = """
import re, resource, sys
from pathlib import Path
from spdist.storage.import_export import import_matrix
small, large, target = sys.argv[1:]
def peaks():  # in KiB, of this process since it started, and of the largest child
    own = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
    return int(own), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
import_matrix(small, target, dense=True)
before = peaks()
import_matrix(large, target, dense=True, overwrite=True)
print(*(after - start for after, start in zip(peaks(), before)))
"""


@pytest.mark.parametrize("chunks", [(100, 100), (2000, 20), (1, 10000)])
def test_dense_is_bounded_in_memory(tmp_path, chunks):
    """160 MB of a dense array; import and child take far less beyond the import of a small one."""
    for name, shape in (("small.h5ad", (4, 4)), ("large.h5ad", (2000, 10000))):
        with h5py.File(tmp_path / name, "w") as file:
            size = tuple(min(pair) for pair in zip(chunks, shape, strict=True))
            made = file.create_dataset("X", shape, "f8", chunks=size, compression="gzip", compression_opts=1)
            for row in range(0, shape[0], 400):
                made[row, ::50] = 1.0
    arguments = [str(tmp_path / name) for name in ("small.h5ad", "large.h5ad", "out.zarr")]
    run = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True)
    assert max(map(int, run.stdout.split())) < 64 << 10


def test_dense_that_lies(tmp_path):
    for change, what in (
        ({"shape": (1 << 20, 1 << 20), "dtype": "f4", "chunks": (64, 64)}, "inflate to 4.00 TiB"),
        ({"shape": (1 << 14, 1 << 14), "dtype": "f8", "chunks": (1 << 13, 1 << 13)}, "HDF5 chunks of 8,192 x 8,192"),
        ({"data": np.zeros((3, 4, 5))}, r"an array of shape \(3, 4, 5\), not sparse"),
        ({"data": np.zeros(5)}, r"an array of shape \(5,\), not sparse"),
        ({"data": np.zeros((3, 4), "f2")}, "float16"),
        ({"data": [["a", "b"]]}, "Python objects"),
        ({"shape": (4, 3), "dtype": "f8", "external": [("/etc/passwd", 0, 96)]}, "lies in other files"),
    ):
        with h5py.File(tmp_path / "a.h5ad", "w") as file:
            file.create_dataset("X", **change)
        refused(tmp_path / "a.h5ad", tmp_path, what, dense=True)


# -- 10x Genomics ------------------------------------------------------------------------------------------------------


def put_10x(group, matrix, **names):
    """Write genes x cells by cells, as Cell Ranger does."""
    stored = matrix.tocsc()
    group["data"] = stored.data
    group["indices"] = stored.indices.astype("i8")
    group["indptr"] = stored.indptr.astype("i8")
    group["shape"] = np.array(stored.shape, "i4")
    for name, values in names.items():
        longest = max(len(each.encode()) for each in values)
        group[name] = np.array([each.encode() for each in values], f"S{longest}")


COUNTS = sp.random(20, 30, 0.2, "csc", random_state=2) * 10
COUNTS = COUNTS.astype("i4")
IDS = [f"ENSG{i:05}" for i in range(20)]


def test_cell_ranger_3(tmp_path):
    path = tmp_path / "filtered_feature_bc_matrix.h5"
    with h5py.File(path, "w") as file:
        kinds = ["Gene Expression"] * 18 + ["Antibody Capture"] * 2
        put_10x(file.create_group("matrix"), COUNTS, barcodes=CELLS)
        put_10x(file.create_group("other"), COUNTS)
        features = file["matrix"].create_group("features")
        for name, values in (("id", IDS), ("name", GENES), ("feature_type", kinds), ("genome", ["GRCh38"] * 20)):
            features[name] = np.array([each.encode() for each in values])
    said_kinds = "of 2 feature types: Antibody Capture, Gene Expression"
    for source, options in ((path, {}), (f"{path}::matrix", {"orient": "cells-by-genes"})):
        found, names, said = read(source, tmp_path, **options)
        assert_same(found, COUNTS.T)
        assert names == (CELLS, GENES)
        assert said == (
            f"read as a 10x Genomics file; matrix; cells x genes (stored as genes x cells); {said_kinds}; "
            f"names of rows and columns; left out: identifiers of genes"
        )
    found, names, said = read(path, tmp_path, orient="genes-by-cells")
    assert_same(found, COUNTS)
    assert names == (GENES, CELLS)
    assert said == (
        f"read as a 10x Genomics file; matrix; genes x cells; {said_kinds}; names of rows and columns; "
        "left out: identifiers of genes"
    )
    refused(f"{path}::none", tmp_path, "there is no such matrix; there is matrix$")


def test_cell_ranger_2(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        put_10x(file.create_group("mm10"), COUNTS, barcodes=CELLS, genes=IDS, gene_names=GENES)
    found, names, said = read(path, tmp_path)
    assert_same(found, COUNTS.T)
    assert names == (CELLS, GENES)
    assert said == (
        "read as a 10x Genomics file; mm10; cells x genes (stored as genes x cells); names of rows and columns; "
        "left out: identifiers of genes"
    )
    with h5py.File(path, "a") as file:
        put_10x(file.create_group("hg19"), 2 * COUNTS, barcodes=CELLS, genes=IDS)
    refused(path, tmp_path, r"matrices of several genomes: hg19, mm10; name one, as in FILE\.h5::hg19$")
    found, names, said = read(f"{path}::hg19", tmp_path)
    assert_same(found, 2 * COUNTS.T)
    assert names == (CELLS, IDS)
    assert said.endswith("; left out: genomes mm10")


def test_damaged_10x(tmp_path):
    path = tmp_path / "a.h5"
    for name, value, what in (
        ("shape", [20, 31], "30 names where 31 are needed"),
        ("shape", [20.0, 30.0], "two dimensions"),
        ("shape", "text", "two dimensions|no array 'shape'"),
        ("indptr", np.zeros(31, "i8"), "ends at 0"),
        ("indices", np.full(COUNTS.nnz, 20), "column"),
        ("data", ["a"] * COUNTS.nnz, "Python objects"),
        ("barcodes", h5py.SoftLink("/matrix/data"), "is a link"),
    ):
        with h5py.File(path, "w") as file:
            put_10x(file.create_group("matrix"), COUNTS, barcodes=CELLS)
            del file["matrix"][name]
            file["matrix"][name] = value
        refused(path, tmp_path, what)


# -- binsparse ---------------------------------------------------------------------------------------------------------


def iso(matrix):
    """Return a matrix all of whose values are one, which binsparse stores once."""
    found = from_scipy(matrix)
    found.values = np.broadcast_to(np.array([7.0]), (matrix.nnz,))
    return found


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "u1", "?", "c8", "c16"])
def test_binsparse(tmp_path, kind, dtype):
    matrix = (10 * A).astype(dtype).asformat(kind)
    matrix.sum_duplicates()
    binsparse.save_binsparse(from_scipy(matrix), tmp_path / "a.bsp.h5")
    found, names, said = read(tmp_path / "a.bsp.h5", tmp_path)
    assert_same(found, matrix)
    assert names == (None, None)
    assert said == f"read as a binsparse file; format {'COOR' if kind == 'coo' else kind.upper()}; no names"


def test_binsparse_of_other_kinds(tmp_path):
    path = tmp_path / "a.bsp.h5"
    binsparse.save_binsparse(iso(A), path)
    seven = A.astype("f8")
    seven.data[:] = 7
    assert_same(read(path, tmp_path)[0], seven)
    by_columns = A.tocsc().tocoo()
    binsparse.save_binsparse(tensor.COOCMatrix(A.shape, A.nnz, indices_0=by_columns.col, indices_1=by_columns.row,
                                               values=by_columns.data), path)  # fmt: skip
    assert_same(read(path, tmp_path)[0], A)
    binsparse.save_binsparse(tensor.COORMatrix(A.shape, A.nnz, indices_0=by_columns.row, indices_1=by_columns.col,
                                               values=by_columns.data), path)  # fmt: skip
    refused(path, tmp_path, "format COOR is sorted by rows, and this file is not; it may have rows and columns")
    binsparse.save_binsparse(tensor.DVECVector((3,), 3, values=np.ones(3)), path)
    refused(path, tmp_path, "binsparse format DVEC is not read; known are CSR, CSC")
    binsparse.save_binsparse(from_scipy(A), path, header={"structure": "symmetric_lower"})
    refused(path, tmp_path, "structure 'symmetric_lower' is not read")
    filled = from_scipy(A)
    filled.fill, filled.fill_value = True, 1.0
    binsparse.save_binsparse(filled, path)
    refused(path, tmp_path, "not stored are not zero")
    filled.fill_value = 0.0
    binsparse.save_binsparse(filled, path)
    assert_same(read(path, tmp_path)[0], A)


def test_binsparse_that_lies(tmp_path):
    path = tmp_path / "a.bsp.h5"
    for change, what in (
        ({"data_types": {"values": "f128"}}, "'f128', which is not read"),
        ({"data_types": {"values": "iso[float32"}}, r"'iso\[float32', which is not read"),
        ({"data_types": {"values": "float64"}}, "holds float32, and its descriptor says float64"),
        ({"data_types": {"values": "iso[float32]"}}, "120 values where all are one"),
        ({"shape": [30]}, "two dimensions"),
        ({"shape": [31, 20]}, "does not fit"),
        ({"shape": "x"}, "lacks shape"),
        ({"number_of_stored_values": None}, "lacks shape or number_of_stored_values"),
        ({"format": ["CSR"]}, "is not read"),
    ):
        binsparse.save_binsparse(from_scipy(A), path)
        with h5py.File(path, "a") as file:
            header = json.loads(file.attrs["binsparse"])
            inner = header["binsparse"]
            inner["data_types"] |= change.pop("data_types", {})
            inner |= change
            file.attrs["binsparse"] = json.dumps(header)
        refused(path, tmp_path, what)
    binsparse.save_binsparse(iso(A), path)
    with h5py.File(path, "a") as file:
        file.attrs["binsparse"] = file.attrs["binsparse"].replace("120", "120000000000")
    refused(path, tmp_path, "inflate to")
    for text in ("[]", "{}", "no JSON"):
        with h5py.File(path, "a") as file:
            file.attrs["binsparse"] = text
        refused(path, tmp_path, "describes no matrix|damaged")


# -- other files -------------------------------------------------------------------------------------------------------


def test_other_hdf5(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["weights"] = np.eye(3)
        file.create_group("model/layer")
        file["away"] = h5py.ExternalLink("/etc/passwd", "/")
    refused(
        path,
        tmp_path,
        r"none of AnnData, 10x Genomics, MATLAB or binsparse; it holds away, model, weights \(3 x 3\); name a matrix "
        r"in it, as in FILE::PATH; sparse in this file: none$",
    )
    assert_same(read(f"{path}::weights", tmp_path, dense=True)[0], np.eye(3))
    refused(f"{path}::away/x", tmp_path, "is a link to another place")
    anndata.AnnData(A).write_h5ad(path)
    assert_same(read(path, tmp_path)[0], A)
    refused(path, tmp_path, r"is an AnnData file and has no cells and genes to turn", orient="genes-by-cells")
    shutil.copy(path, tmp_path / "a.hdf5")
    assert_same(read(f"{tmp_path}/a.hdf5::X", tmp_path)[0], A)
    path.write_bytes(b"no HDF5" * 100)
    with pytest.raises(MatrixError, match="damaged or truncated"):
        import_matrix(path, tmp_path / "none.zarr")
