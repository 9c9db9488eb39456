"""Halo exchange between the parts of a matrix: elements of x before a product, and sums over all parts.

`HostHaloExchange` sends between host memories by sockets, `NcclHaloExchange` from GPU to GPU. Both send in the
background: between `start` and `finish` a part multiplies the rows that need no halo.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol

import numpy as np

from spdist.matrices.dtypes import DeviceArray
from spdist.operators.halo import Share


class HaloExchange(Protocol):
    """Sends and receives of one part; every part must make the same calls in the same order."""

    def start(self, x: DeviceArray) -> None:
        """Begin to send the elements of `x` that other parts need, and to receive this part's halo into `x`."""

    def finish(self) -> None:
        """Wait until the halo of `x` is complete."""

    def total(self, values: Any) -> Any:
        """Set real `values` to their sums over all parts, the same bits in each; return them."""

    def close(self) -> None:
        """Close the connections after the last exchange."""

    def abort(self) -> None:
        """Close the connections at once."""


class HostHaloExchange:
    """HaloExchange by sockets, a connection between any two parts.

    `listener`: accepts connections to this part.
    `addresses`: address of each part's listener.
    `key`: secret that only the parts know.
    """

    def __init__(self, share: Share, listener: Listener, addresses: list[Any], key: bytes) -> None:
        self.rank, self.sends, self.receives, self.listener = share.rank, share.sends, share.receives, listener
        self.links: dict[int, Connection[Any, Any]] = {}
        for rank in range(share.rank):
            self.links[rank] = Client(addresses[rank], authkey=key)
            self.links[rank].send(share.rank)
        for _ in range(share.rank + 1, len(addresses)):
            link = listener.accept()
            self.links[link.recv()] = link
        self.pool = ThreadPoolExecutor(2)
        self.pending: list[Future[None]] = []
        steps = [(share.rank + step) % len(addresses) for step in range(1, len(addresses))]
        self.targets = [rank for rank in steps if rank in share.sends]
        self.sources = [rank for rank in reversed(steps) if rank in share.receives]

    def start(self, x: DeviceArray) -> None:
        """Start to exchange: one thread sends to the parts after this one, another receives from the parts before it.

        Parts cannot wait for each other in a cycle: all send to the part k ranks ahead while it receives from k behind.
        """
        self.pending = [self.pool.submit(self._send, x), self.pool.submit(self._receive, x)]

    def _send(self, x: Any) -> None:
        for rank in self.targets:
            self.links[rank].send_bytes(x[self.sends[rank]].view(np.uint8))

    def _receive(self, x: DeviceArray) -> None:
        for rank in self.sources:
            first, last = self.receives[rank]
            self.links[rank].recv_bytes_into(x[first:last].view(np.uint8))

    def finish(self) -> None:
        """Wait until all sends and receives are done."""
        for future in self.pending:
            future.result()

    def total(self, values: Any) -> Any:
        """Add up in part 0, in the order of the ranks."""
        memory = values.view(np.uint8)
        if self.rank:
            self.links[0].send_bytes(memory)
            self.links[0].recv_bytes_into(memory)
            return values
        for rank in sorted(self.links):
            values += np.frombuffer(self.links[rank].recv_bytes(), values.dtype)
        for link in self.links.values():
            link.send_bytes(memory)
        return values

    def close(self) -> None:
        """Close the connections."""
        self.abort()

    def abort(self) -> None:
        """Close the connections, so that parts that wait for a message raise an error."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        for link in self.links.values():
            link.close()
        self.listener.close()


class NcclHaloExchange:
    """HaloExchange by NCCL, on a separate stream.

    The host waits for nothing, and the streams wait for each other by events alone, so a CUDA graph can capture both.

    `size`: number of parts.
    `name`: identifier of the communicator, from part 0.
    `dtype`: dtype of x.
    """

    def __init__(self, share: Share, size: int, name: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        import cupy
        from cupy.cuda import nccl

        self.xp, self.nccl, self.receives = cupy, nccl, share.receives
        self.link = nccl.NcclCommunicator(size, name, share.rank)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.ready, self.done = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        places = [share.sends[rank] for rank in sorted(share.sends)]
        self.places = cupy.asarray(np.concatenate([np.empty(0, np.int64), *places]))
        ends = np.cumsum([0, *map(len, places)]).tolist()
        self.sent = {rank: (ends[i], ends[i + 1]) for i, rank in enumerate(sorted(share.sends))}
        self.packed = cupy.empty(len(self.places), dtype)

    def start(self, x: DeviceArray) -> None:
        """Pack and exchange on this object's stream, after the work on the current stream."""
        self.ready.record()
        self.stream.wait_event(self.ready)
        with self.stream:
            self.xp.take(x, self.places, out=self.packed)
            self.nccl.groupStart()
            for rank, (first, last) in self.sent.items():
                self._move(self.link.send, self.packed[first:last], rank)
            for rank, (first, last) in self.receives.items():
                self._move(self.link.recv, x[first:last], rank)
            self.nccl.groupEnd()
            self.done.record()

    def _move(self, how: Any, array: Any, rank: int) -> None:
        how(array.data.ptr, array.nbytes, self.nccl.NCCL_UINT8, rank, self.stream.ptr)

    def finish(self) -> None:
        """Let the current stream wait for the exchange."""
        self.xp.cuda.get_current_stream().wait_event(self.done)

    def total(self, values: Any) -> Any:
        """Add up on the GPUs, on the current stream."""
        kind = self.nccl.NCCL_FLOAT64 if values.dtype == np.float64 else self.nccl.NCCL_FLOAT32
        place, stream = values.data.ptr, self.xp.cuda.get_current_stream().ptr
        self.link.allReduce(place, place, values.size, kind, self.nccl.NCCL_SUM, stream)
        return values

    def close(self) -> None:
        """Leave the communicator."""
        self.xp.cuda.Device().synchronize()
        self.link.destroy()

    def abort(self) -> None:
        """Leave the communicator; NCCL does not notify other parts, which wait until their workers are closed."""
        self.link.abort()
