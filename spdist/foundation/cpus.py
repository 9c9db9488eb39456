"""How many CPUs this process may use: those it is bound to, within the quota of its control groups."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

from spdist.foundation.memory import control_groups

SYSTEM = Path("/")


def count_cpus() -> int:
    """Return how many CPUs this process may keep busy, at least 1.

    It is the least of the CPUs that the process is bound to (``taskset``, cpusets), of the CPU quota of its control
    groups (containers, Kubernetes, systemd), rounded down, and of what SLURM gives the job on this node. `os.cpu_count`
    knows none of them.

    Examples
    --------
    >>> 1 <= count_cpus() <= os.cpu_count()
    True
    """
    return int(max(1, min(cpu_limits().values())))


def cpu_limits() -> dict[str, float]:
    """Return what limits the CPUs of this process, and to how many."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits: dict[str, float] = {"machine": max(os.cpu_count() or 1, bound)}
    if bound < limits["machine"]:
        limits["affinity"] = bound
    if (quota := cpu_quota(SYSTEM)) < limits["machine"]:
        limits["control group"] = quota
    if (given := os.environ.get("SLURM_CPUS_ON_NODE", "")).isdecimal() and int(given):
        limits["SLURM"] = int(given)
    return limits


def cpus_per_worker(workers: int | None) -> int:
    """Return the CPUs that each of some workers of this machine may keep busy, at least 1.

    `workers`: worker processes; None means one worker, in this process.

    Examples
    --------
    >>> cpus_per_worker(None) == cpus_per_worker(1) == count_cpus()
    True
    """
    return max(1, count_cpus() // (workers or 1))


@functools.cache
def cpu_quota(system: Path) -> float:
    """Return the smallest CPU quota of this process's control groups and their parents; infinity without quotas.

    `system`: the root directory.
    """
    groups = control_groups(system, "cpu")
    return min((_second_quota(one) if is_second else _first_quota(one) for one, is_second in groups), default=math.inf)


def _second_quota(folder: Path) -> float:
    """Return the quota by ``cpu.max`` of version 2: microseconds, or max, of a period."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # the outermost group has no such file
        return float("inf")


def _first_quota(folder: Path) -> float:
    """Return the quota by the files of version 1; -1 means none."""
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else float("inf")
    except (OSError, ValueError, ZeroDivisionError):
        return float("inf")
