"""Run commands as another user: ``python as_user.py UID FOLDER '[["multiply", ...], ...]'``, for root alone.

Python itself may lie where that user sees nothing, so all that the commands need is loaded before: a product, a check
and a transpose are made in FOLDER. Prints a JSON list of exit code and stderr for each command.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys

from spdist import cli


def said(words: list[str]) -> tuple[int, str]:
    """Run a command; return its exit code, and what it said on stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(words)
    return code, err.getvalue()


def load(folder: str) -> None:
    """Run what the commands run, in a folder."""
    a = f"{folder}/warm.zarr"
    for words in (
        ["generate", "banded", a, "--n", "50", "--bandwidth", "2"],
        ["multiply", a, a, f"{folder}/warm-c.zarr", "--engine", "scipy", "--json"],
        ["multiply", a, a, f"{folder}/warm-c.zarr", "--engine", "scipy", "--overwrite"],
        ["transpose", a, f"{folder}/warm-t.zarr"],
        ["check", a],
    ):
        assert said(words)[0] == 0, said(words)


def main() -> None:
    """Load, become the user, run, print."""
    user, folder, commands = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    load(folder)
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    print(json.dumps([said(words) for words in commands]))


if __name__ == "__main__":
    main()
