"""Matrices that other programs wrote: bounds on decoded Zarr chunks, a check of each matrix, groups around them."""
