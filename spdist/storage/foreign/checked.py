"""Check a matrix from elsewhere once: the user's cache folder keeps a digest of each matrix that passed."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

from spdist.shown import without_secrets
from spdist.storage.checksums import digest_of
from spdist.storage.foreign import versions
from spdist.storage.matrix import StoredMatrix

VERSION = 1
"""Version of the check; after a new version every matrix is checked again."""


def cache_folder() -> Path:
    """Return the folder whose file names are the digests of matrices that passed the check."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "spdist" / "checked"


def checked(matrix: StoredMatrix) -> StoredMatrix:
    """Return the matrix, known to be canonical; read and check one that spdist did not write, unless it passed before.

    Raises `MatrixError` if offsets or columns are out of range, or rows are not sorted or have duplicates; names the
    row.
    Raises `CorruptError` if a Zarr chunk is missing or altered.
    """
    versions.note(matrix)
    if matrix.is_known_canonical:
        return matrix
    found = matrix.fingerprint()
    arrays = [array.metadata for array in (matrix.indptr, matrix.indices, matrix.data)]
    digest = digest_of(json.dumps([VERSION, found, arrays]).encode())
    if not _is_remembered(digest):
        matrix.check()
        _remember(digest, matrix.url)
    known = replace(matrix, known=found)
    versions.note(known)
    return known


def _is_remembered(digest: str) -> bool:
    try:
        return (cache_folder() / digest).exists()
    except (OSError, RuntimeError):  # no permission, or no home
        return False


def _remember(digest: str, url: str) -> None:
    """Keep the digest; if the folder cannot be written, the matrix is checked again next time."""
    with contextlib.suppress(OSError, RuntimeError):
        cache_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        (cache_folder() / digest).write_text(f"{without_secrets(url)}\n")
