"""Products of matrices in memory."""
