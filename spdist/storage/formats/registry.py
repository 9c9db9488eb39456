"""The formats of files that are imported: their endings, their readers, the options that each takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spdist.errors import InputError
from spdist.storage.formats.edges.edge_list import import_edges
from spdist.storage.formats.graphs.mci import import_mci
from spdist.storage.formats.graphs.metis import import_metis
from spdist.storage.formats.hdf5.reader import import_hdf5, import_mat
from spdist.storage.formats.matrix_market import import_text
from spdist.storage.formats.npz import import_npy, import_npz
from spdist.storage.formats.opening import STANDARD_INPUT, check_file
from spdist.storage.formats.petsc import import_petsc
from spdist.storage.formats.reading import ReadOptions
from spdist.storage.formats.source import Import
from spdist.storage.formats.tenx_folder import holds_cells, import_folder
from spdist.storage.formats.text import PACKINGS, packing_of
from spdist.storage.formats.zarr_groups import import_zarr, is_zarr
from spdist.stores.registry import at

EDGE_ENDINGS = (".abc", ".tsv", ".csv", ".txt", ".edges", ".edgelist")
"""Endings of lists of edges."""

EDGE_OPTIONS = frozenset({"names", "duplicates", "header", "columns", "separator", "quotes", "allow_nan"})
"""Options of lists of edges."""

MEANINGS = {
    "names": "names of vertices",
    "duplicates": "edges",
    "header": "header",
    "columns": "columns to choose from",
    "separator": "choice of separators",
    "quotes": "quoted fields",
    "allow_nan": "weights to refuse",
    "orient": "choice of orientation",
    "dense": "dense array",
}
"""What a file has that an option is about."""


ARCHIVES = (".zip", ".tar", ".tgz", *(f".tar{packing}" for packing in PACKINGS), ".7z", ".rar")
"""Endings of archives."""


@dataclass(frozen=True)
class Format:
    """A kind of file."""

    name: str  # with its article, as a sentence says it
    endings: tuple[str, ...]  # of names of files; the first, without its dot, is the format's name for ``--format``
    read: Callable[[Import], None]  # imports one file: takes an `Import`
    takes: frozenset[str] = frozenset()  # fields of `ReadOptions` that mean something for it
    is_text: bool = False  # whether the file may be compressed whole (.gz, .bz2, .xz, .zst)
    # of a format that is a folder or a group and no file: whether a normalised path or URL is one
    holds: Callable[[str], bool] | None = None

    def check(self, options: ReadOptions, source: str) -> None:
        """Refuse options that mean nothing for this format.

        `source`: the file, for the message.
        """
        for name, value in options.changed().items():
            if name not in self.takes:
                those = " or ".join(each.name for each in FORMATS if name in each.takes)
                raise InputError(
                    f"{name}={value!r}: {source} is {self.name} and has no {MEANINGS[name]}, as {those} may; "
                    f"leave it out"
                )


FORMATS = (
    Format("a Matrix Market file", (".mtx",), import_text, is_text=True),
    Format("a file of scipy.sparse.save_npz", (".npz",), import_npz),
    Format("an array of numpy.save", (".npy",), import_npy, frozenset({"dense"})),
    Format("an AnnData file", (".h5ad", ".h5mu"), import_hdf5, frozenset({"dense"})),
    Format("a MATLAB file", (".mat",), import_mat, frozenset({"dense"})),
    Format("an HDF5 file", (".h5", ".hdf5"), import_hdf5, frozenset({"dense", "orient"})),
    Format("Zarr", (".zarr",), import_zarr, frozenset({"dense"}), holds=is_zarr),
    Format("a list of edges", EDGE_ENDINGS, import_edges, EDGE_OPTIONS, is_text=True),
    Format("a matrix in mcl's native format", (".mci",), import_mci, is_text=True),
    Format("a graph of METIS", (".graph", ".metis"), import_metis, is_text=True),
    Format("a matrix of PETSc", (".petsc",), import_petsc, frozenset({"dense"})),
    Format("a folder of 10x Genomics", (), import_folder, frozenset({"orient"}), holds=holds_cells),
)
"""All formats."""


def ending_of(path: str, format: str | None) -> str:
    """Return the ending that says the format, without the ending of its compression.

    Examples
    --------
    >>> ending_of("/data/graph.csv.gz", None), ending_of("-", "abc")
    ('.csv', '.abc')
    """
    name = (path if format is None else f".{format.removeprefix('.')}").lower()
    name = name.removesuffix(packing_of(name))
    return next((ending for each in FORMATS for ending in each.endings if name.endswith(ending)), "")


def format_of(path: str, source: str, format: str | None = None) -> Format:
    """Return the format of a file.

    `path`: normalised path or URL, or - for standard input.
    `format`: an ending that the file should be read as, without its dot, whatever its name.
    """
    name = (path if format is None else f".{format.removeprefix('.')}").lower()
    packing = packing_of(name)
    if format is None and path != STANDARD_INPUT:
        for each in FORMATS:
            if each.holds is not None and each.holds(path):
                return each
    for each in FORMATS:
        if name.removesuffix(packing).endswith(each.endings):
            if path == STANDARD_INPUT and each.holds is not None:
                raise InputError(f"{each.name} is a folder, which standard input cannot be: name its path")
            if packing and not each.is_text:
                raise InputError(f"{source}: {each.name} is not read compressed as {packing}; unpack it first")
            return each
    if name.endswith(ARCHIVES):
        raise InputError(f"{source} is an archive of files; unpack it, and name one of them")
    known = ", ".join(ending for each in FORMATS for ending in each.endings)
    if format is not None:
        raise InputError(f"format={format!r} is not known; known are {known.replace('.', '')}")
    if path == STANDARD_INPUT:
        raise InputError(f"standard input has no name that says what it is: pass --format; known are {known}")
    if at(path).is_folder():
        kinds = " or ".join(each.name for each in FORMATS if each.holds is not None)
        raise InputError(
            f"{source} is a folder and not {kinds} (which has matrix.mtx or matrix.mtx.gz); name a file in it"
        )
    check_file(path)
    raise InputError(
        f"{source}: cannot tell the format from the name; known are {known}, of text also with {', '.join(PACKINGS)}; "
        f"or pass --format"
    )
