"""Zarr metadata that are damaged or lie: one error of spdist's, in one line that names the file."""

import copy
import gzip
import json
import os
import zlib
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import GzipCodec

import spdist
from spdist.api import products as api
from spdist.errors import CorruptError, MatrixError, SpdistError
from spdist.storage import groups
from spdist.storage.matrix import open_matrix

FILES = ["zarr.json", "indptr/zarr.json", "indices/zarr.json", "data/zarr.json"]
ODD = [
    None, True, -1, 0, 1, 1 << 31, 10**18, 10**40, 1.5, float("nan"), "", "x", "two\nlines", [], [0], [1, 2],
    [-5], [[]], {}, {"a": 1}, {"name": "gzip"}, [{"name": "sharding_indexed"}],
]  # fmt: skip


@pytest.fixture(scope="module")
def matrix(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("damaged") / "A.zarr"
    spdist.save(place, sp.random_array((50, 50), density=0.1, format="csr"))
    return place


def places(document, before=()):
    """Yield the way to each value of a JSON document."""
    pairs = document.items() if isinstance(document, dict) else enumerate(document if type(document) is list else ())
    for key, value in pairs:
        yield (*before, key)
        yield from places(value, (*before, key))


def opened_with(matrix: Path, file: str, content: bytes) -> None:
    """Open, describe and check a matrix with this content in a metadata file; only spdist's errors may come."""
    whole = (matrix / file).read_bytes()
    (matrix / file).write_bytes(content)
    said = "A.zarr"
    try:
        open_matrix(matrix)
        api.info(matrix)
        open_matrix(matrix).check()
    except SpdistError as error:
        said = str(error)
    finally:
        (matrix / file).write_bytes(whole)
    assert said.isprintable()
    assert "A.zarr" in said


@settings(max_examples=150, deadline=None)
@given(data=st.data(), file=st.sampled_from(FILES))
def test_values_that_cannot_be(matrix, data, file):
    document = json.loads((matrix / file).read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        way = data.draw(st.sampled_from(sorted(places(document), key=str)))
        inner = document
        for key in way[:-1]:
            inner = inner[key]
        if data.draw(st.booleans()):
            inner[way[-1]] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
        else:
            del inner[way[-1]]
        if not document:
            break
    opened_with(matrix, file, json.dumps(document).encode())


def test_a_seal_of_null_is_none(matrix):
    document = json.loads((matrix / "zarr.json").read_text())
    document["attributes"]["spdist"]["seal"] = None
    opened_with(matrix, "zarr.json", json.dumps(document).encode())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), file=st.sampled_from(FILES))
def test_bytes_that_are_changed_or_missing(matrix, data, file):
    raw = bytearray((matrix / file).read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    opened_with(matrix, file, bytes(raw[: data.draw(st.integers(0, len(raw)))]))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"", b"null", b"\xff\xfe", b"1" * 10_000])
def test_documents_that_are_none(matrix, file, content):
    whole = (matrix / file).read_bytes()
    (matrix / file).write_bytes(content)
    try:
        with pytest.raises((MatrixError, CorruptError)) as caught:
            open_matrix(matrix)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 700
        assert groups.read_facts(str(matrix)) == {} or file != "zarr.json"
    finally:
        (matrix / file).write_bytes(whole)


@pytest.mark.parametrize("codec", ["gzip", "zlib"])
def test_a_chunk_that_inflates(tmp_path, codec):
    """It is refused before it is inflated whole; chunks that are sound are read."""
    matrix = sp.random_array((50, 50), density=0.1, format="csr")
    version = 3 if codec == "gzip" else 2
    group = zarr.open_group(tmp_path / "A.zarr", mode="w", zarr_format=version)
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [50, 50]})
    compressor = GzipCodec() if codec == "gzip" else numcodecs.Zlib()
    for name in ("indptr", "indices", "data"):
        values = getattr(matrix, name)
        group.create_array(name, shape=values.shape, dtype=values.dtype, chunks=(100,), compressors=compressor)
        group[name][:] = values
    np.testing.assert_array_equal(open_matrix(tmp_path / "A.zarr").rows(0, 50).data, matrix.data)
    path = tmp_path / "A.zarr" / ("data/c/0" if version == 3 else "data/0")
    path.write_bytes((gzip if codec == "gzip" else zlib).compress(bytes(80 << 20)))
    with pytest.raises(CorruptError, match=r"chunk 0 of array 'data' .* is not decoded: it decodes to"):
        open_matrix(tmp_path / "A.zarr").rows(0, 50)


def test_metadata_that_would_hang_or_fill_the_memory(tmp_path):
    place = tmp_path / "A.zarr"
    spdist.save(place, sp.eye_array(3, format="csr"))
    (place / "indices" / "zarr.json").unlink()
    os.mkfifo(place / "indices" / "zarr.json")
    with pytest.raises(MatrixError, match=r"indices/zarr.json: is no ordinary file"):
        open_matrix(place)
    (place / "indices" / "zarr.json").unlink()
    with (place / "indices" / "zarr.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(MatrixError, match=r"indices/zarr.json: Zarr metadata of 1.00 TiB, more than 16.00 MiB"):
        open_matrix(place)
