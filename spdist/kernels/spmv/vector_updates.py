"""In-place updates of a solver's vectors, with the sums that they need.

On the GPU each update is one launch, and sums stay in device memory; on the host NumPy computes them. Sums are doubles.

References
----------
M. R. Hestenes, E. Stiefel, "Methods of Conjugate Gradients for Solving Linear Systems", J. Res. NBS 49(6).
L. Page, S. Brin, R. Motwani, T. Winograd, "The PageRank Citation Ranking: Bringing Order to the Web", 1999.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from spdist.kernels.cuda.constants import UPDATE_THREADS, ConjugateGradientSum, PageRankSum
from spdist.kernels.cuda.module import c_type, module
from spdist.kernels.rounding import ceil_div
from spdist.matrices.dtypes import DeviceArray, is_on_gpu

FILE = "spmv/vector_updates.cu"
BLOCKS = 512
"""Most thread blocks: few enough for a large GPU to run all of them at a time."""
PQ, RZ, RR, BEFORE = map(int, ConjugateGradientSum)
"""Places of sums: (p, q), (r, z), (r, r), and (r, z) of the previous iteration."""
KEPT, CHANGED = map(int, PageRankSum)
"""Places of sums: the ranks that moved along links, and the total change of ranks."""


class Updates(Protocol):
    """The updates of vectors of one length and dtype; vectors of a call do not overlap."""

    def dot(self, x: DeviceArray, y: DeviceArray | None, out: DeviceArray) -> None:
        """Set ``out[0]`` to the real part of ``(x, y)``, or of the sum of x if y is None."""

    def advance(
        self, x: DeviceArray, r: DeviceArray, p: DeviceArray, q: DeviceArray, scale: DeviceArray | None,
        sums: DeviceArray,
    ) -> None:  # fmt: skip
        """Take a step of conjugate gradients along p: ``x += step p``, ``r -= step q``, ``step = RZ / PQ``.

        q is ``A p``. The step is 0 once r is 0. Of `sums`, BEFORE is set to RZ, then RZ and RR to their new values.
        With a preconditioner `scale`, q is overwritten by ``z = scale r``; without one, z is r.
        """

    def set_direction(self, p: DeviceArray, z: DeviceArray, sums: DeviceArray) -> None:
        """Set p to the next direction, ``z + (RZ / BEFORE) p``."""

    def set_ranks(
        self, ranks: DeviceArray, moved: DeviceArray, damping: float, nodes: float, sums: DeviceArray
    ) -> None:
        """Set ranks to ``damping moved`` plus equal shares of the remaining rank; set CHANGED.

        `moved`: ranks that moved along links; overwritten. `nodes`: of all parts.
        """


def kernel_names(value: str) -> tuple[str, ...]:
    """Return the name expressions of the kernels; ranks are real numbers."""
    kernels = ("dot", "advance", "direction", *(() if value.startswith("Complex") else ("ranks",)))
    return tuple(f"update_{kernel}<{value}>" for kernel in kernels)


def updates_of(x: DeviceArray) -> Updates:
    """Return the updates for vectors like x, on the device that holds x."""
    return OnGpu(x) if is_on_gpu(x) else OnHost()


class OnHost:
    """The updates by NumPy."""

    def dot(self, x: DeviceArray, y: DeviceArray | None, out: DeviceArray) -> None:
        """See `Updates`."""
        out[0] = (x.sum() if y is None else np.vdot(x, y)).real

    def advance(
        self, x: DeviceArray, r: DeviceArray, p: DeviceArray, q: DeviceArray, scale: DeviceArray | None,
        sums: DeviceArray,
    ) -> None:  # fmt: skip
        """See `Updates`."""
        step = _ratio(sums[RZ], sums[PQ])
        np.multiply(q, step, out=q)
        r -= q
        np.multiply(p, step, out=q)
        x += q
        sums[BEFORE], sums[RR] = sums[RZ], np.vdot(r, r).real
        sums[RZ] = sums[RR] if scale is None else np.vdot(r, np.multiply(scale, r, out=q)).real

    def set_direction(self, p: DeviceArray, z: DeviceArray, sums: DeviceArray) -> None:
        """See `Updates`."""
        p *= _ratio(sums[RZ], sums[BEFORE])
        p += z

    def set_ranks(
        self, ranks: DeviceArray, moved: DeviceArray, damping: float, nodes: float, sums: DeviceArray
    ) -> None:
        """See `Updates`."""
        moved *= damping
        moved += (1 - damping * float(sums[KEPT])) / nodes
        ranks -= moved
        sums[CHANGED] = np.abs(ranks, out=ranks).sum()
        ranks[...] = moved


def _ratio(above: float, below: float) -> float:
    """Return a ratio; 0 if r has become 0 between two checks of the residual."""
    return float(above) / (float(below) or 1.0)


class OnGpu:
    """The updates by the kernels of `vector_updates.cu`."""

    def __init__(self, x: DeviceArray) -> None:
        import cupy

        self.count, self.blocks = len(x), min(BLOCKS, max(1, ceil_div(len(x), UPDATE_THREADS)))
        self.value = c_type(np.dtype(x.dtype))
        self.kernels = module(FILE, kernel_names(self.value))
        self.partial, self.arrived = cupy.empty(2 * self.blocks), cupy.zeros(1, np.uint32)

    def dot(self, x: DeviceArray, y: DeviceArray | None, out: DeviceArray) -> None:
        """See `Updates`."""
        self._launch("dot", x, y, out, self.partial, self.arrived)

    def advance(
        self, x: DeviceArray, r: DeviceArray, p: DeviceArray, q: DeviceArray, scale: DeviceArray | None,
        sums: DeviceArray,
    ) -> None:  # fmt: skip
        """See `Updates`."""
        self._launch("advance", scale, p, q, x, r, sums, self.partial, self.arrived)

    def set_direction(self, p: DeviceArray, z: DeviceArray, sums: DeviceArray) -> None:
        """See `Updates`."""
        self._launch("direction", z, p, sums)

    def set_ranks(
        self, ranks: DeviceArray, moved: DeviceArray, damping: float, nodes: float, sums: DeviceArray
    ) -> None:
        """See `Updates`."""
        numbers = np.float64(damping), np.float64(nodes)
        self._launch("ranks", *numbers, moved, ranks, sums, self.partial, self.arrived)

    def _launch(self, kernel: str, *arguments: Any) -> None:
        self.kernels(
            f"update_{kernel}<{self.value}>", self.blocks, UPDATE_THREADS, (self.count, *arguments), early=True
        )
