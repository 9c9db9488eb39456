"""Who runs the stages of a product: threads of this process, or Dask workers."""
