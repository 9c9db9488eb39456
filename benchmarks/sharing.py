"""Time how lanes share rows in SELL on a GPU, and check the constants of `sell.layout.share` on families left out.

::

    python benchmarks/sharing.py --real data --folder /data/suite --out record.json   # on a GPU
    python benchmarks/sharing.py --fit record.json     # anywhere; without --real or --fit, the record that is kept

A regret is the time of a choice over the least of all that were timed. Constants are fitted on a grid to all families
but one, and judged on that one.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import record  # noqa: E402
import scipy.sparse as sp  # noqa: E402
import spmv  # noqa: E402
import spmv_suite as suite  # noqa: E402

from spdist.kernels.spmv.sell import layout  # noqa: E402
from spdist.kernels.spmv.sell.format import GPU_LONG  # noqa: E402
from spdist.matrices.csr import CSR, from_scipy  # noqa: E402

KEPT = ROOT / "benchmarks" / "results" / "old" / "2026-11-27-spmv_sharing.json"
MOST, LONG = (4, 8, 16, 32, 64), (256, 512, 1024, 2048)
"""Entries of a lane, and entries above which a row stays in CSR, that are timed."""
HUB = 100
"""Entries of the longest row from which it matters which rows stay in CSR."""
FAMILIES = {
    "meshes": "4elt brack2 fe_body wing wing_nodal t60k mdual pwt rgg_n_2_15_s0 bfly cca ccc cage10",
    "graphs": "ca-AstroPh-nr ca-CondMat email-Enron email-Eu-core soc-brightkite-nr soc-epinions-nr web-BerkStan-dir "
    "web-indochina-2004 web-spam wiki-Vote p2p-Gnutella31 polblogs facebook_combined prone_wikipedia "
    "debian_trixie_deps planetoid_pubmed human_gene_GO",
    "optimisation": "BAL_16_22106_J BOYD1_A CONT-201_A CVXQP3_L_A f855_mat9 Journals well1033 zenios",
}
"""Families of the real matrices; others are of engineering, and generated ones are a family of their own."""
BOUNDS = ((5e4, 8e4, 1.3e5), (2e5, 5e5, 1e6, 4e6), (7e5, 1e6, 2e6, 2e7), (4e6, 1e7, 2e7))
"""Nonzeros from which a lane takes more entries: those that the fit may choose from."""
Row = dict[str, Any]


def matrices(args: Any) -> Iterable[tuple[str, str, CSR]]:
    """Yield each matrix's name and family, and the matrix."""
    of = {name: family for family, names in FAMILIES.items() for name in names.split()}
    for path in sorted(args.real.glob("*.npz")):
        m = sp.load_npz(path).tocsr().astype(np.float64)
        yield path.stem, of.get(path.stem, "engineering"), from_scipy(m)
    names = [*suite.OTHER, "s5_2d_300", "s27_40", "circuit_2700k", "rmat_20"]
    suite.prepare(names, args.folder)
    for name in names:
        yield name, "generated", suite.load(name, args.folder)


def measure(args: Any) -> dict[str, Any]:
    """Time each way to share the rows of each matrix, checked against SciPy; return the record."""
    import cupy
    import gpu_measure

    from spdist.kernels.spmv.sell import sell

    rows = []
    for name, family, m in matrices(args):
        reference, a = spmv.Reference(m, np.dtype(np.float64)), gpu_measure.on_device(m, np.dtype(np.float64))
        lengths, survey, x, us = np.diff(m.indptr), sell.survey_rows(a), cupy.asarray(reference.x), {}
        for most, long in itertools.product(MOST, LONG if lengths.max(initial=0) > HUB else LONG[-1:]):
            made = sell.build(a, survey=replace(survey, sharing=layout.Sharing(most, long)))
            y = cupy.full(m.nrows, np.nan)
            us[f"{most} {long}"] = spmv.graph_us(lambda made=made, y=y, x=x: sell.multiply(made, x, y))
            assert reference.error(y.get()) < spmv.TOLERANCE["float64"]
        counts = np.bincount(np.minimum(lengths, GPU_LONG + 1), minlength=GPU_LONG + 2)
        longer = {str(long): int(counts[long + 1 :].sum()) for long in LONG}
        rows.append({"matrix": name, "family": family, "nrows": m.nrows, "nnz": m.nnz,
                     "longest": int(lengths.max(initial=0)), "longer": longer, "us": us})  # fmt: skip
        print(name, min(us, key=us.__getitem__), flush=True)
    return {"gpu": record.gpu(), "results": rows}


def is_skewed(row: Row) -> bool:
    return row["longest"] > layout.SKEWED * row["nnz"] / max(row["nrows"], 1)


def regret(row: Row, most: int) -> float:
    """Return the logarithm of a choice's time over the least, rows in CSR as `share` chooses."""
    long = next((long for long in LONG if row["longer"][str(long)] <= layout.LONG_BLOCKS), LONG[-1])
    timed = {key: us for key, us in row["us"].items() if int(key.split()[1]) in (long, LONG[-1])}
    fits = [key for key in timed if int(key.split()[1]) == long] or list(timed)
    nearest = min(fits, key=lambda key: abs(np.log2(int(key.split()[0]) / most)))
    return float(np.log(timed[nearest] / min(row["us"].values())))


def chosen(row: Row, even: tuple[float, ...], skewed: tuple[float, ...]) -> int:
    """Return the entries of a lane by bounds of nonzeros."""
    if is_skewed(row):
        return (4, 8, 16, 64)[sum(row["nnz"] >= bound for bound in skewed)]
    return (4, 8, 16, 32, 64)[sum(row["nnz"] >= bound for bound in even)]


def fitted(rows: list[Row]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the bounds of even and of skewed matrices with the least sum of logarithms of regrets."""

    def total(some: list[Row], even: tuple[float, ...], skewed: tuple[float, ...]) -> float:
        return sum(regret(row, chosen(row, even, skewed)) for row in some)

    grid = [bounds for bounds in itertools.product(*BOUNDS) if list(bounds) == sorted(bounds)]
    short = sorted({(a, b, d) for a, b, _, d in grid})
    evens, skews = ([row for row in rows if is_skewed(row) == kind] for kind in (False, True))
    return min(grid, key=lambda even: total(evens, even, short[0])), min(short, key=lambda s: total(skews, grid[0], s))


def judge(rows: list[Row]) -> list[Row]:
    """Print and return the regrets of the constants as they are, and of a fit without a family on that family."""
    even, skewed = (tuple(below for below, _ in rule) for rule in (layout.EVEN_ENTRIES, layout.SKEWED_ENTRIES))
    found = [_regrets("none", rows, (even, skewed))]
    for family in sorted({row["family"] for row in rows}):
        bounds = fitted([row for row in rows if row["family"] != family])
        found.append(_regrets(family, [row for row in rows if row["family"] == family], bounds))
    for one in found:
        print(
            "left out: {left_out:13} mean regret {mean:.3f}, worst {worst:.2f} ({matrix}), {count} matrices".format(
                **one
            )
        )
    return found


def _regrets(left_out: str, rows: list[Row], bounds: tuple[tuple[float, ...], tuple[float, ...]]) -> Row:
    out = [(regret(row, chosen(row, *bounds)), row["matrix"]) for row in rows]
    worst, name = max(out)
    mean = float(np.exp(np.mean([one for one, _ in out])))
    return {"left_out": left_out, "mean": mean, "worst": float(np.exp(worst)), "matrix": name, "count": len(out)}


def main() -> int:
    parser = record.parser("how lanes share rows in SELL on a GPU")
    parser.add_argument("--fit", type=Path, help="a record to fit the constants to, instead of measuring")
    parser.add_argument("--real", type=Path, help="a folder of .npz files, to measure on a GPU")
    parser.add_argument("--folder", type=Path, default=Path("suite"), help="keeps the generated matrices")
    args = parser.parse_args()
    found = (
        {"results": json.loads((args.fit or KEPT).read_text())["results"]}
        if args.fit or not args.real
        else measure(args)
    )
    found |= {"regrets": judge(found["results"])}
    record.write(found, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
