"""The state of a run: right sums, a size that does not grow, a time left that can be trusted."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest

from spdist.scheduler.dashboard.messages import RUNS, RunEnd, RunProgress, RunStart
from spdist.scheduler.dashboard.run_state import DURABLE, WAITING, WRITTEN, RunState
from spdist.scheduler.dashboard.runs import Runs
from spdist.scheduler.dashboard.timeline import BINS, Timeline
from spdist.scheduler.execution.records import StageTotal
from spdist.scheduler.execution.telemetry import add_totals

ROWS = 1_000_000
OPERAND = {"url": "/A.zarr", "shape": [ROWS, ROWS], "nnz": 10, "bytes": 120}


def start(**changed) -> RunStart:
    content = RunStart(
        target="/C.zarr", operands={"A": OPERAND, "B": OPERAND, "C": OPERAND}, engine="numba",
        grid={"row_blocks": 4, "inner_blocks": 1, "column_blocks": 1}, block_starts=[0, 10, 20, 30], rows=40,
        products=1000, memory_limit=1 << 30, host_limit=1 << 30, projected_memory=1 << 20, seconds={"multiply": 1.0},
        expected=0.0, resumed_row=0, begun=100.0, versions={"dask": "1"},
    )  # fmt: skip
    return RunStart(**{**content, **changed})


def progress(products: int = 0, durable_row: int = 0, blocks: int = 0) -> RunProgress:
    return RunProgress(
        blocks=blocks, blocks_total=4, products=products, products_total=1000, nnz=0, durable_row=durable_row,
        in_flight=1, multiplied=products, written=products, work=1000,
    )  # fmt: skip


def timing(stage: str, row: int, begin: float, seconds: float = 0.5, nbytes: int = 8) -> dict:
    return {"stage": stage, "row": row, "begin": begin, "seconds": seconds, "nbytes": nbytes}


def test_the_end_brings_exact_totals():
    run = RunState("p", start())
    run.add_timings("w", [timing("multiply", 0, 101.0)], {})
    total = {"seconds": 2.5, "bytes": 80, "tasks": 3, "limit": 9.0}
    run.finish(104.0, RunEnd(state="finished", error="", stages={"multiply": total}))
    assert run.to_json(200.0)["stages"] == {"multiply": {"seconds": 2.5, "nbytes": 80, "tasks": 3, "limit": 9.0}}


def test_stages_and_workers_add_up():
    run = RunState("p", start())
    run.add_timings("w1", [timing("multiply", 0, 101.0), timing("gpu upload", 0, 101.0)], {"multiply": 5.0})
    run.add_timings("w2", [timing("multiply", 10, 101.0, 1.5)], {"multiply": 7.0})
    found = run.to_json(110.0)
    assert found["stages"]["multiply"] == {"seconds": 2.0, "nbytes": 16, "tasks": 2, "limit": 7.0}
    assert found["stages"]["gpu upload"]["tasks"] == 1
    assert found["workers"]["w1"]["seconds"] == 0.5, "parts of a stage must not count twice"
    assert len(found["gantt"]) == 2
    assert found["bound_by"] == ("multiply", 1.0)


def test_the_map_of_blocks():
    run = RunState("p", start())
    run.add_timings("w", [timing("multiply", 0, 101.0), timing("commit", 10, 102.0), timing("join", -1, 103.0)], {})
    assert list(run.cells) == [1, WRITTEN, WAITING, WAITING]
    run.add_progress(104.0, progress(durable_row=19))
    assert list(run.cells)[:2] == [DURABLE, WRITTEN]
    run.add_progress(105.0, progress(durable_row=40))
    run.add_timings("w", [timing("multiply", 35, 106.0)], {})
    assert list(run.cells) == [DURABLE] * 4


@pytest.mark.parametrize("rate", [10.0, 50.0])
def test_time_left_of_a_steady_run(rate):
    run = RunState("p", start())
    assert run.seconds_left(100.0) is None
    for i in range(6):
        run.add_progress(100.0 + i, progress(int(rate * i)))
    likely, least, most = run.seconds_left(105.0)
    true = (1000 - 5 * rate) / rate
    assert least <= likely <= most
    assert likely == pytest.approx(true, rel=0.05)
    assert run.seconds_left(106.0)[0] == pytest.approx(true - 1, rel=0.05), "it goes down between two messages"
    run.finish(106.0, RunEnd(state="finished", error="", stages={}))
    assert run.seconds_left(106.0) is None


def test_time_left_begins_with_what_was_expected():
    run = RunState("p", start(expected=8.0))
    run.add_progress(102.0, progress(100))
    assert run.seconds_left(102.0)[0] == pytest.approx(7.2)
    without = {name: value for name, value in start().items() if name != "expected"}
    old = RunState("p", without)
    old.add_progress(102.0, progress(100))
    assert old.seconds_left(102.0)[0] == pytest.approx(12.0), "a record that was written earlier"


def test_time_left_has_bounds_when_the_rate_changes():
    run = RunState("p", start())
    for i in range(20):
        run.add_progress(100.0 + i, progress(20 * i if i < 10 else 200 + 5 * (i - 10)))
    likely, least, most = run.seconds_left(119.0)
    assert least < likely < most
    assert least <= (1000 - 245) / 12.9 <= most
    assert most >= (1000 - 245) / 5


def test_the_size_does_not_grow():
    """With 10^5 blocks, the state and the JSON are as small as with 2,000."""
    sizes = []
    generator = random.Random(1)
    run = RunState("p", start(block_starts=list(range(0, ROWS, ROWS // 256))[:256], rows=ROWS))
    for i in range(100_000):
        now = 100.0 + i / 50
        row = i * (ROWS // 100_000)
        worker = f"tcp://10.0.0.{i % 40}:40000"
        run.add_timings(worker, [timing("multiply", row, now, generator.random()), timing("commit", row, now)], {})
        if i % 10 == 0:
            run.add_progress(now, progress(i // 100, durable_row=row))
            run.add_event(now, f"worker {worker} joined")
        if i in (2000, 99_999):
            sizes.append(len(json.dumps(run.to_json(now), separators=(",", ":"))))
    assert sizes[1] < 1.2 * sizes[0]
    assert sizes[1] < 60_000
    assert len(run.samples) <= 241
    assert len(run.recent) <= 1000
    assert run.stages["multiply"].tasks == 100_000


def test_workers_beyond_the_most_are_added_up():
    run = RunState("p", start())
    for i in range(300):
        run.add_timings(f"w{i}", [timing("multiply", 0, 101.0)], {})
    assert len(run.workers) == 257
    assert sum(sums.tasks for sums in run.workers.values()) == 300


def test_a_timeline_keeps_its_sums_while_bins_widen():
    timeline = Timeline(50.0)
    for i in range(1000):
        timeline.add("multiply", 50.0 + i, 0.5)
    assert timeline.width * BINS >= 1000
    assert sum(timeline.busy["multiply"]) == pytest.approx(500.0)
    assert len(timeline.to_json()["busy"]["multiply"]) <= BINS
    timeline.add("commit", 40.0, 2.0)  # another host's clock
    assert timeline.busy["commit"][0] == pytest.approx(2.0)
    assert timeline.largest(50.0, 1050.0)[0] == "multiply"
    assert Timeline(0.0).largest(0.0, 1.0) is None


def test_events_of_resume_and_failure():
    run = RunState("p", start(resumed_row=30))
    run.finish(105.0, RunEnd(state="failed", error="the disk is full", stages={}))
    found = run.to_json(200.0)
    assert [text for _, text in found["events"]] == [
        "resumed: 30 rows were durable already",
        "failed: the disk is full",
    ]
    assert (found["state"], found["error"], found["seconds"]) == ("failed", "the disk is full", 5.0)
    assert "gantt" not in run.to_json(200.0, short=True)


class Worker:
    """A worker that publishes some of its timings, and has totals while it lives."""

    def __init__(self, name: str) -> None:
        self.name, self.waiting, self.totals = name, [], {}

    def work(self, stage: str, seconds: float, nbytes: int) -> None:
        self.waiting.append(timing(stage, 0, 101.0, seconds) | {"nbytes": nbytes})
        known = self.totals.get(stage, (0.0, 0, 0))
        self.totals[stage] = known[0] + seconds, known[1] + nbytes, known[2] + 1

    def publish(self, run: RunState) -> None:
        run.add_timings(self.name, self.waiting, {})
        self.waiting = []


def history(rng: random.Random, look) -> tuple[RunState, list[Worker]]:
    """Return a run whose workers published, vanished with what they had not published, and joined; and those alive."""
    run, workers = RunState("p", start()), [Worker("w0")]
    for joined in range(1, rng.randrange(2, 40)):
        match rng.choice(["work", "work", "publish", "join", "lose"]):
            case "work" if workers:
                stage = rng.choice(["multiply", "commit", "gpu multiply"])
                rng.choice(workers).work(stage, rng.random(), rng.randrange(99))
            case "publish" if workers:
                rng.choice(workers).publish(run)
            case "join":
                workers.append(Worker(f"w{joined}"))
            case "lose" if workers:
                workers.remove(rng.choice(workers))
        look(run)
    return run, workers


def test_no_counter_falls_in_any_history():
    for seed in range(1000):
        before: dict[str, tuple[float, int, int]] = {}

        def look(run: RunState, before=before) -> None:
            for stage, sums in run.stages.items():
                now = sums.seconds, sums.nbytes, sums.tasks
                assert all(x >= y for x, y in zip(now, before.get(stage, (0, 0, 0)), strict=True))
                before[stage] = now

        run, workers = history(random.Random(seed), look)
        runs = Runs(SimpleNamespace(workers={one.name for one in workers}))
        runs.by_name["p"] = run
        lost = [{stage: StageTotal(*sums) for stage, sums in one.items()} for one in runs.totals_of_lost("p")]
        alive = [{stage: StageTotal(*sums) for stage, sums in one.totals.items()} for one in workers]
        stages = add_totals([*alive, *lost])
        run.finish(200.0, RunEnd(state="finished", error="", stages=stages))
        look(run)
        for stage, total in stages.items():
            assert run.stages[stage].tasks == total["tasks"], "lost work counts once, and so does what came late"


def test_nothing_is_known_of_another_job():
    assert Runs(SimpleNamespace(workers={})).totals_of_lost("q") == []


def test_memory_is_what_the_limit_counts():
    """Beyond the memory of the idle worker: of one that joined later, what it had when it was first seen."""
    worker = SimpleNamespace(metrics={"memory": 150}, extra={})
    runs = Runs(SimpleNamespace(workers={"w": worker}))
    runs.fold(RUNS, {"product": "p", "what": "start", "content": start(host_limit=0, memory_limit=1000)})
    worker.metrics = {"memory": 400}
    assert runs.memory() == {"w": {"host": 250, "host_limit": 1000, "idle": 150}}
    worker.metrics = {"memory": 100}
    assert runs.memory()["w"]["host"] == 0
