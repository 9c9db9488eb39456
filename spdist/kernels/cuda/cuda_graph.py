"""Steps that are taken again and again: on a GPU many of them are captured as one CUDA graph, and launched at once.

Launched one by one, a step's kernels keep the host busy for longer than the GPU where vectors are short.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

log = logging.getLogger("spdist")


class Steps:
    """Takes steps, in a ``with``; on a GPU on a stream of its own, as the default one cannot be captured.

    The first batch on a GPU is launched step by step: kernels are compiled, memory is allocated and parts that talk to
    each other connect. The second is captured, and launched from then on. What a step allocates comes from a pool that
    nothing else takes memory from, so that it stays the graph's until the end. A step waits for nothing on the host;
    other streams it uses wait for its own by an event, and it for them.

    Parameters
    ----------
    xp : module
        NumPy or CuPy, whose vectors the steps are about.
    step : callable
        Takes a step. Afterwards its arrays are where they were.
    batch : int
        Steps of a graph.
    agree : callable
        Told whether the graph was captured, returns whether it is to be used: parts of one computation must all launch
        graphs, or none of them. Called at most once.
    graph : bool
        Whether to capture at all.

    Attributes
    ----------
    launched : str
        How steps were: "as a CUDA graph", or "one by one", and why.
    """

    def __init__(
        self, xp: Any, step: Callable[[], None], batch: int, agree: Callable[[bool], bool], graph: bool = True
    ) -> None:
        self.step, self.batch, self.agree = step, batch, agree
        self.launched = "one by one" if graph or xp is np else "one by one: as asked for"
        self._cuda = xp.cuda if graph and xp is not np else None
        self._stream: Any = None
        self._graph: Any = None
        self._batches = 0
        self._closing = contextlib.ExitStack()

    def take(self, count: int) -> None:
        """Take so many steps."""
        if count != self.batch or self._cuda is None:
            self._one_by_one(count)
            return
        self._batches += 1
        if self._batches == 2:
            self._graph = self._agreed()
        if self._graph is None:
            self._one_by_one(count)
        else:
            self._graph.launch()

    def _one_by_one(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def _agreed(self) -> Any:
        """Return the graph, or None where it is not captured everywhere."""
        graph, why = self._captured()
        if self.agree(not why):
            self.launched = "as a CUDA graph"
            return graph
        self.launched = f"one by one: {why or 'another part has no CUDA graph'}"
        log.info("iterations are launched %s", self.launched)
        return None

    def _captured(self) -> tuple[Any, str]:
        """Return a graph of a batch, or why there is none; no exception is kept, whose frames would hold the graph."""
        graph, why = None, ""
        try:
            self._stream.begin_capture()
            self._one_by_one(self.batch)
        except Exception as error:  # whatever it was, steps that are not captured can still be taken
            why = str(error) or repr(error)
        try:
            graph = self._stream.end_capture()
        except Exception as error:  # often because of the first one
            why = why or str(error)
        return (None, why) if why else (graph, why)

    def __enter__(self) -> Steps:
        if self._cuda is not None:
            self._stream, pool = self._cuda.Stream(non_blocking=True), self._cuda.MemoryPool()
            self._stream.wait_event(self._cuda.get_current_stream().record())
            self._closing.callback(pool.free_all_blocks)
            self._closing.callback(self._stream.synchronize)
            self._closing.enter_context(self._stream)
            self._closing.enter_context(self._cuda.using_allocator(pool.malloc))
        return self

    def __exit__(self, *exception: object) -> None:
        self._graph = None  # NCCL ends no communicator while a graph holds calls to it
        self._closing.close()
