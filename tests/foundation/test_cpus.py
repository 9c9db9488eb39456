"""CPUs are counted by what the process is bound to and by quotas, in real processes and in made-up file systems."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from spdist.api import products as api
from spdist.foundation import cpus
from spdist.foundation.cpus import count_cpus, cpu_quota
from tests.conftest import random_matrix
from tests.support.worker_processes import ROOT

INFINITE = float("inf")


def system(folder, cgroup: str, files: dict[str, str]):
    """Write what ``/proc`` and ``/sys`` would say."""
    for name, content in {"proc/self/cgroup": cgroup, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


SECOND = "0::/pod/container\n"
FIRST = "3:cpuset:/x\n2:cpu,cpuacct:/docker/abc\n1:memory:/y\n0::/\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        (SECOND, {"pod/container/cpu.max": "250000 100000"}, 2.5),
        (SECOND, {"pod/container/cpu.max": "max 100000"}, INFINITE),
        (SECOND, {"pod/container/cpu.max": "400000 100000", "pod/cpu.max": "150000 100000"}, 1.5),
        (SECOND, {"cpu.max": "300000 100000"}, 3.0),
        (SECOND, {"pod/container/cpu.max": "nonsense"}, INFINITE),
        (SECOND, {"pod/container/cpu.max": "100000 0"}, INFINITE),
        (SECOND, {}, INFINITE),
        (FIRST, {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "50000",
                 "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000"}, 0.5),
        (FIRST, {"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 2.0),
        (FIRST, {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "-1",
                 "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000"}, INFINITE),
    ],
)  # fmt: skip
def test_quotas(tmp_path, cgroup, files, quota):
    files = {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
    assert cpu_quota(system(tmp_path, cgroup, files)) == quota


def test_a_system_without_control_groups(tmp_path):
    assert cpu_quota(tmp_path) == INFINITE


@pytest.mark.parametrize(("quota", "count"), [(0.5, 1), (2.9, 2), (INFINITE, 8), (100.0, 8)])
def test_the_lesser_counts(monkeypatch, quota, count):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    monkeypatch.setattr(cpus, "cpu_quota", lambda system: quota)
    assert count_cpus() == count
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    assert count_cpus() == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process")
def test_a_process_bound_to_one_cpu_starts_one_worker(tmp_path):
    """A grid of several blocks would start a worker for each CPU."""
    api.save(tmp_path / "A.zarr", random_matrix(300, 300, 5, 1))
    words = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import spdist
from spdist.options import InMemoryOptions
if __name__ == "__main__":
    print(spdist.multiply("A.zarr", "A.zarr", "C.zarr", grid=(4, 1, 1), engine="scipy").workers)
"""
    done = subprocess.run(
        [sys.executable, "-c", words], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout == "1\n", done.stderr
