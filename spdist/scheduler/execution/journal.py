"""How much of C is durable: row offsets as they become known, and the journal from which ``--resume`` continues."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

import numpy as np

from spdist.matrices.dtypes import Int64Array
from spdist.storage import groups
from spdist.storage.writer import ChunkBuffer, Layout

JOURNAL = "journal"
"""Name of the note in an unfinished C that holds the journal."""


@dataclass(frozen=True)
class Checkpoint:
    """The durable part of C, and where work continues after it.

    Attributes
    ----------
    row, nnz : int
        First row that is not durable, and the position of its first entry in C.
    chunks : int
        Zarr chunks of `indices` and `data` that are written, from the first one on.
    compressed : bool
        Whether the values are compressed.
    """

    row: int = 0
    nnz: int = 0
    chunks: int = 0
    compressed: bool = False


def write_journal(url: str, checkpoint: Checkpoint, offsets: Int64Array) -> None:
    """Write the journal of an unfinished C, in one file and one step.

    Parameters
    ----------
    url : str
        Of C.
    checkpoint : Checkpoint
    offsets : (n,) int64
        Row offsets since the last whole Zarr chunk of `indptr`.
    """
    head = json.dumps(asdict(checkpoint), sort_keys=True).encode()
    groups.write_note(url, JOURNAL, head + b"\n" + offsets.astype("<i8").tobytes())


def read_journal(url: str) -> tuple[Checkpoint, Int64Array]:
    """Read the journal of an unfinished C.

    Parameters
    ----------
    url : str
        Of C.

    Returns
    -------
    checkpoint : Checkpoint
    offsets : (n,) int64
        As `write_journal` takes them. Without a journal: the checkpoint of an empty C, and its one offset.
    """
    content = groups.read_note(url, JOURNAL)
    if content is None:
        return Checkpoint(), np.zeros(1, np.int64)
    head, _, body = content.partition(b"\n")
    return Checkpoint(**json.loads(head)), np.frombuffer(body, "<i8").astype(np.int64)


class Journal:
    """The durable part of C during a run: the only writer of C's row offsets and of its journal.

    Parameters
    ----------
    layout : Layout
        Of C; the journal that lies there is read.
    """

    def __init__(self, layout: Layout) -> None:
        self.url = layout.url
        self.checkpoint, offsets = read_journal(layout.url)
        self._offsets = ChunkBuffer(layout.array("indptr"), (self.checkpoint.row + 1) - len(offsets))
        self._offsets.append(offsets)

    def add_rows(self, stop: int, offset: int, row_nnz: Int64Array) -> None:
        """Add rows up to `stop` to the durable part; their entries begin at `offset`."""
        ends = offset + np.cumsum(row_nnz, dtype=np.int64)
        self._offsets.append(ends)
        self.checkpoint = replace(self.checkpoint, row=stop, nnz=int(ends[-1]) if len(ends) else offset)

    def set_chunks(self, chunks: int) -> bool:
        """Set how many Zarr chunks are durable; return whether there are more than before."""
        before = self.checkpoint.chunks
        self.checkpoint = replace(self.checkpoint, chunks=chunks)
        return chunks != before

    def set_compressed(self) -> None:
        """Note that C's values are compressed."""
        self.checkpoint = replace(self.checkpoint, compressed=True)

    def write(self) -> None:
        """Write the journal."""
        write_journal(self.url, self.checkpoint, np.concatenate(self._offsets.parts))

    def close(self) -> None:
        """Write the last Zarr chunk of row offsets."""
        self._offsets.close()
