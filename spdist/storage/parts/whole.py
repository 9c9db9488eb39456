"""Make one matrix of parts that are whole: metadata alone are written."""

from __future__ import annotations

from typing import Any

from spdist.matrices.dtypes import blocksize
from spdist.storage import groups
from spdist.storage.matrix import PARTS, StoredMatrix, open_matrix
from spdist.storage.names.names import AxisNames
from spdist.storage.writer import write_names
from spdist.stores.registry import at


def part_name(number: int, count: int) -> str:
    """Return the folder of a part in its matrix."""
    return f"{number}-of-{count}"


def join_parts(url: str, parts: list[StoredMatrix], facts: dict[str, Any], names: AxisNames) -> StoredMatrix:
    """Make a matrix of all rows of some parts, one after another; they lie in its folder.

    Two processes that do so at the same time write the same bytes.
    """
    size = blocksize(parts[0].dtype)
    r, s = size or (1, 1)
    sealed = [{"name": one.url.rpartition("/")[2], "seal": one.facts["seal"]["group"]} for one in parts]
    attributes = {
        "encoding-type": PARTS,
        "encoding-version": "0.1.0",
        "shape": [sum(one.nrows for one in parts) * r, parts[0].ncols * s],
        "spdist": {**facts, "state": "complete", "canonical": True, "parts": sealed},
    }
    groups.finish_group(url, list(write_names(url, names)), attributes)
    at(url).sync_disk()
    return open_matrix(url)
