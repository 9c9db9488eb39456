"""C = A @ B by a `dask.array` of SciPy's blocks, a few at a time: ``python dask_sparse.py A B C ROWS THREADS``."""

import sys

import dask
import dask.array as da
import numpy as np
import scipy.sparse as sp
import zarr

rows, threads = map(int, sys.argv[4:])


def read(path, start, stop):
    """Return rows of a stored matrix."""
    m = zarr.open_group(path, mode="r")
    offsets = m["indptr"][start : stop + 1]
    part = slice(offsets[0], offsets[-1])
    return sp.csr_matrix(
        (m["data"][part], m["indices"][part], offsets - offsets[0]), shape=(stop - start, m.attrs["shape"][1])
    )


def array(path, rows):
    """Return a matrix as a Dask array of row blocks."""
    (nrows, ncols), block = zarr.open_group(path, mode="r").attrs["shape"], dask.delayed(read)
    cuts = [(start, min(nrows, start + rows)) for start in range(0, nrows, rows)]
    meta = sp.csr_matrix((0, 0))
    blocks = [da.from_delayed(block(path, i, j), (j - i, ncols), float, meta=meta) for i, j in cuts]
    return da.concatenate(blocks)


a, b = array(sys.argv[1], rows), array(sys.argv[2], 1 << 60)
product = da.dot(a, b)
c = zarr.create_group(sys.argv[3], attributes={"encoding-type": "csr_matrix", "encoding-version": "0.1.0"})
c.attrs["shape"] = list(product.shape)
data, indices = (
    c.create_array(name, shape=0, chunks=1 << 20, dtype=dtype, compressors=None)
    for name, dtype in (("data", float), ("indices", np.int32))
)
lengths, blocks = [[0]], product.to_delayed().ravel()
for first in range(0, len(blocks), threads):
    for block in dask.compute(*blocks[first : first + threads], scheduler="threads", num_workers=threads):
        data.append(block.data)
        indices.append(block.indices)
        lengths.append(np.diff(block.indptr))
c["indptr"] = np.cumsum(np.concatenate(lengths))
