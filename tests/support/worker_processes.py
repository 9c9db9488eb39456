"""Workers as processes of their own: with another spdist, another folder, or little memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]

NO_SPDIST = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "spdist":
            raise ModuleNotFoundError("No module named 'spdist'")
sys.meta_path.insert(0, Block())
"""
OTHER_FOLDER = """
import pathlib, tempfile
from spdist.scheduler.executors.supervision.nonce import NonceFolder
own, elsewhere = NonceFolder._open, tempfile.mkdtemp()
NonceFolder._open = lambda folder, own=own: (own(folder)[0], elsewhere)  # Dask loads this file twice
"""


def workers_below(pid: int) -> list[psutil.Process]:
    """Return the worker processes that a process has started, less those that are ending."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("spawn_main" in word for word in child.cmdline()):
                found.append(child)
    return found


def other_source(folder: Path) -> Path:
    """Copy the package and change one line of it; return the folder to import it from."""
    shutil.copytree(ROOT / "spdist", folder / "spdist", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "spdist" / "units.py").open("a") as file:
        file.write("\n# another commit\n")
    return folder


@contextlib.contextmanager
def worker_process(
    scheduler: str, *options: str, path: Path = ROOT, preload: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``dask worker`` with spdist from `path`, and kill it afterwards."""
    words = [sys.executable, "-m", "distributed.cli.dask_worker", scheduler, "--nthreads", "1", "--no-dashboard"]
    words += [*options, *(["--preload", str(preload)] if preload else [])]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "PYTHONPATH": str(path)}
    process = subprocess.Popen([*words, "--no-nanny"], cwd=path, env=environment, **quiet)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
