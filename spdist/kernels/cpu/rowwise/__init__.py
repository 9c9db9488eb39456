"""Row-by-row products on the CPU."""
