"""Zarr chunks of spdist's own matrices: numbers, or what Blosc makes of them, and a crc32c behind them."""

from __future__ import annotations

import functools
import json
import math
import os
from typing import Any, NamedTuple

import crc32c
import numpy as np
import numpy.typing as npt

from spdist.matrices.dtypes import ValueArray

CHECKSUM_BYTES = 4
COMPRESSOR, LEVEL = "lz4", 5
"""Blosc's, with byte shuffle: of what spdist writes."""
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
BYTES = {"name": "bytes"}
"""How Zarr writes numbers of one byte."""
CRC32C = {"name": "crc32c"}
KEYS = {"name": "default", "configuration": {"separator": "/"}}


class ChunkCodec(NamedTuple):
    """How the Zarr chunks of an array are encoded."""

    dtype: np.dtype[Any]  # of the numbers
    shape: tuple[int, ...]  # of a chunk
    packed: bool  # whether Blosc compresses it

    @property
    def nbytes(self) -> int:
        """Bytes of a decoded Zarr chunk."""
        return math.prod(self.shape) * self.dtype.itemsize

    def decode_into(self, raw: bytes | bytearray, out: ValueArray) -> None:
        """Decode the bytes of a Zarr chunk.

        `out`: (n,) array of `dtype`: gets the numbers; contiguous.
        Raises `ValueError` if the bytes are truncated or altered; says how.
        """
        stored = np.frombuffer(raw, np.uint8)
        body = stored[:-CHECKSUM_BYTES]
        _check(body, stored[-CHECKSUM_BYTES:].tobytes())
        if not self.packed:
            if len(body) != out.nbytes:
                raise ValueError(f"it has {len(body):,} bytes, not {out.nbytes:,}")
            out.view(np.uint8)[:] = body
            return
        from numcodecs.blosc import decompress

        if (size := int.from_bytes(body[4:8].tobytes(), "little")) != out.nbytes:  # in Blosc's header
            raise ValueError(f"it decodes to {size:,} bytes, not {out.nbytes:,}")
        decompress(body, out)

    def read_into(self, descriptor: int, size: int, out: ValueArray) -> int:
        """Decode the Zarr chunk in a file, without a copy if it is not packed; return its checksum.

        `descriptor, size`: an open file, and its bytes.
        `out`: as of `decode_into`; for errors see there.
        """
        if self.packed:
            raw = bytearray(size)
            _read_all(descriptor, [memoryview(raw)])
            self.decode_into(raw, out)
            return int.from_bytes(raw[-CHECKSUM_BYTES:], "little")
        if size != out.nbytes + CHECKSUM_BYTES:
            raise ValueError(f"it has {size:,} bytes, not {out.nbytes + CHECKSUM_BYTES:,}")
        body, end = out.view(np.uint8), bytearray(CHECKSUM_BYTES)
        _read_all(descriptor, [memoryview(body.data), memoryview(end)])
        return _check(body, end)

    def encode(self, values: ValueArray) -> npt.NDArray[np.uint8]:
        """Return the bytes of a Zarr chunk, the same that Zarr's codecs make."""
        return np.concatenate(self.encoded_parts(values))

    def encoded_parts(self, values: ValueArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Return the bytes of a Zarr chunk up to its checksum, and the checksum; without a copy if it is not packed."""
        numbers = np.ascontiguousarray(values, self.dtype.newbyteorder("<")).reshape(-1)
        body = numbers.view(np.uint8)
        if self.packed:
            from numcodecs.blosc import SHUFFLE, compress

            packed = compress(numbers, COMPRESSOR.encode(), LEVEL, SHUFFLE, 0, self.dtype.itemsize)
            body = np.frombuffer(packed, np.uint8)
        checksum = crc32c.crc32c(body.data)
        return body, np.frombuffer(checksum.to_bytes(CHECKSUM_BYTES, "little"), np.uint8)


def _read_all(descriptor: int, parts: list[memoryview]) -> None:
    """Fill all parts from a file, one after the other; raise ValueError if it ends before."""
    while parts:
        if not (count := os.readv(descriptor, parts)):
            raise ValueError("it became shorter while it was read")
        drop_moved(parts, count)


def drop_moved(parts: list[memoryview], count: int) -> None:
    """Drop the first `count` bytes of all parts, which the system has read or written."""
    while parts and count >= len(parts[0]):
        count -= len(parts.pop(0))
    if parts:
        parts[0] = parts[0][count:]


def _check(body: npt.NDArray[np.uint8], end: bytes | bytearray) -> int:
    """Return the checksum at the end of a Zarr chunk; raise ValueError if the bytes before it have another."""
    if len(end) < CHECKSUM_BYTES or crc32c.crc32c(body.data) != (checksum := int.from_bytes(end, "little")):
        raise ValueError("its checksum is not that of its bytes")
    return checksum


def array_document(dtype: np.dtype[Any], shape: tuple[int, ...], chunk: int, *, packed: bool) -> dict[str, Any]:
    """Return Zarr's metadata of an array.

    `chunk`: elements of a Zarr chunk; a block is one element.
    `packed`: whether Blosc compresses Zarr chunks.
    """
    zero: Any = [0.0, 0.0] if dtype.kind == "c" else dtype.type(0).item()
    options = {"typesize": dtype.itemsize, "cname": COMPRESSOR, "clevel": LEVEL, "shuffle": "shuffle", "blocksize": 0}
    blosc = [{"name": "blosc", "configuration": options}] if packed else []
    return {
        "shape": list(shape),
        "data_type": str(dtype.newbyteorder("=")),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk, *shape[1:]]}},
        "chunk_key_encoding": KEYS,
        "fill_value": zero,
        "codecs": [BYTES if dtype.itemsize == 1 else LITTLE, *blosc, CRC32C],
        "attributes": {},
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def group_document(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return Zarr's metadata of a group with these attributes."""
    return {"attributes": attributes, "zarr_format": 3, "node_type": "group"}


@functools.lru_cache(maxsize=64)
def codec_of(metadata: str) -> ChunkCodec | None:
    """Return how the Zarr chunks of an array are encoded; None if they are to be left to Zarr.

    `metadata`: Zarr's document of the array, as JSON.

    Examples
    --------
    >>> codec_of('{"zarr_format": 2}') is None
    True
    """
    document = json.loads(metadata)
    try:
        names = document["node_type"], document["chunk_grid"]["name"], document["chunk_key_encoding"]
        if names != ("array", "regular", KEYS):
            return None
        dtype = np.dtype(str(document["data_type"])).newbyteorder("<")
        first, *packers, last = document["codecs"]
        shape = tuple(map(int, document["chunk_grid"]["configuration"]["chunk_shape"]))
    except (KeyError, TypeError, ValueError):
        return None
    plain = first in ([BYTES, LITTLE] if dtype.itemsize == 1 else [LITTLE]) and dtype.kind in "biufc"
    packed = [codec["name"] for codec in packers]
    if not plain or last != CRC32C or packed not in ([], ["blosc"]) or document.get("storage_transformers"):
        return None
    return ChunkCodec(dtype.newbyteorder("="), shape, bool(packed))
