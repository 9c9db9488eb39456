"""An interrupt is never lost: Python drops exceptions that are raised while an object is being finalized."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

_stopping = False
"""Whether this process was told to stop: what was half made then may fail when it is taken apart."""

RETRY_SECONDS = 0.05
"""Seconds until an interrupt that was dropped is raised again; what dropped it has ended by then."""


def raise_dropped_interrupts() -> None:
    """Interrupt the main thread again whenever Python drops a KeyboardInterrupt, for the rest of the process.

    A signal's handler runs between any two instructions of the main thread, those of ``__del__`` and of callbacks among
    them; what it raises there is reported and goes no further, and a second Ctrl-C would be needed.

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
    """Raise KeyboardInterrupt as Python's own handler does, and say at once on the terminal that it was heard.

    `number`: of the signal.
    Raises `KeyboardInterrupt` Always.
    """
    global _stopping
    is_first, _stopping = not _stopping, True
    if is_first and sys.stderr.isatty():
        with contextlib.suppress(OSError):
            os.write(2, b"\r\x1b[Kspdist: stopping ...\n")  # in one piece, whatever the main thread writes
    raise KeyboardInterrupt


def _interrupt() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)
