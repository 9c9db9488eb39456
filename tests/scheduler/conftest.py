"""Who runs the products of a test."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session", params=["threads", "workers"])
def executor(request) -> dict[str, Any]:
    """Return the options with which a short product is run by threads of this process, or by Dask workers."""
    return {} if request.param == "threads" else {"scheduler": request.getfixturevalue("scheduler")}
