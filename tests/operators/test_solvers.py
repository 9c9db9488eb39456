"""Loops of solvers: iterates by their formulas, and steps that are captured once and launched again and again.

Without a GPU, kernels run on the host, and what is captured there is a list of launches. With `gpu`: CUDA graphs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.errors import MatrixError
from spdist.kernels.cuda.cuda_graph import Steps
from spdist.kernels.spmv import csr as csr_spmv
from spdist.kernels.spmv import vector_updates
from spdist.matrices.csr import CSR
from spdist.operators import solvers
from spdist.operators.solvers import LOOKS, conjugate_gradient_loop, pagerank_loop
from tests.conftest import random_matrix
from tests.support import host_cupy


def positive(n: int, dtype: str = "f8") -> sp.csr_matrix:
    """Return a Hermitian, positive definite matrix."""
    m = random_matrix(n, n, 4, 7).astype(dtype)
    if dtype[0] == "c":
        m.data = m.data * np.exp(1j * np.arange(m.nnz)).astype(dtype)
    m = m + m.conj().T
    return sp.csr_matrix(m + sp.diags_array(abs(m).sum(axis=1).A1.real + 1)).astype(dtype)


# -- the formulas ------------------------------------------------------------------------------------------------------


def textbook(
    m: np.ndarray, b: np.ndarray, x: np.ndarray, scale: np.ndarray, iterations: int
) -> tuple[np.ndarray, float]:
    """Return x and the length of r after some iterations, by Hestenes and Stiefel."""
    r = b - m @ x
    p = scale * r
    for _ in range(iterations):
        z = scale * r
        step = (np.vdot(r, z) / np.vdot(p, m @ p)).real
        x, after = x + step * p, r - step * (m @ p)
        p = scale * after + (np.vdot(after, scale * after) / np.vdot(r, z)).real * p
        r = after
    return x, float(np.linalg.norm(r))


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize(("dtype", "room"), [("f8", 1e-12), ("f4", 1e-4), ("c16", 1e-12)])
def test_iterates_follow_the_formulas(dtype, room, preconditioned):
    m, rng = positive(60, dtype), np.random.default_rng(1)
    b, x = (rng.standard_normal((2, 60)) + (1j * rng.standard_normal((2, 60)) if dtype[0] == "c" else 0)).astype(dtype)
    diagonal = m.diagonal().real if preconditioned else None
    scale = 1 / diagonal if preconditioned else np.ones(60)
    for iterations in (0, 1, 2, 5):
        given = b.copy(), x.copy()
        found = spdist.conjugate_gradient(
            spdist.operator(m), *given, diagonal=diagonal, rtol=0, maxiter=iterations
        )  # fmt: skip
        expected, residual = textbook(m.toarray().astype("c16"), b, x, scale, iterations)
        np.testing.assert_allclose(found.x, expected, rtol=room, atol=room)
        np.testing.assert_allclose(found.residual, residual, rtol=1e-3 if dtype == "f4" else 1e-9)
        assert (found.iterations, found.converged, found.launched) == (iterations, False, "one by one")
        np.testing.assert_array_equal(given, [b, x])  # the caller's vectors are left alone


@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_ranks_equal_the_power_method(dtype):
    m = abs(random_matrix(50, 50, 2, 3)).astype(dtype)
    links, out = m.toarray().astype("f8"), m.toarray().sum(axis=1)
    moves = np.where(out[:, None] > 0, links / np.where(out > 0, out, 1)[:, None], 1 / 50)
    ranks, change = np.full(50, 1 / 50), np.inf
    for iterations in range(4):
        found = spdist.pagerank(m, maxiter=iterations, tolerance=0)
        np.testing.assert_allclose(found.x, ranks, rtol=1e-5 if dtype == "f4" else 1e-12)
        np.testing.assert_allclose(found.residual, change, rtol=1e-3 if dtype == "f4" else 1e-9)
        assert found.iterations == iterations
        after = 0.85 * ranks @ moves + 0.15 / 50
        ranks, change = after, abs(after - ranks).sum()


def test_a_residual_that_is_no_number_ends_it():
    found = spdist.conjugate_gradient(spdist.operator(np.nan * positive(9)), np.ones(9))
    assert (found.iterations, found.converged) == (0, False)


# -- what is captured --------------------------------------------------------------------------------------------------


class FakeGpu:
    """Notes what `Steps` asks of CuPy, and is all of it: module, stream, pool and graph."""

    malloc = None

    def __init__(self, broken: str = "") -> None:
        self.calls: list[str] = []
        self.broken, self.cuda, self.capturing, self.failed = broken, self, False, False

    def note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.broken and self.capturing:
            self.failed = True
            raise RuntimeError(f"{name} cannot be captured")

    def mine(self, *arguments: object, **options: object) -> FakeGpu:
        return self

    Stream = MemoryPool = get_current_stream = record = mine

    def wait_event(self, event: object) -> None:
        self.note("after")

    def __enter__(self) -> None:
        self.note("in")

    def __exit__(self, *error: object) -> None:
        self.note("out")

    def using_allocator(self, malloc: object):
        self.note("pool")
        return contextlib.nullcontext()

    def step(self) -> None:
        self.note("step")

    def begin_capture(self) -> None:
        self.capturing = True
        self.note("begin")

    def end_capture(self) -> FakeGpu:
        try:
            if self.failed:
                raise RuntimeError("the capture was broken before")
            self.note("end")
        finally:
            self.capturing = False
        return self

    def launch(self) -> None:
        self.note("launch")

    def synchronize(self) -> None:
        self.note("wait")

    def free_all_blocks(self) -> None:
        self.note("free")


BATCH = ["step"] * 3


def around(*calls: str) -> list[str]:
    """Return calls with those before and after them."""
    return ["after", "in", "pool", *calls, "out", "wait", "free"]


def taken(gpu: FakeGpu, agrees: bool = True, graph: bool = True) -> tuple[str, list[bool]]:
    """Take three batches of three steps and two steps more; return how they were launched, and what was agreed on."""
    asked: list[bool] = []
    with Steps(gpu, gpu.step, 3, lambda captured: asked.append(captured) or (captured and agrees), graph) as steps:
        for count in (3, 3, 3, 2):
            steps.take(count)
    assert steps._graph is None
    return steps.launched, asked


def test_captured_once_and_launched_again():
    gpu = FakeGpu()
    assert taken(gpu) == ("as a CUDA graph", [True])
    assert gpu.calls == around(*BATCH, "begin", *BATCH, "end", "launch", "launch", "step", "step")


@pytest.mark.parametrize("broken", ["begin", "step", "end"])
def test_goes_on_without_a_graph_and_says_why(caplog, broken):
    gpu = FakeGpu(broken)
    with caplog.at_level(logging.INFO, "spdist"):
        assert taken(gpu) == (f"one by one: {broken} cannot be captured", [False])
    tried = {"begin": ["begin"], "step": ["begin", "step"], "end": ["begin", *BATCH, "end"]}[broken]
    assert gpu.calls == around(*BATCH, *tried, *BATCH, *BATCH, "step", "step")
    assert caplog.messages == [f"iterations are launched one by one: {broken} cannot be captured"]


def test_no_part_launches_a_graph_unless_all_do():
    gpu = FakeGpu()
    assert taken(gpu, agrees=False) == ("one by one: another part has no CUDA graph", [True])
    assert gpu.calls == around(*BATCH, "begin", *BATCH, "end", *BATCH, *BATCH, "step", "step")
    space = SimpleNamespace(xp=host_cupy.fake_cupy(), total=lambda failures: failures + 1)
    space.xp.cuda.Stream = lambda non_blocking: FakeGpu()
    outcome = solvers._iterate(space, lambda: None, lambda: 1.0, 1.0, 0.0, 3 * LOOKS, True)
    assert outcome == (3 * LOOKS, 1.0, "one by one: another part has no CUDA graph")


def test_nothing_is_captured_unless_asked_for():
    gpu = FakeGpu()
    assert taken(gpu, graph=False) == ("one by one: cuda_graph=False", [])
    assert gpu.calls == ["step"] * 11


def test_a_step_that_fails_leaves_nothing_behind():
    gpu = FakeGpu()

    def fail() -> None:
        raise ValueError("a broken product")

    with pytest.raises(ValueError, match="broken product"), Steps(gpu, fail, 3, bool) as steps:
        steps.take(3)
    assert gpu.calls == around()


# -- the loops, their kernels on the host ------------------------------------------------------------------------------


class OneGpu:
    """A space whose product is a kernel's, whose arrays come from `host_cupy`."""

    def __init__(self, m: sp.csr_matrix) -> None:
        import cupy

        self.xp = cupy
        self.a = CSR(*(host_cupy.filled(part) for part in (m.indptr, m.indices, m.data)), m.shape)
        self.x = host_cupy.filled(np.zeros(m.shape[0], m.dtype))

    def matvec(self, x, out):
        return csr_spmv.multiply(self.a, x, out)

    def total(self, values):
        return values


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def on_host(monkeypatch, folder):
    if not host_cupy.CAN_RUN:
        pytest.skip("needs g++ on x86-64")
    with host_cupy.installed(monkeypatch, folder):
        monkeypatch.setattr(vector_updates, "is_on_gpu", lambda x: isinstance(x, host_cupy.HostArray))
        monkeypatch.setattr(host_cupy.Module, "launched", [])
        yield


@pytest.mark.parametrize("iterations", [LOOKS - 1, LOOKS, 3 * LOOKS, 4 * LOOKS + 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_captured_gradients_are_those_launched_one_by_one(on_host, scaled, iterations):
    m, b = positive(300), np.random.default_rng(0).standard_normal(300)
    vectors = [host_cupy.filled(v) for v in (b, np.zeros(300), *([1 / m.diagonal()] if scaled else []))]
    expected = spdist.conjugate_gradient(
        spdist.operator(m), b, diagonal=m.diagonal() if scaled else None, rtol=0, maxiter=iterations
    )
    found = {}
    for graph in (True, False):
        host_cupy.Module.launched.clear()
        x, done, residual, converged, _, launched = conjugate_gradient_loop(
            OneGpu(m), *vectors, rtol=0, maxiter=iterations, cuda_graph=graph
        )
        found[graph] = x
        assert (done, converged) == (iterations, False)
        one = ["spmv_csr", "update_dot", "update_advance", "update_direction"]
        names = [name.partition("<")[0] for name in host_cupy.Module.launched]
        assert names == ["spmv_csr", *["update_dot"] * 3, *one * iterations]
        np.testing.assert_allclose(x, expected.x, atol=1e-7)
        # Of its own x: after so many iterations another order of sums, as another processor has, shows in the residual.
        np.testing.assert_allclose(residual, np.linalg.norm(b - m @ np.asarray(x)), rtol=1e-6, atol=1e-10)
        captured = graph and iterations >= 2 * LOOKS
        assert launched == ("as a CUDA graph" if captured else "one by one" + ": cuda_graph=False" * (not graph))
    np.testing.assert_array_equal(found[True], found[False])


def test_captured_ranks_are_those_launched_one_by_one(on_host):
    m = abs(random_matrix(200, 200, 3, 4))
    moves = solvers._transition_matrix(m)
    start = host_cupy.filled(np.full(200, 1 / 200))
    expected = spdist.pagerank(m, maxiter=3 * LOOKS, tolerance=0)
    found = {}
    for graph in (True, False):
        host_cupy.Module.launched.clear()
        space = OneGpu(moves)
        found[graph], done, change, *_ = pagerank_loop(
            space, start, damping=0.85, tolerance=0, maxiter=3 * LOOKS, cuda_graph=graph
        )
        assert not np.shares_memory(found[graph], space.x)  # the next products are multiplied there
        names = [name.partition("<")[0] for name in host_cupy.Module.launched]
        assert names == ["spmv_csr", "update_dot", "update_ranks"] * 3 * LOOKS
        assert done == 3 * LOOKS
        np.testing.assert_allclose(found[graph], expected.x, rtol=1e-12)
        np.testing.assert_allclose(change, expected.residual, rtol=1e-6)
    np.testing.assert_array_equal(found[True], found[False])


# -- on a GPU ----------------------------------------------------------------------------------------------------------

MANY = 12 * LOOKS + 3
"""Iterations after which these systems are solved."""
NAMES = ("sell", "csr", "levels", "popular", "cusparse")
MAKERS = {
    **{name: functools.partial(spdist.operator, method=name) for name in NAMES},
    "ehyb": lambda a: spdist.ehyb(a, part=np.arange(a.shape[0]) * 4 // a.shape[0]),
}


def arrow(n: int) -> sp.csr_matrix:
    """Return a positive definite matrix with a row that thread blocks share."""
    m = positive(n).tolil()
    m[0, :] = m[:, 0] = 1e-3
    m[0, 0] = float(n)
    return m.tocsr()


@pytest.mark.gpu
@pytest.mark.parametrize("make", [positive, arrow])
@pytest.mark.parametrize("method", list(MAKERS))
def test_graphs_of_each_product(method, make):
    import cupy
    import cupyx.scipy.sparse as csp

    m, b = make(5000), np.random.default_rng(0).standard_normal(5000)
    a, here = MAKERS[method](csp.csr_matrix(m)), cupy.asarray(b)
    for diagonal in (None, cupy.asarray(m.diagonal())):
        captured, plain = (
            spdist.conjugate_gradient(a, here, diagonal=diagonal, rtol=0, maxiter=MANY, cuda_graph=graph)
            for graph in (True, False)
        )
        assert captured.iterations == plain.iterations == MANY
        assert plain.launched == "one by one: cuda_graph=False"
        np.testing.assert_allclose(m @ captured.x.get(), b, atol=1e-8)
        assert captured.launched == "as a CUDA graph"
        if method == "cusparse":  # its bits may differ from run to run
            np.testing.assert_allclose(captured.x.get(), plain.x.get(), rtol=1e-9, atol=1e-12)
        else:
            np.testing.assert_array_equal(captured.x.get(), plain.x.get())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f4", "c8", "c16"])
def test_graphs_of_each_dtype(dtype):
    import cupy
    import cupyx.scipy.sparse as csp

    m, b = positive(3000, dtype), np.ones(3000, dtype)
    a = spdist.operator(csp.csr_matrix(m), "sell")
    captured, plain = (
        spdist.conjugate_gradient(a, cupy.asarray(b), rtol=0, maxiter=MANY, cuda_graph=graph) for graph in (True, False)
    )
    assert captured.launched == "as a CUDA graph"
    np.testing.assert_array_equal(captured.x.get(), plain.x.get())
    np.testing.assert_allclose(m @ captured.x.get(), b, atol=1e-3 if dtype in ("f4", "c8") else 1e-8)


@pytest.mark.gpu
def test_an_operator_that_waits_for_the_gpu_is_not_captured():
    import cupy
    import cupyx.scipy.sparse as csp

    m = positive(3000)
    inner = spdist.operator(csp.csr_matrix(m), "sell")

    def matvec(x, out=None):
        assert np.isfinite(float(x[0]))
        return inner.matvec(x, out)

    a = SimpleNamespace(shape=m.shape, dtype=np.dtype("f8"), matvec=matvec)
    found = spdist.conjugate_gradient(a, cupy.ones(3000), rtol=0, maxiter=MANY)
    assert found.launched.startswith("one by one: ")
    np.testing.assert_allclose(m @ found.x.get(), 1, atol=1e-8)


@pytest.mark.gpu
def test_graphs_of_ranks(monkeypatch):
    """Of one form: the quickest of each of two calls could differ, and with it the order of sums."""
    import cupyx.scipy.sparse as csp

    monkeypatch.setattr(solvers, "operator", functools.partial(spdist.operator, method="sell"))
    links = csp.csr_matrix(abs(random_matrix(3000, 3000, 3, 4)))
    captured, plain = (spdist.pagerank(links, tolerance=0, maxiter=MANY, cuda_graph=graph) for graph in (True, False))
    assert (captured.launched, plain.launched) == ("as a CUDA graph", "one by one: cuda_graph=False")
    np.testing.assert_array_equal(captured.x.get(), plain.x.get())


@pytest.mark.gpu
def test_graphs_of_a_partitioned_matrix():
    import cupy

    m, b = positive(5000), np.random.default_rng(0).standard_normal(5000)
    with spdist.partitioned(m, cupy.cuda.runtime.getDeviceCount(), partition="rows", on_gpu=True, method="sell") as a:
        captured, plain, again = (
            spdist.conjugate_gradient(a, b, rtol=0, maxiter=MANY, cuda_graph=graph) for graph in (True, False, True)
        )
        np.testing.assert_allclose(a @ b, m @ b, atol=1e-10)  # messages go on as before
    assert (captured.launched, plain.launched) == ("as a CUDA graph", "one by one: cuda_graph=False")
    np.testing.assert_array_equal(captured.x, plain.x)
    np.testing.assert_array_equal(again.x, plain.x)
    np.testing.assert_allclose(m @ captured.x, b, atol=1e-8)


@pytest.mark.parametrize("weight", [-1.0, np.inf, np.nan])
def test_links_have_weights_above_zero(weight):
    with pytest.raises(MatrixError, match="negative, infinite or NaN"):
        spdist.pagerank(sp.csr_array([[0.0, weight], [1.0, 0.0]]))


def test_a_matrix_is_an_operator():
    a = sp.diags_array([1.0, 2.0, 4.0], format="csr")
    np.testing.assert_allclose(spdist.conjugate_gradient(a, np.ones(3)).x, [1, 0.5, 0.25])


def test_a_norm_that_is_infinite_is_not_reached():
    a = sp.diags_array([1.0, 2.0, 4.0], format="csr")
    with np.errstate(over="ignore"):
        assert not spdist.conjugate_gradient(a, np.full(3, 1e300)).converged


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["b", "x0", "diagonal"])
def test_vectors_are_of_finite_values(name, value):
    vectors = {"b": np.ones(3), name: np.array([1, value, 1])}
    with pytest.raises(MatrixError, match=f"{name} holds NaN or infinite values"):
        spdist.conjugate_gradient(positive(3), **vectors)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_diagonal_is_positive(value):
    with pytest.raises(MatrixError, match="the diagonal is not positive"):
        spdist.conjugate_gradient(positive(3), np.ones(3), diagonal=np.array([1, value, 1]))


def test_complex_vectors_of_a_real_matrix_are_refused():
    """Their imaginary parts would be dropped."""
    with pytest.raises(MatrixError, match="b, x0 or the diagonal is complex"):
        spdist.conjugate_gradient(spdist.operator(positive(5)), 1j * np.ones(5))
    with pytest.raises(MatrixError, match="give real weights"):
        spdist.pagerank(positive(5, "c16"))


def test_vectors_may_be_lists_and_must_fit():
    a = sp.diags_array([1.0, 2.0, 4.0], format="csr")
    np.testing.assert_allclose(spdist.conjugate_gradient(a, [1, 1, 1], [0, 0, 0], diagonal=[1, 2, 4]).x, [1, 0.5, 0.25])
    for wrong in ({"x0": [1.0]}, {"diagonal": np.ones((3, 1))}):
        with pytest.raises(MatrixError, match=rf"A is \(3, 3\), {next(iter(wrong))} is"):
            spdist.conjugate_gradient(a, np.ones(3), **wrong)
    with pytest.raises(MatrixError, match="b holds object, where numbers are needed"):
        spdist.conjugate_gradient(a, np.array([1, None, 2]))
