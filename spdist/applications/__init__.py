"""Applications of sparse products: neighbours, co-occurrence, triangles, paths, clusters."""
