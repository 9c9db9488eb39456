"""``python -m spdist``: the command line, where the ``spdist`` command is not on the path."""

from spdist.cli import command

if __name__ == "__main__":
    command()
