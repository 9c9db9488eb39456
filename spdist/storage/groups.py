"""Zarr groups: created unfinished, finished in one step; their attributes, and small files of spdist's own."""

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
    """Create an unfinished group at `url`.

    Parameters
    ----------
    url : str
    facts : dict
        Kept under the attribute ``spdist``, with the state ``unfinished``.
    """
    zarr.create_group(locations.open_store(url), attributes={"spdist": {**facts, "state": "unfinished"}})


def read_facts(url: str) -> dict[str, Any]:
    """Return the attribute ``spdist`` of the group at `url`; an empty dictionary if there is none.

    Raises
    ------
    MatrixError
        If the system denies reading the group.
    """
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
    """Write the small file ``spdist-<name>`` into an unfinished group; an older one is replaced in one step.

    Parameters
    ----------
    url : str
        An unfinished group.
    name : str
        Of the note; the file is ``spdist-<name>``.
    content : bytes
    """
    store = locations.open_store(url)
    sync(store.set(f"spdist-{name}", default_buffer_prototype().buffer.from_bytes(content)))


def read_note(url: str, name: str) -> bytes | None:
    """Return the content that `write_note` wrote; None if there is no such file.

    Parameters
    ----------
    url, name : str
        As for `write_note`.

    Returns
    -------
    bytes or None
    """
    found = sync(locations.open_store(url).get(f"spdist-{name}", default_buffer_prototype()))
    return None if found is None else found.to_bytes()


def remove_note(url: str, name: str) -> None:
    """Delete the file that `write_note` wrote.

    Parameters
    ----------
    url, name : str
        As for `write_note`.
    """
    sync(locations.open_store(url).delete(f"spdist-{name}"))


def read(url: str) -> tuple[dict[str, Any], dict[str, zarr.Array[Any]]]:
    """Return the attributes of the group at `url`, and its arrays named in `ARRAYS`.

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
    """Finish a group: write the metadata of its arrays, then replace its attributes.

    Parameters
    ----------
    url : str
    arrays : list of (ChunkedArray, int)
        The arrays written, and the length of each in elements.
    attributes : dict
    """
    group = zarr.open_group(locations.open_store(url), mode="r+")
    for array, length in arrays:
        document = json.loads(array.metadata)
        document["shape"] = [length, *document["shape"][1:]]
        buffer = default_buffer_prototype().buffer.from_bytes(json.dumps(document, indent=2).encode())
        sync(locations.open_store(url).set(f"{array.name}/zarr.json", buffer))
    group.attrs.put(attributes)


def write_arrays(url: str | Path, arrays: dict[str, ValueArray], attributes: dict[str, Any]) -> None:
    """Write a Zarr group of NumPy arrays, for `read_arrays`.

    Parameters
    ----------
    url : str or Path
        Must not exist.
    arrays : dict
        Stored flattened; the shapes go to the attributes.
    attributes : dict
    """
    location = locations.normalise(url)
    begin(location, {})
    written = []
    for name, values in arrays.items():
        flat = np.ascontiguousarray(values).ravel()
        array = new_array(location, name, flat.dtype, CHUNK_LENGTH, compressed=compresses(flat))
        if len(flat):
            array.write_chunks(0, flat)
        written.append((array, len(flat)))
    shapes = {name: list(values.shape) for name, values in arrays.items()}
    finish_group(location, written, {**attributes, "spdist": {"state": "complete", "shapes": shapes}})


def read_arrays(url: str | Path) -> tuple[dict[str, ValueArray], dict[str, Any]]:
    """Return the arrays and the attributes that `write_arrays` wrote.

    Raises
    ------
    MatrixError
        If nothing is at `url`, or it is no Zarr group.
    CorruptError
        If a Zarr chunk is missing, truncated or altered.
    """
    location = locations.normalise(url)
    attributes, _ = read(location)
    shapes = attributes.get("spdist", {}).get("shapes", {})
    group = zarr.open_group(locations.open_store(location), mode="r")
    arrays = {}
    for name, shape in shapes.items():
        array = from_zarr(location, name, cast("zarr.Array[Any]", group[name]))
        arrays[name] = np.array(array.read(0, array.length)).reshape(shape)
    return arrays, attributes
