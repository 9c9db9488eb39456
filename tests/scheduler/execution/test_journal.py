"""The journal of an unfinished C: what is written is read, and what lies there is compared with it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spdist.api import products as api
from spdist.errors import CorruptError, ResumeError
from spdist.matrices.csr import CSR
from spdist.scheduler.execution import recovery, stages, unfinished
from spdist.scheduler.execution.journal import Journal, KnownChecksums, UnseenChunkError, is_seen
from spdist.scheduler.execution.records import BlockCounts, BlockTask
from spdist.scheduler.execution.unfinished import (
    Checkpoint,
    DurablePart,
    read_events,
    read_journal,
    read_plan,
    write_plan,
)
from spdist.storage import groups, notes
from spdist.storage.writer import Layout
from tests.conftest import random_matrix

LENGTH = 4  # elements of a Zarr chunk


def layout_of(folder: Path) -> Layout:
    layout = Layout(str(folder / "C.zarr"), 9, np.dtype(np.float64), LENGTH)
    shutil.rmtree(layout.url, ignore_errors=True)
    groups.begin(layout.url, {})
    return layout


def rows_of(start: int, offset: int, *lengths: int) -> tuple[BlockTask, int, BlockCounts]:
    """Return a block whose row offsets all go to the journal."""
    ends = np.cumsum(lengths, dtype=np.int64)
    counts = BlockCounts(len(lengths), int(ends[-1]), ends, ends[:0], b"", False)
    return BlockTask(0, start, start + len(lengths), 0, False), offset, counts


def write_rows(layout: Layout, lengths: list[int]) -> Journal:
    """Write rows as a run does, whole Zarr chunks only, and their journal."""
    journal, nnz = Journal(layout), sum(lengths)
    chunks = nnz // LENGTH
    values = np.arange(1, chunks * LENGTH + 1)
    journal.chunks.add(layout.write_entries(0, values.astype(np.int32) % 9, values.astype(float)))
    assert journal.chunks.count == chunks
    journal.chunks.look(wait=True)
    journal.keep()
    ends = np.cumsum([0, *lengths])
    for row, (begin, end) in enumerate(itertools.pairwise(ends)):
        if end <= chunks * LENGTH:
            journal.add_rows(*rows_of(row, int(begin), end - begin))
    journal.write()
    journal.chunks.close()
    return journal


def test_rows_and_chunks_become_durable(tmp_path):
    layout = layout_of(tmp_path)
    assert read_journal(layout.url).checkpoint == Checkpoint()
    journal = Journal(layout)
    journal.chunks.add(layout.write_entries(0, np.arange(8, dtype=np.int32), np.ones(8)))
    journal.add_rows(*rows_of(0, 0, 2, 0, 5))
    journal.keep()
    assert journal.checkpoint.chunks == 2
    journal.set_compressed()
    journal.write()
    part = read_journal(layout.url)
    assert part.checkpoint == Checkpoint(3, 7, 2, True)
    assert part.offsets.tolist() == []  # offsets 0, 2, 2, 7 fill a Zarr chunk
    assert layout.array("indptr").read(0, 4).tolist() == [0, 2, 2, 7]
    for name in groups.ARRAYS:
        stored = getattr(part.checksums, name)
        assert stored.tolist() == layout.array(name).stored_checksums(0, len(stored)).tolist()
    assert [len(part.checksums.indptr), len(part.checksums.data)] == [1, 2]


def test_a_resumed_journal_goes_on(tmp_path, caplog):
    layout = layout_of(tmp_path)
    write_rows(layout, [2, 0, 5, 1])
    journal = Journal(layout)
    assert journal.checkpoint == Checkpoint(4, 8, 2)
    journal.add_rows(*rows_of(4, 8, 1, 1))
    sums = journal.close()
    assert layout.array("indptr").read(4, 7).tolist() == [8, 9, 10]
    assert sums.indptr.tolist() == layout.array("indptr").stored_checksums(0, 2).tolist()
    assert not caplog.records


@given(cuts=st.sets(st.integers(1, 40)), seed=st.randoms(use_true_random=False), before=st.integers(0, 3))
def test_checksums_become_known_in_order_however_they_are_told(cuts, seed, before):
    ends = sorted({before, *(before + cut for cut in cuts)})
    sums = np.arange(ends[-1], dtype=np.uint32)
    known = KnownChecksums(sums[:before])
    parts, told = list(itertools.pairwise(ends)), set(range(before))
    seed.shuffle(parts)
    for begin, end in [*parts, *parts[:1]]:  # a block that is computed again tells it again
        known.add(begin, sums[begin:end])
        told.update(range(begin, end))
        assert known.count == next(k for k in itertools.count() if k not in told)
        assert known.table().tolist() == sums[: known.count].tolist()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    blocks=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=14), min_size=1, max_size=6),
    chunk=st.integers(1, 5),
    resumed=st.integers(0, 6),
)
def test_row_offsets_are_written_by_workers_and_the_journal(tmp_path, blocks, chunk, resumed):
    """Each Zarr chunk once: by the worker whose block it lies in, or by the journal, before and after a resume."""
    layout = replace(layout_of(tmp_path), chunk=chunk)
    context = SimpleNamespace(job=SimpleNamespace(offsets_chunk=chunk))
    journal, row, nnz, by_workers = Journal(layout), 0, 0, set()
    for number, lengths in enumerate(blocks):
        if number == resumed:
            journal.keep()
            journal.write()
            journal = Journal(layout)
            assert (journal.checkpoint.row, journal.checkpoint.nnz) == (row, nnz)
        ends = np.cumsum([0, *lengths], dtype=np.int64)
        c = CSR(ends, np.zeros(ends[-1], np.int32), np.zeros(ends[-1]), (len(lengths), 9))
        task = BlockTask(number, row, row + len(lengths), 0, False)
        first, last = stages.offsets_inside(row, len(lengths), chunk)
        inside = layout.write("indptr", first, nnz + ends[first * chunk - row : last * chunk - row])
        by_workers |= set(range(first, last))
        entries = np.zeros(-(-(nnz + int(ends[-1])) // chunk) * chunk)
        journal.chunks.add([*inside, *layout.write_entries(0, entries.astype(np.int32), entries)])
        journal.add_rows(task, nnz, stages.count(context, task, c))
        row, nnz = row + len(lengths), nnz + int(ends[-1])
    sums = journal.close()
    journal.chunks.close()
    every = np.cumsum([0, *(length for lengths in blocks for length in lengths)])
    assert layout.array("indptr").read(0, row + 1).tolist() == every.tolist()
    assert sums.indptr.tolist() == layout.array("indptr").stored_checksums(0, -(-(row + 1) // chunk)).tolist()
    assert by_workers <= set(range(len(sums.indptr)))
    assert len(by_workers) >= sum((len(lengths) + 1) // chunk - 1 for lengths in blocks if len(lengths) >= 2 * chunk)


def test_a_zarr_chunk_that_is_not_as_told_is_found(tmp_path, monkeypatch):
    """Also if a file is there, such as one of another run in a folder that only this process sees."""
    monkeypatch.setattr("spdist.scheduler.execution.journal.LATE_FILE_SECONDS", 0.0)
    layout = layout_of(tmp_path)
    journal = Journal(layout)
    written = layout.write_entries(0, np.arange(12, dtype=np.int32) % 9, np.arange(12.0))
    layout.write_entries(0, np.arange(12, dtype=np.int32) % 9, np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 99.0]))
    journal.chunks.add(written)
    with pytest.raises(UnseenChunkError, match="data/c/2"):
        journal.chunks.look(wait=True)
    journal.chunks.close()


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_process_sees_the_zarr_chunks_that_are_there(tmp_path):
    layout = layout_of(tmp_path)
    write_rows(layout, [LENGTH, 1])
    assert [is_seen(layout.array("indices"), k) for k in (0, 1)] == [True, False]


def damage(path: Path, how: str, other: Path) -> None:
    """Delete, shorten or alter a file, in its middle or at its end, or exchange it with another."""
    content = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "swap":
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        at = {"flip": len(content) // 2, "flip the checksum": -2}.get(how, 0)
        content[at] ^= 16
        path.write_bytes(content[: len(content) // 2] if how == "shorten" else content)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    picked=st.integers(0, 10**6),
    how=st.sampled_from(["delete", "shorten", "flip", "flip the checksum", "swap"]),
)
def test_work_goes_back_to_the_last_row_before_the_damage(tmp_path, lengths, picked, how):
    layout = layout_of(tmp_path)
    written = write_rows(layout, lengths)
    files = sorted(Path(layout.url).glob("*/c/*"))
    if not files:
        return
    path, other = files[picked % len(files)], files[picked // 7 % len(files)]
    damage(path, how, other)
    part, ends = recovery.resume_from(layout), np.cumsum([0, *lengths])
    front, array, k = part.checkpoint, path.parts[-3], int(path.name)
    assert front.nnz == ends[front.row] <= front.chunks * LENGTH
    at = front.row + 1 - len(part.offsets)
    assert at == len(part.checksums.indptr) * LENGTH
    assert part.offsets.tolist() == ends[at : front.row + 1].tolist()
    if how == "swap":  # of equal files, or with a file of another array
        assert front.row <= written.checkpoint.row
    elif array == "indptr":
        assert front.row == max(k * LENGTH - 1, 0)
    else:
        assert front.chunks == k
        assert front.row == np.flatnonzero(ends <= k * LENGTH)[-1]
    for name in groups.ARRAYS:
        sums = getattr(part.checksums, name)
        assert sums.tolist() == layout.array(name).stored_checksums(0, len(sums)).tolist()
        assert len(list(Path(layout.url, name, "c").glob("*"))) == len(sums)


def test_damaged_offsets_far_back_cost_the_rows_from_them_on(tmp_path, monkeypatch):
    """Only the newest Zarr chunks are read before they are needed."""
    monkeypatch.setattr(recovery, "CHECKED_WHOLE", 1)
    layout = layout_of(tmp_path)
    write_rows(layout, [1] * 40)
    Path(layout.url, "data", "c", "6").unlink()  # entry 24 is missing, and offset 24 is the first of its Zarr chunk
    damage(Path(layout.url, "indptr", "c", "6"), "flip", Path())
    assert recovery.resume_from(layout).checkpoint == Checkpoint(23, 23, 6)


def test_zarr_chunks_beyond_the_journal_are_deleted(tmp_path):
    layout = layout_of(tmp_path)
    write_rows(layout, [4, 4])
    layout.write_entries(2, np.ones(4, np.int32), np.ones(4))
    Path(layout.url, "data", "c", "9.0123.partial").write_text("half")
    Journal(layout)
    for name in ("indices", "data"):
        assert sorted(path.name for path in Path(layout.url, name, "c").iterdir()) == ["0", "1"]


def test_a_damaged_journal_is_begun_anew(tmp_path, caplog):
    layout = layout_of(tmp_path)
    write_rows(layout, [4, 4])
    damage(Path(layout.url, "spdist-journal"), "flip", Path())
    assert Journal(layout).checkpoint == Checkpoint()
    (record,) = caplog.records
    assert "spdist-journal is damaged" in record.getMessage()
    assert "row 0" in record.getMessage()


def test_a_journal_belongs_to_its_plan(stored, tmp_path):
    a, layout = stored("A", random_matrix(40, 40, 3, 1)), layout_of(tmp_path)
    write_plan(layout.url, api.plan(a, a), {"a": 1})
    unfinished.write_journal(layout.url, DurablePart(), unfinished.plan_digest(layout.url))
    read_journal(layout.url)
    assert read_plan(layout.url, {"a": 1}) == api.plan(a, a)
    with pytest.raises(CorruptError, match=r"spdist-plan is damaged .it is the plan of another product.*--overwrite"):
        read_plan(layout.url, {"a": 2})
    write_plan(layout.url, api.plan(a, a, grid=(2, 1, 1)), {"a": 1})
    with pytest.raises(CorruptError, match=r"spdist-journal is damaged .it belongs to another plan.*--overwrite"):
        read_journal(layout.url)


# -- notes -------------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_note_that_is_not_as_it_was_is_one_line(tmp_path, data):
    url, path = str(tmp_path / "C.zarr"), tmp_path / "C.zarr" / "spdist-plan"
    if not path.exists():
        groups.begin(url, {})
        notes.write_note(url, "plan", bytes(range(256)))
    whole, content = path.read_bytes(), None
    try:
        content = bytearray(data.draw(st.one_of(st.binary(max_size=200), st.just(whole))))
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        if content and data.draw(st.booleans()):
            content[at] ^= data.draw(st.integers(1, 255))
        else:
            del content[at:]
        path.write_bytes(content)
        with pytest.raises((CorruptError, ResumeError), match=r"^[^\n]*spdist-plan [^\n]*--overwrite$"):
            notes.read_note(url, "plan")
    finally:
        path.write_bytes(whole)
    assert notes.read_note(url, "plan") == bytes(range(256))


HOSTILE = [
    b"", b"\n", b"{}", b"[]\n", b"null\nx", b"[" * 100_000, b'{"kind": "plan"}\n', b'{"format": {}, "kind": []}\n',
    b'{"format": 1, "kind": "journal", "length": 0, "blake2b": ""}\n', b"\xff\xfe\n", b"9" * 5000, b'{"format": NaN}',
]  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("note", notes.UNFINISHED_NOTES)
def test_any_content_is_one_line(tmp_path, note, content):
    layout = layout_of(tmp_path)
    read = {"plan": read_plan, "journal": read_journal, "events": read_events}[note]
    Path(layout.url, f"spdist-{note}").write_bytes(content)
    with pytest.raises((CorruptError, ResumeError), match=rf"^[^\n]*spdist-{note} [^\n]*--overwrite$"):
        read(layout.url)
    notes.write_note(layout.url, note, content)  # as another version would, with the right checksum
    with pytest.raises(ResumeError, match=rf"spdist-{note} was written by another version of spdist.*--overwrite"):
        read(layout.url)


@pytest.mark.parametrize("head", [{"format": 2}, {"format": 7, "kind": "plan"}, {"row": 5, "nnz": 3, "chunks": 1}])
def test_a_note_of_another_version_is_one_line(tmp_path, head):
    layout = layout_of(tmp_path)
    Path(layout.url, "spdist-journal").write_bytes(json.dumps(head).encode() + b"\n\0\0")
    with pytest.raises(ResumeError, match=r"spdist-journal was written by another version of spdist.*--overwrite"):
        read_journal(layout.url)


def test_a_note_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    url = str(tmp_path / "C.zarr")
    groups.begin(url, {})
    notes.write_note(url, "journal", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        notes.write_note(url, "journal", b"new")
    assert notes.read_note(url, "journal") == b"old"
    assert sorted(path.name for path in Path(url).iterdir()) == ["spdist-journal", "zarr.json"]


@pytest.fixture
def synced(monkeypatch) -> list[tuple[str, bytes]]:
    """Collect what is synced to the disk: its path, and of a folder the content of the note in it at that moment."""
    found, sync = [], os.fsync

    def record(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        note = path / "spdist-journal" if path.is_dir() else path
        found.append((path.name, note.read_bytes() if note.exists() else b""))
        sync(descriptor)

    monkeypatch.setattr("os.fsync", record)
    return found


def test_power_that_fails_after_a_note_was_written_does_not_lose_it(tmp_path, synced):
    """The content reaches the disk before the name, and the name before `write_note` returns."""
    url = str(tmp_path / "C.zarr")
    groups.begin(url, {})
    synced.clear()
    notes.write_note(url, "journal", b"new")
    (partial, content), folder = synced
    assert partial.startswith("spdist-journal.")
    assert content.endswith(b"new")
    assert folder == ("C.zarr", Path(url, "spdist-journal").read_bytes())


def test_power_that_fails_after_a_matrix_is_sealed_does_not_lose_its_metadata(tmp_path, synced):
    a = api.save(tmp_path / "A.zarr", random_matrix(30, 30, 4, 1))
    synced.clear()
    api.multiply(a, a, tmp_path / "C.zarr")
    names = [name for name, _ in synced]
    for array in ("indptr", "indices", "data"):
        assert names.index(array) < len(names) - 1 - names[::-1].index("C.zarr")
    assert names.count("zarr.json") >= 4
