"""A list of edges to CSR in Zarr by pandas, SciPy and zarr-python: ``python pandas_zarr.py FILE SEPARATOR C``."""

import sys

import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr

edges = pd.read_csv(sys.argv[1], sep=sys.argv[2], header=None, decimal="," if sys.argv[2] == ";" else ".")
if edges[0].dtype.kind in "iu":
    rows, columns = edges[0].to_numpy(), edges[1].to_numpy()
    n = int(max(rows.max(), columns.max())) + 1
else:
    codes, names = pd.factorize(pd.concat([edges[0], edges[1]], ignore_index=True))
    (rows, columns), n = np.split(codes, 2), len(names)
matrix = sp.coo_array((edges[2].to_numpy(float), (rows, columns)), shape=(n, n)).tocsr()
matrix.sort_indices()
c = zarr.create_group(sys.argv[3], attributes={"encoding-type": "csr_matrix", "encoding-version": "0.1.0"})
c.attrs["shape"] = [n, n]
for name in ("data", "indices", "indptr"):
    c.create_array(name, data=getattr(matrix, name), compressors=None)
