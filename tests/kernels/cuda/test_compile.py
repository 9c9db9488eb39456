"""Every kernel compiles for every architecture, without a GPU; `spdist.kernels.shipped.every_kernel` lists them."""

from __future__ import annotations

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
from spdist.kernels.shipped.every_kernel import kernels_by_file
from tests.support.compile_cuda import compile_log

FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.cu"))
TYPES = [  # every type of values, of indices and of offsets, and the architecture for which machine code is made
    ("double", "int", "int", "sm_90"),
    ("float", "int", "long long", "sm_80"),
    ("Complex<float>", "long long", "int", "sm_90"),
    ("Complex<double>", "long long", "long long", "sm_80"),
]
OTHER = {"sm_90": "compute_80", "sm_80": "compute_90"}
"""The other architecture, for which templates are instantiated and checked, and no code is made."""
ARCHITECTURES = [*OTHER.values()]


OWN = Semiring(min, max, math.inf, cuda=("x < y ? x : y", "x < y ? y : x"))
RINGS = {  # each named one once, and each way to add to a sum at each width, in the kernels that do so
    **{name: (ring, np.dtype(ring.dtype or np.float64)) for name, ring in SEMIRINGS.items()},
    **{f"min_plus {kind}": (SEMIRINGS["min_plus"], np.dtype(kind)) for kind in ("f4", "i4", "u8")},
    **{f"own {kind}": (OWN, np.dtype(kind)) for kind in ("f4", "i8", "?")},
    **{f"plus_times {kind}": (SEMIRINGS["plus_times"], np.dtype(kind)) for kind in ("i4", "i8", "u4", "u8", "?")},
    "plus_first c16": (SEMIRINGS["plus_first"], np.dtype("c16")),
}


def names_of(file: str, *types: str) -> list[str]:
    return sorted(kernels_by_file(*types).get(file, ()))


def test_every_file_has_names():
    assert all(names_of(file, "double", "int", "int") for file in FILES)


@pytest.fixture(scope="module")
def compiler():
    """Give a pool of processes that compile, one a core."""
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def compiled(compiler):
    """Return the outcome of every file for every choice of types and architecture; all of them are on their way."""
    return {
        (file, *types, arch): compiler.submit(compile_log, file, names_of(file, *types), arch)
        for file, (*types, made) in itertools.product(FILES, TYPES) for arch in (made, OTHER[made])
    }  # fmt: skip


@pytest.mark.parametrize(("value", "index", "pointer", "arch"), TYPES)
@pytest.mark.parametrize("file", FILES)
def test_compiles(compiled, file, value, index, pointer, arch):
    for each in (arch, OTHER[arch]):
        done, log = compiled[file, value, index, pointer, each].result()
        assert done, log


@pytest.fixture(scope="module")
def rings(compiler):
    """Return the outcome of a kernel of each family for every semiring, each family for both architectures by turns."""
    jobs = {}
    for number, (name, (ring, dtype)) in enumerate(RINGS.items()):
        types, defines = f"{value_type(dtype)},int,int", ring.defines(dtype)
        kernels = {
            "rowwise_gpu/rank_rows.cu": f"rank_fill<{types},8,false>",
            "rowwise_gpu/long_rows.cu": f"long_fill<{types}>",
            "rowwise_gpu/sort_rows.cu": f"sort_rows<{types},u32,16,8,4,false>",
            "rowwise_gpu/node_rows.cu": f"node_fill<{types},2,false>",
            "rowwise_gpu/mask_rows.cu": f"masked_rows<{types},{'true' if name == 'plus_first c16' else 'false'}>",
        }
        if name.startswith("plus_times "):
            kernels[gpu_epilogue.FILE] = gpu_epilogue.kernel_names(value_type(dtype), "int", "int")["keep"]
        jobs[name] = [
            compiler.submit(compile_log, file, [kernel], ARCHITECTURES[(number + n) % 2], defines)
            for n, (file, kernel) in enumerate(kernels.items())
        ]
    return jobs


@pytest.mark.parametrize("name", list(RINGS))
def test_semirings_compile(rings, name):
    outcomes = [job.result() for job in rings[name]]
    assert not [log for done, log in outcomes if not done]


@pytest.mark.parametrize("arch", ["compute_90", "sm_90"])
def test_a_broken_name_fails(compiler, arch):
    assert not compiler.submit(compile_log, "esc/short_rows.cu", ["no_such_kernel<int>"], arch).result()[0]


def test_a_broken_template_fails(compiler):
    """In functions that a kernel calls, and only for some types: no code has to be made to find it."""
    names = names_of("esc/short_rows.cu", "double", "int", "int")
    broken = [name.replace("double", "int*") for name in names]  # pointers are not multiplied
    assert not compiler.submit(compile_log, "esc/short_rows.cu", broken, "compute_90").result()[0]
