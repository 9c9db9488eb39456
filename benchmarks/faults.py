"""Inject faults by the thousand and count what came of them: right products, one-line refusals, and anything else.

``--count`` is the number of kills and of damaged files; the other parts are in proportion (`tests/torture`). ``--part``
picks parts, ``--jobs`` makes trials side by side, and ``--budget`` ends it after so many seconds: the record says how
many were done. It has the seed: the same seed on the same commit makes the same trials, though a kill at a random
moment may find the run elsewhere.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import record

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.torture.__main__ import add_arguments
from tests.torture.jobs import PARTS, Orders, torture
from tests.torture.outcome import GOOD
from tests.torture.runs import ROOT


def without(text: str, places: tuple[str, ...]) -> str:
    """Return a text without the names of this machine's folders."""
    for place in places:
        text = text.replace(place, "")
    return text


def main() -> None:
    """Torture, print, record."""
    parser = record.parser(__doc__ or "")
    add_arguments(parser, 1000, 20261123)
    args = parser.parse_args()
    count, parts = (2, ["kills", "damage"]) if args.quick else (args.count, args.part or list(PARTS))
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spdist-faults-", ignore_cleanup_errors=True) as folder:
        trials = Orders.numbered(parts, count)
        done = torture(Orders(trials, args.seed, Path(folder), args.jobs, args.budget))
        places = folder, str(ROOT)
        bad = [{**vars(outcome), "detail": without(outcome.detail, places)} for outcome in done.table.bad]
    print("\n".join(done.table.lines()))
    outcomes = done.table.outcomes
    good = sum(outcome.verdict in GOOD for outcome in outcomes)
    print(f"{good} of {len(outcomes)} ended as they should, of {len(trials)} that were asked for")
    result = {
        "benchmark": "faults", "seed": args.seed, "jobs": args.jobs, "asked": len(trials), "trials": len(outcomes),
        "good": good, "seconds": time.monotonic() - begin, "counts": done.table.counts(), "bad": bad,
        "cut_off": done.cut_off,
    }  # fmt: skip
    record.write(result, args.out)


if __name__ == "__main__":
    main()
