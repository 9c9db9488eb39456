"""Updates of a solver's vectors equal their formulas: by NumPy, by the kernels on the host, and on the GPU."""

from __future__ import annotations

import numpy as np
import pytest

from spdist.kernels.cuda.constants import UPDATE_THREADS
from spdist.kernels.spmv import vector_updates
from spdist.kernels.spmv.vector_updates import BEFORE, BLOCKS, CHANGED, KEPT, PQ, RR, RZ
from tests.support import host_cupy

DTYPES = ("f8", "f4", "c16", "c8")
LENGTHS = (0, 1, 255, 257, 5000)
LONG = 3 * BLOCKS * UPDATE_THREADS + 17


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(params=["numpy", "on host", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request, monkeypatch, folder):
    """Return a function that makes an array, and one that makes the updates of vectors like it."""
    if request.param == "numpy":
        yield np.array, lambda x: vector_updates.OnHost()
    elif request.param == "gpu":
        import cupy

        yield cupy.array, vector_updates.updates_of
    elif not host_cupy.CAN_RUN:
        pytest.skip("needs g++ on x86-64")
    else:
        with host_cupy.installed(monkeypatch, folder):
            yield host_cupy.filled, vector_updates.OnGpu


def host(array) -> np.ndarray:
    return np.array(array.get() if hasattr(array, "get") else array)


def vectors(n: int, dtype: str, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(n)
    parts = rng.standard_normal((2, count, n))
    return list((parts[0] + 1j * parts[1] if dtype[0] == "c" else parts[0]).astype(dtype))


def close(found, expected, dtype: str = "f8") -> None:
    expected = np.asarray(expected)
    room = 1e-5 if dtype in ("f4", "c8") else 1e-13
    np.testing.assert_allclose(host(found), expected, rtol=room, atol=room * max(1.0, abs(expected).max(initial=0)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_dots(place, n, dtype):
    make, updates_of = place
    x, y = vectors(n, dtype, 2)
    update, sums = updates_of(make(x)), make(np.full(3, np.nan))
    kind = dtype if isinstance(update, vector_updates.OnHost) else "f8"  # kernels add up in doubles
    update.dot(make(x), make(y), sums[1:2])
    close(sums[1], np.vdot(x.astype("c16"), y.astype("c16")).real, kind)
    update.dot(make(x), None, sums[1:2])
    close(sums[1], x.astype("c16").sum().real, kind)
    assert np.isnan(host(sums)[[0, 2]]).all()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_a_step_and_a_direction(place, n, dtype, scaled):
    make, updates_of = place
    x, r, p, q, scale = vectors(n, dtype, 5)
    step, rz = 0.75, 1.5
    given = [make(v) for v in (x, r, p, q)]
    update, sums = updates_of(given[0]), make(np.array([rz / step, rz, np.nan, np.nan]))
    update.advance(*given, make(scale) if scaled else None, sums)
    r = r - step * q
    z = scale * r if scaled else r
    close(given[0], x + step * p, dtype)
    close(given[1], r, dtype)
    close(given[2], p, dtype)
    if scaled:
        close(given[3], z, dtype)
    close(sums, [rz / step, np.vdot(r.astype("c16"), z).real, np.vdot(r.astype("c16"), r).real, rz], dtype)
    update.set_direction(given[2], given[3] if scaled else given[1], sums)
    ratio = host(sums)[RZ] / rz
    close(given[2], z + ratio * p, dtype)


def test_nothing_is_left_of_r(place):
    make, updates_of = place
    x, r, p, q = (make(v) for v in (np.arange(4.0), np.zeros(4), np.zeros(4), np.zeros(4)))
    update, sums = updates_of(x), make(np.zeros(4))
    update.advance(x, r, p, q, None, sums)
    update.set_direction(p, r, sums)
    np.testing.assert_array_equal(host(x), np.arange(4))
    np.testing.assert_array_equal(host(p), 0)
    np.testing.assert_array_equal(host(sums), 0)


@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("n", LENGTHS)
def test_ranks(place, n, dtype):
    make, updates_of = place
    ranks, moved = (abs(v) for v in vectors(n, dtype, 2))
    here, sums = make(ranks), make(np.array([0.25, np.nan]))
    updates_of(here).set_ranks(here, make(moved), 0.85, 2.0 * n + 1, sums)
    expected = 0.85 * moved + (1 - 0.85 * 0.25) / (2 * n + 1)
    close(here, expected, dtype)
    assert host(sums)[KEPT] == 0.25
    close(sums[CHANGED], abs(expected - ranks).sum(), dtype)


def test_threads_that_take_many_elements(place):
    """Sums are of every element, with the same bits each time, by the same workspace."""
    make, updates_of = place
    x = np.random.default_rng(0).integers(-3, 4, LONG).astype(float)
    here, sums = make(x), make(np.zeros(4))
    update = updates_of(here)
    for _ in range(2):
        update.dot(here, here, sums[PQ:RZ])
        assert host(sums)[PQ] == x @ x
    others = [make(v) for v in (np.zeros(LONG), x, x)]
    sums = make(np.array([x @ x, x @ x, 0, 0]))
    update.advance(others[0], others[1], others[2], make(np.zeros(LONG)), None, sums)
    np.testing.assert_array_equal(host(others[0]), x)
    np.testing.assert_array_equal(host(sums), [x @ x, x @ x, x @ x, x @ x])
    assert (RZ, RR, BEFORE) == (1, 2, 3)
