"""Check one whole stored matrix: metadata, Zarr chunks, structure, and files of dead runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from spdist.errors import MatrixError, SpdistError
from spdist.storage import groups
from spdist.storage.checksums import NOTE
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.names.of_matrix import named_arrays, open_names
from spdist.storage.parts.arrays import arrays_of
from spdist.stores.names import FAMILY
from spdist.stores.registry import at

LISTED = 30
"""Problems of one kind that are named at most; further ones are counted."""

READ_CHUNKS = 8
"""Zarr chunks that are decoded at a time."""

REMAINS = ("spdist-plan", "spdist-journal")
"""Files of an unfinished matrix, which a finished one lacks."""


@dataclass(frozen=True)
class MatrixCheck:
    """What `check` found in a stored matrix."""

    matrix: str  # an absolute path or an fsspec URL
    sealed: bool  # whether spdist wrote the matrix with a seal, which reveals altered and swapped Zarr chunks
    problems: tuple[str, ...]  # one line for each problem; at most 30 Zarr chunks of an array are named
    count: int  # number of problems, named or not
    nchunks: int  # Zarr chunks that were read
    nnz: int  # entries, or dense blocks of a block matrix; 0 if its metadata are wrong
    seconds: float  # wall-clock time of the check

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.count

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and `ok`, as a dictionary that JSON can hold."""
        return asdict(self) | {"problems": list(self.problems), "ok": self.ok}


class _Problems:
    """Collects problems: names some of each kind, counts all."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def add(self, found: Iterator[str]) -> int:
        """Add problems of one kind; return how many there are."""
        number = 0
        for number, line in enumerate(found, 1):
            if number <= LISTED:
                self.lines.append(line)
        if number > LISTED:
            self.lines.append(f"... and {number - LISTED:,} more like the last one")
        self.count += number
        return number


def check(url: str, progress: Callable[[int, int], None] = lambda done, total: None) -> MatrixCheck:
    """Read a whole stored matrix in bounded memory and list every problem; `spdist.check` describes it.

    `progress`: called with Zarr chunks done and Zarr chunks in all.
    Raises `MatrixError` if nothing is there, or it is no matrix.
    """
    begin, problems = time.perf_counter(), _Problems()
    attributes = groups.read_attributes(url)
    problems.add(_remains_next_to(url))
    facts, matrix = groups.facts_of(attributes), None
    if facts.get("state") == "unfinished":
        problems.add(iter([f"{url}: unfinished; finish it with `spdist multiply A B {url} --resume`"]))
    elif not problems.add(str(error) for error in groups.broken_seals(at(url), attributes)):
        matrix = _open(url, attributes, problems)
    if matrix is not None:
        _check_content(matrix, problems, progress)
    arrays = [] if matrix is None else _arrays(matrix)
    nchunks, nnz = sum(array.nchunks for array in arrays), 0 if matrix is None else matrix.nnz
    seconds = time.perf_counter() - begin
    return MatrixCheck(url, "seal" in facts, tuple(problems.lines), problems.count, nchunks, nnz, seconds)


def _open(url: str, attributes: dict[str, Any], problems: _Problems) -> StoredMatrix | None:
    """Open the matrix; if it says that it is one and cannot be opened, add why."""
    try:
        return open_matrix(url)
    except SpdistError as error:
        if isinstance(error, MatrixError) and attributes.get("encoding-type") not in ("csr_matrix", "bsr_matrix"):
            raise
        problems.add(iter([str(error)]))
        return None


def _arrays(matrix: StoredMatrix) -> list[ChunkedArray]:
    names = [open_names(matrix.url, name, matrix.facts) for name in named_arrays(matrix.facts)]
    own = (matrix.indptr, matrix.indices, matrix.data)
    return [array for one in own for array in arrays_of(one)] + names


def _check_content(matrix: StoredMatrix, problems: _Problems, progress: Callable[[int, int], None]) -> None:
    """Read all Zarr chunks, then the structure if no Zarr chunk that says it is damaged."""
    arrays, done, damaged = _arrays(matrix), 0, 0
    total = sum(array.nchunks for array in arrays)
    for array in arrays:
        start = done
        found = problems.add(_damage(array, lambda k, start=start: progress(start + k, total)))  # type: ignore[misc]
        damaged += found if array.name in ("indptr", "indices") else 0
        done += array.nchunks
        if array.table:
            problems.add(_strays(array))
    for url in dict.fromkeys([matrix.url, *(array.url for array in arrays)]):
        problems.add(_remains_inside(url))
    if not damaged:
        try:
            matrix.check()
        except SpdistError as error:
            problems.add(iter([str(error)]))


def _damage(array: ChunkedArray, progress: Callable[[int], None]) -> Iterator[str]:
    """Yield a line for each Zarr chunk that cannot be read or is not the one that was written; or for the table."""
    if array.table and array.nchunks:
        try:
            array.expected()
        except SpdistError as error:
            yield str(error)
            return
    for k in range(0, array.nchunks, READ_CHUNKS):
        last = min(k + READ_CHUNKS, array.nchunks)
        if _problem(array, k, last) is not None:
            yield from (line for one in range(k, last) if (line := _problem(array, one, one + 1)) is not None)
        progress(last)


def _problem(array: ChunkedArray, k: int, last: int) -> str | None:
    """Return what is wrong with some Zarr chunks, if anything is."""
    try:
        array.read(k * array.chunk, min(last * array.chunk, array.length))
    except SpdistError as error:
        return str(error)
    return None


def _strays(array: ChunkedArray) -> Iterator[str]:
    """Yield a line for each foreign file in an array's folder."""
    for key in array.location.keys_below(array.name):
        k = array.files.number(key)
        if (k is None or k >= array.nchunks) and key not in (f"{array.name}/zarr.json", f"{array.name}/{NOTE}"):
            yield f"{array.url}/{key}: is no file of array '{array.name}'; remove it if no run needs it"


def _remains_inside(url: str) -> Iterator[str]:
    """Yield a line for each file that a run left in a finished matrix."""
    for name in at(url).names():
        if name in REMAINS or name.endswith(".partial"):
            yield f"{url}/{name}: left by a run that died; remove it if no run is at work"


def _remains_next_to(url: str) -> Iterator[str]:
    """Yield a line for each file or folder of a dead run next to the matrix."""
    parent, _, own = url.rpartition("/")
    for name in at(parent or "/").names():
        if name.startswith(f"{own}{FAMILY}"):
            yield f"{parent}/{name}: left by a run that died; remove it if no run is at work"
