"""Lists of edges: what separates their fields, the edges of a text, the numbers of its vertices."""
