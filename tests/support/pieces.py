"""Files read and written in small pieces, so that small matrices take the paths of large ones."""

from __future__ import annotations

import pytest

from spdist.storage import import_export
from spdist.storage.formats import compressed_rows, dense_rows, npz, petsc


def take_pieces(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    """Let readers and writers of files take `entries` entries at a time."""
    for module in (compressed_rows, dense_rows, npz, petsc, import_export):
        monkeypatch.setattr(module, "ENTRIES", entries)
