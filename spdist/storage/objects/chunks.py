"""Zarr chunks in an object store: several threads encode or decode them, and obstore transfers them.

Zarr's own pipeline runs the codecs in the thread of its event loop, so that requests wait for codecs. This module knows
only the codecs that spdist writes; Zarr reads and writes all others.
"""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import zarr

from spdist.matrices.dtypes import ValueArray
from spdist.storage.objects import service

AT_ONCE = 16
"""Most Zarr chunks that a process transfers at once."""

BYTES_AT_ONCE = 32 << 20
"""Most bytes of these Zarr chunks together, unless a single one has more."""

CHECKSUM_BYTES = 4
"""Bytes of the crc32c that ends each Zarr chunk."""

BLOSC_HEADER_BYTES = 16
"""Bytes of Blosc's header; bytes 4 to 7 hold the length of the decoded data."""


@dataclass(frozen=True)
class ObjectChunks:
    """The Zarr chunks of one array.

    Attributes
    ----------
    store : obstore.store.ObjectStore
    dtype : dtype
        Of the numbers.
    shape : tuple of int
        Of one Zarr chunk.
    codec : numcodecs.blosc.Blosc or None
        Compresses a Zarr chunk before its checksum is added; None if Zarr chunks are not compressed.
    """

    store: Any
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    codec: Any

    def write(self, keys: list[str], chunks: ValueArray) -> None:
        """Write Zarr chunks.

        Parameters
        ----------
        keys : list of str
            Their keys in the store.
        chunks : (len(keys), elements) array
            Contiguous.

        Raises
        ------
        OSError
            If the store refuses one, or cannot be reached.
        """
        _at_once(lambda i: self._put(keys[i], chunks[i]), len(keys), self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of one decoded Zarr chunk."""
        return math.prod(self.shape) * self.dtype.itemsize

    def _put(self, key: str, chunk: ValueArray) -> None:
        body = chunk.view(np.uint8) if self.codec is None else np.frombuffer(self.codec.encode(chunk), np.uint8)
        whole = np.empty(len(body) + CHECKSUM_BYTES, np.uint8)
        whole[:-CHECKSUM_BYTES] = body
        whole[-CHECKSUM_BYTES:] = _checksum(whole[:-CHECKSUM_BYTES])
        service.put(self.store, key, whole)

    def read(self, keys: list[str], out: ValueArray | None = None) -> ValueArray:
        """Read Zarr chunks.

        Parameters
        ----------
        keys : list of str
            Their keys in the store.
        out : array, optional
            Gets the decoded elements; contiguous.

        Returns
        -------
        (elements, ...) array
            `out`, or a new array.

        Raises
        ------
        FileNotFoundError
            If one is missing.
        ValueError
            If one is truncated or altered.
        OSError
            If the store refuses one, or cannot be reached.
        """
        if out is None:
            out = np.empty((len(keys) * self.shape[0], *self.shape[1:]), self.dtype)
        parts = out.reshape(len(keys), -1).view(np.uint8)
        _at_once(lambda i: self._get(keys[i], parts[i]), len(keys), self.nbytes)
        return out

    def _get(self, key: str, out: ValueArray) -> None:
        whole = np.frombuffer(service.get(self.store, key), np.uint8)
        body = whole[:-CHECKSUM_BYTES]
        if len(whole) < CHECKSUM_BYTES or not np.array_equal(_checksum(body), whole[-CHECKSUM_BYTES:]):
            raise ValueError("its checksum does not match")
        if (len(body) if self.codec is None else _decoded_bytes(body)) != len(out):
            raise ValueError("it is of another length")
        if self.codec is None:
            out[:] = body
        else:
            self.codec.decode(body, out)


def of_array(array: zarr.Array[Any]) -> ObjectChunks | None:
    """Return the Zarr chunks of an array if obstore holds it and spdist writes these codecs.

    Parameters
    ----------
    array : zarr.Array

    Returns
    -------
    ObjectChunks or None
        None if Zarr must read and write the array.
    """
    store = getattr(array.store_path.store, "store", None)
    if store is None or array.metadata.zarr_format != 3 or np.dtype(array.dtype).newbyteorder("=") != array.dtype:
        return None
    document = json.loads(json.dumps(array.metadata.to_dict()))
    codecs = document["codecs"]
    names = [codec["name"] for codec in codecs]
    if names not in (["bytes", "crc32c"], ["bytes", "blosc", "crc32c"]) or not _is_little(codecs[0]):
        return None
    shape = tuple(document["chunk_grid"]["configuration"]["chunk_shape"])
    codec = _blosc(codecs[1]["configuration"]) if len(names) == 3 else None
    return ObjectChunks(store, np.dtype(array.dtype), shape, codec)


def _is_little(codec: dict[str, Any]) -> bool:
    return bool(codec.get("configuration", {}).get("endian", "little") == "little")


def _blosc(configuration: dict[str, Any]) -> Any:
    from numcodecs.blosc import BITSHUFFLE, NOSHUFFLE, SHUFFLE, Blosc

    shuffle = {"noshuffle": NOSHUFFLE, "shuffle": SHUFFLE, "bitshuffle": BITSHUFFLE}[configuration["shuffle"]]
    return Blosc(configuration["cname"], configuration["clevel"], shuffle, configuration.get("blocksize", 0))


def _decoded_bytes(body: ValueArray) -> int:
    """Return the decoded length in Blosc's header; -1 if there is no header."""
    return int.from_bytes(body[4:8].tobytes(), "little") if len(body) >= BLOSC_HEADER_BYTES else -1


def _checksum(body: ValueArray) -> ValueArray:
    return np.array([google_crc32c.value(body)], "<u4").view(np.uint8)


def most_moving(nbytes: int) -> int:
    """Return the most bytes of encoded Zarr chunks that a process holds at once.

    Parameters
    ----------
    nbytes : int
        Bytes of a Zarr chunk.

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
        """Wait until so many bytes are free, and hold them."""
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
