"""Names of observations and variables in the AnnData around a matrix: the indices of its data frames."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spdist.errors import InputError, MatrixError
from spdist.storage import groups
from spdist.storage.checksums import ChunkFiles
from spdist.storage.foreign.decoded_size import codecs_of
from spdist.storage.names.names import AxisNames, Names, text_of, wrong_number
from spdist.stores.names import family_of
from spdist.stores.registry import at

if TYPE_CHECKING:
    import zarr

FRAMES = {
    "X": ("obs", "var"),
    "layers": ("obs", "var"),
    "obsp": ("obs", "obs"),
    "varp": ("var", "var"),
    "obsm": ("obs", ""),
    "varm": ("var", ""),
    "raw/X": ("obs", "raw/var"),
    "raw/varm": ("raw/var", ""),
}
"""Data frames that name the rows and the columns of X, and of the matrices in each folder of an AnnData."""

AXES = {"obs": "observations", "var": "variables", "raw/var": "variables of raw", "": "any number"}
"""What messages call the rows or columns that a data frame names."""

READ_NAMES = 1 << 16
"""Names that are read at a time, if a Zarr chunk does not hold more."""

NAME_BYTES = 256
"""Bytes of a name, on average over a large Zarr chunk, above which the Zarr chunk is not decoded."""


def frames_around(url: str) -> tuple[str, str] | None:
    """Return where the data frames of rows and columns lie; None if the matrix is not one of an AnnData.

    `url`: the matrix; a normalised path or URL. Nothing is read unless its path looks like one in an AnnData.
    Returns (str, str) or None: empty for an axis without a data frame.

    Examples
    --------
    >>> frames_around("/data/C.zarr") is None
    True
    """
    if (around := _around(url)) is None:
        return None
    root, member = around
    rows, columns = (frame and f"{root}/{frame}" for frame in FRAMES[member])
    return rows, columns


def _around(url: str) -> tuple[str, str] | None:
    """Return the AnnData around a matrix and the key of `FRAMES` for it, or None."""
    for key in FRAMES:
        path = url if key.endswith("X") else at(url).parent_url()  # X is a matrix, the others are folders of matrices
        root = at(path).parent_url()
        if "/" in key:
            root = at(root).parent_url()
        if root and path == f"{root}/{key}" and groups.read_attributes(root).get("encoding-type") == "anndata":
            return root, key
    return None


def check_axes(target: str, shape: tuple[int, int], encoding: str = "csr_matrix") -> None:
    """Refuse a matrix that would make the AnnData around its target unreadable: one that does not fit its place.

    `target`: where the matrix goes; a normalised path or URL. Temporary copies beside a target pass.
    `encoding`: how the matrix is stored.
    Raises `InputError`; states both shapes, and where a matrix of this shape belongs.

    Examples
    --------
    >>> check_axes("/data/C.zarr", (3, 4))
    """
    if family_of(target) != target or (around := _around(target)) is None:
        return
    root, member = around
    lengths = {frame: _length_of(f"{root}/{frame}") for frame in ("obs", "var", *filter(None, FRAMES[member]))}

    def fits(key: str) -> bool:
        wanted = [lengths.get(frame) for frame in FRAMES[key]]
        return all(most is None or most == length for most, length in zip(wanted, shape, strict=True))

    if not fits(member):
        size = " x ".join("unknown" if length is None else f"{length:,}" for length in (lengths["obs"], lengths["var"]))
        axes = " x ".join(AXES[frame] for frame in FRAMES[member])
        homes = [key for key in FRAMES if "/" not in key and fits(key)]
        homes = [key for key in homes if all(FRAMES[key])] or homes
        remedy = f"it belongs in {' or '.join(homes)}" if homes else "write it outside the AnnData"
        raise InputError(
            f"{target}: a matrix of {shape[0]:,} x {shape[1]:,} does not fit {member}, which holds {axes}, in an "
            f"AnnData of {size} observations x variables; {remedy}"
        )
    if encoding != "csr_matrix":
        raise InputError(f"{target}: AnnData reads no {encoding}; write it outside the AnnData, or by entries")


def _length_of(frame: str) -> int | None:
    """Return the number of rows of a data frame; None if its index does not tell."""
    import zarr

    if (url := _index_url(frame)) is None:
        return None
    parts = {"nullable-string-array": "/values", "categorical": "/codes"}
    try:
        url += parts.get(str(groups.read_attributes(url).get("encoding-type")), "")
        groups.check_metadata_files(at(url), ())
        with groups.clear_zarr_errors(url):
            array = zarr.open_array(at(url).zarr_store(), mode="r")
    except MatrixError:
        return None
    return int(array.shape[0]) if array.ndim == 1 else None


def frame_names(frames: tuple[str, str], shape: tuple[int, int]) -> AxisNames:
    """Return the names that data frames give to the rows and columns of a matrix of this shape."""
    return AxisNames(*(_index_of(frame, count) for frame, count in zip(frames, shape, strict=True)))


def _index_of(frame: str, count: int) -> Names | None:
    url = _index_url(frame) if frame else None
    if url is None:
        return None
    return Names(url, count, functools.partial(_pieces, url, count), foreign=True)


def _index_url(frame: str) -> str | None:
    """Return where the index of a data frame lies; None if it does not say."""
    index = groups.read_attributes(frame).get("_index")
    return f"{frame}/{index}" if isinstance(index, str) and index and "/" not in index else None


def _pieces(url: str, count: int) -> Iterator[bytes]:
    """Yield the text of an array of strings."""
    import zarr

    groups.check_metadata_files(at(url), ("values",))
    encoding = groups.read_attributes(url).get("encoding-type")
    if encoding == "nullable-string-array":
        url = f"{url}/values"
    elif encoding == "categorical":
        raise MatrixError(f"{url}: names in a categorical are not read; make it an index of strings")
    with groups.clear_zarr_errors(url):
        array = zarr.open_array(at(url).zarr_store(), mode="r")
    if array.ndim != 1:
        raise MatrixError(f"{url}: an array of {array.ndim} dimensions where names are expected; write it again")
    if array.shape[0] != count:
        raise wrong_number(url, array.shape[0], count)
    with groups.clear_zarr_errors(url):
        chunk = (array.shards or array.chunks)[0]
        _check_chunks(url, array, chunk)
    step = max(chunk, READ_NAMES)
    for first in range(0, array.shape[0], step):
        with groups.clear_zarr_errors(url):
            names = array[first : first + step].tolist()  # type: ignore[union-attr]
        yield text_of(names, url)


def _check_chunks(url: str, array: zarr.Array[Any], chunk: int) -> None:
    """Refuse local Zarr chunks that are no files, or decode to far more bytes than names take.

    A Zarr chunk that is not there holds empty names.
    """
    frame, _, index = url.rpartition("/")
    prefix = array.metadata.encode_chunk_key((0,)).removesuffix("0")
    files = ChunkFiles(at(frame), index, f"{index}/{prefix}", "")
    codecs = codecs_of(json.dumps(array.metadata.to_dict()), chunk * NAME_BYTES)
    files.check_decoded_sizes(range(-(-array.shape[0] // chunk)), codecs, may_be_missing=True)
