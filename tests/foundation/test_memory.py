"""The memory that a process may take: control groups of both versions, SLURM, the machine."""

from __future__ import annotations

import os

import pytest

from spdist import cli
from spdist.foundation.memory import available_memory, host_memory, memory_limits, resident_memory
from tests.foundation.test_cpus import SECOND, system

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


FIRST = "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n"
ABOVE = {
    "pod/container/memory.max": "max", "pod/memory.max": f"{64 * MIB}", "pod/memory.current": f"{20 * MIB}",
    "pod/memory.stat": f"anon 1\ninactive_file {4 * MIB}\n",
}  # fmt: skip
OVER = {"pod/container/memory.max": f"{32 * MIB}", "pod/container/memory.current": f"{40 * MIB}"}
OLD = {
    "memory/docker/abc/memory.limit_in_bytes": f"{16 * MIB}", "memory/docker/abc/memory.usage_in_bytes": f"{6 * MIB}",
}  # fmt: skip


@pytest.mark.parametrize(
    ("cgroup", "files", "limit", "free"),
    [
        (SECOND, ABOVE, 64 * MIB, 48 * MIB),
        (SECOND, OVER, 32 * MIB, 0),
        (FIRST, OLD, 16 * MIB, 10 * MIB),
        (SECOND, {"pod/memory.max": "nonsense"}, None, None),
        (SECOND, {}, None, None),
    ],
)
def test_control_groups(tmp_path, cgroup, files, limit, free):
    files = {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
    root = system(tmp_path, cgroup, files | {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {512 * 1024} kB\n"})
    assert memory_limits(root).get("control group") == limit
    assert available_memory(root) == (512 * MIB if free is None else free)


@pytest.mark.parametrize(
    ("variables", "limit"),
    [
        ({"SLURM_MEM_PER_NODE": "100"}, 100 * MIB),
        ({"SLURM_MEM_PER_CPU": "10", "SLURM_CPUS_ON_NODE": "4"}, 40 * MIB),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_CPU": "10"}, None),
        ({"SLURM_MEM_PER_NODE": "much"}, None),
    ],
)
def test_slurm(monkeypatch, variables, limit):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert memory_limits().get("SLURM") == limit
    assert host_memory() == min(memory_limits().values()) <= MACHINE


def test_a_system_that_is_not_linux(tmp_path):
    assert memory_limits(tmp_path) == {"machine": MACHINE}
    assert 0 < available_memory(tmp_path) < MACHINE


def test_this_process():
    assert 0 < resident_memory() < host_memory()
    assert 0 < available_memory() <= MACHINE


def test_the_command_shows_what_limits_it(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "3072")
    assert cli.main(["info", "--machine"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "(1 by SLURM) and 3.00 GiB of" in said
    assert "of memory (3.00 GiB by SLURM)" in said
