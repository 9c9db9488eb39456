"""Names of the engines: which code multiplies a block, and on which memory the limit is."""

from __future__ import annotations

from typing import Literal, get_args

Engine = Literal["auto", "scipy", "numba", "cuda", "hybrid"]
ENGINES: tuple[Engine, ...] = get_args(Engine)

GPU_ENGINES = ("cuda", "hybrid")
"""Engines whose memory limit is that of the GPU; with ``hybrid``, workers without a GPU multiply too."""
