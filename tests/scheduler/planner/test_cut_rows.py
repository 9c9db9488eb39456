"""The compiled cut, and that of NumPy, against a slow twin in Python."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from spdist.scheduler.planner.cut_kernel import cut
from spdist.scheduler.planner.cut_rows import (
    BlockCosts,
    BlockCutter,
    BlockRecord,
    ExpectedRows,
    block_records,
    joined_records,
)
from tests.conftest import random_matrix


def slow_cut(a, b_lengths, rows_per_chunk, costs, expected, forced):
    """Return the blocks, one row of A after the other, with a set of the rows of B that each needs."""
    blocks, start, sums, needed, longest = [], 0, [0] * 4, set(), 0

    def record(stop):
        chunks = {k // rows_per_chunk for k in needed}
        b_bytes = sum(int(b_lengths[k]) * costs.b_entry + costs.b_row for k in needed)
        return BlockRecord(start, stop, sums[0], sums[1], sums[2], b_bytes, len(chunks), sums[3], longest)

    for row, (begin, end) in enumerate(itertools.pairwise(a.indptr.tolist())):
        columns = a.indices[begin:end].tolist()
        products = nnz = sum(int(b_lengths[k]) for k in columns)
        if products:
            nnz = min(int(products * expected.ratio[int(math.log2(products))]) + 1, products, costs.ncols)
        bound = min(products, max(costs.ncols - row, 0) if costs.upper else costs.ncols)
        mask = int(expected.mask_lengths[row]) if len(expected.mask_lengths) else None
        if mask is not None:
            left = mask if costs.inside else costs.ncols - mask
            nnz, bound = min(nnz, left), min(bound, left)
        shares = expected.share[:, row * expected.share.shape[1] // costs.nrows]
        products, uncut = math.ceil(products * shares[0]), math.ceil(nnz * shares[1])
        a_bytes = (end - begin) * costs.a_entry + 16 + (0 if mask is None else mask * costs.mask_entry + 8)
        own, before = [products, min(uncut, costs.top_n), a_bytes, uncut], (list(sums), set(needed), longest)
        sums, needed = [x + y for x, y in zip(sums, own, strict=True)], needed | set(columns)
        longest = max(longest, bound)
        whole = record(row + 1)
        nbytes = whole.a_bytes + (row + 1 - start) * costs.c_row
        nbytes += max(whole.nnz, min(longest, costs.top_n)) * costs.c_entry
        full = nbytes + (0 if costs.b_resident else whole.b_bytes) > costs.budget
        full = row > start and (full or whole.products > costs.max_products)
        if row in forced if len(forced) else full:
            sums, needed, longest = before
            blocks.append(record(row))
            start, sums, needed, longest = row, own, set(columns), bound
    return [*blocks, record(a.shape[0])]


@pytest.mark.parametrize("in_numpy", [False, True])
@pytest.mark.parametrize("seed", range(24))
def test_blocks_are_those_of_a_slow_twin(seed, in_numpy):
    """Fed in pieces of any length: bounds by bytes and by products, forced starts, masks, top-n and triangles."""
    rng = np.random.default_rng(seed)
    a, n = random_matrix(300, 200, 6, seed), 200
    b_lengths = rng.integers(0, 30, n).astype(np.uint32)
    masked = rng.integers(0, 40, 300).astype(np.uint32) if seed % 3 == 1 else np.empty(0, np.uint32)
    ranges = 4 if seed % 4 == 3 else 1
    ratio = np.linspace(1, 0.3, 64) if seed % 2 else np.full(64, 0.02)  # the longest row counts for more than the sum
    expected = ExpectedRows(ratio, rng.random((2, ranges)) if ranges > 1 else np.ones((2, 1)), masked)
    forced = np.array([17, 90, 91, 250]) if seed % 5 == 4 else np.empty(0, np.int64)
    budget, products = int(rng.integers(2_000, 40_000)), int(rng.integers(500, 5_000))
    top_n = int(rng.integers(1, 60))
    resident, upper = in_numpy or seed % 7 == 0, seed % 6 == 3
    costs = BlockCosts(24, 12, 24, 12, 8, 300, 80, budget, products, 4, bool(seed % 2), top_n, resident, upper)
    cutter, found = BlockCutter(costs, expected, b_lengths, 9, forced, cut=None if in_numpy else cut), []
    bounds = np.unique([0, *rng.integers(0, 300, 5), 300]).tolist()
    for low, high in itertools.pairwise(bounds):
        offsets = a.indptr[low : high + 1].astype(np.int64)
        found += block_records(cutter.feed(offsets, a.indices[offsets[0] : offsets[-1]]))
    found += block_records(cutter.close())
    assert len(found) > 3
    assert found == slow_cut(a, b_lengths, -(-n // 9), costs, expected, forced.tolist())


def test_no_rows_are_no_block():
    expected = ExpectedRows(np.ones(64), np.ones((2, 1)), np.empty(0, np.uint32))
    costs = BlockCosts(24, 12, 24, 12, 8, 0, 80, 1 << 20, 1 << 20, 4, False, 80, True, False)
    assert len(BlockCutter(costs, expected, np.ones(5, np.uint32), 1, np.empty(0, np.int64)).close()) == 0


def test_joined_blocks_have_the_rows_and_sums_of_both_and_the_longer_row():
    first, second = BlockRecord(3, 7, 1, 2, 3, 4, 5, 6, 9), BlockRecord(7, 9, 10, 20, 30, 40, 50, 60, 8)
    assert joined_records(first, second) == BlockRecord(3, 9, 11, 22, 33, 44, 55, 66, 9)
