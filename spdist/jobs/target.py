"""The place of C: checks before it is written, the place of a replacement, and results of earlier runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from spdist.errors import InputError, ResumeError
from spdist.storage import groups
from spdist.storage.atomic_replace import is_ours
from spdist.storage.foreign.parents import check_parents
from spdist.storage.lock import remove_remains
from spdist.stores.folder_replacement import NEW
from spdist.stores.registry import at, normalise

logger = logging.getLogger("spdist")

Facts = dict[str, Any]
"""The record that a stored matrix carries: its state, its provenance, and fingerprints of its factors."""


def reserve_target(target: str, *, overwrite: bool) -> str:
    """Return where to write a new matrix: `target`, or `replacement_path` if a whole matrix lies there.

    Removes an unfinished matrix at `target`, and all that earlier runs left. The target must be held.

    `target`: A normalised path or URL.
    `overwrite`: whether a matrix at `target` may be replaced.
    Returns A place where nothing is.
    Raises `InputError` As `check_target`.
    """
    check_target(target, overwrite=overwrite)
    remove_remains(target)
    if not at(target).exists():
        return target
    if groups.read_facts(target).get("state") == "unfinished":
        at(target).remove()
        return target
    return replacement_path(target)


def replacement_path(target: str) -> str:
    """Return where a matrix is written that replaces the one at `target` once it is whole."""
    return f"{target}{NEW}"


def remove_useless_remains(target: str) -> None:
    """Remove what dead runs left for a target and no run can resume; the target must be held."""
    remove_remains(target, keep=(replacement_path(target), f"{target}.spdist-columns"))


def check_target(target: str, *, overwrite: bool) -> None:
    """Refuse a target that cannot be written, or holds something that may not be replaced.

    `target`: A normalised path or URL.
    `overwrite`: whether a matrix at `target` may be replaced.
    Raises `InputError` if the target cannot be written, or may not be replaced.
    """
    check_parents(target)
    if not at(target).exists():
        at(target).check_parent()
    elif not overwrite:
        if "product" in (facts := groups.read_facts(target)) and facts.get("state") == "unfinished":
            raise InputError(
                f"{target} is an unfinished product; continue it with --resume (resume=True), or start again with "
                f"--overwrite (overwrite=True)"
            )
        raise InputError(f"{target} exists; choose another name or pass --overwrite (overwrite=True)")
    elif not is_ours(target):
        raise InputError(f"{target} exists and is not a matrix, so it is not replaced; remove it yourself")
    else:
        at(target).check_removable()


def check_apart(target: str, *operands: str) -> None:
    """Refuse a target that is an operand, lies in one, or contains one.

    `*operands`: URLs of the operands and the mask, normalised as `target` is.
    Raises `InputError` if the target overlaps an operand.

    Examples
    --------
    >>> check_apart("/data/C.zarr", "/data/A.zarr", "/data/B.zarr")
    """
    for operand in operands:
        if f"{target}/".startswith(f"{operand}/") or f"{operand}/".startswith(f"{target}/"):
            raise InputError(f"C may not be A or B, or the mask, nor lie in one or around one: {target} and {operand}")


def check_file(name: str, file: str | Path | None, *matrices: str) -> None:
    """Refuse a file for timings or a report that is one of some matrices, or is inside one.

    `name`: of the option, for the error.
    `file`: None without a file.
    `*matrices`: URLs of the operands, the mask and C, normalised.
    """
    if file is None:
        return
    place = normalise(file)
    for url in matrices:
        if f"{place}/".startswith(f"{url}/"):
            raise InputError(f"{name}={file} is inside the matrix {url}: choose a place outside the matrices")


def find_earlier_product(target: str) -> tuple[str, Facts] | None:
    """Return place and facts of the product that a run left; an unfinished replacement comes before a whole C.

    Returns (str, dict) or None: none if nothing is at `target`.
    Raises `InputError` if something other than a product is at `target`.
    Raises `ResumeError` if an unfinished replacement has lost its metadata.
    """
    replacement = replacement_path(target)
    for place in (replacement, target):
        facts = groups.read_facts(place)
        if "product" in facts:
            if facts.get("state") == "unfinished":
                at(place).check_removable()
            return place, facts
        if place == replacement and at(place).exists():
            raise ResumeError(
                f"{place}, which was to replace {target}, has lost its metadata ({place}/zarr.json), and cannot be "
                f"resumed: start again with --overwrite (overwrite=True); {target} is unchanged"
            )
    if at(target).exists():
        raise InputError(f"{target} exists and is no product of spdist: choose another name or pass --overwrite")
    return None
