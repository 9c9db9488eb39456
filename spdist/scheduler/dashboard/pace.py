"""How long a run still takes, from the work that was done so far and when; no clock."""

from __future__ import annotations

from typing import NamedTuple

SAMPLES = 240
"""Samples that are kept; when they are full, every second one is dropped."""
EARLIEST_SHARE = 0.01
"""Share of the work after which the time left is shown."""
FEW = 4
"""Samples after the first finished work that make a rate of their own, or weigh as much as an expected one."""
OVERLAP = 1.5
"""How many times as quick as the mean so far a run is guessed to go on after its first finished work."""
MARGIN = 0.1
"""Share by which bounds are wider than the slowest and the quickest rate seen."""
DOUBT = 1.6
"""How many times as quick as expected a run may go on."""


class TimeLeft(NamedTuple):
    """Seconds that are left: likely, least and most.

    Examples
    --------
    >>> TimeLeft(12.2, 10.9, 14.0).in_words
    '12 s left (11 to 14)'
    """

    likely: float
    least: float
    most: float

    @property
    def in_words(self) -> str:
        """The seconds as a user reads them."""
        return f"{self.likely:.0f} s left ({self.least:.0f} to {self.most:.0f})"


class Pace:
    """When how much work was multiplied, and written.

    Nothing is done until the first block has gone through, while later blocks already follow: to divide the work by the
    time since the beginning would count that wait again and again. A stage's rate is therefore counted from its first
    finished work on. The slower of the two stages says what is left: at first blocks are multiplied one after the
    other, even if they will have to wait for others to be written. While few blocks are done, how long the run was
    expected to take says more than they do.

    `begun`: when the run began, in seconds of any clock.
    `expected`: seconds that the run should take; 0.0 if nobody knows. Counts as much as the first few samples.

    Examples
    --------
    >>> pace = Pace(0.0)
    >>> for now, work in [(2, 10), (3, 20), (4, 30), (5, 40), (6, 50), (7, 60)]:
    ...     pace.add(now, work, work - 10, 100)
    >>> round(pace.estimate_time_left(8.0).likely, 1)
    4.0
    """

    def __init__(self, begun: float, expected: float = 0.0) -> None:
        self.begun = begun
        self._stages = _Stage(begun, expected), _Stage(begun, expected)

    def add(self, now: float, multiplied: float, written: float, total: float) -> None:
        """Take note of the work of blocks that were multiplied, and written, in any unit, and of all work."""
        for stage, work in zip(self._stages, (multiplied, written), strict=True):
            stage.add(now, work, total)

    def estimate_time_left(self, now: float) -> TimeLeft | None:
        """Return the seconds that are left; None if it is too early to tell."""
        multiplied, written = (stage.estimate_time_left(now) for stage in self._stages)
        if written is None or (multiplied is not None and not self._stages[1].is_steady):
            return multiplied
        return written if multiplied is None else TimeLeft(*map(max, zip(multiplied, written, strict=True)))


class _Stage:
    """Work that one stage has done, by time."""

    def __init__(self, begun: float, expected: float) -> None:
        self.total, self.expected = 0.0, expected
        self.samples = [(begun, 0.0)]

    @property
    def is_steady(self) -> bool:
        """Whether there are enough samples after the first finished work."""
        return len(self.samples) >= FEW + 2

    def add(self, now: float, work: float, total: float) -> None:
        """Take note of the work done so far."""
        self.total = total
        if work > self.samples[-1][1]:
            self.samples.append((now, work))
        if len(self.samples) > SAMPLES:
            del self.samples[2:-1:2]

    def estimate_time_left(self, now: float) -> TimeLeft | None:
        """Return the seconds until all work is done, if others do not hold it up."""
        begin, last = self.samples[0], self.samples[-1]
        if last[1] <= EARLIEST_SHARE * self.total:
            return None
        whole, later = _rate(begin, last), len(self.samples) - 2
        guess, doubt, weight = self._expected_rate(), DOUBT, later / (later + FEW)
        if not guess:
            guess, doubt, weight = OVERLAP * whole, 2.0, min(later / FEW, 1.0)
        likely, rates = guess, [] if self.is_steady else [whole, doubt * guess]
        if later:
            steady, half = _rate(self.samples[1], last), self.samples[1 + later // 2]
            likely, rates = steady**weight * guess ** (1 - weight), [*rates[:1], steady, _rate(half, last)]
        rest, since = max(self.total - last[1], 0.0), now - last[0]
        each = rest / likely, rest / max(*rates, likely) * (1 - MARGIN), rest / min(*rates, likely) * (1 + MARGIN)
        return TimeLeft(*(max(seconds - since, 0.0) for seconds in each))

    def _expected_rate(self) -> float:
        """Return the work per second of a run that takes as long as expected, or as it already has; 0.0 if unknown."""
        spent = self.samples[-1][0] - self.samples[0][0]
        return self.total / max(self.expected, spent) if self.expected else 0.0


def _rate(first: tuple[float, float], last: tuple[float, float]) -> float:
    """Return the work per second between two samples; any more than none if they are one."""
    return max(last[1] - first[1], 1e-9) / max(last[0] - first[0], 1e-9)
