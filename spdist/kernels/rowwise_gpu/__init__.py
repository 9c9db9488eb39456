"""Row-by-row products on a GPU."""
