"""SELL-C-sigma on the CPU and on the GPU: the format, building it, and products with vectors."""
