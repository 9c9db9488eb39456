"""Read and write Matrix Market text piece by piece.

SciPy's reader (fast_matrix_market) converts the numbers, correctly rounded and in threads: it gets each piece of the
file under a header of its own, without comments and with ``e`` for Fortran's ``D``. It stops reading a line where a
number ends, so that ``1,5`` would pass for 1: `count_entries` therefore scans every byte first. Pieces that are
unusual (``+1``) or that SciPy refuses are read again line by line in Python, which also states what is wrong with a
line.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, cast

import numpy as np

from spdist.errors import MatrixError, one_line
from spdist.foundation.units import counted
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import ValueArray
from spdist.storage.external_sort import Entries
from spdist.storage.formats.reading import Reading
from spdist.storage.formats.source import Import
from spdist.storage.formats.text import TextFile
from spdist.storage.formats.text_numbers import MOST_EXACT, excerpt, is_whole, with_e

TEXT_BYTES = 4 << 20
"""Bytes of text read at a time; its entries take about three times as much memory, at worst eleven times."""

MAX_LINE = 1 << 20
"""Bytes of the longest line that is read; a longer one means that the file is no Matrix Market file."""

MAX_IDLE_LINES = 1 << 20
"""Comments and blank lines at most: they are read in Python, and a compressed file can hold billions of them."""

FIELDS = {
    "real": np.dtype(np.float64),
    "double": np.dtype(np.float64),
    "integer": np.dtype(np.int64),
    "unsigned-integer": np.dtype(np.uint64),
    "complex": np.dtype(np.complex128),
    "pattern": np.dtype(np.float64),
}
COMMENT = re.compile(rb"%[^\n]*")

SYMMETRIES = ("general", "symmetric", "skew-symmetric", "hermitian")


class Text(Protocol):
    """Text that is read in order, a binary file for instance."""

    def read(self, count: int, /) -> bytes:
        """Return the next bytes, at most `count`; none at the end."""
        ...

    def readline(self, count: int, /) -> bytes:
        """Return the rest of the line, at most `count` bytes of it."""
        ...


@dataclass(frozen=True)
class Header:
    """The header of a file."""

    name: str  # the file, in messages
    dense: bool  # whether the file lists all values by columns (``array``) instead of entries (``coordinate``)
    field: str
    symmetry: str
    shape: tuple[int, int]  # (nrows, ncols)
    count: int  # entries, or values of a dense file, that follow
    lines: int  # lines of the header

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values; pattern entries are ones of float64, as in SciPy."""
        return FIELDS[self.field]

    @property
    def coordinates(self) -> int:
        """Numbers at the begin of a line that are row and column."""
        return 0 if self.dense else 2

    @property
    def numbers(self) -> int:
        """Numbers on a line."""
        return self.coordinates + {"pattern": 0, "complex": 2}.get(self.field, 1)

    @property
    def most(self) -> int:
        """Entries at most, mirrored ones among them."""
        return self.count if self.symmetry == "general" else 2 * self.count

    @property
    def spellings(self) -> tuple[tuple[bool, int, str], ...]:
        """Ways in which the lines may be written: whether in digits only, numbers on a line, field to read them as."""
        if self.field == "pattern":
            return (True, 2, "pattern"), (False, 3, "pattern")
        if self.dtype.kind in "iu":
            return (True, self.numbers, self.field), (False, self.numbers, "real")
        return ((False, self.numbers, self.field),)

    def error(self, line: int, what: str) -> MatrixError:
        """Return an error that names a line and says what is wrong with it."""
        return MatrixError(f"{self.name}, line {line:,}: {what}")


# -- the file ----------------------------------------------------------------------------------------------------------


def import_text(job: Import) -> None:
    """Import Matrix Market text.

    Raises `MatrixError` if it is damaged, or claims more entries than a file of its size can hold; names the line.
    """
    header, entries = begin_reading(job)
    job.sort(entries, job.shape(header.shape), header.dtype, header.most)


def begin_reading(job: Import) -> tuple[Header, Iterator[Entries]]:
    """Return the header of the file and an iterator over its entries; raises as `import_text`."""
    text = TextFile(job.source)
    header = read_header(text, job.path)
    room = job.source.inflated if text.packing else job.source.size
    if header.count * 2 * header.numbers > room:  # a digit and a separator for each number
        raise header.error(
            header.lines,
            f"{header.count:,} entries do not fit into a file of {job.source.size:,} bytes; correct their number, or "
            f"get the file again",
        )
    return header, read_entries(text, header, reading=job.reading)


# -- the header --------------------------------------------------------------------------------------------------------


def read_header(file: Text, name: str) -> Header:
    r"""Read the banner, the comments and the size line.

    `file`: at its start; afterwards at the first entry.
    `name`: what messages call the file.
    Raises `MatrixError`; names the file and the line.

    Examples
    --------
    >>> read_header(io.BytesIO(b"%%MatrixMarket matrix coordinate real general\n2 3 1\n1 1 0.5\n"), "a.mtx").shape
    (2, 3)
    """
    words = file.readline(MAX_LINE).decode("latin-1").lower().split()
    if len(words) < 5 or words[0].lstrip("%") != "matrixmarket" or words[1] != "matrix":
        raise MatrixError(
            f"{name}, line 1: not a Matrix Market file; "
            f"its first line is like '%%MatrixMarket matrix coordinate real general'"
        )
    layout, field, symmetry = words[2:5]
    for word, known in ((layout, ("coordinate", "array")), (field, tuple(FIELDS)), (symmetry, SYMMETRIES)):
        if word not in known:
            raise MatrixError(f"{name}, line 1: '{one_line(word, 40)}' is none of {', '.join(known)}")
    no_signs = field in ("pattern", "unsigned-integer") and symmetry == "skew-symmetric"
    if no_signs or (field == "pattern" and (layout == "array" or symmetry == "hermitian")):
        raise MatrixError(f"{name}, line 1: a matrix of field '{field}' cannot be '{layout} {symmetry}'")
    line, text = 1, b"%"
    while not text.strip() or text.lstrip().startswith(b"%"):
        line, text = line + 1, file.readline(MAX_LINE)
        if not text:
            raise MatrixError(f"{name}, line {line:,}: the file ends before the line with the sizes")
        if line > MAX_IDLE_LINES:
            raise _too_idle(name)
    return _read_sizes(Header(name, layout == "array", field, symmetry, (0, 0), 0, line), text)


def _read_sizes(header: Header, text: bytes) -> Header:
    words = text.partition(b"%")[0].split()
    expected = ["rows", "columns"] if header.dense else ["rows", "columns", "entries"]
    if len(words) != len(expected) or not all(map(is_whole, words)):
        raise header.error(header.lines, f"expected the numbers of {', '.join(expected)}, got '{excerpt(text)}'")
    nrows, ncols, *rest = map(int, words)
    if max(nrows, ncols) >= 1 << 63:
        raise header.error(header.lines, f"{nrows:,} x {ncols:,} is larger than 64-bit indices reach")
    if header.symmetry != "general" and nrows != ncols:
        raise header.error(header.lines, f"a {header.symmetry} matrix must be square, not {nrows:,} x {ncols:,}")
    count = rest[0] if rest else _dense_count(nrows, ncols, header.symmetry)
    return Header(header.name, header.dense, header.field, header.symmetry, (nrows, ncols), count, header.lines)


def _dense_count(nrows: int, ncols: int, symmetry: str) -> int:
    if symmetry == "general":
        return nrows * ncols
    return nrows * (nrows - 1) // 2 if symmetry == "skew-symmetric" else nrows * (nrows + 1) // 2


# -- the entries -------------------------------------------------------------------------------------------------------


def read_entries(
    file: Text, header: Header, text_bytes: int = TEXT_BYTES, *, reading: Reading | None = None
) -> Iterator[Entries]:
    """Yield the entries after the header in file order, each followed by its mirror image if the matrix is symmetric.

    Zeros are kept in ``coordinate`` files and dropped from ``array`` files, as are values in files of patterns.

    `file`: after the header.
    Rows and columns count from 0.
    Raises `MatrixError` if a word is no number, an index is out of range, or there are more or fewer entries than the
    header announces; names the file and the line.
    """
    done, line, idle = 0, header.lines + 1, header.lines
    findings = _Findings(header)
    for text in _pieces(file, header, text_bytes):
        piece, further = _parse(text, header, line)
        if done + len(piece.values) > header.count:
            extra = _line_of_entry(text, header.count - done)
            raise header.error(
                line + extra, f"more than the {counted(header.count, 'entry')} that line {header.lines} announces"
            )
        lines = text.count(b"\n")
        idle += lines - len(piece.values)
        if idle > MAX_IDLE_LINES:
            raise _too_idle(header.name)
        if header.dense:
            piece = _locate(piece.values, done, header)
            done += len(piece.values)
            piece = piece.take(piece.values != 0)
        else:
            done += len(piece.values)
        line += lines
        findings.add(piece, further)
        yield _mirror(piece, header.symmetry)
    if done < header.count:
        raise header.error(
            line - 1, f"the file ends after {done:,} of {counted(header.count, 'entry')}; is it truncated?"
        )
    if reading is not None:
        findings.tell(reading)


class _Findings:
    """What is worth a word about the entries of a file."""

    def __init__(self, header: Header) -> None:
        self.header, self.mirrored, self.further = header, 0, False
        self.below, self.above = False, False

    def add(self, entries: Entries, further: bool) -> None:
        """Add entries of the file; `further`: whether their lines hold values that are left out."""
        self.further |= further
        if self.header.symmetry != "general":
            below, above = entries.rows > entries.columns, entries.rows < entries.columns
            self.mirrored += int(np.count_nonzero(below)) + int(np.count_nonzero(above))
            self.below, self.above = self.below or bool(below.any()), self.above or bool(above.any())

    def tell(self, reading: Reading) -> None:
        """Add the findings to what is said of the file."""
        kind = "array" if self.header.dense else "coordinate"
        found = f"{kind} {self.header.field} {self.header.symmetry}"
        if self.header.symmetry != "general":
            found += f", {counted(self.mirrored, 'entry')} mirrored"
        if self.below and self.above:
            found += " from both sides of the diagonal, and added where they meet"
        reading.found.append(found)
        if self.further:
            reading.left_out.append("values of a pattern")


def _too_idle(name: str) -> MatrixError:
    return MatrixError(f"{name}: more than {MAX_IDLE_LINES:,} comments and blank lines; remove them")


def _pieces(file: Text, header: Header, text_bytes: int) -> Iterator[bytes]:
    """Yield the rest of `file` in pieces of whole lines."""
    rest = b""
    while text := file.read(text_bytes):
        cut = text.rfind(b"\n") + 1
        if cut:
            yield rest + text[:cut]
            rest = text[cut:]
        else:
            rest += text
        if len(rest) > max(MAX_LINE, text_bytes):
            raise MatrixError(f"{header.name}: a line is longer than {MAX_LINE:,} bytes; this is no Matrix Market file")
    if rest:
        yield rest + b"\n"


def _parse(text: bytes, header: Header, line: int) -> tuple[Entries, bool]:
    """Convert complete lines of text, numbered from `line`; also return whether values were left out."""
    from spdist.storage.formats.number_scan import INTEGERS, REALS, count_entries  # Numba, which is slow to load

    if b"%" in text:
        text = COMMENT.sub(b"", text)
    spelled = with_e(text) if header.dtype.kind in "fc" else text
    for is_whole_number, numbers, field in header.spellings:
        table = INTEGERS if is_whole_number else REALS
        count = count_entries(np.frombuffer(spelled, np.uint8), table, numbers, header.coordinates)
        if count == 0:
            return _parse_lines([], header, line)
        if count > 0:
            with contextlib.suppress(ValueError, OverflowError):  # reading line by line tells what is wrong
                return _convert(spelled, header, field, count), numbers > header.numbers
    return _parse_lines(text.split(b"\n"), header, line)


def _convert(text: bytes, header: Header, field: str, count: int) -> Entries:
    """Convert `count` lines with SciPy; raise ValueError if whole numbers are expected and one has a fraction.

    `text` ends with a line feed: without it SciPy 1.17 reads beyond the end of a last line that has more than it needs.
    """
    import scipy.io

    layout, (nrows, ncols) = ("array", (count, 1)) if header.dense else ("coordinate", header.shape)
    size = f"{nrows} {ncols}" if header.dense else f"{nrows} {ncols} {count}"
    top = f"%%MatrixMarket matrix {layout} {field} general\n{size}\n"
    matrix = cast(Any, scipy.io.mmread(io.BytesIO(top.encode() + text)))
    values = matrix[:, 0] if header.dense else matrix.data
    if field != header.field:
        values = _whole(values, header.dtype)
    if header.dense:
        nowhere = np.empty(count, np.int64)
        return Entries(nowhere, nowhere, values)
    return Entries(matrix.row, matrix.col, values)


def _whole(values: ValueArray, dtype: np.dtype[Any]) -> ValueArray:
    """Return floats as whole numbers of a dtype; raise ValueError if one is not exactly such a number."""
    least = -1 if dtype.kind == "u" else -MOST_EXACT
    if not np.all((values > least) & (values < MOST_EXACT) & (values == np.trunc(values))):
        raise ValueError
    return values.astype(dtype)


def _parse_lines(lines: list[bytes], header: Header, line: int) -> tuple[Entries, bool]:
    """Convert lines one by one: slow, accepts all that float() accepts, and names the line that is wrong."""
    positions, values = [], []
    further = False
    for number, text in enumerate(lines, line):
        words = text.split()
        if not words:
            continue
        more = 0 <= len(words) - header.numbers <= 2 if header.field == "pattern" else len(words) == header.numbers
        if not more:
            raise header.error(number, f"expected {counted(header.numbers, 'number')}, got '{excerpt(text)}'")
        positions.append((0, 0) if header.dense else _position_of(words, header, number))
        values.append(_value_of(words[header.coordinates :], header, number))
        further |= len(words) > header.numbers
    rows, columns = np.array(positions, np.int64).reshape(-1, 2).T
    return Entries(rows, columns, np.array(values, header.dtype)), further


def _position_of(words: list[bytes], header: Header, number: int) -> tuple[int, int]:
    """Return the 0-based row and column."""
    position = []
    for word, limit, what in zip(words, header.shape, ("row", "column"), strict=False):
        digits = word.removeprefix(b"+")
        if not is_whole(digits.removeprefix(b"-")):
            raise header.error(number, f"'{excerpt(word)}' is not a {what} number")
        if not 1 <= int(digits) <= limit:
            raise header.error(number, f"{what} {int(digits):,} is outside 1 to {limit:,} (indices are 1-based)")
        position.append(int(digits) - 1)
    return position[0], position[1]


def _value_of(words: list[bytes], header: Header, number: int) -> complex:
    """Return the value that the words after the indices spell; 1 for a pattern, whatever numbers follow."""
    kind = header.dtype.kind
    try:
        if any(b"_" in word for word in words):
            raise ValueError
        parts = [_integer(word) if kind in "iu" else float(with_e(word)) for word in words]
    except ValueError:
        raise header.error(number, f"'{excerpt(b' '.join(words))}' is not a number of type {header.field}") from None
    if header.field == "pattern":
        return 1.0
    if kind in "iu" and not np.iinfo(header.dtype).min <= parts[0] <= np.iinfo(header.dtype).max:
        raise header.error(number, f"{parts[0]:,} does not fit {header.dtype}; write the values as 'real'")
    return complex(*parts) if kind == "c" else parts[0]


def _integer(word: bytes) -> int:
    """Return a whole number, written as one or as a decimal number; raise ValueError if it is not exactly one."""
    if is_whole(word.lstrip(b"+-")):
        return int(word)
    return int(_whole(np.array([float(word)]), np.dtype(np.int64))[0])


def _locate(values: ValueArray, done: int, header: Header) -> Entries:
    """Return values of an ``array`` file with their rows and columns; `done` values come before them."""
    nrows, ncols = header.shape
    at = np.arange(done, done + len(values), dtype=np.int64)
    if header.symmetry == "general":
        return Entries(at % nrows, at // nrows, values)
    skip = int(header.symmetry == "skew-symmetric")
    column = np.arange(ncols, dtype=np.int64)
    starts = column * (nrows - skip) - column * (column - 1) // 2  # of the columns' lower triangles
    columns = np.searchsorted(starts, at, side="right") - 1
    return Entries(at - starts[columns] + columns + skip, columns, values)


def _mirror(entries: Entries, symmetry: str) -> Entries:
    """Return the entries, each one off the diagonal followed by its mirror image."""
    if symmetry == "general":
        return entries
    rows, columns, values = entries
    image = -values if symmetry == "skew-symmetric" else values.conj() if symmetry == "hermitian" else values
    keep = np.stack([np.ones(len(rows), np.bool_), rows != columns], 1).ravel()
    both = (np.stack(pair, 1).ravel() for pair in ((rows, columns), (columns, rows), (values, image)))
    return Entries(*(each[keep] for each in both))


def _line_of_entry(text: bytes, number: int) -> int:
    """Return the line of entry `number` within `text`, both counted from 0."""
    for line, words in enumerate(text.split(b"\n")):
        if words.strip() and not words.lstrip().startswith(b"%"):
            if number == 0:
                return line
            number -= 1
    return 0


# -- writing -----------------------------------------------------------------------------------------------------------


def field_of(dtype: np.dtype[Any]) -> str:
    """Return the field that values of `dtype` are written as; bools are integers, so that a stored False is kept.

    Examples
    --------
    >>> field_of(np.dtype(np.bool_)), field_of(np.dtype(np.float32))
    ('integer', 'real')
    """
    if dtype.kind == "u" and dtype.itemsize == 8:
        return "unsigned-integer"
    return {"f": "real", "c": "complex"}.get(dtype.kind, "integer")


def write_header(file: BinaryIO, shape: tuple[int, int], nnz: int, dtype: np.dtype[Any]) -> None:
    """Write the banner and the size line of a ``general coordinate`` file.

    `file`: at its start.
    `nnz`: entries that `write_rows` will write.

    Examples
    --------
    >>> file = io.BytesIO()
    >>> write_header(file, (2, 3), 1, np.dtype("f8"))
    >>> file.getvalue().splitlines()
    [b'%%MatrixMarket matrix coordinate real general', b'2 3 1']
    """
    file.write(f"%%MatrixMarket matrix coordinate {field_of(dtype)} general\n".encode())
    file.write(f"{shape[0]} {shape[1]} {nnz}\n".encode())


def write_rows(file: BinaryIO, block: CSR, first_row: int, nrows: int) -> None:
    """Write the entries of a row block so that its values read back exactly."""
    import scipy.io
    import scipy.sparse as sp

    if not block.nnz:
        return
    exact = FIELDS[field_of(block.dtype)]  # float32 as the float64 it equals, not as the shortest float32
    rows = np.repeat(np.arange(first_row, first_row + block.nrows, dtype=np.int64), np.diff(block.indptr))
    matrix = sp.coo_array((block.data.astype(exact, copy=False), (rows, block.indices)), shape=(nrows, block.ncols))
    text = io.BytesIO()
    scipy.io.mmwrite(text, matrix, field=None, symmetry="general")
    body = text.getvalue()
    start = 0
    for _ in range(3):  # SciPy's own banner, empty comment and size line
        start = body.index(b"\n", start) + 1
    file.write(memoryview(body)[start:])
