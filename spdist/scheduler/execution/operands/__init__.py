"""Operands of a block: its rows of A, B and the mask, and a resident B."""
