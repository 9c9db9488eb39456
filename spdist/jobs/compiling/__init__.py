"""Kernels compiled before a product needs them: those of one product, or of all usual ones."""
