"""Run ``spdist`` and kill it at a point: ``python kill_at.py MODULE.FUNCTION N before|after multiply A B C ...``.

The process kills itself, as ``kill -9`` does, before or after the N-th call of a function.
"""

from __future__ import annotations

import functools
import os
import pkgutil
import signal
import sys
from typing import Any

from spdist import cli


def kill_at(name: str, number: int, when: str) -> None:
    """Let the `number`-th call of a function, ``module.function`` or ``module.Class.method``, kill this process."""
    owner, _, attribute = name.rpartition(".")
    place = pkgutil.resolve_name(owner)
    original, calls = getattr(place, attribute), []

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) != number:
            return original(*args, **kwargs)
        if when == "after":
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(place, attribute, counted)


if __name__ == "__main__":
    kill_at(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    sys.exit(cli.main(sys.argv[4:]))
