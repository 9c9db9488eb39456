"""Runs on the Dask scheduler: messages are folded into a state of bounded size, which a page and metrics show."""
