"""From a plan to a finished C, on Dask workers."""
