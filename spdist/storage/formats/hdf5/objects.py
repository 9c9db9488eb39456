"""Objects of HDF5 files, looked at with care: nothing outside the file is read, nothing long is read whole."""

from __future__ import annotations

import math
from typing import Any

import h5py
import numpy as np

from spdist.storage.formats.hdf5.description import MAX_LISTED, Array, RefusedError, listed

CHUNK_BYTES = 64 << 20
"""Bytes of the largest HDF5 chunk that is read; it is decoded whole."""

ATTRIBUTE_BYTES = 4096
"""Bytes of the longest attribute that is read."""

SEARCHED = 10_000
"""Objects of a file among which sparse matrices are looked for."""

SPARSE = ("csr_matrix", "csc_matrix", "csr", "csc")
"""How AnnData says that a group is a sparse matrix; the short words before its version 0.7."""


def member(group: Any, name: str, shown: str) -> Any:
    """Return a member of a group that lies in this file, or None; refuse links to other files and paths."""
    link = group.get(name, getlink=True) if isinstance(group, h5py.Group) else None
    if link is None:
        return None
    if not isinstance(link, h5py.HardLink):
        raise RefusedError(f"'{shown}' is a link to another place, which is not followed; store the data itself there")
    return group[name]


def find(group: Any, path: str) -> Any:
    """Return the object at a path below a group, or None."""
    for part in filter(None, path.split("/")):
        group = member(group, part, path)
    return group


def attribute(item: Any, name: str) -> Any:
    """Return a short attribute, or None."""
    if name not in item.attrs:
        return None
    found = item.attrs.get_id(name)
    if found.get_storage_size() > ATTRIBUTE_BYTES:
        raise RefusedError(f"the attribute '{name}' is too long")
    return item.attrs[name]


def word(item: Any, name: str) -> str:
    """Return an attribute that is text; empty if it is missing or something else."""
    found = attribute(item, name)
    found = found.decode("utf-8", "replace") if isinstance(found, bytes) else found
    return found if isinstance(found, str) else ""


def kind_of(item: Any) -> str:
    """Return how AnnData says that a group or dataset is encoded."""
    return word(item, "encoding-type") or word(item, "h5sparse_format")


def sparse_names(file: Any) -> str:
    """Return the paths of AnnData's sparse matrices in a file."""
    names: list[str] = []
    seen = 0

    def note(name: str, item: Any) -> bool | None:
        nonlocal seen
        seen += 1
        if isinstance(item, h5py.Group) and kind_of(item) in SPARSE:
            names.append(name)
        return True if seen >= SEARCHED or len(names) > MAX_LISTED else None

    file.visititems(note)
    return listed(names)


def contents(group: Any) -> str:
    """Return what a group holds, in a few words for each member."""
    found = []
    for name in group:
        item = member(group, name, name) if group.get(name, getlink=True).__class__ is h5py.HardLink else None
        shape = " x ".join(map(str, getattr(item, "shape", None) or ()))
        found.append(name if not shape else f"{name} ({shape})")
        if len(found) > MAX_LISTED:
            break
    return listed(found)


def check_dataset(name: str, dataset: Any, dimensions: int = 1) -> None:
    """Refuse a dataset that is missing, has other dimensions, lies outside the file, or is cut into huge chunks."""
    if not isinstance(dataset, h5py.Dataset) or dataset.shape is None or len(dataset.shape) != dimensions:
        raise RefusedError(f"there is no array '{name}' of {('one dimension', 'two dimensions')[dimensions - 1]}")
    if dataset.id.get_create_plist().get_external_count() or dataset.is_virtual:
        raise RefusedError(f"array '{name}' lies in other files, which are not read; copy it into this one")
    filters = dataset.id.get_create_plist()
    for number, _, _, spelled in (filters.get_filter(k) for k in range(filters.get_nfilters())):
        if not h5py.h5z.filter_avail(number):
            shown = spelled.decode("utf-8", "replace") or "of HDF5"
            raise RefusedError(
                f"array '{name}' needs the filter {shown} ({number}), which is not read; write it with gzip"
            )
    if dataset.chunks and math.prod(dataset.chunks) * dataset.dtype.itemsize > CHUNK_BYTES:
        elements = " x ".join(f"{each:,}" for each in dataset.chunks)
        raise RefusedError(f"array '{name}' has HDF5 chunks of {elements} elements; write it with shorter ones")


def stored(name: str, dataset: Any, dimensions: int = 1) -> Array:
    """Return a dataset of numbers; a compound of a real and an imaginary part is complex."""
    check_dataset(name, dataset, dimensions)
    dtype = dataset.dtype
    chunk = dataset.chunks or (1,) * dimensions
    if dtype.names == ("real", "imag") and dtype[0] == dtype[1] and dtype[0].kind == "f":
        whole = np.dtype(f"{dtype[0].byteorder}c{2 * dtype[0].itemsize}")
        if dtype.itemsize == whole.itemsize:
            return Array(dataset.shape, whole, lambda at: dataset[at].view(whole), chunk)
    return Array(dataset.shape, dtype, lambda at: dataset[at], chunk)


def strings(name: str, dataset: Any) -> Array | None:
    """Return a dataset of strings; of a table, its first column; None if it holds something else."""
    if not isinstance(dataset, h5py.Dataset):
        return None
    column = dataset.dtype.names[0] if dataset.dtype.names else None
    dtype = dataset.dtype[0] if column else dataset.dtype
    if h5py.check_string_dtype(dtype) is None:
        return None
    check_dataset(name, dataset)
    return Array(dataset.shape, dtype, (lambda at: dataset.fields(column)[at]) if column else lambda at: dataset[at])


def numbers(dataset: Any) -> list[Any]:
    """Return a short dataset, or an attribute, of whole numbers; an empty list if it is something else."""
    if isinstance(dataset, h5py.Dataset):
        check_dataset("shape", dataset)
        dataset = dataset[:9]
    given: Any = getattr(dataset, "tolist", list)()
    return given if isinstance(given, list) and all(type(each) is int for each in given) else []
