"""Zarr chunks that obstore moves: Zarr reads what is written and the other way round, damage is found."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import zarr
from obstore.store import MemoryStore
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ZstdCodec
from zarr.storage import ObjectStore

from spdist.storage.direct import object_chunks
from spdist.storage.direct.chunks import codec_of
from spdist.storage.direct.object_chunks import ObjectChunks
from spdist.stores import service

CHUNK, COUNT = 1000, 5
BLOSC = BloscCodec(cname="lz4", clevel=5, shuffle="shuffle", typesize=8)
CODECS = (BLOSC, Crc32cCodec())


def new_array(dtype="f8", inner=(), compressors=CODECS, **kwargs) -> zarr.Array:
    return zarr.create_array(
        ObjectStore(MemoryStore()), name="data", shape=(CHUNK * COUNT, *inner), chunks=(CHUNK, *inner), dtype=dtype,
        compressors=compressors and list(compressors), fill_value=0, config={"write_empty_chunks": True}, **kwargs,
    )  # fmt: skip


def of_array(array: zarr.Array) -> ObjectChunks | None:
    codec = codec_of(json.dumps(array.metadata.to_dict()))
    return codec and ObjectChunks(array.store_path.store.store, codec)


def keys(inner=()) -> list[str]:
    return [f"data/c/{k}" + "/0" * len(inner) for k in range(COUNT)]


@pytest.mark.parametrize("dtype", ["f8", "i4", "bool", "c16"])
@pytest.mark.parametrize("inner", [(), (3, 2)])
@pytest.mark.parametrize("compressors", [(BLOSC, Crc32cCodec()), (Crc32cCodec(),)])
def test_zarr_reads_what_is_written_and_the_other_way_round(dtype, inner, compressors):
    values = np.random.default_rng(1).integers(0, 2, (CHUNK * COUNT, *inner)).astype(dtype)
    array = new_array(dtype, inner, compressors)
    chunks = of_array(array)
    chunks.write(keys(inner), values.reshape(COUNT, -1))
    np.testing.assert_array_equal(array[:], values)
    array[:] = values[::-1]
    np.testing.assert_array_equal(chunks.read(keys(inner)), values[::-1])
    out = np.empty((2 * CHUNK, *inner), dtype)
    assert chunks.read(keys(inner)[1:3], out) is out
    np.testing.assert_array_equal(out, values[::-1][CHUNK : 3 * CHUNK])


@pytest.mark.parametrize(
    "arguments",
    [
        {"compressors": [ZstdCodec(), Crc32cCodec()]},
        {"compressors": [BLOSC]},
        {"dtype": ">f8", "serializer": BytesCodec(endian="big")},
        {"zarr_format": 2, "compressors": None},
        {"shards": (CHUNK * COUNT,)},
    ],
)
def test_other_codecs_are_left_to_zarr(arguments):
    assert of_array(new_array(**arguments)) is None


def test_damage_is_found():
    array = new_array()
    chunks, store = of_array(array), array.store_path.store.store
    array[:] = np.arange(CHUNK * COUNT)
    whole = bytes(service.get(store, "data/c/2"))
    for damaged in (whole[:-1], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], b"", b"abc"):
        service.put(store, "data/c/2", damaged)
        with pytest.raises(ValueError, match="checksum"):
            chunks.read(keys())
    store.delete("data/c/2")
    with pytest.raises(FileNotFoundError):
        chunks.read(keys())


@pytest.mark.parametrize("compressors", [(BLOSC, Crc32cCodec()), (Crc32cCodec(),)])
def test_whole_chunks_of_another_length_are_found(compressors):
    chunks, half = (of_array(new_array(dtype, (), compressors)) for dtype in ("f8", "f4"))
    half.write(["data/c/0"], np.ones((1, CHUNK), "f4"))
    service.put(chunks.store, "data/c/0", bytes(service.get(half.store, "data/c/0")))
    with pytest.raises(ValueError, match="bytes, not"):
        chunks.read(["data/c/0"])


def test_bytes_at_once_are_bounded(monkeypatch):
    lock, held, most = threading.Lock(), [0], [0]
    too_many = threading.Event()

    def get(store, key):
        with lock:
            held[0] += 1
            most[0] = max(most[0], held[0])
            if held[0] > 3:
                too_many.set()
        too_many.wait(0.2)
        with lock:
            held[0] -= 1
        return stored

    array = new_array()
    chunks, values = of_array(array), np.arange(CHUNK, dtype="f8")
    chunks.write(["data/c/0"], values[None])
    stored = bytes(service.get(chunks.store, "data/c/0"))
    monkeypatch.setattr(object_chunks, "_room", object_chunks._Room(3 * chunks.codec.nbytes + 1))
    monkeypatch.setattr(service, "get", get)
    np.testing.assert_array_equal(chunks.read(["data/c/0"] * 6), np.tile(values, 6))
    assert most[0] == 3
