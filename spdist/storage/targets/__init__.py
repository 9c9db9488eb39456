"""Targets of commands: lock files, replacing the matrix at a target in one step, and S3."""
