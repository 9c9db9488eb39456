"""The seal: whatever is done to the files of a matrix, a product is right or one line names what is wrong."""

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import anndata
import numpy as np
import pytest
import scipy.sparse as sp
import zarr

from spdist.api import products as api
from spdist.errors import CorruptError, MatrixError, SpdistError
from spdist.matrices.csr import from_scipy
from spdist.storage import checksums, groups
from spdist.storage.checksums import Checksums
from spdist.storage.groups import ARRAYS
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.writer import Layout, MatrixWriter, finish_matrix
from spdist.stores.names import BATCH
from spdist.stores.registry import at
from tests.conftest import random_matrix

pytestmark = pytest.mark.filterwarnings("ignore:zarr v3 autosharding", "ignore::anndata.OldFormatWarning")


def write(url: Path, m: sp.csr_matrix, chunk: int = 64) -> StoredMatrix:
    """Write with short Zarr chunks, so that each array has several."""
    writer = MatrixWriter(url, m.shape[1], m.dtype, {})
    writer.layout = replace(writer.layout, chunk=chunk)
    writer.append(from_scipy(m))
    return writer.close()


def edit(path: Path, change) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.fixture
def matrix(tmp_path) -> StoredMatrix:
    return write(tmp_path / "a.zarr", random_matrix(200, 150, 6, 1))


def flip(path: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(raw))


def truncate(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def swap(path: Path, rng: random.Random) -> None:
    """With any other file of the matrix's Zarr chunks."""
    root = next(parent for parent in path.parents if parent.suffix == ".zarr")
    other = rng.choice([p for p in sorted(root.rglob("c/*")) if p.is_file() and p != path])
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def block(path: Path, rng: random.Random) -> None:
    """Replace the file by a folder, or by a FIFO that nobody writes to."""
    path.unlink()
    path.mkdir() if rng.random() < 0.5 else os.mkfifo(path)


@pytest.mark.parametrize("attack", [flip, truncate, swap, block, lambda path, rng: path.unlink()])
@pytest.mark.parametrize("victim", ["A", "B", "M"])
def test_a_product_of_attacked_matrices_is_right_or_refused(tmp_path, scheduler, victim, attack):
    a, b, m = (random_matrix(120, 120, 5, seed) for seed in (1, 2, 3))
    for name, values in (("A", a), ("B", b), ("M", m)):
        write(tmp_path / f"{name}.zarr", values)
    keywords = {"mask": tmp_path / "M.zarr", "scheduler": scheduler, "memory_limit": "64MiB"}
    api.multiply(tmp_path / "A.zarr", tmp_path / "B.zarr", tmp_path / "C.zarr", **keywords)
    want = open_matrix(tmp_path / "C.zarr").rows(0, 120).to_scipy()
    rng = random.Random(f"{victim} {attack.__name__}")
    shutil.copytree(tmp_path / f"{victim}.zarr", tmp_path / "sound")
    files = sorted(p.relative_to(tmp_path / "sound") for p in (tmp_path / "sound").rglob("*") if p.is_file())
    refused = 0
    for n in range(6):
        path = tmp_path / f"{victim}.zarr" / rng.choice(files)
        attack(path, rng)
        target = tmp_path / f"C{n}.zarr"
        try:
            api.multiply(tmp_path / "A.zarr", tmp_path / "B.zarr", target, **keywords)
        except SpdistError as error:
            refused += 1
            lines = str(error).splitlines()
            assert len(lines) == 1
            assert f"{victim}.zarr" in lines[0]
            assert groups.read_facts(str(target)).get("state", "unfinished") == "unfinished"
        else:
            found = open_matrix(target).rows(0, 120).to_scipy()
            assert abs(found - want).nnz == 0
        shutil.rmtree(tmp_path / f"{victim}.zarr")
        shutil.copytree(tmp_path / "sound", tmp_path / f"{victim}.zarr")
    assert refused  # a flip of a space in metadata hurts nobody; most attacks do


@pytest.mark.parametrize("name", ARRAYS)
def test_swapped_chunks_name_each_other(matrix, name):
    array = getattr(matrix, name)
    first, second = (Path(matrix.url) / array.key(k) for k in (0, 1))
    raw = first.read_bytes(), second.read_bytes()
    first.write_bytes(raw[1])
    second.write_bytes(raw[0])
    said = rf"Zarr chunk 0 of array '{name}' .* is in another's place: it is Zarr chunk 1"
    for attempt in (matrix.fingerprint, lambda: open_matrix(matrix.url).rows(0, 200)):
        with pytest.raises(CorruptError, match=said):
            attempt()


def test_old_versions_of_chunks_are_refused(tmp_path, matrix):
    """A Zarr chunk of another matrix passes its own checksum."""
    other = write(tmp_path / "b.zarr", random_matrix(200, 150, 6, 2))
    shutil.copy(Path(other.url) / "data/c/3", Path(matrix.url) / "data/c/3")
    with pytest.raises(CorruptError, match=r"Zarr chunk 3 of array 'data'.*is not the one that was written"):
        matrix.rows(0, 200)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("zarr.json", lambda d: d["attributes"]["shape"].__setitem__(1, 155)),
        ("zarr.json", lambda d: d["attributes"]["spdist"].update(canonical=False)),
        ("zarr.json", lambda d: d["attributes"]["spdist"].update(seal=7)),
        ("zarr.json", lambda d: d["attributes"]["spdist"]["seal"].pop("group")),
        ("data/zarr.json", lambda d: d["codecs"][0]["configuration"].update(endian="big")),
        ("data/zarr.json", lambda d: d.update(data_type="int64")),
        ("indices/zarr.json", lambda d: d["chunk_grid"]["configuration"].update(chunk_shape=[128])),
        ("indptr/zarr.json", lambda d: d.update(shape=[100])),
        ("indptr/zarr.json", lambda d: d.update(fill_value=1)),
    ],
)
def test_edited_metadata_name_the_file(matrix, file, change):
    edit(Path(matrix.url) / file, change)
    with pytest.raises(CorruptError, match=rf"a.zarr/{file}: the (attributes|metadata) are not what spdist wrote"):
        open_matrix(matrix.url)


@pytest.mark.parametrize("content", ["", "null", "[" * 100_000, "{"])
def test_metadata_that_are_no_document_name_the_file(matrix, content):
    (Path(matrix.url) / "data/zarr.json").write_text(content)
    with pytest.raises(CorruptError, match=r"data/zarr.json: the metadata are not what spdist wrote"):
        open_matrix(matrix.url)


def test_metadata_may_be_written_otherwise(matrix):
    """Spaces, the order of keys, consolidated metadata and attributes of the arrays change no matrix."""
    for path in Path(matrix.url).rglob("zarr.json"):
        document = json.loads(path.read_text())
        path.write_text(json.dumps(dict(reversed(document.items())), indent=7))
    with pytest.warns(UserWarning, match="Consolidated metadata"):
        zarr.consolidate_metadata(matrix.url)
    edit(Path(matrix.url) / "data/zarr.json", lambda d: d.update(attributes={"encoding-type": "array"}))
    assert open_matrix(matrix.url).is_known_canonical
    assert open_matrix(matrix.url).fingerprint() == matrix.fingerprint()


def test_a_lie_in_consolidated_metadata_is_not_heard(matrix):
    with pytest.warns(UserWarning, match="Consolidated metadata"):
        zarr.consolidate_metadata(matrix.url)
    key = "consolidated_metadata"
    edit(Path(matrix.url) / "zarr.json", lambda d: d[key]["metadata"]["data"].update(data_type="int64"))
    assert open_matrix(matrix.url).dtype == np.float64


def test_a_later_seal_asks_for_a_later_spdist(matrix):
    edit(Path(matrix.url) / "zarr.json", lambda d: d["attributes"]["spdist"]["seal"].update(version=2))
    with pytest.raises(MatrixError, match="version 2, not 1: read it by a later spdist"):
        open_matrix(matrix.url)


@pytest.mark.parametrize("damage", ["missing", "altered", "of another matrix", "a FIFO"])
def test_a_damaged_table_is_one_line(tmp_path, matrix, damage):
    path = Path(matrix.url) / "indices" / checksums.NOTE
    raw = path.read_bytes()
    path.unlink()
    match damage:
        case "altered":
            path.write_bytes(raw[:30] + bytes([raw[30] ^ 1]) + raw[31:])
        case "of another matrix":
            other = write(tmp_path / "b.zarr", random_matrix(200, 150, 6, 2))
            shutil.copy(Path(other.url) / "indices" / checksums.NOTE, path)
        case "a FIFO":
            os.mkfifo(path)
    checksums.read_table.cache_clear()
    with pytest.raises(CorruptError, match=r"a.zarr/indices/spdist-checksums: the table of checksums is") as raised:
        open_matrix(matrix.url).fingerprint()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["zarr.json", "data/zarr.json"])
def test_metadata_that_are_no_files_do_not_block(matrix, name):
    path = Path(matrix.url) / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(MatrixError, match=rf"{name}: is no ordinary file"):
        open_matrix(matrix.url)
    assert (groups.read_facts(matrix.url) == {}) == (name == "zarr.json")


def test_without_a_seal_it_is_a_matrix_from_elsewhere(matrix):
    edit(Path(matrix.url) / "zarr.json", lambda d: d["attributes"]["spdist"].pop("seal"))
    found = open_matrix(matrix.url)
    assert not found.is_known_canonical
    assert found.nnz == matrix.nnz


def test_finish_takes_checksums_that_are_given(tmp_path):
    """As a run knows them that wrote the Zarr chunks; a wrong one shows when the matrix is read."""
    layout = Layout(str(tmp_path / "a.zarr"), 9, np.dtype("f8"), 4)
    groups.begin(layout.url, {})
    layout.array("indptr").write_chunks(0, np.array([0, 2], np.int64))
    layout.write_entries(0, np.array([1, 3], np.int32), np.array([5.0, 6.0]))
    found = [replace(layout.array(name), length=1).stored_checksums(0, 1) for name in ARRAYS]
    found[2] = found[2] + np.uint32(1)
    stored = finish_matrix(layout, 1, 2, {}, Checksums(*found))
    with pytest.raises(CorruptError, match="Zarr chunk 0 of array 'data'"):
        stored.rows(0, 1)


def test_a_missing_chunk_finishes_nothing(tmp_path):
    layout = Layout(str(tmp_path / "a.zarr"), 9, np.dtype("f8"), 4)
    groups.begin(layout.url, {})
    layout.array("indptr").write_chunks(0, np.array([0, 2], np.int64))
    layout.write_entries(0, np.array([1, 3], np.int32), np.array([5.0, 6.0]))
    (tmp_path / "a.zarr/indices/c/0").unlink()
    with pytest.raises(CorruptError, match="Zarr chunk 0 of array 'indices'"):
        finish_matrix(layout, 1, 2, {})
    with pytest.raises(MatrixError, match="unfinished"):
        open_matrix(layout.url)


def test_other_readers_read_it_without_a_word(matrix):
    """Warnings are errors here: the tables of checksums must not look to Zarr like a broken hierarchy."""
    group = zarr.open_group(matrix.url, mode="r")
    assert sorted(name for name, _ in group.members()) == sorted(ARRAYS)
    found = anndata.io.read_elem(group)
    np.testing.assert_array_equal(found.toarray(), matrix.rows(0, 200).to_scipy().toarray())


def test_tables_of_several_batches(tmp_path):
    stored = write(tmp_path / "a.zarr", random_matrix(200, 40, 5, 1), 1)
    assert stored.data.nchunks > 3 * BATCH
    stored.fingerprint()
    victim = 2 * BATCH + 5
    (Path(stored.url) / stored.data.key(victim)).unlink()
    with pytest.raises(CorruptError, match=f"Zarr chunk {victim} of array 'data'"):
        stored.fingerprint()


def test_bytes_of_tables():
    tables = Checksums(*(np.arange(n, dtype=np.uint32) << 20 for n in (0, 3, 1)))
    raw = tables.to_bytes()
    found = Checksums.from_bytes(raw)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(found, name), getattr(tables, name))
    for bit in range(8 * len(raw)):
        broken = bytearray(raw)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"it|version"):
            Checksums.from_bytes(bytes(broken))
    for end in range(len(raw)):
        with pytest.raises(ValueError, match=r"it"):
            Checksums.from_bytes(raw[:end])


def test_remote_chunks_are_compared_too():
    url = "memory://seal-test/a.zarr"
    stored = api.save(url, random_matrix(200, 150, 6, 1), overwrite=True)
    raw = at(url).read("data/c/0")
    at(url).write("data/c/0", raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CorruptError, match="Zarr chunk 0 of array 'data'"):
        stored.fingerprint()


@pytest.mark.parametrize("changed", ["swapped", "old"])
def test_remote_chunks_are_compared_as_they_are_read(changed):
    url = f"memory://seal-test/{changed}.zarr"
    stored = write(url, random_matrix(200, 150, 6, 1))
    keys = [stored.data.key(k) for k in (0, 1)]
    raw = [at(url).read(key) for key in keys]
    if changed == "old":
        other = write("memory://seal-test/other.zarr", random_matrix(200, 150, 6, 2))
        raw = [at(other.url).read(key) for key in reversed(keys)]
    for key, content in zip(keys, reversed(raw), strict=True):
        at(url).write(key, content)
    said = "is in another's place: it is Zarr chunk 1" if changed == "swapped" else "is not the one that was written"
    with pytest.raises(CorruptError, match=rf"Zarr chunk 0 of array 'data' .* {said}"):
        open_matrix(url).rows(0, 200)
