"""The keys of connections: temporary keys of a cluster that spdist starts, and key files of other clusters.

Whoever connects to a Dask scheduler, worker or nanny runs code as its owner. With TLS both sides show a certificate;
all processes of a cluster share one, which is its own authority.
"""

from __future__ import annotations

import contextlib
import datetime
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from distributed import Security
from distributed.client import _maybe_call_security_loader

from spdist.errors import InputError

KEY_FILES = {"ca-file": "ca.pem", "cert": "cert.pem", "key": "key.pem", "environment": "environment.sh"}
"""Files that `write_keys` writes."""
DAYS = 365
"""Days for which a certificate is valid."""
KNOWN: dict[str, Security] = {}
"""Keys of the schedulers that this process started, by address; whoever starts one adds it by `remembered`."""


class KeyPair(NamedTuple):
    """A certificate that signs itself, and its private key."""

    # in PEM
    certificate: str
    key: str


class RunSecurity(Security):
    """Keys for connections that are never taken up again: tickets for that took half of a server's handshake."""

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """Return the arguments with which a process of this role listens."""
        arguments: dict[str, Any] = super().get_listen_args(role)  # type: ignore[no-untyped-call]
        if (context := arguments.get("ssl_context")) is not None:
            context.num_tickets = 0
        return arguments


def make_key_pair() -> KeyPair:
    """Make a new key pair for all processes of a cluster, on the curve P-256.

    Examples
    --------
    >>> make_key_pair().certificate.splitlines()[0]
    '-----BEGIN CERTIFICATE-----'
    """
    from cryptography import x509  # late: most products in one process need no keys
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "spdist")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of other hosts may be behind
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    key = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return KeyPair(certificate.public_bytes(serialization.Encoding.PEM).decode(), key.decode())


def temporary_keys() -> Security:
    """Return new keys for a cluster that this process starts; they are never written to a place that others can read.

    Returns it requires encryption, and pickles to the processes of the cluster.
    """
    return security_of(*make_key_pair())


def security_of(certificate: str, key: str, ca_file: str | None = None) -> Security:
    """Return keys that a process uses in every role.

    `certificate, key`: paths, or texts in PEM.
    `ca_file`: the authority of the other processes' certificates; by default the certificate itself.
    """
    roles = ("client", "scheduler", "worker")
    files = {f"tls_{role}_cert": certificate for role in roles} | {f"tls_{role}_key": key for role in roles}
    return RunSecurity(require_encryption=True, tls_ca_file=ca_file or certificate, **files)  # type: ignore[no-untyped-call]


def security_of_files(ca_file: str | None, certificate: str | None, key: str | None) -> Security | None:
    """Return keys from the files that ``--tls-ca-file``, ``--tls-cert`` and ``--tls-key`` name.

    `ca_file, certificate, key`: paths of PEM files.
    Returns none if no file was named.
    Raises `InputError` if only some files were named, or one cannot be read.
    """
    named = {"--tls-ca-file": ca_file, "--tls-cert": certificate, "--tls-key": key}
    if not any(named.values()):
        return None
    if missing := [option for option, path in named.items() if not path]:
        raise InputError(f"{' and '.join(missing)} missing: name all three files that `spdist cluster-keys` writes")
    for option, path in named.items():
        try:
            Path(str(path)).read_bytes()
        except OSError as error:
            raise InputError(f"{option} {path}: {error.strerror}; name a PEM file that you may read") from None
    return security_of(str(certificate), str(key), ca_file)


def write_keys(folder: str | Path) -> dict[str, Path]:
    """Write new keys for a scheduler, its workers and its clients, for the owner's eyes alone.

    `folder`: A new or empty folder that all hosts of the cluster see, and nobody else.
    Returns paths by the option ``--tls-*`` of Dask's commands that names each: ``ca-file``, ``cert``, ``key``. Under
    ``environment``, a file for the shell command ``source`` that sets them for Dask and spdist.
    Raises `InputError` if the folder holds something, is a URL, or cannot be written.
    """
    if "://" in str(folder):
        raise InputError(f"{folder} is a URL: keys are written to a folder of this machine alone; name a path")
    place, pair = Path(folder).absolute(), make_key_pair()
    files = {option: place / name for option, name in KEY_FILES.items()}
    texts = {"ca-file": pair.certificate, "cert": pair.certificate, "key": pair.key, "environment": _exports(files)}
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(place.iterdir()):
            raise InputError(f"{place} is not empty: name a new folder, because keys are never replaced")
        place.chmod(0o700)
        for option, text in texts.items():
            files[option].touch(mode=0o600, exist_ok=False)
            files[option].write_text(text)
    except OSError as error:
        raise InputError(f"{place}: {error.strerror}; name a folder that you may write") from None
    return files


def _exports(files: dict[str, Path]) -> str:
    """Return shell commands that set Dask's configuration to key files."""
    prefix = "DASK_DISTRIBUTED__COMM__"
    settings = {f"{prefix}REQUIRE_ENCRYPTION": "true", f"{prefix}TLS__CA_FILE": str(files["ca-file"])}
    for role in ("CLIENT", "SCHEDULER", "WORKER"):
        settings |= {f"{prefix}TLS__{role}__{option.upper()}": str(files[option]) for option in ("cert", "key")}
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())


@contextlib.contextmanager
def remembered(address: str, security: Security) -> Iterator[None]:
    """Let calls in this process that name an address use its keys.

    `address`: of a scheduler.
    Yields while the keys are known.
    """
    KNOWN[address] = security
    try:
        yield
    finally:
        KNOWN.pop(address, None)


def security_for(address: str, given: Security | None = None) -> Security:
    """Return the keys to use for a running scheduler.

    `given`: by the user.
    Returns what was given; else the keys of a scheduler that this process started; else what Dask's configuration says.
    """
    found: Security = given or KNOWN.get(address) or _maybe_call_security_loader(address) or Security()
    return found


def cluster_security(address: str) -> Security:
    """Return the keys of workers that this process started, for a client of one's own.

    Parameters
    ----------
    address : str
        From `spdist.workers`.

    Returns
    -------
    distributed.Security
        Whoever has it can run code on the workers: keep it in this process.

    Raises
    ------
    InputError
        If this process runs no workers with this address.

    Examples
    --------
    >>> with spdist.workers(2) as address:  # doctest: +SKIP
    ...     client = distributed.Client(address, security=spdist.cluster_security(address))
    """
    if address not in KNOWN:
        raise InputError(
            f"this process started no workers at {address}: give the address that spdist.workers() yields, within its "
            f"`with` block"
        )
    return KNOWN[address]


def has_keys(security: Security) -> bool:
    """Return whether a client can prove with these keys who it is."""
    mine = security.get_tls_config_for_role("client")
    return bool(mine["ca_file"] and mine["cert"])
