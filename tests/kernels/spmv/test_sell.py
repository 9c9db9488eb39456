"""SELL-C-sigma on the host, the model, reorderings: SciPy is the oracle. The same on the GPU: test_sell_gpu."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from spdist.errors import InputError, MatrixError
from spdist.kernels.cuda import module
from spdist.kernels.spmv import parallel, reorder
from spdist.kernels.spmv.sell import build_cpu, sell
from spdist.kernels.spmv.sell.format import DIAGONAL, chunk_kinds, index_places
from spdist.kernels.spmv.sell.layout import chunk_occupancy, code_balance, sort_by_length
from spdist.matrices.csr import CSR
from tests.support.strategies import SMALL_INTS

OPTIONS = [
    {},
    {"lanes": 8},
    {"lanes": 24},
    {"height": 8},
    {"height": 1},
    {"height": 32, "sigma": 1},
    {"sigma": 64},
    {"sigma": 1 << 20, "lanes": 16},
    {"index": "wide"},
    {"index": "narrow"},
    {"block": 1},
    {"lanes": 4, "sigma": 1},
    {"block": 2},
    {"block": 3, "sigma": 1},
]


DTYPES = [  # of values, indices and offsets: kernels are compiled for 4 of the 16 choices
    (np.float32, np.int32, np.int32),
    (np.float64, np.int32, np.int64),
    (np.complex64, np.int64, np.int32),
    (np.complex128, np.int64, np.int64),
]


@st.composite
def any_csr(draw, dtype=np.float64, index=None, pointer=None):
    """Draw CSR with empty and full rows, unsorted duplicates, explicit zeros, int32 or int64 indices and offsets."""
    nrows, ncols = draw(st.integers(0, 70)), draw(st.integers(0, 40))
    row = st.just([])
    if ncols:
        row |= st.lists(st.integers(0, ncols - 1), max_size=4) | st.just(list(range(ncols)) * 2)
    rows = draw(st.lists(row, min_size=nrows, max_size=nrows))
    kinds = st.sampled_from([np.int32, np.int64])
    indices = np.array([j for r in rows for j in r], index or draw(kinds))
    values = draw(st.lists(SMALL_INTS, min_size=len(indices), max_size=len(indices)))
    indptr = np.cumsum([0, *map(len, rows)], dtype=pointer or draw(kinds))
    return CSR(indptr, indices, np.array(values, np.int64).astype(dtype), (nrows, ncols))


def dense(m: CSR) -> np.ndarray:
    out = np.zeros(m.shape, m.dtype)
    np.add.at(out, (np.repeat(np.arange(m.nrows), np.diff(m.indptr)), m.indices), m.data)
    return out


def blocks(side: int, count: int, seed: int) -> sp.csr_matrix:
    """Return a matrix of dense blocks with random values."""
    nodes = sp.random_array((count, count), density=0.1, random_state=seed, format="csr") + sp.eye_array(count)
    m = sp.kron(nodes, np.ones((side, side))).tocsr()
    m.data = np.random.default_rng(seed).random(m.nnz)
    return m


def stencil(n: int = 12) -> sp.csr_matrix:
    line = sp.diags_array([1.0, 2.0, 3.0], offsets=[-1, 0, 1], shape=(n, n))
    return sp.kron(sp.kron(line, line), line).tocsr()


def mixed() -> sp.csr_matrix:
    """Return a stencil below, between and above rows of far columns, of near ones, and of none."""
    rng = np.random.default_rng(8)
    n = 1 << 17
    far = sp.random_array((100, n), density=6 / n, rng=rng)
    near = sp.random_array((100, 200), density=0.03, rng=rng)
    parts = [stencil(10), far, stencil(9), near, sp.csr_matrix((70, n)), stencil(11)]
    return sp.vstack([sp.csr_matrix((p.data, p.coords), (p.shape[0], n)) for p in map(sp.coo_array, parts)]).tocsr()


LISTS = {
    "stencil": lambda: stencil(20),
    "line": lambda: sp.diags_array([1.0, 2.0, 3.0], offsets=[-40, 0, 7], shape=(3000, 3000)),
    "mixed": mixed,
    "none equal": lambda: sp.diags_array(np.arange(1.0, 901.0) * (np.random.default_rng(2).random((9, 900)) < 0.9),
                                         offsets=range(-4, 5), shape=(900, 900)).tocsr(),
    "empty": lambda: sp.csr_matrix((300, 40)),
    "no rows": lambda: sp.csr_matrix((0, 40)),
}  # fmt: skip
"""Matrices of chunks that keep diagonals, or not."""
SHARE_LISTS = build_cpu.share_lists


def collide(patch, change=lambda hashes: np.full_like(hashes, 5)) -> None:
    """Change the hashes of lists."""

    def share_lists(sizes):
        sizes[3] = np.where(sizes[3] >= 0, change(sizes[3]), -1)
        return SHARE_LISTS(sizes)

    patch.setattr(build_cpu, "share_lists", share_lists)


def collide_on_gpu(patch, folder, hashes="5") -> None:
    """Let kernels be made of a copy, in `folder`, of their sources, with other hashes of lists."""
    shutil.copytree(module.FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    text = (folder / "spmv/sell/build.cu").read_text()
    assert text.count("(i64)(d.hash >> 1)") == 1
    (folder / "spmv/sell/build.cu").write_text(text.replace("(i64)(d.hash >> 1)", hashes))
    module._module.cache_clear()
    patch.setattr(module, "FOLDER", folder)


def lists_of(a) -> list[tuple[int, bytes]]:
    """Return the place of each chunk's list of diagonals, and the list."""
    width, places = a.chunks[:, 2] >> 32, index_places(a.chunks)
    listed = np.flatnonzero(chunk_kinds(a.chunks) == DIAGONAL)
    return [(int(places[i]), a.wide[places[i] : places[i] + 2 * width[i]].tobytes()) for i in listed]


def guarded() -> np.ndarray:
    """Return an x of 4 elements, infinite first, with NaN on either side as far as 16-bit offsets reach."""
    memory = np.full(140_000, np.nan)
    memory[70_000:70_004] = [np.inf, 1.0, 1.0, 1.0]
    return memory[70_000:70_004]


def as_csr(m) -> CSR:
    m = m.tocsr()
    return CSR(m.indptr.astype(np.int64), m.indices, m.data, m.shape)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_product_and_back(options, data):
    dtype, *kinds = data.draw(st.sampled_from(DTYPES))
    m = data.draw(any_csr(dtype, *kinds))
    a = sell.build(m, **options)
    x = (np.arange(m.ncols * 3).reshape(-1, 3) % 7 - 3).astype(dtype)
    truth = dense(m)
    y = np.full(m.nrows, np.nan, dtype)
    np.testing.assert_array_equal(sell.multiply(a, x[:, 0].copy(), y), truth @ x[:, 0])
    np.testing.assert_array_equal(sell.multiply(a, x), truth @ x)
    back = sell.to_csr(a)
    np.testing.assert_array_equal(back.to_scipy().toarray(), truth)
    assert back.nnz == len(set(zip(np.repeat(np.arange(m.nrows), np.diff(m.indptr)), m.indices, strict=True)))


@pytest.mark.parametrize("side", [2, 3, 4, 6])
@pytest.mark.parametrize("lanes", [16, 32])
def test_dense_blocks_share_indices(side, lanes):
    m = blocks(side, 61, side)
    a = sell.build(as_csr(m), lanes=lanes, block=side)
    assert set(a.kind_counts()) == {"block_narrow"}
    assert sell.build(as_csr(m), lanes=lanes).nbytes > a.nbytes
    x = np.random.default_rng(1).standard_normal(m.shape[1])
    np.testing.assert_allclose(sell.multiply(a, x), m @ x, rtol=1e-12)
    assert abs(sell.to_csr(a).to_scipy() - m).max() == 0


def test_one_broken_block_leaves_its_chunk_to_entries():
    m = blocks(3, 61, 7).tolil()
    m[90, 90] = 0
    m = m.tocsr()
    m.eliminate_zeros()
    a = sell.build(as_csr(m), sigma=1, block=3)
    assert set(a.kind_counts()) > {"block_narrow"}
    x = np.random.default_rng(1).standard_normal(m.shape[1])
    np.testing.assert_allclose(sell.multiply(a, x), m @ x, rtol=1e-12)


def test_stencils_keep_diagonals():
    m = stencil()
    a = sell.build(as_csr(m), sigma=1)
    assert a.kind_counts()["diagonal"] == max(a.kind_counts().values())
    plain = sell.build(as_csr(m), sigma=1, index="wide")
    assert a.nbytes < 0.75 * plain.nbytes
    x = np.random.default_rng(1).standard_normal(m.shape[1])
    np.testing.assert_allclose(sell.multiply(a, x), m @ x, rtol=1e-12)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize(("lanes", "dtype"), [(32, "f8"), (32, "f4"), (16, "c16"), (24, "f8"), (8, "c8")])
def test_chunks_of_equal_lists_share_one(monkeypatch, name, lanes, dtype):
    m = as_csr(LISTS[name]().astype(dtype))
    a = sell.build(m, lanes=lanes, sigma=1)
    monkeypatch.setattr(build_cpu, "FEW_LISTS", 1)
    apart = sell.build(m, lanes=lanes, sigma=1)
    lists = lists_of(a)
    listed = [pairs for _, pairs in lists]
    assert listed == [pairs for _, pairs in lists_of(apart)]
    assert len({place for place, pairs in lists if pairs}) == len({pairs for pairs in listed if pairs})
    assert not any(place % 8 for place, _ in lists)
    rooms = [sum(len(pairs) + 31 & -32 for pairs in some) for some in (listed, set(listed))]
    assert apart.wide.nbytes - a.wide.nbytes == rooms[0] - rooms[1]
    assert (a.nbytes < apart.nbytes) == (name in ("stencil", "line", "mixed"))
    for array in ("values", "narrow"):
        np.testing.assert_array_equal(getattr(a, array), getattr(apart, array))
    x = (np.arange(2 * m.ncols).reshape(-1, 2) % 7 - 3).astype(dtype)
    np.testing.assert_array_equal(sell.multiply(a, x), m.to_scipy() @ x)
    np.testing.assert_array_equal(sell.multiply(a, x[:, 0].copy()), m.to_scipy() @ x[:, 0])
    back, wanted = sell.to_csr(a), sell.to_csr(apart)
    for array in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(back, array), getattr(wanted, array))


@pytest.mark.parametrize("name", LISTS)
def test_different_lists_of_one_hash(monkeypatch, name):
    m = as_csr(LISTS[name]())
    right = sell.build(m, sigma=1, threads=2)
    with monkeypatch.context() as patch:
        patch.setattr(build_cpu, "FEW_LISTS", 1)
        apart = sell.build(m, sigma=1)
    collide(monkeypatch)
    a = sell.build(m, sigma=1, threads=2)
    few = len({pairs for _, pairs in lists_of(a)}) <= 1
    for array in ("chunks", "values", "wide", "narrow"):
        np.testing.assert_array_equal(getattr(a, array), getattr(right if few else apart, array))


def test_different_hashes_in_one_place(monkeypatch):
    """The first list is shared, the others are not."""
    m = as_csr(stencil(20))
    collide(monkeypatch, lambda hashes: hashes >> 20 << 20)
    lists = lists_of(a := sell.build(m, sigma=1))
    assert len({place for place, pairs in lists}) == 1 + sum(pairs != lists[0][1] for _, pairs in lists)
    x = np.arange(m.ncols) % 7 - 3.0
    np.testing.assert_array_equal(sell.multiply(a, x), m.to_scipy() @ x)


def test_few_lists_stay_apart():
    far = sp.random_array((4000, 1 << 17), density=1e-4, rng=np.random.default_rng(3))
    near = sp.eye_array(300, 1 << 17)
    a = sell.build(as_csr(sp.vstack([far, near])), sigma=1)
    places = [place for place, _ in lists_of(a)]
    assert 1 < len(places) == len(set(places))


def test_far_columns_take_32_bits():
    m = sp.random_array((64, 1 << 20), density=2e-4, rng=np.random.default_rng(3), format="csr")
    a = sell.build(as_csr(m), lanes=16)
    assert "wide" in a.kind_counts()
    x = np.random.default_rng(1).standard_normal(m.shape[1])
    np.testing.assert_allclose(sell.multiply(a, x), m @ x, rtol=1e-12)


def test_long_rows_are_cut_into_pieces():
    m = sp.random_array((400, 9000), density=0.001, random_state=3, format="lil")
    m[7] = np.arange(9000) % 5 + 1
    m[300, ::2] = 2
    m = m.tocsr()
    a = sell.build(as_csr(m), lanes=16, threads=2)
    assert len(a.long_rows) == 2
    assert len(a.pieces) == 1 + 5 + 3
    x = np.random.default_rng(1).integers(-4, 5, (9000, 2)).astype(float)
    np.testing.assert_allclose(sell.multiply(a, x, threads=2), m @ x, rtol=1e-12)
    np.testing.assert_allclose(sell.multiply(a, x[:, 0].copy(), threads=2), m @ x[:, 0], rtol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(513, 545) | st.integers(0, 30), min_size=1, max_size=12),
    st.sampled_from([np.float32, np.float64]),
    st.sampled_from([8, 16, 32]),
)
def test_long_rows_of_all_lengths(lengths, dtype, lanes):
    ncols = 1 << 17  # columns of 32 bits, for x to be fetched ahead
    rng = np.random.default_rng(len(lengths))
    columns = np.concatenate([np.sort(rng.choice(ncols, n, replace=False)) for n in lengths]).astype(np.int32)
    m = CSR(
        np.append(0, np.cumsum(lengths)),
        columns,
        rng.integers(-4, 5, len(columns)).astype(dtype),
        (len(lengths), ncols),
    )
    x = np.full(ncols, np.nan, np.float64)  # an element that no row asks for would show
    x[columns] = rng.integers(-4, 5, len(columns))
    truth = [m.data[i:j].astype(np.float64) @ x[m.indices[i:j]] for i, j in itertools.pairwise(m.indptr)]
    a = sell.build(m, lanes=lanes)
    assert len(a.long_rows) == sum(n > 512 for n in lengths)
    np.testing.assert_array_equal(sell.multiply(a, x, np.full(m.nrows, np.nan)), truth)
    np.testing.assert_array_equal(sell.multiply(a, np.stack([x, x], axis=1)), np.stack([truth, truth], axis=1))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 90), st.sampled_from([1, 64]), st.sampled_from([8, 16, 24, 32]), st.integers(0, 2**32 - 1))
def test_every_height_gives_the_same_sums(nrows, sigma, lanes, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 12, nrows)
    columns = np.concatenate([np.sort(rng.choice(1 << 18, n, replace=False)) for n in lengths]).astype(np.int32)
    values = rng.standard_normal(len(columns))
    m = CSR(np.append(0, np.cumsum(lengths)), columns, values, (nrows, 1 << 18))
    x = rng.standard_normal(1 << 18)
    one = sell.multiply(sell.build(m, height=1, lanes=1), x)
    np.testing.assert_array_equal(sell.multiply(sell.build(m, lanes=lanes, sigma=sigma), x), one)


def test_results_may_be_strided():
    m = stencil(8)
    x, y = np.random.default_rng(1).standard_normal(m.shape[1]), np.zeros(2 * m.shape[0])
    sell.multiply(sell.build(as_csr(m), lanes=16, sigma=1), x, y[::2])
    np.testing.assert_allclose(y[::2], m @ x, rtol=1e-12)
    assert not y[1::2].any()


def test_padding_is_not_multiplied():
    m = sp.csr_array((np.ones(3), np.array([1, 2, 3]), np.array([0, 2, 3])), shape=(2, 4))
    for options in OPTIONS:
        np.testing.assert_array_equal(sell.multiply(sell.build(as_csr(m), **options), guarded()), [2.0, 1.0])


def test_threads_give_the_same_bits():
    m = as_csr(stencil(32))
    one, two = sell.build(m, lanes=16), sell.build(m, lanes=16, threads=3)
    for name in ("chunks", "values", "wide", "narrow"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    x = np.random.default_rng(1).standard_normal(m.ncols)
    np.testing.assert_array_equal(sell.multiply(one, x), sell.multiply(two, x, threads=3))


def test_values_may_be_stored_narrower():
    m = as_csr(stencil())
    a = sell.build(m, dtype=np.float32)
    x = np.random.default_rng(1).standard_normal(m.ncols)
    assert a.dtype == np.float32
    assert sell.multiply(a, x).dtype == np.float64
    np.testing.assert_allclose(sell.multiply(a, x), m.to_scipy() @ x, rtol=1e-6)


def test_what_cannot_be_built_is_refused():
    m = as_csr(stencil(3))
    with pytest.raises(InputError, match="C = 5 rows of a chunk must divide its 32 lanes"):
        sell.build(m, height=5)
    with pytest.raises(MatrixError, match="up to 32 lanes"):
        sell.build(m, lanes=64)
    with pytest.raises(MatrixError, match="use CSR"):
        sell.build(CSR(np.zeros(2, np.int64), np.empty(0, np.int64), np.empty(0), (1, 1 << 40)))


@given(st.lists(st.integers(0, 9), max_size=50), st.integers(1, 60))
def test_sorting_stays_within_its_windows(lengths, sigma):
    lengths = np.array(lengths, np.int64)
    order = sort_by_length(lengths, sigma)
    for start in range(0, len(lengths), sigma):
        window = order[start : start + sigma]
        assert sorted(window) == list(range(start, min(start + sigma, len(lengths))))
        assert all(np.diff(lengths[window]) <= 0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=50), st.sampled_from([1, 2, 8]), st.sampled_from([1, 8, 64]))
def test_modelled_occupancy_equals_the_built_matrix(lengths, height, sigma):
    indptr = np.append(0, np.cumsum(lengths))
    m = CSR(indptr, np.zeros(indptr[-1], np.int32), np.ones(indptr[-1]), (len(lengths), 9))
    a = sell.build(m, height=height, lanes=height, sigma=sigma, index="wide", block=1)
    assert a.beta == pytest.approx(chunk_occupancy(np.array(lengths), height, sigma))


def test_code_balance_is_the_papers():
    assert code_balance(1.0, 1 / 10, 10.0) == pytest.approx(6 + (8 * 0.1 + 16 / 10) / 2)
    assert code_balance(0.5, 1.0, 10.0, index_bytes=2) == pytest.approx(10 + (8 + 16 / 10) / 2)


@pytest.mark.parametrize("order", [reorder.levels, reorder.popular])
def test_orders_are_permutations_and_keep_the_product(order):
    m = as_csr(blocks(1, 60, 3))
    places = order(m)
    np.testing.assert_array_equal(np.sort(places), np.arange(60))
    moved = reorder.apply(m, places, places)
    x = np.random.default_rng(1).standard_normal(60)
    np.testing.assert_allclose((moved.to_scipy() @ x[places]), (m.to_scipy() @ x)[places], rtol=1e-12)
    np.testing.assert_array_equal(reorder.inverse(places)[places], np.arange(60))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 1 << 20), max_size=60),
    st.integers(1, 20),
    st.sampled_from(["begin at once", "begin late"]),
)
def test_ranges_for_threads_cover_all(weights, threads, others):
    """Each item belongs to one range, also if no other thread begins before all is done."""
    seen: list[int] = []
    late: list[Callable[[], None]] = []
    with pytest.MonkeyPatch.context() as patch:
        if others == "begin late":
            patch.setattr(parallel, "begin_in_thread", late.append)
        parallel.in_parallel(lambda start, stop: seen.extend(range(start, stop)), np.cumsum([1, *weights]), threads)
    for begin in late:
        begin()
    assert sorted(seen) == list(range(len(weights) + 1))


@pytest.mark.parametrize("threads", [1, 2])
def test_what_fails_in_a_thread_fails(threads):
    def work(start, stop):
        raise ValueError(f"[{start}:{stop})")

    with pytest.raises(ValueError, match=r"\[\d+:\d+\)"):  # of whichever thread was first
        parallel.in_parallel(work, np.arange(1, 101), threads)
