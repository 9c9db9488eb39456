"""Inject faults by the thousand and count what came of them: right products, one-line refusals, and anything else.

``--count`` is the number of kills and of damaged files; the other parts are in proportion (`tests/torture`). ``--part``
picks parts. The record has the seed: the same seed on the same commit makes the same trials, though a kill at a random
moment may find the run elsewhere.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import record

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.torture.__main__ import PARTS, torture
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
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=20261123)
    parser.add_argument("--part", choices=PARTS, action="append")
    args = parser.parse_args()
    count, parts = (2, ["kills", "damage"]) if args.quick else (args.count, args.part or list(PARTS))
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spdist-faults-") as folder:
        table = torture(parts, count, args.seed, Path(folder))
        places = folder, str(ROOT)
        bad = [{**vars(outcome), "detail": without(outcome.detail, places)} for outcome in table.bad]
    print("\n".join(table.lines()))
    trials = len(table.outcomes)
    good = sum(outcome.verdict in GOOD for outcome in table.outcomes)
    print(f"{good} of {trials} ended as they should")
    result = {
        "benchmark": "faults", "seed": args.seed, "trials": trials, "good": good, "seconds": time.monotonic() - begin,
        "counts": table.counts(), "bad": bad,
    }  # fmt: skip
    record.write(result, args.out)


if __name__ == "__main__":
    main()
