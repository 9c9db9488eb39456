"""What integrity costs a stored product: CPU seconds of checksums, digests, journal, lock, handshake, and their share.

Products run in this process, and each piece is timed where it runs, by the CPU time of its thread: other work on the
machine delays it and is not counted. A piece within another one counts for the outer one alone. The crc32c of Zarr
chunks is computed by zarrs, within its decoding and encoding: its seconds are the stored bytes that were read and
written times the seconds that it takes a byte here.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import crc32c
import matrices
import record

import spdist
from spdist.jobs import by_rows
from spdist.scheduler.execution import journal
from spdist.scheduler.executors.supervision import handshake, monitor, supervisor
from spdist.storage import chunked_array, groups, lock, matrix, notes
from spdist.stores.local import LocalLocation

ROUNDS = 3
PIECES: dict[str, list[tuple[Any, str]]] = {
    "places of what is read": [(chunked_array.ChunkedArray, "_look"), (chunked_array.ChunkedArray, "_require")],
    "fingerprints of A and B": [(matrix.StoredMatrix, "fingerprint")],
    "seals of A and B": [(groups, "check_seal")],
    "checksums of what is written": [
        (journal.DurableChunks, "_see"), (journal.Journal, "_note_offsets"), (LocalLocation, "read_ends"),
    ],
    "journal and plan": [(journal.Journal, "write"), (by_rows, "write_plan")],
    "seal of C": [(groups, "write_table"), (groups, "_document_digest"), (groups, "_attributes_digest")],
    "syncing": [(notes, "sync_metadata"), (LocalLocation, "sync_disk")],
    "lock and its heartbeat": [
        *((lock.TargetLock, name) for name in ("acquire", "check", "release", "_heartbeat")),
        (LocalLocation, "recover"),
    ],
    "remains of dead runs": [(by_rows, "remove_useless_remains"), (notes, "remove_remains")],
    "handshake": [(supervisor.Supervisor, "check"), (handshake.Handshake, "admit")],
    "watching": [(monitor.Monitor, "_watch")],
}  # fmt: skip
"""Functions of each piece: the module or class that has them, and their names."""
CRC = "crc32c of Zarr chunks"


@dataclass
class Tally:
    """CPU seconds and calls of each piece, and the bytes that zarrs decoded and encoded, by array."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    decoded: dict[tuple[str, str], int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _inside: threading.local = field(default_factory=threading.local)

    def timed(self, piece: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and adds the CPU time of its thread to a piece."""

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if getattr(self._inside, "piece", None) is not None:
                return function(*args, **options)
            self._inside.piece, begin = piece, time.thread_time()
            try:
                return function(*args, **options)
            finally:
                seconds, self._inside.piece = time.thread_time() - begin, None
                with self._lock:
                    self.seconds[piece] = self.seconds.get(piece, 0.0) + seconds
                    self.calls[piece] = self.calls.get(piece, 0) + 1

        return call

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of `ChunkedArray` that does the same, and adds the bytes of its values."""

        @functools.wraps(function)
        def call(array: Any, *args: Any) -> Any:
            found = function(array, *args)
            values = args[1] if found is None else found
            place = array.url.partition(".spdist-")[0], array.name
            with self._lock:
                self.decoded[place] = self.decoded.get(place, 0) + values.nbytes
            return found

        return call

    def stored_bytes(self) -> int:
        """Return the stored bytes of what was decoded and encoded."""
        total = 0.0
        for (url, name), nbytes in self.decoded.items():
            array = getattr(spdist.open(url), name)
            stored = sum(path.stat().st_size for path in Path(url, name, "c").iterdir())
            total += nbytes * stored / (array.nchunks * array.chunk_nbytes)
        return int(total)


@contextlib.contextmanager
def tallied() -> Iterator[Tally]:
    """Time the pieces during a ``with`` block."""
    tally, undo = Tally(), contextlib.ExitStack()
    with undo:
        for piece, functions in PIECES.items():
            for owner, name in functions:
                _patch(undo, owner, name, tally.timed(piece, getattr(owner, name)))
        for name in ("_decode", "write_chunks"):
            _patch(undo, chunked_array.ChunkedArray, name, tally.counted(getattr(chunked_array.ChunkedArray, name)))
        yield tally


def _patch(undo: contextlib.ExitStack, owner: Any, name: str, replaced: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, replaced)


def cpu_seconds() -> float:
    """Return what this process and its children took, user and system."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def crc_seconds() -> float:
    """Return the CPU seconds that crc32c takes for a byte; the least of some rounds."""
    block = bytes(1 << 20)

    def once() -> float:
        begin = time.thread_time()
        for _ in range(32):
            crc32c.crc32c(block)
        return time.thread_time() - begin

    return min(once() for _ in range(5)) / (32 * len(block))


def product(a: Path, c: Path, crc: float) -> dict[str, Any]:
    """Multiply A by itself; return CPU seconds of the whole and of the pieces."""
    with tallied() as tally:
        begin, wall = cpu_seconds(), time.perf_counter()
        report = spdist.multiply(a, a, c, overwrite=True)
        seconds, wall = cpu_seconds() - begin, time.perf_counter() - wall
    nbytes = tally.stored_bytes()
    pieces = {**tally.seconds, CRC: crc * nbytes}
    return {"cpu_s": seconds, "wall_s": wall, "nnz": report.nnz, "blocks": report.blocks, "bytes": nbytes,
            "pieces_s": pieces, "calls": tally.calls, "share": sum(pieces.values()) / seconds}  # fmt: skip


def main() -> None:
    """Run, print, record."""
    args = record.parser(__doc__ or "").parse_args()
    crc, rows = crc_seconds(), {}
    cases: dict[str, Callable[[], Any]] = {
        "27-point 100^3": lambda: matrices.poisson(27, 100), "R-MAT 16 x 8": lambda: matrices.rmat(16, 8),
    }  # fmt: skip
    if args.quick:
        cases = {"27-point 20^3": lambda: matrices.poisson(27, 20)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case, make in cases.items():
            spdist.save(folder / "A.zarr", make().to_scipy(), overwrite=True)
            product(folder / "A.zarr", folder / "C.zarr", crc)  # loads and compiles
            rows[case] = [
                product(folder / "A.zarr", folder / "C.zarr", crc) for _ in range(1 if args.quick else ROUNDS)
            ]
    for case, rounds in rows.items():
        whole = median(one["cpu_s"] for one in rounds)
        print(f"{case}: {whole:.2f} s of CPU, {median(one['share'] for one in rounds):.2%} of it for integrity")
        for piece in {piece: None for one in rounds for piece in one["pieces_s"]}:
            seconds = median(one["pieces_s"].get(piece, 0.0) for one in rounds)
            print(f"    {piece:30} {1e3 * seconds:9.2f} ms {seconds / whole:8.3%}")
    record.write({"benchmark": "integrity", "crc_s_per_byte": crc, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
