"""The options of the command line, by what they are about."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Any, NoReturn

from spdist.errors import InputError, one_line

WORKERS = "worker processes on this machine; by default none besides this one, or one per GPU if there are several"
TARGET = "where the matrix goes, in Zarr, path or URL"
STEAL = "take over from a run on another host that writes there and had no heartbeat for a minute"


class Parser(argparse.ArgumentParser):
    """Takes no abbreviated options, which would change their meaning when others come; names the nearest one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse options that there are not, as the command that they were given to."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            words = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            near = difflib.get_close_matches(words[0], self._option_string_actions, 1) if words else []
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean {near[0]}?" if near else ""))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        if (wrong := re.match(r"argument COMMAND: invalid choice: '([^']*)'", message)) is not None:
            commands = [
                name for action in self._actions if action.metavar == "COMMAND" for name in action.choices or ()
            ]
            near = difflib.get_close_matches(wrong[1], commands, 1)
            message = f"no command {wrong[1]!r}" + (f"; did you mean {near[0]}?" if near else "")
        raise InputError(f"{one_line(message)} (see {self.prog} --help)")


def _grid(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"'{text}' is not a grid: write row,inner,column blocks, for instance 8,1,1")
    return int(parts[0]), int(parts[1]), int(parts[2])


def count_of(text: str) -> int:
    """Return a number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of at least 1")
    return int(text)


def block_size(text: str) -> tuple[int, int] | str:
    """Return the rows and columns that a text like ``2x3`` says; "auto" stays."""
    sides = text.split("x")
    if text == "auto":
        return text
    if len(sides) != 2 or not all(side.isdigit() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"'{text}' is not a size of blocks: write rows x columns, as in 3x3, or auto")
    return int(sides[0]), int(sides[1])


def _edges(text: str) -> list[float]:
    try:
        return [float(edge) for edge in text.split(",")]
    except ValueError:
        message = f"'{text}' is not a list of edges: write numbers that rise, as in 0,0.5,1"
        raise argparse.ArgumentTypeError(message) from None


def _columns(text: str) -> tuple[int | str, ...]:
    return tuple(int(part) if part.isdigit() else part for part in text.split(","))


def add_file_options(sub: argparse.ArgumentParser) -> None:
    """Add the options that say how to read a file of another program."""
    text = "read the file as this format, whatever its name: mtx, abc, csv.gz, ..."
    sub.add_argument("--format", metavar="NAME", help=text)
    text = "rows and columns of single cells: cells-by-genes (default) or genes-by-cells"
    sub.add_argument("--orient", metavar="ORIENT", help=text)
    sub.add_argument("--dense", action="store_true", help="read a dense array, and keep its nonzeros")
    sub = sub.add_argument_group("lists of edges: .abc, .tsv, .csv, .txt, .edges, .edgelist")  # type: ignore[assignment]
    text = "the first line names the columns, or does not; by default it does if it has the known words"
    sub.add_argument("--header", action=argparse.BooleanOptionalAction, default=None, help=text)
    text = (
        "columns of source, target and perhaps weight: numbers from 1, or names in the header; by default what the "
        "header says, else 1,2,3"
    )
    sub.add_argument("--columns", type=_columns, metavar="I,J,K", help=text)
    text = "what separates fields: tab, comma, semicolon or space; by default what ending and lines say"
    sub.add_argument("--separator", metavar="NAME", help=text)
    text = "fields may be in quotes, or quotes are part of names; by default they may, except in .abc"
    sub.add_argument("--quotes", action=argparse.BooleanOptionalAction, default=None, help=text)
    sub.add_argument("--allow-nan", action="store_true", help="take weights that are NaN")


def file_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return how to read a file of another program, as the API takes it."""
    edges = ("header", "columns", "separator", "quotes", "allow_nan")
    return {name: getattr(args, name) for name in ("format", "orient", "dense", *edges)}


def add_overwrite(sub: argparse.ArgumentParser) -> None:
    """Add ``--overwrite`` and ``--steal``."""
    sub.add_argument("--overwrite", action="store_true", help="replace TARGET once the new one is whole")
    sub.add_argument("--steal", action="store_true", help=STEAL)


def add_multiply_options(sub: argparse.ArgumentParser) -> None:
    """Add the options of ``multiply``."""
    add_plan_options(sub)
    add_workers(sub)
    add_scheduler_options(sub)
    sub.add_argument("--verify", action="store_true", help="check C at the end")
    text = "write what each stage of each block took, one JSON object per line"
    sub.add_argument("--record", metavar="FILE", help=text)
    sub.add_argument("--report", metavar="FILE.html", help="write a report of the run to read in a browser")
    add_transposes(sub)
    text = "0: --top-n and --normalize look at columns, not rows; the transposes are multiplied"
    sub.add_argument("--axis", type=int, choices=(0, 1), default=1, help=text)
    mode = sub.add_mutually_exclusive_group()
    mode.add_argument("--resume", action="store_true", help="continue an unfinished C")
    mode.add_argument("--overwrite", action="store_true", help="replace C once the new one is whole")
    sub.add_argument("--steal", action="store_true", help=STEAL)
    add_names(sub)


def add_names(sub: argparse.ArgumentParser) -> None:
    """Add ``--no-names``."""
    text = "the result gets no names of rows and columns"
    sub.add_argument("--no-names", dest="names", action="store_false", help=text)


def add_verify_options(sub: argparse.ArgumentParser) -> None:
    """Add the options of ``verify``."""
    add_transposes(sub)
    add_product_options(sub)


def add_transposes(sub: argparse.ArgumentParser) -> None:
    """Add ``--transpose-a`` and ``--transpose-b``."""
    for name in ("A", "B"):
        text = f"multiply by the transpose of {name}; a transposed copy lies next to C meanwhile"
        sub.add_argument(f"--transpose-{name.lower()}", action="store_true", help=text)


def add_warm_up_options(sub: argparse.ArgumentParser) -> None:
    """Add the options of ``warm-up``."""
    text = "auto (default) for CPUs; cuda: for the GPU here too"
    sub.add_argument("--engine", default="auto", help=text)
    sub.add_argument("--dtype", metavar="NAME,NAME", help="of values; by default float32,float64")
    sub.add_argument("--processes", type=count_of, help="that compile side by side; by default one per CPU")


def add_reduce_options(sub: argparse.ArgumentParser) -> None:
    """Add the options of ``reduce``."""
    add_bins(sub)
    text = "where to write it; a value for each row or column goes there, or is printed with --json"
    sub.add_argument("--out", metavar="FILE.npy", help=text)
    add_engine_options(sub)
    add_workers(sub)
    add_scheduler_options(sub)
    add_product_options(sub)


def add_bins(sub: argparse.ArgumentParser) -> None:
    """Add the bins of a histogram."""
    text = "edges of a histogram's bins, rising: --bins=-1,0,0.5,1"
    sub.add_argument("--bins", type=_edges, metavar="X,X,...", help=text)


def add_workers(sub: argparse.ArgumentParser) -> None:
    """Add ``--workers``."""
    sub.add_argument("--workers", type=count_of, help=WORKERS)


def add_scheduler_options(sub: argparse.ArgumentParser) -> None:
    """Add the options that choose workers and how to reach them."""
    sub.add_argument("--scheduler", metavar="ADDRESS", help="use a running Dask scheduler")
    texts = {"ca-file": "authority of its certificate", "cert": "certificate of this process", "key": "its private key"}
    for name, text in texts.items():
        sub.add_argument(f"--tls-{name}", metavar="FILE.pem", help=f"for a scheduler at tls://: {text}")


def add_engine_options(sub: argparse.ArgumentParser) -> None:
    """Add engine and limits of memory."""
    sub.add_argument(
        "--engine", default="auto", help="auto (default), scipy, numba; cuda: GPUs; hybrid: GPUs and cores"
    )
    sub.add_argument(
        "--memory-limit", metavar="BYTES",
        help="of each worker, by default 2GiB; with GPUs, of each GPU, by default 0.9 of what is free",
    )  # fmt: skip
    sub.add_argument("--host-limit", metavar="BYTES", help="of the host's memory for each GPU, by default 8GiB")


def add_plan_options(sub: argparse.ArgumentParser) -> None:
    """Add what a plan depends on."""
    add_engine_options(sub)
    sub.add_argument("--grid", type=_grid, metavar="I,K,J", help="force the number of row, inner and column blocks")
    add_product_options(sub)


def add_product_options(sub: argparse.ArgumentParser) -> None:
    """Add the options that change rows of the product."""
    sub = sub.add_argument_group("what becomes of each row, in this order")  # type: ignore[assignment]
    sub.add_argument("--semiring", default="plus_times", help="plus_times (default), min_plus, plus_pair, or_and, ...")
    sub.add_argument("--mask", metavar="M", help="a matrix: C has entries only where it stores one")
    sub.add_argument("--complement", action="store_true", help="only where the mask stores none")
    sub.add_argument("--triangle", metavar="upper", help="of a symmetric C, only what is on and above the diagonal")
    for name in ("rows", "columns"):
        sub.add_argument(f"--scale-{name}", metavar="F.npy", help=f"multiply {name} of C by these factors")
    sub.add_argument("--normalize", metavar="NORM", help="divide rows by their norm: l1, l2 or max")
    sub.add_argument("--drop-zeros", action="store_true", help="leave out entries that are zero")
    sub.add_argument("--threshold", type=float, metavar="X", help="keep values from X up")
    sub.add_argument("--top-n", type=count_of, metavar="N", help="keep the N largest of each row")


def add_generate(sub: argparse.ArgumentParser, chosen: bool) -> None:
    """Add the options of ``generate``; those of the kinds only if that verb was chosen."""
    kinds = "one of those below" if chosen else "spdist generate --help lists them"
    sub.add_argument("kind", metavar="KIND", help=f"kind of the matrix, {kinds}")
    sub.add_argument("target", metavar="TARGET", help=TARGET)
    sub.add_argument("--dtype", default="float64", help="of the values, by default float64")
    sub.add_argument("--seed", type=int, default=0, help="of the random numbers, by default 0")
    add_overwrite(sub)
    if not chosen:
        return  # the kinds import Zarr, which --help does not need
    from spdist.storage.generators import KINDS

    sub.formatter_class = argparse.RawDescriptionHelpFormatter
    sub.epilog = "kinds:\n" + "\n".join(
        f"  {name:12} {kind.help}\n" + "".join(f"{'':15}--{p.replace('_', '-'):13} {parameter.help}\n"
        for p, parameter in kind.parameters.items())
        for name, kind in KINDS.items()
    )  # fmt: skip
    for name in sorted({name for kind in KINDS.values() for name in kind.parameters}):
        sub.add_argument(f"--{name.replace('_', '-')}", dest=name, help=argparse.SUPPRESS)
