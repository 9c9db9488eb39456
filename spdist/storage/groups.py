"""Zarr groups: begun unfinished, finished in one step, with attributes and small files of spdist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.errors import GroupNotFoundError

from spdist.errors import MatrixError
from spdist.matrices.dtypes import ValueArray
from spdist.storage import locations
from spdist.storage.chunked_array import CHUNK_LENGTH, ChunkedArray, compresses, from_zarr, new_array
from spdist.storage.locations import unreadable

ARRAYS = ("indptr", "indices", "data")
"""Names of the arrays of a matrix."""


def begin(url: str, facts: dict[str, Any]) -> None:
    """Create an unfinished matrix at `url`: a group that says so, and nothing else."""
    zarr.create_group(locations.open_store(url), attributes={"spdist": {**facts, "state": "unfinished"}})


def read_facts(url: str) -> dict[str, Any]:
    """Return what spdist noted at `url`, empty where there is nothing of ours."""
    try:
        if not locations.exists(url):
            return {}
        attributes = zarr.open_group(locations.open_store(url), mode="r").attrs.asdict()
    except PermissionError as error:
        raise unreadable(url) from error
    except (GroupNotFoundError, FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return cast(dict[str, Any], attributes.get("spdist", {}))


def write_note(url: str, name: str, content: bytes) -> None:
    """Write a small file of ours into the unfinished matrix; replaced in one step."""
    store = locations.open_store(url)
    sync(store.set(f"spdist-{name}", default_buffer_prototype().buffer.from_bytes(content)))


def read_note(url: str, name: str) -> bytes | None:
    """Return what `write_note` wrote, or None."""
    found = sync(locations.open_store(url).get(f"spdist-{name}", default_buffer_prototype()))
    return None if found is None else found.to_bytes()


def remove_note(url: str, name: str) -> None:
    """Remove what `write_note` wrote."""
    sync(locations.open_store(url).delete(f"spdist-{name}"))


def read(url: str) -> tuple[dict[str, Any], dict[str, zarr.Array[Any]]]:
    """Return the attributes of the group at `url`, and the arrays of a matrix that it has.

    Raises
    ------
    MatrixError
        If there is no group, or the system denies reading it.
    """
    try:
        there = locations.exists(url)
        group = zarr.open_group(locations.open_store(url), mode="r") if there else None
    except PermissionError as error:
        raise unreadable(url) from error
    except (GroupNotFoundError, FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise MatrixError(f"{url}: not a Zarr group; convert files with `spdist import`") from error
    if group is None:
        raise MatrixError(f"{url}: there is no such matrix")
    try:
        members = {name: member for name in ARRAYS if isinstance(member := group.get(name), zarr.Array)}
    except PermissionError as error:
        raise unreadable(url) from error
    return group.attrs.asdict(), members


def finish_group(url: str, arrays: list[tuple[ChunkedArray, int]], attributes: dict[str, Any]) -> None:
    """Give written arrays their lengths, then the group at `url` its attributes in place of those it had."""
    group = zarr.open_group(locations.open_store(url), mode="r+")
    for array, length in arrays:
        document = json.loads(array.metadata)
        document["shape"] = [length, *document["shape"][1:]]
        buffer = default_buffer_prototype().buffer.from_bytes(json.dumps(document, indent=2).encode())
        sync(locations.open_store(url).set(f"{array.name}/zarr.json", buffer))
    group.attrs.put(attributes)


def write_arrays(url: str | Path, arrays: dict[str, ValueArray], attributes: dict[str, Any]) -> None:
    """Write a Zarr group of arrays, flattened, their shapes among its attributes; `url` must not exist."""
    place = locations.normalise(url)
    begin(place, {})
    written = []
    for name, values in arrays.items():
        flat = np.ascontiguousarray(values).ravel()
        array = new_array(place, name, flat.dtype, CHUNK_LENGTH, compressed=compresses(flat))
        if len(flat):
            array.write_chunks(0, flat)
        written.append((array, len(flat)))
    shapes = {name: list(values.shape) for name, values in arrays.items()}
    finish_group(place, written, {**attributes, "spdist": {"state": "complete", "shapes": shapes}})


def read_arrays(url: str | Path) -> tuple[dict[str, ValueArray], dict[str, Any]]:
    """Return the arrays and the attributes that `write_arrays` wrote.

    Raises
    ------
    MatrixError
        If there is nothing, or nothing of the kind.
    CorruptError
        If a Zarr chunk is missing, truncated or altered.
    """
    place = locations.normalise(url)
    attributes, _ = read(place)
    shapes = attributes.get("spdist", {}).get("shapes", {})
    group = zarr.open_group(locations.open_store(place), mode="r")
    arrays = {}
    for name, shape in shapes.items():
        array = from_zarr(place, name, cast("zarr.Array[Any]", group[name]))
        arrays[name] = np.array(array.read(0, array.length)).reshape(shape)
    return arrays, attributes
