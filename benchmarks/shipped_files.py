"""Import every matrix file that installed packages ship, and compare it with what the file's own reader makes of it.

``python benchmarks/shipped_files.py --packages FOLDER`` takes the site-packages of an environment with SciPy, scanpy,
anndata, PyAMG and others, or any folder; their own readers are those of the environment that runs this script. A file
is read as its own reader does ("equal"), or refused in one line, which the record keeps. Anything else is a defect: it
is printed, and the exit code is 1.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import record
import scipy.io
import scipy.sparse as sp

import spdist

ENDINGS = (".mat", ".mtx", ".mtx.gz", ".h5ad", ".npz", ".graph", ".h5", ".mci")


def sparse_in_mat(path: Path) -> dict[str, Any]:
    """Return the sparse variables of a MATLAB file, and the matrix of SuiteSparse's struct."""
    found = scipy.io.loadmat(path)
    if "Problem" in found and sp.issparse(matrix := found["Problem"]["A"][0, 0]):
        return {"": matrix}
    each = {name: value for name, value in found.items() if sp.issparse(value)}
    return {"": next(iter(each.values()))} if len(each) == 1 else each


def sparse_in_h5ad(path: Path) -> dict[str, Any]:
    """Return the sparse matrices of an AnnData file by their paths."""
    import anndata
    import h5py

    data = anndata.read_h5ad(path)
    members = {"X": data.X, **{f"layers/{name}": each for name, each in data.layers.items()}}
    members |= {f"obsp/{name}": each for name, each in data.obsp.items()}
    members |= {"raw/X": data.raw.X} if data.raw is not None else {}
    with h5py.File(path) as file:
        if "raw.X" in file:  # before AnnData 0.7
            places = {"raw/X": "raw.X", **{f"obsp/{name}": f"uns/neighbors/{name}" for name in data.obsp}}
            members = {places.get(name, name): each for name, each in members.items()}
    return {name: each for name, each in members.items() if sp.issparse(each)}


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    ".mat": sparse_in_mat,
    ".mtx": lambda path: {"": scipy.io.mmread(path)},
    ".npz": lambda path: {"": sp.load_npz(path)},
    ".h5ad": sparse_in_h5ad,
}
"""Readers of each ending: the sparse matrices of a file by what follows ``::``."""


def own_matrices(path: Path) -> dict[str, Any]:
    """Return the sparse matrices that a file's own reader finds; nothing if it cannot read the file."""
    reader = READERS.get(Path(path.name.removesuffix(".gz")).suffix)
    if reader is None:
        return {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return reader(path)
    except Exception:  # the libraries raise nearly every type that there is
        return {}


def compare(path: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield a verdict and its line for each matrix in a file, or for the file."""
    for inner, expected in (own_matrices(path) or {"": None}).items():
        source = f"{path}::{inner}" if inner else str(path)
        try:
            got = spdist.import_matrix(source, folder / "m.zarr", overwrite=True).to_scipy()
        except spdist.SpdistError as error:
            verdict = "refused, though read by its own reader" if expected is not None else "refused"
            yield (verdict, str(error)) if "\n" not in str(error) else ("several lines", str(error))
        except Exception as error:  # what must not be
            yield "crash", f"{source}: {type(error).__name__}: {error}"
        else:
            yield (verdict_of(got, expected), source)


def verdict_of(got: Any, expected: Any) -> str:
    """Return whether a matrix is what its own reader made of it."""
    if expected is None:
        return "read, though not by its own reader"
    wanted = sp.csr_array(expected)
    wanted.sum_duplicates()
    same = got.shape == wanted.shape and np.array_equal(got.toarray(), wanted.toarray(), equal_nan=True)
    return "equal" if same else "WRONG"


def main() -> None:
    """Compare all files, print what is not equal, and write a record."""
    parser = record.parser(__doc__ or "")
    parser.add_argument("--packages", type=Path, nargs="+", help="folders, by default where SciPy is installed")
    args = parser.parse_args()
    logging.getLogger("spdist").setLevel(logging.ERROR)
    roots = args.packages or [Path(scipy.__file__).parent.parent]
    files = sorted(path for root in roots for path in root.rglob("*") if path.is_file() and path.name.endswith(ENDINGS))
    files = files[::40] if args.quick else files
    verdicts: Counter[str] = Counter()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for path in files:
            for verdict, line in compare(path, Path(folder)):
                verdicts[verdict] += 1
                rows.append({"file": path.name, "verdict": verdict, "line": line.replace(str(path), path.name)})
                if verdict not in ("equal", "refused"):
                    print(f"{verdict:12} {rows[-1]['line'][:230]}")
    print("\n".join(f"{count:5} {verdict}" for verdict, count in verdicts.most_common()))
    record.write({"benchmark": "shipped_files", "verdicts": dict(verdicts), "files": rows}, args.out)
    if set(verdicts) - {"equal", "refused"}:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
