"""The keywords of the public calls, and the frozen values that they become.

An option is declared once, as a field of a value: its default, and how the command line shows it (`option`). Its line
in a ``TypedDict`` (PEP 692) says which calls take it: `lists_keywords` puts it into their signatures,
`spdist.cli.options` into their commands. The first statement of a call turns keywords into values by `options_of`;
functions below the API pass the values on whole.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

from spdist.errors import InputError
from spdist.foundation.cpus import count_cpus
from spdist.foundation.units import check_count, counted
from spdist.kernels.engine import find_engine

if TYPE_CHECKING:
    from distributed import Client, Security
    from distributed.deploy.cluster import Cluster

    from spdist.kernels.product_spec import Epilogue, ProductSpec
    from spdist.kernels.semirings import Semiring

DEFAULT_MEMORY_LIMIT = "2GiB"
"""Memory limit of a worker without a GPU."""

Bytes = int | str
"""A number of bytes, or a text such as ``"512MiB"``."""


# -- the values --------------------------------------------------------------------------------------------------------


def option(default: Any, help: str = "", metavar: str | None = None, **shown: Any) -> Any:
    """Declare a field that is an option of commands.

    `help`: one sentence on the command line.
    `metavar`: its value there.
    `shown`: ``choices``; ``group``, the title above it; ``flag``, its name there if that is another; ``alias``, one
    more name; ``parts``, a dataclass whose fields are the options that make up this one.
    """
    return field(default=default, metadata={"help": help, "metavar": metavar, **shown})


def of_rows(default: Any, help: str, metavar: str | None = None) -> Any:
    """Declare an option that changes each row of C."""
    return option(default, help, metavar, group="what becomes of each row, in this order")


def of_edges(default: Any, help: str, metavar: str | None = None) -> Any:
    """Declare an option that says how to read a list of edges."""
    return option(default, help, metavar, group="lists of edges: .abc, .tsv, .csv, .txt, .edges, .edgelist")


def of_keys(help: str) -> Any:
    """Declare an option that names a file with a key."""
    return option(None, help, "FILE.pem", group="keys for a scheduler at tls://")


@dataclass(frozen=True)
class EpilogueParts:
    """An epilogue on the command line and in job files."""

    scale_rows: str | None = of_rows(None, "multiply rows of C by these factors", "F.npy")
    scale_columns: str | None = of_rows(None, "multiply columns of C by these factors", "F.npy")
    normalize: str | None = of_rows(None, "divide rows by their norm: l1, l2 or max", "NORM")
    drop_zeros: bool = of_rows(False, "leave out entries that are zero")


@dataclass(frozen=True)
class KeyFiles:
    """Keys for a scheduler on the command line."""

    tls_ca_file: str | None = of_keys("authority of the scheduler's certificate")
    tls_cert: str | None = of_keys("certificate of this process")
    tls_key: str | None = of_keys("its private key")


@dataclass(frozen=True)
class ProductOptions:
    """How C is computed from A and B, as the user wrote it: names not looked up, matrices not opened.

    `spdist.spgemm` and `spdist.multiply` explain each field.
    """

    semiring: str | Semiring = of_rows("plus_times", "plus_times (default), min_plus, plus_pair, or_and, ...")
    mask: Any = of_rows(None, "a matrix: C has entries only where it stores one", "M")
    complement: bool = of_rows(False, "only where the mask stores none")
    triangle: str | None = of_rows(None, "of a symmetric C, only what is on and above the diagonal", "upper")
    epilogue: Epilogue | None = option(None, parts=EpilogueParts)
    threshold: float | None = of_rows(None, "keep values from X up", "X")
    top_n: int | None = of_rows(None, "keep the N largest of each row", "N")
    axis: int = option(
        1, "0: --top-n and --normalize look at columns, not rows; the transposes are multiplied", choices=(0, 1)
    )
    sort: bool = True
    transpose_a: bool = option(False, "multiply by the transpose of A; a transposed copy lies next to C meanwhile")
    transpose_b: bool = option(False, "multiply by the transpose of B; a transposed copy lies next to C meanwhile")

    def row_spec(self) -> ProductSpec:
        """Return what kernels do to each row, without the mask, which the caller opens or converts.

        Raises `InputError` if an option is wrong in itself.
        """
        from spdist.kernels.product_spec import ProductSpec
        from spdist.kernels.semirings import find

        return ProductSpec(
            find(self.semiring),
            top_n=self.top_n,
            threshold=self.threshold,
            epilogue=self.epilogue,
            triangle=self.triangle,
            sort=self.sort,
        )


@dataclass(frozen=True)
class ExecutionOptions:
    """Where and within which limits a product runs, as the user wrote it.

    `spdist.multiply` explains each field.
    """

    engine: str = option("auto", "auto (default): the quickest; scipy, numba: cores; cuda: GPUs; hybrid: both")
    memory_limit: Bytes | None = option(
        None,
        f"of each worker, by default {DEFAULT_MEMORY_LIMIT}; with GPUs, of each GPU, by default 0.9 of what is free",
        "BYTES",
    )
    host_limit: Bytes | None = option(None, "of the host's memory for each GPU, by default 8GiB", "BYTES")
    grid: tuple[int, int, int] | None = option(None, "force the number of row, inner and column blocks", "I,K,J")
    workers: int | None = option(
        None, "worker processes on this machine; by default none besides this one, or one per GPU if there are several"
    )
    scheduler: str | Client | Cluster | None = option(
        None, "use a running Dask scheduler: its address, or the file that it wrote", "ADDRESS", alias="scheduler_file"
    )
    security: Security | None = option(None, parts=KeyFiles)

    def check_engine(self) -> None:
        """Refuse an engine that does not exist."""
        find_engine(self.engine)

    def check(self) -> None:
        """Refuse an engine that does not exist, and invalid numbers of workers or blocks."""
        check_count("workers", self.workers, "this process alone, or one per GPU")
        most = max(64, 8 * count_cpus())
        if self.workers is not None and self.workers > most:
            raise InputError(
                f"workers={self.workers}: so many processes would stop this machine: "
                f"{counted(count_cpus(), 'CPU')} may be used; name {most} at most, or leave it out"
            )
        grid: object = self.grid
        if grid is not None and (not isinstance(grid, tuple | list) or len(grid) != 3):
            raise InputError(
                f"grid={grid!r}: write the numbers of row, inner and column blocks, for instance (10, 1, 1)"
            )
        self.check_engine()


@dataclass(frozen=True)
class OutputOptions:
    """Treatment of an existing C, verification, and the files for timings and the report.

    `spdist.multiply` explains each field.
    """

    resume: bool = option(False, "continue an unfinished C")
    overwrite: bool = option(False, "replace C once the new one is whole")
    steal: bool = option(
        False, "take over from a run on another host that writes there and had no heartbeat for a minute"
    )
    names: bool = option(True, "the result gets no names of rows and columns", flag="no_names")
    part: str | tuple[int, int] | None = option(
        None, "make only the rows of part K of N; C is whole when all parts are", "K/N"
    )
    check: bool = option(False, "check C at the end", flag="verify")
    record: str | Path | None = option(
        None, "write what each stage of each block took, one JSON object per line", "FILE"
    )
    report: str | Path | None = option(None, "write a report of the run to read in a browser", "FILE.html")


@dataclass(frozen=True)
class FileOptions:
    """How an operand that is a file is read.

    `spdist.import_matrix` explains each field.
    """

    format: str | None = option(None, "read the file as this format, whatever its name: mtx, abc, csv.gz, ...", "NAME")
    header: bool | None = of_edges(
        None, "the first line names the columns, or does not; by default it does if it has the known words"
    )
    columns: Sequence[int | str] | None = of_edges(
        None,
        "columns of source, target and perhaps weight: numbers from 1, or names in the header; by default what the "
        "header says, else 1,2,3",
        "I,J,K",
    )
    separator: str | None = of_edges(
        None, "what separates fields: tab, comma, semicolon or space; by default what ending and lines say", "NAME"
    )
    quotes: bool | None = of_edges(
        None, "fields may be in quotes, or quotes are part of names; by default they may, except in .abc"
    )
    allow_nan: bool = of_edges(False, "take weights that are NaN")
    orient: str | None = option(
        None, "rows and columns of single cells: cells-by-genes (default) or genes-by-cells", "ORIENT"
    )
    dense: bool = option(False, "read a dense array, and keep its nonzeros")


@dataclass(frozen=True)
class CheckOptions:
    """How C is verified.

    `spdist.verify` explains each field.
    """

    vectors: int = 2
    seed: int = 0
    threads: int | None = None
    progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True)
class InMemoryOptions:
    """How matrices in memory are multiplied.

    `spdist.spgemm` explains each field.
    """

    method: str = "auto"
    threads: int | None = None
    deterministic: bool = False
    memory_limit: int | None = None  # bytes of GPU memory

    @property
    def thread_count(self) -> int:
        """Threads on the CPU; by default one for each core."""
        return self.threads or count_cpus()


# -- the keywords ------------------------------------------------------------------------------------------------------


class ProductKeywords(TypedDict, total=False):
    """Changes to each row of the product."""

    semiring: str | Semiring
    mask: Any
    complement: bool
    triangle: str | None
    epilogue: Epilogue | None
    threshold: float | None
    top_n: int | None


class EngineKeywords(TypedDict, total=False):
    """The engine and its memory limit."""

    engine: str
    memory_limit: Bytes | None


class WorkerKeywords(TypedDict, total=False):
    """Which processes multiply."""

    workers: int | None
    scheduler: Any
    security: Any


class LimitKeywords(EngineKeywords, total=False):
    """The engine and its limits of memory."""

    host_limit: Bytes | None


class GridKeywords(LimitKeywords, total=False):
    """How the planner cuts the product."""

    grid: tuple[int, int, int] | None


class TargetKeywords(TypedDict, total=False):
    """Treatment of an existing C, and whether C gets names."""

    resume: bool
    overwrite: bool
    steal: bool
    names: bool


class SpgemmKeywords(ProductKeywords, total=False):
    """Keywords of `spdist.spgemm`."""

    axis: int
    sort: bool
    threads: int | None
    deterministic: bool
    memory_limit: int | None


class WhereKeywords(LimitKeywords, WorkerKeywords, total=False):
    """Where the products of an application run."""


class ApplicationKeywords(WhereKeywords, TargetKeywords, total=False):
    """Keywords of applications that store their result."""


class FileKeywords(TypedDict, total=False):
    """How an operand that is a file is read; `spdist.import_matrix` explains each."""

    format: str | None
    header: bool | None
    columns: Sequence[int | str] | None
    separator: str | None
    quotes: bool | None
    allow_nan: bool
    orient: str | None
    dense: bool


class TaskKeywords(ApplicationKeywords, FileKeywords, total=False):
    """Keywords of applications that store their result and take a file."""


class CountKeywords(WhereKeywords, FileKeywords, total=False):
    """Keywords of applications that return a number and take a file."""


class PlanKeywords(GridKeywords, ProductKeywords, total=False):
    """Keywords of `spdist.plan`."""


class StoredKeywords(GridKeywords, WorkerKeywords, TargetKeywords, ProductKeywords, total=False):
    """Keywords of products that are stored."""

    axis: int
    transpose_a: bool
    transpose_b: bool


class MatmulKeywords(StoredKeywords, total=False):
    """Keywords of `spdist.matmul`."""

    sort: bool


class MultiplyKeywords(StoredKeywords, total=False):
    """Keywords of `spdist.multiply`."""

    part: str | tuple[int, int] | None
    check: bool
    record: str | Path | None
    report: str | Path | None


class ReduceKeywords(WhereKeywords, ProductKeywords, total=False):
    """Keywords of `spdist.reduce`."""


class ChainKeywords(WhereKeywords, TargetKeywords, total=False):
    """Keywords of `spdist.multi_matmul`."""


class CheckKeywords(TypedDict, total=False):
    """How C is verified; `spdist.verification.freivalds.verify` explains each."""

    vectors: int
    seed: int
    threads: int | None
    progress: Callable[[int, int], None] | None


class VerifyKeywords(ProductKeywords, CheckKeywords, total=False):
    """Keywords of `spdist.verify`."""

    transpose_a: bool
    transpose_b: bool


VALUES = (InMemoryOptions, CheckOptions, ProductOptions, ExecutionOptions, OutputOptions, FileOptions)
OPTIONS = {one.name: one for kind in VALUES for one in fields(kind)}
DEFAULTS: dict[str, Any] = {name: one.default for name, one in OPTIONS.items()}


def _command_line_names() -> dict[str, str]:
    """Return the options of commands and job files that have another name in Python, and that name."""
    found = {one.metadata["flag"]: name for name, one in OPTIONS.items() if "flag" in one.metadata}
    parts = {name: fields(one.metadata["parts"]) for name, one in OPTIONS.items() if "parts" in one.metadata}
    return found | {part.name: name for name, group in parts.items() for part in group}


COMMAND_LINE_NAMES = _command_line_names()
DASK_NAMES = {"client": "scheduler", "cluster": "scheduler"}
"""What users of Dask call an option."""


# -- from one to the other ---------------------------------------------------------------------------------------------

Function = TypeVar("Function", bound=Callable[..., Any])
One = TypeVar("One")
Two = TypeVar("Two")
Three = TypeVar("Three")


def _resolved(annotation: Any, module: str) -> Any:
    """Return the type that an annotation names in a module; other annotations stay text."""
    return vars(sys.modules[module]).get(annotation, annotation)


def lists_keywords(keywords: type) -> Callable[[Function], Function]:
    """Decorate a function of ``**keywords`` so that `inspect.signature` and `help` list each keyword.

    `keywords`: the ``TypedDict`` that the function unpacks.
    Returns a decorator that sets the function's ``__signature__``.

    Examples
    --------
    >>> @lists_keywords(TargetKeywords)
    ... def store(url, **keywords): ...
    >>> print(inspect.signature(store))
    (url, *, resume: 'bool' = False, overwrite: 'bool' = False, steal: 'bool' = False, names: 'bool' = True)
    """

    def decorate(function: Function) -> Function:
        own = inspect.signature(function)
        named = [
            one.replace(annotation=_resolved(one.annotation, function.__module__))
            for one in own.parameters.values()
            if one.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        listed = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=DEFAULTS[name],
                annotation=_resolved(getattr(kind, "__forward_arg__", kind), keywords.__module__),
            )
            for name, kind in keywords.__annotations__.items()
        ]
        function.__dict__["__signature__"] = own.replace(parameters=[*named, *listed])
        return function

    return decorate


def select(keywords: Mapping[str, object], kind: type[One]) -> One:
    """Return the keywords that a ``TypedDict`` names.

    Returns the keywords that `kind` declares; other keywords are left out.

    Examples
    --------
    >>> select({"seed": 1, "top_n": 3}, CheckKeywords)
    {'seed': 1}
    """
    return kind(**{name: value for name, value in keywords.items() if name in kind.__annotations__})


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function; kept, since a small product takes little longer than this question."""
    return inspect.signature(function).parameters


@overload
def options_of(function: Callable[..., Any], keywords: Mapping[str, object], /) -> tuple[()]: ...
@overload
def options_of(function: Callable[..., Any], keywords: Mapping[str, object], one: type[One], /) -> tuple[One]: ...
@overload
def options_of(
    function: Callable[..., Any], keywords: Mapping[str, object], one: type[One], two: type[Two], /
) -> tuple[One, Two]: ...
@overload
def options_of(
    function: Callable[..., Any], keywords: Mapping[str, object], one: type[One], two: type[Two], three: type[Three], /
) -> tuple[One, Two, Three]: ...
def options_of(function: Callable[..., Any], keywords: Mapping[str, object], /, *kinds: Any) -> Any:
    """Return values made from the keywords of a call; each takes those that name its fields.

    `function`: the function that was called; its signature says which keywords there are.
    `keywords`: the keywords of the call.
    Raises `TypeError` if the function has no such keyword; names the nearest one.

    Examples
    --------
    >>> @lists_keywords(TargetKeywords)
    ... def store(url, **keywords):
    ...     return options_of(store, keywords, OutputOptions)
    >>> store("C.zarr", resume=True)
    (OutputOptions(resume=True, overwrite=False, steal=False, names=True, part=None, check=False, record=None, ...),)
    >>> store("C.zarr", again=True)
    Traceback (most recent call last):
        ...
    TypeError: store() got an unexpected keyword argument 'again'
    >>> store("C.zarr", overwirte=True)
    Traceback (most recent call last):
        ...
    TypeError: store() got an unexpected keyword argument 'overwirte'; did you mean 'overwrite'?
    """
    known = _parameters(function)
    for name in keywords:
        if name not in known:
            wanted = (DASK_NAMES | COMMAND_LINE_NAMES).get(name, "")
            near = [wanted] if wanted in known else difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}")
    return tuple(
        kind(**{name: value for name, value in keywords.items() if name in kind.__dataclass_fields__}) for kind in kinds
    )
