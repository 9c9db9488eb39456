"""What every workflow shares: a job file that is checked whole, lines for a log, signals, exit codes, a report.

A workflow is a `Workflow`: its keys, what it looks at before it starts, and what it does. `main` runs its job files::

    python workflows/NAME.py JOB.yaml [--set key=value ...]

A signal of the batch system (SIGTERM, SIGUSR1) ends the run so that it can be resumed, and the same command goes on
from there. Relative paths count from the current folder.

Exit codes: 0 done; 1 the job failed, or its result is false or has not converged; 2 the job file or a matrix is wrong,
nothing was written; 75 stopped by a signal before the end: run it again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, try again
LOG_SECONDS = 30.0
TERMINAL_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """The keys that every job has; a workflow's own class has the rest."""

    out: str
    report: str
    memory_limit: int | str = "2GiB"
    workers: int | None = None
    scheduler: str | None = None
    scheduler_file: str | None = None
    resume: bool = True

    def where(self) -> dict[str, Any]:
        """Return memory limit and workers as spdist's calls take them."""
        file = self.scheduler_file
        scheduler = scheduler_address(file) if file is not None else self.scheduler
        return {"memory_limit": self.memory_limit, "workers": self.workers, "scheduler": scheduler}

    @contextmanager
    def where_for_all(self) -> Iterator[dict[str, Any]]:
        """Give the same for several products: workers that are asked for start once."""
        import spdist

        where = self.where()
        if self.workers is None:
            yield where
            return
        with spdist.workers(self.workers) as scheduler:
            yield where | {"workers": None, "scheduler": scheduler}


@dataclass(frozen=True, kw_only=True)
class WholeJob(Job):
    """The keys of a job that makes its result whole, and puts it in place of what lies at `out`."""

    overwrite: bool = False


@dataclass(frozen=True)
class Workflow:
    """One workflow.

    Attributes
    ----------
    description : str
        For ``--help``.
    job : type
        A subclass of `Job`; its fields are the keys.
    readers : dict
        What reads the value of each key.
    matrices : tuple of str
        Keys that name matrices.
    run : callable
        Does the job; returns what the report says of it.
    summary : callable
        Returns the result in a line.
    """

    description: str
    job: type[Job]
    readers: dict[str, Callable[[Any], Any]]
    matrices: tuple[str, ...]
    run: Callable[[Any, Log], dict[str, Any]]
    summary: Callable[[dict[str, Any]], str]

    @property
    def required(self) -> tuple[str, ...]:
        """Keys without a default."""
        return tuple(one.name for one in fields(self.job) if one.default is MISSING and one.name != "report")


class JobError(ValueError):
    """The job file is wrong; the message says where and what to do."""


class ConvergenceError(Exception):
    """The steps that were allowed are done, and the end is not reached; `result` is what the report says of it."""

    def __init__(self, message: str, result: dict[str, Any]) -> None:
        super().__init__(message)
        self.result = {**result, "converged": False}


class Stopped(KeyboardInterrupt):
    """A signal asked for the end; like Ctrl-C, it leaves a C that can be resumed."""


# -- the job file ------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise JobError(f"key {twice!r} is there twice; keep one")
        content: dict[Any, Any] = super().construct_mapping(node, deep)
        return content


def read_job(workflow: Workflow, path: Path, settings: Sequence[str]) -> Any:
    """Read a job file, `settings` (``key=value``) in place of its values, and check all of it."""
    content = read_mapping(path) | dict(map(split_setting, settings))
    for key in content:
        if key not in workflow.readers:
            raise JobError(f"unknown key {key!r}; the keys are {', '.join(workflow.readers)}")
    for key in workflow.required:
        if content.get(key) is None:
            raise JobError(f"{key} is missing; add a line `{key}: PATH`")
    given = {key: read_value(workflow, key, value) for key, value in content.items() if value is not None}
    job = workflow.job(**{"report": str(path.with_suffix(".report.json")), **given})
    check_workers(job)
    check_places(workflow, job)
    return job


def read_mapping(path: Path) -> dict[Any, Any]:
    """Return the keys and values of a YAML file."""
    try:
        content = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise JobError(f"cannot be read: {error.strerror}; name a job file, a copy of one in workflows") from None
    except JobError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # of a text or a date that cannot be
        raise JobError(f"is not YAML: {' '.join(str(error).split())}; correct that line") from None
    if not isinstance(content, dict):
        raise JobError(f"holds {type(content).__name__} where `key: value` lines belong; see those in workflows")
    return content


def split_setting(text: str) -> tuple[str, Any]:
    """Return key and value of a ``--set key=value``; the value is read as in the file."""
    key, equals, value = text.partition("=")
    if not equals:
        raise JobError(f"--set {text!r} is not key=value; write for instance --set memory_limit=4GiB")
    try:
        return key.strip(), yaml.load(value, _Loader)
    except (yaml.YAMLError, ValueError):
        raise JobError(f"--set {text!r}: the value is not YAML; put it in quotes") from None


def read_value(workflow: Workflow, key: str, value: Any) -> Any:
    """Return one value in the type its key asks for."""
    try:
        return workflow.readers[key](value)
    except ValueError as error:
        raise JobError(f"{key}: {value!r} {error}") from None


def text_of(value: Any) -> str:
    """Accept a text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"is {type(value).__name__}, not a text; write it in quotes" if value else "is empty; fill it in"
        )
    return value


def flag(value: Any) -> bool:
    """Accept true and false."""
    if not isinstance(value, bool):
        raise ValueError("is neither true nor false; write one of them, without quotes")
    return value


def count(value: Any) -> int:
    """Accept a whole number from 1 up."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("is not a whole number of at least 1; write for instance 4, or null for the default")
    return value


def size(value: Any) -> int | str:
    """Accept bytes as a number or a text like 2GiB."""
    is_size = re.fullmatch(r"\s*[0-9]*\.?[0-9]+\s*[KMGT]?i?B?\s*", str(value), re.IGNORECASE) and re.search(
        "[1-9]", str(value)
    )
    if isinstance(value, bool) or not isinstance(value, int | str) or not is_size:
        raise ValueError("is not a size; write for instance 512MiB, 2GiB or a number of bytes")
    return value


def number(value: Any) -> float:
    """Accept a number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        raise ValueError("is not a number; write for instance 0.2, or null for none")
    return float(value)


def grid_of(value: Any) -> tuple[int, int, int]:
    """Accept three counts, as a list or with commas between."""
    parts = (
        [int(part) if part.strip().isdigit() else part for part in value.split(",")]
        if isinstance(value, str)
        else value
    )
    try:
        row, inner, column = map(count, parts)
    except (TypeError, ValueError):
        raise ValueError("is not three numbers of at least 1; write row, inner, column blocks: [8, 1, 1]") from None
    return row, inner, column


COMMON: dict[str, Callable[[Any], Any]] = {
    "memory_limit": size,
    "workers": count,
    "scheduler": text_of,
    "scheduler_file": text_of,
    "resume": flag,
    "report": text_of,
}
"""What reads the keys that every job has, but for `out`."""

WHOLE: dict[str, Callable[[Any], Any]] = {"out": text_of, "overwrite": flag, **COMMON}
"""What reads the keys of a `WholeJob`."""


# -- what must be there ------------------------------------------------------------------------------------------------


def check_workers(job: Job) -> None:
    """Refuse two answers to where the workers are."""
    named = [key for key in ("workers", "scheduler", "scheduler_file") if getattr(job, key) is not None]
    if len(named) > 1:
        values = " and ".join(f"{key}: {getattr(job, key)!r}" for key in named)
        raise JobError(f"{values} exclude each other: workers are of this machine, a scheduler has its own; keep one")


def check_places(workflow: Workflow, job: Any) -> None:
    """Look at every place that the job reads or writes, before it does."""
    for key in workflow.matrices:
        if getattr(job, key) is not None:
            check_matrix(key, getattr(job, key))
    check_report(job)
    if (out := local(job.out)) is not None:
        check_folder("out", str(out))
    if not isinstance(job, WholeJob) or not job.overwrite:
        check_out(job)
    if job.scheduler_file is not None:
        scheduler_address(job.scheduler_file)


def check_report(job: Job) -> None:
    """Refuse a report in place of anything but an earlier report: the job file, say, or a vector that it names."""
    check_folder("report", job.report)
    path = Path(job.report)
    if path.is_dir():
        raise JobError(f"report: {job.report!r} is a folder; name a file in it")
    if (out := local(job.out)) is not None and path.resolve() == out.resolve():
        raise JobError(f"report: {job.report!r} is what out names; name another file")
    if path.exists() and not earlier_report(path):
        raise JobError(f"report: {job.report!r} exists and is no report of a job; name another file")


def earlier_report(path: Path) -> dict[str, Any]:
    """Return what an earlier run left as its report; nothing where there is none."""
    try:
        content = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError):
        return {}
    is_report = isinstance(content, dict) and "exit_code" in content and isinstance(content.get("job"), dict)
    return content if is_report else {}


def check_out(job: Job) -> None:
    """Refuse to go on with what lies at `out` against `resume`; to replace it, unless this job's report names it."""
    if (out := local(job.out)) is not None and out.exists() and not job.resume:
        raise JobError(f"out: {job.out!r} exists; remove it, choose another name, or set resume: true to continue it")
    own = earlier_report(Path(job.report)).get("job", {}).get("out") == job.out
    if isinstance(job, WholeJob) and not own and is_there(job.out):
        raise JobError(
            f"out: {job.out!r} exists, and {job.report} does not say that this job wrote it; name another out, or set "
            f"overwrite: true to replace it"
        )


def is_there(place: str) -> bool:
    """Whether there is anything at a place."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(place)
        return bool(system.exists(path))
    except (OSError, ImportError, ValueError) as error:
        raise JobError(f"out: {place!r} cannot be opened: {error}; correct the address") from None


def check_matrix(key: str, place: str) -> None:
    """Refuse what is no matrix."""
    import spdist

    path = local(place)
    if path is not None and not path.exists():
        raise JobError(
            f"{key}: {place!r} does not exist in {Path.cwd()}; correct it, or create it with `spdist import`"
        )
    try:
        spdist.open(place)
    except spdist.SpdistError as error:
        raise JobError(f"{key}: {place!r}: {error}") from None
    except (OSError, ImportError, ValueError) as error:
        raise JobError(f"{key}: {place!r} cannot be opened: {error}; correct the address") from None


def square(key: str, a: Any) -> Any:
    """Return a stored matrix if it is square, as the adjacency matrix of a graph."""
    import spdist

    if a.nrows != a.ncols or not a.nrows:
        raise spdist.MatrixError(
            f"{key}: {a.url} is {a.nrows:,} x {a.ncols:,}; a square matrix is needed, with a row and a column for each "
            f"vertex or unknown: name another"
        )
    return a


def with_values(key: str, a: Any, fit: Callable[[Any], Any], needed: str) -> Any:
    """Return a stored matrix if all of its values fit, `needed` in words; they are looked at by blocks of rows."""
    import spdist

    if a.blocksize is not None:
        raise spdist.MatrixError(
            f"{key}: {a.url} is stored in blocks; store it by entries: `spdist export` it, `spdist import` that"
        )
    if a.dtype.kind == "c":
        raise spdist.MatrixError(f"{key}: {a.url} holds {a.dtype}; {needed} are needed: convert it")
    for start, stop, _ in a.row_blocks(1 << 20):
        block = a.rows(start, stop).to_scipy().tocoo()
        if not (fits := fit(block.data)).all():
            at = int(fits.argmin())
            raise spdist.MatrixError(
                f"{key}: {a.url} holds {block.data[at]} in row {start + block.row[at]:,}, column {block.col[at]:,}; "
                f"{needed} are needed: correct it"
            )
    return a


def check_folder(key: str, place: str) -> None:
    """Refuse a file in a folder that is not there or may not be written to."""
    parent = Path(place).absolute().parent
    if not parent.is_dir():
        raise JobError(f"{key}: {place!r}: {parent} is not a folder; create it or choose another place")
    if not os.access(parent, os.W_OK):
        raise JobError(f"{key}: {place!r}: {parent} may not be written to; choose another place")


def local(place: str) -> Path | None:
    """Return the path of a place on this machine; None for a URL."""
    return Path(place) if "://" not in place else None


def scheduler_address(path: str) -> str:
    """Return the address that `dask scheduler --scheduler-file` wrote."""
    try:
        return str(json.loads(Path(path).read_text())["address"])
    except OSError as error:
        problem = str(error.strerror)
    except (ValueError, TypeError, KeyError):
        problem = "it holds no address"
    raise JobError(f"scheduler_file: {path!r}: {problem}; start `dask scheduler --scheduler-file {path}` first")


# -- the run -----------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Write one line with its time."""
    print(time.strftime("%Y-%m-%dT%H:%M:%S"), text, flush=True)


@dataclass
class Log:
    """Says now and then how far the run is.

    Attributes
    ----------
    latest : dict
        Blocks, products and entries of C when last heard of.
    """

    every: float = field(default_factory=lambda: TERMINAL_SECONDS if sys.stdout.isatty() else LOG_SECONDS)
    latest: dict[str, int] = field(default_factory=dict)
    told: float = field(default_factory=time.monotonic)

    def callbacks(self) -> Any:
        """Return what `spdist.multiply` calls."""
        import spdist

        return spdist.Callbacks(
            resumed=lambda durable: say(f"resuming by the stored plan: {durable} are there already"),
            planned=lambda plan: say(
                f"{plan.expansion:,} products in a grid of {' x '.join(map(str, plan.grid.values()))}"
            ),
            started=lambda link: say(f"workers are ready; dashboard: {link}"),
            progress=self.progress,
            verifying=lambda done, total: self.tell(f"verifying: {done / max(total, 1):.0%}"),
        )

    def progress(self, now: Any) -> None:
        """Take note of a run's progress."""
        self.latest = asdict(now)
        self.tell(
            f"{now.blocks:,} of {now.blocks_total:,} blocks, {now.products / max(now.products_total, 1):.0%} of the "
            f"products, {now.nnz:,} entries of C"
        )

    def tell(self, text: str) -> None:
        """Write a line, unless the last one is recent; the place where a signal is heard that came at a bad moment."""
        if ASKED:
            raise Stopped(ASKED[0])
        if time.monotonic() - self.told >= self.every:
            self.told = time.monotonic()
            say(text)


ASKED: list[str] = []
"""The signal that asked for the end, where it could not be raised at once."""


def catch_signals() -> None:
    """Turn the first signal into `Stopped`; those that follow find the end under way."""
    signals = (signal.SIGTERM, signal.SIGUSR1)

    def stop(number: int, frame: Any) -> None:
        for one in signals:
            signal.signal(one, lambda number, frame: None)
        logging.disable()  # a scheduler that is ended at the same time is no news
        ASKED.append(signal.Signals(number).name)
        if not in_finalizer(frame):
            raise Stopped(ASKED[0])

    for one in signals:
        signal.signal(one, stop)


def in_finalizer(frame: Any) -> bool:
    """Whether an object is being finalized: Python drops what is raised there."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def run_to_exit(workflow: Workflow, job: Any, log: Log) -> tuple[int, dict[str, Any]]:
    """Do the job, whatever happens; return the exit code and what the report says of the end."""
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
    """Return the exit code for an error and what to say of it."""
    import spdist

    if isinstance(error, spdist.SpdistError):
        hint = "; in a job: remove C, or name another out" if "--overwrite" in str(error) else ""
        return error.exit_code, {"state": "failed", "error": f"{error}{hint}"}
    if not isinstance(error, OSError):
        traceback.print_exc()
    return 1, {"state": "failed", "error": f"{type(error).__name__}: {error}; run it again to go on"}


@contextmanager
def scratch(out: str, *names: str, keep: bool = False) -> Iterator[list[str]]:
    """Give places beside `out` for matrices of a job, and remove them in the end.

    Parameters
    ----------
    keep : bool
        Keep them where the job was stopped or failed: they are steps from which it goes on.
    """
    places = [f"{out}.{name}" for name in names]
    if not keep:
        remove(places)
    done = False
    try:
        yield places
        done = True
    finally:
        if done or not keep:
            remove(places)


def remove(places: Sequence[str]) -> None:
    """Remove matrices of a job."""
    import fsspec

    for place in places:
        system, path = fsspec.core.url_to_fs(place)
        if system.exists(path):
            system.rm(path, recursive=True)


def put(place: str, out: str) -> None:
    """Put a matrix of a job where its result goes, in place of what an earlier run left there."""
    import fsspec

    remove([out])
    fsspec.core.url_to_fs(place)[0].mv(place, out, recursive=True)


def remove_steps(place: str, last: int) -> None:
    """Remove what the steps of a job left beside `place`."""
    remove([f"{place}-{step}" for step in range(last + 1)])


def was_stopped(error: BaseException | None) -> bool:
    """Whether an error came up while a stopped run was cleaning up: the scheduler may be gone before it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def write_report(job: Job, content: dict[str, Any]) -> None:
    """Write the report, whole or not at all."""
    part = Path(f"{job.report}.part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(job.report)


def product_summary(result: dict[str, Any], what: str) -> str:
    """Return the report of a product in a line."""
    checked = f"; verified: {result['verification']['reason']}" if result["verification"] else ""
    took = f"{result['blocks']:,} blocks, {result['seconds']:.1f} s"
    return f"{result['state']}: {result['nnz']:,} {what}, {took}{checked}"


# -- the command -------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def arguments(workflow: Workflow, argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=workflow.description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, metavar="JOB.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in place of the file's value")
    return parser.parse_args(argv)


def main(workflow: Workflow, argv: Sequence[str] | None = None) -> int:
    """Run a job file; return the exit code."""
    catch_signals()
    try:
        return run_file(workflow, arguments(workflow, argv))
    except KeyboardInterrupt:  # before there was a run, or while the report was written
        return STOPPED


def run_file(workflow: Workflow, args: argparse.Namespace) -> int:
    """Check the job file, run it, write the report; return the exit code."""
    begin = time.time()
    try:
        job = read_job(workflow, args.job, args.set)
    except JobError as error:
        print(f"{args.job}: {error}", file=sys.stderr)
        return 2
    operands = " and ".join(getattr(job, key) for key in workflow.matrices if getattr(job, key) is not None)
    say(f"{operands} to {job.out}, {job.memory_limit} a worker")
    log = Log()
    code, end = run_to_exit(workflow, job, log)
    if code == 2:
        print(f"{args.job}: {end['error']}", file=sys.stderr)
        return code
    say(workflow.summary(end["result"]) if code == 0 else end["error"])
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin))
    seconds = round(time.time() - begin, 3)
    facts = {"exit_code": code, "started": started, "seconds": seconds, "progress": log.latest, "job": asdict(job)}
    write_report(job, {**end, **facts})
    return code
