"""Make the records of one host, all of one commit: `make bench`, `make bench-gpu`, `make bench-gpus`.

::

    python benchmarks/suites.py cores|gpu|gpus [--part K] [--only NAME ...] [--out FOLDER] [--real FOLDER] [--list]

A suite is cut into parts that each take some minutes, for hosts that are lent for a while. Each record is named after
what it times, without a date: a new one replaces the old one. A benchmark that fails is said and does not stop the
others; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent


class Benchmark(NamedTuple):
    """One record: its name, and the script with its words."""

    name: str
    words: str  # FOLDER is a folder for matrices, REAL one of real matrices


SUITES: dict[str, list[list[Benchmark]]] = {
    "cores": [
        [
            Benchmark("prompt_2cores", "prompt.py --folder FOLDER --budget 330 --workers= --rounds 3"),
            Benchmark("spgemm_cpu", "spgemm_cpu.py --threads 2"),
            Benchmark("spmv_cpu", "spmv.py --cpu --folder FOLDER"),
            Benchmark("block_spmv", "block_spmv.py"),
            Benchmark("block_spgemm_cpu", "block_spgemm.py"),
            Benchmark("fused", "fused.py --repeats 3"),
            Benchmark("answers", "answers.py --repeats 3"),
            Benchmark("predictions_2cores", "predictions.py --folder FOLDER --rounds 2 --engines numba --budget 200"),
            Benchmark("integrity", "integrity.py"),
            Benchmark("watching", "watching.py"),
            Benchmark("scale", "scale.py"),
        ]
    ],
    "gpu": [
        [
            Benchmark("spgemm", "spgemm.py --folder FOLDER --methods rowwise,auto"),
            Benchmark("spgemm_float32", "spgemm.py --folder FOLDER --methods auto --dtype float32"),
            Benchmark(
                "spgemm_papers", "spgemm.py --folder FOLDER --methods esc,hyspmm --matrices hood,atmosmodl,offshore"
            ),
            Benchmark("spgemm_cold", "spgemm.py --folder FOLDER --cold --methods rowwise,esc"),
            Benchmark("spgemm_real", "spgemm.py --folder FOLDER --real REAL --methods auto"),
        ],
        [
            Benchmark("spmv", "spmv.py --folder FOLDER --methods auto,sell,ehyb"),
            Benchmark("spmv_float32", "spmv.py --folder FOLDER --methods auto,ehyb --dtype float32"),
            Benchmark("spmv_real", "spmv.py --folder FOLDER --methods auto --real REAL"),
            Benchmark("spmv_hybrid", "spmv.py --folder FOLDER --hybrid --threads 16"),
        ],
        [
            Benchmark("pipeline", "pipeline.py --folder FOLDER"),
            Benchmark("pipeline_thesis", "pipeline.py --folder FOLDER --thesis"),
            Benchmark("pipeline_blocks", "pipeline.py --blocks"),
            Benchmark(
                "pipeline_store", "pipeline.py --folder FOLDER --matrices er_4m_d16,poisson27_160 --store FOLDER/store"
            ),
            Benchmark("packing", "packing.py"),
        ],
        [
            Benchmark("papers", "papers.py --folder FOLDER --data REAL"),
            Benchmark("answers_gpu", "answers.py --gpu --repeats 3"),
            Benchmark("block_spgemm_gpu", "block_spgemm.py --gpu"),
            Benchmark("calls", "calls.py --budget 120"),
            Benchmark("scheduling", "scheduling.py"),
            Benchmark("top_n_16cores", "fused.py --threads 16 --only top_n"),
        ],
        [
            Benchmark("prompt_gpu", "prompt.py --folder FOLDER --budget 400"),
        ],
        [
            Benchmark("predictions_gpu", "predictions.py --folder FOLDER --budget 200 --rounds 2"),
            Benchmark("cores_16", "cores.py --threads 1,2,4,8,16 --data REAL --budget 200"),
        ],
        [
            Benchmark("clustering", "clustering.py --engine cuda numba --rounds 3 --limit 60"),
            Benchmark("neighbors", "neighbors.py"),
            Benchmark("solvers", "solvers.py --gpu --workers 1"),
        ],
    ],
    "gpus": [
        [
            Benchmark("scaling", "scaling.py --folder FOLDER --workers 1,2 --weak"),
            Benchmark("prompt_gpus", "prompt.py --folder FOLDER --budget 200 --gpus 1,2 --no-calls"),
            Benchmark("solvers_gpus", "solvers.py --gpu --workers 1,2"),
        ]
    ],
}


def run(one: Benchmark, folder: Path, real: Path, out: Path, limit: float) -> str:
    """Make one record; return why there is none, nothing if there is one."""
    words = one.words.replace("FOLDER", str(folder)).replace("REAL", str(real)).split()
    command = [sys.executable, str(HERE / words[0]), *words[1:], "--out", str(out / f"{one.name}.json")]
    log = out / f"{one.name}.log"
    try:
        with log.open("w") as said:
            code = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    if code:
        return f"exit code {code}: {(log.read_text().strip().splitlines() or ['nothing was said'])[-1][:200]}"
    log.unlink()
    return ""


def main() -> int:
    """Make the records of a suite or of a part of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--part", type=int, help="from 1; all by default")
    parser.add_argument("--only", nargs="*", help="names of records")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--real", type=Path, default=HERE.parent / "data", help="folder of real matrices, .npz")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of each")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    args = parser.parse_args()
    parts = SUITES[args.suite] if args.part is None else [SUITES[args.suite][args.part - 1]]
    chosen = [one for part in parts for one in part if not args.only or one.name in args.only]
    if args.list:
        print("\n".join(f"{one.name}: {one.words}" for one in chosen))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for one in chosen:
            begin = time.perf_counter()
            problem = run(one, Path(scratch), args.real.resolve(), args.out.resolve(), args.limit)
            failed += bool(problem)
            print(f"{one.name}: {time.perf_counter() - begin:.0f} s{problem and f', {problem}'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
