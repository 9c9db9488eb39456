"""Sizes and a memory limit in, a frozen `Plan` out; imports no cupy, dask or zarr.

A plan is a value: it prints, compares and serialises, and is the same on every machine. Blocks of rows of A are cut by
products and bytes, never by row count. A block takes the rows of B that its columns ask for (all of B where B stays
resident on the worker), and where even one row asks for more than fits, the inner dimension is cut and the partial
products are merged.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from spdist.engines import GPU_ENGINES
from spdist.kernels.streaming.workspace import PAIR_BYTES, device_shares
from spdist.matrices.csr import INT32_MAX

MAX_BLOCK_PRODUCTS = 1 << 26
"""Products of one row block at the most: about a quarter of a second of one core, so that workers stay balanced."""

GPU_BLOCK_PRODUCTS = 1 << 28
"""The same where a GPU multiplies: some tenths of a second of writing C."""

DEFAULT_HOST_LIMIT = 8 << 30
"""Bytes of the host's memory for a worker with a GPU."""

RATES = {
    "read": 0.7e9,
    "decode": 1.2e9,
    "write": 1.5e9,
    "product": 6.0e8,
    "within": 5.0e9,
    "entry": 2.5e8,
    "merge": 2.0e8,
    "call": 4.0e-3,
    "block": 6.0e-3,
    "start": 2.0,
}
"""Bytes/s read, decoded in Zarr chunks that are read for a few rows each, and written, products/s, those of numbers
within products of blocks/s, entries of C/s and merged entries/s of one core, as measured; seconds that the reads of one
block cost beside their bytes, that a block costs the scheduler, and that the workers need to start."""

GPU_RATES = {"read": 6.0e9, "decode": 8.0e9, "write": 6.0e9, "product": 3.0e10, "entry": 4.0e9}
"""Those that differ where the worker is a GPU with its share of the cores: round guesses, no measurement."""

JSON_KEYS = {"blocks_in_flight": "pairs"}
"""Keys of a serialised `Plan` that are not its attributes' names: plans of unfinished products must stay readable."""


def gpu_staging(host_limit: int) -> int:
    """Return the bytes of the host limit that blocks on their way to the GPU take.

    Examples
    --------
    >>> gpu_staging(8 << 30)
    1073741824
    """
    return host_limit // 8


@dataclass(frozen=True)
class Operand:
    """What a plan knows of a stored matrix: `shape`, `nnz`, bytes of one value, and bytes of its longest Zarr chunk.

    Of a block matrix shape and entries are counted in blocks, of `block` rows and columns.
    """

    shape: tuple[int, int]
    nnz: int
    value_bytes: int
    read_bytes: int
    block: tuple[int, int] = (1, 1)

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


@dataclass(frozen=True)
class Block:
    """Rows ``[start:stop)`` of A and of C, with what they take.

    Attributes
    ----------
    split : bool
        Whether the inner dimension is cut for this block.
    products, nnz : int
        Multiply-adds, and the estimated entries of C; as many, at the most, where GPUs reduce it.
    capacity : int
        Entries of C for which there is room; a block that turns out longer ends where the room does, and the rest
        becomes a block of its own.
    a_bytes, b_bytes, c_bytes : int
        Bytes of A's rows, of the rows of B they need, and of C as estimated; none of a C that stays on the GPU.
    b_read : int
        Bytes of B's Zarr chunks in which those rows lie; each is decoded whole.
    """

    start: int
    stop: int
    split: bool
    products: int
    nnz: int
    capacity: int
    a_bytes: int
    b_bytes: int
    c_bytes: int
    b_read: int = 0

    @property
    def needed(self) -> int:
        """Bytes of the block pair and its result: the left side of hySpMM's equation 3."""
        return self.a_bytes + self.b_bytes + self.c_bytes


@dataclass(frozen=True)
class Plan:
    """How A @ B is cut, what each part takes, and what it should cost.

    Attributes
    ----------
    a, b, c : Operand
        C with its estimated nnz.
    engine : str
        What multiplies a block.
    memory_limit : int
        Bytes a worker may use: of the host's memory, or of the GPU's with an engine of `GPU_ENGINES`.
    host_limit, reserved_memory : int
        Bytes of the host's memory that a worker may use, the same as `memory_limit` without a GPU; and of these what it
        holds throughout: B where resident, workspace, read buffers.
    device_memory : int
        Bytes of the GPU's memory that a worker takes.
    blocks_in_flight : int
        Blocks that a worker reads, multiplies or writes at once, np of hySpMM's equation 5.
    resident : bool
        Whether B stays in a worker's memory for the whole run.
    chunk : int
        Elements of C's Zarr chunks.
    inner_bounds, column_bounds : tuple of int
        Cuts of the inner dimension (used by blocks that are `split`) and of B's columns.
    blocks : tuple of Block
        In order of rows.
    expansion : int
        Products in all.
    counted : bool
        Whether these were counted; of a triangle they are estimated.
    """

    a: Operand
    b: Operand
    c: Operand
    engine: str
    memory_limit: int
    reserved_memory: int
    blocks_in_flight: int
    resident: bool
    chunk: int
    inner_bounds: tuple[int, ...]
    column_bounds: tuple[int, ...]
    blocks: tuple[Block, ...]
    expansion: int
    host_limit: int = 0
    device_memory: int = 0
    counted: bool = True

    @property
    def on_gpu(self) -> bool:
        """Whether GPUs multiply."""
        return self.engine in GPU_ENGINES

    def through_gpu(self, memory_limit: int) -> Plan:
        """Return the plan for GPUs of so many bytes; how it is cut depends on the host's memory alone."""
        number = self.c.value_bytes // math.prod(self.c.block)
        entry = number * math.prod(self.b.block) + self.b.index_bytes + (PAIR_BYTES if self.b.block != (1, 1) else 0)
        resident = self.b.nnz * entry + 8 * self.b.shape[0]
        b_bytes = resident if self.resident else max((block.b_bytes for block in self.blocks), default=0)
        return replace(self, memory_limit=memory_limit, device_memory=device_shares(b_bytes, memory_limit).total)

    @property
    def rates(self) -> dict[str, float]:
        """What a worker does in a second; see `RATES`."""
        return RATES | (GPU_RATES if self.on_gpu else {})

    @property
    def inner_blocks(self) -> int:
        """Cuts of the inner dimension that some block uses."""
        return len(self.inner_bounds) - 1 if any(block.split for block in self.blocks) else 1

    @property
    def column_blocks(self) -> int:
        """Cuts of B's columns."""
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
        """Bytes of the limited memory that the worst worker should reach."""
        return self.device_memory if self.on_gpu else self.projected_host_memory

    @property
    def projected_host_memory(self) -> int:
        """Bytes of the host's memory that the worst worker should reach."""
        return self.reserved_memory + self.blocks_in_flight * max((block.needed for block in self.blocks), default=0)

    @property
    def compression(self) -> float:
        """Products per entry of C, as estimated."""
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

    def stage_seconds(self) -> dict[str, float]:
        """Return the seconds of one core that each stage should take, at `rates`."""
        moved, rates = self.stage_bytes(), self.rates
        reading = max(moved["preprocess"] / rates["read"], sum(block.b_read for block in self.blocks) / rates["decode"])
        return {
            "preprocess": reading + len(self.blocks) * self._pieces * rates["call"],
            "multiply": self.expansion * self._product_seconds() + self.c.nnz / rates["entry"],
            "merge": moved["merge"] / self.c.entry_bytes / rates["merge"],
            "commit": moved["commit"] / rates["write"],
            "schedule": len(self.blocks) * rates["block"],
        }

    def _product_seconds(self) -> float:
        """Return the seconds of one product, of numbers or of blocks."""
        within = self.a.block[0] * self.a.block[1] * self.b.block[1]
        return 1 / self.rates["product"] + (within / self.rates["within"] if within > 1 else 0.0)

    @property
    def rereads(self) -> bool:
        """Whether reading takes longer than all else, because block after block decodes the same Zarr chunks of B."""
        seconds = self.stage_seconds()
        return not self.resident and 2 * seconds["preprocess"] > sum(seconds.values())

    @property
    def bound_by(self) -> str:
        """The stage that should take longest."""
        seconds = self.stage_seconds()
        return max(seconds, key=lambda stage: seconds[stage])

    def seconds(self, workers: int) -> float:
        """Return the wall time that `workers` workers should need; blocks are scheduled by one process."""
        stages = self.stage_seconds()
        schedule = stages.pop("schedule")
        start = RATES["start"] if len(self.blocks) > 1 else 0.0
        return start + max(sum(stages.values()) / max(1, min(workers, len(self.blocks))), schedule)

    def to_json(self) -> str:
        """Serialise; the same plan gives the same text."""
        fields = {JSON_KEYS.get(name, name): value for name, value in asdict(self).items()}
        return json.dumps(fields, sort_keys=True)

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """Restore what `to_json` wrote."""
        names = {key: name for name, key in JSON_KEYS.items()}
        raw = {names.get(key, key): value for key, value in json.loads(text).items()}
        for name in ("a", "b", "c"):
            tuples = {key: tuple(raw[name][key]) for key in ("shape", "block")}
            raw[name] = Operand(**(raw[name] | tuples))
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
            "b_resident": self.resident,
            "chunk": self.chunk,
            "stage_bytes": self.stage_bytes(),
            "stage_seconds": {stage: round(s, 4) for stage, s in self.stage_seconds().items()},
            "bound_by": self.bound_by,
        }


def even_bounds(weights: np.ndarray[Any, np.dtype[Any]], parts: int) -> tuple[int, ...]:
    """Cut ``range(len(weights))`` into `parts` ranges of about equal weight, none empty.

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
