"""Read a folder of 10x Genomics' Cell Ranger or of STARsolo: a matrix, and the names of its genes and cells.

The matrix, in Matrix Market, is genes x cells. By default it is read as cells x genes, as scanpy does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from spdist.errors import InputError, MatrixError, one_line
from spdist.storage.external_sort import Entries
from spdist.storage.formats.matrix_market import begin_reading
from spdist.storage.formats.opening import opened_source
from spdist.storage.formats.source import Import, Source
from spdist.storage.formats.text import PACKINGS, TextFile
from spdist.storage.names.names import AxisNames, Names, wrong_number
from spdist.stores.registry import at

MATRIX = "matrix.mtx"
BARCODES = "barcodes.tsv"
FEATURES = ("features.tsv", "genes.tsv")
"""Names of the file of genes: of Cell Ranger 3, and of Cell Ranger 2."""

LINE_BYTES = 1 << 16
"""Bytes of the longest line of a file of names."""

PIECE_NAMES = 1 << 14
"""Names that are read at a time."""

MOST_TYPES = 8
"""Types of features that are imported apart."""


def holds_cells(path: str) -> bool:
    """Whether a path is a local folder with a matrix of 10x Genomics."""
    return at(path).is_folder() and bool(_find(path, MATRIX))


def import_folder(job: Import) -> None:
    """Import a folder with the names of cells and genes.

    `job`: with `orient` of "genes-by-cells", the matrix stays as it is in the file.
    Raises `InputError` if the file of barcodes or of genes is missing.
    Raises `MatrixError` if there are more or fewer names than genes or cells, or a file is damaged; names the file.
    """
    paths = {}
    for what, known in (("matrix", (MATRIX,)), ("barcodes", (BARCODES,)), ("features", FEATURES)):
        paths[what] = next(filter(None, (_find(job.path, name) for name in known)), "")
        if not paths[what]:
            raise InputError(
                f"{job.path}: no {' or '.join(known)}, compressed or not, beside {paths['matrix']}; get it, or import "
                f"{paths['matrix']} for a matrix without names"
            )
    by_cells = job.options.orient != "genes-by-cells"
    with opened_source(paths["matrix"]) as file:
        of_matrix = replace(job, source=Source.measured(file, paths["matrix"]))
        header, entries = begin_reading(of_matrix)
        features = _NameFile(paths["features"], _symbol, header.shape[0])
        barcodes = _NameFile(paths["barcodes"], _first, header.shape[1])
        features.check()
        barcodes.check()
        job.reading.found.append(_facts(barcodes, features, by_cells))
        job.reading.left_out += ["identifiers of genes"] * features.has_more
        names = AxisNames(features.names(), barcodes.names())
        oriented = replace(of_matrix, names=names.T if by_cells else names)
        shape = oriented.shape(header.shape[::-1] if by_cells else header.shape)
        oriented.sort(map(_transposed, entries) if by_cells else entries, shape, header.dtype, header.most)


def _find(folder: str, name: str) -> str:
    """Return the path of a file, compressed or not; empty if it is missing."""
    for ending in ("", *PACKINGS):
        path = at(f"{folder}/{name}{ending}")
        if path.is_file():
            return str(path)
    return ""


def _transposed(entries: Entries) -> Entries:
    return Entries(entries.columns, entries.rows, entries.values)


def _facts(barcodes: _NameFile, features: _NameFile, by_cells: bool) -> str:
    """Return in words what rows and columns are."""
    cells, genes = f"{barcodes.count:,} barcodes", f"{features.count:,} genes of {features.file_name}"
    found = f"cells x genes: {cells} are rows, {genes} columns"
    if not by_cells:
        found = f"genes x cells: {genes} are rows, {cells} columns"
    return found + (f"; features of types {', '.join(features.types)}" if len(features.types) > 1 else "")


# -- names -------------------------------------------------------------------------------------------------------------


@dataclass
class _NameFile:
    """A file of names, one a line, read anew each time.

    `types`: types of features that were met, in the third field of a line.
    `has_more`: whether lines have several fields.
    """

    path: str
    name_in: Callable[[list[bytes]], bytes]  # returns the name in the fields of a line
    count: int  # names that there must be

    def __post_init__(self) -> None:
        self.types: list[str] = []
        self.has_more = False

    @property
    def file_name(self) -> str:
        """The name of the file without its folder."""
        return self.path.rpartition("/")[2]

    def names(self) -> Names:
        """Return the names, unread."""
        return Names(self.path, self.count, self._pieces)

    def check(self) -> None:
        """Read all lines once; refuse more or fewer than there must be."""
        found = 0
        for fields in self._lines():
            found += 1
            self.has_more |= len(fields) > 1
            if len(fields) > 2 and len(self.types) < MOST_TYPES:
                kind = one_line(fields[2].decode("utf-8", "replace"), 40)
                self.types += [kind] if kind not in self.types else []
        if found != self.count:
            raise wrong_number(self.path, found, self.count)

    def _pieces(self) -> Iterator[bytes]:
        """Yield the text of the names."""
        held: list[bytes] = []
        for fields in self._lines():
            held.append(self.name_in(fields) + b"\n")
            if len(held) == PIECE_NAMES:
                yield b"".join(held)
                held = []
        yield b"".join(held)

    def _lines(self) -> Iterator[list[bytes]]:
        """Yield the fields of each line that is not empty."""
        with opened_source(self.path) as file:
            text = TextFile(Source.measured(file, self.path))
            for number, raw in enumerate(iter(lambda: text.readline(LINE_BYTES), b""), 1):
                if len(raw) == LINE_BYTES:
                    raise MatrixError(f"{self.path}, line {number:,}: longer than {LINE_BYTES:,} bytes; it is no name")
                if raw.strip():
                    yield [_unquoted(each) for each in raw.rstrip(b"\n").split(b"\t")]


def _unquoted(field: bytes) -> bytes:
    """Return a field without the quotes around it, which R writes."""
    return field[1:-1] if len(field) > 2 and field[:1] == field[-1:] == b'"' else field


def _first(fields: list[bytes]) -> bytes:
    """Return the first field of a line: a barcode."""
    return fields[0]


def _symbol(fields: list[bytes]) -> bytes:
    """Return the second field of a line, a gene's symbol, or else its only field."""
    return b"".join(fields[1:2]) or fields[0]
