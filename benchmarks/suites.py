"""Make the records of one host, all of one commit: `make bench`, `make bench-gpu`, `make bench-gpus`.

::

    python benchmarks/suites.py cores|gpu|gpus [--part K] [--only NAME ...] [--out FOLDER] [--real FOLDER] [--list]
    python benchmarks/suites.py check          # exit with 1 if a record is of other code than there is now

A suite is cut into parts that each take some minutes, for hosts that are paid by the minute. Each record is named after
what it times, without a date: a new one replaces the old one, and holds a digest of the code that it times. A benchmark
that fails is said and does not stop the others; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
THESIS = "hood,atmosmodl,offshore,bmwcra_1,mono_500Hz,cage12,cca,poisson3Da,orsirr_1"


ROOM = 16 << 30
"""Bytes that the matrices of a suite and their products take at most."""
CPU = "spdist/kernels/cpu"
WHOLE_ROWS = tuple(
    str(path.relative_to(ROOT)) for path in sorted((ROOT / CPU).rglob("*.py")) if path.name != "largest.py"
)
"""What products without `top_n` and threshold run on the CPU."""
GPU = "spdist/kernels/rowwise_gpu", "spdist/kernels/radix_sort.py"
STREAM = "spdist/kernels/streaming", *GPU
VECTORS = "spdist/kernels/spmv", "spdist/kernels/bsr"
CLUSTERING = "spdist/applications/markov_clustering"
NEIGHBORS = "spdist/neighbors.py", "spdist/applications/nearest_rows.py"
IMPORTS = "spdist/storage/formats", "spdist/storage/external_sort.py"
STORED = "spdist/storage/writer.py", "spdist/storage/chunked_array.py"


class Benchmark(NamedTuple):
    """One record: its name, the script with its words, and the code that it times."""

    name: str
    words: str  # FOLDER is a folder for matrices, REAL one of real matrices
    paths: tuple[str, ...]  # files and folders of the repository: a record of other code of theirs is stale
    needs: str = ""  # environment variable without which it is left out


SUITES: dict[str, list[list[Benchmark]]] = {
    "cores": [
        [
            Benchmark(
                "prompt_2cores", "prompt.py --folder FOLDER --budget 330 --workers= --rounds 3", (*WHOLE_ROWS, *STORED)
            ),
            Benchmark("spgemm_cpu", "spgemm_cpu.py", WHOLE_ROWS),
            Benchmark("spgemm_cpu_real", "spgemm_cpu.py --data REAL --stored", WHOLE_ROWS),
            Benchmark("spmv_cpu", "spmv.py --cpu --folder FOLDER", ("spdist/kernels/spmv/sell",)),
            Benchmark("block_spmv", "block_spmv.py", ("spdist/kernels/bsr",)),
            Benchmark("block_spgemm", "block_spgemm.py", ("spdist/kernels/bsr",)),
            Benchmark("fused", "fused.py --repeats 3", (CPU,)),
            Benchmark("answers", "answers.py --repeats 3", (CPU,)),
            Benchmark("integrity", "integrity.py", STORED),
            Benchmark("watching", "watching.py", ("spdist/scheduler/dashboard",)),
            Benchmark("scheduling", "scheduling.py", ("spdist/scheduler/executors",)),
            Benchmark("scale", "scale.py", ("spdist/scheduler/executors",)),
        ],
        [
            Benchmark(
                "predictions_2cores", "predictions.py --folder FOLDER --rounds 3 --engines numba --budget 300", (CPU,)
            ),
            Benchmark("out_of_core", "out_of_core.py --folder FOLDER", (*WHOLE_ROWS, *STORED)),
            Benchmark("importing", "importing.py --size 0.1 --folder FOLDER", IMPORTS),
            Benchmark("clustering_cpu",
                      "clustering.py --engine numba --rounds 3 --limit 120 --data REAL --only 1138_bus ca-CondMat"
                      " facebook_combined web-indochina-2004 email-Enron 'planted 100,000' 'R-MAT 14 x 16'",
                      (CLUSTERING, CPU)),
            Benchmark("neighbors", "neighbors.py --only '20,000 documents' '20,000 cells'", (*NEIGHBORS, CPU)),
            Benchmark("object_store", "object_store.py", ("spdist/stores",), "AWS_ENDPOINT_URL"),
            Benchmark("from_dask", "from_dask.py --entries 200000000", STORED),
            Benchmark("shipped_files", "shipped_files.py", IMPORTS),
            Benchmark("faults", "faults.py --count 100 --jobs 2 --budget 150", ("spdist/jobs",)),
        ],
    ],
    "gpu": [
        [
            Benchmark("spgemm", "spgemm.py --folder FOLDER --methods auto,esc,numeric", GPU),
            Benchmark("spgemm_float32", "spgemm.py --folder FOLDER --methods auto --dtype float32", GPU),
            Benchmark("spgemm_hyspmm",
                      f"spgemm.py --folder FOLDER --methods hyspmm,hyspmm_duplicated --matrices {THESIS}",
                      ("spdist/kernels/hyspmm",)),
            Benchmark("spgemm_deterministic", "spgemm.py --folder FOLDER --deterministic --methods rowwise", GPU),
            Benchmark("spgemm_cold", "spgemm.py --folder FOLDER --cold --methods rowwise,esc", GPU),
            Benchmark("spgemm_real", "spgemm.py --folder FOLDER --real REAL --methods auto", GPU),
        ],
        [
            Benchmark("spmv", "spmv.py --folder FOLDER --methods auto,sell,ehyb", VECTORS),
            Benchmark("spmv_other", "spmv.py --folder FOLDER --methods auto,sell --other", VECTORS),
            Benchmark("spmv_float32", "spmv.py --folder FOLDER --methods auto,ehyb --dtype float32", VECTORS),
            Benchmark("spmv_real", "spmv.py --folder FOLDER --methods auto --real REAL", VECTORS),
            Benchmark("spmv_hybrid", "spmv.py --folder FOLDER --hybrid", VECTORS),
        ],
        [
            Benchmark("pipeline", "pipeline.py --folder FOLDER --matrices er_4m_d16,rmat18_e16,poisson27_160",
                      STREAM),
            Benchmark("pipeline_thesis", "pipeline.py --folder FOLDER --thesis", STREAM),
            Benchmark("pipeline_blocks", "pipeline.py --blocks", STREAM),
            Benchmark("pipeline_store",
                      "pipeline.py --folder FOLDER --matrices er_4m_d16,poisson27_160 --store FOLDER/store",
                      (*STREAM, *STORED)),
        ],
        [
            Benchmark("papers_vectors", "papers.py --folder FOLDER --data REAL --only villa kreutzer", VECTORS),
            Benchmark("papers_ehyb", "papers.py --folder FOLDER --data REAL --only ehyb", VECTORS),
            Benchmark("papers_products", "papers.py --folder FOLDER --data REAL --only hyspmm polok",
                      ("spdist/kernels/esc", "spdist/kernels/hyspmm")),
            Benchmark("answers_gpu", "answers.py --gpu --repeats 3", GPU),
            Benchmark("block_spgemm_gpu", "block_spgemm.py --gpu", ("spdist/kernels/bsr",)),
            Benchmark("top_n_16cores", "fused.py --threads 16 --only top_n", (CPU,)),
        ],
        [
            Benchmark("prompt_gpu",
                      "prompt.py --folder FOLDER --budget 450 --workers= --cases 16^3 100^3 '18 x 8' 'A @ P'",
                      (*STREAM, *WHOLE_ROWS, *STORED)),
        ],
        [
            Benchmark("predictions_gpu",
                      "predictions.py --folder FOLDER --engines cuda --budget 150 --rounds 3", STREAM),
            Benchmark("clusters", "clusters.py --folder FOLDER", (CLUSTERING, *STREAM, *STORED)),
            Benchmark("neighbors_gpu", "neighbors.py", (*NEIGHBORS, CPU, *GPU)),
        ],
        [
            Benchmark(
                "cores_16",
                "cores.py --threads 1,2,4,8,16 --data REAL --budget 180 --only top masked min_plus norm operator"
                " 27-point R-MAT Erdos brack2 cage10 bcsstk16 debian memplus pwt",
                (CPU,),
            ),
        ],
        [
            Benchmark("clustering",
                      "clustering.py --engine cuda numba --rounds 3 --limit 60 --options='--memory-limit 60GiB'"
                      " --only human_gene_GO 'planted 100,000' 'R-MAT 14 x 16'", (CLUSTERING, CPU, *GPU)),
            Benchmark("solvers", "solvers.py --gpu --workers 1", ("spdist/operators",)),
        ],
    ],
    "gpus": [
        [
            Benchmark("scaling", "scaling.py --folder FOLDER --workers 1,2 --weak", STREAM),
            Benchmark("prompt_gpus",
                      "prompt.py --folder FOLDER --budget 350 --gpus 1,2 --engines cuda --workers= --cases 220 'A @ P'"
                      " --no-calls", STREAM),
            Benchmark("solvers_gpus", "solvers.py --gpu --workers 1,2", ("spdist/operators",)),
            Benchmark("large", "large.py --folder FOLDER", (*STREAM, *STORED)),
        ]
    ],
}  # fmt: skip


def meaning(path: Path) -> bytes:
    """Return a source file without comments and blank lines, Python also without docstrings."""
    text = path.read_text()
    if path.suffix != ".py":
        return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL).split()).encode()
    lines = text.splitlines()  # not what `ast.unparse` writes: that is another text with other versions of Python
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)  # type: ignore[operator]
    return "\n".join(line.rstrip() for line in lines if line.strip()).encode()


def digest(paths: tuple[str, ...]) -> str:
    """Return a digest of what the sources at these paths mean."""
    found = hashlib.sha256()
    for path in paths:
        whole = ROOT / path
        files = sorted(whole.rglob("*")) if whole.is_dir() else [whole]
        for file in files:
            if file.suffix in (".py", ".cu", ".cuh"):
                found.update(f"{file.relative_to(ROOT)}\n".encode() + meaning(file))
    return found.hexdigest()[:16]


def stale(results: Path) -> list[str]:
    """Return what is wrong with the records of a folder: made of other code, or made by no suite."""
    known = {
        one.name: (suite, n, one) for suite, parts in SUITES.items() for n, part in enumerate(parts, 1) for one in part
    }
    found = []
    for path in sorted(results.glob("*.json")):
        if path.stem not in known:
            found.append(f"{path.name}: no suite makes it; git mv it to {results.name}/old")
            continue
        suite, part, one = known[path.stem]
        if json.loads(path.read_text()).get("digest") != digest(one.paths):
            again = f"make {'bench' if suite == 'cores' else f'bench-{suite}'} PART={part}"
            changed = f"{', '.join(one.paths)} changed since"
            found.append(f"{path.name}: {changed}: {again}, or git mv it to {results.name}/old")
    return found


def run(one: Benchmark, folder: Path, real: Path, out: Path, limit: float) -> str:
    """Make one record; return why there is none, nothing if there is one."""
    if one.needs and one.needs not in os.environ:
        print(f"{one.name}: left out, set {one.needs}")
        return ""
    words = shlex.split(one.words.replace("FOLDER", str(folder)).replace("REAL", str(real)))
    command = [sys.executable, str(HERE / words[0]), *words[1:], "--out", str(out / f"{one.name}.json")]
    log, made = out / f"{one.name}.log", out / f"{one.name}.json"
    before = made.read_bytes() if made.exists() else b""
    problem = ""
    try:
        with log.open("w") as said:
            code = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        problem = f"stopped after {limit:.0f} s"
    else:
        if code:
            return f"exit code {code}: {(log.read_text().strip().splitlines() or ['nothing was said'])[-1][:200]}"
    if not made.exists() or made.read_bytes() == before:
        return problem or "it made no record"
    # what was recorded until a stop is kept, and says that it is a part
    facts = {"digest": digest(one.paths), **({"stopped_after_s": limit} if problem else {})}
    made.write_text(json.dumps({**json.loads(made.read_text()), **facts}, indent=1) + "\n")
    if not problem:
        log.unlink()
    return problem


def scratch_folder() -> str | None:
    """Return memory as a folder where it has room for the matrices; by default that of temporary files."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free >= ROOM else None


def main() -> int:
    """Make the records of a suite or of a part of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=[*SUITES, "check"])
    parser.add_argument("--part", type=int, help="from 1; all by default")
    parser.add_argument("--only", nargs="*", help="names of records")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--real", type=Path, default=HERE.parent / "data", help="folder of real matrices, .npz")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of each")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    args = parser.parse_args()
    if args.suite == "check":
        problems = stale(args.out)
        print("\n".join(problems), end="\n" if problems else "")
        return int(bool(problems))
    parts = SUITES[args.suite] if args.part is None else [SUITES[args.suite][args.part - 1]]
    chosen = [one for part in parts for one in part if not args.only or one.name in args.only]
    if args.list:
        print("\n".join(f"{one.name}: {one.words}" for one in chosen))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory(dir=scratch_folder()) as scratch:
        for one in chosen:
            begin = time.perf_counter()
            problem = run(one, Path(scratch), args.real.resolve(), args.out.resolve(), args.limit)
            failed += bool(problem)
            print(f"{one.name}: {time.perf_counter() - begin:.0f} s{problem and f', {problem}'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
