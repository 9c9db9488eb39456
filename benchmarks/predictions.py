"""Compare what `spdist plan` predicts with what the command then takes, for products of different kinds.

::

    python benchmarks/predictions.py --folder /dev/shm/predictions --out record.json
    python benchmarks/predictions.py --engines cuda,numba --size large      # a host with many cores and a GPU

Every command is a fresh process with caches of its own. First, small products of each kind compile their kernels, and
`spdist info --machine` measures the machine. Then, for each job and round, `spdist plan` predicts, and the job runs,
timed from its start to its end as the shell times it. The products are new to the machine: nothing but rates and the
plan's own look at the matrices is known of them.

*Predicted / wall* is 1 for a right prediction. *Time left* is what the run itself says after a tenth of its work,
over what was left: the messages that ``--record`` keeps are folded as the dashboard does. Runs that end before they
have said anything have none.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import prompt
import record

import spdist
from spdist.scheduler.dashboard.run_state import RunState
from spdist.stores.registry import at

Row = dict[str, Any]
Stored = Callable[[Path, Path], Any]
SHARE = 0.1
"""Of the work, after which the time left is compared."""
INNER_PARTS = "8,2,1"


class Job(NamedTuple):
    """A command: its name, what stores A and B, a small product of its kind, the verb, and its options."""

    name: str
    store: Stored
    small: Stored
    verb: str = "multiply"
    words: tuple[str, ...] = ()


def erdos_renyi(rows: int, per_row: int) -> Stored:
    """Return what stores a matrix whose entries are anywhere, which is A and B."""
    return lambda a, _: spdist.generate("erdos-renyi", a, nrows=rows, ncols=rows, per_row=per_row)


def jobs(large: bool) -> list[Job]:
    """Return ten kinds of products, and two ways to cut them; A stands for its path in the options."""
    grid, graph, galerkin = (prompt.poisson, prompt.rmat, prompt.galerkin)
    # Small ones of more columns than one accumulator takes, where the large ones have more: that is another kernel.
    some, few, small_graph = grid(66), grid(66, 7), graph(13, 8)
    side = 220 if large else 110
    rmat = graph(18 if large else 17, 8)
    mask = ("--mask", "A", "--semiring", "plus_pair")
    scattered = erdos_renyi(8_000_000 if large else 1_500_000, 8)
    limit = "512MiB" if large else "192MiB"
    return [
        Job(f"27-point {side}^3", grid(side), some),
        Job("7-point", grid(300 if large else 150, 7), few),
        Job("R-MAT", rmat, small_graph),
        Job("Erdos-Renyi", scattered, erdos_renyi(300_000, 3)),
        Job("A @ P", galerkin(204 if large else 153), galerkin(36)),
        Job("top 10 of R-MAT", rmat, small_graph, words=("--top-n", "10")),
        Job("R-MAT within itself", graph(20 if large else 18, 8), graph(19, 1) if large else small_graph, words=mask),
        Job("min_plus", grid(180 if large else 90), some, words=("--semiring", "min_plus")),
        Job("Frobenius norm of R-MAT", rmat, small_graph, "reduce"),
        Job("verified", grid(180 if large else 90), some, words=("--verify",)),
        Job(f"R-MAT within {limit}", rmat, small_graph, words=("--memory-limit", limit)),
        Job("cut by inner parts", scattered, erdos_renyi(300_000, 3), words=("--grid", INNER_PARTS)),
    ]


class Place:
    """Stored operands of one job, and where its C goes."""

    def __init__(self, store: Stored, folder: Path, name: str) -> None:
        self.a, self.b, self.c = (folder / f"{name}-{letter}.zarr" for letter in "ABC")
        self.record = folder / "run.jsonl"
        store(self.a, self.b)
        if not self.b.exists():
            self.b = self.a

    def remove(self) -> None:
        """Remove all that is there."""
        for path in {self.a, self.b, self.c}:
            if path.exists():
                at(str(path)).remove()

    def words(self, job: Job, engine: str) -> list[str]:
        """Return the options of a job on an engine; its memory limit is that of the host."""
        found = [str(self.a) if word == "A" else word for word in job.words]
        if engine == "cuda":
            found = ["--host-limit" if word == "--memory-limit" else word for word in found]
        return [*found, "--engine", engine, "--json"]

    def plan(self, job: Job, engine: str) -> list[str]:
        """Return the command that predicts a job."""
        words = [word for word in self.words(job, engine) if word != "--verify"]
        return self._spdist("plan", [*words, *(["--reduce", "frobenius"] if job.verb == "reduce" else [])])

    def run(self, job: Job, engine: str) -> list[str]:
        """Return the command of a job."""
        if job.verb == "reduce":
            words = [sys.executable, "-m", "spdist", "reduce", "frobenius", str(self.a), str(self.b)]
            return [*words, *self.words(job, engine)]
        return self._spdist("multiply", [str(self.c), "--record", str(self.record), *self.words(job, engine)])

    def _spdist(self, verb: str, words: list[str]) -> list[str]:
        return [sys.executable, "-m", "spdist", verb, str(self.a), str(self.b), *words]


def time_left(lines: Path) -> Row | None:
    """Return what a run said was left after `SHARE` of its work, and what was; None if it ended before that."""
    if not lines.exists():
        return None
    messages = [found for line in lines.read_text().splitlines() if (found := json.loads(line)).get("what")]
    begin, end = (next((m for m in messages if m["what"] == what), None) for what in ("start", "end"))
    if begin is None or end is None:
        return None
    state = RunState("job", begin["content"])
    for message in messages:
        if message["what"] != "progress":
            continue
        now, content = message["at"], message["content"]
        state.add_progress(now, content)
        left = state.seconds_left(now)
        if content["multiplied"] >= SHARE * content["work"] and left is not None and end["at"] > now:
            said = dict(zip(("likely_s", "least_s", "most_s"), left, strict=True))
            share = content["multiplied"] / content["work"]
            return {"share": share, "was_s": end["at"] - now, "ratio": left[0] / (end["at"] - now), **said}
    return None


def measure(job: Job, place: Place, engine: str, surroundings: dict[str, str]) -> Row:
    """Predict a job and run it; return both."""
    os.sync()
    planned = prompt.trial(place.plan(job, engine), surroundings)
    place.record.unlink(missing_ok=True)
    ran = prompt.trial(place.run(job, engine), surroundings)
    if place.c.exists():
        at(str(place.c)).remove()
    failed = planned.get("failed") or ran.get("failed")
    if failed:
        return {"failed": failed.replace(f"{place.a.parent}/", "")}
    said = json.loads(planned["stdout"])
    predicted = said["seconds"] + (said["verify_seconds"] if "--verify" in job.words else 0.0)
    phases = json.loads(ran["stdout"])["phases"]
    return {
        "predicted_s": predicted,
        "range_s": said["seconds_range"],
        "predicted_phases": said["phases"],
        "wall_s": ran["s"],
        "cpu_s": ran["cpu_s"],
        "plan_command_s": planned["s"],
        "phases": phases,
        "ratio": predicted / ran["s"],
        "left": time_left(place.record) if job.verb == "multiply" else None,
    }


def prepared(chosen: list[Job], engines: list[str], folder: Path, surroundings: dict[str, str]) -> Row:
    """Compile the kernels of all kinds of products, then measure the machine; return what was measured."""
    for number, job in enumerate(chosen):
        place = Place(job.small, folder, f"small-{number}")
        for engine in engines:
            found = prompt.trial(place.run(job, engine), surroundings)
            print(f"{job.name:28} {engine:6} small  {found['s']:6.2f} s  {found.get('failed', '')}", flush=True)
            if place.c.exists():
                at(str(place.c)).remove()
        place.remove()
    words = [sys.executable, "-m", "spdist", "info", "--machine", "--folder", str(folder), "--json"]
    found = prompt.trial(words, surroundings)
    if "failed" in found:
        sys.exit(f"spdist info --machine: {found['failed']}")
    machine: Row = json.loads(found["stdout"])
    return {"seconds": found["s"], **{name: machine[name] for name in machine if name not in ("host", "seen")}}


def measured(chosen: list[Job], args: Any, folder: Path, surroundings: dict[str, str]) -> Iterator[list[Row]]:
    """Measure every job on every engine, while the budget lasts; yield the rows after each."""
    rows: list[Row] = []
    end = time.monotonic() + args.budget
    for number, job in enumerate(chosen):
        if time.monotonic() > end:
            print(f"{job.name}: left out, for want of time")
            continue
        place = Place(job.store, folder, str(number))
        for engine in args.engines.split(","):
            trials = [measure(job, place, engine, surroundings) for _ in range(args.rounds)]
            good = [trial for trial in trials if "failed" not in trial]
            row: Row = {"job": job.name, "engine": engine, "trials": trials}
            if good:
                row |= {name: statistics.median(trial[name] for trial in good) for name in ("predicted_s", "wall_s")}
                row["ratio"] = statistics.median(trial["ratio"] for trial in good)
                lefts = [trial["left"]["ratio"] for trial in good if trial["left"]]
                row["left_ratio"] = statistics.median(lefts) if lefts else None
            rows.append(row)
            show(row)
            yield rows
        place.remove()


def show(row: Row) -> None:
    """Print one row."""
    if "ratio" not in row:
        print(f"{row['job']:28} {row['engine']:6} {row['trials'][0]['failed']}", flush=True)
        return
    left = "" if row["left_ratio"] is None else f"  time left, said / true {row['left_ratio']:.2f}"
    print(
        f"{row['job']:28} {row['engine']:6} predicted {row['predicted_s']:6.2f} s  wall {row['wall_s']:6.2f} s  "
        f"predicted / wall {row['ratio']:.2f}{left}",
        flush=True,
    )


def parse() -> Any:
    """Return the arguments."""
    parser = record.parser(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, help="for matrices; a temporary one by default")
    parser.add_argument("--size", choices=("usual", "large"), default="usual", help="large: C of some GB")
    parser.add_argument("--engines", default="cuda,numba" if record.has_gpu() else "numba")
    parser.add_argument("--jobs", nargs="*", help="parts of their names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=500.0, help="seconds after which no job begins")
    return parser.parse_args()


def main() -> int:
    """Measure, print, record."""
    args = parse()
    chosen = [job for job in jobs(args.size == "large") if not args.jobs or any(part in job.name for part in args.jobs)]
    if args.quick:
        args.rounds, args.engines = 1, "numba"
        chosen = [job._replace(store=job.small) for job in chosen if job.name == "Frobenius norm of R-MAT"]
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        surroundings = prompt.environment(folder / "caches", prompt.Program("", "numba", [], True))
        if args.quick:  # kernels that are compiled already
            surroundings = {**os.environ, "PYTHONPATH": surroundings["PYTHONPATH"]}
        result: Row = {"benchmark": "predictions", "size": args.size, "storage": prompt.storage(folder)}
        result["machine"] = prepared(chosen, args.engines.split(","), folder, surroundings)
        for rows in measured(chosen, args, folder, surroundings):
            record.write({**result, "rows": rows}, args.out, quiet=True)
            result["rows"] = rows
        record.write(result, args.out)
    return int(any("ratio" not in row for row in result.get("rows", [])))


if __name__ == "__main__":
    sys.exit(main())
