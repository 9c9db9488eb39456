"""Products that stream through a GPU which need not hold them."""
