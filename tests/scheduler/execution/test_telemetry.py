"""Timings on their way from a stage to the report."""

from __future__ import annotations

import threading

from spdist.scheduler.execution.records import StageTotal
from spdist.scheduler.execution.telemetry import StageRecorder, TimingSubscriber


def test_timings_that_arrive_late_are_waited_for():
    """Events go another way than answers."""
    lines = []
    timings = TimingSubscriber("p", lines.extend)
    event = 0, {"product": "p", "worker": "w", "timings": [{"row": 1}] * 2}
    threading.Timer(0.1, timings.receive, [event]).start()
    timings.finish({"w": (2, [{"row": 3}])})
    assert [line["row"] for line in lines] == [1, 1, 3]


def test_timings_of_other_jobs_are_ignored():
    lines = []
    TimingSubscriber("p", lines.extend).receive((0, {"product": "q", "worker": "w", "timings": [{"row": 1}]}))
    assert not lines


def test_a_stage_is_recorded_once():
    recorder, sent = StageRecorder(), []
    recorder.set_limits({"commit": 5.0})
    for row in (0, 7):
        with recorder.measure("commit", row) as add_bytes:
            add_bytes(10)
            add_bytes(20)
    recorder.publish(sent.extend)
    recorder.publish(lambda timings: 1 / 0)  # nothing is left
    assert [(line["stage"], line["row"], line["nbytes"]) for line in sent] == [("commit", 0, 30), ("commit", 7, 30)]
    assert recorder.published == 2
    seconds = sum(line["seconds"] for line in sent)
    assert recorder.totals == {"commit": StageTotal(seconds, 60, 2, 5.0)}
    recorder.clear()
    assert (recorder.totals, recorder.take_timings(), recorder.limits) == ({}, [], {"commit": 5.0})
