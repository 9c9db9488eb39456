"""From blocks to Dask tasks: keys and dependencies only, no arithmetic.

Every task is named by its stage, so that the ordinary Dask dashboard already shows the pipeline::

    preprocess ─▶ multiply ─▶ (next piece: preprocess ─▶ multiply ─▶ merge) ─▶ commit ─▶ join
"""

from __future__ import annotations

from typing import Any

from distributed import Client, Future

from spdist.scheduler.execution.stages import Counted, Task, stage
from spdist.storage.writer import Layout

COMMIT_PRIORITY = 10
"""Commits go before the stages of later blocks: they free memory."""


class Graph:
    """Submits the tasks of one product.

    Parameters
    ----------
    client : distributed.Client
    product : str
        Name of the product on the workers.
    pieces : int
        Inner times column pieces of a block that is split.
    layout : Layout
        Of C.
    """

    def __init__(self, client: Client, product: str, pieces: int, layout: Layout) -> None:
        self.client, self.product, self.pieces, self.layout = client, product, pieces, layout

    def block(self, task: Task, worker: str) -> Future[Any]:
        """Submit what computes a block; the result says how many entries each of its rows has.

        The pieces of a split block follow one another, so that only one is in memory.
        """
        last: Future[Any] | None = None
        for piece in range(self.pieces if task.split else 1):
            last = self._submit("preprocess", task, piece, number=task.number, piece=piece, worker=worker, after=last)
            last = self._submit("multiply", task, last, piece, number=task.number, piece=piece, worker=worker)
            if piece:
                last = self._submit("merge", task, piece, number=task.number, piece=piece, worker=worker, after=last)
        assert last is not None
        return last

    def commit(
        self, task: Task, counted: Counted, at: int, done_chunks: int, worker: str, multiplied: Future[Any]
    ) -> Future[Any]:
        """Submit what writes a block whose place `at` in C is known."""
        arguments = (task, len(counted.row_nnz), counted.digest, self.layout, at, done_chunks)
        return self._submit("commit", *arguments, number=task.number, worker=worker, after=multiplied)

    def join(self, k: int, commits: list[Future[Any]]) -> Future[Any]:
        """Submit what writes Zarr chunk `k`, shared by several blocks."""
        return self._submit("join", self.layout, k, *commits, number=k)

    def _submit(
        self,
        name: str,
        *arguments: Any,
        number: int,
        piece: int = 0,
        worker: str | None = None,
        after: Future[Any] | None = None,
    ) -> Future[Any]:
        call = (stage, self.product, name) if after is None else (_after, after, self.product, name)
        return self.client.submit(
            *call,
            *arguments,
            key=(f"{name}-{self.product}", number, piece),
            workers=[worker] if worker else None,
            allow_other_workers=bool(worker),
            priority=COMMIT_PRIORITY if name in ("commit", "join") else 0,
            pure=False,
        )


def _after(_: Any, product: str, name: str, *arguments: Any) -> Any:
    """Run a stage once another task is done, whose result it does not need."""
    return stage(product, name, *arguments)
