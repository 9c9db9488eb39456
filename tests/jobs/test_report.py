"""The closing line of a report."""

from __future__ import annotations

import pytest

from spdist.jobs.report import Report


@pytest.mark.parametrize(
    ("used", "words"),
    [(150, "used 150.00 MiB of 192.00 MiB"), (244, "used 244.00 MiB, 52.00 MiB above its limit of 192.00 MiB")],
)
def test_memory_above_the_limit_is_called_so(used, words):
    report = Report(4, 1, 0.5, "numba", used << 20, 192 << 20, {"row_blocks": 1}, "computed", {})
    line = next(part for part in report.description("C.zarr") if isinstance(part, str) and "worst worker" in part)
    assert f"worst worker {words};" in line
