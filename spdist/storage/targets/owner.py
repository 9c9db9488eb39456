"""The owner of a lock: the run that its file names."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from uuid import uuid4

from spdist.foundation.processes import boot, namespace, process_start
from spdist.shown import without_secrets

STALE_SECONDS = 60.0
"""Seconds without a heartbeat after which a lock of another host counts as stale."""


@dataclass(frozen=True)
class Owner:
    """The run that holds a lock; the content of the lock file."""

    record: str  # unique for each lock file that is written
    run: str  # the run's name
    host: str
    user: str
    command: str
    # the boot of the host and the namespace of process ids, within which `pid` means one process
    boot: str
    namespace: str
    pid: int
    start: str  # when the process started, on a clock that nobody sets
    begun: str  # when the run began, UTC

    def __str__(self) -> str:
        return f"{self.run} (user {self.user} on {self.host}, process {self.pid}, since {self.begun} UTC)"

    def to_bytes(self) -> bytes:
        """Return the content of the lock file."""
        return json.dumps(asdict(self), indent=1).encode()

    @property
    def is_near(self) -> bool:
        """Whether this process can see the run's process: on the same boot, in the same namespace."""
        return (self.boot, self.namespace) == (boot(), namespace())

    @property
    def is_process_alive(self) -> bool:
        """Whether the run's process, which must be near, is alive."""
        return process_start(self.pid) == self.start


def owner_from(content: bytes) -> Owner | None:
    """Return the owner that a lock file names; None if the file is damaged."""
    try:
        found = json.loads(content)
        texts = {field.name: str(found[field.name]) for field in dataclasses.fields(Owner)}
        return Owner(**{**texts, "pid": int(found["pid"])})  # type: ignore[arg-type]
    except (ValueError, TypeError, KeyError):
        return None


def this_process(run: str) -> Owner:
    """Return this process as the owner of locks of a run."""
    return Owner(
        record=uuid4().hex,
        run=run,
        host=socket.gethostname(),
        user=_user(),
        command=without_secrets(" ".join(sys.argv))[:200],
        boot=boot(),
        namespace=namespace(),
        pid=os.getpid(),
        start=process_start(os.getpid()),
        begun=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in containers
        return str(os.getuid()) if hasattr(os, "getuid") else "unknown"
