"""The request for a plan, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from spdist.kernels.engine import find_engine
from spdist.matrices.dtypes import number_dtype
from spdist.scheduler.planner.plan import DEFAULT_HOST_LIMIT, PlannedOperand
from spdist.storage.matrix import StoredMatrix
from spdist.storage.product_spec import WHOLE, StoredProductSpec
from spdist.stores.registry import at

if TYPE_CHECKING:
    from spdist.scheduler.planner.estimate import Survey


class CastBytes(NamedTuple):
    """Bytes of the copy of one entry in the dtype of C, while it is multiplied."""

    # bytes for an entry of A and of B; 0 without a copy
    a: int
    b: int


@dataclass(frozen=True)
class PlanRequest:
    """A product and the limits that its plan keeps."""

    a: StoredMatrix
    b: StoredMatrix
    engine: str  # engine that multiplies blocks
    # bytes that a worker may use: of the GPU's memory with an engine of GPUs, else of the host's
    memory_limit: int
    # bytes of the host's memory that a worker with a GPU may use; `DEFAULT_HOST_LIMIT` if not given
    host_limit: int | None = None
    # (int, int, int), optional: forces the number of row, inner and column blocks
    grid: tuple[int, int, int] | None = None
    # options for the product. C has no more entries than mask, triangle and top-n leave; the effect of a threshold is
    # not known.
    spec: StoredProductSpec = WHOLE
    writes_c: bool = True  # whether C is written; otherwise it is reduced where it is made
    threads: int = 1  # most cores of a worker that multiply; 1 if GPUs multiply
    to_objects: bool = False  # whether C goes to an object store
    survey: Survey | None = field(default=None, compare=False, repr=False)  # if it was made before the plan
    # predicted seconds of each engine among which this one was chosen; empty if the user named it
    choice: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def on_gpu(self) -> bool:
        """Whether GPUs multiply."""
        return find_engine(self.engine).uses_gpu

    @property
    def on_gpus_alone(self) -> bool:
        """Whether GPUs multiply all blocks."""
        return self.on_gpu and not find_engine(self.engine).uses_cpus

    @property
    def threads_share_blocks(self) -> bool:
        """Whether all threads of a worker multiply one block; only blocks that are reduced, or BSR, have one each."""
        return self.threads > 1 and self.writes_c and self.a.blocksize is None

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that a worker may use."""
        return self.host_limit or DEFAULT_HOST_LIMIT if self.on_gpu else self.memory_limit

    @property
    def cuts_rows_only(self) -> bool:
        """Whether no grid cuts the inner dimension or B's columns."""
        return self.grid is None or self.grid[1] == self.grid[2] == 1

    @property
    def in_process(self) -> bool:
        """Whether a matrix is in this process's memory, where other processes do not see it."""
        return any(at(m.url).is_private for m in (self.a, self.b, self.spec.mask) if m is not None)

    @property
    def cast_bytes(self) -> CastBytes:
        """Bytes of the copies of entries in the dtype of C; a GPU that multiplies all blocks takes its own."""
        dtype, reads = self.spec.dtype(self.a, self.b), self.spec.per_row.semiring.reads
        if self.on_gpus_alone:
            return CastBytes(0, 0)
        left, right = (
            0 if number_dtype(m.dtype) == number_dtype(dtype) or name not in reads else dtype.itemsize
            for name, m in (("a", self.a), ("b", self.b))
        )
        return CastBytes(left, right)


def operand(matrix: StoredMatrix) -> PlannedOperand:
    """Describe `matrix` for a plan."""
    longest = matrix.indices.chunk_nbytes + matrix.data.chunk_nbytes
    return PlannedOperand(matrix.shape, matrix.nnz, matrix.dtype.itemsize, longest, matrix.blocksize or (1, 1))
