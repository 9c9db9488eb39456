"""Public calls: products, chains of products, and stored matrices by entries, without a product."""
