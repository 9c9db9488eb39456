"""Zarr chunks of remote stores are compared, as they arrive, with the table of checksums of their array."""

from __future__ import annotations

from typing import Any, Self

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import WrapperStore

from spdist.storage.checksums import ChunkFiles, Table, misplaced


class PlacedStore(WrapperStore[Store]):
    """A store from which the Zarr chunks of one array come only if they are in their places.

    On a file system the ends of Zarr chunks are read before they are decoded (`ChunkedArray.check_places`). From an
    object store that would be a request more for each. Here the four bytes are taken from what was asked for anyway.

    Parameters
    ----------
    store : Store
    files : ChunkFiles
    table : Table
        The array's checksums.
    """

    def __init__(self, store: Store, files: ChunkFiles, table: Table) -> None:
        super().__init__(store)
        self.files, self.table = files, table

    def _with_store(self, store: Store) -> Self:
        return type(self)(store, self.files, self.table)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return what is at a key; refuse a Zarr chunk that is another's, or nobody's.

        Raises
        ------
        CorruptError
            Names array and Zarr chunk.
        """
        found = await super().get(key, prototype, byte_range)
        k = self.files.number(key)
        if found is not None and k is not None and byte_range is None:
            self._check(k, found)
        return found

    def _check(self, k: int, content: Buffer) -> None:
        trailer: Any = content[-4:].to_bytes() if len(content) >= 4 else b""
        if len(trailer) < 4:
            raise self.files.error(k, "is truncated")
        checksum = int.from_bytes(trailer, "little")
        if checksum != self.table[k]:
            raise self.files.error(k, misplaced(checksum, self.table))
