"""Job files: the keys that every job has, YAML without ambiguities, values in the right types."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

DEFAULT_LIMIT = "2GiB"
"""Memory of a worker on CPUs if a job has no memory_limit."""


class JobError(ValueError):
    """The job file is wrong; the message says where and what to do, in one line."""

    def __str__(self) -> str:
        text = super().__str__()
        text = text if len(text) <= 1000 else f"{text[:500]}...{text[-497:]}"
        return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


LONGEST = 1 << 16
"""Characters of the longest job file that is read."""


LONGEST_NAME = 255
"""Bytes of the longest name of a file."""


class _Loader(yaml.SafeLoader):
    """Refuses repeated keys, where YAML would silently take the last, and aliases, which can explode."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise JobError("an alias (*name) stands for a value; write the value itself")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise JobError(f"key {twice!r} is there twice; keep one")
        content: dict[Any, Any] = super().construct_mapping(node, deep)
        return content


def read_mapping(path: Path) -> dict[Any, Any]:
    """Return the keys and values of a YAML file.

    Raises `JobError` if the file cannot be read, or is not YAML of keys and values.
    """
    try:
        if path.exists() and not path.is_file():
            raise JobError("is no ordinary file; name a job file, a copy of one in workflows")
        with path.open() as file:
            text = file.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise JobError(f"has more than {LONGEST:,} characters; name a job file, a copy of one in workflows")
        content = yaml.load(text, _Loader)
    except OSError as error:
        raise JobError(f"cannot be read: {error.strerror}; name a job file, a copy of one in workflows") from None
    except JobError:
        raise
    except Exception as error:  # a text, a date or a nesting that YAML cannot read
        raise JobError(f"is not YAML: {' '.join(str(error).split())}; correct that line") from None
    if not isinstance(content, dict):
        raise JobError(f"holds {type(content).__name__} where `key: value` lines belong; see those in workflows")
    return content


def split_setting(text: str) -> tuple[str, Any]:
    """Return key and value of a ``--set key=value``; the value is read as in the file.

    Raises `JobError` if the text is not ``key=value``.

    Examples
    --------
    >>> split_setting("workers=4")
    ('workers', 4)
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise JobError(f"--set {text!r} is not key=value; write for instance --set memory_limit=4GiB")
    try:
        return key.strip(), yaml.load(value, _Loader)
    except JobError:
        raise
    except Exception:
        raise JobError(f"--set {text!r}: the value is not YAML; put it in quotes") from None


def text_of(value: object) -> str:
    """Accept a text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"is {type(value).__name__}, not a text; write it in quotes" if value else "is empty; fill it in"
        )
    if "\0" in value or max(len(part.encode()) for part in value.split("/")) > LONGEST_NAME:
        raise ValueError("holds a zero byte, or is too long for a name; write another")
    return value


def flag(value: object) -> bool:
    """Accept true and false."""
    if not isinstance(value, bool):
        raise ValueError("is neither true nor false; write one of them, without quotes")
    return value


def count(value: object) -> int:
    """Accept a whole number from 1 up."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("is not a whole number of at least 1; write for instance 4, or null for the default")
    return value


def size(value: object) -> int | str:
    """Accept bytes as a number or a text like 2GiB."""
    is_size = re.fullmatch(r"\s*[0-9]*\.?[0-9]+\s*[KMGT]?i?B?\s*", str(value), re.IGNORECASE) and re.search(
        "[1-9]", str(value)
    )
    if isinstance(value, bool) or not isinstance(value, int | str) or not is_size:
        raise ValueError("is not a size; write for instance 512MiB, 2GiB or a number of bytes")
    return value


def number(value: object) -> float:
    """Accept a number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        raise ValueError("is not a number; write for instance 0.2, or null for none")
    return float(value)


def reading(value: object) -> dict[str, Any]:
    """Accept keywords that say how a file is read; spdist checks their values."""
    if not isinstance(value, dict) or not set(value) <= set(READING):
        raise ValueError(f"is no mapping of {', '.join(READING)}; write for instance {{format: abc, header: false}}")
    return value


def grid_of(value: Any) -> tuple[int, int, int]:
    """Accept three counts, as a list or with commas between.

    Examples
    --------
    >>> grid_of("8, 1, 1")
    (8, 1, 1)
    """
    parts = (
        [int(part) if part.strip().isdigit() else part for part in value.split(",")]
        if isinstance(value, str)
        else value
    )
    try:
        row, inner, column = map(count, parts)
    except (TypeError, ValueError):
        raise ValueError("is not three numbers of at least 1; write row, inner, column blocks: [8, 1, 1]") from None
    return row, inner, column


def choice_of(noun: str, call: str) -> Callable[[object], str]:
    """Return a reader that accepts the words that a call of spdist takes for the keyword `noun`."""

    def words_of_call() -> Sequence[str]:
        import spdist

        parameter = inspect.signature(getattr(spdist, call), eval_str=True).parameters[noun]
        return typing.get_args(parameter.annotation)

    return one_of(noun, words_of_call)


def engines() -> Sequence[str]:
    """Return the names of spdist's engines."""
    import spdist

    return spdist.engine_names()


def one_of(noun: str, list_words: Callable[[], Sequence[str]]) -> Callable[[object], str]:
    """Return a reader that accepts the listed words; errors call them by `noun`."""

    def read(value: object) -> str:
        choices = list_words()
        if value not in choices:
            words = " or ".join(choices) if len(choices) == 2 else f"one of {', '.join(choices)}"
            raise ValueError(f"is no {noun}; write {words}")
        return str(value)

    return read


READING = ("format", "header", "columns", "separator", "quotes", "allow_nan", "orient", "dense")
"""Keywords of `spdist.import_matrix` that say how a file is read."""


READERS: dict[str, Callable[[Any], Any]] = {
    "str": text_of, "str | None": text_of, "bool": flag, "int": count, "int | None": count,
    "float": number, "float | None": number, "int | str | None": size,
    "tuple[int, int, int] | None": grid_of, "dict[str, Any] | None": reading,
}  # fmt: skip
"""Readers of the keys of each type; they raise ValueError with a message that follows the key's name."""


def key(reader: Callable[[Any], Any], default: Any = MISSING) -> Any:
    """Declare a key of a job whose type does not say how its value is read."""
    return field(default=default, metadata={"reader": reader})


def readers_of(job: type[Job]) -> dict[str, Callable[[Any], Any]]:
    """Return the reader of each key: required keys first, then keys that the class itself declares."""
    order = [name for kind in job.__mro__ for name in vars(kind).get("__annotations__", ())]
    keys = sorted(fields(job), key=lambda one: (one.name not in required(job), order.index(one.name)))
    return {one.name: one.metadata.get("reader") or READERS[str(one.type)] for one in keys}


def required(job: type[Job]) -> list[str]:
    """Return the keys without a default."""
    return [one.name for one in fields(job) if one.default is MISSING and one.name != "report"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The keys that every job has; a workflow's own class has the others."""

    out: str  # where the result goes
    memory_limit: int | str | None = None  # bytes of each worker; None for spdist's choice
    workers: int | None = None  # processes on this machine
    scheduler: str | None = None  # address of a running Dask scheduler
    scheduler_file: str | None = None  # or the file that holds it
    resume: bool = True  # continue an unfinished result
    report: str  # where the report goes

    def options(self, *names: str) -> dict[str, Any]:
        """Return the values of some keys, by name."""
        return {name: getattr(self, name) for name in names}

    def where(self) -> dict[str, Any]:
        """Return memory limit and workers as spdist's calls take them."""
        file = self.scheduler_file
        scheduler = scheduler_address(file) if file is not None else self.scheduler
        return self.options("memory_limit", "workers") | {"scheduler": scheduler}


@dataclass(frozen=True, kw_only=True)
class ProductJob(Job):
    """The keys of a job that multiplies stored matrices."""

    engine: Any = key(one_of("engine", engines), "auto")
    host_limit: int | str | None = None  # bytes of host memory for each GPU

    def where(self) -> dict[str, Any]:
        """Return engine, limits and workers as spdist's calls take them."""
        return super().where() | self.options("engine", "host_limit")


@dataclass(frozen=True, kw_only=True)
class WholeJob(Job):
    """The keys of a job that replaces `out` at the end, with its whole result."""

    overwrite: bool = False  # replace whatever lies at `out`


@dataclass(frozen=True, kw_only=True)
class WholeProductJob(ProductJob, WholeJob):
    """The keys of a job that multiplies stored matrices, and replaces `out` at the end with its whole result."""


def local(url: str) -> Path | None:
    """Return a path on this machine; None for a URL of another file system."""
    return Path(url) if "://" not in url else None


def scheduler_address(path: str) -> str:
    """Return the address in a scheduler's file; raise `JobError` if it is missing, or holds no address."""
    import spdist

    try:
        return spdist.scheduler_address(path)
    except spdist.InputError as error:
        raise JobError(str(error)) from None
