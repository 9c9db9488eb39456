"""The time left of a run: right once a tenth of the work is done, with bounds, and silent before that."""

from __future__ import annotations

import pytest

from spdist.scheduler.dashboard.pace import SAMPLES, Pace


def run(blocks: int, *, wait: float, multiply: float, write: float, ahead: int) -> list[tuple[float, int, int]]:
    """Return when something of a run is done, and the blocks multiplied and written until then.

    Blocks are multiplied one after the other from `wait` on, but no more than `ahead` before the last one written.
    """
    multiplied: list[float] = []
    written: list[float] = []
    for i in range(blocks):
        begin = max([wait, *multiplied[-1:], *([written[i - ahead]] if i >= ahead else [])])
        multiplied.append(begin + multiply)
        written.append(max(multiplied[-1], *written[-1:], 0.0) + write)
    times = sorted({*multiplied, *written})
    return [(now, sum(t <= now for t in multiplied), sum(t <= now for t in written)) for now in times]


@pytest.mark.parametrize("wait", [0.0, 5.0])
@pytest.mark.parametrize(("multiply", "write"), [(1.0, 0.2), (1.0, 1.0), (0.3, 1.0)])
def test_after_a_tenth_it_is_right(wait, multiply, write):
    """Whatever is read first, and whether products or writes bound the run: to divide by all the time is wrong."""
    steps, pace = run(60, wait=wait, multiply=multiply, write=write, ahead=5), Pace(0.0)
    for now, multiplied, written in steps:
        pace.add(now, multiplied, written, 60)
        if written >= 6:
            break
    true, left = steps[-1][0] - now, pace.estimate_time_left(now)
    assert left.likely == pytest.approx(true, rel=0.2)
    assert left.least <= true <= left.most
    assert pace.estimate_time_left(now + 2.0).likely == pytest.approx(left.likely - 2.0)


def test_one_finished_block_gives_wide_bounds():
    pace = Pace(0.0)
    assert pace.estimate_time_left(1.0) is None
    pace.add(1.0, 0, 0, 10)
    assert pace.estimate_time_left(2.0) is None, "nothing is done"
    pace.add(3.0, 1, 0, 10)
    left = pace.estimate_time_left(3.0)
    assert left.least < 9.0 < left.most, "9 s if blocks follow each other by the second"
    assert left.least < 27.0 < left.most, "27 s if they do not overlap"


def test_bounds_hold_a_rate_that_changes():
    pace = Pace(0.0)
    for i in range(1, 21):
        work = 20.0 * i if i <= 10 else 200.0 + 5.0 * (i - 10)
        pace.add(float(i), work, work, 1000.0)
    left = pace.estimate_time_left(20.0)
    assert left.least < left.likely < left.most
    assert left.most >= (1000 - 250) / 5


def test_it_keeps_few_samples():
    pace = Pace(0.0)
    for i in range(1, 5000):
        pace.add(float(i), float(i), float(i), 10_000.0)
    assert max(len(stage.samples) for stage in pace._stages) <= SAMPLES + 1
    assert pace.estimate_time_left(4999.0).likely == pytest.approx(5001.0, rel=0.01)


def test_few_blocks_say_less_than_what_was_expected():
    """All that is read before the first block would count again and again, or not at all."""
    told, asked = Pace(0.0, expected=10.0), Pace(0.0)
    for pace in (told, asked):
        pace.add(4.0, 10.0, 0.0, 100.0)
    left = told.estimate_time_left(4.0)
    assert left.likely == pytest.approx(9.0)
    assert left.least < 5.5 < 36.0 < left.most, "with doubt, and if blocks do not overlap"
    assert told.estimate_time_left(5.0).likely == pytest.approx(left.likely - 1.0)
    assert asked.estimate_time_left(4.0).likely == pytest.approx(24.0)


def test_an_expectation_gives_way_to_what_is_measured():
    pace = Pace(0.0, expected=10.0)
    for i in range(1, 61):
        pace.add(float(i), float(i), float(i), 100.0)
    assert pace.estimate_time_left(60.0).likely == pytest.approx(40.0, rel=0.15)


def test_a_late_run_does_not_end_at_once():
    pace = Pace(0.0, expected=10.0)
    pace.add(20.0, 50.0, 0.0, 100.0)
    left = pace.estimate_time_left(20.0)
    assert 3.0 < left.likely < 20.0
    assert left.most >= 20.0
