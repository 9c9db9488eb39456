"""Products of block-sparse matrices."""
