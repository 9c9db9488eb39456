"""The scan over A: each Zarr chunk decoded once, and parts side by side."""

from __future__ import annotations

import numpy as np
import pytest

from spdist.api import products as api
from spdist.scheduler.planner.planner import make_plan
from spdist.scheduler.planner.request import PlanRequest
from spdist.scheduler.planner.row_scan import read_ranges
from spdist.scheduler.planner.stored_rows import even_rows
from spdist.scheduler.planner.tuning import (
    PlannerTuning,
    ScanTuning,
)
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.matrix import open_matrix
from tests.conftest import random_matrix
from tests.support.cpus import pretend_cpus


def test_parts_that_are_scanned_side_by_side(stored, monkeypatch):
    """Blocks end where parts end; all else is as in one scan."""
    a, b = stored("A", random_matrix(20_000, 3_000, 20, 1)), stored("B", random_matrix(3_000, 40_000, 20, 2))
    request, parts = PlanRequest(a, b, "numba", 64 << 20), PlannerTuning(scan=ScanTuning(part_entries=1 << 17))
    whole, plan = make_plan(request), make_plan(request, tuning=parts)
    pretend_cpus(monkeypatch, 64)
    assert make_plan(request, tuning=parts) == plan
    starts = [block.start for block in plan.blocks]
    assert starts == [0, *(block.stop for block in plan.blocks[:-1])]
    assert plan.blocks[-1].stop == 20_000
    bounds = even_rows(a, a.nnz >> 17)
    assert len(bounds) == 4
    assert {*bounds} - {20_000} <= {*starts} != {block.start for block in whole.blocks}
    assert plan.expansion == whole.expansion
    assert plan.projected_memory <= 0.9 * plan.memory_limit


@pytest.mark.parametrize("piece", [1, 700, 1 << 22])
@pytest.mark.parametrize("chunk", [128, 1000])
def test_each_zarr_chunk_is_decoded_once_by_a_scan(tmp_path, monkeypatch, chunk, piece):
    """Whatever is read at once: the columns are those of the rows, and read ahead into memory that is used again."""
    m = random_matrix(3_000, 500, 7, 1)
    monkeypatch.setattr("spdist.storage.writer.chunk_of", lambda dtype: chunk)
    api.save(tmp_path / "A.zarr", m)
    a = open_matrix(tmp_path / "A.zarr")
    decoded: list[int] = []
    decode = ChunkedArray._decode

    def note(self, k0, k1, out=None):
        decoded.extend(range(k0, k1) if self.name == "indices" else [])
        return decode(self, k0, k1, out)

    monkeypatch.setattr(ChunkedArray, "_decode", note)
    tuning = ScanTuning(read_entries=piece)
    for first, last in ((0, 3_000), (700, 2_222)):
        decoded.clear()
        found = [(start, stop, columns.copy()) for start, stop, _, columns in read_ranges(a, first, last, tuning)]
        assert [start for start, _, _ in found] == [first, *(stop for _, stop, _ in found)][:-1]
        low, high = m.indptr[first], m.indptr[last]
        np.testing.assert_array_equal(np.concatenate([columns for _, _, columns in found]), m.indices[low:high])
        assert sorted(decoded) == list(range(low // chunk, -(-high // chunk)))
