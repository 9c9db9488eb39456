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
    """Rows of A whose entries of C are counted.

    Attributes
    ----------
    runs : int
        Runs of consecutive rows that are read, spread evenly over A.
    run_rows : int
        Rows of a run.
    rows_per_bin : int
        Most rows that are counted for each power of two of products.
    products : int
        Most products of all counted rows.
    parts : int
        Parts of the sample that are counted apart, side by side: each fits the caches.
    threads : int
        Most threads that read the sample.
    read_whole_entries : int
        Up to this many entries, a matrix is read at once instead of run by run: each read takes the interpreter about a
        millisecond.
    row_ranges : int
        Ranges of rows of an upper triangle that are estimated apart: its rows grow shorter from the first to the last.
    """

    runs: int = 256
    run_rows: int = 8
    rows_per_bin: int = 64
    products: int = 1 << 21
    parts: int = 16
    threads: int = 8
    read_whole_entries: int = 1 << 22
    row_ranges: int = 16


@dataclass(frozen=True)
class ScanTuning:
    """The scan over the columns of A.

    Attributes
    ----------
    parts : int
        Most parts of A that are scanned independently. Blocks end where parts end, on every machine alike.
    part_entries : int
        Least entries of each part.
    read_entries : int
        Entries of A that are read at once, but at least two Zarr chunks. Each thread holds two such buffers.
    stamp_bytes : int
        Most bytes of the stamps of all threads of one process: 4 bytes for each row of B and thread. One
        thread always scans.
    """

    parts: int = 32
    part_entries: int = 1 << 22
    read_entries: int = 1 << 22
    stamp_bytes: int = 2 << 30


@dataclass(frozen=True)
class BlockTuning:
    """Sizes of row blocks.

    Attributes
    ----------
    cpu_products : int
        Most products of a block.
    per_thread, least_products : int
        With several threads, the blocks for each of them, or for all that share blocks, and the least bound on a
        thread's products of a block that this may lead to.
    gpu_products : int
        Most products of a block if GPUs multiply.
    gpu_reduced_products : int
        Most products of a block that a GPU only reduces; the last blocks are as small as `gpu_products`.
    gpu_bytes : int
        Bytes of A and C of a block that GPUs multiply and whose C is written. With larger blocks a run would begin with
        a wait for the page-locked memory of all blocks in flight.
    small_nnz, small_products : int
        Entries of A and products up to which a product is one block if it fits: some milliseconds of work.
    margin : float
        Factor on the estimated nnz(C) of a block, so that few blocks turn out longer than planned.
    taper : int
        A joined block has at most this part of the products that are left: some blocks for each of many GPUs.
    in_flight : int
        Blocks in flight on a worker for each thread: one is multiplied while the other waits for its place in C or is
        written.
    shared_in_flight, many_in_flight : int
        Blocks in flight for all threads that share blocks: one is read meanwhile and, if they are `many_threads` that
        multiply quicker than one reads, two.
    most_in_flight : int
        Blocks in flight on a worker if blocks are small.
    """

    cpu_products: int = MAX_BLOCK_PRODUCTS
    per_thread: int = 8
    least_products: int = 1 << 22
    gpu_products: int = GPU_BLOCK_PRODUCTS
    gpu_reduced_products: int = 1 << 30
    gpu_bytes: int = 1 << 28
    small_nnz: int = 1 << 17
    small_products: int = 1 << 22
    margin: float = 1.08
    taper: int = 32
    in_flight: int = 2
    shared_in_flight: int = 3
    many_in_flight: int = 4
    many_threads: int = 4
    most_in_flight: int = 8


@dataclass(frozen=True)
class ResidencyTuning:
    """Whether B is resident on the workers.

    Attributes
    ----------
    most_share : float
        Largest share of the usable memory that a resident B may take.
    small_share : float
        Share of the memory limit up to which B is resident without a comparison of predicted times.
    least_blocks : int
        Least number of blocks for which a GPU reads rows of B block by block although B could be resident.
    most_reread : float
        Most bytes of B that these blocks may read more than once, as a share of B.
    most_joined : int
        Most neighbouring blocks that are joined to read less of B twice.
    sampled_chunks : int
        Zarr chunks of A that are read to guess, before there is a plan, whether B will be resident.
    """

    most_share: float = 0.8
    small_share: float = 0.25
    least_blocks: int = 4
    most_reread: float = 0.5
    most_joined: int = 3
    sampled_chunks: int = 8


@dataclass(frozen=True)
class ChunkTuning:
    """Lengths of C's Zarr chunks, in elements.

    Attributes
    ----------
    length : int
        Greatest length.
    long_length : int
        Greatest length if C has at least `many` chunks of this length, and GPUs multiply, or C goes to an object store
        and the buffers of its requests take little of the memory. Each chunk takes the interpreter some 50 us, which
        was most of a run on a GPU; an object takes a request. A program that reads such a C block by block holds some
        MiB more.
    many : int
        Number of chunks.
    objects_share : int
        Zarr chunks in an object store are long if the memory is at least so many times the buffers of all requests.
    """

    length: int = CHUNK_LENGTH
    long_length: int = 1 << 19
    many: int = 64
    objects_share: int = 8


@dataclass(frozen=True)
class PlannerTuning:
    """All numbers that decide how a plan is made.

    Attributes
    ----------
    sample : SampleTuning
    scan : ScanTuning
    blocks : BlockTuning
    residency : ResidencyTuning
    chunks : ChunkTuning
    """

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
