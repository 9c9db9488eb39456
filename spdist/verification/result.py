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
        Any larger error in one value of C is caught. The unit is the sum of ``|A||B|`` over the value's row. Rows
        differ; this is the largest of their bounds. 0 means that every error is caught. If C is wrong, only rows that
        were checked count.
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
