"""Kernels that were compiled before spdist was installed: one archive for each architecture of GPUs.

`make kernels` writes the archives; a checkout has none, and compiles every kernel on first use. An archive is a zip of
cubins and an index, a JSON object: ``cuda_version``, of the compiler; ``files``, the digest of each .cu file;
``kernels``, by .cu file and name expression the member with the kernel and its name there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

logger = logging.getLogger("spdist")

FOLDER = Path(__file__).parent.parent / "shipped"
"""Where the archives are."""
INDEX = "index.json"


def archive_path(architecture: str) -> Path:
    """Return where the archive of an architecture is, such as ``"sm_90"``."""
    return FOLDER / f"{architecture}.zip"


def source_digest(source: bytes, options: Iterable[str]) -> str:
    """Return the digest by which a compiled .cu file is known to be of its source; folders of headers do not count."""
    words = [option.encode() for option in options if not option.startswith("-I")]
    return hashlib.sha256(b"\0".join([source, *words])).hexdigest()[:32]


class Archive:
    """The kernels of one architecture.

    Raises `OSError` if there is no such archive, and `ValueError` or `KeyError` if it is damaged.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._zip = zipfile.ZipFile(path)
            index = json.loads(self._zip.read(INDEX))
        except zipfile.BadZipFile as error:
            raise ValueError(str(error)) from None
        self.cuda: int = index["cuda_version"]  # as the driver counts versions: 13000 is 13.0
        self._digests: dict[str, str] = index["files"]
        self._kernels: dict[str, dict[str, tuple[str, str]]] = index["kernels"]

    def find(self, file: str, digest: str, names: Iterable[str]) -> dict[str, tuple[str, str]] | None:
        """Return the member and the name in it of each kernel; None if one is missing, or the file is another one."""
        if self._digests.get(file) != digest:
            return None
        kernels = self._kernels[file]
        try:
            return {name: (kernels[name][0], kernels[name][1]) for name in names}
        except KeyError:
            return None

    def read(self, member: str) -> bytes:
        """Return a cubin."""
        return self._zip.read(member)


@functools.cache
def archive_for(device: int) -> Archive | None:
    """Return the archive whose kernels run on a device: of its architecture, or of an earlier one of the generation."""
    import cupy

    capability = int(cupy.cuda.Device(device).compute_capability)
    for one in range(capability, capability // 10 * 10 - 1, -1):
        with contextlib.suppress(OSError):
            path = archive_path(f"sm_{one}")
            try:
                found = Archive(path)
            except (ValueError, KeyError) as error:
                logger.warning("%s is damaged (%s): kernels are compiled instead", path, error)
                return None
            return found if cupy.cuda.runtime.driverGetVersion() // 1000 >= found.cuda // 1000 else None
    return None


@functools.lru_cache(maxsize=256)
def loaded_cubin(device: int, member: str) -> Any:
    """Return a cubin of the archive of a device, the current one, as a module of CuPy."""
    import cupy

    archive, module = archive_for(device), cupy.cuda.function.Module()
    assert archive is not None
    module.load(archive.read(member))
    return module
