"""Interface between pipeline and device: both import it, so that neither imports the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from spdist.kernels.cuda.pinned import Bytes
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.reduction_spec import PartialReduction, Reduction
from spdist.kernels.streaming.layout import DeviceDtypes, StagedBlock
from spdist.matrices.csr import CSR

logger = logging.getLogger("spdist")


class ArenaFullError(Exception):
    """A block needs more device memory than its slot has: `needed` bytes with the allocation that failed."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


class Stage(NamedTuple):
    """One stage of one block, with its time and bytes."""

    start: int  # first row of the block
    name: str  # "prepare", "upload", "multiply", "pack", "reduce" or "download"
    begin: float  # when it began, in seconds since 1970
    seconds: float
    nbytes: int


Report = Callable[[Stage], None]


def ignore_stage(stage: Stage) -> None:
    """Do nothing; the default report."""


class DownloadTarget(NamedTuple):
    """Arrays on the host for the first rows of a block's C."""

    # rows and entries to download
    rows: int
    nnz: int
    offsets: npt.NDArray[Any]  # (rows,) array: where each row ends, counted from the first entry of the block
    # (nnz,) array
    indices: npt.NDArray[Any]
    data: npt.NDArray[Any]


class Slot(Protocol):
    """Device memory for one block."""

    size: int  # bytes
    held: int  # entries of C that took memory in the last multiply, including entries that were cut away

    def upload(self, staged: StagedBlock) -> None:
        """Start the upload of a block; return at once."""

    def multiply(self, expected: int = 0, while_busy: Callable[[], None] | None = None) -> int:
        """Multiply the uploaded block; return the entries of C that are kept.

        `expected`: entries of C to expect; 0 if unknown. `while_busy`: called once while the device is busy, if it is.
        Raises `ArenaFullError` if the slot has no room for C.
        """

    def reduce(self, first_row: int) -> None:
        """Start to reduce C and to download the result; A's row 0 is row `first_row` of the whole C."""

    def take_part(self) -> PartialReduction:
        """Return the downloaded reduction of the block."""

    @property
    def is_packing(self) -> bool:
        """Whether the device still packs C, so that `download` would wait."""

    def download(self, target: DownloadTarget) -> None:
        """Start the download of the first rows of C; return at once."""

    def wait(self) -> list[Stage]:
        """Wait until all work of the slot is done; return the stages since the last upload."""

    def take_host_work(self) -> list[Callable[[], None]]:
        """Return the host's remaining work for a downloaded block: calls that unpack its columns."""


class HostMemory(Protocol):
    """Host memory as a device allocates and inspects it."""

    def allocate(self, size: int, /) -> Bytes:
        """Return host memory from which the device copies at full speed."""

    def note_operands(self, arrays: Iterable[Any], /) -> None:
        """Note that a multiplication reads arrays; arrays that a later one reads too may be page-locked."""

    def is_locked(self, array: npt.NDArray[Any], /) -> bool:
        """Return whether an array is page-locked, so that the device can copy from it in place."""


class Device(HostMemory, Protocol):
    """A device with memory for slots and for a resident B."""

    memory_limit: int  # bytes of device memory for slots, B and everything else
    staging_bytes: int  # bytes of host memory for blocks that are staged or being uploaded

    def begin(
        self, spec: ProductSpec, reduction: Reduction | None, shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> int:
        """Begin a multiplication; return the bytes that it reserves besides B and slots."""

    def slots(self, count: int, size: int, kept: int) -> Sequence[Slot]:
        """Return slots of `size` bytes, or less if the device has less; slots returned earlier lose their memory first.

        `kept`: bytes that stay free for B.
        """

    def keep(self, b: CSR | None, dtypes: DeviceDtypes) -> bool:
        """Make B resident for later blocks, or drop it if `b` is None; return whether B is resident."""

    def take_sums(self) -> PartialReduction:
        """Return the column sums of all blocks."""
