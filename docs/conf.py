"""Settings of the site that `make docs` builds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import spdist

HERE = Path(__file__).resolve().parent

project = "spdist"
version = release = spdist.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.mathjax", "numpydoc"]
templates_path = ["templates"]
html_theme = "furo"
html_title = f"spdist {release}"
myst_heading_anchors = 4
autodoc_typehints = "none"  # numpydoc's Parameters have them, with shapes
autosummary_generate = True
numpydoc_show_class_members = False
suppress_warnings = ["misc.highlighting_failure"]  # drawings and tables of the command line


def leave_out_links(app: Any, document: str, source: list[str]) -> None:
    """Turn links to files outside docs/ into plain text: the site has only docs/."""
    folder = (HERE / document).parent

    def plain(found: re.Match[str]) -> str:
        text, target = found[1], found[2].partition("#")[0]
        inside = "://" in target or not target or (folder / target).resolve().is_relative_to(HERE)
        return found[0] if inside else text

    source[0] = re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", plain, source[0])


def setup(app: Any) -> None:
    """Connect what the settings above do not reach."""
    app.connect("source-read", leave_out_links)
