"""Read HDF5 and MATLAB files in a process of their own: see `process`."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np

from spdist.errors import InputError, MatrixError, install, one_line
from spdist.matrices.dtypes import ValueArray
from spdist.shown import without_keys
from spdist.storage.formats.compressed_rows import Arrays, import_compressed, import_coordinates
from spdist.storage.formats.dense_rows import check_dense, import_dense
from spdist.storage.formats.hdf5.description import TENX, Settings
from spdist.storage.formats.source import Import, check_numbers, foreign
from spdist.storage.names.anndata_frames import FRAMES
from spdist.storage.names.names import AxisNames, Names, wrong_number

PROCESS = "spdist.storage.formats.hdf5.process"
"""Module that the child runs."""

PACKAGES = str(Path(__file__).parents[4])
"""Folder in which the child finds spdist."""

PATIENCE = 60.0
"""Seconds to wait for an answer: at most 64 MB from a slow disk. What computes is ended earlier."""

PATIENCE_BYTES = 2 << 20
"""Bytes of a MATLAB file before 7.3 for which there is another second."""

READ_NAMES = 1 << 14
"""Names that are read at a time."""

LINE_BYTES = 1 << 16
"""Bytes of the longest line of JSON in an answer."""

MATLAB_HEAD = 128
"""Bytes of the head of a MATLAB file of version 5."""

SIGNATURE = b"\x89HDF\r\n\x1a\n"
"""First bytes of HDF5, at the start of the file or after a block of 512 bytes, or twice, four times ... as many."""


def import_hdf5(job: Import) -> None:
    """Import a matrix of an HDF5 file, whichever program wrote it, with the names of its rows and columns.

    Raises `InputError` if h5py is not installed.
    Raises `MatrixError` if there is no such matrix, the file is damaged, or it refers to other files.
    """
    with _local_file(job) as file:
        _import_file(job, file, is_matlab5=False)


def import_mat(job: Import) -> None:
    """Import a matrix of a MATLAB file: HDF5 in version 7.3; an older one needs no h5py.

    Raises as `import_hdf5`.
    """
    with _local_file(job) as file:
        is_hdf5 = _is_hdf5(file, job.path)
        head = file.read(MATLAB_HEAD)
        file.seek(0)
        if head and not is_hdf5 and b"\0" not in head:
            raise MatrixError(f"{job.path}: it is text, and no MATLAB file; save it again with save -v7")
        _import_file(job, file, is_matlab5=not is_hdf5)


def _is_hdf5(file: BinaryIO, path: str) -> bool:
    """Whether a file is HDF5; it is at its start before and after."""
    offsets = [0, *(512 << k for k in range(12))]
    with foreign(path):
        found = any(file.seek(offset) == offset and file.read(len(SIGNATURE)) == SIGNATURE for offset in offsets)
        file.seek(0)
    return found


def _import_file(job: Import, file: BinaryIO, is_matlab5: bool) -> None:
    if not is_matlab5 and importlib.util.find_spec("h5py") is None:
        raise InputError(f"{job.path}: reading HDF5 needs h5py: {install('h5ad')}")
    with _reader(file, job, is_matlab5) as reader:
        found = reader.answer()
        inner = one_line(found["inner"], 100)
        reader.name = f"{job.path}::{inner}" if inner else job.path
        _check_orient(job, found["format"])
        job.reading.format = found["format"]
        job.reading.found += [one_line(each) for each in [inner, *found["found"]] if each]
        job.reading.left_out += [one_line(each) for each in found["left_out"]]
        shape = job.shape(found["shape"])
        streams = {
            name: _H5Stream(reader, name, described, "biufc" if name in ("data", "values") else "iu")
            for name, described in found["arrays"].items()
        }
        if found["kind"] == "dense":
            check_dense(job, reader.name, found["sparse"])
        claimed = sum(stream.nbytes for stream in streams.values())
        job.source.check_inflated(claimed, "write it without compression if it is meant to")
        named = replace(job, names=_names(reader, found["names"], shape))
        _write(named, shape, found, streams, reader.name)


def _write(
    job: Import, shape: tuple[int, int], found: dict[str, Any], streams: dict[str, _H5Stream], name: str
) -> None:
    """Import the matrix from its arrays."""
    kind = found["kind"]
    if kind == "dense":
        values = streams["values"]
        chunk = (values.chunk[0], values.chunk[1])
        import_dense(job, shape, values.dtype, values.rectangle, chunk, found["by_columns"])
    elif kind == "coordinates":
        import_coordinates(job, shape, streams["rows"], streams["columns"], streams["data"], name)
    else:
        arrays = Arrays(streams["indptr"], streams["indices"], streams["data"], name)
        import_compressed(job, shape, arrays, by_columns=kind == "columns")


def _check_orient(job: Import, format: str) -> None:
    """Refuse an orientation of a matrix that is not one of cells and genes."""
    if job.options.orient is not None and format != TENX:
        raise InputError(
            f"orient={job.options.orient!r}: {job.path} is {format} and has no cells and genes to turn, as {TENX} has; "
            f"leave it out"
        )


def _names(reader: _Reader, lengths: dict[str, int | None], shape: tuple[int, int]) -> AxisNames:
    """Return the names of rows and columns, unread; leave out names that cannot be kept with the matrix."""
    found: list[Names | None] = []
    for axis, count in zip(("rows", "columns"), shape, strict=True):
        label, length = f"{reader.name}, names of {axis}", lengths.get(axis)
        if length is not None and length != count:
            raise wrong_number(label, length, count)
        pieces = functools.partial(_pieces, reader, axis, count)
        found.append(None if length is None else Names(label, count, pieces, foreign=True))
    return AxisNames(*found)


def _pieces(reader: _Reader, axis: str, count: int) -> Iterator[bytes]:
    for first in range(0, count, READ_NAMES):
        yield reader.ask(axis, slice(first, min(first + READ_NAMES, count)))


@contextlib.contextmanager
def _local_file(job: Import) -> Iterator[BinaryIO]:
    """Yield the source as a file of this machine; one from elsewhere is copied first."""
    with contextlib.suppress(OSError):  # of a file that has no descriptor
        job.source.file.fileno()
        yield job.source.file
        return
    copy = job.stage.scratch / "source.hdf5"
    with copy.open("wb") as file, foreign(job.path):
        shutil.copyfileobj(job.source.file, file)
    with copy.open("rb") as file:
        copy.unlink()
        yield file


@contextlib.contextmanager
def _reader(file: BinaryIO, job: Import, is_matlab5: bool) -> Iterator[_Reader]:
    """Yield the process that reads a file; it is gone afterwards."""
    options = job.options
    settings = Settings(
        job.source.inner, options.orient or "", options.dense, {name: list(each) for name, each in FRAMES.items()}
    )
    paths = os.pathsep.join([PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", PROCESS, str(file.fileno()), "matlab5" if is_matlab5 else "hdf5"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[file.fileno()], bufsize=0,
        env={**without_keys(), "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        patience = PATIENCE + (job.source.size / PATIENCE_BYTES if is_matlab5 else 0)
        reader = _Reader(process, f"{job.path}::{settings.inner}" if settings.inner else job.path, patience)
        reader.write(json.dumps(asdict(settings)))
        yield reader
    finally:
        process.kill()
        process.communicate()


class _Reader:
    """The process that reads a file.

    `patience`: seconds to wait for an answer.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str, patience: float) -> None:
        self.process, self.name, self.patience = process, name, patience
        self.pipe = cast(IO[bytes], process.stdout).fileno()
        self.waiting = b""

    def write(self, line: str) -> None:
        """Send a line."""
        try:
            cast(IO[bytes], self.process.stdin).write(f"{line}\n".encode())
        except BrokenPipeError:
            raise self._gone() from None

    def ask(self, name: str, *at: slice) -> bytes:
        """Return the bytes of a part of an array, or the text of names."""
        self.write(" ".join([name, *(f"{each.start} {each.stop}" for each in at)]))
        return self._bytes(self.answer()["bytes"])

    def answer(self) -> dict[str, Any]:
        """Return the next line of JSON."""
        while b"\n" not in self.waiting:
            self.waiting += self._more(time.monotonic() + self.patience)
            if len(self.waiting) > LINE_BYTES and b"\n" not in self.waiting[:LINE_BYTES]:
                raise self._gone()
        line, _, self.waiting = self.waiting.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise MatrixError(f"{self.name}: {one_line(found['error'], 600)}")
        return found

    def _bytes(self, count: int) -> bytes:
        parts, held, end = [self.waiting], len(self.waiting), time.monotonic() + self.patience
        self.waiting = b""
        while held < count:
            parts.append(self._more(end))
            held += len(parts[-1])
        return b"".join(parts)

    def _more(self, end: float) -> bytes:
        """Return what the process has written, by the time `end` of `time.monotonic`."""
        ready, _, _ = select.select([self.pipe], [], [], max(end - time.monotonic(), 0))
        if not ready:
            raise MatrixError(f"{self.name}: not read within {self.patience:.0f} s; copy the file to a quicker disk")
        found = os.read(self.pipe, 1 << 20)
        if not found:
            raise self._gone()
        return found

    def _gone(self) -> MatrixError:
        """Return the error to raise when the process has ended before its answer."""
        self.process.kill()
        code = self.process.wait()
        reason = f"it ended with code {code}"
        if code == -signal.SIGPROF:
            reason = "it took too long"
        elif code < 0:
            reason = f"it crashed, {signal.Signals(-code).name}"
        return MatrixError(f"{self.name}: its library cannot read it ({reason}); get the file again")


class _H5Stream:
    """An array in a file: read in order, or by rectangles."""

    def __init__(self, reader: _Reader, name: str, described: list[Any], kinds: str) -> None:
        shape, spelled, chunk = described
        self.reader, self.name, self.stored, self.at = reader, name, np.dtype(spelled), 0
        self.shape: tuple[int, ...] = tuple(shape)
        self.chunk: tuple[int, ...] = tuple(chunk)
        self.dtype = check_numbers(self.stored, reader.name, name, kinds)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return int(math.prod(self.shape) * self.stored.itemsize)

    def read(self, count: int) -> ValueArray:
        """Return the next `count` elements."""
        self.at += count
        return self._part(slice(self.at - count, self.at))

    def rectangle(self, rows: slice, columns: slice) -> ValueArray:
        """Return the elements in some rows and columns."""
        return self._part(rows, columns).reshape(rows.stop - rows.start, columns.stop - columns.start)

    def _part(self, *at: slice) -> ValueArray:
        count = math.prod(each.stop - each.start for each in at)
        if count == 0:
            return np.empty(0, self.dtype)
        raw = self.reader.ask(self.name, *at)
        if len(raw) != count * self.stored.itemsize:
            raise MatrixError(f"{self.reader.name}: array '{self.name}' is truncated; get the file again")
        return np.frombuffer(raw, self.stored).astype(self.dtype, copy=False)
