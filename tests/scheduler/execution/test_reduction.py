"""Reductions: as NumPy reduces the whole product, in memory and from storage, whatever the blocks."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import spdist
from spdist import cli
from spdist.api import products as api
from spdist.errors import InputError, MatrixError, SpdistError
from spdist.kernels import reduction_spec
from spdist.kernels.cpu import reduce
from spdist.scheduler.execution import stages
from spdist.scheduler.execution.worker import CONTEXTS
from spdist.scheduler.planner import planner
from tests.scheduler.execution.test_product_spec import whole_numbers
from tests.support.planning import in_grid
from tests.support.strategies import csr_pairs

OPTIONS = [{}, {"top_n": 3}, {"semiring": "min_plus", "mask": True}]


def by_hand(c: sp.csr_matrix, what: str):
    """Reduce a product that is whole."""
    total = {
        "sum": lambda: c.data.sum(),
        "row_sums": lambda: np.asarray(c.sum(axis=1)).ravel(),
        "column_sums": lambda: np.asarray(c.sum(axis=0)).ravel(),
        "trace": lambda: c.diagonal().sum(),
        "nnz": lambda: c.nnz,
        "row_nnz": lambda: np.diff(c.indptr),
        "frobenius": lambda: np.sqrt((c.data.astype(float) ** 2).sum()),
    }
    return total[what]()


@pytest.mark.parametrize("dtype", ["float64", "int64", "bool"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_all_in_memory_and_stored(stored, tmp_path, scheduler, monkeypatch, options, dtype):
    monkeypatch.setattr(reduce, "SLICE_PRODUCTS", 3_000)
    if dtype == "bool" and options:
        pytest.skip("kernels of bools are those of the other options")
    a, b, mask = (whole_numbers(*shape, 6, 1, dtype) for shape in ((150, 90), (90, 150), (150, 150)))
    c = spdist.spgemm(a, b, **options | ({"mask": mask} if "mask" in options else {}))
    for name, matrix in (("A", a), ("B", b), ("M", mask)):
        stored(name, matrix)
    monkeypatch.setattr(planner, "make_plan", in_grid((5, 2, 2)))
    for what in reduction_spec.REDUCTIONS:
        expected = by_hand(c, what)
        found = spdist.reduce(a, b, what, **options | ({"mask": mask} if "mask" in options else {}))
        wanted = options | ({"mask": tmp_path / "M.zarr"} if "mask" in options else {})
        other = spdist.reduce(tmp_path / "A.zarr", tmp_path / "B.zarr", what, scheduler=scheduler, **wanted)
        for one in (found, other):
            np.testing.assert_array_equal(one, expected, err_msg=what)
            assert np.asarray(one).dtype.kind == np.asarray(expected).dtype.kind


def test_short_integers_and_floats(stored, scheduler):
    """Entries of C wrap, sums do not."""
    a = whole_numbers(80, 80, 9, 2, "int8")
    c = spdist.spgemm(a, a)
    assert spdist.reduce(a, a, "sum") == c.data.sum(dtype=np.int64)
    floats = sp.random_array((80, 80), density=0.1, format="csr", random_state=np.random.default_rng(0))
    for what in ("sum", "row_sums", "column_sums", "frobenius", "trace"):
        np.testing.assert_allclose(spdist.reduce(floats, floats, what), by_hand(floats @ floats, what), rtol=1e-12)


@pytest.mark.parametrize("shape", [(0, 5, 4), (5, 0, 4), (5, 4, 0), (7, 3, 2), (2, 3, 7)])
def test_empty_and_oblong(stored, tmp_path, scheduler, shape):
    m, k, n = shape
    a, b = (sp.csr_matrix(np.ones(s)) for s in ((m, k), (k, n)))
    stored("A", a), stored("B", b)
    for what in reduction_spec.REDUCTIONS:
        expected = by_hand((a @ b).tocsr(), what)
        np.testing.assert_array_equal(spdist.reduce(a, b, what), expected, err_msg=what)
        found = spdist.reduce(tmp_path / "A.zarr", tmp_path / "B.zarr", what, scheduler=scheduler)
        np.testing.assert_array_equal(found, expected, err_msg=what)


def test_rows_that_do_not_fit_come_later(stored, scheduler, monkeypatch):
    m = whole_numbers(400, 400, 10, 3)
    a = stored("A", m)
    make = in_grid((6, 1, 1))

    def short(*arguments):
        plan = make(*arguments)
        return replace(plan, blocks=tuple(replace(block, capacity=300) for block in plan.blocks))

    monkeypatch.setattr("spdist.scheduler.planner.planner.make_plan", short)
    assert spdist.reduce(a, a, "frobenius", scheduler=scheduler) == by_hand(m @ m, "frobenius")


EDGES = [[0, 1], [-8, 0, 8, 64], [-1000, -0.5, 0.5, 1e9], [3, 4, 5]]


@settings(max_examples=100, deadline=None)
@given(csr_pairs(), st.sampled_from(EDGES), st.sampled_from(["f8", "f4", "i8", "i2", "u1", "?"]))
def test_histograms_equal_numpy(pair, bins, dtype):
    """With values on edges and outside, zeros, rows without entries, and entries of A that occur twice."""
    a, b = (m.to_scipy().astype(dtype) for m in pair)
    twice = sp.csr_matrix((np.repeat(a.data, 2), np.repeat(a.indices, 2), 2 * a.indptr), a.shape)
    for left in (a, twice):
        found = spdist.reduce(left, b, "histogram", bins=bins)
        np.testing.assert_array_equal(found, by_bins(left, b, bins))
        assert found.dtype == np.int64


def by_bins(a: sp.csr_matrix, b: sp.csr_matrix, bins):
    """Count the values of SciPy's product wherever it has an entry."""
    ones = [sp.csr_matrix((np.ones(m.nnz), m.indices, m.indptr), m.shape) for m in (a, b)]
    values = (a @ b).toarray()[(ones[0] @ ones[1]).nonzero()]
    return np.histogram(values.astype(np.uint8) if values.dtype == bool else values, bins)[0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_histograms_of_what_is_stored(stored, tmp_path, scheduler, monkeypatch, options):
    monkeypatch.setattr(reduce, "SLICE_PRODUCTS", 3_000)
    a, b, mask = (whole_numbers(*shape, 6, 1) for shape in ((150, 90), (90, 150), (150, 150)))
    a.data[::7] = 0
    for name, matrix in (("A", a), ("B", b), ("M", mask)):
        stored(name, matrix)
    monkeypatch.setattr(planner, "make_plan", in_grid((5, 2, 2)))
    within = options | ({"mask": mask} if "mask" in options else {})
    bins = [-20, 0, 1, 7, 30]
    expected = np.histogram(spdist.spgemm(a, b, **within).data, bins)[0]
    np.testing.assert_array_equal(spdist.reduce(a, b, "histogram", bins=bins, **within), expected)
    wanted = options | ({"mask": tmp_path / "M.zarr"} if "mask" in options else {})
    found = spdist.reduce(
        tmp_path / "A.zarr", tmp_path / "B.zarr", "histogram", bins=bins, scheduler=scheduler, **wanted
    )
    np.testing.assert_array_equal(found, expected)


EXTREME = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-3, 3).map(float)


@settings(max_examples=300, deadline=None)
@given(st.lists(EXTREME, min_size=2, max_size=20, unique=True), st.lists(EXTREME | st.just(np.nan), max_size=20))
def test_bins_of_any_width(edges, values):
    from spdist.kernels.cpu.finished.histogram import histogram

    edges = np.unique(edges)
    assume(len(edges) > 1)
    around = [np.nextafter(edges[1:-1], side) for side in (-np.inf, np.inf)]
    values = np.concatenate([np.array(values), edges, *around])
    np.testing.assert_array_equal(histogram(values, edges), np.histogram(values, edges)[0])


def test_infinities_and_nan_are_in_no_bin():
    m = sp.csr_matrix(np.diag([np.nan, np.inf, -np.inf, 1e300, 2.0, 3.0]))
    found = spdist.reduce(m, sp.csr_matrix(np.eye(6)), "histogram", bins=[-1e308, 0, 2, 3])
    np.testing.assert_array_equal(found, [0, 0, 2])


@pytest.mark.parametrize("bins", [None, 10, [1], [0, 0], [0, 2, 1], [0, np.nan], [0, np.inf], [[0, 1], [2, 3]], "low"])
def test_bins_that_are_no_edges(stored, bins):
    m = whole_numbers(20, 20, 3, 1)
    for one in (m, stored("A", m)):
        with pytest.raises(InputError, match="two edges or more, finite and rising"):
            spdist.reduce(one, one, "histogram", bins=bins)


def test_nothing_stays_when_it_fails(stored, scheduler, monkeypatch):
    a = stored("A", whole_numbers(100, 100, 5, 4))

    def failing(*_):
        raise OSError(5, "the disk is gone")

    monkeypatch.setattr(stages, "preprocess", failing)
    with pytest.raises(SpdistError, match="the disk is gone"):
        spdist.reduce(a, a, "nnz", scheduler=scheduler)
    assert not CONTEXTS


def test_refusals(stored):
    m = whole_numbers(20, 20, 3, 1)
    a = stored("A", m)
    with pytest.raises(InputError, match="'mean' is not one of sum"):
        spdist.reduce(m, m, "mean")
    for one in (a, m):
        with pytest.raises(InputError, match="engine='scipy' has no reductions: choose"):
            spdist.reduce(one, one, "sum", engine="scipy")
    for b in (whole_numbers(9, 20, 3, 1), stored("B", whole_numbers(9, 20, 3, 1))):
        with pytest.raises((InputError, MatrixError), match="shapes do not fit"):
            spdist.reduce(m if sp.issparse(b) else a, b, "sum")
    with pytest.raises(InputError, match="some of the operands are in memory"):
        spdist.reduce(m, a, "sum")
    with pytest.raises(InputError, match="bins are for a histogram, not for 'sum'"):
        spdist.reduce(m, m, "sum", bins=[0, 1])
    for one in (m.astype(complex), stored("Z", m.astype(complex))):
        with pytest.raises(MatrixError, match="no order, which a histogram needs"):
            spdist.reduce(one, one, "histogram", bins=[0, 1])


def test_command_line(stored, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    m = whole_numbers(60, 60, 4, 1)
    stored("A", m)
    masked = ["--semiring", "plus_pair", "--mask", "A.zarr"]
    assert cli.main(["reduce", "sum", "A.zarr", "A.zarr", "--json", *masked]) == 0
    assert json.loads(capsys.readouterr().out)["sum"] == api.reduce(m, m, "sum", semiring="plus_pair", mask=m)
    assert cli.main(["reduce", "row_nnz", "A.zarr", "A.zarr", "--out", "n.npy", "--engine", "numba"]) == 0
    assert "60 values" in capsys.readouterr().out
    np.testing.assert_array_equal(np.load("n.npy"), np.diff(spdist.spgemm(m, m).indptr))
    assert cli.main(["reduce", "histogram", "A.zarr", "A.zarr", "--json", "--bins=-1,0,2.5,100"]) == 0
    expected = np.histogram(spdist.spgemm(m, m).data, [-1, 0, 2.5, 100])[0]
    assert json.loads(capsys.readouterr().out)["histogram"] == expected.tolist()
    assert cli.main(["reduce", "histogram", "A.zarr", "A.zarr", "--bins", "low,high"]) == 2
    assert "'low,high' is not a list of edges" in capsys.readouterr().err
    assert cli.main(["reduce", "histogram", "A.zarr", "A.zarr", "--bins=-1,0,2.5,100"]) == 0
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    bins = ["[-1,", "0)"], ["[0,", "2.5)"], ["[2.5,", "100]"]
    assert lines[4:7] == [[*bin_, f"{count:,}"] for bin_, count in zip(bins, expected, strict=True)]


def test_a_vector_goes_where_it_is_told(stored, tmp_path, monkeypatch, capsys):
    """To the very name, which is looked at before the work; and no vector is made to be thrown away."""
    monkeypatch.chdir(tmp_path)
    m = whole_numbers(60, 60, 4, 1)
    stored("A", m)
    assert cli.main(["reduce", "row_sums", "A.zarr", "A.zarr", "--out", "sums.txt"]) == 0
    np.testing.assert_array_equal(np.load("sums.txt"), api.reduce(m, m, "row_sums"))
    assert {path.name for path in tmp_path.iterdir()} == {"A.zarr", "sums.txt"}
    capsys.readouterr()
    assert cli.main(["reduce", "row_nnz", "A.zarr", "A.zarr", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["row_nnz"]) == 60
    monkeypatch.setattr(api, "reduce", None)  # nothing is computed
    for out, message in (
        ([], "--out FILE.npy"),
        (["--out", "sums.txt/x.npy"], "sums.txt"),
        (["--out", "A.zarr"], "A.zarr: is a dir"),
    ):
        assert cli.main(["reduce", "column_sums", "A.zarr", "A.zarr", *out]) == 2
        assert message in capsys.readouterr().err
