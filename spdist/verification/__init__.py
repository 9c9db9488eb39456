"""Checks that C = A @ B."""
