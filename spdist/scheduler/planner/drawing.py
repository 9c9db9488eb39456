"""Pictures of a plan as SVG: how C is cut into blocks, and what the memory of a worker holds."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from spdist.foundation.display import Drawing
from spdist.foundation.units import format_bytes

SIDE = 180.0
"""Height of the picture of C, and width of a square one."""
STRIPES = 180
"""Row blocks that are drawn one by one; more are drawn by their sums."""
BAR = 420.0
"""Width of the memory bar up to the limit."""
COLOURS = ("#4878a8", "#6aa56a", "#d08a3c", "#b0566b", "#7d6bb0")

Rows = tuple[int, int, int]
"""The first row of a block, the row after its last, and its products."""


def cut_drawing(shape: tuple[int, int], blocks: Sequence[Rows], column_bounds: Sequence[int]) -> Drawing:
    """Draw how C is cut: a stripe for each row block, the darker the more products a row has.

    `shape`: (nrows, ncols).
    `column_bounds`: of the parts of B's columns.

    Examples
    --------
    >>> cut_drawing((4, 4), [(0, 2, 8), (2, 4, 1)], (0, 4)).svg.count("<rect")
    3
    """
    nrows, ncols = max(shape[0], 1), max(shape[1], 1)
    width = min(max(SIDE * ncols / nrows, 24.0), 2 * SIDE)
    merged = _merged(blocks)
    density = [products / max(stop - start, 1) for start, stop, products in merged]
    most = max(density, default=0.0) or 1.0
    edge = 0.5 if len(merged) <= STRIPES // 3 else 0.0
    scale = SIDE / nrows
    stripes = "".join(
        f'<rect x="0" y="{scale * start:.2f}" width="{width:.1f}" height="{scale * (stop - start):.2f}" '
        f'fill="{COLOURS[0]}" fill-opacity="{0.2 + 0.8 * each / most:.2f}" '
        f'stroke="currentColor" stroke-width="{edge}"/>'
        for (start, stop, _), each in zip(merged, density, strict=True)
    )
    cuts = "".join(
        f'<line x1="{width * bound / ncols:.1f}" x2="{width * bound / ncols:.1f}" y1="0" y2="{SIDE:.0f}" '
        'stroke="currentColor"/>'
        for bound in column_bounds[1:-1]
    )
    frame = f'<rect x="0" y="0" width="{width:.1f}" height="{SIDE:.0f}" fill="none" stroke="currentColor"/>'
    return _svg(f"C in {len(blocks):,} row blocks", width, SIDE, stripes + cuts + frame)


def _merged(blocks: Sequence[Rows]) -> list[Rows]:
    """Add up neighbours until there are few enough blocks to draw."""
    step = -(-len(blocks) // STRIPES) or 1
    groups = [blocks[i : i + step] for i in range(0, len(blocks), step)]
    return [(group[0][0], group[-1][1], sum(products for _, _, products in group)) for group in groups]


def memory_drawing(parts: Sequence[tuple[str, int]], limit: int) -> Drawing:
    """Draw what the memory of a worker holds at most, beside its limit.

    `parts`: what takes memory, and its bytes.
    `limit`: bytes.

    Examples
    --------
    >>> "of 4.00 KiB" in memory_drawing([("A", 1 << 10), ("B", 2 << 10)], 4 << 10).svg
    True
    """
    total = sum(size for _, size in parts)
    scale = BAR / max(limit, total, 1)
    bars, labels, x = "", "", 0.0
    for i, (name, size) in enumerate(parts):
        colour = COLOURS[i % len(COLOURS)]
        bars += f'<rect x="{x:.1f}" y="0" width="{scale * size:.1f}" height="18" fill="{colour}"/>'
        labels += f'<rect x="0" y="{26 + 18 * i}" width="10" height="10" fill="{colour}"/>'
        labels += _label(16, 35 + 18 * i, f"{name}: {format_bytes(size)}")
        x += scale * size
    labels += _label(
        0, 35 + 18 * len(parts), f"{format_bytes(sum(size for _, size in parts))} of {format_bytes(limit)}"
    )
    frame = f'<rect x="0" y="0" width="{scale * limit:.1f}" height="18" fill="none" stroke="currentColor"/>'
    return _svg("memory of a worker", BAR, 44 + 18 * len(parts), bars + frame + labels)


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y}" font-size="12" fill="currentColor">{escape(text)}</text>'


def _svg(title: str, width: float, height: float, inside: str) -> Drawing:
    size = f'width="{width + 2:.0f}" height="{height + 2:.0f}" viewBox="-1 -1 {width + 2:.1f} {height + 2:.1f}"'
    return Drawing(
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" {size} '
        f'style="margin: 4px 12px 4px 0; vertical-align: top"><title>{escape(title)}</title>{inside}</svg>'
    )
