"""Zarr chunks and metadata that spdist reads and writes without Zarr are those of Zarr."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from spdist.errors import CorruptError
from spdist.matrices.dtypes import block_dtype
from spdist.storage import chunked_array, groups
from spdist.storage.chunked_array import new_array
from spdist.storage.direct.chunks import array_document, codec_of
from spdist.storage.matrix import open_matrix
from tests.conftest import random_matrix

F8 = np.dtype(np.float64)
DTYPES = ["bool", "int8", "uint16", "int32", "int64", "uint64", "float32", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_metadata_are_those_of_zarr(dtype, packed):
    number = np.dtype(dtype)
    compressors = [BloscCodec(cname="lz4", clevel=5, shuffle="shuffle", typesize=number.itemsize)] if packed else []
    made = zarr.create_array(
        {}, shape=(100, 2, 3), dtype=number, chunks=(8, 2, 3), compressors=[*compressors, Crc32cCodec()],
        fill_value=0, zarr_format=3,
    )  # fmt: skip
    document = array_document(number, (100, 2, 3), 8, packed=packed)
    assert json.dumps(document) == json.dumps(made.metadata.to_dict())
    assert codec_of(json.dumps(document)) == (number, (8, 2, 3), packed)


def leave_to_zarr(monkeypatch):
    """Let Zarr read and write what spdist would."""
    monkeypatch.setattr(chunked_array.ChunkedArray, "_direct_codec", lambda *_: None)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_are_those_of_zarr(tmp_path, monkeypatch, dtype, packed):
    """Bytes on disk, also of a chunk that is not full, and what is read of them."""
    values = (np.arange(1000) // 7 % 90 + 1).astype(dtype)
    files = []
    for name in ("ours", "theirs"):
        if name == "theirs":
            leave_to_zarr(monkeypatch)
        array = new_array(str(tmp_path), name, np.dtype(dtype), 600, compressed=packed)
        array.write_chunks(0, values)
        files.append([(tmp_path / name / "c" / str(k)).read_bytes() for k in range(2)])
    assert files[0] == files[1]
    codec = codec_of(array.metadata)
    found = np.ones(1200, dtype)
    for k in range(2):
        codec.decode_into(files[0][k], found[600 * k : 600 * (k + 1)])
    np.testing.assert_array_equal(found[:1000], values)
    assert not found[1000:].any()


@pytest.mark.parametrize("packed", [True, False])
def test_damaged_chunks(packed):
    codec = codec_of(json.dumps(array_document(np.dtype(np.float64), (8,), 8, packed=packed)))
    raw = codec.encode(np.arange(8.0)).tobytes()
    shorter = codec._replace(shape=(7,)).encode(np.arange(7.0)).tobytes()
    for wrong, why in ((raw[:-1], "checksum"), (bytes([raw[0] ^ 1]) + raw[1:], "checksum"), (b"", "checksum")):
        with pytest.raises(ValueError, match=why):
            codec.decode_into(wrong, np.empty(8))
    with pytest.raises(ValueError, match=r"56 bytes, not 64"):
        codec.decode_into(shorter, np.empty(8))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("codecs", [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "crc32c"}]),
        ("codecs", [{"name": "bytes", "configuration": {"endian": "little"}}]),
        ("codecs", [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd"}, {"name": "crc32c"}]),
        ("chunk_key_encoding", {"name": "v2", "configuration": {"separator": "."}}),
        ("storage_transformers", [{"name": "other"}]),
        ("data_type", "string"),
        ("chunk_grid", {"name": "rectangular"}),
    ],
)
def test_what_is_left_to_zarr(key, value):
    document = array_document(np.dtype(np.float64), (8,), 8, packed=False)
    assert codec_of(json.dumps(document)) is not None
    assert codec_of(json.dumps(document | {key: value})) is None


@pytest.mark.parametrize("kind", [F8, block_dtype(F8, (2, 3))], ids=["numbers", "blocks"])
def test_a_group_is_the_same_with_and_without_zarr(tmp_path, monkeypatch, kind):
    values, written = np.zeros(300, kind), []
    values.view(np.float64)[:] = np.arange(values.nbytes // 8)
    for name in ("ours", "theirs"):
        if name == "theirs":
            leave_to_zarr(monkeypatch)
        folder = tmp_path / name
        groups.begin(str(folder), {})
        array = new_array(str(folder), "data", kind, 100, compressed=True)
        array.write_chunks(0, values)
        groups.finish_group(str(folder), [(array, 300)], {"spdist": {"state": "complete"}})
        written.append({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()})
    assert written[0] == written[1]
    found = zarr.open_group(tmp_path / "ours", mode="r")
    assert found.attrs["spdist"]["state"] == "complete"
    np.testing.assert_array_equal(found["data"][:].ravel(), values.view(np.float64))


def test_a_damaged_chunk_is_named(stored):
    """Its last bytes, which the table of checksums knows, are as before."""
    m = random_matrix(50, 50, 3, 1)
    a = stored("A", m)
    np.testing.assert_array_equal(a.rows(10, 40).data, m[10:40].data)
    path = Path(a.url) / "indices/c/0"
    raw = path.read_bytes()
    path.write_bytes(raw[:30] + bytes([raw[30] ^ 1]) + raw[31:])
    with pytest.raises(CorruptError, match=r"Zarr chunk 0 of array 'indices' .* truncated or altered"):
        open_matrix(a.url).rows(0, 50)


def test_threads_that_open_arrays_leave_zarrs_settings_as_they_were():
    before = zarr.config.get("codec_pipeline.path")
    inside, left = threading.Event(), threading.Event()

    def open_meanwhile():
        with chunked_array._codec_pipeline("one.Pipeline"):
            inside.set()
            left.wait(30)

    thread = threading.Thread(target=open_meanwhile)
    with chunked_array._codec_pipeline("another.Pipeline"):
        thread.start()
        inside.wait(0.2)  # without the lock it is inside now, and leaves last
    left.set()
    thread.join()
    assert zarr.config.get("codec_pipeline.path") == before
