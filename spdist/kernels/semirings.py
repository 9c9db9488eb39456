"""Semirings: the functions that add and multiply in a product. Plain Python; `cpu.numba_compile` compiles them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from spdist.errors import InputError, MatrixError
from spdist.matrices.dtypes import check_dtype

Operator = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Semiring:
    """Replacements of plus and times: ``C[i, j] = add over k of multiply(A[i, k], B[k, j])``.

    Only those k take part for which both A and B have an entry, and C has an entry if there is such a k; so no value
    needs to annihilate. Products are added in the order of k, the first one to `zero`.

    Parameters
    ----------
    add, multiply : functions of two numbers
        Pure, and made of operations that Numba compiles. Each result is converted to the dtype of C.
    zero : number
        The identity of `add`: ``add(zero, x) == x`` for every x. For integers ``math.inf`` and ``-math.inf`` stand for
        the highest and the lowest value. An infinite zero says that `add` compares, which complex numbers cannot.
    dtype : dtype, optional
        Dtype of C; the values of A and B are converted to it as by ``astype``. By default NumPy's ``result_type`` of
        the operands that are read, or int64 if that is bool.
    reads : {"ab", "a", "b", ""}
        Operands whose values `multiply` uses; the values of the other operands are undefined. "" needs a `dtype`.
    name : str
        Name in messages.
    cuda : (str, str), optional
        `add` and `multiply` for the GPU, as C expressions of x and y, which have the dtype of C. Without them the GPU
        does not multiply by the semiring.

    Raises
    ------
    InputError
        If `dtype` is missing, or `reads` is not one of the four words.

    Notes
    -----
    Compiled kernels for the named semirings are cached on disk; kernels for a user's own semiring are compiled again in
    each process, which takes some seconds.

    Examples
    --------
    The most reliable path of at most two steps, probabilities on the edges, lost below 0.1 a step:

    >>> import numpy as np, scipy.sparse as sp, spdist
    >>> best = spdist.Semiring(lambda x, y: x if x > y else y, lambda x, y: x * y if y > 0.1 else 0.0, 0.0)
    >>> a = sp.csr_array(np.array([[0, 0.5, 0.9], [0, 0, 0.2], [0, 0.4, 0]]))
    >>> spdist.spgemm(a, a, semiring=best).toarray()
    array([[0.  , 0.36, 0.1 ],
           [0.  , 0.08, 0.  ],
           [0.  , 0.  , 0.08]])
    """

    add: Operator
    multiply: Operator
    zero: float = 0
    dtype: npt.DTypeLike | None = None
    reads: Literal["ab", "a", "b", ""] = "ab"
    name: str = "one's own"
    cuda: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        for name, function in (("add", self.add), ("multiply", self.multiply)):
            check_function(name, function, "x, y")
        if self.reads not in ("ab", "a", "b", ""):
            raise InputError(f"reads={self.reads!r} of a semiring is not one of 'ab', 'a', 'b', ''")
        if not self.reads and self.dtype is None:
            raise InputError("a semiring that reads neither A's values nor B's needs the dtype of C")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a named semiring by its name, so that another process finds its own object of that name."""
        if self.named:
            return find, (self.name,)
        return Semiring, (self.add, self.multiply, self.zero, self.dtype, self.reads, self.name, self.cuda)

    @property
    def named(self) -> bool:
        """Whether it is one of `SEMIRINGS`."""
        return SEMIRINGS.get(self.name) is self

    def identity(self) -> str:
        """Return text that identifies the semiring in every process: its name, for a user's own semiring with a digest.

        The digest covers the code of `add` and `multiply` and the values they close over, not functions they call.
        """
        if self.named:
            return self.name
        codes = [code_of(function) for function in (self.add, self.multiply)]
        dtype = None if self.dtype is None else np.dtype(self.dtype).str
        facts = codes, self.zero, dtype, self.reads, *([] if self.cuda is None else [self.cuda])
        return f"{self.name} {digest(repr(facts).encode())}"

    def result_dtype(self, a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype of C.

        Raises
        ------
        MatrixError
            If spdist does not multiply it, or it is complex and `add` compares.
        """
        read = [check_dtype(dtype) for operand, dtype in (("a", a), ("b", b)) if operand in self.reads]
        dtype = np.dtype(self.dtype) if self.dtype is not None else np.result_type(*read)
        if self.dtype is None and dtype.kind == "b" and self is not PLUS_TIMES:
            dtype = np.dtype(np.int64)
        if dtype.kind == "c" and math.isinf(np.real(self.zero)):
            raise MatrixError(f"complex values have no order, which semiring {self.name} needs: pass real ones")
        return check_dtype(dtype)

    def zero_of(self, dtype: np.dtype[Any]) -> Any:
        """Return the identity of `add` as a NumPy scalar."""
        if dtype.kind in "iu" and math.isinf(np.real(self.zero)):
            return dtype.type(np.iinfo(dtype).max if self.zero > 0 else np.iinfo(dtype).min)
        return dtype.type(self.zero)

    def check_device(self) -> tuple[str, str]:
        """Return the expressions for the GPU.

        Raises
        ------
        InputError
            If the semiring has no expressions for the GPU.
        """
        if self.cuda is None:
            raise InputError(
                f"semiring {self.name} has no C expressions, which the GPU needs: pass "
                f"spdist.Semiring(..., cuda=('y < x ? y : x', 'x + y')) with the expressions of your add and multiply"
            )
        return self.cuda

    def defines(self, dtype: np.dtype[Any]) -> tuple[str, ...]:
        """Return the compiler's options for the GPU's kernels, whose own operators are plus and times.

        Raises
        ------
        InputError
            If there are no C expressions.
        """
        if self is PLUS_TIMES:
            return OR_AND.defines(dtype) if dtype.kind == "b" else ()
        add, multiply = self.check_device()
        zero = c_literal(self.zero_of(dtype))
        kind = ATOMICS.get(add.strip(), "CAS")
        return f"-DSPDIST_ADD={add}", f"-DSPDIST_MULTIPLY={multiply}", f"-DSPDIST_ZERO={zero}", f"-DSPDIST_{kind}"

    def has_atomics(self, dtype: np.dtype[Any]) -> bool:
        """Whether threads of the GPU can add to one sum concurrently; complex numbers add by plus alone."""
        return self is PLUS_TIMES or dtype.kind != "c" or (self.cuda or ("",))[0].strip() == C_PLUS


C_PLUS, C_MIN, C_MAX, C_OR = "x + y", "y < x ? y : x", "y > x ? y : x", "x | y"
ATOMICS = {C_PLUS: "ATOMIC_ADD", C_MIN: "ATOMIC_MIN", C_MAX: "ATOMIC_MAX", C_OR: "ATOMIC_OR"}
"""Macro of the GPU's atomic instruction for each expression of `add`; other sums compare and swap."""


def c_literal(value: np.generic) -> str:
    """Return a NumPy scalar as a C literal with the same bits."""
    dtype, number = value.dtype, value.item()
    if dtype.kind == "c":
        parts = np.array([value]).view(dtype.char.lower())
        return f"Complex<{'float' if dtype.itemsize == 8 else 'double'}>({c_literal(parts[0])}, {c_literal(parts[1])})"
    if dtype.kind == "f":
        bits = int.from_bytes(value.tobytes(), "little")
        return f"__int_as_float(0x{bits:x})" if dtype.itemsize == 4 else f"__longlong_as_double(0x{bits:x}ull)"
    return f"(i64)0x{int(number) & (1 << 64) - 1:x}ull"


def digest(content: bytes) -> str:
    """Return a digest of some bytes."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def check_function(name: str, function: Any, arguments: str) -> None:
    """Raise `InputError` for values that are no function, and for NumPy's ufuncs, which Numba does not compile.

    `arguments`: arguments of the function, for the message: ``"x, y"``. None passes.
    """
    if function is not None and (isinstance(function, np.ufunc) or not callable(function)):
        raise InputError(f"{name}={function!r} is no function of numbers: write lambda {arguments}: ... around it")


def code_of(function: Callable[..., Any]) -> Any:
    """Return the code of a function, its defaults and the values it closes over, to be compared."""
    function = getattr(function, "py_func", function)  # of a function that Numba compiled
    if not hasattr(function, "__code__"):
        return repr(function)
    cells = [repr(cell.cell_contents) for cell in function.__closure__ or ()]
    return _constants(function.__code__), repr(function.__defaults__), cells


def _constants(code: Any) -> Any:
    """Return code and constants, inner functions included, without file names and line numbers."""
    inner = [_constants(one) if hasattr(one, "co_code") else one for one in code.co_consts]
    return code.co_code, code.co_names, inner


def plus(x: Any, y: Any) -> Any:
    """Return the sum."""
    return x + y


def times(x: Any, y: Any) -> Any:
    """Return the product."""
    return x * y


def smaller(x: Any, y: Any) -> Any:
    """Return the smaller; y never wins if it is NaN."""
    return y if y < x else x


def larger(x: Any, y: Any) -> Any:
    """Return the larger; y never wins if it is NaN."""
    return y if y > x else x


def either(x: Any, y: Any) -> Any:
    """Return the bitwise OR of x and y."""
    return x | y


def both(x: Any, y: Any) -> Any:
    """Return the bitwise AND of x and y."""
    return x & y


def pair(x: Any, y: Any) -> Any:
    """Return 1, whatever the values of the two entries."""
    return 1


def first(x: Any, y: Any) -> Any:
    """Return x."""
    return x


def second(x: Any, y: Any) -> Any:
    """Return y."""
    return y


PLUS_TIMES = Semiring(plus, times, name="plus_times")
OR_AND = Semiring(either, both, dtype=np.bool_, name="or_and", cuda=(C_OR, "x & y"))

SEMIRINGS = {
    semiring.name: semiring
    for semiring in (
        PLUS_TIMES,
        OR_AND,
        Semiring(smaller, plus, math.inf, name="min_plus", cuda=(C_MIN, C_PLUS)),
        Semiring(larger, plus, -math.inf, name="max_plus", cuda=(C_MAX, C_PLUS)),
        Semiring(larger, times, -math.inf, name="max_times", cuda=(C_MAX, "x * y")),
        Semiring(larger, smaller, -math.inf, name="max_min", cuda=(C_MAX, C_MIN)),
        Semiring(plus, pair, dtype=np.int64, reads="", name="plus_pair", cuda=(C_PLUS, "1")),
        Semiring(plus, first, reads="a", name="plus_first", cuda=(C_PLUS, "x")),
        Semiring(plus, second, reads="b", name="plus_second", cuda=(C_PLUS, "y")),
        Semiring(second, pair, dtype=np.bool_, reads="", name="any_pair", cuda=(C_OR, "1")),
    )
}
"""The named semirings."""


def transposed(semiring: Semiring) -> Semiring:
    """Return the semiring by which ``B.T @ A.T`` is the transpose of ``A @ B``.

    Raises `InputError` if the semiring is a user's own: whether its operands may change places is not known.
    """
    if not semiring.named:
        raise InputError(
            f"axis=0 multiplies B.T by A.T, and semiring {semiring.name} may not allow its operands to change places: "
            f"multiply the transposes with axis=1 by a semiring whose first operand is B's value, and transpose the "
            f"result"
        )
    others = {"plus_first": "plus_second", "plus_second": "plus_first"}
    return SEMIRINGS[others.get(semiring.name, semiring.name)]


def find(semiring: str | Semiring) -> Semiring:
    """Return a semiring by name, or the one given; raise `InputError` if no semiring has that name."""
    if isinstance(semiring, Semiring):
        return semiring
    if semiring not in SEMIRINGS:
        raise InputError(
            f"semiring={semiring!r} is not one of {', '.join(SEMIRINGS)}; pass spdist.Semiring(add, multiply, zero) "
            f"for one of your own"
        )
    return SEMIRINGS[semiring]
