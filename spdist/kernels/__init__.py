"""Compute on one block: these modules know arrays and `CSR`, never Zarr, Dask or plans."""
