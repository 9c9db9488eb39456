"""Read AnnData's .h5ad files, in a process of their own: see `h5ad_process`."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np

from spdist.errors import InputError, MatrixError, install, one_line
from spdist.matrices.dtypes import ValueArray
from spdist.storage import locations
from spdist.storage.formats.compressed_rows import Arrays, import_by_columns, import_by_rows
from spdist.storage.formats.source import Import, check_numbers, foreign
from spdist.storage.names.anndata_frames import FRAMES
from spdist.storage.names.names import AxisNames, Names, wrong_number

PATIENCE = 60.0
"""Seconds to wait for an answer: at most 16 MB from a slow disk. What computes is ended earlier."""

READ_NAMES = 1 << 14
"""Names that are read at a time."""

LINE_BYTES = 1 << 16
"""Bytes of the longest line of JSON in an answer."""


def import_h5ad(job: Import) -> None:
    """Import a sparse matrix of an .h5ad file, with the names of its rows and columns.

    Parameters
    ----------
    job : Import

    Raises
    ------
    InputError
        If h5py is not installed.
    MatrixError
        If there is no such matrix, the file is damaged, or it refers to other files.
    """
    if importlib.util.find_spec("h5py") is None:
        raise InputError(f"{job.path}: reading .h5ad needs AnnData: {install('h5ad')}")
    job = replace(job, source=replace(job.source, inner=job.source.inner or "X"))
    with _local_file(job) as file, _reader(file, job) as reader:
        found = reader.answer()
        streams = {}
        for name, kinds in (("indptr", "iu"), ("indices", "iu"), ("data", "biufc")):
            length, spelled = found["arrays"][name]
            streams[name] = _H5Stream(reader, name, length, np.dtype(spelled), kinds)
        shape = job.shape(found["shape"])
        claimed = sum(stream.nbytes for stream in streams.values())
        job.source.check_inflated(claimed, "write it without compression if it is meant to")
        arrays = Arrays(streams["indptr"], streams["indices"], streams["data"], reader.name)
        named = replace(job, names=_names(reader, found["names"], shape))
        (import_by_rows if found["rows"] else import_by_columns)(named, shape, arrays)


def _names(reader: _Reader, lengths: dict[str, int | None], shape: tuple[int, int]) -> AxisNames:
    """Return the names of rows and columns, of which nothing was read."""
    found: list[Names | None] = []
    for axis, count in zip(("rows", "columns"), shape, strict=True):
        place, length = f"{reader.name}, names of {axis}", lengths[axis]
        if length is not None and length != count:
            raise wrong_number(place, length, count)
        pieces = functools.partial(_pieces, reader, axis, count)
        found.append(None if length is None else Names(place, count, pieces))
    return AxisNames(*found)


def _pieces(reader: _Reader, axis: str, count: int) -> Iterator[bytes]:
    for first in range(0, count, READ_NAMES):
        yield reader.ask(axis, first, min(first + READ_NAMES, count))


@contextlib.contextmanager
def _local_file(job: Import) -> Iterator[BinaryIO]:
    """Yield the source as a file of this machine; one from elsewhere is copied first."""
    if locations.is_local(job.path):
        yield job.source.file
        return
    copy = job.stage.scratch / "source.h5ad"
    with copy.open("wb") as file, foreign(job.path):
        shutil.copyfileobj(job.source.file, file)
    with copy.open("rb") as file:
        copy.unlink()
        yield file


@contextlib.contextmanager
def _reader(file: BinaryIO, job: Import) -> Iterator[_Reader]:
    """Yield the process that reads a file; it is gone afterwards."""
    script = str(Path(__file__).with_name("h5ad_process.py"))
    frames = FRAMES.get(job.source.inner.strip("/").partition("/")[0], ("", ""))
    process = subprocess.Popen(
        [sys.executable, "-P", script, str(file.fileno()), job.source.inner, *frames],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[file.fileno()], bufsize=0,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield _Reader(process, f"{job.path}::{job.source.inner}")
    finally:
        process.kill()
        process.communicate()


class _Reader:
    """The process that reads a file.

    Parameters
    ----------
    process : Popen
    name : str
        File and matrix, for messages.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self.process, self.name = process, name
        self.pipe = cast(IO[bytes], process.stdout).fileno()
        self.waiting = b""

    def ask(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes of elements ``[start:stop)`` of an array, or the text of names."""
        try:
            cast(IO[bytes], self.process.stdin).write(f"{name} {start} {stop}\n".encode())
        except BrokenPipeError:
            raise self._gone() from None
        return self._bytes(self.answer()["bytes"])

    def answer(self) -> dict[str, Any]:
        """Return the next line of JSON."""
        while b"\n" not in self.waiting:
            self.waiting += self._more(time.monotonic() + PATIENCE)
            if len(self.waiting) > LINE_BYTES and b"\n" not in self.waiting[:LINE_BYTES]:
                raise self._gone()
        line, _, self.waiting = self.waiting.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise MatrixError(f"{self.name}: {one_line(found['error'])}")
        return found

    def _bytes(self, count: int) -> bytes:
        parts, held, end = [self.waiting], len(self.waiting), time.monotonic() + PATIENCE
        self.waiting = b""
        while held < count:
            parts.append(self._more(end))
            held += len(parts[-1])
        return b"".join(parts)

    def _more(self, end: float) -> bytes:
        """Return what the process has written, by the time `end` of `time.monotonic`."""
        ready, _, _ = select.select([self.pipe], [], [], max(end - time.monotonic(), 0))
        if not ready:
            raise MatrixError(f"{self.name}: not read within {PATIENCE:.0f} s; copy the file to a quicker disk")
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
        return MatrixError(f"{self.name}: HDF5 cannot read it ({reason}); get the file again")


class _H5Stream:
    """A dataset in an HDF5 file, read in order."""

    def __init__(self, reader: _Reader, name: str, length: int, stored: np.dtype[Any], kinds: str) -> None:
        self.reader, self.name, self.stored, self.at = reader, name, stored, 0
        self.shape: tuple[int, ...] = (length,)
        self.dtype = check_numbers(stored, reader.name, name, kinds)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole dataset."""
        return self.shape[0] * self.stored.itemsize

    def read(self, count: int) -> ValueArray:
        """Return the next `count` elements."""
        if count == 0:
            return np.empty(0, self.dtype)
        raw = self.reader.ask(self.name, self.at, self.at + count)
        if len(raw) != count * self.stored.itemsize:
            raise MatrixError(f"{self.reader.name}: array '{self.name}' is truncated; get the file again")
        self.at += count
        return np.frombuffer(raw, self.stored).astype(self.dtype, copy=False)
