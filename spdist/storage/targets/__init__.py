"""Targets of commands: the files of their locks, how what lies at a target is replaced, and S3."""
