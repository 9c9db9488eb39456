"""Products larger than the memory limit of a GPU, against SciPy."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_array_equal

import spdist
from spdist.errors import MatrixError, MemoryBoundError
from spdist.kernels.bsr import multiply_cpu as bsr_cpu
from spdist.kernels.cpu import multiply as cpu
from spdist.kernels.streaming import pipeline
from spdist.matrices.bsr import from_rows
from spdist.matrices.bsr import from_scipy as from_scipy_blocks
from spdist.matrices.csr import CSR, from_scipy
from tests.conftest import random_matrix
from tests.kernels.bsr.test_multiply_cpu import assert_is_block_product, block_matrix

pytestmark = pytest.mark.gpu


def assert_product(c: CSR, a: CSR, b: CSR) -> None:
    d = cpu.multiply(a, b, engine="scipy")
    assert c.shape == d.shape
    assert_array_equal(c.indptr, d.indptr)
    assert_array_equal(c.indices, d.indices)
    scale = cpu.multiply(*(CSR(m.indptr, m.indices, abs(m.data), m.shape) for m in (a, b)), engine="scipy").data
    assert np.all(abs(c.data - d.data) <= np.finfo(d.dtype).eps * 64 * scale)


def gpu(memory_limit, **options):
    from spdist.kernels.streaming.gpu_device import Gpu

    return Gpu(memory_limit, **options)


def matrices():
    banded = sp.diags_array([np.linspace(1, 2, 60_000)] * 27, offsets=range(-13, 14), shape=(60_000, 60_000))
    skewed = random_matrix(20_000, 20_000, 6.0, 4).tolil()
    skewed[11] = 1.5
    return {
        "random": random_matrix(60_000, 60_000, 12.0, 3),
        "banded": sp.csr_matrix(banded),
        "skewed": skewed.tocsr(),
        "tiny": random_matrix(7, 7, 2.0, 5),
    }


@pytest.mark.parametrize("megabytes", [24, 64, 1024])
@pytest.mark.parametrize("name", ["random", "banded", "skewed", "tiny"])
def test_equals_scipy_within_the_limit(name, megabytes):
    a = from_scipy(matrices()[name])
    device = gpu(megabytes << 20)
    assert_product(pipeline.multiply(a, a, device), a, a)
    assert device.peak <= megabytes << 20


@pytest.mark.parametrize("name", ["random", "banded", "skewed"])
@pytest.mark.parametrize("pack", [True, False])
def test_columns_come_back_packed(name, pack):
    from spdist.kernels.streaming.gpu_memory import GpuTuning
    from spdist.kernels.streaming.packing import PackingCosts

    tuning = GpuTuning(least_packed=1000, packing=PackingCosts(worth=1e9))
    a, device = from_scipy(matrices()[name]), gpu(256 << 20, pack=pack, tuning=tuning)
    stages = []
    assert_product(pipeline.multiply(a, a, device, report=stages.append), a, a)
    packed, back = ([stage for stage in stages if stage.name == step] for step in ("pack", "download"))
    assert bool(packed) == pack
    if pack:  # one block more in which C is too small, and the sample's, may be plain
        saved = sum(stage.nbytes for stage in packed) - (1 << 16)
        assert sum(stage.nbytes for stage in back) < cpu.multiply(a, a).nnz * 12 - saved / 4


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_dtypes_rectangles_and_capacity(dtype):
    a, b = (from_scipy(random_matrix(*shape, 5.0, 6).astype(dtype)) for shape in ((900, 400), (400, 3000)))
    device = gpu(64 << 20, deterministic=True)
    assert_product(pipeline.multiply(a, b, device), a, b)
    c = pipeline.multiply_rows(a, b, device, pipeline.RowSlice(100, 500))
    assert_product(c, a.rows(100, 100 + c.nrows), b)
    assert 0 < c.nrows < 800


def test_b_is_sent_once(monkeypatch):
    tuning = pipeline.PipelineTuning(small_products=0)  # else it comes with its only block
    a = from_scipy(random_matrix(5000, 5000, 5.0, 7))
    device = gpu(1 << 30)
    sent = []
    uploader = device.context.uploader
    send = uploader.send
    monkeypatch.setattr(uploader, "send", lambda *args: (sent.extend(args), send(*args)))
    for _ in range(3):
        assert_product(pipeline.multiply(a, a, device, tuning=tuning), a, a)
    assert len(sent) == 3
    other = CSR(a.indptr, a.indices, 2 * a.data, a.shape)
    assert_product(pipeline.multiply(a, other, device), a, other)


def test_results_outlive_the_next_product():
    a = from_scipy(random_matrix(3000, 3000, 5.0, 8))
    device = gpu(256 << 20)
    first = pipeline.multiply(a, a, device)
    kept = first.data.copy()
    pipeline.multiply(CSR(a.indptr, a.indices, -a.data, a.shape), a, device)
    assert_array_equal(first.data, kept)


def test_deterministic_whatever_the_limit():
    a = from_scipy(matrices()["skewed"])
    bits = [pipeline.multiply(a, a, gpu(mb << 20, deterministic=True)).data for mb in (48, 512)]
    assert_array_equal(bits[0].view(np.uint64), bits[1].view(np.uint64))


def test_refusals():
    wide = from_scipy(sp.csr_array(np.ones((2, 3000))))
    with pytest.raises(MemoryBoundError, match="row 0 of A expands to 9,000,000 products"):
        pipeline.multiply(wide, from_scipy(sp.csr_array(np.ones((3000, 3000)))), gpu(16 << 20))
    a = from_scipy(sp.csr_array(np.eye(4, dtype=np.int16)))
    with pytest.raises(MatrixError, match="int16 is not multiplied on the GPU"):
        pipeline.multiply(a, a, gpu(64 << 20))
    b = CSR(np.array([0, 2]), np.array([1, 0], np.int32), np.ones(2), (1, 2))
    with pytest.raises(MatrixError, match="not sorted"):
        pipeline.multiply(from_scipy(sp.csr_array(np.ones((1, 1)))), b, gpu(64 << 20))


def test_a_gpu_in_use_by_others_makes_smaller_blocks(caplog):
    import cupy

    a = from_scipy(random_matrix(5000, 5000, 5.0, 9))
    free = cupy.cuda.runtime.memGetInfo()[0]
    taken = cupy.cuda.Memory(free - (900 << 20))
    try:
        device = gpu(4 << 30)
        assert_product(pipeline.multiply(a, a, device), a, a)
    finally:
        del taken
    assert "another program uses it" in caplog.text


@pytest.mark.parametrize("megabytes", [16, 64, 1024])
@pytest.mark.parametrize("sides", [(2, 2, 2), (3, 3, 3), (6, 6, 6), (8, 2, 5)])
def test_values_that_are_blocks(sides, megabytes):
    a, b = block_matrix(9000, 8000, 6.0, sides[:2], 1, "float32"), block_matrix(8000, 9000, 6.0, sides[1:], 2)
    device = gpu(megabytes << 20, pack=True)
    c, d = from_rows(pipeline.multiply(a.rows(), b.rows(), device)), bsr_cpu.multiply(a, b)
    for x, y in ((c.indptr, d.indptr), (c.indices, d.indices), (c.data, d.data)):
        assert_array_equal(x, y)
    assert device.peak <= megabytes << 20


def test_block_matrices_from_host_to_host():
    a = block_matrix(5000, 5000, 6.0, (3, 3), 1)
    for m in (a, a.to_scipy()):
        c = spdist.matmul(m, m, engine="cuda", memory_limit="8MiB")
        assert type(c) is type(m)
    assert_is_block_product(from_scipy_blocks(c), a, a)


@pytest.mark.parametrize("megabytes", [128, 1024])
def test_operands_of_a_second_product_are_locked_where_they_are(monkeypatch, megabytes):
    """Other code copies locked arrays like any array, and they are unlocked when they are deleted."""
    import cupy

    from spdist.kernels.cuda import host_registration

    # From 32 MiB on, pages are an array's own.
    tuning = host_registration.RegistrationTuning(least_bytes=33 << 20, least_rate=0)
    note = host_registration.note_operands
    monkeypatch.setattr(host_registration, "note_operands", lambda arrays: note(arrays, tuning))
    bands = sp.diags_array([np.linspace(1, 2, 1_100_000)] * 9, offsets=range(-4, 5), shape=(1_100_000,) * 2)
    a, b = from_scipy(sp.csr_array(bands)), from_scipy(sp.csr_array(bands))
    device = gpu(megabytes << 20)
    locked = []
    for _ in range(3):
        assert_product(pipeline.multiply(a, b, device), a, b)
        locked.append(all(map(device.is_locked, (a.indices, a.data))))
    assert locked == [False, True, True]
    assert_array_equal(cupy.asarray(a.data[100:-100]).get(), a.data[100:-100])
    addresses = {m.ctypes.data for m in (a.indices, a.data)}
    assert addresses <= host_registration._owned.keys()
    cupy.cuda.alloc_pinned_memory(1)  # has CuPy let go of what it copied from
    del a
    gc.collect()
    assert not addresses & host_registration._owned.keys()
