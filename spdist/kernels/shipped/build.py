"""Compile every kernel of the usual types for every architecture, by NVRTC and without a GPU: ``make kernels``."""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import zipfile
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from spdist.kernels.cuda import cubins
from spdist.kernels.cuda.module import FOLDER, options
from spdist.kernels.shipped.every_kernel import kernels_by_file

ARCHITECTURES = "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"
TYPES = ("double", "int", "int"), ("float", "int", "int")
"""C types of values, columns and offsets."""
DATE = 1980, 1, 1, 0, 0, 0
"""Of every member, so that equal kernels make equal archives."""


class Job(NamedTuple):
    """Kernels of one file that become one cubin."""

    file: str
    names: tuple[str, ...]
    architecture: str


class Compiled(NamedTuple):
    """A cubin, and the names of its kernels in it, by name expression."""

    job: Job
    cubin: bytes
    lowered: dict[str, str]


def _nvrtc() -> Any:
    """Return NVRTC's bindings, which have no types."""
    return importlib.import_module("cuda.bindings.nvrtc")


def compile_job(job: Job) -> Compiled:
    """Compile kernels; raise `RuntimeError` with the compiler's messages if they do not compile."""
    nvrtc = _nvrtc()
    _, program = nvrtc.nvrtcCreateProgram((FOLDER / job.file).read_bytes(), job.file.encode(), 0, [], [])
    for name in job.names:
        nvrtc.nvrtcAddNameExpression(program, name.encode())
    flags = [f"--gpu-architecture={job.architecture}".encode(), *(option.encode() for option in options(job.file))]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{job.file} for {job.architecture}: {log.decode(errors='replace')}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    lowered = {name: nvrtc.nvrtcGetLoweredName(program, name.encode())[1].decode() for name in job.names}
    nvrtc.nvrtcDestroyProgram(program)
    return Compiled(job, cubin, lowered)


def jobs_for(architecture: str) -> list[Job]:
    """Return what is compiled for an architecture; kernels that are the same for several types once."""
    found: list[Job] = []
    seen: set[tuple[str, str]] = set()
    for types in TYPES:
        for file, names in kernels_by_file(*types).items():
            new = tuple(sorted(name for name in names if (file, name) not in seen))
            seen.update((file, name) for name in new)
            if new:
                found.append(Job(file, new, architecture))
    return found


def write_archive(architecture: str, compiled: list[Compiled], cuda: int) -> None:
    """Write the archive of an architecture; an archive that is there is replaced at once."""
    index: dict[str, object] = {"cuda_version": cuda}
    kernels: dict[str, dict[str, tuple[str, str]]] = {}
    path = cubins.archive_path(architecture)
    staged = path.with_suffix(".part")
    with zipfile.ZipFile(staged, "w", zipfile.ZIP_LZMA) as archive:
        for number, one in enumerate(compiled):
            member = f"{number}.cubin"
            archive.writestr(zipfile.ZipInfo(member, DATE), one.cubin, zipfile.ZIP_LZMA)
            kernels.setdefault(one.job.file, {}).update(
                {name: (member, lowered) for name, lowered in one.lowered.items()}
            )
        files = {file: cubins.source_digest((FOLDER / file).read_bytes(), options(file)) for file in kernels}
        index |= {"files": files, "kernels": kernels}
        archive.writestr(zipfile.ZipInfo(cubins.INDEX, DATE), json.dumps(index), zipfile.ZIP_LZMA)
    staged.replace(path)


def cuda_version() -> int:
    """Return the version of NVRTC as drivers count: 13000 is 13.0."""
    nvrtc = _nvrtc()
    _, major, minor = nvrtc.nvrtcVersion()
    return int(1000 * major + 10 * minor)


def main() -> None:
    """Write the archives that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="*", default=ARCHITECTURES, help="such as sm_90; by default all")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile side by side")
    chosen = parser.parse_args()
    jobs = [job for architecture in chosen.architectures for job in jobs_for(architecture)]
    spawn = multiprocessing.get_context("spawn")  # of SciPy, whose C++ library must not mix with NVRTC's
    with ProcessPoolExecutor(chosen.processes, spawn) as pool:
        cuda = pool.submit(cuda_version).result()
        done = list(pool.map(compile_job, jobs))
    for architecture in chosen.architectures:
        write_archive(architecture, [one for one in done if one.job.architecture == architecture], cuda)
        path = cubins.archive_path(architecture)
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
