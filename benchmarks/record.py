"""What every benchmark shares: the facts of the machine, and a dated JSON record of the run."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

FIELDS = ("date", "commit", "dirty", "command", "host", "device", "driver", "versions", "load_before", "shared_machine")
"""Of every record."""
PACKAGES = "spdist", "numpy", "scipy", "numba", "zarr", "zarrs", "dask", "distributed"
PEERS = (
    "python-graphblas",
    "suitesparse-graphblas",
    "sparse-dot-topn",
    "sp_matmul_rs",
    "pandas",
    "scikit-learn",
    "faiss-cpu",
    "kaminpar",
    "obstore",
)
"""Recorded where they are installed."""
PACKAGE = "spdist"
LOAD = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
"""Of the minute before the benchmark started: what else ran on the machine."""


def cpu_model() -> str:
    """Return the processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def sources() -> tuple[str, bool | None]:
    """Return the last commit that changed the package, and whether it was changed since; ``SPDIST_COMMIT`` goes first.

    Returns
    -------
    (str, bool or None)
        "unknown" and None outside a checkout. A ``-dirty`` at the end of ``SPDIST_COMMIT`` is the flag.
    """
    told = os.environ.get("SPDIST_COMMIT")
    found = told or _git("log", "-1", "--format=%h", "--abbrev=12", "--", PACKAGE)
    if not found:
        return "unknown", None
    if not told and _git("status", "--porcelain", "--", PACKAGE):
        found += "-dirty"
    return found.removesuffix("-dirty"), found.endswith("-dirty")


def _git(*words: str) -> str:
    """Return what git says of this checkout, nothing if there is no git or no checkout of this package."""
    folder = Path(__file__).resolve().parent
    if not (folder.parent / ".git").exists():  # an exported tree may lie in the checkout of something else
        return ""
    try:
        return subprocess.run(
            ["git", *words], cwd=folder.parent, capture_output=True, text=True, check=False
        ).stdout.strip()
    except FileNotFoundError:
        return ""


def host() -> dict[str, Any]:
    """Return the processor, the cores that this process may use, and the memory of the machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"cpu": cpu_model(), "cores": usable, "memory_gib": round(memory / 2**30, 1)}


def gpus() -> list[dict[str, str]]:
    """Return name and driver of each GPU, from ``nvidia-smi``; nothing if there is none."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    lines = found.stdout.splitlines() if found.returncode == 0 else []
    return [{"name": name.strip(), "driver": driver.strip()} for name, driver in (line.split(",") for line in lines)]


def version_of(package: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    from spdist.foundation import distribution  # late: `compare` runs this file with older packages

    return distribution.version_of(package)


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of packages; None for those of `PACKAGES` that are not installed."""
    cupy = next((found for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if (found := version_of(name))), None)
    others = {name: found for name in PEERS if (found := version_of(name))}
    return {
        "python": platform.python_version(),
        **{name: version_of(name) for name in PACKAGES},
        "cupy": cupy,
        **others,
    }


def machine() -> dict[str, Any]:
    """Return date, sources, command, host, device, driver and versions: `FIELDS`."""
    (commit, dirty), here, cards = sources(), host(), gpus()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "command": " ".join(["python", *(Path(word).name if word[:1] == "/" else word for word in sys.argv)]),
        "host": here,
        "device": f"{len(cards)} x {cards[0]['name']}" if cards else f"{here['cpu']}, {here['cores']} cores",
        "driver": cards[0]["driver"] if cards else None,
        "versions": versions(),
        "load_before": LOAD,
        "shared_machine": "--shared-machine" in sys.argv,
    }


def has_gpu() -> bool:
    """Whether CuPy is installed and sees a device."""
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver, no device: each raises its own
        return False


def gpu() -> dict[str, Any]:
    """Return the current GPU and the versions of CuPy and CUDA."""
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    driver, cuda = (f"{v // 1000}.{v % 1000 // 10}" for v in (runtime.driverGetVersion(), runtime.runtimeGetVersion()))
    return {
        "device": properties["name"].decode(),
        "memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
        "cupy": cupy.__version__,
        "cuda": cuda,
        "driver_cuda": driver,
    }


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--quick", action="store_true", help="sizes for a test of the benchmark itself")
    made.add_argument("--out", type=Path, help="write a JSON record")
    made.add_argument("--shared-machine", action="store_true", help="mark the record: other jobs ran beside")
    return made


def write(result: dict[str, Any], out: Path | None, quiet: bool = False) -> None:
    """Write the record of a run."""
    if out is not None:
        out.write_text(json.dumps({**machine(), **result}, indent=1) + "\n")
        if not quiet:
            print(f"recorded in {out}")
