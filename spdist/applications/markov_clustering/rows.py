"""Rows of sparse matrices, on the host or on a GPU: picked, filtered, replaced, cut, inflated."""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.cpu.finished import inflate as on_host
from spdist.kernels.cpu.multiply import cut
from spdist.kernels.product_spec import ProductSpec
from spdist.matrices.csr import CSR


def is_on_gpu(rows: CSR) -> bool:
    """Whether the arrays of rows are CuPy's."""
    return type(rows.data) is not np.ndarray


def module_of(rows: CSR) -> Any:
    """Return NumPy or CuPy, whose arrays these are."""
    if not is_on_gpu(rows):
        return np
    import cupy

    return cupy


def numbers_of(rows: CSR) -> Any:
    """Return the row of each entry."""
    return _row_of_each(rows.indptr, rows.nnz, module_of(rows))


def _row_of_each(indptr: Any, nnz: int, xp: Any) -> Any:
    if xp is np:
        return np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return xp.searchsorted(indptr, xp.arange(nnz), side="right") - 1


def sums_of(rows: CSR) -> Any:
    """Return the sum of each row, as float64."""
    if not is_on_gpu(rows):
        return on_host.sums_of_rows(rows)
    from spdist.kernels.rowwise_gpu.epilogue import BlockEpilogue

    work = BlockEpilogue(ProductSpec(), "row_sums", rows.shape, rows.dtype)
    sums = work.room(rows)
    work.reduce(rows, 0, sums)
    return sums


def filtered(rows: CSR, keep: Any) -> CSR:
    """Return rows with some of their entries.

    `keep`: (nnz,) bool.
    """
    xp = module_of(rows)
    before = xp.zeros(rows.nnz + 1, rows.indptr.dtype)
    xp.cumsum(keep, out=before[1:])
    return CSR(before[rows.indptr], rows.indices[keep], rows.data[keep], rows.shape)


def taken(rows: CSR, numbers: Any) -> CSR:
    """Return some rows.

    `numbers`: (k,) int: which, in any order.
    """
    xp = module_of(rows)
    indptr = xp.zeros(len(numbers) + 1, rows.indptr.dtype)
    xp.cumsum((rows.indptr[1:] - rows.indptr[:-1])[numbers], out=indptr[1:])
    nnz = int(indptr[-1])
    row = _row_of_each(indptr, nnz, xp)
    at = xp.arange(nnz) + (rows.indptr[numbers] - indptr[:-1])[row]
    return CSR(indptr, rows.indices[at], rows.data[at], (len(numbers), rows.ncols))


def replaced(rows: CSR, numbers: Any, others: CSR) -> CSR:
    """Return rows, some of them replaced.

    `numbers`: (k,) int64: which, rising.
    `others`: the `k` rows in place of these.
    """
    xp = module_of(rows)
    stays = xp.ones(rows.nrows, np.bool_)
    stays[numbers] = False
    kept = filtered(rows, stays[numbers_of(rows)])
    lengths = kept.indptr[1:] - kept.indptr[:-1]
    lengths[numbers] = others.indptr[1:] - others.indptr[:-1]
    indptr = xp.zeros(rows.nrows + 1, rows.indptr.dtype)
    xp.cumsum(lengths, out=indptr[1:])
    nnz = kept.nnz + others.nnz
    stayed = stays[_row_of_each(indptr, nnz, xp)]
    indices, data = xp.empty(nnz, rows.indices.dtype), xp.empty(nnz, rows.dtype)
    indices[~stayed], data[~stayed] = others.indices, others.data
    indices[stayed], data[stayed] = kept.indices, kept.data
    return CSR(indptr, indices, data, rows.shape)


def cut_rows(rows: CSR, spec: ProductSpec) -> CSR:
    """Return rows cut by threshold and top-n, as rows of a product are; the given rows are not changed."""
    if not is_on_gpu(rows):
        return cut(CSR(rows.indptr.copy(), rows.indices.copy(), rows.data.copy(), rows.shape), spec)
    from spdist.kernels.rowwise_gpu.epilogue import finish

    return finish(rows, spec)


def inflate(rows: CSR, power: float) -> float:
    """Raise the values of each row to a power and scale the row to sum 1, in place; see either implementation.

    `rows`: on the host or the GPU.
    """
    if not is_on_gpu(rows):
        return on_host.inflate(rows, power)
    from spdist.kernels.rowwise_gpu.finished import inflate as on_gpu

    return on_gpu.inflate(rows, power)


def stacked(blocks: list[CSR]) -> CSR:
    """Return blocks of rows below each other."""
    xp = module_of(blocks[0])
    nnz = sum(block.nnz for block in blocks)
    offsets = np.int64 if nnz > np.iinfo(np.int32).max else blocks[0].indptr.dtype
    starts = np.cumsum([0, *(block.nnz for block in blocks[:-1])]).tolist()
    pieces = [block.indptr[1:].astype(offsets) + start for block, start in zip(blocks, starts, strict=True)]
    indptr = xp.concatenate([xp.zeros(1, offsets), *pieces])
    indices, data = (xp.concatenate([getattr(block, name) for block in blocks]) for name in ("indices", "data"))
    return CSR(indptr, indices, data, (len(indptr) - 1, blocks[0].ncols))
