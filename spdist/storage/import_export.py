"""Import matrices from files of other programs and export them, streaming in bounded memory.

===========  ======  ======  =======================================================================
Format       import  export  What it is
===========  ======  ======  =======================================================================
.mtx         yes     yes     Matrix Market text, also .mtx.gz and .mtx.bz2
.npz         yes     yes     ``scipy.sparse.save_npz``: CSR, CSC, COO, BSR, DIA
.h5ad        yes             AnnData on HDF5, ``X`` or the path after ``::``, as in ``cells.h5ad::layers/counts``
binsparse            yes     a Zarr group as GraphBLAS' Binsparse specification 0.1 lays it out
===========  ======  ======  =======================================================================

A file that is not stored by rows goes through `spdist.storage.external_sort`. Memory is bounded by 512 MiB, including
the interpreter and its libraries, or by twenty times the longest row (for CSC, column) if that is more. While entries
are sorted, the disk holds 12 to 32 bytes an entry in addition to the matrix.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Literal, Protocol, cast

import numpy as np

from spdist.errors import InputError, MatrixError
from spdist.matrices.checks import check_structure, is_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, IndexArray, ValueArray, check_dtype, index_dtype
from spdist.storage import groups, locations, matrix_market
from spdist.storage.atomic_replace import Progress, Stage, ignore_progress, staged_file, staged_matrix
from spdist.storage.block_layout import BlockSize, as_numbers, natural_size, store_blocks
from spdist.storage.chunked_array import CHUNK_LENGTH, new_array
from spdist.storage.external_sort import BUCKET_BYTES, Entries, RowSorter, canonical
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.writer import ChunkBuffer, MatrixWriter

ENTRIES = 1 << 20
"""Entries of a binary file read at a time."""


# -- import ------------------------------------------------------------------------------------------------------------


def import_matrix(
    source: str | Path,
    target: str | Path,
    *,
    overwrite: bool = False,
    block_size: BlockSize | Literal["auto"] | None = None,
    progress: Progress | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> StoredMatrix:
    """Convert a file to a matrix in Zarr, in bounded memory.

    Rows are sorted and duplicates summed in file order. Zeros that a sparse file stores are kept; zeros of a dense file
    (``array`` in Matrix Market) and of DIA are dropped. Matrix Market's integers become int64, reals float64, patterns
    ones of float64; other formats keep their dtype.

    Parameters
    ----------
    source : str or Path
        A path or fsspec URL that ends in .mtx, .mtx.gz, .mtx.bz2, .npz or .h5ad; an .h5ad may be followed by ``::``
        and the path of a sparse matrix inside it; by default ``X``.
    target : str or Path
        A path or fsspec URL; gets the matrix when all is written.
    overwrite : bool
        Replace the matrix at `target`.
    block_size : (int, int) or "auto", optional
        Store dense blocks of so many rows and columns; "auto" takes the size of fewest bytes, up to 16 x 16. During the
        import the matrix is on disk twice.
    progress : callable, optional
        Called as ``progress(done, total)``; reading the file and sorting its entries each count for one half.
    bucket_bytes : int
        Bytes of entries sorted at a time.

    Returns
    -------
    StoredMatrix

    Raises
    ------
    InputError
        If `target` exists, `source` is none of these files, or blocks do not divide it or take more bytes than none.
    MatrixError
        If `source` is damaged, or its format is not what its name says; names the line of a text file.

    Examples
    --------
    >>> import_matrix("poisson.mtx.gz", "poisson.zarr")  # doctest: +SKIP
    """
    path, _, inner = str(source).partition(".h5ad::")
    path = locations.normalise(path + (".h5ad" if inner else ""))
    reader = _reader_of(path, str(source))
    if locations.is_local(path) and not locations.local_path(path).is_file():
        raise InputError(f"{path}: there is no such file")
    facts = {"provenance": {"command": "import", "source": str(source)}}
    with staged_matrix(target, overwrite=overwrite) as stage, _clear_source_errors(path), _open(path) as file:
        size = max(file.seek(0, 2), 1)
        file.seek(0)
        first = stage if block_size is None else replace(stage, url=str(stage.scratch / "numbers.zarr"))
        source_file = _Source(path, file, size, inner or "X")
        reader(_Import(source_file, first, facts, progress or ignore_progress, bucket_bytes))
        if block_size is not None:
            numbers = open_matrix(first.url)
            wanted = natural_size(numbers, str(source)) if block_size == "auto" else block_size
            store_blocks(numbers, stage.url, wanted, facts, str(source))
    return open_matrix(target)


def _reader_of(path: str, source: str) -> Callable[[_Import], None]:
    for suffix, reader in _READERS.items():
        if path.endswith(suffix):
            return reader
    raise InputError(f"{source}: cannot tell the format from the name; known are {', '.join(_READERS)}")


@dataclass(frozen=True)
class _Source:
    """The file that is imported: its path, its bytes, their number, and the path of the matrix inside an .h5ad."""

    path: str
    file: BinaryIO
    size: int
    inner: str


@dataclass(frozen=True)
class _Import:
    """One import: its source, where it writes, and how it reports."""

    source: _Source
    stage: Stage
    facts: dict[str, Any]
    progress: Progress
    bucket_bytes: int

    @property
    def path(self) -> str:
        """The source, for messages."""
        return self.source.path

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
        writer = MatrixWriter(self.stage.url, ncols, dtype, self.facts)
        for block in blocks:
            writer.append(block)
            self.report_written(writer.nnz, nnz)
        writer.close()
        self.report_written(1, 1)

    def sort(self, batches: Iterable[Entries], shape: tuple[int, int], dtype: np.dtype[Any], expected: int) -> None:
        """Sort entries into rows and write them."""
        sorter = RowSorter(self.stage.scratch, shape, dtype, expected=expected, bucket_bytes=self.bucket_bytes)
        done = 0
        for entries in batches:
            sorter.add(entries)
            done += len(entries.rows)
            self.report_read(done, expected)
        self.write(sorter.blocks(), shape[1], dtype, expected)


@contextmanager
def _clear_source_errors(path: str) -> Iterator[None]:
    """Name the damaged file in errors of the libraries that unpack it, which do not."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise MatrixError(f"{path}: damaged or truncated ({error}); get the file again") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise MatrixError(f"{path}: cannot be read ({error}); is it what its name says?") from error


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    """Open a local path or an fsspec URL for reading."""
    if locations.is_local(path):
        with locations.local_path(path).open("rb") as file:
            yield file
    else:
        fsspec: Any = importlib.import_module("fsspec")
        with fsspec.open(path, "rb") as file:
            yield file


def _check_shape(shape: tuple[Any, ...], path: str) -> tuple[int, int]:
    if len(shape) != 2 or min(shape) < 0:
        raise MatrixError(f"{path}: a matrix has two dimensions, this has shape {tuple(shape)}")
    return int(shape[0]), int(shape[1])


# -- Matrix Market -----------------------------------------------------------------------------------------------------


def _import_text(job: _Import) -> None:
    if job.path.endswith(".gz"):
        text = cast(BinaryIO, gzip.GzipFile(fileobj=job.source.file))
    else:
        text = cast(BinaryIO, bz2.BZ2File(job.source.file)) if job.path.endswith(".bz2") else job.source.file
    header = matrix_market.read_header(text, job.path)
    expected = header.count if header.symmetry == "general" else 2 * header.count
    job.sort(matrix_market.read_entries(text, header), header.shape, header.dtype, expected)


# -- binary files ------------------------------------------------------------------------------------------------------


class _Stream(Protocol):
    """An array that is read sequentially."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def read(self, count: int) -> ValueArray:
        """Return the next `count` elements, in the order in which they are stored."""
        ...


def _compressed_rows(
    indptr: _Stream, indices: _Stream, data: _Stream, shape: tuple[int, int], path: str
) -> Iterator[tuple[int, CSR]]:
    """Yield the first row and the entries of each row block; `data` may hold several values an entry (BSR)."""
    nnz = indices.shape[0]
    if indptr.shape != (shape[0] + 1,) or data.shape[:1] != (nnz,):
        raise MatrixError(
            f"{path}: shape {shape} does not fit arrays of {indptr.shape[0]:,} offsets, {nnz:,} indices and "
            f"{data.shape[0]:,} values"
        )
    width = int(np.prod(data.shape[1:]))
    last = indptr.read(1).astype(np.int64)
    if last[0] != 0:
        raise MatrixError(f"{path}: indptr starts at {last[0]:,}, not at 0")
    for start in range(0, shape[0], ENTRIES):
        offsets = np.concatenate([last, indptr.read(min(ENTRIES, shape[0] - start)).astype(np.int64)])
        last = offsets[-1:]
        if np.any(np.diff(offsets) < 0) or last[0] > nnz:
            raise MatrixError(f"{path}: indptr does not rise from 0 to {nnz:,} after row {start:,}")
        for at, stop in _cut(offsets, max(ENTRIES // width, 1)):
            local = offsets[at : stop + 1] - offsets[at]
            columns, values = indices.read(int(local[-1])), data.read(int(local[-1]) * width)
            check_structure(CSR(local, columns, columns, (stop - at, shape[1])), f"{path}, rows from {start + at:,}")
            columns = columns.astype(index_dtype(shape[1]), copy=False)
            yield start + at, CSR(local, columns, values, (stop - at, shape[1]))
    if last[0] != nnz:
        raise MatrixError(f"{path}: indptr ends at {last[0]:,}, but there are {nnz:,} entries")


def _cut(offsets: IndexArray, entries: int) -> Iterator[tuple[int, int]]:
    """Cut rows into blocks of at most `entries` entries, or of one row."""
    start, end = 0, len(offsets) - 1
    while start < end:
        stop = int(np.searchsorted(offsets, offsets[start] + entries, side="right")) - 1
        stop = min(max(stop, start + 1), end)
        yield start, stop
        start = stop


def _import_csr(job: _Import, shape: tuple[int, int], indptr: _Stream, indices: _Stream, data: _Stream) -> None:
    blocks = (block for _, block in _compressed_rows(indptr, indices, data, shape, job.path))
    whole = (block if is_canonical(block) else canonical(block) for block in blocks)
    job.write(whole, shape[1], data.dtype, indices.shape[0])


def _import_csc(job: _Import, shape: tuple[int, int], indptr: _Stream, indices: _Stream, data: _Stream) -> None:
    def batches() -> Iterator[Entries]:
        for first, block in _compressed_rows(indptr, indices, data, (shape[1], shape[0]), job.path):
            columns = np.repeat(np.arange(first, first + block.nrows), np.diff(block.indptr))
            yield Entries(block.indices, columns, block.data)

    job.sort(batches(), shape, data.dtype, indices.shape[0])


# -- npz ---------------------------------------------------------------------------------------------------------------


class _NpyStream:
    """An array in a .npz file."""

    def __init__(self, archive: zipfile.ZipFile, name: str, path: str) -> None:
        if f"{name}.npy" not in archive.namelist():
            raise MatrixError(f"{path}: no array '{name}'; expected a file of scipy.sparse.save_npz")
        self.file, self.name, self.path = archive.open(f"{name}.npy"), name, path
        try:
            version = np.lib.format.read_magic(self.file)
            parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            self.shape, self.fortran, self.stored = parse(self.file)
        except ValueError as error:
            raise MatrixError(f"{path}: array '{name}' is damaged: {error}") from error
        if self.stored.hasobject:
            raise MatrixError(f"{path}: array '{name}' holds Python objects, which are not read")
        self.dtype = self.stored.newbyteorder("=")

    def read(self, count: int) -> ValueArray:
        """Return the next `count` elements."""
        raw = self.file.read(count * self.stored.itemsize)
        if len(raw) != count * self.stored.itemsize:
            raise MatrixError(f"{self.path}: array '{self.name}' is truncated; get the file again")
        return np.frombuffer(raw, self.stored).astype(self.dtype, copy=False)

    def all(self) -> ValueArray:
        """Return all elements of a small array."""
        return self.read(int(np.prod(self.shape, dtype=np.int64)))


def _import_npz(job: _Import) -> None:
    with zipfile.ZipFile(job.source.file) as archive:

        def stream(name: str) -> _NpyStream:
            return _NpyStream(archive, name, job.path)

        kind = _text(stream("format").all())
        shape = _check_shape(tuple(stream("shape").all().tolist()), job.path)
        data = stream("data")
        check_dtype(data.dtype)
        if kind in ("csr", "csc"):
            importer = _import_csr if kind == "csr" else _import_csc
            importer(job, shape, stream("indptr"), stream("indices"), data)
        elif kind == "bsr":
            _import_bsr(job, shape, stream("indptr"), stream("indices"), data)
        elif kind == "dia":
            _import_dia(job, shape, stream("offsets").all(), data)
        elif kind == "coo":
            rows, columns = stream("row"), stream("col")
            job.sort(_coo_batches(rows, columns, data, shape, job.path), shape, data.dtype, data.shape[0])
        else:
            raise MatrixError(f"{job.path}: sparse format '{kind}' is not read; convert it with .tocsr()")


def _text(value: ValueArray) -> str:
    word = value.reshape(-1)[0]
    return word.decode("ascii", "replace") if isinstance(word, bytes) else str(word)


def _import_bsr(job: _Import, shape: tuple[int, int], indptr: _Stream, indices: _Stream, data: _NpyStream) -> None:
    if len(data.shape) != 3 or (data.fortran and data.shape[0] > 1) or 0 in data.shape[1:]:
        raise MatrixError(f"{job.path}: blocks of shape {data.shape} in this order are not read; save .tocsr()")
    height, width = data.shape[1:]
    if shape[0] % height or shape[1] % width:
        raise MatrixError(f"{job.path}: blocks of {height} x {width} do not tile shape {shape}")

    def batches() -> Iterator[Entries]:
        grid = shape[0] // height, shape[1] // width
        for first, block in _compressed_rows(indptr, indices, data, grid, job.path):
            block_rows = np.repeat(np.arange(first, first + block.nrows), np.diff(block.indptr))
            rows = block_rows[:, None, None] * height + np.arange(height)[:, None]
            columns = block.indices.astype(np.int64)[:, None, None] * width + np.arange(width)
            rows, columns = np.broadcast_arrays(rows, columns)
            yield Entries(rows.ravel(), columns.ravel(), block.data)

    job.sort(batches(), shape, data.dtype, int(np.prod(data.shape, dtype=np.int64)))


def _import_dia(job: _Import, shape: tuple[int, int], offsets: IndexArray, data: _NpyStream) -> None:
    if data.shape[:1] != offsets.shape or len(data.shape) != 2:
        raise MatrixError(f"{job.path}: {len(offsets):,} diagonals do not fit data of shape {data.shape}")
    ndiagonals, length = data.shape

    def batches() -> Iterator[Entries]:
        for start in range(0, ndiagonals * length, ENTRIES):
            values = data.read(min(ENTRIES, ndiagonals * length - start))
            at = np.arange(start, start + len(values), dtype=np.int64)
            diagonal, column = (at % ndiagonals, at // ndiagonals) if data.fortran else (at // length, at % length)
            row = column - offsets[diagonal]
            inside = (row >= 0) & (row < shape[0]) & (column < shape[1]) & (values != 0)
            yield Entries(row[inside], column[inside], values[inside])

    job.sort(batches(), shape, data.dtype, ndiagonals * length)


def _coo_batches(
    rows: _Stream, columns: _Stream, data: _Stream, shape: tuple[int, int], path: str
) -> Iterator[Entries]:
    nnz = data.shape[0]
    if rows.shape != (nnz,) or columns.shape != (nnz,):
        raise MatrixError(f"{path}: {rows.shape} rows, {columns.shape} columns and {nnz:,} values do not fit together")
    for start in range(0, nnz, ENTRIES):
        count = min(ENTRIES, nnz - start)
        batch = Entries(rows.read(count), columns.read(count), data.read(count))
        for places, limit, what in ((batch.rows, shape[0], "row"), (batch.columns, shape[1], "column")):
            if int(places.min()) < 0 or int(places.max()) >= limit:
                at = int(np.argmax((places < 0) | (places >= limit)))
                raise MatrixError(
                    f"{path}: {what} {int(places[at]):,} of entry {start + at:,} is outside [0, {limit:,})"
                )
        yield batch


# -- h5ad --------------------------------------------------------------------------------------------------------------


class _H5Stream:
    """A dataset in an HDF5 file."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.at = dataset, 0
        self.shape = tuple(dataset.shape)
        self.dtype = dataset.dtype.newbyteorder("=")

    def read(self, count: int) -> ValueArray:
        """Return the next `count` elements."""
        self.at += count
        return cast(ValueArray, self.dataset[self.at - count : self.at]).astype(self.dtype, copy=False)


def _import_h5ad(job: _Import) -> None:
    try:
        h5py = importlib.import_module("h5py")
    except ImportError as error:
        raise InputError(f"{job.path}: reading .h5ad needs AnnData: pip install 'spdist[h5ad]'") from error
    with h5py.File(job.source.file, "r") as file:
        group = file.get(job.source.inner)
        attributes: dict[str, Any] = dict(group.attrs) if group is not None else {}
        kind = attributes.get("encoding-type", attributes.get("h5sparse_format"))
        if kind not in ("csr_matrix", "csc_matrix", "csr", "csc"):
            what = (
                "there is no such matrix" if group is None else f"it is stored as {kind or 'a dense array'}, not sparse"
            )
            raise MatrixError(
                f"{job.path}::{job.source.inner}: {what}; sparse in this file: {_sparse_names(h5py, file)}"
            )
        shape = _check_shape(tuple(attributes.get("shape", attributes.get("h5sparse_shape", ()))), job.path)
        streams = [_H5Stream(group[name]) for name in ("indptr", "indices", "data")]
        check_dtype(streams[2].dtype)
        (_import_csr if kind.startswith("csr") else _import_csc)(job, shape, *streams)


def _sparse_names(h5py: ModuleType, file: Any) -> str:
    names: list[str] = []

    def note(name: str, item: object) -> None:
        if isinstance(item, h5py.Group) and str(item.attrs.get("encoding-type", "")) in ("csr_matrix", "csc_matrix"):
            names.append(name)

    file.visititems(note)
    return ", ".join(names) or "none"


_READERS: dict[str, Callable[[_Import], None]] = {
    ".mtx": _import_text,
    ".mtx.gz": _import_text,
    ".mtx.bz2": _import_text,
    ".npz": _import_npz,
    ".h5ad": _import_h5ad,
}


# -- export ------------------------------------------------------------------------------------------------------------


def export_matrix(
    source: str | Path,
    target: str | Path,
    *,
    format: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Convert a matrix in Zarr to a file of another program, in bounded memory.

    Parameters
    ----------
    source : str or Path
        Path or fsspec URL of a matrix. Blocks are written entry by entry.
    target : str or Path
        A local path; for binsparse a path or URL. Gets the file when all is written.
    format : {"mtx", "npz", "binsparse"}, optional
        By default the format that `target` ends in: .mtx, .mtx.gz, .mtx.bz2 or .npz. Text keeps numbers exactly; bool
        is written as integers 0 and 1. An .npz is not compressed; ``scipy.sparse.load_npz`` reads it.
    overwrite : bool
        Replace the file or matrix at `target`.
    progress : callable, optional
        Called as ``progress(done, total)``, in entries.

    Raises
    ------
    InputError
        If `target` exists, or the format is not known.
    CorruptError
        If a Zarr chunk of `source` is missing or altered.

    Examples
    --------
    >>> export_matrix("C.zarr", "C.mtx.gz")  # doctest: +SKIP
    """
    matrix = as_numbers(open_matrix(source))
    report = progress or ignore_progress
    kind = format or _format_of(str(target))
    if kind == "binsparse":
        with staged_matrix(target, overwrite=overwrite) as stage:
            _write_binsparse(matrix, stage.url, report)
    elif kind in ("mtx", "npz"):
        with staged_file(target, overwrite=overwrite) as path:
            (_write_text if kind == "mtx" else _write_npz)(matrix, path, report)
    else:
        raise InputError(f"format '{kind}' is not written; known are mtx, npz and binsparse")


def _format_of(target: str) -> str:
    for suffix, kind in ((".mtx", "mtx"), (".mtx.gz", "mtx"), (".mtx.bz2", "mtx"), (".npz", "npz")):
        if target.endswith(suffix):
            return kind
    raise InputError(f"{target}: cannot tell the format from the name; end it in .mtx or .npz, or pass --format")


def _row_blocks(matrix: StoredMatrix, progress: Progress) -> Iterator[tuple[int, CSR]]:
    done = 0
    for start, stop, _ in matrix.row_blocks(ENTRIES):
        block = matrix.rows(start, stop)
        yield start, block
        done += block.nnz
        progress(done, matrix.nnz)


def _write_text(matrix: StoredMatrix, path: Path, progress: Progress) -> None:
    opener = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
    with cast(BinaryIO, cast(Any, opener)(path, "wb")) as file:
        matrix_market.write_header(file, matrix.shape, matrix.nnz, matrix.dtype)
        for start, block in _row_blocks(matrix, progress):
            matrix_market.write_rows(file, block, start, matrix.nrows)


def _write_npz(matrix: StoredMatrix, path: Path, progress: Progress) -> None:
    offsets = np.dtype(np.int32 if max(matrix.nnz, matrix.ncols) <= INT32_MAX else np.int64)  # SciPy wants one dtype
    small = {"format": np.array(b"csr"), "shape": np.array(matrix.shape, np.int64)}
    arrays = ((matrix.indptr, offsets), (matrix.indices, offsets), (matrix.data, matrix.dtype))
    done, total = 0, sum(array.length for array, _ in arrays)
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in small.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, value)
        for array, dtype in arrays:
            header = {"descr": dtype.str, "fortran_order": False, "shape": (array.length,)}
            with archive.open(f"{array.name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array_header_1_0(file, header)
                for first in range(0, array.length, ENTRIES):
                    values = array.read(first, min(first + ENTRIES, array.length))
                    file.write(np.ascontiguousarray(values, dtype).data)
                    progress((done := done + len(values)), total)


def _write_binsparse(matrix: StoredMatrix, url: str, progress: Progress) -> None:
    """Write the three arrays under Binsparse's names, sorted and without duplicates, as its specification demands."""
    stored, spelled = _binsparse_type(matrix.dtype)
    width = matrix.dtype.itemsize // stored.itemsize  # a complex number is two floats
    groups.begin(url, {})
    layout = {"pointers_to_1": np.dtype(np.int64), "indices_1": index_dtype(matrix.ncols), "values": stored}
    pointers, indices, values = (
        ChunkBuffer(new_array(url, name, dtype, CHUNK_LENGTH, compressed=name != "values"))
        for name, dtype in layout.items()
    )
    pointers.append(np.zeros(1, np.int64))
    nnz = 0
    for _, block in _row_blocks(matrix, progress):
        block = block if is_canonical(block) else canonical(block)
        pointers.append(nnz + block.indptr[1:])
        indices.append(block.indices)
        values.append(np.ascontiguousarray(block.data).view(stored))
        nnz += block.nnz
    lengths = (matrix.nrows + 1, nnz, nnz * width)
    for buffer in (pointers, indices, values):
        buffer.close()
    descriptor = {
        "version": "0.1.0",  # the specification says 0.1; the reference parser demands three numbers
        "format": "CSR",
        "shape": list(matrix.shape),
        "number_of_stored_values": nnz,
        "data_types": {name: dtype.name for name, dtype in layout.items()} | {"values": spelled},
    }
    arrays = [(buffer.array, length) for buffer, length in zip((pointers, indices, values), lengths, strict=True)]
    groups.finish_group(url, arrays, {"binsparse": {"binsparse": descriptor}, "spdist": {"state": "complete"}})


def _binsparse_type(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], str]:
    """Return the dtype that stores values of `dtype`, and Binsparse's name for `dtype`."""
    if dtype.kind == "b":
        return np.dtype(np.uint8), "bint8"
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return part, f"complex[{part.name}]"
    return dtype, dtype.name
