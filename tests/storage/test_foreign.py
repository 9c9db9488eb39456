"""Matrices from elsewhere: what their Zarr chunks decode to is bounded, and each is checked once."""

import bz2
import contextlib
import gzip
import json
import zlib
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from spdist.api import products as api
from spdist.errors import CorruptError, MatrixError
from spdist.storage.foreign import checked as remembered
from spdist.storage.foreign.decoded_size import HARMLESS, Codecs, check_decoded_size, codecs_of
from spdist.storage.matrix import StoredMatrix, open_matrix
from tests.conftest import random_matrix

CODECS = {
    "none": None,
    "zstd": ZstdCodec(level=3),
    "gzip": GzipCodec(level=5),
    "blosc": BloscCodec(cname="zstd", clevel=5, shuffle="shuffle", typesize=8),
}
OLD_CODECS = {
    "none": None,
    "zstd": numcodecs.Zstd(),
    "gzip": numcodecs.GZip(),
    "blosc": numcodecs.Blosc(),
    "zlib": numcodecs.Zlib(),
    "bz2": numcodecs.BZ2(),
    "lz4": numcodecs.LZ4(),
}


def write(url: Path, m: sp.csr_matrix, codec: str = "none", chunk: int = 64, zarr_format: int = 3, **options) -> Path:
    """Write a matrix as other programs do."""
    group = zarr.open_group(url, mode="w", zarr_format=zarr_format)
    known = CODECS if zarr_format == 3 else OLD_CODECS
    for name in ("data", "indices", "indptr"):
        array = group.create_array(
            name, shape=getattr(m, name).shape, dtype=getattr(m, name).dtype, chunks=(chunk,), compressors=known[codec],
            **options,
        )  # fmt: skip
        array[:] = getattr(m, name)
    group.attrs.put({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [int(n) for n in m.shape]})
    return url


def product(tmp_path: Path, scheduler: str, mask: Path) -> StoredMatrix:
    api.save(tmp_path / "A.zarr", random_matrix(60, 60, 5, 1))
    place = tmp_path / "A.zarr"
    api.multiply(place, place, tmp_path / "C.zarr", mask=mask, scheduler=scheduler, memory_limit="64MiB")
    return open_matrix(tmp_path / "C.zarr")


# -- checked once ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("column", "what"), [(10**9, "is outside"), (-1, "is outside"), (7, "holds a duplicate")])
@pytest.mark.parametrize("claim", [{}, {"spdist": {"canonical": True, "state": "complete"}}])
def test_masks_are_checked_whatever_they_say(tmp_path, scheduler, column, what, claim):
    mask = sp.csr_matrix((np.ones(2), np.array([7, column]), np.r_[np.zeros(30, int), np.full(31, 2)]), shape=(60, 60))
    url = write(tmp_path / "M.zarr", mask)
    zarr.open_group(url, mode="r+").attrs.update(claim)
    with pytest.raises(MatrixError, match=rf"M.zarr.*row 29.*{what}|M.zarr.*columns.*outside") as raised:
        product(tmp_path, scheduler, url)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "C.zarr").exists()


def test_rows_of_a_mask_are_checked_again_as_they_are_read(tmp_path, scheduler, monkeypatch):
    """Were it changed after the check, kernels would write outside of their rows."""
    mask = random_matrix(60, 60, 5, 2)
    mask.indices[-1] = 60_000
    url = write(tmp_path / "M.zarr", mask)
    monkeypatch.setattr(StoredMatrix, "check", lambda self: None)
    with pytest.raises(MatrixError, match=r"M.zarr: column 60,000 in row \d+ is outside"):
        product(tmp_path, scheduler, url)


def test_a_sound_matrix_is_checked_once(tmp_path, scheduler, monkeypatch):
    mask = random_matrix(60, 60, 5, 2)
    url = write(tmp_path / "M.zarr", mask)
    checks, check = [], StoredMatrix.check
    monkeypatch.setattr(StoredMatrix, "check", lambda self: (checks.append(self.url), check(self)))
    a = api.save(tmp_path / "A.zarr", random_matrix(60, 60, 5, 1))
    for _ in range(3):
        api.plan(a, a, mask=url, memory_limit="64MiB")
    assert len(checks) == 1
    mask.data[0] += 1
    write(url, mask)
    api.plan(a, a, mask=url, memory_limit="64MiB")
    assert len(checks) == 2


@pytest.mark.parametrize("place", ["file", "none"])
def test_without_a_cache_folder_it_is_checked_each_time(tmp_path, monkeypatch, place):
    url = write(tmp_path / "M.zarr", random_matrix(60, 60, 5, 2))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if place == "file" else "")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    checks = []
    monkeypatch.setattr(StoredMatrix, "check", lambda self: checks.append(self.url))
    for _ in range(2):
        assert remembered.checked(open_matrix(url)).is_known_canonical
    assert len(checks) == 2


def test_another_byte_order_is_another_matrix(tmp_path):
    """The bytes of the Zarr chunks are the same, and the metadata are not."""
    url = write(tmp_path / "M.zarr", sp.csr_matrix(np.array([[0, 1.0], [2.0, 0]])))
    assert remembered.checked(open_matrix(url)).is_known_canonical
    path = url / "indices" / "zarr.json"
    document = json.loads(path.read_text())
    document["codecs"][0]["configuration"]["endian"] = "big"
    path.write_text(json.dumps(document))
    with pytest.raises(MatrixError, match="outside"):
        remembered.checked(open_matrix(url))


# -- bombs -------------------------------------------------------------------------------------------------------------


def zstd_without_size(nbytes: int) -> bytes:
    """A frame that does not say its size, of blocks that repeat one byte."""
    head = b"\x28\xb5\x2f\xfd\x00\x50"  # magic; no size, no checksum; a window of 1 MiB
    blocks = nbytes >> 17
    block = lambda last: ((1 << 17) << 3 | 1 << 1 | last).to_bytes(3, "little") + b"\0"  # noqa: E731
    return head + block(0) * (blocks - 1) + block(1)


BOMB = bytes(2 * HARMLESS)
BOMBS = {
    "zstd": [
        numcodecs.Zstd().encode(BOMB),
        zstd_without_size(4 * HARMLESS),
        numcodecs.Zstd().encode(bytes(512)) * 10**6,
    ],
    "gzip": [gzip.compress(BOMB), gzip.compress(bytes(512)) + gzip.compress(BOMB)],
    "blosc": [numcodecs.Blosc().encode(BOMB)],
    "zlib": [zlib.compress(BOMB)],
    "bz2": [bz2.compress(BOMB), bz2.compress(b"x") + bz2.compress(BOMB)],
    "lz4": [numcodecs.LZ4().encode(BOMB)],
}


def test_a_bomb_that_declares_much_is_not_decoded():
    codecs = Codecs((("bytes", {}), ("zstd", {})), 40 << 20, 320 << 20)
    with pytest.raises(ValueError, match="it takes 30,000 bytes and claims to decode to 335,544,320"):
        check_decoded_size(lambda at, nbytes: bytes(nbytes), 30_000, codecs)


@pytest.mark.parametrize("name", ["zstd", "gzip", "blosc"])
def test_bombs_are_not_decoded(tmp_path, name):
    url = write(tmp_path / "M.zarr", random_matrix(60, 60, 5, 2), name)
    for bomb in BOMBS[name]:
        (url / "data/c/0").write_bytes(bomb)
        with pytest.raises(CorruptError, match=r"Zarr chunk 0 of array 'data' .* is not decoded: it"):
            open_matrix(url).rows(0, 60)


@pytest.mark.parametrize("name", ["zstd", "gzip", "blosc", "zlib", "bz2", "lz4"])
def test_bombs_in_the_older_format_are_not_decoded(tmp_path, name):
    url = write(tmp_path / "M.zarr", random_matrix(60, 60, 5, 2), name, zarr_format=2)
    for bomb in BOMBS[name]:
        (url / "data/0").write_bytes(bomb)
        with pytest.raises(CorruptError, match=r"Zarr chunk 0 of array 'data' .* is not decoded: it"):
            open_matrix(url).rows(0, 60)


def test_a_bomb_in_a_shard_is_not_decoded(tmp_path):
    url = write(tmp_path / "M.zarr", random_matrix(60, 60, 5, 2), "zstd", chunk=16, shards=(64,))
    bomb = numcodecs.Zstd().encode(BOMB)
    index = np.full((4, 2), 2**64 - 1, np.uint64)
    index[1] = 0, len(bomb)
    raw = index.astype("<u8").tobytes()
    (url / "data/c/0").write_bytes(bomb + raw + bytes(numcodecs.CRC32C().encode(raw))[-4:])
    with pytest.raises(CorruptError, match=r"Zarr chunk 0 of array 'data' .* is not decoded: it decodes to"):
        open_matrix(url).rows(0, 60)


def test_metadata_that_claim_much_of_little(tmp_path):
    m = sp.csr_matrix((np.ones(4), np.arange(4), np.arange(5)), shape=(4, 4))
    url = write(tmp_path / "M.zarr", m, "zstd")
    path = url / "data" / "zarr.json"
    document = json.loads(path.read_text())
    document["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 27]
    path.write_text(json.dumps(document))
    with pytest.raises(CorruptError, match=r"is not decoded: it takes \d+ bytes and claims to decode to"):
        open_matrix(url).rows(0, 4)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(OLD_CODECS)), count=st.integers(1, 300_000))
def test_honest_chunks_pass(data, name, count):
    """Whatever the codec, and however well the values compress; cut short they raise no other error."""
    rng = np.random.default_rng(count)
    values = rng.integers(0, data.draw(st.sampled_from([1, 3, 2**62])), count)
    codec = OLD_CODECS[name]
    raw = bytes(values.tobytes() if codec is None else codec.encode(values))
    listed = None if codec is None else codec.get_config()
    document = json.dumps({"zarr_format": 2, "chunks": [count], "filters": None, "compressor": listed})
    codecs = codecs_of(document, values.nbytes)
    check_decoded_size(lambda at, nbytes: raw[at : at + nbytes], len(raw), codecs)
    cut = raw[: data.draw(st.integers(0, len(raw)))]
    with contextlib.suppress(ValueError):
        check_decoded_size(lambda at, nbytes: cut[at : at + nbytes], len(cut), codecs)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shards", [None, (64,), {"shape": (64,), "index_location": "start"}])
@pytest.mark.parametrize("checked", [False, True])
def test_honest_matrices_read(tmp_path, name, shards, checked):
    m = random_matrix(60, 60, 5, 2)
    group = zarr.open_group(write(tmp_path / "M.zarr", m, name, chunk=16, shards=shards), mode="r+")
    if checked:
        codec = [CODECS[name]] if CODECS[name] else []
        del group["data"]
        array = group.create_array("data", shape=m.data.shape, dtype="f8", chunks=(16,), shards=shards,
                                   compressors=[*codec, Crc32cCodec()])  # fmt: skip
        array[:] = m.data
    assert abs(open_matrix(tmp_path / "M.zarr").rows(0, 60).to_scipy() - m).nnz == 0


def test_entries_of_another_index_type_are_converted(tmp_path):
    """More of them than are converted at a time."""
    m = random_matrix(60, 60, 5, 2)
    m.indices = m.indices.astype(np.int64)
    indices, data = open_matrix(write(tmp_path / "M.zarr", m, chunk=16)).entries(5, m.nnz)
    np.testing.assert_array_equal(indices, m.indices[5:])
    np.testing.assert_array_equal(data, m.data[5:])


def test_an_unknown_compression_is_refused(tmp_path):
    url = write(tmp_path / "M.zarr", random_matrix(60, 60, 5, 2), zarr_format=2)
    path = url / "data" / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"compressor": numcodecs.LZMA().get_config()}))
    with pytest.raises(CorruptError, match="compressed by lzma, whose decoded size has no bound"):
        open_matrix(url).rows(0, 60)


def test_a_bomb_on_a_remote_store_is_not_decoded(tmp_path):
    m = random_matrix(60, 60, 5, 2)
    url = "memory://foreign-test/M.zarr"
    group = zarr.open_group(url, mode="w")
    for name in ("data", "indices", "indptr"):
        group.create_array(name, data=getattr(m, name), chunks=(64,), compressors=CODECS["zstd"])
    group.attrs.put({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [60, 60]})
    buffer = zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(BOMBS["zstd"][0])
    zarr.core.sync.sync(group.store.set("data/c/0", buffer))
    with pytest.raises(CorruptError, match=r"Zarr chunk 0 of array 'data' .* is not decoded: it"):
        remembered.checked(open_matrix(url))
