"""Where the entries of a stored matrix lie: a picture of at most 256 x 256 cells."""

from __future__ import annotations

import base64
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from spdist.foundation.cpus import count_cpus
from spdist.foundation.display import Displayed, Drawing, Part
from spdist.foundation.units import counted
from spdist.jobs.operands import MatrixLike, open_operand
from spdist.storage.matrix import StoredMatrix

CELLS = 256
"""Cells in each direction at most."""
MOST_ENTRIES = 1 << 25
"""Entries that are read at most: a larger matrix is drawn by samples from each row of cells."""
RECORD_ENTRIES = 1 << 21
"""The same of each picture in the record of a run, for which the user waits."""

WHOLE_OFFSETS = 1 << 22
"""Rows up to which all offsets are read at once: each of 257 single reads takes the interpreter a millisecond."""
PART_ENTRIES = 1 << 20
"""Entries that are counted at a time."""

Counts = np.ndarray[Any, np.dtype[np.float64]]

_DARK, _LIGHT = (20, 70, 140), (120, 180, 240)
"""Colours of the cells with most and with fewest entries."""


@dataclass(frozen=True)
class DensityMap(Displayed):
    """How many entries of a matrix lie in each cell of a grid.

    Examples
    --------
    >>> found = DensityMap("A", (2, 2), np.array([[3.0, 0.0], [0.0, 1.0]]), 4, 4)
    >>> found.to_svg().startswith("<svg")
    True
    """

    name: str
    shape: tuple[int, int]  # (nrows, ncols)
    # (m, n) float64: entries of each cell, estimated if not all entries were read; dense blocks if the matrix is stored
    # in them
    counts: Counts
    entries: int
    entries_read: int

    def description(self) -> list[Part]:
        """Return the picture, and a line about it."""
        return [Drawing(self.to_svg()), self.caption]

    @property
    def caption(self) -> str:
        """What the picture shows, in words."""
        size = " x ".join(f"{n:,}" for n in self.shape)
        drawn = "" if self.entries_read == self.entries else f", drawn from {self.entries_read:,} of them"
        most = self.counts.max(initial=0.0)
        return f"{size}, {counted(self.entries, 'entry')}{drawn}; darkest cell: about {most:,.0f}"

    def to_png(self) -> bytes:
        """Return a PNG of a pixel a cell: the darker the more entries, on a logarithmic scale; clear where none are."""
        most = self.counts.max(initial=0.0)
        scale = 254 / np.log1p(most) if most else 0.0
        levels = np.where(self.counts > 0, 1 + scale * np.log1p(self.counts), 0).astype(np.uint8)
        steps = np.linspace(0, 1, 255)[:, None]
        colours = np.vstack([[0, 0, 0], (1 - steps) * _LIGHT + steps * _DARK]).astype(np.uint8)
        rows = np.pad(levels, ((0, 0), (1, 0)))  # each row begins with the number of its filter
        height, width = levels.shape
        header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            _png_chunk(kind, content)
            for kind, content in (
                (b"IHDR", header), (b"PLTE", colours.tobytes()), (b"tRNS", b"\0"),
                (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""),
            )
        )  # fmt: skip

    def to_uri(self) -> str:
        """Return the PNG as a ``data:`` address."""
        return f"data:image/png;base64,{base64.b64encode(self.to_png()).decode()}"

    def to_svg(self) -> str:
        """Return the picture with a frame, as one SVG element that needs no other file."""
        longest = max(*self.shape, 1)
        height, width = (max(24.0, 2 * CELLS * n / longest) for n in self.shape)
        name, caption = escape(self.name, quote=True), escape(self.caption, quote=True)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 2:.0f}" height="{height + 2:.0f}" '
            f'viewBox="-1 -1 {width + 2:.0f} {height + 2:.0f}" role="img" aria-label="{name}: {caption}">'
            f"<title>{name}: {caption}</title>"
            f'<image width="{width:.0f}" height="{height:.0f}" preserveAspectRatio="none" '
            f'style="image-rendering: pixelated" href="{self.to_uri()}"/>'
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="none" stroke="#808080"/></svg>'
        )


def density_map(matrix: MatrixLike, most: int | None = None) -> DensityMap:
    """Count the entries of a stored matrix in the cells of a grid; `spdist.spy` describes it.

    `most`: entries to read at most; `MOST_ENTRIES` by default.
    """
    m, most = open_operand(matrix), MOST_ENTRIES if most is None else most
    counts = np.zeros((min(CELLS, m.nrows), min(CELLS, m.ncols)))
    read = _count(m, counts) if m.nnz <= most else _sample(m, counts, most)
    return DensityMap(m.url, m.full_shape, counts, m.nnz, read)


def _count(m: StoredMatrix, counts: Counts) -> int:
    """Count every entry; return how many there are."""
    height, width = counts.shape
    for start, stop, offsets in m.row_blocks(PART_ENTRIES) if counts.size else ():
        rows = np.repeat(np.arange(start, stop) * height // m.nrows * width, np.diff(offsets))
        columns = m.read_indices(int(offsets[0]), int(offsets[-1])).astype(np.int64, copy=False)
        counts += np.bincount(rows + columns * width // m.ncols, minlength=counts.size).reshape(counts.shape)
    return m.nnz


def _sample(m: StoredMatrix, counts: Counts, most: int) -> int:
    """Estimate the counts of each row of cells from entries in its middle; return how many were read."""
    height, width = counts.shape
    bounds = [-(-i * m.nrows // height) for i in range(height + 1)]

    def sample(i: int) -> int:
        first, last = ends[i : i + 2]
        begin = first + max(last - first - most // height, 0) // 2
        end = min(last, begin + most // height)
        if begin < end:
            columns = m.read_indices(begin, end).astype(np.int64, copy=False)
            counts[i] = np.bincount(columns * width // m.ncols, minlength=width) * ((last - first) / (end - begin))
        return int(max(end - begin, 0))

    with ThreadPoolExecutor(count_cpus()) as pool:  # to read an offset or a sample is to decode its Zarr chunks
        if m.nrows <= WHOLE_OFFSETS:
            ends = m.read_indptr(0, m.nrows)[bounds].tolist()
        else:
            ends = list(pool.map(lambda row: int(m.read_indptr(row, row)[0]), bounds))
        return sum(pool.map(sample, range(height)))


def density_maps(a: MatrixLike, b: MatrixLike, c: MatrixLike) -> dict[str, dict[str, str]]:
    """Return pictures of A, B and C as a report holds them.

    Returns for each matrix its picture and what it shows.
    """
    opened = {name: open_operand(matrix) for name, matrix in zip("ABC", (a, b, c), strict=True)}
    maps = {m.url: density_map(m, RECORD_ENTRIES) for m in {m.url: m for m in opened.values()}.values()}
    return {name: {"image": maps[m.url].to_uri(), "caption": maps[m.url].caption} for name, m in opened.items()}


def _png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
