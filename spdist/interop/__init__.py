"""Stored matrices as what other libraries know, and back: SciPy's matrices, NumPy's vectors, Dask's arrays."""
