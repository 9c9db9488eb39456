"""An operator is a linear operator of SciPy's or CuPy's: arithmetic, and every function there that takes one."""

from __future__ import annotations

import inspect
import pickle

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as linalg

import spdist
from spdist.errors import InputError, MatrixError

N = 120
RNG = np.random.default_rng(5)
REAL = (sp.random_array((N, N), density=0.05, rng=RNG, format="csr") + 6 * sp.eye_array(N)).tocsr()
COMPLEX = (REAL * (1 + 0.3j)).tocsr()
X = RNG.random(N)
START = np.ones(N)
BLOCK = np.stack([X, X**2, X**3], axis=1)


def symmetric(a):
    return (a + a.conj().T).tocsr()


@pytest.fixture(params=[REAL, COMPLEX, REAL.astype(np.float32)], ids=["float64", "complex128", "float32"])
def pair(request):
    """Give an operator and its matrix."""
    return spdist.operator(request.param), request.param


def close(x, y, of=REAL):
    np.testing.assert_allclose(x, y, rtol=1e-5 if of.dtype == np.float32 else 1e-12)


ARITHMETIC = {
    "a.T @ x": lambda a: a.T @ X,
    "a.T.T @ x": lambda a: a.T.T @ X,
    "conj(a).T @ x": lambda a: (a.H if hasattr(a, "H") else a.conj().T) @ X,
    "a.dot(x)": lambda a: a.dot(X),
    "x @ a": lambda a: X @ a,
    "X @ a": lambda a: np.stack([X, 2 * X]) @ a,
    "a @ [...]": lambda a: a @ list(X),
    "2 * a @ x": lambda a: (2 * a) @ X,
    "(a * 2) @ x": lambda a: (a * 2) @ X,
    "a / 3 @ x": lambda a: (a / 3) @ X,
    "-a @ x": lambda a: -a @ X,
    "(a + a.T) @ x": lambda a: (a + a.T) @ X,
    "(a - a @ a) @ x": lambda a: (a - a @ a) @ X,
    "a @ column": lambda a: a @ X.reshape(-1, 1),
    "(a @ a.T) @ X": lambda a: (a @ a.T) @ np.stack([X, X**2], axis=1),
}


@pytest.mark.parametrize("what", ARITHMETIC)
def test_arithmetic(pair, what):
    op, a = pair
    close(ARITHMETIC[what](op), ARITHMETIC[what](a), a)


def test_powers_and_calls(pair):
    op, a = pair
    close((op**2) @ X, a @ (a @ X), a)
    close(op(X), a @ X)


def test_it_is_a_linear_operator(pair):
    op, a = pair
    assert isinstance(op, linalg.LinearOperator)
    assert isinstance(op, spdist.Operator)
    assert linalg.aslinearoperator(op) is op
    assert repr(op).startswith("<Operator 120 x 120")
    close(pickle.loads(pickle.dumps(op)) @ X, a @ X)


def test_numbers_and_sparse_matrices_are_refused(pair):
    op, a = pair
    with pytest.raises(InputError, match=r"a matrix times a number, 2, is written with \*"):
        op @ 2
    with pytest.raises(MatrixError, match=r"operators multiply dense arrays"):
        op @ a
    with pytest.raises(TypeError):
        op @ "x"


def of_rectangles():
    a = sp.random_array((30, 20), density=0.2, rng=np.random.default_rng(1), format="csr")
    return spdist.operator(a), a


def test_shapes_of_products_follow():
    op, a = of_rectangles()
    assert (op.T @ op).shape == (20, 20)
    close((op @ op.T) @ np.ones(30), a @ (a.T @ np.ones(30)))
    with pytest.raises(ValueError, match="cannot multiply"):
        op @ op


SOLVERS = ("bicg", "bicgstab", "cgs", "gmres", "lgmres", "qmr", "gcrotmk", "tfqmr")


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("a", [REAL, COMPLEX], ids=["real", "complex"])
def test_solvers(solver, a):
    x, state = getattr(linalg, solver)(spdist.operator(a), X, rtol=1e-10)
    assert state == 0
    np.testing.assert_allclose(a @ x, X, rtol=1e-7)


@pytest.mark.parametrize("solver", ["cg", "minres"])
def test_symmetric_solvers(solver):
    a = symmetric(REAL)
    x, state = getattr(linalg, solver)(spdist.operator(a), X, rtol=1e-10)
    assert state == 0
    np.testing.assert_allclose(a @ x, X, rtol=1e-6)


def least_squares(name):
    return lambda a: getattr(linalg, name)(a, np.ones(30), atol=1e-12, btol=1e-12)[0]


@pytest.mark.parametrize("solver", ["lsqr", "lsmr"])
def test_least_squares(solver):
    op, a = of_rectangles()
    np.testing.assert_allclose(least_squares(solver)(op), least_squares(solver)(a), rtol=1e-8, atol=1e-10)


SPECTRA = {
    "eigs": (REAL, lambda a: np.sort_complex(linalg.eigs(a, 4, v0=START)[0])),
    "eigs of complex values": (COMPLEX, lambda a: np.sort_complex(linalg.eigs(a, 4, v0=START)[0])),
    "eigsh": (symmetric(REAL), lambda a: linalg.eigsh(a, 4, v0=START)[0]),
    "eigsh of complex values": (symmetric(COMPLEX), lambda a: linalg.eigsh(a, 4, v0=START)[0]),
    "lobpcg": (symmetric(REAL), lambda a: linalg.lobpcg(a, BLOCK, maxiter=300, tol=1e-6)[0]),
    "svds by ARPACK": (REAL, lambda a: linalg.svds(a, 3, v0=START)[1]),
    "svds by ARPACK, complex": (COMPLEX, lambda a: linalg.svds(a, 3, v0=START)[1]),
    "svds by PROPACK": (REAL, lambda a: linalg.svds(a, 3, v0=START, solver="propack", maxiter=200)[1]),
    "expm_multiply": (REAL, lambda a: linalg.expm_multiply(a / 20, X, traceA=REAL.trace() / 20)),
    "onenormest": (REAL, linalg.onenormest),
}  # fmt: skip


@pytest.mark.parametrize("what", SPECTRA)
def test_spectra_and_functions(what):
    a, function = SPECTRA[what]
    np.testing.assert_allclose(function(spdist.operator(a)), function(a), rtol=1e-6)


@pytest.mark.gpu
def test_on_the_gpu_it_is_a_linear_operator_of_cupy():
    import cupy
    from cupyx.scipy import sparse
    from cupyx.scipy.sparse import linalg as on_gpu

    a, x = sparse.csr_matrix(sp.csr_matrix(REAL)), cupy.asarray(X)
    s = sparse.csr_matrix(sp.csr_matrix(symmetric(REAL)))
    op, symmetric_op = spdist.operator(a), spdist.operator(s)
    assert isinstance(op, on_gpu.LinearOperator)
    close(((2 * op + op @ op - op.T) @ x).get(), (2 * REAL + REAL @ REAL - REAL.T) @ X)
    for solver in ("cg", "gmres", "cgs", "minres"):
        solve = getattr(on_gpu, solver)
        tolerance = "rtol" if "rtol" in inspect.signature(solve).parameters else "tol"  # CuPy's names differ
        found, state = solve(symmetric_op, x, **{tolerance: 1e-10})
        assert state == 0
        np.testing.assert_allclose((s @ found).get(), X, rtol=1e-6)
    np.testing.assert_allclose(on_gpu.eigsh(symmetric_op, 4)[0].get(), linalg.eigsh(symmetric(REAL), 4)[0], rtol=1e-6)
    np.testing.assert_allclose(on_gpu.svds(op, 3)[1].get(), linalg.svds(REAL, 3)[1], rtol=1e-6)
    for solver in ("lsmr",):
        found = getattr(on_gpu, solver)(op, x, atol=1e-12, btol=1e-12)[0]
        np.testing.assert_allclose((a @ found).get(), X, rtol=1e-6)
