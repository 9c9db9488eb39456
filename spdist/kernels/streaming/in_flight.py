"""Blocks in flight: the device memory that they share, and the queues of uploads and of downloads."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from spdist.foundation import threads
from spdist.foundation.cpus import count_cpus
from spdist.kernels.streaming.layout import StagedBlock, lay_out_resident
from spdist.kernels.streaming.multiplication import Multiplication
from spdist.kernels.streaming.protocols import ArenaFullError, Device, DownloadTarget, Report, Slot, Stage
from spdist.kernels.streaming.staging import BlockStager
from spdist.kernels.streaming.workspace import BLOCKS_IN_FLIGHT, device_shares
from spdist.matrices.csr import CSR

HostWork = list[Callable[[], None]]
"""Work of the host for a downloaded block: calls that any thread may make."""


class DeviceMemory:
    """The device's memory during one multiplication: slots for blocks, and B if it is resident, or is to be.

    `memory_limit`: bytes for slots and B.
    """

    def __init__(self, device: Device, work: Multiplication, memory_limit: int) -> None:
        self.memory_limit, self.device, self._dtypes = memory_limit, device, work.dtypes
        _, self._b_bytes = lay_out_resident(work.b, work.dtypes)
        self.b_resident = device_shares(self._b_bytes, memory_limit).kept > 0
        self.slots: Sequence[Slot] = ()
        self._turns: Iterator[Slot] = iter(())

    def take_slots(self, count: int, *, beside_b: bool) -> None:
        """Allocate slots, of all the memory if there is one; `beside_b` leaves memory for B."""
        shares = device_shares(self._b_bytes if beside_b else 0, self.memory_limit, count)
        self.slots = self.device.slots(count, shares.slot, shares.kept)
        self._turns = itertools.cycle(self.slots)

    def next_slot(self) -> Slot:
        """Return the next slot, round-robin."""
        return next(self._turns)

    def make_resident(self, b: CSR) -> bool:
        """Make B resident; return False if another program has taken the memory."""
        self.b_resident = self.device.keep(b, self._dtypes)
        return self.b_resident

    def has_all_of(self, work: Multiplication) -> bool:
        """Return whether blocks are rows of the resident B, so that nothing is uploaded for them."""
        return self.b_resident and work.rows.offset is not None

    def uploaded_operands(self, work: Multiplication) -> list[CSR]:
        """Return the operands whose rows are uploaded with each block."""
        if self.has_all_of(work):
            return []
        return [work.a] if self.b_resident else [work.a, work.b]

    def wait(self) -> list[Exception]:
        """Wait for all slots, even if some fail; return the errors."""
        errors = []
        for slot in self.slots:
            try:
                slot.wait()
            except Exception as error:
                errors.append(error)
        return errors

    def drop_b(self) -> None:
        """Drop the resident B."""
        self.b_resident = False
        self.device.keep(None, self._dtypes)


@dataclass
class InFlightBlock:
    """A block on the device."""

    slot: Slot
    staged: StagedBlock  # arrays and layout that were uploaded
    _target: DownloadTarget | None = None
    _receive: Callable[[InFlightBlock], HostWork] | None = field(default=None, repr=False)

    def multiply(self, work: Multiplication, while_busy: Callable[[], None] | None = None) -> int:
        """Multiply the block, record its entries in the history, and return the entries of C that are kept.

        `while_busy`: called once while the device is busy, if it is. Raises `ArenaFullError` if the slot has no room
        for C.
        """
        staged, history = self.staged, work.rows.history
        predictable = work.spec.mask is None and not work.dtypes.blocked
        expected = history.exact_entries(staged.products) if predictable else 0
        try:
            nnz = self.slot.multiply(expected, while_busy)
        except ArenaFullError:
            history.distrust()
            raise
        history.record(staged, self.slot.held, nnz / work.triangle_share(staged.start, staged.stop))
        return nnz

    def set_target(self, target: DownloadTarget | None, receive: Callable[[InFlightBlock], HostWork]) -> None:
        """Set where C is downloaded to, if it is, and the function from which `complete` gets the host's other work.

        `receive`: must not refer to the block: a reference cycle would keep page-locked memory.
        """
        self._target, self._receive = target, receive

    def start_download(self) -> None:
        """Start the download of C."""
        assert self._target is not None
        self.slot.download(self._target)

    def complete(self, report: Report) -> HostWork:
        """Wait until the block is downloaded and report its stages; return the host's remaining work."""
        for stage in self.slot.wait():
            report(stage)
        staged = self.staged
        report(Stage(staged.start, "prepare", staged.begin, staged.seconds, staged.nbytes))
        return self._receive(self) if self._receive else []


class DownloadQueue:
    """Blocks that are being downloaded, in order; `report` is called with each stage of each block.

    `in_caller`: do the host's work in the calling thread, without waking another.
    """

    def __init__(self, report: Report, *, in_caller: bool = False) -> None:
        self.report, self._in_caller = report, in_caller
        self._blocks: collections.deque[InFlightBlock] = collections.deque()
        self._packing: InFlightBlock | None = None  # the last block, if its packed C is not downloaded yet
        self._host_work: collections.deque[list[Future[None]]] = collections.deque()

    def add(self, block: InFlightBlock) -> None:
        """Add a block that has nothing to download, or whose download has started."""
        self._blocks.append(block)

    def add_packing(self, block: InFlightBlock) -> None:
        """Add a block and start its download; if its C is being packed, wait until the next block is computed."""
        self.start_download()
        self._blocks.append(block)
        self._packing = block
        if not block.slot.is_packing:
            self.start_download()

    def start_download(self) -> None:
        """Start the download of the block that was added last, unless it has started."""
        block, self._packing = self._packing, None
        if block is not None:
            block.start_download()

    def complete(self, slot: Slot) -> None:
        """Wait until a slot's block, and all blocks that were added before it, are downloaded."""
        while any(block.slot is slot for block in self._blocks):
            block = self._blocks.popleft()
            if block is self._packing:
                self.start_download()
            if calls := block.complete(self.report):
                submit = threads.run_now if self._in_caller else threads.thread_pool(
                    count_cpus(), "finish"
                ).submit  # fmt: skip
                self._host_work.append([submit(call) for call in calls])
                self.finish_host_work(BLOCKS_IN_FLIGHT)  # else blocks would arrive faster than they are unpacked

    def complete_all(self) -> None:
        """Wait until all blocks are downloaded."""
        while self._blocks:
            self.complete(self._blocks[0].slot)

    def finish_host_work(self, most: int = 0) -> None:
        """Wait until the host works on no more than `most` blocks."""
        while len(self._host_work) > most:
            wait(self._host_work[0])
            for future in self._host_work.popleft():
                future.result()

    def close(self) -> list[Exception]:
        """Wait for the host's work, even if some of it fails; return the errors."""
        futures = [future for group in self._host_work for future in group]
        wait(futures)
        errors = [future.exception() for future in futures]
        return [error for error in errors if isinstance(error, Exception)]


class UploadQueue:
    """Blocks that are being uploaded, in order.

    `downloads`: a slot's block must be downloaded before the next block is uploaded to the slot. `most`: blocks that
    are uploaded before they are multiplied, if there are slots for them.
    """

    def __init__(self, memory: DeviceMemory, stager: BlockStager, downloads: DownloadQueue, most: int) -> None:
        self._memory, self._downloads, self._most = memory, downloads, most
        self.stager = stager
        self._uploaded: collections.deque[InFlightBlock] = collections.deque()
        self._again: collections.deque[tuple[int, int]] = collections.deque()  # rows to prepare once more

    def use_stager(self, stager: BlockStager) -> None:
        """Take later blocks from another stager."""
        self.stager = stager

    def fill(self) -> None:
        """Upload the next blocks."""
        while len(self._uploaded) < min(self._most, max(1, len(self._memory.slots) - 1)):
            if not self.stager.is_ready:
                self._downloads.start_download()
            staged = self.stager.prepare(*self._again.popleft()) if self._again else self.stager.take()
            if staged is None:
                break
            self._uploaded.append(self.upload(self._memory.next_slot(), staged))

    def fill_while_busy(self) -> None:
        """While the device multiplies, start a download and upload blocks that are prepared."""
        self._downloads.start_download()
        prepared = self.stager.is_ready or self.stager.preparer.is_brief  # else the device might wait for the host
        if prepared and len(self._memory.slots) > 1:  # the only slot is in use
            self.fill()

    def upload(self, slot: Slot, staged: StagedBlock) -> InFlightBlock:
        """Upload a block to a slot when the slot's block is back."""
        self._downloads.complete(slot)
        slot.upload(staged)
        return InFlightBlock(slot, staged)

    def upload_rows(self, slot: Slot, start: int, stop: int) -> InFlightBlock:
        """Prepare rows [start, stop) now, and upload them to a slot."""
        return self.upload(slot, self.stager.prepare(start, stop))

    def take(self) -> InFlightBlock | None:
        """Return the uploaded block to multiply next; None if no block is uploaded."""
        return self._uploaded.popleft() if self._uploaded else None

    def recall(self, start: int, stop: int) -> None:
        """Drop the uploaded blocks; prepare rows [start, stop), then the dropped rows, again before all others."""
        uploaded = [(block.staged.start, block.staged.stop) for block in self._uploaded]
        self._again.extendleft(reversed([(start, stop), *uploaded]))
        self._uploaded.clear()

    def prepare_again(self, rows: Iterable[tuple[int, int]]) -> None:
        """Prepare ranges of rows again, after the ranges that wait for it already."""
        self._again.extend(rows)
