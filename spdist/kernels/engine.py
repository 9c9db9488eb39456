"""What multiplies the blocks of a product: the interface of an engine, and the table of engines by name."""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from spdist.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from spdist.kernels.product_spec import ProductSpec
    from spdist.kernels.reduction_spec import PartialReduction, Reduction
    from spdist.kernels.streaming.layout import SubmatrixOffset
    from spdist.matrices.csr import CSR
    from spdist.matrices.dtypes import ValueArray

ENGINES = {
    "auto": "spdist.kernels.cpu.engine:AUTO",
    "scipy": "spdist.kernels.cpu.engine:SCIPY",
    "numba": "spdist.kernels.cpu.engine:NUMBA",
    "cuda": "spdist.kernels.streaming.engine:CUDA",
    "hybrid": "spdist.kernels.streaming.engine:HYBRID",
}
"""Where each engine is, by its public name; its module is imported when the engine is first asked for."""
DENSE_BLOCKS = "spdist.kernels.bsr.engine:DENSE_BLOCKS"
"""The engine that multiplies matrices of dense blocks on the CPU, whichever engine was chosen."""

Record = Callable[[str, int, float, float, int], None]
"""Takes a stage on the GPU: name, first row, when it began (seconds since 1970), seconds, bytes."""


class MatrixSizes(Protocol):
    """The sizes of a matrix in memory or in storage."""

    @property
    def ncols(self) -> int: ...  # noqa: D102

    @property
    def nrows(self) -> int: ...  # noqa: D102

    @property
    def nnz(self) -> int: ...  # noqa: D102

    @property
    def dtype(self) -> np.dtype[Any]: ...  # noqa: D102


@dataclass(frozen=True)
class Workload:
    """The kernels that a worker runs for a product: what their workspace depends on."""

    a: MatrixSizes
    b: MatrixSizes
    dtype: np.dtype[Any]  # of C
    plain: bool  # whether C is the whole product by plus and times
    limit: int  # bytes of the host's memory that the worker may use
    threads: int = 1  # threads of a kernel
    kernels: int = 1  # kernels at once
    row_bytes: int = 0  # bytes that a kernel takes for rows that are masked or cut
    shared_bytes: int = 0  # bytes that all kernels share


class WorkerLimits(NamedTuple):
    """What the kernels of a worker may take."""

    memory: int = 0  # bytes of the memory that ``memory_limit`` limits
    host: int = 0  # bytes of the host's memory; 0 for the default
    threads: int = 1  # threads of a kernel
    kernels: int = 1  # kernels at once
    workspace: int | None = None  # bytes of a kernel beside operands and result
    gpu: int | None = None  # number of the GPU; None: the current one of the calling thread
    gpus: int = 1  # GPUs that this process uses, each within the same limits


class BlockFacts(NamedTuple):
    """What is known of a block before it is multiplied."""

    offset_in_b: SubmatrixOffset | None = None  # position of `a` in `b`, if it is a part of it
    products: int = 0  # as they were planned; 0 if unknown


NOTHING_KNOWN = BlockFacts()


class Multiplier:
    """An engine at work: it multiplies the blocks of one product on one worker, and holds what they share."""

    @property
    def peak(self) -> int:
        """Peak bytes of GPU memory."""
        return 0

    @property
    def allocate(self) -> Callable[[int, np.dtype[Any]], ValueArray] | None:
        """Allocator for the arrays that blocks are read into; None means any memory."""
        return None

    def reserve(self, sizes: Iterable[int]) -> None:
        """Get memory of these bytes ready for results, if that takes long."""

    def multiply_rows(
        self, a: CSR, b: CSR, capacity: int, row: int, spec: ProductSpec, known: BlockFacts = NOTHING_KNOWN
    ) -> CSR:
        """Return as many rows of ``a @ b`` as fit in `capacity` entries, one at least; messages call the first `row`.

        `known`: hints; a wrong number of products costs time alone.
        """
        raise NotImplementedError

    def reduce(
        self, a: CSR, b: CSR, what: Reduction, row: int, spec: ProductSpec, known: BlockFacts = NOTHING_KNOWN
    ) -> PartialReduction:
        """Return a reduction of ``a @ b``; engines that use a GPU can."""
        raise NotImplementedError

    def warm_up(self, a: CSR, b: CSR, spec: ProductSpec) -> CSR:
        """Load all kernels that products of such types need; return the product, which has one row."""
        return self.multiply_rows(a, b, 1, 0, spec)

    def copy_rates(self) -> Mapping[str, float]:
        """Return the best bytes/s of stages that only this engine has."""
        return {}

    def take_over(self, earlier: Multiplier) -> None:
        """Take over the memory of a multiplier that prefetched for the same product."""

    def close(self) -> None:
        """Release all memory."""


class Engine(ABC):
    """What multiplies blocks. It is asked what it can do and takes; nobody else compares names.

    Defaults of these attributes describe compiled kernels on the CPU.
    """

    name: str
    uses_gpu = False  # whether `memory_limit` counts bytes of a GPU's memory
    uses_cpus = True  # whether workers without a GPU multiply
    plain_only = False  # whether it makes only whole products of numbers by plus and times
    compiles = True  # whether Numba compiles its kernels, or those that check rows for it
    module = ""  # loaded when its first block is multiplied; empty if that depends on the product
    alternative = "auto"  # engine to propose where this one cannot run
    gpu_counterpart = ""  # engine that makes a product instead where GPUs should be quicker

    @property
    def mixes(self) -> bool:
        """Whether workers with a GPU and workers without one multiply blocks of the same product."""
        return self.uses_gpu and self.uses_cpus

    def check_values(self, dtype: np.dtype[Any]) -> None:
        """Raise `InputError` if the engine does not multiply values of C's dtype, a subarray dtype for dense blocks."""
        if self.plain_only and dtype.names is not None:
            raise InputError(f"engine={self.name!r} does not multiply block matrices: choose engine='auto'")

    def check_options(self, spec: ProductSpec) -> None:
        """Refuse a product that is not plain if the engine lacks an option; the mask is not looked at."""
        if self.plain_only:
            raise InputError(
                f"engine={self.name!r} makes whole products by plus and times: for semirings, masks, triangles, top_n "
                f"and threshold choose engine='auto' or 'numba'"
            )

    @abstractmethod
    def kernel_bytes(self, work: Workload) -> int:
        """Return the workspace of one kernel on the CPU, in bytes, beside rows that are masked or cut."""

    def workspace_bytes(self, work: Workload) -> int:
        """Return the bytes of the host's memory that all kernels of a worker take beside operands and results."""
        return work.kernels * (self.kernel_bytes(work) + work.row_bytes) + work.shared_bytes

    def on_worker(self, has_gpu: Callable[[], bool]) -> Engine:
        """Return the engine that multiplies on a worker; only a mixed one asks for its GPU."""
        return self

    def for_values(self, dtype: np.dtype[Any]) -> Engine:
        """Return the engine that multiplies values of a dtype."""
        return self

    def at_first(self, plain: bool) -> Engine:
        """Return the engine whose kernels a worker loads before the first block."""
        return self

    def settled(
        self, a: MatrixSizes, b: MatrixSizes, spec: Any, products: tuple[int, ...], limits: WorkerLimits
    ) -> Engine:
        """Return the engine that multiplies blocks of these numbers of products; itself if that is still open.

        `spec`: tells `plain` and whether rows are sorted.
        """
        return self

    @abstractmethod
    def begin(self, limits: WorkerLimits, record: Record) -> Multiplier:
        """Return what multiplies the blocks of a product on a worker; it takes no memory yet."""


def engine_names() -> list[str]:
    """Return the names that the keyword `engine` takes.

    Returns
    -------
    list of str

    Examples
    --------
    >>> engine_names()
    ['auto', 'scipy', 'numba', 'cuda', 'hybrid']
    """
    return list(ENGINES)


def find_engine(name: str) -> Engine:
    """Return the engine of a name; raise `InputError` if the name is unknown."""
    if name not in ENGINES:
        raise InputError(f"engine {name!r} is not one of {', '.join(ENGINES)}")
    return load_engine(ENGINES[name])


@functools.cache
def load_engine(place: str) -> Engine:
    """Import an engine; `place` is ``"module:name"``."""
    module, _, name = place.partition(":")
    engine: Engine = getattr(importlib.import_module(module), name)
    return engine
