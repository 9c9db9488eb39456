"""Finished matrices in Zarr, read by rows.

A matrix is one Zarr v3 group in AnnData's ``csr_matrix`` encoding: one-dimensional arrays `indptr`, `indices`, `data`
and the attributes ``encoding-type``, ``encoding-version`` and ``shape``. The attribute ``spdist`` has everything that
spdist adds (state, provenance). A block matrix is a group of SciPy's BSR arrays in spdist's own encoding
``bsr_matrix``: `data` has three dimensions, ``block-size`` is an attribute, ``shape`` counts rows and columns. Its
values in memory are blocks (`dtypes.block_dtype`), and rows, columns and entries are block rows, block columns and
blocks. Four rules keep wrong bytes out of a product:

* Every Zarr chunk ends with a checksum by Zarr's crc32c codec, and is always read **whole**: a pipeline that decodes
  part of a Zarr chunk does not check it. `ChunkedArray` therefore rounds the length of an array up to whole ones.
* A missing Zarr chunk reads as zeros in Zarr, so `fingerprint` looks for every Zarr chunk before work starts, and
  `read` looks again.
* A Zarr chunk in the place of another has a sound checksum: the table of each array lists checksums by Zarr chunk, and
  the group's attributes hold digests of the tables and of all metadata (`groups.check_seal`).
* The arrays' metadata and the encoding attributes are written last: no reader accepts an unfinished matrix.

A matrix in parts is a group of such groups, each with some of the rows, in spdist's own encoding ``spdist_parts``.

Rows and columns may have names, in arrays of bytes beside the others or in an AnnData around the matrix (`names`).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from spdist.errors import CorruptError, InputError, MatrixError, one_line
from spdist.foundation.display import Displayed, Part, Table
from spdist.foundation.units import counted, format_bytes
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray, blocksize, check_dtype, index_dtype, number_dtype
from spdist.matrices.late_bindings import load
from spdist.shown import without_secrets
from spdist.storage import groups
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.groups import ARRAYS
from spdist.storage.lock import readable_url
from spdist.storage.names.names import AxisNames, NameArray
from spdist.storage.names.of_matrix import names_of
from spdist.storage.parts.arrays import Joined
from spdist.stores.registry import at, normalise

READ_CHUNKS = 2
"""Zarr chunks of each array that one read of scattered rows decodes at a time."""

PARTS = "spdist_parts"
"""Encoding of a matrix whose rows lie in several; the attribute ``spdist`` lists their folders, and their seals."""

Allocate = Callable[[int, np.dtype[Any]], ValueArray]
"""Function that takes a number of elements and their dtype and returns an array to fill."""

Held = tuple[int, CSR]
"""The position of an entry in the stored matrix, and rows in memory that begin with this entry."""


@dataclass(frozen=True)
class MatrixHeader(Displayed):
    """The metadata of a stored matrix; no Zarr chunk is read."""

    url: str  # an absolute path or an fsspec URL
    # (nrows, ncols): in blocks, if the matrix is stored in blocks; `full_shape` counts single rows and columns
    shape: tuple[int, int]
    indptr: ChunkedArray
    indices: ChunkedArray
    data: ChunkedArray
    facts: dict[str, Any] = field(compare=False)  # the attribute ``spdist``: state and provenance
    # the fingerprint, if this matrix from elsewhere was checked whole before this call's work; empty otherwise
    known: str = field(default="", compare=False)

    def __repr__(self) -> str:
        size = f"{self.full_shape[0]:,} x {self.full_shape[1]:,}, {number_dtype(self.dtype)}"
        of = self.blocksize
        stored = counted(self.nnz, "entry") if of is None else f"{counted(self.nnz, 'block')} of {of[0]} x {of[1]}"
        return f"<StoredMatrix {size}: {stored} at {without_secrets(self.url)}>"

    def description(self) -> list[Part]:
        """Return a table of what the metadata say."""
        size, of = " x ".join(f"{n:,}" for n in self.full_shape), self.blocksize
        mean = self.nnz / max(self.nrows, 1)
        blocks = "" if of is None else f"{counted(self.nnz, 'block')} of {of[0]} x {of[1]}"
        entries = blocks or f"{self.nnz:,}, {mean:.2f} a row"
        facts = {
            "stored matrix": self.url, "shape": size, "dtype": str(number_dtype(self.dtype)), "entries": entries,
            "in memory": format_bytes(self.nbytes), "Zarr chunks": f"{self.indices.chunk:,} entries",
        }  # fmt: skip
        return [Table((), tuple(facts.items()))]

    @property
    def nrows(self) -> int:
        """Number of rows."""
        return self.shape[0]

    @property
    def ncols(self) -> int:
        """Number of columns."""
        return self.shape[1]

    @property
    def nnz(self) -> int:
        """Number of stored entries."""
        return self.indices.length

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.data.dtype

    @property
    def blocksize(self) -> tuple[int, int] | None:
        """Rows and columns of the blocks; None if entries are numbers."""
        return blocksize(self.dtype)

    @property
    def full_shape(self) -> tuple[int, int]:
        """Single rows and columns, in a block matrix too."""
        r, s = self.blocksize or (1, 1)
        return self.nrows * r, self.ncols * s

    @property
    def entry_nbytes(self) -> int:
        """Bytes of an entry in memory: its column and its value."""
        return index_dtype(self.ncols).itemsize + self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix in memory."""
        return self.nnz * self.entry_nbytes + 8 * (self.nrows + 1)

    @property
    def names(self) -> AxisNames:
        """Names of rows and columns, unread; the enclosing AnnData's names, if any."""
        return names_of(self.url, self.facts, self.full_shape)

    @property
    def row_names(self) -> NameArray | None:
        """Names of the rows as an array of str, read whole; None if they have none."""
        names = self.names.rows
        return None if names is None else names.to_array()

    @property
    def column_names(self) -> NameArray | None:
        """Names of the columns as an array of str, read whole; None if they have none."""
        names = self.names.columns
        return None if names is None else names.to_array()

    @property
    def is_known_canonical(self) -> bool:
        """Whether the matrix is known to be canonical: spdist wrote and sealed it, or it was checked whole."""
        return bool(self.known or (self.facts.get("canonical") and self.facts.get("seal")))


class Conversions:
    """Methods that read entries of a stored matrix; they call functions of the higher layer `interop`."""

    def to_scipy(self) -> Any:
        """Return the matrix in memory: a `csr_array`, or a `bsr_array` if it is stored in dense blocks.

        Raises `MatrixError` if there is not enough free memory.
        """
        return load("to_scipy")(self)

    def to_dask(self, rows: int | None = None) -> Any:
        """Return the matrix as a Dask array of CSR blocks, as `spdist.to_dask`."""
        return load("to_dask")(self, rows)

    def __getitem__(self, key: Any) -> Any:
        """Return rows, or rows and columns, as SciPy's `csr_array` does; only the selected rows are read.

        Examples
        --------
        >>> import scipy.sparse as sp, spdist
        >>> a = spdist.save("memory://A.zarr", sp.eye_array(3), overwrite=True)
        >>> a[0:2, 1].toarray(), (a @ [1, 2, 3]).tolist(), (a.T @ [1, 2, 3]).tolist()
        (array([0., 1.]), [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
        """
        return load("select")(self, key)

    def __matmul__(self, x: Any) -> Any:
        """Return the product with a dense vector or matrix; the matrix is read once, some rows at a time."""
        return load("multiply")(self, x)

    @property
    def T(self) -> Transposed:  # noqa: N802 (the name that SciPy gives it)
        """The transpose, for ``a.T @ x``, `spdist.matmul` and `spdist.multiply`; nothing is read."""
        return Transposed(cast(StoredMatrix, self))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError("a stored matrix is no dense array: to_scipy() reads it, a[0:100].toarray() some rows")

    def __iter__(self) -> Any:
        raise InputError("a stored matrix is not read row by row: a[0:100] reads some rows, to_scipy() all")


@dataclass(frozen=True, repr=False)
class StoredMatrix(Conversions, MatrixHeader):
    """A finished matrix in Zarr; each process opens the arrays itself, so that it pickles to a few hundred bytes."""

    def read_indptr(self, start: int, stop: int) -> Int64Array:
        """Return the ``stop - start + 1`` offsets of rows ``[start:stop)``."""
        return self.indptr.read(start, stop + 1).astype(np.int64, copy=False)

    def read_indices(self, first: int, last: int) -> ValueArray:
        """Return the columns of entries ``[first:last)``."""
        found = self.indices.read(first, last)
        dtype = index_dtype(self.ncols)
        if found.dtype != dtype and len(found) and (int(found.min()) < 0 or int(found.max()) >= self.ncols):
            raise MatrixError(
                f"{self.url}: entries {first:,} to {last:,} hold columns {int(found.min()):,} to {int(found.max()):,}, "
                f"outside [0, {self.ncols:,})"
            )
        return found.astype(dtype, copy=False)

    def rows(self, start: int, stop: int, allocate: Allocate | None = None) -> CSR:
        """Read rows ``[start:stop)``, or as many of them as there are.

        `allocate`: gives the memory to read into; by default columns and values are views of decoded Zarr chunks.
        Raises `InputError` if `start` is negative, or above `stop`.
        """
        start, stop = self._clip(start, stop)
        offsets = self.read_indptr(start, stop)
        first, last = int(offsets[0]), int(offsets[-1])
        if allocate is None:
            values = self.data.read(first, last)
            return CSR(offsets - first, self.read_indices(first, last), values, (stop - start, self.ncols))
        return CSR(offsets - first, *self.entries(first, last, (), allocate), (stop - start, self.ncols))

    def _clip(self, start: int, stop: int) -> tuple[int, int]:
        """Return a range of rows, cut to the rows that exist."""
        if not 0 <= start <= stop:
            raise InputError(f"{self.url}: rows {start:,} to {stop:,} are no range of its {self.nrows:,} rows")
        return min(start, self.nrows), min(stop, self.nrows)

    def rows_indices(self, start: int, stop: int) -> CSR:
        """Read the pattern of rows ``[start:stop)``; `data` of the result is its `indices`."""
        start, stop = self._clip(start, stop)
        offsets = self.read_indptr(start, stop)
        indices = self.read_indices(int(offsets[0]), int(offsets[-1]))
        return CSR(offsets - offsets[0], indices, indices, (stop - start, self.ncols))

    def entries(
        self, first: int, last: int, held: Sequence[Held] = (), allocate: Allocate = np.empty
    ) -> tuple[ValueArray, ValueArray]:
        """Return columns and values of entries ``[first:last)``: copy those that are held, read the others."""
        indices, data = allocate(last - first, index_dtype(self.ncols)), allocate(last - first, self.dtype)
        done = first
        for position, rows in sorted(held, key=lambda one: one[0]):
            low, high = max(done, position), min(last, position + rows.nnz)
            if low < high:
                self.read_entries(indices, data, first, done, low)
                indices[low - first : high - first] = rows.indices[low - position : high - position]
                data[low - first : high - first] = rows.data[low - position : high - position]
                done = high
        self.read_entries(indices, data, first, done, last)
        return indices, data

    def read_entries(self, indices: ValueArray, data: ValueArray, origin: int, first: int, last: int) -> None:
        """Read entries ``[first:last)`` into arrays.

        `origin`: entry that goes to the first element of the arrays.
        """
        part = slice(first - origin, last - origin)
        self.data.read_into(data[part], first)
        if indices.dtype == self.indices.dtype:
            self.indices.read_into(indices[part], first)
            return
        step = 2 * READ_CHUNKS * self.indices.chunk
        while first < last:
            stop = min(last, first - first % step + step)
            indices[first - origin : stop - origin] = self.read_indices(first, stop)
            first = stop

    def take(self, rows: Int64Array, *, values: bool = True) -> CSR:
        """Read the given rows; decode only the Zarr chunks that hold them.

        `rows`: (n,) int64: rising, no duplicates.
        `values`: if false, no values are read, and `data` of the result is its `indices`.
        """
        starts, stops = self.offsets_of(rows)
        indptr = np.concatenate([[0], np.cumsum(stops - starts)]).astype(np.int64)
        indices = np.empty(int(indptr[-1]), index_dtype(self.ncols))
        data = np.empty(len(indices), self.dtype) if values else indices
        pairs = ((self.indices, indices), (self.data, data))[: 1 + values]
        _gather(pairs, starts, indptr, READ_CHUNKS * self.indices.chunk)
        return CSR(indptr, indices, data, (len(rows), self.ncols))

    def offsets_of(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the first entry of some rising rows, and the entry after the last of each."""
        starts, stops = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for i, j in _runs(rows // (READ_CHUNKS * self.indptr.chunk)):  # decodes each Zarr chunk once
            low = int(rows[i])
            offsets = self.read_indptr(low, int(rows[j - 1]) + 1)
            starts[i:j], stops[i:j] = offsets[rows[i:j] - low], offsets[rows[i:j] - low + 1]
        return starts, stops

    def row_blocks(
        self, entries: int, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[int, int, Int64Array]]:
        """Cut rows into blocks of about `entries` entries, streaming.

        `entries`: at least the entries of a Zarr chunk are taken, because smaller blocks would decode it several times.
        `first, last`: rows ``[first:last)`` to cut; by default all.
        Yields rows ``[start:stop)`` and their ``stop - start + 1`` offsets.
        """
        last, entries = self.nrows if last is None else last, max(entries, self.indices.chunk)
        for begin in range(first, last, self.indptr.chunk):
            end = min(begin + self.indptr.chunk, last)
            offsets = self.read_indptr(begin, end)
            start = begin
            while start < end:
                limit = offsets[start - begin] + entries
                stop = begin + int(np.searchsorted(offsets, limit, side="right")) - 1
                stop = min(max(stop, start + 1), end)
                yield start, stop, offsets[start - begin : stop - begin + 1]
                start = stop

    def check(self) -> None:
        """Check structure and canonical form of the whole matrix, streaming.

        Raises `MatrixError`; names the row.
        """
        end = 0
        for start, stop, offsets in self.row_blocks(4 * self.indices.chunk):
            first, last = int(offsets[0]), int(offsets[-1])
            if first != end or np.any(np.diff(offsets) < 0) or last > self.nnz:
                raise MatrixError(
                    f"{self.url}: indptr does not rise from 0 to the {self.nnz:,} entries there are, in rows "
                    f"{start:,}-{stop:,}"
                )
            end = last
            indices = self.read_indices(first, last)
            check_canonical(CSR(offsets - first, indices, indices, (stop - start, self.ncols)), self.url, start)
        if end != self.nnz:
            raise MatrixError(f"{self.url}: indptr ends at {end:,}, but there are {self.nnz:,} entries")

    def fingerprint(self) -> str:
        """Return a digest of the content, and raise if a Zarr chunk is missing or not the one that was written.

        The digest is of the chunks' stored checksums, so that it costs one small read a chunk; a matrix without
        checksums is read whole.

        Raises `CorruptError`; names the first Zarr chunk that is missing, altered or in another's place.
        """
        if self.known:
            return self.known
        kind = self.dtype.str if blocksize(self.dtype) is None else str(self.dtype)
        digest = hashlib.blake2b(repr((self.shape, kind)).encode(), digest_size=16)
        for array in (self.indptr, self.indices, self.data):
            for part in array.digests():
                digest.update(part)
        return digest.hexdigest()


@dataclass(frozen=True)
class Transposed:
    """The transpose of a stored matrix, unread."""

    matrix: StoredMatrix

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.matrix.full_shape[::-1]

    @property
    def T(self) -> StoredMatrix:  # noqa: N802 (the name that SciPy gives it)
        """The stored matrix."""
        return self.matrix

    def __matmul__(self, x: Any) -> Any:
        """Return the product with a dense vector or matrix."""
        return load("multiply_transposed")(self.matrix, x)


def _runs(keys: Int64Array) -> Iterator[tuple[int, int]]:
    """Yield the ranges in which all of `keys` are equal."""
    cuts = np.flatnonzero(np.diff(keys)) + 1
    yield from itertools.pairwise([0, *cuts.tolist(), len(keys)] if len(keys) else [])


def _gather(
    pairs: tuple[tuple[ChunkedArray, ValueArray], ...], starts: Int64Array, indptr: Int64Array, span: int
) -> None:
    """Read the entries of some rows; rows that start in the same `span` entries share one read.

    `pairs`: each stored array, and where to put its elements.
    `starts`: (n,) int64: first entry of each row in the stored arrays, rising.
    `indptr`: (n + 1,) int64: offsets of the rows in the arrays to fill.
    """
    lengths = np.diff(indptr)
    for i, j in _runs(starts // span):
        first, last = int(starts[i]), int(starts[j - 1] + lengths[j - 1])
        part = slice(int(indptr[i]), int(indptr[j]))
        if part.stop - part.start == last - first:
            for array, out in pairs:
                out[part] = array.read(first, last)
            continue
        wanted = np.repeat(starts[i:j] - first - indptr[i:j] + indptr[i], lengths[i:j])
        wanted += np.arange(len(wanted))  # positions of the wanted elements in the elements that are read
        for array, out in pairs:
            np.take(array.read(first, last).astype(out.dtype, copy=False), wanted, out=out[part], mode="clip")


def refuse_blocks(what: str, *matrices: object) -> None:
    """Refuse matrices that are stored in blocks for an operation on single entries.

    Raises `InputError`; names the first stored block matrix, and its blocks.
    """
    for m in matrices:
        if isinstance(m, StoredMatrix) and m.blocksize is not None:
            rows, columns = m.blocksize
            raise InputError(
                f"{what} are for matrices of entries, but {m.url} is stored in blocks of {rows}x{columns}: store it by "
                f"entries, as `spdist export` and `spdist import` without --block-size do"
            )


def open_matrix(url: str | Path) -> StoredMatrix:
    """Open a stored matrix.

    Raises `MatrixError` if nothing is there, it is not a CSR matrix in AnnData's encoding, or it is unfinished.

    Examples
    --------
    >>> import scipy.sparse as sp, spdist
    >>> a = spdist.save("memory://A.zarr", sp.eye_array(3), overwrite=True)
    >>> open_matrix("memory://A.zarr").shape
    (3, 3)
    """
    url = readable_url(normalise(url))
    attributes, members = groups.read(at(url))
    facts = attributes.get("spdist", {})
    if not isinstance(facts, dict):
        raise _damaged(url, "the attribute 'spdist'", facts)
    if facts.get("state") == "unfinished":
        raise MatrixError(f"{url}: an unfinished product; finish it with `spdist multiply A B {url} --resume`")
    kind = str(attributes.get("encoding-type"))
    if kind == "csc_matrix":
        raise MatrixError(
            f"{url}: stored by columns (csc_matrix), and products read rows; `spdist import {url} A.zarr` sorts it "
            f"into rows"
        )
    if kind == PARTS and isinstance(facts.get("seal"), dict):
        return _open_parts(url, facts)
    needed = {"csr_matrix": {"shape"}, "bsr_matrix": {"shape", "block-size"}}.get(kind)
    if needed is None or needed - set(attributes) or any(name not in members for name in ARRAYS):
        inside = f"; name a matrix in it, for instance {url}/X" if kind == "anndata" else ""
        raise MatrixError(
            f"{url}: not a sparse matrix: expected a Zarr group with encoding-type csr_matrix, got "
            f"{one_line(kind)}{inside}"
        )
    shape = _two_numbers(url, attributes, "shape", 0)
    size = _two_numbers(url, attributes, "block-size", 1) if kind == "bsr_matrix" else ()
    arrays = {}
    for name in ARRAYS:
        table = groups.table_digest(attributes, name)
        with groups.clear_zarr_errors(url, name):
            arrays[name] = groups.array_of(url, name, members[name], size if name == "data" else (), table)
    if size:
        shape = shape[0] // size[0], shape[1] // size[1]
    return _checked(StoredMatrix(url, shape, arrays["indptr"], arrays["indices"], arrays["data"], facts))


def _open_parts(url: str, facts: dict[str, Any]) -> StoredMatrix:
    """Open a matrix in parts; raise CorruptError if one is another than when they were joined."""
    folders = tuple(one["name"] for one in facts["parts"])
    parts = [open_matrix(f"{url}/{folder}") for folder in folders]
    for part, one in zip(parts, facts["parts"], strict=True):
        if part.facts.get("seal", {}).get("group") != one["seal"]:
            raise CorruptError(f"{part.url}: is not the part that {url} was made of; restore it, or make both again")
    rows, entries = [part.nrows for part in parts], [part.nnz for part in parts]

    def joined(name: str, lengths: list[int], bases: list[int]) -> Any:
        arrays = [getattr(part, name) for part in parts]
        chunk = max(array.chunk for array in arrays)
        return Joined(name, tuple(arrays), tuple(lengths), tuple(bases), chunk, arrays[0].dtype, folders)

    return StoredMatrix(
        url,
        (sum(rows), parts[0].ncols),
        joined("indptr", [*rows[:-1], rows[-1] + 1], [sum(entries[:i]) for i in range(len(parts))]),
        joined("indices", entries, [0] * len(parts)),
        joined("data", entries, [0] * len(parts)),
        facts,
    )


def _checked(m: StoredMatrix) -> StoredMatrix:
    """Check that the arrays of a matrix fit together, as far as their metadata say."""
    check_dtype(m.data.dtype)
    if m.indptr.length != m.nrows + 1 or m.indices.length != m.data.length:
        raise MatrixError(
            f"{m.url}: shape {m.shape} does not fit arrays of {m.indptr.length:,} offsets, {m.indices.length:,} "
            f"indices and {m.data.length:,} values"
        )
    for array in (m.indptr, m.indices):
        if array.dtype.kind not in "iu":
            raise MatrixError(f"{m.url}: array '{array.name}' holds {array.dtype}; it must hold whole numbers")
    return m


def _two_numbers(url: str, attributes: dict[str, Any], name: str, least: int) -> tuple[int, int]:
    """Return an attribute that must be two whole numbers."""
    value = attributes[name]
    pair = isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value)
    if not pair or min(value) < least or max(value) >= 1 << 63:
        raise _damaged(url, f"the attribute '{name}'", value)
    return value[0], value[1]


def _damaged(url: str, what: str, value: object) -> MatrixError:
    return MatrixError(
        f"{url}: {what} is {one_line(repr(value), 60)}; restore it from a copy or write the matrix again"
    )
