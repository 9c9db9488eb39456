"""Matrix Market as people write it: a reader in plain Python is the oracle, and SciPy's where it reads rightly."""

import bz2
import gzip
import io
import lzma
import re

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from spdist.errors import MatrixError
from spdist.storage.formats import matrix_market
from spdist.storage.formats.reading import Reading
from spdist.storage.formats.source import Source
from spdist.storage.formats.text import TextFile
from spdist.storage.import_export import import_matrix

TOP = "%%MatrixMarket matrix coordinate real general\n"
INTEGER, PATTERN, COMPLEX = (TOP.replace("real", field) for field in ("integer", "pattern", "complex"))


def read(raw: bytes, piece: int = 1 << 20) -> tuple[sp.coo_array, Reading]:
    """Read a file without storing it."""
    reading = Reading("a.mtx", "a Matrix Market file")
    text = TextFile(Source("a.mtx", io.BytesIO(raw), len(raw), ""))
    header = matrix_market.read_header(text, "a.mtx")
    parts = list(matrix_market.read_entries(text, header, piece, reading=reading))
    nothing = np.empty(0, np.int64)
    rows, columns = (np.concatenate([nothing, *(part[axis] for part in parts)]) for axis in (0, 1))
    values = np.concatenate([np.empty(0, header.dtype), *(part.values for part in parts)])
    return sp.coo_array((values, (rows, columns)), shape=header.shape), reading


def dense(raw: bytes | str) -> list:
    return read(raw if isinstance(raw, bytes) else raw.encode())[0].toarray().tolist()


# -- each oddity by itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (TOP[:-1] + " % written by X\n2 2 1\n1 2 3\n", [[0, 3], [0, 0]]),
        (TOP[:-1] + " row-major\n2 2 1\n1 2 3\n", [[0, 3], [0, 0]]),
        (TOP + "2 2 2 % sizes\n1 1 2 % diag\n2 2 3% 7\n", [[2, 0], [0, 3]]),
        (TOP + "2 2 2\n1 1 2 %\n%\n % 1 1 9\n2 2 3", [[2, 0], [0, 3]]),
        (INTEGER + "2 2 4\n1 1 1.0\n1 2 -2.\n2 1 1e3\n2 2 +4.50E+1\n", [[1, -2], [1000, 45]]),
        (INTEGER + f"1 2 2\n1 1 {(1 << 62) + 1}\n1 2 2.0\n", [[(1 << 62) + 1, 2]]),
        (TOP.replace("real", "unsigned-integer") + "1 2 2\n1 1 3.0\n1 2 2\n", [[3, 2]]),
        (INTEGER.replace("coordinate", "array") + "2 1\n1.0\n2\n", [[1], [2]]),
        (PATTERN + "2 2 2\n1 1 5\n2 2 0.5\n", [[1, 0], [0, 1]]),
        (PATTERN + "2 2 1\n1 2 7", [[0, 1], [0, 0]]),  # SciPy crashes
        (PATTERN + "2 2 2\n1 1\n2 2 0.5 2\n", [[1, 0], [0, 1]]),
        (TOP + "2 2 4\n1 1 2.5D+01\n1 2 3d0\n2 1 -1.D-1\n2 2 1D3\n", [[25, 3], [-0.1, 1000]]),
        (COMPLEX + "1 1 1\n1 1 1D1 2d-1\n", [[10 + 0.2j]]),
        (TOP.replace("coordinate", "array") + "1 1\n1.5d1\n", [[15]]),
        (TOP.replace("%%", "%").upper() + "  1   1 1 \n  1\t1   4  \n", [[4]]),
        (" " + TOP + "\n% one\n\n%two\n1 1 1\n1 1 4\n", [[4]]),
        (TOP.replace("\n", "\r") + "1 1 1\r1 1 4\r", [[4]]),
        (TOP.replace("\n", "\r\n") + "1 1 1\r\n1 1 4 % x\r\n", [[4]]),
        ("\ufeff" + TOP + "1 1 1\n1 1 4\n", [[4]]),
        (TOP.replace("general", "Symmetric") + "2 2 2\n1 2 1\n2 1 5\n", [[0, 6], [6, 0]]),
    ],
)
def test_files_as_people_write_them(text, want, monkeypatch):
    assert dense(text) == want
    for piece in (1, 7, 40):
        monkeypatch.setattr("spdist.storage.formats.text.READ_BYTES", piece)
        assert read(text.encode(), piece)[0].toarray().tolist() == want


def test_whole_numbers_stay_integers():
    assert read((INTEGER + "1 1 1\n1 1 1.0\n").encode())[0].dtype == np.int64


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (TOP + "2 2 1\n1 1.5 3\n", 3, "'1.5' is not a column number"),
        (PATTERN + "2 2 1\n1 1.5 3\n", 3, "'1.5' is not a column number"),
        (TOP + "2 2 1\n1.5 1 3\n", 3, "'1.5' is not a row number"),
        (TOP + "2 2 1\n1 1 1D\n", 3, "'1D' is not a number of type real"),
        (TOP + "2 2 1\n1 1 1.0+100\n", 3, r"'1\.0\+100' is not a number"),
        (TOP + "2 2 1\n1 1 % 5\n", 3, "expected 3 numbers"),
        (INTEGER + "2 2 2\n1 1 1\n1 1 1.5\n", 4, "'1.5' is not a number of type integer"),
        (INTEGER + "2 2 1\n1 1 1e300\n", 3, "'1e300' is not a number of type integer"),
        (INTEGER + "2 2 1\n1 1 9007199254740993.0\n", 3, "is not a number of type integer"),
        (INTEGER + "2 2 1\n1 1 nan\n", 3, "'nan' is not a number of type integer"),
        (TOP.replace("real", "unsigned-integer") + "2 2 1\n1 1 -1.0\n", 3, "does not fit uint64"),
        (PATTERN + "2 2 1\n1 1 x\n", 3, "'x' is not a number"),
        (PATTERN + "2 2 1\n1\n", 3, "expected 2 numbers"),
        (PATTERN + "2 2 1\n1 1 2 3 4\n", 3, "expected 2 numbers"),
        (TOP.replace("real general", "unsigned-integer skew-symmetric") + "1 1 0\n", 1, "cannot be 'coordinate skew"),
        ("%%MatrixMarket matrix coordinate real % general\n1 1 0\n", 1, "'%' is none of"),
        (TOP.replace("general", "symmetric") + "2 3 1\n1 2 1\n", 2, "a symmetric matrix must be square, not 2 x 3"),
    ],
)
def test_the_line_is_named(text, line, what):
    for piece in (1 << 20, 5):
        with pytest.raises(MatrixError, match=what) as caught:
            read(text.encode(), piece)
        assert f"a.mtx, line {line}: " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "found", "left_out"),
    [
        (TOP + "1 1 1\n1 1 1\n", "coordinate real general", []),
        (PATTERN + "2 2 2\n1 1\n1 2 5\n", "coordinate pattern general", ["values of a pattern"]),
        (
            TOP.replace("general", "symmetric") + "3 3 3\n1 1 1\n2 1 1\n3 1 1\n",
            "real symmetric, 2 entries mirrored",
            [],
        ),
        (
            TOP.replace("general", "symmetric") + "2 2 2\n1 2 1\n2 1 1\n",
            "2 entries mirrored from both sides of the diagonal, and added where they meet",
            [],
        ),
        (TOP.replace("coordinate", "array") + "1 1\n1\n", "array real general", []),
    ],
)
def test_what_was_found_is_said(text, found, left_out):
    _, reading = read(text.encode(), 9)
    assert reading.found[0].endswith(found)
    assert reading.left_out == left_out


@pytest.mark.parametrize(
    ("ending", "pack"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", zstandard.compress)],
)
def test_packed(tmp_path, ending, pack):
    (tmp_path / f"a.mtx{ending}").write_bytes(pack(("\ufeff" + TOP + "1 2 1\n1 2 2.5D+01 % 25\n").encode()))
    matrix = import_matrix(tmp_path / f"a.mtx{ending}", tmp_path / "a.zarr")
    assert matrix.rows(0, 1).to_scipy().toarray().tolist() == [[0, 25]]
    assert "coordinate real general" in matrix.facts["provenance"]["read"]


def test_exponents_of_fortran_are_not_read_line_by_line(monkeypatch):
    """Nor are comments behind entries, whole numbers with a point, or patterns with values."""
    monkeypatch.setattr(matrix_market, "_parse_lines", None)
    for top, line in ((TOP, "1 1 2.5D+01 % x"), (INTEGER, "1 1 1.0"), (PATTERN, "1 1 1.5"), (COMPLEX, "1 1 1d0 2D0")):
        read((top + "1 1 3\n" + 3 * (line + "\n")).encode())


# -- an oracle in plain Python -----------------------------------------------------------------------------------------

NUMBER = re.compile(r"[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|nan|inf|infinity)", re.IGNORECASE)


class WrongLineError(Exception):
    """Holds the number of a line."""


def oracle(text: str) -> tuple[tuple[int, int], dict[tuple[int, int], complex]]:
    """Read a file of coordinates; raise WrongLineError."""
    lines = re.split(r"\r\n|\r|\n", text.removeprefix("\ufeff"))
    if lines[-1] == "":
        lines.pop()
    words = lines[0].lower().split() if lines else []
    if len(words) < 5 or words[0].lstrip("%") != "matrixmarket" or words[1:3] != ["matrix", "coordinate"]:
        raise WrongLineError(1)
    field, symmetry = words[3:5]
    if field not in matrix_market.FIELDS or symmetry not in matrix_market.SYMMETRIES:
        raise WrongLineError(1)
    if (field == "pattern" and symmetry == "hermitian") or (field[0] in "pu" and symmetry == "skew-symmetric"):
        raise WrongLineError(1)
    sizes, entries, done = None, {}, 0
    for number, line in enumerate(lines[1:], 2):
        words = line.split("%")[0].split()
        if not words:
            continue
        try:
            if sizes is None:
                sizes = [int(word) for word in words if re.fullmatch(r"\d+", word)]
                if len(sizes) != 3 or len(words) != 3 or (symmetry != "general" and sizes[0] != sizes[1]):
                    raise ValueError
                continue
            place = tuple(int(word) - 1 for word in words[:2] if re.fullmatch(r"[+-]?\d+", word))
            if len(place) != 2 or not all(0 <= at < size for at, size in zip(place, sizes, strict=False)):
                raise ValueError
            value = value_of(words[2:], field)
        except ValueError:
            raise WrongLineError(number) from None
        done += 1
        if done > sizes[2]:
            raise WrongLineError(number)
        entries[place] = entries.get(place, 0) + value
        if place[0] != place[1] and symmetry != "general":
            image = -value if symmetry == "skew-symmetric" else np.conj(value) if symmetry == "hermitian" else value
            entries[place[::-1]] = entries.get(place[::-1], 0) + image
    if sizes is None or done < sizes[2]:
        raise WrongLineError(len(lines) + (sizes is None))
    return (sizes[0], sizes[1]), entries


def value_of(words: list[str], field: str) -> complex:
    """Return a value; raise ValueError."""
    if field == "pattern" and len(words) <= 2:
        words, field = words or ["1"], "pattern"
    elif len(words) != (2 if field == "complex" else 1):
        raise ValueError
    if "integer" in field:
        if "d" in words[0].lower() or (field[0] == "u" and words[0] != "-0" and words[0][:1] == "-"):
            raise ValueError
        if re.fullmatch(r"[+-]?\d+", words[0]):
            return int(words[0])
    parts = []
    for word in words:
        word = re.sub("[dD]", "e", word)
        if not NUMBER.fullmatch(word):
            raise ValueError
        parts.append(float(word))
    if "integer" in field:
        if not parts[0].is_integer():
            raise ValueError
        return int(parts[0])
    return complex(*parts) if field == "complex" else 1 if field == "pattern" else parts[0]


ENDS = st.sampled_from(["\n", "\n", "\n", "\r\n", "\r"])
COMMENTS = st.sampled_from(["", "", "", " % diag", "%", " % 1 2 3", "\t%%"])
SPACES = st.sampled_from(["", "", " ", "  ", "\t"])
EXPONENTS = st.sampled_from(["", "", "e3", "E-2", "D+01", "d0", "D-2", ".0", "."])
VALUES = st.builds(lambda value, exponent: f"{value}{exponent}", st.integers(-9, 99), EXPONENTS)
MUTANTS = ["", " ", "%", "\n", "\r", ".", "D", "e", "-", "+", ",", "1", "0", "x", "#", "\t", "1.5", "nan", "general"]


@st.composite
def files(draw) -> str:
    """Return a file of coordinates, most of them right, some with one or two places changed."""
    field = draw(st.sampled_from(list(matrix_market.FIELDS)))
    symmetry = draw(st.sampled_from(["general", "general", *matrix_market.SYMMETRIES]))
    nrows = draw(st.integers(1, 4))
    ncols = nrows if symmetry != "general" else draw(st.integers(1, 4))
    count = draw(st.integers(0, 5))
    end = draw(ENDS)
    lines = [f"%%MatrixMarket matrix coordinate {field} {symmetry}{draw(COMMENTS)}"]
    if draw(st.booleans()):
        lines[0] = lines[0].replace("%%M", "%M").upper()
    lines += draw(st.lists(st.sampled_from(["", "% comment", "%", "  "]), max_size=2))
    lines.append(f"{draw(SPACES)}{nrows} {ncols}  {count}{draw(COMMENTS)}")
    for _ in range(count):
        words = [str(draw(st.integers(1, nrows))), str(draw(st.integers(1, ncols)))]
        values = {"pattern": draw(st.sampled_from([0, 0, 1])), "complex": 2}.get(field, 1)
        words += [draw(VALUES) for _ in range(values)]
        lines.append(draw(SPACES) + (draw(SPACES) or " ").join(words) + draw(COMMENTS))
        lines += draw(st.lists(st.sampled_from(["", "% between", " %", "\t"]), max_size=1))
    text = draw(st.sampled_from(["", "", "\ufeff"])) + end.join(lines) + draw(st.sampled_from(["", end, end + end]))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(MUTANTS)) + text[at + draw(st.integers(0, 1)) :]
    return text


@settings(max_examples=250, deadline=None)
@given(text=files(), piece=st.sampled_from([1 << 20, 20]))
def test_files_and_mutants_are_read_as_by_the_oracle(text, piece):
    raw = text.encode()
    shape, entries, wrong = None, {}, 0
    try:
        shape, entries = oracle(text)
    except WrongLineError as error:
        wrong = error.args[0]
    if wrong:
        with pytest.raises(MatrixError) as caught:
            read(raw, piece)
        assert f"line {wrong}:" in str(caught.value)
        return
    got, _ = read(raw, piece)
    assert got.shape == shape
    summed = got.tocsr()
    summed.sum_duplicates()
    places = dict(
        zip(zip(*(axis.tolist() for axis in summed.tocoo().coords), strict=True), summed.data.tolist(), strict=True)
    )
    assert places.keys() == entries.keys()
    for place, value in entries.items():
        np.testing.assert_allclose(places[place], value, rtol=1e-15)
    compare_with_scipy(text, got)


def compare_with_scipy(text: str, got: sp.coo_array) -> None:
    """Compare with SciPy, where the file has nothing that SciPy misreads, and if SciPy reads it at all."""
    body = re.split(r"[\r\n]+", text, maxsplit=1)[-1]
    if re.search("[dD+.eE]", re.sub("%.*", "", body)) or "\r" in text or not text.endswith("\n"):
        return  # exponents; CR as the end of a line; without a last line feed SciPy reads beyond the end of the text
    try:
        want = scipy.io.mmread(io.BytesIO(text.encode()))
    except (ValueError, OverflowError):
        return
    np.testing.assert_array_equal(got.toarray(), want.toarray())
