"""Every exception that spdist raises.

::

    SpdistError                 exit code 1: the job failed
    ├── InputError              exit code 2: what was asked for cannot work; nothing was written
    │   ├── MatrixError         not a matrix, not canonical, wrong shape, unfinished
    │   ├── MemoryBoundError    the memory limit is too small; says how much is needed
    │   └── ResumeError         the unfinished C belongs to another product
    ├── CorruptError            a Zarr chunk is missing, truncated or altered; names the array and the chunk
    └── VerificationError       C is not A @ B

Each takes one string, so that it pickles back from a worker unharmed, and the string says what is wrong, the
numbers with their units, and what to do.
"""


class SpdistError(Exception):
    """The job failed; what is finished stays, and ``--resume`` goes on from there."""

    exit_code = 1


class InputError(SpdistError, ValueError):
    """What was asked for cannot work; raised before anything is written."""

    exit_code = 2


class MatrixError(InputError):
    """A stored or given matrix is not what a product needs."""


class MemoryBoundError(InputError):
    """The memory limit cannot hold the smallest block."""


class ResumeError(InputError):
    """An unfinished C was begun from other matrices or other options."""


class CorruptError(SpdistError):
    """A Zarr chunk is missing, truncated or altered."""


class VerificationError(SpdistError):
    """C is not A @ B."""
