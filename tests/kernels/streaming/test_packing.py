"""Packed matrices come back bit for bit: packed by plain Python, and by the GPU where there is one."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from spdist.errors import InputError
from spdist.kernels.streaming import packing, workspace
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import index_dtype
from tests.support import packing_twin as twin

DTYPES = [np.dtype(t) for t in ("f4", "f8", "c8", "c16")]
UNIT = 512
"""Rows and entries of a unit of a small matrix."""


def unpacked(packed: packing.Bytes, like: CSR, values: bool, cuts: list[int] | None = None, pointer: Any = "i8") -> CSR:
    """Unpack into poisoned arrays, in ranges of units, the last first."""
    indptr, indices = np.full(like.nrows + 1, -1, pointer), np.full(like.nnz, -1, like.indices.dtype)
    data = np.full(like.nnz, -7, like.dtype) if values else like.data
    units = workspace.packed_units(like.nrows, like.nnz)
    for first, last in reversed(list(itertools.pairwise(sorted({0, *(cuts or []), units})))):
        packing.unpack(packed, indptr, indices, data if values else None, first, last)
    return CSR(indptr, indices, data, like.shape)


def assert_same_bits(found: CSR, c: CSR) -> None:
    assert_array_equal(found.indptr, c.indptr)
    assert_array_equal(found.indices, c.indices)
    assert found.data.tobytes() == c.data.tobytes()


def matrix(rows: list[list[int]], ncols: int, values: Any) -> CSR:
    """Return a matrix of these columns; `values` has the dtype, and is repeated."""
    indptr = np.cumsum([0, *map(len, rows)])
    columns = np.array([j for row in rows for j in row], index_dtype(ncols))
    return CSR(indptr, columns, np.resize(values, len(columns)).astype(values.dtype), (len(rows), ncols))


def with_dtype(c: CSR, dtype: Any) -> CSR:
    """Return the matrix with values of another dtype."""
    with np.errstate(invalid="ignore"):  # NaN that signals
        return CSR(c.indptr, c.indices, c.data.astype(dtype), c.shape)


def random_rows(lengths: Any, ncols: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    picks = (np.unique(rng.integers(0, ncols, length)) for length in lengths)
    return [pick.tolist() for pick in picks]


def stencil_rows(size: int, steps: list[int]) -> list[list[int]]:
    return [[row + step for step in steps if 0 <= row + step < size] for row in range(size)]


NAN = np.array([np.nan, -np.nan, 0.0, -0.0, np.inf, 1.5])
NAN_BITS = np.array([0x7FF8000000000001, 0xFFF0000000000001, 1, 0], np.uint64).view(np.float64)
RANDOM = np.random.default_rng(0).standard_normal(20_000)
CASES = {
    "nothing": matrix([], 0, NAN),
    "no rows": matrix([], 5, NAN),
    "empty rows": matrix([[]] * 10_000, 5, NAN),
    "one entry": matrix([[3]], 5, NAN),
    "one far entry": matrix([[], [2**40], []], 2**41, NAN),
    "last columns": matrix([[2**31 - 2], [0, 2**31 - 2], [0]], 2**31 - 1, NAN),
    "farthest columns": matrix([[2**63 - 2], [0, 2**63 - 2], [5, 6]], 2**63 - 1, NAN),
    "gaps of all widths": matrix([[(1 << bits) - 1 for bits in range(62)]] * 3, 2**62, RANDOM),
    "gaps beyond 16 bits": matrix([[0, 1 << 17, 1 << 18, 1 << 30]] * 40, 2**31 - 1, NAN_BITS),
    "one long row": matrix([list(range(0, 40_000, 2))], 40_000, RANDOM),
    "long rows": matrix([[1], list(range(UNIT)), [], list(range(5, 3 * UNIT)), [7]] * 2, 3 * UNIT, NAN),
    "rows about a unit": matrix([list(range(n)) for n in range(UNIT - 3, UNIT + 3)], 2 * UNIT, RANDOM),
    "stencil": matrix(stencil_rows(3000, [-100, -1, 0, 1, 100]), 3000, np.array([1.0, 1.0, -4.0, 1.0, 1.0])),
    "nodes": matrix([row for row in stencil_rows(400, [-20, -1, 0, 2]) for _ in range(3)], 402, RANDOM),
    "random": matrix(random_rows([0, 3, 50, 700, 1, 0, 0, 90] * 20, 5000, 1), 5000, RANDOM),
    "counts": matrix(random_rows([10] * 2000, 4000, 2), 4000, np.random.default_rng(3).poisson(2.0, 30_000) + 1.0),
    "rare values": matrix(random_rows([10] * 2000, 4000, 4), 4000, np.where(RANDOM > 2.9, RANDOM, 1.0)),
}


@st.composite
def matrices(draw: Any) -> CSR:
    """Draw rows of all kinds: empty, alike, dense, far apart; values that repeat or do not, NaN among them."""
    ncols = draw(st.sampled_from([1, 300, 2**17, 2**31 - 1, 2**40, 2**63 - 1]))
    column = st.integers(0, ncols - 1)
    row = st.lists(column, max_size=70, unique=True).map(sorted) | st.integers(0, min(ncols, 300)).map(
        lambda n: list(range(n))
    )
    rows = [r for r, times in draw(st.lists(st.tuples(row, st.integers(1, 3)), max_size=10)) for _ in range(times)]
    words = draw(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=300))
    return matrix(rows, ncols, np.array([*words, *words], np.uint64).view(draw(st.sampled_from(DTYPES))))


def check_twin(c: CSR) -> None:
    packed, values = twin.pack(c)
    units = workspace.packed_units(*(c.nrows, c.nnz))
    assert_same_bits(unpacked(packed, c, values), c)
    assert_same_bits(unpacked(packed, c, values, [units // 3, units // 2], "i4"), c)
    if not values:
        assert len(packed) <= workspace.packed_bound(c.shape, c.nnz, c.indices.itemsize)


@pytest.fixture(params=[9, 12])
def unit(request, monkeypatch):
    """Set the size of units, a power of 2; large matrices take the larger ones."""
    monkeypatch.setattr(workspace, "PACKED_UNIT", (request.param, request.param))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("unit")
def test_round_trip(case, dtype):
    check_twin(with_dtype(CASES[case], dtype))


@settings(deadline=None)
@given(matrices())
def test_any_matrix_comes_back(c):
    check_twin(c)


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 2**40), st.integers(0, 2**32))
def test_bound_holds_for_even_gaps(length, ncols, seed):
    c = matrix(random_rows([length] * 20, ncols, seed), ncols, RANDOM)
    packed, _ = twin.pack(CSR(c.indptr, c.indices, RANDOM[:0], c.shape))
    assert len(packed) <= workspace.packed_bound(c.shape, c.nnz, c.indices.itemsize)


def test_stencil_shrinks():
    c = CASES["stencil"]
    packed, values = twin.pack(c)
    assert values
    assert len(packed) - workspace.packed_start(c.nrows, c.nnz) < 0.8 * c.nnz


def test_threads_share_the_units():
    c = CASES["random"]
    packed, _ = twin.pack(c)
    units = workspace.packed_units(c.nrows, c.nnz)
    indptr, indices = np.empty(c.nrows + 1, np.int64), np.empty(c.nnz, c.indices.dtype)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda k: packing.unpack(packed, indptr, indices, None, k, k + 1), range(units)))
    assert_same_bits(CSR(indptr, indices, c.data, c.shape), c)


RECORD = Path(__file__).parents[3] / "benchmarks" / "results" / "old" / "2026-11-21-packing.json"
"""What the costs of packing were fitted to."""


@pytest.mark.parametrize("row", json.loads(RECORD.read_text())["rows"], ids=lambda row: row["product"])
def test_what_is_chosen_was_measured_to_be_quicker(row):
    blocks, found = row["blocks"], {f["values"]: f for f in row["packed"]}
    mean = packing.Sizes(*(row[key] // blocks for key in ("nrows", "nnz", "plain_bytes")), 8 * row["nnz"] // blocks)
    sizes = [found[values]["packed_bytes"] // blocks if values in found else 0 for values in (False, True)]
    for threads, figures in found[False]["threads"].items():
        way = packing.choose(mean, *sizes, int(threads))
        measured = {"plain": 1.0, "columns": figures["over_plain"]}
        if True in found:
            measured["both"] = found[True]["threads"][threads]["over_plain"]
        assert measured[way] >= 1
        assert measured[way] > 0.75 * max(measured.values())


def test_a_slow_wire_is_spared():
    c = packing.Sizes(nrows=10**5, nnz=10**7, nbytes=12 * 10**7, values=8 * 10**7)
    assert (
        packing.choose(c, 2 * 10**6, 3 * 10**6, 16) == "columns"
    )  # the wire brings values quicker than the host writes
    assert packing.choose(c, 2 * 10**6, 3 * 10**6, 16, packing.PackingCosts(wire_gb_s=12)) == "both"
    assert packing.choose(c, 0, 0, 16, packing.PackingCosts(wire_gb_s=12)) == "plain"


def on_device(c: CSR, pointer: Any = np.int64) -> CSR:
    import cupy

    return CSR(*(cupy.asarray(x) for x in (c.indptr.astype(pointer), c.indices, c.data)), c.shape)


def through_device(c: CSR, room: int | None = None, values: bool = True, pointer: Any = np.int64) -> Any:
    """Pack on the device; return what came of it, and the bytes on the host."""
    import cupy

    bound = workspace.packed_bound(c.shape, c.nnz, c.indices.itemsize, c.dtype.itemsize if values else 0)
    size = bound if room is None else room
    out = cupy.full(size + 64, 0xFF, np.uint8)
    packed = packing.pack(on_device(c, pointer), out[:size], values=values).wait()
    assert bool((out[size:] == 0xFF).all())
    host = np.full(packed.nbytes, 0xEE, np.uint8)
    packed.copy(host)
    cupy.cuda.get_current_stream().synchronize()
    return packed, host


def assert_same_units(found: packing.Bytes, expected: packing.Bytes, c: CSR, values: bool) -> None:
    """Check the bytes of each unit; their order is left to the device, the twin has them in order."""
    assert len(found) == len(expected)
    start = workspace.packed_start(c.nrows, c.nnz)
    places, places_expected = (
        bytes_[workspace.PACKED_HEAD : start].view(np.int64).reshape(-1, 4)[:, 2 : 3 + values].T[:, :-1].ravel()
        for bytes_ in (found, expected)
    )
    ends = [*places_expected[1:], len(expected) - start - workspace.PACKED_PADDING]
    for at, begin, end in zip(places, places_expected, ends, strict=True):
        assert_array_equal(found[start + at : start + at + end - begin], expected[start + begin : start + end])


def check_device(c: CSR, pointer: Any = np.int64) -> None:
    packed, host = through_device(c, pointer=pointer)
    expected, values = twin.pack(c)
    assert packed.columns
    assert packed.values or packed.why
    assert_same_bits(unpacked(host, c, packed.values), c)
    if values == packed.values:
        assert_same_units(host, expected, c, values)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("unit")
def test_device_packs_the_same_bytes(case, dtype):
    for pointer in (np.int32, np.int64):
        check_device(with_dtype(CASES[case], dtype), pointer)


@pytest.mark.gpu
@settings(deadline=None, max_examples=60)
@given(matrices())
def test_device_packs_any_matrix(c):
    check_device(c)


@pytest.mark.gpu
def test_what_does_not_fit_is_not_packed():
    c = CASES["counts"]
    whole, _ = through_device(c)
    assert whole.columns
    assert whole.values
    columns, host = through_device(c, whole.nbytes - 1)
    assert columns.columns
    assert not columns.values
    assert_same_bits(unpacked(host, c, False), c)
    nothing, host = through_device(c, columns.nbytes - 1)
    assert not nothing.columns
    assert nothing.nbytes == 0
    assert "bytes" in nothing.why
    with pytest.raises(InputError, match="directory"):
        through_device(c, 100)


@pytest.mark.gpu
def test_what_does_not_pay_is_left_out():
    c = CASES["counts"]
    packed, _ = through_device(c)
    assert packed.choose(1, packing.PackingCosts(wire_gb_s=1e-3)).values
    with_values = packed.nbytes
    assert packed.choose(64, packing.PackingCosts(wire_gb_s=1e-3)).nbytes == with_values
    assert not packed.choose(1, packing.PackingCosts(wire_gb_s=1e3)).columns
    assert packed.nbytes == 0
    assert "no faster" in packed.why


@pytest.mark.gpu
def test_values_that_differ_stay():
    packed, host = through_device(CASES["random"])
    assert packed.columns
    assert not packed.values
    assert "256" in packed.why
    packed, host = through_device(CASES["counts"], values=False)
    assert packed.columns
    assert not packed.values
    assert_same_bits(unpacked(host, CASES["counts"], False), CASES["counts"])
