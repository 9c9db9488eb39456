"""Bring a matrix into SELL-C-sigma on the GPU: the launches of `build.cu`."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from spdist.errors import MatrixError
from spdist.kernels.cuda.constants import SELL_WARPS
from spdist.kernels.cuda.module import C_TYPES, c_type, module
from spdist.kernels.rounding import ceil_div
from spdist.kernels.spmv.sell.format import (
    BLOCKED_SHARE,
    BLOCKS,
    FEW_LISTS,
    GPU_LONG,
    LANES,
    SAMPLES,
    WINDOW,
)
from spdist.kernels.spmv.sell.layout import (
    Placement,
    Sharing,
    choose_window,
    cut_long_rows,
    list_places,
    no_long_rows,
    piece_on_gpu,
    share,
    sort_by_length,
    sort_groups,
)
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import DeviceArray, IndexArray

FILE = "spmv/sell/build.cu"
SURVEY_BLOCKS = 1024
"""Most thread blocks that count the rows of each length: each adds its counts to the counts of all."""


def placing(index: str, pointer: str) -> tuple[str, ...]:
    """Return the name expressions of the kernels that read no values, which are small and compiled together."""
    names = (f"sell_{step}<{pointer}>" for step in ("part", "sort", "keys"))
    return f"sell_survey<{index}, {pointer}>", *names, "sell_cut", "sell_starts"


@dataclass(frozen=True)
class Survey:
    """Lengths of the rows of a matrix."""

    counts: IndexArray  # (GPU_LONG + 2,) int64: rows of each number of entries; the last: of more than `GPU_LONG`
    slots: int  # sum of the widths of chunks of `height` rows, unsorted, if no row is longer
    blocked: IndexArray  # (len(BLOCKS),) int64: rows of the sample in blocks of each side
    height: int  # rows of a chunk of rows that are not tall
    sharing: Sharing

    @functools.cached_property
    def rest(self) -> int:
        """Rows that are neither tall nor long."""
        return int(self.counts[: self.sharing.most + 1].sum())

    @functools.cached_property
    def long(self) -> int:
        """Rows that stay in CSR."""
        return int(self.counts[self.sharing.long + 1 :].sum())

    def tall(self, entries: int) -> int:
        """Return the number of tall rows with more than `entries` entries."""
        return int(self.counts[max(entries, self.sharing.most) + 1 : self.sharing.long + 1].sum())

    def entries(self) -> int:
        """Return the entries of the rows that are neither tall nor long."""
        return int(self.counts[: self.sharing.most + 1] @ np.arange(self.sharing.most + 1))

    def sorted_slots(self) -> int:
        """Return the sum of the widths of chunks of these, sorted all together."""
        # than 0, 1, 2, ...: of as many chunks the first
        longer = self.rest - np.cumsum(self.counts[: self.sharing.most + 1])
        return int((-(-longer // self.height)).sum())


class Builder:
    """The steps of `sell.build` for a matrix on the GPU.

    Waiting for the GPU takes as long as some launches, so each step reads all its numbers back at once.
    """

    def __init__(self, a: CSR, lanes: int, height: int) -> None:
        import cupy

        if lanes != LANES:
            raise MatrixError(f"a chunk has {LANES} lanes on the GPU, not {lanes}")
        self.xp, self.a, self.height = cupy, a, height
        types = C_TYPES[np.dtype(a.indices.dtype)], C_TYPES[np.dtype(a.indptr.dtype)]
        self.types, self.pointer, self.placing = ", ".join(types), types[1], placing(*types)

    @functools.cached_property
    def survey(self) -> Survey:
        """Lengths of the rows, and how many rows of a sample are blocked."""
        nrows = self.a.nrows
        stride = max(1, nrows // SAMPLES)
        samples = ceil_div(nrows, stride)
        found = self.xp.zeros(GPU_LONG + 3 + len(BLOCKS), np.int64)
        height = self.height or LANES
        if nrows:
            grid = ceil_div(samples, 256) + min(ceil_div(nrows, 256), SURVEY_BLOCKS)
            self._launch(f"sell_survey<{self.types}>", grid, (
                samples, stride, nrows, height, self.a.indptr, self.a.indices, found
            ))  # fmt: skip
        host = found.get()
        counts, slots, blocked = host[: GPU_LONG + 2], int(host[GPU_LONG + 2]), host[GPU_LONG + 3 :]
        sharing = Sharing(GPU_LONG, GPU_LONG) if self.height else share(counts, self.a.nnz)
        return Survey(counts, slots, blocked, height, sharing)

    def find_block(self) -> int:
        """Return the side of the dense blocks that most sampled rows are made of; 1 without dense blocks."""
        samples = ceil_div(self.a.nrows, max(1, self.a.nrows // SAMPLES))
        blocked = zip(BLOCKS, self.survey.blocked.tolist(), strict=True)
        return max((b for b, n in blocked if samples and n >= BLOCKED_SHARE * samples), default=1)

    def has_long_rows(self) -> bool:
        """Whether rows stay in CSR."""
        return self.survey.long > 0

    def place(self, sigma: int | Literal["auto"], block: int, entry_bytes: int) -> Placement:
        """Choose sigma if it is "auto", sort the rows in groups of `block`, and cut them into chunks.

        Rows far longer than others, which several lanes take, have the last positions, sorted all together, and the
        first chunks.
        """
        if block > 1:
            lengths = self.a.indptr[1:] - self.a.indptr[:-1]
            sigma, order = sort_groups(lengths, sigma, LANES, block, entry_bytes)
            return Placement(
                self._cut([(0, len(lengths), LANES)]), None if order is None else order.astype(np.int32), sigma
            )
        survey = self.survey
        if sigma == "auto":
            sigma = choose_window(self._slots, survey.entries(), survey.rest, survey.height, entry_bytes, 4)
        rows = self._ordered(sigma)
        most, start, runs = survey.sharing.most, survey.rest, []
        for threads in (32, 16, 8, 4, 2) if survey.tall(0) else ():
            end = survey.rest + survey.tall(most * threads // 2)  # rows of more entries get `threads` lanes
            runs.append((start, end - start, LANES // threads))
            start = end
        return Placement(self._cut([*runs, (0, survey.rest, survey.height)]), rows, sigma)

    @functools.cached_property
    def _parted(self) -> tuple[Any, Any]:
        """Rows of chunks, tall ones last, None if all rows are in order; and the rows that stay in CSR."""
        survey, nrows = self.survey, self.a.nrows
        long_rows = self.xp.empty(survey.long, np.int32)
        if survey.rest == nrows:
            return None, long_rows
        rows, tiles = self.xp.empty(nrows - survey.long, np.int32), ceil_div(nrows, 1024)
        self._launch(f"sell_part<{self.pointer}>", tiles, (
            nrows, survey.sharing.most, survey.sharing.long, survey.rest, survey.long, self.a.indptr,
            self.xp.zeros(tiles + 1, np.int64), rows, long_rows, self._notes[2:],
        ), 1024)  # fmt: skip
        return rows, long_rows

    @functools.cached_property
    def _notes(self) -> Any:
        """Slots of chunks as rows are and as windows are sorted; starts and entries of the rows that stay in CSR."""
        return self.xp.zeros(2 + 2 * self.survey.long, np.int64)

    @functools.cached_property
    def _noted(self) -> IndexArray:
        """The notes, copied to the host after the kernels launched so far."""
        noted: IndexArray = self._notes.get()
        return noted

    @functools.cached_property
    def _windows(self) -> Any:
        """Rows of chunks, sorted in windows, but for tall ones."""
        rows, n = self._parted[0], self.survey.rest
        ordered = self.xp.empty(n if rows is None else len(rows), np.int32)
        self._launch(f"sell_sort<{self.pointer}>", ceil_div(n, WINDOW), (
            n, self.survey.height, self.a.indptr, rows, ordered, self._notes
        ))  # fmt: skip
        return ordered

    def _slots(self, window: int) -> int:
        """Return the sum of the widths of all chunks if rows that are not tall are sorted in such windows."""
        if window == 1 and self._parted[0] is None:
            return self.survey.slots
        if window == self.survey.rest or not self.survey.rest:
            return self.survey.sorted_slots()
        _ = self._windows  # notes both
        return int(self._noted[0 if window == 1 else 1])

    def _ordered(self, sigma: int) -> Any:
        """Return the row at each position, None if positions are rows."""
        rows, n, xp = self._parted[0], self.survey.rest, self.xp
        ordered = rows
        if sigma == WINDOW and n:
            ordered = self._windows
        elif sigma > 1 and n:
            keys = self._keys(rows, n)
            lengths = None if sigma >= n else GPU_LONG - keys.astype(np.int32)
            order = xp.argsort(keys, kind="stable") if lengths is None else sort_by_length(lengths, sigma)
            if rows is None:
                return order.astype(np.int32)
            ordered = xp.empty_like(rows)
            ordered[:n] = rows[:n][order]
        if rows is not None and len(rows) > n:
            ordered[n:] = rows[n:][xp.argsort(self._keys(rows[n:], len(rows) - n), kind="stable")]
        return ordered

    def _keys(self, rows: DeviceArray | None, count: int) -> Any:
        """Return what rows are sorted by: few bits, so that the sort passes over them few times."""
        keys = self.xp.empty(count, np.uint16)
        self._launch(f"sell_keys<{self.pointer}>", ceil_div(count, 256), (count, self.a.indptr, rows, keys))
        return keys

    def _cut(self, runs: list[tuple[int, int, int]]) -> Any:
        """Return the chunks of runs of positions: the first, how many, and rows of a chunk."""
        ends = list(itertools.accumulate(ceil_div(count, height) for _, count, height in runs))
        chunks = self.xp.empty((ends[-1], 4), np.int64)
        for (first, count, height), end in zip(runs, ends, strict=True):
            if count:
                nchunks = ceil_div(count, height)
                self._launch("sell_cut", ceil_div(nchunks, 256), (first, count, height, chunks[end - nchunks :]))
        return chunks

    def long_rows(self, dtype: np.dtype[Any]) -> tuple[Any, ...]:
        """Return the rows that stay in CSR, cut into pieces."""
        xp, a, n = self.xp, self.a, self.survey.long
        if not n:
            return no_long_rows(xp, dtype)
        rows, noted = self._parted[1], self._noted
        cut = cut_long_rows(noted[2 + n :], a.nnz, piece_on_gpu(noted[2 + n :]))
        there = xp.asarray(np.concatenate(cut))  # one copy
        indptr, pieces, row_pieces = there[: n + 1], there[n + 1 : -(n + 1)], there[-(n + 1) :].astype(np.int32)
        indices, data = xp.empty(int(cut[0][-1]), np.int32), xp.empty(int(cut[0][-1]), dtype)
        name = f"sell_copy<{c_type(np.dtype(a.dtype))}, {c_type(dtype)}, {C_TYPES[np.dtype(a.indices.dtype)]}>"
        self._launch(name, len(cut[1]) - 1, (
            n, pieces, row_pieces, indptr, self._notes[2:], a.indices, a.data, indices, data
        ))  # fmt: skip
        return rows, indptr, indices, data, pieces, row_pieces

    def fill(self, placed: Placement, block: int, dtype: np.dtype[Any], allowed: int) -> tuple[Any, ...]:
        """Find each chunk's width and kind, and where its arrays are; return values and indices of all chunks.

        All that was launched before has ended then: products launched early do not wait for what they multiply.
        """
        xp, nchunks = self.xp, len(placed.chunks)
        sizes, starts = xp.empty((2, 4, nchunks), np.int64)
        owners, places, tiles = xp.empty(nchunks, np.int32), list_places(nchunks), ceil_div(nchunks, 256)
        zeros = xp.zeros(6 + 4 * (tiles + 1) + places // 2, np.int64)
        totals, differ, states, found = zeros[:5], zeros[5:6], zeros[6:], zeros[6 + 4 * (tiles + 1) :]
        if nchunks:
            self._launch(f"sell_analyse<{self.types}, {block}>", ceil_div(nchunks, SELL_WARPS), (
                nchunks, self.a.nrows, dtype.itemsize, allowed, places, self.a.indptr, self.a.indices, placed.rows,
                placed.chunks, sizes, found,
            ))  # fmt: skip
            self._launch("sell_starts", (tiles, 4), (nchunks, places, sizes, found, states, owners, starts, totals))
        values, wide, narrow, shared, listed = totals.get().tolist()
        filled = xp.empty(values, dtype), xp.empty(narrow, np.uint16)
        if listed > FEW_LISTS * nchunks:
            lists = xp.empty(shared, np.int32)
            self._fill(placed, block, starts, owners, (filled[0], lists, filled[1]), differ)
            if not differ.get()[0]:
                return filled[0], lists, filled[1]
        apart = filled[0], xp.empty(wide, np.int32), filled[1]  # few lists, or two of one hash
        self._fill(placed, block, starts, None, apart, differ)
        self.xp.cuda.get_current_stream().synchronize()
        return apart

    def _fill(
        self, placed: Placement, block: int, starts: DeviceArray, owners: DeviceArray | None, filled: tuple[Any, ...],
        differ: DeviceArray,
    ) -> None:  # fmt: skip
        a, nchunks, chunks, rows = self.a, len(placed.chunks), placed.chunks, placed.rows
        name = f"sell_fill<{c_type(np.dtype(a.dtype))}, {c_type(filled[0].dtype)}, {self.types}, {block}>"
        for shared in () if not nchunks else (0,) if owners is None else (0, 1):
            self._launch(name, ceil_div(nchunks, SELL_WARPS), (
                nchunks, a.indptr, a.indices, a.data, rows, starts, owners, shared, chunks, *filled, differ
            ))  # fmt: skip

    def _launch(self, name: str, grid: int | tuple[int, int], arguments: tuple[Any, ...], block: int = 256) -> None:
        module(FILE, self.placing if name in self.placing else (name,))(name, grid, block, arguments)
