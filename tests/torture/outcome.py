"""What a trial came to, and the table of all trials."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.torture.runs import Run

VERDICTS = {
    "right": "the right product, and nothing left behind",
    "refused": "one line that names the matter, exit code 1 or 2",
    "wrong": "C is not the product, and the exit code is 0 or C claims to be whole",
    "over": "more memory than the limit, by its own report or from outside",
    "lost": "the old C is gone before the new one is there",
    "stuck": "neither --resume nor --overwrite leads to the product",
    "gave up": "the run ended although only workers died",
    "traceback": "a traceback on stderr",
    "crash": "ended by a signal that nobody sent",
    "silent": "failed without a line",
    "chatter": "lines on stderr that are not spdist's",
    "vague": "one line that does not name array and Zarr chunk, or the file",
    "hang": "did not end in time",
    "left": "processes, files or shared memory left behind",
    "broken": "torture itself failed",
}
"""Every verdict, and what it means; the first two are good."""
GOOD = {"right", "refused"}


@dataclass(frozen=True)
class Outcome:
    """One trial.

    Attributes
    ----------
    part : str
        Kind of trial, a row of the table.
    what : str
        The trial, so that it can be repeated.
    verdict : str
        A key of `VERDICTS`.
    detail : str
        What was seen.
    """

    part: str
    what: str
    verdict: str
    detail: str = ""

    @property
    def good(self) -> bool:
        """Whether this may happen."""
        return self.verdict in GOOD


class VerdictError(Exception):
    """Ends a trial with a verdict."""

    def __init__(self, verdict: str, detail: str) -> None:
        assert verdict in VERDICTS
        super().__init__(verdict, detail)
        self.verdict, self.detail = verdict, detail


OF_LIBRARIES = re.compile(
    r"Error allocating memory!|memory allocation of \d+ bytes failed\n((stack backtrace:|note: .*|\s.*)\n)*"
)
"""What Blosc and zarrs print of themselves if there is no memory."""


def ended(run: Run, *, seconds: float = 0.0, killed: bool = False) -> bool:
    """Wait for a command; return whether it is done, False if it refused or was killed as it should be.

    A command that answers on stdout that a check failed refuses too.

    Raises
    ------
    VerdictError
        If it hangs, crashes, or says anything but one line of its own.
    """
    seconds = max(seconds, run.launcher.seconds)
    if not run.wait(seconds):
        stack = run.err.rpartition("(most recent call first)")[2].split("\n")
        raise VerdictError("hang", f"{command(run)}: no end within {seconds:.0f} s; {' | '.join(stack[:12])}")
    err = run.err
    if "Traceback (most recent call last)" in err or "Fatal Python error" in err:
        raise VerdictError("traceback", f"{command(run)}: {_middle_of(err)}")
    if run.code is not None and run.code < 0:
        if killed:
            return False
        raise VerdictError("crash", f"{command(run)}: signal {-run.code}: {err[-500:]}")
    lines = [line for line in OF_LIBRARIES.sub("", err).splitlines() if line.strip()]
    foreign = [line for line in lines if not line.startswith("spdist")]
    if foreign:
        raise VerdictError("chatter", f"{command(run)}: {foreign[0][:300]}")
    if run.code == 0:
        return True
    if run.code not in (1, 2) or not (lines or '"ok": false' in run.out):
        raise VerdictError("silent", f"{command(run)}: exit code {run.code}, {len(lines)} lines")
    return False


def last_line(run: Run) -> str:
    """Return the line that says why a command failed."""
    lines = run.err.strip().splitlines()
    return lines[-1] if lines else ""


def command(run: Run) -> str:
    """Return a command as it would be typed, with the names of files alone."""
    words = [word.rpartition("/")[2] if word.startswith("/") else word for word in run.words]
    return f"[{run.name}] spdist {' '.join(words)}"


def _middle_of(err: str) -> str:
    """Return the last lines of a traceback."""
    lines = [line for line in OF_LIBRARIES.sub("", err).splitlines() if line.strip()]
    return " | ".join(line.strip()[:160] for line in lines[-4:])


@dataclass
class Table:
    """All outcomes."""

    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome, verbose: bool = False) -> None:
        """Add an outcome; say it at once if it is bad."""
        self.outcomes.append(outcome)
        if verbose and not outcome.good:
            print(f"{outcome.verdict.upper()}: {outcome.part}: {outcome.what}\n    {outcome.detail}", flush=True)

    @property
    def bad(self) -> list[Outcome]:
        """Return the outcomes that may not happen."""
        return [outcome for outcome in self.outcomes if not outcome.good]

    def counts(self) -> dict[str, dict[str, int]]:
        """Return how often each verdict came, by part."""
        found: dict[str, Counter[str]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.part, Counter())[outcome.verdict] += 1
        return {part: dict(counter) for part, counter in found.items()}

    def lines(self) -> Iterator[str]:
        """Yield the table as text."""
        counts = self.counts()
        verdicts = [verdict for verdict in VERDICTS if any(verdict in row for row in counts.values())]
        yield f"{'':28} {'trials':>7} " + " ".join(f"{verdict:>9}" for verdict in verdicts)
        for part, row in counts.items():
            numbers = " ".join(f"{row.get(verdict, 0) or '':>9}" for verdict in verdicts)
            yield f"{part:28} {sum(row.values()):7} {numbers}"
