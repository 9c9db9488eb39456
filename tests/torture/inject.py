"""Runs inside the processes under test: names every function's start and end as a point, and dies where it is told to.

Nothing of spdist is imported or named here. `install` reads a specification, a JSON file that ``SPDIST_TORTURE`` names:

``folder``
    Of the trial: ``pids/``, ``hits`` and ``fired`` are kept there.
``log``
    Whether to write every point that is passed, and every system call that is watched, to ``hits``.
``role, point, number, victims, action``
    In processes of this role, at this point, the `number`-th time: kill the processes of the roles `victims`, or
    ``self``, the process that is there.
``calls``
    What `faults.c` is to do, if it was loaded: see there.

A fault fires once in a trial, in the process that gets there first: a worker that is started again lives.
"""

from __future__ import annotations

import ast
import faulthandler
import importlib.abc
import importlib.machinery
import itertools
import json
import marshal
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

SPECIFICATION = "SPDIST_TORTURE"
"""Environment variable: the file with the specification."""
LEFT_ALONE = (
    *("spdist.kernels", "spdist.matrices", "spdist.errors", "spdist.foundation.units"),
    "spdist.applications.cooccurrence",
)
"""Modules without points: Numba compiles their functions, or they hold nothing that could be lost."""

COMPILED = b"from spdist.kernels.cpu.numba_compile import"
"""What a module says whose functions Numba compiles: it has no points."""


class Armed:
    """What this process is to do; `None` in `armed` means nothing."""

    def __init__(self, specification: dict[str, Any], role: str) -> None:
        self.folder, self.role = Path(specification["folder"]), role
        self.log = -1
        if specification.get("log"):
            self.log = os.open(self.folder / "hits", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        mine = specification.get("role") == role
        self.point = specification.get("point") if mine else None
        self.number, self.count = specification.get("number", 1), itertools.count(1)
        self.victims, self.action = specification.get("victims", []), specification.get("action", "kill")

    def pass_point(self, point: str) -> None:
        """Note a point; act if it is the one."""
        if self.log >= 0:
            os.write(self.log, f"{self.role} {os.getpid()} {point}\n".encode())
        if point == self.point and next(self.count) == self.number and self._first():
            self.act()

    def _first(self) -> bool:
        """Whether no other process has fired."""
        try:
            os.close(os.open(self.folder / "fired", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True

    def act(self) -> None:
        """Kill the victims, this process last; or raise an error."""
        if self.action == "memory":
            raise MemoryError("injected")
        own = "self" in self.victims
        for entry in sorted((self.folder / "pids").iterdir()):
            pid, role = entry.name.split(".")
            if role in self.victims and int(pid) == os.getpid():
                own = True
            elif role in self.victims:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        if own:
            os.kill(os.getpid(), signal.SIGKILL)


armed: Armed | None = None


def hit(point: str) -> None:
    """Be called at every point."""
    if armed is not None:
        armed.pass_point(point)


class _Marker(ast.NodeTransformer):
    """Calls `hit` where a function starts and where it ends, however it ends."""

    def __init__(self, module: str) -> None:
        self.path = [module]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.path.append(node.name)
        self.generic_visit(node)
        self.path.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.path.append(node.name)
        self.generic_visit(node)
        name = ".".join(self.path)
        self.path.pop()
        head = 1 if ast.get_docstring(node, clean=False) is not None else 0
        begin, end = (ast.parse(f"__torture__({f'{name}:{edge}'!r})").body for edge in ("start", "end"))
        body = node.body[head:] or [ast.Pass()]
        node.body[head:] = [*begin, ast.Try(body=body, handlers=[], orelse=[], finalbody=end)]
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module with its points; keeps the result in a folder of its own."""

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.get_filename(fullname))
        stat = path.stat()
        cache = Path(tempfile.gettempdir()) / f"spdist-torture-{os.getuid()}" / f"{sys.version_info[1]}"
        kept = cache / f"{fullname}-{stat.st_mtime_ns}-{stat.st_size}"
        with suppress(OSError, EOFError, ValueError, TypeError):
            code: CodeType = marshal.loads(kept.read_bytes())
            if code.co_filename == str(path):
                return code
        source = path.read_bytes()
        tree = ast.parse(source)
        if COMPILED not in source:
            tree = ast.fix_missing_locations(_Marker(fullname).visit(tree))
        code = compile(tree, str(path), "exec", dont_inherit=True)
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = kept.with_name(f"{kept.name}.{os.getpid()}")
        part.write_bytes(marshal.dumps(code))
        part.replace(kept)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules of spdist and gives them `_Loader`."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "spdist" or fullname.startswith(LEFT_ALONE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def mark_points() -> None:
    """Let modules of spdist that are imported from now on have points."""
    import builtins

    builtins.__torture__ = hit  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder())


def answer_where_it_hangs() -> None:
    """Write the stacks of all threads to stderr at SIGUSR1."""
    with suppress(RuntimeError, AttributeError, OSError, ValueError):
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=False)


def install(path: str, role: str) -> None:
    """Do in this process what the specification at `path` says."""
    global armed
    answer_where_it_hangs()
    try:
        specification = json.loads(Path(path).read_text())
    except FileNotFoundError:  # the trial is over
        return
    folder = Path(specification["folder"])
    (folder / "pids" / f"{os.getpid()}.{role}").touch()
    armed = Armed(specification, role)
    calls = specification.get("calls")
    if calls and role in specification["call_roles"]:
        import ctypes

        ctypes.CDLL(None).torture_arm(calls.encode(), str(folder).encode(), f"{role} {os.getpid()} ".encode())


def role_of(command: list[str]) -> str:
    """Return the role of a process from its command; empty for one that is none of the run's."""
    text = " ".join(command)
    if "spawn_main" in text:
        return "worker"
    if "resource_tracker" in text or "forkserver" in text:
        return ""
    names = {"scheduler": ("dask scheduler", "dask-scheduler", "dask_scheduler"),
             "nanny": ("dask worker", "dask-worker", "dask_worker"), "client": ("-m spdist", "bin/spdist")}  # fmt: skip
    return next((role for role, words in names.items() if any(word in text for word in words)), "")
