"""A Dask array larger than memory, stored by `spdist.from_dask`: seconds, and memory seen from outside.

The blocks of the array are made when they are asked for, with random columns, so that nothing but `from_dask` holds
them. It runs in a process of its own, whose resident memory this one reads from the system until it ends. The matrix is
then checked: its tables of checksums, the order of its rows, and the sum of its values, which is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import record
import scipy.sparse as sp

ROW_ENTRIES = 100
BLOCK_ROWS = 20_000


def make_block(height: int, ncols: int, number: int) -> sp.csr_array:
    """Return rows of `ROW_ENTRIES` entries in different columns, sorted; their values are small whole numbers."""
    rng, width = np.random.default_rng(number), ncols // ROW_ENTRIES
    columns = rng.integers(0, width, (height, ROW_ENTRIES), np.int32) + np.arange(ROW_ENTRIES, dtype=np.int32) * width
    values = np.ones(height * ROW_ENTRIES)
    values[:: max(height, 1)] = number
    return sp.csr_array((values, columns.ravel(), np.arange(height + 1) * ROW_ENTRIES), shape=(height, ncols))


def lazy(nrows: int, ncols: int) -> Any:
    """Return the Dask array."""
    import dask.array as da

    heights = tuple(min(BLOCK_ROWS, nrows - start) for start in range(0, nrows, BLOCK_ROWS))
    return da.map_blocks(
        lambda block_info: make_block(heights[block_info[None]["chunk-location"][0]], ncols,
                                      block_info[None]["chunk-location"][0]),
        chunks=(heights, (ncols,)), dtype=np.float64, meta=sp.csr_array((0, 0)),
    )  # fmt: skip


def store(place: str, nrows: int, ncols: int) -> None:
    """Store the array, and print the seconds."""
    import spdist

    begin = time.perf_counter()
    spdist.from_dask(lazy(nrows, ncols), place)
    print(json.dumps({"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time()}))


def measured(words: list[str]) -> dict[str, float]:
    """Run a command that prints JSON; add the most memory that it was seen to take: in all, and more than at first."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    seen, peak = psutil.Process(process.pid), 0
    while process.poll() is None:
        try:
            peak = max(peak, seen.memory_info().rss)
        except psutil.Error:
            break
        time.sleep(0.05)
    out = process.communicate()[0]
    if process.returncode:
        raise SystemExit(process.returncode)
    found: dict[str, float] = json.loads(out)
    return found | {"peak_rss": peak}


def main() -> None:
    """Measure, check, record."""
    parser = record.parser(__doc__ or "")
    parser.add_argument("--entries", type=int, default=1_000_000_000)
    parser.add_argument("--ncols", type=int, default=10_000_000)
    parser.add_argument(
        "--folder", type=Path, help="where the matrix is written; by default the one for temporary files"
    )
    parser.add_argument("--store", help="place of the matrix: what the process that is measured is called with")
    args = parser.parse_args()
    nrows, ncols = (3 * BLOCK_ROWS // 2 if args.quick else args.entries // ROW_ENTRIES), args.ncols
    if args.store:
        store(args.store, nrows, ncols)
        return
    import spdist

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        place = f"{folder}/A.zarr"
        words = ["--entries", str(nrows * ROW_ENTRIES), "--ncols", str(ncols), "--store", place]
        found = measured([sys.executable, __file__, *words])
        matrix = spdist.open(place)
        heights = [min(BLOCK_ROWS, nrows - start) for start in range(0, nrows, BLOCK_ROWS)]
        expected = sum(ROW_ENTRIES * (height + number - 1) for number, height in enumerate(heights))
        total = sum(matrix.rows(start, stop).data.sum() for start, stop, _ in matrix.row_blocks(1 << 22))
        ok = spdist.check(place).ok and matrix.nnz == nrows * ROW_ENTRIES and total == expected
        nbytes = matrix.nbytes
    print(f"{nrows * ROW_ENTRIES:,} entries, {nbytes / 1e9:.1f} GB in memory: {found['seconds']:.1f} s, at most "
          f"{found['peak_rss'] / 2**20:,.0f} MiB, {'right' if ok else 'WRONG'}")  # fmt: skip
    shape = {"nrows": nrows, "ncols": ncols, "entries": nrows * ROW_ENTRIES, "nbytes": nbytes}
    record.write({"benchmark": "from_dask", **shape, "results": {**found, "ok": bool(ok)}}, args.out)
    if not ok:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
