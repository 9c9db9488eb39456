"""What the Dask scheduler knows of runs: messages in, state of bounded size, a page and metrics out."""
