"""Estimate how long it takes to prepare a matrix in a form, and to multiply it with a vector.

The constants were fitted on matrices that `benchmarks/spmv_suite.py` does not hold: design 019.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spdist.kernels.spmv import csr as csr_spmv
from spdist.kernels.spmv.parallel import threads_for
from spdist.matrices.csr import CSR

if TYPE_CHECKING:
    from spdist.kernels.spmv.sell.build_gpu import Survey

SELL_START, CSR_START, CUSPARSE_START, COO_START = 1.3e-6, 1.7e-6, 8e-6, 3.5e-6
"""Seconds of a product of next to nothing, in a CUDA graph."""
SELL_SHARE, CSR_SHARE = 0.9, 0.6
"""Shares of the memory's bandwidth that a product of a large matrix reaches."""
SELL_INDEX, CSR_INDEX, COO_INDEX = 2.5, 4, 8
"""Bytes of the place of an entry."""
STEP_S = 1e-7
"""Seconds that a lane of a long row takes for each of its entries."""
BUILD_S, SKEWED_S, BUILD_PRODUCTS = 3.5e-4, 3.5e-4, 15
"""A conversion to SELL: seconds, more of them if rows are tall or long, and products of a large matrix."""
DESCRIBE_S, ROWS_S = 3e-5, 1e-4
"""Seconds of making cuSPARSE's descriptor, and of writing the row of each entry."""

SCIPY_START_S, SCIPY_ENTRY_S = 5e-6, 1.3e-9
"""Seconds of SciPy's product on the CPU: at least, and an entry."""
SELL_START_S, SELL_GAIN = 8e-6, 1.2
"""Of SELL on the CPU: seconds of a call, and times as fast as SciPy's loops."""
CONVERT_START_S, CONVERT_ENTRY_S = 2.5e-3, 1e-7
"""Seconds of a conversion to SELL on the CPU: at least, and an entry on one thread."""


class Costs(NamedTuple):
    """Seconds of a form."""

    prepare: float
    product: float

    def total(self, uses: int) -> float:
        """Return the seconds of the preparation and `uses` products."""
        return self.prepare + uses * self.product


def on_gpu(m: CSR, survey: Survey, value_bytes: int) -> dict[str, Costs]:
    """Return the costs of the forms that keep the order of rows and columns.

    `value_bytes`: of a stored value.
    """
    rate, width = bandwidth(device()), csr_spmv.row_width(m.nrows, m.nnz)
    long = np.flatnonzero(survey.counts)
    longest = int(long[-1]) if len(long) else 0
    if longest == len(survey.counts) - 1:
        longest = m.nnz  # rows of more entries are counted together
    more = SKEWED_S if survey.rest < m.nrows else 0.0
    sell = SELL_START + m.nnz * (value_bytes + SELL_INDEX) / (SELL_SHARE * rate)
    plain = m.nnz * (value_bytes + CSR_INDEX) / (CSR_SHARE * rate)
    return {
        "sell": Costs(BUILD_S + more + BUILD_PRODUCTS * (sell - SELL_START), sell),
        "csr": Costs(0.0, CSR_START + plain + STEP_S * longest / width),
        "cusparse": Costs(DESCRIBE_S, CUSPARSE_START + plain),
        "cusparse_coo": Costs(ROWS_S, COO_START + m.nnz * (value_bytes + COO_INDEX) / (CSR_SHARE * rate)),
    }


def on_cpu(nnz: int, threads: int) -> dict[str, Costs]:
    """Return the costs of SciPy's loops over a matrix as it is, and of SELL."""
    scipy = nnz * SCIPY_ENTRY_S / threads_for(nnz, threads)
    convert = CONVERT_START_S + nnz * CONVERT_ENTRY_S / max(1, threads)
    return {
        "scipy": Costs(0.0, SCIPY_START_S + scipy),
        "sell": Costs(convert, SELL_START_S + scipy / SELL_GAIN),
    }


def compared(name: str, costs: dict[str, Costs], uses: int) -> str:
    """Compare the form chosen with the others, for people, and with the best that is sooner prepared."""
    sooner = [key for key, cost in costs.items() if cost.prepare < costs[name].prepare]
    other = min(sooner, key=lambda key: costs[key].total(uses), default=name)
    after = repaid_after(costs[name], costs[other])
    repaid = f"; its preparation is repaid after {after:,.0f} products" if 0 < after < math.inf else ""
    return ", ".join(f"{key} {1e6 * cost.product:,.1f} us" for key, cost in costs.items()) + repaid


def repaid_after(found: Costs, other: Costs) -> float:
    """Return the products that repay what one form takes longer to prepare than another; inf if none do."""
    gain = other.product - found.product
    more = max(found.prepare - other.prepare, 0.0)
    return more / gain if gain > 0 else math.inf if more else 0.0


def device() -> int:
    """Return the number of the current CUDA device."""
    import cupy

    return int(cupy.cuda.runtime.getDevice())


@functools.cache
def bandwidth(number: int) -> float:
    """Return the bytes a second that a device's memory moves, by its clock and width."""
    import cupy

    attribute = cupy.cuda.runtime.deviceGetAttribute
    clock_khz, bits = (attribute(which, number) for which in (36, 37))  # memory clock, bus width
    return float(2e3 * clock_khz * bits / 8)
