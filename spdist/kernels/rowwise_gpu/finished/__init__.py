"""What becomes of rows of C that are made, on the GPU."""
