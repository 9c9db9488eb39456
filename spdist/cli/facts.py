"""Facts of a matrix in the terminal: names and values; not by rich, which takes longer to load than the facts."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from spdist.foundation.units import format_bytes
from spdist.shown import printable

LEAST_WIDTH = 20
"""Minimum characters of a value in a line, even in a narrow terminal."""


def entries_in_words(block_size: Sequence[int] | None) -> str:
    """Return the name of the items that a matrix with blocks of this size stores."""
    return "entries" if block_size is None or tuple(block_size) == (1, 1) else "dense blocks"


def show_facts(facts: dict[str, Any]) -> None:
    """Print the facts that `info`, `check` or `status` returns, a line each; long values wrap."""
    rows = [tuple(map(printable, _row(name, value, facts))) for name, value in facts.items()]
    indent = max(len(name) for name, _ in rows) + 2
    width = max(shutil.get_terminal_size().columns - indent, LEAST_WIDTH)
    for name, text in rows:
        first, *others = textwrap.wrap(text, width, break_on_hyphens=False) or [""]
        print(f"{name:{indent}}{first}".rstrip())
        for line in others:
            print(f"{'':{indent}}{line}")


def _row(name: str, value: Any, facts: dict[str, Any]) -> tuple[str, str]:
    """Return a fact as its name and its value in words."""
    if name == "rows" and isinstance(value, dict):
        what = entries_in_words(facts.get("block_size"))
        return name, f"{value['min']:,} to {value['max']:,} {what}, mean {value['mean']:.2f}; {value['empty']:,} empty"
    if name in ("row_names", "column_names"):
        return name.replace("_", " "), "yes" if value else "no"
    if name == "bytes":
        return name, f"{format_bytes(value['memory'])} in memory, {format_bytes(value['stored'])} stored"
    if name == "shape":
        return name, " x ".join(f"{size:,}" for size in value)
    if name == "block_size":
        return "block size", f"{value[0]} x {value[1]}"
    if name == "events":
        return name, "; ".join(value)
    return name, f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
