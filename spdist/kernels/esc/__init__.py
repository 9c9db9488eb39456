"""Expansion, sorting and compression (Polok, Ila, Smrz, 2015)."""
