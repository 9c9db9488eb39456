"""The host side of `esc`: classes, slices, tables and workspace; and the algorithm in NumPy. No GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spdist.kernels.cuda.constants import ROW_CLASSES
from spdist.kernels.esc.long_rows import long_table, slices
from spdist.kernels.esc.row_classes import ESC_CLASSES, classes_that_fit, share_rows
from spdist.kernels.esc.workspace import ESC_BUCKET, ESC_LIMIT, EscSizes, esc_workspace

COUNTS = st.lists(st.integers(0, 50), max_size=30)
TILE = 8192


@given(COUNTS, st.integers(1, 60))
def test_slices_take_every_row_once_and_fit(tiles, most):
    before = np.cumsum([0, *(t + 1 for t in tiles)])
    cut = slices(before, most)
    assert [row for first, last in cut for row in range(first, last)] == list(range(len(tiles)))
    assert all(before[last] - before[first] <= most or last == first + 1 for first, last in cut)


@given(st.lists(st.integers(0, 5000), min_size=16, max_size=16))
def test_groups_take_every_row_once_and_hold_it(counts):
    work = share_rows(counts, ESC_CLASSES)
    first = counts[0]
    most = np.repeat([0, *(c.max_products for c in ESC_CLASSES), 2**62], counts)
    for row_class, start, rows in work:
        assert (start, rows > 0) == (first, True)
        assert most[start : start + rows].max() <= row_class.max_products
        first += rows
    assert first == sum(counts[: len(ESC_CLASSES) + 1])


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(TILE + 1, 2**28)), max_size=20), st.randoms())
def test_table_of_long_rows(rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    described = np.zeros((3, len(rows) + 1), np.int64)
    for at, row in enumerate(order):
        described[:, at] = (row, *rows[row])
    table = long_table(described, TILE)
    assert table[0, :-1].tolist() == list(range(len(rows)))
    for row, (entries, products) in enumerate(rows):
        assert table[1, row + 1] - table[1, row] == entries
        assert table[2, row + 1] - table[2, row] == products
        assert table[3, row + 1] - table[3, row] == -(-products // TILE)
        assert table[4, row + 1] - table[4, row] == -(-products // ESC_BUCKET)


def test_classes_rise_and_fit():
    most = [c.max_products for c in ESC_CLASSES]
    assert most == sorted(set(most))
    assert len(most) + 2 <= ROW_CLASSES
    assert all(c.max_products < 1 << 16 for c in ESC_CLASSES)
    assert classes_that_fit(225 << 10, 16, 8)[-1].max_products == TILE  # H100, complex128
    assert classes_that_fit(161 << 10, 16, 8)[-1].max_products == TILE // 2  # A100
    assert classes_that_fit(97 << 10, 16, 8)[-1].max_products >= 2048


@pytest.mark.parametrize("row_class", ESC_CLASSES)
def test_keys_hold_column_and_number(row_class):
    for ncols in (1, 2, 1 << 18, (1 << 19) + 1, 1 << 31, 1 << 40):
        bits = 32 if row_class.key_type(ncols) == "u32" else 64
        assert (ncols - 1) << (row_class.max_products - 1).bit_length() < 1 << bits


SIZES = st.fixed_dictionaries(
    {
        "nrows": st.integers(1, 10**8), "ncols": st.integers(1, 10**8), "products": st.integers(1, 10**11),
        "value_itemsize": st.sampled_from([4, 8, 16]), "index_itemsize": st.sampled_from([4, 8]),
    }
)  # fmt: skip
LONG = st.tuples(st.integers(0, 100), st.integers(1, 10**5), st.integers(TILE + 1, 10**8))


@given(SIZES, LONG, st.none() | st.integers(1, 10**11))
def test_workspace_is_within_the_limit_or_says_what_it_needs(sizes, long, limit):
    rows, entries, products = long
    longest = products if rows else 100
    asked = EscSizes(
        **sizes, max_row_products=longest, long_rows=rows, long_entries=rows * entries, long_products=rows * products
    )
    work = esc_workspace(asked, TILE, limit)
    assert work.pool_entries <= min(sizes["products"], sizes["nrows"] * sizes["ncols"])
    assert work.slice_tiles * TILE >= longest or rows == 0
    allowed = ESC_LIMIT if limit is None else limit
    assert work.total <= max(allowed, work.needed)
    assert esc_workspace(asked, TILE, work.needed).total <= work.needed


@given(SIZES, LONG)
def test_workspace_grows_with_its_arguments(sizes, long):
    rows, entries, products = long
    if rows == 0:
        return
    common = dict(sizes, max_row_products=products)
    exact = EscSizes(**common, long_rows=rows, long_entries=rows * entries, long_products=rows * products)
    bound = EscSizes(
        **common, long_rows=rows + 1, long_entries=rows * entries + 5, long_products=rows * products + TILE
    )
    assert esc_workspace(exact, TILE).needed <= esc_workspace(bound, TILE).needed


def model_long_row(columns: np.ndarray, values: np.ndarray, tile: int, slots: int) -> tuple[list[int], list[float]]:
    """Return a long row's sums by column as `long_rows.cu` makes them: sorted tiles, merged by ranges of columns."""
    tiles = []
    for start in range(0, len(columns), tile):
        order = np.argsort(columns[start : start + tile], kind="stable")
        tiles.append((columns[start : start + tile][order], values[start : start + tile][order]))
    samples = np.sort(np.concatenate([c[:: max(len(c) // 4, 1)] for c, _ in tiles]))
    buckets = -(-len(columns) // (slots // 2))
    splitters = [0, *(samples[b * len(samples) // buckets] for b in range(1, buckets)), columns.max() + 1]
    out: tuple[list[int], list[float]] = [], []
    for low, high in itertools.pairwise(splitters):
        while low < high:
            stop = high
            while (total := sum(int(((c >= low) & (c < stop)).sum()) for c, _ in tiles)) > slots and stop - low > 1:
                stop = low + (stop - low) // 2
            pieces = [((c >= low) & (c < stop), c, v) for c, v in tiles]
            merged = np.concatenate([c[m] for m, c, _ in pieces]), np.concatenate([v[m] for m, _, v in pieces])
            order = np.argsort(merged[0], kind="stable") if total <= slots else np.arange(total)
            for column in np.unique(merged[0]):
                total_sum = 0.0
                for at in order[merged[0][order] == column]:
                    total_sum += merged[1][at]
                out[0].append(int(column))
                out[1].append(total_sum)
            low = stop
    return out


@given(st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 60), st.integers(2, 12))
def test_model_of_a_long_row_keeps_the_order_of_sums(seed, count, ncols, slots):
    rng = np.random.default_rng(seed)
    columns, values = rng.integers(0, ncols, count), rng.standard_normal(count)
    truth: dict[int, float] = {}
    for column, value in zip(columns.tolist(), values.tolist(), strict=True):
        truth[column] = truth.get(column, 0.0) + value
    got = model_long_row(columns, values, 2 * slots, slots)
    assert got[0] == sorted(truth)
    assert got[1] == [truth[column] for column in got[0]]
