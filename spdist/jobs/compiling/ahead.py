"""Kernels of the CPU that no cache on disk has yet: compiled once, before workers need them.

A small file in the user's cache folder says that the kernels for some types and options were compiled on this host, so
that a process need not load Numba to find out. Where the file is wrong, because the cache was removed, say, workers
compile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import threading
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path

from spdist.kernels.cpu.workspace import WINDOW
from spdist.kernels.engine import Engine, find_engine
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.sources import kernel_sources
from spdist.matrices.csr import CSR
from spdist.scheduler.execution.records import JobSpec
from spdist.scheduler.execution.worker import load_cpu_kernels, tiny_product
from spdist.storage.foreign.checked import cache_folder

SLICES = "spdist.kernels.cpu.slices"
"""Module of the kernels that multiply slices of rows; it is loaded with the first of them."""


def compile_ahead(job: JobSpec) -> Future[None]:
    """Compile the kernels of a job in a thread of this process, unless they were compiled on this host before.

    Returns done once workers find the kernels in the cache. It holds an error that they will meet too.
    """
    future: Future[None] = Future()
    if not _compiles(job):
        future.set_result(None)
        return future
    (a, b, spec), engine = tiny_product(job), find_engine(job.engine).for_values(job.a.dtype)
    note = note_of(a, b, spec, merges=len(job.pieces) > 1)
    if is_noted(note):
        future.set_result(None)
        return future

    def work() -> None:
        try:
            compile_kernels(a, b, spec, engine, merges=len(job.pieces) > 1)
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="spdist-compile", daemon=True).start()
    return future


def compile_kernels(a: CSR, b: CSR, spec: ProductSpec, engine: Engine, *, merges: bool = False) -> None:
    """Compile the kernels of a product, or load them, and note that they are in the cache.

    `a, b`: of one row: types and sizes as `tiny_product` returns them.
    `merges`: whether partial products are merged.
    """
    load_cpu_kernels(a, b, spec, engine, merges=merges)
    _note(a, b, spec, merges=merges)


def note_compiled(job: JobSpec) -> None:
    """Note that the kernels of a job, which this process has made, are in the cache."""
    if _compiles(job) and SLICES in sys.modules:
        a, b, spec = tiny_product(job)
        _note(a, b, spec, merges=len(job.pieces) > 1)


def _compiles(job: JobSpec) -> bool:
    """Whether kernels of the CPU multiply, and the cache on disk keeps them."""
    engine = find_engine(job.engine)
    return engine.compiles and not engine.uses_gpu and not job.product.per_row.functions


def _note(a: CSR, b: CSR, spec: ProductSpec, *, merges: bool) -> None:
    from spdist.kernels.cpu.slices import multiply_slices  # loads Numba

    place = getattr(getattr(multiply_slices, "stats", None), "cache_path", None)
    if place is not None:
        with contextlib.suppress(OSError, RuntimeError):  # no permission, or no home: the next process loads them again
            note = note_of(a, b, spec, merges=merges)
            note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            note.write_text(place)


def is_noted(note: Path) -> bool:
    """Whether a file says that kernels are in a cache, and the cache is there."""
    try:
        return any(Path(note.read_text()).glob("slices.multiply_slices-*.nbc"))
    except (OSError, RuntimeError):
        return False


def note_of(a: CSR, b: CSR, spec: ProductSpec, *, merges: bool) -> Path:
    """Return the file that says whether the kernels of a product were compiled on this host.

    Its name is a digest of processor, Numba and sources of kernels, and of all types for which kernels differ.

    `a, b`: their types and sizes choose the kernels.
    `merges`: whether partial products are merged.
    """
    epilogue = spec.epilogue
    types = [
        *(str(kind) for kind in (a.dtype, b.dtype, a.indices.dtype, b.indices.dtype)),
        b.ncols > WINDOW,
        merges,
        spec.semiring.name,
        spec.mask is not None and (spec.complement, str(spec.mask.indices.dtype)),
        spec.selects,
        spec.diagonal is not None,
        epilogue is not None and (epilogue.rows is None, epilogue.columns is None),
    ]
    text = json.dumps([_processor(), os.environ.get("NUMBA_CACHE_DIR"), version("numba"), kernel_sources(), types])
    return cache_folder().parent / "compiled" / hashlib.sha256(text.encode()).hexdigest()[:32]


def _processor() -> list[str]:
    """Return model and instructions of the processor, for which Numba compiles; without Linux, the name of the host."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return [platform.node()]
    return [line for line in first if line.startswith(("model", "flags", "Features", "CPU"))]
