"""C = A @ B by SciPy and zarr-python, a few row blocks at a time: ``python scipy_zarr.py A B C ROWS THREADS``."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import scipy.sparse as sp
import zarr

rows, threads = map(int, sys.argv[4:])
a, b = (zarr.open_group(path, mode="r") for path in sys.argv[1:3])
indptr, (nrows, inner) = a["indptr"][:], a.attrs["shape"]
right = sp.csr_array((b["data"][:], b["indices"][:], b["indptr"][:]), shape=b.attrs["shape"])
c = zarr.create_group(sys.argv[3], attributes={"encoding-type": "csr_matrix", "encoding-version": "0.1.0"})
c.attrs["shape"] = [nrows, right.shape[1]]
data, indices = (
    c.create_array(name, shape=0, chunks=1 << 20, dtype=dtype, compressors=None)
    for name, dtype in (("data", right.dtype), ("indices", np.int32))
)


def multiply(start):
    """Return the product of some rows; SciPy leaves each row unsorted."""
    offsets = indptr[start : start + rows + 1]
    part = slice(offsets[0], offsets[-1])
    left = (a["data"][part], a["indices"][part], offsets - offsets[0])
    return sp.csr_array(left, shape=(len(offsets) - 1, inner)) @ right


lengths, starts = [[0]], range(0, nrows, rows)
with ThreadPoolExecutor(threads) as pool:
    for first in range(0, len(starts), threads):
        for block in pool.map(multiply, starts[first : first + threads]):
            data.append(block.data)
            indices.append(block.indices)
            lengths.append(np.diff(block.indptr))
c["indptr"] = np.cumsum(np.concatenate(lengths))
