"""What products of sparse matrices are for: neighbours, co-occurrence, triangles, paths, clusters."""
