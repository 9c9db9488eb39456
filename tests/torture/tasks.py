"""Kills of applications, conversions and chains: at each call that changes files, from the last one back, or any time.

A task is a command whose result lies at one place. It is killed, then run again, with ``--resume`` or plainly, and must
come to the result of an undisturbed run with nothing beside it.
"""

from __future__ import annotations

import hashlib
import logging
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.torture.calls import CHANGES, operations
from tests.torture.kills import Bench, names_in
from tests.torture.outcome import Outcome, VerdictError, ended, last_line
from tests.torture.products import LIMIT, PATIENCE, claims_to_be_whole, digests
from tests.torture.runs import Run, Trial

VERTICES = "300"
LAST_CALLS = 60
"""Calls before the end of a run among which half of the kills are."""
REFUSALS = "exists; choose", "already exists", "is an unfinished product"
"""What a command may say that is to write where an earlier run left a result."""


@dataclass(frozen=True)
class Task:
    """A command to torture.

    Attributes
    ----------
    name : str
    words : tuple of str
        ``{at}`` stands for the folder of the operands, ``{result}`` for the place of the result.
    result : str
        Name of the result: of a matrix if it ends in ``.zarr``, else of a file; empty if it is on stdout alone.
    resumes : bool
        Whether it takes ``--resume``.
    limited : bool
        Whether it takes an engine and a memory limit.
    call : str
        Function that takes the arguments, ``module:function``.
    """

    name: str
    words: tuple[str, ...]
    result: str = "C.zarr"
    resumes: bool = True
    limited: bool = True
    call: str = "spdist.cli:main"

    def command(self, at: Path, data: Path) -> list[str]:
        """Return the arguments of spdist."""
        words = [word.format(at=at, result=data / self.result, data=data) for word in self.words]
        return [*words, *(("--engine", "numba", *LIMIT) if self.limited else ()), "--json"]


TASKS = (
    Task("shortest_paths", ("shortest-paths", "{at}/G.zarr", "{result}")),
    Task("shortest_paths_from", ("shortest-paths", "{at}/G.zarr", "{result}", "--sources", "0,7", "--hops", "4")),
    Task("shortest_paths_of_file", ("shortest-paths", "{at}/G.abc", "{result}", "--sources", "0,7")),
    Task("shortest_paths_workers", ("shortest-paths", "{at}/G.zarr", "{result}", "--hops", "2", "--workers", "1")),
    Task("similarity", ("similarity", "{at}/A.zarr", "{result}")),
    Task("similarity_of_file", ("similarity", "{at}/G.abc", "{result}", "--metric", "inner_product")),
    Task("cooccurrence", ("cooccurrence", "{at}/A.zarr", "{result}", "--measure", "pmi")),
    Task("clusters", ("markov-clustering", "{at}/G.zarr", "-o", "{result}"), "C.txt"),
    Task("clusters_stored", ("markov-clustering", "{at}/G.zarr", "-o", "{result}", "-S", "20", "-R", "30",
                             "--workers", "1", "-I", "4"), "C.txt"),
    Task("transposed", ("multiply", "{at}/A.zarr", "{at}/B.zarr", "{result}", "--transpose-a")),
    Task("by_columns", ("multiply", "{at}/A.zarr", "{at}/B.zarr", "{result}", "--top-n", "5", "--axis", "0")),
    Task("chain", ("{at}/A.zarr", "{at}/D.zarr", "{at}/B.zarr", "{result}"), call="tests.torture.tasks:multiply_chain"),
    Task("pagerank", ("pagerank", "{at}/G.zarr", "{result}"), "C.npy", resumes=False, limited=False),
    Task("triangles", ("triangles", "{at}/G.zarr", "--folder", "{data}"), "", resumes=False),
    Task("triangles_of_file", ("triangles", "{at}/G.abc", "--folder", "{data}"), "", resumes=False),
    Task("transpose", ("transpose", "{at}/A.zarr", "{result}"), resumes=False, limited=False),
    Task("symmetrize", ("symmetrize", "{at}/U.zarr", "{result}"), resumes=False, limited=False),
    Task("import", ("import", "{at}/G.abc", "{result}"), resumes=False, limited=False),
    Task("import_matrix_market", ("import", "{at}/G.mtx", "{result}"), resumes=False, limited=False),
    Task("export", ("export", "{at}/A.zarr", "{result}"), "C.mtx", resumes=False, limited=False),
    Task("generate", ("generate", "banded", "{result}", "--n", "4000"), resumes=False, limited=False),
)  # fmt: skip


def multiply_chain(argv: list[str]) -> int:
    """Multiply a chain of stored matrices, for which there is no command: ``A B ... C [--resume | --overwrite]``."""
    from spdist import SpdistError, multi_matmul

    *matrices, out = [word for word in argv if word.endswith(".zarr")]
    modes = {word.removeprefix("--"): True for word in argv if word in ("--resume", "--overwrite")}
    logging.basicConfig(format="spdist: %(message)s")
    try:
        multi_matmul(matrices, out, engine="numba", memory_limit=LIMIT[1], **modes)
    except SpdistError as error:
        print(f"spdist: {error}", file=sys.stderr)
        return 2
    return 0


def operands(bench: Bench) -> Path:
    """Return the folder of the operands; a graph as a matrix and as files is added to those of products once."""
    at = bench.stock.folder
    if not (at / "U.zarr").exists():
        graph = at / "G.zarr"
        for words in (
            ("generate", "erdos-renyi", graph, "--nrows", VERTICES, "--ncols", VERTICES, "--per-row", "3",
             "--seed", "4"),
            ("export", graph, at / "G.abc"), ("export", graph, at / "G.mtx"),
            ("generate", "banded", at / "U.zarr", "--n", VERTICES, "--offsets", "0,3,50"),
        ):  # fmt: skip
            run = bench.launcher.start(at, "operands", [*words, "--json"])
            assert ended(run), run.err
    return at


# -- undisturbed runs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What an undisturbed run leaves.

    Attributes
    ----------
    files : dict
        A digest of each file of the result; under the empty name, of what it says on stdout if it leaves no file.
    changes : int
        Calls of its client that change files.
    seconds : float
    """

    files: dict[str, str]
    changes: int
    seconds: float


def expected(bench: Bench, task: Task) -> Expected:
    """Return what an undisturbed run of a task leaves; runs it once."""
    if task.name not in bench.tasks:
        trial, begin = bench.trial(), time.monotonic()
        run = _start(bench, trial, task, "discovery", calls=f"log 0 fail 0 {bench.folder}/")
        assert ended(run, seconds=180), run.err
        seconds = time.monotonic() - begin
        bench.launcher.seconds = max(bench.launcher.seconds, PATIENCE * seconds)
        changes = sum(operation in CHANGES for _, _, operation in operations(trial))
        bench.tasks[task.name] = Expected(_left_by(task, trial, run), changes, seconds)
        shutil.rmtree(trial.folder)
    return bench.tasks[task.name]


def _start(bench: Bench, trial: Trial, task: Task, name: str, *more: str, calls: str = "") -> Run:
    """Start a task, with faults in its client if `calls` says so."""
    specification = trial.arm(**({"calls": calls, "call_roles": ["client"]} if calls else {}))
    words = [*task.command(operands(bench), trial.data), *more]
    return bench.launcher.start(trial.folder, name, words, specification=specification, call=task.call)


def _left_by(task: Task, trial: Trial, run: Run) -> dict[str, str]:
    """Return a digest of each file of a result, or of what is on stdout."""
    place = trial.data / task.result
    if task.result.endswith(".zarr"):
        return digests(place)
    content = place.read_bytes() if task.result else run.out.encode()
    return {"": hashlib.blake2b(content).hexdigest()}


# -- one kill ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskKill:
    """When a task is killed, and how it is run again.

    Attributes
    ----------
    task : Task
    before_last : int, optional
        The kill comes so many calls that change files before the last; None if it comes at a moment.
    seconds : float
        The moment, after the start.
    mode : str
        Option of the second run, empty for a plain one.
    times : int
        Runs that are killed.
    """

    task: Task
    before_last: int | None = None
    seconds: float = 0.0
    mode: str = ""
    times: int = 1

    def __str__(self) -> str:
        """Return the kill as the table of failures shows it."""
        back = self.before_last
        when = f"after {self.seconds:.3f} s" if back is None else f"{back} calls before the last"
        return f"{self.task.name}: killed {when}, {self.times} times; then {self.mode or 'again'}"


def kill_in_turn(bench: Bench, rng: random.Random, number: int) -> Outcome:
    """Kill all tasks before their last call that changes files, then before the one before it, and so on."""
    before_last, which = divmod(number, len(TASKS))
    task = TASKS[which]
    mode = rng.choice(["--resume", "--resume", ""]) if task.resumes else ""
    return kill_task(bench, TaskKill(task, before_last % expected(bench, task).changes, 0.0, mode))


def random_task_kill(bench: Bench, rng: random.Random) -> Outcome:
    """Kill an application or a conversion, mostly near its end, and run it again."""
    task = rng.choice(TASKS)
    known = expected(bench, task)
    mode, times = rng.choice(["--resume", "--resume", ""]) if task.resumes else "", 1 + (rng.random() < 0.2)
    if rng.random() < 0.25:
        return kill_task(bench, TaskKill(task, None, rng.uniform(0.0, 1.05) * known.seconds, mode, times))
    most = rng.choice([LAST_CALLS, known.changes])
    return kill_task(bench, TaskKill(task, rng.randrange(min(most, known.changes)), 0.0, mode, times))


def kill_task(bench: Bench, kill: TaskKill) -> Outcome:
    """Do a kill and bring the task to its end."""
    trial, task, known = bench.trial(), kill.task, expected(bench, kill.task)

    def act() -> None:
        for turn in range(kill.times):
            calls = ""
            if kill.before_last is not None:
                calls = f"change {known.changes - kill.before_last} before 0 {bench.folder}/"
            run = _start(bench, trial, task, f"run{turn}", *_words(kill.mode if turn else ""), calls=calls)
            if kill.before_last is None:
                _kill_after(run, kill.seconds)
            done = ended(run, killed=True)
            if stayed := bench.launcher.left(run):
                raise VerdictError("left", f"processes after the kill: {'; '.join(stayed)}")
            if done or (turn and run.code == 2):  # what was begun is refused, or done, before the kill comes again
                break
        else:
            _check_between(trial, task, known)
            done = False
        if not done:
            run = _second_run(bench, trial, kill)
        _check_end(trial, task, known, run)
        if stayed := bench.launcher.left(run):
            raise VerdictError("left", f"processes: {'; '.join(stayed)}")

    return bench.judge(f"task {task.name}", str(kill), trial, act)


def _words(mode: str) -> list[str]:
    return [mode] if mode else []


def _kill_after(run: Run, seconds: float) -> None:
    """Kill a run at a moment, unless it has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and run.poll() is None:
        time.sleep(0.005)
    run.kill()


def _check_between(trial: Trial, task: Task, known: Expected) -> None:
    """Check, after a kill, that no reader sees a result that is not whole."""
    place = trial.data / task.result
    if not task.result or not place.exists() or (task.result.endswith(".zarr") and not claims_to_be_whole(place)):
        return
    found = _left_by(task, trial, Run([], trial.folder, "", "", 0, None))  # type: ignore[arg-type]
    if wrong := [name for name, digest in known.files.items() if found.get(name) != digest]:
        raise VerdictError("wrong", f"the result claims to be whole after the kill, and differs in {wrong[:4]}")


def _second_run(bench: Bench, trial: Trial, kill: TaskKill) -> Run:
    """Run a killed task again until it is done: --overwrite only where it refuses to write over what is there."""
    run = _start(bench, trial, kill.task, "second", *_words(kill.mode))
    if ended(run):
        return run
    line = last_line(run)
    is_matrix = kill.task.result.endswith(".zarr")
    if not any(words in line for words in REFUSALS) or (kill.mode and is_matrix):
        raise VerdictError("stuck", f"{kill.mode}: {line}")
    again = _start(bench, trial, kill.task, "third", "--overwrite")
    if not ended(again):
        raise VerdictError("stuck", f"--overwrite: {last_line(again)}")
    return again


def _check_end(trial: Trial, task: Task, known: Expected, run: Run) -> None:
    """Check that the result is that of an undisturbed run and that nothing lies in it or beside it."""
    found = _left_by(task, trial, run)
    differing = [name for name in known.files.keys() | found.keys() if known.files.get(name) != found.get(name)]
    if wrong := sorted(name for name in differing if name in known.files):
        raise VerdictError("wrong", f"differs in {wrong[:4]}")
    if more := sorted(differing):
        raise VerdictError("left", f"in the result: {more[:4]}")
    if beside := sorted(names_in(trial.data) - {task.result}):
        raise VerdictError("left", f"beside the result: {', '.join(beside)}")
