"""Cases: a folder with a malformed input, and the command that reads it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.mutate import mutate

METADATA = ("zarr.json", "indptr/zarr.json", "indices/zarr.json", "data/zarr.json")
VERBS: dict[str, tuple[str, ...]] = {  # where {M} is the damaged matrix
    "info": ("info", "{M}"),
    "plan": ("plan", "A.zarr", "B.zarr", "--mask", "M.zarr", "--json"),
    "verify": ("verify", "A.zarr", "B.zarr", "C.zarr"),
    "transpose": ("transpose", "{M}", "out.zarr"),
    "symmetrize": ("symmetrize", "{M}", "out.zarr", "--overwrite"),
    "export": ("export", "{M}", "out.npz"),
    "overwrite": ("transpose", "A.zarr", "{M}", "--overwrite"),
}
SLOW_VERBS: dict[str, tuple[str, ...]] = {  # these start worker processes
    "multiply": ("multiply", "A.zarr", "B.zarr", "out.zarr", "--engine", "scipy", "--workers", "1"),
    "reduce": ("reduce", "sum", "A.zarr", "B.zarr", "--engine", "scipy", "--workers", "1"),
    "resume": ("multiply", "A.zarr", "B.zarr", "C.zarr", "--resume", "--engine", "scipy", "--workers", "1"),
}
GROUPS = ("cells2.zarr", "cells3.zarr", "cells2.zarr::layers/dense", "cells3.zarr::layers/dense", "binsparse.zarr")
KINDS = {
    "mtx": 30,
    "npz": 30,
    "h5ad": 10,
    "h5": 10,
    "mat": 10,
    "graph": 10,
    "mci": 10,
    "petsc": 10,
    "tenx": 5,
    "zarr": 20,
    "groups": 15,
    "npy": 5,
    "dense": 5,
    "edges": 15,
    "yaml": 5,
}
"""Kinds of input, and how often each is chosen."""


@dataclass(frozen=True)
class Case:
    """One command on malformed input.

    Attributes
    ----------
    kind : str
        One of `KINDS`, or the verb.
    arguments : tuple of str
        Of ``spdist``, or of the workflow multiply if the first is a job file.
    made : tuple of str
        What the command may leave beside the input if it succeeds.
    """

    kind: str
    arguments: tuple[str, ...]
    made: tuple[str, ...] = field(default=("out.zarr", "out.npz"))


def write_case(rng: random.Random, folder: Path, whole: dict[str, bytes], stored: Path, slow: bool = False) -> Case:
    """Write the input of a case into an empty folder.

    Parameters
    ----------
    rng : Random
        Decides all; the same state makes the same files.
    folder : Path
    whole : dict
        The seeds.
    stored : Path
        Folder of stored matrices, as `seeds.store_matrices` writes them.
    slow : bool
        Whether commands that start worker processes may be chosen.
    """
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    writers = {"zarr": _stored, "npy": _factors, "yaml": _job, "tenx": _folder, "groups": _groups}
    writer: Callable[..., Case] = writers.get(kind, _import)
    if kind in ("zarr", "npy"):
        shutil.copytree(stored, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("groups"))
    elif kind == "groups":
        shutil.copytree(stored / "groups", folder, dirs_exist_ok=True)
    return writer(kind, rng, folder, whole, slow)


def _import(kind: str, rng: random.Random, folder: Path, whole: dict[str, bytes], slow: bool) -> Case:
    name = rng.choice([each for each in whole if f".{kind}." in f"{each}." and "/" not in each])
    raw = mutate(name, whole[name], rng, list(whole.values()))
    (folder / name).write_bytes(raw)
    return Case(name.partition(".")[2], import_of(name, rng.random() < 0.3))


def import_of(name: str, dense: bool = False) -> tuple[str, ...]:
    """Return the command that imports a file: with ``--dense`` if its matrix is dense, or `dense` for such a format."""
    takes_dense = name.endswith((".h5ad", ".h5", ".mat")) and (dense or "full" in name)
    options = ("--dense",) if takes_dense or ".dense." in name else ("--names",) if ".edges." in name else ()
    return ("import", name, "out.zarr", *options)


def _folder(kind: str, rng: random.Random, folder: Path, whole: dict[str, bytes], slow: bool) -> Case:
    names = [each for each in whole if each.startswith("cells/")]
    wrong = rng.choice(names)
    (folder / "cells").mkdir()
    for name in names:
        raw = mutate(name, whole[name], rng, list(whole.values())) if name == wrong else whole[name]
        (folder / name).write_bytes(raw)
    return Case("tenx", ("import", "cells", "out.zarr"))


def _groups(kind: str, rng: random.Random, folder: Path, whole: dict[str, bytes], slow: bool) -> Case:
    """Change one file of a group that another program wrote: metadata or a Zarr chunk."""
    source = rng.choice(GROUPS)
    files = sorted(path for path in (folder / source.partition("::")[0]).rglob("*") if path.is_file())
    path = rng.choice(
        [one for one in files if one.suffix == ".json" or one.name[:2] == ".z"] if rng.random() < 0.6 else files
    )
    name = "a.json" if path.suffix == ".json" or path.name[:2] == ".z" else path.name
    path.write_bytes(mutate(name, path.read_bytes(), rng, list(whole.values())))
    return Case("groups", ("import", source, "out.zarr", "--dense"))


def _stored(kind: str, rng: random.Random, folder: Path, whole: dict[str, bytes], slow: bool) -> Case:
    matrix, file = rng.choice("ABCM") + ".zarr", rng.choice(METADATA)
    path = folder / matrix / file
    path.write_bytes(mutate(path.name, path.read_bytes(), rng, list(whole.values())))
    verbs = SLOW_VERBS if slow and rng.random() < 0.1 else VERBS
    verb = rng.choice(list(verbs))
    return Case(verb, tuple(word.replace("{M}", matrix) for word in verbs[verb]))


def _factors(kind: str, rng: random.Random, folder: Path, whole: dict[str, bytes], slow: bool) -> Case:
    name = rng.choice(("floats.npy", "whole.npy"))
    (folder / name).write_bytes(mutate(name, whole[name], rng, list(whole.values())))
    return Case("npy", ("plan", "A.zarr", "B.zarr", "--scale-rows", name, "--json"))


def _job(kind: str, rng: random.Random, folder: Path, whole: dict[str, bytes], slow: bool) -> Case:
    (folder / "job.yaml").write_bytes(mutate("job.yaml", whole["job.yaml"], rng, list(whole.values())))
    return Case("yaml", ("job.yaml",), ())
