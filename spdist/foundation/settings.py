"""What users set for libraries, in the environment or in files: what is wrong there becomes one line that names it."""

from __future__ import annotations

import importlib
import os
import re
import traceback
import warnings
from pathlib import Path
from typing import Any

from spdist.errors import InputError, one_line

PREFIXES = {
    "numba": "NUMBA_", "llvmlite": "NUMBA_", "dask": "DASK_", "distributed": "DASK_", "zarr": "ZARR_",
    "donfig": "ZARR_", "zarrs": "ZARR_", "fsspec": "FSSPEC_", "botocore": "AWS_", "obstore": "AWS_",
    "cupy": "CUPY_", "tempfile": "TMPDIR",
}  # fmt: skip
"""How the variables begin that a module reads."""
FOLDERS = {"dask": "~/.config/dask", "distributed": "~/.config/dask", "fsspec": "~/.config/fsspec",
           "numba": ".numba_config.yaml"}  # fmt: skip
"""Files and folders of settings that a module reads."""
SHOWN, VALUE = "NUMBA_", 60
"""How variables begin whose values a message shows, as none is a secret, and characters of a value that it shows."""
HARMLESS = r"NUMBA_NUM_THREADS=[1-9]\d{0,3}|NUMBA_CACHE_DIR=.*"
"""Settings of Numba that are right as they stand; Dask leaves the first in the environment of who starts workers."""
SHOW = "SPDIST_TRACEBACK"
"""The variable that asks for tracebacks."""


def unexpected(error: BaseException) -> str:
    """Return the line for an error that no code foresaw: the error, and what is set for the libraries it came from.

    With `SPDIST_TRACEBACK` set in the environment, the traceback is printed too.
    """
    if os.environ.get(SHOW):
        traceback.print_exception(error)
    text = f"{type(error).__name__}: {one_line(' '.join(str(error).split()), 500)}".rstrip(": ")
    modules = {each for one in _chain(error) for each in _modules(one)}
    found = _settings(modules)
    if not found:
        return f"unexpected {text}; {SHOW}=1 shows where it came from"
    return f"{text}; correct or remove what is set: {found} ({SHOW}=1 shows where the error came from)"


def check_numba() -> None:
    """Refuse settings of Numba that it cannot read, or that turn compilation off, before anything needs it.

    Numba is loaded only if there are settings.
    """
    lines = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(PREFIXES["numba"])]
    if all(re.fullmatch(HARMLESS, line) for line in lines) and not Path(FOLDERS["numba"]).exists():
        return
    found = _settings({"numba"})
    if not found:
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            config: Any = importlib.import_module("numba.core.config")
        except Exception as error:
            raise InputError(f"Numba: {one_line(error)}; correct or remove what is set: {found}") from error
    if said and issubclass(said[0].category, RuntimeWarning):
        problem = one_line(str(said[0].message).partition("\n")[0])
        raise InputError(f"Numba: {problem} Correct or remove what is set: {found}")
    features = (config.CPU_FEATURES or "").split(",")
    if any(one and one[0] not in "+-" for one in features):  # LLVM would end the process
        raise InputError(f"Numba: names of CPU features begin with + or -; correct or remove what is set: {found}")
    if config.DISABLE_JIT:
        raise InputError(f"Numba is told to compile nothing, and spdist's kernels are compiled: remove {found}")


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an exception, and those from which it was raised."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _modules(error: BaseException) -> set[str]:
    """Return the top-level modules that an exception passed."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return {str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in frames}


def _settings(modules: set[str]) -> str:
    """Return what is set for some modules: variables with their values, files and folders."""
    prefixes = tuple(PREFIXES[module] for module in modules & PREFIXES.keys())
    variables = [
        f"{name}={one_line(value, VALUE)}" if name.startswith(SHOWN) else name
        for name, value in sorted(os.environ.items())
        if name.startswith(prefixes)
    ]
    places = sorted({FOLDERS[module] for module in modules & FOLDERS.keys()})
    return ", ".join(variables + [place for place in places if Path(place).expanduser().exists()])
