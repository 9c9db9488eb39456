"""spdist."""
