"""Every kernel compiles for every architecture, without a GPU.

A module that launches kernels lists them in a function ``sources(value, index, pointer)``: file -> name expressions.
"""

from __future__ import annotations

import importlib
import itertools
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from spdist.kernels.cuda.module import FOLDER, value_type
from spdist.kernels.rowwise_gpu import epilogue as gpu_epilogue
from spdist.kernels.semirings import SEMIRINGS, Semiring
from tests.support.compile_cuda import compile_log

FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.cu"))
MODULES = sorted(
    ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for path in FOLDER.rglob("*.py")
    if "def sources(" in path.read_text()
)
TYPES = [  # every value, index and pointer type, and both architectures; all combinations would take half an hour
    ("double", "int", "int", "sm_90"),
    ("float", "int", "long long", "compute_80"),
    ("Complex<float>", "long long", "int", "compute_90"),
    ("Complex<double>", "long long", "long long", "sm_80"),
]
"""``sm`` compiles to machine code, which finds too much shared memory as well, ``compute`` only to PTX, in half the
time."""


OWN = Semiring(min, max, math.inf, cuda=("x < y ? x : y", "x < y ? y : x"))
RINGS = {  # each named one once, and each way to add to a sum at each width, in the kernels that do so
    **{name: (ring, np.dtype(ring.dtype or np.float64)) for name, ring in SEMIRINGS.items()},
    **{f"min_plus {kind}": (SEMIRINGS["min_plus"], np.dtype(kind)) for kind in ("f4", "i4", "u8")},
    **{f"own {kind}": (OWN, np.dtype(kind)) for kind in ("f4", "i8", "?")},
    **{f"plus_times {kind}": (SEMIRINGS["plus_times"], np.dtype(kind)) for kind in ("i4", "i8", "u4", "u8", "?")},
    "plus_first c16": (SEMIRINGS["plus_first"], np.dtype("c16")),
}


def names_of(file: str, *types: str) -> list[str]:
    names = set()
    for name in MODULES:
        found = importlib.import_module(f"spdist.kernels.{name}")
        names |= set(found.sources(*types).get(file, ()))
    return sorted(names)


def test_every_file_has_names():
    assert all(names_of(file, "double", "int", "int") for file in FILES)


@pytest.fixture(scope="module")
def compiler():
    """Give a pool of processes that compile, one a core."""
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def compiled(compiler):
    """Return the outcome of every file for every choice of types; all of them are on their way."""
    jobs = [(file, types) for file in FILES for types in TYPES]
    return {
        (file, *types): compiler.submit(compile_log, file, names_of(file, *types[:3]), types[3]) for file, types in jobs
    }


@pytest.mark.parametrize(("value", "index", "pointer", "arch"), TYPES)
@pytest.mark.parametrize("file", FILES)
def test_compiles(compiled, file, value, index, pointer, arch):
    done, log = compiled[file, value, index, pointer, arch].result()
    assert done, log


@pytest.fixture(scope="module")
def rings(compiler):
    """Return the outcome of a kernel of each family for every semiring, one architecture and the other in turn."""
    jobs = {}
    for (name, (ring, dtype)), arch in zip(RINGS.items(), itertools.cycle(["compute_80", "compute_90"]), strict=False):
        types = f"{value_type(dtype)},int,int"
        kernels = {
            "rowwise_gpu/rank_rows.cu": f"rank_fill<{types},8,false>",
            "rowwise_gpu/long_rows.cu": f"long_fill<{types}>",
        }
        if name in ("min_plus", "or_and", "plus_first c16"):
            kernels |= {
                "rowwise_gpu/sort_rows.cu": f"sort_rows<{types},u32,16,8,4,false>",
                "rowwise_gpu/node_rows.cu": f"node_fill<{types},2,false>",
                "rowwise_gpu/mask_rows.cu": f"masked_rows<{types},{'true' if name == 'plus_first c16' else 'false'}>",
            }
        defines = ring.defines(dtype)
        if name.startswith("plus_times "):
            kernels["rowwise_gpu/epilogue.cu"] = gpu_epilogue.sources(value_type(dtype), "int", "int")[
                "rowwise_gpu/epilogue.cu"
            ][2]
        jobs[name] = [compiler.submit(compile_log, file, [one], arch, defines) for file, one in kernels.items()]
    return jobs


@pytest.mark.parametrize("name", list(RINGS))
def test_semirings_compile(rings, name):
    for job in rings[name]:
        done, log = job.result()
        assert done, log


def test_a_broken_name_fails(compiler):
    assert not compiler.submit(compile_log, "esc/short_rows.cu", ["no_such_kernel<int>"], "sm_90").result()[0]
