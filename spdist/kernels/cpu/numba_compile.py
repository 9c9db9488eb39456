"""Compile kernels by Numba; semirings are Numba types, so that their operators are compiled in."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import logging
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import cloudpickle
import numpy as np
from numba import njit, types
from numba.core import event
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache
from numba.core.dispatcher import Dispatcher
from numba.core.errors import NumbaError
from numba.extending import NativeValue, intrinsic, models, overload, register_model, typeof_impl, unbox
from numba.np.numpy_support import as_dtype, from_dtype

from spdist.errors import InputError
from spdist.foundation.phases import COMPILATIONS
from spdist.kernels.cpu.part_compiler import PartCompiler
from spdist.kernels.semirings import Semiring
from spdist.kernels.sources import kernel_sources
from spdist.matrices.dtypes import ValueArray

# No compiled function makes arrays, so that references need not be counted: threads would contend for the counters.
OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "_nrt": False, "no_cfunc_wrapper": True}
PART: dict[str, Any] = {**OPTIONS, "no_cpython_wrapper": True}
"""Options of functions that only kernels call. The code by which Python calls a function, which unpacks its arguments,
takes as long to compile as many a function."""
INLINED: Any = {"forceinline": True, **PART}
COMPILE_OBJECTS = 100_000
"""New objects, about 10 MB, after which Python looks for garbage while a kernel is compiled; it takes a tenth less."""
Function = TypeVar("Function", bound=Callable[..., Any])

log = logging.getLogger("spdist")


class _CompileListener(event.Listener):
    """Notes when Numba compiles a kernel of spdist, under Numba's lock; the kernel's parts are compiled meanwhile."""

    def __init__(self) -> None:
        self._depth = 0
        self._kernel = contextlib.ExitStack()

    def on_start(self, compiled: Any) -> None:
        """Note that a function is compiled."""
        kernel = compiled.data["dispatcher"]
        if self._depth == 0 and kernel.py_func.__module__.startswith("spdist."):
            is_kept = not isinstance(kernel._cache, NullCache)
            self._kernel.enter_context(COMPILATIONS.around(kernel.py_func.__name__, is_kept=is_kept))
            self._kernel.enter_context(_rare_collections())
        self._depth += 1

    def on_end(self, compiled: Any) -> None:
        """Note that it is compiled, or refused."""
        self._depth -= 1
        if self._depth == 0:
            self._kernel.close()


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for garbage rarely in a ``with`` block: most of the many objects that Numba makes stay."""
    before = gc.get_threshold()
    if before[0] > 0:  # collections are on
        gc.set_threshold(max(before[0], COMPILE_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


event.register("numba:compile", _CompileListener())


class _CacheFile(IndexDataCacheFile):
    """The code of a kernel for each of its types, with an index that pickles the types' classes."""

    def _load_index(self) -> Any:
        """Return no code if a class was renamed since: Numba would look whether the sources changed only afterwards."""
        try:
            return super()._load_index()  # type: ignore[no-untyped-call]
        except (AttributeError, ImportError):
            return {}


class _LockedCache(FunctionCache):
    """A kernel's cache on disk to which one process writes at a time.

    Two processes that wrote at once would take one file name for the code of two types, and Numba would later run one
    type's code with arrays of the other. Cached code is valid as long as no source of the kernels changes: Numba itself
    looks at the kernel's own file, not at the files of its parts.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        path, name = self._cache_path, self._impl.filename_base
        self._cache_file = _CacheFile(path, name, kernel_sources())  # type: ignore[no-untyped-call]

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write the code for one signature."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a file system without locks
                lock = stack.enter_context((Path(self.cache_path) / f"{self._py_func.__name__}.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


class _QuickCache(_LockedCache):
    """The cache of a kernel that counts no references: its code runs with less of Numba than compiling needs."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for one signature, or None.

        Numba would first refresh the context: load half of its modules, with SciPy's linear algebra, and compile what
        counts references. All of that takes longer than a small product, and is done anyway before Numba compiles.
        """
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]


def kept(function: Function, **options: Any) -> Function:
    """Compile a function with options of `numba.njit`; cache it on disk if Numba finds a folder it can write to."""
    try:
        cache: Any = (_LockedCache if options.get("_nrt", True) else _QuickCache)(function)
    except RuntimeError as error:
        if "cannot cache function" not in str(error):
            raise
        _warn_that_nothing_is_cached()
        cache = NullCache()
    dispatcher = njit(**options)(function)
    dispatcher._cache = cache  # what cache=True sets, with a lock
    return cast(Function, dispatcher)


@functools.cache
def _warn_that_nothing_is_cached() -> None:
    log.warning(
        "Numba may write neither to spdist's folder nor to the user's cache folder: each process compiles the kernels "
        "again, which takes some seconds; set NUMBA_CACHE_DIR to a folder that can be written to"
    )


def compiled(function: Function) -> Function:
    """Compile a kernel when it is first called with new types, and cache it on disk."""
    return kept(function, **OPTIONS)


def part(function: Function) -> Function:
    """Compile a function that kernels call: the kernels' cache on disk contains it. Python cannot call it."""
    return cast(Function, _closed_to_python(njit(pipeline_class=PartCompiler, **PART)(function)))


def tight(function: Function) -> Function:
    """Compile a part whose loops take most of the time: it is also optimised by itself, which leaves quicker loops."""
    return cast(Function, _closed_to_python(njit(**PART)(function)))


def inlined(function: Function) -> Function:
    """Compile a function into its callers: passing the arrays to it would cost as much as a short row."""
    return cast(Function, _closed_to_python(njit(pipeline_class=PartCompiler, **INLINED)(function)))


def _closed_to_python(dispatcher: Any) -> Any:
    """Let calls from Python raise an error: without this, Numba would call a null pointer."""

    def refuse(*args: Any, **keywords: Any) -> None:
        raise TypeError(f"{dispatcher.py_func.__name__} is compiled for kernels only: call a kernel, or its .py_func")

    dispatcher._compile_for_args, dispatcher._insert = refuse, lambda *args, **keywords: None
    return dispatcher


def instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that builds LLVM code be called from compiled functions."""
    return cast(Callable[..., Any], intrinsic(function))


@functools.cache
def callable_part(function: Callable[..., Any]) -> Any:
    """Return a user's function as kernels call it, one object for equal functions: kernels are compiled once for each.

    A worker gets a new copy of a lambda with every product, so that the object alone would not tell.
    """
    if isinstance(function, Dispatcher):
        return function
    return _PARTS.setdefault(content_of(function), njit(**INLINED)(function))


_PARTS: dict[Hashable, Any] = {}
"""Compiled functions of users, by `content_of`."""


@functools.cache
def content_of(function: Callable[..., Any]) -> Hashable:
    """Return a value that is equal for copies of one function: its code with all that it refers to, pickled.

    A function that lies in a module would be pickled as its name, which may come to mean another function: it stands
    for itself, as does one that cannot be pickled.
    """
    is_named = "<" not in getattr(function, "__qualname__", "")  # as in <lambda> and f.<locals>.g
    if is_named and getattr(function, "__module__", "") != "__main__":
        return function
    try:
        return bytes(cloudpickle.dumps(function))  # type: ignore[no-untyped-call]
    except Exception:  # whatever an object that the function refers to raises
        return function


def check_functions(functions: dict[str, tuple[Callable[..., Any], str]], dtype: np.dtype[Any]) -> None:
    """Raise `InputError` with the reason if Numba does not compile `ProductSpec.functions` for a C of this dtype.

    `functions`: by the name for the message: a function, and its arguments as text.
    """
    for what, (function, arguments) in functions.items():
        hashable = isinstance(function, Hashable)  # `callable_part` caches it
        reason = _refusal(function, arguments, dtype) if hashable else "it cannot be hashed"
        if reason is not None:
            name = getattr(function, "__qualname__", repr(function))
            raise InputError(
                f"{what}={name} cannot be compiled by Numba for values of {dtype}: {reason}; write lambda {arguments}: "
                f"... of arithmetic, comparisons and functions of math, which returns a number"
            )


@functools.cache
def _refusal(function: Callable[..., Any], arguments: str, dtype: np.dtype[Any]) -> str | None:
    """Return why Numba does not compile a function as kernels call it; None if it does."""
    kinds = (from_dtype(dtype),) * len(arguments.split(","))
    try:
        called = callable_part(function)
        caller = njit(**INLINED)((lambda x: called(x)) if len(kinds) == 1 else (lambda x, y: called(x, y)))
        caller.compile(kinds)
    except (NumbaError, TypeError) as error:
        lines = [line for line in str(error).splitlines() if line and not line.startswith("Failed in nopython mode")]
        return lines[0].rstrip(".") if lines else type(error).__name__
    result = types.unliteral(caller.overloads[kinds].signature.return_type)
    real = isinstance(result, types.Integer | types.Float | types.Boolean)
    return None if real or (dtype.kind == "c" and result in types.complex_domain) else f"it returns {result}"


def for_ring(function: Callable[..., Any], ring: Semiring | None) -> Any:
    """Return the kernel to call with a semiring: only kernels of named semirings are cached on disk."""
    return function if ring is None or ring.named else unsaved(function)


@functools.cache
def unsaved(function: Any) -> Any:
    """Return a kernel that is not cached on disk: another process would not find a user's own semiring or function."""
    return njit(**OPTIONS)(function.py_func)


def entry_point(kernel: Any, *arguments: Any) -> Callable[..., Any]:
    """Return the compiled code of a kernel for arguments of these types; later calls must pass the same types."""
    code: Callable[..., Any] = kernel.compile(tuple(kernel.typeof_pyval(one) for one in arguments))
    return code


class RingType(types.Opaque):
    """The Numba type of one semiring: kernels are compiled for it as for a dtype; values of it hold nothing."""

    def __init__(self, ring: Semiring) -> None:
        self.ring = ring
        super().__init__(name=f"Semiring({ring.name}, {hash(self.key)})")

    @property
    def key(self) -> Hashable:
        """Types of equal semirings are equal; of a user's own semiring, of any copy."""
        ring = self.ring
        if ring.named:
            return ring
        dtype = None if ring.dtype is None else np.dtype(ring.dtype).str
        return ring.name, content_of(ring.add), content_of(ring.multiply), ring.zero, dtype, ring.reads


register_model(RingType)(models.OpaqueModel)


@typeof_impl.register(Semiring)
def _type_of(ring: Semiring, context: Any) -> RingType:
    return RingType(ring)


@unbox(RingType)  # type: ignore[untyped-decorator]
def _unbox(kind: RingType, ring: Any, c: Any) -> Any:
    return NativeValue(c.context.get_dummy_value())


def fold(total: Any, value: Any, ring: Semiring | None) -> Any:
    """Return `total` with one product added; `ring` is None for plus and times, here and below."""
    return total + value if ring is None else ring.add(total, value)


def product(like: Any, x: Any, y: Any, ring: Semiring | None) -> Any:
    """Return the product of x, a value of A, and y, a value of B, in the type of `like`."""
    return x * y if ring is None else type(like)(ring.multiply(x, y))


def zero_of(values: ValueArray, ring: Semiring | None) -> Any:
    """Return the zero of a semiring in the dtype of an array."""
    return values.dtype.type(0) if ring is None else ring.zero_of(values.dtype)


@overload(fold, jit_options=INLINED, strict=False)
def _fold(total: Any, value: Any, ring: Any) -> Callable[..., Any]:
    if not isinstance(ring, RingType):
        return lambda total, value, ring: total + value
    add, kind = callable_part(ring.ring.add), _scalar(total)
    return lambda total, value, ring: kind(add(total, value))


@overload(product, jit_options=INLINED, strict=False)
def _product(like: Any, x: Any, y: Any, ring: Any) -> Callable[..., Any]:
    if not isinstance(ring, RingType):
        return lambda like, x, y, ring: x * y
    multiply, kind = callable_part(ring.ring.multiply), _scalar(like)
    return lambda like, x, y, ring: kind(multiply(x, y))


@overload(zero_of, jit_options=INLINED, strict=False)
def _zero_of(values: Any, ring: Any) -> Callable[..., Any]:
    dtype = as_dtype(values.dtype)
    zero = ring.ring.zero_of(dtype) if isinstance(ring, RingType) else dtype.type(0)
    return lambda values, ring: zero


@inlined
def add_product(total: Any, x: Any, y: Any, ring: Semiring | None) -> Any:
    """Return `total` with the product of x and y added."""
    return fold(total, product(total, x, y, ring), ring)


def _scalar(kind: Any) -> Any:
    """Return the NumPy scalar type of a Numba type."""
    return as_dtype(types.unliteral(kind)).type
