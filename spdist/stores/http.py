"""Matrices behind servers that answer every request with the whole file, such as ``python -m http.server``."""

from __future__ import annotations

import asyncio
from typing import Any

from zarr.abc.store import ByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import FsspecStore


class HttpStore(FsspecStore):
    """Files of an HTTP server; where it ignores the ranges of requests, they are cut out of whole files.

    Until a server has kept to a range, requests with ranges are made one at a time: one file is in memory at most.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._keeps_to_ranges, self._alone = False, asyncio.Lock()

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return a file, or a part of it; None if it does not exist."""
        if byte_range is None or self._keeps_to_ranges:
            return await super().get(key, prototype, byte_range)
        async with self._alone:
            found = await super().get(key, prototype, byte_range)
            if found is None:
                return None
            match byte_range:
                case RangeByteRequest(start, stop) if len(found) > stop - start:
                    return found[start:stop]
                case SuffixByteRequest(count) if len(found) > count:
                    return found[len(found) - count :]
            self._keeps_to_ranges = True
            return found
