"""Targets of commands: the files of their locks, and how what lies at a target is replaced."""
