"""Small whole files of each format, from which malformed ones are made. Nothing is stored: all are written here."""

from __future__ import annotations

import bz2
import gzip
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
import scipy.sparse as sp

from tests.fuzz.hdf5_seeds import hdf5_seeds

FORMATS = ("csr", "csc", "coo", "bsr", "dia")

JOB = """
a: A.zarr
b: B.zarr  # a comment
out: C.zarr
memory_limit: 1GiB
workers: 1
grid: [2, 1, 1]
threshold: 0.5
"""


def sample(dtype: str = "f8") -> sp.coo_matrix:
    """Return a matrix of a few entries."""
    return sp.random(12, 10, 0.2, format="coo", random_state=0).astype(dtype)


def texts() -> dict[str, bytes]:
    """Return Matrix Market files: several fields and symmetries, dense, compressed."""
    found = {}
    for field, dtype in (("real", "f8"), ("integer", "i8"), ("complex", "c16")):
        text = io.BytesIO()
        scipy.io.mmwrite(text, sample(dtype), comment="a seed", symmetry="general")
        found[f"{field}.mtx"] = text.getvalue()
    square = sp.tril(sp.random(8, 8, 0.3, random_state=1))
    text = io.BytesIO()
    scipy.io.mmwrite(text, square, symmetry="general")
    found["symmetric.mtx"] = text.getvalue().replace(b"general", b"symmetric", 1)
    found["pattern.mtx"] = b"%%MatrixMarket matrix coordinate pattern general\n3 3 2\n1 1\n3 2\n"
    found["dense.mtx"] = b"%%MatrixMarket matrix array real general\n2 3\n1\n0\n2.5\n-3\n0\n1e5\n"
    found["hermitian.mtx"] = b"%%MatrixMarket matrix array complex hermitian\n2 2\n1 0\n2 1\n3 0\n"
    found["packed.mtx.gz"] = gzip.compress(found["real.mtx"], mtime=0)
    found["packed.mtx.bz2"] = bz2.compress(found["real.mtx"])
    return found


def graphs() -> dict[str, bytes]:
    """Return graphs of METIS and mcl, with and without weights, domains and comments."""
    head = b"(mclheader\nmcltype matrix\ndimensions 4x3\n)\n"
    body = b"(mclmatrix\nbegin\n0 1:0.5 2:1e-3 $ # a comment\n7 0\n  4 1:2 $\n1 $\n)\n"
    metis = b"% a comment\n7 11 011 2\n1 1 5 1 3 2 2 1\n1 1 1 1 3 2 4 1\n1 1 5 3 4 2 2 2 1 2\n1 1 2 1 3 2 6 2 7 5\n"
    return {
        "plain.graph": b"4 3\n2 3\n1 3\n1 2\n\n",
        "weights.graph": metis + b"1 1 1 1 3 3 6 2\n1 1 5 2 4 2 7 6\n1 1 6 6 4 5\n",
        "packed.graph.gz": gzip.compress(b"2 1\n2\n1\n", mtime=0),
        "plain.mci": head.replace(b"4x3", b"5x8") + body,
        "domains.mci": head + b"(mclrows\n0 1 2 4 $\n)\n(mclcols\n0 1 7 $\n)\n" + body,
    }


def edges() -> dict[str, bytes]:
    """Return lists of edges: every separator, quotes, a header, further columns, compression."""
    lines = b"source;target;weight;year\nA b;c;1,5;2001\nc;d;2;2002\n"
    return {
        "tabs.edges.tsv": b"# a comment\ngene A\tgene B\t0.5\ngene B\tc\t1e-3\n",
        "commas.edges.csv": b'source,target,weight\n"a, b",c,1\nc,"say ""x""",2\n',
        "semicolons.edges.csv": b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n"),
        "spaces.edges.txt": b"% sym\n1 2 5 1094\n2 3 1 1095\n",
        "packed.edges.abc.gz": gzip.compress(b"a b 1\nb c\n", mtime=0),
    }


def petsc() -> dict[str, bytes]:
    """Return matrices of PETSc's builds."""
    matrix, found = sample().tocsr(), {}
    for name, index, value in (("usual", ">i4", ">f8"), ("wide", ">i8", ">c16")):
        head = [1211216, *matrix.shape, matrix.nnz, *np.diff(matrix.indptr), *matrix.indices]
        found[f"{name}.petsc"] = np.array(head, index).tobytes() + matrix.data.astype(value).tobytes()
    found["followed.petsc"] = found["usual.petsc"] + np.array([1211214, 2, 0, 0, 0, 0], ">i4").tobytes()
    return found


def tenx() -> dict[str, bytes]:
    """Return the files of a folder of 10x Genomics."""
    text = io.BytesIO()
    scipy.io.mmwrite(text, sample("i8"))
    genes = "".join(f"ENSG{i}\tgene {i}\tGene Expression\n" for i in range(12))
    barcodes = "".join(f"AAC{i}-1\n" for i in range(10))
    return {
        "cells/matrix.mtx": text.getvalue(),
        "cells/features.tsv": genes.encode(),
        "cells/barcodes.tsv.gz": gzip.compress(barcodes.encode(), mtime=0),
    }


def archives() -> dict[str, bytes]:
    """Return files of ``scipy.sparse.save_npz`` in each format, stored and compressed, and of pydata/sparse."""
    found = {}
    coo, csr = sample(), sample().tocsr()
    others: dict[str, dict[str, Any]] = {
        "coo": {"coords": np.array([coo.row, coo.col]), "data": coo.data},
        "gcxs": {"indices": csr.indices, "indptr": csr.indptr, "data": csr.data, "compressed_axes": np.array([0])},
    }
    for kind, arrays in others.items():
        file = io.BytesIO()
        np.savez(file, format=kind, shape=np.array(coo.shape), fill_value=np.zeros(()), **arrays)
        found[f"pydata-{kind}.npz"] = file.getvalue()
    for kind in FORMATS:
        for packed in (False, True):
            file = io.BytesIO()
            matrix = sample("f4" if packed else "f8").asformat(kind)
            sp.save_npz(file, matrix, compressed=packed)
            found[f"{kind}{'-packed' if packed else ''}.npz"] = file.getvalue()
    return found


def cells() -> dict[str, bytes]:
    """Return files of AnnData's layout, written by h5py alone: by rows and by columns, plain and compressed."""
    import h5py

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, options in (("csr", {}), ("csc", {"compression": "gzip", "chunks": (8,), "shuffle": True})):
            matrix = sample().asformat(kind)
            with h5py.File(Path(folder) / "a.h5ad", "w") as file:
                file.attrs["encoding-type"] = "anndata"
                group = file.create_group("X")
                group.attrs.update({"encoding-type": f"{kind}_matrix", "encoding-version": "0.1.0"})
                group.attrs["shape"] = np.array(matrix.shape)
                for name in ("indptr", "indices", "data"):
                    group.create_dataset(name, data=getattr(matrix, name), **options)
                for frame, length in zip(("obs", "var"), matrix.shape, strict=True):
                    file.create_group(frame).attrs["_index"] = "_index"
                    file[f"{frame}/_index"] = [f"{frame} {i}" for i in range(length)]
            found[f"{kind}.h5ad"] = (Path(folder) / "a.h5ad").read_bytes()
    return found


def dense() -> dict[str, bytes]:
    """Return dense arrays of two dimensions, as `numpy.save` writes them."""
    found = {}
    for name, order in (("rows.dense.npy", "C"), ("columns.dense.npy", "F")):
        file = io.BytesIO()
        np.save(file, np.asarray(sample().toarray(), order=order))  # type: ignore[call-overload]
        found[name] = file.getvalue()
    return found


def vectors() -> dict[str, bytes]:
    """Return factors for rows, as `numpy.save` writes them."""
    found = {}
    for name, values in (("floats.npy", np.linspace(1, 2, 12)), ("whole.npy", np.arange(12))):
        file = io.BytesIO()
        np.save(file, values)
        found[name] = file.getvalue()
    return found


def seeds() -> dict[str, bytes]:
    """Return all seeds by name."""
    binary = {**archives(), **cells(), **hdf5_seeds(), **dense(), **vectors(), **petsc()}
    return {**texts(), **graphs(), **edges(), **tenx(), **binary, "job.yaml": JOB.encode()}


def store_matrices(folder: Path) -> None:
    """Write the stored matrices A (12 x 10, with names) and B (10 x 12), their product C, and a mask M of C.

    Matrices of other programs go to the folder ``groups``.
    """
    import spdist

    a = sample().tocsr()
    spdist.save(folder / "A.zarr", a, row_names=[f"row {i} é" for i in range(12)], column_names=["c"] * 10)
    spdist.save(folder / "B.zarr", a.T.tocsr())
    spdist.save(folder / "C.zarr", (a @ a.T).tocsr())
    spdist.save(folder / "M.zarr", sp.eye(12, format="csr"))
    store_groups(folder / "groups")


def store_groups(folder: Path) -> None:
    """Write matrices of other programs: an AnnData with columns and a dense array, and A in Binsparse."""
    import zarr

    import spdist

    folder.mkdir()
    spdist.export_matrix(folder.parent / "A.zarr", folder / "binsparse.zarr", format="binsparse")
    for version in (2, 3):
        root = zarr.open_group(folder / f"cells{version}.zarr", mode="w", zarr_format=version)  # type: ignore[arg-type]
        root.attrs["encoding-type"] = "anndata"
        x, matrix = root.create_group("X"), sample().tocsc()
        x.attrs.update({"encoding-type": "csc_matrix", "encoding-version": "0.1.0", "shape": list(matrix.shape)})
        for name in ("indptr", "indices", "data"):
            x.create_array(name, data=getattr(matrix, name), chunks=(8,), config={"write_empty_chunks": True})
        root.create_group("layers").create_array("dense", data=matrix.toarray(), chunks=(5, 4))
        for frame, length in zip(("obs", "var"), matrix.shape, strict=True):
            root.create_group(frame).attrs["_index"] = "_index"
            names = np.array([f"{frame} {i}" for i in range(length)], dtype=object)
            root[frame].create_array("_index", shape=(length,), dtype=str)[:] = names  # type: ignore[union-attr]
