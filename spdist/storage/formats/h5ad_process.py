"""A process of its own that reads one HDF5 file: damaged files crash, hang or blow up the HDF5 library itself.

Run as a script by `spdist.storage.formats.h5ad`, so that it imports nothing of spdist. It gets the open file as a
descriptor, the path of the matrix in it, and the data frames, perhaps empty, that name its rows and columns. It writes
one line of JSON that describes the matrix. Then it answers each line ``NAME START STOP`` on its standard input with a
line of JSON and the bytes that this line announces: numbers of an array, or names of ``rows`` or ``columns`` as lines
of text. It ends with its standard input. An error is a line of JSON too: ``{"error": ...}``.

Nothing outside the file is read: external links, external storage and virtual datasets are refused.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

CPU_SECONDS = 2
"""Seconds of CPU time that one answer may take; the system ends the process after that."""

GROWTH_BYTES = 512 << 20
"""Bytes by which the process may grow."""

CHUNK_BYTES = 64 << 20
"""Bytes of the largest HDF5 chunk that is read; it is decoded whole."""

ATTRIBUTE_BYTES = 4096
"""Bytes of the longest attribute that is read."""

SEARCHED = 10_000
"""Objects of a file among which sparse matrices are looked for."""

NAMES = ("indptr", "indices", "data")


class RefusedError(Exception):
    """Why a file is not read, as the message says it after the file's name."""


def limit_memory() -> None:
    """Let the process grow by `GROWTH_BYTES` at most, where the system says how large it is."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + GROWTH_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):
        return


def limit_time() -> None:
    """Let the process end if it computes for longer than `CPU_SECONDS` from now on."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)


def member(h5py: Any, group: Any, name: str, shown: str) -> Any:
    """Return a member of a group that lies in this file; links to other places are refused."""
    link = group.get(name, getlink=True) if isinstance(group, h5py.Group) else None
    if link is None:
        return None
    if not isinstance(link, h5py.HardLink):
        raise RefusedError(f"'{shown}' is a link to another place, which is not followed; store the data itself there")
    return group[name]


def attribute(item: Any, name: str) -> Any:
    """Return a short attribute; None if there is none."""
    if name not in item.attrs:
        return None
    found = item.attrs.get_id(name)
    if found.get_storage_size() > ATTRIBUTE_BYTES:
        raise RefusedError(f"the attribute '{name}' is too long")
    return item.attrs[name]


def kind_of(item: Any) -> str:
    """Return how AnnData says that a group or dataset is encoded."""
    kind = attribute(item, "encoding-type")
    kind = attribute(item, "h5sparse_format") if kind is None else kind
    kind = kind.decode("utf-8", "replace") if isinstance(kind, bytes) else kind
    return kind if isinstance(kind, str) else ""


def sparse_names(h5py: Any, file: Any) -> str:
    """Return the paths of the sparse matrices in a file."""
    names: list[str] = []
    seen = 0

    def note(name: str, item: Any) -> bool | None:
        nonlocal seen
        seen += 1
        if isinstance(item, h5py.Group) and kind_of(item) in ("csr_matrix", "csc_matrix"):
            names.append(name)
        return True if seen >= SEARCHED or len(names) >= 20 else None

    file.visititems(note)
    return ", ".join(names) or "none"


def check_dataset(h5py: Any, name: str, dataset: Any) -> None:
    """Refuse a dataset that is none, lies outside the file, or is cut into huge chunks."""
    if not isinstance(dataset, h5py.Dataset) or dataset.shape is None or len(dataset.shape) != 1:
        raise RefusedError(f"there is no array '{name}' of one dimension")
    if dataset.id.get_create_plist().get_external_count() or dataset.is_virtual:
        raise RefusedError(f"array '{name}' lies in other files, which are not read; copy it into this one")
    if dataset.chunks and dataset.chunks[0] * dataset.dtype.itemsize > CHUNK_BYTES:
        raise RefusedError(
            f"array '{name}' has HDF5 chunks of {dataset.chunks[0]:,} elements; write it with shorter ones"
        )


def find(h5py: Any, file: Any, inner: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what describes the matrix at a path, and its datasets."""
    item = file
    for part in filter(None, inner.split("/")):
        item = member(h5py, item, part, inner)
    kind = "" if item is None else kind_of(item)
    if not isinstance(item, h5py.Group) or kind not in ("csr_matrix", "csc_matrix", "csr", "csc"):
        what = "there is no such matrix" if item is None else f"it is stored as {kind or 'a dense array'}, not sparse"
        raise RefusedError(f"{what}; sparse in this file: {sparse_names(h5py, file)}")
    shape = attribute(item, "shape")
    shape = attribute(item, "h5sparse_shape") if shape is None else shape
    datasets = {name: member(h5py, item, name, name) for name in NAMES}
    for name, dataset in datasets.items():
        check_dataset(h5py, name, dataset)
    described = {name: [dataset.shape[0], dataset.dtype.str] for name, dataset in datasets.items()}
    given: Any = getattr(shape, "tolist", list)()
    numbers = given if isinstance(given, list) and all(type(each) is int for each in given) else []
    return {"rows": kind.startswith("csr"), "shape": numbers[:9], "arrays": described}, datasets


def find_names(h5py: Any, file: Any, frames: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the lengths and the datasets of the names in the data frames of rows and columns; None for none."""
    axes = zip(("rows", "columns"), frames, strict=True)
    datasets = {axis: frame_index(h5py, file, frame) if frame else None for axis, frame in axes}
    return {axis: None if found is None else found.shape[0] for axis, found in datasets.items()}, datasets


def frame_index(h5py: Any, file: Any, name: str) -> Any:
    """Return the dataset of a data frame's index; None if it is no array of strings."""
    frame = member(h5py, file, name, name)
    index = attribute(frame, "_index") if isinstance(frame, h5py.Group) else None
    index = index.decode("utf-8", "replace") if isinstance(index, bytes) else index
    if not isinstance(index, str) or "/" in index:
        return None
    found = member(h5py, frame, index, f"{name}/{index}")
    if isinstance(found, h5py.Group):  # strings some of which may be missing
        found = member(h5py, found, "values", f"{name}/{index}/values")
    if not isinstance(found, h5py.Dataset) or h5py.check_string_dtype(found.dtype) is None:
        return None
    check_dataset(h5py, f"{name}/{index}", found)
    return found


def text_of(names: Any) -> bytes:
    """Return names as text, in which a line break follows each."""
    text = b"".join(name + b"\n" for name in names.tolist())
    if text.count(b"\n") != len(names):
        raise RefusedError("a name of a row or a column has a line break; names must have none")
    return text


def say(content: dict[str, Any], raw: bytes = b"") -> None:
    """Write a line of JSON, and the bytes that it announces."""
    sys.stdout.buffer.write(json.dumps(content).encode() + b"\n")
    sys.stdout.buffer.write(raw)
    sys.stdout.buffer.flush()


def serve(h5py: Any, descriptor: int, inner: str, frames: list[str]) -> None:
    """Describe the matrix, then answer every request."""
    with os.fdopen(descriptor, "rb") as raw, h5py.File(raw, "r") as file:
        description, datasets = find(h5py, file, inner)
        lengths, names = find_names(h5py, file, frames)
        say(description | {"names": lengths})
        datasets |= names
        for line in sys.stdin:
            limit_time()
            name, start, stop = line.split()
            part = datasets[name][int(start) : int(stop)]
            found = part.tobytes() if name in NAMES else text_of(part)
            say({"bytes": len(found)}, found)


def main() -> None:
    """Serve the file of descriptor ``argv[1]``, the matrix ``argv[2]`` and its data frames; say what went wrong."""
    import h5py

    limit_memory()
    limit_time()
    try:
        serve(h5py, int(sys.argv[1]), sys.argv[2], sys.argv[3:5])
    except RefusedError as error:
        say({"error": str(error)})
    except BrokenPipeError:  # whoever asked is gone
        os._exit(1)
    except Exception as error:  # h5py raises nearly every type that there is
        say({"error": f"damaged or truncated ({type(error).__name__}: {error}); get the file again"})
    sys.stdout.flush()
    os._exit(0)  # the library may crash once more while it closes a damaged file


if __name__ == "__main__":
    main()
