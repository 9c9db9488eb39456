"""Options that change each row of a product, so that the whole C is never in memory: semiring, mask, epilogue, cuts."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.errors import InputError, MatrixError, one_line
from spdist.foundation.units import check_count
from spdist.kernels.semirings import OR_AND, PLUS_TIMES, Semiring, check_function, code_of, digest
from spdist.matrices.checks import check_mask_shape
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array

NORMS = ("l1", "l2", "max")
"""Norms that rows can be divided by."""


@dataclass(frozen=True, slots=True, eq=False)
class Epilogue:
    """Operations on the values of a finished row, in this order.

    Parameters
    ----------
    rows : (nrows,) array or path, optional
        Factor for each row of C, or a file of `numpy.save` with these factors.
    columns : (ncols,) array or path, optional
        Factor for each column.
    apply : function of one number, optional
        Compiled by Numba, again in each process. Its result is converted to the dtype of C.
    normalize : {"l1", "l2", "max"}, optional
        Rows are divided by the sum of their absolute values, the root of the sum of their squares, or the largest
        absolute value; rows of zeros are not changed.
    drop_zeros : bool
        Whether to leave out entries that are zero after these operations.
    cuda : str, optional
        `apply` for the GPU, as a C expression of x: ``"x * x"``.

    Raises
    ------
    InputError
        If `normalize` is another word, a file holds no vector of numbers, or `cuda` is given without `apply`.

    Examples
    --------
    A step of Markov clustering, on a matrix whose rows sum to 1:

    >>> import numpy as np, scipy.sparse as sp, spdist
    >>> m = sp.csr_array(np.array([[0.5, 0.5, 0], [0.25, 0.5, 0.25], [0, 0.5, 0.5]]))
    >>> inflate = spdist.Epilogue(apply=lambda x: x * x, normalize="l1")
    >>> spdist.spgemm(m, m, epilogue=inflate, threshold=0.1).toarray().round(3)
    array([[0.346, 0.615, 0.   ],
           [0.167, 0.667, 0.167],
           [0.   , 0.615, 0.346]])
    """

    rows: Any = None
    columns: Any = None
    apply: Callable[[Any], Any] | None = None
    normalize: str | None = None
    drop_zeros: bool = False
    cuda: str | None = None

    def __post_init__(self) -> None:
        check_function("apply", self.apply, "x")
        if self.cuda is not None and self.apply is None:
            raise InputError(f"cuda={self.cuda!r} is the C expression of a function: pass the function as apply too")
        if self.normalize is not None and self.normalize not in NORMS:
            raise InputError(f"normalize={self.normalize!r} is not one of {', '.join(NORMS)}")
        for name in ("rows", "columns"):
            if isinstance(path := getattr(self, name), str | os.PathLike):
                object.__setattr__(self, name, _read_factors(path))

    @property
    def idle(self) -> bool:
        """Whether the epilogue changes nothing."""
        return not self.drop_zeros and all(x is None for x in (self.rows, self.columns, self.apply, self.normalize))

    def check(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
        """Check that the epilogue fits a C of this shape and dtype.

        Raises
        ------
        InputError
            If there are not as many factors as rows or columns, or values of an integer dtype would become fractions.
        """
        for name, factors, size in (("rows", self.rows, shape[0]), ("columns", self.columns, shape[1])):
            if factors is not None and np.shape(factors) != (size,):
                raise InputError(f"epilogue: {name} has shape {np.shape(factors)}, but C has {size:,} {name}")
        divides = self.rows is not None or self.columns is not None or self.normalize is not None
        if dtype.kind in "biu" and (divides or (dtype.kind == "b" and self.apply is not None)):
            raise InputError(f"epilogue: C holds {dtype}, which has no fractions: convert A or B to float64")

    def of_rows(self, start: int, stop: int) -> Epilogue:
        """Return the epilogue of rows ``[start, stop)`` of C."""
        return self if self.rows is None else replace(self, rows=self.rows[start:stop])

    def transposed(self) -> Epilogue:
        """Return the epilogue of C.T: row and column factors change places."""
        return replace(self, rows=self.columns, columns=self.rows)

    def identity(self) -> list[Any]:
        """Return facts that identify the epilogue, equal in every process."""
        factors = [None if one is None else digest(np.asarray(one).tobytes()) for one in (self.rows, self.columns)]
        code = None if self.apply is None else digest(repr(code_of(self.apply)).encode())
        return [*factors, code, self.normalize, self.drop_zeros, *([] if self.cuda is None else [self.cuda])]


def _read_factors(path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    """Return a vector that `numpy.save` wrote; map it first, so that a false header allocates nothing."""
    try:
        if not Path(path).is_file():
            raise OSError("no such file")
        with Path(path).open("rb") as file:
            start = file.read(12)
        if (
            start[:6] == np.lib.format.MAGIC_PREFIX
            and start[6:7] != b"\1"
            and int.from_bytes(start[8:], "little") > 10_000
        ):
            raise ValueError("its header is too long")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            factors = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy raises nearly every type on a damaged header
        raise InputError(
            f"{one_line(path)}: not readable as a vector of NumPy's ({one_line(error)}): write one with numpy.save"
        ) from None
    if not isinstance(factors, np.ndarray) or factors.ndim != 1 or factors.dtype.kind not in "biufc":
        what = f"{factors.dtype} of shape {factors.shape}" if isinstance(factors, np.ndarray) else "several arrays"
        raise InputError(f"{path} holds {one_line(what, 100)}: factors for rows or columns are a vector of numbers")
    return np.array(factors)


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str) and not math.isnan(float(value))
    except (TypeError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class ProductSpec:
    """Options of the rows of a product, applied in this order: semiring, mask and triangle, epilogue, threshold, top-n.

    Raises `InputError` if `top_n` is below 1, `threshold` is NaN, `sort` is no bool, or `complement` comes without a
    mask; if `triangle` is not "upper", or comes with `top_n` or a norm, which need whole rows.
    """

    semiring: Semiring = PLUS_TIMES  # adds and multiplies
    # canonical, with the rows of A and the columns of B. C has entries only where the mask has one, whatever its value.
    # If the operands are on the GPU, the mask may be there too.
    mask: CSR | None = None
    complement: bool = False  # whether C has entries only where the mask has none
    # keep this many entries of each row: the largest; of equal entries, those in smaller columns
    top_n: int | None = None
    threshold: float | None = None  # keep entries ``>= threshold``, compared in the dtype of C
    epilogue: Epilogue | None = None  # applied to finished rows before they are cut
    triangle: str | None = None  # C has entries only on and above the diagonal; products below it are not computed
    first_row: int = 0  # the number, in the whole C, of the first row of this product; the triangle counts from it
    sort: bool = True  # whether rows of C must be sorted by column. If not, kernels may still sort them.

    def __post_init__(self) -> None:
        check_count("top_n", self.top_n, "all entries")
        if self.threshold is not None and not _is_number(self.threshold):
            raise InputError(f"threshold={self.threshold!r} must be a number other than NaN")
        if type(self.epilogue) not in (type(None), Epilogue):
            raise InputError(f"epilogue={self.epilogue!r} is none: pass for instance spdist.Epilogue(normalize='l1')")
        if self.complement and self.mask is None:
            raise InputError("complement=True needs a mask")
        if not isinstance(self.sort, bool | np.bool_):
            raise InputError(f"sort={self.sort!r} is neither True nor False")
        self._check_triangle()

    def _check_triangle(self) -> None:
        if self.triangle not in (None, "upper"):
            raise InputError(
                f"triangle={self.triangle!r} is not 'upper': the lower one of a symmetric C is its transpose"
            )
        normalize = None if self.epilogue is None else self.epilogue.normalize
        for name, value in (("top_n", self.top_n), ("epilogue: normalize", normalize)):
            if self.triangle is not None and value is not None:
                raise InputError(
                    f"{name}={value!r} needs whole rows, and triangle='upper' makes the part of each from the diagonal "
                    f"on: leave one of the two out"
                )

    @property
    def diagonal(self) -> int | None:
        """The column of the diagonal in the first row if C is a triangle; None if rows are whole."""
        return None if self.triangle is None else self.first_row

    @property
    def inside(self) -> CSR | None:
        """The mask that C is confined to; None without one, or with a complement."""
        return None if self.complement else self.mask

    @property
    def selects(self) -> bool:
        """Whether finished rows are cut by a threshold or to their largest entries."""
        return self.top_n is not None or self.threshold is not None

    @property
    def fused(self) -> bool:
        """Whether kernels must mask rows or work on finished rows."""
        return self.finishes or self.mask is not None

    @property
    def finishes(self) -> bool:
        """Whether rows are changed or cut once all their products are added."""
        return self.selects or self.epilogue is not None

    @property
    def sorts(self) -> bool:
        """Whether rows are made in order of columns: always under masks, epilogues and cuts, which go by that order."""
        return self.sort or self.fused

    @property
    def functions(self) -> dict[str, tuple[Callable[..., Any], str]]:
        """The user's functions, each with its arguments, by the name that messages give it."""
        ring, found = self.semiring, {}
        if not ring.named:
            found = {f"semiring {ring.name}: {name}": (getattr(ring, name), "x, y") for name in ("add", "multiply")}
        if self.epilogue is not None and self.epilogue.apply is not None:
            found["epilogue: apply"] = self.epilogue.apply, "x"
        return found

    def facts(self) -> dict[str, Any]:
        """Return what identifies the specification besides its mask, as JSON can hold it; resuming compares it."""
        epilogue, triangle = self.epilogue, self.triangle
        return {
            "semiring": self.semiring.identity(),
            "top_n": self.top_n,
            "threshold": self.threshold,
            **({} if epilogue is None else {"epilogue": epilogue.identity()}),
            **({} if triangle is None else {"triangle": triangle}),
        }

    @property
    def unfinished(self) -> ProductSpec:
        """The specification of a partial product: without epilogue and cuts."""
        return replace(self, top_n=None, threshold=None, epilogue=None)

    @property
    def plain(self) -> bool:
        """Whether C is the whole product by plus and times."""
        return self.semiring is PLUS_TIMES and self.triangle is None and not self.fused

    def of_rows(self, start: int, stop: int) -> ProductSpec:
        """Return the specification of rows ``[start, stop)``."""
        mask = None if self.mask is None else self.mask.rows(start, stop)
        epilogue = None if self.epilogue is None else self.epilogue.of_rows(start, stop)
        return replace(self, mask=mask, epilogue=epilogue, first_row=self.first_row + start)

    def ring(self, dtype: np.dtype[Any]) -> Semiring | None:
        """Return the semiring as kernels take it: None for plus and times, or for bools OR and AND."""
        if self.semiring is not PLUS_TIMES:
            return self.semiring
        return OR_AND if dtype.kind == "b" else None

    def check(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
        """Check that the specification fits a C of this shape and dtype.

        Raises `MatrixError` if the mask has another shape, or rows of complex values are to be cut; `InputError` if no
        value of the dtype reaches the threshold, or the epilogue does not fit.
        """
        if self.mask is not None:
            check_mask_shape(self.mask.shape, shape)
        if self.epilogue is not None:
            self.epilogue.check(shape, dtype)
        if self.selects and dtype.kind == "c":
            raise MatrixError(f"values of dtype {dtype} have no order, which top_n and threshold need: pass real ones")
        if dtype.kind in "biu" and self.threshold is not None and self.threshold > _highest(dtype):
            raise InputError(f"threshold={self.threshold} is above every value of dtype {dtype}: lower it")

    def check_square(self, shape: tuple[int, int]) -> None:
        """Raise `MatrixError` if there is a triangle and C is not square."""
        if self.triangle is not None and shape[0] != shape[1]:
            raise MatrixError(
                f"triangle={self.triangle!r} is for a symmetric C, as of A @ A.T and A.T @ A, but this C is "
                f"{shape[0]:,} x {shape[1]:,}"
            )

    def check_device(self) -> None:
        """Check that the GPU has kernels for the specification."""
        if self.semiring is not PLUS_TIMES:
            self.semiring.check_device()
        if self.epilogue is not None and self.epilogue.apply is not None and self.epilogue.cuda is None:
            raise InputError(
                "epilogue: apply is a Python function, which the GPU cannot call: pass it as a C expression of x too, "
                "spdist.Epilogue(apply=lambda x: x * x, cuda='x * x')"
            )

    def least(self, dtype: np.dtype[Any]) -> Any:
        """Return the smallest value of a real `dtype` that is kept: the threshold, or without one the lowest value."""
        if dtype.kind == "f":
            return dtype.type(-math.inf if self.threshold is None else self.threshold)
        lowest = 0 if dtype.kind == "b" else int(np.iinfo(dtype).min)
        if self.threshold is None or self.threshold <= lowest:
            return dtype.type(lowest)
        return dtype.type(math.ceil(self.threshold))

    def row_entries(self, ncols: int) -> int:
        """Bound the entries of a row of C, which has `ncols` columns."""
        bounds = [ncols] if self.top_n is None else [ncols, self.top_n]
        return min(bounds if self.inside is None else [*bounds, longest_row(self.inside)])


def is_by_columns(axis: int, top_n: int | None, epilogue: Epilogue | None) -> bool:
    """Whether a product needs whole columns of C: `top_n` or a norm with an axis of 0.

    Raises `InputError` if the axis is neither 0 nor 1.
    """
    if not isinstance(axis, int | np.integer) or isinstance(axis, bool) or axis not in (0, 1):
        raise InputError(
            f"axis={axis!r} is neither 1, for the largest of each row, nor 0, for the largest of each column"
        )
    return axis == 0 and (top_n is not None or getattr(epilogue, "normalize", None) is not None)


def longest_row(m: CSR) -> int:
    """Return the number of entries of the longest row."""
    lengths: Int64Array = m.indptr[1:] - m.indptr[:-1]
    return int(lengths.max(initial=0))


def _highest(dtype: np.dtype[Any]) -> int:
    return 1 if dtype.kind == "b" else int(np.iinfo(dtype).max)


PLAIN = ProductSpec()
"""The product by plus and times, whole."""
