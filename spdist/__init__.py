"""spdist: sparse matrix products larger than memory, planned, distributed, resumable and verified.

The public names load on first use, so that ``import spdist`` and ``spdist --help`` stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from spdist.foundation.distribution import check_alone, version_of
from spdist.matrices import late_bindings

if TYPE_CHECKING:
    from spdist.api.chain import multi_matmul
    from spdist.api.elementwise import apply, ewise_add, ewise_mult
    from spdist.api.products import append, check, matmul, multiply, plan, reduce, save, spy, status, verify
    from spdist.applications.cooccurrence import cooccurrence
    from spdist.applications.correlation import correlation
    from spdist.applications.growth import update
    from spdist.applications.markov_clustering.clustering import Clustering
    from spdist.applications.markov_clustering.markov_clustering import markov_clustering
    from spdist.applications.nearest_rows import kneighbors_graph
    from spdist.applications.pagerank import pagerank
    from spdist.applications.shortest_paths import shortest_paths
    from spdist.applications.similarity import similarity
    from spdist.applications.triangles import TriangleCount, triangles
    from spdist.errors import (
        CorruptError,
        InputError,
        MatrixError,
        MemoryBoundError,
        ResumeError,
        SpdistError,
        VerificationError,
    )
    from spdist.inmemory.pattern import numeric, symbolic
    from spdist.inmemory.spgemm import spgemm
    from spdist.interop.dask_arrays import from_dask, to_dask
    from spdist.jobs.report import Callbacks, Report
    from spdist.kernels.engine import engine_names
    from spdist.kernels.product_spec import Epilogue
    from spdist.kernels.semirings import Semiring
    from spdist.matrices import vbr
    from spdist.matrices.bsr import BSR
    from spdist.matrices.vbr import VBR
    from spdist.operators.operator import Operator
    from spdist.operators.partitioned import PartitionedOperator, partitioned
    from spdist.operators.prepare import ehyb_operator as ehyb
    from spdist.operators.prepare import open_operator, operator
    from spdist.operators.prepare import sell_operator as sell
    from spdist.operators.solvers import Solution, conjugate_gradient
    from spdist.scheduler.clusters.addresses import scheduler_address
    from spdist.scheduler.clusters.security import cluster_security
    from spdist.scheduler.executors.clients.cluster import workers
    from spdist.shown import without_secrets
    from spdist.storage.generators import generate
    from spdist.storage.import_export import export_matrix, import_matrix
    from spdist.storage.matrix import open_matrix as open
    from spdist.storage.transpose import symmetrize, transpose
    from spdist.storage.vbr import open_vbr

    __version__: str

_HOME = {
    **dict.fromkeys(
        ("append", "check", "matmul", "multiply", "plan", "reduce", "save", "spy", "status", "verify"),
        "spdist.api.products",
    ),
    "Clustering": "spdist.applications.markov_clustering.clustering",
    "cooccurrence": "spdist.applications.cooccurrence",
    "correlation": "spdist.applications.correlation",
    "markov_clustering": "spdist.applications.markov_clustering.markov_clustering",
    "pagerank": "spdist.applications.pagerank",
    "shortest_paths": "spdist.applications.shortest_paths",
    "update": "spdist.applications.growth",
    "kneighbors_graph": "spdist.applications.nearest_rows",
    "similarity": "spdist.applications.similarity",
    **dict.fromkeys(("apply", "ewise_add", "ewise_mult"), "spdist.api.elementwise"),
    **dict.fromkeys(("TriangleCount", "triangles"), "spdist.applications.triangles"),
    **dict.fromkeys(("Callbacks", "Report"), "spdist.jobs.report"),
    **dict.fromkeys(("numeric", "symbolic"), "spdist.inmemory.pattern"),
    "spgemm": "spdist.inmemory.spgemm",
    **dict.fromkeys(
        (
            "CorruptError",
            "InputError",
            "MatrixError",
            "MemoryBoundError",
            "ResumeError",
            "SpdistError",
            "VerificationError",
        ),
        "spdist.errors",
    ),
    "BSR": "spdist.matrices.bsr",
    "engine_names": "spdist.kernels.engine",
    "Epilogue": "spdist.kernels.product_spec",
    "multi_matmul": "spdist.api.chain",
    "Semiring": "spdist.kernels.semirings",
    "Operator": "spdist.operators.operator",
    **dict.fromkeys(("ehyb", "open_operator", "operator", "sell"), "spdist.operators.prepare"),
    **dict.fromkeys(("PartitionedOperator", "partitioned"), "spdist.operators.partitioned"),
    **dict.fromkeys(("Solution", "conjugate_gradient"), "spdist.operators.solvers"),
    **dict.fromkeys(("from_dask", "to_dask"), "spdist.interop.dask_arrays"),
    "generate": "spdist.storage.generators",
    "export_matrix": "spdist.storage.import_export",
    "import_matrix": "spdist.storage.import_export",
    "open": "spdist.storage.matrix",
    **dict.fromkeys(("symmetrize", "transpose"), "spdist.storage.transpose"),
    "VBR": "spdist.matrices.vbr",
    "open_vbr": "spdist.storage.vbr",
    "cluster_security": "spdist.scheduler.clusters.security",
    "scheduler_address": "spdist.scheduler.clusters.addresses",
    "without_secrets": "spdist.shown",
    "workers": "spdist.scheduler.executors.clients.cluster",
}

check_alone(__path__[0])
late_bindings.register("save_vbr", "spdist.storage.vbr")
for _name in ("to_scipy", "select", "multiply", "multiply_transposed"):
    late_bindings.register(_name, "spdist.interop.rows")
late_bindings.register("to_dask", "spdist.interop.dask_arrays")
late_bindings.register("compiled_scan", "spdist.kernels.cpu.pattern_scan")

_NAME_AT_HOME = {"ehyb": "ehyb_operator", "open": "open_matrix", "sell": "sell_operator"}

__all__ = [
    "BSR",
    "VBR",
    "Callbacks",
    "Clustering",
    "CorruptError",
    "Epilogue",
    "InputError",
    "MatrixError",
    "MemoryBoundError",
    "Operator",
    "PartitionedOperator",
    "Report",
    "ResumeError",
    "Semiring",
    "Solution",
    "SpdistError",
    "TriangleCount",
    "VerificationError",
    "append",
    "apply",
    "check",
    "cluster_security",
    "conjugate_gradient",
    "cooccurrence",
    "correlation",
    "ehyb",
    "engine_names",
    "ewise_add",
    "ewise_mult",
    "export_matrix",
    "from_dask",
    "generate",
    "import_matrix",
    "kneighbors_graph",
    "markov_clustering",
    "matmul",
    "multi_matmul",
    "multiply",
    "numeric",
    "open",
    "open_operator",
    "open_vbr",
    "operator",
    "pagerank",
    "partitioned",
    "plan",
    "reduce",
    "save",
    "scheduler_address",
    "sell",
    "shortest_paths",
    "similarity",
    "spgemm",
    "spy",
    "status",
    "symbolic",
    "symmetrize",
    "to_dask",
    "transpose",
    "triangles",
    "update",
    "vbr",
    "verify",
    "without_secrets",
    "workers",
]


def __getattr__(name: str) -> Any:
    if name == "vbr":  # a module: Python itself keeps it among the names of the package
        return importlib.import_module("spdist.matrices.vbr")
    if name == "neighbors":  # asks for scikit-learn
        return importlib.import_module("spdist.neighbors")
    if name == "__version__":
        return _version()
    if name not in _HOME:
        raise AttributeError(f"module 'spdist' has no attribute {name!r}")
    if _HOME[name] != "spdist.errors":
        from spdist.foundation.settings import check_numba

        check_numba()
    value = getattr(importlib.import_module(_HOME[name]), _NAME_AT_HOME.get(name, name))
    globals()[name] = value
    return value


def _version() -> str:
    """Return the version that the build took from tag and commit; ``0.0.0`` if spdist is not installed."""
    return version_of("spdist") or "0.0.0"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
