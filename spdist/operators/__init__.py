"""Matrices prepared for many products with vectors, and solvers on them."""
