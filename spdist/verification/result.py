"""The result of a verification, and the error that ends a check at the first wrong row."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Verification:
    """The result of `verify`."""

    ok: bool  # whether C passed the check
    reason: str  # one line: what is wrong, with row, column and figures, or why C is accepted
    # rows and entries of C
    rows: int
    nnz: int
    vectors: int  # random vectors used; 0 if every row was recomputed
    method: str  # ``freivalds`` (float, complex), ``modular`` (integers), ``recompute`` (bool) or ``sampled``
    # the check finds every larger error in one value of C. The unit is the sum of ``|A||B|`` over the value's row; this
    # is the largest bound of all rows. 0 means that every error is found. If C is wrong, only rows that were checked
    # count.
    smallest_error: float
    seconds: float  # wall-clock time of the check

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dictionary that JSON can hold."""
        return asdict(self)


class WrongProductError(Exception):
    """C is wrong; the message says where and why. It ends a check and never leaves `verify`."""
