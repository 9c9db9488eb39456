"""The options of the command line: those that `spdist.options` declares, and how texts become their values."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import Field, fields
from typing import Any, NoReturn

from spdist.errors import InputError, one_line
from spdist.options import OPTIONS

MODE = ("overwrite", "steal")
TARGET = "where the matrix goes, in Zarr, path or URL"


class Parser(argparse.ArgumentParser):
    """Refuse abbreviated options, which could change their meaning with new options; suggest the nearest one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown options in the name of the command that got them."""
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


def _numbers(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.strip().isdecimal() for number in numbers) or len(set(map(int, numbers))) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of different numbers of GPUs, such as 0,2")
    return [int(number) for number in numbers]


def _columns(text: str) -> tuple[int | str, ...]:
    return tuple(int(part) if part.isdigit() else part for part in text.split(","))


PARSERS: dict[Any, Any] = {
    "int": int,
    "int | None": count_of,
    "float | None": float,
    "tuple[int, int, int] | None": _grid,
    "Sequence[int | str] | None": _columns,
}
"""Reader of an option's text for each annotation of a field; others stay text."""


def _names(wanted: Iterable[str | type]) -> Iterator[str]:
    """Yield the options that commands take, of some names and ``TypedDict``s."""
    for one in wanted:
        for name in [one] if isinstance(one, str) else one.__annotations__:
            if OPTIONS[name].metadata.get("help") or "parts" in OPTIONS[name].metadata:
                yield name


def add_options(sub: argparse._ActionsContainer, *wanted: str | type, **texts: str) -> None:
    """Add options as `spdist.options` declares them.

    `wanted`: names of options, or the ``TypedDict`` of a call for all that it takes.
    `texts`: help in place of the declared one.
    """
    groups: dict[Any, Any] = {None: sub}
    for name in _names(wanted):
        declared = OPTIONS[name]
        for one in fields(declared.metadata["parts"]) if "parts" in declared.metadata else [declared]:
            title = one.metadata.get("group")
            if title not in groups:
                groups[title] = sub.add_argument_group(title)
            _add_option(groups[title], one, texts.get(name, one.metadata["help"]))
        if name == "engine":
            text = "numbers of the GPUs to use, by default all that CUDA_VISIBLE_DEVICES names"
            sub.add_argument("--gpus", type=_numbers, metavar="N,N,...", help=text)


def add_mode(sub: argparse.ArgumentParser, **texts: str) -> None:
    """Add ``--resume`` and ``--overwrite``, which exclude each other, and the other options of a target."""
    add_options(sub.add_mutually_exclusive_group(), "resume", "overwrite", **texts)
    add_options(sub, "steal", "names")


def _add_option(sub: argparse._ActionsContainer, one: Field[Any], text: str) -> None:
    names = one.metadata.get("flag", one.name), one.metadata.get("alias")
    flags = [f"--{name.replace('_', '-')}" for name in names if name]
    shown = {name: value for name in ("metavar", "choices") if (value := one.metadata.get(name)) is not None}
    if one.type == "bool":
        shown["action"] = "store_false" if one.default else "store_true"
    elif one.type == "bool | None":
        shown["action"] = argparse.BooleanOptionalAction
    else:
        shown["type"] = PARSERS.get(one.type)
    sub.add_argument(*flags, dest=one.name, default=one.default, help=text, **shown)


def given(args: argparse.Namespace, *wanted: str | type) -> dict[str, Any]:
    """Return options as keywords of a call: `wanted` as for `add_options`."""
    made = {"epilogue": _epilogue, "security": _security}
    return {name: made[name](args) if name in made else getattr(args, name) for name in _names(wanted)}


def _epilogue(args: argparse.Namespace) -> Any:
    from spdist.kernels.product_spec import Epilogue

    return Epilogue(args.scale_rows, args.scale_columns, None, args.normalize, args.drop_zeros)


def _security(args: argparse.Namespace) -> Any:
    """Return the keys that ``--tls-*`` name, if any."""
    if not (args.tls_ca_file or args.tls_cert or args.tls_key):
        return None
    from spdist.scheduler.clusters.security import security_of_files

    return security_of_files(args.tls_ca_file, args.tls_cert, args.tls_key)


def chosen(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options that were given; a call has its defaults for the others."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def show_gpus(numbers: list[int]) -> None:
    """Let CUDA see only these GPUs of those that it would see, in this process and in those that it starts.

    Raises `InputError` if ``CUDA_VISIBLE_DEVICES`` names too few.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = None if named is None else [one for one in named.split(",") if one.strip()]
    if seen is not None and max(numbers) >= len(seen):
        raise InputError(f"--gpus: {max(numbers)} is none of the {len(seen)} that CUDA_VISIBLE_DEVICES={named} names")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(one) if seen is None else seen[one] for one in numbers)


def add_overwrite(sub: argparse.ArgumentParser) -> None:
    """Add ``--overwrite`` and ``--steal``."""
    add_options(sub, *MODE, overwrite="replace TARGET once the new one is whole")


def add_bins(sub: argparse.ArgumentParser) -> None:
    """Add the bins of a histogram."""
    text = "edges of a histogram's bins, rising: --bins=-1,0,0.5,1"
    sub.add_argument("--bins", type=_edges, metavar="X,X,...", help=text)


def add_generate(sub: argparse.ArgumentParser, chosen: bool) -> None:
    """Add the options of ``generate``; options of the kinds only if that verb was chosen."""
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
