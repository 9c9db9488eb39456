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
from dataclasses import dataclass
from typing import BinaryIO, Self, cast

import numpy as np
import numpy.typing as npt

from spdist.errors import CorruptError, SpdistError
from spdist.storage.foreign.decoded_size import Codecs, check_decoded_size
from spdist.stores.location import Location
from spdist.stores.names import unreadable
from spdist.stores.registry import at
from spdist.stores.regular_files import NotRegularError, open_regular

Table = npt.NDArray[np.uint32]
"""The checksums of one array, by the number of the Zarr chunk."""

MAGIC = b"spdist-checksums"
"""First bytes of a table."""

VERSION = 1
"""Version of the format of tables."""

NOTE = "spdist-checksums"
"""File name of a table, in the folder of its array: Zarr does not list that folder, so it warns of no stray file."""

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
    start, tables = _HEAD.size + 8 * count, []
    for length in lengths:
        tables.append(np.frombuffer(raw, "<u4", length, start).astype(np.uint32, copy=False))
        start += 4 * length
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
class WrittenChunks:
    """Consecutive Zarr chunks of an array, as their writer found them in storage afterwards."""

    array: str
    first: int
    sums: Table


@dataclass(frozen=True)
class ChunkFiles:
    """The files of the Zarr chunks of one array."""

    # the matrix and the array in it
    location: Location
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

    def error(self, k: int, what: str) -> CorruptError:
        """Return the error to raise for a Zarr chunk."""
        return CorruptError(
            f"{self.location}: Zarr chunk {k} of array '{self.name}' ({self.key(k)}) {what}; restore it from a copy or "
            f"write the matrix again"
        )

    def exists(self, k: int) -> bool:
        """Whether Zarr chunk `k` exists."""
        return self.location.holds(self.key(k))

    def open(self, k: int) -> BinaryIO:
        """Open Zarr chunk `k`.

        Raises `CorruptError` if it is missing, or no regular file.
        Raises `MatrixError` if the system denies reading it.
        Raises `SpdistError` if the system cannot open it for another reason.
        """
        try:
            return self.location.open(self.key(k))
        except OSError as error:
            raise self._cannot_be_opened(k, error) from error

    def open_file(self, k: int) -> tuple[int, int]:
        """Open Zarr chunk `k` in a file of this host; return the descriptor, and its bytes. Raises as `open` does."""
        try:
            return open_regular(f"{self.location.path}/{self.key(k)}")
        except OSError as error:
            raise self._cannot_be_opened(k, error) from error

    def _cannot_be_opened(self, k: int, error: OSError) -> SpdistError:
        path = f"{self.location}/{self.key(k)}"
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return self.error(k, "is missing")
        if isinstance(error, PermissionError):
            return unreadable(path)
        if isinstance(error, NotRegularError):
            return self.error(k, "is no regular file")
        return SpdistError(f"{path}: cannot be opened: {error.strerror}; try again")

    def check_decoded_sizes(self, chunks: range, codecs: Codecs, *, may_be_missing: bool = False) -> None:
        """Refuse Zarr chunks in files that decode to far more bytes than their array declares, before zarrs does it.

        Raises `CorruptError` if one does; or is no regular file, or is missing and may not be.
        """
        if self.location.has_files:
            for k in chunks:
                if not may_be_missing or self.exists(k):
                    with self.open(k) as file:
                        self._check_decoded_size(k, file, codecs)

    def _check_decoded_size(self, k: int, file: BinaryIO, codecs: Codecs) -> None:
        def read(first: int, nbytes: int) -> bytes:
            file.seek(first)
            return file.read(nbytes)

        try:
            check_decoded_size(read, file.seek(0, os.SEEK_END), codecs)
        except ValueError as error:
            raise self.error(k, f"is not decoded: {error}") from error
        file.seek(0)

    def checksums(self, first: int, last: int) -> Table:
        """Return the last four bytes of Zarr chunks ``[first:last)``, as numbers.

        Raises `CorruptError` if a Zarr chunk is missing, shorter than its checksum, or no regular file.
        """
        ends = self.location.read_ends([self.key(k) for k in range(first, last)], 4)
        for k, end in enumerate(ends, first):
            if isinstance(end, OSError):
                raise self._cannot_be_opened(k, end) from end
            if len(end) != 4:
                raise self.error(k, "is truncated")
        return np.frombuffer(b"".join(cast(list[bytes], ends)), "<u4").astype(np.uint32, copy=False)

    def digests(self, first: int, last: int, codecs: Codecs) -> Iterator[bytes]:
        """Yield a digest of each of the Zarr chunks ``[first:last)``, which are read whole.

        Raises `CorruptError` at the first Zarr chunk that is missing, no regular file, or decodes to far more bytes
        than declared.
        """
        for k in range(first, last):
            with self.open(k) as file:
                self._check_decoded_size(k, file, codecs)
                yield hashlib.file_digest(file, "blake2b").digest()  # type: ignore[arg-type]


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
    """Write the table of array `name`; return its digest."""
    raw = pack([table])
    at(url).write(f"{name}/{NOTE}", raw)
    return digest_of(raw)


@functools.lru_cache(maxsize=64)
def read_table(url: str, name: str, digest: str, length: int) -> Table:
    """Return the table of an array, cached in the process.

    Returns (length,) uint32.
    Raises `CorruptError` if the table is missing or damaged, or belongs to another matrix.
    """
    try:
        raw = at(url).read(f"{name}/{NOTE}")
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
