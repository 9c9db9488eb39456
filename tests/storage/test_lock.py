"""One run writes a target, whoever is killed when; real processes where it is about kills."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import scipy.sparse as sp

import spdist
from spdist.api import products as api
from spdist.errors import InputError, SpdistError
from spdist.foundation.processes import process_start
from spdist.storage import lock
from spdist.storage.atomic_replace import staged_file, staged_matrix
from spdist.storage.lock import TargetLock, hold_target
from spdist.storage.matrix import open_matrix
from spdist.storage.targets.owner import owner_from, this_process
from spdist.storage.transpose import transpose
from spdist.stores import local
from spdist.stores.lock_files import LocalFiles, RemoteFiles

EYE = sp.eye_array(3, format="csr")
HOLD = """
import sys, time
from spdist.storage.lock import hold_target
with hold_target(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["FIFO", "socket", "folder", "unreadable"])
def test_what_is_no_lock_is_refused_at_once(tmp_path, monkeypatch, kind):
    place = tmp_path / "C.zarr.spdist-lock"
    if kind == "FIFO":
        os.mkfifo(place)
    elif kind == "socket":
        monkeypatch.chdir(tmp_path)  # for the length of its path
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(place.name)
    elif kind == "folder":
        place.mkdir()
    else:
        place.touch()
        monkeypatch.setattr(os, "open", no_right_to(place, os.open))
    what = "may not be read" if kind == "unreadable" else "is no ordinary file"
    with pytest.raises(InputError, match=rf"{place}, of user \w+, {what}: remove it"), hold_target(tmp_path / "C.zarr"):
        pass
    assert names(tmp_path) == {place.name}


def no_right_to(place: Path, system_open):
    """Return a twin of `os.open` that may not open one file."""

    def refusing(path, *rest, **options):
        if str(path) == str(place):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return system_open(path, *rest, **options)

    return refusing


@pytest.fixture
def holder(tmp_path):
    """Return a process that holds C.zarr."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "C.zarr")], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def elsewhere(target: Path, age: float) -> bytes:
    """Put the lock of a run on another host next to a target; its last heartbeat is `age` seconds old."""
    path = Path(f"{target}.spdist-lock")
    found = json.loads(this_process("abc123").to_bytes())
    path.write_text(json.dumps(found | {"host": "node7", "boot": "another", "record": "1"}))
    os.utime(path, (time.time() - age, time.time() - age))
    return path.read_bytes()


def test_a_live_run_is_named_and_its_death_is_known_at_once(tmp_path, holder, caplog):
    target = tmp_path / "C.zarr"
    with pytest.raises(InputError, match=rf"is being written by run \w+ \(user .*process {holder.pid}, since.*wait fo"):
        api.save(target, EYE)
    with pytest.raises(InputError, match="last heartbeat 0 s ago"):
        api.save(target, EYE, steal=True)  # only what is stale is stolen
    assert names(tmp_path) == {"C.zarr.spdist-lock"}
    holder.kill()  # it stays a zombie, as in a container without an init process
    while process_start(holder.pid):
        time.sleep(0.01)
    api.save(target, EYE)
    assert names(tmp_path) == {"C.zarr"}
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"process {holder.pid}" in line
    assert "took over" in line


def test_a_live_run_on_this_host_keeps_its_lock_without_a_heartbeat(tmp_path):
    """As one that is stopped, or waits for its disk; nobody steals it."""
    target, content = tmp_path / "C.zarr", this_process("abc123").to_bytes()
    path = Path(f"{target}.spdist-lock")
    path.write_bytes(content)
    os.utime(path, (0, 0))
    with pytest.raises(InputError, match=r"is being written by run abc123 .*last heartbeat [\d,]+ s ago; wait for it"):
        api.save(target, EYE, steal=True)
    assert path.read_bytes() == content
    assert TargetLock(str(target)).is_live(str(path), content)  # nor is its right to end a lock taken


def test_sigterm_releases(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "default_int_handler", signal.default_int_handler)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), hold_target(tmp_path / "C.zarr"):  # noqa: PT012
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not names(tmp_path)


def test_another_host_is_judged_by_its_heartbeat(tmp_path, caplog):
    target = tmp_path / "C.zarr"
    elsewhere(target, 20)
    for steal in (False, True):
        with pytest.raises(InputError, match=r"abc123 \(user .* on node7.*last heartbeat 2\d s ago; wait"):
            api.save(target, EYE, steal=steal)
    elsewhere(target, 90)
    with pytest.raises(InputError, match=r"no heartbeat for 9\d s; if it is dead, take over with --steal"):
        api.save(target, EYE)
    api.save(target, EYE, steal=True)
    assert "took over from run abc123" in caplog.text
    assert names(tmp_path) == {"C.zarr"}


def test_a_heartbeat_in_the_future_is_told(tmp_path):
    """A clock was set back: the lock would not become stale for as long."""
    elsewhere(str(tmp_path / "C.zarr"), -3600.0)
    with pytest.raises(InputError, match=r"lies 3,\d+ s in the future, as a clock was set: .* remove /"):
        api.save(tmp_path / "C.zarr", EYE, steal=True)


def test_the_longest_name_leaves_nothing_behind(tmp_path):
    target = tmp_path / ("ü" * (local.NAME_BYTES // 2))
    api.save(target, EYE)
    api.save(target, EYE, overwrite=True)
    assert names(tmp_path) == {target.name}
    with pytest.raises(InputError, match=r"its name has 171 bytes, .* at most 170 bytes"):
        api.save(tmp_path / ("x" * (local.NAME_BYTES + 1)), EYE)
    assert names(tmp_path) == {target.name}


@pytest.mark.parametrize("stolen", [False, True])
def test_a_full_disk_keeps_no_lock(tmp_path, monkeypatch, caplog, stolen):
    """Nothing can be created; a lock that another run took meanwhile stays."""
    target = str(tmp_path / "C.zarr")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with hold_target(target):
        if stolen:
            other = elsewhere(target, 0.0)
        monkeypatch.setattr(LocalFiles, "create", full)
    assert not caplog.messages
    assert names(tmp_path) == ({"C.zarr.spdist-lock"} if stolen else set())
    assert not stolen or Path(f"{target}.spdist-lock").read_bytes() == other


@pytest.mark.parametrize("content", [b"", bytes(300)])
def test_a_lock_that_a_power_loss_emptied_is_taken_once_it_is_stale(tmp_path, caplog, content):
    path = tmp_path / "C.zarr.spdist-lock"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"does not name.*wait for it"):
        api.save(tmp_path / "C.zarr", EYE)
    os.utime(path, (time.time() - 90, time.time() - 90))
    api.save(tmp_path / "C.zarr", EYE)
    assert "took over from a run that left an empty lock" in caplog.text
    assert names(tmp_path) == {"C.zarr"}


def test_a_damaged_lock_is_refused_until_it_is_stale(tmp_path):
    path = tmp_path / "C.zarr.spdist-lock"
    path.write_bytes(b"{")
    with pytest.raises(InputError, match="does not name"):
        api.save(tmp_path / "C.zarr", EYE, steal=True)
    os.utime(path, (time.time() - 90, time.time() - 90))
    with pytest.raises(InputError, match="--steal"):
        api.save(tmp_path / "C.zarr", EYE)
    api.save(tmp_path / "C.zarr", EYE, steal=True)
    assert names(tmp_path) == {"C.zarr"}


@pytest.mark.parametrize(
    "make", [spdist.vbr.from_scipy, lambda m: spdist.sell(m, C=8, sigma=1)], ids=["vbr", "operator"]
)
def test_whatever_is_saved_steals(tmp_path, make):
    matrix = make(EYE)
    elsewhere(tmp_path / "C.zarr", 90)
    with pytest.raises(InputError, match="--steal"):
        matrix.save(tmp_path / "C.zarr")
    matrix.save(tmp_path / "C.zarr", steal=True)
    assert names(tmp_path) == {"C.zarr"}


def test_a_run_whose_lock_was_stolen_replaces_nothing(tmp_path):
    target = tmp_path / "C.zarr"
    old = api.save(target, EYE)
    lost = pytest.raises(SpdistError, match="another run took the lock")
    with lost, staged_matrix(target, overwrite=True) as stage:
        api.save(stage.url, 2 * EYE)
        stolen = elsewhere(target, 0)
    assert open_matrix(target).rows(0, 3).data.tolist() == [1, 1, 1] == old.rows(0, 3).data.tolist()
    assert Path(f"{target}.spdist-lock").read_bytes() == stolen  # nor does it end the lock of the other
    with pytest.raises(SpdistError, match="another run"), hold_target(tmp_path / "D.zarr") as held:  # noqa: PT012
        elsewhere(tmp_path / "D.zarr", 0)
        held.check()


@pytest.fixture
def quick_heartbeat(monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.02)


@pytest.mark.usefixtures("quick_heartbeat")
def test_the_heartbeat_stops_a_run_whose_lock_was_stolen(tmp_path):
    ended = []
    with pytest.raises(SpdistError, match="another run took the lock"), hold_target(tmp_path / "C.zarr"):  # noqa: PT012
        elsewhere(tmp_path / "C.zarr", 0)
        time.sleep(60)
        ended.append(True)
    assert not ended


@pytest.mark.usefixtures("quick_heartbeat")
def test_the_heartbeat_stops_a_thread_and_a_process_that_ignores_signals(tmp_path):
    def write(name: str) -> str:
        with pytest.raises(SpdistError, match="another run took the lock"), hold_target(tmp_path / name):  # noqa: PT012
            elsewhere(tmp_path / name, 0)
            for _ in range(1000):
                time.sleep(0.01)
        return "stopped"

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(write, "C.zarr").result(9) == "stopped"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        write("D.zarr")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("quick_heartbeat")
def test_the_heartbeat_is_seen(tmp_path):
    with hold_target(tmp_path / "C.zarr") as held:
        os.utime(held.path, (0, 0))
        deadline = time.monotonic() + 90
        while LocalFiles().age(held.path) > 5:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_thread_holds_again_what_it_holds_and_other_threads_are_other_runs(tmp_path):
    target = tmp_path / "C.zarr"
    with hold_target(target) as outer, hold_target(f"{target}.spdist-new.spdist-columns") as inner:
        assert inner is outer
        api.save(target, EYE)
        assert Path(outer.path).exists()  # the inner block does not release it
        with ThreadPoolExecutor(1) as pool, pytest.raises(InputError, match="another thread of this process"):
            pool.submit(api.save, target, EYE, overwrite=True).result()
        api.save(tmp_path / "D.zarr", EYE)  # another target
    assert names(tmp_path) == {"C.zarr", "D.zarr"}


def dead_lock(target: Path) -> bytes:
    """Leave the lock of a process of this host that is dead."""
    path = Path(f"{target}.spdist-lock")
    found = json.loads(this_process("dead").to_bytes())
    path.write_text(json.dumps(found | {"start": "0"}))
    return path.read_bytes()


def test_of_several_that_take_over_one_wins(tmp_path):
    for turn in range(20):
        target = tmp_path / f"{turn}.zarr"
        dead_lock(target)
        start, locks = threading.Barrier(6), [TargetLock(str(target)) for _ in range(6)]

        def take(one: TargetLock, start: threading.Barrier = start) -> bool:
            start.wait()
            try:
                one.acquire(steal=False)
            except InputError:
                return False
            return True

        with ThreadPoolExecutor(6) as pool:
            won = list(pool.map(take, locks))
        assert sum(won) == 1
        owner = owner_from((tmp_path / f"{turn}.zarr.spdist-lock").read_bytes())
        assert owner == locks[won.index(True)].owner
        locks[won.index(True)].release()
    assert not names(tmp_path)


def killed_at(step: int, work) -> bool:
    """Do some work in a process that is killed at its n-th call of the system for files; return whether it was."""
    child = os.fork()
    if not child:
        seen = [0]

        def count(event: str, args: tuple[object, ...]) -> None:
            if event in ("open", "os.link", "os.rename", "os.remove", "os.rmdir", "os.utime", "os.mkdir", "os.listdir"):
                seen[0] += 1
                if seen[0] == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("left", ["nothing", "a dead lock", "a dead lock that a dead run was taking"])
def test_a_kill_at_any_moment_leaves_a_target_that_can_be_held(tmp_path, left):
    target, step, killed = tmp_path / "C.zarr", 0, True

    def hold() -> None:
        with hold_target(target):
            pass

    while killed:
        step += 1
        content = b"" if left == "nothing" else dead_lock(target)
        if left.endswith("taking"):
            right = TargetLock(str(target))
            right.files.delete = lambda path: None
            right.files.put = lambda path, content: None
            assert right._end(right.path, content, b"")
            (file,) = (path for path in tmp_path.iterdir() if ".end-" in path.name)
            file.write_text(json.dumps(json.loads(file.read_bytes()) | {"start": "0"}))
        killed = killed_at(step, hold)
        with hold_target(target):
            lock.remove_remains(str(target))
        assert not names(tmp_path), step
    assert step > 5


def test_remains_of_dead_runs_are_removed_in_a_line(tmp_path, caplog):
    api.save(tmp_path / "C.zarr", EYE)
    for name in ("new", "old", "columns", "transposed-a", "scratch-1"):
        (tmp_path / f"C.zarr.spdist-{name}" / "deep").mkdir(parents=True)
    (tmp_path / "C.zarr.spdist-lock.00000000").write_bytes(json.dumps({}).encode())  # of a run that is about to ask
    (tmp_path / "CC.zarr.spdist-new").mkdir()  # of another target
    api.save(tmp_path / "C.zarr", EYE, overwrite=True)
    assert names(tmp_path) == {"C.zarr", "C.zarr.spdist-lock.00000000", "CC.zarr.spdist-new"}
    (line,) = (record.getMessage() for record in caplog.records)
    assert all(f"spdist-{name}" in line for name in ("new", "old", "columns", "transposed-a", "scratch-1"))


def test_a_killed_transpose_leaves_nothing_to_the_next(tmp_path, caplog):
    a = api.save(tmp_path / "A.zarr", EYE)
    work = (
        "import os, sys; from spdist.storage import transpose as t\n"
        "t._blocks = lambda m: os.kill(os.getpid(), 9)\n"
        "t.transpose(sys.argv[1], sys.argv[2])"
    )
    call = [sys.executable, "-c", work, a.url, str(tmp_path / "T.zarr")]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run(call, env=env, check=False).returncode == -signal.SIGKILL
    assert any("T.zarr.spdist-scratch-" in name for name in names(tmp_path))
    with hold_target(tmp_path / "A.zarr"):  # another target: what is the first's stays
        lock.remove_remains(a.url)
    assert any("T.zarr.spdist-scratch-" in name for name in names(tmp_path))
    transpose(a, tmp_path / "T.zarr")
    assert names(tmp_path) == {"A.zarr", "T.zarr"}
    assert "removed what a run left" in caplog.text


def test_an_exported_file_is_held_too(tmp_path):
    with staged_file(tmp_path / "a.npz", overwrite=False) as path, ThreadPoolExecutor(1) as pool:
        with pytest.raises(InputError, match="is being written by run"):
            pool.submit(staged_file(tmp_path / "a.npz", overwrite=False).__enter__).result()
        path.write_bytes(b"1")


class IgnoresConditions:
    """A store that takes ``mode="create"`` and ignores it; `rival` writes after each write.

    Parameters
    ----------
    rival : bytes or None
        What another run writes, which asked for the object when it was not there, as the first one did.
    """

    protocol = "memory"

    def __init__(self, rival: bytes | None) -> None:
        self.objects, self.rival = dict[str, bytes](), rival

    def _strip_protocol(self, path: str) -> str:
        return path

    def cat_file(self, path: str) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]

    def pipe_file(self, path: str, content: bytes, mode: str = "overwrite") -> None:
        self.objects[path] = content if self.rival is None else self.rival


def test_of_two_runs_on_a_store_that_ignores_conditions_one_has_the_lock():
    for rival, mine in ((None, True), (b"the other's", False)):
        files = RemoteFiles(IgnoresConditions(rival), is_exclusive=True)
        assert files.create("memory://C.zarr.spdist-lock", b"mine") is mine
        assert not files.create("memory://C.zarr.spdist-lock", b"a third one's")


def test_a_folder_that_is_none_is_refused(tmp_path):
    a = api.save(tmp_path / "A.zarr", EYE)
    with pytest.raises(InputError, match="is not a folder; create it"):
        api.multiply(a, a, tmp_path / "none" / "C.zarr")


def test_a_file_system_without_links_has_locks_too(tmp_path, monkeypatch):
    def refuse(*names: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    test_of_several_that_take_over_one_wins(tmp_path)
