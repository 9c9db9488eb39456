"""MATLAB's version 7.3: HDF5, in which a sparse matrix is a group with the attribute ``MATLAB_sparse``."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

from spdist.storage.formats.hdf5.description import Array, Description, RefusedError, Settings, listed
from spdist.storage.formats.hdf5.matlab import FORMAT, NUMERIC, choose, fields_left_out
from spdist.storage.formats.hdf5.objects import attribute, check_dataset, find, member, numbers, stored, word

HEADER = b"MATLAB"
"""First bytes of the block before HDF5."""

HIDDEN = ("#refs#", "#subsystem#")
"""Groups in which MATLAB keeps what cells and objects refer to."""


def is_matlab(file: Any, header: bytes) -> bool:
    """Whether a file is MATLAB's: it begins with this word, or its variables have attributes of MATLAB."""
    if header == HEADER:
        return True
    items = (file[name] for name in file if isinstance(file.get(name, getlink=True), h5py.HardLink))
    return any("MATLAB_class" in item.attrs or "MATLAB_sparse" in item.attrs for item in items)


def describe(file: Any, settings: Settings) -> Description:
    """Return what describes a sparse matrix, or a dense one, of a file."""
    inner = settings.inner.replace(".", "/").strip("/")
    variables = {name: member(file, name, name) for name in file if name not in HIDDEN}
    sparse = [name for name, item in variables.items() if "MATLAB_sparse" in item.attrs]
    left_out: list[str] = []
    if not inner and isinstance(variables.get("Problem"), h5py.Group) and "Problem" not in sparse:
        inner = "Problem/A"
    elif not inner:
        dense = [name for name, item in variables.items() if _is_dense(item)]
        inner = choose(sparse, dense, [f"{name} ({word(item, 'MATLAB_class')})" for name, item in variables.items()])
        left_out = [f"variable {name}" for name in variables if name != inner]
    item = find(file, inner)
    shown = inner.replace("/", ".")
    if inner == "Problem/A":
        left_out = fields_left_out(list(variables["Problem"]))
    if item is None:
        raise RefusedError(f"there is no variable '{shown}'; there is {listed(variables)}")
    if "MATLAB_sparse" in item.attrs:
        found = _sparse(item, shown)
    elif _is_dense(item):
        found = _dense(item, shown)
        found.sparse = "" if settings.dense else listed(sparse)
    else:
        kind = word(item, "MATLAB_class") or "an object"
        raise RefusedError(f"{shown} is no matrix of numbers but {kind}; sparse in this file: {listed(sparse)}")
    found.left_out = left_out
    return found


def _is_dense(item: Any) -> bool:
    is_numeric = word(item, "MATLAB_class") in NUMERIC
    return isinstance(item, h5py.Dataset) and is_numeric and ("MATLAB_empty" in item.attrs or len(item.shape) == 2)


def _sparse(group: Any, shown: str) -> Description:
    """Return what describes a sparse matrix; one without entries has no arrays of rows and values."""
    nrows = attribute(group, "MATLAB_sparse")
    indptr = stored("jc", member(group, "jc", "jc"))
    if any(name in group for name in ("ir", "data")):
        indices, data = (stored(name, member(group, name, name)) for name in ("ir", "data"))
    else:
        indices, data = _none(np.int64), _none(np.float64)
    data = _logical(data) if word(group, "MATLAB_class") == "logical" else data
    shape = [int(nrows) if np.ndim(nrows) == 0 else -1, indptr.shape[0] - 1]
    return Description(FORMAT, shown, "columns", shape, {"indptr": indptr, "indices": indices, "data": data})


def _dense(dataset: Any, shown: str) -> Description:
    """Return what describes a dense array, whose dimensions HDF5 has in reverse order."""
    if "MATLAB_empty" in dataset.attrs:
        check_dataset(shown, dataset)
        shape = numbers(dataset)
        return Description(FORMAT, shown, "dense", shape, {"values": _none(np.float64, (0, 0))})
    turned = stored(shown, dataset, 2)
    values = Array(turned.shape[::-1], turned.dtype, lambda at: turned.read(at[::-1]).T, turned.chunk[::-1])
    values = _logical(values) if word(dataset, "MATLAB_class") == "logical" else values
    return Description(FORMAT, shown, "dense", list(values.shape), {"values": values}, by_columns=True)


def _logical(found: Array) -> Array:
    return Array(found.shape, np.dtype(bool), lambda at: found.read(at) != 0, found.chunk)


def _none(dtype: Any, shape: tuple[int, ...] = (0,)) -> Array:
    return Array(shape, np.dtype(dtype), lambda at: np.empty(shape, dtype), (1,) * len(shape))
