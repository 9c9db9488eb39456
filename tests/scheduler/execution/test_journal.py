"""The journal of an unfinished C."""

from __future__ import annotations

import json

import numpy as np

from spdist.scheduler.execution.journal import Checkpoint, Journal, read_journal, write_journal
from spdist.storage.groups import begin
from spdist.storage.writer import Layout


def test_journal_is_one_file(tmp_path):
    url = str(tmp_path / "C.zarr")
    begin(url, {})
    assert read_journal(url)[0] == Checkpoint()
    write_journal(url, Checkpoint(5, 70, 2, True), np.array([3, 70]))
    front, offsets = read_journal(url)
    assert (front, offsets.tolist()) == (Checkpoint(5, 70, 2, True), [3, 70])
    assert json.loads((tmp_path / "C.zarr" / "spdist-journal").read_bytes().split(b"\n")[0])["row"] == 5


def test_rows_and_chunks_become_durable(tmp_path):
    layout = Layout(str(tmp_path / "C.zarr"), 9, np.dtype(np.float64), 4)
    begin(layout.url, {})
    journal = Journal(layout)
    journal.add_rows(3, 0, np.array([2, 0, 5], np.uint32))
    assert journal.set_chunks(1)
    assert not journal.set_chunks(1)
    journal.set_compressed()
    journal.write()
    checkpoint, offsets = read_journal(layout.url)
    assert checkpoint == Checkpoint(3, 7, 1, True)
    assert offsets.tolist() == []  # offsets 0, 2, 2, 7 fill a Zarr chunk
    assert layout.array("indptr").read(0, 4).tolist() == [0, 2, 2, 7]
    journal = Journal(layout)
    journal.add_rows(5, 7, np.array([1, 1], np.uint32))
    journal.close()
    assert layout.array("indptr").read(4, 6).tolist() == [8, 9]
