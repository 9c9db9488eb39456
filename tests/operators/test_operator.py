"""Operators: what solvers see, the choice, storage; on the CPU. With `gpu`: the same on CuPy's matrices."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as sla

import spdist
from spdist.errors import CorruptError, InputError, MatrixError
from spdist.matrices.bsr import BSR
from tests.conftest import random_matrix
from tests.kernels.bsr.test_multiply_cpu import block_matrix
from tests.kernels.spmv.test_sell import stencil

HOST_METHODS = ("auto", "sell", "scipy", "levels", "popular")
GPU_METHODS = ("auto", "sell", "csr", "cusparse", "cusparse_coo", "levels", "popular")


def vectors(n: int) -> list[np.ndarray]:
    """Return x of every kind that an operator takes: vectors, columns, matrices of both orders, real and complex."""
    rng = np.random.default_rng(0)
    x, many = rng.standard_normal(n), rng.standard_normal((n, 5))
    return [
        x,
        x[:, None],
        many,
        np.asfortranarray(many),
        x + 1j * x,
        many - 1j * many,
        x.astype(np.float32),
        many[:, ::2],
    ]


@pytest.mark.parametrize("method", HOST_METHODS)
def test_products_are_scipys(method):
    m = stencil(8)
    a = spdist.operator(m, method, threads=2)
    for x in vectors(m.shape[1]):
        y = a @ x
        assert y.dtype == np.result_type(m.dtype, x.dtype)
        np.testing.assert_allclose(y, m @ x, rtol=1e-5 if x.dtype == np.float32 else 1e-12, atol=1e-5)
        np.testing.assert_allclose(a.rmatmat(x) if x.ndim == 2 else a.rmatvec(x), m.T @ x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("kind", [sp.bsr_array, spdist.BSR])
@pytest.mark.parametrize("method", ["bsr", "auto", "sell"])
def test_block_matrices(kind, method, dtype, tmp_path):
    m = block_matrix(40, 40, 5.0, (3, 2), 1)
    blocks = m.to_scipy()
    a = spdist.operator(m if kind is spdist.BSR else blocks, method, threads=2, dtype=dtype)
    for x in vectors(m.shape[1]):
        y = a @ x
        assert y.dtype == np.result_type(m.dtype, x.dtype)
        np.testing.assert_allclose(y, blocks @ x, rtol=1e-12, atol=1e-12)
    for z in vectors(m.shape[0]):
        back = a.rmatmat(z) if z.ndim == 2 else a.rmatvec(z)
        np.testing.assert_allclose(back, blocks.T @ z, rtol=1e-6, atol=1e-5)
    assert abs(a.to_csr().to_scipy() - blocks.tocsr()).max() == 0
    a.save(tmp_path / "a.zarr")
    x = np.random.default_rng(1).standard_normal(m.shape[1])
    np.testing.assert_array_equal(spdist.open_operator(tmp_path / "a.zarr") @ x, a @ x)
    if method == "bsr":
        assert "blocks of 3 x 2" in repr(a)
        with pytest.raises(InputError, match="multiplies blocks on the CPU"):
            spdist.open_operator(tmp_path / "a.zarr", on_gpu=True)


def test_blocks_are_tried_where_there_are_some():
    m = block_matrix(400, 400, 20.0, (3, 3), 1)
    assert "bsr" in spdist.operator(m).why
    assert "bsr" not in spdist.operator(m.to_scipy().tocsr()).why
    with pytest.raises(InputError, match="method 'bsr' is not for this matrix on the CPU"):
        spdist.operator(m.to_scipy().tocsr(), "bsr")
    complex_ = BSR(m.indptr, m.indices, m.data * (1 + 2j), m.shape)
    x = np.random.default_rng(1).standard_normal(m.shape[0])
    np.testing.assert_allclose(spdist.operator(complex_, "bsr").rmatvec(x), (1 - 2j) * (m.to_scipy().T @ x))


@pytest.mark.parametrize("method", HOST_METHODS)
def test_solvers_take_it(method):
    m = stencil(8)
    m = m @ m.T + sp.eye_array(m.shape[0])
    b = np.random.default_rng(1).standard_normal(m.shape[0])
    x, failed = sla.cg(spdist.operator(m.tocsr(), method), b, rtol=1e-10)
    assert failed == 0
    np.testing.assert_allclose(m @ x, b, atol=1e-6)
    sla.lsqr(spdist.operator(m.tocsr(), method), b, iter_lim=3)  # asks for rmatvec


@pytest.mark.parametrize("method", HOST_METHODS)
def test_saved_and_opened(tmp_path, method):
    m = stencil(8)
    a = spdist.operator(m, method)
    a.save(tmp_path / "a.zarr")
    b = spdist.open_operator(tmp_path / "a.zarr")
    assert (b.shape, b.dtype, b.method, b.why) == (a.shape, a.dtype, a.method, a.why)
    x = np.random.default_rng(1).standard_normal(m.shape[1])
    np.testing.assert_array_equal(b @ x, a @ x)
    np.testing.assert_allclose(b.rmatvec(x), m.T @ x, rtol=1e-12)
    assert abs(b.to_csr().to_scipy() - m).max() == 0


def test_opening_checks(tmp_path):
    m = stencil(8)
    spdist.save(tmp_path / "m.zarr", m)
    with pytest.raises(MatrixError, match="not an operator, but csr_matrix"):
        spdist.open_operator(tmp_path / "m.zarr")
    with pytest.raises(MatrixError, match="there is no such matrix"):
        spdist.open_operator(tmp_path / "none.zarr")
    spdist.sell(m).save(tmp_path / "a.zarr")
    with pytest.raises(MatrixError, match="expected a Zarr group with encoding-type csr_matrix, got spdist-operator"):
        spdist.open(tmp_path / "a.zarr")
    with pytest.raises(InputError, match="already exists"):
        spdist.sell(m).save(tmp_path / "a.zarr")
    chunk = next(path for path in (tmp_path / "a.zarr" / "matrix.values" / "c").iterdir())
    content = bytearray(chunk.read_bytes())
    content[10] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(CorruptError, match=r"chunk 0 of array 'matrix\.values'"):
        spdist.open_operator(tmp_path / "a.zarr")


def test_it_says_what_it_chose_and_why():
    m = stencil(16)
    tried = spdist.operator(m, uses=1_000_000)
    assert tried.why.startswith("auto: fastest of ")
    assert all(name in tried.why for name in ("sell", "scipy"))
    once = spdist.operator(m, uses=1)
    assert once.method == "scipy"
    assert once.prepared.matrix.data is m.data  # nothing was built
    assert once.why.startswith("auto: the best for 1 uses by the model, scipy ")


def test_sell_has_its_parameters():
    m = stencil(8)
    a = spdist.sell(m, C=8, sigma=1, T=4)
    assert "SELL-32-1," in repr(a)
    x = np.random.default_rng(1).standard_normal(m.shape[1])
    np.testing.assert_allclose(a @ x, m @ x, rtol=1e-12)


SELL_REFUSED = [
    ({"sigma": "x"}, "sigma='x' must be a whole number"), ({"sigma": 1.5}, "sigma=1.5 must be"),
    ({"sigma": 0}, "sigma=0 must be"), ({"block": "x"}, "block='x' must be"), ({"C": "auto"}, "C='auto' must be"),
    ({"C": 8.0}, "C=8.0 must be"), ({"T": 0}, "T=0 must be"), ({"index": "x"}, "index='x' is not one of wide"),
    ({"dtype": "x"}, "dtype='x' is none of NumPy's"),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "message"), SELL_REFUSED)
def test_what_are_no_parameters_of_sell_is_refused(parameters, message):
    with pytest.raises(InputError, match=message):
        spdist.sell(stencil(3), **parameters)


def test_parameters_may_be_numbers_of_numpy():
    m, x = stencil(3), np.ones(27)
    np.testing.assert_allclose(spdist.sell(m, C=np.int64(8), sigma=np.int32(4), T=np.int64(2)) @ x, m @ x)


@pytest.mark.parametrize("dtype", ["int32", "bool", "float32", "complex64", "complex128"])
def test_dtypes(dtype):
    m = stencil(6).astype(dtype)
    a = spdist.operator(m, "sell")
    assert a.dtype == (np.float64 if m.dtype.kind in "bi" else m.dtype)
    x = np.ones(m.shape[1], a.dtype)
    np.testing.assert_allclose(a @ x, m.astype(a.dtype) @ x, rtol=1e-5)
    np.testing.assert_allclose(a.rmatvec(x), m.astype(a.dtype).conj().T @ x, rtol=1e-5)


def test_values_stored_in_half_the_bytes():
    m = stencil(8)
    m.data += np.random.default_rng(1).random(m.nnz)
    whole, half = spdist.operator(m, "sell"), spdist.operator(m, "sell", dtype=np.float32)
    assert half.dtype == np.float64
    assert half.nbytes < 0.65 * whole.nbytes
    x = np.random.default_rng(1).standard_normal(m.shape[1])
    np.testing.assert_allclose(half @ x, m @ x, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="cannot be stored as float16"):
        spdist.operator(m, dtype=np.float16)
    with pytest.raises(InputError, match="float32 cannot be stored as float64"):
        spdist.operator(m.astype(np.float32), dtype=np.float64)


def test_duplicates_and_order_do_not_matter():
    m = sp.csr_array((np.array([1.0, 2, 3, 4]), np.array([3, 0, 3, 1]), np.array([0, 3, 3, 4])), shape=(3, 4))
    np.testing.assert_array_equal(spdist.operator(m, "sell") @ np.array([1.0, 10, 100, 1000]), [4002, 0, 40])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (7, 3)])
def test_empty_matrices(shape):
    for method in ("auto", "sell", "scipy"):
        a = spdist.operator(sp.csr_array(shape), method)
        np.testing.assert_array_equal(a @ np.ones(shape[1]), np.zeros(shape[0]))
        assert (a @ np.ones((shape[1], 2))).shape == (shape[0], 2)


def test_what_does_not_fit_is_refused():
    a = spdist.operator(stencil(3), "sell")
    with pytest.raises(MatrixError, match="x has shape"):
        a @ np.ones(5)
    with pytest.raises(MatrixError, match="X has shape"):
        a @ np.ones((5, 2))
    with pytest.raises(MatrixError, match="out must be a C-ordered float64 array"):
        a.matvec(np.ones(27), out=np.ones(27, np.float32))
    for other in (stencil(3), stencil(3)[:, :1]):
        with pytest.raises(MatrixError, match=r"x is a csr_(array|matrix), .*multiply two sparse matrices by spdist"):
            a @ other
    for method in ("sell", "scipy"):
        with pytest.raises(MatrixError, match=r"array of shape \(27,\)"):
            spdist.operator(stencil(3), method).matvec(np.ones(27), out=np.ones(10))
    with pytest.raises(InputError, match="'csr' is not for this matrix on the CPU"):
        spdist.operator(stencil(3), "csr")
    with pytest.raises(InputError, match="'levels' is not for this matrix"):
        spdist.operator(sp.csr_array((3, 4)), "levels")
    with pytest.raises(MatrixError, match=r"where a sparse matrix is expected"):
        spdist.operator(np.eye(3))


def test_out_is_written():
    m = stencil(4)
    a, y = spdist.operator(m, "sell"), np.full(64, np.nan)
    assert a.matvec(np.ones(64), out=y) is y
    np.testing.assert_allclose(y, m @ np.ones(64))


@pytest.mark.gpu
@pytest.mark.parametrize("method", GPU_METHODS)
def test_on_the_gpu(tmp_path, method):
    import cupy
    import cupyx.scipy.sparse as csp
    import cupyx.scipy.sparse.linalg as csl

    m = stencil(8)
    m = (m @ m.T + sp.eye_array(m.shape[0])).tocsr()
    a = spdist.operator(csp.csr_matrix(m), method)
    for x in vectors(m.shape[1]):
        y = a @ cupy.asarray(x)
        np.testing.assert_allclose(y.get(), m @ x, rtol=1e-3 if x.dtype == np.float32 else 1e-12, atol=1e-3)
    x = cupy.asarray(x[:, 0].copy())
    np.testing.assert_allclose(a.rmatvec(x).get(), m.T @ x.get(), rtol=1e-10)
    solved, failed = csl.cg(a, x)
    assert failed == 0
    np.testing.assert_allclose(m @ solved.get(), x.get(), atol=1e-2)
    a.save(tmp_path / "a.zarr")
    again = spdist.open_operator(tmp_path / "a.zarr", on_gpu=True)
    np.testing.assert_allclose((again @ x).get(), m @ x.get(), rtol=1e-10)
    np.testing.assert_allclose(again.rmatvec(x).get(), m.T @ x.get(), rtol=1e-10)
    with pytest.raises(MatrixError, match="not where x is"):
        a @ x.get()


@pytest.mark.gpu
def test_products_go_into_graphs():
    import cupy
    import cupyx.scipy.sparse as csp

    m = stencil(8)
    a, x, y = spdist.operator(csp.csr_matrix(m), "sell"), cupy.ones(512), cupy.zeros(512)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        a.matvec(x, out=y)
        y.fill(0)
        stream.begin_capture()
        a.matvec(x, out=y)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    np.testing.assert_allclose(y.get(), m @ np.ones(512))


@pytest.mark.parametrize("threads", [0, -1, "x", 1.5])
def test_threads_that_are_no_number_are_refused(threads):
    with pytest.raises(InputError, match=r"threads=.* must be a whole number of at least 1"):
        spdist.operator(sp.eye_array(3, format="csr"), threads=threads)


@pytest.mark.gpu
@pytest.mark.parametrize(("uses", "even", "skewed"), [
    (1, "cusparse", "cusparse"), (100, "csr", "cusparse_coo"), (5000, "sell", "sell"), (200_000, "sell", "sell"),
])  # fmt: skip
def test_uses_are_what_a_preparation_must_repay(uses, even, skewed):
    import cupy
    import cupyx.scipy.sparse as csp

    rng = np.random.default_rng(5)
    lengths = np.append(np.full(8000, 5), np.full(30, 900))
    columns = rng.integers(0, 8030, lengths.sum())
    uneven = sp.csr_matrix((rng.random(len(columns)), columns, np.append(0, np.cumsum(lengths))), (8030, 8030))
    for m, method in ((stencil(20), even), (uneven, skewed)):
        a = spdist.operator(csp.csr_matrix(m.astype(float)), uses=uses)
        assert a.method.startswith(method), a.why
        assert ("repaid after" in a.why) == (1 < uses < 200_000 and method != "csr"), a.why
        x = rng.random(m.shape[1])
        np.testing.assert_allclose((a @ cupy.asarray(x)).get(), m @ x, rtol=1e-12)


@pytest.mark.gpu
def test_cusparse_takes_what_cupy_gives():
    import cupy
    import cupyx.scipy.sparse as csp

    m = random_matrix(300, 200, 5.0, 3)
    for method in ("cusparse", "cusparse_coo"):
        for dtype in ("f4", "f8", "c8", "c16"):
            a = pickle.loads(pickle.dumps(spdist.operator(csp.csr_matrix(m.astype(dtype)), method)))
            x = np.random.default_rng(1).random((200, 3)).astype(dtype)
            for one in (x[:, 0].copy(), x, x.astype("c16")):
                np.testing.assert_allclose(
                    (a @ cupy.asarray(one)).get(), m @ one, rtol=1e-4 if dtype in "f4c8" else 1e-12
                )
        empty = spdist.operator(csp.csr_matrix((5, 0)), method)
        np.testing.assert_array_equal((empty @ cupy.ones(0)).get(), np.zeros(5))
