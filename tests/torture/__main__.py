"""Torture spdist: ``python -m tests.torture --count 1000 --seed 7``; the package's docstring says what is done."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.torture import calls, damage, kills, machine, pairs, proxy
from tests.torture.kills import Bench
from tests.torture.outcome import Outcome, Table
from tests.torture.products import Stock
from tests.torture.runs import Launcher

Part = Callable[[Bench, random.Random], Outcome]
PARTS: dict[str, tuple[Part, float]] = {
    "kills": (lambda bench, rng: kills.run_kill(bench, kills.random_kill(bench, rng)), 1.0),
    "cluster": (kills.random_cluster_kill, 0.1),
    "damage": (damage.random_damage, 1.0),
    "pairs": (pairs.random_pair, 0.5),
    "calls": (calls.random_failure, 1.0),
    "memory": (calls.random_allocation, 0.2),
    "network": (proxy.random_network_fault, 0.1),
    "histories": (machine.random_history, 0.1),
    "power": (calls.random_power_loss, 0.2),
}
"""What each part does, and its trials for each one of ``--count``."""


def torture(parts: list[str], count: int, seed: int, folder: Path, only: int | None = None) -> Table:
    """Run trials; each has a seed of its own, so that it can be repeated alone."""
    table = Table()
    with Launcher(calls.compile_library(folder)) as launcher:
        bench = Bench(Stock(folder / "stock", launcher).make(), folder)
        for name in parts:
            part, share = PARTS[name]
            numbers = range(max(1, round(share * count))) if only is None else [only]
            for number in numbers:
                outcome = part(bench, random.Random(f"{seed}/{name}/{number}"))
                if not outcome.good:
                    print(f"--part {name} --seed {seed} --only {number}:", flush=True)
                table.add(outcome, verbose=True)
    return table


def main() -> int:
    """Read arguments, torture, print the table; return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="kills; other parts in proportion")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="by default another one each time")
    parser.add_argument("--part", choices=PARTS, action="append", help="by default all")
    parser.add_argument("--only", type=int, help="the number of one trial")
    parser.add_argument("--folder", type=Path, help="where trials happen; by default a temporary folder")
    parser.add_argument("--out", type=Path, help="write counts and failures as JSON")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="spdist-torture-"))
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    print(f"seed {args.seed}, in {folder}", flush=True)
    table = torture(args.part or list(PARTS), args.count, args.seed, folder, args.only)
    print("\n".join(table.lines()))
    print(f"{len(table.bad)} of {len(table.outcomes)} went wrong, in {time.monotonic() - begin:.0f} s; "
          f"seed {args.seed}; the folders of bad trials are in {folder}")  # fmt: skip
    if args.out is not None:
        bad = [vars(outcome) for outcome in table.bad]
        args.out.write_text(json.dumps({"seed": args.seed, "counts": table.counts(), "bad": bad}, indent=1))
    return int(bool(table.bad))


if __name__ == "__main__":
    sys.exit(main())
