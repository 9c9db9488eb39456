"""Malformed files and arguments, made from small seeds; `python -m tests.fuzz --count 10000 --seed 1` runs many."""
