"""Names of observations and variables in the AnnData around a matrix: the indices of its data frames."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spdist.errors import MatrixError
from spdist.storage import groups, locations
from spdist.storage.checksums import ChunkFiles
from spdist.storage.foreign.decoded_size import codecs_of
from spdist.storage.foreign.parents import above
from spdist.storage.names.names import AxisNames, Names, text_of, wrong_number

if TYPE_CHECKING:
    import zarr

FRAMES = {
    "X": ("obs", "var"),
    "layers": ("obs", "var"),
    "obsp": ("obs", "obs"),
    "varp": ("var", "var"),
    "obsm": ("obs", ""),
    "varm": ("var", ""),
}
"""Data frames that name the rows and the columns of X, and of the matrices in each folder of an AnnData."""

READ_NAMES = 1 << 16
"""Names that are read at a time, if a Zarr chunk does not hold more."""

NAME_BYTES = 256
"""Bytes of a name, on average over a large Zarr chunk, above which the Zarr chunk is not decoded."""


def frames_around(url: str) -> tuple[str, str] | None:
    """Return where the data frames of rows and columns lie; None if the matrix is not one of an AnnData.

    Parameters
    ----------
    url : str
        The matrix; a normalised path or URL. Nothing is read unless its path looks like one in an AnnData.

    Returns
    -------
    (str, str) or None
        Empty for an axis without a data frame.

    Examples
    --------
    >>> frames_around("/data/C.zarr") is None
    True
    """
    folder, name = above(url), url.rpartition("/")[2]
    kind = folder.rpartition("/")[2]
    for root, key in ((folder, name if name == "X" else ""), (above(folder), kind if kind != "X" else "")):
        if root and key in FRAMES and groups.read_attributes(root).get("encoding-type") == "anndata":
            rows, columns = (frame and f"{root}/{frame}" for frame in FRAMES[key])
            return rows, columns
    return None


def frame_names(frames: tuple[str, str], shape: tuple[int, int]) -> AxisNames:
    """Return the names that data frames give to the rows and columns of a matrix of this shape."""
    return AxisNames(*(_index_of(frame, count) for frame, count in zip(frames, shape, strict=True)))


def _index_of(frame: str, count: int) -> Names | None:
    index = groups.read_attributes(frame).get("_index") if frame else None
    if not isinstance(index, str) or not index or "/" in index:
        return None
    place = f"{frame}/{index}"
    return Names(place, count, functools.partial(_pieces, place, count))


def _pieces(place: str, count: int) -> Iterator[bytes]:
    """Yield the text of an array of strings."""
    import zarr

    groups.check_metadata_files(place, ("values",))
    if groups.read_attributes(place).get("encoding-type") == "nullable-string-array":
        place = f"{place}/values"
    with groups.clear_zarr_errors(place):
        array = zarr.open_array(locations.open_store(place), mode="r")
    if array.ndim != 1:
        raise MatrixError(f"{place}: an array of {array.ndim} dimensions where names are expected; write it again")
    if array.shape[0] != count:
        raise wrong_number(place, array.shape[0], count)
    with groups.clear_zarr_errors(place):
        chunk = (array.shards or array.chunks)[0]
        _check_chunks(place, array, chunk)
    step = max(chunk, READ_NAMES)
    for first in range(0, array.shape[0], step):
        with groups.clear_zarr_errors(place):
            names = array[first : first + step].tolist()  # type: ignore[union-attr]
        yield text_of(names, place)


def _check_chunks(place: str, array: zarr.Array[Any], chunk: int) -> None:
    """Refuse local Zarr chunks that are no files, or decode to far more bytes than names take.

    A Zarr chunk that is not there holds empty names.
    """
    if not locations.is_local(place):
        return
    frame, _, index = place.rpartition("/")
    prefix = array.metadata.encode_chunk_key((0,)).removesuffix("0")
    files = ChunkFiles(frame, index, f"{index}/{prefix}", "")
    codecs = codecs_of(json.dumps(array.metadata.to_dict()), chunk * NAME_BYTES)
    for k in range(-(-array.shape[0] // chunk)):
        if files.exists(k):
            files.check_decoded_size(k, codecs)
