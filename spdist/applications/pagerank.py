"""PageRank of a graph in memory, stored or in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from spdist.applications.files import imported, in_folder
from spdist.applications.operands import WEIGHTS, check_square, check_values
from spdist.interop.rows import to_scipy
from spdist.jobs.operands import open_operand
from spdist.operators import solvers
from spdist.operators.solvers import Solution
from spdist.options import FileKeywords, lists_keywords, options_of
from spdist.storage.matrix import StoredMatrix


@lists_keywords(FileKeywords)
def pagerank(
    links: Any,
    *,
    damping: float = 0.85,
    tolerance: float = 1e-10,
    maxiter: int = 1000,
    workers: int | None = None,
    scheduler: Any = None,
    security: Any = None,
    on_gpu: bool = False,
    cuda_graph: bool = True,
    **keywords: Unpack[FileKeywords],
) -> Solution:
    """Rank the nodes of a graph by PageRank [1]_.

    Parameters
    ----------
    links : sparse matrix or array; path, URL or StoredMatrix; or path of a list of edges or another file
        SciPy's or CuPy's, square: a link from i to j has its weight, not negative, in row i and column j. A stored
        matrix is brought to memory whole, and a file imported first; several links from one node to another add up.
    damping : float
        Chance to follow a link. A node without links passes its rank to all nodes in equal shares.
    tolerance : float
        Iterations end once ranks change by no more than this in total.
    maxiter : int
        Most iterations.
    workers, scheduler, security, on_gpu
        As for `partitioned`, if one of them is given; otherwise this process ranks the graph on the device that holds
        it.
    cuda_graph : bool
        As for `conjugate_gradient`.
    format, header, columns, separator, quotes, allow_nan, orient, dense
        As in `import_matrix`: how to read a file.

    Returns
    -------
    Solution
        Its ranks add up to 1. Nodes of a list of edges are in the order in which the list names them: `names` has it.

    Raises
    ------
    MatrixError
        If the matrix is empty, not square, or has a weight that is negative or not finite.
    InputError
        If `damping` is not at least 0 and below 1.

    References
    ----------
    .. [1] L. Page, S. Brin, R. Motwani, T. Winograd, "The PageRank Citation Ranking: Bringing Order to the Web", 1999.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> pagerank(sp.csr_array([[0.0, 1.0], [1.0, 0.0]])).x
    array([0.5, 0.5])
    """
    options_of(pagerank, keywords)
    options: dict[str, Any] = {
        "damping": damping, "tolerance": tolerance, "maxiter": maxiter, "workers": workers, "scheduler": scheduler,
        "security": security, "on_gpu": on_gpu, "cuda_graph": cuda_graph,
    }  # fmt: skip
    with imported(links, in_folder(), keywords, duplicates="sum") as graph:
        names = None
        if isinstance(graph, str | Path | StoredMatrix):
            stored = open_operand(graph)
            if stored.blocksize is None:  # errors name the line of the file
                check_square(stored)
                check_values(stored, lambda x: np.isfinite(x) & (x >= 0), WEIGHTS)
            graph, names = to_scipy(stored), stored.row_names
    return replace(solvers.pagerank(graph, **options), names=names)
