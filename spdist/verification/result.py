"""What a verification returns, and the error with which a check ends it early."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes
    ----------
    ok : bool
        Whether C is A @ B, as far as the check can tell.
    reason : str
        One line: what is wrong, with row, column and figures, or why C is accepted.
    rows, nnz : int
        Rows and entries of C.
    vectors : int
        Random vectors used; 0 if every row was recomputed.
    method : str
        ``freivalds`` (float, complex), ``modular`` (integers), ``recompute`` (bool) or ``sampled``.
    smallest_error : float
        A larger error in one value of C is certain to be caught. In units of the sum of ``|A||B|`` of the value's row,
        of the worst row; 0 means any error. If C is wrong, of the rows that were checked.
    seconds : float
        Wall-clock time of the check.
    """

    ok: bool
    reason: str
    rows: int
    nnz: int
    vectors: int
    method: str
    smallest_error: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dictionary that JSON can hold."""
        return asdict(self)


class WrongProductError(Exception):
    """C is wrong; the message says where and why. It ends a check and never leaves `verify`."""
