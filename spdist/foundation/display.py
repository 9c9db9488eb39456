"""Descriptions of objects as lines, tables and drawings, for terminals, plain text and notebooks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from spdist.shown import printable, without_secrets

if TYPE_CHECKING:
    from rich.console import Console

TEXT_WIDTH = 120
"""Characters of a line of plain text."""


@dataclass(frozen=True)
class Table:
    """Rows of text below the names of their columns."""

    columns: tuple[str, ...]  # empty for a table of names and their values
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...] = ()  # columns of numbers
    last: tuple[str, ...] = ()  # A row of totals below a line; empty for none


@dataclass(frozen=True)
class Drawing:
    """A picture as SVG, for notebooks alone."""

    svg: str


Part = str | Table | Drawing
"""A line, a table or a drawing."""


class Displayed:
    """Base of objects that notebooks show by their `description`."""

    def description(self) -> Sequence[Part]:
        """Return the description of the object."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """Return the description as HTML; Jupyter calls this."""
        return as_html(self.description())


def print_parts(parts: Sequence[Part], console: Console) -> None:
    """Print a description in a terminal.

    `parts`: drawings are left out.
    """
    from rich import table as rich_table
    from rich.text import Text

    for part in parts:
        if isinstance(part, str):
            console.print(printable(part), markup=False)
        elif isinstance(part, Table):
            if part.columns:
                shown = rich_table.Table(title=None)
                for name in part.columns:
                    shown.add_column(name, justify="right" if name in part.right else "left", overflow="fold")
            else:
                shown = rich_table.Table(box=None, show_header=False, padding=(0, 2, 0, 0))
                for _ in part.rows[0] if part.rows else ():
                    shown.add_column(overflow="fold")  # paths whole
            for row in part.rows:
                shown.add_row(*(Text(printable(text)) for text in row))
            if part.last:
                shown.add_section()
                shown.add_row(*(Text(printable(text)) for text in part.last))
            console.print(shown)


def as_text(parts: Sequence[Part]) -> str:
    """Return a description as plain text.

    Examples
    --------
    >>> print(as_text(["a matrix", Table((), (("rows", "3"),))]))
    a matrix
    rows  3
    """
    from rich.console import Console

    file = io.StringIO()
    print_parts(parts, Console(file=file, width=TEXT_WIDTH, highlight=False, soft_wrap=True, color_system=None))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def as_html(parts: Sequence[Part]) -> str:
    """Return a description as HTML that a notebook's own style fits.

    Examples
    --------
    >>> as_html(["1 < 2"])
    '<div><p style="margin: 0.3em 0">1 &lt; 2</p></div>'
    """
    return f"<div>{''.join(_html_of(part) for part in parts)}</div>"


def _html_of(part: Part) -> str:
    if isinstance(part, str):
        return f'<p style="margin: 0.3em 0">{escape(without_secrets(part))}</p>'
    if isinstance(part, Drawing):
        return part.svg
    heads = "".join(_cell("th", name, name in part.right) for name in part.columns)
    rows = [f"<tr>{heads}</tr>"] if heads else []
    names = part.columns or ("",) * max((len(row) for row in part.rows), default=0)
    for row in (*part.rows, *([part.last] if part.last else [])):
        cells = (_cell("td", text, name in part.right) for name, text in zip(names, row, strict=True))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _cell(tag: str, text: str, right: bool) -> str:
    return f'<{tag} style="text-align: {"right" if right else "left"}">{escape(without_secrets(text))}</{tag}>'
