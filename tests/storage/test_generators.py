"""Generated matrices: the stencils against SciPy's Kronecker sums, the random ones against their statistics."""

import inspect

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from spdist.errors import InputError
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR
from spdist.storage import external_sort, groups
from spdist.storage import generators as module
from spdist.storage.generators import KINDS, generate
from spdist.storage.matrix import StoredMatrix
from spdist.stores.registry import at

SMALL = {
    "poisson": {"dims": (4, 5, 6)},
    "rmat": {"scale": 7},
    "erdos-renyi": {"nrows": 90, "ncols": 70},
    "banded": {"n": 50, "bandwidth": 3},
    "fem-blocks": {"dims": (2, 3, 4), "dof": 2},
}


def whole(matrix: StoredMatrix) -> CSR:
    block = matrix.rows(0, matrix.nrows)
    check_canonical(block)
    return block


def made(folder, kind, **parameters) -> CSR:
    return whole(generate(kind, folder / "a.zarr", overwrite=True, **parameters))


def star(dims) -> sp.csr_array:
    """Laplacian as the Kronecker sum of one-dimensional ones."""
    total = sp.csr_array((1, 1))
    for n in dims:
        line = sp.diags_array([-np.ones(n - 1), 2 * np.ones(n), -np.ones(n - 1)], offsets=[-1, 0, 1], shape=(n, n))
        total = sp.kron(total, sp.eye_array(n)) + sp.kron(sp.eye_array(total.shape[0]), line)
    return sp.csr_array(total)


def box(dims, block=1) -> sp.csr_array:
    """Ones wherever two nodes are neighbours in the full stencil."""
    total = sp.csr_array(np.ones((1, 1)))
    for n in dims:
        total = sp.kron(total, sp.diags_array([1.0, 1.0, 1.0], offsets=[-1, 0, 1], shape=(n, n)))
    return sp.csr_array(sp.kron(total, np.ones((block, block))))


@settings(max_examples=25, deadline=None)
@given(dims=st.lists(st.integers(1, 6), min_size=2, max_size=3), full=st.booleans())
def test_poisson(tmp_path_factory, dims, full):
    points = {2: (5, 9), 3: (7, 27)}[len(dims)][full]
    got = made(tmp_path_factory.getbasetemp(), "poisson", dims=tuple(dims), points=points).to_scipy()
    want = star(dims) if not full else points * sp.eye_array(int(np.prod(dims))) - box(dims)
    np.testing.assert_array_equal(got.toarray(), want.toarray())
    assert got.nnz == np.count_nonzero(want.toarray())


@pytest.mark.parametrize("dof", [1, 2, 3])
def test_fem_blocks(tmp_path, dof):
    got = made(tmp_path, "fem-blocks", dims=(3, 2, 4), dof=dof).to_scipy()
    want = box((3, 2, 4), dof)
    dense = got.toarray()
    assert got.nnz == np.count_nonzero(want.toarray())
    assert got.tobsr((dof, dof)).nnz == got.nnz
    np.testing.assert_array_equal(dense != 0, want.toarray() != 0)
    np.testing.assert_array_equal(dense, dense.T)
    assert np.linalg.eigvalsh(dense).min() > 0


@pytest.mark.parametrize(
    ("parameters", "offsets"),
    [
        ({"bandwidth": 2}, range(-2, 3)),
        ({"bandwidth": 0}, [0]),
        ({"offsets": (7, -3, 0, 7)}, [-3, 0, 7]),
        ({}, [-1, 0, 1]),
    ],
)
def test_banded(tmp_path, parameters, offsets):
    got = made(tmp_path, "banded", n=20, **parameters).to_scipy().toarray()
    row, column = np.indices(got.shape)
    np.testing.assert_array_equal(got != 0, np.isin(column - row, list(offsets)))


def test_erdos_renyi_statistics(tmp_path):
    got = made(tmp_path, "erdos-renyi", nrows=20_000, ncols=500, per_row=7.5)
    assert got.nnz == pytest.approx(20_000 * 7.5, rel=0.02)
    degrees = np.diff(got.indptr)
    assert degrees.var() == pytest.approx(7.5 * (1 - 7.5 / 500), rel=0.05)
    assert np.bincount(got.indices).std() == pytest.approx(np.sqrt(20_000 * 0.015), rel=0.15)
    assert got.data.mean() == pytest.approx(0.5, abs=0.01)
    assert 0 <= got.data.min() < got.data.max() < 1


@pytest.mark.parametrize(
    ("nrows", "ncols", "per_row"), [(5, 8, 8), (3, 1, 1), (4, 1 << 40, 3), (5, 1 << 56, 2), (9, 9, 1e-9)]
)
def test_erdos_renyi_extremes(tmp_path, nrows, ncols, per_row):
    got = made(tmp_path, "erdos-renyi", nrows=nrows, ncols=ncols, per_row=per_row)
    assert got.shape == (nrows, ncols)
    if per_row == ncols:
        assert got.nnz == nrows * ncols


def test_rmat_statistics(tmp_path):
    got = made(tmp_path, "rmat", scale=12, edge_factor=8, dtype="int64")
    assert got.shape == (4096, 4096)
    assert 0.5 * 8 * 4096 < got.nnz < 8 * 4096
    upper = got.indptr[2048] / got.nnz
    assert 0.6 < upper < 0.8  # a + b = 0.76 of the edges, before duplicates meet
    assert np.diff(got.indptr).max() > 20 * 8


def test_rmat_duplicates(tmp_path):
    summed = made(tmp_path, "rmat", scale=5, edge_factor=30, dtype="int64")
    first = made(tmp_path, "rmat", scale=5, edge_factor=30, dtype="int64", duplicates="first")
    np.testing.assert_array_equal(summed.indices, first.indices)
    assert first.data.max() <= 9 < summed.data.max()
    assert made(tmp_path, "rmat", scale=5, edge_factor=30, dtype="bool").data.all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["?", "i1", "i8", "u4", "f4", "f8", "c8", "c16"])
def test_every_kind_in_every_dtype(tmp_path, kind, dtype):
    if kind == "poisson" and dtype == "u4":
        pytest.skip("has no -1")
    if kind == "fem-blocks" and dtype == "i1":
        dtype = "i2"
    got = made(tmp_path, kind, dtype=dtype, **SMALL[kind])
    assert got.dtype == np.dtype(dtype)
    assert got.nnz > 0
    assert np.isfinite(got.data).all()
    if kind != "rmat" and dtype != "i1":
        assert np.count_nonzero(got.data) == got.nnz


@pytest.mark.parametrize("kind", KINDS)
def test_same_for_every_block_size_and_other_for_another_seed(tmp_path, monkeypatch, kind):
    want = made(tmp_path, kind, seed=3, **SMALL[kind])
    other = made(tmp_path, kind, seed=4, **SMALL[kind])
    monkeypatch.setattr(module, "ENTRIES", 37)
    monkeypatch.setattr(
        external_sort.RowSorter.__init__, "__kwdefaults__", {"bucket_bytes": 300, "duplicates": "sum", "cuts": None}
    )
    got = made(tmp_path, kind, seed=3, **SMALL[kind])
    for name in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    assert (kind == "poisson") == np.array_equal(other.data, want.data)


def test_several_generators_meet(tmp_path, monkeypatch):
    """Ranges of rows and batches of edges beyond the first: other numbers, and no gap between."""
    monkeypatch.setattr(module, "RANGE_ENTRIES", 64)
    monkeypatch.setattr(module, "EDGES", 100)
    got = made(tmp_path, "erdos-renyi", nrows=100, ncols=50, per_row=5)
    assert 300 < got.nnz < 700
    rows = {tuple(got.rows(i, i + 1).indices.tolist()) for i in range(100)}
    assert len(rows) > 90
    assert made(tmp_path, "rmat", scale=10, edge_factor=3, dtype="i8", duplicates="first").nnz > 2000


def test_text_parameters_and_facts(tmp_path):
    got = generate("poisson", tmp_path / "a.zarr", dims="4x5", points="9")
    assert got.shape == (20, 20)
    assert groups.read_facts(got.url)["provenance"] == {
        "command": "generate", "kind": "poisson", "seed": 0, "dims": [4, 5], "points": 9,
    }  # fmt: skip
    assert made(tmp_path, "banded", n="9", offsets="-2,0").nnz == 16


def test_memory_url_and_progress():
    calls: list[tuple[int, int]] = []
    url = "memory://generate-test/a.zarr"
    got = generate("banded", url, n=100, progress=lambda *call: calls.append(call))
    assert whole(got).nnz == 298
    assert calls[-1] == (298, 298)
    with pytest.raises(InputError, match="already exists"):
        generate("banded", url, n=100)
    at(url).remove()


@pytest.mark.parametrize(
    ("kind", "parameters", "what"),
    [
        ("hilbert", {}, "'hilbert' is not a kind of matrix; known are poisson"),
        ("poisson", {}, "poisson needs dims: the numbers of grid points"),
        ("poisson", {"dims": (3, 3), "size": 3}, "no parameter 'size'; it has dims, points"),
        ("poisson", {"dims": (3, 3)}, "points=7 does not fit"),
        ("poisson", {"dims": (3,), "points": 3}, "points=3 does not fit"),
        ("poisson", {"dims": (3, 0, 3)}, "not valid; give the numbers"),
        ("poisson", {"dims": "3xtwo"}, "not valid; give the numbers"),
        ("poisson", {"dims": 5}, "not valid; give the numbers"),
        ("poisson", {"dims": (1 << 30,) * 3}, "64-bit"),
        ("poisson", {"dims": (3, 3, 3), "dtype": "u1"}, "signed dtype"),
        ("banded", {"n": 5, "dtype": "float16"}, "cannot be multiplied"),
        ("banded", {"n": 5, "dtype": "nonsense"}, "not a NumPy dtype"),
        ("banded", {"n": 5, "seed": -1}, "seed=-1"),
        ("banded", {"n": 5.5}, "n=5.5 is not valid"),
        ("banded", {"n": 5, "bandwidth": 5}, "outside 5 columns"),
        ("rmat", {"scale": 41}, "scale=41 must lie"),
        ("rmat", {"scale": 3, "a": 0.9}, "at most 1"),
        ("rmat", {"scale": 3, "duplicates": "max"}, "give sum or first"),
        ("rmat", {"scale": 3, "edge_factor": float("nan")}, "edge_factor=nan is not valid"),
        ("erdos-renyi", {"nrows": 3, "ncols": 3, "per_row": 4}, "at most ncols=3"),
        ("erdos-renyi", {"nrows": 3, "ncols": 1 << 60}, "give fewer"),
        ("fem-blocks", {"dims": (3, 3)}, "three numbers"),
        ("fem-blocks", {"dims": (3, 3, 3), "dof": 10, "dtype": "u1"}, "too large for dtype=uint8"),
    ],
)
def test_wrong_parameters(tmp_path, kind, parameters, what):
    with pytest.raises(InputError, match=what) as caught:
        generate(kind, tmp_path / "a.zarr", **parameters)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_table_fits_the_functions():
    for kind in KINDS.values():
        assert list(inspect.signature(kind.function).parameters)[1:] == list(kind.parameters)
        for parameter in kind.parameters.values():
            assert parameter.help
            if parameter.default is not None:
                parameter.convert(parameter.default)
