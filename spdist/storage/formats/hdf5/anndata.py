"""AnnData's .h5ad, also as versions before 0.7 wrote it, and MuData's .h5mu: X, or the matrix at a path."""

from __future__ import annotations

from typing import Any

import h5py

from spdist.storage.formats.hdf5.description import Array, Description, RefusedError, Settings
from spdist.storage.formats.hdf5.objects import (
    SPARSE,
    attribute,
    check_dataset,
    contents,
    find,
    kind_of,
    member,
    numbers,
    sparse_names,
    stored,
    strings,
    word,
)

FORMAT = "an AnnData file"

MORE_FRAMES = {
    "raw.X": ["obs", "raw.var"],  # before AnnData 0.7
    "raw.varm": ["raw.var", ""],
    "uns/neighbors/connectivities": ["obs", "obs"],
    "uns/neighbors/distances": ["obs", "obs"],
}
"""Data frames that name rows and columns of matrices outside the folders that every AnnData has."""


def describe(file: Any, settings: Settings) -> Description:
    """Return what describes a matrix of an AnnData, with the names of its rows and columns."""
    inner = settings.inner.strip("/") or "X"
    if not settings.inner and "X" not in file and word(file, "encoding-type") not in ("anndata", "MuData"):
        raise RefusedError(
            f"this HDF5 file is none of AnnData, 10x Genomics, MATLAB or binsparse; it holds {contents(file)}; name a "
            f"matrix in it, as in FILE::PATH; sparse in this file: {sparse_names(file)}"
        )
    item = find(file, inner)
    if isinstance(item, h5py.Group) and kind_of(item) in SPARSE:
        shape = attribute(item, "shape")
        shape = attribute(item, "h5sparse_shape") if shape is None else shape
        arrays = {name: stored(name, member(item, name, name)) for name in ("indptr", "indices", "data")}
        found = Description(
            FORMAT, inner, "rows" if kind_of(item).startswith("csr") else "columns", numbers(shape), arrays
        )
    else:
        values = _dense(file, inner, item)
        found = Description(FORMAT, inner, "dense", list(values.shape), {"values": values})
        found.sparse = "" if settings.dense else sparse_names(file)
    root, frames = _frames(file, inner, settings.frames)
    for axis, frame in zip(("rows", "columns"), frames, strict=True):
        found.names[axis] = _index(root, frame) if frame else None
        if frame and found.names[axis] is None:
            found.left_out.append(f"names of {axis}: {frame} has no index of strings")
    return found


def _dense(file: Any, inner: str, item: Any) -> Array:
    """Return a dense array; refuse what is something else."""
    path, _, column = inner.rpartition("/")
    table = find(file, path) if path else None
    dtype = table.dtype if isinstance(table, h5py.Dataset) else None  # a column of it is an array before AnnData 0.7
    if dtype is not None and column in (dtype.names or ()) and len(dtype[column].shape) == 1:
        return _column(inner, table, column)
    if isinstance(item, h5py.Dataset) and item.shape is not None and len(item.shape) == 2 and not item.dtype.names:
        return stored(inner, item, 2)
    what = f"there is no matrix {inner}"
    if item is not None:
        kind = kind_of(item) or ("a group" if isinstance(item, h5py.Group) else "an array")
        of = f" of shape {item.shape}" if isinstance(item, h5py.Dataset) else ""
        what = f"it is stored as {kind}{of}, not sparse"
    raise RefusedError(f"{what}; sparse in this file: {sparse_names(file)}")


def _column(name: str, table: Any, column: str) -> Array:
    """Return a column of a table, each of whose elements is a row of a matrix."""
    check_dataset(name, table)
    base, (width,) = table.dtype[column].subdtype
    return Array(
        (table.shape[0], width),
        base,
        lambda at: table.fields(column)[at[0]][:, at[1]],
        (*(table.chunks or (1,)), width),
    )


def _frames(file: Any, inner: str, known: dict[str, list[str]]) -> tuple[Any, list[str]]:
    """Return the AnnData around a matrix, and the paths in it of the data frames of rows and columns."""
    root, path = file, inner
    parts = inner.split("/")
    for at in range(1, len(parts)):
        group = find(file, "/".join(parts[:at]))
        if isinstance(group, h5py.Group) and word(group, "encoding-type") == "anndata":
            root, path = group, "/".join(parts[at:])
    for known_path, frames in (known | MORE_FRAMES).items():
        if path == known_path or path.startswith(f"{known_path}/"):
            return root, [frame if frame and find(root, frame) is not None else "" for frame in frames]
    return root, ["", ""]


def _index(root: Any, name: str) -> Array | None:
    """Return the index of a data frame; None if it is no array of strings."""
    frame = find(root, name)
    if isinstance(frame, h5py.Dataset):  # a table, before AnnData 0.7, whose first column is the index
        return strings(name, frame) if frame.dtype.names else None
    index = word(frame, "_index")
    if not index or "/" in index:
        return None
    found = member(frame, index, f"{name}/{index}")
    if isinstance(found, h5py.Group):  # strings, which may be missing
        found = member(found, "values", f"{name}/{index}/values")
    return strings(f"{name}/{index}", found)
