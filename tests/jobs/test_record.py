"""The file of a run's timings and messages."""

from __future__ import annotations

import json
import threading

from spdist.jobs.report import Callbacks, recorder


def test_threads_write_whole_lines(tmp_path):
    file, lines = tmp_path / "run.jsonl", 400

    def write(call, thread):
        for number in range(lines):
            call(thread, number)

    with recorder(file, Callbacks()) as calls:
        timings = lambda thread, number: calls.on_timings([{"thread": thread, "number": number, "text": "x" * 200}])  # noqa: E731
        messages = lambda thread, number: calls.on_message({"thread": thread, "number": number})  # noqa: E731
        threads = [threading.Thread(target=write, args=(call, i)) for i, call in enumerate([timings, messages] * 4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    found = [json.loads(line) for line in file.read_text().splitlines()]
    every = [(t, n) for t in range(8) for n in range(lines)]
    assert sorted((line["thread"], line["number"]) for line in found) == every
