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
with their units, and says what to do; secrets in it are hidden.
"""

from __future__ import annotations

from spdist.shown import printable, without_secrets


class SpdistError(Exception):
    """The job failed; finished blocks are kept, and ``--resume`` continues from them.

    Examples
    --------
    >>> CorruptError("A.zarr: a chunk is missing").exit_code, InputError("C.zarr exists").exit_code
    (1, 2)
    """

    exit_code = 1

    def __init__(self, text: str = "") -> None:
        super().__init__(without_secrets(text))


class InputError(SpdistError, ValueError):
    """The request cannot work; raised before anything is written.

    Examples
    --------
    >>> import spdist
    >>> spdist.multiply("A.zarr", "A.zarr", "C.zarr", workers=0)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    InputError: workers=0 ...
    """

    exit_code = 2


class MatrixError(InputError):
    """A stored or given matrix is not what a product needs.

    Examples
    --------
    >>> import scipy.sparse as sp, spdist
    >>> spdist.spgemm(sp.eye_array(2), sp.eye_array(3))  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    MatrixError: A is 2 x 2, B 3 x 3 ...
    """


class MemoryBoundError(InputError):
    """The memory limit cannot hold the smallest block.

    Examples
    --------
    >>> import scipy.sparse as sp, spdist
    >>> a = spdist.save("memory://A.zarr", sp.eye_array(3), overwrite=True)
    >>> spdist.plan(a, a, memory_limit=1)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    MemoryBoundError: ...
    """


class ResumeError(InputError):
    """An unfinished C was started from other matrices or with other options.

    Examples
    --------
    >>> spdist.multiply("other.zarr", "B.zarr", "C.zarr", resume=True)  # doctest: +SKIP
    Traceback (most recent call last):
    ResumeError: C.zarr is a product of other matrices or options: ...
    """


class CorruptError(SpdistError):
    """A Zarr chunk is missing, truncated or altered.

    Examples
    --------
    >>> spdist.verify("A.zarr", "B.zarr", "C.zarr")  # doctest: +SKIP
    Traceback (most recent call last):
    CorruptError: C.zarr: ...
    """


class VerificationError(SpdistError):
    """C is not A @ B; C is kept for inspection.

    Examples
    --------
    >>> spdist.multiply("A.zarr", "B.zarr", "C.zarr", resume=True, check=True)  # doctest: +SKIP
    Traceback (most recent call last):
    VerificationError: C.zarr is not A @ B: ...
    """


def one_line(text: object, most: int = 300) -> str:
    r"""Return text for an error message: one line, characters that do not print escaped, the middle of long text cut.

    `text`: text or an exception, perhaps with content of a damaged file in it.
    `most`: characters of the result at most.

    Examples
    --------
    >>> one_line("two\nlines"), one_line("1" * 500 + "2" * 500, 20)
    ('two\\nlines', '1111111111...2222222')
    """
    whole = printable(str(text)).replace("\n", "\\n")  # before a cut takes the end of a secret
    if len(whole) > most:
        whole = f"{whole[: most // 2]}...{whole[len(whole) - most // 2 + 3 :]}"
    return whole


def install(extra: str) -> str:
    """Return what to do to have the packages of an extra; the package `spdist` on PyPI is another project.

    Examples
    --------
    >>> install("h5ad")
    "install spdist with its extra h5ad (pip install '.[h5ad]' in its checkout)"
    """
    return f"install spdist with its extra {extra} (pip install '.[{extra}]' in its checkout)"
