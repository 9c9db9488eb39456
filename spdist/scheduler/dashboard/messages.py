"""Messages of a run to the scheduler: their topics and their fields.

They are Dask events; a scheduler without `RunCollector` keeps the newest and ignores the rest:

* Workers publish under `TIMINGS` ``{"product": name, "timings": [...], "limits": {stage: bytes/s}}``, and under
  `ANNOUNCEMENTS` ``{"product": name, "text": ...}``, which the driver says.
* The driver publishes under `RUNS` a `RunStart`, a `RunProgress` at most every `PROGRESS_SECONDS`, a `RunEvent` for
  every warning that it says, and a `RunEnd`, each with ``product`` and ``what``.
"""

from __future__ import annotations

from typing import Any, TypedDict

SCHEMA = 1
"""Version of the messages, and of the JSON that the page reads."""

TIMINGS = "spdist"
"""Dask topic of timings."""
ANNOUNCEMENTS = "spdist-announcements"
"""Dask topic of lines of text from workers to the user."""
RUNS = "spdist-runs"
"""Dask topic of the driver's messages."""

PROGRESS_SECONDS = 0.5
"""Shortest time between two messages about progress, in seconds."""

Message = dict[str, Any]


class RunStart(TypedDict):
    """The plan of a run."""

    target: str  # path or URL of C; the name of the reduction if C is not stored
    # for A, B and C: ``url``, ``shape``, ``nnz``, ``bytes``; the entries of C are estimated
    operands: dict[str, dict[str, Any]]
    engine: str
    grid: dict[str, int]  # numbers of row, inner and column blocks
    block_starts: list[int]  # first row of each block, or of each of at most `CELLS` groups of blocks
    # rows of C, and products of the run
    rows: int
    products: int
    # bytes of a worker
    memory_limit: int
    host_limit: int
    projected_memory: int
    seconds: dict[str, float]  # predicted core seconds by stage
    expected: float  # predicted wall seconds of the run; 0.0 if nobody knows. Older records have none.
    resumed_row: int  # rows that were durable when the run began
    begun: float  # seconds since 1970
    versions: dict[str, str]


class RunProgress(TypedDict):
    """The progress of a run."""

    # finished blocks, and blocks known so far; splitting a block adds one
    blocks: int
    blocks_total: int
    # of finished blocks, and of all
    products: int
    products_total: int
    nnz: int  # entries of C with a known position
    durable_row: int  # rows of C that are durable
    in_flight: int  # blocks in flight
    # of blocks that this run has multiplied, and written, and of all, by the time that they should take: see `Progress`
    multiplied: int
    written: int
    work: int


class RunEvent(TypedDict):
    """Something out of the ordinary: the line that a user reads on stderr."""

    text: str


class RunEnd(TypedDict):
    """How a run ended."""

    state: str
    error: str  # empty if it finished
    # exact totals of a run that finished: ``seconds``, ``bytes``, ``tasks`` and ``limit`` by stage. Timings that were
    # not published yet are in them.
    stages: dict[str, dict[str, float]]
