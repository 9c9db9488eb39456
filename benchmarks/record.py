"""What every benchmark shares: the facts of the machine, and a dated JSON record of the run."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def cpu_model() -> str:
    """Return the processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def installed(package: str) -> str | None:
    """Return the version of a package, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit of the sources, with ``-dirty`` if files were changed since; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"],
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:  # git is not installed
        return None
    return found.stdout.strip() or None


def machine() -> dict[str, Any]:
    """Return date, commit, device and versions."""
    packages = ("spdist", "numpy", "scipy", "numba", "zarr", "zarrs", "dask", "distributed")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": f"{cpu_model()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {package: found for package in packages if (found := installed(package))},
        "command": " ".join(["python", *(Path(word).name if word[:1] == "/" else word for word in sys.argv)]),
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
    return made


def write(result: dict[str, Any], out: Path | None) -> None:
    """Write the record of a run."""
    if out is not None:
        out.write_text(json.dumps({**machine(), **result}, indent=1) + "\n")
        print(f"recorded in {out}")
