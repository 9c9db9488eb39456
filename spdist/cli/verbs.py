"""Parts that commands share: adding them, their JSON, results on standard output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from spdist.cli.options import Parser
from spdist.errors import InputError
from spdist.foundation.standard_output import STANDARD_OUTPUT
from spdist.shown import without_secrets

MATRIX = "matrix in Zarr (spdist import makes one), path or URL"
"""Help of an operand."""
PRODUCT = "where the product goes, in Zarr, path or URL"
"""Help of the target of a product."""
FILE = "matrix in Zarr, or a file that spdist import reads; path, URL, or - for standard input"
"""Help of an operand that may be a file."""
GRAPH = "graph: list of edges (.abc, .tsv, .csv, ...) or another file, - for standard input; or square matrix in Zarr"
"""Help of a graph."""


class Verbs:
    """Adds verbs to the parser of the command line."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def add(
        self, name: str, run: Callable[[argparse.Namespace], int], help: str, /, **operands: str
    ) -> argparse.ArgumentParser:
        """Add a verb that `run` does, with the help of each operand, in order, and ``--json``; return its parser."""
        sub: argparse.ArgumentParser = self.commands.add_parser(name, help=help, description=help)
        for operand, text in operands.items():
            sub.add_argument(operand, metavar=operand.upper(), help=text)
        sub.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        sub.set_defaults(run=run)
        return sub


def goes_to_standard_output(args: argparse.Namespace, target: str, *, option: str) -> bool:
    """Return whether a result goes to standard output; refuse options that cannot go with it.

    `target`: where the result goes.
    `option`: what names the target, for messages.
    Raises `InputError` if ``--json`` needs standard output too, or ``--resume`` needs a folder beside the result.
    """
    if target != STANDARD_OUTPUT:
        return False
    if args.json:
        raise InputError(f"{option} - and --json both write to standard output: name a file, or leave --json out")
    if getattr(args, "resume", False):
        raise InputError(f"{option} - keeps no steps, so nothing can be resumed: name a file, or leave --resume out")
    return True


def print_json(content: dict[str, Any], args: argparse.Namespace) -> int:
    """Print a JSON object if ``--json`` was given; return exit code 0."""
    if args.json:
        print(json.dumps(without_secrets(content), default=str))  # complex numbers become text
    return 0
