"""The smallest job from shell prompt to prompt, and the time of ``spdist --help``."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

DATA = Path(__file__).resolve().parent.parent / "data" / "orsirr_1.mtx.gz"
SPDIST = [sys.executable, "-m", "spdist"]


def seconds(*words: str) -> float:
    """Run one command in a fresh process; return its wall time."""
    begin = time.perf_counter()
    subprocess.run([*SPDIST, *words], capture_output=True, check=True)
    return time.perf_counter() - begin


def main() -> None:
    """Measure, print, record."""
    args = record.parser(__doc__ or "").parse_args()
    runs = 2 if args.quick else 7
    with tempfile.TemporaryDirectory() as folder:
        a, c = f"{folder}/A.zarr", f"{folder}/C.zarr"
        seconds("import", str(DATA), a)
        result = {
            "multiply_verify_s": statistics.median(
                seconds("multiply", a, a, c, "--verify", "--overwrite") for _ in range(runs)
            ),
            "help_s": statistics.median(seconds("--help") for _ in range(runs)),
        }
    for name, value in result.items():
        print(f"{name:20} {value:6.3f}")
    record.write({"benchmark": "startup", "matrix": DATA.name, "result": result}, args.out)


if __name__ == "__main__":
    main()
