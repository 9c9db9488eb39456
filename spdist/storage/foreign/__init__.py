"""Matrices that spdist did not write: bounds on what their Zarr chunks decode to, and which were checked before."""
