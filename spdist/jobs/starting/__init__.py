"""How a product starts: in this process alone, or with workers that start while it is planned."""
