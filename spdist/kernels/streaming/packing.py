"""Pack C on the GPU, so that fewer bytes cross the bus, and unpack it on the host with several threads.

::

    packed = pack(c, out)                    # queued on the current stream; `out` are bytes on the device
    packed.wait().choose(threads)            # the only wait: now its sizes are known
    packed.copy(host)                        # queued; `host` are pinned bytes
    unpack(host, indptr, indices, data)      # or a range of units in each of several threads

Columns become differences of few bits, and take none if a row has the pattern of the row before, moved (stencils, nodes
of finite elements). If a sample has at most 256 different values, values become numbers of a dictionary, and take no
bits if a row repeats the values of the row before. Else the caller copies ``c.data`` as it is. All bits are kept, also
the bits of NaN. ``packing.cu`` defines the format; `unpacking` is the host's code.

References
----------
D. Lemire, L. Boytsov, "Decoding billions of integers per second through vectorization", Software: Practice and
Experience 45(1), 2015.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.errors import InputError
from spdist.kernels.cuda import constants, pinned
from spdist.kernels.cuda.module import c_type, module
from spdist.kernels.rounding import ceil_div
from spdist.kernels.streaming.workspace import (
    PACKED_HEAD,
    PACKED_PADDING,
    PACKED_PLACES,
    packed_start,
    packed_unit,
    packed_units,
)
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import IndexArray, ValueArray

Bytes = npt.NDArray[np.uint8]

FILE = "streaming/packing.cu"
PACKED_KINDS = "fc"
"""Kinds of the dtypes of matrices that are packed."""
USED, COLUMNS, DISTINCT = map(int, constants.PackedCount)
"""Numbers at the start of a packed matrix: bytes of all units, bytes of their columns, words of the dictionary."""
NUMBERS = len(constants.PackedCount)
DICTIONARY = 64
"""Byte at which the dictionary starts."""
WORDS = constants.PACKED_WORDS
"""Most words of the dictionary."""
TABLE = DICTIONARY + 8 * WORDS
"""Byte at which the hash table of the dictionary starts."""
SAMPLE = constants.PACKED_SAMPLE
"""Words of the values that are sampled to find the dictionary, and threads that sample them."""
UNITS_PER_BLOCK = 8
"""Units that a thread block packs, a warp each."""
Way = Literal["plain", "columns", "both"]
"""Arrays of a matrix that are packed: none, its columns, or its columns and values."""


@dataclass(frozen=True)
class PackingCosts:
    """Costs and savings of packing; the host's part is fitted to measurements of benchmarks/packing.py."""

    worth: float = 0.9  # share of the plain copy's time that a packed copy may take to be chosen
    wire_gb_s: float = 55.0  # GB/s of the bus: 55 for PCIe 5, 43 each way if both are busy
    thread_gb_s: float = 13.0  # GB/s that a thread of the host writes
    host_gb_s: float = 65.0  # GB/s that all threads write
    entry_seconds: float = 0.6e-9  # seconds of a thread for an entry that does not repeat the row before
    entry_bits: int = 6  # least bits of such an entry; the packed sizes give an upper bound on their number
    row_seconds: float = 6e-9  # seconds of a thread for a row
    block_seconds: float = 2e-4  # seconds for a block, whatever its size
    speed_up: float = 0.85  # n threads are as quick as n to this power


PACKING_COSTS = PackingCosts()


def kernel_names(value: str, index: str, pointer: str) -> tuple[str, str, str]:
    """Return the name expressions of the kernels that pack columns, sample values and pack values."""
    word = "u32" if value == "float" else "u64"
    return f"pack_columns<{index}, {pointer}>", f"sample_values<{word}>", f"pack_values<{word}, {pointer}>"


def words_of(data: ValueArray) -> ValueArray:
    """Return values as unsigned numbers of 4 or 8 bytes: one for each value, two for complex128."""
    return data.view(np.uint32 if data.dtype.itemsize == 4 else np.uint64)


class Sizes(NamedTuple):
    """Sizes of a matrix."""

    nrows: int
    nnz: int
    nbytes: int  # bytes of the three arrays
    values: int  # bytes of the values


def seconds(c: Sizes, packed: int, apart: int, threads: int, costs: PackingCosts = PACKING_COSTS) -> float:
    """Predict the seconds until a packed matrix is in the host's memory; bus and threads work at the same time.

    `packed`: bytes that cross the bus and are unpacked. `apart`: bytes that cross the bus without unpacking.
    """
    written, decoded = c.nbytes - apart, min(c.nnz, 8 * packed / costs.entry_bits)
    one = written / (1e9 * costs.thread_gb_s) + decoded * costs.entry_seconds + c.nrows * costs.row_seconds
    host = max(one / math.pow(threads, costs.speed_up), written / (1e9 * costs.host_gb_s))
    return costs.block_seconds + max((packed + apart) / (1e9 * costs.wire_gb_s), host)


def choose(c: Sizes, columns: int, both: int, threads: int, costs: PackingCosts = PACKING_COSTS) -> Way:
    """Choose the arrays to pack for the shortest time until the matrix is on the host.

    `columns, both`: packed bytes without the values and with them; 0 if they are not packed.
    """
    ways: dict[Way, float] = {"plain": costs.worth * c.nbytes / (1e9 * costs.wire_gb_s)}
    if columns:
        ways["columns"] = seconds(c, columns, c.values, threads, costs)
    if both:
        ways["both"] = seconds(c, both, 0, threads, costs)
    return min(ways, key=ways.__getitem__)


class Packed:
    """A matrix that the device packs into `out`; its sizes are known after `wait`.

    `columns, values`: whether they are packed. If columns are not, `out` was too small for them: copy the matrix
    unpacked. If values are not, copy ``c.data``. `nbytes`: bytes that `copy` copies; 0 if nothing is packed. `why`: why
    columns or values are not packed, in a line for a log. `source`: device address of the packed bytes. `pointer`:
    dtype of the offsets.
    """

    def __init__(self, c: CSR, out: Any) -> None:
        import cupy

        self.columns = self.values = False
        self.nbytes, self.why = 0, ""
        self._out, self._sizes = out, Sizes(c.nrows, c.nnz, c.nbytes, c.data.nbytes)
        self._start = packed_start(c.nrows, c.nnz)
        self.source, self.pointer = int(out.data.ptr), c.indptr.dtype
        self._numbers = pinned.numbers(NUMBERS)
        # Written by a kernel: a copy would wait behind copies of other streams.
        publish = module("rowwise_gpu/rows.cu", ("publish",))
        publish("publish", 1, NUMBERS, (self.source, int(self._numbers.ctypes.data)))
        self._ready = cupy.cuda.get_current_stream().record()

    def wait(self) -> Packed:
        """Wait until the matrix is packed, and read its sizes."""
        self._ready.synchronize()
        used, columns, distinct = (int(number) for number in self._numbers)
        room = len(self._out) - self._start - PACKED_PADDING
        self.columns = columns <= room
        self.values = self.columns and distinct > 0 and used <= room and 2 * (used - columns) <= self._sizes.values
        if not self.columns:
            self.why = f"packed columns take {columns:,} bytes, more than the {room:,} available"
        elif not self.values:
            self.why = "values hardly repeat" if distinct else f"values have more than {WORDS} different words"
        self._with_columns, self._with_values = (self._start + bytes_ + PACKED_PADDING for bytes_ in (columns, used))
        self.nbytes = self._with_values if self.values else self._with_columns if self.columns else 0
        return self

    def choose(self, threads: int, costs: PackingCosts = PACKING_COSTS) -> Packed:
        """Copy arrays unpacked if that is quicker than unpacking them with `threads` threads of the host."""
        columns, both = self._with_columns * self.columns, self._with_values * self.values
        way = choose(self._sizes, columns, both, threads, costs)
        if way == "plain" and self.columns:
            self.columns, self.values, self.nbytes = False, False, 0
            self.why = f"{threads} threads unpack no faster than the bus copies all"
        elif way == "columns" and self.values:
            self.values, self.nbytes = False, columns
            self.why = f"{threads} threads write values no faster than the bus copies them"
        return self

    def copy(self, host: Bytes) -> None:
        """Copy the packed bytes to page-locked memory of at least `nbytes` bytes, on the current stream."""
        import cupy

        if len(host) < self.nbytes:
            raise InputError(f"{self.nbytes:,} packed bytes do not fit in a buffer of {len(host):,}")
        self._out.data.copy_to_host_async(host.ctypes.data, self.nbytes, cupy.cuda.get_current_stream())


def pack(c: CSR, out: Any, *, values: bool = True) -> Packed:
    """Pack a canonical matrix on the device, on the current stream; allocate nothing there, and do not wait.

    `out`: aligned to 8 bytes. `workspace.packed_bound` says how many are enough; with fewer, arrays that do not fit are
    not packed, and `Packed` says so. `values`: whether to pack the values if they repeat.
    Raises `InputError` if `out` does not hold the directory, `MatrixError` if the GPU has no kernels for the dtype.
    """
    import cupy

    start, units = packed_start(c.nrows, c.nnz), packed_units(c.nrows, c.nnz)
    if len(out) < start + PACKED_PADDING:
        raise InputError(f"{len(out):,} bytes are too few for a packed matrix: its directory alone takes {start:,}")
    types = c_type(c.dtype), c_type(c.indices.dtype), c_type(c.indptr.dtype)
    columns, sample, coded = kernel_names(*types)
    kernels = module(FILE, (columns, sample, coded))
    at = int(out.data.ptr)
    directory, stream = at + PACKED_HEAD, at + start
    room = np.uint64(len(out) - start - PACKED_PADDING)
    out.data.memset_async(0, DICTIONARY, cupy.cuda.get_current_stream())
    unit = np.int32(packed_unit(c.nrows, c.nnz))
    grid, sizes = ceil_div(units, UNITS_PER_BLOCK), (np.int64(units), unit, np.int64(c.nrows), room)
    kernels(columns, grid, 32 * UNITS_PER_BLOCK, (*sizes, c.indptr, c.indices, at, directory, stream))
    words = words_of(c.data) if values else c.data[:0]
    parts = np.int32(c.data.nbytes // max(1, words.itemsize * c.nnz)) if values else np.int32(1)
    count = np.int64(words.size if values else 0)
    kernels(sample, 1, SAMPLE, (count, words, at, at + DICTIONARY, at + TABLE))
    if values:
        places = at + DICTIONARY, at + TABLE, at, directory, stream
        kernels(coded, grid, 32 * UNITS_PER_BLOCK, (*sizes, parts, c.indptr, words, *places))
    return Packed(c, out)


def unpack(
    packed: Bytes,
    indptr: IndexArray,
    indices: IndexArray,
    data: ValueArray | None = None,
    first: int = 0,
    last: int | None = None,
) -> None:
    """Unpack units ``[first, last)`` on the host without the interpreter's lock: threads may share the units.

    Writes the offsets of the rows that start in these units, and their entries; the call for the last unit also writes
    the last offset. There are ``workspace.packed_units(nrows, nnz)`` units, which have about as many rows and entries
    each.
    `packed`: bytes that `Packed.copy` has copied. `data`: None if the values are not packed (`Packed.values`).
    """
    from spdist.kernels.streaming import unpacking

    nrows, nnz = len(indptr) - 1, len(indices)
    units, start = packed_units(nrows, nnz), packed_start(nrows, nnz)
    last = units if last is None else last
    directory = packed[PACKED_HEAD:start].view(np.int64).reshape(units + 1, PACKED_PLACES // 8)
    unpacking.unpack_columns(packed, start, directory, first, last, indptr, indices)
    if last == units:
        indptr[nrows] = nnz
    if data is not None and nnz:
        words = words_of(data)
        dictionary = packed[DICTIONARY:TABLE].view(words.dtype)
        parts = len(words) // nnz
        unpacking.unpack_values(packed, start, directory, first, last, indptr, parts, dictionary, words)
