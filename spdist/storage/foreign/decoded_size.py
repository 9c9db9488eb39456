"""Bounds on the bytes that a Zarr chunk from elsewhere decodes to, found without decoding it.

A few bytes of zstd or gzip can claim gigabytes. Headers, and a walk over zstd's blocks, show the size before memory is
allocated.
"""

from __future__ import annotations

import bz2
import functools
import importlib
import json
import math
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Read = Callable[[int, int], bytes]
"""Function that takes an offset and a number of bytes and returns these bytes of a stored Zarr chunk, or fewer."""

SLACK = 1 << 16
"""Bytes beyond the declared ones that are allowed: headers and checksums of codecs."""

HARMLESS = 64 << 20
"""Bytes that any Zarr chunk may decode to, whatever its array declares: every machine can hold them."""

LARGE = 256 << 20
"""Declared bytes above which a Zarr chunk must take more than a thousandth of them in storage: it is copied once."""

STEP = 1 << 20
"""Bytes that are decoded at a time to measure a stream."""

DEFLATE_RATIO = 1032
"""Bytes that a byte of a zlib or gzip stream decodes to, at most."""

ZSTD_BLOCK = 128 << 10
"""Bytes that a block of zstd decodes to, at most."""

STRINGS = "vlen-utf8"
"""Codec that writes strings: their number first, then the length of each before its bytes."""

SAME_SIZE = {
    "bytes", "transpose", "crc32c", "crc32", "adler32", "fletcher32", "jenkins_lookup3", "shuffle", "delta",
    "fixedscaleoffset", "astype", "quantize", "bitround", "packbits", STRINGS,
}  # fmt: skip
"""Codecs that change the number of bytes by less than `FILTER_RATIO`."""

CHECKSUM_PLACES = {
    "crc32c": "end", "fletcher32": "end", "crc32": "start", "adler32": "start", "jenkins_lookup3": "start",
}  # fmt: skip
"""Where codecs put their checksum by default."""

CHECKSUM_BYTES = 4
"""Bytes of such a checksum."""

FILTER_RATIO = 8
"""A codec in `SAME_SIZE` changes the number of bytes by this factor at most."""


class Codecs(NamedTuple):
    """The codecs of an array, as names with their configuration."""

    chain: tuple[tuple[str, dict[str, Any]], ...]
    chunk: int
    nbytes: int

    @property
    def packers(self) -> list[tuple[str, dict[str, Any]]]:
        """The codecs that compress."""
        return [codec for codec in self.chain if codec[0] not in SAME_SIZE]


@functools.lru_cache(maxsize=64)
def codecs_of(metadata: str, nbytes: int) -> Codecs:
    """Return the codecs in a metadata document of Zarr.

    `nbytes`: bytes that each Zarr chunk must decode to.
    """
    document = json.loads(metadata)
    if document["zarr_format"] == 2:
        listed = [*(document.get("filters") or []), *([document["compressor"]] if document.get("compressor") else [])]
        return Codecs(tuple((str(codec["id"]), codec) for codec in listed), math.prod(document["chunks"]), nbytes)
    shape = document["chunk_grid"]["configuration"]["chunk_shape"]
    return Codecs(_chain(document["codecs"]), math.prod(shape), nbytes)


def _chain(listed: list[Any]) -> tuple[tuple[str, dict[str, Any]], ...]:
    named: list[dict[str, Any]] = [{"name": codec} if isinstance(codec, str) else codec for codec in listed]
    return tuple((str(codec["name"]).removeprefix("numcodecs."), codec.get("configuration") or {}) for codec in named)


def check_decoded_size(read: Read, stored: int, codecs: Codecs) -> None:
    """Refuse a Zarr chunk that decodes to far more bytes than its array declares.

    Raises `ValueError` if it does, or might; says why.
    """
    declared, packers = codecs.nbytes, codecs.packers
    limit = declared * (FILTER_RATIO if len(codecs.chain) > len(packers) + 2 else 1) + SLACK
    if stored > 2 * limit:
        raise ValueError(f"it takes {stored:,} bytes and should decode to {declared:,}")
    if declared > LARGE and stored < declared // 1000:
        raise ValueError(f"it takes {stored:,} bytes and claims to decode to {declared:,}")
    if len(packers) > 1:
        raise ValueError(f"it is compressed by {packers[0][0]} and again by {packers[1][0]}, which has no bound")
    read, stored = _without_checksums(read, stored, codecs)
    for name, configuration in packers:
        if name == "sharding_indexed":
            _check_shard(read, stored, configuration, codecs)
        elif name in MEASURES:
            MEASURES[name](read, stored, limit)
        else:
            raise ValueError(f"it is compressed by {name}, whose decoded size has no bound: write it with zstd")
    if codecs.chain and codecs.chain[0][0] == STRINGS:
        _check_strings(read(0, stored), packers, codecs.chunk)


def _without_checksums(read: Read, stored: int, codecs: Codecs) -> tuple[Read, int]:
    """Return the compressed bytes without the checksums that later codecs put before or behind them."""
    names = [name for name, _ in codecs.chain]
    packed = [at for at, name in enumerate(names) if name not in SAME_SIZE]
    start = 0
    for name, configuration in codecs.chain[packed[0] + 1 :] if packed else ():
        if name not in CHECKSUM_PLACES:
            raise ValueError(f"it is compressed and then changed by {name}, which has no bound")
        stored -= CHECKSUM_BYTES
        start += CHECKSUM_BYTES if configuration.get("location", CHECKSUM_PLACES[name]) == "start" else 0
    if not start:
        return read, stored
    return lambda at, nbytes: read(start + at, nbytes), stored


def _check_strings(raw: bytes, packers: list[tuple[str, dict[str, Any]]], chunk: int) -> None:
    """Refuse a Zarr chunk that claims more strings than its array declares: their decoder makes room for all."""
    registry: Any = importlib.import_module("numcodecs.registry")
    try:
        for name, _ in packers:
            raw = bytes(registry.get_codec({"id": name}).decode(raw))
    except Exception as error:  # each codec raises its own
        raise ValueError(f"it is truncated or altered ({error})") from error
    if (claimed := int.from_bytes(raw[:4], "little")) > chunk:
        raise ValueError(f"it claims to hold {claimed:,} strings, and its array declares {chunk:,}")


def _refuse(size: int, limit: int) -> None:
    if size > max(limit, HARMLESS):
        raise ValueError(f"it decodes to {size:,} bytes or more, and its array declares {limit - SLACK:,}")


def _check_shard(read: Read, stored: int, configuration: dict[str, Any], codecs: Codecs) -> None:
    """Check each Zarr chunk in a shard, by the shard's index."""
    inner = math.prod(configuration["chunk_shape"])
    count = codecs.chunk // inner
    extra = {"bytes": 0, "crc32c": 4}
    names = [name for name, _ in _chain(configuration["index_codecs"])]
    if any(name not in extra for name in names):
        raise ValueError(f"the index of a shard is encoded by {' and '.join(names)}: write it with bytes and crc32c")
    length = 16 * count + sum(extra[name] for name in names)
    raw = read(0 if configuration.get("index_location") == "start" else max(stored - length, 0), length)
    if len(raw) < length:
        raise ValueError("the index of the shard is truncated")
    part = Codecs(_chain(configuration["codecs"]), inner, codecs.nbytes // max(count, 1))
    for start, nbytes in np.frombuffer(raw, "<u8", 2 * count).reshape(-1, 2).tolist():
        if start == nbytes == 2**64 - 1:  # not there: reads as the fill value
            continue
        if start + nbytes > stored:
            raise ValueError("the index of the shard points beyond its end")
        check_decoded_size(lambda at, n, start=start: read(start + at, n), nbytes, part)  # type: ignore[misc]


def _blosc(read: Read, stored: int, limit: int) -> None:
    head = read(0, 16)
    if len(head) < 16:
        raise ValueError("it is truncated")
    size, _, packed = struct.unpack_from("<III", head, 4)
    if packed > stored:  # Blosc would read beyond its end
        raise ValueError("it is truncated")
    _refuse(size, limit)


def _lz4(read: Read, stored: int, limit: int) -> None:
    head = read(0, 4)
    if len(head) < 4:
        raise ValueError("it is truncated")
    _refuse(struct.unpack("<I", head)[0], limit)


def _stream(start: Callable[[], Any], ratio: int, read: Read, stored: int, limit: int) -> None:
    """Decode a stream, or several one after the other, piece by piece, and drop the pieces."""
    if ratio and stored * ratio <= HARMLESS:
        return
    decoder, total, at, rest = start(), 0, 0, b""
    while rest or at < stored:
        if not rest:
            rest = read(at, STEP)
            at += len(rest)
            if not rest:
                return  # shorter than its length: the decoder will say so
        try:
            total += len(decoder.decompress(rest, STEP))
        except (zlib.error, OSError) as error:
            raise ValueError(str(error)) from error
        _refuse(total, limit)
        rest = decoder.unused_data if decoder.eof else getattr(decoder, "unconsumed_tail", b"")
        while not decoder.eof and not getattr(decoder, "needs_input", True):
            total += len(decoder.decompress(b"", STEP))
            _refuse(total, limit)
        if decoder.eof:
            rest, decoder = decoder.unused_data, start()


def _zstd(read: Read, stored: int, limit: int) -> None:
    """Add up what the blocks of all frames decode to at most."""
    at, most, claimed = 0, 0, 0
    while at < stored:
        at, frame, content = _zstd_frame(read, at)
        most, claimed = most + frame, claimed + (frame if content is None else content)
        _refuse(claimed, limit)
    if most > max(limit, HARMLESS):  # many short blocks: count what they really decode to
        from numcodecs.zstd import Zstd

        try:
            Zstd().decode(read(0, stored), out=np.empty(claimed, np.uint8))
        except RuntimeError as error:
            raise ValueError(str(error)) from error


def _zstd_frame(read: Read, at: int) -> tuple[int, int, int | None]:
    """Return the end of a frame, the most bytes that it decodes to, and the number of bytes that it claims."""
    head = read(at, 18).ljust(18, b"\0")
    magic, flags = struct.unpack_from("<IB", head)
    if magic & 0xFFFFFFF0 == 0x184D2A50:  # a frame to be skipped
        return at + 8 + struct.unpack_from("<I", head, 4)[0], 0, 0
    if magic != 0xFD2FB528:
        raise ValueError("it is no zstd frame")
    single, code = flags >> 5 & 1, flags >> 6
    skip = 5 + (1 - single) + (0, 1, 2, 4)[flags & 3]
    width = (single, 2, 4, 8)[code]
    content = int.from_bytes(head[skip : skip + width], "little") + 256 * (code == 1) if width else None
    at, most, is_last = at + skip + width, 0, False
    while not is_last:
        raw = read(at, 3)
        if len(raw) < 3:
            raise ValueError("it is truncated")
        word = int.from_bytes(raw, "little")
        is_last, kind, size = bool(word & 1), word >> 1 & 3, word >> 3
        most += ZSTD_BLOCK if kind == 2 else size
        at += 3 + (1 if kind == 1 else size)
    return at + 4 * (flags >> 2 & 1), most, content


MEASURES: dict[str, Callable[[Read, int, int], None]] = {
    "blosc": _blosc,
    "lz4": _lz4,
    "zstd": _zstd,
    "gzip": functools.partial(_stream, lambda: zlib.decompressobj(31), DEFLATE_RATIO),
    "zlib": functools.partial(_stream, zlib.decompressobj, DEFLATE_RATIO),
    "bz2": functools.partial(_stream, bz2.BZ2Decompressor, 0),
}
"""Functions that refuse a compressed Zarr chunk of too many bytes, by the name of the codec."""
