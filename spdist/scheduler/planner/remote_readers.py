"""Functions applied to many parts of a matrix: by the threads of this process, or by other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from spdist.errors import SpdistError

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class RemoteReaders:
    """Other processes that see the matrices, and read parts of them for a plan.

    Reads need the interpreter, so that threads of one process wait for each other; processes do not.
    """

    executor: Executor  # runs functions in these processes; for Dask ``client.get_executor(pure=False)``
    # number of processes. Each gets one task, so that it reads data that several of its parts need only once.
    processes: int
    threads: int  # most threads of each process

    def map(self, function: Callable[[Sequence[Item], int], list[Result]], items: Sequence[Item]) -> list[Result]:
        """Return the results for all items, in their order.

        `function`: takes some of the items and a number of threads, and returns one result for each. Each of n
        processes gets every n-th item.
        """
        count = min(self.processes, len(items))
        results: list[Result | None] = [None] * len(items)
        tasks = [self.executor.submit(function, items[i::count], self.threads) for i in range(count)]
        try:
            for i, task in enumerate(tasks):
                results[i::count] = task.result()
        finally:
            for task in tasks:
                task.cancel()
        return results  # type: ignore[return-value]  # each place was set


def results_or_errors(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int
) -> list[Result | SpdistError | None]:
    """Apply a function to items, several at once.

    `function`: takes an item, returns its result or raises `SpdistError`.
    `threads`: most items at once.
    Returns for each item the result, or the error that was raised; None for items that were skipped because an item
    before them had an error.

    Examples
    --------
    >>> results_or_errors(abs, [-1, 2], threads=2)
    [1, 2]
    """
    failed: list[int] = []

    def attempt(i: int, item: Item) -> Result | SpdistError | None:
        if any(before < i for before in failed):
            return None
        try:
            return function(item)
        except SpdistError as error:
            failed.append(i)
            return error

    with ThreadPoolExecutor(max(1, min(len(items), threads))) as pool:
        return list(pool.map(attempt, range(len(items)), items))


def raise_first_error(results: Iterable[Result | SpdistError | None]) -> Iterator[Result]:
    """Yield the results of `results_or_errors`; at an error, raise it.

    Examples
    --------
    >>> list(raise_first_error([1, 2]))
    [1, 2]
    """
    for result in results:
        if isinstance(result, SpdistError):
            raise result
        yield result  # type: ignore[misc]  # None only follows an error
