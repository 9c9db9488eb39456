"""A matrix cut by rows over Dask workers, for solvers that run there: each has its rows of the matrix and of vectors.

The driver starts one function on all workers at once (SPMD) and passes each worker its part; parts exchange messages
without the driver. Workers are processes on CPUs, or have a GPU each.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable
from multiprocessing.connection import Listener
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
import scipy.sparse as sp
from distributed import Client, as_completed, get_worker

from spdist.errors import InputError, MatrixError
from spdist.foundation.cpus import count_cpus
from spdist.foundation.units import check_count
from spdist.inmemory import cupy_operands
from spdist.kernels.spmv import ehyb
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import DeviceArray
from spdist.operators import halo
from spdist.operators.halo import Integers, Rows, Share
from spdist.operators.halo_exchange import HaloExchange, HostHaloExchange, NcclHaloExchange
from spdist.operators.operator import Operator
from spdist.operators.prepare import operator, read_matrix
from spdist.scheduler.executors.clients import cluster, members
from spdist.storage.matrix import StoredMatrix, open_matrix

logger = logging.getLogger("spdist")

Partition = Literal["auto", "metis", "rows"]
CLOSE_SECONDS = 10
"""Seconds that workers have to close their connections: a worker that waits for a failed one never closes them."""


class PartitionMember:
    """The rows of a partitioned matrix on one worker, and the worker's connections to the others.

    It is the first argument of functions that run on all workers.

    `rows`: (n,) int: the rows of the matrix on this worker, in the order of its vectors.
    `x`: (n,) array: A vector that `matvec` does not copy: solvers may keep the vector that they multiply here.
    """

    def __init__(
        self, share: Share, messages: HaloExchange, prepare: Callable[[CSR], Operator], xp: ModuleType
    ) -> None:
        self.rank, self.rows, self.xp, self.messages = share.rank, share.rows, xp, messages
        self.inner, self.outer = (prepare(m) if m.nrows else None for m in (share.inner, share.outer))
        self.dtype, self.first_outer = share.inner.dtype, share.inner.nrows
        self.buffer = xp.zeros(share.outer.ncols, self.dtype)
        self.x = self.buffer[: len(share.rows)]

    def matvec(self, x: DeviceArray, out: DeviceArray | None = None) -> Any:
        """Return this part of A @ x, in `out` if given; a CUDA graph can capture it, except with method "hybrid".

        Rows that need no halo are multiplied while the halo is exchanged.

        `x`: (n,) array: this part of the vector.
        `out`: (n,) array, optional.
        """
        if x is not self.x:
            self.x[...] = x
        y = self.xp.empty(len(self.rows), self.dtype) if out is None else out
        self.messages.start(self.buffer)
        if self.inner is not None:
            self.inner.matvec(self.x, out=y[: self.first_outer])
        self.messages.finish()
        if self.outer is not None:
            self.outer.matvec(self.buffer, out=y[self.first_outer :])
        return y

    def total(self, values: DeviceArray) -> Any:
        """Set real values to their sums over all parts; return them."""
        return self.messages.total(values)


class PartitionedOperator:
    """A square matrix whose rows are on Dask workers; `partitioned` returns it. Close it, or use it in a ``with``.

    SciPy's solvers accept it, but each product then sends a vector to the workers and back; `conjugate_gradient` and
    `pagerank` keep their vectors on the workers.

    Attributes
    ----------
    shape : (nrows, nrows)
    dtype : dtype
    why : str
        How the matrix was cut, for people.

    Examples
    --------
    >>> with spdist.partitioned("A.zarr", workers=4) as a:  # doctest: +SKIP
    ...     y = a @ np.ones(a.shape[0])
    """

    def __init__(
        self, client: Client, rows: list[Any], part: Integers, addresses: list[str], why: str, options: Any
    ) -> None:
        self.client, self.why, self.addresses = client, why, addresses
        self.closing, self.closed = contextlib.ExitStack(), False
        found = members.fetch(client, [self._submit(i, _facts, mine) for i, mine in enumerate(rows)])
        self.shape, self.dtype = (len(part), len(part)), found[0][1]
        exchanges = halo.exchanges([needs for needs, _ in found], part)
        sent = [_send(client, address, mine) for address, mine in zip(addresses, exchanges, strict=True)]
        shares = [self._submit(i, halo.share, i, *pair) for i, pair in enumerate(zip(rows, sent, strict=True))]
        self.rows = members.fetch(client, [self._submit(i, _rows_of, mine) for i, mine in enumerate(shares)])
        self.parts = self._joined(shares, options)

    def _joined(self, shares: list[Any], options: dict[str, Any]) -> list[Any]:
        """Return the futures of the parts, once all are connected to each other."""
        key, size = secrets.token_bytes(16), len(shares)
        if options["on_gpu"]:
            name = self._submit(0, _nccl_name).result()
            hosts = [urlsplit(address).hostname for address in self.addresses]
            parts = [
                self._submit(i, _join_gpus, mine, size, name, hosts.count(hosts[i]), options)
                for i, mine in enumerate(shares)
            ]
        else:
            listeners = [self._submit(i, _listen, key, size) for i in range(size)]
            places = [self._submit(i, _address, listener) for i, listener in enumerate(listeners)]
            where = members.fetch(self.client, places)
            parts = [
                self._submit(i, _join_hosts, mine, listener, where, key, options)
                for i, (mine, listener) in enumerate(zip(shares, listeners, strict=True))
            ]
        for part in as_completed(parts, loop=self.client.loop):
            if part.status == "error":
                part.result()  # raises the worker's error; of a good part it would copy the rows here
        return parts

    def _submit(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.client.submit(function, *arguments, workers=[self.addresses[rank]], pure=False)

    def leave(self) -> None:
        """Close the connections of the parts; ignore lost workers, which have none."""
        try:
            ends = [self._submit(rank, _close, part) for rank, part in enumerate(self.parts)]
            for _ in as_completed(ends, loop=self.client.loop, timeout=CLOSE_SECONDS):
                pass
        except Exception as error:  # any error: the workers are released next
            logger.info("not all parts ended their connections: %s", error)

    def run(self, function: Callable[..., Any], *vectors: Any, **options: Any) -> list[Any]:
        """Call ``function(part, *vectors, **options)`` on all workers at once, each with its rows of the vectors.

        Parameters
        ----------
        function : callable
            Importable by the workers; its `PartitionMember` multiplies and sums over all parts.
        vectors : (nrows,) arrays
            In host memory.

        Returns
        -------
        list
            Results of the function, by rank.

        Raises
        ------
        MatrixError
            If a vector does not fit.
        InputError
            If the operator is closed.
        """
        if self.closed:
            raise InputError(
                "the operator is closed: use it inside its `with` block, or make another with spdist.partitioned"
            )
        for vector in vectors:
            if np.shape(vector) != self.shape[:1]:
                raise MatrixError(f"A is {self.shape[0]:,} x {self.shape[1]:,}, a vector has shape {np.shape(vector)}")
        sent = [
            _send(self.client, address, [np.asarray(vector)[rows] for vector in vectors])
            for address, rows in zip(self.addresses, self.rows, strict=True)
        ]
        tasks = [
            self._submit(rank, _call, function, part, mine, options)
            for rank, (part, mine) in enumerate(zip(self.parts, sent, strict=True))
        ]
        return list(members.fetch(self.client, tasks))

    def whole(self, pieces: list[Any]) -> Any:
        """Return a whole vector in host memory.

        Parameters
        ----------
        pieces : list of array
            Rows of the vector by rank, as `run` returns them.
        """
        out = np.empty(self.shape[0], pieces[0].dtype)
        for rows, piece in zip(self.rows, pieces, strict=True):
            out[rows] = piece
        return out

    def matvec(self, x: DeviceArray) -> Any:
        """Return ``A @ x`` for an (nrows,) vector of the host, in the operator's dtype."""
        if sp.issparse(x):
            raise MatrixError(f"x is a {type(x).__name__}, and a partitioned operator multiplies vectors: give one")
        if not np.can_cast(np.asarray(x).dtype, self.dtype, "same_kind"):
            raise MatrixError(f"x of dtype {np.asarray(x).dtype} cannot be multiplied in {self.dtype}")
        return self.whole(self.run(_product, np.asarray(x, self.dtype)))

    def __matmul__(self, x: Any) -> Any:
        return self.matvec(x)

    def close(self) -> None:
        """Release the memory of the workers, and end workers that were started for this operator."""
        self.closed = True
        self.closing.close()

    def __enter__(self) -> PartitionedOperator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def partitioned(
    a: Any, workers: int | None = None, *, scheduler: Any = None, security: Any = None,
    partition: Partition | Any = "auto", on_gpu: bool = False, method: str = "auto", uses: int = 1000,
) -> PartitionedOperator:  # fmt: skip
    """Cut a square sparse matrix by rows, and prepare each part on a Dask worker for many products with vectors.

    Parameters
    ----------
    a : sparse matrix or array, StoredMatrix, str or Path
        SciPy's; or a stored matrix: each worker reads its own rows, so that no process holds the whole matrix.
    workers : int, optional
        Processes to start on this machine; by default one a core or a GPU.
    scheduler : str, distributed.Client or cluster, optional
        A running scheduler instead, as for `multiply`; each of its workers gets a part.
    security : distributed.Security, optional
        Keys for that scheduler, as for `multiply`.
    partition : {"auto", "metis", "rows"} or (nrows,) int
        "metis" cuts few connections between parts; "rows" puts neighbouring rows together, which suits grids in
        natural order; "auto" is METIS if the matrix is in memory and pymetis is installed. Or the part of each row.
    on_gpu : bool
        Whether each worker multiplies on a GPU of its own; parts then exchange messages by NCCL.
    method, uses
        As for `operator`, for each part's rows; with "hybrid", parts on one host share its cores equally.

    Returns
    -------
    PartitionedOperator

    Raises
    ------
    MatrixError
        If the matrix is not square.
    InputError
        If there are no workers, `on_gpu` is set and a worker has no GPU, or "metis" is given without pymetis.

    Examples
    --------
    >>> with spdist.partitioned("A.zarr", workers=4) as a:  # doctest: +SKIP
    ...     x = spdist.conjugate_gradient(a, np.ones(a.shape[0])).x
    """
    check_count("workers", workers, "one per core or GPU")
    if cupy_operands.is_cupyx(a):
        raise MatrixError("a matrix to be partitioned is SciPy's or stored, this is CuPy's")
    stored = open_matrix(a) if isinstance(a, str | Path) else a if isinstance(a, StoredMatrix) else None
    m = read_matrix(a)[0] if stored is None else stored
    if m.shape[0] != m.shape[1] or not m.shape[0]:
        raise MatrixError(f"a partitioned matrix is square and not empty, this is {m.shape[0]:,} x {m.shape[1]:,}")
    with contextlib.ExitStack() as stack:
        engine = "cuda" if on_gpu else "auto"
        client = stack.enter_context(
            cluster.connect(
                workers=workers, scheduler=scheduler, security=security, processes=True, blocks=m.shape[0],
                engine=engine,
            )
        )  # fmt: skip
        addresses = sorted(client.scheduler_info(n_workers=-1)["workers"])
        part, why = _parts_of(m, partition, len(addresses))
        numbers = [np.flatnonzero(part == rank) for rank in range(len(addresses))]
        rows = [_place_rows(client, m, mine, address) for mine, address in zip(numbers, addresses, strict=True)]
        options = {"on_gpu": on_gpu, "method": method, "uses": uses}
        made = PartitionedOperator(client, rows, part, addresses, why, options)
        stack.callback(made.leave)
        made.closing = stack.pop_all()
    return made


def _parts_of(m: CSR | StoredMatrix, partition: Any, parts: int) -> tuple[Any, str]:
    """Return the part of each row, and how that was chosen."""
    if not isinstance(partition, str):
        part = np.asarray(partition, np.int64)
        if part.shape != m.shape[:1] or part.min(initial=0) < 0 or part.max(initial=0) >= parts:
            raise InputError(f"partition must hold a part from 0 to {parts - 1} for each of the {m.shape[0]:,} rows")
        return part, "by the parts given"
    if partition not in ("auto", "metis", "rows"):
        raise InputError(f"partition={partition!r} is unknown: choose auto, metis, rows, or give the part of each row")
    if isinstance(m, StoredMatrix):
        if partition == "metis":
            raise InputError("METIS cuts matrices in memory only: give SciPy's matrix, or choose partition='rows'")
        return halo.even_rows(m.read_indptr(0, m.nrows), parts), "neighbouring rows together"
    if parts == 1 or partition == "rows" or (partition == "auto" and not ehyb.has_metis()):
        return halo.even_rows(m.indptr, parts), "neighbouring rows together"
    return ehyb.partition(m, parts).astype(np.int64), "by METIS"


def _place_rows(client: Client, m: CSR | StoredMatrix, numbers: Integers, address: str) -> Any:
    """Return the future of one worker's rows: sent to it, or read there from the stored matrix."""
    if isinstance(m, StoredMatrix):
        return client.submit(_read, m.url, _send(client, address, numbers), workers=[address], pure=False)
    return _send(client, address, Rows(numbers, read_matrix(m.to_scipy()[numbers])[0]))


def _send(client: Client, address: str, value: Any) -> Any:
    """Return the future of a value that is on a worker: within a task, large ones would pass through the scheduler."""
    return client.scatter([value], workers=[address], hash=False)[0]


# -- on the workers ----------------------------------------------------------------------------------------------------


def _read(url: str, numbers: Any) -> Rows:
    """Read rows of a stored matrix."""
    stored = open_matrix(url)
    contiguous = len(numbers) > 0 and numbers[-1] - numbers[0] == len(numbers) - 1
    m = stored.rows(int(numbers[0]), int(numbers[-1]) + 1) if contiguous else stored.take(numbers)
    return Rows(numbers, read_matrix(m.to_scipy())[0])


def _facts(rows: Rows) -> tuple[Any, Any]:
    """Return what the rows need of others, and the dtype they are multiplied in."""
    return halo.needed(rows), rows.matrix.dtype


def _rows_of(share: Share) -> Any:
    return share.rows


def _listen(key: bytes, size: int) -> Listener:
    """Listen on the address of Dask's worker."""
    url = urlsplit(get_worker().address)
    host = url.hostname if url.scheme in ("tcp", "tls") else None
    return Listener((host or "127.0.0.1", 0), backlog=size, authkey=key)


def _address(listener: Listener) -> Any:
    return listener.address


def _join_hosts(
    share: Share, listener: Listener, where: list[Any], key: bytes, options: dict[str, Any]
) -> PartitionMember:
    """Reach the other parts, then prepare this one."""
    messages = HostHaloExchange(share, listener, where, key)
    threads = get_worker().state.nthreads

    def prepare(m: CSR) -> Operator:
        return operator(m.to_scipy(), options["method"], uses=options["uses"], threads=threads)

    return PartitionMember(share, messages, prepare, np)


def _nccl_name() -> Any:
    from cupy.cuda import nccl

    return nccl.get_unique_id()


def _join_gpus(share: Share, size: int, name: Any, on_this_host: int, options: dict[str, Any]) -> PartitionMember:
    """Reach the other parts, then prepare this one; parts on one host share its cores if cores multiply too."""
    import cupy

    threads = max(1, count_cpus() // on_this_host)
    messages = NcclHaloExchange(share, size, name, share.inner.dtype)

    def prepare(m: CSR) -> Operator:
        moved = CSR(cupy.asarray(m.indptr), cupy.asarray(m.indices), cupy.asarray(m.data), m.shape)
        return operator(cupy_operands.to_cupyx_any(moved), options["method"], uses=options["uses"], threads=threads)

    return PartitionMember(share, messages, prepare, cupy)


def _call(function: Callable[..., Any], part: PartitionMember, vectors: list[Any], options: dict[str, Any]) -> Any:
    try:
        return function(part, *map(part.xp.asarray, vectors), **options)
    except BaseException:
        part.messages.abort()  # the others wait for this part
        raise


def _product(part: PartitionMember, x: DeviceArray) -> Any:
    return on_host(part.matvec(x))


def on_host(array: DeviceArray) -> Any:
    """Return an array of the host's."""
    return array.get() if hasattr(array, "get") else array


def _close(part: PartitionMember) -> None:
    part.messages.close()
