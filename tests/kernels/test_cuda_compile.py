"""Every kernel compiles for every architecture, without a GPU.

A module that launches kernels lists them in a function ``sources(value, index, pointer)``: file -> name expressions,
or in a method of its class `Kernels`, made for these types.
"""

from __future__ import annotations

import importlib

import pytest

from spdist.kernels.module import FOLDER, options

FILES = sorted(path.name for path in FOLDER.glob("*.cu"))
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if "def sources(" in path.read_text())
QUICK = [("double", "int", "int", "sm_90"), ("Complex<double>", "long long", "long long", "sm_80")]
MORE = [
    (value, index, pointer, arch)
    for value in ("float", "double", "Complex<float>", "Complex<double>")
    for index, pointer in (("int", "int"), ("int", "long long"), ("long long", "int"), ("long long", "long long"))
    for arch in ("sm_80", "sm_90")
    if (value, index, pointer, arch) not in QUICK
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


def compile_log(file: str, names: list[str], arch: str) -> tuple[bool, str]:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    _, program = nvrtc.nvrtcCreateProgram((FOLDER / file).read_bytes(), file.encode(), 0, [], [])
    for name in names:
        nvrtc.nvrtcAddNameExpression(program, name.encode())
    flags = [option.encode() for option in (f"--gpu-architecture={arch}", *options())]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    return result == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode(errors="replace")


@pytest.mark.parametrize(("value", "index", "pointer", "arch"), QUICK)
@pytest.mark.parametrize("file", FILES)
def test_compiles(file, value, index, pointer, arch):
    done, log = compile_log(file, names_of(file, value, index, pointer), arch)
    assert done, log


@pytest.mark.slow
@pytest.mark.parametrize(("value", "index", "pointer", "arch"), MORE)
@pytest.mark.parametrize("file", FILES)
def test_compiles_for_all_types(file, value, index, pointer, arch):
    done, log = compile_log(file, names_of(file, value, index, pointer), arch)
    assert done, log


def test_a_broken_name_fails():
    assert not compile_log("esc.cu", ["no_such_kernel<int>"], "sm_90")[0]
