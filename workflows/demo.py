"""Show spdist on shipped matrices: import, plan, multiply under a memory limit, verify, compare with SciPy.

::

    make demo

Everything goes to demo-output/, which is emptied first; report.md there says what was found. Exits with 1 unless every
product is right and the largest stayed within its memory limit.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

import spdist

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
OUT = ROOT / "demo-output"
SMALL = ("orsirr_1.mtx.gz", "1138_bus.npz", "bcsstk16.npz", "cage10.npz", "memplus.npz", "debian_trixie_deps.npz")
MEMORY_LIMIT = "96MiB"
PACKAGES = ("numpy", "scipy", "zarr", "zarrs", "numba", "dask")


def main() -> int:
    """Run the demonstration; return the exit code."""
    begin = time.perf_counter()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    os.chdir(OUT)

    say("1. Small real matrices: import, multiply, verify, compare with SciPy")
    found = [compare(DATA / name) for name in SMALL]

    say("2. A product larger than its memory limit: how many genes share each pair of Gene Ontology terms")
    spdist_command("import", DATA / "human_gene_GO.npz", "genes.zarr")
    spdist.save("terms.zarr", sp.load_npz(DATA / "human_gene_GO.npz").T)
    spdist_command("info", "terms.zarr")
    spdist_command("plan", "terms.zarr", "genes.zarr", "--memory-limit", MEMORY_LIMIT)
    print(
        f"$ spdist multiply terms.zarr genes.zarr shared.zarr --memory-limit {MEMORY_LIMIT} --verify --report run.html"
    )
    # A few rows first: on a new machine they compile the kernels, whose compiler takes memory beside the product.
    spdist.save("few.zarr", sp.load_npz(DATA / "human_gene_GO.npz").T.tocsr()[:2000])
    spdist.multiply("few.zarr", "genes.zarr", "few-shared.zarr", memory_limit=MEMORY_LIMIT, check=True)
    report = spdist.multiply(
        "terms.zarr",
        "genes.zarr",
        "shared.zarr",
        memory_limit=MEMORY_LIMIT,
        check=True,
        report="run.html",
        callbacks=callbacks(),
    )
    product = spdist.open("shared.zarr")
    spdist_command("info", "shared.zarr")

    text = write_report(found, report, product.nbytes, time.perf_counter() - begin)
    say("3. Report")
    print(text)
    within = report.peak_memory <= 1.15 * report.memory_limit  # what the allocator keeps comes on top
    if not (within and verified(report) and all(one.right for one in found)):
        print("The demonstration FAILED: see the report above.", file=sys.stderr)
        return 1
    folder = OUT.relative_to(ROOT)
    print(f"Written to {folder}/report.md; {folder}/run.html shows the large product: open it in a browser.\n\n{NEXT}")
    return 0


NEXT = """What to do next, with a Matrix Market file of yours (or data/orsirr_1.mtx.gz), in this folder:

  .venv/bin/spdist import my.mtx A.zarr
  .venv/bin/spdist plan A.zarr A.zarr --memory-limit 512MiB
  .venv/bin/spdist multiply A.zarr A.zarr C.zarr --memory-limit 512MiB --verify --resume"""


# -- small matrices ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One small product beside SciPy's.

    `nnz`, `product_nnz`: entries of A and of A @ A.
    `difference`: largest difference from SciPy's product, in units of the largest value of |A||A|.
    """

    name: str
    shape: tuple[int, int]
    nnz: int
    product_nnz: int
    seconds: float
    difference: float
    right: bool


def compare(source: Path) -> Comparison:
    """Compute A @ A out of core and compare with SciPy."""
    name = source.name.split(".")[0]
    stored = spdist.import_matrix(source, f"{name}.zarr")
    report = spdist.multiply(stored, stored, f"{name}-squared.zarr", memory_limit="32MiB", check=True)
    a, c = (whole(f"{part}.zarr") for part in (name, f"{name}-squared"))
    ones = sp.csr_matrix((np.ones(a.nnz), a.indices, a.indptr), a.shape)
    pattern = ones @ ones  # SciPy drops sums that are zero, so the pattern comes from a product of ones
    difference = abs(c - a @ a).max() / (abs(a) @ abs(a)).max()
    right = verified(report) and c.nnz == pattern.nnz and difference < 1e-14
    print(
        f"  {name:20} {a.shape[0]:>7,} rows, {a.nnz:>9,} entries; A @ A: {c.nnz:>9,} entries, "
        f"{report.seconds:5.2f} s, difference {difference:.0e}, {'verified, equals SciPy' if right else 'WRONG'}",
        flush=True,
    )
    return Comparison(name, a.shape, a.nnz, c.nnz, report.seconds, difference, right)


def verified(report: spdist.Report) -> bool:
    """Whether the product was verified and found right."""
    return report.verification is not None and report.verification["ok"]


def whole(url: str) -> Any:
    """Return a stored matrix as a SciPy matrix."""
    matrix = spdist.open(url)
    return matrix.rows(0, matrix.nrows).to_scipy()


# -- what is shown -----------------------------------------------------------------------------------------------------


def say(title: str) -> None:
    """Print a heading."""
    print(f"\n{title}\n", flush=True)


def spdist_command(*arguments: object) -> None:
    """Show a command and run it."""
    words = [str(word) for word in arguments]
    print("$ spdist", *(os.path.relpath(word) if word.startswith("/") else word for word in words), flush=True)
    subprocess.run([sys.executable, "-m", "spdist", *words], check=True)
    print(flush=True)


def callbacks() -> spdist.Callbacks:
    """Say where the dashboard is, and how far the product and its verification are."""

    def show(what: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{what} {done / max(total, 1):4.0%}", end="\n" if done >= total else "", file=sys.stderr)

    return spdist.Callbacks(
        started=lambda link: print(f"dashboard while it runs: {link}", flush=True),
        progress=lambda progress: show("multiplying", progress.products, progress.products_total),
        verifying=lambda done, total: show("verifying", done, total),
    )


def write_report(found: list[Comparison], report: spdist.Report, product_bytes: int, seconds: float) -> str:
    """Write report.md.

    `product_bytes`: bytes of the large C in memory.
    `seconds`: wall time of the demonstration.
    """
    size, limit, peak = (count / 2**20 for count in (product_bytes, report.memory_limit, report.peak_memory))
    reason = (report.verification or {"reason": "not verified"})["reason"].replace("|", "\\|")
    rows = "\n".join(
        f"| {one.name} | {one.shape[0]:,} x {one.shape[1]:,} | {one.nnz:,} | {one.product_nnz:,} | {one.seconds:.2f} s "
        f"| {one.difference:.0e} | {'yes' if one.right else '**NO**'} |"
        for one in found
    )
    text = f"""# spdist demonstration

## The large product

terms x genes times genes x terms, from data/human_gene_GO.npz: {report.nnz:,} entries.

| what | figure |
|---|---|
| C in memory | {size:.1f} MiB |
| memory limit of a worker | {limit:.1f} MiB: C is {size / limit:.1f} times as large |
| most that a worker used | {peak:.1f} MiB, {peak / limit:.0%} of the limit |
| grid | {" x ".join(str(count) for count in report.grid.values())} row, inner and column blocks |
| time | {report.seconds:.1f} s, start of the workers included |
| verified | {"yes" if verified(report) else "**NO**"}: {reason} |

## Small products, each verified and compared with SciPy

| matrix | shape | entries | entries of A @ A | time | difference | right |
|---|---|---|---|---|---|---|
{rows}

The difference is the largest of any entry, in units of the largest entry of |A||A|.

## Where

{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()};
spdist {spdist.__version__}, {", ".join(f"{package} {version(package)}" for package in PACKAGES)}.
The whole demonstration took {seconds:.0f} s.
"""
    Path("report.md").write_text(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
