"""Top-n and norms by columns: as NumPy finds them in each column, in memory and from storage, whatever the blocks."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist import cli
from spdist.api import products as api
from spdist.errors import InputError, ResumeError, SpdistError
from spdist.matrices.bsr import from_scipy as from_scipy_blocks
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import from_scipy
from spdist.scheduler.execution.journal import JournalTuning
from spdist.storage import transpose as transposition
from tests.conftest import out_of_space, random_matrix
from tests.scheduler.execution.test_driver import read
from tests.scheduler.execution.test_product_spec import assert_same, whole_numbers
from tests.support.planning import SHORT_CHUNKS


def largest(c, top_n: int, threshold: float = -np.inf):
    """Return the largest entries of each column of a product above 0; of equal ones those in smaller rows."""
    dense = c.toarray()
    out = np.zeros_like(dense)
    for j, column in enumerate(dense.T):
        order = np.lexsort((np.arange(len(column)), -column))
        kept = [i for i in order if column[i] > 0 and column[i] >= threshold][:top_n]
        out[kept, j] = column[kept]
    return out


@pytest.fixture
def operands():
    return whole_numbers(90, 70, 5, 1), whole_numbers(70, 80, 5, 2)


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
@pytest.mark.parametrize("top_n", [1, 3, 100])
def test_ties_go_to_smaller_rows(operands, kind, top_n):
    """Whole numbers, so that many are equal."""
    a, b = (sp.csr_array(m).asformat(kind) for m in operands)
    c = spdist.spgemm(a, b, top_n=top_n, threshold=2, axis=0)
    assert c.format == ("csc" if kind == "csc" else "csr")
    np.testing.assert_array_equal(c.toarray(), largest(a @ b, top_n, 2))
    if kind == "csr":
        check_canonical(from_scipy(c))
    np.testing.assert_array_equal(spdist.matmul(a, b, top_n=top_n, threshold=2, axis=0).toarray(), c.toarray())


@pytest.mark.parametrize(("semiring", "masked"), [
    ("plus_times", {}), ("plus_first", {"mask": True}), ("plus_second", {"mask": True, "complement": True}),
])  # fmt: skip
def test_other_options_stay_as_they_are(operands, semiring, masked):
    """The mask and factors of rows are those of C; the first operand is A's."""
    a, b = operands
    options = masked | {"semiring": semiring} | ({"mask": whole_numbers(90, 80, 30, 3)} if masked else {})
    if semiring != "plus_pair":  # whole numbers have no fractions
        options["epilogue"] = spdist.Epilogue(np.arange(1.0, 91), np.arange(1.0, 81))
    whole = sp.csr_array(spdist.spgemm(a, b, **options))
    np.testing.assert_array_equal(spdist.spgemm(a, b, **options, top_n=3, axis=0).toarray(), largest(whole, 3))


@pytest.mark.parametrize("normalize", ["l1", "l2", "max"])
def test_a_step_of_markov_clustering_on_columns_that_sum_to_1(normalize):
    """What the workflow does to rows of the transpose."""
    m = abs(random_matrix(60, 60, 6, 1)) + sp.eye_array(60)
    m = sp.csr_array(m / m.sum(axis=0))
    inflate = spdist.Epilogue(apply=lambda x: x * x, normalize=normalize)
    options = {"epilogue": inflate, "threshold": 1e-3, "top_n": 10}
    c = spdist.spgemm(m, m, **options, axis=0)
    np.testing.assert_array_equal(c.toarray(), spdist.spgemm(m.T.tocsr(), m.T.tocsr(), **options).T.toarray())
    squares = (m @ m).toarray() ** 2
    squares /= np.linalg.norm(squares, {"l1": 1, "l2": 2, "max": np.inf}[normalize], axis=0)
    np.testing.assert_allclose(c.toarray(), largest(sp.csr_array(squares), 10, 1e-3), rtol=1e-12)


def test_without_what_looks_at_columns_nothing_is_transposed(operands):
    own = spdist.Semiring(lambda x, y: x + y, lambda x, y: x - y)
    for options in ({"threshold": 3.0}, {"triangle": "upper"}, {"semiring": own}):
        m = operands[0][:70] if "triangle" in options else operands[0]
        b = m.T.tocsr() if "triangle" in options else operands[1]
        assert_same(from_scipy(spdist.spgemm(m, b, axis=0, **options)), spdist.spgemm(m, b, **options))


@pytest.mark.parametrize("grid", [(5, 1, 1), (3, 2, 2)])
@pytest.mark.parametrize("transposed", [{}, {"transpose_a": True}, {"transpose_a": True, "transpose_b": True}], ids=str)
def test_from_storage(operands, stored, tmp_path, scheduler, grid, transposed):
    """Columns go across all row blocks; factors of rows are those of C."""
    a, b = operands
    wanted = {"top_n": 4, "axis": 0, "epilogue": spdist.Epilogue(np.arange(1.0, 91), np.arange(1.0, 81))}
    mask = whole_numbers(90, 80, 40, 3)
    stored("A", a.T.tocsr() if "transpose_a" in transposed else a), stored("M", mask)
    stored("B", b.T.tocsr() if "transpose_b" in transposed else b)
    report = api.multiply(
        tmp_path / "A.zarr", tmp_path / "B.zarr", tmp_path / "C.zarr", mask=tmp_path / "M.zarr", grid=grid,
        scheduler=scheduler, check=True, **wanted, **transposed,
    )  # fmt: skip
    assert report.verification["ok"]
    assert tuple(report.grid.values()) == grid  # of C, not of its transpose
    assert_same(read(tmp_path / "C.zarr"), spdist.spgemm(a, b, mask=mask, **wanted))
    assert {path.name for path in tmp_path.iterdir()} == {"A.zarr", "B.zarr", "M.zarr", "C.zarr"}


@contextlib.contextmanager
def out_of_space_in_the_end():
    """Let the transpose fail that becomes C."""
    transpose = transposition.transpose

    def last_fails(m, out, **options):
        if "facts" in options:
            raise OSError(28, "No space left on device")
        return transpose(m, out, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transposition, "transpose", last_fails)
        with pytest.raises(OSError, match="No space left"):
            yield


def test_what_was_made_by_columns_is_not_called_false(operands, stored, tmp_path, scheduler):
    a, b = (stored(name, m) for name, m in zip("AB", operands, strict=True))
    c, wanted = tmp_path / "C.zarr", {"top_n": 3, "axis": 0, "scheduler": scheduler}
    api.multiply(a, b, c, **wanted)
    with pytest.raises(InputError, match=r"C\.zarr was computed by columns, with axis=0.*--axis 0 --resume --verify"):
        api.verify(a, b, c, top_n=3)
    report = api.multiply(a, b, c, **wanted, resume=True, check=True)  # as it says
    assert (report.state, report.verification["ok"]) == ("already finished", True)


def test_resume_and_overwrite(stored, tmp_path, scheduler, monkeypatch):
    monkeypatch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)
    monkeypatch.setattr("spdist.scheduler.execution.journal.TUNING", JournalTuning(seconds=0.0))
    m = whole_numbers(900, 900, 12, 3)
    a, wanted = stored("A", m), {"top_n": 5, "axis": 0, "scheduler": scheduler}
    with out_of_space():
        api.multiply(a, a, tmp_path / "C.zarr", grid=(2, 1, 20), **wanted)
    assert not (tmp_path / "C.zarr").exists()
    with pytest.raises(ResumeError, match="the mask or an option changed"):
        api.multiply(a, a, tmp_path / "C.zarr", resume=True, **wanted | {"top_n": 6})
    with out_of_space_in_the_end():
        api.multiply(a, a, tmp_path / "C.zarr", resume=True, **wanted)
    assert {path.name for path in tmp_path.iterdir()} == {"A.zarr", "C.zarr.spdist-columns"}
    api.multiply(a, a, tmp_path / "C.zarr", resume=True, **wanted)
    assert_same(read(tmp_path / "C.zarr"), spdist.spgemm(m, m, top_n=5, axis=0))
    assert api.multiply(a, a, tmp_path / "C.zarr", resume=True, **wanted).state == "already finished"
    for other in ({"top_n": 6}, {"axis": 1}):
        with pytest.raises(ResumeError):
            api.multiply(a, a, tmp_path / "C.zarr", resume=True, **wanted | other)
    with pytest.raises(InputError, match="exists"):
        api.multiply(a, a, tmp_path / "C.zarr", **wanted)
    with pytest.raises(InputError, match="choose one"):
        api.multiply(a, a, tmp_path / "C.zarr", resume=True, overwrite=True, **wanted)
    with pytest.raises(InputError, match="C may not be A or B"):
        api.multiply(a, a, tmp_path / "A.zarr", overwrite=True, **wanted)
    api.multiply(a, a, tmp_path / "C.zarr", overwrite=True, **wanted | {"top_n": 1})
    assert np.diff(read(tmp_path / "C.zarr").to_scipy().tocsc().indptr).max() == 1
    assert {path.name for path in tmp_path.iterdir()} == {"A.zarr", "C.zarr"}


def test_a_replacement_is_resumed_and_what_is_finished_is_verified(stored, tmp_path, scheduler, monkeypatch):
    """The old C stays until the new one is whole, and is not taken for it."""
    a, b = stored("A", whole_numbers(90, 70, 5, 1)), stored("B", whole_numbers(70, 80, 5, 2))
    c, wanted = tmp_path / "C.zarr", {"axis": 0, "scheduler": scheduler}
    api.multiply(a, b, c, top_n=1, **wanted)
    old = read(c).to_scipy()
    with out_of_space_in_the_end():
        api.multiply(a, b, c, top_n=3, overwrite=True, **wanted)
    assert_same(read(c), old)
    api.multiply(a, b, c, top_n=3, resume=True, **wanted)
    assert np.diff(read(c).to_scipy().tocsc().indptr).max() == 3
    again = api.multiply(a, b, c, top_n=3, resume=True, check=True, **wanted)
    assert (again.state, again.verification["ok"]) == ("already finished", True)
    assert {path.name for path in tmp_path.iterdir()} == {"A.zarr", "B.zarr", "C.zarr"}


def test_what_does_not_fit_is_refused_before_anything_is_transposed(stored, tmp_path, monkeypatch):
    a, b = stored("A", whole_numbers(90, 70, 5, 1)), stored("B", whole_numbers(70, 80, 5, 2))
    mask = stored("M", whole_numbers(80, 90, 5, 3))
    monkeypatch.setattr(transposition, "transpose", None)
    for right, options, message in (
        (a, {}, "A is 90 x 70 and B is 90 x 70"), (b, {"mask": mask}, "the mask is 80 x 90, but C is 90 x 80"),
        (b, {"grid": (99, 1, 1)}, "99 row blocks of 90 rows"), (b, {"engine": "scipy"}, "choose engine='auto'"),
        (b, {"memory_limit": "much"}, "is not a size"), (b, {"transpose_a": True}, "A is 70 x 90 and B is 70 x 80"),
        (b, {"epilogue": spdist.Epilogue(rows=np.ones(80))}, "rows has shape"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            api.multiply(a, right, tmp_path / "C.zarr", top_n=3, axis=0, **options)
    transposed = stored("T", whole_numbers(70, 90, 5, 1))
    for options, message in (
        ({"mask": mask}, "the mask is 80 x 90, but C is 90 x 80"), ({"grid": (99, 1, 1)}, "99 row blocks of 90 rows"),
        ({"grid": 7}, "grid=7: write the numbers of row"), ({"memory_limit": "much"}, "is not a size"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            api.multiply(transposed, b, tmp_path / "C.zarr", transpose_a=True, **options)
    with pytest.raises(InputError, match="grid=7"):
        api.plan(a, b, grid=7)


def test_the_time_of_transposes_counts(operands, stored, tmp_path, scheduler, monkeypatch):
    a, b = (stored(name, m) for name, m in zip("AB", operands, strict=True))
    transpose = transposition.transpose
    monkeypatch.setattr(transposition, "transpose", lambda *m, **told: (time.sleep(0.2), transpose(*m, **told))[1])
    begin = time.perf_counter()
    report = api.multiply(a, b, tmp_path / "C.zarr", top_n=3, axis=0, scheduler=scheduler)
    assert 0.6 < report.seconds < time.perf_counter() - begin


@pytest.mark.parametrize("axis", [0, 1])
def test_of_a_symmetric_matrix_columns_are_not_rows_either(stored, tmp_path, scheduler, axis):
    m = whole_numbers(50, 50, 4, 1)
    a = stored("A", sp.csr_matrix(m + m.T))
    api.multiply(a, a, tmp_path / "C.zarr", top_n=2, axis=axis, scheduler=scheduler)
    with pytest.raises(ResumeError, match="the mask or an option changed"):
        api.multiply(a, a, tmp_path / "C.zarr", top_n=2, axis=1 - axis, scheduler=scheduler, resume=True)


def test_refusals(operands, stored, tmp_path):
    a, b = operands
    one, other = stored("A", a), stored("B", b)
    for options, message in (
        ({"axis": 2}, "axis=2 is neither 1"), ({"axis": True}, "axis=True is neither"),
        ({"axis": np.array([0, 1])}, "axis=array.* is neither"),
        ({"semiring": spdist.Semiring(lambda x, y: x, lambda x, y: y, 0)}, "may not allow its operands"),
        ({"triangle": "upper"}, "top_n=3 needs whole rows"),
    ):  # fmt: skip
        for left, right in ((a, b), (one, other)):
            with pytest.raises(InputError, match=message):
                spdist.matmul(left, right, tmp_path / "C.zarr", **{"top_n": 3, "axis": 0} | options)
    blocks = sp.kron(a, np.ones((2, 2))).tobsr((2, 2))
    c = spdist.spgemm(blocks, blocks.T, top_n=3, axis=0)
    np.testing.assert_array_equal(c.toarray(), largest(blocks @ blocks.T, 3))
    with pytest.raises(InputError, match="axis=0 is for SciPy's and CuPy's matrices"):
        spdist.spgemm(from_scipy_blocks(blocks), from_scipy_blocks(blocks), top_n=3, axis=0)
    assert not (tmp_path / "C.zarr").exists()


def test_c_is_of_the_kind_of_a(operands):
    a, b = operands
    for left, right in ((sp.csr_array, sp.csr_matrix), (sp.csr_matrix, sp.csc_array), (sp.csc_array, sp.csc_matrix)):
        rows, columns = (spdist.spgemm(left(a), right(b), top_n=3, axis=axis) for axis in (1, 0))
        assert type(columns) is type(rows)
        np.testing.assert_array_equal(columns.toarray(), largest(a @ b, 3))


def test_errors_name_what_was_given(operands):
    """And not its transpose, which is multiplied."""
    a, b = operands
    for options, message in (
        ({"mask": a}, "the mask is 90 x 70, but C is 90 x 80"),
        ({"epilogue": spdist.Epilogue(rows=np.ones(80))}, "rows has shape"),
        ({"epilogue": "l1"}, "epilogue='l1' is none"),
    ):
        with pytest.raises(SpdistError, match=message):
            spdist.spgemm(a, b, top_n=3, axis=0, **options)
    with pytest.raises(SpdistError, match="A is 90 x 70 and B is 90 x 70"):
        spdist.spgemm(a, a, top_n=3, axis=0)


def test_command_line_and_a_job(operands, stored, tmp_path, run_job, capsys):
    a, b = operands
    stored("A", a), stored("B", b)
    columns = ["--top-n", "2", "--axis", "0", "--verify"]
    assert cli.main(["multiply", "A.zarr", "B.zarr", "C.zarr", *columns]) == 0
    np.testing.assert_array_equal(read("C.zarr").to_scipy().toarray(), largest(a @ b, 2))
    run_job("multiply", a="A.zarr", b="B.zarr", out="D.zarr", top_n=2, axis=0)
    assert_same(read("D.zarr"), read("C.zarr").to_scipy())
    run_job("multiply", a="A.zarr", b="B.zarr", out="D.zarr", top_n=2, axis=0)  # finished
    run_job("multiply", code=2, a="A.zarr", b="B.zarr", out="E.zarr", top_n=2, axis=3)
