"""A process that has spdist and Dask loaded and forks itself for each command, which saves the seconds of starting.

Commands come as JSON lines on stdin. ``{"call": "module:function", "argv": [...], "environment": {...}, ...}`` starts
one, and the answer is its process id; ``{"poll": pid}`` is answered with its exit code, or null. Workers are forked
too: multiprocessing's fork server is started here and handed to every child.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from typing import Any

from tests.torture import inject

MODULES = (
    "numba", "distributed", "distributed.cli.dask_scheduler", "distributed.cli.dask_worker", "bokeh.server.server",
    "distributed.dashboard.scheduler", "zarrs", "scipy.sparse", "spdist.cli", "spdist.api.products",
    "spdist.cli.console", "spdist.jobs.multiply", "spdist.storage.transpose", "spdist.storage.import_export",
    "spdist.verification.freivalds", "spdist.applications.shortest_paths", "spdist.applications.similarity",
    "spdist.applications.cooccurrence", "spdist.applications.markov_clustering.markov_clustering",
    "spdist.applications.pagerank", "spdist.applications.triangles",
    "spdist.scheduler.executors.clients.worker_setup", "spdist.kernels.cpu.numba_engine", "spdist.kernels.cpu.rowwise",
)  # fmt: skip
"""Modules that every command imports sooner or later."""


def prepare_worker() -> None:
    """Let workers that are forked from this process be tortured; called in multiprocessing's fork server."""
    from distributed.nanny import WorkerProcess

    run = WorkerProcess._run.__func__  # type: ignore[attr-defined]

    @functools.wraps(run)  # it is pickled by its name
    def prepared(cls: type, *args: Any, env: dict[str, str], **kwargs: Any) -> None:
        os.environ.update(env)
        if (errors := env.get("SPDIST_TORTURE_STDERR")) is not None:
            _redirect(errors, 1, 2)
        inject.answer_where_it_hangs()
        if inject.SPECIFICATION in env:
            inject.install(env[inject.SPECIFICATION], "worker")
        run(cls, *args, env=env, **kwargs)

    WorkerProcess._run = classmethod(prepared)  # type: ignore[method-assign,assignment]


def load_kernels() -> None:
    """Load the compiled kernels that products use."""
    import scipy.sparse as sp

    import spdist

    a = sp.csr_array([[1.0, 2.0], [0.0, 3.0]])
    for options in ({}, {"semiring": "min_plus"}, {"mask": a}, {"top_n": 1}):
        spdist.spgemm(a, a, method="numba", **options)  # type: ignore[arg-type]


def _redirect(path: str, *descriptors: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for descriptor in descriptors:
        os.dup2(file, descriptor)
    os.close(file)


def _enter(command: dict[str, Any]) -> None:
    """Become the process that a command asks for."""
    import dask

    os.setsid()
    main = sys.modules["__main__"]
    main.__spec__ = None  # children of this process are not to import the server
    main.__dict__.pop("__file__", None)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _redirect(command["stdout"], 1)
    _redirect(command["stderr"], 2)
    os.environ.update(command["environment"])
    passed = {key: value for key, value in command["environment"].items() if key.startswith("SPDIST_TORTURE")}
    dask.config.set({
        "distributed.worker.multiprocessing-method": "forkserver",
        "distributed.nanny.environ": {**passed, "SPDIST_TORTURE_STDERR": command["stderr"]},
    })  # fmt: skip
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    tracker._fd = tracker._pid = None  # a killed child's semaphores are removed by a tracker of its own
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[attr-defined]
    inject.answer_where_it_hangs()
    if inject.SPECIFICATION in os.environ:
        inject.install(os.environ[inject.SPECIFICATION], command["role"])


def _become(command: dict[str, Any]) -> None:
    """Run a command in this process, which was just forked, and end it."""
    code = 1
    try:
        _enter(command)
        module, _, name = command["call"].partition(":")
        sys.argv = [module, *command["argv"]]
        code = getattr(importlib.import_module(module), name)(command["argv"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)  # without the half second in which the interpreter takes everything apart


def main() -> None:
    """Answer commands until stdin ends."""
    multiprocessing.set_forkserver_preload(["tests.torture.preload"])
    forkserver.ensure_running()
    importlib.import_module("tests.torture.preload")
    gc.collect()
    gc.freeze()  # what is shared with children stays shared
    ended: dict[int, int] = {}
    started: set[int] = set()
    print(json.dumps({"ready": os.getpid(), "forkserver": forkserver._forkserver._forkserver_pid}), flush=True)  # type: ignore[attr-defined]
    for line in sys.stdin:
        command = json.loads(line)
        if "poll" in command:
            pid = command["poll"]
            if pid not in ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    ended[pid] = os.waitstatus_to_exitcode(status)
            print(json.dumps({"code": ended.get(pid)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become(command)
        started.add(pid)
        ended.pop(pid, None)  # of an earlier process of this number
        print(json.dumps({"pid": pid}), flush=True)
    for pid in started - ended.keys():  # nobody asks for them any more
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
