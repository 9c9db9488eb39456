"""What pip installs as: this project's name there, and another project's package in the same folder."""

from __future__ import annotations

import os
from importlib.machinery import EXTENSION_SUFFIXES

DISTRIBUTION = "spdist-spgemm"
"""What pip calls this project; `spdist` on PyPI is another one."""


def check_alone(folder: str) -> None:
    """Raise `ImportError` if the other package's library lies in this one's folder: they replace each other's files."""
    for suffix in EXTENSION_SUFFIXES:
        path = os.path.join(folder, f"spdist{suffix}")  # noqa: PTH118  (pathlib takes longer to load than all of this)
        if os.path.exists(path):  # noqa: PTH110
            raise ImportError(
                f"{path} is of another package, spdist on PyPI, which was installed into the same folder: pip "
                f"uninstall spdist {DISTRIBUTION}, then install {DISTRIBUTION} alone"
            )


def version_of(package: str) -> str | None:
    """Return the version of a package, None if it is not installed; of others than spdist by pip's name."""
    from importlib.metadata import PackageNotFoundError, version  # loads much

    try:
        return version(DISTRIBUTION if package == "spdist" else package)
    except PackageNotFoundError:
        return None
