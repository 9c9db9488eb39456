"""System calls that fail or are never made durable: the n-th open, write, rename, message or allocation; power loss."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Container
from pathlib import Path

from tests.torture.kills import Bench
from tests.torture.outcome import Outcome, VerdictError, ended, last_line
from tests.torture.products import PRODUCTS, Product
from tests.torture.runs import Trial

SOURCE = Path(__file__).with_name("faults.c")
ERRORS = {
    "open": (errno.ENOSPC, errno.EMFILE, errno.EIO),
    "openread": (errno.EMFILE, errno.EIO),
    "write": (errno.ENOSPC, errno.EIO),
    "fsync": (errno.EIO,),
    "syncfs": (errno.EIO, errno.ENOSPC),
    "rename": (errno.EIO, errno.ENOSPC),
    "unlink": (errno.EIO,),
    "mkdir": (errno.ENOSPC, errno.EIO),
    "read": (errno.EIO,),
    "send": (errno.ECONNRESET, errno.EPIPE),
    "recv": (errno.ECONNRESET,),
    "alloc": (errno.ENOMEM,),
}
"""Operations of `faults.c`, and the errors with which they fail."""
CHANGES = {"open", "write", "fsync", "syncfs", "rename", "unlink", "mkdir"}
"""Operations that change files; `faults.c` counts them together as ``change``."""
WRITERS = (
    *(f"spdist.scheduler.execution.{name}" for name in ("driver", "journal", "recovery", "unfinished")),
    "spdist.storage",
    "spdist.stores",
    "spdist.jobs",
)
"""Modules at whose points power is lost."""
LOST = "keep", "empty", "zeros", "half", "delete"
"""What a file may be after power is lost, if it was written and not synchronised."""


def compile_library(folder: Path) -> Path | None:
    """Compile `faults.c`; return None if there is no compiler."""
    compilers = os.environ.get("CC"), "cc", "gcc", "clang"
    compiler = next((found for name in compilers if name and (found := shutil.which(name))), None)
    if compiler is None:
        return None
    library = folder / "faults.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def sites(bench: Bench, product: Product) -> dict[tuple[str, str], int]:
    """Return how many calls of each operation a process of each role makes for a product; runs it once."""
    name = f"calls of {product.name}"
    if name not in bench.points:
        trial = bench.trial()
        run = bench.multiply(trial, product, "discovery", _log(bench, trial))
        assert ended(run), run.err
        most: dict[tuple[str, str], int] = {}
        for (role, _, operation), count in Counter(operations(trial)).items():
            most[role, operation] = max(most.get((role, operation), 0), count)
        bench.points[name] = most
        shutil.rmtree(trial.folder)
    return bench.points[name]


def _log(bench: Bench, trial: Trial, **more: object) -> Path:
    calls = f"log 0 fail 0 {bench.folder}/"
    return trial.arm(calls=calls, call_roles=["client", "worker"], **more)


def operations(trial: Trial) -> list[tuple[str, int, str]]:
    """Return role, process id and operation of the calls that were written down, in order."""
    return [(role, pid, what.split(" ")[0][5:]) for role, pid, what in trial.hits() if what.startswith("call.")]


def random_failure(bench: Bench, rng: random.Random, operations: Container[str] = ERRORS) -> Outcome:
    """Let one system call of some operations fail, be short, or kill its process; then resume."""
    products = [p for p in PRODUCTS if p.name not in ("masked", "min_plus")]
    for product in rng.sample(products, len(products)):  # not every product allocates a MiB at once
        found = sites(bench, product)
        if known := sorted({operation for _, operation in found if operation in operations}):
            break
    operation = rng.choice(known)
    role = rng.choice(sorted(role for role, name in found if name == operation))
    most = found[role, operation]
    number = rng.choice([1, most, rng.randint(1, most)])
    ways = ["fail", "fail", "forever", "before", "after"] + ["short"] * (operation in ("write", "read"))
    way = "fail" if operation in ("send", "recv") else rng.choice(ways[:3] if operation == "alloc" else ways)
    code = rng.choice(ERRORS[operation])
    trial = bench.trial()
    what = f"{product.name}: {role}: {operation} #{number} of {most}: {way} {errno.errorcode[code]}"

    def act() -> str | None:
        calls = f"{operation} {number} {way} {code} {bench.folder}/"
        run = bench.multiply(trial, product, "run", trial.arm(calls=calls, call_roles=[role]))
        dies = way in ("before", "after")
        done = ended(run, killed=role == "client" and (dies or operation == "alloc"))  # zarrs ends a process for memory
        if stayed := bench.launcher.left(run):
            raise VerdictError("left", f"processes: {'; '.join(stayed)}")
        if done and operation != "unlink" and way != "forever":  # what cannot be removed stays until the next run
            bench.check_end(trial, product, run)
            return None
        if dies and role == "worker":
            raise VerdictError("gave up", last_line(run))
        bench.check_between(trial, product)
        bench.bring_to_end(trial, product)
        return "right" if dies else "refused"

    return bench.judge(f"call {operation}", what, trial, act)


def random_allocation(bench: Bench, rng: random.Random) -> Outcome:
    """Let the n-th allocation of more than a MiB fail, or all from then on; then resume."""
    return random_failure(bench, rng, ("alloc",))


# -- power loss --------------------------------------------------------------------------------------------------------


def not_durable(trial: Trial) -> list[Path]:
    """Return the files of C that were written and not synchronised since, under their names of now."""
    pending: set[str] = set()
    for _, _, what in trial.hits():
        operation, _, path = what.removeprefix("call.").partition(" ")
        if operation == "write":
            pending.add(path)
        elif operation == "fsync":
            pending.discard(path)
        elif operation == "syncfs":
            pending.clear()
        elif operation == "rename":
            old, _, new = path.partition("\t")
            pending = {
                new + name[len(old) :] if name == old or name.startswith(f"{old}/") else name for name in pending
            }
    return [Path(name) for name in sorted(pending) if Path(name).is_file()]


def lose_power(trial: Trial, rng: random.Random) -> list[str]:
    """Let files that are not durable lose what they hold; return what was done."""
    done = []
    for path in not_durable(trial):
        way, size = rng.choice(LOST), path.stat().st_size
        if way == "delete":
            path.unlink()
        elif way != "keep":
            path.write_bytes({"empty": b"", "zeros": bytes(size), "half": path.read_bytes()[: size // 2]}[way])
        if path.exists():
            os.utime(path, (time.time() - 3600,) * 2)  # the power comes back later
        if way != "keep":
            done.append(f"{way} {'/'.join(path.parts[-3:])}")
    return done


def random_power_loss(bench: Bench, rng: random.Random) -> Outcome:
    """Kill a run, lose what was not synchronised, and resume."""
    product = rng.choice([p for p in PRODUCTS if p.name not in ("masked", "min_plus", "by_columns")])
    points = bench.discover(product)
    late = sorted(key for key in points if key[0] == "client" and key[1].startswith(WRITERS))
    role, point = rng.choice(late)
    number = rng.choice([1, points[role, point], rng.randint(1, points[role, point])])
    trial = bench.trial()
    lost: list[str] = []

    def act() -> str | None:
        kill = {"role": role, "point": point, "number": number, "victims": ["client", "worker"]}
        run = bench.multiply(trial, product, "run", _log(bench, trial, **kill))
        if ended(run, killed=True):
            return None
        bench.launcher.left(run)
        lost.extend(lose_power(trial, rng))
        again = bench.multiply(trial, product, "resume", None, "--resume")
        if ended(again):
            bench.check_end(trial, product, again)
            return None
        steal = ["--steal"] * ("--steal" in last_line(again))  # the lock lost what it said
        anew = bench.multiply(trial, product, "overwrite", None, "--overwrite", *steal)
        if not ended(anew) and "remove it yourself" in last_line(anew):
            shutil.rmtree(trial.data / "C.zarr")
            anew = bench.multiply(trial, product, "anew", None, "--resume")
        if not ended(anew):
            raise VerdictError("stuck", f"--resume: {last_line(again)}; --overwrite: {last_line(anew)}")
        bench.check_end(trial, product, anew)
        return "refused"

    outcome = bench.judge("power loss", "", trial, act)
    what = f"{product.name}: {point} #{number}; {len(lost)} files: {', '.join(lost[:5])}"
    return Outcome(outcome.part, what, outcome.verdict, outcome.detail)
