"""Compile kernels before a product needs them: the usual dtypes, indices and options."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import numpy as np
import scipy.sparse as sp

from spdist.errors import InputError
from spdist.foundation.cpus import count_cpus
from spdist.jobs import dispatch, planning, save
from spdist.jobs.compiling.ahead import compile_kernels
from spdist.kernels.cpu.engine import NUMBA
from spdist.kernels.cpu.workspace import WINDOW
from spdist.kernels.engine import ENGINES, find_engine
from spdist.kernels.product_spec import ProductSpec
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import index_dtype
from spdist.options import ExecutionOptions, OutputOptions, ProductOptions

DTYPES = "float32", "float64"
"""Dtypes of values whose kernels are compiled by default."""
WIDTHS = 1, WINDOW + 1, 1 << 31
"""Columns of B for which kernels differ: few, many, and enough to need int64 indices."""
OPTIONS = "plain", "selection", "mask"
"""Whole products; threshold and top-n, which share their kernels; masks."""

Case = tuple[str, int, str]
"""Dtype, columns of B, and options."""


def warm_up(
    engine: str = "auto",
    dtypes: Sequence[str] = DTYPES,
    processes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Compile the kernels of usual products for this machine; what the cache has already is only loaded.

    `engine`: "cuda" and "hybrid" compile for the GPU of this process too.
    `dtypes`: of the values of A and B.
    `processes`: compile side by side; by default one for each CPU that this process may use.
    `progress`: called as ``progress(done, total)``.
    Returns ``engine``, ``dtypes``, number of ``products`` whose kernels are there now, and ``seconds``.
    Raises `InputError` if there is no such engine or dtype, or no GPU for an engine that needs one.
    """
    if engine not in ENGINES or not find_engine(engine).compiles:
        raise InputError(f"engine={engine!r} compiles nothing ahead: write auto, numba, cuda or hybrid")
    for dtype in dtypes:
        _check_dtype(dtype)
    begin, done = time.perf_counter(), 0
    cases = list(itertools.product(dtypes, WIDTHS, OPTIONS))
    with_gpu = find_engine(engine).on_worker(lambda: True)
    on_gpu = list(itertools.product(dtypes, OPTIONS)) if with_gpu.uses_gpu else []
    total = len(cases) + len(on_gpu)
    for dtype, options in on_gpu:
        _compile_for_gpu(with_gpu.name, dtype, options)
        progress(done := done + 1, total)
    count = processes or count_cpus()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(count, len(cases)), mp_context=spawn, initializer=_be_quiet) as pool:
        for task in as_completed([pool.submit(_compile_case, *case) for case in cases]):
            task.result()
            progress(done := done + 1, total)
    return {"engine": engine, "dtypes": list(dtypes), "products": total, "seconds": time.perf_counter() - begin}


def _check_dtype(name: str) -> None:
    try:
        is_number = np.dtype(name).kind in tuple("biufc")
    except TypeError:
        is_number = False
    if not is_number:
        raise InputError(f"dtype={name!r} is not one of numbers: write float64 or float32, for instance")


def _be_quiet() -> None:
    """Say nothing of single kernels: the command says what is compiled."""
    logging.getLogger("spdist").setLevel(logging.ERROR)


def _compile_case(dtype: str, ncols: int, options: str) -> None:
    """Compile the kernels of one kind of product for the CPU, and those that plan it."""
    a, b = (CSR(np.array([0, 1]), np.zeros(1, index_dtype(ncols)), np.ones(1, dtype), (1, size)) for size in (1, ncols))
    is_real = np.dtype(dtype).kind != "c"
    specs = {
        "plain": ProductSpec(),
        "selection": ProductSpec(top_n=1, threshold=0) if is_real else ProductSpec(),
        "mask": ProductSpec(mask=b),
    }
    compile_kernels(a, b, specs[options], NUMBA)
    if options == "plain" and ncols == WIDTHS[0]:
        stored = save.save(f"memory://spdist-warm-up-{dtype}.zarr", _one(dtype), overwrite=True)
        planning.plan(stored, stored, ProductOptions(), ExecutionOptions())


def _compile_for_gpu(engine: str, dtype: str, options: str) -> None:
    """Compile the kernels of one kind of product for the GPU."""
    one = _one(dtype)
    product = {
        "plain": ProductOptions(),
        "selection": ProductOptions(top_n=1, threshold=0),
        "mask": ProductOptions(mask=one),
    }[options]
    dispatch.matmul((one, one), None, product, ExecutionOptions(engine=engine), OutputOptions())


def _one(dtype: str) -> sp.csr_array:
    return sp.csr_array(np.ones((1, 1), dtype))
