"""Hostile environments: a command with variables, configuration and files of settings set to what they should not be.

``python -m tests.fuzz.environments --count 300 --seed 1`` runs each in a fresh process. A case fails if there is a
traceback, the command ends by a signal or fails without a line of its own, or it does not end in time; and if it says
that it is done and its result is not the right one.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import yaml

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 90.0
"""Seconds after which a command hangs; a busy machine takes 20."""
NUMBA = (
    "NUM_THREADS OPT CACHE_DIR DISABLE_JIT CPU_NAME CPU_FEATURES DEBUG DUMP_IR DEVELOPER_MODE BOUNDSCHECK COLOR_SCHEME "
    "FUNCTION_CACHE_SIZE THREADING_LAYER THREADING_LAYER_PRIORITY LOOP_VECTORIZE SLP_VECTORIZE ENABLE_AVX "
    "LLVM_REFPRUNE_PASS LLVM_REFPRUNE_FLAGS CACHE_LOCATOR_CLASSES FULL_TRACEBACKS DISABLE_CUDA ENABLE_CUDASIM "
    "DEBUG_CACHE CUDA_DRIVER CAPTURED_ERRORS ENABLE_PROFILING DISABLE_INTEL_SVML"
)
DASK = (
    "CONFIG ROOT_CONFIG TEMPORARY_DIRECTORY DISTRIBUTED DISTRIBUTED__WORKER DISTRIBUTED__COMM__TIMEOUTS__CONNECT "
    "DISTRIBUTED__WORKER__MEMORY__TARGET DISTRIBUTED__LOGGING DISTRIBUTED__COMM__TLS DISTRIBUTED__COMM__COMPRESSION "
    "DISTRIBUTED__SCHEDULER__WORK_STEALING DISTRIBUTED__ADMIN__TICK__INTERVAL DISTRIBUTED__NANNY__ENVIRON "
    "DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD DISTRIBUTED__DASHBOARD__LINK DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES "
    "DISTRIBUTED__WORKER__PRELOAD DISTRIBUTED__ADMIN__LOG_FORMAT DISTRIBUTED__CLIENT__HEARTBEAT SCHEDULER_ADDRESS "
    "DISTRIBUTED__NANNY__PRE_SPAWN_ENVIRON DISTRIBUTED__COMM__SHARD DISTRIBUTED__WORKER__RESOURCES DASHBOARD"
)
OTHERS = (
    "ZARR_ASYNC__CONCURRENCY ZARR_ASYNC__TIMEOUT ZARR_CODEC_PIPELINE__PATH ZARR_THREADING__MAX_WORKERS ZARR_ARRAY "
    "ZARR_CONFIG ZARR_JSON_INDENT ZARR_DEFAULT_ZARR_FORMAT ZARR_BUFFER ZARR_CODEC_PIPELINE BLOSC_NTHREADS "
    "OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS RAYON_NUM_THREADS MALLOC_ARENA_MAX MALLOC_MMAP_THRESHOLD_ "
    "TMPDIR TEMP HOME XDG_CACHE_HOME XDG_CONFIG_HOME COLUMNS LINES TERM NO_COLOR FORCE_COLOR COLORTERM LANG LC_ALL "
    "LC_CTYPE TZ USER LOGNAME PWD SHELL PATH AWS_ACCESS_KEY_ID AWS_ENDPOINT_URL AWS_CONFIG_FILE AWS_PROFILE "
    "AWS_SHARED_CREDENTIALS_FILE FSSPEC_CONFIG_DIR FSSPEC_S3 FSSPEC_FILE_KWARGS GOOGLE_APPLICATION_CREDENTIALS "
    "AZURE_STORAGE_ACCOUNT_NAME SLURM_JOB_ID SLURM_CPUS_PER_TASK SLURM_MEM_PER_NODE SLURM_NTASKS SLURM_JOB_END_TIME "
    "CUDA_VISIBLE_DEVICES CUDA_PATH CUPY_CACHE_DIR BOKEH_RESOURCES BOKEH_LOG_LEVEL HTTP_PROXY HTTPS_PROXY NO_PROXY "
    "SSL_CERT_FILE JUPYTER_COLUMNS TTY_COMPATIBLE TTY_INTERACTIVE SPDIST_TRACEBACK SPDIST_COMMIT PSUTIL_DEBUG "
    "NPY_PROMOTION_STATE NUMPY_MADVISE_HUGEPAGE PYTHONASYNCIODEBUG PYTHONUNBUFFERED PYTHONOPTIMIZE LD_BIND_NOW"
)
VARIABLES = (*(f"NUMBA_{name}" for name in NUMBA.split()), *(f"DASK_{name}" for name in DASK.split()), *OTHERS.split())
VALUES = (
    "", "0", "-1", "1", "abc", "9" * 30, "nan", "1e400", "{", "[1, 2]", "{'a': 1}", "None", "\udcff\udcfe",
    "a\nb", "\x1b[31mred", "x" * 5000, "{missing}", "{missing}/deep/er", "{file}", "{folder}", "{locked}", "/dev/null",
    "/dev/full", "true", "http://127.0.0.1:1", "C.UTF-8", "POSIX", "tls://127.0.0.1:1", "a.b:c", "é",
)  # fmt: skip
"""Values; the names in braces stand for places."""
PYTHONS = {
    "PYTHONIOENCODING": ("ascii", "latin-1", "utf-8:strict"), "PYTHONWARNINGS": ("error", "always", "nonsense"),
    "PYTHONHASHSEED": ("0", "42"), "PYTHONDEVMODE": ("1",), "PYTHONUTF8": ("0", "1"), "PYTHONMALLOC": ("malloc",),
    "PYTHONOPTIMIZE": ("2",), "PYTHONFAULTHANDLER": ("1",), "PYTHONDONTWRITEBYTECODE": ("1",),
}  # fmt: skip
"""Variables of Python, of which other values end Python before it runs anything."""
DOCUMENTS = (
    "", "{", "- 1\n- 2\n", "5\n", "distributed: 5\n", "distributed:\n  worker: [1]\n", "\t",
    "a: !!python/object:os.x {}\n",
    "distributed:\n  comm:\n    timeouts:\n      connect: soon\n", "distributed:\n  nanny: {environ: 7}\n",
    "distributed:\n  logging: {distributed: shout}\n", "distributed: {worker: {memory: {target: many}}}\n",
    "distributed: {scheduler: {http: {routes: [nowhere]}}}\n", "distributed: null\n", "a: *b\n", "1: 2\n",
    "distributed: {worker: {preload: [none.such]}}\n", "temporary-directory: 5\n", "num_threads: 0\n", "opt: fast\n",
    "distributed: {comm: {tls: {ca-file: /none}}}\n", "distributed: {comm: {require-encryption: maybe}}\n",
    "\xff\xfe\x00", "distributed: {admin: {tick: {interval: [1]}}}\n", "distributed: {worker: {resources: x}}\n",
)  # fmt: skip
"""Contents of files of settings."""
FILES = ("dask.yaml", "home/.config/dask/x.yaml", "home/.config/dask/y.json", "work/.numba_config.yaml",
         "home/.config/zarr/z.yaml", "home/.config/fsspec/c.json", "home/.aws/config")  # fmt: skip
"""Files of settings, beside the data."""
COMMANDS = {
    "workers": ("multiply", "A.zarr", "A.zarr", "C.zarr", "--workers", "1", "--engine", "numba"),
    "alone": ("multiply", "A.zarr", "A.zarr", "C.zarr", "--engine", "numba", "--json"),
    "auto": ("multiply", "A.zarr", "A.zarr", "C.zarr", "--top-n", "100"),
    "import": ("import", "A.mtx", "C.zarr"),
    "edges": ("import", "A.csv", "C.zarr", "--json"),
    "info": ("info", "A.zarr"),
    "verify": ("verify", "A.zarr", "A.zarr", "S.zarr"),
    "transpose": ("transpose", "A.zarr", "C.zarr"),
    "job": ("job.yaml",),
}
"""Commands; C is what they make."""


@dataclass(frozen=True)
class Environment:
    """A command, and what is set for it.

    Attributes
    ----------
    command : str
        A key of `COMMANDS`.
    variables : dict
        With places in braces.
    files : dict
        Contents by name.
    """

    command: str
    variables: dict[str, str]
    files: dict[str, str] = field(default_factory=dict)


def random_environment(rng: random.Random) -> Environment:
    """Return a command with one to three hostile variables, or a hostile file of settings."""
    command = rng.choices(list(COMMANDS), [3, 3, 1, 1, 1, 1, 1, 1, 2])[0]
    variables = {}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.1:
            name = rng.choice(list(PYTHONS))
            variables[name] = rng.choice(PYTHONS[name])
        else:
            variables[rng.choice(VARIABLES)] = rng.choice(VALUES)
    files = {rng.choice(FILES): rng.choice(DOCUMENTS)} if rng.random() < 0.3 else {}
    if "dask.yaml" in files:
        variables["DASK_CONFIG"] = "{dask}"
    elif files:
        variables = {} if rng.random() < 0.8 else variables
    return Environment(command, variables, files)


def write_matrices(folder: Path) -> sp.csr_matrix:
    """Store a matrix and its square in a folder; return the square."""
    import scipy.io

    import spdist

    a = sp.random_array((300, 300), density=0.02, rng=np.random.default_rng(5), format="csr")
    a.data = np.ceil(a.data * 9)
    spdist.save(folder / "A.zarr", a)
    spdist.save(folder / "S.zarr", sp.csr_matrix(a @ a))
    scipy.io.mmwrite(folder / "A.mtx", a)
    entries = a.tocoo()
    lines = (f"{i},{j},{x}\n" for i, j, x in zip(entries.row, entries.col, entries.data, strict=True))
    (folder / "A.csv").write_text("".join(lines))
    job = {"a": "A.zarr", "b": "A.zarr", "out": "C.zarr", "workers": 1, "memory_limit": "64MiB", "engine": "numba"}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return sp.csr_matrix(a @ a)


def run(environment: Environment, stored: Path, folder: Path) -> tuple[int | None, str]:
    """Run a command in an empty folder; return its exit code, None if it hangs, and what it said on stderr."""
    places = {name: str(folder / name) for name in ("missing", "file", "folder", "locked")}
    shutil.copytree(stored, folder / "work")
    for name in ("folder", "locked", "home"):
        (folder / name).mkdir()
    (folder / "file").write_text("no folder\n")
    (folder / "locked").chmod(0)
    for name, content in environment.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode("latin-1"))
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    variables.pop("XDG_CACHE_HOME", None)
    for name, value in environment.variables.items():
        for place, path in {**places, "dask": str(folder / "dask.yaml")}.items():
            value = value.replace(f"{{{place}}}", path)
        variables[name] = value
    job = environment.command == "job"
    words = [str(ROOT / "workflows" / "multiply.py")] if job else ["-m", "spdist"]
    process = subprocess.Popen(
        [sys.executable, *words, *COMMANDS[environment.command]], cwd=folder / "work", env=variables,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        _, said = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return None, process.communicate()[1].decode(errors="replace")
    finally:
        (folder / "locked").chmod(0o700)
    return process.returncode, said.decode(errors="replace")


def wrong(environment: Environment, code: int | None, said: str, folder: Path, square: sp.csr_matrix) -> str:
    """Return what is wrong with the end of a command; empty if nothing is."""
    if code is None:
        return "hang"
    if "Traceback" in said or "Fatal Python error" in said:
        return "traceback"
    own = [line for line in said.splitlines() if line.startswith(("spdist: ", "job.yaml: "))]
    if code not in (0, 1, 2):
        return f"exit code {code}"
    if code and environment.command != "job" and len([line for line in own if ": warning: " not in line]) != 1:
        return f"{len(own)} lines"
    if code == 0 and environment.command in ("workers", "alone", "auto", "job") and not _is(folder, square):
        return "wrong product"
    return ""


def _is(folder: Path, square: sp.csr_matrix) -> bool:
    import spdist

    found = spdist.open(folder / "work" / "C.zarr").to_scipy()
    difference = abs(found - square)
    return difference.nnz == 0 or difference.max() == 0


def main() -> int:
    """Run the environments that the arguments ask for; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="one case, with what it says")
    args = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="environments-") as place:
        stored = Path(place) / "stored"
        stored.mkdir()
        square = write_matrices(stored)
        for number in range(args.count) if args.only is None else [args.only]:
            environment = random_environment(random.Random(f"{args.seed}/{number}"))
            folder = Path(place) / str(number)
            folder.mkdir()
            code, said = run(environment, stored, folder)
            problem = wrong(environment, code, said, folder, square)
            counts[problem or f"exit {code}"] += 1
            if problem or args.only is not None:
                print(f"seed {args.seed} case {number}: {problem or 'fine'}: exit {code}: {environment}")
                print(said[-1500:], flush=True)
            shutil.rmtree(folder)
    print(dict(counts))
    return int(any(not name.startswith("exit ") or name[5:] not in "012" for name in counts))


if __name__ == "__main__":
    sys.exit(main())
