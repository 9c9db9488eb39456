"""Binsparse in HDF5 (.bsp.h5): a group with a JSON attribute ``binsparse``, version 0.1 of the specification."""

from __future__ import annotations

import json
import re
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from spdist.storage.formats.hdf5.description import Array, Description, Kind, RefusedError, Settings
from spdist.storage.formats.hdf5.objects import find, member, stored, word

FORMAT = "a binsparse file"

LAYOUTS: dict[str, tuple[Kind, dict[str, str]]] = {
    "CSR": ("rows", {"indptr": "pointers_to_1", "indices": "indices_1"}),
    "CSC": ("columns", {"indptr": "pointers_to_1", "indices": "indices_1"}),
    "COO": ("coordinates", {"rows": "indices_0", "columns": "indices_1"}),
    "COOR": ("coordinates", {"rows": "indices_0", "columns": "indices_1"}),
    "COOC": ("coordinates", {"rows": "indices_1", "columns": "indices_0"}),
}
"""Formats that are read: how they are stored, and the specification's names of their arrays of places."""


def describe(file: Any, settings: Settings) -> Description:
    """Return what describes a group."""
    inner = settings.inner.strip("/")
    group = find(file, inner)
    header = json.loads(word(group, "binsparse"))
    header = header.get("binsparse", header) if isinstance(header, dict) else None
    if not isinstance(header, dict) or not isinstance(header.get("data_types"), dict):
        raise RefusedError("its attribute 'binsparse' describes no matrix")
    kind = str(header.get("format"))
    if kind not in LAYOUTS:
        raise RefusedError(f"binsparse format {kind} is not read; known are {', '.join(LAYOUTS)}")
    if header.get("structure") is not None:
        raise RefusedError(f"structure {header['structure']!r} is not read; store both triangles of the matrix")
    shape, count = header.get("shape"), header.get("number_of_stored_values")
    if type(count) is not int or count < 0 or not isinstance(shape, list):
        raise RefusedError("its attribute 'binsparse' lacks shape or number_of_stored_values")
    _check_fill(group, header)
    layout, names = LAYOUTS[kind]
    arrays = {ours: _array(group, theirs, header, count) for ours, theirs in (names | {"data": "values"}).items()}
    if layout == "coordinates":
        first = "columns" if kind == "COOC" else "rows"
        arrays[first] = _rising(arrays[first], f"format {kind} is sorted by {first}, and this file is not")
    return Description(FORMAT, inner, layout, shape, arrays, found=[f"format {kind}"])


def is_binsparse(file: Any, inner: str) -> bool:
    """Whether the group at a path is a matrix of binsparse."""
    group = find(file, inner)
    return isinstance(group, h5py.Group) and "binsparse" in group.attrs


def _check_fill(group: Any, header: dict[str, Any]) -> None:
    """Refuse a matrix whose entries that are not stored are not zero."""
    if header.get("fill"):
        value = _array(group, "fill_value", header, 1)
        if value.shape != (1,) or value.read((slice(0, 1),))[0] != 0:
            raise RefusedError("its entries that are not stored are not zero (fill_value)")


def _array(group: Any, name: str, header: dict[str, Any], count: int) -> Array:
    """Return an array in the type that the descriptor declares."""
    declared = header["data_types"].get(name)
    found = stored(name, member(group, name, name))
    match = re.fullmatch(r"(iso\[)?(complex\[)?(u?int\d+|float\d+|bint8)\]{0,2}", str(declared))
    if match is None or str(declared).count("[") != str(declared).count("]"):
        raise RefusedError(f"array '{name}' has the type {declared!r}, which is not read")
    is_iso, is_complex, is_bool = match[1], match[2], match[3] == "bint8"
    if not is_bool and found.dtype != np.dtype(match[3]):
        raise RefusedError(f"array '{name}' holds {found.dtype}, and its descriptor says {declared}")
    if is_complex and found.dtype.kind == "f":
        found = _complex(name, found)
    if is_bool:
        found = Array(found.shape, np.dtype(bool), _as_bool(found))
    return _repeated(name, found, count) if is_iso else found


def _complex(name: str, parts: Array) -> Array:
    """Return an array of complex numbers whose parts alternate."""
    whole = np.dtype(f"{parts.dtype.byteorder}c{2 * parts.dtype.itemsize}")
    if parts.shape[0] % 2:
        raise RefusedError(f"array '{name}' has {parts.shape[0]:,} parts of complex numbers, an odd number")

    def read(at: tuple[slice, ...]) -> npt.NDArray[Any]:
        return parts.read((slice(2 * at[0].start, 2 * at[0].stop),)).view(whole)

    return Array((parts.shape[0] // 2,), whole, read)


def _rising(places: Array, problem: str) -> Array:
    """Return an array that is read in order, and must rise: Finch once wrote rows in the place of columns."""
    last = 0

    def read(at: tuple[slice, ...]) -> npt.NDArray[Any]:
        nonlocal last
        found = places.read(at)
        if len(found) and (found[0] < last or np.any(found[1:] < found[:-1])):
            raise RefusedError(f"{problem}; it may have rows and columns in each other's place: store it as CSR")
        last = found[-1] if len(found) else last
        return found

    return Array(places.shape, places.dtype, read)


def _as_bool(found: Array) -> Any:
    return lambda at: found.read(at) != 0


def _repeated(name: str, found: Array, count: int) -> Array:
    """Return an array all of whose elements are one stored value."""
    if found.shape != (1,):
        raise RefusedError(f"array '{name}' holds {found.shape[0]:,} values where all are one")
    value = found.read((slice(0, 1),))
    return Array((count,), found.dtype, lambda at: np.repeat(value, at[0].stop - at[0].start))
