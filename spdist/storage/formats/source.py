"""The file that is imported and the matrix that it becomes: bounds on what it claims, and errors of its libraries.

A file of seventy bytes may announce a trillion rows, and one of nine megabytes inflate to gigabytes. What a file claims
is therefore held against its own size, and against the free disk, before anything is allocated or written.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from spdist.errors import MatrixError, SpdistError, one_line
from spdist.foundation.units import format_bytes
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import check_dtype
from spdist.shown import as_cause
from spdist.storage.atomic_replace import Progress, Stage
from spdist.storage.external_sort import Entries, RowSorter
from spdist.storage.formats.reading import Reading, ReadOptions
from spdist.storage.names.anndata_frames import check_axes
from spdist.storage.names.names import NO_NAMES, AxisNames
from spdist.storage.names.of_matrix import names_for
from spdist.storage.writer import MatrixWriter
from spdist.stores.registry import at

INFLATED_BYTES = 1 << 30
"""Bytes to which any compressed file may inflate."""

INFLATED_RATIO = 256
"""Times its own bytes to which a larger compressed file may inflate; text shrinks 10 times, equal values 1,000."""

OFFSET_BYTES = 2 << 30
"""Bytes of offsets, 8 a row, that any file may ask for: a quarter of a billion rows."""

OFFSET_RATIO = 4096
"""Bytes of offsets that a larger file may ask for, for each byte of its own."""

_SYSTEM = (None, 22, 75)
"""Numbers of OSErrors that mean damage: none, EINVAL and EOVERFLOW, from a seek to a place that cannot be."""


@contextmanager
def foreign(path: str, what: str = "") -> Iterator[None]:
    """Turn whatever a library raises on foreign content into one line that names the file.

    Wrap calls of libraries only, so that an error of spdist's own is not taken for a bad file.

    Raises `MatrixError` in place of every error but spdist's own, and the operating system's.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except SpdistError:
        raise
    except Exception as error:  # zipfile, zlib, bz2, NumPy's headers and h5py raise nearly every type that there is
        if isinstance(error, OSError) and error.errno not in _SYSTEM:
            raise
        part = f"{what} is " if what else ""
        raise MatrixError(
            f"{path}: {part}damaged, truncated or not what its name says ({type(error).__name__}: {one_line(error)}); "
            f"get the file again"
        ) from as_cause(error)


@dataclass(frozen=True)
class Source:
    """The file that is imported."""

    path: str  # for messages; a path or URL
    file: BinaryIO  # at its start
    size: int  # bytes of the file
    inner: str = ""  # path of the matrix inside the file, after ``::``; empty if none was given
    ending: str = ""  # what says its format, as in ".csv": the ending of its name, or the caller

    @classmethod
    def measured(cls, file: BinaryIO, path: str, inner: str = "", ending: str = "") -> Source:
        """Return an open file as a source, at its start and with its size."""
        with foreign(path):
            size = max(file.seek(0, 2), 1)
            file.seek(0)
        return cls(path, file, size, inner, ending)

    @property
    def inflated(self) -> int:
        """Bytes to which the file may inflate."""
        return max(INFLATED_BYTES, INFLATED_RATIO * self.size)

    def check_inflated(self, claimed: int, remedy: str) -> None:
        """Refuse a compressed file that inflates to many times its size."""
        if claimed > self.inflated:
            raise MatrixError(
                f"{self.path}: {format_bytes(self.size)} that inflate to {format_bytes(claimed)} or more, over the "
                f"limit of {format_bytes(self.inflated)}; {remedy}"
            )


@dataclass(frozen=True)
class Import:
    """One import: its source, where it writes, and how it reports."""

    source: Source
    stage: Stage
    facts: dict[str, Any]  # provenance, kept under the attribute ``spdist``
    progress: Progress
    bucket_bytes: int  # bytes of entries sorted at a time
    options: ReadOptions
    reading: Reading  # gets what the reader finds
    labels: Path | None = None  # where to write the names of vertices
    names: AxisNames = NO_NAMES  # of the matrix, once a reader has found them

    @property
    def path(self) -> str:
        """The source, for messages."""
        return self.source.path

    def shape(self, numbers: Sequence[Any]) -> tuple[int, int]:
        """Return the shape that a file states, once it is known to be one and its offsets to fit on the disk.

        Raises `MatrixError`; states the shape, or the bytes of its offsets and what there is.
        """
        if len(numbers) != 2 or not all(isinstance(each, int | np.integer) and each >= 0 for each in numbers):
            shown = one_line(", ".join(map(str, numbers[:9])), 60)
            raise MatrixError(f"{self.path}: a matrix has two dimensions, this has shape ({shown})")
        nrows, ncols = map(int, numbers)
        if max(nrows, ncols) >= 1 << 63:
            raise MatrixError(f"{self.path}: {nrows:,} x {ncols:,} is larger than 64-bit indices reach")
        size, most = self.source.size, max(OFFSET_BYTES, OFFSET_RATIO * self.source.size)
        if 8 * nrows > most:
            raise MatrixError(
                f"{self.path}: {nrows:,} rows in a file of {format_bytes(size)} would take {format_bytes(8 * nrows)} "
                f"of offsets, over the limit of {format_bytes(most)}; correct the number of rows, or leave empty ones "
                f"out"
            )
        check_axes(self.stage.target, (nrows, ncols))
        free = at(self.stage.url).free_bytes()
        if 8 * nrows > free:
            raise MatrixError(
                f"{self.path}: {nrows:,} rows take up to {format_bytes(8 * nrows)} of offsets, and the disk of the "
                f"target has {format_bytes(free)} free; correct the number of rows, or choose another disk"
            )
        return nrows, ncols

    def report_read(self, done: int, total: int) -> None:
        """Report that `done` of `total` entries are read: the first half of the progress, in bytes of the file."""
        size = self.source.size
        self.progress(size * min(done, total) // max(total, 1), 2 * size)

    def report_written(self, done: int, total: int) -> None:
        """Report that `done` of `total` entries are sorted and written: the second half of the progress."""
        size = self.source.size
        self.progress(size + size * min(done, total) // max(total, 1), 2 * size)

    def write(self, blocks: Iterable[CSR], ncols: int, dtype: np.dtype[Any], nnz: int) -> None:
        """Write row blocks that are in order and canonical."""
        names = names_for(self.stage.target, self.names)
        writer = MatrixWriter(self.stage.url, ncols, dtype, self.facts, names)
        for block in blocks:
            writer.append(block)
            self.report_written(writer.nnz, nnz)
        self.facts["provenance"]["read"] = self.reading.line(names)
        writer.close()
        self.report_written(1, 1)

    def sort(self, batches: Iterable[Entries], shape: tuple[int, int], dtype: np.dtype[Any], expected: int) -> None:
        """Sort entries into rows and write them."""
        sizes: dict[str, Any] = {"expected": expected, "bucket_bytes": self.bucket_bytes}
        sorter = RowSorter(self.stage.scratch, shape, dtype, duplicates=self.options.duplicates, **sizes)
        done = 0
        for entries in batches:
            sorter.add(entries)
            done += len(entries.rows)
            self.report_read(done, expected)
        self.write(sorter.blocks(), shape[1], dtype, expected)


def check_numbers(dtype: np.dtype[Any], path: str, name: str, kinds: str) -> np.dtype[Any]:
    """Return the dtype of an array in a file, in this machine's byte order, once it is known to be one of numbers.

    `kinds`: kinds that may be: "iu" for places, "biufc" for values.
    """
    if dtype.kind not in kinds or dtype.names is not None or dtype.subdtype is not None:
        if dtype.hasobject:
            raise MatrixError(f"{path}: array '{name}' holds Python objects, which are not read")
        what = "whole numbers" if kinds == "iu" else "numbers"
        raise MatrixError(f"{path}: array '{name}' holds {one_line(dtype, 60)}; it must hold {what}")
    try:
        return check_dtype(dtype.newbyteorder("="))
    except MatrixError as error:
        raise MatrixError(f"{path}: {error}") from None
