"""Rows of a stored matrix as a matrix of their own, and a matrix whose rows lie in several: nothing is copied."""
