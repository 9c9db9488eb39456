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
KINDS = ("mtx", "npz", "h5ad", "zarr", "npy", "yaml", "dense", "groups")


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
    kind = rng.choices(KINDS, (30, 30, 10, 20, 5, 5, 5, 15))[0]
    writer: Callable[..., Case] = {"zarr": _stored, "npy": _factors, "yaml": _job, "groups": _groups}.get(kind, _import)
    if kind in ("zarr", "npy"):
        shutil.copytree(stored, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("groups"))
    elif kind == "groups":
        shutil.copytree(stored / "groups", folder, dirs_exist_ok=True)
    return writer(kind, rng, folder, whole, slow)


def _import(kind: str, rng: random.Random, folder: Path, whole: dict[str, bytes], slow: bool) -> Case:
    name = rng.choice([each for each in whole if f".{kind}" in each])
    raw = mutate(name, whole[name], rng, list(whole.values()))
    (folder / name).write_bytes(raw)
    options = ("--dense",) if kind == "dense" else ()
    return Case(name.partition(".")[2], ("import", name, "out.zarr", *options))


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
