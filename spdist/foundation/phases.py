"""Where the wall time of a call or command goes: consecutive phases, which add up to what the user waits.

A `PhaseClock` belongs to the call, or to the process if the command line runs it; each moment is in one phase. Code
that begins a phase says so with `enter`. Kernels that a process compiles are noted in `COMPILATIONS`; a clock takes the
seconds in which a kernel was compiled out of the phase that they fell into, and calls them ``compile``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

WHAT_PHASES_DO = {
    "start": "Python, libraries, checks, workers",
    "plan": "how the product is cut",
    "compile": "kernels, once for this machine",
    "transpose": "transposed copies",
    "run": "blocks, from the first read to the last write",
    "verify": "is C right?",
    "close": "C is sealed, workers end",
}
"""Every phase in the order of tables, with a text for people. Those that took no time are not shown."""
SAY_SECONDS = 1.0
"""Seconds of compilation after which a line says what the user waits for."""
QUIET_SECONDS = 60.0
"""Seconds without compilation after which a line may be said again."""
NOTED_SECONDS = 0.25
"""A library that finds its code in a cache on disk takes less: `Compilations.around` does not note it."""

Span = tuple[float, float]
"""Begin and end in seconds since 1970."""

logger = logging.getLogger("spdist")


class Compilations:
    """When this process compiled kernels; safe to use from several threads."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._lock = threading.Lock()
        self._last_said = -QUIET_SECONDS

    @contextlib.contextmanager
    def around(self, what: str, least: float = 0.0, *, is_kept: bool = True) -> Iterator[None]:
        """Note the time of a ``with`` block in which `what` is compiled, unless it took less than `least` seconds.

        If compilation takes longer than `SAY_SECONDS`, those before it included, the log says so while it lasts; also
        whether the code `is_kept` for later processes.
        """
        begin = time.time()
        recent = sum(end - start for start, end in list(self.spans) if end > begin - QUIET_SECONDS)
        line = threading.Timer(max(SAY_SECONDS - recent, least), self._say, (what, is_kept))
        line.daemon = True
        line.start()
        try:
            yield
        finally:
            line.cancel()
            end = time.time()
            if end - begin >= least:
                with self._lock:
                    self.spans.append((begin, end))

    def since(self, begin: float) -> list[Span]:
        """Return the compilations that ended after a time in seconds since 1970."""
        with self._lock:
            return [span for span in self.spans if span[1] > begin]

    def _say(self, what: str, is_kept: bool) -> None:
        now = time.monotonic()
        with self._lock:
            is_due, self._last_said = now - self._last_said > QUIET_SECONDS, now
        if is_due:
            how = "once for this machine; `spdist warm-up` does it ahead" if is_kept else "in this process alone"
            logger.warning("compiling kernels (first %s), %s", what, how, extra={"notice": True})


COMPILATIONS = Compilations()
"""Of this process."""


class PhaseClock:
    """Wall seconds of consecutive phases.

    `begin`: when the phase ``start`` began, in seconds since 1970; by default now.
    `is_of_process`: whether the clock started with the process and so measures its whole time.

    Examples
    --------
    >>> clock = PhaseClock(time.time() - 2)
    >>> clock.enter("plan")
    >>> round(sum(clock.seconds().values()))
    2
    """

    def __init__(self, begin: float | None = None) -> None:
        self.is_of_process = begin is not None
        self.marks = [(time.time() if begin is None else begin, "start")]
        self._compiled: list[Span] = []

    @property
    def begin(self) -> float:
        """When the first phase began."""
        return self.marks[0][0]

    @property
    def phase(self) -> str:
        """The phase now."""
        return self.marks[-1][1]

    def enter(self, phase: str) -> None:
        """End the phase and begin another one, or the same again."""
        self.marks.append((max(time.time(), self.marks[-1][0]), phase))

    def add_compiled(self, spans: Iterable[Span]) -> None:
        """Add compilations of other processes."""
        self._compiled += spans

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase until now, in the order of `WHAT_PHASES_DO`; they add up to all seconds."""
        ends = [*(begin for begin, _ in self.marks[1:]), max(time.time(), self.marks[-1][0])]
        spans = union([*self._compiled, *COMPILATIONS.since(self.begin)])
        found = dict.fromkeys(WHAT_PHASES_DO, 0.0)
        for (begin, phase), end in zip(self.marks, ends, strict=True):
            compiled = sum(max(min(end, last) - max(begin, first), 0.0) for first, last in spans)
            found[phase] += end - begin - compiled
            found["compile"] += compiled
        return {phase: seconds for phase, seconds in found.items() if seconds}


def union(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint spans that cover the same times.

    Examples
    --------
    >>> union([(3.0, 4.0), (0.0, 2.0), (1.0, 2.5)])
    [(0.0, 2.5), (3.0, 4.0)]
    """
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


_current: ContextVar[PhaseClock | None] = ContextVar("spdist_phases", default=None)


@contextlib.contextmanager
def clocked(begin: float | None = None) -> Iterator[PhaseClock]:
    """Yield the active clock, or start one for this block, which `enter` then uses.

    `begin`: when a new clock begins, in seconds since 1970; by default now.
    """
    if (running := _current.get()) is not None:
        yield running
        return
    clock = PhaseClock(begin)
    token = _current.set(clock)
    try:
        yield clock
    finally:
        _current.reset(token)


def enter(phase: str) -> None:
    """Begin a phase of the clock that runs, if any."""
    if (clock := _current.get()) is not None:
        clock.enter(phase)


@contextlib.contextmanager
def during(phase: str) -> Iterator[None]:
    """Be in a phase during a ``with`` block, and in the one before it again afterwards."""
    clock = _current.get()
    before = "" if clock is None else clock.phase
    enter(phase)
    try:
        yield
    finally:
        enter(before)


def call_begin() -> float:
    """Return when the clock that runs began; without one, now."""
    clock = _current.get()
    return time.time() if clock is None else clock.begin


def add_compiled(spans: Iterable[Span]) -> None:
    """Add compilations of other processes to the clock that runs, if any."""
    if (clock := _current.get()) is not None:
        clock.add_compiled(spans)


def process_begin(stat: Path = Path("/proc/self/stat"), fields: Sequence[str] = ()) -> float:
    """Return when this process was started, in seconds since 1970; where the system does not tell (no Linux), now.

    `stat`: where Linux describes the process.
    `fields`: what it says there, for tests.
    """
    now = time.time()
    try:
        # the name, in parentheses, may hold spaces; the start is the 20th field after it, in ticks since boot
        words = fields or stat.read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(words[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return now
    return now - max(age, 0.0)
