"""Repeat a step many times: on a GPU a batch of steps is captured as one CUDA graph, which is launched at once.

If vectors are short, launching a step's kernels one by one takes the host longer than the GPU takes to run them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

log = logging.getLogger("spdist")


class Steps:
    """Take steps inside a ``with`` block; on a GPU on a separate stream, as the default stream cannot be captured.

    The first batch on a GPU is launched step by step, so that kernels are compiled, memory is allocated and the
    processes of one computation connect. The second batch is captured, and its graph is launched from then on. A step
    allocates from a pool that nothing else uses, so that the graph owns its memory until the end. A step must not wait
    on the host; if it uses other streams, they and its own stream wait for each other by events.
    `step`: takes one step; its arrays must keep their addresses. `batch`: steps in a graph.
    `agree`: takes whether the graph was captured here, returns whether to use it: the processes of one computation must
    all launch graphs, or none of them. Called at most once.
    `launched`: how steps were launched: "as a CUDA graph", or "one by one" with the reason.
    """

    def __init__(
        self, xp: ModuleType, step: Callable[[], None], batch: int, agree: Callable[[bool], bool], graph: bool = True
    ) -> None:
        self.step, self.batch, self.agree = step, batch, agree
        self.launched = "one by one" if graph or xp is np else "one by one: cuda_graph=False"
        self._cuda = xp.cuda if graph and xp is not np else None
        self._stream: Any = None
        self._graph: Any = None
        self._batches = 0
        self._closing = contextlib.ExitStack()

    def take(self, count: int) -> None:
        """Take `count` steps; a graph is only used if `count` is the batch."""
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
        """Capture a batch, and return its graph; None unless all processes have captured theirs."""
        graph, why = self._captured()
        if self.agree(not why):
            self.launched = "as a CUDA graph"
            return graph
        self.launched = f"one by one: {why or 'another part has no CUDA graph'}"
        log.info("iterations are launched %s", self.launched)
        return None

    def _captured(self) -> tuple[Any, str]:
        """Return the graph of a batch, or why it was not captured; a kept exception's frames would hold the graph."""
        graph, why = None, ""
        try:
            self._stream.begin_capture()
            self._one_by_one(self.batch)
        except Exception as error:  # steps that cannot be captured can still be taken one by one
            why = str(error) or repr(error)
        try:
            graph = self._stream.end_capture()
        except Exception as error:  # often a consequence of the first error
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
