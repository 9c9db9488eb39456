"""Names of the engines: the code that multiplies a block."""

from __future__ import annotations

from typing import Literal, get_args

Engine = Literal["auto", "scipy", "numba", "cuda", "hybrid"]
ENGINES: tuple[Engine, ...] = get_args(Engine)

GPU_ENGINES = ("cuda", "hybrid")
"""Engines whose `memory_limit` counts bytes of GPU memory; with ``hybrid``, workers without a GPU multiply too."""
