"""Import what other programs keep in Zarr: AnnData's sparse and dense matrices, Binsparse, arrays of two dimensions.

Zarr chunks are decoded whole, and checked first as operands' Zarr chunks are. A missing Zarr chunk of a sparse matrix
is damage; of a dense array it holds the fill value, as Zarr leaves out Zarr chunks of zeros.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from spdist.errors import InputError, MatrixError, one_line
from spdist.foundation.units import format_bytes
from spdist.matrices.dtypes import ValueArray
from spdist.storage import groups
from spdist.storage.checksums import ChunkFiles
from spdist.storage.chunked_array import CHUNK_BYTES, ChunkedArray, from_zarr
from spdist.storage.foreign.decoded_size import codecs_of
from spdist.storage.foreign.parents import members_of
from spdist.storage.formats.compressed_rows import ENTRIES, Arrays, import_compressed, import_coordinates
from spdist.storage.formats.dense_rows import check_dense, import_dense
from spdist.storage.formats.source import Import, check_numbers, foreign
from spdist.storage.matrix import PARTS, open_matrix
from spdist.storage.names.of_matrix import names_of
from spdist.stores.registry import at

if TYPE_CHECKING:
    import zarr

LONGEST_HEADER = 1 << 16
"""Characters of the longest descriptor of Binsparse."""

BINSPARSE = {
    "CSR": ("pointers_to_1", "rows"),
    "CSC": ("pointers_to_1", "columns"),
    "COO": ("indices_0", "rows"),
    "COOR": ("indices_0", "rows"),
    "COOC": ("indices_0", "columns"),
}
"""Formats of Binsparse that are read: the array beside ``indices_1``, and what it is about."""


def is_zarr(url: str) -> bool:
    """Whether a normalised path is a group or an array of Zarr, or a URL has the name of one."""
    return at(url).is_zarr()


def import_zarr(job: Import) -> None:
    """Import a matrix in Zarr that another program wrote, with the names of the AnnData around it; or one in parts.

    Raises `InputError` if it is a matrix of spdist's, or a dense array and `dense` was not asked for.
    Raises `MatrixError` if there is no such matrix, or it is damaged.
    """
    url, attributes = _matrix_in(job)
    job = replace(job, source=replace(job.source, size=max(_stored_bytes(url), 1)))
    kind = attributes.get("encoding-type")
    if groups.is_array(at(url)):
        _import_dense(job, url)
    elif "binsparse" in attributes:
        _import_binsparse(job, url, attributes["binsparse"])
    elif kind in ("csr_matrix", "csc_matrix"):
        _import_compressed(job, url, str(kind))
    elif kind == PARTS:
        _import_parts(job, url)
    else:
        raise _no_matrix(job, url, kind)


def _matrix_in(job: Import) -> tuple[str, dict[str, Any]]:
    """Return the URL of the matrix and the attributes of its group: ``X`` of an AnnData if no path was given."""
    url, inner = job.path, job.source.inner.strip("/")
    if any(part in ("", ".", "..") for part in inner.split("/")) and inner:
        raise InputError(
            f"{url}: {one_line(inner, 60)} is no path inside a group; name one, for instance layers/counts"
        )
    if not at(url).exists():
        raise MatrixError(f"{url}: there is no such group; correct the path")
    attributes = groups.read_attributes(url)
    if not inner and attributes.get("encoding-type") == "anndata":
        inner = "X"
        others = [name for name in members_of(url) if name != "X"]
        job.reading.left_out += others
    if not inner:
        if groups.facts_of(attributes) and not {"binsparse", "parts"} & {*attributes, *groups.facts_of(attributes)}:
            raise InputError(
                f"{url} is a matrix of spdist's, which needs no import: give spdist plan or multiply its path"
            )
        return url, attributes
    member = f"{url}/{inner}"
    if not at(member).exists():
        raise MatrixError(f"{url}: nothing is at {one_line(inner, 60)}; {_sparse_in(job, url)}")
    job.reading.found.append(f"matrix {inner}")
    return member, groups.read_attributes(member)


def _stored_bytes(url: str) -> int:
    """Return the bytes that the files of a matrix take; 0 if the storage cannot list them."""
    with at(url).clear_errors():
        return at(url).stored_bytes()


def _sparse_in(job: Import, url: str) -> str:
    found = ", ".join(f"{job.path}::{name}" for name in members_of(url))
    return f"matrices in it: {found}" if found else "name a matrix in it, as in cells.zarr::layers/counts"


def _no_matrix(job: Import, url: str, kind: object) -> MatrixError:
    what = f"a group of encoding-type {one_line(kind, 40)}" if kind else "a group of Zarr without a matrix's attributes"
    return MatrixError(
        f"{url}: {what}; csr_matrix, csc_matrix, Binsparse and arrays of two dimensions are read; "
        f"{_sparse_in(job, job.path)}"
    )


# -- compressed --------------------------------------------------------------------------------------------------------


@dataclass
class _ArrayStream:
    """An array of one dimension in Zarr, read in order: each Zarr chunk is decoded once.

    `width` numbers are an element (two for Binsparse's complex numbers). `is_zero` says that all elements must be zero,
    so that Zarr chunks may be missing: Zarr leaves out Zarr chunks of zeros.
    """

    array: ChunkedArray
    dtype: np.dtype[Any]
    width: int = 1
    is_zero: bool = False

    def __post_init__(self) -> None:
        if self.array.length % self.width:
            raise MatrixError(
                f"{self.array.url}: array '{self.array.name}' has {self.array.length:,} parts of complex numbers, an "
                f"odd number; write it again"
            )
        self.shape: tuple[int, ...] = (self.array.length // self.width,)
        self._next = 0
        self._held = np.empty(0, self.array.dtype)

    def read(self, count: int) -> ValueArray:
        """Return the next `count` elements."""
        wanted, chunk = count * self.width, self.array.chunk
        if (missing := wanted - len(self._held)) > 0:
            stop = min(-(-(self._next + missing) // chunk) * chunk, self.array.length)
            self._held = np.concatenate([self._held, self._decoded(self._next, stop)])
            self._next = stop
        found, self._held = self._held[:wanted], self._held[wanted:].copy()
        return np.ascontiguousarray(found).view(self.dtype) if self.width > 1 else found.astype(self.dtype, copy=False)

    def _decoded(self, first: int, last: int) -> ValueArray:
        chunk = self.array.chunk
        if self.is_zero and not any(self.array.files.exists(k) for k in range(first // chunk, -(-last // chunk))):
            return np.zeros(last - first, self.array.dtype)
        return self.array.read(first, last)


class _OneValue:
    """Values that are all equal; only one is stored."""

    def __init__(self, value: ValueArray, shape: tuple[int, ...]) -> None:
        self.value, self.shape, self.dtype = value, shape, value.dtype

    def read(self, count: int) -> ValueArray:
        """Return the next `count` elements."""
        return np.broadcast_to(self.value, (count,)).copy()


def _import_compressed(job: Import, url: str, kind: str) -> None:
    attributes, members = groups.read(at(url))
    if missing := [name for name in groups.ARRAYS if name not in members]:
        raise MatrixError(f"{url}: a {kind} without an array '{missing[0]}'; write it again")
    found = {}
    for name, kinds in zip(groups.ARRAYS, ("iu", "iu", "biufc"), strict=True):
        with groups.clear_zarr_errors(url, name):
            array = groups.array_of(url, name, members[name], (), groups.table_digest(attributes, name))
        found[name] = _ArrayStream(array, check_numbers(array.dtype, url, name, kinds))
    shape = job.shape(_numbers(attributes.get("shape")))
    found["indptr"].is_zero = found["indices"].shape == (0,)
    found["indices"].is_zero = shape[1 if kind == "csr_matrix" else 0] == 1
    _check_size(job, url, [stream.array for stream in found.values()])
    named = replace(job, names=names_of(url, groups.facts_of(attributes), shape))
    job.reading.found.append(kind)
    arrays = Arrays(found["indptr"], found["indices"], found["data"], url)
    import_compressed(named, shape, arrays, by_columns=kind == "csc_matrix")


def _import_parts(job: Import, url: str) -> None:
    """Write a matrix in parts as one."""
    m = open_matrix(url)
    job.reading.found.append("csr_matrix in parts")
    blocks = (m.rows(start, stop) for start, stop, _ in m.row_blocks(ENTRIES))
    replace(job, names=m.names).write(blocks, m.ncols, m.dtype, m.nnz)


def _numbers(value: object) -> list[Any]:
    """Return the shape that an attribute states, for `Import.shape` to check."""
    return [None if isinstance(each, bool) else each for each in value] if isinstance(value, list) else [value]


def _check_size(job: Import, url: str, arrays: list[ChunkedArray]) -> None:
    """Refuse arrays that decode to many times the bytes that are stored."""
    claimed = sum(array.length * array.dtype.itemsize for array in arrays)
    replace(job.source, path=url).check_inflated(claimed, "write it without compression if it is meant to")


# -- Binsparse ---------------------------------------------------------------------------------------------------------


def _import_binsparse(job: Import, url: str, given: object) -> None:
    """Import a matrix in Binsparse 0.1 whose format is CSR, CSC or COO."""
    header = _descriptor(url, given)
    name, types = str(header.get("format")), header.get("data_types")
    if name not in BINSPARSE or not isinstance(types, Mapping):
        raise MatrixError(f"{url}: Binsparse of format {one_line(name, 40)} is not read; write it as CSR, CSC or COO")
    if header.get("fill") and not _is_zero(_binsparse_values(url, "fill_value", types, (1,))):
        raise MatrixError(f"{url}: what is not stored has another value than 0 (fill_value); write it with 0")
    if header.get("structure"):
        raise MatrixError(
            f"{url}: Binsparse of structure {one_line(header['structure'], 40)} is not read; write all entries"
        )
    shape, count = job.shape(_numbers(header.get("shape"))), header.get("number_of_stored_values")
    first, axis = BINSPARSE[name]
    pointers, indices = (_binsparse_indices(url, each) for each in (first, "indices_1"))
    values = _binsparse_values(url, "values", types, indices.shape)
    if count != indices.shape[0]:
        raise MatrixError(f"{url}: states {one_line(count, 30)} values and holds {indices.shape[0]:,}; write it again")
    _check_size(job, url, [each.array for each in (pointers, indices, values) if isinstance(each, _ArrayStream)])
    job.reading.found.append(f"Binsparse {name}")
    if first == "indices_0":
        rising = _RisingStream(pointers, f"{url}: Binsparse {name} is sorted by {axis}, and this is not")
        rows, columns = (rising, indices) if axis == "rows" else (indices, rising)
        import_coordinates(job, shape, rows, columns, values, url)
        return
    import_compressed(job, shape, Arrays(pointers, indices, values, url), by_columns=axis == "columns")


def _descriptor(url: str, given: object) -> dict[str, Any]:
    """Return Binsparse's descriptor, which an attribute holds as a document or as its text."""
    if isinstance(given, str) and len(given) <= LONGEST_HEADER:
        with groups.clear_zarr_errors(url):
            given = json.loads(given)
    inner = given.get("binsparse", given) if isinstance(given, dict) else None
    if not isinstance(inner, dict):
        raise MatrixError(f"{url}: the attribute 'binsparse' is {one_line(repr(given), 60)}; write it again")
    version = inner.get("version")
    if not isinstance(version, str) or version.split(".")[:2] != ["0", "1"]:
        raise MatrixError(f"{url}: Binsparse of version {one_line(version, 30)}; version 0.1 is read")
    return inner


def _binsparse_indices(url: str, name: str) -> _ArrayStream:
    array = _array_in(url, name)
    return _ArrayStream(array, check_numbers(array.dtype, url, name, "iu"))


class _RisingStream:
    """Indices that must rise: a writer once put rows in the place of columns, and their order shows it."""

    def __init__(self, stream: _ArrayStream, problem: str) -> None:
        self.stream, self.problem, self.shape, self.dtype, self._last = stream, problem, stream.shape, stream.dtype, 0

    def read(self, count: int) -> ValueArray:
        """Return the next `count` elements."""
        found = self.stream.read(count)
        if len(found) and (found[0] < self._last or np.any(found[1:] < found[:-1])):
            raise MatrixError(f"{self.problem}; rows and columns may be in each other's place: write it as CSR")
        self._last = found[-1] if len(found) else self._last
        return found


def _binsparse_values(
    url: str, name: str, types: Mapping[str, Any], shape: tuple[int, ...]
) -> _ArrayStream | _OneValue:
    """Return the values as their type says: numbers, bool as bytes, complex as pairs, or one for all."""
    array, spelled = _array_in(url, name), types.get(name)
    dtype = check_numbers(array.dtype, url, name, "biufc")
    one_for_all = re.fullmatch(r"iso\[(.*)\]", str(spelled))
    text = str(spelled) if one_for_all is None else one_for_all[1]
    if text == "bint8" and dtype.itemsize == 1:
        stream = _ArrayStream(array, np.dtype(np.bool_))
    elif text == f"complex[{dtype.name}]" and dtype.kind == "f":
        stream = _ArrayStream(array, np.dtype(f"c{2 * dtype.itemsize}"), 2)
    elif text == dtype.name:
        stream = _ArrayStream(array, dtype)
    else:
        raise MatrixError(f"{url}: values of type {one_line(spelled, 40)} in an array of {dtype}; write it again")
    if one_for_all is None:
        return stream
    if stream.shape != (1,):
        raise MatrixError(
            f"{url}: values of type {one_line(spelled, 40)} are {stream.shape[0]:,}, not one; write it again"
        )
    return _OneValue(stream.read(1), shape)


def _is_zero(value: _ArrayStream | _OneValue) -> bool:
    """Whether a stored value is zero, whose Zarr chunk may be missing."""
    if isinstance(value, _ArrayStream):
        value.is_zero = True
    return bool(value.shape == (1,) and value.read(1)[0] == 0)


def _array_in(url: str, name: str) -> ChunkedArray:
    """Open an array of a group."""
    path = f"{url}/{name}"
    if not at(path).exists() or not groups.is_array(at(path)):
        raise MatrixError(f"{url}: no array '{name}', which Binsparse's format needs; write it again")
    with groups.clear_zarr_errors(url, name):
        return from_zarr(url, name, _open_array(path))


# -- dense -------------------------------------------------------------------------------------------------------------


def _open_array(url: str) -> zarr.Array[Any]:
    import zarr

    groups.check_metadata_files(at(url), ())
    with groups.clear_zarr_errors(url):
        return zarr.open_array(at(url).zarr_store(), mode="r")


def _import_dense(job: Import, url: str) -> None:
    """Import the nonzeros of an array of two dimensions."""
    array = _open_array(url)
    shape = job.shape(array.shape)
    with groups.clear_zarr_errors(url):
        stored = np.dtype(array.dtype)
        chunk = array.shards or array.chunks
    dtype = check_numbers(stored, url, url.rpartition("/")[2], "biufc")
    check_dense(job, url, ", ".join(f"{job.path}::{name}" for name in members_of(job.path)))
    if min(chunk) < 1 or chunk[0] * chunk[1] * stored.itemsize > CHUNK_BYTES:
        size = format_bytes(chunk[0] * chunk[1] * stored.itemsize)
        raise MatrixError(f"{url}: Zarr chunks of {size}, more than {format_bytes(CHUNK_BYTES)}: write smaller ones")
    claimed = shape[0] * shape[1] * stored.itemsize
    replace(job.source, path=url).check_inflated(claimed, "write it without compression if it is meant to")
    chunks = _DenseChunks(url, array, (chunk[0], chunk[1]), stored)

    def read(rows: slice, columns: slice) -> ValueArray:
        chunks.check(rows, columns)
        with foreign(url, "a Zarr chunk"):
            found: Any = array[rows, columns]
        return np.ascontiguousarray(found).astype(dtype, copy=False)

    job.reading.found.append(f"dense array of {stored.name}")
    named = replace(job, names=names_of(url, {}, shape))
    import_dense(named, shape, dtype, read, (chunk[0], chunk[1]))


@dataclass(frozen=True)
class _DenseChunks:
    """The Zarr chunks of an array of two dimensions, looked at before they are decoded."""

    url: str
    array: Any
    chunk: tuple[int, int]
    dtype: np.dtype[Any]

    def check(self, rows: slice, columns: slice) -> None:
        """Refuse local Zarr chunks that are no files, or decode to far more bytes than the array declares."""
        folder, _, name = self.url.rpartition("/")
        codecs = codecs_of(
            json.dumps(self.array.metadata.to_dict()), self.chunk[0] * self.chunk[1] * self.dtype.itemsize
        )
        for i in _touched(rows, self.chunk[0]):
            prefix = self.array.metadata.encode_chunk_key((i, 0)).removesuffix("0")
            files = ChunkFiles(at(folder), name, f"{name}/{prefix}", "")
            files.check_decoded_sizes(_touched(columns, self.chunk[1]), codecs, may_be_missing=True)


def _touched(span: slice, length: int) -> range:
    """Return the numbers of the Zarr chunks that a slice touches along an axis."""
    return range(span.start // length, -(-span.stop // length))
