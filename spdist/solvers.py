"""Iterations around products with vectors: conjugate gradients and PageRank, in one process or on all workers at once.

Each is one loop over a space: something that multiplies a vector, and sums over all of its parts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp

from spdist import device, operators
from spdist.errors import InputError, MatrixError
from spdist.kernels.sell_format import module_of
from spdist.operators import Operator
from spdist.parts import PartitionedOperator, on_host

LOOKS = 8
"""Iterations between looks at the residual on a GPU: each look waits for it."""


@dataclass(frozen=True, eq=False)
class Solution:
    """Where an iteration came to.

    Attributes
    ----------
    x : (n,) array
    iterations : int
    residual : float
        What the tolerance was asked of, at the end.
    converged : bool
    seconds : float
        Of the iterations.
    """

    x: Any
    iterations: int
    residual: float
    converged: bool
    seconds: float


class Space(Protocol):
    """What a loop needs of a matrix; `spdist.parts.Part` is one."""

    xp: Any
    x: Any

    def matvec(self, x: Any) -> Any:
        """Return ``A @ x``."""

    def total(self, values: Any) -> Any:
        """Return sums over all parts."""


class _Whole:
    """The space of an operator that is not cut."""

    def __init__(self, a: Operator, like: Any) -> None:
        self.xp, self.matvec = module_of(like), a.matvec
        self.x = self.xp.zeros(a.shape[1], a.dtype)

    def total(self, values: Any) -> Any:
        """Return the values: there is one part."""
        return values


def conjugate_gradient(
    a: Operator | PartitionedOperator, b: Any, x0: Any = None, *, diagonal: Any = None, rtol: float = 1e-8,
    maxiter: int | None = None,
) -> Solution:  # fmt: skip
    """Solve A x = b by conjugate gradients.

    Parameters
    ----------
    a : Operator or PartitionedOperator
        Symmetric (Hermitian) and positive definite.
    b : (n,) array
        Where the operator is; of the host for a partitioned one.
    x0 : (n,) array, optional
        Where to begin; zero by default.
    diagonal : (n,) array, optional
        Of A, positive: residuals are divided by it (Jacobi's preconditioner).
    rtol : float
        Ends at ``|b - A x| <= rtol |b|``, as the recurrence has it.
    maxiter : int, optional
        10 n by default.

    References
    ----------
    .. [1] M. R. Hestenes, E. Stiefel, "Methods of Conjugate Gradients for Solving Linear Systems", J. Res. NBS 49(6).

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> a = operators.operator(sp.diags_array([1.0, 2.0, 4.0], format="csr"))
    >>> conjugate_gradient(a, np.ones(3)).x
    array([1.  , 0.5 , 0.25])
    """
    if a.shape[0] != a.shape[1] or b.shape != a.shape[:1]:
        raise MatrixError(f"conjugate gradients are for square matrices: A is {a.shape}, b is {b.shape}")
    most = 10 * a.shape[0] if maxiter is None else maxiter
    begin = module_of(b).zeros_like(b) if x0 is None else x0
    vectors = [b, begin] if diagonal is None else [b, begin, 1 / diagonal]
    return _on(a, conjugate_gradient_loop, *(v.astype(a.dtype) for v in vectors), rtol=rtol, maxiter=most)


def pagerank(
    links: Any, *, damping: float = 0.85, tolerance: float = 1e-10, maxiter: int = 1000,
    workers: int | None = None, scheduler: str | None = None, on_gpu: bool = False,
) -> Solution:  # fmt: skip
    """Rank the nodes of a graph by PageRank.

    Parameters
    ----------
    links : sparse matrix or array
        SciPy's or CuPy's, square: a link from i to j has its weight, not negative, in row i and column j.
    damping : float
        Chance to follow a link; nodes without any are followed by all alike.
    tolerance : float
        Ends once ranks change by no more than that in total.
    workers, scheduler, on_gpu
        As for `partitioned`, where one of them is given; else the graph is ranked where it is.

    Returns
    -------
    Solution
        Its ranks add up to 1.

    References
    ----------
    .. [1] L. Page, S. Brin, R. Motwani, T. Winograd, "The PageRank Citation Ranking: Bringing Order to the Web", 1999.

    Examples
    --------
    >>> pagerank(sp.csr_array([[0.0, 1.0], [1.0, 0.0]])).x
    array([0.5, 0.5])
    """
    if links.shape[0] != links.shape[1] or not links.shape[0]:
        raise MatrixError(f"a graph's matrix is square and not empty, this is {links.shape[0]:,} x {links.shape[1]:,}")
    if not 0 <= damping < 1:
        raise InputError(f"damping={damping} must be at least 0 and below 1")
    m = _followed(links)
    start = module_of(m.data).full(m.shape[0], 1 / m.shape[0], m.dtype)
    options = {"damping": damping, "tolerance": tolerance, "maxiter": maxiter}
    if workers is None and scheduler is None and not on_gpu:
        return _on(operators.operator(m), pagerank_loop, start, **options)
    from spdist.parts import partitioned

    with partitioned(m, workers, scheduler=scheduler, on_gpu=on_gpu) as a:
        return _on(a, pagerank_loop, start, **options)


def _followed(links: Any) -> Any:
    """Return the matrix that moves ranks along links: transposed, each column with a sum of 1 or empty."""
    library: Any = sp
    if device.is_cupyx(links):
        import cupyx.scipy.sparse as library  # type: ignore[no-redef]
    m = library.csr_matrix(links)
    m = m.astype(m.dtype if m.dtype.kind == "f" else np.float64)
    out = module_of(m.data).asarray(m.sum(axis=1)).ravel()
    shares = (out > 0) / out.clip(np.finfo(m.dtype).tiny)
    return library.csr_matrix((library.diags(shares.astype(m.dtype)) @ m).T)


def _on(a: Operator | PartitionedOperator, loop: Any, *vectors: Any, **options: Any) -> Solution:
    """Run a loop where the matrix is."""
    if not isinstance(a, PartitionedOperator):
        return Solution(*loop(_Whole(a, vectors[0]), *vectors, **options))
    ends = a.run(_back_on_host, *vectors, loop=loop, **options)
    return Solution(a.whole([end[0] for end in ends]), *ends[0][1:])


def _back_on_host(part: Any, *vectors: Any, loop: Any, **options: Any) -> tuple[Any, ...]:
    """Run a loop on one of the workers; its vector goes to the driver."""
    x, *facts = loop(part, *vectors, **options)
    return on_host(x), *facts


# -- the loops, on each part alike -------------------------------------------------------------------------------------


def _dots(space: Space, *pairs: tuple[Any, Any]) -> Any:
    """Return the real parts of dot products over all parts, in an array where the vectors are."""
    return space.total(space.xp.stack([space.xp.vdot(x, y).real for x, y in pairs]))


def _ratio(space: Space, above: Any, below: Any) -> Any:
    """Return a ratio; 0 where r has become 0 between two looks."""
    return above / space.xp.where(below == 0, 1, below)


def conjugate_gradient_loop(
    space: Space, b: Any, x: Any, scale: Any = None, *, rtol: float, maxiter: int
) -> tuple[Any, int, float, bool, float]:
    """Return x, iterations, residual, whether it converged, and seconds; `scale` times r is the preconditioned r."""
    looks = 1 if space.xp is np else LOOKS
    begin, x = time.perf_counter(), x.copy()
    r = b - space.matvec(x)
    z = r if scale is None else scale * r
    p = space.x
    p[...] = z
    limit = rtol * float(_dots(space, (b, b))[0]) ** 0.5
    sums = _dots(space, (r, z), (r, r))
    for done in range(maxiter + 1):
        if done % looks == 0 or done == maxiter:
            residual = float(sums[-1]) ** 0.5
            if residual <= limit or done == maxiter:
                break
        q = space.matvec(p)
        step = _ratio(space, sums[:1], _dots(space, (p, q)))
        x += step * p
        r -= step * q
        z = r if scale is None else scale * r
        before, sums = sums, _dots(space, (r, z)) if scale is None else _dots(space, (r, z), (r, r))
        p *= _ratio(space, sums[:1], before[:1])
        p += z
    return x, done, residual, residual <= limit, time.perf_counter() - begin


def pagerank_loop(
    space: Space, ranks: Any, *, damping: float, tolerance: float, maxiter: int
) -> tuple[Any, int, float, bool, float]:
    """Return ranks, iterations, their last change, whether it was small enough, and seconds."""
    begin = time.perf_counter()
    nodes = float(space.total(space.xp.full(1, len(ranks), ranks.dtype))[0])
    changed, done = np.inf, 0
    while done < maxiter and changed > tolerance:
        moved = space.matvec(ranks) * damping
        kept = space.total(moved.sum().reshape(1))  # what is lost at nodes without links goes to all alike
        moved += (1 - kept) / nodes
        changed = float(space.total(abs(moved - ranks).sum().reshape(1))[0])
        ranks, done = moved, done + 1
    return ranks, done, changed, changed <= tolerance, time.perf_counter() - begin
