"""Products of several matrices, in the order of fewest products; `spdist.jobs.chain_order` finds the order."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import scipy.sparse as sp

from spdist.errors import InputError
from spdist.foundation.cpus import count_cpus
from spdist.foundation.other_objects import refuse_other_objects
from spdist.foundation.units import counted, parse_bytes
from spdist.inmemory.host_operands import scipy_like
from spdist.inmemory.spgemm import spgemm
from spdist.jobs.chain_order import Chain, Order, first_of, last_of, parts_of, plan_chain
from spdist.jobs.save import save
from spdist.jobs.target import check_target, reserve_target
from spdist.kernels.cpu import multiply as cpu
from spdist.matrices.csr import from_scipy
from spdist.matrices.dtypes import index_dtype, result_dtype
from spdist.options import (
    DEFAULT_MEMORY_LIMIT,
    ChainKeywords,
    ExecutionOptions,
    OutputOptions,
    ProductOptions,
    lists_keywords,
    options_of,
)
from spdist.storage.foreign import versions
from spdist.storage.foreign.checked import checked
from spdist.storage.lock import hold_target
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.names.anndata_frames import check_axes
from spdist.storage.names.names import NO_NAMES, AxisNames
from spdist.storage.names.of_matrix import names_for
from spdist.stores.registry import at, normalise

logger = logging.getLogger("spdist")

IN_MEMORY_SHARE = 0.5
"""Share of the memory limit up to which a stored chain, with all partial products, is multiplied in memory."""


@lists_keywords(ChainKeywords)
def multi_matmul(matrices: Sequence[Any], out: str | Path | None = None, **keywords: Unpack[ChainKeywords]) -> Any:
    """Multiply several matrices in the order of fewest estimated products.

    Parameters
    ----------
    matrices : sequence of scipy.sparse matrices or arrays; or of paths, URLs or StoredMatrix
        At least two; all in memory, or all stored.
    out : str or Path, optional
        Where to store the product; required for stored matrices.
    engine, memory_limit, host_limit, workers, scheduler, security, resume, overwrite, steal, names
        As in `multiply`.

    Returns
    -------
    scipy.sparse matrix or array, or StoredMatrix
        In memory if the matrices are and there is no `out`.

    Raises
    ------
    InputError
        If there are fewer than two matrices, neighbours do not fit, or some are in memory and others stored.
    SpdistError
        If the run failed.

    Notes
    -----
    Stored matrices that fit in half of one worker's memory limit, all partial products included, are multiplied in
    memory, and only the result is stored. Otherwise each partial product is stored next to `out` and removed at the
    end; after an interruption it stays for `resume`.

    Examples
    --------
    The coarse matrix of a multigrid method:

    >>> import scipy.sparse as sp
    >>> a = sp.diags_array([-1.0, 2, -1], offsets=[-1, 0, 1], shape=(4, 4), format="csr")
    >>> p = sp.csr_array([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    >>> multi_matmul([p.T, a, p]).toarray()
    array([[ 2., -1.],
           [-1.,  2.]])
    """
    execution, output = options_of(multi_matmul, keywords, ExecutionOptions, OutputOptions)
    return multiply_chain(matrices, out, execution, output)


@versions.watched()
def multiply_chain(
    matrices: Sequence[Any],
    out: str | Path | None,
    execution: ExecutionOptions,
    output: OutputOptions,
    in_memory_share: float = IN_MEMORY_SHARE,
) -> Any:
    """Multiply several matrices; `multi_matmul` describes it.

    `out`: where to store the product; None for matrices in memory.
    `in_memory_share`: see `IN_MEMORY_SHARE`.
    Returns as `multi_matmul`.
    Raises `InputError, SpdistError` As `multi_matmul`.
    """
    if len(matrices) < 2:
        raise InputError(f"a chain of {counted(len(matrices), 'matrix')}: pass two at least")
    refuse_other_objects(*matrices)
    in_memory = {bool(sp.issparse(m)) for m in matrices}
    if len(in_memory) > 1:
        raise InputError("some matrices are in memory and others stored: store all with spdist.save, or open all")
    if out is not None and in_memory == {True}:
        check_axes(normalise(out), (matrices[0].shape[0], matrices[-1].shape[1]))
    if in_memory == {True}:
        c = _multiply_scipy(matrices)
        return c if out is None else save(out, c, overwrite=output.overwrite, steal=output.steal)
    if out is None:
        raise InputError("the product of stored matrices is stored too: say where, with out='C.zarr'")
    stored = [checked(m if isinstance(m, StoredMatrix) else open_matrix(m)) for m in matrices]
    chain = plan_chain(stored)
    logger.info("order %s, about %s products", chain.order, f"{chain.products:,}")
    limit = parse_bytes(execution.memory_limit or DEFAULT_MEMORY_LIMIT)
    target = normalise(out)
    check_axes(target, (stored[0].full_shape[0], stored[-1].full_shape[1]))
    if len(stored) > 2 and _estimate_bytes(stored, chain) <= in_memory_share * limit:
        replace_old = output.overwrite or output.resume
        check_target(target, overwrite=replace_old)  # refuses before anything is computed
        with hold_target(target, steal=output.steal):
            reserve_target(target, overwrite=replace_old)
            held = [m.rows(0, m.nrows).to_scipy() for m in stored]
            names = AxisNames(stored[0].names.rows, stored[-1].names.columns) if output.names else NO_NAMES
            rows, columns = (one if one is None else one.to_array() for one in names_for(target, names))
            c = _multiply_in_memory(chain.order, held)
            return save(out, c, row_names=rows, column_names=columns, overwrite=replace_old)
    check_target(target, overwrite=output.overwrite or output.resume)
    with hold_target(target, steal=output.steal) as lock:
        for first, last in list(parts_of(chain.order))[:-1]:
            lock.keep(_place_of_part(target, first, last))
        return _multiply_stored(chain.order, stored, target, execution, output)


def _multiply_scipy(matrices: Sequence[Any]) -> Any:
    """Multiply matrices of SciPy's."""
    canonical = [from_scipy(m) for m in matrices]
    chain = plan_chain(canonical, sizes=False)
    if all(m.format == "csr" for m in matrices):  # partial products are canonical: they need no check
        multiply = functools.partial(cpu.multiply, threads=count_cpus())
        return scipy_like(matrices[0], _multiply_in_memory(chain.order, canonical, multiply))
    return _multiply_in_memory(chain.order, matrices)


def _multiply_in_memory(order: Order, matrices: Sequence[Any], multiply: Callable[[Any, Any], Any] = spgemm) -> Any:
    if isinstance(order, int):
        return matrices[order]
    left, right = (_multiply_in_memory(part, matrices, multiply) for part in order)
    return multiply(left, right)


def _multiply_stored(
    order: Order,
    matrices: Sequence[StoredMatrix],
    out: str,
    execution: ExecutionOptions,
    output: OutputOptions,
) -> StoredMatrix:
    """Multiply from storage to storage; partial products lie next to `out` until the end."""
    from spdist.jobs.multiply import multiply  # imports Dask

    partial: list[str] = []

    def make(part: Order, place: str) -> StoredMatrix:
        if isinstance(part, int):
            return matrices[part]
        left, right = (make(one, _place_of_part(out, first_of(one), last_of(one))) for one in part)
        how = output if place == out else OutputOptions(resume=True, names=output.names)
        multiply((left, right), place, ProductOptions(), execution, how)
        if place != out:
            partial.append(place)
        return open_matrix(place)

    made = make(order, out)
    for place in partial:
        at(place).remove()
    return made


def _place_of_part(out: str, first: int, last: int) -> str:
    """Return where the product of matrices `first` to `last` lies until the end."""
    return f"{out}.spdist-{first}-{last}"


def _estimate_bytes(matrices: Sequence[StoredMatrix], chain: Chain) -> int:
    """Return the bytes in memory of all operands and, as estimated, of all partial products."""
    total = sum(m.nbytes for m in matrices)
    for first, last in parts_of(chain.order):
        dtype = matrices[first].dtype
        for m in matrices[first + 1 : last + 1]:
            dtype = result_dtype(dtype, m.dtype)
        entry = index_dtype(matrices[last].ncols).itemsize + dtype.itemsize
        total += chain.nnz[first, last] * entry + 8 * matrices[first].nrows
    return total
