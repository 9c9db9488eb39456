"""Small whole HDF5 and MATLAB files: of 10x Genomics, binsparse, AnnData before 0.7, MATLAB 5 and 7.3."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.io
import scipy.sparse as sp

MATRIX = sp.random(12, 10, 0.2, format="csc", random_state=0)


def hdf5(write: Callable[[Any], None], header: bytes = b"") -> bytes:
    """Return a file of HDF5; after a block of 512 bytes, if there is a header."""
    import h5py

    raw = io.BytesIO()
    with h5py.File(raw, "w", userblock_size=512 if header else 0) as file:
        write(file)
    return header.ljust(512 if header else 0, b"\0") + raw.getvalue()[512 if header else 0 :]


def put(group: Any, names: tuple[str, str, str] = ("indptr", "indices", "data"), **options: Any) -> Any:
    """Write the arrays of the matrix into a group."""
    for name, array in zip(names, ("indptr", "indices", "data"), strict=True):
        group.create_dataset(name, data=getattr(MATRIX, array), **options)
    return group


def tenx(file: Any) -> None:
    """Write a matrix as Cell Ranger 3 does."""
    group = put(file.create_group("matrix"), compression="gzip")
    group["shape"] = np.array(MATRIX.shape)
    group["barcodes"] = np.array([f"cell-{i}" for i in range(10)], "S8")
    group["features/name"] = np.array([f"gene-{i}" for i in range(12)], "S8")
    group["features/feature_type"] = np.array(["Gene Expression"] * 12, "S16")


def binsparse(file: Any) -> None:
    """Write a matrix as binsparse lays it out, all of whose values are one."""
    names = ("pointers_to_1", "indices_1", "values")
    types = {"pointers_to_1": "int32", "indices_1": "int32", "values": "iso[float64]"}
    put(file, names)
    del file["values"]
    file["values"] = np.array([7.0])
    header = {"version": "0.1", "format": "CSC", "shape": MATRIX.shape, "number_of_stored_values": MATRIX.nnz}
    file.attrs["binsparse"] = json.dumps({"binsparse": header | {"data_types": types}})


def old_cells(file: Any) -> None:
    """Write AnnData as versions before 0.7 did: a dense X, and tables whose first column is the index."""
    file.create_dataset("X", data=MATRIX.toarray(), chunks=(5, 4), compression="gzip")
    for frame, length in (("obs", 12), ("var", 10)):
        file[frame] = np.array([(f"{frame}{i}", i) for i in range(length)], [("index", "S6"), ("n", "i4")])


def old_layer(file: Any) -> None:
    """Write X as a sparse matrix of AnnData before 0.7."""
    group = put(file.create_group("X"))
    group.attrs["h5sparse_format"] = "csc"
    group.attrs["h5sparse_shape"] = MATRIX.shape
    file["obs"] = np.array([(f"obs{i}",) for i in range(12)], [("index", "S6")])


def problem(file: Any) -> None:
    """Write SuiteSparse's struct as MATLAB 7.3 does."""
    group = put(file.create_group("Problem/A"), ("jc", "ir", "data"))
    group.attrs["MATLAB_sparse"] = np.uint64(12)
    file["Problem"].attrs["MATLAB_class"] = np.bytes_("struct")
    file["Problem/b"] = np.ones((1, 12))


def dense(file: Any) -> None:
    """Write a dense variable as MATLAB 7.3 does."""
    file.create_dataset("x", data=MATRIX.toarray().T, chunks=(4, 5)).attrs["MATLAB_class"] = np.bytes_("double")


def matlab(variables: dict[str, Any], **options: Any) -> bytes:
    """Return a file of MATLAB before 7.3."""
    raw = io.BytesIO()
    scipy.io.savemat(raw, variables, **options)
    return raw.getvalue()


def hdf5_seeds() -> dict[str, bytes]:
    """Return all files by name; files of dense arrays are called full."""
    header = b"MATLAB 7.3 MAT-file".ljust(124) + b"\0\2IM"
    return {
        "tenx.h5": hdf5(tenx),
        "a.bsp.h5": hdf5(binsparse),
        "old-full.h5ad": hdf5(old_cells),
        "old-sparse.h5ad": hdf5(old_layer),
        "problem73.mat": hdf5(problem, header),
        "full73.mat": hdf5(dense, header),
        "problem.mat": matlab({"Problem": {"A": MATRIX, "name": "a", "b": np.ones((12, 1))}}),
        "packed.mat": matlab({"a": MATRIX.astype(bool), "x": np.eye(3)}, do_compression=True),
        "full.mat": matlab({"x": MATRIX.toarray()}),
        "four.mat": matlab({"a": MATRIX}, format="4"),
    }
