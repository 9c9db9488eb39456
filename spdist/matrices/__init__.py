"""Matrices in memory: their formats, dtypes and checks."""
