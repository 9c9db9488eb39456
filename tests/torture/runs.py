"""Commands as processes: forked from a server that has everything loaded, or fresh; watched, killed, reaped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = {"client": "spdist.cli:main", "scheduler": "distributed.cli.dask_scheduler:main",
           "nanny": "distributed.cli.dask_worker:main"}  # fmt: skip
"""Function that a process of each role runs, when it is forked."""
WORDS = {"client": ["-m", "spdist"], "scheduler": ["-m", "distributed.cli.dask_scheduler"],
         "nanny": ["-m", "distributed.cli.dask_worker"]}  # fmt: skip
"""Arguments of Python for a process of each role, when it is fresh."""
TIME_LIMIT = 60.0
"""Seconds after which a command hangs; more where an undisturbed one takes long."""
GONE_SECONDS = 10.0
"""Seconds after the end of a command in which all its processes must be gone."""
POLL_SECONDS = 0.01


@dataclass
class Run:
    """A command that was started.

    Attributes
    ----------
    words : list of str
    folder : Path
        Holds its output, ``NAME.out`` and ``NAME.err``.
    name, role : str
    pid : int
    launcher : Launcher
    code : int, optional
        Exit code, negative for a signal; None while it runs.
    """

    words: list[str]
    folder: Path
    name: str
    role: str
    pid: int
    launcher: Launcher
    code: int | None = None

    @property
    def out(self) -> str:
        """Return what was written to stdout."""
        return (self.folder / f"{self.name}.out").read_text(errors="replace")

    @property
    def err(self) -> str:
        """Return what was written to stderr."""
        return (self.folder / f"{self.name}.err").read_text(errors="replace")

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.code is None:
            self.code = self.launcher.poll(self)
        return self.code

    def wait(self, seconds: float) -> bool:
        """Wait for the end; if it does not come in time, write the stacks of all processes and kill them."""
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        if self.code is not None:
            return True
        for process in [psutil.Process(self.pid), *self.launcher.workers()]:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGUSR1)  # faulthandler answers
        time.sleep(0.3)
        self.kill()
        return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process itself; after SIGKILL wait for its end."""
        if self.poll() is None:
            os.kill(self.pid, number)
        while number == signal.SIGKILL and self.poll() is None:
            time.sleep(POLL_SECONDS)


class Launcher:
    """Starts commands: forked from a server, or fresh."""

    def __init__(self, library: Path | None = None) -> None:
        """Start the server; `library` is loaded into all processes (`faults.c`)."""
        self.preload = {} if library is None else {"LD_PRELOAD": str(library)}
        self.fresh: dict[int, subprocess.Popen[bytes]] = {}
        self.seconds = TIME_LIMIT
        self._start_server()

    def _start_server(self) -> None:
        environment = {**os.environ, **self.preload, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
        ready = self._answer()
        self.forkserver = psutil.Process(ready["forkserver"])

    def _revive(self) -> None:
        """Start the servers again if a client that was killed in mid-sentence took multiprocessing's with it."""
        if not self.forkserver.is_running() or self.forkserver.status() == psutil.STATUS_ZOMBIE:
            self.close()
            self._start_server()

    def _answer(self, **command: Any) -> dict[str, Any]:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        if command:
            self.server.stdin.write(json.dumps(command) + "\n")
            self.server.stdin.flush()
        line = self.server.stdout.readline()
        if not line:
            raise RuntimeError("the fork server has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def start(self, folder: Path, name: str, words: Sequence[str | Path], **options: Any) -> Run:
        """Start a command.

        Parameters
        ----------
        folder : Path
            Where its output goes, in the files ``NAME.out`` and ``NAME.err``.
        name : str
        words : sequence
            Its arguments.
        **options
            `role`, by default ``client``; `fresh`: whether to start a new interpreter; `specification`: a file, see
            `inject`; `call`: the function that a forked process runs, ``module:function``, in place of its role's.
        """
        role, fresh = options.get("role", "client"), options.get("fresh", False)
        argv = [str(word) for word in words]
        out, err = (folder / f"{name}.{end}" for end in ("out", "err"))
        for path in (out, err):
            path.write_bytes(b"")
        environment = {}
        if (specification := options.get("specification")) is not None:
            environment = {"SPDIST_TORTURE": str(specification), "SPDIST_TORTURE_ROOT": str(ROOT)}
        run = Run(argv, folder, name, role, 0, self)
        if fresh:
            site = [str(ROOT / "tests" / "torture" / "site")] if environment else []
            paths = {"PYTHONPATH": os.pathsep.join([*site, str(ROOT)])}
            environment |= {**self.preload, **paths}
            process = subprocess.Popen(
                [sys.executable, *WORDS[role], *argv], stdin=subprocess.DEVNULL, stdout=out.open("ab"),
                stderr=err.open("ab"), start_new_session=True, env={**os.environ, **environment},
            )  # fmt: skip
            self.fresh[process.pid] = process
            run.pid = process.pid
            return run
        command = {"call": options.get("call", ENTRIES[role]), "argv": argv, "role": role, "environment": environment}
        self._revive()
        run.pid = self._answer(**command, stdout=str(out), stderr=str(err))["pid"]
        self.fresh.pop(run.pid, None)  # an earlier process of this number
        return run

    def poll(self, run: Run) -> int | None:
        """Return the exit code of a run, or None."""
        if run.pid in self.fresh:
            return self.fresh[run.pid].poll()
        code: int | None = self._answer(poll=run.pid)["code"]
        return code

    def workers(self) -> list[psutil.Process]:
        """Return the workers that were forked and still live."""
        return self.forkserver.children()

    def left(self, *runs: Run, seconds: float = GONE_SECONDS, workers: bool = True) -> list[str]:
        """Wait until every process of runs that have ended is gone, and every forked worker unless `workers` is False.

        Returns
        -------
        list of str
            Commands of those that stay; they are killed.
        """
        sessions = {run.pid for run in runs}
        end = time.monotonic() + seconds
        while (alive := self._alive(sessions, workers)) and time.monotonic() < end:
            time.sleep(5 * POLL_SECONDS)
        stayed = []
        for process in alive:
            with suppress(psutil.Error):
                stayed.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
                process.kill()
        return stayed

    def _alive(self, sessions: set[int], workers: bool) -> list[psutil.Process]:
        """Return the living processes of some sessions and, if asked for, forked workers."""
        found = self.workers() if workers else []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) in sessions:
                    found.append(process)
        living = []
        for process in found:
            with suppress(psutil.Error):
                if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    living.append(process)
        return living

    def close(self) -> None:
        """End the server."""
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait(10)

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Trial:
    """A folder in which one trial happens, with its specification of faults.

    Attributes
    ----------
    folder : Path
    specification : dict
        See `inject`.
    """

    folder: Path
    specification: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the folder, and the bookkeeping beside the data."""
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        (self.folder / "pids").mkdir(exist_ok=True)

    @property
    def data(self) -> Path:
        """Return the folder in which C and nothing else should be at the end."""
        return self.folder / "data"

    @property
    def fired(self) -> bool:
        """Whether the fault came."""
        return (self.folder / "fired").exists()

    def arm(self, **specification: Any) -> Path:
        """Write the specification for the next run and return its file."""
        (self.folder / "fired").unlink(missing_ok=True)
        for entry in (self.folder / "pids").iterdir():
            entry.unlink()
        path = self.folder / "specification.json"
        path.write_text(json.dumps({"folder": str(self.folder), **specification}))
        return path

    def hits(self) -> list[tuple[str, int, str]]:
        """Return role, process id and point of everything that was passed, in order."""
        path = self.folder / "hits"
        lines = [line.split(" ", 2) for line in path.read_text(errors="replace").splitlines()] if path.exists() else []
        return [(line[0], int(line[1]), line[2]) for line in lines if len(line) == 3 and line[1].isdigit()]
