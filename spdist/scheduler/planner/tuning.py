"""Numbers that decide how a plan is made; none of them changes the product."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from spdist.scheduler.planner.plan import GPU_BLOCK_PRODUCTS, MAX_BLOCK_PRODUCTS
from spdist.storage.chunked_array import CHUNK_LENGTH

SAMPLED_BYTES = 128
"""Bytes of the memory limit for each product that is sampled: they take about as many."""
READ_SHARE = 32
"""Bytes of the memory limit for each entry that is read at once: two buffers of at most 8 bytes, and their checks."""


@dataclass(frozen=True)
class SampleTuning:
    """Rows of A whose entries of C are counted."""

    runs: int = 256  # runs of consecutive rows that are read, spread evenly over A
    run_rows: int = 8  # rows of a run
    rows_per_bin: int = 64  # most rows that are counted for each power of two of products
    products: int = 1 << 21  # most products of all counted rows
    parts: int = 16  # parts of the sample that are counted apart, side by side: each fits the caches
    threads: int = 8  # most threads that read the sample
    # up to this many entries, a matrix is read at once instead of run by run: each read takes the interpreter about a
    # millisecond
    read_whole_entries: int = 1 << 22
    # ranges of rows of an upper triangle that are estimated apart: its rows grow shorter from the first to the last
    row_ranges: int = 16


@dataclass(frozen=True)
class ScanTuning:
    """The scan over the columns of A."""

    # most parts of A that are scanned independently. Blocks end where parts end, on every machine alike.
    parts: int = 32
    part_entries: int = 1 << 22  # least entries of each part
    # entries of A that are read at once, but at least two Zarr chunks. Each thread holds two such buffers.
    read_entries: int = 1 << 22
    # most bytes of the stamps of all threads of one process: 4 bytes for each row of B and thread. One thread always
    # scans.
    stamp_bytes: int = 2 << 30


@dataclass(frozen=True)
class BlockTuning:
    """Sizes of row blocks."""

    cpu_products: int = MAX_BLOCK_PRODUCTS  # most products of a block
    # with several threads, the blocks for each of them, or for all that share blocks, and the least bound on a thread's
    # products of a block that this may lead to
    per_thread: int = 8
    least_products: int = 1 << 22
    gpu_products: int = GPU_BLOCK_PRODUCTS  # most products of a block if GPUs multiply
    # most products of a block that a GPU only reduces; the last blocks are as small as `gpu_products`
    gpu_reduced_products: int = 1 << 30
    # bytes of A and C of a block that GPUs multiply and whose C is written. With larger blocks a run would begin with a
    # wait for the page-locked memory of all blocks in flight.
    gpu_bytes: int = 1 << 28
    # entries of A and products up to which a product is one block if it fits: some milliseconds of work
    small_nnz: int = 1 << 17
    small_products: int = 1 << 22
    margin: float = 1.08  # factor on the estimated nnz(C) of a block, so that few blocks turn out longer than planned
    # A joined block has at most this part of the products that are left: some blocks for each of many GPUs
    taper: int = 32
    # blocks in flight on a worker for each thread: one is multiplied while the other waits for its place in C or is
    # written
    in_flight: int = 2
    # blocks in flight for all threads that share blocks: one is read meanwhile and, if they are `many_threads` that
    # multiply quicker than one reads, two
    shared_in_flight: int = 3
    many_in_flight: int = 4
    many_threads: int = 4
    most_in_flight: int = 8  # blocks in flight on a worker if blocks are small


@dataclass(frozen=True)
class ResidencyTuning:
    """Whether B is resident on the workers."""

    most_share: float = 0.8  # largest share of the usable memory that a resident B may take
    # share of the memory limit up to which B is resident without a comparison of predicted times
    small_share: float = 0.25
    # least number of blocks for which a GPU reads rows of B block by block although B could be resident
    least_blocks: int = 4
    most_reread: float = 0.5  # most bytes of B that these blocks may read more than once, as a share of B
    most_joined: int = 3  # most neighbouring blocks that are joined to read less of B twice
    # Zarr chunks of A that are read to guess, before there is a plan, whether B will be resident
    sampled_chunks: int = 8


@dataclass(frozen=True)
class ChunkTuning:
    """Lengths of C's Zarr chunks, in elements."""

    length: int = CHUNK_LENGTH  # greatest length
    # greatest length if C has at least `many` chunks of this length, and GPUs multiply, or C goes to an object store
    # and the buffers of its requests take little of the memory. Each chunk takes the interpreter some 50 us, which was
    # most of a run on a GPU; an object takes a request. A program that reads such a C block by block holds some MiB
    # more.
    long_length: int = 1 << 19
    many: int = 64  # number of chunks
    # number of chunks of an array from which they get longer, up to the longest: a file system takes time for each file
    most: int = 1 << 10
    longest: int = 1 << 23
    # Zarr chunks in an object store are long if the memory is at least this multiple of the buffers of all requests
    objects_share: int = 8


@dataclass(frozen=True)
class PlannerTuning:
    """All numbers that decide how a plan is made."""

    sample: SampleTuning = field(default_factory=SampleTuning)
    scan: ScanTuning = field(default_factory=ScanTuning)
    blocks: BlockTuning = field(default_factory=BlockTuning)
    residency: ResidencyTuning = field(default_factory=ResidencyTuning)
    chunks: ChunkTuning = field(default_factory=ChunkTuning)

    def within(self, limit: int, threads: int) -> PlannerTuning:
        """Return the tuning with which planning itself, by `threads` threads, takes less than a limit in bytes."""
        sample, scan = self.sample, self.scan
        return replace(
            self,
            sample=replace(
                sample,
                products=min(sample.products, limit // SAMPLED_BYTES),
                read_whole_entries=min(sample.read_whole_entries, limit // READ_SHARE),
            ),
            scan=replace(scan, read_entries=min(scan.read_entries, limit // (READ_SHARE * threads))),
        )
