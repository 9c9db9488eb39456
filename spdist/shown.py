"""Text that is shown or stored: without passwords, keys and tokens, and for a terminal without control characters.

Places are used as they were given; whatever prints, logs, stores or raises text calls a function of this file first.
A secret is recognised in three ways: by its position in a URL (user and password, the query), by its name
(``token=...``), and by its value, if it was remembered or stands in the environment or in fsspec's configuration.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import Any, TypeVar
from urllib.parse import quote, unquote

Content = TypeVar("Content")

HIDDEN = "***"
"""Stands in the place of a secret."""

LEAST = 6
"""Characters of the shortest secret that is recognised by its value: shorter ones occur in other text by chance."""

MOST = 256
"""Number of remembered secrets; the oldest one goes."""

NAME = (
    r"[\w.-]*(?:tokens?|secrets?|signature|password|passwd|passphrase|pwd|credentials?|api-?_?keys?|"
    r"access-?_?key(?:-?_?id)?|account-?_?key|secret-?_?key|private-?_?key|sas|sig)"
)
"""Pattern of the names of secrets, in queries, settings and connection strings."""

_URL = re.compile(
    r"(?<![a-z0-9+.-])(?P<scheme>[a-z0-9+.-]+):(?P<slashes>/+)(?P<place>[^\s'\"<>`?]*)"
    r"(?P<query>\?(?:[^\s'\"<>`]*[^\s'\"<>`)\],;:.])?)?",
    re.IGNORECASE,
)
_WITHOUT_SCHEME = re.compile(r"(?<![^\s'\"<>`(=/])(?<!//)(?<!:/)[^\s'\"<>`/:@=(]+:(?![/:])[^\s'\"<>`@]+@(?=\S)")
_HOST = re.compile(r"[^:/?#\[\]]*(?::\d*)?|\[[^\]]*\](?::\d*)?")
_FRAGMENT = re.compile(r"#[^#]*=.*", re.DOTALL)
_NAMED = re.compile(
    rf"(?<![\w.-])(?P<name>{NAME})(?P<sign>(?:\s*=\s*|%3D)[\"']?|[\"']\s*:\s*b?[\"'])(?P<value>[^\s&;,\"'<>`)\]]+)",
    re.IGNORECASE,
)
_AUTHORIZATION = re.compile(r"\b((?:Bearer|Basic|Credential)[ =])[\w+/=.~-]{6,}")
_XML = re.compile(r"<(AWSAccessKeyId|SignatureProvided|StringToSign\w*|CanonicalRequest\w*|\w*Token)>[^<]*")
_ENVIRONMENT = re.compile(r"(?:^|_)(?:KEY|KEY_ID|SECRET|TOKEN|PASSWORD|PASSWD|PASS|SAS|CONNECTION_STRING)$")
_CONTAINER = frozenset({"az", "abfs", "abfss"})
"""Schemes whose URLs have the container before the ``@``, no user."""

PUNCTUATION = ")]},;:.->"
"""Characters of a sentence that may follow a URL."""

_remembered: dict[str, None] = {}


def without_secrets(content: Content) -> Content:
    """Return text, or JSON-like content with text in it, without secrets.

    Parameters
    ----------
    content : str, dict, list, tuple or other
        Of a dictionary the values are searched; other values are returned as they are.

    Returns
    -------
    of the same type

    Examples
    --------
    >>> without_secrets("http://user:password@host/k.abc?token=secret: no answer")
    'http://***@host/k.abc?***: no answer'
    >>> without_secrets({"source": "s3://bucket/A.zarr", "bytes": 3})
    {'source': 's3://bucket/A.zarr', 'bytes': 3}
    """
    found: Any = content
    if isinstance(found, str):
        found = _clean(found)
    elif isinstance(found, dict):
        found = {name: without_secrets(value) for name, value in found.items()}
    elif type(found) in (list, tuple):
        found = type(found)(map(without_secrets, found))
    return found  # type: ignore[no-any-return]


def printable(text: str) -> str:
    r"""Return text for a terminal or a log: without secrets, and characters that do not print escaped, but line ends.

    Examples
    --------
    >>> printable("\x1b]0;title\a.zarr")
    '\\x1b]0;title\\x07.zarr'
    """
    return escaped(_clean(text))


def escaped(text: str, keep: str = "\n") -> str:
    """Return text with the characters that do not print escaped, other than those to keep."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else repr(each)[1:-1] for each in text)


def remember(*secrets: str | None) -> None:
    """Hide these texts wherever they occur from now on, also percent-encoded or decoded."""
    for secret in filter(None, secrets):
        for form in (secret, unquote(secret), quote(secret, safe=""), quote(secret)):
            if len(form) >= LEAST:
                _remembered.pop(form, None)
                _remembered[form] = None
    for oldest in list(_remembered)[:-MOST]:
        del _remembered[oldest]


def remember_place(place: str) -> None:
    """Remember the secrets of a path or URL, so that parts of it in messages of libraries show none."""
    for each in place.split("::"):  # fsspec's chains of file systems
        scheme, mark, rest = each.partition("://")
        if not mark:
            continue
        address, _, query = rest.partition("?")
        user = _user(scheme, rest if "@" in query and "/" not in address else address)
        if not user and not _HOST.fullmatch(authority := address.partition("/")[0]):
            user = authority  # without a host
        parts = re.split(r"[:/?#@]", user)  # a library may name the one at which it stumbled
        remember(user.partition(":")[2] or user, *parts[1:])
        for word in query.split("&"):
            name, _, value = word.partition("=")
            if value and re.fullmatch(NAME, name, re.IGNORECASE):
                remember(value)


def _user(scheme: str, address: str) -> str:
    """Return what stands before the host in a URL without its scheme; empty if there is no secret."""
    authority = address.partition("/")[0]
    if "@" in authority and ":" not in authority:
        return "" if scheme.lower() in _CONTAINER else authority.rpartition("@")[0]
    if "@" in authority or not _HOST.fullmatch(authority.rstrip(PUNCTUATION)):  # a password may hold / and @
        return address.rpartition("@")[0]
    return ""


def as_cause(error: BaseException) -> BaseException | None:
    """Return an error to raise another one from; None if a traceback with it would show a secret."""
    chain: BaseException | None = error
    while chain is not None:
        if _clean(str(chain)) != str(chain):
            return None
        chain = chain.__cause__ or chain.__context__
    return error


def without_keys() -> dict[str, str]:
    """Return the environment without keys and passwords, for a child process that needs none."""
    return {name: value for name, value in os.environ.items() if not _ENVIRONMENT.search(name)}


def _clean(text: str) -> str:
    for secret in sorted((*_remembered, *_configured()), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = _NAMED.sub(rf"\g<name>\g<sign>{HIDDEN}", _URL.sub(_clean_url, text))
    if "@" in text:
        text = _WITHOUT_SCHEME.sub(f"{HIDDEN}@", text)
    return _XML.sub(rf"<\1>{HIDDEN}", _AUTHORIZATION.sub(rf"\g<1>{HIDDEN}", text))


def _clean_url(found: re.Match[str]) -> str:
    place, query = found["place"], found["query"] or ""
    if "@" in query and ":" in place and "/" not in place:  # a password with ? in it
        place, query = place + query, ""
    if user := _user(found["scheme"], place):
        place = place.replace(user, HIDDEN, 1)
    place = _FRAGMENT.sub(f"#{HIDDEN}", place)
    return f"{found['scheme']}:{found['slashes']}{place}{f'?{HIDDEN}' if query else ''}"


def _configured() -> list[str]:
    """Return the keys and passwords in the environment and in fsspec's configuration."""
    found = [value for name, value in os.environ.items() if _ENVIRONMENT.search(name) and "TLS" not in name]
    config: Any = sys.modules.get("fsspec.config")
    if config is not None:
        found += _secrets_of(config.conf)
    return [value for value in found if len(value) >= LEAST]


def _secrets_of(settings: dict[str, Any]) -> list[str]:
    found = []
    for name, value in settings.items():
        if isinstance(value, dict):
            found += _secrets_of(value)
        elif isinstance(value, str) and (name == "key" or re.fullmatch(NAME, str(name), re.IGNORECASE)):
            found.append(value)
    return found


class WithoutSecrets(logging.Filter):
    """Cleans the records of a logger."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace message and arguments by the clean message."""
        record.msg, record.args = without_secrets(record.getMessage()), ()
        return True


logging.getLogger("spdist").addFilter(WithoutSecrets())
