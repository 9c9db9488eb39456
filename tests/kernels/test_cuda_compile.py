"""Every kernel compiles for every architecture, without a GPU.

A module that launches kernels lists them in a function ``sources(value, index, pointer)``: file -> name expressions,
or in a method of its class `Kernels`, made for these types.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from spdist.kernels.module import FOLDER
from tests.kernels.compile_cuda import compile_log

FILES = sorted(path.name for path in FOLDER.glob("*.cu"))
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if "def sources(" in path.read_text())
TYPES = [  # every value, index and pointer type, and both architectures; all combinations would take half an hour
    ("double", "int", "int", "sm_90"),
    ("float", "int", "long long", "sm_80"),
    ("Complex<float>", "long long", "int", "sm_90"),
    ("Complex<double>", "long long", "long long", "sm_80"),
]


def names_of(file: str, *types: str) -> list[str]:
    names = set()
    for name in MODULES:
        found = importlib.import_module(f"spdist.kernels.{name}")
        sources = found.sources(*types) if hasattr(found, "sources") else found.Kernels(*types).sources()
        names |= set(sources.get(file, ()))
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


def test_a_broken_name_fails(compiler):
    assert not compiler.submit(compile_log, "esc.cu", ["no_such_kernel<int>"], "sm_90").result()[0]
