"""The public calls: open -> plan -> run -> verify. Signatures and docstrings; `spdist.jobs` does the work.

`multiply` explains the options of stored products, `spdist.spgemm` what they compute; other calls refer to these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from spdist.foundation import phases
from spdist.notebook import shown
from spdist.options import (
    CheckKeywords,
    ExecutionOptions,
    MatmulKeywords,
    MultiplyKeywords,
    OutputOptions,
    PlanKeywords,
    ProductOptions,
    ReduceKeywords,
    VerifyKeywords,
    lists_keywords,
    options_of,
    select,
)

if TYPE_CHECKING:
    from spdist.jobs.operands import MatrixLike
    from spdist.jobs.report import Callbacks, Report
    from spdist.jobs.reports.density import DensityMap
    from spdist.scheduler.planner.plan import Plan
    from spdist.storage.matrix import StoredMatrix
    from spdist.verification.result import Verification
    from spdist.verification.stored_matrix import MatrixCheck

__all__ = [
    "check",
    "info",
    "matmul",
    "multiply",
    "plan",
    "reduce",
    "save",
    "spy",
    "status",
    "verify",
]


def save(
    url: str | Path,
    matrix: Any,
    *,
    row_names: Iterable[str] | None = None,
    column_names: Iterable[str] | None = None,
    overwrite: bool = False,
    steal: bool = False,
) -> StoredMatrix:
    """Store a SciPy sparse matrix or array as a matrix in Zarr.

    Parameters
    ----------
    url : str or Path
        A path or fsspec URL.
    matrix : scipy.sparse matrix or array
        Rows are sorted and duplicates summed first. A `bsr_array` is stored in its blocks.
    row_names, column_names : iterable of str, optional
        Stored with the matrix, unless it is in an AnnData, which has its own. A name has no line break.
    overwrite : bool
        Replace an existing matrix, once the new one is whole.
    steal : bool
        As in `multiply`.

    Returns
    -------
    StoredMatrix

    Raises
    ------
    InputError
        If something is at `url` already and `overwrite` is false, or it is not a matrix.
    MatrixError
        If there are more or fewer names than rows or columns.
    SpdistError
        If the disk is full.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> a = save("memory://A.zarr", sp.eye_array(3), row_names=["x", "y", "z"], overwrite=True)
    >>> a.shape, a.nnz, a.row_names.tolist(), a.column_names
    ((3, 3), 3, ['x', 'y', 'z'], None)
    """
    from spdist.jobs import save as saving

    return saving.save(url, matrix, row_names=row_names, column_names=column_names, overwrite=overwrite, steal=steal)


def append(
    target: str | Path, rows: Any, *, row_names: Iterable[str] | None = None, steal: bool = False
) -> StoredMatrix:
    """Append rows to a stored matrix; the files of what is there are shared with the new version, not copied.

    Readers see the old matrix, or the new one. Products of the old one are other products, which are not resumed.

    Parameters
    ----------
    target : str or Path
        A matrix that spdist wrote, (n, m), not in blocks.
    rows : scipy.sparse matrix or array; or path, URL or StoredMatrix
        (k, m), of values that the matrix's dtype holds.
    row_names : iterable of str, optional
        Names of the new rows; by default the names that they are stored with. All rows have names, or none.
    steal : bool
        As in `multiply`.

    Returns
    -------
    StoredMatrix
        (n + k, m)

    Raises
    ------
    InputError
        If `target` is no such matrix, or names do not fit. Nothing has been written.
    MatrixError
        If shapes or dtypes do not fit.
    SpdistError
        If the disk is full.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> a = save("memory://A.zarr", sp.eye_array(3), overwrite=True)
    >>> append("memory://A.zarr", sp.eye_array(2, 3)).shape
    (5, 3)
    """
    from spdist.jobs import save as saving

    return saving.append(target, rows, row_names=row_names, steal=steal)


@lists_keywords(PlanKeywords)
def plan(a: MatrixLike, b: MatrixLike, **keywords: Unpack[PlanKeywords]) -> Plan:
    """Plan ``A @ B``: how it is cut, what each worker takes, what it should cost. Runs nothing.

    Parameters
    ----------
    a, b : path, URL or StoredMatrix
    engine, memory_limit, host_limit, grid
        As in `multiply`.
    semiring, mask, complement, triangle, epilogue, threshold, top_n
        As in `multiply`. The plan counts on a C that mask, triangle and top-n have cut, but not on a threshold. The
        number of products in a triangle is estimated.

    Returns
    -------
    Plan
        A frozen value, equal on every machine.

    Raises
    ------
    MemoryBoundError
        If the smallest block does not fit; the message says how much is needed.
    InputError
        If A or B is not a matrix, their shapes do not fit, or the engine does not multiply their values; or if there is
        no `memory_limit`, and no GPU here whose free memory could be the limit.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> a = save("memory://A.zarr", sp.eye_array(3), overwrite=True)
    >>> plan(a, a, memory_limit="64MiB").grid
    {'row_blocks': 1, 'inner_blocks': 1, 'column_blocks': 1}
    """
    from spdist.jobs import planning

    product, execution = options_of(plan, keywords, ProductOptions, ExecutionOptions)
    return planning.plan(a, b, product, execution)


@lists_keywords(MatmulKeywords)
def matmul(a: Any, b: Any, out: str | Path | None = None, **keywords: Unpack[MatmulKeywords]) -> Any:
    """Multiply two sparse matrices in memory, or two stored ones whose product is stored at `out`.

    Parameters
    ----------
    a, b : scipy.sparse matrix or array; or path, URL or StoredMatrix
        Both in memory, or both stored; the mask too. A stored matrix may also be given as ``a.T``, as a `zarr.Group`,
        or as the sparse dataset of a backed AnnData. A Dask array is stored next to `out` while the product runs.
    out : str or Path, optional
        Where to store C; required for stored operands and Dask arrays.
    engine, memory_limit, host_limit, grid, workers, scheduler, security, resume, overwrite, steal, names
        As in `multiply`. For matrices in memory only `engine`, `overwrite` and, on GPUs, `memory_limit` count; "auto"
        takes a GPU for a whole product of two `csr` matrices that should be quicker there, and logs it.
    semiring, mask, complement, triangle, epilogue, threshold, top_n, axis
        As in `spgemm`.
    sort : bool
        As in `spgemm`. Rows of a stored C are sorted: with `out` it must be true.
    transpose_a, transpose_b : bool
        Multiply by the transpose of A or B: ``matmul(a, a, transpose_b=True)`` is ``A @ A.T``.

    Returns
    -------
    scipy.sparse matrix or array, or StoredMatrix
        In memory if the operands are and there is no `out`.

    Raises
    ------
    InputError
        As `multiply`; or if some matrices are in memory and others stored.
    MatrixError
        If the shapes do not fit.
    SpdistError
        If the run failed.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> a = sp.csr_array([[1, 2], [0, 1]])
    >>> matmul(a, a).toarray()
    array([[1, 4],
           [0, 1]])

    Stored matrices; ``memory://`` is a store in this process:

    >>> stored = save("memory://A.zarr", a, overwrite=True)
    >>> matmul(stored, stored, "memory://C.zarr", transpose_b=True, overwrite=True).nnz
    4
    """
    if not keywords and out is None and hasattr(a, "indptr"):
        from spdist.inmemory import small

        if (c := small.multiply(a, b)) is not None:
            return c
    from spdist.jobs import dispatch

    product, execution, output = options_of(matmul, keywords, ProductOptions, ExecutionOptions, OutputOptions)
    return dispatch.matmul((a, b), out, product, execution, output)


@lists_keywords(MultiplyKeywords)
def multiply(
    a: MatrixLike,
    b: MatrixLike,
    c: str | Path,
    *,
    callbacks: Callbacks | None = None,
    **keywords: Unpack[MultiplyKeywords],
) -> Report:
    """Multiply two stored matrices and store the product; each may be larger than memory.

    Parameters
    ----------
    a, b : path, URL or StoredMatrix
        Also ``a.T``, a `zarr.Group`, or the sparse dataset of a backed AnnData.
    c : str or Path
        Where C goes; not A or B. In an AnnData of version 3 of Zarr's format, as in ``cells.zarr/obsp/similarity``,
        AnnData finds it.
    callbacks : Callbacks, optional
        Functions to call while the product runs. By default a Jupyter notebook shows a progress bar.
    engine : {"auto", "scipy", "numba", "cuda", "hybrid"}
        What multiplies a block:

        - "auto" takes the GPUs of this host ("cuda") if the product should be quicker with them, by the prediction
          that `spdist plan` prints, and the cores otherwise. On the cores it picks "scipy" or "numba" for each block.
          With `workers` or `scheduler` it is of the cores.
        - "cuda" has one GPU for each worker. It takes all values but integers of 8 or 16 bits.
        - "hybrid" runs the workers of "cuda", and workers of one CPU core each. CPU workers take blocks far enough
          ahead to finish them before the GPUs get there.

        Matrices stored in dense blocks have one kernel on the CPU, and one on the GPU for float and complex values.
    memory_limit : int or str, optional
        Bytes for each worker, for instance ``"512MiB"``. Without GPUs: host memory for blocks, buffers and waiting
        results, besides the memory of the idle worker; 2GiB by default. With GPUs: GPU memory; by default 0.9 of the
        free memory. With "auto" it is host memory, on GPUs too: as `host_limit` there.
    host_limit : int or str, optional
        With GPUs: maximum bytes of host memory for the blocks of each worker, including blocks on their way to the
        GPU; 8GiB by default.
    grid : (int, int, int), optional
        Numbers of row, inner and column blocks; by default the plan finds the quickest.
    workers : int, optional
        Processes on this machine, which share its CPUs. By default this process does the work, with a thread for each
        CPU; with several GPUs, one process for each. A small product is made without Dask, and has no dashboard. The
        CPUs are the ones that this process is bound to, within the quota of its control groups.
    scheduler : str, distributed.Client or cluster, optional
        A running Dask scheduler, whose workers are used: its address, the ``.json`` that it wrote
        (``dask scheduler --scheduler-file``), or a client or cluster of your own (`LocalCluster`, `SLURMCluster`,
        `KubeCluster`, `GatewayCluster`, ...), with its keys. With "hybrid", workers that see no GPU are cores.
    security : distributed.Security, optional
        Keys for a scheduler at ``tls://``. By default the keys of the client or cluster, of Dask's configuration
        (``distributed.comm.tls``), or of `workers` if it started the scheduler.
    resume : bool
        Continue an unfinished C by its stored plan. Starts afresh if there is no C; does nothing if C is finished. With
        GPUs, `memory_limit` may differ from the earlier run's.
    overwrite : bool
        Replace an existing C, once the new one is whole.
    steal : bool
        Take over from a run on another host that writes C and had no heartbeat for a minute. A dead run of this host is
        taken over without this option; a live run never is.
    names : bool
        Whether C gets the names of A's rows and B's columns. Names in an AnnData that cannot be read are left out with
        a warning; damaged names of a matrix written by spdist are an error.
    semiring, mask, complement, triangle, epilogue, threshold, top_n
        Changes to each row while it is computed, as in `spgemm`; the mask is stored. Not with engine "scipy". If the
        grid cuts the inner dimension, the semiring adds partial products before rows are cut.
    axis : {1, 0}
        Whether `top_n` and an epilogue's norm apply to rows (1) or columns (0), as in `spgemm`. By columns, transposed
        copies of A, B and the mask are written next to C, then the transpose of C, and C from it.
    transpose_a, transpose_b : bool
        Multiply by the transpose of A or B. A transposed copy lies next to C while the product runs, and takes space
        and time to write; it is written again to resume.
    part : str or (int, int), optional
        Make only some rows of C: ``"3/8"`` is the third of eight parts, each with about as many entries of A. The parts
        are matrices in C's folder, made by calls of their own, in any order, on any hosts, each with its own `resume`
        and `check`. The call that makes the last one makes C of them by its metadata; nothing is copied. spdist reads
        such a C as any other; other programs read its parts. Not with `overwrite`, `transpose_a`, `transpose_b`,
        `triangle` or ``axis=0``.
    check : bool
        Verify C at the end. With options that change rows, all rows are checked against the options, and some rows
        are recomputed: `Report.verification` says how many.
    record : str or Path, optional
        File for the seconds and bytes of each stage of each block, one JSON object a line. Lines with ``what`` tell how
        the run began, went on and ended; `spdist report` reads them.
    report : str or Path, optional
        HTML file for the report of the run, even if it fails: the page of the dashboard with its data inside.

    Returns
    -------
    Report

    Raises
    ------
    InputError
        If an argument is wrong; nothing has been written.
    SpdistError
        If the run failed; durable blocks stay, for `resume`.
    VerificationError
        If `check` found C to be wrong.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> a = save("memory://A.zarr", sp.csr_array([[1.0, 2.0], [0.0, 1.0]]), overwrite=True)
    >>> report = multiply(a, a, "memory://C.zarr", memory_limit="64MiB", overwrite=True, check=True)
    >>> report.nnz, report.state, report.verification["ok"]
    (3, 'computed', True)
    """
    with phases.clocked(), shown(callbacks) as calls:
        from spdist.jobs import multiply as jobs  # imports Dask, which the report counts

        product, execution, output = options_of(multiply, keywords, ProductOptions, ExecutionOptions, OutputOptions)
        return jobs.multiply((a, b), c, product, execution, output, calls)


@lists_keywords(ReduceKeywords)
def reduce(
    a: Any,
    b: Any,
    what: str,
    *,
    bins: Sequence[float] | None = None,
    callbacks: Callbacks | None = None,
    **keywords: Unpack[ReduceKeywords],
) -> Any:
    """Reduce a product to a number or a vector; C is never whole, in memory or in storage.

    Parameters
    ----------
    a, b : scipy.sparse matrix or array; or path, URL or StoredMatrix
        Both in memory, or both stored; the mask too.
    what : str
        "sum", "row_sums", "column_sums", "trace", "nnz" (entries, zeros included), "row_nnz" (of each row),
        "frobenius" (the root of the sum of squares), or "histogram".
    bins : sequence of float, optional
        Edges of a histogram's bins: at least two, finite and rising. An entry, zero included, is counted in the bin
        with ``edge <= value < next edge``, in the last bin also if it equals the last edge. Other values and NaN are
        not counted. Values are compared as float64, to which integers beyond 2^53 are rounded; they are not complex.
    callbacks : Callbacks, optional
        Functions to call while the product runs. By default a Jupyter notebook shows a progress bar.
    engine, memory_limit, host_limit, workers, scheduler, security
        As in `multiply`. The engine is "auto", "numba", or "cuda" or "hybrid", with which C never leaves the GPU. In
        memory, only the engine counts and, on GPUs, `memory_limit`.
    semiring, mask, complement, triangle, epilogue, threshold, top_n
        Changes to the product before it is reduced, as in `spgemm`.

    Returns
    -------
    number or (nrows,), (ncols,) or (bins,) array
        Values are added by plus, whatever the semiring, as NumPy adds them: integers and bools as int64 or uint64.
        Counts are int64.

    Raises
    ------
    InputError
        If an argument is wrong.
    MatrixError
        If shapes do not fit, or the values of a histogram are complex.
    SpdistError
        If the run failed.

    Notes
    -----
    Sums of a whole product by plus and times are products with vectors, ``A (B 1)``. For other reductions some rows of
    C are made at a time; for "trace" only the diagonal.

    Examples
    --------
    The triangles of a graph, each seen from its three corners in both directions:

    >>> import scipy.sparse as sp
    >>> a = sp.csr_array([[0, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 1, 0]])
    >>> int(reduce(a, a, "sum", semiring="plus_pair", mask=a)) // 6
    2
    """
    from spdist.jobs import dispatch

    product, execution = options_of(reduce, keywords, ProductOptions, ExecutionOptions)
    with shown(callbacks) as calls:
        return dispatch.reduce((a, b), (what, bins), product, execution, calls)


def info(matrix: MatrixLike) -> dict[str, Any]:
    """Describe a stored matrix.

    Returns ``shape``, ``dtype``, ``nnz``; of a block matrix ``blocks`` and ``block_size``; ``rows`` with min, mean and
    max entries of a row and the number of empty rows, of a block matrix in blocks; ``row_names`` and ``column_names``:
    whether they have names; ``bytes`` in memory and as stored; ``state``: ``complete``, or ``unfinished`` with its
    durable part; ``provenance``.
    Raises `MatrixError` if it is not a matrix.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> info(save("memory://A.zarr", sp.eye_array(3), overwrite=True))["rows"]
    {'min': 1, 'mean': 1.0, 'max': 1, 'empty': 0}
    """
    from spdist.jobs.describe import info as described

    return described(matrix)


def spy(matrix: MatrixLike) -> DensityMap:
    """Draw where the entries of a stored matrix lie, in at most 256 x 256 cells. Notebooks show the picture.

    Parameters
    ----------
    matrix : path, URL or StoredMatrix
        Up to 2^25 entries are all counted; in larger matrices, samples from each row of cells.

    Returns
    -------
    DensityMap
        `counts` of the cells; `to_svg` and `to_png` give files.

    Raises
    ------
    MatrixError
        If it is not a matrix, or unfinished.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> spy(save("memory://A.zarr", sp.eye_array(3), overwrite=True)).counts
    array([[1., 0., 0.],
           [0., 1., 0.],
           [0., 0., 1.]])
    """
    from spdist.jobs.reports.density import density_map

    return density_map(matrix)


def status(target: str | Path) -> dict[str, Any]:
    """Return the state of a target: of an active run, a stopped run, or a complete matrix.

    Reads the lock next to the target, its plan and its journal. Writes nothing and starts nothing, so that it may be
    asked at any time and from any host that sees the storage.

    Parameters
    ----------
    target : path or URL
        Where `multiply` writes, or wrote, C; any stored matrix.

    Returns
    -------
    dict
        ``state``: ``running``, ``stopped`` or ``complete``; ``remedy``: what to do next. If part of C is there,
        ``blocks_done`` of ``blocks``, ``rows_done`` of ``rows``, ``entries_durable``, ``last_write`` (UTC), and
        ``events``: what was said of the run, such as workers that were lost. If a run holds the target, ``run`` names
        it and ``sign_of_life`` says when it last gave one. ``replaces`` is there if the target is a complete matrix
        that the run will replace.

    Raises
    ------
    MatrixError
        If nothing is there, or the system denies reading it.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> status(save("memory://A.zarr", sp.eye_array(3), overwrite=True).url)["state"]
    'complete'
    """
    from spdist.jobs.status import status as status_of

    return status_of(target)


@lists_keywords(VerifyKeywords)
def verify(a: MatrixLike, b: MatrixLike, c: MatrixLike, **keywords: Unpack[VerifyKeywords]) -> Verification:
    """Verify out of core that C is ``A @ B``, or ``A @ B`` changed by options.

    A plain product passes Freivalds' check, row by row. If options changed it, rows drawn at random are recomputed, and
    all rows are checked against mask, threshold and top-n.

    Parameters
    ----------
    a, b, c : path, URL or StoredMatrix
        A and B also ``a.T``.
    semiring, mask, complement, triangle, epilogue, threshold, top_n
        As C was made by `multiply`.
    transpose_a, transpose_b : bool
        As C was made by `multiply`. A transposed copy lies next to C for as long as the check runs.
    vectors : int
        Random vectors of Freivalds' check; plain products only.
    seed : int
        Seed of the random vectors, or of the rows that are drawn.
    threads : int, optional
        Threads, by default one for each CPU that this process may use; plain products only.
    progress : callable, optional
        Called as ``progress(done, total)``.

    Returns
    -------
    Verification
        `ok` says whether C is ``A @ B``, `reason` why.

    Raises
    ------
    InputError
        If matrices or options do not fit, or C was made by columns, with an axis of 0; with transposes, if a run writes
        C or nothing may be written next to it.
    CorruptError
        If a Zarr chunk is missing or altered.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> a = save("memory://A.zarr", sp.csr_array([[1.0, 2.0], [0.0, 1.0]]), overwrite=True)
    >>> c = save("memory://C.zarr", sp.csr_array([[1.0, 4.0], [0.0, 1.0]]), overwrite=True)
    >>> verify(a, a, c).ok, verify(a, a, a).ok
    (True, False)
    """
    from spdist.jobs import check

    (product,) = options_of(verify, keywords, ProductOptions)
    return check.verify((a, b, c), product, **select(keywords, CheckKeywords))


def check(url: str | Path, *, progress: Callable[[int, int], None] | None = None) -> MatrixCheck:
    """Read a stored matrix whole, in bounded memory, and name everything that is wrong with it.

    Metadata, Zarr chunks that are missing, altered or in another's place, offsets, columns, the order of rows, and what
    dead runs left in the matrix or beside it. Altered metadata and swapped Zarr chunks are detected only in
    matrices written by spdist.

    Parameters
    ----------
    url : str or Path
        A path or fsspec URL.
    progress : callable, optional
        Called as ``progress(done, total)``, in Zarr chunks.

    Returns
    -------
    MatrixCheck
        `ok` is true if nothing is wrong; `problems` lists the problems.

    Raises
    ------
    MatrixError
        If nothing is there, or it is no matrix.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> a = save("memory://A.zarr", sp.eye_array(3), overwrite=True)
    >>> check("memory://A.zarr").ok
    True
    """
    from spdist.stores.registry import normalise
    from spdist.verification import stored_matrix

    return stored_matrix.check(normalise(url), *([] if progress is None else [progress]))
