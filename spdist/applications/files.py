"""Operands of applications that are files of other programs: imported first, and the import removed at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from spdist.errors import InputError, SpdistError
from spdist.foundation.processes import name_of_writer, writer_lives
from spdist.jobs.target import check_target
from spdist.options import DEFAULTS, FileKeywords, TaskKeywords, select
from spdist.shown import without_secrets
from spdist.storage.external_sort import Duplicates
from spdist.storage.formats.opening import STANDARD_INPUT
from spdist.storage.formats.registry import Format, format_of
from spdist.storage.import_export import import_matrix, parted
from spdist.storage.lock import hold_target
from spdist.stores.names import FAMILY
from spdist.stores.registry import at, normalise


def file_format(operand: Any, keywords: Mapping[str, object]) -> Format | None:
    """Return the format of an operand that is a file; None if it is a matrix, in memory or stored.

    `operand`: ``"-"`` is standard input. A local file is always imported; the ending of other paths decides.
    `keywords`: of the call; the names of `FileKeywords` say how to read a file.
    Raises `InputError` if the format of a file is not known, or a matrix should be read as a file.
    """
    read = select(keywords, FileKeywords)
    how = {name: value for name, value in read.items() if value != DEFAULTS[name]}
    if isinstance(operand, str | Path):
        given, _ = parted(str(operand))
        path = given if given == STANDARD_INPUT else normalise(given)
        is_file = path == STANDARD_INPUT or at(path).is_file()
        try:
            kind = format_of(path, str(operand), read.get("format"))
            is_opened = ".zarr" in kind.endings and not how.keys() & {"format", *kind.takes}
            if not is_opened:
                return kind
        except InputError:
            if is_file or read.get("format") is not None:
                raise
    for name, value in how.items():
        shown = operand if isinstance(operand, str | Path) else "the operand"
        raise InputError(f"{name}={value!r}: {shown} is no file to be read, but a matrix already; leave it out")
    return None


@contextmanager
def imported(
    operand: Any, place: AbstractContextManager[str], keywords: Mapping[str, object], *, duplicates: Duplicates
) -> Iterator[Any]:
    """Yield an operand; if it is a file, the matrix imported from it, with the names of vertices if it has any.

    `place`: yields the path of the matrix, which is removed at the end; entered only for a file.
    `keywords`: of the call; the names of `FileKeywords` say how to read a file.
    `duplicates`: how several edges from one vertex to another are combined.
    Raises `SpdistError` that names the file, not the imported matrix.
    """
    kind = file_format(operand, keywords)
    if kind is None:
        yield operand
        return
    chosen = {"names": True, "duplicates": duplicates}
    read = select(keywords, FileKeywords) | {name: value for name, value in chosen.items() if name in kind.takes}
    with place as url:
        try:
            yield import_matrix(operand, url, **cast(Any, read))
        except SpdistError as error:
            hidden = without_secrets(url)
            if hidden not in str(error):
                raise
            shown = "standard input" if str(operand) == STANDARD_INPUT else str(operand)
            raise type(error)(str(error).replace(hidden, shown)) from error
        finally:
            at(url).discard()


@contextmanager
def beside(out: str | Path | None, what: str, keywords: TaskKeywords) -> Iterator[str]:
    """Lock the target of a result while a file is imported beside it; yield the path of the import.

    Workers see that path, and its disk has space for a result. A resumed run imports the file
    again, to a matrix of the same fingerprint.

    `what`: the result, as the message names it.
    Raises `InputError` if the result has no path, or may not be written there.
    """
    if out is None:
        raise InputError(f"the {what} of a file are stored: say where, with out='C.zarr'")
    target = normalise(out)
    if not keywords.get("resume", False):
        check_target(target, overwrite=keywords.get("overwrite", False))
    with hold_target(target, steal=keywords.get("steal", False)):
        yield f"{target}.spdist-file-{uuid4().hex[:8]}"


@contextmanager
def in_folder(folder: str | Path | None = None) -> Iterator[str]:
    """Yield a path for a matrix in a folder, by default the folder for temporary files; delete it at the end.

    Remains of killed processes in the folder are deleted first.
    """
    target = f"{normalise(tempfile.gettempdir() if folder is None else folder)}/temporary"
    place = f"{target}{FAMILY}of.{name_of_writer()}"
    at(place).make_folder(0o700 if folder is None else 0o777)
    for other in at(target).relatives():
        if writer_lives(other) is False:
            at(other).discard()
    try:
        yield f"{place}/matrix.zarr"
    finally:
        at(place).discard()
