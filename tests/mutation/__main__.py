"""Plant mutants: ``python -m tests.mutation --count 300 --seed 7``; the package's docstring says what is done."""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.mutation.mutants import Mutant, mutants
from tests.mutation.trials import ROOT, Coverage, Verdict, Workplace, measure_coverage

FOLDERS = ("scheduler", "stores", "storage", "verification", "jobs", "applications", "matrices")
"""Folders of spdist in which mutants are planted by default."""


def candidates(paths: list[str]) -> list[Mutant]:
    """Return every mutant of the files below these paths."""
    files = sorted(
        {file for path in paths for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"))}
    )
    return [mutant for file in files for mutant in mutants(file, file.relative_to(ROOT).as_posix())]


def main() -> int:
    """Read arguments, plant mutants, print survivors; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="mutants, drawn at random; default: %(default)s")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--path", action="append", help="file or folder; default: " + ", ".join(FOLDERS))
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no mutant is begun")
    parser.add_argument("--each", type=float, default=300, help="seconds of tests a mutant: %(default)s")
    parser.add_argument("--only", type=int, action="append", help="the number of a mutant; may be repeated")
    parser.add_argument("--coverage", type=Path, help="file of an earlier run on the same sources; by default measured")
    parser.add_argument("--out", type=Path, help="write counts and survivors as JSON")
    args = parser.parse_args()
    found = candidates(args.path or [f"spdist/{folder}" for folder in FOLDERS])
    sample = random.Random(args.seed).sample(found, min(args.count, len(found)))
    chosen = [(number, mutant) for number, mutant in enumerate(sample) if args.only is None or number in args.only]
    print(f"seed {args.seed}: {len(chosen)} of {len(found)} mutants", flush=True)
    with tempfile.TemporaryDirectory(prefix="spdist-coverage-") as folder:
        path = args.coverage or Path(folder) / "coverage"
        if not path.exists():
            measure_coverage(path, args.jobs)
        verdicts = _judge(chosen, Coverage(path), args.jobs, args.budget, args.each)
    survivors = {number: verdict for number, verdict in sorted(verdicts.items()) if not verdict.killer}
    for number, verdict in survivors.items():
        late = f", for {verdict.left} it had no time" if verdict.left else ""
        print(f"{number:4d}  {verdict.text}\n      {verdict.tests} tests passed{late}")
    killed = len(verdicts) - len(survivors)
    print(f"{killed} of {len(verdicts)} killed ({100 * killed / max(len(verdicts), 1):.0f} %), seed {args.seed}; "
          f"{len(chosen) - len(verdicts)} not tried in time")  # fmt: skip
    if args.out is not None:
        lines = [(verdict.text, verdict.tests, verdict.left) for verdict in survivors.values()]
        facts = {"seed": args.seed, "tried": len(verdicts), "killed": killed, "survivors": lines}
        args.out.write_text(json.dumps(facts, indent=1))
    return int(bool(survivors))


def _judge(
    chosen: list[tuple[int, Mutant]], coverage: Coverage, jobs: int, budget: float, each: float
) -> dict[int, Verdict]:
    """Return the verdicts by number; each job takes the next mutant until none or no time is left."""
    waiting: queue.SimpleQueue[tuple[int, Mutant]] = queue.SimpleQueue()
    for item in chosen:
        waiting.put(item)
    verdicts: dict[int, Verdict] = {}
    end = time.monotonic() + budget
    left_out: set[str] = set()

    def work(folder: Path, cpus: set[int]) -> None:
        os.sched_setaffinity(0, cpus)  # of this thread, and of the processes that it starts
        workplace = Workplace(folder, coverage, each, left_out).make()
        while time.monotonic() < end:
            try:
                number, mutant = waiting.get_nowait()
            except queue.Empty:
                return
            verdict = verdicts[number] = workplace.judge(mutant)
            survival = f"SURVIVED {verdict.tests} tests, {verdict.left} not run"
            fate = f"killed by {verdict.killer}" if verdict.killer else survival
            where = f"{mutant.path}:{mutant.line} {mutant.kind}"
            print(f"{number:4d} {verdict.seconds:5.0f} s  {where}  {fate}", flush=True)

    with tempfile.TemporaryDirectory(prefix="spdist-mutation-") as folder:
        cpus = sorted(os.sched_getaffinity(0))
        threads = [
            threading.Thread(target=work, args=(Path(folder) / str(job), {*cpus[job % len(cpus) :: jobs]}))
            for job in range(jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for test in sorted(left_out):
        print(f"left out, fails without a mutant: {test}")
    return verdicts


if __name__ == "__main__":
    sys.exit(main())
