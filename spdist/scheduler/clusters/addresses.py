"""Addresses of running schedulers: say in one line why one cannot be used, before Dask waits for it."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import time
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from distributed import Client, Security
from distributed.comm.registry import get_backend
from distributed.deploy.cluster import Cluster

from spdist.errors import InputError, one_line
from spdist.scheduler.clusters.security import has_keys

SILENT_SECONDS = 10
"""Seconds in which a process that accepts a connection should greet; a busy scheduler takes its time."""
RETRY_SECONDS = 0.2
"""Seconds between two attempts to connect."""
MOST_GREETING = 1 << 20
"""Most bytes of a greeting. Other services send text, which reads as a much larger number."""
KEYS_WANTED = (
    "name the files that the scheduler was started with: --tls-ca-file, --tls-cert, --tls-key, or Dask's configuration "
    "distributed.comm.tls (DASK_DISTRIBUTED__COMM__TLS__CA_FILE, ..__TLS__CLIENT__CERT, ..__TLS__CLIENT__KEY)"
)


class SchedulerRefusedError(Exception):
    """Something other than a Dask scheduler answers, or it refuses these keys; says what, and what to do."""


def of_scheduler(scheduler: Any, given: Security | None) -> tuple[str, Security | None]:
    """Return the address and the keys of the scheduler that the caller names, or has a client or a cluster of.

    `scheduler`: A string that ends in ``.json`` is the path of a file that a scheduler wrote. A cluster is any of
    Dask's: `LocalCluster`, `SLURMCluster`, `KubeCluster`, `GatewayCluster`, ...
    `given`: the caller's keys; they override the client's or cluster's.
    Returns (str, Security or None).
    Raises `InputError` if it is something else, closed, or asynchronous.

    Examples
    --------
    >>> of_scheduler("tcp://node1:8786", None)
    ('tcp://node1:8786', None)
    """
    if isinstance(scheduler, str):
        return scheduler_address(scheduler) if scheduler.endswith(".json") else scheduler, given
    kind = type(scheduler).__name__
    if isinstance(scheduler, Cluster):
        address = scheduler.scheduler_address
    elif isinstance(scheduler, Client):
        address = getattr(scheduler.scheduler, "address", "")
    else:
        raise InputError(f"scheduler={scheduler!r:.80} is a {kind}: give a Dask client, a cluster, or an address")
    status = getattr(scheduler.status, "name", scheduler.status)
    if scheduler.asynchronous:
        raise InputError(
            f"scheduler is an asynchronous {kind}, whose event loop a product would block: give a synchronous one, or "
            f"call in a thread of its own (asyncio.to_thread) with scheduler={address!r}"
        )
    if status != "running" or not address:
        raise InputError(f"scheduler is a {kind} that is {status}, not running: give one that is connected")
    return address, given or scheduler.security


def scheduler_address(file: str | Path) -> str:
    """Return the address in the file that ``dask scheduler --scheduler-file`` wrote.

    Parameters
    ----------
    file : str or Path

    Returns
    -------
    str
        Such as ``tls://10.0.0.1:8786``; `multiply` and others take it as `scheduler`.

    Raises
    ------
    InputError
        If there is no such file, or it holds no address.

    Examples
    --------
    >>> scheduler_address("scheduler.json")  # doctest: +SKIP
    'tls://10.0.0.1:8786'
    """
    try:
        return str(json.loads(Path(file).read_text())["address"])
    except OSError as error:
        problem = str(error.strerror)
    except (ValueError, TypeError, KeyError):
        problem = "it holds no address"
    raise InputError(f"scheduler_file: {str(file)!r}: {problem}; start `dask scheduler --scheduler-file {file}` first")


def check_address(address: str, security: Security) -> SplitResult:
    """Refuse an address that cannot be one of a scheduler, and ``tls://`` without keys.

    `address`: ``PROTOCOL://HOST:PORT``; without a protocol it is ``tcp``.
    `security`: the keys that would be used.
    Returns the parts of the address.

    Examples
    --------
    >>> check_address("node1:8786", Security()).port
    8786
    >>> check_address("http://node1:8786", Security())  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    InputError: scheduler='http://node1:8786': Dask knows no protocol 'http'; write tcp://HOST:PORT ...
    """
    example = "write tcp://HOST:PORT, or tls://HOST:PORT where the scheduler has keys"
    try:
        parts = urlsplit(address if "://" in address else f"tcp://{address}")
    except ValueError as error:  # a bracket that is not closed
        raise InputError(f"scheduler={address!r}: {one_line(error)}; {example}") from None
    try:
        get_backend(parts.scheme)
    except ValueError:
        raise InputError(f"scheduler={address!r}: Dask knows no protocol {parts.scheme!r}; {example}") from None
    if parts.scheme not in ("tcp", "tls"):
        return parts
    try:
        complete = bool(parts.hostname) and bool(parts.port) and parts.path in ("", "/")
    except ValueError:  # no number, or too large
        complete = False
    if not complete:
        raise InputError(f"scheduler={address!r} names no host and port; {example}")
    if parts.scheme == "tls" and not has_keys(security):
        raise InputError(f"scheduler={address!r} needs keys, and there are none: {KEYS_WANTED}")
    if parts.scheme == "tcp" and security.require_encryption:
        raise InputError(f"scheduler={address!r} is open, but keys are given or Dask is told to require encryption: "
                         f"write tls://{parts.netloc}, or leave the keys out")  # fmt: skip
    return parts


def wait_until_reachable(address: str, security: Security, seconds: float) -> None:
    """Wait until a Dask process greets at an address; Dask itself would wait for a silent one for ever.

    `seconds`: how long to try while nobody accepts a connection.
    Raises `InputError` if nobody answers, or something other than a Dask scheduler.
    """
    parts = check_address(address, security)
    if parts.scheme not in ("tcp", "tls"):
        return
    context = _tls_context(security) if parts.scheme == "tls" else None
    deadline = time.monotonic() + seconds
    while True:
        left = max(deadline - time.monotonic(), 0.1)
        try:
            _greet(str(parts.hostname), int(parts.port or 0), context, min(left, SILENT_SECONDS))
            return
        except SchedulerRefusedError as error:
            raise InputError(f"scheduler={address!r}: {error}") from None
        except socket.gaierror as error:
            raise InputError(f"scheduler={address!r}: no host {parts.hostname!r}: {error.strerror}") from None
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise InputError(
                    f"no Dask scheduler answers at {address}: {error}; start one with `dask scheduler`, or correct "
                    f"host and port"
                ) from None
        time.sleep(RETRY_SECONDS)


def _tls_context(security: Security) -> ssl.SSLContext:
    """Read the key files."""
    try:
        context: ssl.SSLContext = security.get_connection_args("client")["ssl_context"]
    except OSError as error:  # of a file that is not there, or holds no key
        raise InputError(f"the keys cannot be read ({error.strerror or error}): {KEYS_WANTED}") from None
    return context


def _greet(host: str, port: int, context: ssl.SSLContext | None, seconds: float) -> None:
    """Connect, and read the first bytes that a Dask process sends: the length of its greeting."""
    with socket.create_connection((host, port), timeout=seconds) as plain:
        try:
            link = plain if context is None else context.wrap_socket(plain)
            with link:
                first = link.recv(8, socket.MSG_WAITALL) if context is None else link.recv(8)
        except TimeoutError:
            other = "tls://, or another service" if context is None else "tcp://, or another service"
            raise SchedulerRefusedError(
                f"it accepts connections and is silent for {seconds:.0f} s: is it {other}?"
            ) from None
        except ssl.SSLError as error:
            raise SchedulerRefusedError(_tls_failure(error)) from None
    if not first and context is not None:
        raise SchedulerRefusedError(f"it ended the connection: {KEYS_WANTED}")
    if len(first) < 8 or struct.unpack("Q", first)[0] > MOST_GREETING:
        raise SchedulerRefusedError("what answers there is no Dask scheduler; correct host and port")


def _tls_failure(error: ssl.SSLError) -> str:
    if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return "what answers there speaks no TLS: write tcp:// if the scheduler has no keys, or correct host and port"
    return f"the keys are not those of the scheduler ({error.reason or error}): {KEYS_WANTED}"
