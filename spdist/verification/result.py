"""What a verification returns, and the error with which a check ends it early."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes
    ----------
    ok : bool
        Whether C is A @ B, as far as the check can tell.
    reason : str
        One line: what is wrong, with row, column and figures, or why C is taken to be right.
    rows, nnz : int
        Of C.
    vectors : int
        Random vectors used; 0 where every row was recomputed.
    method : str
        ``freivalds`` (float, complex), ``modular`` (integers) or ``recompute`` (bool).
    smallest_error : float
        An error of one value of C that is larger than this, in units of its row's sum of ``|A||B|``, is caught with
        certainty; of the worst row. 0 means any error. Where C is false: as far as the check came.
    seconds : float
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
