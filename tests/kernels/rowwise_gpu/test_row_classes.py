"""The row-by-row product on the GPU: what of it runs on the host, without a GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spdist.errors import MatrixError
from spdist.kernels.cuda.constants import ROW_CLASSES
from spdist.kernels.cuda.module import C_TYPES, c_type
from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
from spdist.kernels.rowwise_gpu import workspace
from spdist.kernels.rowwise_gpu.row_classes import (
    CLASSES,
    SINGLE_PASS_CLASSES,
    SORT_CLASSES,
    TUNING,
    RowTuning,
    SortClass,
    early_classes,
    share_rows,
    single_pass_class,
)
from spdist.kernels.rowwise_gpu.row_kernels import FACTS, RowKernels
from spdist.matrices.csr import from_scipy
from tests.conftest import random_matrix

COUNTS = st.lists(st.integers(0, 10**6) | st.just(0), min_size=ROW_CLASSES, max_size=ROW_CLASSES)


def test_classes_ascend_and_fit_the_device():
    most = [kind.max_products for kind in CLASSES]
    assert most == sorted(set(most))
    assert len(CLASSES) + 1 == ROW_CLASSES
    assert 8 * FACTS <= workspace.SCRATCH_BYTES
    first_ranked = next(i for i, kind in enumerate(CLASSES) if not isinstance(kind, SortClass))
    assert len(CLASSES) - first_ranked == workspace.RANKED - 1
    assert CLASSES[first_ranked - 2].max_products == TUNING.node_products[0]


@given(COUNTS)
def test_every_row_is_in_one_share(counts):
    shares = share_rows(counts)
    at = counts[0]
    for number, first, count in shares:
        assert first == at
        assert count > 0
        at += count
        assert at == sum(counts[: number + 2])  # no row of a later class, and all of this one
    assert at == sum(counts)


@given(COUNTS)
def test_few_rows_join_the_next_sorted_class(counts):
    shares = share_rows(counts)
    for (number, _, count), (later, _, _) in itertools.pairwise(shares):
        between = [n for n in range(number + 1, later + 1) if counts[n + 1]]
        if isinstance(CLASSES[between[0]], SortClass):
            assert count * CLASSES[between[0]].max_products > TUNING.few_slots


def test_few_rows_do_join():
    counts = [3, 10, 20, *[0] * (ROW_CLASSES - 3)]
    assert share_rows(counts) == [(len(SORT_CLASSES) - 1, 3, 30)]
    counts = [3, 5000, 50_000, *[0] * (ROW_CLASSES - 3)]  # too many for a kernel that takes a warp a row
    assert share_rows(counts, single_pass=True) == [(1, 3, 55_000)]
    counts = [3, 5000, *[0] * 4, 50_000, *[0] * (ROW_CLASSES - 7)]
    assert share_rows(counts, single_pass=True) == [(len(SORT_CLASSES) - 1, 3, 55_000)]
    assert share_rows(counts) == [(5, 3, 55_000)]
    counts = [0, 10**7, 20, *[0] * (ROW_CLASSES - 3)]
    assert share_rows(counts) == [(0, 0, 10**7), (1, 10**7, 20)]


@given(st.lists(st.integers(0, 1 << 20), min_size=16, max_size=16), st.booleans())
def test_rows_made_at_once_are_most_of_the_products(counts, small):
    counts[len(CLASSES) + 1 :] = [0] * (ROW_CLASSES - 1 - len(CLASSES))
    number = single_pass_class(counts, small)
    if number is None:
        return
    slots = [rows * kind.max_products for rows, kind in zip(counts[1:], CLASSES, strict=False)]
    share = sum(slots[: number + 1]) / sum(slots)
    assert number in SINGLE_PASS_CLASSES
    assert share == 1 if small else share >= TUNING.single_pass_share


def test_rows_of_one_class_are_made_at_once_unless_they_are_few_or_long():
    one = [
        [0] * place + [rows] + [0] * (ROW_CLASSES - 1 - place) for place, rows in ((3, 10**6), (3, 100), (11, 10**6))
    ]
    assert [single_pass_class(counts, False) for counts in one] == [2, None, None]
    assert [single_pass_class(counts, True) for counts in one[:2]] == [2, 2]


SHARED = st.sampled_from([99 << 10, 163 << 10, 227 << 10])
"""Bytes that a thread block may use on sm_86, which has least from sm_80 on; on sm_80; on sm_90."""


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 40), st.sampled_from([4, 8, 16]), st.booleans(), SHARED)
def test_a_part_of_a_row_fits_in_shared_memory(width, products, itemsize, ordered, most):
    window, capacity, shared = workspace.rank_fill_shared(width, products, itemsize, ordered, most)
    assert window == min(-(-width // 256) * 256, 1 << 19 if most > 160 << 10 else 1 << 18)
    assert workspace.rank_count_window(width, most) // 8 <= most
    assert window % 256 == 0
    assert capacity >= 64 if ordered else capacity == 0
    assert shared % itemsize == 0
    assert shared <= most


@given(st.integers(1, 1 << 11), st.integers(1, 6), st.integers(1, 20_000), st.sampled_from([4, 8, 16]), SHARED)
def test_a_node_fits_in_shared_memory(words, rows, entries, itemsize, shared):
    capacity, most, stride = workspace.node_fill_shared(words, rows, entries, itemsize, shared)
    assert capacity % 4 == 0
    assert capacity <= most <= rows * capacity
    assert capacity >= min(entries, 64)
    assert stride % 16 == 0
    assert 2 * stride <= shared


@given(st.integers(1, 32), st.integers(1, 1 << 33), st.integers(1, 1 << 24))
def test_tasks_stay_small(parts, ncols, rows):
    taken = workspace.rank_parts(parts, ncols, rows)
    assert taken >= 1
    assert taken == 1 or 24 * taken * rows <= workspace.TASK_BYTES


def test_long_rows_need_little():
    assert workspace.long_fits(64, 200_000)
    assert not workspace.long_fits(10**5, 10**7)


@pytest.mark.parametrize("dtype", C_TYPES)
def test_names_cover_all_types(dtype):
    assert c_type(dtype)


@pytest.mark.parametrize("dtype", ["bool", "int16", "longdouble"])
def test_other_types_are_refused(dtype):
    with pytest.raises(MatrixError, match="convert it to"):
        c_type(np.dtype(dtype))


def test_wide_keys_change_the_sort_alone():
    kernels = RowKernels("double", "int", "int")
    narrow, wide = kernels.name_expressions(), kernels.with_wide_keys().name_expressions()
    changed = {file for file in narrow if narrow[file] != wide[file]}
    assert changed == {"rowwise_gpu/sort_rows.cu"}
    sorts = sum("u64" in name for name in wide["rowwise_gpu/sort_rows.cu"])
    assert sorts == len(SORT_CLASSES) + len(SINGLE_PASS_CLASSES)


def test_shapes_are_checked_before_a_gpu_is_needed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupy", object())
    a = from_scipy(random_matrix(4, 5, 2.0, 1))
    with pytest.raises(MatrixError, match="A is 4 x 5 and B is 4 x 5"):
        rowwise_gpu.multiply(a, a)


def test_classes_are_named_before_rows_are_counted():
    room = workspace.SMALL_BYTES // 12
    assert early_classes(49_152, 400_000, 12) == ((0, 7), 849_152)
    assert early_classes(10_000, 200_000, 12) == ((2, 7, 9), 410_000)
    assert early_classes(4000, 400_000, 12) == ((9,), 804_000)  # few rows
    assert early_classes(13_514, 9_473_852, 12) == ((9,), 0)
    assert early_classes(200_000, room, 12) == ((2,), room)
    assert [early_classes(*sizes, 12) for sizes in ((40_000, room + 1), (workspace.SMALL_ROWS + 1, 10))] == [None, None]
    assert early_classes(10, 10, 12, RowTuning(early=False)) is None
