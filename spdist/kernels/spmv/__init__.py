"""Products of a prepared matrix with vectors."""
