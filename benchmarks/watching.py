"""What it costs a scheduler that people watch a product: its CPU time and memory with and without three open pages.

A scheduler and two workers run as processes of their own. A page asks for its data once a second, as three threads do
here; what an answer takes and how long it is are measured too. Runs with and without pages alternate.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import record
import scipy.sparse as sp

import spdist

PAGES = 3
POLL_SECONDS = 1.0


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[tuple[psutil.Process, dict[str, Any]]]:
    """Start a scheduler and its workers; yield the scheduler's process and what its file says."""
    place = folder / "scheduler.json"
    words = ["scheduler", "--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"]
    with ExitStack() as stack:

        def start(*words: str) -> subprocess.Popen[bytes]:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            process = subprocess.Popen([sys.executable, "-m", "dask", *words, "--scheduler-file", str(place)], **quiet)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        scheduler = start(*words)
        while not place.exists():
            time.sleep(0.1)
        for _ in range(workers):
            start("worker", "--nthreads", "1", "--no-dashboard", "--memory-limit", "0")
        yield psutil.Process(scheduler.pid), json.loads(place.read_text())


class Pages:
    """So many pages that ask for their data, each once a second."""

    def __init__(self, address: str, count: int) -> None:
        self.address, self.seconds, self.sizes = address, [], []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._poll) for _ in range(count)]

    def _poll(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            begin = time.perf_counter()
            with urllib.request.urlopen(self.address) as answer:
                self.sizes.append(len(answer.read()))
            self.seconds.append(time.perf_counter() - begin)

    def __enter__(self) -> Pages:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


def run(scheduler: psutil.Process, facts: dict[str, Any], folder: Path, blocks: int, pages: int) -> dict[str, Any]:
    """Multiply with so many pages open; return the scheduler's seconds of CPU, and how its memory grew."""
    address = f"http://127.0.0.1:{facts['services']['dashboard']}/spdist/data.json"
    with Pages(address, pages) as watching:
        before, memory, begin = sum(scheduler.cpu_times()[:2]), scheduler.memory_info().rss, time.perf_counter()
        spdist.multiply(
            folder / "A.zarr", folder / "A.zarr", folder / "C.zarr", scheduler=facts["address"], grid=(blocks, 1, 1),
            overwrite=True,
        )  # fmt: skip
        wall = time.perf_counter() - begin
    return {
        "pages": pages, "wall_s": wall, "cpu_s": sum(scheduler.cpu_times()[:2]) - before,
        "grown_bytes": scheduler.memory_info().rss - memory, "answers": len(watching.sizes),
        "answer_bytes": max(watching.sizes, default=0), "answer_s": median(watching.seconds or [0.0]),
    }  # fmt: skip


def main() -> None:
    """Run, print, record."""
    args = record.parser(__doc__ or "").parse_args()
    blocks, turns = (60, 1) if args.quick else (10_000, 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spdist.save(folder / "A.zarr", sp.random_array((2 * blocks, 2 * blocks), density=2 / blocks, format="csr"))
        with cluster(folder, 2) as (scheduler, facts):
            run(scheduler, facts, folder, min(blocks, 200), 0)  # loads what is loaded once
            runs = [run(scheduler, facts, folder, blocks, pages) for _ in range(turns) for pages in (0, PAGES)]
    for one in runs:
        print(f"{one['pages']} pages: {one['wall_s']:6.1f} s, scheduler {one['cpu_s']:6.2f} s of CPU, memory grew by "
              f"{one['grown_bytes'] / 2**20:5.1f} MiB; {one['answers']} answers of {one['answer_bytes']:,} bytes, "
              f"{1e3 * one['answer_s']:.1f} ms")  # fmt: skip
    share = [median(one["cpu_s"] / one["wall_s"] for one in runs if one["pages"] == pages) for pages in (0, PAGES)]
    print(f"share of a core: {share[0]:.1%} without pages, {share[1]:.1%} with {PAGES}")
    record.write({"benchmark": "watching", "blocks": blocks, "runs": runs, "share": share}, args.out)


if __name__ == "__main__":
    main()
