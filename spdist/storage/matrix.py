"""Matrices in Zarr: the only file that imports zarr.

A matrix is one Zarr v3 group in AnnData's ``csr_matrix`` encoding: one-dimensional arrays `indptr`, `indices`, `data`
and the attributes ``encoding-type``, ``encoding-version`` and ``shape``. Facts of ours (state, provenance) lie under
the one attribute ``spdist``. A block matrix is a group of SciPy's BSR arrays in an encoding of ours, ``bsr_matrix``:
`data` has three dimensions, ``block-size`` is an attribute, ``shape`` counts rows and columns. In memory its values are
blocks (`csr.block_dtype`), and rows, columns and entries are block rows, block columns and blocks. Three rules keep
wrong bytes out of a product:

* Every Zarr chunk ends in Zarr's own crc32c codec, and is always read **whole**: a pipeline that decodes part of a
  chunk does not check it. `ChunkedArray` therefore sees an array as if its length were a multiple of the chunk length.
* A missing chunk reads as zeros in Zarr, so `fingerprint` looks for every chunk before work starts and `read` again.
* The arrays' metadata and the encoding attributes are written last: an unfinished matrix is no matrix to any reader.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
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
from zarr.errors import GroupNotFoundError
from zarr.storage import FsspecStore, LocalStore, StorePath

from spdist.errors import CorruptError, InputError, MatrixError
from spdist.matrices.csr import (
    CSR,
    Int64Array,
    ValueArray,
    block_dtype,
    blocksize,
    check_canonical,
    check_dtype,
    from_blocks,
    index_dtype,
    number_dtype,
)

CHUNK_LENGTH = 1 << 17
"""Elements of a Zarr chunk unless a memory limit asks for shorter ones: 512 KiB of int32, 1 MiB of float64.

Measured, 64k to 256k elements read and write fastest through zarrs; 1M elements lose a third, 16k a half.
"""

READ_CHUNKS = 2
"""Zarr chunks that one read of scattered rows decodes at a time."""

GLANCE = 64
"""Elements of a Zarr chunk among which one that is not zero is looked for first."""

PROBE_BYTES = 1 << 20
PROBE_RATIO = 1.3
UNBOUNDED = 1 << 60
ARRAYS = ("indptr", "indices", "data")
_CONFIG: Any = {"order": "C", "write_empty_chunks": True}  # a chunk that is not written looks like a missing one
_FAST_PIPELINE = "zarrs.ZarrsCodecPipeline"
_ZARR_PIPELINE = "zarr.core.codec_pipeline.BatchedCodecPipeline"


# -- stores ------------------------------------------------------------------------------------------------------------


def is_local(url: str) -> bool:
    """Whether `url` is a path of this machine rather than an fsspec URL such as ``s3://`` or ``memory://``."""
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> Path:
    """Return the path that a local `url` names."""
    return Path(url.removeprefix("file://"))


def in_process(url: str) -> bool:
    """Whether only this process sees what `url` holds, so that a product of it must run in this process."""
    return url.startswith("memory://")


def normalise(url: str | Path) -> str:
    """Return `url` as workers in other directories understand it: an absolute path with links followed, or a URL."""
    if not isinstance(url, str | os.PathLike):
        raise InputError(f"{url!r} is no path and no URL: write for instance 'C.zarr'")
    text = str(url).rstrip("/")
    return str(local_path(text).resolve()) if is_local(text) else text


def open_store(url: str) -> Store:
    """Return the Zarr store at `url`."""
    if is_local(url):
        return LocalStore(local_path(url))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # memory:// is not asynchronous; Zarr wraps it and says so each time
            return FsspecStore.from_url(url)
    except (ImportError, ValueError) as error:
        raise InputError(f"{url}: no file system for this URL: {error}") from error


def exists(url: str) -> bool:
    """Whether anything lies at `url`."""
    if is_local(url):
        return local_path(url).exists()
    return not sync(open_store(url).is_empty(""))


def remove(url: str) -> None:
    """Delete everything at `url`."""
    if is_local(url):
        shutil.rmtree(local_path(url))
    else:
        sync(open_store(url).delete_dir(""))


def move(source: str, target: str) -> None:
    """Put what lies at `source` in place of what lies at `target`; one rename on a local file system."""
    if is_local(target):
        old = local_path(target)
        if old.exists():
            aside = old.with_name(old.name + ".spdist-old")
            if aside.exists():  # somebody was killed right here
                shutil.rmtree(aside)
            old.rename(aside)
            try:
                local_path(source).rename(old)
            except BaseException:
                aside.rename(old)
                raise
            shutil.rmtree(aside)
        else:
            local_path(source).rename(old)
        return
    import fsspec

    fs, path = fsspec.core.url_to_fs(target)
    if fs.exists(path):
        fs.rm(path, recursive=True)
    fs.mv(fsspec.core.url_to_fs(source)[1], path, recursive=True)


def stored_bytes(url: str) -> int:
    """Return the bytes that lie at `url`."""
    if is_local(url):
        return sum(path.stat().st_size for path in local_path(url).rglob("*") if path.is_file())
    return sync(open_store(url).getsize_prefix(""))


# -- one array ---------------------------------------------------------------------------------------------------------


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
            raise _unreadable(path) from error
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
                    return _unreadable(f"{self.url}/{self.key(k)}")
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


# -- a matrix ----------------------------------------------------------------------------------------------------------


Allocate = Callable[[int, np.dtype[Any]], ValueArray]
"""Takes a number of elements and their dtype, returns an array."""

Held = tuple[int, CSR]
"""Rows in memory, and the place of their first entry in the stored matrix."""


@dataclass(frozen=True)
class StoredMatrix:
    """A finished matrix in Zarr; opens its arrays where it is used, so it travels to workers as a few hundred bytes.

    Of a block matrix, shape, rows, columns and entries are in blocks; `full_shape` is not.
    """

    url: str
    shape: tuple[int, int]
    indptr: ChunkedArray
    indices: ChunkedArray
    data: ChunkedArray
    facts: dict[str, Any] = field(compare=False)

    def __repr__(self) -> str:
        size = f"{self.full_shape[0]:,} x {self.full_shape[1]:,}, {number_dtype(self.dtype)}"
        of = self.blocksize
        stored = f"{self.nnz:,} entries" if of is None else f"{self.nnz:,} blocks of {of[0]} x {of[1]}"
        return f"<StoredMatrix {size}: {stored} at {self.url}>"

    @property
    def nrows(self) -> int:
        """Number of rows."""
        return self.shape[0]

    @property
    def ncols(self) -> int:
        """Number of columns."""
        return self.shape[1]

    @property
    def nnz(self) -> int:
        """Number of stored entries."""
        return self.indices.length

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.data.dtype

    @property
    def blocksize(self) -> tuple[int, int] | None:
        """Rows and columns of its blocks; None where entries are numbers."""
        return blocksize(self.dtype)

    @property
    def full_shape(self) -> tuple[int, int]:
        """Rows and columns, also of a block matrix."""
        r, s = self.blocksize or (1, 1)
        return self.nrows * r, self.ncols * s

    @property
    def entry_nbytes(self) -> int:
        """Bytes of one entry in memory: its column and its value."""
        return index_dtype(self.ncols).itemsize + self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix in memory."""
        return self.nnz * self.entry_nbytes + 8 * (self.nrows + 1)

    @property
    def ours(self) -> bool:
        """Whether spdist wrote it, canonical; what others wrote is checked before it is multiplied."""
        return bool(self.facts.get("canonical"))

    def read_indptr(self, start: int, stop: int) -> Int64Array:
        """Return the offsets of rows `start` to `stop`, both included: ``stop - start + 1`` of them."""
        return self.indptr.read(start, stop + 1).astype(np.int64, copy=False)

    def read_indices(self, first: int, last: int) -> ValueArray:
        """Return the columns of entries ``[first:last)``."""
        found = self.indices.read(first, last)
        dtype = index_dtype(self.ncols)
        if found.dtype != dtype and len(found) and (int(found.min()) < 0 or int(found.max()) >= self.ncols):
            raise MatrixError(
                f"{self.url}: entries {first:,} to {last:,} hold columns {int(found.min()):,} to {int(found.max()):,}, "
                f"outside [0, {self.ncols:,})"
            )
        return found.astype(dtype, copy=False)

    def rows(self, start: int, stop: int, allocate: Allocate | None = None) -> CSR:
        """Read rows ``[start:stop)``, or as many of them as there are; to memory that is allocated so, if it is given.

        Raises
        ------
        InputError
            If `start` is negative, or above `stop`.
        """
        start, stop = self._range(start, stop)
        offsets = self.read_indptr(start, stop)
        first, last = int(offsets[0]), int(offsets[-1])
        if allocate is None:
            values = self.data.read(first, last)
            return CSR(offsets - first, self.read_indices(first, last), values, (stop - start, self.ncols))
        return CSR(offsets - first, *self.entries(first, last, (), allocate), (stop - start, self.ncols))

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        """Return a range of rows, cut to those that there are."""
        if not 0 <= start <= stop:
            raise InputError(f"{self.url}: rows {start:,} to {stop:,} are no range of its {self.nrows:,} rows")
        return min(start, self.nrows), min(stop, self.nrows)

    def rows_indices(self, start: int, stop: int) -> CSR:
        """Read the pattern of rows ``[start:stop)``; `data` of the result is its `indices`."""
        start, stop = self._range(start, stop)
        offsets = self.read_indptr(start, stop)
        indices = self.read_indices(int(offsets[0]), int(offsets[-1]))
        return CSR(offsets - offsets[0], indices, indices, (stop - start, self.ncols))

    def entries(
        self, first: int, last: int, held: Sequence[Held] = (), allocate: Allocate = np.empty
    ) -> tuple[ValueArray, ValueArray]:
        """Return columns and values of entries ``[first:last)``; those that are held are copied, the rest is read."""
        indices, data = allocate(last - first, index_dtype(self.ncols)), allocate(last - first, self.dtype)
        at = first
        for place, rows in sorted(held, key=lambda one: one[0]):
            low, high = max(at, place), min(last, place + rows.nnz)
            if low < high:
                self.read_entries(indices, data, first, at, low)
                indices[low - first : high - first] = rows.indices[low - place : high - place]
                data[low - first : high - first] = rows.data[low - place : high - place]
                at = high
        self.read_entries(indices, data, first, at, last)
        return indices, data

    def read_entries(self, indices: ValueArray, data: ValueArray, origin: int, first: int, last: int) -> None:
        """Read entries ``[first:last)`` to where they belong, `origin` being the entry that comes first."""
        part = slice(first - origin, last - origin)
        self.data.read_into(data[part], first)
        if indices.dtype == self.indices.dtype:
            self.indices.read_into(indices[part], first)
            return
        step = 2 * READ_CHUNKS * self.indices.chunk
        while first < last:
            stop = min(last, first - first % step + step)
            indices[first - origin : stop - origin] = self.read_indices(first, stop)
            first = stop

    def take(self, rows: Int64Array, *, values: bool = True) -> CSR:
        """Read the given rows, reading only the Zarr chunks that hold them.

        Parameters
        ----------
        rows : (n,) int64
            Rising, no duplicates.
        values : bool
            Without, `data` of the result is its `indices`, and no values are read.

        Returns
        -------
        CSR
            Of shape ``(n, ncols)``.
        """
        starts, stops = self.offsets_of(rows)
        indptr = np.concatenate([[0], np.cumsum(stops - starts)]).astype(np.int64)
        indices = np.empty(int(indptr[-1]), index_dtype(self.ncols))
        data = np.empty(len(indices), self.dtype) if values else indices
        for i, j in _runs(starts // (READ_CHUNKS * self.indices.chunk)):
            first, last = int(starts[i]), int(stops[j - 1])
            part = slice(int(indptr[i]), int(indptr[j]))
            pairs = ((self.indices, indices), (self.data, data))[: 1 + values]
            if part.stop - part.start == last - first:
                for array, out in pairs:
                    out[part] = array.read(first, last)
                continue
            shift = np.repeat(starts[i:j] - first - indptr[i:j] + indptr[i], stops[i:j] - starts[i:j])
            shift += np.arange(len(shift))  # places of the wanted entries in what is read
            for array, out in pairs:
                np.take(array.read(first, last).astype(out.dtype, copy=False), shift, out=out[part], mode="clip")
        return CSR(indptr, indices, data, (len(rows), self.ncols))

    def offsets_of(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return where each of some rising rows starts and stops; each Zarr chunk that holds them is read once."""
        starts, stops = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for i, j in _runs(rows // (READ_CHUNKS * self.indptr.chunk)):
            low = int(rows[i])
            offsets = self.read_indptr(low, int(rows[j - 1]) + 1)
            starts[i:j], stops[i:j] = offsets[rows[i:j] - low], offsets[rows[i:j] - low + 1]
        return starts, stops

    def row_blocks(
        self, entries: int, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[int, int, Int64Array]]:
        """Cut rows ``[first:last)``, all by default, into blocks of about `entries` entries, streaming.

        Of no fewer than a Zarr chunk has, which would be decoded again for each.

        Yields
        ------
        start, stop, offsets
            Rows ``[start:stop)`` and their ``stop - start + 1`` offsets.
        """
        last, entries = self.nrows if last is None else last, max(entries, self.indices.chunk)
        for at in range(first, last, self.indptr.chunk):
            end = min(at + self.indptr.chunk, last)
            offsets = self.read_indptr(at, end)
            start = at
            while start < end:
                limit = offsets[start - at] + entries
                stop = at + int(np.searchsorted(offsets, limit, side="right")) - 1
                stop = min(max(stop, start + 1), end)
                yield start, stop, offsets[start - at : stop - at + 1]
                start = stop

    def check(self) -> None:
        """Check structure and canonical form of the whole matrix, streaming.

        Raises
        ------
        MatrixError
            Naming the row.
        """
        end = 0
        for start, stop, offsets in self.row_blocks(4 * self.indices.chunk):
            first, last = int(offsets[0]), int(offsets[-1])
            if first != end or np.any(np.diff(offsets) < 0) or last > self.nnz:
                raise MatrixError(f"{self.url}: indptr does not rise from 0 to {self.nnz:,} in rows {start:,}-{stop:,}")
            end = last
            indices = self.read_indices(first, last)
            block = CSR(offsets - first, indices, indices, (stop - start, self.ncols))
            check_canonical(block, self.url, start)
        if end != self.nnz:
            raise MatrixError(f"{self.url}: indptr ends at {end:,}, but there are {self.nnz:,} entries")

    def fingerprint(self) -> str:
        """Return a digest of the content; also finds every Zarr chunk that is missing.

        Made of the chunks' stored checksums, so it costs one small read a chunk; a matrix without checksums is read
        whole.
        """
        kind = self.dtype.str if blocksize(self.dtype) is None else str(self.dtype)
        digest = hashlib.blake2b(repr((self.shape, kind)).encode(), digest_size=16)
        for array in (self.indptr, self.indices, self.data):
            for checksum in array.checksums():
                digest.update(checksum)
        return digest.hexdigest()


def _runs(keys: Int64Array) -> Iterator[tuple[int, int]]:
    """Yield the ranges over which `keys` stays the same."""
    cuts = np.flatnonzero(np.diff(keys)) + 1
    yield from itertools.pairwise([0, *cuts.tolist(), len(keys)] if len(keys) else [])


def refuse_blocks(what: str, *matrices: Any) -> None:
    """Refuse matrices that are stored in blocks where entries are asked for.

    Raises
    ------
    InputError
        Names the first, and its blocks.
    """
    for m in matrices:
        if isinstance(m, StoredMatrix) and m.blocksize is not None:
            rows, columns = m.blocksize
            raise InputError(
                f"{what} are for matrices of entries, but {m.url} is stored in blocks of {rows}x{columns}: store it by "
                f"entries, as `spdist export` and `spdist import` without --block-size do"
            )


def open_matrix(url: str | Path) -> StoredMatrix:
    """Open the matrix at `url`, a path or an fsspec URL.

    Raises
    ------
    MatrixError
        If there is nothing, it is not a CSR matrix in AnnData's encoding, or it is unfinished.
    """
    url = normalise(url)
    attributes, members = _read_group(url)
    facts = attributes.get("spdist", {})
    if facts.get("state") == "unfinished":
        raise MatrixError(f"{url}: an unfinished product; finish it with `spdist multiply A B {url} --resume`")
    kind = attributes.get("encoding-type")
    if kind == "csc_matrix":
        raise MatrixError(f"{url}: stored by columns (csc_matrix); store it by rows, as csr_matrix")
    needed = {"csr_matrix": {"shape"}, "bsr_matrix": {"shape", "block-size"}}.get(str(kind))
    if needed is None or needed - set(attributes) or any(name not in members for name in ARRAYS):
        raise MatrixError(
            f"{url}: not a sparse matrix: expected a Zarr group with encoding-type csr_matrix, got {kind}"
        )
    shape = (int(attributes["shape"][0]), int(attributes["shape"][1]))
    indptr, indices = (_describe(url, name, members[name]) for name in ARRAYS[:2])
    size = tuple(map(int, attributes["block-size"])) if kind == "bsr_matrix" else ()
    data = _describe(url, "data", members["data"], size)
    if size:
        shape = shape[0] // size[0], shape[1] // size[1]
    check_dtype(data.dtype)
    if indptr.length != shape[0] + 1 or indices.length != data.length or indices.dtype.kind not in "iu":
        raise MatrixError(
            f"{url}: shape {shape} does not fit arrays of {indptr.length:,} offsets, {indices.length:,} "
            f"{indices.dtype} indices and {data.length:,} values"
        )
    return StoredMatrix(url, shape, indptr, indices, data, facts)


def _unreadable(place: str) -> MatrixError:
    return MatrixError(f"{place}: may not be read (permission denied): ask whoever owns it for access")


def _read_group(url: str) -> tuple[dict[str, Any], dict[str, zarr.Array[Any]]]:
    try:
        there = exists(url)
        group = zarr.open_group(open_store(url), mode="r") if there else None
    except PermissionError as error:
        raise _unreadable(url) from error
    except (GroupNotFoundError, FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise MatrixError(f"{url}: not a Zarr group; convert files with `spdist import`") from error
    if group is None:
        raise MatrixError(f"{url}: there is no such matrix")
    try:
        members = {name: member for name in ARRAYS if isinstance(member := group.get(name), zarr.Array)}
    except PermissionError as error:
        raise _unreadable(url) from error
    return group.attrs.asdict(), members


def _describe(url: str, name: str, array: zarr.Array[Any], size: tuple[int, ...] = ()) -> ChunkedArray:
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


# -- writing -----------------------------------------------------------------------------------------------------------


def chunk_of(dtype: np.dtype[Any]) -> int:
    """Return the elements of a Zarr chunk where no memory limit asks for fewer: of blocks, a power of two of them."""
    r, s = blocksize(dtype) or (1, 1)
    return max(CHUNK_LENGTH >> (r * s - 1).bit_length(), 1)


@dataclass(frozen=True)
class Layout:
    """How a matrix being written is laid out: fixed before the first chunk, so that any process can write any chunk."""

    url: str
    ncols: int
    dtype: np.dtype[Any]
    chunk: int = CHUNK_LENGTH
    compressed: bool = False

    def array(self, name: str) -> ChunkedArray:
        """Return array `name` of the matrix, open for writing by chunks."""
        dtype = {"indptr": np.dtype(np.int64), "indices": index_dtype(self.ncols), "data": self.dtype}[name]
        return _new_array(self.url, name, dtype, self.chunk, self.compressed or name != "data")

    def write_entries(self, k: int, indices: ValueArray, values: ValueArray) -> None:
        """Write Zarr chunks `k`, `k` + 1, ... of `indices` and `data`."""
        self.array("indices").write_chunks(k, indices)
        self.array("data").write_chunks(k, values)


@functools.lru_cache(maxsize=64)
def _new_array(url: str, name: str, dtype: np.dtype[Any], chunk: int, compressed: bool) -> ChunkedArray:
    return new_array(url, name, dtype, chunk, compressed=compressed)


def begin(url: str, facts: dict[str, Any]) -> None:
    """Create an unfinished matrix at `url`: a group that says so, and nothing else."""
    zarr.create_group(open_store(url), attributes={"spdist": {**facts, "state": "unfinished"}})


def read_facts(url: str) -> dict[str, Any]:
    """Return what spdist noted at `url`, empty where there is nothing of ours."""
    try:
        if not exists(url):
            return {}
        attributes = zarr.open_group(open_store(url), mode="r").attrs.asdict()
    except PermissionError as error:
        raise _unreadable(url) from error
    except (GroupNotFoundError, FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return cast(dict[str, Any], attributes.get("spdist", {}))


def write_note(url: str, name: str, content: bytes) -> None:
    """Write a small file of ours into the unfinished matrix; replaced in one step."""
    store = open_store(url)
    sync(store.set(f"spdist-{name}", default_buffer_prototype().buffer.from_bytes(content)))


def read_note(url: str, name: str) -> bytes | None:
    """Return what `write_note` wrote, or None."""
    found = sync(open_store(url).get(f"spdist-{name}", default_buffer_prototype()))
    return None if found is None else found.to_bytes()


def remove_note(url: str, name: str) -> None:
    """Remove what `write_note` wrote."""
    sync(open_store(url).delete(f"spdist-{name}"))


def finish(layout: Layout, nrows: int, nnz: int, facts: dict[str, Any]) -> StoredMatrix:
    """Turn what has been written into a matrix: array metadata first, the encoding last."""
    lengths = zip(ARRAYS, (nrows + 1, nnz, nnz), strict=True)
    size = blocksize(layout.dtype)
    r, s = size or (1, 1)
    attributes = {
        "encoding-type": "csr_matrix" if size is None else "bsr_matrix",
        "encoding-version": "0.1.0",
        "shape": [nrows * r, layout.ncols * s],
        **({} if size is None else {"block-size": [r, s]}),
        "spdist": {**facts, "state": "complete", "canonical": True},
    }
    finish_group(layout.url, [(layout.array(name), length) for name, length in lengths], attributes)
    return open_matrix(layout.url)


def finish_group(url: str, arrays: list[tuple[ChunkedArray, int]], attributes: dict[str, Any]) -> None:
    """Give written arrays their lengths, then the group at `url` its attributes in place of those it had."""
    group = zarr.open_group(open_store(url), mode="r+")
    for array, length in arrays:
        document = json.loads(array.metadata)
        document["shape"] = [length, *document["shape"][1:]]
        buffer = default_buffer_prototype().buffer.from_bytes(json.dumps(document, indent=2).encode())
        sync(open_store(url).set(f"{array.name}/zarr.json", buffer))
    group.attrs.put(attributes)


class ChunkBuffer:
    """Collects elements of one array and writes each Zarr chunk once it is full; holds less than one chunk between."""

    def __init__(self, array: ChunkedArray, at: int = 0) -> None:
        self.array, self.at, self.parts = array, at, [np.empty(0, array.dtype)]

    def append(self, values: ValueArray) -> None:
        """Add `values`; writes what fills whole chunks."""
        self.parts.append(np.asarray(values, self.array.dtype))
        if sum(map(len, self.parts)) >= self.array.chunk:
            self._flush(final=False)

    def close(self) -> None:
        """Write the rest as the last chunk."""
        self._flush(final=True)

    def _flush(self, *, final: bool) -> None:
        values = np.concatenate(self.parts)
        count = len(values) if final else len(values) - len(values) % self.array.chunk
        if count:
            self.array.write_chunks(self.at // self.array.chunk, values[:count])
        self.at += count
        self.parts = [values[count:].copy()]


class MatrixWriter:
    """Writes a matrix row block by row block in bounded memory; what it leaves before `close` is no matrix.

    Parameters
    ----------
    url : str
        A path or fsspec URL; must not exist.
    ncols : int
        Columns; the number of rows is known at the end.
    dtype : dtype
        Of the values.
    facts : dict
        Provenance, kept under the attribute ``spdist``.
    """

    def __init__(self, url: str | Path, ncols: int, dtype: np.dtype[Any], facts: dict[str, Any]) -> None:
        dtype = check_dtype(np.dtype(dtype))
        self.layout = Layout(normalise(url), int(ncols), dtype, chunk_of(dtype))
        self.facts, self.nrows, self.nnz = facts, 0, 0
        self._offsets: ChunkBuffer | None = None
        self._entries: tuple[ChunkBuffer, ChunkBuffer] | None = None

    def append(self, block: CSR) -> None:
        """Write the next rows, canonical."""
        self._begin()
        assert self._offsets is not None
        if self._entries is None and block.nnz:  # the first entries decide whether values are compressed
            self.layout = replace(self.layout, compressed=compresses(block.data))
            self._entries = ChunkBuffer(self.layout.array("indices")), ChunkBuffer(self.layout.array("data"))
        if self._entries is not None:
            self._entries[0].append(block.indices)
            self._entries[1].append(block.data)
        self._offsets.append(self.nnz + block.indptr[1:])
        self.nrows += block.nrows
        self.nnz += block.nnz

    def close(self) -> StoredMatrix:
        """Finish the matrix and return it."""
        self._begin()
        assert self._offsets is not None
        for buffer in (self._offsets, *(self._entries or ())):
            buffer.close()
        return finish(self.layout, self.nrows, self.nnz, self.facts)

    def _begin(self) -> None:
        if self._offsets is None:
            begin(self.layout.url, self.facts)
            self._offsets = ChunkBuffer(self.layout.array("indptr"))
            self._offsets.append(np.zeros(1, np.int64))


# -- other things than matrices ----------------------------------------------------------------------------------------


def write_arrays(url: str | Path, arrays: dict[str, ValueArray], attributes: dict[str, Any]) -> None:
    """Write a Zarr group of arrays, flattened, their shapes among its attributes; `url` must not exist."""
    place = normalise(url)
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
    place = normalise(url)
    attributes, _ = _read_group(place)
    shapes = attributes.get("spdist", {}).get("shapes", {})
    group = zarr.open_group(open_store(place), mode="r")
    arrays = {}
    for name, shape in shapes.items():
        array = _describe(place, name, cast("zarr.Array[Any]", group[name]))
        arrays[name] = np.array(array.read(0, array.length)).reshape(shape)
    return arrays, attributes
