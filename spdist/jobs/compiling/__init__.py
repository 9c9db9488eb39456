"""Kernels compiled before a product needs them: for one product, or for all usual ones."""
