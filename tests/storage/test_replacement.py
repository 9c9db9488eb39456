"""What lies at a target is the old matrix or the new one, whole, whoever is killed when."""

from __future__ import annotations

import errno
import os
import shutil
import socket

import pytest
import scipy.sparse as sp

import spdist
from spdist.api import products as api
from spdist.errors import CorruptError, InputError, MatrixError
from spdist.storage import lock
from spdist.storage.lock import hold_target
from spdist.storage.matrix import open_matrix
from spdist.storage.targets.owner import Owner
from spdist.stores import folder_replacement as replacement
from spdist.stores import location
from spdist.stores.local import LocalLocation
from spdist.stores.location import Location
from spdist.stores.registry import at
from tests.storage.test_lock import killed_at, names

OLD, NEW = sp.eye_array(3, format="csr"), 2 * sp.eye_array(3, format="csr")


def value(url) -> float:
    return float(open_matrix(url).rows(0, 3).data[0])


@pytest.fixture(params=["exchanged", "renamed twice"])
def way(request, monkeypatch):
    """Replace by an exchange and, as other systems do, by two renames."""
    if request.param == "renamed twice":
        monkeypatch.setattr(replacement, "_exchange", lambda one, other: False)
    return request.param


def test_a_folder_is_replaced_whole(tmp_path, way):
    target = tmp_path / "C.zarr"
    api.save(target, OLD)
    new = api.save(tmp_path / "C.zarr.spdist-new", NEW)
    (tmp_path / "C.zarr.spdist-old" / "left").mkdir(parents=True)
    at(str(target)).replace_by(at(new.url))
    assert value(target) == 2
    assert names(tmp_path) == {"C.zarr"}
    assert not (target / replacement.NOTE).exists()


def test_the_exchange_is_used_here(tmp_path):
    for name in "ab":
        (tmp_path / name / name).mkdir(parents=True)
    assert replacement._exchange(tmp_path / "a", tmp_path / "b")
    assert names(tmp_path / "a") == {"b"}


def test_a_matrix_is_on_the_disk_before_it_replaces_another(tmp_path, monkeypatch):
    target, synced = tmp_path / "C.zarr", list[float]()
    monkeypatch.setattr(LocalLocation, "sync_disk", lambda staged: synced.append(value(staged.url)))
    api.save(target, OLD)
    assert not synced
    api.save(target, NEW, overwrite=True)
    assert synced == [2.0]


def test_an_error_that_passes_leaves_no_old_matrix(tmp_path, way, monkeypatch, caplog):
    target, list_folder, failed = tmp_path / "C.zarr", os.scandir, list[int]()

    def fail_once(place):
        if not failed and isinstance(place, int):  # an open folder, which is being emptied
            failed.append(place)
            raise OSError(errno.EIO, "Input/output error")
        return list_folder(place)

    api.save(target, OLD)
    new = api.save(tmp_path / "C.zarr.spdist-new", NEW)
    monkeypatch.setattr(os, "scandir", fail_once)
    at(str(target)).replace_by(at(new.url))
    assert failed
    assert value(target) == 2
    assert names(tmp_path) == {"C.zarr"}
    assert not caplog.messages


def test_a_replacement_that_fails_leaves_the_old_matrix(tmp_path, way, monkeypatch):
    target = tmp_path / "C.zarr"
    api.save(target, OLD)
    with pytest.raises(FileNotFoundError):
        at(str(target)).replace_by(at(f"{target}.spdist-none"))
    assert value(target) == 1


@pytest.mark.parametrize(
    ("source", "reader"), [("C.zarr.spdist-new", False), ("C.zarr.spdist-scratch-1/whole.zarr", True)]
)
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_matrix(tmp_path, way, source, reader):
    seen, step, killed = set(), 0, True

    def replace() -> None:
        with hold_target(target):
            at(str(target)).replace_by(at(str(target.parent / source)))

    kept, target = tmp_path / "kept", tmp_path / "here" / "C.zarr"
    target.parent.mkdir()
    api.save(kept / "old.zarr", OLD)
    api.save(kept / "new.zarr", NEW)
    while killed:
        step += 1
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(kept / "old.zarr", target)
        shutil.copytree(kept / "new.zarr", target.parent / source)
        killed = killed_at(step, replace)
        if reader:
            assert value(target) in (1, 2), step
        with hold_target(target):
            assert value(target) in (1, 2), step
            seen.add(value(target))
            if value(target) == 1 and source.endswith("new"):
                assert value(target.parent / source) == 2  # `--resume` puts it in place
            lock.remove_remains(str(target))
        assert names(target.parent) == {"C.zarr"}, step
        assert not (target / replacement.NOTE).exists()
    assert seen == {1, 2}


def test_a_matrix_between_two_renames_is_read(tmp_path, monkeypatch):
    api.save(tmp_path / "C.zarr.spdist-old", OLD)
    assert value(tmp_path / "C.zarr") == 1
    assert names(tmp_path) == {"C.zarr"}
    (tmp_path / "C.zarr").rename(tmp_path / "C.zarr.spdist-new")
    assert api.info(tmp_path / "C.zarr")["nnz"] == 3
    (tmp_path / "C.zarr").rename(tmp_path / "C.zarr.spdist-old")
    monkeypatch.setattr(lock, "hold_target", lambda url: pytest.fail("writes"))
    monkeypatch.setattr(os, "access", lambda *rest: False)

    def refused(url: str) -> None:
        raise InputError("may not be written to")

    monkeypatch.setattr(lock, "hold_target", refused)  # a folder that may only be read
    assert open_matrix(tmp_path / "C.zarr").url.endswith("C.zarr.spdist-old")
    with pytest.raises(MatrixError, match="no such matrix"):
        open_matrix(tmp_path / "D.zarr")


def test_only_what_belongs_to_the_target_is_removed(tmp_path):
    api.save(tmp_path / "C.zarr", OLD)
    api.save(tmp_path / "A.zarr", OLD)
    for name in ("A.zarr", "C.zarr.spdist-new/../../A.zarr", "/A.zarr"):
        (tmp_path / "C.zarr" / replacement.NOTE).write_text(name)
        api.save(tmp_path / "C.zarr", OLD, overwrite=True)
    assert names(tmp_path) == {"A.zarr", "C.zarr"}


# -- object stores -----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


class Dying:
    """A file system whose process is killed at its n-th request that changes something."""

    def __init__(self, fs, step: int) -> None:
        self.fs, self.step = fs, step

    def __getattr__(self, name: str):
        found = getattr(self.fs, name)
        if name not in ("pipe_file", "rm", "copy"):
            return found

        def request(*arguments, **options):
            self.step -= 1
            if self.step == 0:
                if name != "pipe_file":  # many requests, of which some were answered
                    found(*([each[:1] if isinstance(each, list) else each for each in arguments]), **options)
                raise Killed
            return found(*arguments, **options)

        return request


def kill_while_replacing(folder: str, step: int) -> bool:
    """Replace C by a run that is killed at its n-th request; return whether it was."""
    target, source = f"{folder}/C.zarr", f"{folder}/C.zarr.spdist-new"
    api.save(target, OLD, overwrite=True)
    api.save(source, NEW, overwrite=True)
    with pytest.MonkeyPatch.context() as patch:
        find, dying = Location.file_system, []

        def file_system(location: Location):
            fs, path = find(location)
            dying[:] = dying or [Dying(fs, step)]
            return dying[0], path

        patch.setattr(Location, "file_system", file_system)
        try:
            at(target).replace_by(at(source))
        except Killed:
            return True
    return False


def check_after_kills(folder: str) -> None:
    target, seen, step, killed = f"{folder}/C.zarr", [], 0, True
    while killed:
        step += 1
        killed = kill_while_replacing(folder, step)
        read = value(target)
        assert read in (1, 2), step
        with hold_target(target):
            assert value(target) == read
            assert open_matrix(target).url == target
            lock.remove_remains(target)
        assert value(target) == read
        assert not [place for place in at(target).relatives() if "spdist-lock" not in place]
        seen.append(read)
    assert seen == sorted(seen) == [1.0] + [2.0] * (len(seen) - 1)
    assert len(seen) > 4


def test_a_kill_at_any_request_leaves_the_old_or_the_new_matrix(caplog):
    check_after_kills("memory://replacement-test")
    assert "finishing the replacement" in caplog.text


@pytest.fixture(scope="module")
def bucket():
    """Return the URL of an empty bucket of a simulated S3."""
    s3fs = pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem(use_listings_cache=False).mkdir("bucket")
        yield "s3://bucket"
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_matrices_in_s3_are_saved_and_overwritten(bucket, tmp_path, scheduler):
    old = api.save(f"{bucket}/A.zarr", OLD)
    a = api.save(old.url, NEW, overwrite=True)
    assert value(a.url) == 2
    with pytest.raises(CorruptError, match="of another matrix"):
        old.rows(0, 3)
    spdist.transpose(a, f"{bucket}/T.zarr")
    sp.save_npz(tmp_path / "a.npz", OLD)
    spdist.import_matrix(tmp_path / "a.npz", a.url, overwrite=True)
    assert value(a.url) == 1
    for _ in range(2):
        api.multiply(a.url, a.url, f"{bucket}/C.zarr", overwrite=True, scheduler=scheduler)
    assert value(f"{bucket}/C.zarr") == 1
    assert at(a.url).relatives() == []


def test_a_kill_at_any_request_to_s3_leaves_the_old_or_the_new_matrix(bucket):
    check_after_kills(f"{bucket}/kills")


def test_a_lock_in_s3(bucket, monkeypatch):
    target = f"{bucket}/L.zarr"
    with hold_target(target) as held:
        other = lock.TargetLock(target)
        with pytest.raises(InputError, match="is being written by run"):
            other.acquire(steal=True)
        assert not other.files.create(held.path, b"")
        held.files.touch(held.path)
        assert held.files.age(held.path) < 5
        monkeypatch.setattr(Owner, "is_near", False)
        monkeypatch.setattr(lock, "STALE_SECONDS", -1)
        with pytest.raises(InputError, match="--steal"):
            other.acquire(steal=False)
        other.acquire(steal=True)
        with pytest.raises(spdist.SpdistError, match="another run took the lock"):
            held.check()
    other.release()
    assert at(target).relatives() == []


@pytest.mark.parametrize("what", ["no credentials", "no bucket", "no answer"])
def test_a_storage_that_cannot_be_used_is_told_in_a_line(bucket, what, monkeypatch):
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    with socket.socket() as silent:
        if what == "no answer":
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
            monkeypatch.setattr(location, "REMOTE_SECONDS", 1.0)
        if what == "no credentials":
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                monkeypatch.delenv(name)
            monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
            monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        url = f"s3://{'none' if what == 'no bucket' else 'bucket'}/A.zarr"
        for call in (lambda: open_matrix(url), lambda: api.save(url, OLD, overwrite=True)):
            with pytest.raises(InputError, match=r"A.zarr: the storage cannot be used \(.*\); check the URL") as caught:
                call()
            assert "\n" not in str(caught.value)
    s3fs.S3FileSystem.clear_instance_cache()
