"""Messages between the parts of a matrix: elements of x before a product, and sums over all parts.

`HostMessages` sends from and to host memory by sockets, `NcclMessages` from GPU to GPU. Both send while the caller goes
on: between `start` and `finish` a part multiplies the rows that need nothing of the others.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol

import numpy as np

from spdist.operators.halo import Share


class Messages(Protocol):
    """What a part says to the others; every part must make the same calls in the same order."""

    def start(self, x: Any) -> None:
        """Begin to send what the others need of `x`, and to receive what this part needs, in its place in `x`."""

    def finish(self) -> None:
        """Return once the halo of `x` is there."""

    def total(self, values: Any) -> Any:
        """Set real `values` to their sums over all parts, the same bits in each; return them."""

    def close(self) -> None:
        """Send no more, once all is done."""

    def abort(self) -> None:
        """Send no more, at once."""


class HostMessages:
    """Messages by sockets, a connection between any two parts.

    Parameters
    ----------
    share : Share
    listener : Listener
        This part's.
    addresses : list
        Where each part listens.
    key : bytes
        Known to the parts alone.
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

    def start(self, x: Any) -> None:
        """Begin to exchange; one thread sends to the parts after this one, another receives from those before it.

        So nobody waits in a circle: what is sent k parts ahead is received k parts behind.
        """
        self.pending = [self.pool.submit(self._send, x), self.pool.submit(self._receive, x)]

    def _send(self, x: Any) -> None:
        for rank in self.targets:
            self.links[rank].send_bytes(x[self.sends[rank]].view(np.uint8))

    def _receive(self, x: Any) -> None:
        for rank in self.sources:
            first, last = self.receives[rank]
            self.links[rank].recv_bytes_into(x[first:last].view(np.uint8))

    def finish(self) -> None:
        """Wait for what is on its way."""
        for future in self.pending:
            future.result()

    def total(self, values: Any) -> Any:
        """Add up in the order of the ranks, in part 0."""
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
        """Close the connections: parts that wait for a message get an error."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        for link in self.links.values():
            link.close()
        self.listener.close()


class NcclMessages:
    """Messages by NCCL, on a stream of their own.

    Nothing here waits on the host, and the streams wait for each other by events alone: a CUDA graph can capture both.

    Parameters
    ----------
    share : Share
    size : int
        Parts.
    name : tuple
        Of the communicator, as part 0 made it.
    dtype : dtype
        Of x.
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

    def start(self, x: Any) -> None:
        """Pack and exchange on the stream of messages, once what is on the current stream is done."""
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
        """Have the current stream wait for the exchange."""
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
        """Leave the communicator; NCCL does not tell the others, which wait until their workers are closed."""
        self.link.abort()
