"""Make malformed files from whole ones: bytes flipped, cut and spliced, and values that cannot be in their places."""

from __future__ import annotations

import io
import json
import random
import re
import warnings
import zipfile
from typing import Any

NUMBERS = (
    b"-1", b"0", b"1", b"2147483648", b"4294967297", b"8589934592", b"1000000000000", b"9223372036854775807",
    b"9223372036854775808", b"18446744073709551616", b"1" * 400, b"1e400", b"nan", b"inf", b"-0", b"+1", b"1.5", b"0x1",
)  # fmt: skip
WORDS = (
    b"",
    b"\n",
    b"\0",
    b"\xff",
    b"%",
    b"\r",
    b"\x85",
    b"array",
    b"coordinate",
    b"hermitian",
    b"pattern",
    b"\x1b[2J",
)
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 1 << 31, 1 << 33, 1 << 63, 10**18, 10**30, 1.5, float("nan"), float("inf"), "", "x",
    "a\nb", [], [0], [-5], [1, 2], [10**18], [[]], {}, {"name": "gzip"}, {"name": "zstd", "configuration": {}},
)  # fmt: skip
DESCRIPTIONS = (
    b"'|O'", b"'<f2'", b"'<c16'", b"'|V8'", b"'<U7'", b"'|S100000000'", b"'<M8[s]'", b"'|b1'", b"'>i8'", b"'<f16'",
    b"[('a', '<f8')]", b"[('block', '<f8')]", b"('<f8', (2, 2))", b"'<i8'", b"'<u8'", b"1", b"None",
)  # fmt: skip
SHAPES = (
    b"()",
    b"(1,)",
    b"(-1,)",
    b"(0,)",
    b"(3, 4)",
    b"(10000000000,)",
    b"(9223372036854775807, 9)",
    b"(True,)",
    b"7",
)


def mutate(name: str, raw: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Return a malformed version of a file.

    Parameters
    ----------
    name : str
        Its ending says what can be changed with sense.
    raw : bytes
    rng : Random
    others : list of bytes
        Files of which parts may be spliced in.
    """
    texts = dict.fromkeys(("mtx", "yaml", "graph", "mci", "tsv", "csv", "txt", "abc"), _text)
    sense = {"json": _json, "npz": _archive, "npy": _array, "petsc": _integers, **texts}.get(name.rpartition(".")[2])
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        raw = sense(raw, rng) if sense is not None and rng.random() < 0.6 else _bytes(raw, rng, others)
    return raw


def _bytes(raw: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Change bytes without sense."""
    if not raw:
        return rng.randbytes(20)
    at, end = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    changed = bytearray(raw)
    kind = rng.choice(("flip", "flip", "set", "cut", "drop", "repeat", "splice", "word"))
    if kind in ("flip", "set"):
        for _ in range(rng.choice((1, 1, 2, 8, 32))):
            place = rng.randrange(len(raw))
            changed[place] = changed[place] ^ (1 << rng.randrange(8)) if kind == "flip" else rng.choice((0, 255, 127))
        return bytes(changed)
    if kind == "splice":
        other = rng.choice(others)
        start = rng.randrange(len(other) + 1)
        return raw[:at] + other[start : start + rng.randrange(200)] + raw[end:]
    part = {"cut": b"", "drop": raw[end:], "repeat": raw[at:end] * 3 + raw[end:], "word": rng.choice(WORDS) + raw[at:]}
    return raw[:at] + part[kind]


def _text(raw: bytes, rng: random.Random) -> bytes:
    """Replace, drop or repeat words and lines."""
    words = re.split(rb"(\s+)", raw)
    at = rng.randrange(len(words))
    if rng.random() < 0.2:
        lines = raw.split(b"\n")
        line = rng.randrange(len(lines))
        lines[line : line + 1] = [lines[line]] * rng.choice((0, 2, 50))
        return b"\n".join(lines)
    words[at] = rng.choice(NUMBERS + WORDS)
    return b"".join(words)


def _json(raw: bytes, rng: random.Random) -> bytes:
    """Replace or drop a value of a JSON document."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return raw[: len(raw) // 2]
    ways = list(_ways(document))
    if not ways:
        return b"[" * 50_000
    way = rng.choice(ways)
    inner = document
    for key in way[:-1]:
        inner = inner[key]
    if rng.random() < 0.7:
        inner[way[-1]] = json.loads(json.dumps(rng.choice(VALUES)))
    else:
        del inner[way[-1]]
    return json.dumps(document).encode()


def _ways(document: Any, before: tuple[Any, ...] = ()) -> Any:
    pairs = (
        document.items() if isinstance(document, dict) else enumerate(document if isinstance(document, list) else ())
    )
    for key, value in pairs:
        yield (*before, key)
        yield from _ways(value, (*before, key))


def _array(raw: bytes, rng: random.Random) -> bytes:
    """Change the header of a .npy array and keep its length right; or its version or length."""
    if len(raw) < 10 or rng.random() < 0.1:
        return b"\x93NUMPY" + bytes([rng.randrange(5), 0]) + rng.randbytes(4) + raw[10:]
    end = 10 + int.from_bytes(raw[8:10], "little")
    header, body = raw[10:end], raw[end:]
    kind = rng.choice(("descr", "shape", "order", "body", "number"))
    if kind == "descr":
        header = re.sub(rb"'descr': [^,]*", b"'descr': " + rng.choice(DESCRIPTIONS), header)
    elif kind == "shape":
        header = re.sub(rb"'shape': \([^)]*\)", b"'shape': " + rng.choice(SHAPES), header)
    elif kind == "order":
        header = header.replace(b"False", rng.choice((b"True", b"None", b"((" * 500, b"'\\q'")))
    elif kind == "number" and len(body) >= 8:
        at = 8 * rng.randrange(len(body) // 8)
        value = rng.choice((0, 1, -1, 1 << 31, (1 << 63) - 1, -(1 << 63), 1 << 40))
        body = body[:at] + value.to_bytes(8, "little", signed=True) + body[at + 8 :]
    else:
        body = body[: rng.randrange(len(body) + 1)]
    return raw[:8] + min(len(header), 65535).to_bytes(2, "little") + header + body


def _integers(raw: bytes, rng: random.Random) -> bytes:
    """Change a big-endian integer of four or eight bytes near the begin of a file."""
    width = rng.choice((4, 8))
    at = width * rng.randrange(12)
    value = rng.choice((0, 1, -1, -2, 100, 1211214, 1211216, (1 << 31) - 1, 1 << 28, (1 << 63) - 1, -(1 << 63)))
    return raw[:at] + value.to_bytes(8, "big", signed=True)[8 - width :] + raw[at + width :]


def _archive(raw: bytes, rng: random.Random) -> bytes:
    """Change one array of a .npz archive, leave it out, or store it twice, encrypted or by another method."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = [(info, archive.read(info)) for info in archive.infolist()]
    except Exception:  # made malformed before
        return raw[::-1]
    at, kind = rng.randrange(len(members)), rng.random()
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w") as archive:
        warnings.simplefilter("ignore")  # of a name that is there twice
        for number, (info, content) in enumerate(members):
            method = info.compress_type
            if number == at and kind < 0.1:
                continue
            if number == at and kind < 0.2:
                method = rng.choice((zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
            if number == at and kind >= 0.3:
                content = _array(content, rng)
            for _ in range(2 if number == at and 0.25 <= kind < 0.3 else 1):
                archive.writestr(info.filename, content, method)
    whole = out.getvalue()
    if 0.2 <= kind < 0.25:  # the flag of encryption, in both of its places
        whole = whole.replace(b"PK\x03\x04\x14\x00\x00", b"PK\x03\x04\x14\x00\x01")
        whole = re.sub(rb"(?s)(PK\x01\x02....)\x00", lambda found: found[1] + b"\x01", whole)
    return whole
