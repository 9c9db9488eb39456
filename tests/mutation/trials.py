"""Which tests run a line, and whether one of them fails in a copy of the tree."""

from __future__ import annotations

import collections
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import coverage
import psutil

from tests.mutation.mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
STATEMENT_LINES = 4
"""Lines above a mutant's at which its statement may begin."""
TEST_SECONDS = 60
"""Seconds after which a test counts as one that hangs, which kills the mutant."""
SKIPPED = ("tests/torture/", "tests/benchmarks/", "tests/test_docs.py", "tests/test_measured.py", "tests/mutation/")
"""Tests that say nothing about one line, or take minutes."""
OPTIONS = ("-q", "--no-header", "-p", "no:cacheprovider", "-m", "not gpu and not slurm")
SETTINGS = """
[run]
source_pkgs = spdist
data_file = {path}
parallel = true
patch = subprocess
sigterm = true
concurrency = thread, multiprocessing
context = ${{PYTEST_CURRENT_TEST-}}
"""
"""What coverage.py measures; a child process counts for the test that started it."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.M)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    text: str
    """The line before and after."""
    killer: str
    """The test that failed; empty if the mutant survived."""
    seconds: float
    tests: int
    """Tests that passed."""
    left: int
    """Tests for which its time was too short."""


class Coverage:
    """Which tests run which lines, measured by coverage.py in this process and its children."""

    def __init__(self, path: Path) -> None:
        data = coverage.CoverageData(str(path))
        data.read()
        self.by_line: dict[str, dict[int, set[str]]] = {}
        self.lines: collections.Counter[str] = collections.Counter()
        for name in data.measured_files():
            found = self.by_line["spdist/" + Path(name).as_posix().rpartition("/spdist/")[2]] = {
                line: {sys.intern(test) for context in contexts if (test := _test(context))}
                for line, contexts in data.contexts_by_lineno(name).items()
            }
            for tests in found.values():
                self.lines.update(tests)

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests of a mutant's line or, as it may be compiled, of its file; the most special tests first."""
        found = self.by_line.get(mutant.path, {})
        near = (found.get(line) for line in range(mutant.line, mutant.line - STATEMENT_LINES, -1))
        tests = next(filter(None, near), None) or set().union(*found.values())
        return sorted(tests, key=lambda test: (self.lines[test], test))


def _test(context: str) -> str:
    """Return the id of the test that a context names; empty outside of tests, as when modules are loaded."""
    return context.partition("|")[0].partition(" (")[0]


def measure_coverage(path: Path, processes: int) -> None:
    """Run every test once, to see which lines it runs; ``path`` is written."""
    settings = path.with_name("settings.ini")
    settings.write_text(SETTINGS.format(path=path))
    options = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report=", *OPTIONS]
    ignored = [f"--ignore={name.rstrip('/')}" for name in SKIPPED]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *options,
        *ignored,
        "--dist",
        "worksteal",
        "-n",
        str(processes),
        "--timeout=300",
        "tests",
    ]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTEST_CURRENT_TEST": ""})


@dataclass
class Workplace:
    """A copy of the working tree, in which one mutant is planted at a time."""

    folder: Path
    coverage: Coverage
    budget: float
    """Seconds of tests that a mutant may survive."""
    left_out: set[str] = field(default_factory=set)
    """Tests that fail without a mutant."""

    def make(self) -> Workplace:
        """Copy the working tree, with the bytecode and kernels that Python and Numba keep in it."""
        shutil.copytree(ROOT, self.folder, ignore=shutil.ignore_patterns(".*", "build", "dist", "demo-output"))
        return self

    def judge(self, mutant: Mutant) -> Verdict:
        """Plant the mutant, run its tests until one fails, and take the mutant out again."""
        path = self.folder / mutant.path
        source = path.read_bytes()
        begin = time.monotonic()
        try:
            while True:
                path.write_bytes(mutant.applied(source))
                killer, passed, left = self._first_failure(mutant, begin + self.budget)
                path.write_bytes(source)
                if not killer or self._passes(killer):
                    text = mutant.described(source)
                    return Verdict(mutant, text, killer, time.monotonic() - begin, passed, left)
                self.left_out.add(killer)
        finally:
            path.write_bytes(source)

    def _first_failure(self, mutant: Mutant, end: float) -> tuple[str, int, int]:
        """Run tests in growing batches; return the test that failed, or "", and how many passed and were not run."""
        known = self.coverage.tests(mutant) or self._tests_beside(mutant)
        tests = [test for test in known if test not in self.left_out]
        ran, size = 0, 8
        while tests and time.monotonic() < end:
            batch, tests = tests[:size], tests[size:]
            code, output = self._pytest([*batch, "-x"], end - time.monotonic())
            if code is None:
                return "", ran, len(batch) + len(tests)
            if code not in (0, 5):  # 5: all of them need a GPU
                failed = FAILED.search(output)
                return (failed.group(1) if failed else batch[0]), ran, 0
            ran, size = ran + len(batch), size * 3
        return "", ran, len(tests)

    def _tests_beside(self, mutant: Mutant) -> list[str]:
        """Return the test files of a file's folder, those named for the file first: no test runs its Python lines."""
        folder = self.folder / "tests" / Path(mutant.path).parent.relative_to("spdist")
        while not (files := list(folder.glob("test_*.py"))):
            folder = folder.parent
        stem = Path(mutant.path).stem
        return [
            file.relative_to(self.folder).as_posix()
            for file in sorted(files, key=lambda file: (stem not in file.stem, file.name))
        ]

    def _passes(self, test: str) -> bool:
        """Return whether a test passes without the mutant."""
        return self._pytest([test], 300)[0] in (0, 5)

    def _pytest(self, arguments: list[str], seconds: float) -> tuple[int | None, str]:
        """Run pytest; return its exit code, which is None if time was up, and what it printed."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            *OPTIONS,
            f"--timeout={TEST_SECONDS}",
            *arguments,
            *(f"--deselect={t}" for t in self.left_out),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",  # a mutant of the same second and size would be taken for the source
        }
        environment["TMPDIR"] = str(self.folder / ".tmp")
        (self.folder / ".tmp").mkdir(exist_ok=True)
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, errors="replace",
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=max(seconds, 1))
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            self._end_processes(process)
            shutil.rmtree(self.folder / ".tmp", ignore_errors=True)

    def _end_processes(self, process: subprocess.Popen[str]) -> None:
        """Kill pytest and every process that works in this folder."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        for other in psutil.process_iter(["cwd"]):
            if (other.info["cwd"] or "").startswith(str(self.folder)):
                other.kill()
        process.communicate()
