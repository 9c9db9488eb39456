"""How much memory this process may take: of the machine, within the limits of its control groups and its SLURM job.

Workers get this file as text (`handshake.ask_workers`), so it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

SYSTEM = Path("/")


def memory_limits(system: Path = SYSTEM) -> dict[str, int]:
    """Return what limits the memory of this process, and to how many bytes.

    `system`: the root directory.
    """
    limits = {"machine": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    of_groups = [limit for limit, _ in _limits_of_groups(system)]
    if of_groups and min(of_groups) < limits["machine"]:
        limits["control group"] = min(of_groups)
    with contextlib.suppress(KeyError, ValueError):
        if (of_job := _slurm_bytes()) > 0:
            limits["SLURM"] = of_job
    return limits


def host_memory() -> int:
    """Return the bytes of memory that this process may take."""
    return min(memory_limits().values())


def available_memory(system: Path = SYSTEM) -> int:
    """Return the bytes that this process may take besides what is taken, without making the system swap or end it.

    `system`: the root directory.
    """
    free = [limit - used for limit, used in _limits_of_groups(system)]
    try:
        lines = (system / "proc/meminfo").read_text().splitlines()
        free.append(next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    except (OSError, StopIteration):  # no Linux
        import psutil

        free.append(psutil.virtual_memory().available)
    return max(0, min(free))


def resident_memory() -> int:
    """Return the resident bytes of this process; 0 without Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _slurm_bytes() -> int:
    """Return the bytes that SLURM gives the job on this node; 0 for all of it. Raises `KeyError` without a limit."""
    given = os.environ
    if "SLURM_MEM_PER_NODE" in given:
        return int(given["SLURM_MEM_PER_NODE"]) << 20
    return (int(given["SLURM_MEM_PER_CPU"]) * int(given["SLURM_CPUS_ON_NODE"])) << 20


def _limits_of_groups(system: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and used bytes of this process's control groups, and of those that contain them, if they have limits.

    Cached files that were not read lately do not count as used: the system drops them first.
    """
    for folder, is_second in control_groups(system, "memory"):
        names = ("memory.max", "memory.current") if is_second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        with contextlib.suppress(OSError, ValueError):  # no such group in this container, or no limit ("max")
            limit, used = (int((folder / name).read_text()) for name in names)
            cached = _value(folder / "memory.stat", "inactive_file" if is_second else "total_inactive_file")
            yield limit, max(0, used - cached)


def control_groups(system: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's control groups and of those that contain them; whether of version 2.

    `system`: the root directory. `controller`: the resource, which groups of version 1 are for.
    """
    with contextlib.suppress(OSError):  # no Linux
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):  # version 2 has one hierarchy
                mount = system / "sys/fs/cgroup" / controllers
                group = mount / path.lstrip("/")
                above = [group, *group.parents]
                for folder in above[: above.index(mount) + 1]:
                    yield folder, not controllers


def _value(path: Path, name: str) -> int:
    """Return a value of a file of names and values; 0 if it is not there."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
