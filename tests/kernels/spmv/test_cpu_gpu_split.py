"""Rows shared by a GPU and the host: products, and the share; with a GPU that does all as late as it may."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.errors import InputError, MatrixError
from spdist.kernels.cuda.cuda_graph import Steps
from spdist.kernels.spmv import cpu_gpu_split
from spdist.kernels.spmv.cpu_gpu_split import Cuts, Forms, PreparedSplit
from spdist.kernels.spmv.prepared import PreparedSell
from spdist.kernels.spmv.sell import sell
from spdist.operators import choice, partitioned
from spdist.operators.operator import csr_of
from tests.conftest import random_matrix
from tests.kernels.spmv.test_sell import stencil
from tests.support import late_cupy
from tests.support.cpus import pretend_cpus
from tests.support.late_cupy import Late, Stream, array, on_gpu


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    monkeypatch.setattr(cpu_gpu_split, "pinned", lambda size: np.full(size, 0xA5, np.uint8))
    monkeypatch.setattr(cpu_gpu_split.multiply_gpu, "gather", late_cupy.gather)
    return late_cupy.install(monkeypatch)


def in_sell(rows) -> PreparedSell:
    return PreparedSell(sell.build(rows, lanes=16))


def forms(alone: float = 1.0, dtype: str = "f8") -> Forms:
    return Forms(Late, in_sell, lambda: alone, np.dtype(dtype), 2)


def shared(m: sp.csr_array, cut: int) -> PreparedSplit:
    return cpu_gpu_split._cut(Cuts(on_gpu(m)), cut, forms(), gpu=True)


def with_long_rows() -> sp.csr_array:
    m = random_matrix(300, 200, 4.0, 3).tolil()
    m[250], m[298] = 1.0, 2.0
    m[299] = 0
    return sp.csr_array(m)


MATRICES = {
    "stencil": lambda: stencil(8),  # a range of x
    "random": lambda: random_matrix(300, 3000, 4.0, 1),  # x is gathered
    "long rows": with_long_rows,
    "rows of nothing": lambda: sp.csr_array(([1.0], ([0], [2])), shape=(40, 5)),
    "no columns": lambda: sp.csr_array((6, 0)),
}


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("kind", MATRICES)
def test_products_equal_scipys(kind, dtype):
    m = sp.csr_array(MATRICES[kind]()).astype(dtype)
    rng = np.random.default_rng(1)
    for cut in (1, m.shape[0] // 2, m.shape[0] - 1):
        a = shared(m, cut)
        for columns in ((), (1,), (4,), (0,), (2,)):
            x, z = (rng.integers(-3, 4, (m.shape[1], *columns)).astype(dtype) for _ in range(2))
            here, out = array(x), array(np.full((m.shape[0], *columns), np.nan, dtype))
            first = a.multiply(here, None, 2)
            Stream.current.give(lambda here=here, z=z: here.__setitem__(..., z))
            assert a.multiply(here, out, 2) is out
            Stream.current.synchronize()
            np.testing.assert_allclose(np.asarray(first), m @ x, rtol=1e-6, err_msg=f"{cut} {columns}")
            np.testing.assert_allclose(np.asarray(out), m @ z, rtol=1e-6)


def test_only_what_is_asked_for_goes_to_the_host():
    m = stencil(8)
    near, far = shared(m, 448), shared(sp.csr_array(random_matrix(300, 3000, 4.0, 1)), 290)
    assert near.columns is None
    assert (near.low, near.high) == (384, 512)
    asked = np.unique(random_matrix(300, 3000, 4.0, 1)[290:].indices)
    np.testing.assert_array_equal(np.asarray(far.columns), asked)
    assert f"reads {len(asked):,} elements of x" in far.describe()
    assert "448 rows on the GPU (CSR), 64 on the host (SELL-16" in near.describe()


@pytest.mark.parametrize("kind", MATRICES)
def test_nothing_of_the_matrix_is_lost(kind):
    m = sp.csr_array(MATRICES[kind]())
    cuts = Cuts(on_gpu(m))
    for share in (0.0, 0.1, 0.5, 1.0):
        cut = cuts.row(share)
        assert 0 < cut < m.shape[0]
        whole = sp.vstack([late_cupy.host_matrix(cuts.before(cut)), cuts.after(cut).to_scipy()])
        assert abs(whole - m).max() == 0 if m.nnz else not whole.nnz
        back = csr_of(shared(m, cut))
        assert abs(back.to_scipy() - m).nnz == 0
        assert back.nnz == m.nnz


def test_a_share_is_of_entries_and_rows():
    m = sp.csr_array(np.vstack([np.zeros((100, 99)), np.ones((100, 99))]))
    cuts = Cuts(on_gpu(m))
    assert cuts.row(0.5) == 150
    assert cuts.share(cuts.row(0.25)) == pytest.approx(0.25, abs=0.01)
    assert cuts.row(0.0) == 199
    assert cuts.row(1.0) == 1


def test_more_columns_than_32_bits_are_refused():
    m = on_gpu(sp.csr_array((2, 2)))
    with pytest.raises(MatrixError, match=r"32-bit columns, the matrix is 2 x 2,147,483,648: choose method='csr'"):
        Cuts(type(m)(m.indptr, m.indices, m.data, (2, 1 << 31)))


def test_the_host_is_done_when_the_gpu_is():
    alone, fixed = 100e-6, 20e-6
    asked = []

    def chain(share: float) -> float:
        asked.append(share)
        return fixed + 900e-6 * share

    share = cpu_gpu_split.balance(alone, fixed, chain)
    assert fixed + 900e-6 * share == pytest.approx(alone * (1 - share))
    assert asked[0] == cpu_gpu_split.FIRST_SHARE
    assert asked[1:] == [share]  # and not a third time


def test_a_host_that_is_slower_with_more_is_timed_again():
    alone, fixed = 100e-6, 20e-6

    def chain(share: float) -> float:  # the host's cache is too small for more
        return fixed + 500e-6 * share + (400e-6 if share > 0.1 else 0) * (share - 0.1)

    share = cpu_gpu_split.balance(alone, fixed, chain)
    assert chain(share) == pytest.approx(alone * (1 - share), rel=0.1)
    assert cpu_gpu_split.balance(alone, fixed, lambda share: fixed) == pytest.approx(0.8)
    assert cpu_gpu_split.balance(alone, fixed, lambda share: 0.0) == pytest.approx(0.8)


def test_a_gain_is_more_than_the_noise():
    steady = [1.0, 1.01, 0.99, 1.0, 1.01, 0.99, 1.0, 1.0, 5.0]
    assert cpu_gpu_split.wins([0.9 * t for t in steady], steady)
    assert not cpu_gpu_split.wins(steady, steady)
    assert not cpu_gpu_split.wins([0.99 * t for t in steady], steady)
    assert not cpu_gpu_split.wins([0.5, 0.5, 0.5, 0.5, 1.5, 1.5, 1.5, 1.5, 1.5], steady)


class Clock:
    """Made-up seconds of the host and of the shared product."""

    def __init__(self, monkeypatch, fixed: float, all_rows: float, gain: float = 0.0) -> None:
        self.fixed, self.all_rows, self.gain = fixed, all_rows, gain
        monkeypatch.setattr(cpu_gpu_split, "_seconds", self.seconds)

    def seconds(self, product, vectors, threads) -> float:
        product.multiply(*vectors, threads)
        if product.device is not None:
            return 1.0 - self.gain
        host = product.host.matrix.nnz / stencil(8).nnz
        return self.fixed + (self.all_rows * host if product.cut < 511 else 0)


@pytest.mark.parametrize(("fixed", "gain", "said"), [
    (1.5, 0.5, "the GPU alone, 1,000,000.0 us: copies to the host and back take 1,500,000.0 us for a single row"),
    (0.1, 0.0, "the GPU alone, 1,000,000.0 us: with 8.3% of the matrix on the host, threads=2, 1,000,000.0 us, no g"),
    (0.1, 0.1, "8.3% of the matrix on the host, threads=2: 900,000.0 us, the GPU alone 1,000,000.0 us"),
])  # fmt: skip
def test_it_is_shared_where_that_pays(monkeypatch, fixed, gain, said):
    m = stencil(8)
    Clock(monkeypatch, fixed, 10.0, gain)
    product, why = cpu_gpu_split.prepare(on_gpu(m), forms())
    assert said in why
    assert (product is not None) == (gain == 0.1)
    if product is not None:
        assert 1 - product.device.matrix.nnz / m.nnz == pytest.approx(0.9 / 11, abs=0.01)


@pytest.mark.parametrize("shape", [(0, 5), (1, 5), (5, 5)])
def test_there_may_be_nothing_to_share(shape):
    product, why = cpu_gpu_split.prepare(on_gpu(sp.csr_array(shape)), forms())
    assert product is None
    assert why == f"the GPU alone: {shape[0]} rows with 0 entries are not to be shared"


def test_times_are_of_all_that_the_gpu_has_to_do(monkeypatch):
    m, asked = stencil(8), []
    y, x = array(np.full(512, np.nan)), array(np.ones(512))

    def clock() -> float:
        asked.append((Stream.current.done, len(Stream.current.given)))
        return float(len(asked))

    monkeypatch.setattr(cpu_gpu_split.time, "perf_counter", clock)
    assert cpu_gpu_split._seconds(shared(m, 400), (x, y), 1) == 1 / cpu_gpu_split.PRODUCTS
    assert [done == given for done, given in asked] == [True, True]
    assert 0 < asked[0][0] < asked[1][0]
    np.testing.assert_allclose(np.asarray(y), m @ np.ones(512))


def test_memory_is_not_let_go_while_a_copy_is_under_way(monkeypatch):
    m, taken = stencil(8), []
    a = shared(m, 400)
    stream = a._transfers.stream

    def memory(size):
        taken.append(stream.done == len(stream.given))
        return np.full(size, 0xA5, np.uint8)

    def fails(*arguments):
        raise MemoryError

    monkeypatch.setattr(cpu_gpu_split, "pinned", memory)
    with monkeypatch.context() as patch:
        patch.setattr(Late, "multiply", fails)
        with pytest.raises(MemoryError):
            a.multiply(array(np.ones(512)), None, 1)
    y = a.multiply(array(np.ones((512, 3))), None, 1)
    assert taken == [True] * 3
    assert stream.done < len(stream.given)
    del a
    gc.collect()
    assert stream.done == len(stream.given)
    Stream.current.synchronize()
    np.testing.assert_allclose(np.asarray(y), m @ np.ones((512, 3)))


def test_a_graph_does_not_hold_it_and_steps_say_why(cupy):
    m = stencil(8)
    a, x, y = shared(m, 400), array(np.ones(512)), array(np.zeros(512))
    with Steps(cupy, lambda: a.multiply(x, y, 1), 2, lambda captured: captured) as steps:
        for _ in range(3):
            steps.take(2)
    assert steps.launched.startswith("one by one: rows from 400 on are multiplied by cores of the host, which a CUDA")
    np.testing.assert_allclose(np.asarray(y), m @ np.ones(512))


# -- as an operator ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_forms(monkeypatch):
    """Let the GPU have one form, which takes a second."""
    makers = choice.makers_for

    def of_either(m, threads, stored):
        if not choice.is_on_gpu(m.data):
            return makers(m, threads, stored)
        data = array(np.asarray(m.data, stored))
        form = Late(type(m)(m.indptr, m.indices, data, m.shape))
        return {"sell": lambda: form, "csr": lambda: form}

    monkeypatch.setattr(choice, "makers_for", of_either)
    monkeypatch.setattr(choice, "gpu_seconds", lambda *arguments: 1.0)


def check(a, m, rtol: float = 1e-12) -> None:
    x = np.random.default_rng(1).standard_normal((m.shape[1], 4))
    for one in (x, x[:, 0].copy(), x + 1j * x):
        y = a @ array(one)
        Stream.current.synchronize()
        np.testing.assert_allclose(np.asarray(y), m @ one, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("stored", [None, "float32"])
@pytest.mark.parametrize("gain", [0.1, 0.0])
def test_an_operator_saved_and_opened(monkeypatch, tmp_path, gpu_forms, gain, stored):
    m = stencil(8)
    m.data = m.data + np.random.default_rng(1).random(m.nnz)
    Clock(monkeypatch, 0.1, 10.0, gain)
    a = spdist.operator(late_cupy.CupyxMatrix(m), "hybrid", uses=1, threads=2, dtype=stored)
    assert (a.method, a.threads, a.dtype) == ("hybrid", 2, np.float64)
    assert a.why.startswith(
        "hybrid: 8.3% of the matrix on" if gain else "hybrid: the GPU alone, 1,000,000.0 us: with 8.3%"
    )
    assert isinstance(a.prepared, PreparedSplit) == (gain > 0)
    assert ("457 rows on the GPU" in repr(a)) == (gain > 0)
    monkeypatch.setattr(choice, "DEFAULT_USES", 1)
    a.save(tmp_path / "a.zarr")
    with pytest.raises(InputError, match="shared by a GPU and cores: open it with on_gpu=True"):
        spdist.open_operator(tmp_path / "a.zarr")
    Clock(monkeypatch, 0.1, 10.0, 0.1)
    b = spdist.open_operator(tmp_path / "a.zarr", on_gpu=True, threads=1)
    assert b.why.startswith("hybrid: 8.3% of the matrix on the host, threads=1")
    assert b._source.dtype == b.dtype == np.float64  # for an adjoint that is prepared as it was
    for one in (a, b):
        check(one, m, 1e-12 if stored is None else 1e-5)
        assert one.to_csr().dtype == np.dtype(stored or "float64")
        assert abs(one.to_csr().to_scipy() - m.astype(stored or "float64")).max() == 0


def test_matrices_of_the_host_are_refused():
    with pytest.raises(InputError, match=r"'hybrid' is not for this matrix on the CPU: .*pass a matrix of CuPy's"):
        spdist.operator(stencil(3), "hybrid")
    with pytest.raises(InputError) as refused:
        spdist.operator(stencil(3), "csr")
    assert "CuPy" not in str(refused.value)


def test_parts_of_one_host_share_its_cores(monkeypatch, cupy):
    m, asked = on_gpu(stencil(3)), []
    empty = on_gpu(sp.csr_array((0, 27)))
    share = SimpleNamespace(rank=0, rows=np.arange(27), inner=m, outer=empty)
    cupy.zeros = lambda shape, dtype: array(np.zeros(shape, dtype))
    monkeypatch.setattr(partitioned, "NcclHaloExchange", lambda *arguments: None)
    monkeypatch.setattr(partitioned.cupy_operands, "to_cupyx_any", lambda matrix: matrix)
    monkeypatch.setattr(partitioned, "operator", lambda *given, **options: asked.append((given[1], options)))
    pretend_cpus(monkeypatch, 13)
    for on_this_host in (1, 4, 20):
        partitioned._join_gpus(share, 20, None, on_this_host, {"method": "hybrid", "uses": 7})
    assert asked == [("hybrid", {"uses": 7, "threads": threads}) for threads in (13, 3, 1)]
