"""The engine of dense blocks on the CPU: one kernel for all names of engines, for the ordinary product."""

from __future__ import annotations

from spdist.kernels.cpu.engine import CpuEngine
from spdist.kernels.cpu.workspace import block_workspace
from spdist.kernels.engine import Workload
from spdist.kernels.product_spec import PLAIN, ProductSpec
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import index_dtype


class DenseBlockEngine(CpuEngine):
    """Multiplies matrices whose values are dense blocks, each in one thread."""

    def multiply_rows(
        self, a: CSR, b: CSR, capacity: int, spec: ProductSpec = PLAIN, threads: int = 1, workspace: int | None = None
    ) -> CSR:
        """Return as many block rows of ``a @ b`` as fit in `capacity` blocks, one at least."""
        from spdist.kernels.bsr import multiply_cpu  # loads Numba

        return multiply_cpu.multiply_rows(a, b, 0, capacity)

    def kernel_bytes(self, work: Workload) -> int:
        """Return the workspace of one kernel, in bytes."""
        matrices = (work.a.ncols, work.a.dtype), (work.b.ncols, work.b.dtype), (work.b.ncols, work.dtype)
        block = min(index_dtype(ncols).itemsize + dtype.itemsize for ncols, dtype in matrices)
        return block_workspace(work.b.ncols, work.limit // block // work.kernels)


DENSE_BLOCKS = DenseBlockEngine("dense blocks")
