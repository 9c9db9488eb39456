"""Zarr chunks of remote stores are compared, as they arrive, with the table of checksums of their array."""

from __future__ import annotations

from typing import Self

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import WrapperStore

from spdist.storage.checksums import ChunkFiles, Table, misplaced


class ChecksumPlacedStore(WrapperStore[Store]):
    """A store from which the Zarr chunks of one array come only if they are in their positions.

    On a file system the ends of Zarr chunks are read before they are decoded (`ChunkedArray.check_positions`). From an
    object store that would be a request more for each. Here the four bytes are taken from what was asked for anyway.
    """

    def __init__(self, store: Store, files: ChunkFiles, table: Table) -> None:
        super().__init__(store)
        self.files, self.table = files, table

    def _with_store(self, store: Store) -> Self:
        return type(self)(store, self.files, self.table)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return what is at a key; refuse a Zarr chunk that is another's, or nobody's.

        Raises `CorruptError`; names array and Zarr chunk.
        """
        found = await super().get(key, prototype, byte_range)
        k = self.files.number(key)
        if found is not None and k is not None and byte_range is None:
            check_position(self.files, self.table, k, found[-4:].to_bytes() if len(found) >= 4 else b"")
        return found


def check_position(files: ChunkFiles, table: Table, k: int, end: bytes) -> None:
    """Compare the end of a Zarr chunk with the array's table.

    Raises `CorruptError` if another checksum belongs there; names array and Zarr chunk.
    """
    if len(end) < 4:
        raise files.error(k, "is truncated")
    checksum = int.from_bytes(end, "little")
    if checksum != table[k]:
        raise files.error(k, misplaced(checksum, table))
