"""Row-by-row products on CPUs, compiled by Numba."""
