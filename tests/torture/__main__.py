"""Torture spdist: ``python -m tests.torture --count 1000 --seed 7``; the package's docstring says what is done."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.torture.jobs import PARTS, Orders, torture


def add_arguments(parser: argparse.ArgumentParser, count: int, seed: int) -> None:
    """Add the options that torture has in common with its benchmark."""
    parser.add_argument("--count", type=int, default=count, help="kills; other parts in proportion")
    parser.add_argument("--seed", type=int, default=seed, help="default: %(default)s")
    parser.add_argument("--part", choices=PARTS, action="append", help="by default all")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which it stops where it is")


def main() -> int:
    """Read arguments, torture, print the table; return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, 100, random.randrange(10**6))
    parser.add_argument("--only", type=int, help="the number of one trial")
    parser.add_argument("--folder", type=Path, help="where trials happen; by default a temporary folder")
    parser.add_argument("--out", type=Path, help="write counts and failures as JSON")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="spdist-torture-"))
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    print(f"seed {args.seed}, in {folder}", flush=True)
    parts = args.part or list(PARTS)
    trials = Orders.numbered(parts, args.count) if args.only is None else tuple((part, args.only) for part in parts)
    done = torture(Orders(trials, args.seed, folder, args.jobs, args.budget))
    table = done.table
    print("\n".join([*table.lines(), *(f"not done in time: {trial}" for trial in done.cut_off)]))
    print(f"{len(table.bad)} of {len(table.outcomes)} went wrong, of {len(trials)} that were asked for, in "
          f"{time.monotonic() - begin:.0f} s; seed {args.seed}; the folders of bad trials are in {folder}")  # fmt: skip
    if args.out is not None:
        bad = [vars(outcome) for outcome in table.bad]
        args.out.write_text(json.dumps({"seed": args.seed, "counts": table.counts(), "bad": bad}, indent=1))
    return int(bool(table.bad))


if __name__ == "__main__":
    sys.exit(main())
