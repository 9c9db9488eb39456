"""Matrices in SELL-C-sigma: bring one there, multiply it with vectors, bring it back; on the host or on the GPU."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np

from spdist.csr import CSR, INT32_MAX
from spdist.errors import InputError, MatrixError
from spdist.kernels.sell_format import (
    LANES,
    PIECE,
    PIECES,
    WARPS_WANTED,
    Sell,
    host,
    is_on_gpu,
    module_of,
    place_rows,
    to_host,
)

Index = Literal["auto", "wide", "narrow"]

ALLOWED = {"wide": 0, "narrow": 1, "auto": 3}
"""Forms that a chunk may take, as the kernels number them."""
FEW_LISTS = 1 / 8
"""Share of the chunks up to which those that keep diagonals have a list each: to find equal ones is not free."""
SPREAD_ROWS = WARPS_WANTED
"""Times 32: rows below which several lanes of a GPU take a row."""


def build(
    a: CSR, *, height: int = 0, lanes: int = LANES, sigma: int | Literal["auto"] = "auto",
    index: Index = "auto", block: int | Literal["auto"] = "auto", dtype: Any = None,
    threads: int = 1,
) -> Sell:  # fmt: skip
    """Bring a matrix into SELL-C-sigma, where its arrays are.

    Parameters
    ----------
    a : CSR
        On the host or on the GPU; any order of entries, duplicates count twice.
    height : int
        C, rows of a chunk; divides `lanes`. 0 chooses.
    lanes : int
        C times T; 32 where the GPU is to multiply.
    sigma : int or "auto"
        Rows of the windows that are sorted by length; "auto" takes what the model says moves fewest bytes.
    index : {"auto", "narrow", "wide"}
        Forms of column indices that chunks may take: all, 16-bit offsets, or 32-bit columns only.
    block : int or "auto"
        Side of the dense blocks to look for; 1 for none, as "auto" has it on the CPU.
    dtype : dtype, optional
        Of the stored values; that of `a` unless given.
    threads : int
        On the host.

    Raises
    ------
    MatrixError
        If the matrix has 2**31 rows or columns.
    """
    if max(a.shape) > INT32_MAX:
        raise MatrixError(f"SELL-C-sigma has 32-bit positions, the matrix is {a.nrows:,} x {a.ncols:,}: use CSR")
    if lanes < 1 or height < 0:
        raise InputError(f"C = {height} rows of a chunk and {lanes} lanes: both are numbers above 0")
    if height and lanes % height:
        raise InputError(f"C = {height} rows of a chunk must divide its {lanes} lanes")
    builder = _builder(a, lanes, threads)
    stored = np.dtype(a.dtype if dtype is None else dtype)
    lengths = builder.lengths()
    longest = int(lengths.max()) if a.nrows else 0
    limit = builder.long if longest > builder.long else None
    side = builder.find_block() if block == "auto" and index == "auto" else 1 if block == "auto" else block
    if limit is not None or height not in (0, lanes):
        side = 1  # blocks have a lane a row
    placed = place_rows(
        lengths if limit is None else builder.xp.where(lengths > limit, -1, lengths), longest, a.nnz, height=height,
        lanes=lanes, sigma=sigma, block=side, entry_bytes=stored.itemsize + 2, spread=builder.spread,
    )  # fmt: skip
    chunks = builder.xp.zeros((len(placed.first), 4), np.int64)
    chunks[:, 2], chunks[:, 3] = placed.first, placed.code << 32
    sizes = builder.analyse(chunks, placed.rows, side, stored, ALLOWED[index])
    owners, kept = _share_lists(builder.xp, sizes)
    filled = builder.fill(chunks, placed.rows, side, stored, kept, owners)
    if filled is None:  # two lists of one hash
        filled = builder.fill(chunks, placed.rows, side, stored, sizes, None)
    long = _long_rows(a, builder.xp, lengths, limit, stored)
    parts: tuple[Any, ...] = (*filled, placed.rows, *long)
    return Sell(a.shape, a.nnz, lanes, side, placed.sigma, chunks, *parts)


def _share_lists(xp: Any, sizes: Any) -> tuple[Any, Any]:
    """Find chunks whose lists of diagonals are equal, as far as hashes tell: `fill` compares the lists.

    Parameters
    ----------
    sizes : (4, nchunks) int64
        Elements of each chunk's values, of its indices in `wide` and in `narrow`; the hash of its list, -1 for none.

    Returns
    -------
    owners : (nchunks,) int32 or None
        The first chunk with the list of each; itself where it has none, or where another list's hash took its place.
        None where few chunks have lists.
    sizes : (4, nchunks) int64
        The same with nothing in `wide` for those whose list is another's.
    """
    nchunks, hashes = sizes.shape[1], sizes[3]
    listed = hashes >= 0
    if int(listed.sum()) <= FEW_LISTS * nchunks:
        return None, sizes
    own = xp.arange(nchunks, dtype=np.int32)
    size = 1 << (8 * nchunks).bit_length()  # many more places than lists: few of these meet another in theirs
    places = hashes & (size - 1)
    first = xp.full(size, nchunks, np.int32)
    xp.minimum.at(first, places, own)
    found = first[places]
    owners = xp.where(listed & (hashes[found] == hashes), found, own)
    kept = sizes.copy()
    kept[1] *= owners == own
    return owners, kept


def _long_rows(a: CSR, xp: Any, lengths: Any, limit: int | None, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Return the rows longer than `limit` in CSR, cut into pieces; none if it is None."""
    if limit is None:
        empty = xp.empty(0, np.int32)
        zero = xp.zeros(1, np.int64)
        return empty, zero, empty, xp.empty(0, dtype), zero, xp.zeros(1, np.int32)
    rows = xp.flatnonzero(lengths > limit)
    counts = lengths[rows].astype(np.int64)
    indptr = xp.concatenate([xp.zeros(1, np.int64), xp.cumsum(counts)])
    ends = host(indptr)
    size = max(PIECE, a.nnz // PIECES)
    starts = [np.arange(first, last, size) for first, last in itertools.pairwise(ends)]
    row_pieces = np.append(0, np.cumsum([len(s) for s in starts])).astype(np.int32)
    pieces = np.append(np.concatenate(starts), ends[-1])
    entry = xp.arange(int(ends[-1]))
    owner = xp.searchsorted(indptr, entry, side="right") - 1
    source = entry + (a.indptr[rows].astype(np.int64) - indptr[:-1])[owner]
    return (
        rows.astype(np.int32), indptr, a.indices[source].astype(np.int32), a.data[source].astype(dtype),
        xp.asarray(pieces), xp.asarray(row_pieces),
    )  # fmt: skip


def long_rows(a: CSR, limit: int, dtype: np.dtype[Any]) -> Sell:
    """Return only the rows of more than `limit` entries, for products that write the others themselves."""
    xp = module_of(a.data)
    lengths = a.indptr[1:] - a.indptr[:-1]
    found = limit if a.nrows and int(lengths.max()) > limit else None
    none = (xp.empty((0, 4), np.int64), *(xp.empty(0, kind) for kind in (dtype, np.int32, np.uint16)))
    parts: tuple[Any, ...] = (*none, None, *_long_rows(a, xp, lengths, found, dtype))
    return Sell(a.shape, a.nnz, LANES, 1, 1, *parts)


def _builder(a: CSR, lanes: int, threads: int) -> Any:
    if is_on_gpu(a.data):
        from spdist.kernels.sell_gpu import Builder as GpuBuilder

        return GpuBuilder(a, lanes)
    from spdist.kernels.sell_cpu import Builder

    return Builder(a, lanes, threads)


def multiply(a: Sell, x: Any, out: Any = None, *, threads: int = 1) -> Any:
    """Return ``a @ x``.

    Parameters
    ----------
    a : Sell
    x : (ncols,) or (ncols, k)
        Where the arrays of `a` are; C order, of the dtype in which products are summed: that of `a`, or the wider one
        of the same kind.
    out : array, optional
        Takes the result.
    threads : int
        On the host.
    """
    if is_on_gpu(a.values):
        from spdist.kernels import sell_gpu

        return sell_gpu.multiply(a, x, out)
    from spdist.kernels import sell_cpu

    return sell_cpu.multiply(a, x, out, threads)


def to_csr(a: Sell) -> CSR:
    """Return the matrix on the host as canonical CSR: duplicates summed, explicit zeros kept."""
    from spdist.kernels import sell_cpu

    return sell_cpu.to_csr(to_host(a))
