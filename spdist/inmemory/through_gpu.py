"""Matrices of the host multiplied on the GPU by row blocks; the GPU need not hold any of them whole.

CuPy is imported only when a product runs on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from spdist.errors import InputError, install
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.reduction_spec import Reduction, final_value
from spdist.matrices.csr import CSR
from spdist.options import InMemoryOptions

if TYPE_CHECKING:
    from typing import Any

    from spdist.kernels.streaming.gpu_device import Gpu


def multiply(a: CSR, b: CSR, spec: ProductSpec, options: InMemoryOptions) -> CSR:
    """Stream row blocks of A and B through the GPU.

    Parameters
    ----------
    a, b : CSR
        Canonical; values may be dense blocks.
    spec : ProductSpec
    options : InMemoryOptions
        Its memory limit and `deterministic` count.

    Returns
    -------
    CSR
        Canonical, on the host.

    Raises
    ------
    InputError
        If there is no GPU, no CuPy to reach it, or no kernel for an option.
    MemoryBoundError
        If the smallest block does not fit.
    """
    spec.check_device()
    check_gpu(options.method)
    from spdist.kernels.streaming import pipeline

    device = _gpu(options.memory_limit, options.deterministic)
    return pipeline.multiply(a, b, device, spec=replace(spec, sort=True))


def multiply_hyspmm(a: CSR, b: CSR, spec: ProductSpec, options: InMemoryOptions) -> CSR:
    """Multiply by the hybrid of CPU and GPU of hySpMM [1]_.

    `a, b`: canonical.
    `spec`: plain; not used.
    `options`: its threads count.
    Returns canonical, on the host.
    Raises `InputError` if there is no GPU, or no CuPy to reach it.

    References
    ----------
    .. [1] X. Wu, "Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform", thesis, Georgia
       State University, 2015.
    """
    check_gpu("hyspmm")
    from spdist.kernels.hyspmm import multiply as hyspmm

    return hyspmm.multiply(a, b, threads=options.threads)


def reduce(a: CSR, b: CSR, what: Reduction, spec: ProductSpec, options: InMemoryOptions) -> Any:
    """Return a reduction of the product; C stays on the GPU.

    Parameters
    ----------
    a, b : CSR
    what : Reduction
    spec : ProductSpec
    options : InMemoryOptions
        Its memory limit counts.

    Returns
    -------
    number or array
        As `spdist.reduce`.

    Raises
    ------
    InputError
        If there is no GPU, no CuPy to reach it, or no kernel for an option.
    """
    spec.check_device()
    check_gpu(options.method)
    from spdist.kernels.streaming import pipeline

    return final_value(what, pipeline.reduce(a, b, what, _gpu(options.memory_limit), spec=spec), b.ncols)


def check_gpu(method: str) -> None:
    """Refuse a method if there is no GPU, or CuPy is not installed; `method` is its name in the message."""
    try:
        import cupy

        cupy.cuda.runtime.getDevice()
    except Exception as error:  # no CuPy, no driver, no device: each has an error of its own
        raise InputError(
            f"method={method!r} needs a CUDA device and CuPy ({error}): {install('cu13')} on a machine with a "
            f"GPU, or choose method='auto'"
        ) from None


def _gpu(memory_limit: int | None, deterministic: bool = False) -> Gpu:
    """Return the current GPU; freed memory stays in CuPy's pool for the next product."""
    import cupy

    from spdist.kernels.streaming.gpu_device import Gpu

    return Gpu(memory_limit, deterministic=deterministic, malloc=cupy.get_default_memory_pool().malloc)
