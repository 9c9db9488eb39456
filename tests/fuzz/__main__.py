"""Run malformed input through the command line, each case in a process of its own, and count what comes of it.

A case fails if the exit code is none of 0, 1 and 2, if there is a traceback or more than one line on stderr, if it
takes more than 20 s or 1 GiB, or leaves files behind. Prints the seed, the number and the command of each failure;
``--only NUMBER --keep FOLDER`` makes its files again.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.fuzz.cases import SLOW_VERBS, Case, write_case
from tests.fuzz.seeds import seeds, store_matrices

SECONDS = 20.0
"""Seconds that a case may take."""
BYTES = 1 << 30
"""Bytes of memory that a case may take."""
WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"


@dataclass(frozen=True)
class Outcome:
    """What came of one case."""

    kind: str
    code: int
    seconds: float
    peak: int
    said: str
    left: tuple[str, ...]

    @property
    def wrong(self) -> str:
        """What is wrong with it; empty if nothing is."""
        lines = self.said.splitlines()
        if self.kind in SLOW_VERBS:  # these say what they do
            lines = [line for line in lines if line.startswith("spdist:")]
        if self.code == 0:  # what was read, and warnings
            lines = [line for line in lines if not line.startswith("spdist: ")]
        found = {
            "time": self.seconds > (3 * SECONDS if self.kind in SLOW_VERBS else SECONDS),
            "code": self.code not in (0, 1, 2),
            "traceback": "Traceback" in self.said,
            "lines": len(lines) > 1 or (self.code == 2 and not lines),  # an import says in a line what it read
            "memory": self.peak > BYTES,
            "left": bool(self.left),
        }
        return ", ".join(name for name, wrong in found.items() if wrong)


def in_child(work: Callable[[], int], folder: Path, seconds: float) -> tuple[int, float, int]:
    """Run a function in a forked process in a folder; return its exit code, seconds and peak bytes."""
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(folder)
        code = 70
        try:
            code = work()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            break
        if time.monotonic() - start > seconds:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.003)
    return os.waitstatus_to_exitcode(status), time.monotonic() - start, usage.ru_maxrss * 1024


def _become(folder: Path) -> None:
    """Turn this process into one of its own group, in a folder, with its output in files beside it."""
    os.setsid()
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, name in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(f"{folder}.{name}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(descriptor, number)


def command(case: Case) -> int:
    """Run the command of a case, as the shell would."""
    if case.arguments[0].endswith(".yaml"):
        sys.path.append(str(WORKFLOWS))
        import multiply

        return int(multiply.main(list(case.arguments)))
    from spdist.cli import main

    return main(list(case.arguments))


def run_case(case: Case, folder: Path) -> Outcome:
    """Run a case whose files lie in a folder."""
    before = {path.name for path in folder.iterdir()}
    code, seconds, peak = in_child(lambda: command(case), folder, 3 * SECONDS + 5)
    said = Path(f"{folder}.stderr").read_text(errors="replace")
    allowed = before | (set(case.made) if code == 0 else set())
    left = tuple(sorted({path.name for path in folder.iterdir()} - allowed))
    return Outcome(case.kind, code, seconds, peak, said, left)


def warm_up() -> None:
    """Import what the commands import, so that each case does not; nothing starts a thread here."""
    import numba  # noqa: F401
    import scipy.io  # noqa: F401
    import zarr  # noqa: F401
    import zarrs  # noqa: F401

    import spdist.api.products
    import spdist.cli
    import spdist.cli.console
    import spdist.storage.import_export
    import spdist.storage.transpose  # noqa: F401


def table(outcomes: list[Outcome]) -> str:
    """Return counts by kind: exit codes, failures, the longest time and the largest peak."""
    rows = [
        f"{'kind':12}{'cases':>8}{'exit 0':>8}{'exit 1':>8}{'exit 2':>8}{'wrong':>8}{'worst s':>9}{'worst MiB':>11}"
    ]
    kinds = collections.defaultdict(list)
    for outcome in outcomes:
        kinds[outcome.kind].append(outcome)
    for kind, found in [*sorted(kinds.items()), ("all", outcomes)]:
        codes = [sum(each.code == code for each in found) for code in (0, 1, 2)]
        wrong = sum(bool(each.wrong) for each in found)
        worst = f"{max(each.seconds for each in found):9.2f}{max(each.peak for each in found) >> 20:11,}"
        rows.append(f"{kind:12}{len(found):8}" + "".join(f"{code:8}" for code in codes) + f"{wrong:8}{worst}")
    return "\n".join(rows)


def main() -> int:
    """Run the cases that the arguments ask for; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slow", action="store_true", help="commands that start worker processes too")
    parser.add_argument("--only", type=int, help="one case")
    parser.add_argument("--keep", type=Path, help="where the files of failed cases go")
    parser.add_argument("--record", type=Path, help="write a JSON object for each case here")
    args = parser.parse_args()
    numbers = range(args.first, args.first + args.count) if args.only is None else [args.only]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        stored = Path(place) / "stored"
        stored.mkdir()
        code, *_ = in_child(lambda: store_matrices(stored) or 0, stored, 120)
        if code:
            raise RuntimeError(Path(f"{stored}.stderr").read_text())
        whole = seeds()
        warm_up()
        record = args.record.open("w") if args.record else None
        for number in numbers:
            folder = Path(place) / "case"
            folder.mkdir()
            case = write_case(random.Random(f"{args.seed}/{number}"), folder, whole, stored, args.slow)
            kept = args.keep / f"{args.seed}-{number}" if args.keep else None
            if kept is not None:
                shutil.copytree(folder, kept, dirs_exist_ok=True)
            outcome = run_case(case, folder)
            outcomes.append(outcome)
            if record is not None:
                record.write(json.dumps({"number": number, "arguments": case.arguments, **asdict(outcome)}) + "\n")
            if outcome.wrong or args.only is not None:
                said = outcome.said.strip()[-1500:]
                print(f"seed {args.seed} case {number}: {outcome.wrong or 'fine'}: exit {outcome.code}, "
                      f"{outcome.seconds:.1f} s, {outcome.peak >> 20} MiB, left {outcome.left}: "
                      f"{' '.join(case.arguments)}\n{said}\n", flush=True)  # fmt: skip
            elif kept is not None:
                shutil.rmtree(kept)
            shutil.rmtree(folder)
        if record is not None:
            record.close()
    print(table(outcomes))
    return int(any(each.wrong for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
