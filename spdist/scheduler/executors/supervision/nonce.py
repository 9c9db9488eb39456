"""Small files next to C that show whether a worker and the client see one folder there."""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from typing import Any

import fsspec

from spdist.stores.registry import at

logger = logging.getLogger("spdist")

NONCE = ".spdist-nonce-"
"""How the names of the files begin."""
VISIBLE_SECONDS = 5.0
"""Seconds after which a file that another host wrote must be visible: a network file system may be late."""
POLL_SECONDS = 0.05
"""Seconds between two looks for a file."""


class NonceFolder:
    """The folder of a target, where each worker writes a file that the client reads and removes.

    The names begin with a digest of the target's name, so that the next run for this target finds what a killed run
    left, and no other run is disturbed.

    `target`: where C goes: a normalised path or a URL. For a URL in the memory of this process nothing is written.
    """

    def __init__(self, target: str) -> None:
        self.is_shared = not at(target).is_private
        self.target = target
        name = target.rstrip("/").rpartition("/")[2]
        self.prefix = f"{NONCE}{hashlib.blake2b(name.encode(), digest_size=6).hexdigest()}-"

    def _open(self) -> tuple[Any, str]:
        """Return the file system and the folder in it."""
        system, path = fsspec.core.url_to_fs(self.target)
        return system, path.rstrip("/").rpartition("/")[0]

    def write(self) -> str:
        """Write a file; return its name, which is also its content. For a worker.

        Raises `OSError` if the folder is not there, or may not be written to.
        """
        if not self.is_shared:
            return ""
        name = f"{self.prefix}{uuid.uuid4().hex[:12]}"
        system, folder = self._open()
        system.pipe_file(f"{folder}/{name}", name.encode())
        return name

    def is_there(self, name: str, deadline: float) -> bool:
        """Whether the client sees the file that a worker wrote, at the latest at `deadline` (`time.monotonic`)."""
        system, folder = self._open()
        while self.is_shared:
            try:
                return bool(system.cat_file(f"{folder}/{name}") == name.encode())
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    return False
                system.invalidate_cache()
                time.sleep(POLL_SECONDS)
        return True

    def clear(self) -> None:
        """Remove all files of this target, also the files that a killed run left."""
        if not self.is_shared:
            return
        system, folder = self._open()
        system.invalidate_cache()
        try:
            names = [str(path).rpartition("/")[2] for path in system.ls(folder, detail=False)]
            for name in names:
                if name.startswith(self.prefix):
                    system.rm_file(f"{folder}/{name}")
        except OSError as error:
            logger.warning("files %s* next to %s were not removed (%s): remove them", self.prefix, self.target, error)
