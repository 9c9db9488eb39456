"""Rows that are made already: merged, inflated, counted by bins."""
