"""Values that travel between the driver and its workers: the job, its blocks, and what stages return."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from spdist.kernels.streaming.layout import SubmatrixOffset
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray
from spdist.scheduler.planner.plan import Plan
from spdist.storage.matrix import StoredMatrix
from spdist.storage.product_spec import WHOLE, StoredProductSpec

BlockNumber = int
Piece = tuple[int, int, int, int]
"""Bounds ``(k0, k1, j0, j1)`` of the inner dimension and of B's columns that one piece of a split block multiplies."""


@dataclass(frozen=True)
class JobSpec:
    """Everything that the tasks of one product share; it travels to every worker.

    Attributes
    ----------
    a, b : StoredMatrix
        The operands.
    engine : str
        Multiplies the blocks.
    resident : bool
        Whether each worker keeps the whole of B in memory.
    inner_bounds, column_bounds : tuple of int
        Cuts of the inner dimension and of B's columns; only split blocks use them.
    blocks_in_flight : int
        Blocks that a worker holds at once, at most.
    threads : int
        Cores of a worker that multiply.
    threads_share_blocks : bool
        Whether they multiply one block at a time, or a block each.
    is_one_block : bool
        Whether the plan has one block: a worker in the client's process then loads only modules that it needs.
    memory_limit, host_limit : int
        Bytes of the limited memory, and of the host's memory. They differ only when a GPU multiplies.
    product : StoredProductSpec
        Semiring, mask and epilogue.
    shared_name : str
        Name of the shared memory in which the workers of one host keep a resident B; empty: each worker keeps its own.
    """

    a: StoredMatrix
    b: StoredMatrix
    engine: str
    resident: bool
    inner_bounds: tuple[int, ...]
    column_bounds: tuple[int, ...]
    blocks_in_flight: int = 1
    threads: int = 1
    threads_share_blocks: bool = False
    is_one_block: bool = False
    memory_limit: int = 0
    host_limit: int = 0
    product: StoredProductSpec = WHOLE
    shared_name: str = ""

    def with_plan(self, plan: Plan, shared_name: str) -> JobSpec:
        """Return the job as its plan decides it."""
        return replace(
            self,
            engine=plan.engine,
            resident=plan.resident,
            inner_bounds=plan.inner_bounds,
            column_bounds=plan.column_bounds,
            blocks_in_flight=plan.blocks_in_flight,
            threads=plan.threads,
            threads_share_blocks=plan.threads_share_blocks,
            is_one_block=len(plan.blocks) <= 1,
            memory_limit=plan.memory_limit,
            host_limit=plan.host_limit,
            shared_name=shared_name,
        )

    @property
    def threads_per_kernel(self) -> int:
        """Threads that multiply one block."""
        return self.threads if self.threads_share_blocks else 1

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that a worker may use."""
        return self.host_limit or self.memory_limit

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Pieces of a split block, in the order in which their partial products are added."""
        inner = list(zip(self.inner_bounds[:-1], self.inner_bounds[1:], strict=True))
        columns = list(zip(self.column_bounds[:-1], self.column_bounds[1:], strict=True))
        return tuple((*k, *j) for j in columns for k in inner)

    def pieces_of(self, task: BlockTask) -> int:
        """Return how many pieces a block is multiplied in."""
        return len(self.pieces) if task.split else 1


@dataclass(frozen=True)
class BlockTask:
    """A row block as the driver hands it to a worker.

    Attributes
    ----------
    number : int
        Numbers blocks in the order of submission; block 0 decides whether C's values are compressed.
    start, stop : int
        Rows ``[start:stop)`` of A and C.
    capacity : int
        Entries of C for which there is room.
    split : bool
        Whether the block is multiplied in pieces.
    b_bytes : int
        Bytes of memory for the rows of B.
    """

    number: BlockNumber
    start: int
    stop: int
    capacity: int
    split: bool
    b_bytes: int = 0


@dataclass(frozen=True)
class BlockOperands:
    """Operands of one block.

    Attributes
    ----------
    a : CSR
        Rows of A; their columns number the rows of `b`.
    b : CSR, optional
        The rows of B that they need; None when B is resident.
    mask : CSR, optional
        Rows of the mask.
    offset_in_b : SubmatrixOffset, optional
        Position of `a` inside `b`, when A and B are the same matrix.
    """

    a: CSR
    b: CSR | None
    mask: CSR | None = None
    offset_in_b: SubmatrixOffset | None = None


@dataclass(frozen=True)
class BlockCounts:
    """Counts of a multiplied block, for the driver.

    Attributes
    ----------
    row_nnz : (rows,) uint32 or int64
        Entries of each finished row; fewer rows than the task has when its capacity was too small.
    digest : bytes
        Digest of `row_nnz`: a block that is computed again must have an equal digest.
    compresses : bool
        Whether the values are worth compressing; only block 0 is probed.
    """

    row_nnz: Int64Array
    digest: bytes
    compresses: bool

    @property
    def nnz(self) -> int:
        """Entries of the block."""
        return int(self.row_nnz.sum(dtype=np.int64))


@dataclass(frozen=True)
class ChunkFragment:
    """The part of a block in a Zarr chunk shared with other blocks.

    Attributes
    ----------
    offset : int
        Position of its first entry in C.
    indices, data : array
        Its columns and values.
    """

    offset: int
    indices: ValueArray
    data: ValueArray


@dataclass(frozen=True)
class StageTiming:
    """One run of one stage; published to the driver and written to ``--record`` files.

    Attributes
    ----------
    stage : str
    row : int
        First row of the block; -1 when the stage has no block.
    begin, seconds : float
        Start in seconds since 1970, and duration.
    nbytes : int
        Bytes moved.
    """

    stage: str
    row: int
    begin: float
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class StageTotal:
    """Time and bytes of one stage on one worker.

    Attributes
    ----------
    seconds : float
        Wall time.
    nbytes, tasks : int
        Bytes moved, and runs of the stage.
    limit : float
        Bytes/s that the machine moves at best: one core in memory, or the bus; 0.0 when unknown.
    """

    seconds: float = 0.0
    nbytes: int = 0
    tasks: int = 0
    limit: float = 0.0

    def plus(self, timing: StageTiming) -> StageTotal:
        """Return the total with one more run."""
        return replace(
            self, seconds=self.seconds + timing.seconds, nbytes=self.nbytes + timing.nbytes, tasks=self.tasks + 1
        )


@dataclass(frozen=True)
class Outcome:
    """Result and costs of a run.

    Attributes
    ----------
    nnz : int
        Entries of C.
    blocks : int
        Blocks that this run computed; a resumed run does not count earlier blocks.
    peak_host_memory, peak_device_memory : int
        Peak bytes of the worst worker beyond its idle memory.
    workers : int
    stages : dict
        See `telemetry.add_totals`.
    """

    nnz: int
    blocks: int
    peak_host_memory: int
    peak_device_memory: int
    workers: int
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
