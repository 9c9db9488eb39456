"""10x Genomics' .h5 files of Cell Ranger: genes x cells, compressed by cells."""

from __future__ import annotations

from typing import Any

import h5py

from spdist.storage.formats.hdf5.description import TENX, Description, RefusedError, Settings, listed
from spdist.storage.formats.hdf5.objects import find, member, numbers, stored, strings

PARTS = ("barcodes", "data", "indices", "indptr", "shape")
"""Datasets of a matrix."""

KINDS_READ = 1 << 20
"""Features whose kinds and genomes are looked at."""


def groups_of(file: Any) -> list[str]:
    """Return the groups that hold matrices: ``matrix``, or one for each genome before Cell Ranger 3."""
    links = {name: file.get(name, getlink=True) for name in file}
    groups = [name for name, link in links.items() if isinstance(link, h5py.HardLink)]
    return [name for name in groups if isinstance(file[name], h5py.Group) and all(part in file[name] for part in PARTS)]


def describe(file: Any, settings: Settings) -> Description:
    """Return what describes the matrix, in the orientation that was asked for."""
    inner, known = settings.inner.strip("/"), groups_of(file)
    if inner and inner not in known:
        raise RefusedError(f"there is no such matrix; there is {listed(known)}")
    if not inner and len(known) > 1:
        raise RefusedError(
            f"it holds matrices of several genomes: {listed(known)}; name one, as in FILE.h5::{known[0]}"
        )
    inner = inner or known[0]
    group = member(file, inner, inner)
    shape = numbers(member(group, "shape", "shape"))
    arrays = {name: stored(name, member(group, name, name)) for name in ("indptr", "indices", "data")}
    names = {"rows": strings("barcodes", member(group, "barcodes", "barcodes")), "columns": _genes(group)}
    transposed = settings.orient == "genes-by-cells"
    if transposed:
        names = {"rows": names["columns"], "columns": names["rows"]}
    found = Description(
        TENX, inner, "columns" if transposed else "rows", shape if transposed else shape[::-1], arrays, names
    )
    found.found.append("genes x cells" if transposed else "cells x genes (stored as genes x cells)")
    for what in ("feature_type", "genome"):
        kinds = _kinds(group, f"features/{what}")
        if len(kinds) > 1:
            found.found.append(f"of {len(kinds)} {what.replace('_', ' ')}s: {listed(kinds)}")
    if names["rows" if transposed else "columns"] is not None and ("features/name" in group or "gene_names" in group):
        found.left_out.append("identifiers of genes")
    others = [name for name in known if name != inner]
    if others:
        found.left_out.append(f"genomes {listed(others)}")
    return found


def _genes(group: Any) -> Any:
    """Return the names of genes, or else their identifiers."""
    for path in ("features/name", "gene_names", "features/id", "genes"):
        found = strings(path, find(group, path))
        if found is not None:
            return found
    return None


def _kinds(group: Any, path: str) -> list[str]:
    """Return the different words in a dataset, sorted."""
    found = strings(path, find(group, path))
    words: set[Any] = set()
    for start in range(0, min(found.shape[0], KINDS_READ) if found else 0, 1 << 14):
        words.update(found.read((slice(start, start + (1 << 14)),)).tolist() if found else ())
    return sorted(each.decode("utf-8", "replace") if isinstance(each, bytes) else str(each) for each in words)
