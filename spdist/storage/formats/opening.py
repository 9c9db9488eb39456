"""Open what is imported: a path, a URL, or standard input, which is copied to a file first."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from spdist.errors import InputError
from spdist.stores.location import copied
from spdist.stores.registry import at

logger = logging.getLogger("spdist")

STANDARD_INPUT = "-"
"""The path that stands for standard input."""


def check_file(path: str) -> None:
    """Refuse a local path that is no file: reading a pipe may wait for ever, and a device never ends."""
    if path != STANDARD_INPUT and not at(path).may_be_file():
        problem = "is no ordinary file" if at(path).exists() else "there is no such file"
        raise InputError(f"{path}: {problem}; name a file, or - for standard input")


@contextmanager
def opened_source(path: str, scratch: Path | None = None) -> Iterator[BinaryIO]:
    """Open a local path, an fsspec URL or standard input for reading and seeking.

    `scratch`: folder for a copy of standard input; by default the system's for temporary files.
    """
    if path == STANDARD_INPUT:
        if sys.stdin.isatty():
            logger.warning(
                "reading from the terminal: type the file, then Ctrl-D in a new line", extra={"notice": True}
            )
        with copied(cast(io.BufferedReader, sys.stdin.buffer).read1, scratch) as copy:
            yield copy
        return
    with at(path).opened(scratch) as file:
        yield file
