"""Matrices of spdist's made to look like ones from elsewhere, so that tests may edit their arrays."""

from __future__ import annotations

from pathlib import Path

import zarr


def without_seal(url: str | Path) -> zarr.Group:
    """Remove spdist's own record from a stored matrix; return its group, open for writing."""
    group = zarr.open_group(url, mode="r+")
    group.attrs.put({key: value for key, value in group.attrs.items() if key != "spdist"})
    return group
