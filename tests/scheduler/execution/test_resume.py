"""What a killed run leaves, and what is done to it, is continued to the right C, or is one line."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import spdist
from spdist.api import products as api
from spdist.errors import CorruptError, InputError, ResumeError, SpdistError
from spdist.scheduler.execution import journal, stages
from spdist.scheduler.execution.journal import JournalTuning
from spdist.scheduler.execution.unfinished import Checkpoint, read_journal
from spdist.storage import groups, notes
from spdist.stores.registry import at
from tests.conftest import random_matrix
from tests.scheduler.execution.test_driver import files
from tests.support.planning import SHORT_CHUNKS

KILL_AT = Path(__file__).parents[2] / "support" / "kill_at.py"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed(point: str, *words: str | Path) -> None:
    """Run a command that kills itself at a point: function, number of the call, before or after it."""
    command = [sys.executable, KILL_AT, *point.split(), *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    """Return a folder with A, B and their product R."""
    folder = tmp_path_factory.mktemp("products")
    for name, seed in (("A", 1), ("B", 2)):
        api.save(folder / f"{name}.zarr", random_matrix(300, 300, 5, seed))
    api.multiply(folder / "A.zarr", folder / "B.zarr", folder / "R.zarr")
    return folder


FINISH = [
    "pathlib.Path.replace 1 before",  # not even begun
    "spdist.storage.notes.write_note 1 before",
    "spdist.storage.groups.finish_group 1 before",
    "pathlib.Path.replace 4 before",  # a temporary file of Zarr's stays
    "spdist.storage.groups.finish_group 1 after",
    "spdist.storage.notes.remove_note 1 after",
]


@pytest.mark.parametrize("point", FINISH)
def test_killed_while_it_finishes(products, tmp_path, executor, caplog, point):
    a, b, c = products / "A.zarr", products / "B.zarr", tmp_path / "C.zarr"
    workers = ["--workers", 1] if executor else []
    killed(point, "multiply", a, b, c, *workers, "--engine", "scipy")
    whole = groups.read_facts(str(c)).get("state") == "complete"
    remains = list(c.glob("spdist-*"))  # a short run writes no journal
    report = api.multiply(a, b, c, resume=True, **executor)
    assert files(c) == files(products / "R.zarr")
    assert names(tmp_path) == ["C.zarr"]
    if whole:
        assert report.state == "already finished"
        said = "removed what a run left that was killed when C was whole: spdist-" in caplog.text
        assert said == bool(remains)
        assert remains or "remove_note" in point


@pytest.mark.parametrize("point", [
    "spdist.storage.notes.sync_metadata 1 before", "spdist.jobs.by_rows.put_in_place 1 before",
])  # fmt: skip
def test_killed_before_the_new_c_is_in_place(products, tmp_path, scheduler, caplog, point):
    """What is reported is the new C, unless power failed before all of it was on the disk."""
    a, b, c = products / "A.zarr", products / "B.zarr", tmp_path / "C.zarr"
    api.multiply(a, a, c, scheduler=scheduler)
    old = files(c)
    killed(point, "multiply", a, b, c, "--workers", 1, "--engine", "scipy", "--overwrite")
    assert files(c) == old
    with (
        lost(Path(f"{c}.spdist-new")),
        pytest.raises(ResumeError, match=r"was finished and is damaged: .*Zarr chunk 0"),
    ):
        api.multiply(a, b, c, resume=True, scheduler=scheduler)
    assert files(c) == old
    report = api.multiply(a, b, c, resume=True, scheduler=scheduler)
    assert report.state == "already finished"
    assert report.nnz == spdist.open(products / "R.zarr").nnz
    assert files(c) == files(products / "R.zarr")
    assert names(tmp_path) == ["C.zarr"]
    assert "C.zarr: replaced by the C that a killed run had finished at" in caplog.text
    with lost(c), pytest.raises(CorruptError, match="Zarr chunk 0 of array 'data'"):
        api.multiply(a, b, c, resume=True, scheduler=scheduler)


@contextlib.contextmanager
def lost(matrix):
    """Let the first Zarr chunk of the values be zeros, as a power failure leaves it."""
    chunk = matrix / "data/c/0"
    content = chunk.read_bytes()
    chunk.write_bytes(bytes(len(content)))
    yield
    chunk.write_bytes(content)


@pytest.mark.parametrize(("when", "replaces"), [("before", True), ("after", False)])
def test_killed_when_the_transpose_is_whole(products, tmp_path, scheduler, when, replaces):
    """Before or after C is written from it; A and B were transposed, too."""
    a, b, c = products / "A.zarr", products / "B.zarr", tmp_path / "C.zarr"
    options = {"axis": 0, "top_n": 2, "scheduler": scheduler}
    api.multiply(a, b, tmp_path / "R.zarr", **options)
    if replaces:
        api.multiply(a, a, c, scheduler=scheduler)
    words = ["multiply", a, b, c, *["--axis", "0", "--top-n", "2", "--workers", "1"], *["--overwrite"] * replaces]
    killed(f"spdist.storage.transpose.transpose 3 {when}", *words)
    report = api.multiply(a, b, c, resume=True, **options)
    assert report.nnz == spdist.open(tmp_path / "R.zarr").nnz
    kept, reference = files(c), files(tmp_path / "R.zarr")
    assert {name for name in reference if kept[name] != reference[name]} == {"zarr.json"}  # names the places of copies
    assert not list(tmp_path.glob("*columns"))


# -- an unfinished C ---------------------------------------------------------------------------------------------------


def tune(patch: pytest.MonkeyPatch) -> None:
    """Let C have several Zarr chunks, and say after each block what of it is durable, however long that takes."""
    patch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)
    patch.setattr("spdist.scheduler.execution.journal.TUNING", JournalTuning(seconds=0.0, share=1e9))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, executor):
    """Return A, the options of a product, and a folder with its C, stopped in the middle, and an undisturbed one."""
    folder, options = tmp_path_factory.mktemp("stopped"), {"grid": (30, 1, 1), **executor}
    a = api.save(tmp_path_factory.mktemp("operand") / "A.zarr", random_matrix(900, 900, 12, 3))
    write = journal.Journal.write

    def stop_late(self):
        write(self)
        if self.checkpoint.row > 600:
            raise SpdistError("the disk is gone")

    with pytest.MonkeyPatch.context() as patch:
        tune(patch)
        api.multiply(a, a, folder / "R.zarr", **options)
        patch.setattr(journal.Journal, "write", stop_late)
        with pytest.raises(SpdistError, match="the disk is gone"):
            api.multiply(a, a, folder / "C.zarr", **options)
    return a, options, folder


@pytest.fixture
def unfinished(stopped, tmp_path, monkeypatch):
    """Return A, the options of a product, and a C of one's own that was stopped, with an undisturbed one beside it."""
    tune(monkeypatch)
    a, options, folder = stopped
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    c = tmp_path / "C.zarr"
    assert read_journal(str(c)).checkpoint.chunks > 2
    return a, options, c


def alter(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def exchange(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


DAMAGE = {
    "missing": lambda c: (c / "data/c/1").unlink(),
    "flipped": lambda c: alter(c / "indices/c/2", 9),
    "other": lambda c: (c / "data/c/0").replace(c / "data/c/1"),
    "swapped": lambda c: exchange(c / "data/c/0", c / "data/c/1"),
    "offsets": lambda c: alter(c / "indptr/c/0", 5) if (c / "indptr/c/0").exists() else None,
    "journal": lambda c: alter(c / "spdist-journal", -1),
    "no journal": lambda c: (c / "spdist-journal").unlink(),
    "truncated journal": lambda c: os.truncate(c / "spdist-journal", 150),
    "empty journal": lambda c: os.truncate(c / "spdist-journal", 0),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_costs_work_and_no_more(unfinished, tmp_path, caplog, how):
    a, options, c = unfinished
    DAMAGE[how](c)
    report = api.multiply(a, a, c, resume=True, **options)
    assert report.state == "resumed"
    assert files(c) == files(tmp_path / "R.zarr")
    if how == "missing":
        assert "Zarr chunks are missing or other than they were when they were written; work goes back" in caplog.text
    if how in ("journal", "truncated journal", "empty journal"):
        assert "the journal is damaged, so that work begins again at row 0" in caplog.text
        assert report.blocks == 30


def test_a_sound_c_is_continued_where_it_ended(unfinished, tmp_path, caplog):
    a, options, c = unfinished
    report = api.multiply(a, a, c, resume=True, **options)
    assert report.blocks < 30
    assert files(c) == files(tmp_path / "R.zarr")
    assert not [record for record in caplog.records if record.name == "spdist"]


def test_the_newest_contents_are_read(unfinished, tmp_path, monkeypatch):
    """Of others only the checksums are, so that a resumed run begins soon."""
    a, options, c = unfinished
    newest = read_journal(str(c)).checkpoint.chunks - 1
    monkeypatch.setattr("spdist.scheduler.execution.recovery.CHECKED_WHOLE", 1)
    alter(c / f"data/c/{newest}", 9)
    alter(c / "data/c/0", 9)
    api.multiply(a, a, c, resume=True, **options)
    kept, reference = files(c), files(tmp_path / "R.zarr")
    assert {name for name in reference if kept[name] != reference[name]} == {"data/c/0"}
    with pytest.raises(CorruptError, match="chunk 0 of array 'data'"):
        spdist.open(c).rows(0, 10)


@pytest.mark.parametrize("how", ["plan", "another plan", "both", "metadata", "no metadata"])
def test_what_cannot_be_continued_is_one_line_and_can_be_overwritten(unfinished, tmp_path, how):
    a, options, c = unfinished
    if how == "another plan":
        notes.write_note(str(c), "plan", b'{"engine": "of tomorrow"}')
    elif "metadata" in how:
        (c / "zarr.json").write_text("{" * (how == "metadata"))
    else:
        alter(c / "spdist-plan", 200)
    if how == "both":
        os.truncate(c / "spdist-journal", 0)
    with pytest.raises(SpdistError, match=r"^[^\n]*C\.zarr[^\n]*--overwrite[^\n]*$") as refused:
        api.multiply(a, a, c, resume=True, **options)
    assert refused.type is (CorruptError if how in ("plan", "both") else refused.type)
    assert refused.type is (ResumeError if how == "another plan" else refused.type)
    api.multiply(a, a, c, overwrite=True, **options)
    assert files(c) == files(tmp_path / "R.zarr")


@pytest.mark.parametrize(("file", "lost"), [("spdist-plan", "plan"), ("zarr.json", "metadata")])
def test_a_replacement_without_its_plan_or_metadata_says_so(unfinished, tmp_path, file, lost):
    a, options, c = unfinished
    c.rename(f"{c}.spdist-new")
    (tmp_path / "R.zarr").rename(c)
    (Path(f"{c}.spdist-new") / file).unlink()
    with pytest.raises(ResumeError, match=rf"C\.zarr\.spdist-new, which was to replace .*lost its {lost}.*--overwrite"):
        api.multiply(a, a, c, resume=True, **options)
    assert spdist.open(c).facts["state"] == "complete"


@pytest.mark.parametrize("place", ["A.zarr/x", "A.zarr", "C.zarr", "C.zarr/x"])
def test_a_record_lies_in_no_matrix(stored, tmp_path, place):
    a = stored("A", random_matrix(30, 30, 3, 1))
    with pytest.raises(InputError, match=r"is inside the matrix .*choose a place outside"):
        api.multiply(a, a, tmp_path / "C.zarr", record=tmp_path / place)
    assert not (tmp_path / "A.zarr" / "x").exists()


# -- during a run ------------------------------------------------------------------------------------------------------


def test_a_worker_that_writes_elsewhere_is_found(stored, tmp_path, scheduler, monkeypatch):
    monkeypatch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)
    monkeypatch.setattr("spdist.scheduler.execution.journal.LATE_FILE_SECONDS", 0.3)
    a, c, commit = stored("A", random_matrix(900, 900, 12, 3)), tmp_path / "C.zarr", stages.commit

    def lose(context, task, *rest):
        committed = commit(context, task, *rest)
        if task.number == 20:
            (chunks,) = (chunks for chunks in committed.written if chunks.array == "data")
            for k in range(chunks.first, chunks.first + len(chunks.sums)):
                (c / f"data/c/{k}").unlink()
        return committed

    monkeypatch.setitem(stages.STAGES, "commit", lose)
    monkeypatch.setattr("spdist.scheduler.executors.dask.is_seen", lambda array, k: True)
    with pytest.raises(SpdistError, match=r"^worker \S+, \S+ wrote \S+data/c/\d+, but it is not there for this"):
        api.multiply(a, a, c, grid=(30, 1, 1), scheduler=scheduler)
    assert groups.read_facts(str(c))["state"] == "unfinished"
    monkeypatch.undo()
    api.multiply(a, a, c, resume=True, check=True, scheduler=scheduler)


def test_a_zarr_chunk_that_is_seen_late_is_waited_for(stored, tmp_path, executor, monkeypatch):
    a, c, look = stored("A", random_matrix(300, 300, 5, 3)), tmp_path / "C.zarr", notes.refresh
    api.multiply(a, a, tmp_path / "R.zarr", **executor)
    commit, looks = stages.join, []

    def hide(*args):
        written = commit(*args)
        (c / "data/c/0").rename(tmp_path / "hidden")
        return written

    def refresh(array):
        look(array)
        looks.append(array.name)
        if (tmp_path / "hidden").exists():
            (tmp_path / "hidden").rename(c / "data/c/0")

    monkeypatch.setitem(stages.STAGES, "join", hide)
    monkeypatch.setattr(notes, "refresh", refresh)
    api.multiply(a, a, c, **executor)
    assert looks == ["data"]
    assert files(c) == files(tmp_path / "R.zarr")


@pytest.mark.parametrize("shrink", [1, 5])
def test_progress_counts_each_block_once(stored, tmp_path, executor, monkeypatch, shrink):
    """Also blocks that end before their last row, because their room is full."""
    from dataclasses import replace

    from spdist.scheduler.planner import planner

    monkeypatch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)
    a, seen = stored("A", random_matrix(900, 900, 12, 3)), []
    plan = api.plan(a, a, grid=(20, 1, 1))
    blocks = tuple(replace(block, capacity=block.capacity // shrink + 1) for block in plan.blocks)
    monkeypatch.setattr(planner, "make_plan", lambda *_, **__: replace(plan, blocks=blocks))
    callbacks = spdist.Callbacks(progress=seen.append)
    report = api.multiply(a, a, tmp_path / "C.zarr", **executor, callbacks=callbacks)
    assert len(seen) > 5
    assert all(each.blocks <= each.blocks_total for each in seen)
    for before, after in itertools.pairwise(seen):
        assert before.blocks <= after.blocks
        assert before.blocks_total <= after.blocks_total
        assert before.products <= after.products
    assert seen[-1].blocks == seen[-1].blocks_total == report.blocks
    assert (report.blocks == 20) == (shrink == 1)
    if shrink == 1:
        assert {each.blocks_total for each in seen} == {20}


def test_the_journal_is_written_less_often_when_it_takes_long(stored, tmp_path, executor, monkeypatch):
    monkeypatch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)
    monkeypatch.setattr("spdist.scheduler.execution.journal.TUNING", JournalTuning(seconds=0.0))
    a, write, writes = stored("A", random_matrix(900, 900, 12, 3)), journal.Journal.write, []

    def slow(self):
        write(self)
        time.sleep(0.1)  # 10 seconds' share
        writes.append(self.checkpoint.row)

    monkeypatch.setattr(journal.Journal, "write", slow)
    api.multiply(a, a, tmp_path / "C.zarr", **executor, grid=(30, 1, 1))
    assert len(writes) == 2  # the first and the last
    assert writes[-1] == 900


def test_nothing_durable_before_the_first_block(stored, tmp_path, executor, monkeypatch):
    """Not even rows without entries, unless the journal says so."""
    a = stored("A", random_matrix(100, 100, 3, 3))
    groups.begin(str(tmp_path / "C.zarr"), {})
    assert read_journal(str(tmp_path / "C.zarr")).checkpoint == Checkpoint()
    at(str(tmp_path / "C.zarr")).remove()
    assert api.multiply(a, a, tmp_path / "C.zarr", **executor, resume=True).state == "computed"
