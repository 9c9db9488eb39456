"""Operands of other packages are refused with the call that makes a matrix; other byte orders are converted."""

from __future__ import annotations

import anndata
import dask.array as da
import networkx as nx
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr

import spdist
from spdist.foundation.other_objects import maker_of
from tests.conftest import random_matrix

X = sp.csr_array(np.arange(9.0).reshape(3, 3))
CALLS = {
    "spgemm": lambda m: spdist.spgemm(X, m),
    "mask": lambda m: spdist.spgemm(X, X, mask=m),
    "by columns": lambda m: spdist.spgemm(m, X, axis=0, top_n=1),
    "matmul": lambda m: spdist.matmul(m, X),
    "multiply": lambda m: spdist.multiply(m, m, "memory://others/C.zarr"),
    "multi_matmul": lambda m: spdist.multi_matmul([X, m, X]),
    "save": lambda m: spdist.save("memory://others/A.zarr", m),
    "open": spdist.open,
    "transpose": lambda m: spdist.transpose(m, "memory://others/T.zarr"),
    "ewise_add": lambda m: spdist.ewise_add(m, m, "memory://others/E.zarr"),
    "reduce": lambda m: spdist.reduce(m, X, "sum"),
    "plan": lambda m: spdist.plan(m, m),
    "verify": lambda m: spdist.verify(m, m, m),
    "symbolic": lambda m: spdist.symbolic(m, X),
    "operator": spdist.operator,
    "conjugate_gradient": lambda m: spdist.conjugate_gradient(m, np.ones(3)),
    "pagerank": spdist.pagerank,
    "similarity": spdist.similarity,
    "triangles": spdist.triangles,
    "shortest_paths": spdist.shortest_paths,
    "markov_clustering": spdist.markov_clustering,
}


class Graph(nx.DiGraph):
    """A class of the user's."""


def igraph_graph():
    """Return an object whose class says that it is igraph's, which is not installed here."""
    return type("Graph", (), {"__module__": "igraph"})()


OBJECTS = {
    "graph": (nx.path_graph(3), "nx.to_scipy_sparse_array(G)"),
    "own graph": (Graph([(0, 1)]), "nx.to_scipy_sparse_array(G)"),
    "igraph": (igraph_graph(), "g.get_adjacency_sparse('weight' if g.is_weighted() else None)"),
    "cells": (anndata.AnnData(sp.csr_matrix(X)), "adata.X"),
    "frame": (pd.DataFrame(np.eye(3)), "scipy.sparse.csr_array(df.to_numpy())"),
    "sparse frame": (pd.DataFrame.sparse.from_spmatrix(X), "df.sparse.to_coo().tocsr()"),
    "rows": ([[1.0, 0.0], [0.0, 1.0]], "scipy.sparse.csr_array(x)"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", OBJECTS)
def test_the_call_that_makes_a_matrix_is_named(call, name):
    thing, maker = OBJECTS[name]
    with pytest.raises(spdist.InputError) as caught:
        CALLS[call](thing)
    assert f"{maker}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call", [name for name in CALLS if name != "pagerank"])
def test_dense_arrays(call):
    with pytest.raises(spdist.InputError, match=r"numpy.ndarray where a sparse matrix.*scipy.sparse.csr_array\(x\)"):
        CALLS[call](X.toarray())


def test_dense_zarr_arrays():
    with pytest.raises(spdist.InputError, match=r"zarr.Array.*import_matrix\(path, 'A.zarr', dense=True\)"):
        spdist.matmul(zarr.array(np.eye(3)), zarr.array(np.eye(3)))


@pytest.mark.parametrize("name", ["graph", "cells", "frame", "sparse frame", "rows"])
def test_the_named_call_makes_one(name):
    thing, maker = OBJECTS[name]
    names = {"nx": nx, "scipy": __import__("scipy.sparse"), "G": thing, "df": thing, "x": thing, "adata": thing}
    made = eval(maker.partition(",")[0], names)
    assert spdist.spgemm(made, made).shape == made.shape


def test_what_is_not_known_is_not_guessed():
    assert maker_of(object()) == maker_of(None) == maker_of("A.zarr") == maker_of(X) == ""


# -- byte order and float16 --------------------------------------------------------------------------------------------


def swapped(m, dtype, indices="<i4"):
    """Return a CSR matrix with arrays of these dtypes; SciPy's constructors convert none."""
    m = sp.csr_array(m)
    m.data, m.indices, m.indptr = m.data.astype(dtype), m.indices.astype(indices), m.indptr.astype(indices)
    return m


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", ">i8", ">u2", ">c8", ">c16"])
@pytest.mark.parametrize("indices", ["<i4", ">i4", ">i8"])
def test_other_byte_orders_are_converted(tmp_path, dtype, indices):
    a = sp.csr_array(abs(random_matrix(8, 8, 3, 1)).astype("i4"))
    m, native = swapped(a, dtype, indices), np.dtype(dtype).newbyteorder("=")
    expected = (a.astype(native) @ a.astype(native)).toarray()
    for c in (spdist.spgemm(m, m), spdist.spgemm(m.T, m.T).T, spdist.matmul(m, m), spdist.multi_matmul([m, m])):
        assert c.dtype == native
        assert c.dtype.isnative
        np.testing.assert_array_equal(c.toarray(), expected)
    np.testing.assert_array_equal(spdist.save(tmp_path / "A.zarr", m).to_scipy().toarray(), a.toarray())
    assert m.data.dtype == dtype
    y = spdist.operator(m) @ np.arange(8.0)
    np.testing.assert_allclose(y, a @ np.arange(8.0))


def test_blocks_and_dask_arrays_of_other_byte_orders(tmp_path):
    values = np.arange(16.0).reshape(4, 4)
    m = sp.bsr_array(values, blocksize=(2, 2))
    m.data = m.data.astype(">f8")
    np.testing.assert_array_equal(spdist.spgemm(m, m).toarray(), values @ values)
    x = da.from_array(np.arange(6.0).reshape(2, 3).astype(">f4"), chunks=(1, 3))
    stored = spdist.from_dask(x, tmp_path / "A.zarr")
    assert stored.dtype == np.dtype("f4")
    np.testing.assert_array_equal(stored.to_scipy().toarray(), np.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i8"])
@pytest.mark.parametrize("engine", ["auto", "numba", "scipy"])
def test_stored_operands_of_other_byte_orders(tmp_path, dtype, engine):
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [3, 3]})
    for name in ("indptr", "indices", "data"):
        values = getattr(X, name).astype(dtype if name == "data" else ">i4")
        array = group.create_array(name, shape=values.shape, dtype=values.dtype, chunks=(4,))
        array[:] = values
    c = spdist.matmul(tmp_path / "a.zarr", tmp_path / "a.zarr", tmp_path / "C.zarr", engine=engine)
    assert c.dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(c.to_scipy().toarray(), (X @ X).toarray())


@pytest.mark.parametrize(
    "call", [name for name in CALLS if name in ("spgemm", "matmul", "save", "operator", "pagerank")]
)
def test_float16_is_refused_with_the_remedy(call):
    half = swapped(X, "f2")
    with pytest.raises(spdist.MatrixError, match=r"float16 cannot be multiplied.*a.astype\('float32'\)"):
        CALLS[call](half)
    assert spdist.spgemm(half.astype("float32"), half.astype("float32")).dtype == np.float32
