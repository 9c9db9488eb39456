"""Zarr's files as spdist writes them, without Zarr, which takes longer to load than a small command to run."""
