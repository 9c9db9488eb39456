"""Iterations around products with vectors: conjugate gradients and PageRank, in one process or on all workers at once.

Each solver is one loop over a `Space`, which multiplies a vector and sums over all parts. An iteration works in place
and reads no number on the host, so that on GPUs a CUDA graph of `LOOKS` iterations is launched repeatedly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp

from spdist.errors import InputError, MatrixError
from spdist.foundation.other_objects import refuse_other_objects
from spdist.inmemory import cupy_operands
from spdist.kernels.cuda.cuda_graph import Steps
from spdist.kernels.spmv.vector_updates import BEFORE, CHANGED, KEPT, PQ, RR, RZ, updates_of
from spdist.matrices.csr import in_native_order
from spdist.matrices.dtypes import DeviceArray, check_dtype, module_of
from spdist.operators.operator import Operator
from spdist.operators.partitioned import PartitionedOperator, on_host
from spdist.operators.prepare import operator

LOOKS = 8
"""Iterations between two checks of the residual on a GPU, for which the host waits; a CUDA graph holds as many."""


@dataclass(frozen=True, eq=False)
class Solution:
    """The result of an iterative solver.

    Attributes
    ----------
    x : (n,) array
        The solution; on the GPU if the operator is.
    iterations : int
    residual : float
        The quantity that the tolerance bounds, after the last iteration: ``|b - A x|`` of conjugate gradients, the
        total change of the ranks of PageRank.
    converged : bool
        Whether the residual met the tolerance.
    seconds : float
        Wall time of the iterations.
    launched : str
        How the iterations were launched: "as a CUDA graph", or "one by one", and on a GPU why. The first `LOOKS`
        iterations, and fewer than `LOOKS` at the end, are always launched one by one.
    names : (n,) array of str, optional
        Of the nodes of a graph that PageRank ranked, if they have names.

    Examples
    --------
    >>> found = pagerank(sp.csr_array([[0.0, 1.0], [1.0, 0.0]]))
    >>> found.converged, found.launched
    (True, 'one by one')
    """

    x: Any
    iterations: int
    residual: float
    converged: bool
    seconds: float
    launched: str
    names: Any = None


class Space(Protocol):
    """A matrix as a loop uses it; `spdist.operators.partitioned.PartitionMember` is one."""

    xp: Any
    x: Any

    def matvec(self, x: DeviceArray, out: DeviceArray | None = None) -> Any:
        """Return ``A @ x``; write it to `out` if it is given.

        `x`: (n,) array: this part of the vector.
        `out`: (n,) array, optional.
        """

    def total(self, values: DeviceArray) -> Any:
        """Set values to their sums over all parts; return them."""


class _Whole:
    """The space of an operator that is not partitioned."""

    def __init__(self, a: Operator, like: DeviceArray) -> None:
        self.xp, self.matvec = module_of(like), a.matvec
        self.x = self.xp.zeros(a.shape[1], a.dtype)

    def total(self, values: DeviceArray) -> Any:
        """Return the values: there is one part."""
        return values


def conjugate_gradient(
    a: Operator | PartitionedOperator, b: Any, x0: Any = None, *, diagonal: Any = None, rtol: float = 1e-8,
    maxiter: int | None = None, cuda_graph: bool = True,
) -> Solution:  # fmt: skip
    """Solve A x = b by conjugate gradients.

    The recurrence is Hestenes' and Stiefel's, which sums over all parts twice an iteration; Chronopoulos' and Gear's
    does so once, but its residual leaves b - A x sooner, and it can take more iterations.

    Parameters
    ----------
    a : Operator or PartitionedOperator, or a sparse matrix
        Symmetric (Hermitian) and positive definite.
    b : (n,) array or sequence
        On the device of the operator; in host memory for a partitioned one.
    x0 : (n,) array, optional
        First guess; zero by default.
    diagonal : (n,) array, optional
        Diagonal of A, positive: residuals are divided by it (Jacobi's preconditioner).
    rtol : float
        Iterations end once ``|b - A x| <= rtol |b|``, by the recurrence for the residual.
    maxiter : int, optional
        10 n by default.
    cuda_graph : bool
        Whether iterations on a GPU are captured as a CUDA graph; it does not change results.

    Returns
    -------
    Solution

    Raises
    ------
    MatrixError
        If A is not square, a vector does not fit or holds NaN or infinity, or the diagonal is not positive.

    References
    ----------
    .. [1] M. R. Hestenes, E. Stiefel, "Methods of Conjugate Gradients for Solving Linear Systems", J. Res. NBS 49(6).

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> a = operator(sp.diags_array([1.0, 2.0, 4.0], format="csr"))
    >>> conjugate_gradient(a, np.ones(3)).x
    array([1.  , 0.5 , 0.25])
    """
    refuse_other_objects(a)
    if sp.issparse(a) or cupy_operands.is_cupyx(a):
        a = operator(a)
    b, x0, diagonal = (v if v is None or hasattr(v, "dtype") else np.asarray(v) for v in (b, x0, diagonal))
    given = {name: v for name, v in {"b": b, "x0": x0, "diagonal": diagonal}.items() if v is not None}
    for name, v in given.items():
        if a.shape[0] != a.shape[1] or v.shape != a.shape[:1]:
            raise MatrixError(f"conjugate gradients are for square matrices: A is {a.shape}, {name} is {v.shape}")
        if v.dtype.kind not in "biufc":
            raise MatrixError(f"{name} holds {v.dtype}, where numbers are needed: convert it, for instance to float64")
        if not module_of(v).isfinite(v).all():
            raise MatrixError(f"{name} holds NaN or infinite values, where finite ones are needed: correct it")
    if diagonal is not None and not (diagonal.real > 0).all():
        raise MatrixError("the diagonal is not positive, so the matrix is not positive definite: leave it out")
    if a.dtype.kind != "c" and any(v.dtype.kind == "c" for v in given.values()):
        raise MatrixError(
            f"A is {a.dtype}, but b, x0 or the diagonal is complex: prepare A as complex, A.astype(complex)"
        )
    most = 10 * a.shape[0] if maxiter is None else maxiter
    begin = module_of(b).zeros_like(b) if x0 is None else x0
    vectors = [v.astype(a.dtype) for v in ([b, begin] if diagonal is None else [b, begin, 1 / diagonal])]
    return _on(a, conjugate_gradient_loop, *vectors, rtol=rtol, maxiter=most, cuda_graph=cuda_graph)


def pagerank(
    links: Any, *, damping: float = 0.85, tolerance: float = 1e-10, maxiter: int = 1000,
    workers: int | None = None, scheduler: Any = None, security: Any = None, on_gpu: bool = False,
    cuda_graph: bool = True,
) -> Solution:  # fmt: skip
    """Rank the nodes of a graph in memory; `spdist.pagerank` explains the parameters."""
    if not isinstance(links, np.ndarray):
        refuse_other_objects(links)
    links = in_native_order(links)
    check_dtype(links.dtype)
    if links.shape[0] != links.shape[1] or not links.shape[0]:
        raise MatrixError(f"a graph's matrix is square and not empty, this is {links.shape[0]:,} x {links.shape[1]:,}")
    if not 0 <= damping < 1:
        raise InputError(f"damping={damping} must be at least 0 and below 1")
    m = _transition_matrix(links)
    start = module_of(m.data).full(m.shape[0], 1 / m.shape[0], m.dtype)
    options = {"damping": damping, "tolerance": tolerance, "maxiter": maxiter, "cuda_graph": cuda_graph}
    if workers is None and scheduler is None and not on_gpu:
        return _on(operator(m), pagerank_loop, start, **options)
    from spdist.operators.partitioned import partitioned

    with partitioned(m, workers, scheduler=scheduler, security=security, on_gpu=on_gpu) as a:
        return _on(a, pagerank_loop, start, **options)


def _transition_matrix(links: Any) -> Any:
    """Return the matrix that moves ranks along links: transposed, each column with a sum of 1 or empty."""
    library: Any = sp
    if cupy_operands.is_cupyx(links):
        import cupyx.scipy.sparse as library  # type: ignore[no-redef]
    m = library.csr_matrix(links)
    if m.dtype.kind == "c":
        raise MatrixError(f"links have weights of {m.dtype}: PageRank follows links by chance, give real weights")
    m = m.astype(m.dtype if m.dtype.kind == "f" else np.float64)
    if not ((m.data >= 0) & (m.data < math.inf)).all():  # NaN is neither
        raise MatrixError(
            "links have weights that are negative, infinite or NaN: PageRank follows links by chance, give weights >= 0"
        )
    out = module_of(m.data).asarray(m.sum(axis=1)).ravel()
    shares = (out > 0) / out.clip(np.finfo(m.dtype).tiny)
    return library.csr_matrix((library.diags(shares.astype(m.dtype)) @ m).T)


def _on(a: Operator | PartitionedOperator, loop: Callable[..., Any], *vectors: Any, **options: Any) -> Solution:
    """Run a loop in the processes that hold the matrix."""
    if not isinstance(a, PartitionedOperator):
        return Solution(*loop(_Whole(a, vectors[0]), *vectors, **options))
    ends = a.run(_back_on_host, *vectors, loop=loop, **options)
    return Solution(a.whole([end[0] for end in ends]), *ends[0][1:])


def _back_on_host(part: Space, *vectors: Any, loop: Callable[..., Any], **options: Any) -> tuple[Any, ...]:
    """Run a loop on one of the workers; return its vector in host memory, for the driver."""
    x, *facts = loop(part, *vectors, **options)
    return on_host(x), *facts


# -- the loops, which every part runs ----------------------------------------------------------------------------------


def _iterate(
    space: Space, step: Callable[[], None], look: Callable[[], float], value: float, limit: float, maxiter: int,
    cuda_graph: bool,
) -> tuple[int, float, str]:  # fmt: skip
    """Iterate until a value is within its limit or NaN; return the iterations, the value, how they were launched."""

    def agree(captured: bool) -> bool:
        return float(space.total(space.xp.full(1, float(not captured)))[0]) == 0

    done, batch = 0, 1 if space.xp is np else LOOKS
    with Steps(space.xp, step, batch, agree, cuda_graph) as steps:
        while done < maxiter and value > limit:
            count = min(batch, maxiter - done)
            steps.take(count)
            value, done = look(), done + count
    return done, value, steps.launched


def conjugate_gradient_loop(
    space: Space, b: DeviceArray, x: DeviceArray, scale: DeviceArray | None = None, *, rtol: float, maxiter: int,
    cuda_graph: bool = True,
) -> tuple[Any, int, float, bool, float, str]:  # fmt: skip
    """Run conjugate gradients on one part of a system, or on the whole of it.

    `space`: the matrix, and sums over all parts.
    `b`: (n,) array: this part's elements of the right-hand side.
    `x`: (n,) array: this part's elements of the first guess; not changed.
    `scale`: (n,) array, optional: ``scale * r`` is the preconditioned residual.
    `rtol`: iterations end once ``|r| <= rtol |b|``.
    `cuda_graph`: whether iterations on a GPU are captured as a CUDA graph.
    Returns the fields of `Solution`, in order.
    """
    begin, x, p, sums = time.perf_counter(), x.copy(), space.x, space.xp.zeros(4)
    update, q = updates_of(p), space.xp.empty_like(b)
    p[...] = x
    r = b - space.matvec(p, q)
    p[...] = r if scale is None else scale * r
    for place, (left, right) in {PQ: (b, b), RZ: (r, p), RR: (r, r)}.items():
        update.dot(left, right, sums[place : place + 1])
    squared, _, first = space.total(sums[:BEFORE]).tolist()
    curved, reduced, z = sums[PQ:RZ], sums[RZ:BEFORE], r if scale is None else q

    def step() -> None:
        space.matvec(p, q)
        update.dot(p, q, curved)
        space.total(curved)
        update.advance(x, r, p, q, scale, sums)
        space.total(reduced)
        update.set_direction(p, z, sums)

    def look() -> float:
        return math.sqrt(float(sums[RR]))

    limit = rtol * math.sqrt(squared)
    done, residual, launched = _iterate(space, step, look, math.sqrt(first), limit, maxiter, cuda_graph)
    return x, done, residual, residual <= limit < math.inf, time.perf_counter() - begin, launched


def pagerank_loop(
    space: Space, start: DeviceArray, *, damping: float, tolerance: float, maxiter: int, cuda_graph: bool = True
) -> tuple[Any, int, float, bool, float, str]:
    """Run PageRank on one part of a graph, or on the whole of it.

    `space`: the matrix that moves ranks along links, and sums over all parts.
    `start`: (n,) array: this part's first ranks; the ranks of all parts add up to 1.
    `damping`: chance to follow a link.
    `tolerance`: iterations end once ranks change by no more than this in total.
    `cuda_graph`: whether iterations on a GPU are captured as a CUDA graph.
    Returns the fields of `Solution`, in order.
    """
    begin, ranks, sums = time.perf_counter(), space.x, space.xp.zeros(2)
    update, moved = updates_of(ranks), space.xp.empty_like(start)
    ranks[...] = start
    nodes = float(space.total(space.xp.full(1, float(len(start))))[0])
    kept, changed = sums[KEPT:CHANGED], sums[CHANGED:]

    def step() -> None:
        space.matvec(ranks, moved)
        update.dot(moved, None, kept)  # nodes without links pass their rank to all nodes in equal shares
        space.total(kept)
        update.set_ranks(ranks, moved, damping, nodes, sums)
        space.total(changed)

    def look() -> float:
        return float(sums[CHANGED])

    done, change, launched = _iterate(space, step, look, np.inf, tolerance, maxiter, cuda_graph)
    return ranks.copy(), done, change, change <= tolerance, time.perf_counter() - begin, launched
