"""Formats of graphs in text: METIS and mcl."""
