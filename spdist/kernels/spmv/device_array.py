"""The type of arrays that lie on the host or on the GPU."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy.typing as npt

DeviceArray: TypeAlias = npt.NDArray[Any]
"""An array of NumPy, or one of CuPy, which has NumPy's interface."""
