"""What a product will take on this machine: rates measured here, kept for each host, and predictions from them."""
