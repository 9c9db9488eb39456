"""The upper triangle of a product: as SciPy cuts the whole, by every method and engine; plan, resume, verify."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spdist
from spdist import cli
from spdist.api import products as api
from spdist.errors import InputError, MatrixError, ResumeError, SpdistError
from spdist.kernels import reduction_spec
from spdist.kernels.cpu import multiply as cpu
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.semirings import SEMIRINGS
from spdist.kernels.streaming.layout import SubmatrixOffset
from spdist.kernels.streaming.multiplication import RowSlice
from spdist.kernels.streaming.pipeline import multiply_rows, reduce
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR, from_scipy
from spdist.scheduler.execution import stages, worker_process
from spdist.scheduler.execution.assignment import BlockAssigner
from spdist.scheduler.execution.journal import JournalTuning
from spdist.scheduler.executors.clients import local_cluster
from spdist.scheduler.planner import planner
from spdist.storage.external_sort import RowSorter
from tests.conftest import random_matrix, upper
from tests.kernels.cpu.test_multiply import assert_same, random_csr
from tests.scheduler.execution.test_driver import files, read
from tests.scheduler.execution.test_product_spec import whole_numbers
from tests.scheduler.execution.test_reduction import by_hand
from tests.support.cpus import pretend_cpus
from tests.support.host_device import HostDevice
from tests.support.planning import SHORT_CHUNKS, in_grid
from tests.support.strategies import csr_matrices

UPPER = ProductSpec(triangle="upper")


@st.composite
def square_pairs(draw: Any, dtype: Any) -> tuple[CSR, CSR, CSR]:
    """Draw A and B of a square product, and a mask."""
    n, inner = draw(st.integers(0, 16)), draw(st.integers(0, 12))
    a, b = draw(csr_matrices((n, inner), dtype=dtype)), draw(csr_matrices((inner, n), dtype=dtype))
    return a, b, draw(csr_matrices((n, n)))


@pytest.mark.parametrize("dtype", ["f8", "i8", "c16", "?"])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_equals_what_scipy_cuts(dtype, data):
    """Empty rows, rows of all columns, explicit zeros, no rows at all."""
    a, b, _ = data.draw(square_pairs(np.dtype(dtype)))
    c = cpu.multiply(a, b, spec=UPPER)
    check_canonical(c)
    assert_same(c, upper(cpu.multiply(a, b, engine="scipy")))
    values = sp.csr_array(sp.triu(a.to_scipy() @ b.to_scipy()))
    assert abs(c.to_scipy() - values.astype(c.dtype)).nnz == 0


@pytest.mark.parametrize("wanted", [
    {"semiring": SEMIRINGS["min_plus"]}, {"threshold": 3.0}, {"semiring": SEMIRINGS["min_plus"], "mask": True},
    {"epilogue": spdist.Epilogue(columns=np.arange(16.0), drop_zeros=True)},
], ids=lambda wanted: ", ".join(wanted))  # fmt: skip
@given(drawn=square_pairs(np.float64), start=st.integers(0, 9), capacity=st.integers(0, 60), threads=st.integers(1, 2))
@settings(max_examples=30, deadline=None)
def test_goes_with_the_other_options(wanted, drawn, start, capacity, threads):
    """Also of some rows, from any on, as many as there is room for."""
    a, b, mask = drawn
    if "epilogue" in wanted:
        wanted = {"epilogue": replace(wanted["epilogue"], columns=np.arange(float(b.ncols)))}
    wanted = wanted | ({"mask": mask} if "mask" in wanted else {})
    whole = upper(cpu.multiply(a, b, spec=ProductSpec(**wanted)))
    options = ProductSpec(**wanted, triangle="upper")
    assert_same(cpu.multiply(a, b, threads=threads, spec=options), whole)
    start = min(start, a.nrows)
    some = options.of_rows(start, a.nrows)
    part = cpu.multiply_rows(a.rows(start, a.nrows), b, 0, capacity, threads=threads, spec=some)
    assert_same(part, whole.rows(start, start + part.nrows))
    assert part.nnz <= capacity or part.nrows == 1
    assert part.nrows or start == a.nrows


def spread(m: CSR, nrows: int) -> CSR:
    """Return the rows of `m` among others that are empty."""
    indptr = np.zeros(nrows + 1, np.int64)
    np.add.at(indptr, 1 + np.linspace(0, nrows - 1, m.nrows).astype(int), np.diff(m.indptr))
    return CSR(np.cumsum(indptr), m.indices, m.data, (nrows, m.ncols))


SHAPES = {
    "window": lambda: (random_csr(400, 200, 12, 1), random_csr(200, 400, 9, 2)),
    "one row of B": lambda: (from_scipy(sp.eye_array(300).tocsr()), random_csr(300, 300, 9, 2)),
    "sorted": lambda: (spread(random_csr(100, 300, 20, 1), 400_000), random_csr(300, 400_000, 15, 2)),
    "strips": lambda: (spread(random_csr(8, 300, 250, 1), 900_000), random_csr(300, 900_000, 900, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_method_of_a_row(shape):
    a, b = SHAPES[shape]()
    for threads in (1, 2):
        assert_same(cpu.multiply(a, b, threads=threads, spec=UPPER), upper(cpu.multiply(a, b)))
        options = ProductSpec(threshold=0.1)
        cut = cpu.multiply(a, b, threads=threads, spec=replace(options, triangle="upper"))
        assert_same(cut, upper(cpu.multiply(a, b, spec=options)))


def test_products_below_are_not_made():
    """A function that is called for each product counts them."""
    a = random_csr(60, 40, 6, 1)
    b = from_scipy(a.to_scipy().T.tocsr())
    pairs = cpu.multiply(*(CSR(m.indptr, m.indices, np.ones(m.nnz, np.int64), m.shape) for m in (a, b)))
    seen = np.zeros(1, np.int64)
    made = []
    for options in (UPPER, ProductSpec()):
        seen[0] = 0
        ring = counting(seen)
        cpu.multiply(a, b, spec=replace(options, semiring=ring))
        made.append(int(seen[0]))
    assert made == [int(upper(pairs).data.sum()), int(pairs.data.sum())]
    assert made[0] == (made[1] + a.nnz) // 2


def counting(seen):
    """Return plus and times, with a note of each product."""
    import numba

    @numba.extending.intrinsic
    def note(context, value):
        from llvmlite import ir

        def generate(context, builder, signature, args):
            word = ir.IntType(64)
            place = builder.inttoptr(ir.Constant(word, seen.ctypes.data), word.as_pointer())
            builder.store(builder.add(builder.load(place), ir.Constant(word, 1)), place)
            return args[0]

        return numba.types.float64(numba.types.float64), generate

    return spdist.Semiring(lambda x, y: x + y, lambda x, y: note(x * y), 0.0)


def test_any_matrix_of_scipys():
    """Duplicates, rows that are not sorted, other formats; of complex values the whole comes back by conjugation."""
    rng = np.random.default_rng(0)
    places = rng.integers(0, 30, 200), rng.integers(0, 20, 200)
    values = rng.integers(-4, 5, 200)
    for kind in (np.int64, np.float64, np.complex128):
        a = sp.coo_array((values.astype(kind) * (1j if kind is np.complex128 else 1), places), shape=(30, 20))
        for m in (a, a.tocsr()[:, ::-1], a.tocsc()):
            c = spdist.spgemm(m, m.T.conj(), triangle="upper")
            whole = (m @ m.T.conj()).toarray()
            assert c.dtype == whole.dtype
            np.testing.assert_array_equal(c.toarray(), np.triu(whole))
            np.testing.assert_array_equal((c + sp.triu(c, 1).T.conj()).toarray(), whole)
    np.testing.assert_array_equal(spdist.matmul(a, a.conj(), transpose_a=True, triangle="upper").toarray(),
                                  np.triu((a.T @ a.conj()).toarray()))  # fmt: skip
    assert spdist.spgemm(sp.csr_array((0, 3)), sp.csr_array((3, 0)), triangle="upper").shape == (0, 0)


@pytest.mark.parametrize("what", [*reduction_spec.REDUCTIONS, "histogram"])
def test_reductions(stored, tmp_path, scheduler, monkeypatch, what):
    monkeypatch.setattr("spdist.kernels.cpu.reduce.SLICE_PRODUCTS", 3_000)
    m = whole_numbers(150, 90, 6, 1)
    wanted = {"triangle": "upper"} | ({"bins": [-20, 0, 1, 30]} if what == "histogram" else {})
    c = sp.csr_matrix(spdist.spgemm(m, m.T, triangle="upper"))
    expected = np.histogram(c.data, wanted["bins"])[0] if what == "histogram" else by_hand(c, what)
    np.testing.assert_array_equal(spdist.reduce(m, m.T, what, **wanted), expected)
    monkeypatch.setattr(planner, "make_plan", in_grid((5, 2, 2)))
    stored("A", m), stored("B", m.T.tocsr())
    found = spdist.reduce(tmp_path / "A.zarr", tmp_path / "B.zarr", what, scheduler=scheduler, **wanted)
    np.testing.assert_array_equal(found, expected)


# -- through a device --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1 << 16, 1 << 18, 1 << 24])
@pytest.mark.parametrize("within", [False, True], ids=["", "of rows of B"])
def test_blocks_of_a_device(limit, within):
    m = random_matrix(900, 900, 8, 3)
    a = b = from_scipy(m)
    expected, first = upper(cpu.multiply(a, b)), 200
    device, some = HostDevice(limit), UPPER.of_rows(first, 900)
    rows = RowSlice(offset=SubmatrixOffset(first) if within else None)
    c = multiply_rows(a.rows(first, 900), b, device, rows, spec=some)
    assert_same(c, expected.rows(first, 900))
    assert reduce(a, b, "nnz", device, spec=UPPER).values[0] == expected.nnz
    few = multiply_rows(a, b, device, RowSlice(capacity=expected.nnz // 3), spec=UPPER)
    assert 0 < few.nnz <= expected.nnz // 3
    assert_same(few, expected.rows(0, few.nrows))


@pytest.mark.slow
def test_a_gpu_and_cores_from_storage(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_process, "count_gpus", lambda: 1)
    monkeypatch.setattr(local_cluster, "PRELOAD", [*local_cluster.PRELOAD, "tests.support.fake_gpu"])
    pretend_cpus(monkeypatch, 4)
    m = random_matrix(3000, 3000, 4.0, 4)
    a, sent, assign = stored("A", m), [], BlockAssigner.assign
    monkeypatch.setattr(
        BlockAssigner, "assign", lambda assigner, worker, work: (sent.append(worker), assign(assigner, worker, work))
    )
    limits = {"engine": "hybrid", "memory_limit": "4MiB", "grid": (40, 1, 1)}
    assert api.multiply(a, a, tmp_path / "C.zarr", triangle="upper", check=True, **limits).verification["ok"]
    assert len(set(sent)) > 1
    assert_same(read(tmp_path / "C.zarr"), upper(cpu.multiply(from_scipy(m), from_scipy(m))))


# -- from storage ------------------------------------------------------------------------------------------------------


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128", "bool"])
@given(seed=st.integers(0, 10**6), grid=st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 3)))
def test_any_grid(tmp_path, scheduler, dtype, seed, grid):
    a, b = whole_numbers(40, 30, 5, seed, dtype), whole_numbers(30, 40, 5, seed + 1, dtype)
    for name, matrix in (("a", a), ("b", b)):
        api.save(tmp_path / name, matrix, overwrite=True)
    found = api.multiply(
        tmp_path / "a", tmp_path / "b", tmp_path / "c", grid=grid, scheduler=scheduler, check=True, overwrite=True,
        triangle="upper",
    )  # fmt: skip
    assert_same(read(tmp_path / "c"), upper(cpu.multiply(from_scipy(a), from_scipy(b))))
    assert "all 40 are sorted, on and above the diagonal" in found.verification["reason"]


def test_transposes_masks_and_epilogues(stored, tmp_path, scheduler):
    m, mask = whole_numbers(90, 70, 5, 1), whole_numbers(90, 90, 30, 2)
    a, factors = stored("A", m), np.arange(1.0, 91)
    wanted = {"semiring": "min_plus", "threshold": 2.0, "epilogue": spdist.Epilogue(factors, factors), "mask": mask}
    expected = upper(from_scipy(spdist.spgemm(m, m.T.tocsr(), **wanted)))
    wanted["mask"] = stored("M", mask)
    flags = {"transpose_b": True, "triangle": "upper", "grid": (4, 3, 1), "scheduler": scheduler}
    assert api.multiply(a, a, tmp_path / "C.zarr", check=True, **flags, **wanted).verification["ok"]
    assert_same(read(tmp_path / "C.zarr"), expected)
    normal = api.multiply(a, a, tmp_path / "N.zarr", transpose_a=True, triangle="upper", scheduler=scheduler)
    assert normal.nnz == sp.triu(m.T @ m).nnz


@pytest.mark.parametrize("kind", ["random", "banded"])
@pytest.mark.parametrize("limit", ["48MiB", "1GiB"])
def test_the_plan_knows_that_it_is_half(stored, kind, limit):
    n = 6_000
    band = sp.diags_array([np.ones(n)] * 80, offsets=range(-40, 40), shape=(n, n)).tocsr()
    m = random_matrix(n, n, 30, 5) if kind == "random" else band
    a = stored("A", m)
    whole, half = (api.plan(a, a, memory_limit=limit, triangle=triangle) for triangle in (None, "upper"))
    made, c = cpu.multiply(from_scipy(m != 0), from_scipy(m != 0), spec=ProductSpec(SEMIRINGS["plus_pair"])), m @ m
    assert whole.expansion == made.data.sum()
    within = 0.1 if limit == "1GiB" else 0.2  # a small limit allows a small sample
    assert half.expansion == pytest.approx(upper(made).data.sum(), rel=within)
    assert half.c.nnz == pytest.approx(sp.triu(c).nnz, rel=within)
    assert half.projected_memory <= 0.9 * half.memory_limit
    assert not half.counted
    if limit == "48MiB" and kind == "random":
        assert len(half.blocks) <= 0.65 * len(whole.blocks)


def test_rows_that_do_not_fit_their_room(stored, tmp_path, scheduler, monkeypatch):
    m = whole_numbers(500, 500, 10, 2)
    a = stored("A", m)
    plan = api.plan(a, a, grid=(9, 2, 1), triangle="upper")
    short = replace(plan, blocks=tuple(replace(block, capacity=400) for block in plan.blocks))
    monkeypatch.setattr("spdist.scheduler.planner.planner.make_plan", lambda *_, **__: short)
    assert api.multiply(a, a, tmp_path / "C.zarr", scheduler=scheduler, triangle="upper").blocks > 9
    assert_same(read(tmp_path / "C.zarr"), upper(cpu.multiply(from_scipy(m), from_scipy(m))))


def test_lost_blocks_and_resume(stored, tmp_path, scheduler, monkeypatch):
    """Blocks whose worker is gone are computed again, as triangles; and a run goes on as a triangle only."""
    monkeypatch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)
    monkeypatch.setattr("spdist.scheduler.execution.journal.TUNING", JournalTuning(seconds=0.0))
    a = stored("A", whole_numbers(900, 900, 12, 3))
    whole = {"threshold": 2.0, "scheduler": scheduler}
    wanted = whole | {"triangle": "upper"}
    api.multiply(a, a, tmp_path / "R.zarr", grid=(20, 2, 1), **wanted)
    commits, again, commit, recompute = [], [], stages.commit, stages.recompute

    def failing(context, task, *rest):
        commits.append(task.number)
        context.results.pop(task.number, None)
        if len(commits) > 6:
            raise OSError(28, "No space left on device")
        return commit(context, task, *rest)

    monkeypatch.setattr(stages, "recompute", lambda *args: (again.append(1), recompute(*args))[1])
    monkeypatch.setitem(stages.STAGES, "commit", failing)
    with pytest.raises(SpdistError, match="disk is full"):
        api.multiply(a, a, tmp_path / "C.zarr", grid=(20, 2, 1), **wanted)
    assert again
    monkeypatch.setitem(stages.STAGES, "commit", commit)
    with pytest.raises(ResumeError, match="the mask or an option changed"):
        api.multiply(a, a, tmp_path / "C.zarr", resume=True, **whole)
    assert api.multiply(a, a, tmp_path / "C.zarr", resume=True, **wanted).state == "resumed"
    assert files(tmp_path / "C.zarr") == files(tmp_path / "R.zarr")


def test_verification_finds_what_is_wrong(stored, tmp_path, monkeypatch):
    m = whole_numbers(150, 90, 6, 1)
    a, b, c = stored("A", m), stored("B", m.T.tocsr()), upper(from_scipy(m @ m.T))
    below = np.repeat(np.arange(150), np.diff(c.indptr))
    at = int(np.argmax(below > 80))
    one, missing = c.data.copy(), np.delete(np.arange(c.nnz), at)
    one[at] += 1
    indptr = c.indptr - (np.arange(151) > below[at])
    low = c.indices.copy()
    low[at] = 0
    assert api.verify(a, b, api.save(tmp_path / "R.zarr", c), triangle="upper").ok
    for name, wrong, reason in (
        ("value", CSR(c.indptr, c.indices, one, c.shape), "computed again it is"),
        ("missing", CSR(indptr, c.indices[missing], c.data[missing], c.shape), "is missing in C"),
        ("whole", from_scipy(m @ m.T), "of C is below the diagonal"),
        ("low", CSR(c.indptr, low, c.data, c.shape), "column 0 of C is below the diagonal"),
    ):
        found = api.verify(a, b, api.save(tmp_path / f"{name}.zarr", wrong), triangle="upper")
        assert not found.ok
        assert reason in found.reason
    assert not api.verify(a, b, tmp_path / "R.zarr").ok


@pytest.mark.parametrize("bucket", [1 << 10, 1 << 24])
def test_the_whole_from_the_half(stored, tmp_path, monkeypatch, capsys, bucket):
    monkeypatch.setitem(RowSorter.__init__.__kwdefaults__, "bucket_bytes", bucket)
    monkeypatch.chdir(tmp_path)
    m = whole_numbers(150, 90, 6, 1)
    a = stored("A", m)
    api.multiply(a, a, "U.zarr", transpose_b=True, triangle="upper", workers=1)
    assert_same(
        spdist.symmetrize("U.zarr", "C.zarr").rows(0, 150), cpu.multiply(from_scipy(m), from_scipy(m.T.tocsr()))
    )
    assert cli.main(["symmetrize", "U.zarr", "C.zarr", "--overwrite", "--json"]) == 0
    assert cli.main(["verify", "A.zarr", str(api.save("B.zarr", m.T.tocsr()).url), "C.zarr"]) == 0
    z = m.astype(complex) * (1 + 2j)
    api.save("H.zarr", spdist.spgemm(z, z.conj().T, triangle="upper"))
    assert cli.main(["symmetrize", "H.zarr", "W.zarr", "--conjugate"]) == 0
    assert abs(read("W.zarr").to_scipy() - z @ z.conj().T).nnz == 0
    capsys.readouterr()
    for name, message in (("C.zarr", "an entry below the diagonal"), ("A.zarr", "is 150 x 90: what is symmetric")):
        assert cli.main(["symmetrize", name, "D.zarr"]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "D.zarr").exists()


# -- refusals, command line, jobs --------------------------------------------------------------------------------------


def test_refusals(stored, tmp_path):
    m, oblong = whole_numbers(20, 20, 3, 1), whole_numbers(20, 30, 3, 1)
    a, wide = stored("A", m), stored("W", oblong)
    for wanted, message in (
        ({"triangle": "lower"}, "triangle='lower' is not 'upper'"),
        ({"triangle": True}, "is not 'upper'"),
        ({"triangle": "upper", "top_n": 3}, "top_n=3 needs whole rows"),
        ({"triangle": "upper", "epilogue": spdist.Epilogue(normalize="l1")}, "normalize='l1' needs whole rows"),
        ({"triangle": "upper", "engine": "scipy"}, "choose"),
    ):
        for one in (m, a):
            with pytest.raises(InputError, match=message):
                spdist.matmul(one, one, tmp_path / "C.zarr", **wanted)
    for left, right in ((m, oblong), (oblong.T.tocsr(), m)):
        with pytest.raises(MatrixError, match=r"as of A @ A.T and A.T @ A, but this C is (20 x 30|30 x 20)"):
            spdist.spgemm(left, right, triangle="upper")
        with pytest.raises(MatrixError, match="but this C is"):
            spdist.reduce(left, right, "nnz", triangle="upper")
    for call in (lambda: api.multiply(a, wide, tmp_path / "C.zarr", triangle="upper"),
                 lambda: api.plan(a, wide, triangle="upper"),
                 lambda: api.reduce(a, wide, "sum", triangle="upper")):  # fmt: skip
        with pytest.raises(MatrixError, match="but this C is 20 x 30"):
            call()
    blocks = api.save(tmp_path / "E.zarr", sp.kron(m, np.ones((2, 2))).tobsr((2, 2)))
    with pytest.raises(InputError, match=r"triangles.* are for matrices of entries"):
        api.multiply(blocks, blocks, tmp_path / "C.zarr", triangle="upper")
    assert not (tmp_path / "C.zarr").exists()


def test_command_line(stored, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    m = whole_numbers(60, 40, 4, 1)
    stored("A", m), stored("B", m.T.tocsr())
    wanted = ["--triangle", "upper", "--threshold", "0"]
    assert cli.main(["plan", "A.zarr", "B.zarr", *wanted]) == 0
    assert "about " in capsys.readouterr().out.splitlines()[1][:6]
    assert cli.main(["multiply", "A.zarr", "A.zarr", "C.zarr", "--transpose-b", "--verify", *wanted]) == 0
    assert_same(read("C.zarr"), from_scipy(spdist.spgemm(m, m.T.tocsr(), triangle="upper", threshold=0)))
    assert cli.main(["verify", "A.zarr", "B.zarr", "C.zarr", *wanted]) == 0
    assert cli.main(["verify", "A.zarr", "B.zarr", "C.zarr", "--threshold", "0"]) == 1
    capsys.readouterr()
    assert cli.main(["reduce", "nnz", "A.zarr", "B.zarr", "--triangle", "upper"]) == 0
    assert f"nnz: {sp.triu(m @ m.T).nnz}" in capsys.readouterr().out
    assert cli.main(["multiply", "A.zarr", "B.zarr", "D.zarr", "--triangle", "lower"]) == 2
    assert "triangle='lower' is not 'upper'" in capsys.readouterr().err


def test_jobs(stored, run_job, tmp_path):
    m = whole_numbers(60, 40, 4, 1)
    stored("A", m)
    run_job("multiply", a="A.zarr", b="A.zarr", out="C.zarr", transpose_b=True, triangle="upper")
    assert_same(read("C.zarr"), from_scipy(spdist.spgemm(m, m.T.tocsr(), triangle="upper")))
    found = run_job("cooccurrence", a="A.zarr", out="P.zarr", triangle="upper")
    assert found["result"]["nnz"] == sp.triu(m.T @ m, 1).nnz
    run_job("cooccurrence", code=2, a="A.zarr", out="Q.zarr", triangle="upper", top_n=3)
