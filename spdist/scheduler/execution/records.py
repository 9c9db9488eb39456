"""Values that travel between the driver and its workers: the job, its blocks, and what stages return."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from spdist.kernels.streaming.layout import SubmatrixOffset
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray
from spdist.scheduler.planner.plan import Plan
from spdist.storage.checksums import WrittenChunks
from spdist.storage.chunked_array import CHUNK_LENGTH
from spdist.storage.matrix import StoredMatrix
from spdist.storage.product_spec import WHOLE, StoredProductSpec
from spdist.storage.writer import offsets_chunk

BlockNumber = int
Piece = tuple[int, int, int, int]
"""Bounds ``(k0, k1, j0, j1)`` of the inner dimension and of B's columns that one piece of a split block multiplies."""


@dataclass(frozen=True)
class JobSpec:
    """Everything that the tasks of one product share; it travels to every worker."""

    # the operands
    a: StoredMatrix
    b: StoredMatrix
    engine: str  # multiplies the blocks
    resident: bool  # whether each worker keeps the whole of B in memory
    # cuts of the inner dimension and of B's columns; only split blocks use them
    inner_bounds: tuple[int, ...]
    column_bounds: tuple[int, ...]
    blocks_in_flight: int = 1  # blocks that a worker holds at once, at most
    threads: int = 1  # cores of a worker that multiply
    threads_share_blocks: bool = False  # whether they multiply one block at a time, or a block each
    # whether the plan has one block: a worker in the client's process then loads only modules that it needs
    is_one_block: bool = False
    # bytes of the limited memory, and of the host's memory. They differ only when a GPU multiplies.
    memory_limit: int = 0
    host_limit: int = 0
    offsets_chunk: int = CHUNK_LENGTH  # elements of a Zarr chunk of C's row offsets
    product: StoredProductSpec = WHOLE  # semiring, mask and epilogue
    # name of the shared memory in which the workers of one host keep a resident B; empty: each worker keeps its own
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
            offsets_chunk=offsets_chunk(plan.chunk),
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
    """A row block as the driver hands it to a worker."""

    number: BlockNumber  # numbers blocks in the order of submission; block 0 decides whether C's values are compressed
    # rows ``[start:stop)`` of A and C
    start: int
    stop: int
    capacity: int  # entries of C for which there is room
    split: bool  # whether the block is multiplied in pieces
    b_bytes: int = 0  # bytes of memory for the rows of B
    products: int = 0  # as they were planned; 0 if unknown


@dataclass(frozen=True)
class BlockOperands:
    """Operands of one block."""

    a: CSR  # rows of A; their columns number the rows of `b`
    b: CSR | None  # the rows of B that they need; None when B is resident
    mask: CSR | None = None  # rows of the mask
    offset_in_b: SubmatrixOffset | None = None  # position of `a` inside `b`, when A and B are the same matrix


@dataclass(frozen=True)
class BlockCounts:
    """Counts of a multiplied block, for the driver."""

    rows: int  # finished rows; fewer than the task has when its capacity was too small
    nnz: int  # entries of the block
    # (h,), (t,) int64: where rows end, counted from the block's first entry, before the first and from the last Zarr
    # chunk of C's row offsets on that lies inside the block; those between are written with its commit
    head: Int64Array
    tail: Int64Array
    digest: bytes  # digest of the row lengths: a block that is computed again must have an equal digest
    compresses: bool  # whether the values are worth compressing; only block 0 is probed


@dataclass(frozen=True)
class ChunkFragment:
    """The part of a block in a Zarr chunk shared with other blocks."""

    offset: int  # position of its first entry in C
    # its columns and values
    indices: ValueArray
    data: ValueArray


@dataclass(frozen=True)
class Committed:
    """What the commit of a block left."""

    fragments: list[ChunkFragment]  # at most two: the head and the tail of the block
    written: list[WrittenChunks]  # the Zarr chunks that lie inside the block


@dataclass(frozen=True)
class StageTiming:
    """One run of one stage; published to the driver and written to ``--record`` files."""

    stage: str
    row: int  # first row of the block; -1 when the stage has no block
    # start in seconds since 1970, and duration
    begin: float
    seconds: float
    nbytes: int  # bytes moved


@dataclass(frozen=True)
class StageTotal:
    """Time and bytes of one stage on one worker."""

    seconds: float = 0.0  # wall time
    # bytes moved, and runs of the stage
    nbytes: int = 0
    tasks: int = 0
    limit: float = 0.0  # bytes/s that the machine moves at best: one core in memory, or the bus; 0.0 when unknown

    def plus(self, timing: StageTiming) -> StageTotal:
        """Return the total with one more run."""
        return replace(
            self, seconds=self.seconds + timing.seconds, nbytes=self.nbytes + timing.nbytes, tasks=self.tasks + 1
        )


@dataclass(frozen=True)
class Outcome:
    """Result and costs of a run."""

    nnz: int  # entries of C
    blocks: int  # blocks that this run computed; a resumed run does not count earlier blocks
    # peak bytes of the worst worker beyond its idle memory
    peak_host_memory: int
    peak_device_memory: int
    workers: int
    stages: dict[str, dict[str, float]] = field(default_factory=dict)  # see `telemetry.add_totals`
