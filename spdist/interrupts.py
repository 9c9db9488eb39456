"""An interrupt is never lost: Python drops exceptions that are raised while an object is being finalized."""

from __future__ import annotations

import signal
import sys
import threading

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
            report(unraisable)
            return
        timer = threading.Timer(RETRY_SECONDS, _interrupt)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook


def _interrupt() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)
