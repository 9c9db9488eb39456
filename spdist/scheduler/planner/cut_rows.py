"""How a walk over the rows of A cuts them into blocks, compiled by Numba; imported when it is needed."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.kernels.cpu.numba_compile import compiled, part
from spdist.matrices.dtypes import Int64Array

Lengths = npt.NDArray[Any]

START, PRODUCTS, NNZ, A_BYTES, B_BYTES, B_CHUNKS, UNCUT, NUMBER, FORCED = range(9)
"""Places in a walk's state: the first row of the block, the sums over its rows, its number, forced starts so far."""


@dataclass(frozen=True)
class Costs:
    """Bytes per entry and the bounds that end a block: what the walk over A needs to know."""

    a_entry: int
    b_entry: int
    b_row: int
    c_entry: int
    c_row: int
    nrows: int
    ncols: int
    budget: int
    max_products: int
    mask_entry: int
    inside: bool
    top_n: int
    resident: bool

    def array(self) -> Int64Array:
        """Return the fields as the kernel takes them."""
        return np.array(astuple(self), np.int64)


@part
def _asked(
    indices: Any, begin: Any, end: Any, lengths: Any, entry: Any, row: Any, stamp: Any, chunk_rows: Any,
    chunk_stamp: Any, number: Any,
) -> Any:  # fmt: skip
    """Return the products of a row of A, and the bytes and Zarr chunks of B that no row of the block asked for before.

    These are stamped with the number of the block.
    """
    products, nbytes, chunks = np.int64(0), np.int64(0), np.int64(0)
    for at in range(begin, end):
        k = np.uintp(indices[at])
        length = np.int64(lengths[k])
        products += length
        if stamp[k] != number:
            stamp[k] = number
            nbytes += length * entry + row
            chunk = k // np.uintp(chunk_rows)
            if chunk_stamp[chunk] != number:
                chunk_stamp[chunk] = number
                chunks += 1
    return products, nbytes, chunks


@part
def _expected(products: Any, row: Any, ratio: Any, share: Any, nrows: Any, ncols: Any, masked: Any, inside: Any) -> Any:
    """Return the products of a row that are made, and the entries of C that are expected of them."""
    nnz = products
    if products > 0:
        nnz = min(np.int64(products * ratio[int(np.log2(products))]) + 1, products, ncols)
    if len(masked) > 0:
        marked = np.int64(masked[row])
        nnz = min(nnz, marked if inside else ncols - marked)
    place = row * share.shape[1] // nrows
    return np.int64(np.ceil(products * share[0, place])), np.int64(np.ceil(nnz * share[1, place]))


@part
def _close(row: Any, state: Any, out: Any, closed: Any) -> None:
    """Write the block that ends before a row, and begin the next one."""
    out[closed, 0], out[closed, 1] = state[START], row
    for at in range(PRODUCTS, NUMBER):
        out[closed, at + 1] = state[at]
        state[at] = 0
    state[START] = row
    state[NUMBER] += 1


@compiled
def cut(
    offsets: Any, indices: Any, b_lengths: Any, ratio: Any, share: Any, masked: Any, costs: Any, forced: Any,
    first_row: Any, stamp: Any, chunk_rows: Any, chunk_stamp: Any, state: Any, out: Any,
) -> Any:  # fmt: skip
    """Walk over rows, adding each to the block in `state`; rows that would pass a bound start the next block.

    `stamp[k]` is the number of the block that last used row k of B, so that each row of B counts once a block;
    `chunk_stamp` is the same for B's Zarr chunks, of `chunk_rows` rows on average.
    Where B is resident, its bytes are counted, but bound nothing.
    `forced` holds the rows at which blocks must start; where it is empty, blocks end where the bounds say.
    `masked` holds the lengths of the mask's rows, if there is one.
    Returns the number of blocks closed, one row of `out` each: start, stop, products, nnz, bytes of A and the mask, of
    B, Zarr chunks of B, and nnz before rows are cut.
    """
    a_entry, b_entry, b_row, c_entry, c_row, nrows, ncols, budget, max_products, mask_entry, inside, top_n, held = costs
    closed = 0
    for i in range(len(offsets) - 1):
        row, begin, end = first_row + i, offsets[i] - offsets[0], offsets[i + 1] - offsets[0]
        number = np.uint32(state[NUMBER])
        all_products, b_bytes, b_chunks = _asked(
            indices, begin, end, b_lengths, b_entry, b_row, stamp, chunk_rows, chunk_stamp, number
        )
        products, uncut = _expected(all_products, row, ratio, share, nrows, ncols, masked, inside)
        nnz, a_bytes = min(uncut, top_n), (end - begin) * a_entry + 16
        if len(masked) > 0:
            a_bytes += np.int64(masked[row]) * mask_entry + 8
        total = state[A_BYTES] + a_bytes + (state[NNZ] + nnz) * c_entry + (row + 1 - state[START]) * c_row
        if not held:
            total += state[B_BYTES] + b_bytes
        full = row > state[START] and (total > budget or state[PRODUCTS] + products > max_products)
        if len(forced) > 0:
            full = state[FORCED] < len(forced) and row == forced[state[FORCED]]
            state[FORCED] += full
        if full:
            _close(row, state, out, closed)
            closed += 1
            _, b_bytes, b_chunks = _asked(
                indices, begin, end, b_lengths, b_entry, b_row, stamp, chunk_rows, chunk_stamp, np.uint32(state[NUMBER])
            )
        state[PRODUCTS] += products
        state[NNZ] += nnz
        state[A_BYTES] += a_bytes
        state[B_BYTES] += b_bytes
        state[B_CHUNKS] += b_chunks
        state[UNCUT] += uncut
    return closed


class Cutter:
    """The walk over A as a value with state: feed it row ranges in order, take the closed blocks.

    Parameters
    ----------
    costs : Costs
    ratio, share : ndarray
        Of `sizes.Estimate`.
    b_lengths : (nrows of B,) int
    b_chunks : int
        Zarr chunks of B's columns.
    forced : (n,) int64
        Rows at which blocks must start; if there are any, bounds count for nothing.
    masked : (nrows,) or (0,) int
        Lengths of the mask's rows.
    row : int
        The first.
    """

    def __init__(
        self, costs: Costs, ratio: npt.NDArray[np.float64], share: npt.NDArray[np.float64], b_lengths: Lengths,
        b_chunks: int, forced: Int64Array, masked: Lengths, row: int = 0,
    ) -> None:  # fmt: skip
        self._fixed = (b_lengths, ratio, share, masked, costs.array(), forced)
        self._stamp = np.zeros(len(b_lengths), np.uint32)
        self._chunk_rows = max(1, -(-len(b_lengths) // max(b_chunks, 1)))
        self._chunk_stamp = np.zeros(len(b_lengths) // self._chunk_rows + 1, np.uint32)
        self._state = np.zeros(FORCED + 1, np.int64)
        self._state[NUMBER] = 1
        self._state[START] = self._row = row

    def feed(self, offsets: Int64Array, indices: npt.NDArray[Any]) -> Int64Array:
        """Walk over the next rows; return the blocks they close, (n, 8)."""
        out = np.empty((len(offsets), NUMBER + 1), np.int64)
        stamps = self._stamp, self._chunk_rows, self._chunk_stamp
        closed = cut(offsets, indices, *self._fixed, self._row, *stamps, self._state, out)
        self._row += len(offsets) - 1
        return out[:closed].copy()  # not a view: it would keep all of `out`

    def close(self) -> Int64Array:
        """Return the last block."""
        start, *sums = self._state[:NUMBER]
        return np.array([[start, self._row, *sums]], np.int64)[: int(self._row > start)]
