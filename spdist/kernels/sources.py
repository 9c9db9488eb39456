"""The state of the kernels' source files, by which compiled code is known to be theirs; without Numba."""

from __future__ import annotations

import functools
from pathlib import Path

SourceFile = tuple[str, int, int]
"""Name, time of the last change in ns, and bytes."""


@functools.cache
def kernel_sources() -> tuple[SourceFile, ...]:
    """Return the source files of all kernels, parts of other kernels included."""
    found = [(path.name, path.stat()) for path in sorted(Path(__file__).parent.rglob("*.py"))]
    return tuple((name, one.st_mtime_ns, one.st_size) for name, one in found)
