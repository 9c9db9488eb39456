"""Clusters of graphs by random walks that are spread, sharpened and pruned until they stay in clusters."""
