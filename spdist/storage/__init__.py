"""Matrices in Zarr, and the ways in and out of it."""
