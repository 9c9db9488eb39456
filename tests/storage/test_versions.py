"""What storages tell of the Zarr chunks of a matrix: each way to rewrite one shows, and nothing else does."""

import functools
import http.server
import os
import threading

import fsspec
import numpy as np
import pytest

import spdist
from spdist.errors import CorruptError
from spdist.storage.foreign import versions
from spdist.storage.foreign.checked import checked
from spdist.storage.matrix import open_matrix
from spdist.stores import local
from spdist.stores.registry import at
from tests.conftest import random_matrix
from tests.storage.test_foreign import write

M = random_matrix(200, 200, 4, 1)


@pytest.fixture
def served(tmp_path):
    """Serve a folder, and return its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def rewrite(path, values) -> None:
    """Write another file in the place of one, of the same size and with the same time of modification."""
    facts = path.stat()
    path.write_bytes(values)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def test_a_file_of_the_same_size_and_time_of_modification_shows(tmp_path):
    place = write(tmp_path / "A.zarr", M)
    with versions.watched():
        checked(open_matrix(place))
        rewrite(place / "data" / "c" / "1", bytes(64 * 8))
        with pytest.raises(CorruptError, match=r"A.zarr was rewritten .*Zarr chunk 1 of array 'data', data/c/1"):
            versions.check()


def test_a_file_that_is_put_in_the_place_of_another_shows(tmp_path):
    """As a change of its number, even where a file system gives all files one time."""
    place, keys = at(str(write(tmp_path / "A.zarr", M))), ["data/c/0", "data/c/1"]
    before, _ = place.versions(keys)
    path = tmp_path / "A.zarr" / "data" / "c" / "1"
    (tmp_path / "other").write_bytes(path.read_bytes())
    (tmp_path / "other").rename(path)
    after, _ = place.versions(keys)
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]


def test_a_file_is_as_new_as_its_last_change_of_any_kind(tmp_path):
    """A time of modification that somebody set back does not make it older."""
    place = write(tmp_path / "A.zarr", M)
    path = tmp_path / "A.zarr" / "data" / "c" / "0"
    os.utime(path, (0, 0))
    assert at(str(place)).version_and_time("data/c/0")[1] == path.stat().st_ctime_ns


def test_digests_decide_where_times_cannot_tell(tmp_path, monkeypatch):
    """A file that is as new as the first look may be written again without another time."""
    place = write(tmp_path / "A.zarr", M)
    assert not versions._versions_of(open_matrix(place)).can_tell
    monkeypatch.setattr(versions, "_first_difference", lambda before, after: None)
    with versions.watched():
        checked(open_matrix(place))
        versions.check()
        rewrite(place / "data" / "c" / "1", bytes(64 * 8))
        with pytest.raises(CorruptError, match=r"A.zarr was rewritten .*its content"):
            versions.check()


def test_times_tell_if_files_are_older_than_the_first_look(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "SAME_TIME_NS", -(10**12))
    assert versions._versions_of(open_matrix(write(tmp_path / "A.zarr", M))).can_tell


def test_metadata_that_change_show(tmp_path):
    place = write(tmp_path / "A.zarr", M)
    with versions.watched():
        checked(open_matrix(place))
        document = place / "zarr.json"
        document.write_text(document.read_text().replace("200", "201", 1))
        with pytest.raises(CorruptError, match=r"A.zarr was rewritten while it was read \((now: .*|its metadata)\)"):
            versions.check()


def test_a_call_inside_another_goes_by_what_the_outer_one_saw(tmp_path):
    a, b = (open_matrix(write(tmp_path / f"{name}.zarr", M)) for name in "AB")
    with versions.watched():
        with versions.watched():
            checked(a)
            checked(b)
        rewrite(tmp_path / "A.zarr" / "data" / "c" / "0", bytes(64 * 8))
        versions.check()  # which has read nothing itself
        with versions.watched():
            versions.note(b)
            versions.check()
        with versions.watched():
            checked(open_matrix(a.url))
            with pytest.raises(CorruptError, match=r"A.zarr was rewritten"):
                versions.check()
    with versions.watched():
        versions.note(a)
        versions.check()


def test_objects_in_memory_that_change_show():
    spdist.save("memory://versions/A.zarr", M, overwrite=True)
    m = open_matrix("memory://versions/A.zarr")
    assert versions._versions_of(m).can_tell
    with versions.watched():
        checked(m)
        versions.check()
        files = fsspec.filesystem("memory")
        content = files.cat_file("/versions/A.zarr/data/c/0")
        files.pipe_file("/versions/A.zarr/data/c/0", content)  # the same again
        versions.check()
        files.pipe_file("/versions/A.zarr/data/c/0", content[:-4] + bytes(4))
        with pytest.raises(CorruptError, match=r"A.zarr was rewritten .*Zarr chunk 0 of array 'data'"):
            versions.check()


def test_files_of_a_web_server_that_change_show(tmp_path, served):
    place = write(tmp_path / "A.zarr", M)
    m = open_matrix(f"{served}/A.zarr")
    before = versions._versions_of(m)
    assert before.can_tell
    assert versions._first_difference(before, versions._versions_of(m)) is None
    path = place / "data" / "c" / "2"
    os.utime(path, (1, 1))  # the server tells whole seconds
    assert versions._first_difference(before, versions._versions_of(m)) == ("data", 2)
    path.unlink()
    assert not versions._versions_of(m).can_tell
    assert (
        np.count_nonzero(versions._versions_of(m).of_chunks["data"] == before.of_chunks["data"]) == m.data.nchunks - 1
    )
