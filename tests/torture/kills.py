"""Kills at random moments and at named points, of the client, workers, scheduler, or all; then resume or overwrite."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.torture.outcome import Outcome, VerdictError, ended, last_line
from tests.torture.products import PRODUCTS, Product, Stock, claims_to_be_whole, digests
from tests.torture.runs import Launcher, Run, Trial

SHARED_MEMORY = Path("/dev/shm")
DULL = ("spdist.cli", "spdist.options")
"""Modules in which nothing is at stake: no kill is aimed there."""
SCHEDULER_SECONDS = 45.0
"""Seconds in which a client must notice that its scheduler is gone."""
VICTIMS = {"client": ["client"], "worker": ["self"], "workers": ["worker"], "all": ["client", "worker"]}


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder."""
    return {path.name for path in folder.iterdir()}


def abandoned(names: set[str]) -> list[str]:
    """Return which files of shared memory stay although no process has them mapped; others may run beside us."""
    if not names:
        return []
    time.sleep(1.0)
    mapped = ""
    for process in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped += process.read_text()
    return sorted(name for name in names & names_in(SHARED_MEMORY) if name not in mapped)


@dataclass
class Bench:
    """What all trials share.

    Attributes
    ----------
    stock : Stock
    folder : Path
        Trials are folders here, each removed when it went well.
    points : dict
        For each product, the points that an undisturbed run passes, with their number for a role's process.
    tasks : dict
        What an undisturbed run of each task leaves; see `tasks`.
    """

    stock: Stock
    folder: Path
    points: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    tasks: dict[str, Any] = field(default_factory=dict)
    _number: int = 0

    @property
    def launcher(self) -> Launcher:
        """Return what starts processes."""
        return self.stock.launcher

    def trial(self) -> Trial:
        """Return a new, empty trial."""
        self._number += 1
        return Trial(self.folder / f"trial-{self._number}")

    def discover(self, product: Product) -> dict[tuple[str, str], int]:
        """Return the points of a product, and how often a process passes each; runs it once."""
        if product.name not in self.points:
            trial = self.trial()
            run = self.multiply(trial, product, "discovery", trial.arm(log=True))
            assert ended(run), run.err
            counts = Counter(trial.hits())
            most: dict[tuple[str, str], int] = {}
            for (role, _, point), count in counts.items():
                if not point.startswith(DULL) and point.startswith("spdist."):
                    most[role, point] = max(most.get((role, point), 0), count)
            self.points[product.name] = most
            shutil.rmtree(trial.folder)
        return self.points[product.name]

    def multiply(
        self, trial: Trial, product: Product, name: str, specification: Path | None = None, *more: str, **options: Any
    ) -> Run:
        """Start a product; an old C that it replaces is put in place first."""
        target = trial.data / "C.zarr"
        mode = [word for word in more if word in ("--resume", "--overwrite")]
        if product.replaces and not mode:
            shutil.copytree(self.stock.folder / "A.zarr", target)
            more = (*more, "--overwrite")
        words = self.stock.words(product, target, options.pop("operands", None))
        return self.launcher.start(trial.folder, name, ["multiply", *words, *more, "--json"],
                                   specification=specification, **options)  # fmt: skip

    def check_between(self, trial: Trial, product: Product) -> None:
        """Check, after a kill, that no reader sees a wrong C, and that an old C is still there."""
        target = trial.data / "C.zarr"
        if product.replaces and not target.exists():
            raise VerdictError("lost", f"there is no C after the kill; beside it: {sorted(names_in(trial.data))}")
        if not claims_to_be_whole(target):
            return
        if product.replaces and digests(target) == digests(self.stock.folder / "A.zarr"):
            return
        difference = self.stock.difference(product, target)
        lasting = [part for part in difference.split("; ") if part and not part.startswith("has too much")]
        if lasting:
            raise VerdictError("wrong", f"C claims to be whole after the kill: {'; '.join(lasting)}")

    def bring_to_end(self, trial: Trial, product: Product, *more: str, **options: Any) -> None:
        """Resume until C is right; an old C that nobody began to replace is replaced by --overwrite."""
        run = self.multiply(trial, product, "resume", None, "--resume", *more, **options)
        if not ended(run):
            if not product.replaces or run.code != 2:
                again = self.multiply(trial, product, "overwrite", None, "--overwrite", *more, **options)
                done = ended(again)
                raise VerdictError(
                    "stuck", f"--resume: {last_line(run)}; --overwrite: {'right' if done else last_line(again)}"
                )
            self.check_between(trial, product)
            run = self.multiply(trial, product, "overwrite", None, "--overwrite", *more, **options)
            if not ended(run):
                raise VerdictError("stuck", f"--overwrite: {last_line(run)}")
        self.check_end(trial, product, run)

    def check_end(self, trial: Trial, product: Product, *runs: Run, notes: bool = True, workers: bool = True) -> None:
        """Check that C is right and that nothing is left; workers of another's cluster may stay (`workers` False)."""
        if difference := self.stock.difference(product, trial.data / "C.zarr", notes=notes):
            only_more = all(part.startswith("has too much") for part in difference.split("; "))
            raise VerdictError("left" if only_more else "wrong", difference)
        beside = sorted(names_in(trial.data) - {"C.zarr", "A.zarr", "B.zarr", "M.zarr"})
        if beside:
            raise VerdictError("left", f"beside C: {', '.join(beside)}")
        if stayed := self.launcher.left(*runs, workers=workers):
            raise VerdictError("left", f"processes: {'; '.join(stayed)}")

    def judge(self, part: str, what: str, trial: Trial, act: Callable[[], str | None]) -> Outcome:
        """Run a trial and return its outcome; the folder of a bad one is kept."""
        before = names_in(SHARED_MEMORY)
        try:
            verdict = act() or "right"
            added = {name for name in names_in(SHARED_MEMORY) - before if name.startswith(f"spdist-{os.getuid()}-")}
            if more := abandoned(added):
                raise VerdictError("left", f"in shared memory: {', '.join(more)}")
        except VerdictError as bad:
            self.launcher.left()
            return Outcome(part, what, bad.verdict, f"{bad.detail} ({trial.folder})")
        shutil.rmtree(trial.folder, ignore_errors=True)
        return Outcome(part, what, verdict)


# -- one kill ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """When and whom to kill.

    Attributes
    ----------
    product : Product
    victim : str
        A key of `VICTIMS`, or ``interrupt``, ``terminate``: signals that the client catches.
    seconds : float
        After the start, unless there is a point.
    role, point, number
        Where; see `inject`.
    again : bool
        Whether the run that resumes is killed in the same way.
    fresh : bool
        Whether processes are fresh ones.
    """

    product: Product
    victim: str
    seconds: float = 0.0
    role: str = ""
    point: str = ""
    number: int = 1
    again: bool = False
    fresh: bool = False

    def __str__(self) -> str:
        """Return the kill as the table of failures shows it."""
        where = f"{self.role} {self.point} #{self.number}" if self.point else f"after {self.seconds:.3f} s"
        extra = " again in resume" * self.again + " fresh" * self.fresh
        return f"{self.product.name}: kill {self.victim} {where}{extra}"


def random_kill(bench: Bench, rng: random.Random) -> Kill:
    """Return a kill at a random moment or a random point."""
    product = rng.choice(PRODUCTS)
    again, fresh = rng.random() < 0.2, rng.random() < 0.02
    if rng.random() < 0.4:
        seconds = rng.uniform(0.0, (3.0 if fresh else 1.05) * bench.stock.seconds_of(product))
        workers = ["worker", "workers"] if product.workers else []
        victim = rng.choice(["client", *workers, "all", "interrupt", "terminate"])
        return Kill(product, victim, seconds, again=again, fresh=fresh)
    points = bench.discover(product)
    modules = sorted({point.rpartition(":")[0].rpartition(".")[0] for _, point in points})
    module = rng.choice(modules)  # a module with many functions is not worth more than one with few
    role, point = rng.choice(sorted(key for key in points if key[1].rpartition(":")[0].rpartition(".")[0] == module))
    number = rng.choice([1, points[role, point], rng.randint(1, points[role, point])])
    victim = rng.choice(["client", "all"] if role == "client" else ["worker", "workers", "all"])
    return Kill(product, victim, role=role, point=point, number=number, again=again, fresh=fresh)


def run_kill(bench: Bench, kill: Kill) -> Outcome:
    """Do a kill and bring the product to its end."""
    trial = bench.trial()
    part = f"kill {kill.victim}, {'point' if kill.point else 'moment'}"

    def act() -> None:
        run = _killed_run(bench, trial, kill, "run")
        if run is None:
            return
        bench.check_between(trial, kill.product)
        if kill.again:
            run = _killed_run(bench, trial, kill, "again", "--resume")
            if run is None:
                return
            bench.check_between(trial, kill.product)
        bench.bring_to_end(trial, kill.product, fresh=kill.fresh)

    return bench.judge(part, str(kill), trial, act)


def _killed_run(bench: Bench, trial: Trial, kill: Kill, name: str, *more: str) -> Run | None:
    """Start a run and kill it; return None if it came to its end nevertheless, and C was right."""
    known = {"role": kill.role, "point": kill.point, "number": kill.number, "victims": VICTIMS.get(kill.victim, [])}
    specification = trial.arm(**(known if kill.point else {}))
    run = bench.multiply(trial, kill.product, name, specification, *more, fresh=kill.fresh)
    if not kill.point:
        end = time.monotonic() + kill.seconds
        while time.monotonic() < end and run.poll() is None:
            time.sleep(0.005)
        _send(trial, run, kill.victim)
    done = ended(run, killed=kill.victim in ("client", "all", "terminate"))  # the last before Python listens for it
    if stayed := bench.launcher.left(run):
        raise VerdictError("left", f"processes after the kill: {'; '.join(stayed)}")
    if done:
        bench.check_end(trial, kill.product, run)
        return None
    if kill.victim in ("worker", "workers") and not more:
        raise VerdictError("gave up", last_line(run))
    return run


def _send(trial: Trial, run: Run, victim: str) -> None:
    """Kill the victims now."""
    if victim in ("interrupt", "terminate"):
        with suppress(ProcessLookupError):
            run.kill(signal.SIGINT if victim == "interrupt" else signal.SIGTERM)
        return
    for entry in sorted((trial.folder / "pids").iterdir()):
        pid, role = entry.name.split(".")
        if role in VICTIMS[victim] or (victim, role) == ("worker", "worker"):
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
            if victim == "worker":
                return


# -- a scheduler of its own --------------------------------------------------------------------------------------------


class Cluster:
    """A Dask scheduler and two workers, processes of their own."""

    def __init__(self, bench: Bench, trial: Trial, name: str, specification: Path) -> None:
        self.bench, self.trial = bench, trial
        file = trial.folder / f"{name}.json"
        start = bench.launcher.start
        common = {"specification": specification}
        self.scheduler = start(
            trial.folder, f"{name}-scheduler",
            ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", file],
            role="scheduler", **common,
        )  # fmt: skip
        end = time.monotonic() + 30
        while not file.exists() or not file.read_text().strip():
            assert time.monotonic() < end, self.scheduler.err
            time.sleep(0.02)
        time.sleep(0.05)
        self.address = json.loads(file.read_text())["address"]
        self.nannies: list[Run] = []
        self.add_workers(specification)

    def add_workers(self, specification: Path) -> None:
        """Start two workers."""
        words = [self.address, "--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1",
                 "--local-directory", self.trial.folder]  # fmt: skip
        for _ in range(2):
            name = f"worker{len(self.nannies)}"
            self.nannies.append(self.bench.launcher.start(
                self.trial.folder, name, words, role="nanny", specification=specification))  # fmt: skip

    @property
    def runs(self) -> list[Run]:
        """Return its processes."""
        return [self.scheduler, *self.nannies]

    def stop(self) -> None:
        """Kill what is left of it."""
        for run in self.runs:
            run.kill()
        self.bench.launcher.left(*self.runs)


def random_cluster_kill(bench: Bench, rng: random.Random) -> Outcome:
    """Kill the scheduler, workers with their nannies, or all of a cluster that spdist did not start."""
    product = rng.choice([product for product in PRODUCTS if product.name in ("plain", "replaced", "masked")])
    victim = rng.choice(["scheduler", "one worker", "all workers", "all"])
    seconds = rng.uniform(0.0, 1.05 * bench.stock.seconds_of(product))
    what = f"{product.name}: kill {victim} of a running cluster after {seconds:.3f} s"
    trial = bench.trial()
    clusters: list[Cluster] = []

    def act() -> None:
        cluster = Cluster(bench, trial, "first", trial.arm())
        clusters.append(cluster)
        run = bench.multiply(trial, product, "run", None, "--scheduler", cluster.address)
        end = time.monotonic() + seconds
        while time.monotonic() < end and run.poll() is None:
            time.sleep(0.005)
        _kill_cluster(cluster, victim, run)
        if victim == "all workers":  # others come
            cluster.add_workers(trial.arm())
        done = ended(run, seconds=SCHEDULER_SECONDS, killed=victim == "all")
        if done:
            bench.check_end(trial, product, run, workers=False)
            return
        if victim == "one worker":
            raise VerdictError("gave up", last_line(run))
        bench.check_between(trial, product)
        cluster.stop()
        bench.bring_to_end(trial, product)

    outcome = bench.judge(f"kill {victim}, cluster", what, trial, act)
    for cluster in clusters:
        cluster.stop()
    return outcome


def _kill_cluster(cluster: Cluster, victim: str, client: Run) -> None:
    """Kill processes of a cluster now: nannies first, so that no worker is started again."""
    nannies = {"scheduler": [], "one worker": cluster.nannies[:1]}.get(victim, cluster.nannies)
    for run in nannies:
        run.kill()
    if victim in ("scheduler", "all"):
        cluster.scheduler.kill()
    if victim == "all":
        client.kill()
