"""What keys on connections cost: the same cluster with TLS, as spdist starts it, and with open TCP, in turns.

Prints medians: seconds from nothing to the first result, microseconds a task (bursts of tasks that do nothing),
milliseconds a block of a product with an empty kernel, and the processor time of all processes for each.
"""

from __future__ import annotations

import collections
import logging
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import record
import scheduling
from distributed import LocalCluster, as_completed

from spdist.scheduler.executors.clients import cluster, local_cluster

TASKS = 1000
WITH_KEYS = local_cluster.local_cluster


def open_cluster(count: int, threads: int, processes: bool) -> LocalCluster:
    """Start what `local_cluster` starts, without keys."""
    options = local_cluster._scheduler_options(processes) | {"protocol": ["tcp", "inproc"]}
    return LocalCluster(
        n_workers=count, threads_per_worker=threads, processes=processes, memory_limit=0, protocol="tcp",
        dashboard_address="127.0.0.1:0", silence_logs=logging.CRITICAL, preload=local_cluster.PRELOAD,
        scheduler_kwargs=options,
    )  # fmt: skip


KINDS: dict[str, Callable[[int, int, bool], LocalCluster]] = {"tls": WITH_KEYS, "tcp": open_cluster}


def processor_seconds() -> float:
    """Return the processor time of this process and of the children that have ended."""
    return sum(os.times()[:4])


def measure(kind: str, workers: int, blocks: int) -> dict[str, float]:
    """Start a cluster, send tasks, run a product of empty blocks; return what each cost."""
    local_cluster.local_cluster = KINDS[kind]
    begin, used = time.perf_counter(), processor_seconds()
    with cluster.connect(workers=workers, scheduler=None, processes=True, blocks=blocks) as client:
        client.submit(abs, -1).result()
        start = time.perf_counter() - begin
        tasks = client.map(abs, range(TASKS), pure=False)
        begin = time.perf_counter()
        collections.deque(as_completed(tasks, loop=client.loop), maxlen=0)
        per_task = (time.perf_counter() - begin) / TASKS
        del tasks
    start_used, used = processor_seconds() - used, processor_seconds()
    found = {"start_s": start, "task_us": per_task * 1e6, "start_and_tasks_cpu_s": start_used}
    if workers == 2:
        product = scheduling.measure(blocks, workers, slow=50, seconds=0.0)
        found |= {"block_ms": product["ms_per_block"], "product_cpu_s": processor_seconds() - used}
    return found


def main() -> None:
    """Measure in turns, print, record."""
    args = record.parser(__doc__ or "").parse_args()
    rounds, blocks = (1, 100) if args.quick else (5, 500)
    results: dict[str, Any] = {}
    for workers in (2,) if args.quick else (2, 8):
        runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for turn in range(rounds):
            for kind in sorted(KINDS, reverse=bool(turn % 2)):
                runs[kind].append(measure(kind, workers, blocks))
        for kind, found in runs.items():
            medians = {name: statistics.median(run[name] for run in found) for name in found[0]}
            results[f"{kind}, {workers} workers"] = medians
            print(f"{kind}, {workers} workers: " + ", ".join(f"{name} {value:.3f}" for name, value in medians.items()))
    record.write({"benchmark": "connections", "rounds": rounds, "blocks": blocks, "results": results}, args.out)


if __name__ == "__main__":
    main()
