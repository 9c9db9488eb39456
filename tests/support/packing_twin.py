"""The packer of packing.cu in plain Python: slow, and easy to compare with what packing.cu says of the format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from spdist.kernels.streaming import packing, workspace
from spdist.matrices.csr import CSR


def unit_start(c: CSR, number: int) -> tuple[int, int]:
    """Return the first mark and the first entry of a unit."""
    size = workspace.packed_unit(c.nrows, c.nnz)
    item, marks = number * size, c.indptr + np.arange(c.nrows + 1)
    row = min(int(np.searchsorted(marks, item)), c.nrows)
    inside = marks[row] >= item + size
    return row, item - row if inside else int(c.indptr[row])


def pieces(c: CSR, start: tuple[int, int], stop: tuple[int, int]) -> Iterator[tuple[int, int, bool]]:
    """Yield first and last entry of each piece of a unit, and whether it starts inside its row."""
    row, begin = start
    if begin < c.indptr[row]:
        yield begin, (begin := min(int(c.indptr[row]), stop[1])), True
    for r in range(row, stop[0]):
        end = min(int(c.indptr[r + 1]), stop[1])
        yield begin, end, False
        begin = end


def put_bits(numbers: list[int], width: int) -> bytes:
    """Return numbers in `width` bits each, the lowest first."""
    return sum(n << k * width for k, n in enumerate(numbers)).to_bytes(-(-len(numbers) * width // 8), "little")


def groups(numbers: list[int]) -> Iterator[list[int]]:
    """Yield 32 numbers at a time."""
    return (numbers[start : start + 32] for start in range(0, len(numbers), 32))


def number_bytes(number: int, signed: bool = False) -> bytes:
    """Return a number in as few bytes as hold it, none for 0."""
    bits = (number if number >= 0 else ~number).bit_length() + signed
    return number.to_bytes(-(-bits // 8) if number else 0, "little", signed=signed)


def pack_columns(c: CSR, start: tuple[int, int], stop: tuple[int, int]) -> bytes:
    """Return the columns of a unit."""
    out, base, gaps_before = b"", 0, None
    for begin, end, continues in pieces(c, start, stop):
        columns = c.indices[begin:end].tolist()
        gaps = [b - a - 1 for a, b in itertools.pairwise(columns)]
        same = bool(columns) and gaps == gaps_before
        size, move = number_bytes(0 if same else len(columns)), number_bytes(columns[0] - base if columns else 0, True)
        out += bytes([len(move) | len(size) << 4 | same * 64 | continues * 128]) + size + move
        for group in groups(gaps) if not same else ():
            width = max(group).bit_length()
            width = 64 if width > 56 else width
            out += bytes([width]) + put_bits(group, width)
        base, gaps_before = columns[0] if columns else base, gaps if columns else None
    return out


def pack_values(c: CSR, start: tuple[int, int], stop: tuple[int, int], codes: dict[int, int]) -> bytes:
    """Return the values of a unit."""
    words, before, out = packing.words_of(c.data), None, b""
    parts, whole = len(words) // max(c.nnz, 1), 8 * words.itemsize
    for begin, end, _ in pieces(c, start, stop):
        piece = words[begin * parts : end * parts].tolist()
        known = all(word in codes for word in piece)
        numbers, width = ([codes[word] for word in piece], (len(codes) - 1).bit_length()) if known else (piece, whole)
        if piece and piece == before:
            out += b"\0"
        elif piece:
            out += bytes([width + 1 if known else width]) + b"".join(put_bits(g, width) for g in groups(numbers))
        before = piece
    return out


def sample(c: CSR) -> dict[int, int]:
    """Return the number of each word of the dictionary; none if there are too many."""
    words = packing.words_of(c.data)
    thread = np.arange(min(packing.SAMPLE, len(words)), dtype=np.uint64)
    share = np.uint64(len(words) // packing.SAMPLE)
    places = thread * share + (thread * np.uint64(2654435761) >> np.uint64(7)) % share if share else thread
    distinct = dict.fromkeys(words[places.astype(np.int64)].tolist())
    return {word: number for number, word in enumerate(distinct)} if len(distinct) <= packing.WORDS else {}


def pack(c: CSR) -> tuple[packing.Bytes, bool]:
    """Return the packed bytes of a matrix on the host, and whether the values are among them."""
    units, start = workspace.packed_units(c.nrows, c.nnz), workspace.packed_start(c.nrows, c.nnz)
    starts = [unit_start(c, number) for number in range(units)] + [(c.nrows, c.nnz)]
    directory = np.zeros((units + 1, 4), np.int64)
    directory[:, :2] = starts
    codes, stream = sample(c), bytearray()
    for number in range(units):
        directory[number, 2] = len(stream)
        stream += pack_columns(c, starts[number], starts[number + 1])
    for number in range(units if codes else 0):
        directory[number, 3] = len(stream)
        stream += pack_values(c, starts[number], starts[number + 1], codes)
    out = np.full(start + len(stream) + workspace.PACKED_PADDING, 0xFF, np.uint8)
    words = packing.words_of(c.data)
    out[packing.DICTIONARY :][: len(codes) * words.itemsize].view(words.dtype)[:] = list(codes)
    out[workspace.PACKED_HEAD : start] = directory.view(np.uint8).ravel()
    out[start : start + len(stream)] = np.frombuffer(bytes(stream), np.uint8)
    return out, bool(codes)
