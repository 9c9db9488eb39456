"""Zarr chunks in files, read and written by threads: no more of them than there are cores, and one for each call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from spdist.foundation.cpus import count_cpus
from spdist.foundation.threads import run_in_threads
from spdist.matrices.dtypes import ValueArray
from spdist.storage.checksums import ChunkFiles, Table, misplaced
from spdist.storage.direct.chunks import ChunkCodec, drop_moved

LEAST = 2
"""Zarr chunks for which a thread is asked: it costs a good part of what one takes."""


def read_chunks(files: ChunkFiles, codec: ChunkCodec, chunks: range, out: ValueArray, table: Table) -> None:
    """Decode Zarr chunks into `out`, which holds them all, and compare each with the table of checksums.

    Raises `CorruptError` if one is missing, truncated, altered or in the wrong place; names the first.
    """
    parts = out.reshape(len(chunks), -1)

    def read(k: int) -> None:
        try:
            checksum = _read(files, codec, k, parts[k - chunks.start])
        except OSError:  # it may be temporary
            try:
                checksum = _read(files, codec, k, parts[k - chunks.start])
            except OSError as error:
                raise files.error(k, f"cannot be read ({error.strerror})") from error
        if checksum != table[k]:
            raise files.error(k, misplaced(checksum, table))

    _for_each(chunks, read)


def write_chunks(files: ChunkFiles, codec: ChunkCodec, chunks: range, numbers: ValueArray) -> None:
    """Write whole Zarr chunks, which `numbers` holds."""
    folder, length = files.location.path, codec.shape[0]
    for parent in {(folder / files.key(k)).parent for k in (chunks if numbers.ndim > 1 else chunks[:1])}:
        parent.mkdir(parents=True, exist_ok=True)

    def write(k: int) -> None:
        first = (k - chunks.start) * length
        parts = codec.encoded_parts(numbers[first : first + length])
        descriptor = os.open(f"{folder}/{files.key(k)}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _write_all(descriptor, [part.data for part in parts])
        finally:
            os.close(descriptor)

    _for_each(chunks, write)


def _read(files: ChunkFiles, codec: ChunkCodec, k: int, out: ValueArray) -> int:
    """Decode a Zarr chunk; return its checksum."""
    descriptor, size = files.open_file(k)
    try:
        return codec.read_into(descriptor, size, out)
    except (ValueError, RuntimeError) as error:  # the latter of Blosc
        raise files.error(k, f"is truncated or altered ({error})") from error
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, parts: list[memoryview]) -> None:
    """Write all parts to a file, one after the other, though the system may take less at a time."""
    while parts:
        drop_moved(parts, os.writev(descriptor, parts))


class _Threads:
    """How many threads read and write Zarr chunks: no more than there are cores, and one for each call."""

    lock: ClassVar = threading.Lock()
    busy: ClassVar = 0

    @classmethod
    @contextmanager
    def at_most(cls, count: int) -> Iterator[int]:
        """Yield how many threads may be busy during a ``with`` block, at most `count`."""
        with cls.lock:
            taken = max(1, min(count, count_cpus() - cls.busy))
            cls.busy += taken
        try:
            yield taken
        finally:
            with cls.lock:
                cls.busy -= taken


def _for_each(chunks: range, work: Callable[[int], None]) -> None:
    """Call a function for the number of each Zarr chunk, in threads; raise the error of the first that has one."""
    waiting, errors = iter(chunks), dict[int, BaseException]()

    def take(_: int) -> None:
        for k in waiting:
            try:
                work(k)
            except BaseException as error:  # to the calling thread, whatever it is
                errors[k] = error
            if errors:
                return

    with _Threads.at_most(-(-len(chunks) // LEAST)) as count:
        run_in_threads(count, take)
    if errors:
        raise errors[min(errors)]
