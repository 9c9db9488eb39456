"""An engine in one file: dense arithmetic, one row at a time."""

from __future__ import annotations

import numpy as np

from spdist.kernels.cpu.engine import CpuEngine
from spdist.kernels.engine import Workload
from spdist.kernels.product_spec import PLAIN, ProductSpec
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import index_dtype, result_dtype


class ToyEngine(CpuEngine):
    """Expands each row of C to a dense vector."""

    blocks = 0  # that it has multiplied

    def kernel_bytes(self, work: Workload) -> int:
        """Return the bytes of a dense row of values and one of marks."""
        return work.b.ncols * (work.dtype.itemsize + 1)

    def multiply_rows(
        self, a: CSR, b: CSR, capacity: int, spec: ProductSpec = PLAIN, threads: int = 1, workspace: int | None = None
    ) -> CSR:
        """Return as many rows of ``a @ b`` as fit in `capacity` entries, one at least."""
        self.blocks += 1
        dtype = result_dtype(a.dtype, b.dtype)
        ends, columns, data = [0], [np.zeros(0, index_dtype(b.ncols))], [np.zeros(0, dtype)]
        for i in range(a.nrows):
            values, marks = np.zeros(b.ncols, dtype), np.zeros(b.ncols, np.bool_)
            for k, value in zip(*(x[a.indptr[i] : a.indptr[i + 1]] for x in (a.indices, a.data)), strict=True):
                at = b.indices[b.indptr[k] : b.indptr[k + 1]]
                values[at] += value * b.data[b.indptr[k] : b.indptr[k + 1]]
                marks[at] = True
            found = np.flatnonzero(marks).astype(columns[0].dtype)
            if i and ends[-1] + len(found) > capacity:
                break
            ends.append(ends[-1] + len(found))
            columns.append(found)
            data.append(values[found])
        return CSR(np.array(ends), np.concatenate(columns), np.concatenate(data), (len(ends) - 1, b.ncols))


TOY = ToyEngine("toy", plain_only=True)
