"""The CPU multiply against SciPy: pattern, order, values bit for bit, capacity and workspace."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from spdist.errors import InputError, MatrixError
from spdist.kernels.cpu import multiply as cpu
from spdist.kernels.cpu import prepare
from spdist.kernels.cpu import workspace as cpu_sizes
from spdist.kernels.cpu.product_counts import estimate_products, row_products
from spdist.kernels.cpu.workspace import cpu_workspace
from spdist.kernels.product_spec import Epilogue, ProductSpec
from spdist.kernels.semirings import Semiring
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR, from_scipy
from spdist.matrices.dtypes import index_dtype, result_dtype
from tests.conftest import random_matrix
from tests.support.strategies import DTYPES, FLOATS, csr_pairs

ENGINES = ["scipy", "numba"]
MANY = settings(max_examples=60, deadline=None)
FEW = settings(max_examples=15, deadline=None)


def random_csr(nrows: int, ncols: int, per_row: float, seed: int = 0, dtype: Any = np.float64) -> CSR:
    """Random columns, row lengths uneven, values with signs."""
    rng = np.random.default_rng(seed)
    lengths = rng.poisson(per_row, nrows)
    lengths[: nrows // 50] *= 10
    rows = np.repeat(np.arange(nrows), lengths)
    values = rng.standard_normal(len(rows)).astype(dtype)
    if np.dtype(dtype).kind == "c":
        values += (1j * rng.standard_normal(len(rows))).astype(dtype)
    m = sp.csr_matrix((values, (rows, rng.integers(0, ncols, len(rows)))), shape=(nrows, ncols))
    return from_scipy(m)


def banded_csr(nrows: int, width: int) -> CSR:
    """A band: long runs of neighbouring columns, high compression."""
    diagonals = np.random.default_rng(1).standard_normal((2 * width + 1, nrows))
    return from_scipy(sp.dia_matrix((diagonals, range(-width, width + 1)), shape=(nrows, nrows)).tocsr())


def pattern(a: CSR, b: CSR) -> Any:
    """SciPy drops zero results, so the pattern needs its own oracle."""
    ones = [sp.csr_matrix((np.ones(m.nnz), m.indices, m.indptr), shape=m.shape) for m in (a, b)]
    c = sp.csr_matrix(ones[0] @ ones[1])
    c.sort_indices()
    return c


def assert_same(c: CSR, d: CSR) -> None:
    """Equal bit for bit; a NaN is a NaN, its sign and payload are the processor's choice."""
    assert c.shape == d.shape
    assert c.dtype == d.dtype
    assert c.indices.dtype == d.indices.dtype
    assert_array_equal(c.indptr, d.indptr)
    assert_array_equal(c.indices, d.indices)
    x, y = c.data, d.data
    if x.dtype.kind == "c":
        x, y = x.view(x.real.dtype), y.view(y.real.dtype)
    assert_array_equal(x, y)
    if x.dtype.kind == "f":
        numbers = ~np.isnan(x)
        assert_array_equal(np.signbit(x[numbers]), np.signbit(y[numbers]))


@pytest.mark.parametrize("engine", ENGINES)
@given(pair=csr_pairs())
@MANY
def test_product_equals_scipy(engine: Any, pair: tuple[CSR, CSR]) -> None:
    a, b = pair
    c = cpu.multiply(a, b, engine=engine)
    check_canonical(c)
    expected = pattern(a, b)
    assert c.shape == (a.nrows, b.ncols)
    assert c.indices.dtype == index_dtype(b.ncols)
    assert_array_equal(c.indptr, expected.indptr)
    assert_array_equal(c.indices, expected.indices)
    assert_array_equal(c.to_scipy().toarray(), a.to_scipy().toarray() @ b.to_scipy().toarray())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@FEW
def test_dtypes_wrap_as_numpy(engine: Any, dtype: Any, data: Any) -> None:
    a, b = data.draw(csr_pairs(dtypes=(dtype, dtype)))
    c = cpu.multiply(a, b, engine=engine)
    assert c.dtype == dtype
    assert_array_equal(c.to_scipy().toarray(), a.to_scipy().toarray() @ b.to_scipy().toarray())


@pytest.mark.parametrize("dtypes", [("?", "f4"), ("i4", "f4"), ("u8", "i8"), ("f8", "c8"), ("i1", "u1")], ids=str)
def test_mixed_dtypes_give_numpys_result_type(dtypes: tuple[str, str]) -> None:
    a, b = (random_csr(40, 40, 4, seed).to_scipy() for seed in (1, 2))
    a, b = from_scipy((a * 3).astype(dtypes[0])), from_scipy((b * 3).astype(dtypes[1]))
    expected = a.to_scipy().toarray() @ b.to_scipy().toarray()
    for engine in ENGINES:
        c = cpu.multiply(a, b, engine=engine)
        assert c.dtype == expected.dtype == result_dtype(a.dtype, b.dtype)
        np.testing.assert_allclose(c.to_scipy().toarray(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [("random", t) for t in ("f4", "f8", "c8", "c16")] + [(s, "f8") for s in ("wide", "scattered", "long")],
)
def test_engines_give_the_same_bits(shape: str, dtype: Any) -> None:
    make = {
        "random": lambda: (random_csr(300, 200, 12, 1, dtype), random_csr(200, 400, 9, 2, dtype)),
        "wide": lambda: (random_csr(100, 300, 20, 1, dtype), random_csr(300, 400_000, 15, 2, dtype)),
        "scattered": lambda: (random_csr(500, 400, 5, 1, dtype), random_csr(400, 3_000_000, 5, 2, dtype)),
        "long": lambda: (random_csr(5, 300, 250, 1, dtype), random_csr(300, 900_000, 900, 2, dtype)),
    }
    a, b = make[shape]()
    expected = cpu.multiply(a, b, engine="scipy")
    assert_array_equal(expected.indptr, pattern(a, b).indptr)
    assert_array_equal(expected.indices, pattern(a, b).indices)
    assert_same(cpu.multiply(a, b, engine="numba"), expected)


@given(pair=csr_pairs(values=FLOATS))
@MANY
def test_engines_agree_on_nan_inf_and_signed_zero(pair: tuple[CSR, CSR]) -> None:
    with np.errstate(all="ignore"):
        assert_same(cpu.multiply(*pair, engine="numba"), cpu.multiply(*pair, engine="scipy"))


def test_complex_nan_and_inf_follow_scipy() -> None:
    values = np.array([complex(x, y) for x in (np.inf, -0.0, 1, np.nan) for y in (-np.inf, 0.0, 2, np.nan)])
    n = len(values)
    a = CSR(np.arange(n + 1), np.zeros(n, np.int32), values, (n, 1))
    b = CSR(np.array([0, n]), np.arange(n, dtype=np.int32), values[::-1].copy(), (1, n))
    assert_same(cpu.multiply(a, b, engine="numba"), cpu.multiply(a, b, engine="scipy"))


@pytest.mark.parametrize("engine", ENGINES)
def test_cancelled_and_stored_zeros_are_kept(engine: Any) -> None:
    a = CSR(np.array([0, 2, 3]), np.array([0, 1, 1], np.int32), np.array([1.0, -1.0, 0.0]), (2, 2))
    b = CSR(np.array([0, 1, 3]), np.array([2, 0, 2], np.int32), np.array([5.0, np.inf, 5.0]), (2, 3))
    c = cpu.multiply(a, b, engine=engine)
    assert_array_equal(c.indptr, [0, 2, 4])
    assert_array_equal(c.indices, [0, 2, 0, 2])
    assert_array_equal(c.data, [-np.inf, 0.0, np.nan, 0.0])


@given(pair=csr_pairs(ncols=st.sampled_from([10**9, 2**31 - 1, 2**31, 10**12, 2**60])))
@FEW
def test_wide_matrices_need_no_memory_for_their_columns(pair: tuple[CSR, CSR]) -> None:
    a, b = pair
    used, at = np.unique(b.indices, return_inverse=True)
    narrow = CSR(b.indptr, at.astype(np.int32), b.data, (b.nrows, len(used)))
    c, d = cpu.multiply(a, b), cpu.multiply(a, narrow, engine="scipy")
    assert c.indices.dtype == index_dtype(b.ncols)
    assert_array_equal(c.indptr, d.indptr)
    assert_array_equal(c.indices, used[d.indices])
    assert_array_equal(c.data, d.data)


def test_a_long_row_of_a_very_wide_matrix() -> None:
    b = random_csr(2_000, 60_000, 60)
    stretched = CSR(b.indptr, b.indices.astype(np.int64) * 10**12 + 5, b.data, (b.nrows, 10**17))
    a = random_csr(3, 2_000, 1_500)
    c, d = cpu.multiply(a, stretched), cpu.multiply(a, b, engine="scipy")
    assert_array_equal(c.indices, d.indices.astype(np.int64) * 10**12 + 5)
    assert_array_equal(c.data, d.data)


@pytest.mark.parametrize("engine", ENGINES)
@given(pair=csr_pairs(), capacity=st.integers(0, 60), threads=st.integers(1, 2))
@MANY
def test_multiply_rows_stops_at_the_capacity(engine: Any, pair: Any, capacity: int, threads: int) -> None:
    a, b = pair
    whole = cpu.multiply(a, b, engine=engine)
    start = 0
    while start < a.nrows:
        part = cpu.multiply_rows(a, b, start, capacity, engine=engine, threads=threads)
        stop = start + part.nrows
        assert part.nrows >= 1
        assert part.nnz <= capacity or part.nrows == 1
        assert stop == a.nrows or int(whole.indptr[stop + 1] - whole.indptr[start]) > capacity
        assert_same(part, whole.rows(start, stop))
        start = stop
    assert cpu.multiply_rows(a, b, a.nrows, capacity, engine=engine).shape == (0, b.ncols)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("capacity", [None, 700_000, 300_000, 1])
def test_threads_place_their_slices_in_order(engine: Any, capacity: int | None) -> None:
    a, b = random_csr(6_000, 3_000, 15, 1), random_csr(3_000, 50_000, 12, 2)
    whole = cpu.multiply(a, b, engine="scipy")
    if capacity is None:
        assert_same(cpu.multiply(a, b, engine=engine, threads=3), whole)
        return
    for start in (0, 1_234):
        part = cpu.multiply_rows(a, b, start, capacity, engine=engine, threads=2)
        fits = int(np.searchsorted(whole.indptr, whole.indptr[start] + capacity, side="right")) - 1
        assert_same(part, whole.rows(start, max(fits, start + 1)))


def test_rows_longer_than_scratch_are_made_in_place() -> None:
    a, b = random_csr(6, 2_000, 1_900, 1), random_csr(2_000, 400_000, 300, 2)
    assert int(np.diff(cpu.multiply(a, b, engine="scipy").indptr).max()) > 1 << 17
    assert_same(cpu.multiply(a, b, engine="numba", threads=2), cpu.multiply(a, b, engine="scipy"))


def test_high_compression_and_integer_wrap_around() -> None:
    a = banded_csr(600, 20)
    assert_same(cpu.multiply(a, a, engine="numba", threads=2), cpu.multiply(a, a, engine="scipy"))
    big = CSR(a.indptr, a.indices, (a.data * 1e18).astype(np.int64), a.shape)
    c = cpu.multiply(big, big, engine="numba")
    assert_array_equal(c.to_scipy().toarray(), big.to_scipy().toarray() @ big.to_scipy().toarray())


def test_read_only_operands_need_no_other_kernel() -> None:
    a = random_csr(50, 50, 3)
    cpu.multiply(a, a, engine="numba")
    from spdist.kernels.cpu import slices

    compiled = len(slices.multiply_slices.signatures)
    for array in (a.indptr, a.indices, a.data):
        array.flags.writeable = False
    assert_same(cpu.multiply(a, a, engine="numba"), cpu.multiply(a, a, engine="scipy"))
    assert len(slices.multiply_slices.signatures) == compiled


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ncols", [1_000, 300_000])
def test_measured_memory_stays_below_the_workspace(engine: Any, threads: int, ncols: int) -> None:
    a, b = random_csr(4_000, 1_000, 12, 1), random_csr(1_000, ncols, 25, 2)
    capacity = cpu.multiply(a, b, engine=engine).nnz  # and whatever is loaded once is loaded
    longest = int(row_products(a, np.diff(b.indptr)).max())
    peaks = []
    for _ in range(3):  # what other threads of the tests allocate meanwhile counts too: the least is the call's own
        tracemalloc.start()
        c = cpu.multiply_rows(a, b, 0, capacity, engine=engine, threads=threads)
        peaks.append(tracemalloc.get_traced_memory()[1] - c.nbytes)
        tracemalloc.stop()
        assert c.nrows == a.nrows
        del c
    assert min(peaks) <= cpu_workspace(engine, ncols, longest, 8, 4, threads)


def test_workspace_does_not_grow_with_columns_for_numba() -> None:
    assert cpu_workspace("numba", 10**15, 10**9, 16, 8, threads=2) < 2 * 14 * 2**20
    assert cpu_workspace("scipy", 10**9, 10, 8, 4) > 10**9


def test_choose_is_deterministic_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_loaded", set())
    monkeypatch.setattr(prepare, "_left_to_scipy", Counter())
    a = random_csr(100, 100, 3)
    wide = CSR(a.indptr, a.indices, a.data, (100, 10**8))
    assert prepare.choose(a, a)[0] == "scipy"
    assert prepare.choose(a, a) == prepare.choose(a, a)
    assert prepare.choose(a, wide)[0] == "numba"
    assert prepare.choose(a, a, workspace_limit=1000)[0] == "numba"
    heavy = random_csr(2_000, 2_000, 150)
    assert prepare.choose(heavy, heavy)[0] == "numba"
    cpu.multiply(a, a, engine="numba")
    assert prepare.choose(a, a)[0] == "numba"


def test_many_small_products_get_the_quicker_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_loaded", set())
    monkeypatch.setattr(prepare, "_left_to_scipy", Counter())
    a = random_csr(1000, 1000, 5)
    products = prepare.estimate_products(a, a)
    monkeypatch.setattr(prepare, "SMALL_PRODUCTS", 3 * products)
    engines = []
    for _ in range(5):
        engines.append(prepare.choose(a, a)[0])
        cpu.multiply(a, a)
    assert engines == ["scipy", "scipy", "scipy", "numba", "numba"]


@given(pair=csr_pairs())
@MANY
def test_row_products_count_each_row(pair: tuple[CSR, CSR]) -> None:
    a, b = pair
    nnz = np.diff(b.indptr)
    expected = [int(nnz[a.indices[a.indptr[i] : a.indptr[i + 1]]].sum()) for i in range(a.nrows)]
    assert_array_equal(row_products(a, nnz), np.array(expected, np.int64))
    assert estimate_products(a, b) == sum(expected)


def test_row_products_over_several_blocks() -> None:
    a = random_csr(30_000, 500, 6)
    nnz = np.random.default_rng(3).integers(0, 9, 500)
    weights = sp.csr_matrix((np.ones(a.nnz, np.int64), a.indices, a.indptr), shape=a.shape)
    assert_array_equal(row_products(a, nnz), weights @ nnz)


def test_wrong_input_is_refused() -> None:
    a, b = random_csr(3, 4, 2), random_csr(3, 4, 2)
    with pytest.raises(MatrixError, match="as many columns as B has rows"):
        cpu.multiply(a, b)
    square = random_csr(4, 4, 2)
    half = CSR(square.indptr, square.indices, square.data.astype(np.float16), square.shape)
    with pytest.raises(MatrixError, match="float16"):
        cpu.multiply(half, half)
    with pytest.raises(InputError, match="start=5"):
        cpu.multiply_rows(square, square, 5, 10)
    with pytest.raises(InputError, match="engine='cuda'"):
        cpu.multiply(square, square, engine="cuda")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="threads=0"):
        cpu.multiply(square, square, threads=0)


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    from spdist.kernels.cpu.numba_engine import new_workspace

    a = random_csr(6_000, 3_000, 15)
    b = random_csr(3_000, 50_000, 12)

    caller = threading.get_ident()

    def broken(*arguments: Any) -> Any:
        if threading.get_ident() != caller:
            raise MemoryError("no scratch")
        return new_workspace(*arguments)

    monkeypatch.setattr("spdist.kernels.cpu.numba_engine._idle_buffers.take", lambda kind: None)
    monkeypatch.setattr("spdist.kernels.cpu.numba_engine.new_workspace", broken)
    with pytest.raises(MemoryError, match="no scratch"):
        cpu.multiply(a, b, engine="numba", threads=2)


def test_buffers_of_threads_serve_the_next_product_of_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    from spdist.kernels.cpu import numba_engine

    made: list[int] = []

    def counted(ncols: int, *rest: Any) -> Any:
        made.append(ncols)
        return new_workspace(ncols, *rest)

    new_workspace = numba_engine.new_workspace
    monkeypatch.setattr(numba_engine, "_idle_buffers", numba_engine.IdleBuffers())
    monkeypatch.setattr(numba_engine, "new_workspace", counted)
    a = random_csr(6_000, 3_000, 15)
    b, wider = random_csr(3_000, 40_000, 12), random_csr(3_000, 50_000, 12)
    expected = cpu.multiply(a, b, engine="scipy")
    for _ in range(3):
        assert_same(cpu.multiply(a, b, engine="numba", threads=2), expected)
    assert 1 <= len(made) <= 2
    idle = sum(map(len, numba_engine._idle_buffers._kept.values()))
    assert cpu.multiply_rows(a, b, 0, expected.nnz // 2, engine="numba", threads=2).nnz <= expected.nnz // 2
    # Those of a product that was stopped are not kept; on a busy machine one thread may have made all of it.
    assert sum(map(len, numba_engine._idle_buffers._kept.values())) < idle
    cpu.multiply(a, b, engine="numba", threads=2)
    assert_same(cpu.multiply(a, wider, engine="numba", threads=2), cpu.multiply(a, wider, engine="scipy"))
    assert len(numba_engine._idle_buffers._kept) == 1
    assert 50_000 in made


@pytest.mark.parametrize("decorator", ["part", "inlined"])
def test_python_cannot_call_parts_of_kernels(decorator) -> None:
    """A part has no code for Python, and Numba would call a null pointer; whether a kernel has compiled it or not."""
    from spdist.kernels.cpu import numba_compile

    twice = getattr(numba_compile, decorator)(lambda x: 2 * x)
    kernel = numba_compile.unsaved(numba_compile.part(lambda x: twice(x) + 1))
    with pytest.raises(TypeError, match=r"compiled for kernels only: call a kernel, or its \.py_func"):
        twice(3)
    assert kernel(3) == 7
    with pytest.raises(TypeError, match="compiled for kernels only"):
        twice(3)


@pytest.mark.parametrize("decorator", ["part", "inlined"])
def test_parts_are_optimised_in_their_kernel_alone(decorator) -> None:
    """Nor has a part machine code of its own; both would take a quarter of the time to compile a kernel of products."""
    from spdist.kernels.cpu import numba_compile

    twice = getattr(numba_compile, decorator)(lambda x: 2 * x)
    part = getattr(numba_compile, decorator)(lambda x: twice(x) + 1)
    kernel = numba_compile.unsaved(numba_compile.part(lambda x: part(x)))
    assert kernel(3) == 7
    [callee], [caller] = twice.overloads.values(), part.overloads.values()
    lines = caller.library.get_llvm_str().splitlines()
    assert any("call" in line and callee.fndesc.llvm_func_name in line for line in lines)
    assert not caller.library.codegen._engine.is_symbol_defined(caller.fndesc.llvm_func_name)


def test_copies_of_a_function_are_compiled_once() -> None:
    """A worker gets a new copy with every product; a kernel for each would take seconds and never leave memory."""
    from spdist.kernels.cpu import slices
    from spdist.kernels.cpu.numba_compile import RingType, unsaved

    def power(exponent: float) -> Callable[[float], float]:
        return lambda x: x**exponent

    m = from_scipy(random_matrix(30, 30, 3, 1))
    kernel = unsaved(slices.multiply_slices)
    sizes, results = [], []
    for exponent in (2.0, 2.0, 3.0):
        spec = ProductSpec(epilogue=Epilogue(apply=power(exponent)))
        results.append(cpu.multiply(m, m, engine="numba", spec=cloudpickle.loads(cloudpickle.dumps(spec))).data)
        sizes.append(len(kernel.signatures))
    assert (sizes[1] - sizes[0], sizes[2] - sizes[1]) == (0, 1)
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[1], results[2])
    own = Semiring(lambda x, y: x + y, lambda x, y: 2 * x * y, 0.0)
    assert RingType(own) == RingType(cloudpickle.loads(cloudpickle.dumps(own)))
    assert RingType(own) != RingType(Semiring(own.add, lambda x, y: 3 * x * y, 0.0))


@pytest.mark.parametrize("options", [{}, {"top_n": 3}, {"threshold": 2.0}, {"triangle": "upper"}], ids=str)
def test_bits_do_not_depend_on_threads(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Small slices and little scratch memory, so that slices wait, and are made in place."""
    monkeypatch.setattr(cpu_sizes, "SLICE_PRODUCTS", 300)
    monkeypatch.setattr(cpu_sizes, "SCRATCH_BYTES", 700 * 12)
    monkeypatch.setattr(cpu, "PARALLEL_PRODUCTS", 1)
    a = from_scipy(sp.vstack([random_matrix(900, 1000, 6, 1), random_matrix(100, 1000, 400, 2)], format="csr"))
    spec = ProductSpec(**options)
    one = cpu.multiply(a, a, engine="numba", threads=1, spec=spec)
    for threads in (2, 5, 16):
        assert_same(cpu.multiply(a, a, engine="numba", threads=threads, spec=spec), one)
        for capacity in (0, 1, one.nnz // 2, one.nnz - 1):
            some = cpu.multiply_rows(a, a, 0, capacity, engine="numba", threads=threads, spec=spec)
            whole = cpu.multiply_rows(a, a, 0, capacity, engine="numba", threads=1, spec=spec)
            assert_same(some, whole)


def test_import_does_not_load_numba() -> None:
    code = "import sys, spdist.kernels.cpu; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_works_where_nothing_can_be_kept_on_disk():
    """Numba finds no folder that can be written to, and refuses to keep a function while spdist's modules load."""
    program = (
        "from numba.core import caching; caching.CacheImpl._locator_classes = []; "
        "import numpy as np; from spdist.matrices import csr; from spdist.kernels.cpu.finished import merge; "
        "from spdist.kernels.cpu.rowwise import multiply; "
        "from spdist.storage.formats import matrix_market; from spdist.scheduler.planner import cut_rows; "
        "m = csr.CSR(np.array([0, 1]), np.array([0], np.int32), np.ones(1), (1, 1)); "
        "print(merge.merge(m, m).data)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_CACHE")}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (found.returncode, found.stdout) == (0, "[2.]\n")
    assert len([line for line in found.stderr.splitlines() if "compiling kernels" not in line]) == 1
    assert "set NUMBA_CACHE_DIR to a folder that can be written to" in found.stderr


def test_a_function_that_cannot_be_hashed_is_refused_by_name() -> None:
    class Square:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: float) -> float:
            return x * x

    a = from_scipy(random_matrix(9, 9, 3, 1))
    with pytest.raises(InputError, match=r"epilogue: apply=.*Square.* cannot be compiled by Numba .* cannot be hashed"):
        cpu.multiply(a, a, spec=ProductSpec(epilogue=Epilogue(apply=Square())))
