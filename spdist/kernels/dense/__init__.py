"""Searches among dense rows; nothing is multiplied sparsely here."""
