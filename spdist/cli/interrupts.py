"""Raise interrupts again that Python dropped because they arrived while an object was being finalized."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

_stopping = False
"""Whether this process received a signal to stop; unfinished objects may then raise while being cleaned up."""

RETRY_SECONDS = 0.05
"""Seconds until a dropped interrupt is raised again; the finalizer that dropped it has ended by then."""


def raise_dropped_interrupts() -> None:
    """Interrupt the main thread again whenever Python drops a KeyboardInterrupt, for the rest of the process.

    A signal handler runs between any two instructions of the main thread, also inside ``__del__`` and callbacks. Python
    reports an exception raised there and drops it, so a second Ctrl-C would be needed.

    Examples
    --------
    >>> raise_dropped_interrupts()  # doctest: +SKIP
    """
    report = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            if not _stopping:
                report(unraisable)
            return
        timer = threading.Timer(RETRY_SECONDS, _interrupt)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook


def say_that_it_stops(number: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt as Python's own handler does, and acknowledge the signal on the terminal at once.

    `number`: of the signal.
    Raises `KeyboardInterrupt` Always.
    """
    global _stopping
    is_first, _stopping = not _stopping, True
    if is_first and sys.stderr.isatty():
        with contextlib.suppress(OSError):
            os.write(2, b"\r\x1b[Kspdist: stopping ...\n")  # one call, so that no output splits the line
    raise KeyboardInterrupt


def _interrupt() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)
