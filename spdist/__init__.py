"""spdist: sparse matrix products larger than memory, planned, distributed, resumable and verified.

The public names load on first use, so that ``import spdist`` and ``spdist --help`` stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spdist import vbr
    from spdist.api import Callbacks, Report, matmul, multiply, plan, reduce, save, verify
    from spdist.bsr import BSR
    from spdist.chain import multi_matmul
    from spdist.errors import (
        CorruptError,
        InputError,
        MatrixError,
        MemoryBoundError,
        ResumeError,
        SpdistError,
        VerificationError,
    )
    from spdist.generators import generate
    from spdist.inmemory import numeric, spgemm, symbolic
    from spdist.interchange import export_matrix, import_matrix
    from spdist.kernels.options import Epilogue
    from spdist.kernels.semirings import Semiring
    from spdist.operators import Operator, open_operator, operator
    from spdist.operators import ehyb_operator as ehyb
    from spdist.operators import sell_operator as sell
    from spdist.parts import PartitionedOperator, partitioned
    from spdist.scheduler.cluster import workers
    from spdist.solvers import Solution, conjugate_gradient, pagerank
    from spdist.storage import open_matrix as open
    from spdist.transposed import symmetrize, transpose
    from spdist.vbr import VBR, open_vbr

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(("Callbacks", "Report", "matmul", "multiply", "plan", "reduce", "save", "verify"), "spdist.api"),
    **dict.fromkeys(("numeric", "spgemm", "symbolic"), "spdist.inmemory"),
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
    "BSR": "spdist.bsr",
    "Epilogue": "spdist.kernels.options",
    "multi_matmul": "spdist.chain",
    "Semiring": "spdist.kernels.semirings",
    **dict.fromkeys(("Operator", "ehyb", "open_operator", "operator", "sell"), "spdist.operators"),
    **dict.fromkeys(("PartitionedOperator", "partitioned"), "spdist.parts"),
    **dict.fromkeys(("Solution", "conjugate_gradient", "pagerank"), "spdist.solvers"),
    "generate": "spdist.generators",
    "export_matrix": "spdist.interchange",
    "import_matrix": "spdist.interchange",
    "open": "spdist.storage",
    **dict.fromkeys(("symmetrize", "transpose"), "spdist.transposed"),
    **dict.fromkeys(("VBR", "open_vbr"), "spdist.vbr"),
    "workers": "spdist.scheduler.cluster",
}

_NAME_AT_HOME = {"ehyb": "ehyb_operator", "open": "open_matrix", "sell": "sell_operator"}

__all__ = [
    "BSR",
    "VBR",
    "Callbacks",
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
    "VerificationError",
    "conjugate_gradient",
    "ehyb",
    "export_matrix",
    "generate",
    "import_matrix",
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
    "sell",
    "spgemm",
    "symbolic",
    "symmetrize",
    "transpose",
    "vbr",
    "verify",
    "workers",
]


def __getattr__(name: str) -> Any:
    if name == "vbr":  # a module: Python itself keeps it among the names of the package
        return importlib.import_module("spdist.vbr")
    if name not in _HOME:
        raise AttributeError(f"module 'spdist' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), _NAME_AT_HOME.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
