"""Calls that take matrices in memory as well as stored ones."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from spdist.errors import InputError
from spdist.foundation.units import parse_bytes
from spdist.interop.dask_arrays import from_dask, is_dask_array
from spdist.jobs.operands import are_in_memory, resolved, transposed
from spdist.jobs.predicting.choice import quickest_in_memory
from spdist.jobs.report import Callbacks
from spdist.jobs.save import save
from spdist.jobs.target import check_target
from spdist.kernels.engine import find_engine
from spdist.kernels.reduction_spec import reduction_of
from spdist.options import ExecutionOptions, InMemoryOptions, OutputOptions, ProductOptions
from spdist.storage.lock import hold_target
from spdist.storage.matrix import open_matrix
from spdist.storage.names.anndata_frames import check_axes
from spdist.stores.registry import at, normalise

logger = logging.getLogger("spdist")


def matmul(
    operands: tuple[Any, Any],
    out: str | Path | None,
    product: ProductOptions,
    execution: ExecutionOptions,
    output: OutputOptions,
) -> Any:
    """Multiply two matrices, both in memory or both stored; `spdist.matmul` describes it.

    Parameters
    ----------
    operands : (A, B)
        Both in memory, or both stored.
    out : str or Path or None
        Where to store C; required for stored operands.
    product : ProductOptions
    execution : ExecutionOptions
    output : OutputOptions

    Returns
    -------
    scipy.sparse matrix or array, or StoredMatrix

    Raises
    ------
    InputError
        If an option is wrong, one operand is in memory and the other stored, or `out` is missing.
    SpdistError
        If the run failed.
    """
    execution.check_engine()
    if out is not None and not product.sort:
        raise InputError(
            f"sort={product.sort!r}: rows of a stored matrix are sorted; leave sort out, or multiply in memory, "
            f"without out={str(out)!r}"
        )
    if any(map(is_dask_array, operands)):
        return _multiply_dask_arrays(operands, out, product, execution, output)
    operands, product = resolved(operands, product)
    if are_in_memory(*operands, product.mask):
        if out is not None:
            check_axes(normalise(out), _shape_of_product(*operands, product))
        c = _multiply_in_memory(*operands, product, execution)
        return c if out is None else save(out, c, overwrite=output.overwrite, steal=output.steal)
    if out is None:
        raise InputError("the product of stored matrices is stored too: say where, with out='C.zarr'")
    from spdist.jobs.multiply import multiply  # imports Dask

    multiply(operands, out, product, execution, output)
    return open_matrix(out)


def _shape_of_product(a: Any, b: Any, product: ProductOptions) -> tuple[int, int]:
    """Return the shape of the product of two matrices in memory."""
    rows = a.shape[1 if product.transpose_a else 0]
    return int(rows), int(b.shape[0 if product.transpose_b else 1])


def _multiply_dask_arrays(
    operands: tuple[Any, Any],
    out: str | Path | None,
    product: ProductOptions,
    execution: ExecutionOptions,
    output: OutputOptions,
) -> Any:
    """Multiply operands that may be Dask arrays: such are stored next to `out` while the product runs."""
    if out is None:
        raise InputError("the product of Dask arrays is stored: say where, with out='C.zarr'")
    target = normalise(out)
    check_target(target, overwrite=output.overwrite or output.resume)
    with hold_target(target, steal=output.steal), contextlib.ExitStack() as stack:
        stored: dict[int, Any] = {}  # of each array, so that A @ A stores it once
        for name, operand in zip("ab", operands, strict=True):
            if is_dask_array(operand) and id(operand) not in stored:
                place = f"{target}.spdist-operand-{name}"
                stack.callback(at(place).discard)
                stored[id(operand)] = from_dask(operand, place, overwrite=True)
        a, b = (stored.get(id(operand), operand) for operand in operands)
        return matmul((a, b), out, product, execution, output)


def _multiply_in_memory(a: Any, b: Any, product: ProductOptions, execution: ExecutionOptions) -> Any:
    from spdist.inmemory import spgemm as inmemory  # loads Numba

    left, right = transposed(a) if product.transpose_a else a, transposed(b) if product.transpose_b else b
    options = _in_memory_options(execution)
    if product.mask is None and isinstance(product.axis, int) and product.axis == 1:
        chosen = quickest_in_memory(left, right, product.row_spec(), find_engine(options.method))
        options = replace(options, method=chosen.name)
    return inmemory.multiply(left, right, product, options)


def _in_memory_options(execution: ExecutionOptions) -> InMemoryOptions:
    """Return the options with which an engine multiplies matrices in memory."""
    engine = find_engine(execution.engine)
    if engine.mixes:
        logger.info("engine %s: matrices in memory are multiplied by the GPU alone", engine.name)
    limit = None if execution.memory_limit is None else parse_bytes(execution.memory_limit)
    return InMemoryOptions(engine.on_worker(lambda: True).name, memory_limit=limit)


def reduce(
    operands: tuple[Any, Any],
    what: tuple[str, Any],
    product: ProductOptions,
    execution: ExecutionOptions,
    callbacks: Callbacks | None = None,
) -> Any:
    """Reduce a product of two matrices, both in memory or both stored; `spdist.reduce` describes it.

    Parameters
    ----------
    operands : (A, B)
        Both in memory, or both stored.
    what : (str, sequence of float or None)
        Name of the reduction, and the bins of a histogram.
    product : ProductOptions
    execution : ExecutionOptions
    callbacks : Callbacks, optional

    Returns
    -------
    number or array
        As `spdist.reduce`.

    Raises
    ------
    InputError
        If an option is wrong, or one operand is in memory and the other stored.
    SpdistError
        If the run failed.
    """
    reduction = reduction_of(*what)
    execution.check()
    if find_engine(execution.engine).plain_only:
        raise InputError(
            f"engine={execution.engine!r} has no reductions: choose engine='auto', 'numba', 'cuda' or 'hybrid'"
        )
    if are_in_memory(*operands, product.mask):
        from spdist.inmemory import host_operands
        from spdist.inmemory import spgemm as inmemory

        options = _in_memory_options(execution)
        return host_operands.reduce(*operands, reduction, inmemory.spec_of(product), options)
    from spdist.jobs import reduce as stored

    return stored.reduce(operands, reduction, product, execution, callbacks)
