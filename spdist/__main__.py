"""``python -m spdist``: the command line, where the ``spdist`` command is not on the path."""

import sys

from spdist.cli import main

if __name__ == "__main__":
    sys.exit(main())
