"""Tables of the records of `prompt.py`, `cores.py` and `predictions.py` in benchmarks, for `docs/measured.py`."""

from __future__ import annotations

import statistics
from typing import Any

from tables import RESULTS, device, record, source, summary, table

Row = dict[str, Any]
SHARED = "Other jobs took most of the cores meanwhile: compare CPU seconds, not the time between prompts.\n"


TRIALS = 3
"""Of a command at least, for README."""
DEFAULT = "spdist auto"
"""What a command without `--engine` runs."""


def recorded(benchmark: str = "prompt") -> list[str]:
    """Return the names of the records of a benchmark, the newest first."""
    stems = [path.stem for path in RESULTS.glob("*.json")]
    names = [name for name in stems if name == benchmark or name.startswith(f"{benchmark}_")]
    return sorted(names, key=lambda name: str(record(name)["date"]), reverse=True)


def headlines() -> list[str]:
    """Return the newest record of each kind of machine, of clean sources on a machine that ran nothing else."""
    newest: dict[str, str] = {}
    for name in recorded():
        if not record(name)["shared_machine"] and record(name)["dirty"] is not True:
            newest.setdefault(device(name), name)
    return list(newest.values())


def timed(rows: list[Row]) -> list[Row]:
    """Return the rows that have a median."""
    return [row for row in rows if "median_s" in row]


def size(row: Row) -> str:
    """Return the size of C."""
    return f"{row['nnz_c'] * 12 / 1e9:.2g} GB"


def seconds(value: float | None) -> str:
    """Return seconds with a digit that means something."""
    return "" if value is None else f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"


def commands(name: str) -> str:
    """Return the table of all programs, from prompt to prompt."""
    lines = []
    for row in timed(record(name)["rows"]):
        ratio = row.get("over_best_peer", "")
        lines.append([row["case"], size(row), row["program"], seconds(row["median_s"]), spread(row),
                      seconds(row.get("median_run_s")), row["median_cpu_s"], ratio])  # fmt: skip
    head = ["product", "C", "program", "prompt to prompt", "from, to, trials", "first read to last write", "CPU s"]
    return table([*head, "over the best script"], lines)


def cold(name: str) -> str:
    """Return a sentence on the first run ever, with empty caches of kernels."""
    rows = [row for row in record(name)["warm_up"] if row["cold"] and row.get("right")]
    parts = [f"{row['program']} {row['s']:.1f} s" for row in rows]
    others = {what: statistics.median(times) for what, times in record(name)["commands"].items()}
    small = ", ".join(f"`{what}` {value:.2f} s" for what, value in others.items())
    return f"One trial each, with empty caches of compiled kernels, 27-point 16^3: {'; '.join(parts)}. Medians of others: {small}.\n"


def calls(name: str) -> str:
    """Return the table of calls, and their ratios once against once."""
    content = record(name)
    rows = content.get("calls", {}).get("rows", [])
    if not rows:
        return ""
    lines = [
        [row["case"], *(1e3 * s for s in (row["once_s"][0], later(row["once_s"]), later(row["again_s"]), later(row["peer_s"]))),
         *over_peer(row), *(f"{row[key]:.0%}" if key in row else "" for key in ("bus_once", "bus_again"))]
        for row in rows
    ]  # fmt: skip
    on_gpu = "gpu" in content
    peer = "CuPy's loop" if on_gpu else "SciPy, 1 thread"
    head = ["`spdist.matmul`, ms", "first", "later", "again", peer, "first over first", "later over later"]
    keywords = '`engine="cuda"` within a third of C; ' if on_gpu else ""
    kept = "C's page-locked buffers, which the peer does not have" if on_gpu else "buffers"
    first, after = (summary([over_peer(row)[n] for row in rows]) for n in (0, 1))
    return (
        f"\nCalls on matrices in memory, {keywords}call to return, operands that no call has seen.\n"
        f"*First*: of its kind in the process, which loads kernels and makes {kept}.\n"
        f"*Later*: with new operands. *Again*: with the same.\nFirst: {first} Later: {after}\n\n"
        + table([*head, *(["of the bus, once", "again"] if on_gpu else [])],
        [line if on_gpu else line[:-2] for line in lines])
    )  # fmt: skip


def later(times: list[float]) -> float:
    """Return the median of all trials but the first."""
    return statistics.median(times[1:])


def over_peer(row: Row) -> tuple[float, float]:
    """Return the peer's seconds over ours, of first calls and of later ones."""
    return row["peer_s"][0] / row["once_s"][0], later(row["peer_s"]) / later(row["once_s"])


def section(name: str) -> str:
    """Return what one record says."""
    where = record(name)["storage"]
    return (
        f"### {device(name)}\n\n"
        f"Fresh processes from prompt to prompt, medians; matrices in the page cache. Storage: {where}. Small products of each\n"
        "kind went before, so that kernels are compiled; a first trial may compile others. *1 GPU*, *2 GPUs*: `--workers 1` and\n"
        "`--workers 2`, which start a process for each; without, one process takes a GPU. The scripts (`benchmarks/peers`)\n"
        "neither compress nor check what they store, and SciPy leaves rows unsorted.\n"
        f"{SHARED if record(name)['shared_machine'] else ''}\n{commands(name)}\n{cold(name)}{calls(name)}\n{source(name)}"
    )


def cores(name: str) -> str:
    """Return the times of the CPU engine by number of threads, and the ratios of peers with as many as there are."""
    rows = record(name)["rows"]
    counts = list(rows[0]["seconds"])
    most = counts[-1]
    lines = [
        [row["work"], *(1e3 * row["seconds"][n] for n in counts), row["speed_up"][most],
         ", ".join(f"{peer} {ratio[most]:.2f}" for peer, ratio in row["ratio"].items() if most in ratio)]
        for row in rows
    ]  # fmt: skip
    return (
        f"### {device(name)}\n\n"
        f"Public calls in a process that has loaded the kernels, ms by threads, medians. Ratios with {most} threads, SciPy with\n"
        f"one{_means_and_rates(record(name))}\n\n"
        + table(["work", *(f"{n}" for n in counts), "speed-up", "ratios"], lines)
        + f"\n{source(name)}"
    )


def _means_and_rates(found: Any) -> str:
    """Return the end of a sentence: means of ratios and STREAM's triad, unless the run was stopped before them."""
    if "summary" not in found:
        return "."
    rates = ", ".join(f"{n}: {rate / 1e9:.1f}" for n, rate in found["triad_bytes_s"].items())
    means = "; ".join(
        f"{what} {ratios['geometric_mean']:.2f}, least {ratios['least']:.2f}"
        for what, ratios in found["summary"].items()
        if ratios.get("cases", 0) > 2
    )
    loop = "".join(
        f" A loop in registers gains {gain:.1f} with {n}." for n, gain in [*found.get("loop_speed_up", {}).items()][-1:]
    )
    return f"; geometric means: {means}. STREAM's triad, GB/s by threads: {rates}.{loop}"


def predictions(name: str) -> str:
    """Return what commands took beside what `spdist plan` had said."""
    found = record(name)
    lines = [
        [row["job"], row["engine"], seconds(row["predicted_s"]), seconds(row["wall_s"]), f"{row['ratio']:.2f}",
         f"{row['left_ratio']:.2f}" if row["left_ratio"] else "", len(row["trials"])]
        for row in found["rows"]
        if "ratio" in row
    ]  # fmt: skip
    near = sum(abs(row["ratio"] - 1) <= 0.25 for row in found["rows"] if "ratio" in row)
    trials = [trial for row in found["rows"] for trial in row["trials"] if "range_s" in trial and "wall_s" in trial]
    within = sum(trial["range_s"][0] <= trial["wall_s"] <= trial["range_s"][1] for trial in trials)
    head = [
        "command",
        "engine",
        "predicted",
        "prompt to prompt",
        "predicted / true",
        "time left, said / true",
        "trials",
    ]
    return (
        f"### {device(name)}\n\n"
        "`spdist plan`, then the command in a fresh process, kernels compiled before; medians. The time left is what the run\n"
        f"itself says after a tenth of its work. {near} of {len(lines)} are predicted within 25 %; {within} of {len(trials)}\n"
        f"trials lie within the bounds that were said. Storage: {found['storage']}.\n"
        f"{SHARED if found['shared_machine'] else ''}\n" + table(head, lines) + f"\n{source(name)}"
    )


def watching(name: str) -> str:
    """Return what open pages cost the scheduler of a run."""
    found = record(name)
    lines = [
        [run["pages"], seconds(run["wall_s"]), f"{run['cpu_s'] / run['wall_s']:.0%}", run["grown_bytes"] / 1e6,
         *([run["answers"], run["answer_bytes"] / 1e3, 1e3 * run["answer_s"]] if run["answers"] else ["", "", ""])]
        for run in found["runs"]
    ]  # fmt: skip
    head = ["pages", "run", "scheduler's share of a core", "it grew by, MB", "answers", "longest, kB", "median, ms"]
    return (
        f"### {device(name)}\n\n"
        f"A product of {found['blocks']:,} blocks on two workers and a scheduler of their own. Threads ask for the data of the page\n"
        f"`/spdist` once a second, each as an open page does.\n\n" + table(head, lines) + f"\n{source(name)}"
    )


def readme(names: list[str]) -> str:
    """Return README's tables: the default command of each product compared with the fastest script, and calls."""
    lines = []
    for name in names:
        rows = timed(record(name)["rows"])
        for case in dict.fromkeys(row["case"] for row in rows):
            ours = [
                row for row in rows if row["case"] == case and "over_best_peer" in row and len(times(row)) >= TRIALS
            ]
            if ours:
                row = next((row for row in ours if row["program"] == DEFAULT), ours[0])
                lines.append([case, size(row), device(name), row["program"], seconds(row["median_s"]),
                              spread(row), row["best_peer"], f"{row['over_best_peer']:.2f}", link(name)])  # fmt: skip
    ratios = [
        [f"`spdist.matmul` in memory, {len(rows)} products", device(name),
         *(f"{statistics.geometric_mean(found):.2f}, {min(found):.2f}" for found in zip(*map(over_peer, rows), strict=True)), link(name)]
        for name in names
        if (rows := record(name).get("calls", {}).get("rows", []))
    ]  # fmt: skip
    if not lines:
        return ""
    head = ["whole command", "C", "on", "engine", "median", "from, to, trials", "fastest script", "ratio", ""]
    return (
        "Whole commands in fresh processes, from prompt to prompt, compared with scripts that users write with zarr-python.\n"
        "Storage is memory (tmpfs), and kernels were compiled before; a first command takes longer. Engine auto is the\n"
        "default; other engines, some of them faster, are in docs/measured.md. The *ratio* is the script's time over spdist's:\n"
        "above 1, spdist is faster. Calls in memory have operands that no call has seen; *later* calls find kernels loaded and\n"
        "buffers made. They are compared with CuPy in a loop on a GPU, or with SciPy. 27-point n^3: C = A @ A for a 27-point\n"
        "stencil on an n x n x n grid. R-MAT s x e: C = A @ A for a power-law graph with 2^s vertices and e edges per vertex.\n"
        "A @ P is a stencil times a multigrid prolongation.\n\n"
        + table(head, lines)
        + (
            f"\n{table(['call to return', 'on', 'first call: ratio, least', 'later calls', ''], ratios)}"
            if ratios
            else ""
        )
    )


def spread(row: Row) -> str:
    """Return the least and the greatest seconds of the trials of a row, and how many there are."""
    took = sorted(times(row))
    return f"{took[0]:.1f} to {took[-1]:.1f}, {len(took)}"


def times(row: Row) -> list[float]:
    """Return the seconds of the trials of a row that came out right."""
    return [trial["s"] for trial in row["trials"] if trial.get("right")]


def link(name: str) -> str:
    """Return a link to a record, from README."""
    return f"[record](benchmarks/results/{name}.json)"
