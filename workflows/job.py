"""Parts that workflows share: a job file that is checked whole, lines for a log, signals, exit codes, a report.

A workflow is a `Workflow`: its keys, its checks, and what it does. Its `main` runs job files::

    python workflows/NAME.py JOB.yaml [--set key=value ...]

A signal of the batch system (SIGTERM, SIGUSR1) ends the run so that it can be resumed, and the same command goes on
from there. Relative paths count from the current folder.

Exit codes: 0 done; 1 the job failed, or its result is false or has not converged; 2 the job file or a matrix is wrong,
nothing was written; 75 stopped by a signal before the end: run it again.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from job_file import DEFAULT_LIMIT, Job, JobError, read_mapping, readers_of, required, split_setting
from job_paths import check_paths, check_workers

STOPPED = 75
"""Exit code of a job that a signal stopped: EX_TEMPFAIL of sysexits.h, try again."""
LOG_SECONDS = 30.0
"""Least seconds between two lines of progress in a log file."""
TERMINAL_SECONDS = 5.0
"""Least seconds between two lines of progress in a terminal."""


@dataclass(frozen=True)
class Workflow:
    """One workflow."""

    description: str  # for ``--help``
    job: type[Job]  # its fields are the keys
    matrices: tuple[str, ...]  # keys that name matrices
    run: Callable[[Any, Log], dict[str, Any]]  # does the job; returns the result for the report
    summary: Callable[[dict[str, Any]], str]  # returns the result in a line
    files: tuple[str, ...] = ()  # keys of matrices that may also name a file that is imported

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the job file that the command line names; return the exit code."""
        catch_signals()
        args = arguments(self, argv)
        try:
            return run_file(self, args)
        except KeyboardInterrupt:  # before there was a run, or while the report was written
            return STOPPED
        except Exception as error:  # libraries that do not load as they are set, the log, the report
            code, end = failed(error)
            print(f"{args.job}: {end['error']}", file=sys.stderr)
            return code


class ConvergenceError(Exception):
    """The iterations ended without convergence."""

    def __init__(self, message: str, result: dict[str, Any]) -> None:
        super().__init__(message)
        self.result = {**result, "converged": False}


class Stopped(KeyboardInterrupt):
    """A signal asked for the end; like Ctrl-C, it leaves a C that can be resumed."""


def read_job(workflow: Workflow, path: Path, settings: Sequence[str]) -> Job:
    """Read a job file and check all of it."""
    content = read_mapping(path) | dict(map(split_setting, settings))
    readers = readers_of(workflow.job)
    for key in content:
        if key not in readers:
            near = difflib.get_close_matches(str(key), readers, 1)
            needed = required(workflow.job)
            others = ", ".join(name for name in readers if name not in needed)
            known = f"a job needs {', '.join(needed)}, and may have {others}"
            raise JobError(f"unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else known))
    for key in required(workflow.job):
        if content.get(key) is None:
            raise JobError(f"{key} is missing; add a line `{key}: PATH`")
    given = {key: read_value(readers[key], key, value) for key, value in content.items() if value is not None}
    report = Path(given.get("report") or path.with_suffix(".report.json"))
    if part := given.get("part"):  # each has a report of its own
        report = report.with_name(f"{report.stem}.part-{part.replace('/', '-of-')}{report.suffix}")
    job = workflow.job(**given | {"report": str(report)})
    check_workers(job)
    check_paths(workflow.matrices, job, files=workflow.files)
    return job


def read_value(reader: Callable[[Any], Any], key: str, value: object) -> Any:
    """Return a value in the type that its key asks for."""
    try:
        return reader(value)
    except ValueError as error:
        raise JobError(f"{key}: {value!r} {error}") from None


def counted(count: int, noun: str) -> str:
    """Return a number of things in words, the noun, which is given in the singular, in the plural unless it is 1.

    Examples
    --------
    >>> counted(1, "block"), counted(1234, "dense block"), counted(2, "entry")
    ('1 block', '1,234 dense blocks', '2 entries')
    """
    plurals = {"entry": "entries", "vertex": "vertices"}
    return f"{count:,} {noun if count == 1 else plurals.get(noun, f'{noun}s')}"


def log_line(text: str) -> None:
    """Write one line with its time."""
    print(time.strftime("%Y-%m-%dT%H:%M:%S"), one_line(text), flush=True)


def one_line(text: str) -> str:
    """Return text for a log: one line without passwords, keys and control characters."""
    import spdist

    clean = " ".join(spdist.without_secrets(text).split())
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in clean)


def refuse(job: Path, problem: object) -> int:
    """Print the problem of a job; return the exit code."""
    print(one_line(f"{job}: {problem}"), file=sys.stderr)
    return 2


@dataclass
class Log:
    """Writes a line now and then with a run's progress.

    `every`: least seconds between two lines.
    `latest`: blocks, products and entries of C at the last progress report.
    `written`: seconds of `time.monotonic` at the last line.
    """

    every: float = field(default_factory=lambda: TERMINAL_SECONDS if sys.stdout.isatty() else LOG_SECONDS)
    latest: dict[str, int] = field(default_factory=dict)
    written: float = field(default_factory=time.monotonic)

    def callbacks(self) -> Any:
        """Return what `spdist.multiply` calls."""
        import spdist

        return spdist.Callbacks(
            resumed=lambda durable: log_line(f"resuming by the stored plan: {durable} are there already"),
            planned=lambda plan: log_line(
                f"{counted(plan.expansion, 'product')} in a grid of {' x '.join(map(str, plan.grid.values()))}"
            ),
            started=lambda link: log_line(f"workers are ready; dashboard: {link}"),
            progress=self.progress,
            verifying=lambda done, total: self.log_progress(f"verifying: {done / max(total, 1):.0%}"),
        )

    def progress(self, now: Any) -> None:
        """Store a run's progress, and write a line now and then."""
        self.latest = asdict(now)
        self.log_progress(
            f"{now.blocks:,} of {counted(now.blocks_total, 'block')}, "
            f"{now.products / max(now.products_total, 1):.0%} of the products, {counted(now.nnz, 'entry')} of C"
        )

    def stop_if_signalled(self) -> None:
        """Raise `Stopped` if a signal came that could not raise it."""
        if RECEIVED_SIGNALS:
            raise Stopped(RECEIVED_SIGNALS[0])

    def log_progress(self, text: str) -> None:
        """Write a line, unless the last one is recent; raise `Stopped` if a signal came that could not raise it."""
        self.stop_if_signalled()
        if time.monotonic() - self.written >= self.every:
            self.written = time.monotonic()
            log_line(text)


RECEIVED_SIGNALS: list[str] = []
"""The signal that asked for the end, if it has come."""


def catch_signals() -> None:
    """Raise `Stopped` on the first signal; ignore those that follow."""
    signals = (signal.SIGTERM, signal.SIGUSR1)

    def stop(number: int, frame: FrameType | None) -> None:
        for one in signals:
            signal.signal(one, lambda number, frame: None)
        logging.disable()  # errors of a scheduler that ends at the same time are expected
        RECEIVED_SIGNALS.append(signal.Signals(number).name)
        if not in_finalizer(frame):
            raise Stopped(RECEIVED_SIGNALS[0])

    for one in signals:
        signal.signal(one, stop)


def in_finalizer(frame: FrameType | None) -> bool:
    """Whether an object is being finalized: Python drops exceptions raised there."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def run_to_exit(workflow: Workflow, job: Job, log: Log) -> tuple[int, dict[str, Any]]:
    """Run the job; return the exit code and the outcome for the report, also after an error."""
    stopped = {"state": "stopped", "error": "stopped by a signal before the end; run it again to go on"}
    try:
        result = workflow.run(job, log)
    except KeyboardInterrupt:
        return STOPPED, stopped
    except ConvergenceError as error:
        return 1, {"state": "failed", "error": str(error), "result": error.result}
    except Exception as error:
        if was_stopped(error):
            return STOPPED, stopped
        return failed(error)
    return 0, {"state": "done", "result": result}


def failed(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the exit code for an error, and its text for the report."""
    import spdist

    if isinstance(error, spdist.SpdistError):
        hint = "; in a job: remove C, or name another out" if "--overwrite" in str(error) else ""
        return error.exit_code, {"state": "failed", "error": f"{error}{hint}"}
    text = " ".join(f"{type(error).__name__}: {error}".split())
    where = {} if isinstance(error, OSError) else {"traceback": spdist.without_secrets(traceback.format_exc())}
    return 1, {"state": "failed", "error": f"{text}; run it again to go on", **where}


def was_stopped(error: BaseException | None) -> bool:
    """Whether an error was raised while a stopped run cleaned up: its scheduler may end first."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def write_report(job: Job, content: dict[str, Any]) -> None:
    """Write the report, whole or not at all."""
    import spdist

    part = Path(f"{job.report}.part")
    part.write_text(json.dumps(spdist.without_secrets(content), indent=2) + "\n")
    part.replace(job.report)


def product_summary(result: dict[str, Any], what: str) -> str:
    """Return the report of a product in a line.

    `result`: JSON form of a `spdist.Report`.
    `what`: what an entry of C is.
    """
    checked = f"; verified: {result['verification']['reason']}" if result["verification"] else ""
    took = f"{counted(result['blocks'], 'block')}, {result['seconds']:.1f} s"
    part = f"part {result['part']}, " if result.get("part") else ""
    left = f"; still to be made: parts {', '.join(map(str, result['missing']))}" if result.get("missing") else ""
    return f"{result['state']}: {part}{counted(result['nnz'], what)}, {took}{checked}{left}"


class Parser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def arguments(workflow: Workflow, argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=workflow.description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, metavar="JOB.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in place of the file's value")
    return parser.parse_args(argv)


def limit_in_words(job: Job) -> str:
    """Return how much memory a worker may take."""
    if job.memory_limit is not None:
        return f"{job.memory_limit} per worker"
    on_gpus = getattr(job, "engine", None) in ("cuda", "hybrid")
    return "0.9 of the free memory of each GPU" if on_gpus else f"{DEFAULT_LIMIT} per worker"


def run_file(workflow: Workflow, args: argparse.Namespace) -> int:
    """Check the job file, run it, and write the report."""
    begin = time.time()
    try:
        job = read_job(workflow, args.job, args.set)
    except JobError as error:
        return refuse(args.job, error)
    operands = " and ".join(getattr(job, key) for key in workflow.matrices if getattr(job, key) is not None)
    log_line(f"{operands} to {job.out}, {limit_in_words(job)}")
    log = Log()
    code, end = run_to_exit(workflow, job, log)
    if code == 2:
        return refuse(args.job, end["error"])
    log_line(workflow.summary(end["result"]) if code == 0 else end["error"])
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin))
    seconds = round(time.time() - begin, 3)
    facts = {"exit_code": code, "started": started, "seconds": seconds, "progress": log.latest, "job": asdict(job)}
    write_report(job, {**end, **facts})
    return code
