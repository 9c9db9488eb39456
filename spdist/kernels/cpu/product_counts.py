"""Count products of ``A @ B``, or estimate their number from a sample; NumPy alone, without Numba."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array

SAMPLE = 1 << 16
"""Entries of A that an estimate reads, and that a count gathers at a time: their counts stay in the cache."""


def row_products(a: CSR, b_row_nnz: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """Count the products of each row of ``C = A @ B`` from the entries of each row of B; they bound the entries of C.

    A. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication on GPU", HPC 2015, equation 1, by rows.
    """
    out = np.zeros(a.nrows, np.int64)
    rows = np.flatnonzero(a.indptr[1:] > a.indptr[:-1])
    cuts = np.searchsorted(a.indptr[rows], np.arange(0, a.nnz + SAMPLE, SAMPLE))
    for first, last in itertools.pairwise(cuts):
        if first < last:
            begin, end = a.indptr[rows[first]], a.indptr[rows[last - 1] + 1]
            counts = b_row_nnz[a.indices[begin:end]]
            out[rows[first:last]] = np.add.reduceat(counts, a.indptr[rows[first:last]] - begin, dtype=np.int64)
    return out


def estimate_products(a: CSR, b: CSR, sample: int = SAMPLE) -> int:
    """Estimate the products of ``a @ b`` from at most `sample` evenly spaced entries of A; exact if A has no more."""
    step = max(1, -(-a.nnz // sample))
    k = a.indices[::step]
    return int((b.indptr[k + 1] - b.indptr[k]).sum(dtype=np.int64)) * a.nnz // max(len(k), 1)
