"""Semirings, masks, threshold and top-n from Zarr to Zarr: as in memory, whatever the blocks; plan, resume, verify."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spdist
from spdist import cli
from spdist.api import products as api
from spdist.errors import InputError, ResumeError
from spdist.kernels.semirings import SEMIRINGS
from spdist.matrices.csr import CSR, from_scipy
from spdist.scheduler.execution.journal import JournalTuning
from spdist.storage.external_sort import RowSorter
from spdist.storage.matrix import open_matrix
from spdist.stores.registry import at
from tests.conftest import out_of_space, random_matrix
from tests.scheduler.execution.test_driver import files, read
from tests.support.planning import SHORT_CHUNKS

OPTIONS = [
    {"semiring": "min_plus"},
    {"top_n": 3},
    {"threshold": 20.0, "top_n": 5},
    {"semiring": "plus_pair", "mask": True},
    {"semiring": "min_plus", "mask": True, "complement": True, "threshold": 4.0},
    {"semiring": "or_and"},
    {"semiring": "any_pair", "mask": True, "complement": True},
]


def whole_numbers(nrows: int, ncols: int, per_row: float, seed: int, dtype: str = "float64") -> sp.csr_matrix:
    """Return a matrix whose products are exact in any order."""
    return random_matrix(nrows, ncols, per_row, seed, "int64").astype(dtype)


def assert_same(c: CSR, expected: sp.csr_matrix) -> None:
    other = from_scipy(expected)
    assert (c.shape, c.dtype) == (other.shape, other.dtype)
    for name in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(c, name), getattr(other, name))


OWN = spdist.Semiring(min, lambda x, y: x + y, np.inf)


def own_max(x, y):
    return x if x > y else y


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@given(seed=st.integers(0, 10**6), grid=st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 3)))
def test_any_grid_gives_what_memory_gives(tmp_path, scheduler, options, seed, grid):
    a, b, mask = (whole_numbers(40, 40, 5, seed + i) for i in range(3))
    place = tmp_path / f"{seed}-{grid}"
    place.mkdir(exist_ok=True)
    for name, matrix in (("a", a), ("b", b), ("mask", mask)):
        api.save(place / name, matrix, overwrite=True)
    wanted = options | ({"mask": mask} if "mask" in options else {})
    stored = options | ({"mask": place / "mask"} if "mask" in options else {})
    found = api.multiply(
        place / "a", place / "b", place / "c", grid=grid, scheduler=scheduler, check=True, overwrite=True, **stored
    )
    assert_same(read(place / "c"), spdist.spgemm(a, b, **wanted))
    assert found.verification["method"] == "sampled"
    assert "all 40 rows computed again" in found.verification["reason"]


@pytest.mark.parametrize("dtype", ["bool", "int64", "float32"])
def test_other_dtypes(stored, tmp_path, scheduler, dtype):
    a = whole_numbers(200, 200, 6, 1, dtype)
    stored("A", a)
    c = spdist.matmul(
        tmp_path / "A.zarr", tmp_path / "A.zarr", tmp_path / "C.zarr", semiring="min_plus", grid=(4, 2, 1),
        scheduler=scheduler,
    )  # fmt: skip
    assert_same(c.rows(0, 200), spdist.spgemm(a, a, semiring="min_plus"))
    assert spdist.verify(tmp_path / "A.zarr", tmp_path / "A.zarr", c, semiring="min_plus").ok


def test_rows_that_do_not_fit_their_room_are_cut_too(stored, tmp_path, scheduler, monkeypatch):
    m = whole_numbers(500, 500, 10, 2)
    a, mask = stored("A", m), stored("M", whole_numbers(500, 500, 30, 3))
    plan = api.plan(a, a, grid=(9, 2, 1), mask=mask, top_n=4)
    short = replace(plan, blocks=tuple(replace(block, capacity=40) for block in plan.blocks))
    monkeypatch.setattr("spdist.scheduler.planner.planner.make_plan", lambda *_, **__: short)
    report = api.multiply(a, a, tmp_path / "C.zarr", scheduler=scheduler, mask=mask, top_n=4)
    assert report.blocks > 9
    expected = spdist.spgemm(m, m, mask=mask.rows(0, 500).to_scipy(), top_n=4)
    assert_same(read(tmp_path / "C.zarr"), expected)


def test_other_processes_know_ones_own_semiring(stored, tmp_path):
    m = whole_numbers(400, 400, 8, 4)
    a = stored("A", m)
    least = 3.0
    ring = spdist.Semiring(lambda x, y: x if x > y else y, lambda x, y: x * y if y > least else 0.0, 0.0)
    report = api.multiply(a, a, tmp_path / "C.zarr", semiring=ring, workers=1, grid=(3, 2, 1), check=True)
    assert report.verification["ok"]
    assert_same(read(tmp_path / "C.zarr"), spdist.spgemm(m, m, semiring=ring))


# -- plan --------------------------------------------------------------------------------------------------------------


def test_the_plan_knows_that_less_is_kept(stored):
    m = random_matrix(6_000, 6_000, 30, 5)
    a, mask = stored("A", m), stored("M", random_matrix(6_000, 6_000, 4, 6))
    whole = api.plan(a, a, memory_limit="64MiB")
    for wanted in ({"top_n": 5}, {"mask": mask}):
        plan = api.plan(a, a, memory_limit="64MiB", **wanted)
        assert len(plan.blocks) < len(whole.blocks) / 2
        assert plan.projected_memory <= 0.9 * plan.memory_limit
        assert plan.expansion == whole.expansion
        assert all(one.stop == other.start for one, other in zip(plan.blocks, plan.blocks[1:], strict=False))
    assert api.plan(a, a, top_n=5).c.nnz == np.minimum(np.diff((m @ m).indptr), 5).sum()
    assert api.plan(a, a, mask=mask).c.nnz <= mask.nnz
    assert api.plan(a, a, mask=mask, complement=True).c.nnz >= whole.c.nnz / 2


def test_the_plan_counts_values_that_are_converted(stored):
    """Short values take the room of C's while they are multiplied, unless nobody reads them."""
    m = whole_numbers(5_000, 5_000, 20, 6)
    short, long = stored("S", m.astype("int8")), stored("L", m.astype("int64"))
    wide = spdist.Semiring(own_max, own_max, dtype="int64")
    held = {
        name: api.plan(a, a, semiring=ring).reserved_memory
        for name, a, ring in (("read", short, wide), ("pair", short, "plus_pair"), ("long", long, "plus_times"))
    }
    assert held["read"] - held["pair"] == 8 * m.nnz
    assert held["long"] > held["pair"]


def test_a_product_many_times_the_memory_limit_keeps_it(stored, tmp_path):
    """C would be 10 times the limit; measured in a process of its own."""
    a = spdist.generate("rmat", tmp_path / "G.zarr", scale=14, edge_factor=24)
    whole = api.plan(a, a, memory_limit="32MiB")
    report = api.multiply(a, a, tmp_path / "C.zarr", memory_limit="32MiB", workers=1, top_n=10, check=True)
    assert whole.c.nbytes > 10 * report.memory_limit
    assert report.blocks < len(whole.blocks) / 5
    assert report.peak_memory <= report.memory_limit
    assert report.verification["ok"]


# -- resume ------------------------------------------------------------------------------------------------------------


def test_resume_with_the_same_options_only(stored, tmp_path, scheduler, monkeypatch):
    monkeypatch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)
    monkeypatch.setattr("spdist.scheduler.execution.journal.TUNING", JournalTuning(seconds=0.0))
    a, mask = stored("A", whole_numbers(900, 900, 12, 3)), stored("M", whole_numbers(900, 900, 90, 7))
    wanted = {"semiring": "min_plus", "mask": mask, "top_n": 7, "scheduler": scheduler}
    api.multiply(a, a, tmp_path / "R.zarr", grid=(20, 2, 1), **wanted)
    with out_of_space():
        api.multiply(a, a, tmp_path / "C.zarr", grid=(20, 2, 1), **wanted)
    for other in ({"top_n": 8}, {"semiring": "max_plus"}, {"mask": a}, {"complement": True}, {"threshold": 1.0}):
        with pytest.raises(ResumeError, match="the mask or an option changed"):
            api.multiply(a, a, tmp_path / "C.zarr", resume=True, **wanted | other)
    assert api.multiply(a, a, tmp_path / "C.zarr", resume=True, **wanted).state == "resumed"
    assert files(tmp_path / "C.zarr") == files(tmp_path / "R.zarr")
    assert api.multiply(a, a, tmp_path / "C.zarr", resume=True, check=True, **wanted).verification["ok"]


def test_semirings_of_ones_own_are_told_apart():
    assert spdist.Semiring(own_max, own_max).identity() == spdist.Semiring(own_max, own_max).identity()
    kinds = [spdist.Semiring(own_max, lambda x, y, n=n: x * y + n).identity() for n in (1, 1, 2)]
    made = [spdist.Semiring(own_max, multiply_by(n)).identity() for n in (1, 2)]
    assert made[0] != made[1]
    assert kinds[0] == kinds[1] != kinds[2]
    assert spdist.Semiring(own_max, own_max, zero=1).identity() != spdist.Semiring(own_max, own_max).identity()
    assert SEMIRINGS["min_plus"].identity() == "min_plus"


def multiply_by(factor):
    return lambda x, y: x * y * factor


# -- verification ------------------------------------------------------------------------------------------------------


def spoilt(c: CSR, how: str) -> CSR:
    indptr, indices, data = c.indptr.copy(), c.indices.copy(), c.data.copy()
    row = int(np.argmax(np.diff(indptr) > 1))
    at = int(indptr[row])
    if how == "value":
        data[at] += 1
    elif how == "column":
        indices[at] = 0 if indices[at] else 1
    else:
        indices, data = np.delete(indices, at), np.delete(data, at)
        indptr[row + 1 :] -= 1
    return CSR(indptr, indices, data, c.shape)


@pytest.mark.parametrize("how", ["value", "column", "missing"])
@pytest.mark.parametrize("options", [{"top_n": 3}, {"semiring": "max_times"}, {"mask": True}], ids=str)
def test_verify_finds_what_is_wrong(stored, tmp_path, options, how):
    a, mask = stored("A", random_matrix(150, 150, 6, 1)), stored("M", random_matrix(150, 150, 40, 2))
    m = a.rows(0, 150).to_scipy()
    wanted = options | ({"mask": mask.rows(0, 150).to_scipy()} if "mask" in options else {})
    c = from_scipy(spdist.spgemm(m, m, **wanted))
    wanted = options | ({"mask": mask} if "mask" in options else {})
    assert api.verify(a, a, api.save(tmp_path / "R.zarr", c), **wanted).ok
    found = api.verify(a, a, api.save(tmp_path / "C.zarr", spoilt(c, how)), **wanted)
    assert not found.ok
    assert "row" in found.reason


def test_every_row_is_looked_at(stored, tmp_path, monkeypatch):
    """What the options demand is checked in rows that are not drawn as well, and the result says what was."""
    monkeypatch.setattr("spdist.verification.recompute_sample.ROWS", 4)
    a = stored("A", whole_numbers(300, 300, 6, 1))
    m = a.rows(0, 300).to_scipy()
    c = api.save(tmp_path / "C.zarr", spdist.spgemm(m, m, semiring="min_plus", top_n=5, threshold=4.0))
    wanted = {"semiring": "min_plus", "top_n": 5, "threshold": 4.0}
    found = api.verify(a, a, c, **wanted)
    assert found.ok
    assert "4 of 300 rows, drawn at random, computed again by min_plus" in found.reason
    assert "values of the others were not" in found.reason
    assert "top_n is 4" in api.verify(a, a, c, **wanted | {"top_n": 4}).reason
    assert "below the threshold" in api.verify(a, a, c, **wanted | {"threshold": 9.0}).reason
    assert "outside the mask" in api.verify(a, a, c, mask=a, **wanted).reason


def test_rounding_of_partial_sums_passes(stored, tmp_path, scheduler):
    a = stored("A", random_matrix(200, 200, 40, 3))
    for wanted in ({"top_n": 5}, {"semiring": "plus_first", "threshold": 0.1}):
        report = api.multiply(
            a, a, tmp_path / "C.zarr", grid=(2, 7, 1), scheduler=scheduler, check=True, overwrite=True, **wanted
        )
        assert report.verification["ok"]


# -- refusals, command line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "message"), [
    ({"mask": "M.zarr"}, "is no sparse matrix"), ({"mask": True}, "is no sparse matrix"),
    ({"threads": 0}, "at least 1"), ({"threads": "2"}, "at least 1"), ({"epilogue": {}}, "spdist.Epilogue"),
])  # fmt: skip
def test_wrong_options_in_memory_are_refused(wanted, message):
    m = whole_numbers(20, 20, 3, 1)
    with pytest.raises(InputError, match=message):
        spdist.spgemm(m, m, **wanted)


def test_functions_that_numba_does_not_compile_are_refused():
    with pytest.raises(InputError, match=r"apply=.*write lambda x: \.\.\. around it"):
        spdist.Epilogue(apply=np.sqrt)
    with pytest.raises(InputError, match=r"add=.*write lambda x, y: \.\.\. around it"):
        spdist.Semiring(np.maximum, lambda x, y: x * y, 0)


def returns_none(x):
    """Return nothing."""


NOT_COMPILED = [
    ({"semiring": spdist.Semiring(lambda x, y: x.least(y), lambda x, y: x, 0)}, "semiring one's own: add=.*'least'"),
    ({"semiring": spdist.Semiring(min, lambda x, y: x, 0)}, "add=min cannot be compiled .* not a function"),
    ({"semiring": spdist.Semiring(lambda x, y: x, lambda x, y: "x", 0, name="letters")}, "semiring letters: multiply="),
    ({"epilogue": spdist.Epilogue(apply=lambda x: read(x))}, "epilogue: apply=.*for values of float64: .*'read'"),
    ({"epilogue": spdist.Epilogue(apply=lambda x, y: x)}, "epilogue: apply=.*write lambda x: "),
    ({"epilogue": spdist.Epilogue(apply=lambda x: x * 1j)}, "it returns complex128"),
    ({"epilogue": spdist.Epilogue(apply=returns_none)}, "apply=returns_none cannot be compiled .* it returns none"),
]


@pytest.mark.parametrize(("wanted", "message"), NOT_COMPILED, ids=lambda one: one if isinstance(one, str) else "")
def test_functions_are_compiled_before_anything_is_written(stored, tmp_path, wanted, message):
    m = whole_numbers(20, 20, 3, 1).astype(float)
    a = stored("A", m)
    with pytest.raises(InputError, match=message):
        spdist.spgemm(m, m, **wanted)
    with pytest.raises(InputError, match=message):
        api.multiply(a, a, tmp_path / "C.zarr", **wanted)
    assert not at(str(tmp_path / "C.zarr")).exists()


def test_wrong_options_are_refused_before_anything_is_written(stored, tmp_path):
    m = whole_numbers(20, 20, 3, 1)
    a, small = stored("A", m), stored("S", whole_numbers(5, 5, 2, 1))
    for wanted, message in (
        ({"engine": "cuda", "semiring": OWN}, "no C expressions, which the GPU needs"),
        ({"engine": "scipy", "semiring": "min_plus"}, "choose engine='auto' or 'numba'"),
        ({"semiring": "plus_plus"}, "is not one of plus_times"),
        ({"complement": True}, "needs a mask"),
        ({"mask": small}, "the mask is 5 x 5, but C is 20 x 20"),
        ({"mask": m}, "is stored too"),
        ({"top_n": 0}, "at least 1"),
        ({"top_n": 1.5}, "at least 1"),
        ({"top_n": True}, "at least 1"),
        ({"threshold": "x"}, "must be a number"),
        ({"epilogue": {"normalize": "l1"}}, "spdist.Epilogue"),
    ):
        with pytest.raises(InputError, match=message):
            api.multiply(a, a, tmp_path / "C.zarr", **wanted)
    with pytest.raises(InputError, match="C may not be A or B, or the mask"):
        api.multiply(a, a, tmp_path / "M.zarr", mask=api.save(tmp_path / "M.zarr", m))
    with pytest.raises(InputError, match="ndarray where a sparse matrix is expected"):
        api.matmul(m, np.ones(20))
    with pytest.raises(InputError, match="some of the operands and the mask are in memory"):
        api.matmul(m, m, mask=a)
    assert not at(str(tmp_path / "C.zarr")).exists()
    assert_same(from_scipy(api.matmul(m, m, mask=m)), spdist.spgemm(m, m, mask=m))


def test_command_line(stored, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    m = whole_numbers(60, 60, 4, 1)
    stored("A", m), stored("M", whole_numbers(60, 60, 9, 2))
    wanted = ["--semiring", "min_plus", "--mask", "M.zarr", "--complement", "--threshold", "3", "--top-n", "2"]
    assert cli.main(["plan", "A.zarr", "A.zarr", "--json", *wanted]) == 0
    assert json.loads(capsys.readouterr().out)["nnz_estimate"] <= 120
    assert cli.main(["multiply", "A.zarr", "A.zarr", "C.zarr", "--verify", *wanted]) == 0
    assert "computed again by min_plus" in " ".join(capsys.readouterr().out.split())
    mask = open_matrix("M.zarr").rows(0, 60).to_scipy()
    expected = spdist.spgemm(m, m, semiring="min_plus", mask=mask, complement=True, threshold=3, top_n=2)
    assert_same(read("C.zarr"), expected)
    assert cli.main(["verify", "A.zarr", "A.zarr", "C.zarr", *wanted]) == 0
    assert cli.main(["verify", "A.zarr", "A.zarr", "C.zarr"]) == 1


# -- epilogues ---------------------------------------------------------------------------------------------------------


def inflate(value):
    return value * value


def by_hand(c: sp.csr_matrix, epilogue: spdist.Epilogue) -> np.ndarray:
    """The slow twin of an epilogue, on a dense product."""
    dense = c.toarray()
    dense = dense * np.asarray(epilogue.rows)[:, None] * np.asarray(epilogue.columns)[None, :]
    dense = np.where(c.toarray() != 0, epilogue.apply(dense), 0)
    order = {"l1": 1, "l2": 2, "max": np.inf}[epilogue.normalize]
    size = np.linalg.norm(dense, order, axis=1)
    return dense / np.where(size > 0, size, 1)[:, None]


@pytest.mark.parametrize("normalize", ["l1", "l2", "max"])
def test_epilogue_in_memory_and_stored(stored, tmp_path, scheduler, normalize):
    m = random_matrix(120, 120, 5, 1)
    a = stored("A", m)
    rng = np.random.default_rng(0)
    epilogue = spdist.Epilogue(rng.uniform(1, 2, 120), rng.uniform(1, 2, 120), inflate, normalize, drop_zeros=True)
    expected = by_hand(m @ m, epilogue)
    c = spdist.spgemm(m, m, epilogue=epilogue)
    np.testing.assert_allclose(c.toarray(), expected, rtol=1e-12)
    assert c.nnz == np.count_nonzero(expected)
    for grid in ((4, 1, 1), (3, 2, 2)):
        report = api.multiply(
            a, a, tmp_path / "C.zarr", grid=grid, epilogue=epilogue, threshold=1e-6, top_n=20, check=True,
            overwrite=True, scheduler=scheduler,
        )  # fmt: skip
        found = read(tmp_path / "C.zarr").to_scipy().toarray()
        assert report.verification["ok"]
        cut = spdist.spgemm(m, m, epilogue=epilogue, threshold=1e-6, top_n=20).toarray()
        np.testing.assert_allclose(found, cut, rtol=1e-10)
        assert (np.count_nonzero(found, axis=1) <= 20).all()


def test_values_that_become_large_are_not_lost_to_the_threshold():
    """The threshold is for values after the epilogue: what is below it before may be above it after."""
    m = abs(random_matrix(200, 200, 20, 3))
    ten = spdist.Epilogue(apply=lambda x: 10 * x)
    c = spdist.spgemm(m, m, epilogue=ten, threshold=5.0)
    assert c.nnz == ((m @ m).data * 10 >= 5.0).sum()


def test_epilogues_that_do_not_fit_are_refused():
    m = whole_numbers(20, 20, 3, 1)
    with pytest.raises(InputError, match="normalize='l3' is not one of l1, l2, max"):
        spdist.Epilogue(normalize="l3")
    with pytest.raises(InputError, match="rows has shape"):
        spdist.spgemm(m, m, epilogue=spdist.Epilogue(rows=np.ones(3)))
    with pytest.raises(InputError, match="has no fractions"):
        spdist.spgemm(m.astype(int), m.astype(int), epilogue=spdist.Epilogue(normalize="l1"))
    first, second = (spdist.Epilogue(apply=multiply_by_one(n)) for n in (1, 2))
    assert first.identity() != second.identity()


def multiply_by_one(factor):
    return lambda x: x * factor


# -- transposes --------------------------------------------------------------------------------------------------------


def test_products_with_a_transpose(stored, tmp_path, scheduler):
    m = whole_numbers(90, 70, 5, 1)
    a = stored("A", m)
    left, right = {"transpose_a": True}, {"transpose_b": True}
    for flags, expected in (
        (right, spdist.spgemm(m, m.T.tocsr(), top_n=4)),
        (left, spdist.spgemm(m.T.tocsr(), m, top_n=4)),
    ):
        report = api.multiply(
            a, a, tmp_path / "C.zarr", grid=(3, 2, 1), scheduler=scheduler, top_n=4, check=True, overwrite=True, **flags
        )
        assert report.verification["ok"]
        assert_same(read(tmp_path / "C.zarr"), expected)
        assert_same(from_scipy(spdist.matmul(m, m, top_n=4, **flags)), expected)
    assert {path.name for path in tmp_path.iterdir()} == {"A.zarr", "C.zarr"}
    with pytest.raises(InputError, match="exists"):
        api.multiply(a, a, tmp_path / "C.zarr", **right)
    with pytest.raises(InputError, match="shapes do not fit"):
        api.multiply(a, a, tmp_path / "D.zarr")
    api.multiply(a, a, tmp_path / "C.zarr", resume=True, top_n=4, **left)  # nothing to do
    with pytest.raises(ResumeError):
        api.multiply(a, a, tmp_path / "C.zarr", resume=True, top_n=4, **right)


def test_the_largest_of_each_column(stored, tmp_path, scheduler):
    m, other = random_matrix(90, 70, 5, 1), random_matrix(70, 80, 5, 2)
    c = (m @ other).toarray()
    flags = {"transpose_a": True, "transpose_b": True, "top_n": 3}
    spdist.multiply(
        stored("B", other), stored("A", m), tmp_path / "T.zarr", grid=(3, 2, 1), scheduler=scheduler, **flags
    )
    for found in (read(tmp_path / "T.zarr").to_scipy(), spdist.matmul(other, m, **flags)):
        for column, kept in enumerate(found.toarray()):
            made = np.sort(c[:, column])[::-1]
            np.testing.assert_allclose(np.sort(kept[kept != 0])[::-1], made[made != 0][:3], rtol=1e-12)


def test_transpose(stored, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(RowSorter.__init__.__kwdefaults__, "bucket_bytes", 1 << 12)
    m = random_matrix(300, 200, 9, 2)
    stored("A", m)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["transpose", "A.zarr", "T.zarr"]) == 0
    assert "200 x 300" in capsys.readouterr().out
    assert_same(read("T.zarr"), m.T.tocsr())
    assert spdist.transpose("A.zarr", "T.zarr", overwrite=True).is_known_canonical
    assert cli.main(["transpose", "A.zarr", "T.zarr"]) == 2
