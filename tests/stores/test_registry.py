"""A place of a new kind: a class in one file, which the layers above do not know."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.sparse as sp
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.spec import AbstractFileSystem
from zarr.storage import FsspecStore

import spdist
from spdist.errors import InputError
from spdist.stores import registry
from spdist.stores.location import Location
from spdist.stores.registry import at, check_writable
from tests.conftest import random_matrix


class Shelf(AbstractFileSystem):
    """Objects in a dictionary."""

    protocol, cachable = "toy", False
    objects: dict[str, bytes]

    def cat_file(self, path, start=None, end=None, **_):
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][start:end]

    def pipe_file(self, path, value, mode="overwrite", **_):
        self.objects[path] = bytes(value)

    def _rm(self, path):
        self.objects.pop(path, None)

    def cp_file(self, path1, path2, **_):
        self.objects[path2] = self.objects[path1]

    def ls(self, path, detail=True, **_):
        """List objects, and what ends with a slash as folders."""
        prefix, found = f"{path.strip('/')}/".lstrip("/"), {}
        for key, content in self.objects.items():
            if key == path or key.startswith(prefix):
                name, slash, _ = key.removeprefix(prefix).partition("/") if key != path else ("", "", "")
                kind, size = ("directory", 0) if slash else ("file", len(content))
                place = path if key == path else f"{prefix}{name}"
                found[place] = {"name": place, "size": size, "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)


class ToyLocation(Location):
    """A ``toy://`` URL."""

    is_writable, is_private, has_folders = True, True, False
    shelf = Shelf()

    def file_system(self):
        return self.shelf, self.url.removeprefix("toy://")

    def _fsspec_store(self):
        fs, path = self.file_system()
        return FsspecStore(AsyncFileSystemWrapper(fs, asynchronous=True), path=path)

    def lock_files(self):
        return None


@pytest.fixture
def shelf(monkeypatch):
    monkeypatch.setitem(registry._KINDS, "toy", ToyLocation)
    monkeypatch.setattr(Shelf, "objects", {}, raising=False)
    at.cache_clear()
    yield Shelf.objects
    at.cache_clear()


def test_a_product_in_a_place_of_a_new_kind(shelf):
    a, b = random_matrix(300, 200, 5, 1), random_matrix(200, 250, 5, 2)
    spdist.save("toy://box/A.zarr", a)
    spdist.save("toy://box/B.zarr", b)
    spdist.multiply("toy://box/A.zarr", "toy://box/B.zarr", "toy://box/C.zarr", engine="scipy")
    np.testing.assert_allclose(spdist.open("toy://box/C.zarr").to_scipy().toarray(), (a @ b).toarray())
    assert spdist.check("toy://box/C.zarr").ok
    spdist.multiply("toy://box/A.zarr", "toy://box/B.zarr", "toy://box/C.zarr", engine="scipy", overwrite=True)
    assert at("toy://box/C.zarr").relatives() == []
    assert {key.split("/")[1] for key in shelf} == {"A.zarr", "B.zarr", "C.zarr"}


def test_damage_in_a_place_of_a_new_kind_is_found(shelf):
    stored = spdist.save("toy://A.zarr", sp.eye_array(100, format="csr"))
    key = f"A.zarr/{stored.data.key(0)}"
    shelf[key] = shelf[key][:-1] + bytes([shelf[key][-1] ^ 1])
    with pytest.raises(spdist.CorruptError, match="Zarr chunk 0 of array 'data'"):
        stored.rows(0, 100)


def test_registering(monkeypatch):
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    with pytest.raises(InputError, match="nothing is written to toy://"):
        check_writable("toy://A.zarr")
    registry.register("toy", ToyLocation)
    check_writable("toy://A.zarr")
    monkeypatch.undo()
    at.cache_clear()


@pytest.mark.parametrize("url", ["/data/A.zarr", "file:///data/A.zarr", "memory://A.zarr", "s3://b/A", "https://h/A"])
def test_a_location_is_a_value(url):
    place = at(url)
    assert at(url) is place
    assert pickle.loads(pickle.dumps(place)) == place
    assert str(place) == place.url == url
    assert place != at(f"{url}.other")


@pytest.mark.parametrize("url", ["folder", "memory://location-test/folder"])
def test_files_by_key(tmp_path, url):
    place = at(url if "://" in url else str(tmp_path / url))
    assert not place.exists()
    place.write("c/0", b"0123456789")
    place.write_durably("c/1", b"abc")
    assert place.exists()
    assert place.has("c/0")
    assert place.holds("c/1")
    assert (place.read("c/0"), place.stored_bytes()) == (b"0123456789", 13)
    with place.open("c/0") as file:
        file.seek(4)
        assert file.read(2) == b"45"
    *ends, missing = place.read_ends(["c/0", "c/1", "c/2"], 4)
    assert ends == [b"6789", b"abc"]
    assert isinstance(missing, FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        place.read("c/2")
    place.remove_members("c", lambda name: name == "1")
    assert (place.has("c/0"), place.has("c/1")) == (False, True)
    place.delete("c/1")
    place.delete("c/1")
    assert not place.has("c/1")
    place.discard()
    assert not place.exists()
