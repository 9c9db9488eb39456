"""The holder of a target, for readers: nothing is written, and no lock is taken."""

from __future__ import annotations

import time
from dataclasses import dataclass

from spdist.storage.targets.owner import STALE_SECONDS, Owner, owner_from
from spdist.stores.lock_files import heartbeat_path
from spdist.stores.registry import at


@dataclass(frozen=True)
class Holder:
    """The run that holds a target, or held it when it died."""

    owner: Owner | None  # none if the lock is damaged
    age: float  # seconds since its last heartbeat: this host's time less the storage's time of the heartbeat

    @property
    def is_near(self) -> bool:
        """Whether the run is on this host, where its death is known for certain."""
        return self.owner is not None and self.owner.is_near

    @property
    def is_process_alive(self) -> bool:
        """Whether the run is alive, or may be."""
        if self.owner is not None and self.owner.is_near:
            return self.owner.is_process_alive
        return self.age < STALE_SECONDS


def holder_of(target: str) -> Holder | None:
    """Return the holder that a target's lock names; None if there is no lock.

    `target`: normalised. Targets in the memory of this process have no lock.
    """
    files = at(target).lock_files()
    if files is None:
        return None
    path = f"{target}.spdist-lock"
    with at(target).clear_errors():
        content = files.read(path)
        if content is None:
            return None
        signs = [at(one).modified() for one in (path, heartbeat_path(path))]
    now = time.time()
    return Holder(owner_from(content), max(now - max((sign for sign in signs if sign is not None), default=now), 0.0))
