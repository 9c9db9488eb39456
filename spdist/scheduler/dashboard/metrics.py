"""Metrics for Prometheus, on the endpoint ``/metrics`` that Dask serves; their number does not grow with a run."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from spdist.scheduler.dashboard.run_state import RunState
from spdist.scheduler.dashboard.runs import Runs


class RunMetrics(Collector):
    """Metrics of the newest run of a scheduler.

    `runs`: none until a scheduler of this process collects runs.
    """

    def __init__(self) -> None:
        self.runs: Runs | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; none before the first run."""
        if self.runs is None or (run := self.runs.newest) is None:
            return
        yield from _stages(run)
        yield from _blocks(run)
        yield from _memory(self.runs.memory())
        left = run.seconds_left(time.time())
        yield GaugeMetricFamily("spdist_eta_seconds", "Seconds left, NaN if unknown", left[0] if left else float("nan"))
        info = {"product": run.name, "target": run.start["target"], "engine": run.start["engine"]}
        yield InfoMetricFamily("spdist_run", "The newest run", info | {"state": run.state})


def _memory(workers: dict[str, dict[str, int]]) -> Iterator[Metric]:
    for kind, name in (("host", "spdist_host_memory_bytes"), ("gpu", "spdist_device_memory_bytes")):
        gauge = GaugeMetricFamily(name, "Bytes of all workers: in use, and the limit", labels=["kind"])
        gauge.add_metric(["used"], sum(one.get(kind, 0) for one in workers.values()))
        gauge.add_metric(["limit"], sum(one.get(f"{kind}_limit", 0) for one in workers.values()))
        yield gauge


def _stages(run: RunState) -> Iterator[Metric]:
    seconds = CounterMetricFamily("spdist_stage_seconds", "Worker seconds of a stage", labels=["stage"])
    nbytes = CounterMetricFamily("spdist_stage_bytes", "Bytes that a stage moved", labels=["stage"])
    limit = GaugeMetricFamily(
        "spdist_machine_limit_ratio", "Rate of a stage beside the machine's, NaN if unknown", labels=["stage"]
    )
    for stage, sums in run.stages.items():
        seconds.add_metric([stage], sums.seconds)
        nbytes.add_metric([stage], sums.nbytes)
        known = sums.limit > 0 and sums.seconds > 0
        limit.add_metric([stage], sums.nbytes / sums.seconds / sums.limit if known else float("nan"))
    yield from (seconds, nbytes, limit)


def _blocks(run: RunState) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("spdist_blocks", "Blocks of the newest run", labels=["state"])
    if (now := run.progress) is not None:
        done, flying = now["blocks"], now["in_flight"]
        for state, count in (("done", done), ("in_flight", flying), ("waiting", now["blocks_total"] - done - flying)):
            blocks.add_metric([state], max(count, 0))
    yield blocks
    yield CounterMetricFamily("spdist_products", "Products that were made", now["products"] if now else 0)
    durable = now["durable_row"] / max(run.start["rows"], 1) if now else 0.0
    yield GaugeMetricFamily("spdist_durable_ratio", "Share of C's rows that is durable", durable)
    grown = now["blocks_total"] - run.start["grid"]["row_blocks"] if now else 0
    yield CounterMetricFamily("spdist_block_splits", "Blocks that were cut again", max(grown, 0))


METRICS = RunMetrics()


def serve_metrics(runs: Runs) -> None:
    """Let this process's metrics describe the runs of a scheduler."""
    if METRICS.runs is None:
        REGISTRY.register(METRICS)
    METRICS.runs = runs
