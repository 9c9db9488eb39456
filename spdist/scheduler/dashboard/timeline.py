"""Busy seconds of each stage over a whole run, in a fixed number of bins that double their width when they are full."""

from __future__ import annotations

from typing import Any

BINS = 128
FIRST_WIDTH = 0.25
"""Seconds of a bin at first."""


class Timeline:
    """Adds up the busy seconds of stages in each bin of time.

    `begin`: start of the first bin, in seconds since 1970.
    `width`: seconds of a bin.
    `busy`: by stage, the worker seconds in each of `BINS` bins.

    Examples
    --------
    >>> timeline = Timeline(0.0)
    >>> timeline.add("multiply", 0.2, 0.1)
    >>> [round(seconds, 3) for seconds in timeline.busy["multiply"][:2]]
    [0.05, 0.05]
    """

    def __init__(self, begin: float) -> None:
        self.begin, self.width = begin, FIRST_WIDTH
        self.busy: dict[str, list[float]] = {}

    def add(self, stage: str, begin: float, seconds: float) -> None:
        """Add one run of a stage; time before the first bin counts in the first bin.

        `begin`: seconds since 1970.
        """
        begin = max(begin - self.begin, 0.0)
        end = begin + seconds
        while end > BINS * self.width:
            self._fold()
        bins = self.busy.setdefault(stage, [0.0] * BINS)
        for i in range(int(begin / self.width), min(int(end / self.width), BINS - 1) + 1):
            bins[i] += max(min(end, (i + 1) * self.width) - max(begin, i * self.width), 0.0)

    def _fold(self) -> None:
        """Make each bin twice as wide."""
        self.width *= 2
        for stage, bins in self.busy.items():
            self.busy[stage] = [bins[i] + bins[i + 1] for i in range(0, BINS, 2)] + [0.0] * (BINS // 2)

    def largest(self, begin: float, end: float) -> tuple[str, float] | None:
        """Return the stage that was busiest from one time to another, and its share of all busy seconds.

        Whole bins count. None if nothing was busy.
        """
        first = max(int((begin - self.begin) / self.width), 0)
        last = min(int((end - self.begin) / self.width), BINS - 1)
        sums = {stage: sum(bins[first : last + 1]) for stage, bins in self.busy.items()}
        total = sum(sums.values())
        if not total:
            return None
        stage = max(sums, key=lambda name: sums[name])
        return stage, sums[stage] / total

    def to_json(self) -> dict[str, Any]:
        """Return width and bins up to the last that is not empty."""
        used = max((i + 1 for bins in self.busy.values() for i in range(BINS) if bins[i]), default=0)
        return {
            "width": self.width,
            "busy": {stage: [round(seconds, 4) for seconds in bins[:used]] for stage, bins in self.busy.items()},
        }
