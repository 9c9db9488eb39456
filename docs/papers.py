"""Write docs/papers.md from the records in benchmarks/results: each table and figure of the five papers beside ours.

::

    python docs/papers.py           # write it
    python docs/papers.py --check   # exit with 1 if it is stale
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

from tables import ROOT, RecordMissingError, geometric_mean, have, million, record, source, table

PAGE = ROOT / "docs" / "papers.md"
INTRODUCTION = """# The papers' figures, and ours

`python docs/papers.py` writes this page from the records in [benchmarks/results](../benchmarks/results). Each table and
figure of the five papers that spdist implements has a row: what the paper reports, what is measured here, and a
verdict.

- *Reproduced*: the same is found on matrices of the same kind, within a tenth. *Beaten* says by how much, on hardware
  that is five to nine years younger: the ratio is of two machines as well as of two programs.
- *Not reached* and *not reproduced* say why. *Not comparable*: both are measured, but not the same thing. *Not measured*:
  it was not run. *Not possible here* names what is missing.
- *Illustration*: it shows no measurement. *Implemented*: it is a formula or a method, and the file that holds it.
- Our means of ratios are geometric, with the least beside them; averages of papers are arithmetic where they can be
  computed again from their tables.
- *Products* as a unit of time: one product of the prepared operator with a vector.
- Matrices are generated after the papers' by `benchmarks/suite.py` and `benchmarks/spmv_suite.py`, unless they are called
  real. Where both occur, generated ones are in italics.
"""
HEAD = "figure or table", "the paper", "here", "verdict"
Row = tuple[str, str, str, str]


def section(title: str, cited: str, rows: list[Row], *more: str) -> str:
    """Return the part of a paper: the table of its figures, and other tables below."""
    return "\n".join([f"## {title}\n", f"{cited}\n", table(HEAD, rows), *more])


def spread(values: list[float], form: str = ".2f") -> str:
    """Return the least and the greatest of some values."""
    return f"{min(values):{form}} to {max(values):{form}}"


def mean_and_least(ratios: list[float]) -> str:
    """Return the geometric mean of some ratios, and the least."""
    return f"{geometric_mean(ratios):.2f}, least {min(ratios):.2f}"


# -- Wu 2015 -----------------------------------------------------------------------------------------------------------


HYSPMM_EQUATIONS: list[Row] = [
    ("eq. 1", "said to bound the triples of a product", "`scheduler/planner/memory.py`, `upper_bound_nnz`: it bounds nnz(C) "
     "only, and loosely; plans estimate nnz(C) by samples instead", "implemented"),
    ("eq. 2", "the share of places that may be filled", "`scheduler/planner/memory.py`", "implemented"),
    ("eq. 3", "blocks of A, B and the triples fit 90 % of the memory",
     "`scheduler/planner/memory.py`, `kernels/hyspmm/workspace.py`", "implemented"),
    ("eq. 4", "the least number of even blocks", "`scheduler/planner/memory.py`", "implemented"),
    ("eq. 5", "the memory is divided by the blocks in flight",
     "`scheduler/planner/memory.py`, `kernels/streaming/workspace.py`", "implemented"),
]  # fmt: skip


LAYOUTS = {"hyspmm": "distinct", "hyspmm_duplicated": "duplicated"}
"""How hySpMM lays out the rows of B that a block needs, by method."""


def from_host_to_host(own: list[dict[str, Any]], thesis: list[dict[str, Any]]) -> str:
    """Return the table of milliseconds of CuPy, hySpMM by layout and the streamed product, with ratios over CuPy."""
    head = [cell for kind in LAYOUTS.values() for cell in (f"hySpMM, {kind}", "ratio")]
    lines = []
    for r, t in zip(own, thesis, strict=True):
        cupy = 1e3 * t["cupy_locked_s"]
        times = [*(r["methods"][name]["ms"] for name in LAYOUTS), 1e3 * t["locked_s"]]
        lines.append([r["matrix"], million(r["products"]), cupy, *(cell for ms in times for cell in (ms, cupy / ms))])
    return table(["matrix", "products", "CuPy", *head, "streamed", "ratio"], lines)


def hyspmm() -> str:
    """Return hySpMM's figures."""
    own, thesis = record("spgemm_hyspmm")["rows"], record("pipeline_thesis")["rows"]
    ratios = {
        kind: [1e3 * t["cupy_locked_s"] / r["methods"][name]["ms"] for r, t in zip(own, thesis, strict=True)]
        for name, kind in LAYOUTS.items()
    }
    mean = "; ".join(f"with {kind} rows of B {mean_and_least(found)}" for kind, found in ratios.items())
    rates = {r["matrix"]: 2e-6 * r["products"] / r["methods"]["hyspmm"]["ms"] for r in own}  # GFLOP/s
    slowest = min(rates, key=rates.__getitem__)
    locked = [r["cupy_locked_s"] / r["locked_s"] for r in thesis]
    hidden = {r["matrix"]: overlap(r) for r in record("pipeline")["rows"]}
    some = [r for r in thesis if r["hidden"] > 0]
    copied = {r["matrix"]: r["copies_s"] / (r["copies_s"] + r["kernels_s"]) for r in thesis}
    counted = record("papers_products")["hyspmm"]["rows"]
    hits = {
        method: [r["hit_ratio"] for r in counted if r["method"] == method] for method in ("hyspmm", "esc", "cusparse")
    }
    hit = ", ".join(f"{name} {100 * statistics.mean(found):.0f} %" for name, found in hits.items() if found)
    counted_of = ", ".join(dict.fromkeys(r["matrix"] for r in counted))
    best = max(geometric_mean(found) for found in ratios.values())
    rows: list[Row] = [
        ("fig. 1.1", "CUSP's ESC misses the second cache in 25 % of its reads (Titan, 1.5 MB)",
         f"our ESC misses in {100 * (1 - statistics.mean(hits['esc'])):.0f} % of lookups (H100, 50 MB), mean of {counted_of}",
         "not comparable: another ESC, and a cache 33 times as large"),
        ("1.1, 1.2, 3.3", "transfers take over half of CUSP's time, 86 % on cage12, and five times the other stages",
         f"copies as a share of copies and kernels, streamed: {spread([*copied.values()])}, cage12 {copied['cage12']:.2f}",
         f"reproduced, but for {', '.join(n for n, share in copied.items() if share < 0.5)}: small matrices, whose kernels take longer"),
        ("fig. 3.1", "the data structure of a block", "`kernels/hyspmm/preparation.py`, with duplicated and with distinct rows of B", "illustration"),
        ("fig. 3.2", "which of five stages uses which unit",
         "preparation and the copies on cores, the other three on the GPU: `spdist status` shows stages of a run",
         "illustration"),
        ("fig. 3.3", "9 % of the transfer is hidden by preparing, 11 % by multiplying",
         "share of the copies' time during which something else runs, at most all. Through a GPU that does not hold C, products "
         "repeated with B there: "
         + ", ".join(f"{name} {100 * share:.0f} %" for name, share in hidden.items())
         + f". The nine matrices, which fit: {hiding(some)}",
         f"beaten by {min(hidden.values()) / 0.2:.1f} or more where C does not fit, on other matrices; not reached on {len(thesis) - len(some) if some else 'any'} of the nine: a "
         "product takes milliseconds, and what is neither copy nor kernel takes longer than could be hidden"),
        ("table 4.1", "i7-2600K, GeForce Titan", "every record names its host", "illustration"),
        ("table 4.2", "nine matrices, 7 k to 10.6 M entries",
         "cca and orsirr_1 are real in `spgemm_real`; nine generated ones of the same sizes here", "illustration"),
        ("fig. 4.1", "0.1 to 1 GFLOP/s with both transfers", f"{spread([*rates.values()], '.2g')} GFLOP/s by our hySpMM",
         f"beaten by {max(rates.values()) / 1.0:.0f} at the top; at the bottom {rates[slowest]:.2g} ({slowest}): calls and copies of "
         "a matrix of kilobytes take a millisecond"),
        ("fig. 4.2", "1.6 times cuSPARSE (CUDA 7), 2.9 times CUSP 0.4, both transfers counted",
         f"our hySpMM over CuPy, which sends A once: {mean}. {over_cusp()}. Our streamed product over CuPy: {mean_and_least(locked)}",
         ("reproduced by hySpMM" if best >= 1.44 else "not reached by hySpMM, least where entries are used a few times: it sends "
          "rows of B beside A, and the bus is slower than either's kernels") + f"; the streamed product reaches {geometric_mean(locked):.2f}"),
        ("fig. 4.3", "hySpMM hits in 90 %, CUSP in 75 %", f"{hit} of lookups, mean of {counted_of}", verdict_of_hits(hits)),
        *HYSPMM_EQUATIONS,
    ]  # fmt: skip
    return section(
        "hySpMM",
        "X. Wu, *Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform*, thesis, Georgia\nState University, 2015.",
        rows,
        "Milliseconds from host to host. CuPy sends A once from page-locked memory, multiplies by cuSPARSE, and brings C to\n"
        "such memory; ratios are CuPy's time over ours. hySpMM sends A and B, with each *distinct* row of B that a block\n"
        "needs, or *duplicated* as in the thesis. *Streamed* is what `spdist.matmul` runs on page-locked arrays.\n",
        from_host_to_host(own, thesis),
        source("spgemm_hyspmm", "pipeline_thesis", "pipeline", "papers_products"),
    )


def over_cusp() -> str:
    """Return hySpMM's ratios over CUSP."""
    beside = [r for r in record("papers_products")["hyspmm"].get("beside_cusp", []) if "cusp_locked_s" in r]
    over = [r["cusp_locked_s"] / r["hyspmm_s"] for r in beside]
    return f"Over CUSP 0.6 on {len(over)} of the 9: {mean_and_least(over)}" if over else "CUSP was not run"


def hiding(rows: list[dict[str, Any]]) -> str:
    """Return the share of the copies that each of some products hides."""
    return ", ".join(f"{100 * r['hidden']:.0f} % on {r['matrix']}" for r in rows) or "none"


def overlap(row: dict[str, Any]) -> float:
    """Return the share of the time of a product's copies during which another stage ran, at most all of it."""
    stages = {name: seconds for name, seconds in row["stages"].items() if name != "blocks"}
    return float(min(1.0, (sum(stages.values()) - row["seconds"]) / (stages["upload"] + stages["download"])))


def verdict_of_hits(hits: dict[str, list[float]]) -> str:
    """Return whether hySpMM's reads hit more often than reads of the others."""
    if not hits["hyspmm"]:
        return "not measured: `ncu`, which runs each kernel many times, did not end on our hySpMM in a minute"
    best = max(statistics.mean(found) for name, found in hits.items() if found and name != "hyspmm")
    return "reproduced" if statistics.mean(hits["hyspmm"]) > best else "not reached: what is sent is read once"


# -- Polok, Ila, Smrz 2015 ---------------------------------------------------------------------------------------------


PAPER_COST, PAPER_RATE = 3.0, 0.3297
"""Polok's milliseconds per million operations, and mean GFLOP/s on SNAP's graphs."""


def polok() -> str:
    """Return the figures of ESC with perfect load balance and of the block-sparse product."""
    content = record("papers_products")
    rows, pairs = content["polok"]["rows"], content["polok"]["all_to_all"]
    published = content["published_s"]
    stages = stage_shares(rows)
    real = [r for r in rows if r["real"]]
    rates = [1e-9 * flop(r) / r["esc_s"] for r in rows]
    faster = [published[r["matrix"]][-1] / r["esc_s"] for r in real]
    over = {
        peer: (f"over {peer} {mean_and_least([r[key] / r['esc_s'] for r in rows])}, on the {len(real)} real ones "
               f"{geometric_mean(r[key] / r['esc_s'] for r in real):.2f}")
        for peer, key in (("cuSPARSE", "cusparse_s"), ("CUSP 0.6", "cusp_s"), ("SciPy's one thread", "scipy_s"))
        if all(key in r for r in rows)
    }  # fmt: skip
    blocks = [r for r in record("block_spgemm_gpu")["rows"] if r["matrix"] == "roadnet"]
    by_side = {
        side: max(r["gflops"] for r in blocks if r["side"] == side) for side in sorted({r["side"] for r in blocks})
    }
    out = outgrown()
    peers = ("SciPy", "scipy_s"), ("our ESC", "esc_s"), ("cuSPARSE", "cusparse_s")
    cost = {peer: least_squares(pairs, key) for peer, key in peers}
    middle = {peer: statistics.median(1e9 * p[key] / flop(p) for p in saturated(pairs)) for peer, key in peers}
    costs, middles = (", ".join(f"{peer} {value:.3f}" for peer, value in found.items()) for found in (cost, middle))
    crossover = max(flop(p) for p in pairs if p["esc_s"] > p["scipy_s"])
    table_of: list[Row] = [
        ("eq. 1", "the exact number of products", "`kernels/cpu/product_counts.py`, `scheduler/planner/memory.py`",
         "implemented"),
        ("fig. 1", "seconds by stage; sorting takes 34 %, where it took 63 % of an earlier ESC",
         "shares of our kernels' time, mean: " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in stages.items()),
         "not comparable: one kernel expands, sorts and compresses here"),
        ("fig. 2", "the data in each stage", "`kernels/esc/`", "illustration"),
        ("fig. 3", "up to 100 products for each entry of C",
         f"{spread([p['expansion'] for p in pairs])} in {len(pairs)} products of real matrices", "reproduced, and exceeded by another matrix"),
        ("fig. 4", "all-to-all products; least squares: 27.7 ms/MFLOP for CSparse, 4.2 for CUSP, 3.0 for the paper; below 10 kFLOP the CPU "
         "wins", f"{len(pairs)} products A A and A A' of real matrices of at most 100 MFLOP; least squares of those with 100,000 "
         f"products, which the largest decide: {costs}; medians: {middles}. SciPy wins below {crossover:,} FLOP at most",
         f"beaten by {PAPER_COST / cost['our ESC']:.0f} by least squares, {PAPER_COST / middle['our ESC']:.0f} in the median; the crossover "
         "is higher, as a launch costs what it did and cores are quicker"),
        ("table 1", "SNAP's graphs: 0.19 to 0.48 GFLOP/s, mean 0.33; 1.53 times CUSP, 13.19 times CSparse",
         f"{spread(rates, '.1f')} GFLOP/s, mean {statistics.mean(rates):.1f}; {'; '.join(over.values())}",
         f"beaten by {statistics.mean(rates) / PAPER_RATE:.0f} in the mean rate; on the {len(real)} real graphs, which are the paper's, "
         f"{spread(faster, '.0f')} times as fast as it was"),
        ("table 1, GTX 680", "the same on a GeForce, without cit-Patents, which did not fit", "one kind of GPU", "not measured"),
        ("table 1, as-Skitter", "did not fit the memory of GPU or host: 53.8 GFLOP", out[0], out[1]),
        ("abstract", "up to 3 times as fast on a GPU, 30 times a CPU", "the ratios of table 1", "see table 1"),
        ("fig. 5", "the first four graphs of table 1 in blocks of up to 8 x 8: rates rise to 1.26 GFLOP/s (email-Enron, 8 x 8)",
         "a generated roadNet, GFLOP/s: " + ", ".join(f"{side} x {side} {rate:,.0f}" for side, rate in by_side.items()),
         f"beaten by {by_side[8] / 1.26:,.0f} at 8 x 8, on another graph than the paper's best; rates rise with the block as in the paper"),
        ("conclusion", "slices of B where the expansion does not fit; blocks of varying sizes are left open",
         "every engine within a memory limit, and every product from Zarr to Zarr; VBR: [blocks](guide/blocks.md)", "implemented"),
    ]  # fmt: skip
    return section(
        "ESC with perfect load balance, and block-sparse products",
        "L. Polok, V. Ila, P. Smrz, *Fast Sparse Matrix Multiplication on GPU*, HPC 2015.",
        table_of,
        "Table 1 in ms; CSparse, CUSP and *paper* are published figures of a Tesla K40 and its host; ours are operands and C\n"
        "on the GPU, SciPy on one thread with sorted rows, one call where it takes half a second. Matrices in italics are generated: their products are fewer\n"
        "(the paper has 92 MFLOP for web-Google, 42 for amazon0312, 95 for cit-Patents), and few of them are added up.\n",
        table_1(rows, published),
        source("papers_products", "block_spgemm_gpu"),
    )


def table_1(rows: list[dict[str, Any]], published: dict[str, list[float]]) -> str:
    """Return table 1 in milliseconds: published figures, and ours."""
    lines = [
        [r["matrix"] if r["real"] else f"*{r['matrix']}*", million(flop(r)), f"{r['expansion']:.2f}",
         *(1e3 * s for s in published[r["matrix"]]), 1e3 * r["scipy_s"], 1e3 * r["cusp_s"] if "cusp_s" in r else "",
         1e3 * r["esc_s"], 1e3 * r["cusparse_s"],
         r["cusparse_s"] / r["esc_s"]]
        for r in rows
    ]  # fmt: skip
    head = [
        "matrix",
        "FLOP",
        "expansion",
        "CSparse",
        "CUSP",
        "paper",
        "SciPy",
        "CUSP 0.6",
        "our ESC",
        "cuSPARSE",
        "ratio",
    ]
    return table(head, lines)


def stage_shares(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean share of each stage in the time of ESC's kernels; kernels of long rows were called others once."""
    stages = [{name.replace("others", "long rows"): s for name, s in r["stages_s"].items()} for r in rows]
    names = dict.fromkeys(name for one in stages for name in one)
    return {name: statistics.mean(one.get(name, 0) / sum(one.values()) for one in stages) for name in names}


def flop(row: dict[str, Any]) -> int:
    """Return the multiplications and additions of a product, as the paper counts them."""
    return int(2 * row["products"] - row["nnz_c"])


def saturated(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the products that are large enough to count."""
    return [p for p in pairs if p["products"] >= 10**5]


def least_squares(pairs: list[dict[str, Any]], key: str) -> float:
    """Return the milliseconds per million operations of the products that are large enough to count."""
    large = [(1e-6 * flop(p), 1e3 * p[key]) for p in saturated(pairs)]
    return sum(x * y for x, y in large) / sum(x * x for x, _ in large)


def outgrown() -> tuple[str, str]:
    """Return what became of a graph of as-Skitter's class, from Zarr to Zarr."""
    if not have("large"):
        return "not recorded with this code yet", "not recorded"
    graph = record("large")["graph"]
    size = f"{1e-9 * graph['bytes_c']:.0f} GB"
    return f"*{graph['matrix']}*, C of {size}: {graph['wall_s']:.1f} s from Zarr to Zarr", "beaten: it is done"


# -- Chen --------------------------------------------------------------------------------------------------------------


def verdict(ours: float, theirs: float, why: str) -> str:
    """Return whether our ratio equals the ratio of a paper within a tenth, and if it is less, why."""
    if ours < 0.9 * theirs:
        return f"not reached: {why}"
    return "reproduced" if ours <= 1.1 * theirs else f"beaten by {ours / theirs:.2f}"


def ehyb() -> str:
    """Return EHYB's figures."""
    names = {"single": "spmv_float32", "double": "spmv"}
    both = {kind: [r for r in record(name)["results"] if "ehyb" in r["methods"]] for kind, name in names.items()}
    own = {kind: {r["matrix"]: r["methods"]["ehyb"] for r in rows} for kind, rows in both.items()}

    saved = {
        kind: [1 - r["methods"]["ehyb"]["bytes"] / csr_bytes(r, 4 if kind == "single" else 8) for r in rows]
        for kind, rows in both.items()
    }
    products = [f["prepared_products"] for f in own["double"].values()]
    solved = record("papers_ehyb")["ehyb"]["rows"]
    gains = [r["cusparse_inverse"]["seconds"] / r["spdist_inverse"]["seconds"] for r in solved]
    with_all = [
        r["cusparse_inverse"]["seconds"] / (r["spdist_inverse"]["seconds"] + r["spdist_prepared_s"]) for r in solved
    ]
    fewer = [r["spdist_plain"]["seconds"] / r["spdist_inverse"]["seconds"] for r in solved]
    auto = {kind: geometric_mean(r["methods"]["auto"]["over_cusparse"] for r in rows) for kind, rows in both.items()}
    rows: list[Row] = [
        ("fig. 1", "the format", "`kernels/spmv/ehyb.py`", "illustration"),
        ("eq. 1, 2", "the number of parts from the shared memory", "`kernels/spmv/ehyb.py`, `part_count`", "implemented"),
        ("section 3.4", "columns of 16 bits save 25 % of CSR's bytes in single and 13.3 % in double precision",
         f"single {in_percent(saved['single'])}, double {in_percent(saved['double'])} with padding and the rows left over",
         "not reached: padding of ELL's slices, and the part that is not cached, take some of it back"),
        ("fig. 2, table 1", "single precision, 94 matrices, V100: 1.52 over cuSPARSE ALG1, 1.9 over ALG2, least 1.21",
         said(both["single"]), judged(both["single"], 4, 1.518, 1.90)),
        ("fig. 4, table 2", "double precision: 1.45 over ALG1, 1.59 over ALG2, least 1.07", said(both["double"]),
         judged(both["double"], 8, 1.45, 1.59)),
        ("fig. 3, 5", "16 named matrices in single and in double precision", "the generated ones stand for their kinds",
         "not possible here: these matrices are not in the repository"),
        ("tables 1, 2, other peers", "single: yaSpMV 1.13, holaSpMV 1.30, CSR5 1.53, merge 1.52; double: holaSpMV 1.5, CSR5 1.38, "
         "merge 1.41", "published figures, at the left", "not measured: none of them is a package that is kept"),
        ("fig. 6", "partitioning takes 400 to 1,500 products (METIS, 16 threads), reordering 50 to 400",
         f"{in_parallel(solved)}with reordering, on other matrices, {spread(products, ',.0f')} with METIS; `operator` takes EHYB "
         "on request only", "not reached: a product is quicker, as an H100's memory moves 3.1 TB/s where a V100's moves 0.9 by its "
         "data sheet, and partitioning on cores is not"),
        ("section 6", "predicts that preparing pays in solvers with an approximate inverse; measures none",
         f"a factorised approximate inverse as two operators of `operator`'s choice, not EHYB: {spread(gains)} times as fast as with "
         f"cuSPARSE's CSR, {spread(with_all)} times in one solve with preparing counted; {spread(fewer)} times as fast as without inverse",
         "not comparable: the paper has no figure"),
        ("table 3", "94 matrices", "generated ones of four kinds; small real ones, not the paper's, in `spmv_real`", "illustration"),
    ]  # fmt: skip
    lines = [
        [r["matrix"], million(r["nnz"]), r["methods"]["ehyb"]["over_cusparse"],
         own["single"].get(r["matrix"], {}).get("over_cusparse", ""), r["methods"]["auto"]["over_cusparse"],
         r["methods"]["auto"]["method"], round(r["methods"]["ehyb"]["prepared_products"])]
        for r in both["double"]
    ]  # fmt: skip
    return section(
        "EHYB",
        "C. Chen, *Explicit caching HYB: a new high-performance SpMV framework on GPGPU*, arXiv 2204.06666.",
        rows,
        "Ratios to the best cuSPARSE format, both replayed in CUDA graphs. What `operator` chooses by itself is "
        f"{auto['double']:.2f} in double\nand {auto['single']:.2f} in single precision on these matrices, geometric mean.\n",
        table(["matrix", "nonzeros", "EHYB", "in single", "`operator`", "chosen", "products to prepare EHYB"], lines),
        source("spmv", "spmv_float32", "papers_ehyb"),
    )


def over(rows: list[dict[str, Any]], algorithm: str) -> list[float]:
    """Return the seconds of an algorithm of cuSPARSE, of its quickest version, over EHYB's."""
    return [1e-3 * microseconds(r, algorithm) / r["methods"]["ehyb"]["ms"] for r in rows]


def microseconds(row: dict[str, Any], algorithm: str) -> float:
    """Return the time of an algorithm of cuSPARSE, by its quickest version."""
    return float(min(us for name, us in row["cusparse_us"].items() if name.endswith(algorithm)))


def said(rows: list[dict[str, Any]]) -> str:
    """Return how EHYB compares with cuSPARSE's two CSR algorithms, and with its best format."""
    ratios = {r["matrix"]: r["methods"]["ehyb"]["over_cusparse"] for r in rows}
    worst = min(ratios, key=ratios.__getitem__)
    return (
        f"{len(ratios)} generated matrices: over ALG1 {mean_and_least(over(rows, 'csr_alg1'))}; over ALG2 "
        f"{mean_and_least(over(rows, 'csr_alg2'))}. Over the best format of cuSPARSE, often its sliced ELL, which the paper did not "
        f"have: {geometric_mean(ratios.values()):.2f}, least {ratios[worst]:.2f} ({worst})"
    )


def judged(rows: list[dict[str, Any]], item: int, first: float, second: float) -> str:
    """Return whether EHYB gains on ALG1 and ALG2 what the paper says; `item`: bytes of a value."""
    reached = [csr_bytes(r, item) / (1e3 * microseconds(r, "csr_alg1")) / r["stream_gb_s"] for r in rows]
    why = (
        f"cuSPARSE's CSR moves its bytes at {statistics.median(reached):.2f} of STREAM's rate in the median, so that little is left but the "
        "bytes that EHYB saves"
    )
    one, two = (geometric_mean(over(rows, name)) for name in ("csr_alg1", "csr_alg2"))
    return f"ALG1: {verdict(one, first, why)}; ALG2: {verdict(two, second, 'the same')}"


def csr_bytes(row: dict[str, Any], item: int) -> int:
    """Return the bytes that a product of CSR moves at least: entries with columns of 4 bytes, offsets, x and y once."""
    return int(row["nnz"] * (4 + item) + row["nrows"] * (4 + 2 * item))


def in_percent(shares: list[float]) -> str:
    """Return the least and the greatest of some shares."""
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %"


def in_parallel(rows: list[dict[str, Any]]) -> str:
    """Return what partitioning takes with one thread, and with a partitioner that has more, if it was measured."""
    cuts = [row["partition"] for row in rows if "partition" in row]
    if not cuts:
        return ""
    counts = {name: [cut[name]["partition_s"] / cut[name]["product_s"] for cut in cuts] for name in cuts[0]}
    return (
        f"partitioning alone: METIS on one thread {spread(counts['METIS'], ',.0f')} products, KaMinPar on "
        f"{cuts[0]['KaMinPar']['threads']} threads {spread(counts['KaMinPar'], ',.0f')}; "
    )


# -- Kreutzer, Hager, Wellein ------------------------------------------------------------------------------------------


def kreutzer() -> str:
    """Return the figures of SELL-C-sigma's poster."""
    found = record("papers_vectors")["kreutzer"]
    host = {r["matrix"]: min(r["sell_s"], r["auto_s"], r["scipy_s"]) / r["sell_s"] for r in found["rows"]}
    gpu, over_csr, over_best = sell_on_gpu()
    shared = [name for name in host if name in gpu]
    worst = min(shared, key=lambda name: min(host[name], gpu[name]))
    traffic, energy = found.get("traffic", []), found.get("energy", [])
    saved, quicker = (ratios_of(energy, key) for key in ("joules", "seconds"))
    balance = {r["matrix"]: r["bytes_per_flop_best"] for r in found["rows"]}
    fewer = {t["matrix"]: balance[t["matrix"]] / t["bytes_per_flop"] for t in traffic}
    alphas = {t["matrix"]: t["alpha"] / t["alpha_best"] for t in traffic}
    irregular = max(alphas, key=alphas.__getitem__)
    scaled = scaling()
    rows: list[Row] = [
        ("SIMD widths", "C after the widest unit: 4 on Sandy Bridge, 8 on Xeon Phi, 32 on Kepler",
         "C = 32 on GPUs", "implemented"),
        ("construction", "chunks of C rows, sorted in windows of sigma", "`kernels/spmv/sell/`", "implemented"),
        ("beta, worst and best", "1 / C, where a chunk has one long row; 1, where its rows are equally long",
         "long rows are stored apart, as they would fill their chunks with zeros", "implemented"),
        ("chunk occupancy beta", "near 1 after sorting",
         f"{spread([r['beta'] for r in found['rows']])} with sigma 1,024",
         "reproduced where rows are alike; graphs of power laws need more than sorting, and long rows are stored apart"),
        ("code balance", "(12 / beta + 8 alpha + 16 / entries per row) / 2 bytes/FLOP in double precision",
         f"counted on the GPU: {spread([t['bytes_per_flop'] for t in traffic])} bytes/FLOP; the formula over what is counted: "
         + ", ".join(f"{name} {ratio:.2f}" for name, ratio in fewer.items()),
         f"beaten by {min(fewer.values()):.2f} to {max(fewer.values()):.1f}: columns take 2 bytes where they can, y is written and not "
         "read, and long rows leave their chunks, which the formula pads"),
        ("alpha", "1 / nnz per row if x is cached perfectly",
         f"counted over perfect: {spread([*alphas.values()])} ({irregular}); counted over predicted bytes: "
         f"{spread([t['over_predicted'] for t in traffic])}",
         f"reproduced on {sum(ratio <= 1.1 for ratio in alphas.values())} of {len(alphas)}; x of {irregular} is not read in order"),
        ("18 matrices, relative to the best", "seldom far behind the best format on three architectures",
         f"SELL relative to the best format measured, {len(shared)} matrices: cores ({COMPARED}) "
         f"{geometric_mean(host[n] for n in shared):.2f}, GPU {geometric_mean(gpu[n] for n in shared):.2f} in the geometric "
         f"mean; least {min(host[worst], gpu[worst]):.2f} ({worst})", "reproduced with our SELL, which has columns of 2 bytes "
         "and long rows apart"),
        ("18 matrices, relative to each device's format", "as fast or faster than CRS on CPUs, ELLPACK on GPUs",
         f"GPU: over cuSPARSE's CSR {mean_and_least([*over_csr.values()])}, over its best format, often sliced ELL, "
         f"{mean_and_least([*over_best.values()])}; cores: SciPy's CRS has one thread",
         "reproduced on the GPU, where ELLPACK itself is in no library any more; not comparable on cores"),
        ("Xeon Phi", "far superior to CRS", "no such processor", "not possible here"),
        ("scaling in a socket", "saturates the memory with fewer cores than CRS", *scaled),
        ("energy", "less than CRS on cores, as fewer of them saturate the memory",
         f"no counter of the host's is readable. On a GPU, by NVML, SELL takes {spread(saved)} of the energy of cuSPARSE's CSR, and "
         f"{spread(quicker)} of its time" if saved else "no counter is readable",
         "not possible here; what it saves on a GPU, it saves by taking less time"),
        ("SMT", "improves energy efficiency", "a guest does not say which of its cores share one", "not possible here"),
        ("sigma", "predicted, not too large", "chosen by `kernels/spmv/sell/layout.py` from the cost of padding and of x",
         "implemented"),
        ("outlook: SELL-C-T-sigma", "T threads in a row for long rows", "lanes share long rows: `kernels/spmv/sell/`",
         "implemented"),
        ("outlook: heterogeneous", "chunks shared by host and accelerator", "`operator(a, \"hybrid\")`", "implemented"),
    ]  # fmt: skip
    occupancy = {r["matrix"]: r["beta"] for r in found["rows"]}
    counted = {t["matrix"]: t for t in traffic}
    lines = [
        [name, f"{occupancy[name]:.3f}", f"{host[name]:.2f}", f"{gpu[name]:.2f}",
         *((f"{counted[name]['alpha']:.3f}", f"{counted[name]['alpha_best']:.3f}", counted[name]["bytes_per_flop"])
           if name in counted else ("", "", ""))]
        for name in shared
    ]  # fmt: skip
    return section(
        "SELL-C-sigma",
        "M. Kreutzer, G. Hager, G. Wellein, *A Unified Sparse Matrix Storage Format for Heterogeneous Systems*, poster.",
        rows,
        "SELL-32-sigma relative to the best format measured on the same device (1 is the best), and what `ncu` counted.\n",
        table(["matrix", "beta", "cores", "GPU", "alpha", "perfect", "bytes/FLOP"], lines),
        source("papers_vectors", "spmv", "spmv_other"),
    )


def sell_on_gpu() -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return by matrix the best time over SELL's: of all formats, of cuSPARSE's CSR, of cuSPARSE's formats."""
    gpu: dict[str, float] = {}
    over_csr: dict[str, float] = {}
    over_best: dict[str, float] = {}
    for name in ("spmv", "spmv_other"):
        for r in record(name)["results"]:
            best = min(*r["cusparse_us"].values(), *(1e3 * f["ms"] for f in r["methods"].values()))
            ours, theirs = 1e3 * r["methods"]["sell"]["ms"], r["cusparse_us"]
            gpu[r["matrix"]], over_best[r["matrix"]] = best / ours, min(theirs.values()) / ours
            over_csr[r["matrix"]] = min(us for name, us in theirs.items() if "csr" in name) / ours
    return gpu, over_csr, over_best


COMPARED = "`operator`, SciPy's one thread"


def ratios_of(rows: list[dict[str, Any]], key: str) -> list[float]:
    """Return what SELL takes, in energy or seconds, over what the CSR of cuSPARSE takes, by matrix."""
    spent = {(r["matrix"], r["method"]): r[key] for r in rows}
    return [
        value / spent[name, "cusparse"]
        for (name, method), value in spent.items()
        if method == "sell" and (name, "cusparse") in spent
    ]


def scaling() -> tuple[str, str]:
    """Return how products with vectors scale over the cores of a host."""
    missing = "not recorded with this code yet", "not measured"
    if not have("cores_16"):
        return missing
    content = record("cores_16")
    row = next((r for r in content["rows"] if r["kind"] == "operator"), None)
    if row is None:
        return missing
    gained = ", ".join(f"{n}: {gain:.1f}" for n, gain in row["speed_up"].items())
    triad = content.get("triad_bytes_s", {})
    shares = {n: rate / triad[n] for n, rate in row["bytes_s"].items() if n in triad}
    of_memory = ", ".join(f"{n}: {share:.0%}" for n, share in shares.items())
    return (
        f"{row['work']}, SELL, speed-up by threads {gained}"
        + (f"; of STREAM's triad {of_memory}" if of_memory else ""),
        "not comparable: no CRS product with threads is at hand",
    )


# -- Villa -------------------------------------------------------------------------------------------------------------


def villa() -> str:
    """Return the figures of CSR-scalar and CSR-vector."""
    rows = record("papers_vectors")["villa"]["rows"]
    long, short = rows

    def across(row: dict[str, Any], kind: str) -> float:
        times = [found[kind] for found in row["by_threads_s"].values()]
        return max(times) / min(times)

    def over_cpu(row: dict[str, Any], kind: str) -> float:
        return float(row["cpu_s"] / row[f"{kind}_s"])

    figures: list[Row] = [
        ("memory of CSR", "less than dense if nnz < (n (m - 1) - 1) / 2, all items being equally large",
         "with values of 8 bytes and columns of 4, if nnz < (2 n m - n - 1) / 3: `matrices/csr.py`, `nbytes`", "illustration"),
        ("block sizes", "a thread a row, 256 to 1024 threads: within 5 %",
         f"most over least time, CSR-scalar: short rows {across(short, 'scalar'):.2f}, rows of 2,000 entries {across(long, 'scalar'):.2f}; "
         f"CSR-vector: {across(short, 'vector'):.2f} and {across(long, 'vector'):.2f}",
         ("reproduced" if across(short, "scalar") < 1.06 else "not reproduced") + " on short rows, which are the paper's; not on long "
         "ones"),
        ("two kernels", "CSR-vector is up to 3 times as fast (kmer_V4a, two entries a row)",
         f"two entries a row: {over_cpu(short, 'vector') / over_cpu(short, 'scalar'):.2f} times as fast; 2,000 entries a row: "
         f"{over_cpu(long, 'vector') / over_cpu(long, 'scalar'):.2f} times",
         "not reproduced on the paper's kind of matrix, where 30 of a warp's 32 lanes have no entry; reproduced on long rows"),
        ("one CPU thread", "CSR-vector is up to 250 times as fast as one thread (Colab)",
         f"over SciPy's product on one thread: CSR-vector {over_cpu(short, 'vector'):.0f} with two entries a row, {over_cpu(long, 'vector'):.0f} with "
         f"2,000; CSR-scalar {over_cpu(short, 'scalar'):.0f} and {over_cpu(long, 'scalar'):.0f}",
         "reproduced by the kernel that suits the rows" if min(max(over_cpu(r, k) for k in ("scalar", "vector")) for r in rows) > 225
         else "not reached: today's cores are nearer to GPUs"),
    ]  # fmt: skip
    lines = [
        [r["matrix"], million(r["nnz"]), 1e3 * r["cpu_s"], *(1e3 * r["by_threads_s"][n][kind] for kind in ("scalar", "vector")
         for n in r["by_threads_s"])]
        for r in rows
    ]  # fmt: skip
    head = [f"{kind} {n}" for kind in ("scalar", "vector") for n in long["by_threads_s"]]
    return section(
        "CSR-scalar and CSR-vector",
        "F. Villa, *Efficient Sparse Matrix-Vector Multiplication on CUDA*, Politecnico di Milano.",
        figures,
        "Milliseconds of a product by threads in a block; spdist's kernels have 256. Ours are in double precision, the\n"
        "paper's in single. `kmer_V4a` is generated, two entries a row.\n",
        table(["matrix", "nonzeros", "one CPU thread", *head], lines),
        source("papers_vectors"),
    )


SECTIONS: list[Callable[[], str]] = [hyspmm, polok, ehyb, kreutzer, villa]


def part(write: Callable[[], str]) -> str:
    """Return the part of a paper, or that a record of it is missing."""
    try:
        return write()
    except RecordMissingError as missing:
        return f"## {write.__name__}\n\nNot recorded with this code: {missing}.\n"


def page() -> str:
    """Return docs/papers.md."""
    return "\n".join([INTRODUCTION, *map(part, SECTIONS)])


def main() -> int:
    """Write the page, or say that it is stale."""
    wanted = page()
    if PAGE.exists() and PAGE.read_text() == wanted:
        return 0
    if "--check" in sys.argv[1:]:
        print("docs/papers.md is stale: run python docs/papers.py", file=sys.stderr)
        return 1
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
