"""Functions of higher layers that matrices call.

The package's `__init__` registers each function by name; the first call imports its module.

`VBR.save` writes to storage, which lies above matrices. The method asks here for the function, so that this layer knows
no module of storage, and a process that only multiplies imports no Zarr.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_homes: dict[str, str] = {}


def register(name: str, module: str) -> None:
    """Note that `module` defines the function `name`; nothing is imported yet."""
    _homes[name] = module


def load(name: str) -> Callable[..., Any]:
    """Import and return the function that was registered as `name`."""
    function: Callable[..., Any] = getattr(importlib.import_module(_homes[name]), name)
    return function
