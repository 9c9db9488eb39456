"""Text of a file: decompressed, without a byte order mark, with line feeds as the only line ends."""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import importlib.util
import lzma
from typing import Any, BinaryIO

from spdist.errors import InputError, MatrixError, install
from spdist.storage.formats.source import Source, foreign

PACKINGS = {
    ".gz": b"\x1f\x8b",
    ".bz2": b"BZh",
    ".xz": b"\xfd7zXZ\0",
    ".zst": b"\x28\xb5\x2f\xfd",
}
"""Endings of compressed text, and the bytes that such a file begins with."""

READ_BYTES = 1 << 20
"""Bytes that are decompressed at a time."""

DECODER_BYTES = 256 << 20
"""Bytes of memory that a decoder may take."""

WIDE_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32LE",
    codecs.BOM_UTF32_BE: "UTF-32BE",
    codecs.BOM_UTF16_LE: "UTF-16LE",
    codecs.BOM_UTF16_BE: "UTF-16BE",
}
"""Byte order marks of encodings that are refused; UTF-32 first, since its mark begins with UTF-16's mark."""


def packing_of(path: str) -> str:
    """Return the ending of a compressed file; empty for any other.

    Examples
    --------
    >>> packing_of("graph.abc.zst"), packing_of("graph.abc")
    ('.zst', '')
    """
    return next((ending for ending in PACKINGS if path.lower().endswith(ending)), "")


class TextFile:
    """The text of a file, read in order; refuses to inflate to many times the file's bytes.

    A compressed file is known by its first bytes. Carriage returns, alone or before a line feed, become line feeds.

    `done`: bytes of text that were read.
    `packing`: the ending of its kind of compression; empty without compression.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.done = source, 0
        with foreign(source.path):
            head = source.file.read(8)
            source.file.seek(0)
        self.packing = next((ending for ending, magic in PACKINGS.items() if head.startswith(magic)), "")
        named = packing_of(source.path)
        if named and named != self.packing:
            raise MatrixError(
                f"{source.path}: damaged, truncated or not what its name says (it is not compressed as {named} files "
                f"are); get the file again"
            )
        self._file: Any = _decompressed(source.file, self.packing, source.path)
        self._rest, self._ended, self._begun = b"", False, False

    def read(self, count: int) -> bytes:
        """Return the next bytes, at most `count`; none at the end."""
        if not self._rest:
            self._fill(count)
        found, self._rest = self._rest[:count], self._rest[count:]
        return found

    def readline(self, count: int) -> bytes:
        """Return the rest of the line, at most `count` bytes of it."""
        while b"\n" not in self._rest and len(self._rest) < count and not self._ended:
            self._fill(READ_BYTES)
        end = min(self._rest.find(b"\n") + 1 or count, count)
        found, self._rest = self._rest[:end], self._rest[end:]
        return found

    def _fill(self, count: int) -> None:
        """Append the next text to what waits; note the end of the file."""
        while not self._ended:
            found = self._raw(count)
            self._ended = not found
            if not self._begun:
                found = self._without_mark(found)
            while found.endswith(b"\r"):  # a line feed may follow
                more = self._raw(1)
                if not more:
                    break
                found += more
            if b"\r" in found:
                found = found.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            self._rest += found
            if found:
                return

    def _raw(self, count: int) -> bytes:
        with foreign(self.source.path):
            found: bytes = self._file.read(count)
        self.done += len(found)
        if self.packing:
            self.source.check_inflated(self.done, "unpack it first if it is meant to")
        return found

    def _without_mark(self, found: bytes) -> bytes:
        """Return the begin of the text without a byte order mark; refuse text that is not made of single bytes."""
        self._begun = True
        while len(found) < 4 and (more := self._raw(4)):
            found += more
        wide = next((name for mark, name in WIDE_MARKS.items() if found.startswith(mark)), "")
        if not wide and b"\0" in found[:4]:
            wide = "UTF-16LE" if found[1:2] == b"\0" else "UTF-16BE"
        if wide:
            raise MatrixError(
                f"{self.source.path}: its text is {wide}, of which nothing is read; convert it: "
                f"iconv -f {wide} -t UTF-8"
            )
        return found.removeprefix(codecs.BOM_UTF8)


def _decompressed(file: BinaryIO, packing: str, path: str) -> Any:
    """Return a file's content as a file."""
    if packing == ".gz":
        return gzip.GzipFile(fileobj=file)
    if packing == ".bz2":
        return bz2.BZ2File(file)
    if packing == ".xz":
        return _XzFile(file)
    if packing == ".zst":
        if importlib.util.find_spec("zstandard") is None:
            raise InputError(f"{path}: reading .zst needs zstandard: {install('zst')}; or unpack the file")
        zstandard: Any = importlib.import_module("zstandard")
        decoder = zstandard.ZstdDecompressor(max_window_size=DECODER_BYTES)
        return decoder.stream_reader(file, read_across_frames=True)
    return file


class _XzFile:
    """The content of an .xz file; `lzma.LZMAFile` has no limit of memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._decoder, self._ended = file, self._new(), False

    def read(self, count: int) -> bytes:
        """Return the next bytes, at most `count`; none at the end."""
        while not self._ended:
            raw = b""
            if self._decoder.eof:
                raw = self._decoder.unused_data.lstrip(b"\0") or self._file.read(READ_BYTES).lstrip(b"\0")
                if not raw:  # streams may be padded
                    self._ended = True
                    break
                self._decoder = self._new()
            elif self._decoder.needs_input:
                raw = self._file.read(READ_BYTES)
                if not raw:
                    raise EOFError("the file ends within a stream")
            if found := self._decoder.decompress(raw, count):
                return found
        return b""

    @staticmethod
    def _new() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=DECODER_BYTES)
