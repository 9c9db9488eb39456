"""The plan of a product as a value, and the time and memory that it predicts; imports no cupy, dask or zarr.

A plan prints, compares and serialises, and is the same on every machine. Row blocks of A are cut by products and bytes,
never by row count. A block takes the rows of B that its columns name, or all of B if B is resident on the worker. If
even one row needs more of B than fits, the inner dimension is cut and the partial products are merged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from spdist.foundation.display import Displayed, Part, Table, as_text
from spdist.foundation.units import counted, format_bytes
from spdist.kernels.engine import find_engine
from spdist.kernels.streaming.workspace import PAIR_BYTES, device_shares
from spdist.matrices.dtypes import INT32_MAX
from spdist.scheduler.planner.drawing import cut_drawing, memory_drawing

MAX_BLOCK_PRODUCTS = 1 << 26
"""Most products of a row block if cores multiply: about a quarter of a second, so that workers stay balanced."""

GPU_BLOCK_PRODUCTS = 1 << 28
"""Most products of a row block if GPUs multiply: some tenths of a second of writing C."""

DEFAULT_HOST_LIMIT = 8 << 30
"""Bytes of the host's memory for a worker with a GPU."""

START_SECONDS = 2.0
"""Seconds that workers take to start: part of the score by which candidates are compared."""


@dataclass(frozen=True)
class Rates:
    """What one core does in a second, or with `GPU_RATES` a GPU with its share of the cores."""

    # bytes/s of Zarr chunks that are read, and of C that is written
    read: float = 0.7e9
    write: float = 1.5e9
    decode: float = 1.2e9  # bytes/s of Zarr chunks that are decoded for a few rows each
    product: float = 6.0e8  # products/s
    dense: float = 5.0e9  # multiply-adds/s inside the products of dense blocks
    entry: float = 2.5e8  # entries of C/s, besides their products
    merge: float = 2.0e8  # merged entries/s
    # seconds that the reads of a block take besides their bytes, and that a block takes the scheduler
    call: float = 4.0e-3
    block: float = 6.0e-3


RATES = Rates()
"""Of a typical core. Candidates are compared at these rates, so that a plan is the same on every machine."""

GPU_RATES = Rates(read=6.0e9, decode=8.0e9, write=6.0e9, product=3.0e10, entry=4.0e9)
"""Of a GPU with its share of the cores: rough guesses, not measured."""

WHAT_STAGES_DO = {
    "preprocess": "read A, and the rows of B each block needs",
    "multiply": "products, sorted and summed",
    "merge": "sums of partial products",
    "commit": "write C",
    "schedule": "submit the blocks",
}
"""Text for each stage in the table of a plan."""

JSON_KEYS = {"blocks_in_flight": "pairs"}
"""Keys of a serialised `Plan` that are not its attributes' names: plans of unfinished products must stay readable."""


@dataclass(frozen=True)
class PlannedOperand:
    """A stored matrix as a plan describes it."""

    shape: tuple[int, int]  # in dense blocks if the matrix is stored in blocks
    nnz: int  # entries, or dense blocks
    value_bytes: int  # bytes of one value, or of one dense block
    read_bytes: int  # bytes of its longest Zarr chunk, of columns and values together
    block: tuple[int, int] = (1, 1)  # rows and columns of a dense block

    @property
    def index_bytes(self) -> int:
        """Bytes of one column index in memory."""
        return 4 if self.shape[1] <= INT32_MAX else 8

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry in memory."""
        return self.index_bytes + self.value_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix in memory."""
        return self.nnz * self.entry_bytes + 8 * (self.shape[0] + 1)

    @property
    def size(self) -> str:
        """Rows and columns in words."""
        blocks = "" if self.block == (1, 1) else f" blocks of {self.block[0]} x {self.block[1]}"
        return f"{self.shape[0]:,} x {self.shape[1]:,}{blocks}"

    @property
    def entries(self) -> str:
        """What it stores, in words."""
        return counted(self.nnz, "entry" if self.block == (1, 1) else "dense block")


@dataclass(frozen=True)
class Block:
    """Rows ``[start:stop)`` of A and of C, and the bytes that they take."""

    start: int
    stop: int
    split: bool  # whether the inner dimension is cut for this block
    products: int  # multiply-adds
    nnz: int  # estimated entries of C; an upper bound if GPUs reduce C
    # entries of C for which there is room. If a block turns out longer, it ends at the last row that fits, and the
    # other rows become a block of their own.
    capacity: int
    a_bytes: int  # bytes of A's rows
    b_bytes: int  # bytes of the rows of B that these need; 0 if B is resident
    c_bytes: int  # estimated bytes of C; 8 for each row if C does not leave the GPU
    b_read: int = 0  # bytes of the Zarr chunks that hold these rows of B; each is decoded whole

    @property
    def needed(self) -> int:
        """Bytes of the rows of A and B and of their product: the left side of hySpMM's equation 3."""
        return self.a_bytes + self.b_bytes + self.c_bytes


@dataclass(frozen=True, repr=False)
class Plan(Displayed):
    """How A @ B is cut, and the bytes that each part takes."""

    # the nnz of C is estimated
    a: PlannedOperand
    b: PlannedOperand
    c: PlannedOperand
    engine: str  # engine that multiplies blocks
    # bytes that a worker may use: of the GPU's memory with an engine of GPUs, else of the host's
    memory_limit: int
    # bytes of the host's memory that a worker holds throughout: a resident B, workspace, read buffers
    reserved_memory: int
    blocks_in_flight: int  # blocks that a worker reads, multiplies or writes at once, np of hySpMM's equation 5
    resident: bool  # whether all of B is in each worker's memory for the whole run
    chunk: int  # elements of C's Zarr chunks
    # bounds of the parts of the inner dimension, for blocks that are `split`, and of the parts of B's columns
    inner_bounds: tuple[int, ...]
    column_bounds: tuple[int, ...]
    blocks: tuple[Block, ...]  # in order of rows
    expansion: int  # products of all blocks
    host_limit: int = 0  # bytes of the host's memory that a worker may use
    device_memory: int = 0  # bytes of the GPU's memory that a worker takes; 0 without a GPU
    counted: bool = True  # whether `expansion` was counted; the products of a triangle are estimated
    # cores of a worker that multiply, each a block of its own or, if `threads_share_blocks`, all the same block
    threads: int = 1
    threads_share_blocks: bool = False  # whether a worker multiplies one block at a time

    def __repr__(self) -> str:
        pieces = " x ".join(f"{count:,}" for count in self.grid.values())
        memory = f"{format_bytes(self.projected_memory)} of {format_bytes(self.memory_limit)} a worker"
        return f"<Plan {self.a.size} times {self.b.size}: {pieces} blocks, engine {self.engine}, up to {memory}>"

    def __str__(self) -> str:
        return as_text(self.description())

    @property
    def on_gpu(self) -> bool:
        """Whether GPUs multiply."""
        return find_engine(self.engine).uses_gpu

    def through_gpu(self, memory_limit: int) -> Plan:
        """Return the plan for GPUs with `memory_limit` bytes; its cuts depend on the host's memory alone."""
        number = self.c.value_bytes // math.prod(self.c.block)
        entry = number * math.prod(self.b.block) + self.b.index_bytes + (PAIR_BYTES if self.b.block != (1, 1) else 0)
        resident = self.b.nnz * entry + 8 * self.b.shape[0]
        b_bytes = resident if self.resident else max((block.b_bytes for block in self.blocks), default=0)
        return replace(self, memory_limit=memory_limit, device_memory=device_shares(b_bytes, memory_limit).total)

    @property
    def typical_rates(self) -> Rates:
        """Rates of a typical worker, by which plans are compared."""
        return GPU_RATES if self.on_gpu else RATES

    @property
    def inner_blocks(self) -> int:
        """Parts of the inner dimension; 1 if no block is split."""
        return len(self.inner_bounds) - 1 if any(block.split for block in self.blocks) else 1

    @property
    def column_blocks(self) -> int:
        """Parts of B's columns."""
        return len(self.column_bounds) - 1

    @property
    def grid(self) -> dict[str, int]:
        """Numbers of row, inner and column blocks."""
        return {
            "row_blocks": len(self.blocks),
            "inner_blocks": self.inner_blocks,
            "column_blocks": self.column_blocks,
        }

    @property
    def projected_memory(self) -> int:
        """Predicted peak bytes of a worker, in the memory that `memory_limit` limits."""
        return self.device_memory if self.on_gpu else self.projected_host_memory

    @property
    def projected_host_memory(self) -> int:
        """Predicted peak bytes of a worker in the host's memory."""
        return self.reserved_memory + self.blocks_in_flight * max((block.needed for block in self.blocks), default=0)

    @property
    def compression(self) -> float:
        """Compression ratio: products per estimated entry of C."""
        return self.expansion / self.c.nnz if self.c.nnz else 1.0

    @property
    def _pieces(self) -> int:
        return self.column_blocks * self.inner_blocks

    def stage_bytes(self) -> dict[str, int]:
        """Return the bytes that each stage moves over the whole run."""
        b_bytes = self.b.nbytes if self.resident else sum(block.b_bytes for block in self.blocks)
        pieces = self._pieces
        c_bytes = self.c.nbytes
        return {
            "preprocess": self.a.nbytes + b_bytes,
            "multiply": c_bytes,
            "merge": 0 if pieces == 1 else (pieces - 1) * 2 * c_bytes,
            "commit": c_bytes,
        }

    def stage_seconds(self, rates: Rates | None = None) -> dict[str, float]:
        """Return the seconds of one core that each stage should take.

        `rates`: of a core of the machine; by default of a typical one, with which the seconds are the same everywhere.
        """
        moved, rates = self.stage_bytes(), rates or self.typical_rates
        reading = max(moved["preprocess"] / rates.read, sum(block.b_read for block in self.blocks) / rates.decode)
        inside = self.a.block[0] * self.a.block[1] * self.b.block[1]
        product = 1 / rates.product + (inside / rates.dense if inside > 1 else 0.0)
        return {
            "preprocess": reading + len(self.blocks) * self._pieces * rates.call,
            "multiply": self.expansion * product + self.c.nnz / rates.entry,
            "merge": moved["merge"] / self.c.entry_bytes / rates.merge,
            "commit": moved["commit"] / rates.write,
            "schedule": len(self.blocks) * rates.block,
        }

    @property
    def rereads(self) -> bool:
        """Whether reading takes longer than all other stages because blocks decode the same Zarr chunks of B again."""
        seconds = self.stage_seconds()
        return not self.resident and 2 * seconds["preprocess"] > sum(seconds.values())

    @property
    def bound_by(self) -> str:
        """The stage that should take longest."""
        seconds = self.stage_seconds()
        return max(seconds, key=lambda stage: seconds[stage])

    def seconds(self, workers: int) -> float:
        """Return the wall time of `workers` typical workers, in seconds; one process schedules the blocks."""
        stages = self.stage_seconds()
        schedule = stages.pop("schedule")
        start = START_SECONDS if len(self.blocks) > 1 else 0.0
        most = workers * self.threads
        at_once = most if self.threads_share_blocks else min(most, len(self.blocks))
        return start + max(sum(stages.values()) / max(1, at_once), schedule)

    def to_json(self) -> str:
        """Return the plan as JSON; equal plans give equal text."""
        fields = {JSON_KEYS.get(name, name): value for name, value in asdict(self).items()}
        return json.dumps(fields, sort_keys=True)

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """Restore a plan from the text of `to_json`."""
        names = {key: name for name, key in JSON_KEYS.items()}
        raw = {names.get(key, key): value for key, value in json.loads(text).items()}
        for name in ("a", "b", "c"):
            tuples = {key: tuple(raw[name][key]) for key in ("shape", "block")}
            raw[name] = PlannedOperand(**(raw[name] | tuples))
        for name in ("inner_bounds", "column_bounds"):
            raw[name] = tuple(raw[name])
        raw["blocks"] = tuple(Block(**block) for block in raw["blocks"])
        return Plan(**raw)

    def summary(self) -> dict[str, Any]:
        """Return the plan as ``spdist plan --json`` prints it."""
        return {
            "grid": self.grid,
            "engine": self.engine,
            "shape": list(self.c.shape),
            "expansion": self.expansion,
            "nnz_estimate": self.c.nnz,
            "compression": round(self.compression, 3),
            "memory_limit": self.memory_limit,
            "reserved_memory": self.reserved_memory,
            "projected_memory": self.projected_memory,
            "host_limit": self.host_limit,
            "projected_host_memory": self.projected_host_memory,
            "pairs": self.blocks_in_flight,
            "threads": self.threads,
            "threads_share_blocks": self.threads_share_blocks,
            "b_resident": self.resident,
            "chunk": self.chunk,
            "stage_bytes": self.stage_bytes(),
            "stage_seconds": {stage: round(s, 4) for stage, s in self.stage_seconds().items()},
            "bound_by": self.bound_by,
        }

    # -- in words ------------------------------------------------------------------------------------------------------

    @property
    def products(self) -> str:
        """The number of products in words."""
        return f"{'' if self.counted else 'about '}{counted(self.expansion, 'product')}"

    def description(self, core_seconds: Mapping[str, float] | None = None) -> list[Part]:
        """Return the plan in words: grid, bytes and seconds of each stage, memory of a worker.

        `core_seconds`: CPU seconds of each stage on the machine that will run the plan; by default on typical
        cores.
        """
        grid = self.grid
        blocks = [(block.start, block.stop, block.products) for block in self.blocks]
        return [
            f"A {self.a.size} with {self.a.entries}, B {self.b.size} with {self.b.nnz:,}",
            f"{self.products}, about {self.c.entries} in C ({format_bytes(self.c.nbytes)}), "
            f"compression {self.compression:.1f}",
            f"grid: {grid['row_blocks']:,} row x {grid['inner_blocks']} inner x {grid['column_blocks']} column blocks, "
            f"{self.blocks_in_flight} in flight on each worker; "
            f"B {'stays in memory' if self.resident else 'is read block by block'}",
            cut_drawing(self.c.shape, blocks, self.column_bounds),
            memory_drawing(self.memory_parts(), self.host_limit or self.memory_limit),
            self._stage_table(self.stage_seconds() if core_seconds is None else core_seconds),
            self._memory_table(),
        ]

    def memory_parts(self) -> list[tuple[str, int]]:
        """Return what takes the host's memory of a worker at most, and its bytes."""
        parts = [("held throughout: buffers, workspace" + (", B" if self.resident else ""), self.reserved_memory)]
        largest = max(self.blocks, key=lambda block: block.needed, default=None)
        if largest is not None:
            count = self.blocks_in_flight
            for what, size in (("A", largest.a_bytes), ("B", largest.b_bytes), ("C", largest.c_bytes)):
                parts.append((f"largest block's {what}, times {count}", count * size))
        return parts

    def _stage_table(self, core_seconds: Mapping[str, float]) -> Table:
        moved, bounds = self.stage_bytes(), max(core_seconds, key=lambda stage: core_seconds[stage])
        rows = tuple(
            (stage, format_bytes(moved[stage]) if stage in moved else "", f"{seconds:.2f}",
             "the run" if stage == bounds else "", WHAT_STAGES_DO[stage])
            for stage, seconds in core_seconds.items()
        )  # fmt: skip
        columns = ("stage", "moves", "core seconds", "bounds", "what it does")
        return Table(columns, rows, right=("moves", "core seconds"))

    def _memory_table(self) -> Table:
        rows = [
            *self.memory_parts(),
            ("projected", self.projected_host_memory),
            ("limit", self.host_limit or self.memory_limit),
        ]
        if self.on_gpu:
            rows += [("on the GPU, projected", self.device_memory), ("on the GPU, limit", self.memory_limit)]
        cells = tuple((name, format_bytes(size)) for name, size in rows)
        return Table(("memory of a worker", "bytes"), cells, right=("bytes",))


def even_bounds(weights: np.ndarray[Any, np.dtype[Any]], parts: int) -> tuple[int, ...]:
    """Cut ``range(len(weights))`` into ranges of about equal weight.

    `weights`: (n,) numbers: not negative.
    `parts`: number of ranges, at most n.
    Returns where the ranges begin, and n; no range is empty.

    Examples
    --------
    >>> even_bounds(np.array([1, 1, 1, 5]), 2)
    (0, 3, 4)
    """
    total = np.cumsum(weights, dtype=np.float64)
    goals = (total[-1] if len(total) else 0.0) * np.arange(1, parts) / parts
    cuts = np.searchsorted(total, goals, side="left") + 1
    for i in range(len(cuts)):  # keep every part at least one long
        low = (cuts[i - 1] if i else 0) + 1
        cuts[i] = min(max(cuts[i], low), len(weights) - (parts - 1 - i))
    return (0, *(int(cut) for cut in cuts), len(weights))
