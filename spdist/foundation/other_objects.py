"""Objects of other packages that people give where a matrix is expected, and the call that makes a matrix of each.

They are recognised by the modules of their classes, so that none of these packages is imported.
"""

from __future__ import annotations

import functools
from typing import Any

from spdist.errors import MatrixError

DATA_FRAME = "scipy.sparse.csr_array(df.to_numpy())"
"""Call that makes a matrix of a data frame of dense columns."""

MAKERS: dict[tuple[str, str], str] = {
    ("networkx", "Graph"): "nx.to_scipy_sparse_array(G)",
    ("igraph", "Graph"): "scipy.sparse.csr_array(g.get_adjacency_sparse('weight' if g.is_weighted() else None))",
    ("igraph", "GraphBase"): "scipy.sparse.csr_array(g.get_adjacency_sparse())",
    ("graph_tool", "Graph"): "scipy.sparse.csr_array(graph_tool.spectral.adjacency(g))",
    ("anndata", "AnnData"): "adata.X, or a matrix of adata.layers or adata.obsp,",
    ("anndata", "Raw"): "adata.raw.X",
    ("pandas", "DataFrame"): DATA_FRAME,
    ("polars", "DataFrame"): DATA_FRAME,
    ("numpy", "ndarray"): "scipy.sparse.csr_array(x)",
    ("builtins", "list"): "scipy.sparse.csr_array(x)",
    ("sparse", "SparseArray"): "x.to_scipy_sparse()",
    ("graphblas", "Matrix"): "graphblas.io.to_scipy_sparse(A)",
    ("zarr", "Array"): "spdist.import_matrix(path, 'A.zarr', dense=True)",
}
"""Calls that make a matrix, by the package and the name of a class, or of one that it derives from."""

SPARSE_FRAME = "df.sparse.to_coo().tocsr()"
"""Call that makes a matrix of a data frame of pandas whose columns are all sparse."""


def maker_of(thing: object) -> str:
    """Return the call that makes a matrix of an object of another package; empty if none is known.

    Examples
    --------
    >>> maker_of([[1, 2]]), maker_of("A.zarr")
    ('scipy.sparse.csr_array(x)', '')
    """
    maker = _maker_of_bases(type(thing).__mro__)
    return SPARSE_FRAME if maker == DATA_FRAME and _is_sparse(thing) else maker


@functools.lru_cache(maxsize=64)
def _maker_of_bases(bases: tuple[type, ...]) -> str:
    names = ((base.__module__.partition(".")[0], base.__name__) for base in bases)
    return next((MAKERS[name] for name in names if name in MAKERS), "")


def _is_sparse(frame: Any) -> bool:
    kinds = {type(dtype).__name__ for dtype in frame.dtypes}
    return kinds == {"SparseDtype"}


def refuse_other_objects(*operands: object) -> None:
    """Raise for objects of other packages that have to be converted to a matrix first.

    `*operands`: others pass.
    Raises `MatrixError` Names the call that makes a matrix.

    Examples
    --------
    >>> refuse_other_objects([[1, 2]])
    Traceback (most recent call last):
        ...
    spdist.errors.MatrixError: a list where a sparse matrix is expected: scipy.sparse.csr_array(x) is one
    """
    for thing in operands:
        if maker := maker_of(thing):
            package, name = type(thing).__module__.partition(".")[0], type(thing).__name__
            shown = name if package == "builtins" else f"{package}.{name}"
            article = "an" if shown[0] in "aeiou" else "a"
            raise MatrixError(f"{article} {shown} where a sparse matrix is expected: {maker} is one")
