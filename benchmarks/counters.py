"""Count what a GPU does: hits of its second cache and bytes from its memory by `ncu`, energy by NVML.

A case is KIND:MATRIX of `CASES`. Each case is preceded by a kernel of its own, MARK, by which its kernels are told from
those of the others.
"""

from __future__ import annotations

import csv
import functools
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MARK = "spdist_case"
HITS, SECTORS = "lts__t_sectors_lookup_hit.sum", "lts__t_sectors.sum"
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
UNITS = {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "sector": 1.0}
SECONDS_OF_ENERGY = 1.0
"""That a call is repeated for: NVML counts in steps of some tens of milliseconds."""
Call = Callable[[], Any]


def hyspmm(name: str, folder: Path) -> Call:
    """Return hySpMM's product, from host to host."""
    import suite

    from spdist.kernels.hyspmm.multiply import multiply

    a, b = suite.load(name, folder)
    return functools.partial(multiply, a, b, memory_limit=1 << 30)  # `ncu` saves and restores all that is allocated


def esc(name: str, folder: Path) -> Call:
    """Return ESC's product, operands on the GPU."""
    import gpu_measure
    import suite

    from spdist.kernels.esc.multiply import multiply

    a = gpu_measure.on_device(suite.load(name, folder)[0], "float64")
    return functools.partial(multiply, a, a)


def cusparse(name: str, folder: Path) -> Call:
    """Return the product of CuPy, which is cuSPARSE's."""
    import gpu_measure
    import suite

    a = gpu_measure.cupyx_matrix(gpu_measure.on_device(suite.load(name, folder)[0], "float64"))
    return lambda: a @ a


def spmv_call(a: Any, method: str) -> Call:
    """Return the product with a vector by a method of `operator`, or by cuSPARSE's CSR through CuPy."""
    import cupy

    from spdist.operators import prepare

    x = cupy.asarray(np.random.default_rng(0).uniform(-1, 1, a.shape[1]))
    if method == "cusparse":
        return lambda: a @ x
    y = cupy.empty(a.shape[0])
    return functools.partial(prepare.operator(a, method).matvec, x, out=y)


def sell(name: str, folder: Path) -> Call:
    """Return SELL-32-sigma's product with a vector."""
    import gpu_measure
    import spmv_suite

    return spmv_call(gpu_measure.cupyx_matrix(gpu_measure.on_device(spmv_suite.load(name, folder), "float64")), "sell")


CASES: dict[str, Callable[[str, Path], Call]] = {"hyspmm": hyspmm, "esc": esc, "cusparse": cusparse, "sell": sell}


def counted(cases: Sequence[str], folder: Path, limit: float) -> dict[str, dict[str, float]]:
    """Return by case the sums of counters over its kernels; nothing, and say why, where `ncu` gives none."""
    command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw",
               "--metrics", ",".join((HITS, SECTORS, READ, WRITTEN)),
               sys.executable, "-c", "import counters; counters.multiply_cases()", *cases]  # fmt: skip
    here = str(Path(__file__).resolve().parent)
    found_by = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"SPDIST_COUNTERS_FOLDER": str(folder), "PYTHONPATH": found_by}
    if shutil.which("ncu") is None:
        print("no counters: ncu is not installed")
        return {}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as running:
        try:
            said, _ = running.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # with what it runs
            print(f"no counters of {', '.join(cases)}: ncu took more than {limit:.0f} s")
            return {}
    lines = said.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        print(f"no counters of {', '.join(cases)}: {said.strip()[-400:]}")
        return {}
    return sums(list(csv.DictReader(io.StringIO("\n".join(lines[start:])))), cases)


def sums(rows: list[dict[str, str]], cases: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the sums of counters by case; the first row has the units."""
    units, found, at = rows[0], {}, -1
    for row in rows[1:]:
        if MARK in row["Kernel Name"]:
            at += 1
            found[cases[at]] = dict.fromkeys((HITS, SECTORS, READ, WRITTEN), 0.0) | {"kernels": 0.0}
            continue
        mine = found[cases[at]]
        mine["kernels"] += 1
        for key in (HITS, SECTORS, READ, WRITTEN):
            mine[key] += float(row[key].replace(",", "")) * UNITS[units[key].lower() or "sector"]
    return found


class Meter:
    """Seconds and joules of a block of code, of the first GPU; joules are None where NVML is not there."""

    def __init__(self) -> None:
        self.seconds, self.joules = 0.0, None
        self._read: Callable[[], float] | None = None
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self._read = lambda: 1e-3 * pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            self._read()
        except Exception as error:  # no package, no library, no permission: each raises its own
            self._read = None
            print(f"no energy: {error}")

    def __enter__(self) -> Meter:
        self._before, self._begin = self._read and self._read(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begin
        if self._read is not None:
            self.joules = self._read() - self._before


def joules(call: Call) -> dict[str, float] | None:
    """Return energy and seconds of a call, from many in a row; None where NVML is not there."""
    import cupy

    call()
    cupy.cuda.Device().synchronize()
    count = 0
    with Meter() as meter:
        begin = time.perf_counter()
        while time.perf_counter() - begin < SECONDS_OF_ENERGY:
            for _ in range(20):
                call()
            cupy.cuda.Device().synchronize()
            count += 20
    return None if meter.joules is None else {"joules": meter.joules / count, "seconds": meter.seconds / count}


def multiply_cases() -> None:
    """Multiply each case once, after a warm-up, between marks."""
    import cupy

    folder, mark = Path(os.environ["SPDIST_COUNTERS_FOLDER"]), cupy.RawKernel(
        f'extern "C" __global__ void {MARK}() {{}}', MARK
    )  # fmt: skip
    for case in sys.argv[1:]:
        kind, name = case.split(":")
        call = CASES[kind](name, folder)
        call()
        cupy.cuda.Device().synchronize()
        cupy.cuda.profiler.start()
        mark((1,), (1,), ())
        call()
        cupy.cuda.Device().synchronize()
        cupy.cuda.profiler.stop()
        del call
