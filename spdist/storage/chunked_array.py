"""One Zarr array, read and written by whole Zarr chunks: codecs, checksums, chunks that are missing."""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import json
import math
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.store import Store, SuffixByteRequest
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.core.array import AsyncArray
from zarr.core.buffer import BufferPrototype, default_buffer_prototype
from zarr.core.buffer.cpu import NDBuffer
from zarr.core.sync import sync
from zarr.storage import StorePath

from spdist.errors import CorruptError, MatrixError
from spdist.matrices.dtypes import ValueArray, block_dtype, blocksize, from_blocks, number_dtype
from spdist.storage.locations import is_local, local_path, open_store, unreadable

CHUNK_LENGTH = 1 << 17
"""Elements of a Zarr chunk unless a memory limit asks for shorter ones: 512 KiB of int32, 1 MiB of float64.

Measured, 64k to 256k elements read and write fastest through zarrs; 1M elements lose a third, 16k a half.
"""
GLANCE = 64
"""Elements of a Zarr chunk among which one that is not zero is looked for first."""

PROBE_BYTES = 1 << 20
PROBE_RATIO = 1.3
UNBOUNDED = 1 << 60
_CONFIG: Any = {"order": "C", "write_empty_chunks": True}  # a chunk that is not written looks like a missing one
_FAST_PIPELINE = "zarrs.ZarrsCodecPipeline"
_ZARR_PIPELINE = "zarr.core.codec_pipeline.BatchedCodecPipeline"


@dataclass(frozen=True)
class ChunkedArray:
    """A one-dimensional Zarr array, read and written by whole Zarr chunks; or one of blocks, which are its elements.

    Attributes
    ----------
    url, name : str
        The matrix and the array in it.
    length : int
        Elements.
    chunk : int
        Elements of one Zarr chunk (of one shard, where the array is sharded).
    metadata : str
        Zarr's own metadata document, as JSON, with a length that no write exceeds.
    checked : bool
        Whether the last codec is crc32c.
    """

    url: str
    name: str
    length: int
    chunk: int
    metadata: str
    checked: bool
    dtype: np.dtype[Any] = field(compare=False)

    @property
    def nchunks(self) -> int:
        """Number of Zarr chunks."""
        return -(-self.length // self.chunk)

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one decoded Zarr chunk."""
        return self.chunk * self.dtype.itemsize

    def read(self, first: int, last: int) -> ValueArray:
        """Return elements ``[first:last)``: a view of the whole Zarr chunks that hold them, each checked.

        Raises
        ------
        CorruptError
            If a Zarr chunk is missing, truncated or altered; names it.
        """
        if first >= last:
            return np.empty(0, self.dtype)
        k0, k1 = first // self.chunk, -(-last // self.chunk)
        wanted = self._decode(k0, k1)[first - k0 * self.chunk : last - k0 * self.chunk]
        return wanted if blocksize(self.dtype) is None else from_blocks(wanted)

    def read_into(self, out: ValueArray, first: int) -> None:
        """Read elements into all of `out`, from `first` on; Zarr chunks that lie in it whole are decoded there.

        Raises
        ------
        CorruptError
            As `read` does.
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
        """Return the elements of Zarr chunks [k0, k1); if `out` is given, they are there."""
        if k1 > self.nchunks:
            raise self._missing(max(k0, self.nchunks))
        array = _open_array(self.url, self.name, self.metadata)
        prototype = default_buffer_prototype() if out is None else _into(out)
        wanted = slice(k0 * self.chunk, k1 * self.chunk)
        try:
            found = cast(ValueArray, _run(self.url, array.async_array.getitem(wanted, prototype=prototype)))
        except Exception as error:  # zarrs, numcodecs and the store each raise their own
            raise self._diagnose(k0, k1, error) from error
        if out is not None and not np.shares_memory(found, out):  # a Zarr that takes its memory elsewhere
            out[:] = found
        self._require(k0, found, array.metadata.fill_value)
        return found

    def write_chunks(self, k: int, values: ValueArray) -> None:
        """Write Zarr chunks `k`, `k` + 1, ... from `values`; the last one is filled up with zeros."""
        pad = -len(values) % self.chunk
        if pad:
            values = np.concatenate([values, np.zeros(pad, self.dtype)])
        numbers = values if blocksize(self.dtype) is None else values["block"]
        # zarrs leaves out chunks of nothing but zeros, whatever the configuration; Zarr's own pipeline writes them.
        chunks = numbers.reshape(-1, self.chunk * math.prod(numbers.shape[1:]))
        fast = all(chunk[:GLANCE].any() or chunk.any() for chunk in chunks)
        array = _open_array(self.url, self.name, self.metadata, fast=fast)
        _run(self.url, array.async_array.setitem(slice(k * self.chunk, k * self.chunk + len(values)), numbers))

    def key(self, k: int) -> str:
        """Return Zarr's key of chunk `k`, within the matrix."""
        metadata = _open_array(self.url, self.name, self.metadata).metadata
        return f"{self.name}/{metadata.encode_chunk_key((k,) + (0,) * (len(metadata.shape) - 1))}"

    def checksums(self) -> Iterator[bytes]:
        """Yield for each Zarr chunk its stored crc32c, or a digest of its bytes where it has none.

        Raises
        ------
        CorruptError
            At the first chunk that is missing.
        """
        batch = 256
        store = open_store(self.url)
        for k in range(0, self.nchunks, batch):
            ids = range(k, min(k + batch, self.nchunks))
            if is_local(self.url):
                yield from map(self._local_checksum, ids)
            else:
                yield from sync(self._remote_checksums(store, ids))

    def _local_checksum(self, k: int) -> bytes:
        path = f"{local_path(self.url)}/{self.key(k)}"
        try:
            if not self.checked:
                with Path(path).open("rb") as file:
                    return hashlib.file_digest(file, "blake2b").digest()
            descriptor = os.open(path, os.O_RDONLY)  # a file object takes several times as long
        except FileNotFoundError as error:
            raise self._missing(k) from error
        except PermissionError as error:
            raise unreadable(path) from error
        try:
            size = os.fstat(descriptor).st_size
            return os.pread(descriptor, 4, max(size - 4, 0)) + size.to_bytes(8, "little")
        finally:
            os.close(descriptor)

    async def _remote_checksums(self, store: Store, ids: range) -> list[bytes]:
        span = SuffixByteRequest(4) if self.checked else None
        prototype = default_buffer_prototype()
        found = await asyncio.gather(*(store.get(self.key(k), prototype, span) for k in ids))
        for k, buffer in zip(ids, found, strict=True):
            if buffer is None:
                raise self._missing(k)
        raw = [cast(Any, buffer).to_bytes() for buffer in found]
        return raw if self.checked else [hashlib.blake2b(chunk).digest() for chunk in raw]

    def _require(self, k0: int, found: ValueArray, fill: Any) -> None:
        """Look for the files of Zarr chunks that were read and may be missing: those would read as zeros, or `fill`."""
        if not is_local(self.url):
            return
        glances = found.reshape(len(found) // self.chunk, self.chunk, -1)[:, :GLANCE]
        doubtful = range(len(glances)) if fill else np.flatnonzero(~glances.any(axis=(1, 2)))
        for k in doubtful:
            if not os.access(local_path(self.url) / self.key(k0 + int(k)), os.F_OK):
                raise self._missing(k0 + int(k))

    def _missing(self, k: int) -> CorruptError:
        return CorruptError(
            f"{self.url}: chunk {k} of array '{self.name}' ({self.key(k)}) is missing; restore it from a copy or "
            f"write the matrix again"
        )

    def _diagnose(self, k0: int, k1: int, error: Exception) -> Exception:
        """Find which chunk made a read fail."""
        array = _open_array(self.url, self.name, self.metadata)
        for k in range(k0, k1):
            try:
                _run(self.url, array.async_array.getitem(slice(k * self.chunk, (k + 1) * self.chunk)))
            except Exception as cause:
                if os.strerror(errno.EACCES) in str(cause):  # zarrs passes the system's error on as a RuntimeError
                    return unreadable(f"{self.url}/{self.key(k)}")
                return CorruptError(
                    f"{self.url}: chunk {k} of array '{self.name}' ({self.key(k)}) is truncated or altered "
                    f"({cause}); restore it from a copy or write the matrix again"
                )
        return error


class _Inline(ThreadPoolExecutor):
    """Runs what it is given at once, in the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return a future that is done."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class _Loop:
    """An event loop of a thread; closed with it, and before the interpreter takes apart what closing needs."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(_Inline())
        weakref.finalize(self, self.loop.close)


_loops = threading.local()


def _run(url: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Finish a coroutine of Zarr's: on a local store in this thread alone, with no hand-over to another.

    Zarr's own `sync` goes through two other threads, which made the reads of a small block a third slower. The work
    itself is done by zarrs, in threads of its own.
    """
    try:
        asyncio.get_running_loop()
        inline = False  # a notebook's thread has a loop that is running already
    except RuntimeError:
        inline = is_local(url)
    if not inline:
        return sync(coroutine)
    if not hasattr(_loops, "kept"):
        _loops.kept = _Loop()
    return _loops.kept.loop.run_until_complete(coroutine)


@functools.lru_cache(maxsize=64)
def _open_array(url: str, name: str, metadata: str, *, fast: bool = True) -> zarr.Array[Any]:
    """Return a Zarr array on `metadata` as given, whatever the store says; one per process."""
    document = json.loads(metadata)
    fast = fast and is_local(url) and document["zarr_format"] == 3
    with zarr.config.set({"codec_pipeline.path": _FAST_PIPELINE if fast else _ZARR_PIPELINE}):
        return zarr.Array(AsyncArray(metadata=document, store_path=StorePath(open_store(url), name), config=_CONFIG))


def _into(out: ValueArray) -> BufferPrototype:
    """Return what makes Zarr decode to `out`: the first buffer for decoded elements that it asks for.

    The class made here goes with the next garbage collection only, so that it may not keep `out`.
    """
    waiting: list[Any] = [out]
    expected = out.shape, out.dtype

    class Into(NDBuffer):
        @classmethod
        def empty(cls, shape: tuple[int, ...], dtype: npt.DTypeLike, order: Literal["C", "F"] = "C") -> Self:
            fits = bool(waiting) and (shape, dtype) == expected
            return cls(waiting.pop()) if fits else super().empty(shape, dtype, order)

    return BufferPrototype(buffer=default_buffer_prototype().buffer, nd_buffer=Into)


def _new_metadata(dtype: np.dtype[Any], chunk: int, compressed: bool) -> str:
    """Return the metadata document of an array of ours, of unbounded length."""
    number, size = number_dtype(dtype), blocksize(dtype) or ()
    blosc = [BloscCodec(cname="lz4", clevel=5, shuffle="shuffle", typesize=number.itemsize)] if compressed else []
    array = zarr.create_array(
        {}, shape=(UNBOUNDED, *size), dtype=number, chunks=(chunk, *size), compressors=[*blosc, Crc32cCodec()],
        fill_value=0, zarr_format=3, config={"write_empty_chunks": True},
    )  # fmt: skip
    return json.dumps(array.metadata.to_dict())


def new_array(url: str, name: str, dtype: np.dtype[Any], chunk: int, *, compressed: bool) -> ChunkedArray:
    """Return an array that can be written by chunks before its length is known; nothing is written yet."""
    return ChunkedArray(url, name, UNBOUNDED, chunk, _new_metadata(dtype, chunk, compressed), True, dtype)


def compresses(values: ValueArray) -> bool:
    """Whether the first megabyte of `values` shrinks enough to be worth compressing."""
    sample = np.ascontiguousarray(values[: PROBE_BYTES // max(values.dtype.itemsize, 1)])
    sample = sample.view(number_dtype(sample.dtype))
    if sample.nbytes < 1024:
        return False
    from numcodecs.blosc import SHUFFLE, Blosc

    packed = Blosc(cname="lz4", clevel=5, shuffle=SHUFFLE).encode(sample)
    return sample.nbytes > PROBE_RATIO * len(packed)


def from_zarr(url: str, name: str, array: zarr.Array[Any], size: tuple[int, ...] = ()) -> ChunkedArray:
    """Return a stored Zarr array as a `ChunkedArray`.

    Parameters
    ----------
    url, name : str
        The matrix and the array in it.
    array : zarr.Array
    size : (r, s) or ()
        Rows and columns of the blocks that the array must hold; empty for an array of numbers.

    Raises
    ------
    MatrixError
        If the array has other dimensions, or its Zarr chunks have unequal lengths or cut blocks.
    """
    metadata = array.metadata
    if array.shape[1:] != size:
        raise MatrixError(f"{url}: array '{name}' has shape {array.shape}; it must be one of (length, {str(size)[1:]}")
    outer = getattr(metadata.chunk_grid, "chunk_shape", None) if metadata.zarr_format == 3 else metadata.chunks
    if outer is None:
        raise MatrixError(f"{url}: array '{name}' has Zarr chunks of unequal lengths; rewrite it with regular ones")
    if tuple(outer[1:]) != size:
        raise MatrixError(f"{url}: array '{name}' has Zarr chunks of {outer} that cut its blocks; write it again")
    chunk = int(outer[0])
    document = replace(metadata, shape=(-(-max(array.shape[0], 1) // chunk) * chunk, *size)).to_dict()
    codecs = document.get("codecs") or [{}]
    checked = dict(cast(Any, codecs)[-1]).get("name") == "crc32c"
    dtype = np.dtype(array.dtype)
    if size:
        dtype = block_dtype(dtype, (size[0], size[1]))
    return ChunkedArray(url, name, array.shape[0], chunk, json.dumps(document), checked, dtype)
