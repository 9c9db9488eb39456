"""The command line: arguments in, one call of the API, one table or one JSON object out; no logic."""

from spdist.cli.entry import command, end_process, main

__all__ = ["command", "end_process", "main"]
