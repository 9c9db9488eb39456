"""What a process says of itself: its versions, its host, its memory, and a digest of spdist's source.

The client sends this file to workers as text (`handshake.ask`), so that it also runs where spdist is missing or has
another version. It imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pickle
import platform
import sys
from pathlib import Path

PROBE = "spdist.scheduler.executors.supervision.probe"
"""Name of this module."""
PACKAGES = {"spdist": "spdist-spgemm", "dask": "dask", "distributed": "distributed", "zarr": "zarr"}
"""Packages whose versions are compared, with the names of their distributions."""
SUFFIXES = ".py", ".cu", ".cuh"
"""Endings of the files that make up spdist's source."""
_CGROUP = Path("/sys/fs/cgroup")
_DIGESTS: dict[str, str] = {}


def source_digest() -> str:
    """Return a digest of the source of the spdist that this process imports; empty without spdist.

    The digest is taken once: what a process has imported does not change with its files.
    """
    if "spdist" not in _DIGESTS:
        try:
            spec = importlib.util.find_spec("spdist")
        except (ImportError, ValueError):
            spec = None
        origin = spec.origin if spec is not None else None
        _DIGESTS["spdist"] = _digest_of(Path(origin).parent) if origin else ""
    return _DIGESTS["spdist"]


def _digest_of(folder: Path) -> str:
    """Return a digest of the names and contents of the source files below a folder."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(hashlib.blake2b(path.read_bytes(), digest_size=16).digest())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of Python and of `PACKAGES`; a package that is missing is left out."""
    import importlib.metadata  # loads much that a product in this process does not need

    found = {"python": platform.python_version()}
    for name, distribution in PACKAGES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(distribution)
    return found


def host_limit() -> int:
    """Return the bytes of memory that this process may take: of its control group, or of the machine."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):  # no Linux
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                limits += _limits_above(_CGROUP / path.lstrip("/"), "memory.max")
            elif "memory" in controllers.split(","):
                limits += _limits_above(_CGROUP / "memory" / path.lstrip("/"), "memory.limit_in_bytes")
    return min(limits)


def _limits_above(folder: Path, name: str) -> list[int]:
    """Return the limits of a control group and of the groups that contain it."""
    limits = []
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError, ValueError):  # no such group in this container, or no limit ("max")
            limits.append(int((place / name).read_text()))
    return limits


def resident() -> int:
    """Return the resident bytes of this process; 0 without Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def memory_share() -> float:
    """Return the share of a worker's memory limit above which Dask pauses or ends it."""
    import dask

    names = "pause", "terminate"
    shares = [dask.config.get("distributed.worker.memory." + name, False) for name in names]
    return min([float(share) for share in shares if share], default=1.0)


def answer(expected: str, question: bytes) -> dict[str, object]:
    """Return facts about this process and, if it has the client's source, its answer to a question.

    `expected`: the `source_digest` of the client; empty to compare no software, and to ask nothing more.
    `question`: A pickled function without arguments; empty to ask nothing more.
    """
    import dask

    found: dict[str, object] = {
        "host": platform.node(),
        "pid": os.getpid(),
        "host_limit": host_limit(),
        "resident": resident(),
        "memory_share": memory_share(),
        "steals": bool(dask.config.get("distributed.scheduler.work-stealing", False)),
    }
    if not expected:
        return found
    imported = sys.modules.get(PROBE)
    own = source_digest() if imported is None else imported.source_digest()
    found |= {"source": own, "versions": versions()}
    if question and own == expected:
        try:
            ask = pickle.loads(question)
            sys.modules[PROBE]._DIGESTS.setdefault("spdist", own)  # of what has just been imported
            found["answer"] = ask()
        except Exception as error:  # a package that is missing, for instance; Dask cannot always send its traceback
            found["error"] = f"{type(error).__name__}: {error}"
    return found
