"""Names of rows and columns: stored with a matrix, or in the AnnData around it."""
