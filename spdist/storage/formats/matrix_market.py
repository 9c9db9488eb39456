"""Read and write Matrix Market text piece by piece.

SciPy's reader (fast_matrix_market) converts the numbers, correctly rounded and in threads: it gets each piece of the
file under a header of its own. It stops reading a line where a number ends, so that ``1,5`` would pass for 1:
`_count_entries` therefore scans every byte first. Pieces that are unusual (comments between the entries, ``+1``) or
that SciPy refuses are read again line by line in Python, which also states what is wrong with a line.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, cast

import numpy as np
import scipy.io
import scipy.sparse as sp

from spdist.errors import MatrixError, one_line
from spdist.foundation.units import counted
from spdist.kernels.cpu.numba_compile import kept
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import IndexArray, ValueArray
from spdist.storage.external_sort import Entries
from spdist.storage.formats.source import Import
from spdist.storage.formats.text import TextFile

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
    """The header of a file.

    Attributes
    ----------
    name : str
        The file, in messages.
    dense : bool
        Whether the file lists all values by columns (``array``) instead of entries (``coordinate``).
    field, symmetry : str
    shape : (nrows, ncols)
    count : int
        Entries, or values of a dense file, that follow.
    lines : int
        Lines of the header.
    """

    name: str
    dense: bool
    field: str
    symmetry: str
    shape: tuple[int, int]
    count: int
    lines: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values; pattern entries are ones of float64, as in SciPy."""
        return FIELDS[self.field]

    @property
    def numbers(self) -> int:
        """Numbers on a line."""
        return (0 if self.dense else 2) + {"pattern": 0, "complex": 2}.get(self.field, 1)

    def error(self, line: int, what: str) -> MatrixError:
        """Return an error that names a line and says what is wrong with it."""
        return MatrixError(f"{self.name}, line {line:,}: {what}")


# -- the file ----------------------------------------------------------------------------------------------------------


def import_text(job: Import) -> None:
    """Import Matrix Market text, compressed if the name ends in .gz or .bz2.

    Parameters
    ----------
    job : Import

    Raises
    ------
    MatrixError
        If it is damaged, or claims more entries than a file of its size can hold; names the line.
    """
    text = TextFile(job.source)
    header = read_header(text, job.path)
    shape = job.shape(header.shape)
    room = job.source.inflated if text.packing else job.source.size
    if header.count * 2 * header.numbers > room:  # a digit and a separator for each number
        raise header.error(
            header.lines,
            f"{header.count:,} entries do not fit into a file of {job.source.size:,} bytes; correct their number, or "
            f"get the file again",
        )
    expected = header.count if header.symmetry == "general" else 2 * header.count
    job.sort(read_entries(text, header), shape, header.dtype, expected)


# -- the header --------------------------------------------------------------------------------------------------------


def read_header(file: Text, name: str) -> Header:
    r"""Read the banner, the comments and the size line.

    Parameters
    ----------
    file : binary file
        At its start; afterwards at the first entry.
    name : str
        What messages call the file.

    Returns
    -------
    Header

    Raises
    ------
    MatrixError
        Names the file and the line.

    Examples
    --------
    >>> read_header(io.BytesIO(b"%%MatrixMarket matrix coordinate real general\n2 3 1\n1 1 0.5\n"), "a.mtx").shape
    (2, 3)
    """
    words = file.readline(MAX_LINE).decode("latin-1").lower().split()
    if len(words) != 5 or words[0].lstrip("%") != "matrixmarket" or words[1] != "matrix":
        raise MatrixError(
            f"{name}, line 1: not a Matrix Market file; "
            f"its first line is like '%%MatrixMarket matrix coordinate real general'"
        )
    _, _, layout, field, symmetry = words
    for word, known in ((layout, ("coordinate", "array")), (field, tuple(FIELDS)), (symmetry, SYMMETRIES)):
        if word not in known:
            raise MatrixError(f"{name}, line 1: '{one_line(word, 40)}' is none of {', '.join(known)}")
    if field == "pattern" and (layout == "array" or symmetry in ("skew-symmetric", "hermitian")):
        raise MatrixError(f"{name}, line 1: a pattern cannot be '{layout} {symmetry}'")
    line, text = 1, b"%"
    while not text.strip() or text.lstrip().startswith(b"%"):
        line, text = line + 1, file.readline(MAX_LINE)
        if not text:
            raise MatrixError(f"{name}, line {line:,}: the file ends before the line with the sizes")
        if line > MAX_IDLE_LINES:
            raise _too_idle(name)
    return _read_sizes(Header(name, layout == "array", field, symmetry, (0, 0), 0, line), text)


def _read_sizes(header: Header, text: bytes) -> Header:
    words = text.split()
    expected = ["rows", "columns"] if header.dense else ["rows", "columns", "entries"]
    if len(words) != len(expected) or not all(map(_is_whole, words)):
        raise header.error(header.lines, f"expected the numbers of {', '.join(expected)}, got '{_excerpt(text)}'")
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


def read_entries(file: Text, header: Header, text_bytes: int = TEXT_BYTES) -> Iterator[Entries]:
    """Yield the entries after the header in file order, each followed by its mirror image if the matrix is symmetric.

    Zeros are kept in ``coordinate`` files and dropped from ``array`` files.

    Parameters
    ----------
    file : binary file
        After the header.
    header : Header
    text_bytes : int
        Bytes of text to read at a time.

    Yields
    ------
    Entries
        Of one piece of text; rows and columns count from 0.

    Raises
    ------
    MatrixError
        If a word is no number, an index is out of range, or there are more or fewer entries than the header announces;
        names the file and the line.
    """
    done, line, idle = 0, header.lines + 1, header.lines
    for text in _pieces(file, header, text_bytes):
        piece = _parse(text, header, line)
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
        yield _mirror(piece, header.symmetry)
    if done < header.count:
        raise header.error(
            line - 1, f"the file ends after {done:,} of {counted(header.count, 'entry')}; is it truncated?"
        )


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


def _parse(text: bytes, header: Header, line: int) -> Entries:
    """Convert complete lines of text, of which the first has number `line`."""
    if b"%" in text:
        lines = text.split(b"\n")
        text = b"\n".join(b"" if each.lstrip().startswith(b"%") else each for each in lines)
    table = _INTEGERS if header.dtype.kind in "iu" or header.field == "pattern" else _REALS
    count = _count_entries(np.frombuffer(text, np.uint8), table, header.numbers)
    if count == 0:
        return _parse_lines([], header, line)
    if count > 0:
        try:
            return _convert(text, header, count)
        except (ValueError, OverflowError):
            pass  # reading line by line tells what is wrong
    return _parse_lines(text.split(b"\n"), header, line)


def _convert(text: bytes, header: Header, count: int) -> Entries:
    """Convert `count` lines with SciPy."""
    layout, (nrows, ncols) = ("array", (count, 1)) if header.dense else ("coordinate", header.shape)
    size = f"{nrows} {ncols}" if header.dense else f"{nrows} {ncols} {count}"
    top = f"%%MatrixMarket matrix {layout} {header.field} general\n{size}\n"
    matrix = cast(Any, scipy.io.mmread(io.BytesIO(top.encode() + text)))
    if header.dense:
        nowhere = np.empty(count, np.int64)
        return Entries(nowhere, nowhere, matrix[:, 0])
    return Entries(matrix.row, matrix.col, matrix.data)


def _parse_lines(lines: list[bytes], header: Header, line: int) -> Entries:
    """Convert lines one by one: slow, accepts all that float() accepts, and names the line that is wrong."""
    positions, values = [], []
    for number, text in enumerate(lines, line):
        words = text.split()
        if not words:
            continue
        if len(words) != header.numbers:
            raise header.error(number, f"expected {header.numbers} numbers, got '{_excerpt(text)}'")
        positions.append((0, 0) if header.dense else _position_of(words, header, number))
        values.append(_value_of(words[0 if header.dense else 2 :], header, number))
    rows, columns = np.array(positions, np.int64).reshape(-1, 2).T
    return Entries(rows, columns, np.array(values, header.dtype))


def _position_of(words: list[bytes], header: Header, number: int) -> tuple[int, int]:
    """Return the 0-based row and column."""
    position = []
    for word, limit, what in zip(words, header.shape, ("row", "column"), strict=False):
        digits = word.removeprefix(b"+")
        if not _is_whole(digits.removeprefix(b"-")):
            raise header.error(number, f"'{_excerpt(word)}' is not a {what} number")
        if not 1 <= int(digits) <= limit:
            raise header.error(number, f"{what} {int(digits):,} is outside 1 to {limit:,} (indices are 1-based)")
        position.append(int(digits) - 1)
    return position[0], position[1]


def _value_of(words: list[bytes], header: Header, number: int) -> complex:
    """Return the value that the words after the indices spell."""
    if header.field == "pattern":
        return 1.0
    kind = header.dtype.kind
    try:
        if any(b"_" in word for word in words):
            raise ValueError
        parts = [int(word) if kind in "iu" else float(word) for word in words]
    except ValueError:
        raise header.error(number, f"'{_excerpt(b' '.join(words))}' is not a number of type {header.field}") from None
    if kind in "iu" and not np.iinfo(header.dtype).min <= parts[0] <= np.iinfo(header.dtype).max:
        raise header.error(number, f"{parts[0]:,} does not fit {header.dtype}; write the values as 'real'")
    return complex(*parts) if kind == "c" else parts[0]


def _locate(values: ValueArray, done: int, header: Header) -> Entries:
    """Return values of an ``array`` file, the first of which has number `done`, with their rows and columns."""
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


def _is_whole(word: bytes) -> bool:
    """Whether `word` is digits only, and not so many that Python refuses to convert them."""
    return word.isdigit() and len(word) < 100


def _excerpt(text: bytes) -> str:
    return one_line(text[:2000].strip().decode("latin-1"), 40)


# -- the grammar of a number -------------------------------------------------------------------------------------------

_SPACE, _SIGN, _INT, _DOT, _FRACTION, _E, _E_SIGN, _EXPONENT, _BAD = range(9)
_DIGITS = "0123456789"


def _grammar(edges: list[tuple[int, str, int]], accepting: set[int], words: tuple[str, ...]) -> IndexArray:
    """Return the transition table [state, byte] of an automaton that reads numbers separated by spaces."""
    table = np.full((_BAD + 1 + sum(map(len, words)), 256), _BAD, np.uint8)
    for state, characters, to in edges:
        table[state, _codes(characters)] = to
    fresh = _BAD + 1
    for word in words:
        states = [_SPACE, _SIGN]
        for letter in word:
            to = int(table[states[0], ord(letter)])
            if to == _BAD:
                to, fresh = fresh, fresh + 1
            for state in states:
                table[state, _codes(letter + letter.upper())] = to
            states = [to]
        accepting = accepting | set(states)
    for state in (_SPACE, *accepting):
        table[state, _codes(" \t\r\n")] = _SPACE
    return table


def _codes(characters: str) -> list[int]:
    return [ord(character) for character in characters]


_WHOLE = [(_SPACE, "-", _SIGN), (_SPACE, _DIGITS, _INT), (_SIGN, _DIGITS, _INT), (_INT, _DIGITS, _INT)]
_DECIMAL = [
    (_SPACE, ".", _DOT), (_SIGN, ".", _DOT), (_INT, ".", _FRACTION), (_DOT, _DIGITS, _FRACTION),
    (_FRACTION, _DIGITS, _FRACTION), (_INT, "eE", _E), (_FRACTION, "eE", _E), (_E, "+-", _E_SIGN),
    (_E, _DIGITS, _EXPONENT), (_E_SIGN, _DIGITS, _EXPONENT), (_EXPONENT, _DIGITS, _EXPONENT),
]  # fmt: skip
_INTEGERS = _grammar(_WHOLE, {_INT}, ())
_REALS = _grammar(_WHOLE + _DECIMAL, {_INT, _FRACTION, _EXPONENT}, ("nan", "inf", "infinity"))


@functools.partial(kept, nogil=True)
def _count_entries(text: IndexArray, table: IndexArray, numbers: int) -> int:
    """Count the lines that hold `numbers` numbers; -1 if any other line is not blank."""
    state, found, count = 0, 0, 0
    for byte in text:
        before = state
        state = table[before, byte]
        if state == _BAD:
            return -1
        if before == _SPACE and state != _SPACE:
            found += 1
        if byte == 10:
            if found == numbers:
                count += 1
            elif found != 0:
                return -1
            found = 0
    return count


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

    Parameters
    ----------
    file : binary file
        At its start.
    shape : (nrows, ncols)
    nnz : int
        Entries that `write_rows` will write.
    dtype : dtype
        Of the values.

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
    """Write the entries of a row block so that its values read back exactly.

    Parameters
    ----------
    file : binary file
    block : CSR
    first_row : int
        The matrix row of the block's first row.
    nrows : int
        Rows of the matrix.
    """
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
