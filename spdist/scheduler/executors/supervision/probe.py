"""What a process says of itself: its versions, its host, its memory, and a digest of spdist's source.

The client sends this file to workers as text (`handshake.ask`), so that it also runs where spdist is missing or has
another version. It imports nothing but the standard library and `spdist.foundation.memory`, whose text goes with it.
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

from spdist.foundation.memory import host_memory, resident_memory

PROBE = "spdist.scheduler.executors.supervision.probe"
"""Name of this module."""
PACKAGES = {"spdist": "spdist-spgemm", "dask": "dask", "distributed": "distributed", "zarr": "zarr"}
"""Packages whose versions are compared, with the names of their distributions."""
SUFFIXES = ".py", ".cu", ".cuh"
"""Endings of the files that make up spdist's source."""
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
        "host_limit": host_memory(),
        "resident": resident_memory(),
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
