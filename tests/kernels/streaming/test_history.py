"""What earlier blocks teach: which ratios stay from call to call, and which are exact enough for the kernels."""

from __future__ import annotations

import numpy as np
import pytest

from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.streaming import pipeline
from spdist.kernels.streaming.layout import MatrixLayout, StagedBlock
from spdist.kernels.streaming.multiplication import RowSlice
from spdist.kernels.streaming.partition import BlockHistory, BlockTuning
from spdist.kernels.streaming.pipeline import PipelineTuning
from spdist.matrices.csr import from_scipy
from tests.conftest import random_matrix
from tests.support.host_device import HostDevice, HostSlot

TUNING = PipelineTuning(small_entries=-1, blocks=BlockTuning(first_bytes=0, scratch_bytes=1 << 10, row_bytes=16))


def block(products: int, entries_of_b: int | None = None) -> StagedBlock:
    layout = MatrixLayout(1, 1, entries_of_b or 0, np.dtype("f8"), 0, 0, 0, 0)
    return StagedBlock(0, 1, products, [], layout, None if entries_of_b is None else layout, 0.0)


def test_a_block_without_products_teaches_nothing():
    history = BlockHistory()
    history.record(block(0), held=0, kept=0)
    assert not history.is_known
    assert (history.held_ratio, history.entries_of_c(8), history.exact_entries(8)) == (1.0, 8, 0)


def test_ratios_predict_later_blocks():
    history = BlockHistory()
    assert history.entries_of_b(10) == 10  # unknown: each product brings an entry
    history.record(block(100, 20), held=50, kept=25)
    assert (history.held_ratio, history.kept_ratio) == (0.5, 0.25)
    assert [f(10) for f in (history.entries_of_c, history.entries_of_b, history.exact_entries)] == [5, 2, 5]
    history.record(block(100), held=40, kept=40)
    assert history.entries_of_b(10) == 2  # B was resident: nothing new


def test_a_call_begins_with_what_earlier_ones_measured_but_expects_nothing_exact():
    history = BlockHistory()
    history.record(block(100), held=50, kept=50)
    history.begin()
    assert (history.is_known, history.held_ratio, history.exact_entries(10)) == (True, 0.5, 0)
    history.record(block(100), held=0, kept=0)
    history.begin()  # blocks that are only counted hold nothing
    assert (history.is_known, history.held_ratio) == (False, 1.0)


def test_an_expectation_that_was_too_low_is_not_repeated():
    history = BlockHistory()
    history.record(block(100), held=50, kept=50)
    history.distrust()
    assert history.exact_entries(10) == 0
    assert history.entries_of_c(10) == 5


@pytest.mark.parametrize("masked", [False, True])
def test_kernels_are_told_what_the_block_before_came_to(monkeypatch, masked):
    """Not the first block of a call; and none if a mask decides."""
    a, expected, multiply = from_scipy(random_matrix(900, 900, 6.0, 3)), [], HostSlot.multiply

    def noting(slot, entries, while_busy=None):
        nnz = multiply(slot, entries, while_busy)
        expected.append((entries, slot.held))
        return nnz

    monkeypatch.setattr(HostSlot, "multiply", noting)
    spec, history = ProductSpec(mask=a) if masked else ProductSpec(), BlockHistory()
    for _ in range(2):
        expected.clear()
        pipeline.multiply_rows(a, a, HostDevice(1 << 17), RowSlice(history=history), spec=spec, tuning=TUNING)
        assert len(expected) > 3
        assert expected[0][0] == 0
        assert all(bool(entries) != masked for entries, _ in expected[1:])
        assert masked or all(0.5 * held < entries < 2 * held for entries, held in expected[2:])
