"""Messages of a run to the scheduler: their topics and their fields.

They are Dask events; a scheduler without `RunCollector` keeps the newest and ignores the rest:

* Workers publish under `TIMINGS` ``{"product": name, "timings": [...], "limits": {stage: bytes/s}}``, and under
  `ANNOUNCEMENTS` ``{"product": name, "text": ...}``.
* The driver publishes under `RUNS` a `RunStart`, a `RunProgress` at most every `PROGRESS_SECONDS`, and a `RunEnd`, each
  with ``product`` and ``what``.
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
    """The plan of a run.

    Attributes
    ----------
    target : str
        Path or URL of C; the name of the reduction if C is not stored.
    operands : dict
        For A, B and C: ``url``, ``shape``, ``nnz``, ``bytes``; the entries of C are estimated.
    engine : str
    grid : dict
        Numbers of row, inner and column blocks.
    block_starts : list of int
        First row of each block, or of each of at most `CELLS` groups of blocks.
    rows, products : int
        Rows of C, and products of the run.
    memory_limit, host_limit, projected_memory : int
        Bytes of a worker.
    seconds : dict
        Predicted core seconds by stage.
    expected : float
        Predicted wall seconds of the run; 0.0 if nobody knows. Older records have none.
    resumed_row : int
        Rows that were durable when the run began.
    begun : float
        Seconds since 1970.
    versions : dict
    """

    target: str
    operands: dict[str, dict[str, Any]]
    engine: str
    grid: dict[str, int]
    block_starts: list[int]
    rows: int
    products: int
    memory_limit: int
    host_limit: int
    projected_memory: int
    seconds: dict[str, float]
    expected: float
    resumed_row: int
    begun: float
    versions: dict[str, str]


class RunProgress(TypedDict):
    """The progress of a run.

    Attributes
    ----------
    blocks, blocks_total : int
        Finished blocks, and blocks known so far; splitting a block adds one.
    products, products_total : int
        Of finished blocks, and of all.
    nnz : int
        Entries of C with a known position.
    durable_row : int
        Rows of C that are durable.
    in_flight : int
        Blocks in flight.
    multiplied, written, work : int
        Of blocks that this run has multiplied, and written, and of all, by the time that they should take: see
        `Progress`.
    """

    blocks: int
    blocks_total: int
    products: int
    products_total: int
    nnz: int
    durable_row: int
    in_flight: int
    multiplied: int
    written: int
    work: int


class RunEnd(TypedDict):
    """How a run ended.

    Attributes
    ----------
    state : {"finished", "failed", "interrupted"}
    error : str
        Empty if it finished.
    stages : dict
        Exact totals of a run that finished: ``seconds``, ``bytes``, ``tasks`` and ``limit`` by stage. Timings that were
        not published yet are in them.
    """

    state: str
    error: str
    stages: dict[str, dict[str, float]]
