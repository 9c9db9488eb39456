"""Standard output as the place of a result: nothing else is printed there, and a reader may leave early."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Iterable

from spdist.errors import InputError

STDOUT = 1
"""Number of the open file that is standard output."""


def check_standard_output(args: argparse.Namespace, target: str, *, option: str) -> bool:
    """Return whether a result goes to standard output; refuse options that cannot go with it.

    Parameters
    ----------
    args : argparse.Namespace
    target : str
        Where the result goes.
    option : str
        What names the target, for messages.

    Raises
    ------
    InputError
        If ``--json`` wants standard output too, or ``--resume`` a place beside the result.
    """
    if target != "-":
        return False
    if args.json:
        raise InputError(f"{option} - and --json both write to standard output: name a file, or leave --json out")
    if getattr(args, "resume", False):
        raise InputError(
            f"{option} - keeps no steps, so there is nothing to resume: name a file, or leave --resume out"
        )
    return True


def write(pieces: Iterable[bytes]) -> None:
    """Write bytes to standard output.

    Raises
    ------
    BrokenPipeError
        If nobody reads on.
    """
    sys.stdout.flush()
    sys.stdout.buffer.writelines(pieces)
    sys.stdout.buffer.flush()


def drop_unread(error: OSError) -> bool:
    """Return whether standard output is a pipe that nobody reads any more; what is still to be written is dropped.

    Parameters
    ----------
    error : OSError
        Of a write. The pipe may be another one, or a connection.
    """
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    poll.register(STDOUT, 0)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
    return True
