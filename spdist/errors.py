"""Every exception that spdist raises.

::

    SpdistError                 exit code 1: the job failed
    ├── InputError              exit code 2: the request cannot work; nothing was written
    │   ├── MatrixError         not a matrix, not canonical, wrong shape, unfinished
    │   ├── MemoryBoundError    the memory limit is too small; states how much is needed
    │   └── ResumeError         the unfinished C belongs to another product
    ├── CorruptError            a Zarr chunk is missing, truncated or altered; names the array and the chunk
    └── VerificationError       C is not A @ B

Each takes one string, so that it pickles from a worker to the client. The string says what is wrong, states the numbers
with their units, and says what to do.
"""


class SpdistError(Exception):
    """The job failed; finished blocks are kept, and ``--resume`` continues from them."""

    exit_code = 1


class InputError(SpdistError, ValueError):
    """The request cannot work; raised before anything is written."""

    exit_code = 2


class MatrixError(InputError):
    """A stored or given matrix is not what a product needs."""


class MemoryBoundError(InputError):
    """The memory limit cannot hold the smallest block."""


class ResumeError(InputError):
    """An unfinished C was started from other matrices or with other options."""


class CorruptError(SpdistError):
    """A Zarr chunk is missing, truncated or altered."""


class VerificationError(SpdistError):
    """C is not A @ B."""
