"""Groups of other programs around a matrix, such as an AnnData: check their version, update their metadata."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from spdist.errors import InputError, MatrixError, one_line
from spdist.storage import groups
from spdist.stores.names import family_of
from spdist.stores.registry import at, check_writable

if TYPE_CHECKING:
    from zarr.abc.store import Store

logger = logging.getLogger("spdist")

MOST_PARENTS = 8
"""Groups above a matrix that are checked at most."""

ONLY_X = ("anndata", "raw")
"""Encodings of groups whose only matrix is X: AnnData does not read them if they hold another."""

MATRICES = "csr_matrix", "csc_matrix", "bsr_matrix"
"""Encodings of sparse matrices."""


def check_parents(url: str) -> None:
    """Refuse to write a matrix into a group of version 2, or beside X in an AnnData: their readers would fail.

    `url`: target of the matrix; a normalised path or URL.
    Raises `InputError` if the target is in a group of version 2, or AnnData could not read the group with it; or
    nothing is written to such URLs.

    Examples
    --------
    >>> check_parents("/data/C.zarr")
    """
    check_writable(url)
    parent, target = at(url).parent_url(), family_of(url)
    try:
        is_older = bool(parent) and at(f"{parent}/.zgroup").exists()
        is_group = bool(parent) and at(f"{parent}/zarr.json").exists()
    except InputError:  # the storage does not answer; the next access reports it
        return
    if is_older:
        raise InputError(
            f"{target} would be in {parent}, a group of version 2 of Zarr's format, whose readers cannot see a matrix "
            f"of version 3: write it elsewhere, or rewrite the group in version 3 "
            f"(anndata.settings.zarr_write_format = 3)"
        )
    name = target.rpartition("/")[2]
    if is_group and name != "X" and groups.read_attributes(parent).get("encoding-type") in ONLY_X:
        raise InputError(
            f"{target}: AnnData cannot read {parent} with a matrix of this name; write it to obsp, varp, layers, obsm, "
            f"varm or uns of the AnnData, or elsewhere"
        )


def refresh_parent_metadata(url: str) -> None:
    """Update the groups around a new matrix that keep a copy of their members' metadata.

    `url`: the matrix; a normalised path or URL. For a temporary copy next to a target, nothing is updated.
    """
    if family_of(url) != url:
        return
    for parent in _parents(url):
        if _consolidated(parent):
            _consolidate(parent)


def _consolidate(parent: str) -> None:
    """Update a group's copy of its members' metadata; only warn if that fails, since the matrix itself is whole."""
    import zarr

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Zarr's, that this is no part of the standard yet
            zarr.consolidate_metadata(_without_temporary(at(parent).zarr_store()))
    except Exception as error:  # of other members, which may be anything
        logger.warning(
            "%s keeps a copy of its members' metadata, which could not be updated (%s: %s): readers that use it do not "
            "see the new matrix; zarr.consolidate_metadata updates it", parent, type(error).__name__, one_line(error),
        )  # fmt: skip


def _without_temporary(store: Store) -> Store:
    """Return a store in which Zarr does not find matrices that lie beside a target while it is made.

    They would be named when they are gone. Another product may be on its way in the same group.
    """
    from zarr.storage import WrapperStore

    class Visible(WrapperStore):  # type: ignore[type-arg]
        async def list_dir(self, prefix: str) -> AsyncIterator[str]:
            async for name in super().list_dir(prefix):
                if family_of(name) == name:
                    yield name

    return Visible(store)


def members_of(url: str) -> list[str]:
    """Return the paths of the sparse matrices in a local group, at most a few, sorted; of other groups none."""
    folders = at(url).folders()
    return [key for key in folders if groups.read_attributes(f"{url}/{key}").get("encoding-type") in MATRICES][:10]


def _parents(url: str) -> list[str]:
    """Return the groups of version 3 around a path, the nearest first."""
    found: list[str] = []
    while len(found) < MOST_PARENTS and (url := at(url).parent_url()) and at(f"{url}/zarr.json").exists():
        found.append(url)
    return found


def _consolidated(url: str) -> bool:
    """Whether a group keeps a copy of its members' metadata."""
    try:
        document: Any = json.loads(at(url).read("zarr.json"))
    except (ValueError, MatrixError):
        return False
    return isinstance(document, dict) and bool(document.get("consolidated_metadata"))
