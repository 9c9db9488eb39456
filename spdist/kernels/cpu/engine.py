"""Engines of the CPU: SciPy, the Numba kernels, and the choice between them for each product; without Numba."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from spdist.kernels.cpu.prepare import choose
from spdist.kernels.cpu.workspace import NUMBA as NUMBA_NAME
from spdist.kernels.cpu.workspace import SCIPY as SCIPY_NAME
from spdist.kernels.cpu.workspace import auto_workspace, cpu_workspace
from spdist.kernels.engine import (
    DENSE_BLOCKS,
    NOTHING_KNOWN,
    BlockFacts,
    Engine,
    MatrixSizes,
    Multiplier,
    Record,
    WorkerLimits,
    Workload,
    load_engine,
)
from spdist.kernels.product_spec import PLAIN, ProductSpec
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import blocksize, index_dtype


class CpuEngine(Engine):
    """An engine of the CPU: one function multiplies a block."""

    def __init__(self, name: str = "", module: str = "", *, compiles: bool = True, plain_only: bool = False) -> None:
        self.name, self.module, self.compiles, self.plain_only = name, module, compiles, plain_only

    def multiply_rows(
        self, a: CSR, b: CSR, capacity: int, spec: ProductSpec = PLAIN, threads: int = 1, workspace: int | None = None
    ) -> CSR:
        """Return as many rows of ``a @ b`` as fit in `capacity` entries, one at least.

        `workspace`: bytes that may be used beyond operands and result, if the engine has a choice.
        """
        from spdist.kernels.cpu import multiply as cpu

        return cpu.multiply_rows(
            a, b, 0, capacity, engine=self.name, spec=spec, threads=threads, workspace_limit=workspace
        )

    def kernel_bytes(self, work: Workload) -> int:
        """Return the workspace of one kernel, in bytes."""
        return cpu_workspace(self.name, *_sizes(work))

    def for_values(self, dtype: np.dtype[Any]) -> CpuEngine:
        """Return the engine itself, or the one of dense blocks."""
        engine = self if blocksize(dtype) is None else load_engine(DENSE_BLOCKS)
        assert isinstance(engine, CpuEngine)
        return engine

    def load(self, a: CSR, b: CSR, spec: ProductSpec) -> CSR:
        """Load all kernels that products of such types need; return the product, which has one row."""
        return self.multiply_rows(a, b, 1, spec)

    def begin(self, limits: WorkerLimits, record: Record) -> Multiplier:
        """Return what multiplies the blocks of a product on a worker; nothing is recorded."""
        return CpuMultiplier(self, limits)


class CpuMultiplier(Multiplier):
    """Multiplies blocks on the CPU: no more at once than there is workspace for."""

    def __init__(self, engine: CpuEngine, limits: WorkerLimits) -> None:
        self.engine, self.limits = engine, limits
        # Dask may give a worker more threads than the plan has workspace for.
        self._kernels = threading.BoundedSemaphore(limits.kernels)

    def multiply_rows(
        self, a: CSR, b: CSR, capacity: int, row: int, spec: ProductSpec, known: BlockFacts = NOTHING_KNOWN
    ) -> CSR:
        """Return as many rows of ``a @ b`` as fit in `capacity` entries."""
        with self._kernels:
            return self.engine.multiply_rows(a, b, capacity, spec, self.limits.threads, self.limits.workspace)

    def warm_up(self, a: CSR, b: CSR, spec: ProductSpec) -> CSR:
        """Load all kernels that the engine may choose; return the product, which has one row."""
        return self.engine.load(a, b, spec)


class AutoEngine(CpuEngine):
    """Chooses SciPy for small products, before Numba's kernels are loaded, and these kernels for others."""

    gpu_counterpart = "cuda"

    def kernel_bytes(self, work: Workload) -> int:
        """Return the workspace of one kernel, in bytes: enough for SciPy only if it may multiply."""
        if not work.plain:
            return NUMBA.kernel_bytes(work)
        products = work.a.nnz * work.b.nnz / max(work.b.nrows, 1)  # as if all rows of B had one length
        return auto_workspace(int(products), work.limit, *_sizes(work))

    def load(self, a: CSR, b: CSR, spec: ProductSpec) -> CSR:
        """Load all kernels that products of such types need; return the product, which has one row."""
        c = NUMBA.load(a, b, spec)
        return SCIPY.load(a, b, spec) if spec.plain else c

    def at_first(self, plain: bool) -> Engine:
        """Return SciPy, which compiles nothing, for a plain product."""
        return SCIPY if plain else self

    def settled(
        self, a: MatrixSizes, b: MatrixSizes, spec: Any, products: tuple[int, ...], limits: WorkerLimits
    ) -> Engine:
        """Return Numba if one of the blocks will load it, so that all that it loads is in memory before the first."""
        if blocksize(a.dtype) is not None:
            return self
        if not spec.plain:
            return NUMBA
        sort = spec.per_row.sort
        chosen = {
            choose(a, b, threads=limits.threads, workspace_limit=limits.workspace, sort=sort, products=count)[0]
            for count in products
        }
        return NUMBA if NUMBA.name in chosen else self


def _sizes(work: Workload) -> tuple[int, int, int, int, int]:
    """Return columns of C, products of its longest row, bytes of a value and of a column of C, and threads."""
    ncols = work.b.ncols
    return ncols, min(work.b.nnz, ncols), work.dtype.itemsize, index_dtype(ncols).itemsize, work.threads


SCIPY = CpuEngine(SCIPY_NAME, compiles=False, plain_only=True)
NUMBA = CpuEngine(NUMBA_NAME, "spdist.kernels.cpu.numba_engine")
AUTO = AutoEngine("auto")
