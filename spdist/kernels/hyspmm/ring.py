"""The ring of memory that threads fill with prepared blocks, and the words that they share; compiled by Numba."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import types

from spdist.kernels.cpu.arrays import Integer
from spdist.kernels.cpu.numba_compile import compiled, instruction
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray

if TYPE_CHECKING:
    from numba.core.base import BaseContext

TAKEN, NEXT, RESERVED, FREED, CLOSED = range(0, 40, 8)
"""Words of the state that threads share, each on its own cache line: number of blocks taken, number of the block that
reserves its room next, bytes of the ring reserved and freed since the start, and whether to stop."""
STATE = 48
"""64-bit words of the state."""
NAP = 20
"""Microseconds that a thread sleeps while the ring is full."""

usleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))
sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())


class Ring(NamedTuple):
    """The ring's memory, seen as arrays of four dtypes."""

    values: ValueArray
    columns: IndexArray
    pointers: IndexArray
    numbers: IndexArray  # numbers of rows of B, of 4 bytes
    room: int  # bytes


class SharedState(NamedTuple):
    """Arrays that the threads write and that other threads and the caller read."""

    words: Int64Array  # (STATE,): see `TAKEN`
    ready: Int64Array  # (blocks,): 1 once a block and its report may be read
    reports: Int64Array  # (blocks, words of a report)


def _word(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, value=args[0])
    return builder.gep(array.data, [args[1]])


@instruction
def atomic_add(context: BaseContext, words: types.Type, at: types.Type, value: types.Type) -> Any:
    """Add `value` to the word at place `at`, and return its old value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(context, builder, signature, args), args[2], "seq_cst")

    return types.int64(words, types.intp, types.int64), generate


@instruction
def atomic_load(context: BaseContext, words: types.Type, at: types.Type) -> Any:
    """Read the word at place `at`, which another thread writes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(context, builder, signature, args), "seq_cst", 8)

    return types.int64(words, types.intp), generate


@instruction
def atomic_store(context: BaseContext, words: types.Type, at: types.Type, value: types.Type) -> Any:
    """Write the word at place `at`, which another thread reads; it sees earlier writes of this thread then."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _word(context, builder, signature, args), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.int64), generate


@compiled
def reserve_room(state: Int64Array, number: Integer, size: Integer, room: Integer) -> Any:
    """Reserve `size` of the ring's `room` bytes after all earlier blocks have; return their place, or -1 if it closed.

    Places are counted without wrapping around. A block that does not fit before the end of the ring starts at its
    beginning.
    """
    while atomic_load(state, NEXT) != number:
        if atomic_load(state, CLOSED):
            return np.int64(-1)
        sched_yield()
    used = atomic_load(state, RESERVED)
    begin = used
    if begin % room + size > room:
        begin += room - begin % room
    while True:
        freed = atomic_load(state, FREED)
        if begin + size - freed <= room or freed == used:  # or the whole ring is free, skipped bytes included
            break
        if atomic_load(state, CLOSED):
            return np.int64(-1)
        usleep(NAP)
    atomic_store(state, RESERVED, begin + size)
    atomic_store(state, NEXT, number + 1)
    return begin


@compiled
def wait_ready(ready: Int64Array, number: Integer, tries: Integer) -> bool:
    """Look at most `tries` times whether a block is ready, and return whether it is."""
    for _ in range(tries):
        if atomic_load(ready, number):
            return True
        sched_yield()
    return False


@compiled
def free_place(state: Int64Array, end: Integer) -> None:
    """Free the ring's bytes before place `end`, counted without wrapping around."""
    atomic_store(state, FREED, end)


@compiled
def close(state: Int64Array) -> None:
    """Ask the threads to stop."""
    atomic_store(state, CLOSED, 1)
