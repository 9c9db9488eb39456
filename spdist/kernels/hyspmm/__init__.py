"""hySpMM (Wu, 2015)."""
