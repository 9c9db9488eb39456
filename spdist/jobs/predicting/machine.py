"""What this machine was measured to do: a small file in the user's cache folder, one for each host and its CPUs.

`measure.measure_machine` fills it. Each finished command adds how long it waited for its start and end, so that the
file stays true; of these the newest few count, by their median. Plans do not depend on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from spdist.errors import InputError
from spdist.foundation.cpus import count_cpus
from spdist.foundation.display import Displayed, Part, Table
from spdist.foundation.units import counted, format_bytes
from spdist.jobs.report import Report
from spdist.jobs.starting.short import is_short
from spdist.scheduler.planner.plan import GPU_RATES, Plan, Rates
from spdist.storage.foreign.checked import cache_folder

VERSION = 1
"""Version of the rates; files of others are not read."""
NEWEST = 9
"""Observations of each wait that are kept."""
WAITS = {
    "start": 1.0,  # until workers in this process can run blocks
    "start of a short product": 0.6,  # nothing of Dask is loaded
    "start on GPUs": 3.5,
    "start of a short product on GPUs": 1.4,
    "one block": 0.4,  # to run it
    "one block on GPUs": 0.6,
    "close": 0.05,
    "compile": 20.0,  # if kernels are not in the cache
    "verify a million entries": 0.01,  # of A, B and C together
}
"""Seconds of waits on a typical machine."""
LEAST_COMPILED = 1.0
"""Seconds of compilation above which a product compiled all of its kernels."""

TYPICAL_CORE = Rates(read=0.9e9, decode=0.9e9, write=1.4e9, product=8.0e8, entry=9.0e7)
FEW = 4
"""CPUs up to which each multiplies nearly as fast as one alone; more of them wait for memory and for each other."""
TYPICAL_GPU = replace(GPU_RATES, read=2.0e10, write=2.0e10)
"""Of a GPU whose products no one has timed; `read` and `write` are the bus."""


@dataclass(frozen=True, repr=False)
class Machine(Displayed):
    """Rates and waits of one host.

    Examples
    --------
    >>> typical_machine().wait("close")
    0.05
    """

    host: str
    processor: str
    cpus: int  # that this process may use
    core: Rates  # of one core, in CPU seconds
    # how many times as fast as one core all CPUs together are, for "read", "multiply" and "write"
    gains: Mapping[str, float]
    strain: float = 1.0  # CPU seconds of products on all CPUs, which share caches and memory, over those on one
    # of a GPU: its products and entries of C, and as `read` and `write` the bus to it and from it
    gpu: Rates = TYPICAL_GPU
    # observed over predicted seconds of a product's run, for "cpu" and "gpu"
    paces: Mapping[str, float] = field(default_factory=lambda: {"cpu": 1.0, "gpu": 1.0})
    measured: str = ""  # day of the measurement; empty for a typical machine
    # whether other programs had the CPUs when it was measured: gains, paces and waits were left as they were
    is_busy: bool = False
    gpu_name: str = ""  # empty if no GPU was measured
    # the newest waits that were observed, by their names in `WAITS`
    seen: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def wait(self, name: str) -> float:
        """Return the seconds of a wait: the median of the newest measurements, or a typical machine's."""
        found = self.seen.get(name)
        return statistics.median(found) if found else WAITS[name]

    def with_waits(self, found: Mapping[str, float]) -> Machine:
        """Return the machine after more waits were observed."""
        seen = {name: (*self.seen.get(name, ()), seconds)[-NEWEST:] for name, seconds in found.items()}
        return replace(self, seen={**self.seen, **seen})

    def to_json(self) -> dict[str, Any]:
        """Return the machine as the file and ``spdist info --machine --json`` hold it."""
        return {"version": VERSION} | asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Machine:
        """Restore a machine from what `to_json` returned.

        Raises `ValueError, KeyError, TypeError` if it is of another version or damaged.
        """
        if raw["version"] != VERSION:
            raise ValueError(f"rates of version {raw['version']}")
        fields = {name: value for name, value in raw.items() if name != "version"}
        fields |= {"core": Rates(**raw["core"]), "gpu": Rates(**raw["gpu"])}
        fields["seen"] = {name: tuple(map(float, found)) for name, found in raw["seen"].items() if name in WAITS}
        return Machine(**fields)

    def description(self) -> list[Part]:
        """Return the machine in words."""
        core = self.core
        rates = [
            ("read", f"{format_bytes(int(core.read))}/s", self.gains["read"]),
            ("write", f"{format_bytes(int(core.write))}/s", self.gains["write"]),
            ("products", f"{core.product / 1e6:,.0f} M/s", self.gains["multiply"]),
            ("entries of C", f"{core.entry / 1e6:,.0f} M/s", self.gains["multiply"]),
        ]
        cells = tuple((name, rate, f"{gain:.1f}") for name, rate, gain in rates)
        waits = tuple((name, f"{self.wait(name):.2f}", f"{len(self.seen.get(name, ()))}") for name in WAITS)
        what = f"measured on {self.measured}" if self.measured else "typical rates: not measured yet"
        if self.is_busy:
            what += "; other programs kept the CPUs busy, so measure again when they are done"
        parts: list[Part] = [
            f"{self.host}: {self.processor}, {counted(self.cpus, 'CPU')}; {what}",
            Table(("of a core", "rate", "all CPUs, times"), cells, right=("rate", "all CPUs, times")),
            Table(("waits", "seconds", "observed"), waits, right=("seconds", "observed")),
        ]
        if self.gpu_name:
            bus = f"{self.gpu.read / 1e9:.1f} GB/s in, {self.gpu.write / 1e9:.1f} GB/s out"
            parts.append(f"{self.gpu_name}: {bus}, {self.gpu.product / 1e9:,.1f} G products/s")
        return parts


def typical_machine() -> Machine:
    """Return this host with typical rates: of cores that were measured once, somewhere."""
    cpus = count_cpus()
    multiply = 0.9 * min(cpus, FEW) + 0.3 * max(cpus - FEW, 0) if cpus > 1 else 1.0
    gains = {"read": min(cpus, 4.0), "multiply": multiply, "write": min(cpus, 4.0)}
    pace = 1.0 + min(max(cpus - FEW, 0), 12) / 24
    return Machine(
        platform.node(), _processor(), cpus, TYPICAL_CORE, gains, strain=max(1.0, 0.9 * cpus / multiply),
        paces={"cpu": pace, "gpu": 1.0},
    )  # fmt: skip


def this_machine() -> Machine:
    """Return what this host was measured to do; typical rates if it was not, or the file cannot be read."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):
        return Machine.from_json(json.loads(_file().read_text()))
    return typical_machine()


def remember(machine: Machine) -> None:
    """Keep what was measured; if nothing can be written, predictions stay a typical machine's."""
    with contextlib.suppress(OSError, RuntimeError):
        place = _file()
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        staged = place.with_name(f"{place.name}.{os.getpid()}")
        staged.write_text(json.dumps(machine.to_json(), indent=1) + "\n")
        staged.replace(place)  # another command may read it now


def record_waits(report: Report, plan: Plan) -> None:
    """Add what a finished command waited for to what is known of this machine.

    `report`: of a whole command, on the workers that it has by default.
    """
    found = waits_of(report, plan)
    if found:
        remember(this_machine().with_waits(found))


def waits_of(report: Report, plan: Plan) -> dict[str, float]:
    """Return what a finished command waited for, by the names of `WAITS`."""
    took, on_gpu = report.phases, " on GPUs" if plan.on_gpu else ""
    found = {start_of(plan): took.get("start", 0.0), "close": took.get("close", 0.0)}
    if len(plan.blocks) <= 1 and is_short_here(plan):
        found[f"one block{on_gpu}"] = took.get("run", 0.0)
    if took.get("compile", 0.0) > LEAST_COMPILED:
        found["compile"] = took["compile"]
    if took.get("verify"):
        found["verify a million entries"] = 1e6 * took["verify"] / max(plan.a.nnz + plan.b.nnz + report.nnz, 1)
    return found


def start_of(plan: Plan) -> str:
    """Return the name of a product's start in `WAITS`."""
    return "start" + " of a short product" * is_short_here(plan) + " on GPUs" * plan.on_gpu


def is_short_here(plan: Plan) -> bool:
    """Whether this process makes the product itself; not with GPUs that are elsewhere."""
    try:
        return is_short(plan)
    except InputError:
        return False


def _file() -> Path:
    """Return the file of this host: its name is a digest of host, processor and CPUs."""
    text = json.dumps([VERSION, platform.node(), _processor(), count_cpus()])
    return cache_folder().parent / "machines" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()
