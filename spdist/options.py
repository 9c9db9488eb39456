"""The keywords of the public calls, and the frozen values that they become.

A public call declares its keywords once, as a ``TypedDict`` (PEP 692), and lists them in its signature by `lists`. Its
first statement turns them into values by `options_of`; functions below the API pass the values on whole. A new option
is a line in its ``TypedDict``, a field of its value and a paragraph in one docstring.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
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


@dataclass(frozen=True)
class ProductOptions:
    """How C is computed from A and B, as the user wrote it: names not looked up, matrices not opened.

    `spdist.spgemm` and `spdist.multiply` explain each field.
    """

    semiring: str | Semiring = "plus_times"
    mask: Any = None
    complement: bool = False
    triangle: str | None = None
    epilogue: Epilogue | None = None
    threshold: float | None = None
    top_n: int | None = None
    axis: int = 1
    sort: bool = True
    transpose_a: bool = False
    transpose_b: bool = False

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

    engine: str = "auto"
    # bytes, or a text such as ``"512MiB"``
    memory_limit: Bytes | None = None
    host_limit: Bytes | None = None
    grid: tuple[int, int, int] | None = None  # (int, int, int), optional: numbers of row, inner and column blocks
    workers: int | None = None
    scheduler: str | Client | Cluster | None = None  # A running Dask scheduler
    security: Security | None = None  # keys for that scheduler

    def check_engine(self) -> None:
        """Refuse an engine that does not exist."""
        find_engine(self.engine)

    def check(self) -> None:
        """Refuse an engine that does not exist, and numbers of workers or blocks that are none."""
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

    resume: bool = False
    overwrite: bool = False
    steal: bool = False
    names: bool = True
    check: bool = False
    record: str | Path | None = None
    report: str | Path | None = None


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


class GridKeywords(TypedDict, total=False):
    """How the planner cuts the product."""

    host_limit: Bytes | None
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


class WhereKeywords(EngineKeywords, WorkerKeywords, total=False):
    """Where the products of an application run."""

    host_limit: Bytes | None


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


class PlanKeywords(EngineKeywords, GridKeywords, ProductKeywords, total=False):
    """Keywords of `spdist.plan`."""


class StoredKeywords(EngineKeywords, GridKeywords, WorkerKeywords, TargetKeywords, ProductKeywords, total=False):
    """Keywords of products that are stored."""

    axis: int
    transpose_a: bool
    transpose_b: bool


class MatmulKeywords(StoredKeywords, total=False):
    """Keywords of `spdist.matmul`."""

    sort: bool


class MultiplyKeywords(StoredKeywords, total=False):
    """Keywords of `spdist.multiply`."""

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


COMMAND_LINE_NAMES = {"verify": "check"} | dict.fromkeys(
    ("scale_rows", "scale_columns", "normalize", "drop_zeros"), "epilogue"
)
"""Options of commands and job files that have another name in Python, and that name."""
CHECK_DEFAULTS: dict[str, Any] = {"vectors": 2, "seed": 0, "threads": None, "progress": None}
FILE_DEFAULTS: dict[str, Any] = dict.fromkeys(FileKeywords.__annotations__) | {"allow_nan": False, "dense": False}
VALUES = (ProductOptions, ExecutionOptions, OutputOptions, InMemoryOptions)
DEFAULTS: dict[str, Any] = {field.name: field.default for kind in VALUES for field in fields(kind)}
DEFAULTS |= CHECK_DEFAULTS | FILE_DEFAULTS


# -- from one to the other ---------------------------------------------------------------------------------------------

Function = TypeVar("Function", bound=Callable[..., Any])
One = TypeVar("One")
Two = TypeVar("Two")
Three = TypeVar("Three")


def _resolved(annotation: Any, keywords: type) -> Any:
    """Return the type that an annotation names in the module of the keywords, or the annotation if it names none."""
    return vars(sys.modules[keywords.__module__]).get(annotation, annotation)


def lists(keywords: type) -> Callable[[Function], Function]:
    """Decorate a function of ``**keywords`` so that `inspect.signature` and `help` list each keyword.

    `keywords`: the ``TypedDict`` that the function unpacks.
    Returns A decorator that sets the function's ``__signature__``.

    Examples
    --------
    >>> @lists(TargetKeywords)
    ... def store(url, **keywords): ...
    >>> print(inspect.signature(store))
    (url, *, resume: 'bool' = False, overwrite: 'bool' = False, steal: 'bool' = False, names: 'bool' = True)
    """

    def decorate(function: Function) -> Function:
        own = inspect.signature(function)
        named = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        listed = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=DEFAULTS[name],
                annotation=_resolved(getattr(kind, "__forward_arg__", kind), keywords),
            )
            for name, kind in keywords.__annotations__.items()
        ]
        function.__dict__["__signature__"] = own.replace(parameters=[*named, *listed])
        return function

    return decorate


def select(keywords: Mapping[str, object], kind: type[One]) -> One:
    """Return the keywords that a ``TypedDict`` names.

    `keywords`: keywords of a call.
    `kind`: A ``TypedDict``.
    Returns the keywords that `kind` declares; other keywords are left out.

    Examples
    --------
    >>> select({"seed": 1, "top_n": 3}, CheckKeywords)
    {'seed': 1}
    """
    return kind(**{name: value for name, value in keywords.items() if name in kind.__annotations__})


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
    `*kinds`: dataclasses.
    Returns A value of each dataclass.
    Raises `TypeError` if the function has no such keyword; names the nearest one.

    Examples
    --------
    >>> @lists(TargetKeywords)
    ... def store(url, **keywords):
    ...     return options_of(store, keywords, OutputOptions)
    >>> store("C.zarr", resume=True)
    (OutputOptions(resume=True, overwrite=False, steal=False, names=True, check=False, record=None, report=None),)
    >>> store("C.zarr", again=True)
    Traceback (most recent call last):
        ...
    TypeError: store() got an unexpected keyword argument 'again'
    >>> store("C.zarr", overwirte=True)
    Traceback (most recent call last):
        ...
    TypeError: store() got an unexpected keyword argument 'overwirte'; did you mean 'overwrite'?
    """
    known = inspect.signature(function).parameters
    for name in keywords:
        if name not in known:
            wanted = COMMAND_LINE_NAMES.get(name, "")
            near = [wanted] if wanted in known else difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}")
    return tuple(
        kind(**{name: keywords[name] for name in kind.__dataclass_fields__ if name in keywords}) for kind in kinds
    )
