"""Small and ragged products by every family of kernels, each checked: a program for compute-sanitizer.

::

    compute-sanitizer --tool memcheck python -m tests.kernels.sanitize
    compute-sanitizer --tool racecheck python -m tests.kernels.sanitize masks answers

Names choose groups of products; none, all.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import scipy.sparse as sp

import spdist
from spdist.applications.markov_clustering import gpu_walks, host_walks
from spdist.applications.markov_clustering.pruning import Pruning
from spdist.kernels import reduction_spec
from spdist.kernels.bsr import multiply_gpu as bsr_gpu
from spdist.kernels.cpu.reduce import reduce_rows
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.streaming import pipeline
from spdist.kernels.streaming.gpu_device import Gpu
from spdist.matrices import bsr
from spdist.matrices.csr import CSR, from_scipy
from spdist.storage.external_sort import Entries

RNG = np.random.default_rng(7)


def ragged(nrows: int, ncols: int, lengths: tuple[int, ...], dtype: str = "float64") -> sp.csr_matrix:
    """Return a canonical matrix of small integers whose rows take the lengths in turn."""
    rows = [np.sort(RNG.choice(ncols, min(length, ncols), replace=False))
            for length in np.resize(lengths, nrows)]  # fmt: skip
    indptr = np.append(0, np.cumsum([len(row) for row in rows]))
    values = RNG.integers(1, 5, indptr[-1]).astype(dtype)
    return sp.csr_matrix((values, np.concatenate(rows).astype(np.int32), indptr), shape=(nrows, ncols))


def operands(dtype: str = "float64") -> list[tuple[sp.csr_matrix, sp.csr_matrix]]:
    """Return pairs: short rows, rows of all classes, one long row, alike rows, next to nothing."""
    return [
        (ragged(90, 70, (0, 1, 3), dtype), ragged(70, 81, (2, 0, 5), dtype)),
        (ragged(60, 900, (1, 0, 40, 300), dtype), ragged(900, 3000, (0, 9, 64), dtype)),
        (ragged(3, 2500, (2500, 0, 1), dtype), ragged(2500, 40000, (30, 200), dtype)),
        (ragged(400, 400, (8,), dtype), ragged(400, 400, (8,), dtype)),
        (ragged(1, 1, (1,), dtype), ragged(1, 1, (0,), dtype)),
    ]


def agree(c: Any, wanted: Any) -> None:
    """Compare values; zeros of the pattern do not count."""
    found = c.to_scipy() if isinstance(c, CSR) else c.get() if hasattr(c, "get") else sp.csr_matrix(c)
    difference = abs(found - wanted)
    assert difference.nnz == 0 or difference.max() <= 1e-4 * abs(wanted).max(), difference.max()


def products() -> None:
    """Whole products in memory: each method, each type of values, twice the same bits."""
    import cupyx.scipy.sparse as csp

    for dtype in ("float64", "float32", "complex128"):
        for a, b in operands(dtype):
            for method in ("auto", "esc") if dtype != "complex128" else ("auto",):
                agree(spdist.spgemm(csp.csr_matrix(a), csp.csr_matrix(b), method), a @ b)
            agree(spdist.spgemm(csp.csr_matrix(a), csp.csr_matrix(b), deterministic=True), a @ b)


def masks() -> None:
    """Products inside of a mask and outside of it."""
    import cupyx.scipy.sparse as csp

    for a, b in operands():
        for lengths in ((0, 3, 1), (200, 0, 7), (5000,)):
            m = ragged(a.shape[0], b.shape[1], lengths)
            inside = m.astype(bool).astype(float)
            on_gpu = [csp.csr_matrix(x) for x in (a, b, m)]
            for deterministic in (False, True):
                c = spdist.spgemm(*on_gpu[:2], mask=on_gpu[2], deterministic=deterministic)
                agree(c, (a @ b).multiply(inside))
                c = spdist.spgemm(*on_gpu[:2], mask=on_gpu[2], complement=True, deterministic=deterministic)
                agree(c, a @ b - (a @ b).multiply(inside))


def answers() -> None:
    """Triangles, cuts, the largest entries, scaled rows, reductions."""
    for a, b in operands():
        left, right, c = from_scipy(a), from_scipy(b), (a @ b).tocsr()
        device = Gpu(64 << 20)
        agree(pipeline.multiply(left, right, device, spec=ProductSpec(threshold=8.0)), c.multiply(c >= 8.0))
        top = pipeline.multiply(left, right, device, spec=ProductSpec(top_n=3))
        assert np.array_equal(np.diff(top.indptr), np.minimum(np.diff(from_scipy(c).indptr), 3))
        for what in ("nnz", "frobenius", "row_sums", "column_sums", "trace"):
            if what != "trace" or a.shape[0] == b.shape[1]:
                part = pipeline.reduce(left, right, what, device)
                found, wanted = (
                    reduction_spec.final_value(what, x, c.shape[1]) for x in (part, reduce_rows(what, from_scipy(c), 0))
                )
                assert np.allclose(found, wanted), what
        if a.shape[0] == b.shape[1]:
            agree(pipeline.multiply(left, right, device, spec=ProductSpec(triangle="upper")), sp.triu(c))


def blocks() -> None:
    """Through slots of little memory: packed and not, B there or brought; dense blocks, TF32 too."""
    import cupy

    for a, b in operands():
        for limit in (48 << 20, 256 << 20):
            for pack in (True, False):
                agree(pipeline.multiply(from_scipy(a), from_scipy(b), Gpu(limit, pack=pack)), a @ b)
    for size in ((2, 2), (3, 3), (4, 4), (6, 6), (8, 8), (16, 16), (5, 5)):
        m = sp.bsr_matrix(sp.kron(ragged(40, 40, (0, 4, 9)), np.ones(size)), blocksize=size)
        for dtype, tf32 in (("float64", False), ("float32", False), ("float32", True)):
            block = bsr.from_scipy(m.astype(dtype))
            arrays = [cupy.asarray(x) for x in (block.indptr.astype(np.int32), block.indices, block.data)]
            c = bsr_gpu.multiply(*2 * [bsr.BSR(*arrays, block.shape)], tf32=tf32)
            agree(bsr.BSR(c.indptr.get(), c.indices.get(), c.data.get(), c.shape).to_scipy(), m @ m)


def walks() -> None:
    """Steps of Markov clustering that stay on the GPU: rows inflated, cut by both rules, replaced."""
    for m in (ragged(90, 90, (0, 1, 3)), ragged(1, 1, (1,)), ragged(2300, 2300, (2300, *[1] * 900))):
        rows = np.repeat(np.arange(m.shape[0]), np.diff(m.indptr))
        edges = Entries(rows, m.indices, m.data)
        for pruning in (Pruning(0, 0, 0), Pruning(30, 4, 9), Pruning(5, 0, 12, 99.0)):
            first = gpu_walks.first_walks_on_gpu(edges, m.shape[0], 1.5)
            on_gpu = gpu_walks.GpuWalks(first, pruning, 1 << 30)
            on_host = host_walks.HostWalks(on_gpu.on_host(), pruning, {"engine": "numba"})
            assert np.isclose(on_gpu.take(2.0), on_host.take(2.0), rtol=1e-3)
            if m.shape[0] < 1000:  # ties of larger ones are cut in any order
                agree(on_gpu.on_host(), on_host.on_host().to_scipy())


GROUPS = {"products": products, "masks": masks, "answers": answers, "blocks": blocks, "walks": walks}


def main() -> None:
    """Make the groups that are named."""
    for name in sys.argv[1:] or GROUPS:
        GROUPS[name]()
        print(f"{name}: right", flush=True)


if __name__ == "__main__":
    main()
