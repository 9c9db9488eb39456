"""Records of benchmarks/results as tables in Markdown, for `docs/measured.py`."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class RecordMissingError(Exception):
    """There is no record of this name: its code changed since, or it was not made yet."""


def record(name: str) -> dict[str, Any]:
    """Return a record of benchmarks/results."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise RecordMissingError(name)
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def shown(parts: Iterable[Callable[[], Any]]) -> list[Any]:
    """Return what functions return, without those that need a record that is not there."""
    found = []
    for part in parts:
        with contextlib.suppress(RecordMissingError):
            found.append(part())
    return found


def unrecorded() -> list[str]:
    """Return the names of the records that suites make and that are not there."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import suites

    names = [one.name for parts in suites.SUITES.values() for part in parts for one in part]
    return [name for name in names if not have(name)]


def have(*names: str) -> bool:
    """Whether there are these records."""
    return all((RESULTS / f"{name}.json").exists() for name in names)


def commits() -> list[str]:
    """Return the commits of the package that the records are of."""
    return sorted({str(json.loads(path.read_text())["commit"]) for path in RESULTS.glob("*.json")})


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of ratios."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def device(name: str) -> str:
    """Return what a record was measured on: the GPU and the cores of its host, or the processor."""
    content = record(name)
    host = content.get("device") or f"{content['cpu']}, 2 cores"
    if "host" in content:
        host = f"{content['host']['cpu']}, {content['host']['cores']} cores"
    shared = "; other jobs ran beside" if content.get("shared_machine") else ""
    if "gpu" not in content:
        return f"{host}{shared}"
    gpu = content["gpu"]["device"].removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")
    return f"{gpu}, host with {host.split(', ')[-1]}{shared}"


def source(*names: str) -> str:
    """Return the line under a table that says where its figures are from."""
    lines = []
    for name in names:
        stopped = record(name).get("stopped_after_s")
        part = f", stopped after {stopped:.0f} s, before its last cases" if stopped else ""
        lines.append(f"[{name}](../benchmarks/results/{name}.json) ({device(name)}{part})")
    return f"Record: {'; '.join(lines)}.\n"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in Markdown; floats with three digits, other numbers with separators."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:#.3g}"
        return f"{value:,}" if isinstance(value, int) else str(value)

    lines = [head, ["---"] * len(head), *([cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def summary(ratios: Sequence[float]) -> str:
    """Return the geometric mean and the least of some ratios as a sentence; fewer than three are listed."""
    if len(ratios) < 3:
        return f"Ratio: {' and '.join(f'{ratio:.2f}' for ratio in sorted(ratios))}."
    return f"Ratio: geometric mean {geometric_mean(ratios):.2f}, least {min(ratios):.2f}, {len(ratios)} cases."


def seconds_ratios(cases: Iterable[dict[str, Any]], peer: str) -> list[float]:
    """Return a peer's seconds over spdist's for cases that have both."""
    return [case["seconds"][peer] / case["seconds"]["spdist"] for case in cases if peer in case["seconds"]]


def million(count: float) -> str:
    """Return a count in millions."""
    return f"{count / 1e6:,.1f} M"
