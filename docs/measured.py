"""Write docs/measured.md, and the figures of README.md, from the records in benchmarks/results.

::

    python docs/measured.py           # write both
    python docs/measured.py --check   # exit with 1 if one of them is stale
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import waits
from tables import (
    ROOT,
    RecordMissingError,
    commits,
    device,
    geometric_mean,
    have,
    million,
    record,
    seconds_ratios,
    shown,
    source,
    summary,
    table,
    unrecorded,
)

MEASURED = ROOT / "docs" / "measured.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: python docs/measured.py -->", "<!-- end of figures -->"
TOP_N = "top_n_16cores" if have("top_n_16cores") else "fused"

INTRODUCTION = """# Measured

`python docs/measured.py` writes this page from the records in [benchmarks/results](../benchmarks/results); `make check`
fails if it is stale, or if a record is of other code than there is now. Each record names its command, date, device,
driver, host and versions, and the last commit that had changed the package: {commits}. The code that a record times is
the same in all of these, by its digest. Records of earlier code are in
[benchmarks/results/old](../benchmarks/results/old) and not shown. `make bench`, `make bench-gpu` and `make bench-gpus`
make them again. [What is measured, and what might be objected](guide/benchmarks.md) defines the words; figures of the
five papers are beside ours in [papers.md](papers.md).

How to read it:

- **Ratio** is the peer's time over spdist's: above 1, spdist is faster. Summaries give the geometric mean and the least.
- **Inner call**: a timed function call in a warm process, with kernels compiled. **Whole call**: one public call from
  entry to return, with planning and the start of workers. **Whole command**: from the shell's prompt to the next.
- Matrices named after the SuiteSparse collection are generated after them (`benchmarks/suite.py`), except in `data/`.
"""


class Figure(NamedTuple):
    """A comparison with a peer: what is compared, how it is timed, and the ratio of each case."""

    what: str
    timed: str
    peer: str
    ratios: dict[str, float]
    record: str


# -- products on CPUs --------------------------------------------------------------------------------------------------


def spgemm_cpu() -> str:
    """Products in memory compared with SciPy."""
    name = "spgemm_cpu"
    rows = record(name)["results"]
    lines = [
        [r["matrix"], r["nnz"], 1e3 * r["scipy_seconds"], 1e3 * r["spdist_seconds"], r["ratio"], r["ratio_min"]]
        for r in rows
    ]
    return (
        "### In memory\n\n"
        f"`spgemm(a, a)` with {record(name)['threads']} threads, compared with SciPy's `a @ a` with `sort_indices()` on one thread. Public call,\n"
        f"repeated, medians in ms; last, the ratio of the least times. {summary([r['ratio'] for r in rows])}\n\n"
        + table(["matrix", "nnz(A)", "SciPy", "spdist", "ratio", "of least"], lines)
        + small_real()
        + "\n"
        + source(name, *(["spgemm_cpu_real"] if have("spgemm_cpu_real") else []))
    )


def small_real() -> str:
    """Return what small real matrices add: the mean, and where spdist is slower."""
    if not have("spgemm_cpu_real"):
        return ""
    ratios = {r["matrix"]: r["ratio"] for r in record("spgemm_cpu_real")["results"]}
    return (
        f"\nSmall real matrices. {summary([*ratios.values()])} Slower than SciPy, most of them with\n"
        f"products of less than two milliseconds: {listed(ratios)}.\n"
    )


def by_side(name: str) -> str:
    """Return ratios of block products: a row for each pattern, a column for each block size."""
    rows = record(name)["rows"]
    sides = sorted({r["side"] for r in rows})
    ratios = {(r["matrix"], r["side"]): r["ratio"] for r in rows if r.get("ratio")}
    names = list(dict.fromkeys(matrix for matrix, _ in ratios))
    lines = [[matrix, *(ratios.get((matrix, side), "") for side in sides)] for matrix in names]
    return table(["blocks of", *(f"{side} x {side}" for side in sides)], lines)


def block_cpu() -> str:
    """Products of block matrices compared with SciPy."""
    name = "block_spgemm"
    ratios = [r["ratio"] for r in record(name)["rows"]]
    return (
        "### Block matrices in memory\n\n"
        "C = A @ A in float64 with 2 threads, compared with SciPy's `bsr_array` product on one, which leaves rows unsorted. Public\n"
        "call, ratios. Where blocks are small and rows short, most of the time goes to finding C's pattern.\n"
        f"{summary(ratios)}\n\n" + by_side(name) + "\n" + source(name)
    )


def answers_cpu() -> str:
    """Top-n, masks, semirings and triangles, in memory."""
    fused, more = "fused", "answers"
    results = record(fused)["results"] | record(TOP_N)["results"]
    lines = [
        [case["case"], million(case["products"]), 1e3 * case["seconds"]["spdist"], 1e3 * seconds, label, ratio]
        for group in ("top_n", "triangles")
        for case in results[group]
        for label, seconds in case["seconds"].items()
        if label != "spdist" and (ratio := seconds / case["seconds"]["spdist"])
    ]
    half = [[c["case"], c["seconds"]["whole"] / c["seconds"]["spdist"]] for c in record(more)["results"]["halves"]]
    workflows = [
        [case["case"], 1e3 * case["seconds"]["spdist"], 1e3 * seconds, label]
        for group in ("similarity", "triangles", "galerkin", "shortest_paths")
        for case in record(more)["results"][group]
        for label, seconds in case["seconds"].items()
        if label != "spdist"
    ]
    return (
        "### Products cut, masked or reduced in memory\n\n"
        "Cosines with `top_n=10` on generated TF-IDF rows, and triangles by a masked `plus_pair` (L: the part of the\n"
        "adjacency matrix below the diagonal). `unmasked` is spdist's whole product filtered by SciPy. Public\n"
        f"calls, top-n with {record(TOP_N)['threads']} threads and triangles with {record(fused)['threads']}, medians in ms.\n\n"
        + table(["case", "products", "spdist", "peer", "which", "ratio"], lines)
        + f"\nEight semirings on three matrices compared with GraphBLAS, rows sorted. "
        f"{summary(seconds_ratios(results['semirings'], 'graphblas'))}\n\n{source(*{TOP_N: 0, fused: 0})}"
        + "\nThe whole of a symmetric product takes this many times as long as its upper triangle (one thread):\n\n"
        + table(["product", "whole / triangle"], half)
        + "\nThe kernels that the workflows call, compared with other packages; medians in ms, 2 threads where there are threads.\n"
        "All pairs of shortest paths in a sparse graph are found faster by Dijkstra's algorithm than by squaring:\n\n"
        + table(["case", "spdist", "peer", "which"], workflows)
        + f"\n{source(more)}"
    )


def stored_cpu() -> str:
    """Products from Zarr to Zarr."""
    name, cut = "out_of_core", "answers"
    lines = [
        [r["case"], million(r["nnz_c"]), r["c_over_limit"], f"{r['wall_s']:.1f} s",
         f"{r['in_memory_s'] + r['read_s'] + r['write_s']:.1f} s", f"{r['peak_mb']:.0f} of {r['allowed_mb']:.0f} MB"]
        for r in record(name)["rows"]
    ]  # fmt: skip
    fewer = [
        [c["case"], c["c_over_limit"], f"{c['blocks']} of {c['blocks_of_whole']}", c["nnz"],
         f"{c['seconds']['spdist']:.1f} s", f"{c['peak_mb']:.0f} of {c['allowed_mb']:.0f} MB"]
        for c in record(cut)["results"]["stored"]
    ]  # fmt: skip
    costs = record("scheduling")["result"]
    return (
        "### From Zarr to Zarr\n\n"
        "Whole call with 2 workers, storage in RAM. *Parts*: the same blocks in memory, A and B read once, C written once.\n"
        "Wall time is far above the parts where a block needs many rows of B besides its rows of A: a halo on a stencil;\n"
        "on a random matrix a few rows from every Zarr chunk of B, each decoded whole for its checksum. *Memory*: resident\n"
        "memory of the worst worker beyond idle, of 1.15 times the limit and 40 MB.\n\n"
        + table(["product", "nnz(C)", "C / limit", "wall", "parts", "memory"], lines)
        + f"\n{source(name)}"
        + "\nProducts cut or masked while they are made, within 64 MiB a worker; *blocks*: of the number that the whole C would need:\n\n"
        + table(["rmat 17 x 16", "C / limit", "blocks", "entries kept", "wall", "memory"], fewer)
        + f"\n{source(cut)}"
        + f"\nA block costs the scheduler {costs['ms_per_block']:.1f} ms (10,000 blocks, empty kernel); over the second "
        f"half the memory of\nscheduler and driver grows by {costs['memory_growth_mb_second_half']:.2f} MB.\n\n"
        + source("scheduling")
    )


# -- products on a GPU -------------------------------------------------------------------------------------------------


def open_codes(name: str) -> dict[str, float]:
    """Return the ratios to the fastest of the open codes, by matrix."""
    found = {r["matrix"]: r["methods"]["auto"].get("over_peer") for r in record(name)["rows"]}
    return {matrix: ratio for matrix, ratio in found.items() if ratio}


def listed(ratios: dict[str, float]) -> str:
    """Return the cases with ratios below 1, the least first."""
    return ", ".join(f"{name} ({ratio:.2f})" for name, ratio in sorted(ratios.items(), key=lambda r: r[1]) if ratio < 1)


def spgemm_gpu() -> str:
    """Products with operands on the GPU."""
    name, real, same, narrow = "spgemm", "spgemm_real", "spgemm_deterministic", "spgemm_float32"
    content = record(name)
    peers = open_codes(name)
    lines = []
    for r in content["rows"]:
        ours, best = r["methods"]["auto"], r["cusparse"][r["cusparse_best"]]
        sizes = [million(r["products"]), million(ours["nnz_c"])]
        spaces = [f"{best['workspace'] / 1e6:,.0f}", f"{ours['workspace'] / 1e6:,.0f}"]
        peer = f"{best['ms']:.2f} ({r['cusparse_best']})"
        lines.append([r["matrix"], *sizes, peer, ours["ms"], ours["over_cusparse"], *spaces])
    methods = [
        [f"`{method}`, {label}", found["over_cusparse"]["geometric_mean"], found["over_cusparse"]["minimum"], of]
        for of, label, method in (
            (name, "float64", "auto"), (name, "float64", "esc"),
            (narrow, "float32", "auto"), (same, "same bits on every run", "rowwise"),
        )
        for found in [record(of)["summary"][method]]
    ]  # fmt: skip
    alone = [r["methods"]["auto"]["over_cusparse"] for r in record(real)["rows"] if r["matrix"].startswith("real/")]
    methods.append(
        ["`auto`, 52 small real matrices".replace("52", str(len(alone))), geometric_mean(alone), min(alone), real]
    )
    slower = {
        r["matrix"]: r["methods"]["auto"]["ms"] / found["methods"]["rowwise"]["ms"]
        for r in content["rows"] for found in record(same)["rows"] if found["matrix"] == r["matrix"]
    }  # fmt: skip
    worst = min(slower, key=slower.__getitem__)
    times = geometric_mean(1 / ratio for ratio in slower.values())
    cold = record("spgemm_cold")["rows"] if have("spgemm_cold") else []
    ahead, then = ([r for r in cold if ("complex" in r["dtype"]) == is_complex] for is_complex in (False, True))
    return (
        "### Operands and result on the GPU\n\n"
        "A @ A (amg_AP: A @ P) in float64 of CuPy's matrices, compared with the quickest of cuSPARSE's ALG1, ALG2, ALG3 and\n"
        "SpGEMMreuse in the same run. Public call, from allocation to C, medians in ms; workspace beyond A, B and C in MB.\n"
        "Every result was checked.\n\n"
        + table(["matrix", "products", "nnz(C)", "cuSPARSE", "spdist", "ratio", "its MB", "our MB"], lines)
        + f"\n{source(name)}"
        + "\nCompared with the fastest of the open SpGEMM codes tried, for each matrix, timed in another run on an\nH100 (`benchmarks/peers.json`). "
        + summary(list(peers.values()))
        + f" Slower than the\nbest of them: {listed(peers)}."
        + "\n\nMethods compared with cuSPARSE; `esc` and `rowwise` are called below the public function:\n\n"
        + table(["method", "geometric mean", "least", "record"], methods)
        + (
            f"\nThe first product of a type on a machine, imports left out: {firsts(ahead)} with real values, whose kernels\n"
            f"`make kernels` had compiled ahead; {firsts(then)} with complex values, compiled then.\n"
            if cold
            else "\n"
        )
        + "Against `auto`, the same bits on every run took "
        f"{times:.2f} of the time in the geometric\nmean, and {1 / slower[worst]:.1f} times as long on {worst}.\n\n"
        + source(real, narrow, same, *(["spgemm_cold"] if cold else []))
    )


def firsts(rows: list[dict[str, Any]]) -> str:
    """Return the longest first call of each method."""
    seconds = {
        method: max(r["cold"]["first_s"] for r in rows if r["method"] == method) for method in ("rowwise", "esc")
    }
    return ", ".join(f"`{method}` {longest:.2g} s" for method, longest in seconds.items())


def block_gpu() -> str:
    """Products of block matrices on the GPU."""
    name = "block_spgemm_gpu"
    ratios = [r["ratio"] for r in record(name)["rows"] if r.get("ratio")]
    return (
        "### Block matrices on the GPU\n\n"
        "C = A @ A in float64 compared with the same product entry by entry, by the quicker of cuSPARSE and our own `auto`.\n"
        f"Public call, ratios; every result checked. {summary(ratios)}\n\n" + by_side(name) + f"\n{source(name)}"
    )


def streamed() -> str:
    """Products through a GPU that does not hold them, from host to host."""
    names = [name for name in ("pipeline", "pipeline_blocks") if have(name)]
    lines = []
    for name in names:
        for r in record(name)["rows"]:
            gib = f"{r['memory_limit'] / 2**30:.2f} GiB, {r['peak'] / 2**30:.2f}"
            times = [r["limit_s"], r.get("once_s"), r["seconds"], r["plain_s"]]
            lines.append([r["matrix"], million(r["nnz_c"]), gib, *(f"{1e3 * t:.0f}" if t else "" for t in times)])
    beside = [
        [r["matrix"], f"{r['loop_s']:.2f} s", f"{r['first_s']:.2f} s", r["loop_s"] / r["first_s"], f"{r['once_s']:.2f} s",
         r["loop_s"] / r["once_s"]]
        for r in record("pipeline")["rows"]
    ]  # fmt: skip
    return (
        "### Larger than the GPU's memory limit, host to host\n\n"
        "Inner call on operands in host memory, C in host memory, in ms. *Bound*: A and B to the GPU and C back at the\n"
        "rates of page-locked memory, both ways at once. *Once*: operands that no product has read; C's page-locked buffers\n"
        "are used again. *Repeated*: product after product of the same operands, which are page-locked by then, B resident\n"
        "where it fits, means; a steady state, not the time of one product. *Unpacked*: repeated, without packing C's columns\n"
        "on the GPU, which is how some pass the bound.\n\n"
        + table(["product", "nnz(C)", "limit, used", "bound", "once", "repeated", "unpacked"], lines)
        + f"\n{source(*names)}"
        + "\nCompared with the loop a user of CuPy writes (row blocks of A up, `A_i @ B`, `.get()`), timed once, which allocates C\n"
        "anew. *First*: the first product of each matrix; the first line's makes all of C's page-locked buffers. *Once*: they\n"
        "are kept.\n\n"
        + table(["product", "loop", "spdist, first", "ratio", "spdist, once", "ratio"], beside)
        + f"\nFirst: {summary([row[3] for row in beside])} Once: {summary([row[-1] for row in beside])}\n\n"
    )


def thesis() -> str:
    """Return the nine matrices of hySpMM's thesis, which fit the GPU."""
    name = "pipeline_thesis"
    rows = record(name)["rows"]
    lines = [
        [r["matrix"], *(1e3 * r[k] for k in ("locked_s", "cupy_locked_s", "limit_s")), r["cupy_locked_s"] / r["locked_s"],
         1e3 * r["seconds"], 1e3 * r["cupy_s"]]
        for r in rows
    ]  # fmt: skip
    return (
        "### Matrices of the thesis, A sent and C brought back\n\n"
        "Inner call, repeated, medians in ms, compared with CuPy's `A @ A` and `.get()`. The fair comparison has both programs\n"
        "copy from and to page-locked memory (*locked*). In the last two columns both take NumPy's arrays; spdist has\n"
        "page-locked them by then, CuPy has not: that ratio is of a steady state against single products.\n\n"
        + table(["matrix", "spdist, locked", "CuPy, locked", "bound", "ratio", "spdist", "CuPy"], lines)
        + f"\nLocked. {summary([r['cupy_locked_s'] / r['locked_s'] for r in rows])}\n\n{source(name)}"
        + "\nThe thesis' own method stands in [papers.md](papers.md).\n"
    )


def stored_gpu() -> str:
    """Products from Zarr to Zarr through GPUs."""
    lines, names = [], [name for name in ("large", "pipeline_store", "scaling") if have(name)]
    if not names:
        raise RecordMissingError("large, pipeline_store, scaling")
    if have("large"):
        lines = [
            [
                large["matrix"],
                large["workers"],
                million(large["nnz_c"]),
                large["wall_s"],
                between(walls_of(large)),
                large["run_s"],
            ]
            for large in map(record("large").__getitem__, ("product", "graph"))
        ]
    for name in (name for name in names if name != "large"):
        content = record(name)
        for r in content.get("rows") or sorted(content["results"], key=lambda r: r["workers"]):
            whole, run = r.get("whole_s") or r["product_s"], r.get("run_s") or r["seconds"]
            lines.append([r.get("matrix", "27-point 256^3"), r["workers"], million(r["nnz_c"]), whole, "", run])
    norms = ""
    if have("scaling"):
        each = [[r["workers"], r["reduction_s"]] for r in sorted(content["results"], key=lambda r: r["workers"])]
        norms = (
            "\nThe Frobenius norm of an R-MAT graph's square (22 x 16); none of its entries comes back; call with workers "
            f"that run:\n\n{table(['GPUs', 's'], each)}"
        )
    return (
        "### From Zarr to Zarr through GPUs\n\n"
        "Engine `cuda` under Dask, storage in RAM, in s. *Whole*: one public call, with planning. Of the 27-point grid of 256^3\n"
        "workers were running and had made the product before, and two calls were timed; of others the start of workers\n"
        "counts; a first trial may compile kernels. *Run*: from the first read to the last write. The results were verified.\n\n"
        + table(["product", "GPUs", "nnz(C)", "whole", "from, to, trials", "run"], lines)
        + f"{norms}{dearness() if have('large') else ''}\n{source(*names)}"
    )


PRICES, PRICED = {"H100": (1.99, 5.00), "H200": (2.50, 7.00)}, "May 2026"
"""Least and greatest published price of a GPU for an hour on demand, in dollars, and when."""


def dearness() -> str:
    """Return what the large product took of storage, energy and money."""
    found = record("large")
    product = found["product"]
    terabytes, hours = product["bytes_c"] / 1e12, product["wall_s"] / 3600
    energy = "" if product["joules"] is None else f", {product['joules'] / 3.6e6 / terabytes:.2f} kWh of the GPU"
    gpu = device("large").split(",")[0]
    money = " to ".join(f"{hours * price / terabytes:.2f}" for price in PRICES[gpu])
    return (
        f"\nThe storage alone, measured in the same run, would take {product['storage_s']:.1f} s for {product['matrix']}. A TB of C\n"
        f"takes {hours / terabytes * 60:.1f} minutes{energy}, and {money} dollars at the prices of an {gpu} on demand in {PRICED}.\n"
    )


def clusters() -> str:
    """Return the clustering of a graph whose walks are stored."""
    graph = record("clusters")["clusters"]
    took = sorted(trial["wall_s"] for trial in graph["trials"])
    return (
        "### Markov clustering, walks stored\n\n"
        f"A graph of {graph['vertices']:,} vertices and {graph['edges']:,} edges, in cliques of 31 that a few edges join:\n"
        f"{graph['steps']} steps, from Zarr to a file of clusters, in {graph['wall_s']:.0f} s from prompt to prompt, the median of {len(took)}: {took[0]:.0f} to\n"
        f"{took[-1]:.0f} s.\n\n{source('clusters')}"
    )


def answers_gpu() -> str:
    """Top-n, masks and reductions on the GPU."""
    name = "answers_gpu"
    results = record(name)["results"]
    lines = [[c["case"], million(c["entries"]), 1e3 * c["seconds"]["spdist"]] for c in results["gpu_top_n"]]
    beside = [
        [c["case"], 1e3 * c["seconds"]["spdist"], label, 1e3 * seconds, seconds / c["seconds"]["spdist"]]
        for group in ("gpu_masks", "gpu_halves")
        for c in results[group]
        for label, seconds in c["seconds"].items()
        if label != "spdist"
    ]
    others = [c for c in results["gpu_semirings"] if not c["case"].endswith("plus_times")]
    ratios = [c["seconds"]["spdist"] / c["seconds"]["plus_times"] for c in others]
    return (
        "### Products cut, masked or reduced on the GPU\n\n"
        "Cosines with `top_n=10`, host memory to host memory, in ms; *entries*: of the whole product, never stored:\n\n"
        + table(["case", "entries", "ms"], lines)
        + f"\nKernels of other semirings take {geometric_mean(ratios):.2f} of the time of plus and times in the geometric "
        f"mean, {max(ratios):.2f} at most.\n"
        + "\nMasked products and upper triangles, operands on the GPU, medians in ms; *whole*: our own product:\n\n"
        + table(["case", "spdist", "compared with", "ms", "ratio"], beside)
        + f"\n{source(name)}"
    )


# -- products with vectors ---------------------------------------------------------------------------------------------


def vectors_cpu() -> str:
    """Products with vectors on the CPU."""
    name, blocks = "spmv_cpu", "block_spmv"
    rows, dense = record(name)["results"], record(blocks)["rows"]
    lines = [
        [r["matrix"], million(r["nnz"]), r["scipy_ms"], r["ms"], r["ratio"], round(r["prepared_products"])]
        for r in rows
    ]
    return (
        "### On the CPU\n\n"
        '`operator(a, "sell") @ x` with 2 threads compared with SciPy\'s product with one, turn by turn; ms a product,\n'
        f"preparation apart. {summary([r['ratio'] for r in rows])}\n\n"
        + table(["matrix", "nonzeros", "SciPy", "spdist", "ratio", "products to prepare"], lines)
        + f"\n{source(name)}"
        + '\nBlock matrices: `operator(a, "bsr")` with one thread compared with the quicker of SciPy\'s `bsr_array` and `csr_array`.\n'
        f"{summary([r['ratio'] for r in dense])}\n\n{source(blocks)}"
    )


def vectors_gpu() -> str:
    """Products with vectors on the GPU."""
    name, single = "spmv", "spmv_float32"
    others = [other for other in ("spmv_other", "spmv_real") if have(other)]
    narrow = {r["matrix"]: r["methods"]["auto"]["over_cusparse"] for r in record(single)["results"]}
    lines = []
    for r in [row for one in (name, *others) for row in rows_of(one)]:
        ours, best = r["methods"]["auto"], r["cusparse_best"]
        peer = f"{r['cusparse_us'][best]:.1f} ({best.replace('_', ' ')})"
        sizes = [million(r["nrows"]), million(r["nnz"])]
        times = [peer, 1e3 * ours["ms"], ours["over_cusparse"], round(ours["prepared_products"]), ours["method"]]
        lines.append([r["matrix"], *sizes, *times, narrow.get(r["matrix"], "")])
    alone = [
        [r["matrix"], r["alone_us"], r["hybrid_us"], "yes" if r["shared"] else "no"]
        for r in (record("spmv_hybrid")["results"] if have("spmv_hybrid") else [])
    ]
    solving = [name for name in ("solvers", "solvers_gpus") if have(name)]
    solvers = [
        [device(of), r["workers"], record(of)["grid"], r["ms"], r["ms_without_graph"]]
        for of in solving
        for r in sorted(record(of)["results"], key=lambda r: r["workers"])
    ]
    return (
        "### On the GPU\n\n"
        "`operator(a)` in float64 compared with the quickest of cuSPARSE's CSR ALG1 and ALG2, COO, sliced ELL, BSR and\n"
        "SpMVOp, preprocessed, of the versions that the table names; us a product, both replayed in CUDA graphs; every result checked. *To\n"
        "prepare*: how many products as long as its own preparing takes, which is not in the ratio.\n"
        f"Generated matrices. {summary(over_cusparse('spmv').values())} Kinds that no constant was tuned on.\n"
        f"{summary(over_cusparse('spmv_other').values())} Small real ones. {summary(over_cusparse('spmv_real').values())}\n"
        f"With both preparations and 1,000 products: {summary(with_preparation(name).values())}\n"
        f"In float32: {summary(over_cusparse(single).values())}\n\n"
        + table(
            ["matrix", "rows", "nonzeros", "cuSPARSE", "spdist", "ratio", "to prepare", "chosen", "float32 ratio"],
            lines,
        )
        + f"\n{source(name, *others, single)}"
        + (f"\nRows shared with cores of the host (`hybrid`), us:\n\n{table(HYBRID, alone)}\n{source('spmv_hybrid')}" if alone else "")
        + (f"\nConjugate gradients on a 27-point grid, rows stored, halos by NCCL; ms an iteration:\n\n"
           f"{table(SOLVERS, solvers)}\n{source(*solving)}" if solvers else "")
    )  # fmt: skip


HYBRID = "matrix", "GPU alone", "hybrid", "shared"
SOLVERS = "on", "GPUs", "points along an edge", "CUDA graph", "launched one by one"


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return the rows of a record of products beside cuSPARSE; of real matrices with a vector only what is real."""
    content = record(name)
    rows = content.get("rows") or content["results"]
    return [r for r in rows if name != "spmv_real" or r["matrix"].startswith("real/")]


def with_preparation(name: str, uses: int = 1000) -> dict[str, float]:
    """Return by matrix: cuSPARSE's least time of preparing a format and of `uses` products, over spdist's."""
    found = {}
    for r in record(name)["results"]:
        ours = r["methods"]["auto"]
        prepared = r["cusparse_prepared_us"]
        theirs = min(prepared[key] + uses * us for key, us in r["cusparse_us"].items())
        found[r["matrix"]] = theirs / (1e3 * ours["prepared_ms"] + uses * 1e3 * ours["ms"])
    return found


def faults(name: str) -> str:
    """Count what came of faults that were injected."""
    found = record(name)
    lines = [
        [part, f"{sum(row.values())}", f"{row.get('right', 0)}", f"{row.get('refused', 0)}",
         ", ".join(f"{count} {verdict}" for verdict, count in row.items() if verdict not in ("right", "refused"))]
        for part, row in found["counts"].items()
    ]  # fmt: skip
    return (
        f"Of {found['trials']:,} faults {found['good']:,} ended as they should: the right product with nothing left behind, or\n"
        f"one line that names the matter and a way out that leads to the product. Seed {found['seed']}; `tests/torture` says how.\n\n"
        + table(["fault", "times", "right", "refused", "anything else"], lines)
        + f"\n{source(name)}"
    )


def integrity(name: str) -> str:
    """Show what integrity costs stored products."""
    found = record(name)
    cases = list(found["rows"])
    pieces = {piece: None for rounds in found["rows"].values() for one in rounds for piece in one["pieces_s"]}
    lines = [
        [piece, *(f"{statistics.median(100 * one['pieces_s'].get(piece, 0) / one['cpu_s'] for one in rounds):.2f} %"
                  for rounds in found["rows"].values())]
        for piece in pieces
    ]  # fmt: skip
    shares = [statistics.median(100 * one["share"] for one in rounds) for rounds in found["rows"].values()]
    seconds = [statistics.median(one["cpu_s"] for one in rounds) for rounds in found["rows"].values()]
    lines.append(["all", *(f"{share:.1f} %" for share in shares)])
    lines.append(["CPU seconds of the product", *(f"{one:.2f}" for one in seconds)])
    return (
        f"Shares of the CPU seconds of a whole call of `multiply` from Zarr to Zarr, {device(name)}; medians of "
        f"{len(found['rows'][cases[0]])} products.\nEach piece is timed by the CPU time of its thread, so that other jobs "
        f"on the machine count little.\n\n" + table(["piece", *cases], lines) + f"\n{source(name)}"
    )


def clustering(name: str) -> str:
    """Compare Markov clustering with mcl."""
    found = record(name)
    lines = [
        [graph, row["edges"], engine.removeprefix("spdist").strip() or found["engine"], seconds,
         *_beside_mcl(row["seconds"], seconds, found), *_agreement(row)]
        for graph, row in found["results"].items() for engine, seconds in row["seconds"].items() if engine != "mcl"
    ]  # fmt: skip
    on_gpu = any("cuda" in engine for row in found["results"].values() for engine in row["seconds"])
    gpu = f", {found['device']}" if on_gpu else ""
    options = found["options"] if isinstance(found["options"], str) else " ".join(found["options"])
    times = "medians of " + str(found["rounds"]) if found["rounds"] > 1 else "one run each"
    return (
        f"### Markov clustering, {found['threads']} threads, {device(name)}{gpu}\n\n"
        f"`spdist markov-clustering graph.abc -I 2.0 {options}`\n"
        f"and `mcl graph.abc --abc -I 2.0` ({found['mcl'] or 'not run'}), file to file. Whole commands in seconds, {times}. Variation of\n"
        f"information as a share of the larger entropy: 0 if the clusterings are equal. Last: vertices that are alone in one of\n"
        f"them only.\n\n"
        + table(["graph", "edges", "engine", "spdist", "mcl", "ratio", "clusters", "variation", "alone in one"], lines)
        + f"\n{source(name)}"
    )


def _beside_mcl(measured: dict[str, float | None], mine: float, found: Any) -> tuple[Any, Any]:
    """Return mcl's seconds and the ratio; bounds of both where it was stopped, nothing where it did not run."""
    if "mcl" not in measured:
        return "", ""
    theirs = measured["mcl"]
    if theirs is None:
        return f"over {found['limit']:.0f}", f"over {found['limit'] / mine:.1f}"
    return theirs, theirs / mine


def _agreement(row: Any) -> list[str]:
    if "clusters" not in row:
        return ["", "", ""]
    return [
        f"{row['clusters'][0]:,} and {row['clusters'][1]:,}",
        f"{100 * row['variation_share']:.3f} %",
        f"{row['alone_in_one']}",
    ]


def object_store(name: str) -> str:
    """Compare what spdist moves to and from an S3 server with what obstore alone moves."""
    found = record(name)
    rows = found["results"]
    raw = rows["obstore alone"]

    def spread(way: str, what: str) -> str:
        rates = [run[what] for run in found["trials"][way]]
        return f"{min(rates):,.0f} to {max(rates):,.0f}"

    lines = [
        [way, *(cell for what in ("write", "read") for cell in (row[what], spread(way, what), f"{row[what] / raw[what]:.0%}"))]
        for way, row in rows.items() if way != "local"
    ]  # fmt: skip
    cpu = [
        [way, *(row[f"{what}_{side}"] for what in ("write", "read") for side in ("client", "server"))]
        for way, row in rows.items() if "write_client" in row
    ]  # fmt: skip
    return (
        f"### C in an S3 server\n\n"
        f"{found['server']}. A product of {found['rows']:,} rows whose C takes {rows['obstore']['bytes'] / 1e6:,.0f} MB as stored: MB/s\n"
        f"from the first read of its factors, which are local, to the last write of C, and of reading C whole; and objects of\n"
        f"8 MiB by obstore alone, eight at a time. The server, the product and the peer share the {found['host']['cores']} cores. Medians of\n"
        f"{found['rounds']}.\n\n"
        + table(["by", "write", "from, to", "of obstore alone", "read", "from, to", "of obstore alone"], lines)
        + (f"\nCPU seconds per GB of C as stored, product included:\n\n{table(CPU_OF, cpu)}" if cpu else "")
        + f"\n{source(name)}"
    )


CPU_OF = "by", "client writes", "server writes", "client reads", "server reads"


def from_dask(name: str) -> str:
    """Say what a Dask array larger than memory takes to be stored."""
    found = record(name)
    took = found["results"]
    return (
        f"### A Dask array larger than memory\n\n"
        f"`from_dask` of {found['entries']:,} entries, {found['nbytes'] / 1e9:.1f} GB in memory, made block by block: resident memory of the\n"
        f"process, as another one saw it, at most {took['peak_rss'] / 2**20:,.0f} MiB, imports included; {took['seconds']:.0f} s, {took['cpu_seconds']:.0f} CPU s.\n\n"
        f"{source(name)}"
    )


def importing(name: str) -> str:
    """Compare imports of lists of edges with pandas."""
    found = record(name)
    head = ("list of edges", "GB", "`spdist import`", "script", "ratio", "`pandas.read_csv`")
    rows = [
        (
            row["list"],
            row["bytes"] / 1e9,
            f"{row['seconds']['spdist']:.2f} s",
            f"{row['seconds']['script']:.2f} s",
            row["seconds"]["script"] / row["seconds"]["spdist"],
            f"{row['seconds']['read_csv']:.2f} s",
        )
        for row in found["rows"]
    ]
    return (
        f"Whole commands in fresh processes on {found['cores_used']} cores of {device(name)}, files and matrices in memory (tmpfs), medians. The\n"
        f"*script* reads with pandas, numbers the vertices, sorts with SciPy and writes with zarr-python, all in memory;\n"
        f"`spdist import` sorts on the disk, within 512 MiB. `pandas.read_csv` alone reads into a frame and is done.\n\n"
        f"{table(head, rows)}\n{source(name)}"
    )


def shipped_files(name: str) -> str:
    """Say how the files that packages ship are read."""
    verdicts = record(name)["verdicts"]
    others = sum(count for verdict, count in verdicts.items() if verdict not in ("equal", "refused"))
    return (
        f"Of the files that SciPy, scanpy, AnnData, PyAMG, networkx, igraph, scikit-network and what they need ship, {verdicts['equal']:,} matrices\n"
        f"are read as their own readers do, and {verdicts['refused']:,} files are refused in one line: most hold no sparse matrix. {others:,} are read\n"
        f"otherwise.\n\n{source(name)}"
    )


def neighbors(name: str) -> str:
    """Compare TopNTransformer with scikit-learn and sparse_dot_topn."""
    found = record(name)
    peers = "scikit-learn", "sparse_dot_topn"
    lines = []
    for row in found["results"]:
        seconds = row["seconds"]
        for way in (way for way in seconds if way.startswith("spdist")):
            ratios = [seconds[peer] / seconds[way] if peer in seconds else "" for peer in peers]
            lines.append([row["case"], row["nnz"], way.removeprefix("spdist "), seconds[way], *ratios])
    return (
        f"### Nearest neighbours, {found['threads']} threads, {device(name)}\n\n"
        f"`TopNTransformer({found['neighbors']}).fit_transform`, and the ratios of scikit-learn's brute force and of sparse_dot_topn, normalising\n"
        f"included. Whole calls in seconds, medians of {found['repeats']}; all graphs are equal.\n\n"
        + table(["rows", "entries", "engine", "spdist", *peers], lines)
        + f"\n{source(name)}"
    )


def large_clusters(name: str) -> str:
    """Show what simulated clusters did with one driver."""
    rows = record(name)["result"]
    lines = [
        [
            case, f"{one['workers']:,}", f"{one['blocks']:,} of {one['block_bytes'] / 1e9:g} GB", f"{one['storage'] / 1e12:g} TB/s",
            f"{one['simulated_seconds']:,.0f} s", f"{100 * one['busy']:.0f} %", f"{one['after_last_block']:.1f} s",
            f"{one['spilled']:,}", f"{one['driver_ms_per_block']:.2f} ms", f"{one['memory_mb']:.0f} MB",
        ]
        for case, one in rows.items()
    ]  # fmt: skip
    first = next(iter(rows.values()))
    return (
        f"Blocks take {first['seconds']:g} s, up to {100 * first['spread']:.0f} % more or less; one in {1 / first['slow']:,.0f} takes ten times as long. "
        f"A worker holds {first['in_flight']}\nblocks and writes {first['worker_storage'] / 1e9:g} GB/s. *Busy*: share of the time in which workers multiply. *After*: from the end\n"
        "of the last block to the end of the run. *Driver*: its own time for a block, on the machine that simulated.\n\n"
        + table(
            ["cluster", "workers", "blocks of C", "storage", "time", "busy", "after", "spilled", "driver", "memory"],
            lines,
        )
        + f"\n{source(name)}"
    )


# -- the two documents -------------------------------------------------------------------------------------------------

SECTIONS: dict[str, list[Callable[[], str]]] = {
    "Products on CPUs": [spgemm_cpu, block_cpu, answers_cpu, stored_cpu],
    "Products on GPUs": [spgemm_gpu, block_gpu, streamed, thesis, stored_gpu, clusters, answers_gpu],
    "Products with vectors": [vectors_cpu, vectors_gpu],
    "Large clusters, simulated": [lambda: large_clusters("scale")],
}


def named(rows: Iterable[dict[str, Any]], key: str = "ratio") -> dict[str, float]:
    """Return ratios by matrix, and by the size of blocks if there is one."""
    return {
        f"{r['matrix']}, {r['side']} x {r['side']}" if "side" in r else r["matrix"]: r[key] for r in rows if r.get(key)
    }


def cases(group: list[dict[str, Any]], peer: str) -> dict[str, float]:
    """Return a peer's seconds over spdist's, by case."""
    return {f"{n}: {case['case']}": ratio for n, case in enumerate(group) for ratio in seconds_ratios([case], peer)}


def figures() -> list[Figure]:
    """Return the comparisons of calls in warm processes, of at least three cases: like with like."""
    threads = record(TOP_N)["threads"]
    return shown([
        lambda: Figure("`spgemm`, 2 threads", "call", "SciPy, 1 thread, rows sorted",
                       named(record("spgemm_cpu")["results"]), "spgemm_cpu"),
        lambda: Figure("the same, small real matrices", "call", "SciPy, 1 thread, rows sorted",
                       named(record("spgemm_cpu_real")["results"]), "spgemm_cpu_real"),
        lambda: Figure("`spgemm` of blocks, 2 threads", "call", "SciPy's `bsr_array`, 1 thread",
                       named(record("block_spgemm")["rows"]), "block_spgemm"),
        lambda: Figure(f"`spgemm(top_n=10)`, {threads} threads", "call", f"sp_matmul_rs, {threads} threads",
                       cases(record(TOP_N)["results"]["top_n"], "sp_matmul_rs"), TOP_N),
        lambda: Figure("eight semirings, 2 threads", "call", "GraphBLAS, 2 threads",
                       cases(record("fused")["results"]["semirings"], "graphblas"), "fused"),
        lambda: Figure("`operator(a, \"sell\") @ x`, 2 threads",
                       prepared(r["prepared_products"] for r in record("spmv_cpu")["results"]), "SciPy, 1 thread",
                       named(record("spmv_cpu")["results"]), "spmv_cpu"),
        lambda: Figure("`spgemm`, operands on the GPU", "call", "best of cuSPARSE", over_cusparse("spgemm"), "spgemm"),
        lambda: Figure("the same", "call", "fastest of the open codes tried", open_codes("spgemm"), "spgemm"),
        lambda: Figure("`spgemm` of blocks, on the GPU", "call", "entry by entry, best of cuSPARSE and spdist",
                       named(record("block_spgemm_gpu")["rows"]), "block_spgemm_gpu"),
        lambda: Figure("A sent, A @ A brought back", "inner call, repeated", "CuPy; page-locked memory both",
                       {r["matrix"]: r["cupy_locked_s"] / r["locked_s"] for r in record("pipeline_thesis")["rows"]},
                       "pipeline_thesis"),
        *(
            lambda name=name, what=what: Figure(
                what, prepared(r["methods"]["auto"]["prepared_products"] for r in rows_of(name)),
                "best of cuSPARSE, preprocessed", over_cusparse(name), name)
            for name, what in VECTORS.items()
        ),
    ])  # fmt: skip


VECTORS = {
    "spmv": "`operator(a) @ x` on the GPU",
    "spmv_other": "the same, kinds that no constant was tuned on",
    "spmv_real": "the same, small real matrices",
}


def over_cusparse(name: str) -> dict[str, float]:
    """Return the ratios of `auto` to cuSPARSE by matrix."""
    return {r["matrix"]: r["methods"]["auto"]["over_cusparse"] for r in rows_of(name)}


def prepared(products: Iterable[float]) -> str:
    """Return what is timed of a product with a vector, and what preparing costs besides."""
    counts = [round(count) for count in products]
    return f"a product; preparing takes as long as {min(counts):,} to {max(counts):,}"


def comparisons(folder: str) -> str:
    """Return the table of calls compared with peers; `folder` is where the records lie, seen from the document."""
    lines = [
        [f.what, f.timed, device(f.record).split(",")[0], f.peer, len(f.ratios), f"{geometric_mean(f.ratios.values()):.2f}",
         f"{min(f.ratios.values()):.2f} ({least_of(f.ratios)})", f"[record]({folder}/{f.record}.json)"]
        for f in figures()
    ]  # fmt: skip
    head = ["what", "timed", "on", "compared with", "cases", "times as fast", "least", ""]
    return (
        "Times of a peer over times of spdist, in warm processes: above 1 spdist is faster. Geometric mean\n"
        "and least of each suite. A *call* is one product from operands to result, in the memory where the operands are, with\n"
        "kernels compiled. Most matrices are generated, and spdist was tuned on them: measure yours.\n\n"
        + table(head, lines)
    )


def least_of(ratios: dict[str, float]) -> str:
    """Return the case with the least ratio, without the number that keeps names apart."""
    return min(ratios, key=ratios.__getitem__).split(": ")[-1]


def between(times: list[float]) -> str:
    """Return the least and the greatest seconds, and how many there are; nothing if they were not recorded."""
    return f"{min(times):.1f} to {max(times):.1f}, {len(times)}" if times else ""


def walls_of(row: dict[str, Any]) -> list[float]:
    """Return the seconds of the calls of a row of `large`."""
    return [trial["wall_s"] for trial in row["trials"]]


def whole_calls() -> str:
    """Return the table of single calls from Zarr to Zarr."""
    whole = []
    if have("large"):
        large = record("large")["product"]
        whole.append(["27-point 412^3 squared", "large", large["bytes_c"] / 1e9, large["wall_s"], walls_of(large)])
    if have("out_of_core"):
        cpu = next(r for r in record("out_of_core")["rows"] if r["case"].startswith("rmat"))
        whole.append(
            ["R-MAT 17 x 16 squared", "out_of_core", cpu["nnz_c"] * 12 / 1e9, cpu["wall_s"], cpu.get("trials_s", [])]
        )
    runs = [
        [what, device(n), f"{g:.1f} GB", f"{s:.1f} s", between(all_), waits.link(n)] for what, n, g, s, all_ in whole
    ]
    head = ["from Zarr to Zarr in `/dev/shm`, call to return", "on", "C", "wall time", "from, to, trials", ""]
    return table(head, runs) if runs else ""


def readme_figures() -> str:
    """Return README's figures: what a user waits for, once it is recorded on idle machines; until then calls."""
    waited = waits.readme(waits.headlines())
    return f"{waited or comparisons('benchmarks/results')}\n{whole_calls()}"


def measured() -> str:
    """Return docs/measured.md."""
    parts = [INTRODUCTION.format(commits=", ".join(f"`{commit}`" for commit in commits()))]
    if missing := unrecorded():
        parts.append(f"Not recorded with this code: {', '.join(missing)}.\n")
    if waits.recorded():
        parts += ["## What a user waits for\n", *map(waits.section, waits.recorded())]
    parts += ["## Calls in one table\n", comparisons("../benchmarks/results")]
    if waits.recorded("predictions"):
        parts += ["## Predictions\n", *map(waits.predictions, waits.recorded("predictions"))]
    if waits.recorded("watching"):
        parts += ["## What watching costs\n", *map(waits.watching, waits.recorded("watching"))]
    if waits.recorded("cores"):
        parts += ["## Threads of the CPU engine\n", *map(waits.cores, waits.recorded("cores"))]
    parts += ["## Tasks built from products\n", *map(clustering, waits.recorded("clustering"))]
    parts += [*map(neighbors, waits.recorded("neighbors")), *map(from_dask, waits.recorded("from_dask"))]
    if waits.recorded("importing"):
        parts += ["## Imports\n", *map(importing, waits.recorded("importing"))]
        parts += map(shipped_files, waits.recorded("shipped_files"))
    if waits.recorded("object_store"):
        parts += ["## Object stores\n", *map(object_store, waits.recorded("object_store"))]
    for title, sections in SECTIONS.items():
        parts += [f"## {title}\n", *shown(sections)]
    if waits.recorded("faults"):
        parts += ["## Faults\n", *map(faults, waits.recorded("faults"))]
    if waits.recorded("integrity"):
        parts += ["## What integrity costs\n", *map(integrity, waits.recorded("integrity"))]
    return "\n".join(parts)


def readme(text: str) -> str:
    """Return README.md with its figures up to date."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{readme_figures()}\n{END}{tail}"


def main() -> int:
    """Write the documents, or say which is stale."""
    wanted = {MEASURED: measured(), README: readme(README.read_text())}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run python docs/measured.py", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
