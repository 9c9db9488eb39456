"""Targets of commands: lock files, and replacing the matrix at a target in one step."""
