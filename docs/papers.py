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

- *Reproduced*: the same is found on matrices of the same kind. *Beaten* says by how much, on hardware that is eight to
  ten years younger: the ratio is of two machines as well as of two programs. Ratios are geometric means, with the least beside them.
- *Not reached* says why. *Not possible here* names what is missing: a program that no longer builds, a counter that the
  host hides. *Illustration*: it shows no measurement.
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


def hyspmm() -> str:
    """Return hySpMM's figures."""
    own = record("spgemm_hyspmm")
    ratios = {r["matrix"]: r["methods"]["hyspmm"]["over_cupy"] for r in own["rows"]}
    rates = [2e-6 * r["products"] / r["methods"]["hyspmm"]["ms"] for r in own["rows"]]  # GFLOP/s
    thesis = record("pipeline_thesis")["rows"]
    locked = [r["cupy_locked_s"] / r["locked_s"] for r in thesis]
    streams = record("pipeline")["rows"]
    hidden = {r["matrix"]: overlap(r) for r in streams}
    counted = record("papers_products")["hyspmm"]["rows"]
    hits = {
        method: [r["hit_ratio"] for r in counted if r["method"] == method] for method in ("hyspmm", "esc", "cusparse")
    }
    hit = ", ".join(f"{name} {100 * statistics.mean(found):.0f} %" for name, found in hits.items() if found)
    no_own = "" if hits["hyspmm"] else "; `ncu` does not end on hySpMM's own product in the time it is given"
    misses = f"{100 * (1 - statistics.mean(hits['esc'])):.0f} %" if hits["esc"] else "not counted"
    beside = [r for r in record("papers_products")["hyspmm"].get("beside_cusp", []) if "cusp_locked_s" in r]
    over = [r["cusp_locked_s"] / r["hyspmm_s"] for r in beside]
    over_cusp = f"; over CUSP 0.6 {mean_and_least(over)}" if over else "; CUSP was not run"
    mean = mean_and_least([*ratios.values()])
    rows: list[Row] = [
        ("fig. 1.1", "CUSP's ESC misses the second cache in 25 % of its reads (Titan, 1.5 MB)",
         f"our ESC misses in {misses} (H100, 50 MB)", "reproduced on another ESC"),
        ("fig. 3.1", "the data structure of a block", "`kernels/hyspmm/preparation.py`, with duplicated and with distinct rows of B", "illustration"),
        ("fig. 3.2", "which of five stages uses which unit",
         "preparation and the copies on cores, the other three on the GPU: `spdist status` shows stages of a run",
         "illustration"),
        ("fig. 3.3", "9 % of the transfer is hidden by preparing, 11 % by multiplying",
         "through a GPU that does not hold C, of all stages' time hidden by others: "
         + ", ".join(f"{name} {100 * share:.0f} %" for name, share in hidden.items())
         + f"; of the nine matrices, which fit, {sum(r['hidden'] > 0 for r in thesis)} hide any of their copies, "
         f"{100 * max(r['hidden'] for r in thesis):.0f} % at most",
         "beaten where the GPU does not hold C; not reached where it does"),
        ("table 4.1", "i7-2600K, GeForce Titan", "every record names its host", "illustration"),
        ("table 4.2", "nine matrices, 7 k to 10.6 M entries",
         "cca and orsirr_1 are real in `spgemm_real`; nine generated ones of the same sizes here", "reproduced"),
        ("fig. 4.1", "0.1 to 1 GFLOP/s with both transfers", f"{spread(rates, '.3f')} GFLOP/s by the thesis' method",
         f"beaten by {statistics.median(rates) / 0.5:.0f} in the median"),
        ("fig. 4.2", "1.6 times cuSPARSE, 2.9 times CUSP, both transfers counted",
         f"the thesis' method over CuPy between page-locked transfers: {mean}{over_cusp}. By the streamed product instead: "
         f"{mean_and_least(locked)}",
         "not reached by the thesis' method against today's cuSPARSE; the streamed product reaches 1.6"
         if geometric_mean(locked) >= 1.6 else "not reached"),
        ("fig. 4.3", "hySpMM hits in 90 %, CUSP in 75 %", f"{hit}{no_own}", verdict_of_hits(hits)),
        ("eq. 1", "a bound of nnz(C)", "`scheduler/planner/memory.py`, `upper_bound_nnz`; plans estimate nnz(C) by samples "
         "instead, as the bound is loose and does not bound the triples", "implemented"),
        ("eq. 2", "the share of places that may be filled", "`scheduler/planner/memory.py`", "implemented"),
        ("eq. 3", "blocks of A, B and the triples fit 90 % of the memory",
         "`scheduler/planner/memory.py`, `kernels/hyspmm/workspace.py`", "implemented"),
        ("eq. 4", "the least number of even blocks", "`scheduler/planner/memory.py`", "implemented"),
        ("eq. 5", "the memory is divided by the blocks in flight",
         "`scheduler/planner/memory.py`, `kernels/streaming/workspace.py`", "implemented"),
    ]  # fmt: skip
    lines = [
        [r["matrix"], million(r["products"]), r["methods"]["hyspmm"]["ms"], r["cupy"]["ms"], ratios[r["matrix"]],
         1e3 * t["locked_s"], t["cupy_locked_s"] / t["locked_s"]]
        for r, t in zip(own["rows"], thesis, strict=True)
    ]  # fmt: skip
    return section(
        "hySpMM",
        "X. Wu, *Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform*, thesis, Georgia\nState University, 2015.",
        rows,
        "Milliseconds from host to host, operands and C page-locked; CuPy sends and multiplies as cuSPARSE does. *Streamed*\n"
        "is what `spdist.matmul` runs.\n",
        table(["matrix", "products", "hySpMM", "CuPy", "ratio", "streamed", "ratio"], lines),
        source("spgemm_hyspmm", "pipeline_thesis", "pipeline", "papers_products"),
    )


def overlap(row: dict[str, Any]) -> float:
    """Return the share of the time of a product's stages that ran while another stage did."""
    stages = sum(seconds for name, seconds in row["stages"].items() if name != "blocks")
    return 1 - row["seconds"] / stages


def verdict_of_hits(hits: dict[str, list[float]]) -> str:
    """Return whether hySpMM's reads hit more often than reads of the others."""
    if not hits["hyspmm"]:
        return "not reached: not counted"
    best = max(statistics.mean(found) for name, found in hits.items() if found and name != "hyspmm")
    return "reproduced" if statistics.mean(hits["hyspmm"]) > best else "not reached: what is sent is read once"


# -- Polok, Ila, Smrz 2015 ---------------------------------------------------------------------------------------------


def polok() -> str:
    """Return the figures of ESC with perfect load balance and of the block-sparse product."""
    content = record("papers_products")
    rows, pairs = content["polok"]["rows"], content["polok"]["all_to_all"]
    stages = stage_shares(rows)
    rate = statistics.mean(1e-9 * flop(r) / r["esc_s"] for r in rows)
    over_cusparse = [r["cusparse_s"] / r["esc_s"] for r in rows]
    over_scipy = [r["scipy_s"] / r["esc_s"] for r in rows]
    over_cusp = [r["cusp_s"] / r["esc_s"] for r in rows if "cusp_s" in r]
    cusp = f"; over CUSP 0.6 {mean_and_least(over_cusp)}" if over_cusp else ""
    blocks = record("block_spgemm_gpu")["rows"]
    best = max(blocks, key=lambda r: r.get("gflops", 0))
    eight = [r["gflops"] for r in blocks if r["side"] == 8]
    out = outgrown()
    cost = {peer: least_squares(pairs, key) for peer, key in
            (("SciPy", "scipy_s"), ("our ESC", "esc_s"), ("cuSPARSE", "cusparse_s"))}  # fmt: skip
    costs = ", ".join(f"{peer} {value:.3f}" for peer, value in cost.items())
    crossover = max(flop(p) for p in pairs if p["esc_s"] > p["scipy_s"])
    table_of: list[Row] = [
        ("fig. 1", "seconds by stage; sorting leads",
         "shares of our kernels' time, mean: " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in stages.items()),
         "reproduced: one kernel expands, sorts and reduces here, and takes most"),
        ("fig. 2", "the data in each stage", "`kernels/esc/`", "illustration"),
        ("fig. 3", "up to 100 products for each entry of C",
         f"{spread([p['expansion'] for p in pairs])} in {len(pairs)} products of real matrices", "reproduced"),
        ("fig. 4", "all-to-all products; 27.7 ms/MFLOP for CSparse, 4.2 for CUSP, 3.0 for the paper; below 10 kFLOP the CPU "
         "wins", f"{len(pairs)} products A A and A A' of real matrices, ms/MFLOP: {costs}; SciPy wins below "
         f"{crossover:,} FLOP at most", f"beaten by {3.0 / cost['our ESC']:.0f}; the crossover is "
         "higher, as launches cost what they did and cores are quicker"),
        ("table 1", "SNAP graphs: 0.19 to 0.48 GFLOP/s, mean 0.33; 1.53 times CUSP, 13.19 times CSparse",
         f"mean {rate:.1f} GFLOP/s; over cuSPARSE {mean_and_least(over_cusparse)}; over SciPy's one thread {geometric_mean(over_scipy):.0f}{cusp}", f"beaten by {rate / 0.3297:.0f}"),
        ("table 1, as-Skitter", "did not fit the memory of GPU or host: 53.8 GFLOP", out[0], out[1]),
        ("fig. 5", "blocks 1 x 1 to 8 x 8: rates rise to 1.26 GFLOP/s (email-Enron, 8 x 8)",
         f"8 x 8: {spread(eight, ',.0f')} GFLOP/s; best {best['gflops']:,.0f} ({best['matrix']}, {best['side']} x {best['side']})",
         f"beaten by {max(eight) / 1.26:,.0f}; rates rise with the block as in the paper"),
        ("conclusion", "split the product by bands where the expansion does not fit", "`expansion` within a memory limit: "
         "every engine, and every product from Zarr to Zarr", "implemented"),
    ]  # fmt: skip
    return section(
        "ESC with perfect load balance, and block-sparse products",
        "L. Polok, V. Ila, P. Smrz, *Fast Sparse Matrix Multiplication on GPU*, HPC 2015.",
        table_of,
        "Table 1 in ms; CSparse, CUSP and *paper* are published figures of a Tesla K40 and its host; ours are operands and C\n"
        "on the GPU, SciPy on one thread with sorted rows. Matrices in italics are generated.\n",
        table_1(rows, content["published_s"]),
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


def least_squares(rows: list[dict[str, Any]], key: str) -> float:
    """Return the milliseconds per million operations of the products that are large enough to count."""
    large = [(1e-6 * flop(r), 1e3 * r[key]) for r in rows if r["products"] >= 10**5]
    return sum(x * y for x, y in large) / sum(x * x for x, _ in large)


def outgrown() -> tuple[str, str]:
    """Return what became of a graph of as-Skitter's class, from Zarr to Zarr."""
    if not have("large"):
        return "not recorded with this code yet", "not recorded"
    graph = record("large")["graph"]
    size = f"{1e-9 * graph['bytes_c']:.0f} GB"
    return f"*{graph['matrix']}*, C of {size}: {graph['wall_s']:.1f} s from Zarr to Zarr", "beaten: it is done"


# -- Chen --------------------------------------------------------------------------------------------------------------


def ehyb() -> str:
    """Return EHYB's figures."""
    both = {name: record(name)["results"] for name in ("spmv_float32", "spmv")}
    own = {
        name: {r["matrix"]: r["methods"]["ehyb"] for r in rows if "ehyb" in r["methods"]} for name, rows in both.items()
    }

    def said(name: str) -> str:
        ratios = {matrix: f["over_cusparse"] for matrix, f in own[name].items()}
        fem = record(name)["summary"]["ehyb"]["finite_elements"]
        faster = sum(ratio > 1 for ratio in ratios.values())
        worst = min(ratios, key=ratios.__getitem__)
        return (
            f"over the best cuSPARSE format {geometric_mean(ratios.values()):.2f}, finite elements {fem:.2f}, least "
            f"{ratios[worst]:.2f} ({worst}); faster on {faster} of {len(ratios)}"
        )

    products = [f["prepared_products"] for f in own["spmv"].values()]
    solved = record("papers_ehyb")["ehyb"]["rows"]
    gains = [r["cusparse_inverse"]["seconds"] / r["spdist_inverse"]["seconds"] for r in solved]
    fewer = [r["spdist_plain"]["seconds"] / r["spdist_inverse"]["seconds"] for r in solved]
    why = "an H100's second cache of 50 MB holds x, which is what EHYB caches"
    auto = {name: record(name)["summary"]["auto"]["geometric_mean"] for name in both}
    rows: list[Row] = [
        ("fig. 1", "the format", "`kernels/spmv/ehyb.py`", "illustration"),
        ("eq. 1, 2", "the number of parts from the shared memory", "`kernels/spmv/ehyb.py`, `part_count`", "implemented"),
        ("fig. 2, table 1", "single precision, 94 matrices, V100: 1.52 over cuSPARSE ALG1, 1.9 over ALG2, least 1.21",
         f"{len(own['spmv_float32'])} generated matrices: {said('spmv_float32')}", f"not reached: {why}"),
        ("fig. 3", "16 common matrices, single precision", "among the above", "not reached"),
        ("fig. 4, table 2", "double precision: 1.45 over ALG1, 1.59 over ALG2, least 1.07",
         f"{len(own['spmv'])} generated matrices: {said('spmv')}", f"not reached: {why}"),
        ("fig. 5", "16 common matrices, double precision", "among the above", "not reached"),
        ("tables 1, 2, other peers", "holaSpMV, yaSpMV, CSR5, merge", "not run; published figures stand at the left",
         "not measured"),
        ("fig. 6", "preparing takes 500 to 2,000 products, METIS on 16 threads",
         f"{spread(products, ',.0f')} products with METIS on one thread{in_parallel(solved)}; `operator` takes EHYB on "
         "request only", "not reached: pymetis has one thread, and products are faster"),
        ("section 6", "CG with an approximate inverse gains what its products gain",
         f"factorised approximate inverse as two operators: {spread(gains)} times as fast with spdist's operators as with "
         f"cuSPARSE's CSR, {spread(fewer)} times as fast as without it", "reproduced"),
        ("table 3", "94 matrices", "generated ones of four kinds, and real ones in `spmv_real`", "illustration"),
    ]  # fmt: skip
    lines = [
        [r["matrix"], million(r["nnz"]), r["methods"]["ehyb"]["over_cusparse"],
         own["spmv_float32"].get(r["matrix"], {}).get("over_cusparse", ""), r["methods"]["auto"]["over_cusparse"],
         r["methods"]["auto"]["method"], round(r["methods"]["ehyb"]["prepared_products"])]
        for r in both["spmv"] if "ehyb" in r["methods"]
    ]  # fmt: skip
    return section(
        "EHYB",
        "C. Chen, *Explicit caching HYB: a new high-performance SpMV framework on GPGPU*, arXiv 2204.06666.",
        rows,
        "Ratios to the best cuSPARSE format, both replayed in CUDA graphs. What `operator` chooses by itself is "
        f"{auto['spmv']:.2f} in double\nand {auto['spmv_float32']:.2f} in single precision, geometric mean.\n",
        table(["matrix", "nonzeros", "EHYB", "in single", "`operator`", "chosen", "products to prepare EHYB"], lines),
        source("spmv", "spmv_float32", "papers_ehyb"),
    )


def in_parallel(rows: list[dict[str, Any]]) -> str:
    """Return what a partitioner with threads gains, if it was measured."""
    cuts = [row["partition"] for row in rows if "partition" in row]
    if not cuts:
        return ""
    gains = [cut["METIS"]["partition_s"] / cut["KaMinPar"]["partition_s"] for cut in cuts]
    counts = [cut["KaMinPar"]["partition_s"] / cut["KaMinPar"]["product_s"] for cut in cuts]
    slower = [cut["KaMinPar"]["product_s"] / cut["METIS"]["product_s"] for cut in cuts]
    return (
        f"; KaMinPar on {cuts[0]['KaMinPar']['threads']} threads cuts {spread(gains, '.0f')} times as fast, in "
        f"{spread(counts, ',.0f')} products, whose parts make products of {spread(slower)} times the time"
    )


# -- Kreutzer, Hager, Wellein ------------------------------------------------------------------------------------------


def kreutzer() -> str:
    """Return the figures of SELL-C-sigma's poster."""
    found = record("papers_vectors")["kreutzer"]
    host = {r["matrix"]: min(r["sell_s"], r["auto_s"], r["scipy_s"]) / r["sell_s"] for r in found["rows"]}
    gpu = {}
    for name in ("spmv", "spmv_other"):
        for r in record(name)["results"]:
            best = min(*r["cusparse_us"].values(), *(1e3 * f["ms"] for f in r["methods"].values()))
            gpu[r["matrix"]] = best / (1e3 * r["methods"]["sell"]["ms"])
    shared = [name for name in host if name in gpu]
    worst = min(shared, key=lambda name: min(host[name], gpu[name]))
    traffic, energy = found.get("traffic", []), found.get("energy", [])
    saved = energy_ratios(energy)
    scaled = scaling()
    rows: list[Row] = [
        ("SIMD widths", "C after the widest unit: 4 on Sandy Bridge, 8 on Xeon Phi, 32 on Kepler",
         "C = 32 on GPUs", "reproduced"),
        ("construction", "chunks of C rows, sorted in windows of sigma", "`kernels/spmv/sell/`", "implemented"),
        ("chunk occupancy beta", "near 1 after sorting",
         f"{spread([r['beta'] for r in found['rows']])} with sigma 1,024",
         "reproduced where rows are alike; graphs of power laws need more than sorting, and long rows are stored apart"),
        ("code balance", "6 bytes/FLOP and more in double precision", "counted on the GPU: "
         f"{spread([t['bytes_per_flop'] for t in traffic])} bytes/FLOP, as columns take 2 bytes where they can",
         "beaten"),
        ("alpha", "1 / nnz per row if x is cached perfectly",
         f"counted over perfect: {spread([t['alpha'] / t['alpha_best'] for t in traffic])}; counted over predicted bytes: "
         f"{spread([t['over_predicted'] for t in traffic])}", "reproduced"),
        ("18 matrices, relative to the best", "seldom far behind the best format on three architectures",
         f"SELL relative to the best format measured, {len(shared)} matrices: cores (`operator`, SciPy) "
         f"{geometric_mean(host[n] for n in shared):.2f}, GPU {geometric_mean(gpu[n] for n in shared):.2f} in the geometric "
         f"mean; least {min(host[worst], gpu[worst]):.2f} ({worst})", "reproduced"),
        ("scaling in a socket", "saturates with fewer cores than CRS", *scaled),
        ("energy", "less than CRS, as fewer cores saturate the memory",
         f"GPU, by NVML: SELL takes {spread(saved)} of the energy of cuSPARSE's CSR; no counter of the host's is readable"
         if saved else "no counter is readable", "reproduced on a GPU" if saved else "not possible here"),
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


def energy_ratios(rows: list[dict[str, Any]]) -> list[float]:
    """Return SELL's energy over cuSPARSE's, by matrix."""
    spent = {(r["matrix"], r["method"]): r["joules"] for r in rows}
    return [
        joules / spent[name, "cusparse"]
        for (name, method), joules in spent.items()
        if method == "sell" and (name, "cusparse") in spent
    ]


def scaling() -> tuple[str, str]:
    """Return how products with vectors scale over the cores of a host."""
    if not have("cores_16"):
        return "not recorded with this code yet", "not recorded"
    rows = [r for r in record("cores_16")["rows"] if "operator" in r["work"] or "SELL" in r["work"]]
    if not rows:
        return "not recorded with this code yet", "not recorded"
    said = "; ".join(f"{r['work']}: {', '.join(f'{n}: {s:.1f}' for n, s in r['speed_up'].items())}" for r in rows)
    return f"speed-up by threads, {said}", "reproduced: the memory's rate limits both"


# -- Villa -------------------------------------------------------------------------------------------------------------


def villa() -> str:
    """Return the figures of CSR-scalar and CSR-vector."""
    rows = record("papers_vectors")["villa"]["rows"]
    long, short = rows
    gain = long["scalar_s"] / long["vector_s"]
    over = [r["cpu_s"] / min(r["scalar_s"], r["vector_s"]) for r in rows]

    def across(row: dict[str, Any], kind: str) -> str:
        times = {n: found[kind] for n, found in row["by_threads_s"].items()}
        least = min(times.values())
        return ", ".join(f"{n}: {seconds / least:.2f}" for n, seconds in times.items())

    figures: list[Row] = [
        ("memory of CSR", "less than dense if nnz < (n (m - 1) - 1) / 2", "counted by `matrices/csr.py`, `nbytes`",
         "illustration"),
        ("block sizes", "256, 512, 1024 threads: within 5 %",
         f"times over the least, short rows, CSR-scalar {across(short, 'scalar')}; CSR-vector "
         f"{across(short, 'vector')}",
         "reproduced for short rows; with rows of 2,000 entries CSR-scalar loses with larger blocks, as the table shows"),
        ("two kernels", "CSR-vector is up to 3 times as fast", f"{gain:.2f} times with rows of 2,000 entries; with two "
         f"entries a row CSR-scalar is {short['vector_s'] / short['scalar_s']:.2f} times as fast", "reproduced"),
        ("one CPU thread", "up to 250 times as fast as one thread (Colab)",
         f"{spread(over, '.0f')} times as fast as SciPy's product on one thread", verdict_of_villa(max(over))),
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
        "Milliseconds of a product by threads in a block; spdist's kernels have 256. `kmer_V4a` is generated, two entries a row.\n",
        table(["matrix", "nonzeros", "one CPU thread", *head], lines),
        source("papers_vectors"),
    )


def verdict_of_villa(most: float) -> str:
    """Return what the ratio to one thread says."""
    if most >= 250:
        return "reproduced"
    return "the paper's CPU was slower: the rates of memory, which bound both, differ by less today"


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
