"""Zarr arrays, read and written by whole Zarr chunks: codecs, checksums, and chunks that are missing.

Zarr chunks as spdist writes them are read and written without Zarr (`direct`), which takes long to load. Other local
arrays are decoded by zarrs, which is written in Rust and several times faster than Zarr's own pipeline; those in an
object store by obstore.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import re
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self, cast
from warnings import catch_warnings, simplefilter

import numpy as np
import numpy.typing as npt

from spdist.errors import CorruptError, MatrixError
from spdist.matrices.dtypes import ValueArray, block_dtype, blocksize, from_blocks, number_dtype
from spdist.storage.checksums import ChunkFiles, Table, misplaced, read_table
from spdist.storage.direct.chunks import ChunkCodec, array_document, codec_of
from spdist.storage.direct.files import read_chunks, write_chunks
from spdist.storage.foreign.decoded_size import codecs_of
from spdist.stores.location import ZARR_PIPELINE, Location
from spdist.stores.names import unreadable
from spdist.stores.registry import at

if TYPE_CHECKING:
    import zarr
    from zarr.core.buffer import BufferPrototype

    from spdist.storage.direct.object_chunks import ObjectChunks

CHUNK_LENGTH = 1 << 17
"""Elements of a Zarr chunk unless a memory limit requires fewer: 512 KiB of int32, 1 MiB of float64.

Measured: 64k to 256k elements read and write fastest through zarrs; 1M elements are a third slower, 16k half as fast.
"""

GLANCE = 64
"""Elements at the start of a Zarr chunk that are tested for zero first, before all of it."""

PROBE_BYTES = 1 << 20
"""Bytes of values that `compresses` compresses to decide."""

PROBE_RATIO = 1.3
"""Compression ratio, uncompressed over compressed bytes, above which values are worth compressing."""

CHUNK_BYTES = 1 << 31
"""Bytes of a decoded Zarr chunk at most: the most that Blosc compresses, and each is decoded whole."""

UNBOUNDED = 1 << 60
"""Length, in elements, of an array whose length is not known yet."""

_CONFIG: Any = {"order": "C", "write_empty_chunks": True}  # a chunk that is not written looks like a missing one


class InChunks:
    """What stored arrays and views of them know of their size."""

    length: int  # elements
    chunk: int  # elements of a Zarr chunk, or of a read
    dtype: np.dtype[Any]

    @property
    def nchunks(self) -> int:
        """Number of Zarr chunks, or of reads."""
        return -(-self.length // self.chunk)

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one decoded Zarr chunk."""
        return self.chunk * self.dtype.itemsize


@dataclass(frozen=True)
class ChunkedArray(InChunks):
    """A one-dimensional Zarr array of numbers, or a three-dimensional one whose elements are blocks.

    It is read and written by whole Zarr chunks, and pickles without being opened.
    """

    # the matrix and the array in it
    url: str = field(repr=False)
    name: str
    length: int  # elements
    chunk: int  # elements of one Zarr chunk (of one shard, if the array is sharded)
    metadata: str  # Zarr's own metadata document, as JSON, with a length that no write exceeds
    checked: bool  # whether the last codec is crc32c
    dtype: np.dtype[Any] = field(compare=False)  # of the elements; a `block_dtype` if they are blocks
    table: str = ""  # digest of the table of checksums that spdist wrote; empty without a table

    @property
    def location(self) -> Location:
        """Where the matrix is."""
        return at(self.url)

    def read(self, first: int, last: int) -> ValueArray:
        """Read elements ``[first:last)``: a view of the decoded Zarr chunks that hold them, each of them checked.

        Raises `CorruptError` if a Zarr chunk is missing, truncated or altered; names it.
        """
        if first >= last:
            return np.empty(0, self.dtype)
        k0, k1 = first // self.chunk, -(-last // self.chunk)
        wanted = self._decode(k0, k1)[first - k0 * self.chunk : last - k0 * self.chunk]
        return wanted if blocksize(self.dtype) is None else from_blocks(wanted)

    def read_into(self, out: ValueArray, first: int) -> None:
        """Fill `out` with the elements from `first` on; whole Zarr chunks are decoded into it without a copy.

        Raises `CorruptError` if a Zarr chunk is missing, truncated or altered; names the chunk.
        """
        last = first + len(out)
        k0, k1 = -(-first // self.chunk), last // self.chunk
        if k0 >= k1 or out.dtype != self.dtype or blocksize(self.dtype) is not None:
            out[:] = self.read(first, last)
            return
        low, high = k0 * self.chunk - first, k1 * self.chunk - first
        out[:low] = self.read(first, first + low)
        self._decode(k0, k1, out[low:high])
        out[high:] = self.read(first + high, last)

    def _decode(self, k0: int, k1: int, out: ValueArray | None = None) -> ValueArray:
        """Decode Zarr chunks ``[k0:k1)``, into `out` if it is given, and return their elements."""
        if k1 > self.nchunks:
            raise self.files.error(max(k0, self.nchunks), "is missing")
        if self.table and (codec := self._direct_codec()):
            found = np.empty(((k1 - k0) * self.chunk, *codec.shape[1:]), codec.dtype) if out is None else out
            read_chunks(self.files, codec, range(k0, k1), found, self.expected())
            return found
        self._look(k0, k1)
        array, objects = _open_for_reading(self), _objects(self.url, self.metadata)
        wanted = slice(k0 * self.chunk, k1 * self.chunk)

        def get() -> ValueArray:
            from zarr.core.buffer import default_buffer_prototype

            if objects is not None:
                return objects.read([self.key(k) for k in range(k0, k1)], out, _position_check(self, k0))
            prototype = default_buffer_prototype() if out is None else _into(out)
            return cast(ValueArray, _run(self.url, array.async_array.getitem(wanted, prototype=prototype)))

        try:
            found = get()
        except CorruptError:  # of a remote Zarr chunk, compared as it arrived
            raise
        except Exception as error:  # zarrs, numcodecs and the store each raise their own
            if (problem := _read_error(self, k0, k1)) is not None:
                raise problem from error
            found = get()  # the error was temporary
        if out is not None and not np.shares_memory(found, out):  # a Zarr that allocates its memory in another way
            out[:] = found
        self._require(k0, found, array.metadata.fill_value)
        return found if found.dtype.isnative else found.astype(found.dtype.newbyteorder("="))

    def _direct_codec(self) -> ChunkCodec | None:
        """Return the codec to read and write Zarr chunks in files without Zarr; None to leave them to Zarr."""
        return codec_of(self.metadata) if self.location.has_files else None

    def _look(self, k0: int, k1: int) -> None:
        """Check the files of Zarr chunks before zarrs decodes them, which would wait for a FIFO and trust any size."""
        if not self.table:
            self.files.check_decoded_sizes(range(k0, k1), codecs_of(self.metadata, self.chunk_nbytes))
        elif self.location.has_files:  # what arrives from elsewhere is compared by `ChecksumPlacedStore`
            self.check_positions(k0, k1)

    def write_chunks(self, k: int, values: ValueArray) -> None:
        """Write Zarr chunks `k`, `k` + 1, ... from `values`; pad the last chunk with zeros."""
        pad = -len(values) % self.chunk
        if pad:
            values = np.concatenate([values, np.zeros(pad, self.dtype)])
        numbers = values if blocksize(self.dtype) is None else values["block"]
        if codec := self._direct_codec():
            write_chunks(self.files, codec, range(k, k + len(numbers) // self.chunk), numbers)
            return
        chunks = numbers.reshape(-1, self.chunk * math.prod(numbers.shape[1:]))
        if (objects := _objects(self.url, self.metadata)) is not None:
            objects.write([self.key(k + i) for i in range(len(chunks))], chunks)
            return
        # zarrs never writes a chunk of zeros, whatever the configuration says; Zarr's own pipeline does.
        fast = all(chunk[:GLANCE].any() or chunk.any() for chunk in chunks)
        array = _open_array(self.url, self.name, self.metadata, fast=fast)
        _run(self.url, array.async_array.setitem(slice(k * self.chunk, k * self.chunk + len(values)), numbers))

    def key(self, k: int) -> str:
        """Return Zarr's key of chunk `k`, relative to the matrix."""
        return self.files.key(k)

    def chunk_keys(self) -> list[str]:
        """Return the keys of all Zarr chunks, relative to the matrix."""
        return [self.key(k) for k in range(self.nchunks)]

    @property
    def files(self) -> ChunkFiles:
        """The files of the Zarr chunks."""
        return _chunk_files(self.url, self.name, self.metadata)

    def stored_checksums(self, first: int, last: int) -> Table:
        """Return the last four bytes of Zarr chunks ``[first:last)``, their crc32c, as numbers.

        Only regular files are read, so that nothing waits for a writer.

        Raises `CorruptError` if a Zarr chunk is missing, truncated, or no regular file; names array and Zarr chunk.
        """
        return self.files.checksums(first, last)

    def expected(self) -> Table:
        """Return the array's table of checksums; raise CorruptError if the table is missing or damaged."""
        return read_table(self.url, self.name, self.table, self.nchunks)

    def check_positions(self, first: int = 0, last: int | None = None) -> Table:
        """Compare the checksums at the ends of Zarr chunks with the array's table.

        `first, last`: Zarr chunks ``[first:last)``; by default all.
        Returns (last - first,) uint32: the checksums.
        Raises `CorruptError` at the first Zarr chunk that is missing, altered or in the wrong place; or if the table is
        damaged.
        """
        last = self.nchunks if last is None else last
        wanted = self.expected()
        found = self.stored_checksums(first, last)
        wrong = np.flatnonzero(found != wanted[first:last])
        if len(wrong):
            raise self.files.error(first + int(wrong[0]), misplaced(int(found[wrong[0]]), wanted))
        return found

    def digests(self) -> Iterator[bytes]:
        """Yield checksums of Zarr chunks, or digests of whole Zarr chunks if these have no checksums.

        Raises `CorruptError` at the first Zarr chunk that is missing, or differs from the array's table.
        """
        if self.table:
            yield self.check_positions().tobytes()
        elif self.checked:
            yield self.stored_checksums(0, self.nchunks).tobytes()
        else:
            yield from self.files.digests(0, self.nchunks, codecs_of(self.metadata, self.chunk_nbytes))

    def _require(self, k0: int, found: ValueArray, fill: object) -> None:
        """Check that Zarr chunks that hold only `fill` exist, because missing ones read as `fill` too."""
        if not fill and found[:: self.chunk].all():  # no element at the start of a Zarr chunk is zero
            return
        glances = found.reshape(len(found) // self.chunk, self.chunk, -1)[:, :GLANCE]
        suspects = range(len(glances)) if fill else np.flatnonzero(~glances.any(axis=(1, 2)))
        for k in suspects:
            if not self.files.exists(k0 + int(k)):
                raise self.files.error(k0 + int(k), "is missing")


def _read_error(array: ChunkedArray, k0: int, k1: int) -> Exception | None:
    """Return the error that names the Zarr chunk which made a read fail; None if all can be read now."""
    opened = _open_array(array.url, array.name, array.metadata)
    for k in range(k0, k1):
        if not array.files.exists(k):
            return array.files.error(k, "is missing")
        try:
            _run(array.url, opened.async_array.getitem(slice(k * array.chunk, (k + 1) * array.chunk)))
        except Exception as cause:
            if os.strerror(errno.EACCES) in str(cause):  # zarrs passes the system's error on as a RuntimeError
                return unreadable(f"{array.url}/{array.key(k)}")
            return array.files.error(k, f"is truncated or altered ({cause})")
    return None


def _run(url: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return what Zarr's coroutine returns, with the system's error where zarrs passes one on."""
    try:
        return at(url).wait(coroutine)
    except RuntimeError as error:  # of zarrs, which passes on so what the system said
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), url) from error


@contextmanager
def _codec_pipeline(pipeline: str) -> Iterator[None]:
    """Have Zarr open arrays with a codec pipeline; one thread at a time, as settings and filters are the process's."""
    import zarr

    with _PROCESS_SETTINGS, zarr.config.set({"codec_pipeline.path": pipeline}), catch_warnings():
        simplefilter("ignore")  # zarrs says when it leaves codecs that it does not know to Zarr's own pipeline
        yield


_PROCESS_SETTINGS = threading.Lock()
"""Held while Zarr's settings are changed: two threads that leave in another order would keep each other's value."""


@functools.lru_cache(maxsize=64)
def _open_array(url: str, name: str, metadata: str, *, fast: bool = True) -> zarr.Array[Any]:
    """Return a Zarr array with the given `metadata`, whatever the store holds; cached in the process."""
    import zarr
    from zarr.core.array import AsyncArray
    from zarr.storage import StorePath

    document, location = json.loads(metadata), at(url)
    pipeline = location.codec_pipeline if fast and document["zarr_format"] == 3 else ZARR_PIPELINE
    with _codec_pipeline(pipeline):
        return zarr.Array(
            AsyncArray(metadata=document, store_path=StorePath(location.zarr_store(), name), config=_CONFIG)
        )


@functools.lru_cache(maxsize=64)
def _open_for_reading(array: ChunkedArray) -> zarr.Array[Any]:
    """Return the Zarr array to read from; Zarr chunks of a remote one are compared with its table as they arrive."""
    opened = _open_array(array.url, array.name, array.metadata)
    if array.location.has_files or not array.table:
        return opened
    import zarr
    from zarr.core.array import AsyncArray
    from zarr.storage import StorePath

    from spdist.storage.targets.chunk_positions import ChecksumPlacedStore

    store = ChecksumPlacedStore(array.location.zarr_store(), array.files, array.expected())
    with _codec_pipeline(ZARR_PIPELINE):
        return zarr.Array(AsyncArray(metadata=opened.metadata, store_path=StorePath(store, array.name), config=_CONFIG))


def _position_check(array: ChunkedArray, k0: int) -> Callable[[int, bytes], None] | None:
    """Return what compares the end of Zarr chunk `k0` + i with the array's table; None if it has none."""
    if not array.table:
        return None
    from spdist.storage.targets.chunk_positions import check_position

    table = array.expected()
    return lambda i, end: check_position(array.files, table, k0 + i, end)


@functools.lru_cache(maxsize=64)
def _objects(url: str, metadata: str) -> ObjectChunks | None:
    """Return the Zarr chunks of an array that obstore moves; None if Zarr does."""
    store, codec = at(url).object_store(), codec_of(metadata)
    if store is None or codec is None:
        return None
    from spdist.storage.direct.object_chunks import ObjectChunks

    return ObjectChunks(store, codec)


def _into(out: ValueArray) -> BufferPrototype:
    """Return a buffer prototype that makes Zarr decode into `out`: the first buffer of its shape that Zarr asks for.

    Only a garbage collection frees the class defined here, so the class must not keep `out` alive.
    """
    from zarr.core.buffer import BufferPrototype, default_buffer_prototype
    from zarr.core.buffer.cpu import NDBuffer

    waiting: list[Any] = [out]
    expected = out.shape, out.dtype

    class PreallocatedBuffer(NDBuffer):
        @classmethod
        def empty(cls, shape: tuple[int, ...], dtype: npt.DTypeLike, order: Literal["C", "F"] = "C") -> Self:
            fits = bool(waiting) and (shape, dtype) == expected
            return cls(waiting.pop()) if fits else super().empty(shape, dtype, order)

    return BufferPrototype(buffer=default_buffer_prototype().buffer, nd_buffer=PreallocatedBuffer)


@functools.lru_cache(maxsize=64)
def _chunk_files(url: str, name: str, metadata: str) -> ChunkFiles:
    if (codec := codec_of(metadata)) is not None:
        return ChunkFiles(at(url), name, f"{name}/c/", "/0" * (len(codec.shape) - 1))
    array = _open_array(url, name, metadata).metadata
    stand_in = 987_654_321  # for the number of a Zarr chunk
    key = f"{name}/{array.encode_chunk_key((stand_in,) + (0,) * (len(array.shape) - 1))}"
    prefix, _, suffix = key.rpartition(str(stand_in))
    return ChunkFiles(at(url), name, prefix, suffix)


def new_array(url: str, name: str, dtype: np.dtype[Any], chunk: int, *, compressed: bool) -> ChunkedArray:
    """Return an array that can be written by Zarr chunks before its length is known; nothing is written yet.

    `chunk`: elements of a Zarr chunk.
    `compressed`: whether to compress with Blosc (LZ4, byte shuffle); crc32c is added in either case.
    The array has the length `UNBOUNDED`.
    """
    shape = UNBOUNDED, *(blocksize(dtype) or ())
    metadata = json.dumps(array_document(number_dtype(dtype), shape, chunk, packed=compressed))
    return ChunkedArray(url, name, UNBOUNDED, chunk, metadata, True, dtype)


def compresses(values: ValueArray) -> bool:
    """Whether the first `PROBE_BYTES` of `values` compress by more than `PROBE_RATIO`.

    Examples
    --------
    >>> compresses(np.zeros(1000))
    True
    """
    sample = np.ascontiguousarray(values[: PROBE_BYTES // max(values.dtype.itemsize, 1)])
    sample = sample.view(number_dtype(sample.dtype))
    if sample.nbytes < 1024:
        return False
    from numcodecs.blosc import SHUFFLE, Blosc

    packed = Blosc(cname="lz4", clevel=5, shuffle=SHUFFLE).encode(sample)
    return sample.nbytes > PROBE_RATIO * len(packed)


def from_document(url: str, name: str, document: dict[str, Any], size: tuple[int, ...], table: str) -> ChunkedArray:
    """Return an array of spdist's own, whose metadata are what was written, as a `ChunkedArray`.

    `document`: Zarr's metadata; `codec_of` must accept it.
    `size`: (r, s) or (): rows and columns of the blocks that the array holds; empty for an array of numbers.
    `table`: digest of the array's table of checksums.
    """
    length, chunk = document["shape"][0], document["chunk_grid"]["configuration"]["chunk_shape"][0]
    codec = codec_of(json.dumps(document))
    assert codec is not None
    dtype = block_dtype(codec.dtype, (size[0], size[1])) if size else codec.dtype
    metadata = json.dumps(document | {"shape": [-(-max(length, 1) // chunk) * chunk, *size]})
    return ChunkedArray(url, name, length, chunk, metadata, True, dtype, table)


def from_zarr(url: str, name: str, array: zarr.Array[Any], size: tuple[int, ...] = (), table: str = "") -> ChunkedArray:
    """Return a stored Zarr array as a `ChunkedArray`.

    `size`: (r, s) or (): rows and columns of the blocks that the array must hold; empty for an array of numbers.
    `table`: digest of the array's table of checksums; empty without a table.
    Raises `MatrixError` if the array has other dimensions, or its Zarr chunks have unequal lengths or cut blocks.
    """
    metadata = array.metadata
    if array.ndim != 1 + len(size) or array.shape[1:] != size:
        raise MatrixError(f"{url}: array '{name}' has shape {array.shape}; it must be one of (length, {str(size)[1:]}")
    outer = getattr(metadata.chunk_grid, "chunk_shape", None) if metadata.zarr_format == 3 else metadata.chunks
    if outer is None:
        raise MatrixError(f"{url}: array '{name}' has Zarr chunks of unequal lengths; rewrite it with regular ones")
    if tuple(outer[1:]) != size:
        raise MatrixError(f"{url}: array '{name}' has Zarr chunks of {outer} that cut its blocks; write it again")
    chunk = int(outer[0])
    if chunk < 1 or chunk * np.dtype(array.dtype).itemsize * math.prod(size) > CHUNK_BYTES:
        raise MatrixError(
            f"{url}: array '{name}' has Zarr chunks of {chunk:,} elements; they must hold one at least and "
            f"{CHUNK_BYTES:,} bytes at most: write it again with others"
        )
    document = replace(metadata, shape=(-(-max(array.shape[0], 1) // chunk) * chunk, *size)).to_dict()
    codecs = document.get("codecs") or [{}]
    checked = dict(cast(Any, codecs)[-1]).get("name") == "crc32c"
    dtype = np.dtype(array.dtype).newbyteorder("=")
    if size:
        dtype = block_dtype(dtype, (size[0], size[1]))
    found = ChunkedArray(url, name, array.shape[0], chunk, json.dumps(document), checked, dtype, table)
    _open_array(url, name, found.metadata)  # codecs that cannot be are an error now, not in the middle of a product
    return found
