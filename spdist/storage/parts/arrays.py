"""Views of stored arrays, read like a `ChunkedArray`: a range of one, and several one after another."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import numpy as np

from spdist.matrices.dtypes import ValueArray
from spdist.storage.chunked_array import ChunkedArray, InChunks


class View(InChunks, ABC):
    """What views of arrays share: all is read by `read`."""

    chunk: int  # elements to read at a time, so that few Zarr chunks are decoded twice

    @abstractmethod
    def read(self, first: int, last: int) -> ValueArray:
        """Read elements ``[first:last)``."""

    def read_into(self, out: ValueArray, first: int) -> None:
        """Fill `out` with the elements from `first` on."""
        out[:] = self.read(first, first + len(out))


@dataclass(frozen=True)
class Range(View):
    """Elements ``[first : first + length)`` of an array, less `base`."""

    array: ChunkedArray
    first: int
    length: int
    base: int = 0

    @property
    def chunk(self) -> int:  # type: ignore[override]
        """Elements of a Zarr chunk of the array."""
        return self.array.chunk

    @property
    def dtype(self) -> np.dtype[Any]:  # type: ignore[override]
        """Dtype of the array; int64 of offsets."""
        return np.dtype(np.int64) if self.base else self.array.dtype

    def read(self, first: int, last: int) -> ValueArray:
        """Read elements ``[first:last)``."""
        found = self.array.read(self.first + first, self.first + last)
        return found.astype(np.int64) - self.base if self.base else found

    def read_into(self, out: ValueArray, first: int) -> None:
        """Fill `out` with the elements from `first` on."""
        if self.base:
            out[:] = self.read(first, first + len(out))
        else:
            self.array.read_into(out, self.first + first)


@dataclass(frozen=True)
class Joined(View):
    """The first elements of several arrays, one after another; what is read from each is raised by its base."""

    name: str
    arrays: tuple[ChunkedArray, ...]
    lengths: tuple[int, ...]  # elements that are taken of each
    bases: tuple[int, ...]
    chunk: int
    dtype: np.dtype[Any] = field(compare=False)
    folders: tuple[str, ...] = ()  # where each array's matrix lies, relative to this one

    @cached_property
    def starts(self) -> list[int]:
        """Position of the first element of each array, and the length of all."""
        return list(accumulate(self.lengths, initial=0))

    @property
    def length(self) -> int:  # type: ignore[override]
        """Elements of all."""
        return self.starts[-1]

    def read(self, first: int, last: int) -> ValueArray:
        """Read elements ``[first:last)``."""
        if first >= last:
            return np.empty(0, self.dtype)
        i = bisect.bisect_right(self.starts, first) - 1
        if last <= self.starts[i + 1] and not self.bases[i]:
            return self.arrays[i].read(first - self.starts[i], last - self.starts[i])
        out = np.empty(last - first, self.dtype)
        self.read_into(out, first)
        return out

    def read_into(self, out: ValueArray, first: int) -> None:
        """Fill `out` with the elements from `first` on."""
        done, last = first, first + len(out)
        while done < last:
            i = bisect.bisect_right(self.starts, done) - 1
            stop = min(last, self.starts[i + 1])
            piece = out[done - first : stop - first]
            self.arrays[i].read_into(piece, done - self.starts[i])
            if self.bases[i]:
                piece += self.bases[i]
            done = stop

    def digests(self) -> Iterator[bytes]:
        """Yield the digests of each array, as `ChunkedArray.digests`."""
        for array in self.arrays:
            yield from array.digests()

    def chunk_keys(self) -> list[str]:
        """Return the keys of all Zarr chunks, relative to this matrix."""
        return [
            f"{folder}/{key}" for folder, one in zip(self.folders, self.arrays, strict=True) for key in one.chunk_keys()
        ]


def arrays_of(array: ChunkedArray | View) -> list[ChunkedArray]:
    """Return the stored arrays that are read for one array of a matrix."""
    if isinstance(array, Range):
        return arrays_of(array.array)
    return list(array.arrays) if isinstance(array, Joined) else [cast(ChunkedArray, array)]
