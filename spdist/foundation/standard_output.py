"""Standard output as the place of a file: written whole, or to a reader that leaves early.

A file or a pipe gets the bytes as they are, and a terminal text without control characters, which it would obey.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from spdist.shown import escaped

STANDARD_OUTPUT = "-"
"""The path that stands for standard output."""

STDOUT = 1
"""Number of the open file that is standard output."""


class _Terminal(io.RawIOBase):
    """Writes bytes to standard output as text that a terminal shows as it is."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        sys.stdout.write(escaped(self.decoder.decode(bytes(content)), keep="\n\t"))
        return len(content)


@contextmanager
def standard_output() -> Iterator[BinaryIO]:
    """Open standard output for bytes; all are written at the end of the block.

    Raises `BrokenPipeError` if nobody reads on.
    """
    sys.stdout.flush()
    if sys.stdout.isatty():
        yield cast(BinaryIO, _Terminal())
        sys.stdout.flush()
        return
    if isinstance(sys.stdout.buffer, io.RawIOBase):  # with PYTHONUNBUFFERED: a write to it may write less
        with open(sys.stdout.fileno(), "wb", closefd=False) as out:
            yield out
        return
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


def drop_unread(error: OSError) -> bool:
    """Return whether standard output is a pipe that nobody reads any more; what is still to be written is dropped.

    `error`: of a write. The pipe may be another one, or a connection.
    """
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    poll.register(STDOUT, 0)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
    return True


def drop_unwritable() -> str:
    """Return why nothing more can be written to standard output, and drop what is still to be written; empty if it can.

    A line end is written to see it.
    """
    try:
        os.write(STDOUT, b"\n")
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
        return error.strerror or str(error)
    return ""
