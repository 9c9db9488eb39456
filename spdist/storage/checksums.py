"""Checksums of Zarr chunks: read from the ends of the Zarr chunks, and kept in a table next to them.

A Zarr chunk ends with its crc32c, which shows that the Zarr chunk is whole, but not that it is in the right place: two
swapped Zarr chunks pass. The table of an array lists the checksums of its Zarr chunks by number.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt

from spdist.errors import CorruptError, SpdistError
from spdist.storage import locations
from spdist.storage.foreign.decoded_size import Codecs, check_decoded_size
from spdist.storage.locations import NotRegularError, is_local, local_path, open_regular, open_store, unreadable

if TYPE_CHECKING:
    from zarr.abc.store import SuffixByteRequest

Table = npt.NDArray[np.uint32]
"""The checksums of one array, by the number of the Zarr chunk."""

MAGIC = b"spdist-checksums"
"""First bytes of a table."""

VERSION = 1
"""Version of the format of tables."""

NOTE = "spdist-checksums"
"""File name of a table, in the folder of its array: Zarr does not list that folder, so it warns of no stray file."""

BATCH = 256
"""Zarr chunks whose checksums one thread reads at a time, or that one batch requests from a remote store."""

THREADS = 8
"""Threads that read checksums; on a network file system their waits for answers overlap."""

_HEAD = struct.Struct("<16sII")  # magic, version, number of tables
_DIGEST = 32  # bytes of the digest at the end


def pack(tables: Sequence[Table]) -> bytes:
    """Return tables as bytes: a header with the version, the length of each table, the tables, a digest.

    Examples
    --------
    >>> [table.tolist() for table in unpack(pack([np.array([7, 8], np.uint32)]))]
    [[7, 8]]
    """
    lengths = struct.pack(f"<{len(tables)}Q", *map(len, tables))
    body = _HEAD.pack(MAGIC, VERSION, len(tables)) + lengths + b"".join(t.astype("<u4").tobytes() for t in tables)
    return body + hashlib.blake2b(body, digest_size=_DIGEST).digest()


def unpack(raw: bytes) -> list[Table]:
    """Return the tables that `pack` turned into bytes.

    Raises `ValueError` if the bytes are damaged, or of another version; says which.
    """
    if len(raw) < _HEAD.size + _DIGEST or not raw.startswith(MAGIC):
        raise ValueError("it is no table of checksums")
    _, version, count = _HEAD.unpack_from(raw)
    if version != VERSION:
        raise ValueError(f"its format has version {version}, and this spdist reads version {VERSION}")
    body = raw[:-_DIGEST]
    if hashlib.blake2b(body, digest_size=_DIGEST).digest() != raw[-_DIGEST:]:
        raise ValueError("it is truncated or altered")
    lengths = struct.unpack_from(f"<{count}Q", raw, _HEAD.size)
    at, tables = _HEAD.size + 8 * count, []
    for length in lengths:
        tables.append(np.frombuffer(raw, "<u4", length, at).astype(np.uint32, copy=False))
        at += 4 * length
    return tables


@dataclass(frozen=True)
class Checksums:
    """The crc32c at the end of each Zarr chunk of each array of a matrix."""

    # (n,) uint32: by the number of the Zarr chunk
    indptr: Table
    indices: Table
    data: Table

    def to_bytes(self) -> bytes:
        """Return the tables as bytes, with a version and a digest."""
        return pack([self.indptr, self.indices, self.data])

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Return the tables that `to_bytes` turned into bytes.

        Raises `ValueError` if the bytes are damaged, or of another version; says which.
        """
        tables = unpack(raw)
        if len(tables) != 3:
            raise ValueError(f"it holds {len(tables)} tables, not 3")
        return cls(*tables)


@dataclass(frozen=True)
class ChunkFiles:
    """The files of the Zarr chunks of one array."""

    # the matrix and the array in it
    url: str
    name: str
    # the parts of a Zarr chunk's key before and after its number, relative to the matrix
    prefix: str
    suffix: str

    def key(self, k: int) -> str:
        """Return Zarr's key of chunk `k`, relative to the matrix."""
        return f"{self.prefix}{k}{self.suffix}"

    def number(self, key: str) -> int | None:
        """Return the number of the Zarr chunk with this key; None if it is no key of a Zarr chunk."""
        middle = key.removeprefix(self.prefix).removesuffix(self.suffix)
        return int(middle) if middle.isdecimal() and key == self.key(int(middle)) else None

    def path(self, k: int) -> str:
        """Return the path of Zarr chunk `k` of a local matrix."""
        return f"{self.url.removeprefix('file://')}/{self.prefix}{k}{self.suffix}"

    def error(self, k: int, what: str) -> CorruptError:
        """Return the error to raise for a Zarr chunk.

        `k`: number of the Zarr chunk.
        `what`: the problem, such as "is missing".
        """
        return CorruptError(
            f"{self.url}: Zarr chunk {k} of array '{self.name}' ({self.key(k)}) {what}; restore it from a copy or "
            f"write the matrix again"
        )

    def exists(self, k: int) -> bool:
        """Whether Zarr chunk `k` exists."""
        return os.access(self.path(k), os.F_OK) if is_local(self.url) else locations.has(self.url, self.key(k))

    def open(self, k: int) -> tuple[int, int]:
        """Open the local file of Zarr chunk `k`; return its descriptor and its bytes.

        Raises `CorruptError` if it is missing, or no regular file.
        Raises `MatrixError` if the system denies reading it.
        Raises `SpdistError` if the system cannot open it for another reason.
        """
        try:
            return open_regular(self.path(k))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self.error(k, "is missing") from error
        except PermissionError as error:
            raise unreadable(self.path(k)) from error
        except NotRegularError as error:
            raise self.error(k, "is no regular file") from error
        except OSError as error:
            raise SpdistError(f"{self.path(k)}: cannot be opened: {error.strerror}; try again") from error

    def check_decoded_size(self, k: int, codecs: Codecs) -> None:
        """Refuse Zarr chunk `k` of a local matrix if it decodes to far more bytes than its array declares.

        Raises `CorruptError` if it does; or it is missing, or no regular file.
        """
        descriptor, size = self.open(k)
        try:
            check_decoded_size(lambda at, nbytes: os.pread(descriptor, nbytes, at), size, codecs)
        except ValueError as error:
            raise self.error(k, f"is not decoded: {error}") from error
        finally:
            os.close(descriptor)

    def checksums(self, first: int, last: int) -> Table:
        """Return the last four bytes of Zarr chunks ``[first:last)``, as numbers.

        Raises `CorruptError` if a Zarr chunk is missing, shorter than its checksum, or no regular file.
        """
        batches = [(k, min(k + BATCH, last)) for k in range(first, last, BATCH)]
        if not is_local(self.url):
            raw = b"".join(self._remote(*batch) for batch in batches)
        elif len(batches) < 2:
            raw = b"".join(map(self._trailer, range(first, last)))
        else:
            with ThreadPoolExecutor(THREADS) as threads:
                raw = b"".join(threads.map(lambda batch: b"".join(map(self._trailer, range(*batch))), batches))
        return np.frombuffer(raw, "<u4").astype(np.uint32, copy=False)

    def _trailer(self, k: int) -> bytes:
        descriptor, size = self.open(k)
        try:
            found = os.pread(descriptor, 4, max(size - 4, 0))
        finally:
            os.close(descriptor)
        if len(found) < 4:
            raise self.error(k, "is truncated")
        return found

    def _remote(self, first: int, last: int) -> bytes:
        from zarr.abc.store import SuffixByteRequest

        found = self._fetch(first, last, SuffixByteRequest(4))
        for k, trailer in enumerate(found, first):
            if len(trailer) != 4:
                raise self.error(k, "is truncated")
        return b"".join(found)

    def _fetch(self, first: int, last: int, span: SuffixByteRequest | None) -> list[bytes]:
        """Return Zarr chunks ``[first:last)`` of a remote store, or the end of each."""
        import asyncio

        from zarr.core.buffer import default_buffer_prototype

        store, prototype = open_store(self.url), default_buffer_prototype()

        async def fetch() -> list[Any]:
            return await asyncio.gather(*(store.get(self.key(k), prototype, span) for k in range(first, last)))

        found = locations.wait(fetch())
        for k, buffer in enumerate(found, first):
            if buffer is None:
                raise self.error(k, "is missing")
        return [cast(bytes, buffer.to_bytes()) for buffer in found]

    def digests(self, first: int, last: int, codecs: Codecs) -> Iterator[bytes]:
        """Yield a digest of each of the Zarr chunks ``[first:last)``, which are read whole.

        Raises `CorruptError` At the first Zarr chunk that is missing, no regular file, or decodes to far more bytes
        than declared.
        """
        for k in range(first, last):
            if is_local(self.url):
                descriptor, _ = self.open(k)
                with os.fdopen(descriptor, "rb") as file:
                    yield hashlib.file_digest(file, "blake2b").digest()
                continue
            raw = self._fetch(k, k + 1, None)[0]
            try:
                check_decoded_size(lambda at, nbytes, raw=raw: raw[at : at + nbytes], len(raw), codecs)  # type: ignore[misc]
            except ValueError as error:
                raise self.error(k, f"is not decoded: {error}") from error
            yield hashlib.blake2b(raw).digest()


def misplaced(found: int, table: Table) -> str:
    """Return what is wrong with a Zarr chunk that ends in the checksum `found`, which is another's or nobody's.

    `table`: (n,) uint32.

    Examples
    --------
    >>> misplaced(8, np.array([7, 8], np.uint32))
    "is in another's place: it is Zarr chunk 1 of this array"
    """
    owners = np.flatnonzero(table == found)
    if len(owners):
        return f"is in another's place: it is Zarr chunk {int(owners[0])} of this array"
    return f"is not the one that was written: it ends in checksum {found:#010x}, which the array's table lacks"


def digest_of(raw: bytes) -> str:
    """Return the digest by which other files refer to these bytes."""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def write_table(url: str, name: str, table: Table) -> str:
    """Write the table of array `name`; return its digest.

    `url`: the matrix.
    """
    raw = pack([table])
    locations.put(url, f"{name}/{NOTE}", raw)
    return digest_of(raw)


@functools.lru_cache(maxsize=64)
def read_table(url: str, name: str, digest: str, length: int) -> Table:
    """Return the table of an array, cached in the process.

    `url, name`: the matrix and the array in it.
    `digest`: from `write_table`.
    `length`: Zarr chunks of the array.
    Returns (length,) uint32.
    Raises `CorruptError` if the table is missing or damaged, or belongs to another matrix.
    """
    try:
        raw = read_small(url, f"{name}/{NOTE}")
        if digest_of(raw) != digest:
            raise ValueError("is truncated, altered, or of another matrix")
        table = unpack(raw)[0]
        if len(table) != length:
            raise ValueError(f"is of {len(table):,} Zarr chunks, not {length:,}")
    except PermissionError as error:
        raise unreadable(f"{url}/{name}/{NOTE}") from error
    except (ValueError, OSError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None) or error
        raise CorruptError(
            f"{url}/{name}/{NOTE}: the table of checksums {why}; restore it from a copy or write the matrix again"
        ) from error
    return table


def read_small(url: str, key: str) -> bytes:
    """Return the bytes of a small file; a local one must be a regular file.

    `url`: the matrix.
    `key`: path of the file, relative to the matrix.
    """
    if is_local(url):
        descriptor, _ = open_regular(f"{local_path(url)}/{key}")
        with os.fdopen(descriptor, "rb") as file:
            return file.read()
    found = locations.get(url, key)
    if found is None:
        raise FileNotFoundError(key)
    return found
