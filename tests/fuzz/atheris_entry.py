"""Guided by coverage: ``pip install atheris``, then ``python -m tests.fuzz.atheris_entry .npz FOLDER``.

The first argument is the ending of the files that are made, the second a folder for those that are kept. Only errors of
spdist's own may come; any other ends the run and names the file.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

from tests.fuzz.seeds import seeds

INSTRUMENTED = ["spdist.storage.formats", "spdist.storage.external_sort", "zipfile", "gzip"]
NUMBA = ["spdist.storage.formats.text_numbers"]  # Numba compiles no instrumented function

with atheris.instrument_imports(include=INSTRUMENTED, exclude=NUMBA):
    from spdist.errors import SpdistError
    from spdist.storage.import_export import import_matrix


def main() -> None:
    """Write the seeds into the folder, then fuzz."""
    ending, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(exist_ok=True)
    for name, raw in seeds().items():
        if name.endswith(ending):
            (folder / name).write_bytes(raw)

    def one(raw: bytes) -> None:
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / f"a{ending}"
            path.write_bytes(raw)
            try:
                import_matrix(path, Path(place) / "out.zarr")
            except SpdistError:
                return

    atheris.Setup([sys.argv[0], str(folder), *sys.argv[3:]], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
