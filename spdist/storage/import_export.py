"""Import matrices from files of other programs and export them, streaming in bounded memory.

`formats.registry` is the table of the formats that are imported; Matrix Market, ``scipy.sparse.save_npz``, lists of
edges and binsparse (a Zarr group as GraphBLAS' specification 0.1 lays it out) are written.

A file that is not stored by rows goes through `spdist.storage.external_sort`. Memory is bounded by 512 MiB, including
the interpreter and its libraries, or by twenty times the longest row (for CSC, column) if that is more; a MATLAB file
before 7.3 is read whole. While entries are sorted, the disk holds 12 to 32 bytes an entry in addition to the matrix.
"""

from __future__ import annotations

import bz2
import gzip
import io
import logging
import lzma
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, Unpack, cast

import numpy as np

from spdist.errors import InputError, one_line
from spdist.foundation.other_objects import refuse_other_objects
from spdist.foundation.standard_output import STANDARD_OUTPUT, standard_output
from spdist.foundation.units import counted
from spdist.matrices.checks import is_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, index_dtype
from spdist.storage import groups
from spdist.storage.atomic_replace import Progress, ignore_progress, staged_file, staged_matrix
from spdist.storage.block_layout import BlockSize, as_numbers, natural_size, store_blocks
from spdist.storage.chunked_array import CHUNK_LENGTH, new_array
from spdist.storage.external_sort import BUCKET_BYTES, Entries, canonical
from spdist.storage.foreign import versions
from spdist.storage.formats import matrix_market
from spdist.storage.formats.edges.edge_list import EDGE, EdgeText
from spdist.storage.formats.edges.edge_output import write_edges
from spdist.storage.formats.opening import STANDARD_INPUT, check_file, opened_source
from spdist.storage.formats.reading import Reading, ReadKeywords, ReadOptions
from spdist.storage.formats.registry import Format, ending_of, format_of
from spdist.storage.formats.source import Import, Source
from spdist.storage.formats.text import packing_of
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.names.names import AxisNames, names_in
from spdist.storage.writer import ChunkBuffer
from spdist.stores.registry import normalise

logger = logging.getLogger("spdist")

ENTRIES = 1 << 20
"""Entries of a stored matrix written at a time."""

EDGE_MEMORY = 3 * EDGE.itemsize // len(b"a b\n")
"""Bytes of memory for each byte of a list of edges, while its edges are collected."""


# -- import ------------------------------------------------------------------------------------------------------------


def import_matrix(
    source: str | Path,
    target: str | Path,
    *,
    overwrite: bool = False,
    steal: bool = False,
    block_size: BlockSize | Literal["auto"] | None = None,
    labels: str | Path | None = None,
    format: str | None = None,
    progress: Progress | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    **read: Unpack[ReadKeywords],
) -> StoredMatrix:
    """Convert a file to a matrix in Zarr, in bounded memory.

    Rows are sorted and duplicates summed in file order. Zeros that a sparse file stores are kept; zeros of a dense file
    (``array`` in Matrix Market) and of DIA are dropped. Matrix Market's integers become int64, reals float64, patterns
    ones of float64; other formats keep their dtype.

    Parameters
    ----------
    source : str or Path
        A path or fsspec URL, whose ending says its format; ``FILE::PATH`` names a matrix inside a file that may hold
        several, as in ``cells.h5ad::layers/counts``; a group or an array of Zarr that another program wrote is taken
        too. ``"-"`` is standard input, with `format`.
    target : str or Path
        A path or fsspec URL; gets the matrix when all is written.
    overwrite, steal : bool
        Replace the matrix at `target`; take over from a run on another host that had no heartbeat for a minute.
    block_size : (int, int) or "auto", optional
        Store dense blocks with these numbers of rows and columns; "auto" takes the size of fewest bytes, up to
        16 x 16. During the import the matrix is on disk twice.
    labels : str or Path, optional
        As `names`, and write the names to this file too, one a line.
    format : str, optional
        Ending of the format of `source`, whatever its name: "mtx", "abc", ...
    progress : callable, optional
        Called as ``progress(done, total)``; reading the file and sorting its entries each count for one half.
    bucket_bytes : int
        Bytes of entries sorted at a time.
    **read
        How to read the file; each format takes some.

        names : bool
            Whether vertices of a list of edges have names. They are numbered in the order in which they come, and
            their names are stored as names of rows and columns. Without, vertices are numbers from 0 on.
        duplicates : {"sum", "max", "min", "first"}
            How to combine several edges from one vertex to another; other formats sum duplicates.
        header : bool
            Whether the first line of a list of edges names the columns; by default if it has the known words
            (source, target, from, to, weight, ...).
        columns : sequence of int or str
            Columns of source, target and perhaps weight: numbers from 1, or names in the header.
        separator : {"tab", "comma", "semicolon", "space"}
            What separates the fields of a line; by default what ending and lines say.
        quotes : bool
            Whether fields may be quoted; by default they may, except in .abc.
        allow_nan : bool
            Whether weights may be NaN.
        orient : {"cells-by-genes", "genes-by-cells"}
            Rows and columns of a matrix of single cells; by default cells by genes, as in AnnData.
        dense : bool
            Read a dense array, and keep its nonzeros.

    Returns
    -------
    StoredMatrix
        ``facts["provenance"]["read"]`` of it says in one line what was read; the same line is logged.

    Raises
    ------
    InputError
        If `target` exists, `source` has none of these formats, an option means nothing for it, or blocks do not divide
        it or take more bytes than single entries.
    MatrixError
        If `source` is damaged, or its format is not what its name says; names the line of a text file.

    Examples
    --------
    >>> import_matrix("poisson.mtx.gz", "poisson.zarr")  # doctest: +SKIP
    """
    given, inner = parted(_checked(source))
    path = given if given == STANDARD_INPUT else normalise(given)
    kind = format_of(path, str(source), format)
    options = ReadOptions(**cast(Any, read | ({} if labels is None else {"names": True})))
    kind.check(options, str(source))
    if kind.holds is None:
        check_file(path)
    facts: dict[str, Any] = {"provenance": {"command": "import", "source": str(source)}}
    staged = staged_matrix(target, overwrite=overwrite, steal=steal)
    lists = nullcontext() if labels is None else staged_file(labels, overwrite=overwrite, steal=steal)
    with lists as listed, staged as stage, _opened(path, kind, stage.scratch) as file:
        opened = Source.measured(file, _shown(path), inner, ending_of(path, format))
        first = stage if block_size is None else replace(stage, url=str(stage.scratch / "numbers.zarr"))
        reading, report = Reading(opened.path, kind.name), progress or ignore_progress
        kind.read(Import(opened, first, facts, report, bucket_bytes, options, reading, listed))
        if block_size is not None:
            numbers = open_matrix(first.url)
            wanted = natural_size(numbers, str(source)) if block_size == "auto" else block_size
            store_blocks(numbers, stage.url, wanted, facts, str(source))
    matrix = open_matrix(target)
    _say_what_was_read(opened.path, facts["provenance"]["read"], matrix.shape, matrix.nnz)
    return matrix


def _opened(path: str, kind: Format, scratch: Path) -> AbstractContextManager[BinaryIO]:
    """Return the open file; an empty one for a format that is a folder."""
    return nullcontext(cast(BinaryIO, io.BytesIO())) if kind.holds is not None else opened_source(path, scratch)


def _shown(path: str) -> str:
    return "standard input" if path == STANDARD_INPUT else path


def _checked(source: Any) -> str:
    """Return a path or URL as text; refuse a matrix in memory."""
    refuse_other_objects(source)
    if not isinstance(source, str | os.PathLike):
        raise InputError(
            f"a matrix is imported from a path or URL, not from {type(source).__name__}: spdist.save('A.zarr', m) "
            f"stores one that is in memory"
        )
    return str(source)


def parted(source: str) -> tuple[str, str]:
    """Return a path, and what follows ``::`` in it: the path of a matrix inside the file."""
    path, mark, inner = source.rpartition("::")
    return (path, inner) if mark and not Path(source).exists() else (source, "")


def _say_what_was_read(path: str, line: str, shape: tuple[int, int], nnz: int) -> None:
    """Log in one line what was read."""
    size = f"{shape[0]:,} x {shape[1]:,} with {counted(nnz, 'entry')}"
    logger.warning("%s: %s, %s", one_line(path), size, line, extra={"notice": True})


def read_edges(
    source: str | Path, *, most_bytes: int, format: str | None = None, **read: Unpack[ReadKeywords]
) -> tuple[Entries, list[str]] | None:
    """Read a list of edges whose vertices have names into memory.

    Returns `edges`: in the order of the file: numbers of vertices, as int64, and weights.
    Returns `names`: of the vertices, in order of appearance.
    """
    given = str(source)
    path = given if given == STANDARD_INPUT else normalise(given)
    options = ReadOptions(**cast(Any, {"names": True} | read))
    kind = format_of(path, given, format)
    kind.check(options, given)
    check_file(path)
    with opened_source(path) as file:
        opened = Source.measured(file, _shown(path), "", ending_of(path, format))
        if packing_of(path) or EDGE_MEMORY * opened.size > most_bytes:
            return None
        shown, reading = opened.path, Reading(opened.path, kind.name)
        text = EdgeText(opened, options, reading)
        edges = np.concatenate([np.empty(0, EDGE), *text.edges()])
    names = text.listed.decode("utf-8", "surrogateescape").split("\n")[:-1]
    axis = names_in(text.listed, shown, len(names))
    _say_what_was_read(shown, f"{reading.line(AxisNames(axis, axis))}", (len(names), len(names)), len(edges))
    return Entries(*(np.ascontiguousarray(edges[field]) for field in ("row", "column", "weight"))), names


# -- export ------------------------------------------------------------------------------------------------------------


@versions.watched()
def export_matrix(
    source: str | Path,
    target: str | Path,
    *,
    format: str | None = None,
    overwrite: bool = False,
    steal: bool = False,
    progress: Progress | None = None,
) -> None:
    """Convert a matrix in Zarr to a file of another program, in bounded memory.

    Parameters
    ----------
    source : str or Path
        Path or fsspec URL of a matrix. Blocks are written entry by entry.
    target : str or Path
        A local path; for binsparse a path or URL. Gets the file when all is written. ``"-"`` is standard output, with
        `format`; text goes there as it is made.
    format : {"mtx", "abc", "tsv", "npz", "binsparse"}, optional
        By default the format that `target` ends in. Text, which .gz, .bz2 or .xz may follow, keeps numbers exactly;
        bool is written as integers 0 and 1. An .npz is not compressed; ``scipy.sparse.load_npz`` reads it. A list of
        edges (abc, tsv) has lines of row, column and value with tabs between: names of the rows if there are any, else
        numbers from 0 on. It is of a square matrix whose columns have the same names.
    overwrite, steal : bool
        As for `import_matrix`.
    progress : callable, optional
        Called as ``progress(done, total)``, in entries.

    Raises
    ------
    InputError
        If `target` exists, or the format is not known or cannot hold the matrix.
    CorruptError
        If a Zarr chunk of `source` is missing or altered.

    Examples
    --------
    >>> export_matrix("C.zarr", "C.mtx.gz")  # doctest: +SKIP
    """
    stored = open_matrix(source)
    versions.note(stored)
    matrix = as_numbers(stored)
    report, name = progress or ignore_progress, str(target)
    kind, packing = _written_as(name, format)
    if kind == "binsparse":
        if name == STANDARD_OUTPUT:
            raise InputError("binsparse is a folder, which standard output cannot be; name a place for it")
        with staged_matrix(target, overwrite=overwrite, steal=steal) as stage:
            _write_binsparse(matrix, stage.url, report)
            versions.check()
    elif name == STANDARD_OUTPUT:
        with standard_output() as file, _PACKERS[packing](file) as out:
            _WRITERS[kind](matrix, out, report)
    else:
        staged = staged_file(target, overwrite=overwrite, steal=steal)
        with staged as path, path.open("wb") as file, _PACKERS[packing](file) as out:
            _WRITERS[kind](matrix, out, report)
            versions.check()


def _written_as(target: str, format: str | None) -> tuple[str, str]:
    """Return the format to write, and the ending of its compression, empty for none."""
    name = target if format is None else f".{format.removeprefix('.')}"
    packing = packing_of(name) or packing_of(target)
    bare = name.removesuffix(packing)
    if bare == ".binsparse" and format is not None:
        return "binsparse", ""
    kind = next((each for each in _WRITERS if bare.endswith(f".{each}")), None)
    known = ", ".join((*_WRITERS, "binsparse"))
    if kind is None and format is not None:
        raise InputError(f"format '{format}' is not written; known are {known}")
    if kind is None and target == STANDARD_OUTPUT:
        raise InputError(f"standard output has no name that says what to write: pass --format; known are {known}")
    if kind is None:
        raise InputError(
            f"{target}: cannot tell the format from the name; end it in .mtx, .abc, .tsv or .npz, or pass --format"
        )
    if packing and (kind == "npz" or packing not in _PACKERS):
        raise InputError(f"{target}: {kind} is not written compressed as {packing}; leave {packing} out, and pack it")
    return kind, packing


def _row_blocks(matrix: StoredMatrix, progress: Progress) -> Iterator[tuple[int, CSR]]:
    done = 0
    for start, stop, _ in matrix.row_blocks(ENTRIES):
        block = matrix.rows(start, stop)
        yield start, block
        done += block.nnz
        progress(done, matrix.nnz)


def _write_mtx(matrix: StoredMatrix, file: BinaryIO, progress: Progress) -> None:
    matrix_market.write_header(file, matrix.shape, matrix.nnz, matrix.dtype)
    for start, block in _row_blocks(matrix, progress):
        matrix_market.write_rows(file, block, start, matrix.nrows)


def _write_npz(matrix: StoredMatrix, out: BinaryIO, progress: Progress) -> None:
    """Write an archive; to standard output by way of a file, because its parts are written out of order."""
    if out.seekable():
        _write_archive(matrix, out, progress)
        return
    with tempfile.TemporaryFile() as file:
        _write_archive(matrix, cast(BinaryIO, file), progress)
        file.seek(0)
        shutil.copyfileobj(file, out)


def _write_archive(matrix: StoredMatrix, out: BinaryIO, progress: Progress) -> None:
    offsets = np.dtype(np.int32 if max(matrix.nnz, matrix.ncols) <= INT32_MAX else np.int64)  # SciPy wants one dtype
    small = {"format": np.array(b"csr"), "shape": np.array(matrix.shape, np.int64)}
    arrays = ((matrix.indptr, offsets), (matrix.indices, offsets), (matrix.data, matrix.dtype))
    done, total = 0, sum(array.length for array, _ in arrays)
    with zipfile.ZipFile(out, "w") as archive:
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


_PACKERS: dict[str, Callable[[BinaryIO], AbstractContextManager[Any]]] = {
    "": nullcontext,
    ".gz": lambda file: gzip.GzipFile("", "wb", fileobj=file),
    ".bz2": lambda file: bz2.BZ2File(file, "wb"),
    ".xz": lambda file: lzma.LZMAFile(file, "wb"),  # noqa: SIM115 (its user closes it)
}
"""What compresses a file, by the ending of its name."""

_WRITERS: dict[str, Callable[[StoredMatrix, BinaryIO, Progress], None]] = {
    "mtx": _write_mtx,
    "abc": lambda matrix, file, progress: write_edges(file, matrix, _row_blocks(matrix, progress), quotes=False),
    "tsv": lambda matrix, file, progress: write_edges(file, matrix, _row_blocks(matrix, progress), quotes=True),
    "npz": _write_npz,
}
"""What writes a file, by the ending of its name."""


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
