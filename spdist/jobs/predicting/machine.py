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
from spdist.foundation.cpus import count_cpus, cpu_limits
from spdist.foundation.display import Displayed, Part, Table
from spdist.foundation.memory import available_memory, memory_limits
from spdist.foundation.units import counted, format_bytes
from spdist.jobs.starting.short import is_short
from spdist.scheduler.planner.plan import GPU_RATES, Plan, Rates
from spdist.storage.foreign.checked import cache_folder

VERSION = 2
"""Version of the rates; files of others are not read."""
NEWEST = 9
"""Observations of each wait and pace that are kept."""
WAITS = {
    "start": 1.0,  # until workers in this process can run blocks
    "start of a short product": 0.6,  # nothing of Dask is loaded
    "start on GPUs": 3.5,
    "start of a short product on GPUs": 1.4,
    "run": 0.12,  # of a run, before stages overlap and after
    "run on GPUs": 0.4,
    "close": 0.05,
    "compile": 20.0,  # if kernels are not in the cache
    "verify a million entries": 0.01,  # of A, B and C together
}
"""Seconds of waits on a typical machine."""
PACES = "pace", "pace on GPUs"
"""How many times as long as predicted from rates a run takes."""
TRUSTED_PACES = 3
"""Paces that are seen before they count alone; until then typical ones fill up, for one run is no rule."""
LEAST_PACED, MOST_UNPACED = 0.4, 0.05
"""Predicted seconds of a run from which it shows its pace, and up to which it shows the wait around its stages."""
PACE_BOUNDS = 0.3, 4.0
"""A run of another pace met something that predictions do not know."""
LEAST_COMPILED = 1.0
"""Seconds of compilation above which a product compiled all of its kernels."""

TYPICAL_CORE = Rates(read=0.9e9, decode=0.9e9, write=1.4e9, product=8.0e8, entry=9.0e7)
FEW = 4
"""CPUs up to which each multiplies nearly as fast as one alone; more of them wait for memory and for each other."""
TYPICAL_GPU = replace(GPU_RATES, read=2.0e10, write=2.0e10)
"""Of a GPU whose products no one has timed; `read` and `write` are the bus."""
TYPICAL_GPU_PACE = 1.3


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
    measured: str = ""  # day of the measurement; empty for a typical machine
    # whether other programs had the CPUs when it was measured: gains and what was seen were left as they were
    is_busy: bool = False
    gpu_name: str = ""  # empty if no GPU was measured
    # the newest observations, by their names in `WAITS` and `PACES`
    seen: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def wait(self, name: str) -> float:
        """Return the seconds of a wait: the median of the newest measurements, or a typical machine's."""
        found = self.seen.get(name)
        return statistics.median(found) if found else WAITS[name]

    def pace(self, on_gpu: bool) -> float:
        """Return how many times as long as its stages predict a run takes; a typical machine's if none was seen."""
        found = self.seen.get(PACES[on_gpu], ())
        typical = TYPICAL_GPU_PACE if on_gpu else 1.0 + min(max(self.cpus - FEW, 0), 12) / 15
        return statistics.median((*found, *(typical,) * (TRUSTED_PACES - len(found))))

    def with_seen(self, found: Mapping[str, float]) -> Machine:
        """Return the machine after more was observed, by names in `WAITS` and `PACES`."""
        seen = {name: (*self.seen.get(name, ()), value)[-NEWEST:] for name, value in found.items()}
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
        fields["seen"] = {name: tuple(map(float, found)) for name, found in raw["seen"].items()}
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
            f"this process may take {_given()}",
            Table(("of a core", "rate", "all CPUs, times"), cells, right=("rate", "all CPUs, times")),
            Table(("waits", "seconds", "observed"), waits, right=("seconds", "observed")),
        ]
        cores, gpus = (f"{self.pace(on_gpu):.2f}" for on_gpu in (False, True))
        parts.append(f"a run takes {cores} times what its stages predict on the cores, {gpus} times on GPUs")
        if self.gpu_name:
            bus = f"{self.gpu.read / 1e9:.1f} GB/s in, {self.gpu.write / 1e9:.1f} GB/s out"
            parts.append(f"{self.gpu_name}: {bus}, {self.gpu.product / 1e9:,.1f} G products/s")
        return parts


def _given() -> str:
    """Return the CPUs and the memory that this process may take, and what limits them, in words."""
    cpus, memory = cpu_limits(), memory_limits()
    limited = [f"{found:g} by {what}" for what, found in cpus.items() if what != "machine"]
    of_memory = [f"{format_bytes(found)} by {what}" for what, found in memory.items() if what != "machine"]
    sizes = (format_bytes(size) for size in (min(memory.values()), memory["machine"], available_memory()))
    taken, whole, free = sizes
    of_cpus = f"{count_cpus()} of {cpus['machine']:g} CPUs{_in_brackets(limited)}"
    return f"{of_cpus} and {taken} of {whole} of memory{_in_brackets(of_memory)}; {free} are free"


def _in_brackets(words: list[str]) -> str:
    return f" ({', '.join(words)})" if words else ""


def typical_machine() -> Machine:
    """Return this host with typical rates: of cores that were measured once, somewhere."""
    cpus = count_cpus()
    multiply = 0.9 * min(cpus, FEW) + 0.3 * max(cpus - FEW, 0) if cpus > 1 else 1.0
    gains = {"read": min(cpus, 4.0), "multiply": multiply, "write": min(cpus, 4.0)}
    strain = max(1.0, 0.9 * cpus / multiply)
    return Machine(platform.node(), _processor(), cpus, TYPICAL_CORE, gains, strain)


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
