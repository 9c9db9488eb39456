"""Storage: what is written reads back, AnnData reads it too, and no damaged chunk goes unseen."""

import errno
import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import anndata
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import default_buffer_prototype

from spdist.api import products as api
from spdist.errors import CorruptError, InputError, MatrixError
from spdist.matrices.csr import CSR, from_scipy
from spdist.matrices.dtypes import index_dtype
from spdist.storage import chunked_array, groups
from spdist.storage.chunked_array import new_array
from spdist.storage.direct.chunks import ChunkCodec
from spdist.storage.groups import ARRAYS
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.writer import ChunkBuffer, MatrixWriter
from spdist.stores.registry import at, normalise
from tests.conftest import random_matrix
from tests.support.seals import without_seal

pytestmark = pytest.mark.filterwarnings("ignore:zarr v3 autosharding", "ignore::anndata.OldFormatWarning")

DTYPES = ["?", "i1", "u1", "i4", "i8", "u8", "f4", "f8", "c8", "c16"]
PLACES = ["first", "middle", "last"]


def random_csr(nrows: int, ncols: int, nnz: int, dtype: str = "f8", seed: int = 0) -> CSR:
    """Distinct places in random order; a tenth of the values are explicit zeros."""
    rng = np.random.default_rng(seed)
    places = np.unique(rng.integers(0, max(nrows * ncols, 1), nnz if nrows and ncols else 0))
    rows, columns = np.divmod(places, max(ncols, 1))
    values = (rng.integers(0, 10, len(places)) * 1.1).astype(dtype)
    indptr = np.searchsorted(rows, np.arange(nrows + 1)).astype(np.int64)
    return CSR(indptr, columns.astype(index_dtype(ncols)), values, (nrows, ncols))


def write(url: str | Path, matrix: CSR, chunk: int = 64, blocks: int = 3) -> StoredMatrix:
    """Write with short Zarr chunks, in several blocks."""
    writer = MatrixWriter(url, matrix.ncols, matrix.dtype, {})
    writer.layout = replace(writer.layout, chunk=chunk)
    cuts = np.linspace(0, matrix.nrows, blocks + 1).astype(int).tolist()
    for start, stop in itertools.pairwise(cuts):
        writer.append(matrix.rows(start, stop))
    return writer.close()


def assert_same(got: CSR, want: CSR) -> None:
    assert got.shape == want.shape
    np.testing.assert_array_equal(got.indptr, want.indptr)
    np.testing.assert_array_equal(got.indices, want.indices)
    assert got.indices.dtype == index_dtype(want.ncols)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.data, want.data)


def chunk_file(matrix: StoredMatrix, name: str, k: int) -> Path:
    return Path(matrix.url) / getattr(matrix, name).key(k)


def position(stored: StoredMatrix, name: str, place: str) -> int:
    nchunks = getattr(stored, name).nchunks
    return {"first": 0, "middle": nchunks // 2, "last": nchunks - 1}[place]


@pytest.fixture
def stored(tmp_path) -> StoredMatrix:
    """At least three Zarr chunks in every array, the last one not full."""
    return write(tmp_path / "a.zarr", random_csr(200, 100, 1500))


# -- round trips -------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    nrows=st.integers(0, 60),
    ncols=st.sampled_from([0, 1, 50, (1 << 31) - 1, 1 << 31, 1 << 40]),
    nnz=st.integers(0, 400),
    dtype=st.sampled_from(DTYPES),
    blocks=st.integers(1, 5),
    chunk=st.sampled_from([1, 7, 64, 1 << 18]),
)
def test_reads_back_what_was_written(tmp_path_factory, nrows, ncols, nnz, dtype, blocks, chunk):
    matrix = random_csr(nrows, ncols, min(nnz, 20) if chunk == 1 else nnz, dtype)
    url = tmp_path_factory.mktemp("w") / "a.zarr"
    stored = write(url, matrix, chunk, blocks)
    assert_same(stored.rows(0, nrows), matrix)
    assert stored.nnz == matrix.nnz
    stored.check()
    stored.fingerprint()
    assert stored.is_known_canonical
    shutil.rmtree(url)


@pytest.mark.parametrize("dtype", DTYPES)
def test_anndata_reads_it(tmp_path, dtype):
    matrix = random_csr(40, 30, 300, dtype)
    write(tmp_path / "a.zarr", matrix)
    got = anndata.io.read_elem(zarr.open_group(tmp_path / "a.zarr", mode="r"))
    assert isinstance(got, sp.csr_matrix)
    assert got.dtype == np.dtype(dtype)
    assert got.indptr.dtype == np.int64
    np.testing.assert_array_equal(got.toarray(), matrix.to_scipy().toarray())


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_reads_what_anndata_wrote(tmp_path, zarr_format):
    matrix = random_csr(40, 30, 300)
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=zarr_format)
    anndata.io.write_elem(group, "/", matrix.to_scipy())
    stored = open_matrix(tmp_path / "a.zarr")
    assert not stored.is_known_canonical
    assert_same(stored.rows(0, 40), matrix)


def test_memory_store():
    matrix = random_csr(70, 50, 400)
    stored = write("memory://storage-test/a.zarr", matrix)
    assert_same(open_matrix("memory://storage-test/a.zarr").rows(0, 70), matrix)
    assert len(stored.fingerprint()) == 32
    at("memory://storage-test/a.zarr").remove()
    assert not at("memory://storage-test/a.zarr").exists()


def test_row_blocks_cover_every_row_once(stored):
    for entries in (1, 37, 10**6):
        rows = [row for start, stop, _ in stored.row_blocks(entries) for row in range(start, stop)]
        assert rows == list(range(stored.nrows))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_range_of_rows(tmp_path_factory, data):
    url = tmp_path_factory.getbasetemp() / "ranges.zarr"
    matrix = random_csr(200, 100, 1500)
    stored = open_matrix(url) if url.exists() else write(url, matrix)
    start = data.draw(st.integers(0, 200))
    stop = data.draw(st.integers(start, 200))
    assert_same(stored.rows(start, stop), matrix.rows(start, stop))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), chunk=st.sampled_from([1, 7, 64]))
def test_entries_are_decoded_where_they_belong(tmp_path_factory, data, dtype, chunk):
    """Whole Zarr chunks are read into given memory, next to held entries; memory around them is not written."""
    url = tmp_path_factory.getbasetemp() / f"into-{dtype.replace('?', 'bool')}-{chunk}.zarr"
    matrix = random_csr(50, 100, 700, dtype)
    stored = open_matrix(url) if url.exists() else write(url, matrix, chunk)
    first = data.draw(st.integers(0, matrix.nnz))
    last = data.draw(st.integers(first, matrix.nnz))
    given: list[np.ndarray] = []

    def allocate(count, dtype):
        given.append(np.full((count + 2) * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype))
        return given[-1][1:-1]

    row = data.draw(st.integers(0, 49))
    held = [(int(matrix.indptr[row]), matrix.rows(row, min(row + 9, 50)))]
    indices, values = stored.entries(first, last, held, allocate)
    np.testing.assert_array_equal(indices, matrix.indices[first:last])
    np.testing.assert_array_equal(values, matrix.data[first:last])
    for array, found in zip(given, (indices, values), strict=True):
        assert not len(found) or np.shares_memory(array, found)
        ends = array[[0, -1]].view(np.uint8)
        assert (ends == 0xA5).all()
    assert_same(stored.rows(row, 50, allocate), matrix.rows(row, 50))


def test_zarr_decodes_to_memory_that_is_given(stored, monkeypatch):
    monkeypatch.setattr(chunked_array.ChunkedArray, "_direct_codec", lambda *_: None)
    decoded, original = [], chunked_array._run
    monkeypatch.setattr(chunked_array, "_run", lambda *args: (decoded.append(original(*args)), decoded[-1])[1])
    rows = stored.rows(0, 200, np.empty)
    for array in (rows.indices, rows.data):
        assert sum(np.shares_memory(array, found) for found in decoded) == 1


def test_zarr_that_decodes_elsewhere_is_copied_from(stored, monkeypatch):
    monkeypatch.setattr(chunked_array.ChunkedArray, "_direct_codec", lambda *_: None)
    monkeypatch.setattr(chunked_array, "_into", lambda out: default_buffer_prototype())
    assert_same(stored.rows(0, 200, np.empty), random_csr(200, 100, 1500))


def test_ranges_of_rows_end_where_the_rows_do(stored):
    whole = stored.rows(0, 200).to_scipy()
    for start, stop in ((0, 500), (150, 201), (300, 400), (200, 200)):
        rows = stored.rows(start, stop).to_scipy()
        assert rows.shape == whole[start:stop].shape
        assert abs(rows - whole[start:stop]).nnz == 0
    for start, stop in ((-1, 50), (5, 3)):
        with pytest.raises(InputError, match="are no range of its 200 rows"):
            stored.rows(start, stop)


def test_rows_touch_only_their_chunks(stored):
    """With every other Zarr chunk deleted, the rows in the middle still read."""
    want = stored.rows(100, 103)
    first, last = stored.read_indptr(100, 103)[[0, -1]].tolist()
    needed = {"indptr": (100, 104), "indices": (first, last), "data": (first, last)}
    for name, (start, stop) in needed.items():
        array = getattr(stored, name)
        for k in set(range(array.nchunks)) - set(range(start // 64, -(-stop // 64))):
            chunk_file(stored, name, k).unlink()
    assert_same(open_matrix(stored.url).rows(100, 103), want)


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", ["raw", "compressed"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "flipped", "longer"])
def test_damage_names_array_and_chunk(tmp_path, damage, name, place, values):
    matrix = random_csr(200, 100, 1500)
    if values == "compressed":
        matrix = CSR(matrix.indptr, matrix.indices, np.ones(matrix.nnz), matrix.shape)
    stored = write(tmp_path / "a.zarr", matrix)
    k = position(stored, name, place)
    path = chunk_file(stored, name, k)
    raw = path.read_bytes()
    at = len(raw) // 2
    match damage:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(raw[:at])
        case "empty":
            path.write_bytes(b"")
        case "longer":
            path.write_bytes(raw + raw[-8:])
        case "flipped":
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
    for allocate in (None, np.empty):
        with pytest.raises(CorruptError, match=rf"chunk {k} of array '{name}'"):
            stored.rows(0, stored.nrows, allocate)


@pytest.mark.parametrize("allocate", [None, np.empty])
def test_an_error_of_the_system_that_passes_ends_no_read(tmp_path, allocate, monkeypatch):
    matrix = random_csr(200, 100, 1500)
    stored = write(tmp_path / "a.zarr", matrix)
    failures = iter([OSError(errno.EIO, "Input/output error")])
    read_into = ChunkCodec.read_into

    def read_or_fail(self, descriptor, size, out):
        for failure in failures:
            raise failure
        return read_into(self, descriptor, size, out)

    monkeypatch.setattr(ChunkCodec, "read_into", read_or_fail)
    assert_same(stored.rows(0, 200, allocate), matrix)
    assert next(failures, None) is None
    failures = itertools.repeat(OSError(errno.EIO, "Input/output error"))
    with pytest.raises(CorruptError, match=r"Zarr chunk \d+ of array .* cannot be read \(Input/output error\)"):
        stored.rows(0, 200, allocate)


@pytest.mark.parametrize("allocate", [None, np.empty])
def test_an_error_of_zarrs_that_passes_ends_no_read(tmp_path, allocate, monkeypatch):
    matrix = random_csr(200, 100, 1500)
    stored = write(tmp_path / "a.zarr", matrix)
    failures = iter([RuntimeError("Input/output error (os error 5)")])
    run = chunked_array._run
    monkeypatch.setattr(chunked_array.ChunkedArray, "_direct_codec", lambda *_: None)

    def run_or_fail(url, coroutine):
        for failure in failures:
            coroutine.close()
            raise failure
        return run(url, coroutine)

    monkeypatch.setattr(chunked_array, "_run", run_or_fail)
    assert_same(stored.rows(0, 200, allocate), matrix)
    assert next(failures, None) is None


def test_what_zarrs_says_of_the_system_is_an_error_of_the_system(tmp_path):
    async def fail():
        raise RuntimeError("Input/output error (os error 5)")

    with pytest.raises(OSError, match="Input/output error") as caught:
        chunked_array._run(str(tmp_path), fail())
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("allocate", [None, np.empty])
def test_chunks_of_zeros_are_there(tmp_path, allocate):
    """A Zarr chunk of zeros does not count as missing, nor does one whose only value is near its end."""
    matrix = random_csr(200, 100, 1500)
    values = np.zeros(matrix.nnz)
    values[5 * 256 - 1] = 1.0
    matrix = CSR(matrix.indptr, matrix.indices, values, matrix.shape)
    stored = write(tmp_path / "a.zarr", matrix, 256)
    assert_same(stored.rows(0, 200, allocate), matrix)
    chunk_file(stored, "data", 1).unlink()
    with pytest.raises(CorruptError, match="chunk 1 of array 'data'"):
        stored.rows(0, 200, allocate)


def test_reads_past_the_end_name_the_chunk_that_is_not_there(stored):
    end = stored.nnz
    last = stored.data.nchunks
    for first, stop in ((end - 5, 64 * last + 1), (64 * last, 64 * last + 7)):
        with pytest.raises(CorruptError, match=f"chunk {last} of array 'data'"):
            stored.data.read(first, stop)


@pytest.mark.parametrize("fill", [1.0, np.nan])
def test_missing_chunk_of_another_fill_value(stored, fill):
    """Arrays from elsewhere may read as something else where a Zarr chunk is missing."""
    without_seal(stored.url)
    path = Path(stored.url) / "data" / "zarr.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"fill_value": "NaN" if np.isnan(fill) else fill}))
    stored = open_matrix(stored.url)
    chunk_file(stored, "data", 1).unlink()
    with pytest.raises(CorruptError, match="chunk 1 of array 'data'"):
        stored.rows(0, 200)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_flipped_bit_is_seen(tmp_path_factory, data):
    """Anywhere in any chunk, the padding of the last one and the checksums included."""
    url = tmp_path_factory.getbasetemp() / "flips.zarr"
    stored = open_matrix(url) if url.exists() else write(url, random_csr(200, 100, 1500))
    name = data.draw(st.sampled_from(ARRAYS))
    k = data.draw(st.integers(0, getattr(stored, name).nchunks - 1))
    path = chunk_file(stored, name, k)
    raw = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    flipped = bytearray(raw)
    flipped[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(flipped))
    try:
        with pytest.raises(CorruptError, match=rf"chunk {k} of array '{name}'"):
            stored.rows(0, stored.nrows)
    finally:
        path.write_bytes(raw)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ARRAYS)
def test_fingerprint_finds_missing_and_changed_chunks(stored, name, place):
    before = stored.fingerprint()
    assert before == open_matrix(stored.url).fingerprint()
    k = position(stored, name, place)
    path = chunk_file(stored, name, k)
    raw = path.read_bytes()
    path.write_bytes(raw[:-4] + bytes(4))
    with pytest.raises(CorruptError, match=rf"chunk {k} of array '{name}'.*is not the one that was written"):
        stored.fingerprint()
    without_seal(stored.url)
    assert open_matrix(stored.url).fingerprint() != before
    path.unlink()
    with pytest.raises(CorruptError, match=rf"chunk {k} of array '{name}'"):
        stored.fingerprint()


@pytest.mark.parametrize("name", ARRAYS)
def test_missing_chunk_in_memory_store(name):
    url = "memory://storage-test/gone.zarr"
    stored = write(url, random_csr(200, 100, 1500))
    at(url).delete(getattr(stored, name).key(1))
    with pytest.raises(CorruptError, match=rf"chunk 1 of array '{name}'"):
        stored.fingerprint()
    at(url).remove()


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_unfinished_is_no_matrix(tmp_path):
    writer = MatrixWriter(tmp_path / "a.zarr", 100, np.dtype("f8"), {})
    writer.append(random_csr(200, 100, 1500))
    with pytest.raises(MatrixError, match="unfinished"):
        open_matrix(tmp_path / "a.zarr")
    assert sp.issparse(anndata.io.read_elem(zarr.open_group(tmp_path / "a.zarr", mode="r"))) is False


def test_what_may_not_be_read_is_named_with_what_to_do(stored, monkeypatch):
    """Root reads everything, so the refusals are made up: Python's, and zarrs', which is a RuntimeError."""

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    def denied_by_zarrs(_url, coroutine):
        coroutine.close()
        raise RuntimeError("failed to read: Permission denied (os error 13)")

    other = f"{stored.url}-of-others"
    shutil.copytree(stored.url, other)
    without_seal(other)
    foreign = open_matrix(other)
    attempts = [
        (os, "open", denied, stored.fingerprint),
        (os, "open", denied, lambda: stored.rows(0, 10)),
        (chunked_array, "_run", denied_by_zarrs, lambda: foreign.rows(0, 10)),
        (os, "open", denied, lambda: open_matrix(stored.url)),
        (os, "open", denied, lambda: groups.read_facts(stored.url)),
        (zarr, "open_group", denied, lambda: open_matrix(other)),
        (zarr.Group, "get", denied, lambda: open_matrix(other)),
    ]
    for where, name, refuse, attempt in attempts:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, refuse)
            with pytest.raises(MatrixError, match=r"may not be read.*ask its owner"):
                attempt()


def test_not_a_matrix(tmp_path):
    with pytest.raises(MatrixError, match="no such matrix"):
        open_matrix(tmp_path / "none.zarr")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MatrixError, match="not a Zarr group"):
        open_matrix(tmp_path / "empty")
    (tmp_path / "file").write_text("text")
    with pytest.raises(MatrixError, match="not a Zarr group"):
        open_matrix(tmp_path / "file")
    zarr.create_group(tmp_path / "group")
    with pytest.raises(MatrixError, match="not a sparse matrix"):
        open_matrix(tmp_path / "group")
    matrix = random_csr(9, 9, 20).to_scipy()
    anndata.io.write_elem(zarr.open_group(tmp_path / "csc.zarr", mode="w"), "/", matrix.tocsc())
    with pytest.raises(MatrixError, match="stored by columns"):
        open_matrix(tmp_path / "csc.zarr")
    assert normalise(f"local://{tmp_path}/x/") == str(tmp_path / "x")
    with pytest.raises(InputError, match="no file system"):
        at("nosuchprotocol://a").zarr_store()


@pytest.mark.parametrize("dtype", ["f2", "M8[s]", "V4"])
def test_unsupported_dtypes(tmp_path, dtype):
    with pytest.raises(MatrixError, match="cannot be multiplied"):
        MatrixWriter(tmp_path / "a.zarr", 3, np.dtype(dtype), {})


@pytest.mark.parametrize(
    ("indices", "what"), [([2, 1, 0], "is not sorted"), ([0, 1, 1], "holds a duplicate"), ([0, 1, 9], "is outside")]
)
def test_check_names_the_row(tmp_path, indices, what):
    bad = sp.csr_matrix((np.ones(3), np.array(indices, np.int32), np.array([0, 0, 3, 3])), shape=(3, 10))
    if what == "is outside":
        bad._shape = (3, 9)
    anndata.io.write_elem(zarr.open_group(tmp_path / "a.zarr", mode="w"), "/", bad)
    with pytest.raises(MatrixError, match=rf"row 1.*{what}"):
        open_matrix(tmp_path / "a.zarr").check()


def test_chunk_buffer_holds_less_than_a_chunk(tmp_path):
    url = str(tmp_path / "a.zarr")
    groups.begin(url, {})
    buffer = ChunkBuffer(new_array(url, "x", np.dtype("i8"), 10, compressed=False))
    for value in range(25):
        buffer.append(np.array([value]))
        assert sum(map(len, buffer.parts)) < 10
    buffer.close()
    assert buffer.position == 25


def test_from_scipy_is_what_is_written(tmp_path):
    matrix = from_scipy(sp.random(30, 20, 0.2, "coo", random_state=np.random.default_rng(0)))
    assert_same(write(tmp_path / "a.zarr", matrix).rows(0, 30), matrix)


def test_blocks_of_rows_have_as_many_entries_as_a_zarr_chunk(tmp_path, monkeypatch):
    """Which would be decoded again for each that is smaller."""
    monkeypatch.setattr("spdist.storage.writer.chunk_of", lambda dtype: 64)
    a = api.save(tmp_path / "A.zarr", random_matrix(300, 50, 4, 1))
    lengths = [int(offsets[-1] - offsets[0]) for _, stop, offsets in a.row_blocks(1) if stop % 64 and stop < 300]
    assert lengths
    assert min(lengths) > 64 - 50
