"""Reach and protect Dask clusters: keys, addresses of running schedulers, limits of this machine."""
