"""TCP proxies between client, scheduler and workers that cut, truncate, delay or swallow what passes."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.torture.kills import Bench
from tests.torture.outcome import Outcome, VerdictError, ended, last_line
from tests.torture.products import PRODUCTS
from tests.torture.runs import Run, Trial

FAULTS = ("cut", "truncate", "delay", "swallow")
DELAY_SECONDS = 3.0
BOUND_SECONDS = 200.0
"""Seconds in which a product is done or has failed, whatever the network did."""
BYTES = 1 << 21
"""About what passes in one run."""


@dataclass
class Network:
    """What the proxies of one trial share: the fault that comes after so many bytes.

    Attributes
    ----------
    fault : str
        One of `FAULTS`: ``cut`` resets one connection, ``truncate`` ends it in the middle of a message, ``swallow``
        forwards nothing more on it.
    after : int
        Bytes that pass before.
    passed : int
        Bytes that have passed.
    """

    fault: str
    after: int
    passed: int = 0
    servers: list[asyncio.Server] = field(default_factory=list)

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction of a connection."""
        with suppress(OSError, asyncio.CancelledError):  # cancelled at the end of the trial
            while content := await reader.read(1 << 16):
                before, self.passed = self.passed, self.passed + len(content)
                if before <= self.after < self.passed:
                    if self.fault == "cut":
                        writer.transport.abort()
                        return
                    if self.fault == "truncate":
                        writer.write(content[: len(content) // 2])
                        break
                    if self.fault == "swallow":
                        await asyncio.sleep(BOUND_SECONDS)
                        return
                    await asyncio.sleep(DELAY_SECONDS)
                writer.write(content)
                await writer.drain()
        writer.close()

    async def serve(self, to: int) -> int:
        """Listen, and forward to a port of this host; return the port."""

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                there = await asyncio.open_connection("127.0.0.1", to)
            except OSError:
                writer.close()
                return
            await asyncio.gather(self.pump(reader, there[1]), self.pump(there[0], writer))

        server = await asyncio.start_server(connect, "127.0.0.1", 0)
        self.servers.append(server)
        return int(server.sockets[0].getsockname()[1])


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # connections that end with the trial
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        for task in asyncio.all_tasks(loop):
            loop.call_soon_threadsafe(task.cancel)
        time.sleep(0.05)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start_cluster(
    bench: Bench, trial: Trial, network: Network, loop: asyncio.AbstractEventLoop
) -> tuple[list[Run], str]:
    """Start a scheduler and two workers that reach each other through proxies; return them and the client's address."""
    start, file = bench.launcher.start, trial.folder / "scheduler.json"
    words: list[str | Path] = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", file]
    runs = [start(trial.folder, "scheduler", words, role="scheduler")]
    end = time.monotonic() + 30
    while not file.exists() or not file.read_text().strip():
        assert time.monotonic() < end, runs[0].err
        time.sleep(0.02)
    time.sleep(0.05)
    port = int(json.loads(file.read_text())["address"].rpartition(":")[2])
    address = f"tcp://127.0.0.1:{asyncio.run_coroutine_threadsafe(network.serve(port), loop).result(5)}"
    for i in range(2):
        port = free_port()
        contact = asyncio.run_coroutine_threadsafe(network.serve(port), loop).result(5)
        words = [address, "--nthreads", "1", "--no-dashboard", "--listen-address", f"tcp://127.0.0.1:{port}",
                 "--contact-address", f"tcp://127.0.0.1:{contact}", "--local-directory", trial.folder]  # fmt: skip
        runs.append(start(trial.folder, f"worker{i}", words, role="nanny"))
    return runs, address


def random_network_fault(bench: Bench, rng: random.Random) -> Outcome:
    """Run a product over a network that fails once."""
    product = rng.choice([p for p in PRODUCTS if p.name in ("plain", "masked", "inner")])
    network = Network(rng.choice(FAULTS), int(BYTES ** rng.uniform(0.4, 1.0)))
    trial = bench.trial()
    what = f"{product.name}: {network.fault} after {network.after} bytes"
    runs: list[Run] = []

    def act() -> str | None:
        with running_loop() as loop:
            cluster, address = start_cluster(bench, trial, network, loop)
            runs.extend(cluster)
            run = bench.multiply(trial, product, "run", None, "--scheduler", address)
            done = ended(run, seconds=BOUND_SECONDS)
            if done:
                bench.check_end(trial, product, run, workers=False)
                return None
        for other in runs:
            other.kill()
        if stayed := bench.launcher.left(run, *runs):
            raise VerdictError("left", f"processes: {'; '.join(stayed)}; {last_line(run)}")
        bench.check_between(trial, product)
        bench.bring_to_end(trial, product)
        return "refused"

    outcome = bench.judge(f"network {network.fault}", what, trial, act)
    for other in runs:
        other.kill()
    bench.launcher.left(*runs)
    return outcome
