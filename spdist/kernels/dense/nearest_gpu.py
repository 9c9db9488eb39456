"""The nearest of dense rows on a GPU, exact: cuBLAS scores all pairs, and the same bounds as on the CPU hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.kernels.cuda.module import c_type, module
from spdist.kernels.dense.nearest import SPARE, DenseMetric, Rows, scoring, search_again, unit_rows
from spdist.matrices.dtypes import Int64Array

FILE = "dense/nearest.cu"
QUERIES, CORPUS = 2048, 8192
"""Rows whose scores are made at a time: most of them stay in the L2 cache."""
MOST_NEIGHBOURS = 512 - SPARE
"""Neighbours that a thread block can keep apart."""
TILE_BYTES = 4 * QUERIES * (CORPUS + 6 * 512)
"""Bytes of scores and candidates, at most."""
THREADS = 256


def kernel_names(value: str) -> tuple[str, ...]:
    """Return the name expressions of all kernels, for the C type of the rows."""
    return "dense_keep", f"dense_decide<{value}>"


def nearest(queries: Rows, corpus: Rows, count: int, metric: DenseMetric) -> tuple[Int64Array, npt.NDArray[np.float64]]:
    """Return the nearest rows of a corpus for each query, and how far they are, as `dense.nearest.nearest` does.

    `count`: at most `MOST_NEIGHBOURS`.
    """
    import cupy

    if metric == "cosine":
        queries, corpus = unit_rows(queries), unit_rows(corpus)
    dtype = np.result_type(queries, corpus)
    queries, corpus = queries.astype(dtype, copy=False), corpus.astype(dtype, copy=False)
    euclidean, kept = metric == "euclidean", min(count + SPARE, len(corpus))
    scored = scoring(queries, corpus, euclidean=euclidean)
    left, right, slack, x, y = (cupy.asarray(m) for m in (scored.left, scored.right, scored.slack, queries, corpus))
    columns, distances = cupy.empty((len(queries), count), np.int64), cupy.empty((len(queries), count), np.float64)
    doubtful = cupy.empty(len(queries), np.uint8)
    scores = cupy.empty(QUERIES * min(CORPUS, len(corpus)), np.float32)
    best = cupy.empty((QUERIES, 2 * kept), np.float32), cupy.empty((QUERIES, 2 * kept), np.int32)
    names = kernel_names(c_type(dtype))
    launch = module(FILE, names)
    for start in range(0, len(queries), QUERIES):
        mine = slice(start, min(start + QUERIES, len(queries)))
        size = mine.stop - start
        counts, bounds = cupy.zeros(size, np.int32), cupy.full(size, np.inf, np.float32)
        for first in range(0, len(corpus), CORPUS):
            others = right[first : first + CORPUS]
            made = scores[: size * len(others)].reshape(size, len(others))
            _multiply(left[mine], others, made)
            launch(names[0], size, THREADS, (made, len(others), first, kept, *best, counts, bounds))
        launch(names[1], size, THREADS, (
            x[mine], y, y.shape[1], int(euclidean), best[1], counts, bounds, slack[mine], np.float64(scored.scale**2),
            kept, count, columns[mine], distances[mine], doubtful[mine],
        ))  # fmt: skip
    found, far, again = columns.get(), distances.get(), np.flatnonzero(doubtful.get())
    search_again(queries, corpus, again, found, far, euclidean=euclidean)
    return found, np.maximum(far + 1, 0) if metric == "cosine" else far


def _multiply(left: Any, right: Any, out: Any) -> None:
    """Write ``left @ right.T`` without TF32, whatever CuPy's `matmul` is set to."""
    from cupy import cublas

    cublas.gemm("N", "T", left, right, out=out)
