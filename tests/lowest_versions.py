"""Print the lowest versions that `pyproject.toml` allows, as constraints of pip: ``make matrix-lowest``."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
TOOLS = "dev", "docs"
"""Extras of development."""


def lowest_versions(project: str) -> list[str]:
    """Return a constraint for each dependency with a lower bound; tools of development keep their newest versions."""
    facts = tomllib.loads(project)["project"]
    extras = facts["optional-dependencies"]
    named = [*facts["dependencies"], *(each for name in extras if name not in TOOLS for each in extras[name])]
    found = (re.match(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)", each) for each in named)
    return [f"{each[1]}=={each[2]}" for each in found if each]


if __name__ == "__main__":
    print(*lowest_versions(PROJECT.read_text()), sep="\n")
