"""Find the names of a stored matrix, and decide which a new one gets."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from spdist.storage import groups
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.names.anndata_frames import frame_names, frames_around
from spdist.storage.names.names import ARRAYS, NO_NAMES, AxisNames, Names
from spdist.stores.registry import at


def names_of(url: str, facts: dict[str, Any], shape: tuple[int, int]) -> AxisNames:
    """Return the names of a stored matrix: those in the AnnData around it, else its own."""
    if (frames := frames_around(url)) is not None:
        return frame_names(frames, shape)
    own = named_arrays(facts)
    axes = zip(ARRAYS, shape, strict=True)
    return AxisNames(*(_own(url, name, facts, count) if name in own else None for name, count in axes))


def names_for(target: str, names: AxisNames) -> AxisNames:
    """Return the names to store with a new matrix at `target`: none in an AnnData, which has its own.

    Names that another program wrote are read, and left out with a warning if they cannot be.
    """
    return NO_NAMES if frames_around(target) is not None else names.readable()


def named_arrays(facts: dict[str, Any]) -> list[str]:
    """Return which arrays of names a matrix has, given its attribute ``spdist``: those under its seal."""
    sealed = (facts.get("seal") or {}).get("arrays", {})
    return [name for name in ARRAYS if name in sealed]


def open_names(url: str, name: str, facts: dict[str, Any]) -> ChunkedArray:
    """Return an array of names of a matrix; raise MatrixError if its metadata cannot be read."""
    digest = groups.table_digest({"spdist": facts}, name)
    with groups.clear_zarr_errors(url, name):
        document = json.loads(at(url).read(f"{name}/zarr.json"))
        return groups.array_of(url, name, document, (), digest)


def _own(url: str, name: str, facts: dict[str, Any], count: int) -> Names:
    return Names(f"{url}/{name}", count, functools.partial(_pieces, url, name, facts))


def _pieces(url: str, name: str, facts: dict[str, Any]) -> Iterator[bytes]:
    array = open_names(url, name, facts)
    for first in range(0, array.length, array.chunk):
        yield array.read(first, min(first + array.chunk, array.length)).tobytes()
