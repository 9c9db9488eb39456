"""Less over the wire: C packed on the GPU, copied to the host, unpacked there by several threads.

::

    packed = pack(c, out)                    # queued on the current stream; `out` are bytes on the device
    packed.wait().choose(threads)            # the only wait: now its sizes are known
    packed.copy(host)                        # queued; `host` are pinned bytes
    unpack(host, indptr, indices, data)      # or a range of units in each of several threads

Columns are differences of few bits, and nothing where a row has the pattern of the row before, moved (stencils, nodes
of finite elements). Values are numbers of a dictionary, and nothing where a row has those of the row before, if a
sample has no more than 256 different ones. Else they do not pass through here: the caller copies ``c.data`` to where it
is wanted. All bits are kept, those of NaN too. ``packing.cu`` has the format, `unpacking` the code of the host.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.errors import InputError
from spdist.kernels.cuda import constants
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

PACKED_KINDS = "fc"
"""Kinds of the dtypes of matrices that are packed."""
USED, COLUMNS, DISTINCT = map(int, constants.PackedCount)
NUMBERS = len(constants.PackedCount)
"""The numbers at the start: bytes of all units, of their columns, words of the dictionary."""
DICTIONARY, WORDS = 64, constants.PACKED_WORDS
TABLE = DICTIONARY + 8 * WORDS
"""Where the dictionary starts, its words at most, where its hash table starts."""
SAMPLE = constants.PACKED_SAMPLE
Way = Literal["plain", "columns", "both"]
"""What of a matrix is packed: nothing, its columns, its columns and values."""
WORTH = 0.9
"""Of the plain copy's time, what the packed one may take where it is chosen."""
WIRE_GB_S = 55.0
# What the host does, fitted to what benchmarks/packing.py measures:
THREAD_GB_S, HOST_GB_S = 13.0, 65.0
"""Gigabytes a second that a thread writes, and all of them."""
ENTRY_SECONDS, ROW_SECONDS, BLOCK_SECONDS = 0.6e-9, 6e-9, 2e-4
"""Of a thread for an entry that does not repeat the row before, and for a row; of all for a block."""
ENTRY_BITS = 6
"""Such an entry takes so many bits or more: how many there are is not counted."""
SPEED_UP = 0.85
"""Threads are as quick as so many to this power."""


def sources(value: str, index: str, pointer: str) -> dict[str, tuple[str, ...]]:
    """Return the name expressions of each .cu file, for C types such as ``"double"``, ``"int"``, ``"int"``."""
    word = "u32" if value == "float" else "u64"
    names = f"pack_columns<{index}, {pointer}>", f"sample_values<{word}>", f"pack_values<{word}, {pointer}>"
    return {"streaming/packing.cu": names}


def words_of(data: Any) -> Any:
    """Return values as unsigned numbers of 4 bytes, or of 8: one for each value, two for complex128."""
    return data.view(np.uint32 if data.dtype.itemsize == 4 else np.uint64)


class Sizes(NamedTuple):
    """Sizes of a matrix: rows, entries, bytes of all and of the values."""

    nrows: int
    nnz: int
    nbytes: int
    values: int


def seconds(c: Sizes, packed: int, apart: int, threads: int, wire_gb_s: float = WIRE_GB_S) -> float:
    """Predict how long a packed matrix takes to the host's memory, where wire and threads work at the same time.

    Parameters
    ----------
    c : Sizes
    packed, apart : int
        Bytes over the wire that are unpacked, and those that are copied as they are.
    threads : int
        Threads of the host that unpack.
    wire_gb_s : float
        55 GB/s for PCIe 5, 43 each way where both are busy.
    """
    written, decoded = c.nbytes - apart, min(c.nnz, 8 * packed / ENTRY_BITS)
    one = written / (1e9 * THREAD_GB_S) + decoded * ENTRY_SECONDS + c.nrows * ROW_SECONDS
    host = max(one / math.pow(threads, SPEED_UP), written / (1e9 * HOST_GB_S))
    return BLOCK_SECONDS + max((packed + apart) / (1e9 * wire_gb_s), host)


def choose(c: Sizes, columns: int, both: int, threads: int, wire_gb_s: float = WIRE_GB_S) -> Way:
    """Return what to pack.

    Parameters
    ----------
    c : Sizes
    columns, both : int
        Packed bytes without the values and with them; 0 where they are not packed.
    threads, wire_gb_s
        As for `seconds`.

    Examples
    --------
    >>> random = Sizes(nrows=60_000, nnz=16_000_000, nbytes=192_240_000, values=128_000_000)
    >>> [choose(random, 28_000_000, 0, threads) for threads in (4, 8)]
    ['plain', 'columns']
    """
    ways: dict[Way, float] = {"plain": WORTH * c.nbytes / (1e9 * wire_gb_s)}
    if columns:
        ways["columns"] = seconds(c, columns, c.values, threads, wire_gb_s)
    if both:
        ways["both"] = seconds(c, both, 0, threads, wire_gb_s)
    return min(ways, key=ways.__getitem__)


class Packed:
    """A matrix that is packed on the device, or will be: its sizes are known after `wait`.

    Attributes
    ----------
    columns : bool
        Whether the columns are packed. If not, `out` was too small for them: copy the matrix as it is.
    values : bool
        Whether the values are packed too. If not, copy ``c.data`` as it is.
    nbytes : int
        Bytes that `copy` copies; 0 if nothing is packed.
    why : str
        Why columns or values are not packed, in a line for a log.
    source : int
        Where its bytes are on the device.
    pointer : numpy.dtype
        Of the offsets.

    Examples
    --------
    A block on its way::

        packed = pack(c, out).wait().choose(threads=8)
        if packed.columns:
            packed.copy(host)
        else:
            ...  # copy c.indptr and c.indices
        if not packed.values:
            ...  # copy c.data
    """

    def __init__(self, c: CSR, out: Any) -> None:
        import cupy
        import cupyx

        self.columns = self.values = False
        self.nbytes, self.why = 0, ""
        self._out, self._sizes = out, Sizes(c.nrows, c.nnz, c.nbytes, c.data.nbytes)
        self._start = packed_start(c.nrows, c.nnz)
        self.source, self.pointer = int(out.data.ptr), c.indptr.dtype
        self._numbers = cupyx.empty_pinned(NUMBERS, np.uint64)
        # Written by a kernel: a copy would wait behind those of other streams.
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
            self.why = f"columns take {columns:,} bytes, more than the {room:,} there are"
        elif not self.values:
            self.why = "values hardly repeat" if distinct else f"values have more than {WORDS} different words"
        self._with_columns, self._with_values = (self._start + bytes_ + PACKED_PADDING for bytes_ in (columns, used))
        self.nbytes = self._with_values if self.values else self._with_columns if self.columns else 0
        return self

    def choose(self, threads: int, wire_gb_s: float = WIRE_GB_S) -> Packed:
        """Leave out what is quicker copied as it is; `threads` of the host will unpack."""
        columns, both = self._with_columns * self.columns, self._with_values * self.values
        way = choose(self._sizes, columns, both, threads, wire_gb_s)
        if way == "plain" and self.columns:
            self.columns, self.values, self.nbytes = False, False, 0
            self.why = f"{threads} threads unpack no quicker than the wire copies all"
        elif way == "columns" and self.values:
            self.values, self.nbytes = False, columns
            self.why = f"{threads} threads write values no quicker than the wire"
        return self

    def copy(self, host: Bytes) -> None:
        """Copy the packed bytes to the host, on the current stream; `host` is pinned and holds at least `nbytes`."""
        import cupy

        if len(host) < self.nbytes:
            raise InputError(f"{self.nbytes:,} packed bytes do not fit in a buffer of {len(host):,}")
        self._out.data.copy_to_host_async(host.ctypes.data, self.nbytes, cupy.cuda.get_current_stream())


def pack(c: CSR, out: Any, *, values: bool = True) -> Packed:
    """Pack a matrix on the device, on the current stream; nothing is allocated there, nothing waited for.

    Parameters
    ----------
    c : CSR
        Arrays of cupy, canonical; float32, float64, complex64 or complex128.
    out : cupy.ndarray of uint8
        Aligned to 8 bytes. `workspace.packed_bound` says how many are enough; with fewer, what does not fit is not
        packed, and `Packed` says so.
    values : bool
        Whether to pack the values if they repeat.

    Returns
    -------
    Packed

    Raises
    ------
    InputError
        If `out` does not hold the directory.
    MatrixError
        If the dtype is not multiplied on the GPU.
    """
    import cupy

    start, units = packed_start(c.nrows, c.nnz), packed_units(c.nrows, c.nnz)
    if len(out) < start + PACKED_PADDING:
        raise InputError(f"{len(out):,} bytes are too few for a packed matrix: its directory alone takes {start:,}")
    types = c_type(c.dtype), c_type(c.indices.dtype), c_type(c.indptr.dtype)
    columns, sample, coded = sources(*types)["streaming/packing.cu"]
    kernels = module("streaming/packing.cu", (columns, sample, coded))
    at = int(out.data.ptr)
    directory, stream = at + PACKED_HEAD, at + start
    room = np.uint64(len(out) - start - PACKED_PADDING)
    out.data.memset_async(0, DICTIONARY, cupy.cuda.get_current_stream())
    unit = np.int32(packed_unit(c.nrows, c.nnz))
    grid, sizes = ceil_div(units, 8), (np.int64(units), unit, np.int64(c.nrows), room)
    kernels(columns, grid, 256, (*sizes, c.indptr, c.indices, at, directory, stream))
    words = words_of(c.data) if values else c.data[:0]
    parts = np.int32(c.data.nbytes // max(1, words.itemsize * c.nnz)) if values else np.int32(1)
    count = np.int64(words.size if values else 0)
    kernels(sample, 1, SAMPLE, (count, words, at, at + DICTIONARY, at + TABLE))
    if values:
        places = at + DICTIONARY, at + TABLE, at, directory, stream
        kernels(coded, grid, 256, (*sizes, parts, c.indptr, words, *places))
    return Packed(c, out)


def unpack(
    packed: Bytes,
    indptr: IndexArray,
    indices: IndexArray,
    data: ValueArray | None = None,
    first: int = 0,
    last: int | None = None,
) -> None:
    """Unpack units ``[first, last)`` on the host, without the interpreter's lock; each may have a thread of its own.

    Parameters
    ----------
    packed : (nbytes,) uint8
        What `Packed.copy` has copied.
    indptr : (nrows + 1,) int32 or int64
        Written, for the rows that start in these units, from 0 on; its end by the last unit.
    indices : (nnz,) int32 or int64
        Written for the entries of these units.
    data : (nnz,), optional
        Likewise; leave it out where the values are not packed (`Packed.values`).
    first, last : int
        There are ``workspace.packed_units(nrows, nnz)`` units, of about as many rows and entries each.
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
