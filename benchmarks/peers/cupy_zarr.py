"""C = A @ B by CuPy and zarr-python, row block by row block: ``python cupy_zarr.py A B C ROWS``."""

import sys

import cupy
import cupyx.scipy.sparse as sp
import numpy as np
import zarr

rows = int(sys.argv[4])
a, b = (zarr.open_group(path, mode="r") for path in sys.argv[1:3])
indptr, (nrows, inner) = a["indptr"][:], a.attrs["shape"]
on_gpu = [cupy.asarray(b[name][:]) for name in ("data", "indices", "indptr")]
right = sp.csr_matrix(tuple(on_gpu), shape=tuple(b.attrs["shape"]))
c = zarr.create_group(sys.argv[3], attributes={"encoding-type": "csr_matrix", "encoding-version": "0.1.0"})
c.attrs["shape"] = [nrows, right.shape[1]]
data, indices = (
    c.create_array(name, shape=0, chunks=1 << 20, dtype=dtype, compressors=None)
    for name, dtype in (("data", right.dtype), ("indices", np.int32))
)
lengths = [[0]]
for start in range(0, nrows, rows):
    offsets = indptr[start : start + rows + 1]
    part = slice(offsets[0], offsets[-1])
    left = (cupy.asarray(x) for x in (a["data"][part], a["indices"][part], offsets - offsets[0]))
    block = (sp.csr_matrix(tuple(left), shape=(len(offsets) - 1, inner)) @ right).get()
    data.append(block.data)
    indices.append(block.indices)
    lengths.append(np.diff(block.indptr))
c["indptr"] = np.cumsum(np.concatenate(lengths))
