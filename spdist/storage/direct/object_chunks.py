"""Zarr chunks in an object store: several threads encode or decode them, and obstore transfers them.

Zarr's own pipeline runs the codecs in the thread of its event loop, so that requests wait for codecs. This module knows
only the codecs that spdist writes; Zarr reads and writes all others.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from spdist.matrices.dtypes import ValueArray
from spdist.storage.direct.chunks import CHECKSUM_BYTES, ChunkCodec
from spdist.stores import service

AT_ONCE = 16
"""Most Zarr chunks that a process transfers at once."""

BYTES_AT_ONCE = 32 << 20
"""Most bytes of these Zarr chunks together, unless a single one has more."""


@dataclass(frozen=True)
class ObjectChunks:
    """The Zarr chunks of one array."""

    store: Any
    codec: ChunkCodec

    def write(self, keys: list[str], chunks: ValueArray) -> None:
        """Write Zarr chunks.

        `chunks`: (len(keys), elements) array: contiguous.
        Raises `OSError` if the store refuses one, or cannot be reached.
        """
        _at_once(lambda i: service.put(self.store, keys[i], self.codec.encode(chunks[i])), len(keys), self.codec.nbytes)

    def read(
        self, keys: list[str], out: ValueArray | None = None, check: Callable[[int, bytes], None] | None = None
    ) -> ValueArray:
        """Read Zarr chunks.

        `out`: gets the decoded elements; contiguous.
        `check`: ``check(i, end)`` looks at the last four bytes of Zarr chunk i of these, and raises an error to refuse
        it.
        Returns (elements, ...) array: `out`, or a new array.
        Raises `FileNotFoundError` if one is missing.
        Raises `ValueError` if one is truncated or altered.
        Raises `OSError` if the store refuses one, or cannot be reached.
        """
        if out is None:
            out = np.empty((len(keys) * self.codec.shape[0], *self.codec.shape[1:]), self.codec.dtype)
        parts = out.reshape(len(keys), -1)

        def get(i: int) -> None:
            raw = service.get(self.store, keys[i])
            if check is not None:
                check(i, bytes(memoryview(raw)[-CHECKSUM_BYTES:]))
            self.codec.decode_into(raw, parts[i])

        _at_once(get, len(keys), self.codec.nbytes)
        return out


def most_moving(nbytes: int) -> int:
    """Return the most bytes of encoded Zarr chunks that a process holds at once.

    `nbytes`: bytes of a Zarr chunk.

    Examples
    --------
    >>> most_moving(1 << 20) >> 20, most_moving(4 << 20) >> 20, most_moving(64 << 20) >> 20
    (16, 32, 64)
    """
    return max(min(AT_ONCE * nbytes, BYTES_AT_ONCE), nbytes)


class _Room:
    """Limits the bytes that threads hold together; a thread that needs more than the limit waits until it is alone."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.taken, self.changed = nbytes, 0, threading.Condition()

    @contextmanager
    def take(self, nbytes: int) -> Iterator[None]:
        """Wait until `nbytes` bytes are free, and hold them."""
        with self.changed:
            self.changed.wait_for(lambda: self.taken == 0 or self.taken + nbytes <= self.nbytes)
            self.taken += nbytes
        try:
            yield
        finally:
            with self.changed:
                self.taken -= nbytes
                self.changed.notify_all()


_room = _Room(BYTES_AT_ONCE)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="spdist-objects")


def _at_once(move: Callable[[int], None], count: int, nbytes: int) -> None:
    """Call `move` for each number below `count`, in threads; raise the first error, and begin no more after it."""

    def held(i: int) -> None:
        with _room.take(nbytes):
            move(i)

    waiting = [_threads().submit(held, i) for i in range(count)]
    try:
        for future in waiting:
            future.result()
    finally:
        for future in waiting:
            future.cancel()
