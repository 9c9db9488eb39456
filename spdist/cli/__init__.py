"""The command line: arguments in, one call of the API, one table or one JSON object out; no logic."""

from spdist.foundation.distribution import check_alone

check_alone(f"{__path__[0]}/..")  # the other package's __init__.py may lie where this one's was

from spdist.cli.entry import command, end_process, main  # noqa: E402

__all__ = ["command", "end_process", "main"]
