"""Variable block row matrices in Zarr: a group of the five arrays of a `VBR`, in an encoding of spdist's own."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from spdist.errors import MatrixError
from spdist.matrices.dtypes import is_on_gpu
from spdist.matrices.vbr import VBR
from spdist.storage import groups
from spdist.storage.atomic_replace import staged_matrix

ENCODING = "vbr_matrix"
"""The group's ``encoding-type``."""


def save_vbr(matrix: VBR, url: str | Path, *, overwrite: bool = False, steal: bool = False) -> None:
    """Store a matrix in Zarr, for `open_vbr`; `VBR.save` calls this.

    Raises `InputError` if `url` exists and `overwrite` is false, or it holds something other than a matrix.
    """
    arrays = {field.name: getattr(matrix, field.name) for field in fields(matrix)}
    arrays = {name: array.get() if is_on_gpu(array) else array for name, array in arrays.items()}
    with staged_matrix(url, overwrite=overwrite, steal=steal, shape=matrix.shape) as stage:
        facts = {"encoding-type": ENCODING, "encoding-version": "0.1.0", "shape": list(matrix.shape)}
        groups.write_arrays(stage.url, arrays, facts)


def open_vbr(url: str | Path, *, on_gpu: bool = False) -> VBR:
    """Open a matrix that `VBR.save` stored, and read all of it.

    Parameters
    ----------
    url : str or Path
        A path or an fsspec URL.
    on_gpu : bool
        Upload the arrays to the current CUDA device.

    Returns
    -------
    VBR

    Raises
    ------
    MatrixError
        If there is no such matrix.
    CorruptError
        If a Zarr chunk is missing, truncated or altered.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, spdist
    >>> m = spdist.vbr.from_scipy(sp.csr_array(np.ones((3, 3))), np.array([0, 1, 3]), np.array([0, 3]))
    >>> m.save("memory://vbr.zarr", overwrite=True)
    >>> open_vbr("memory://vbr.zarr").blocks
    2
    """
    arrays, attributes = groups.read_arrays(url)
    if attributes.get("encoding-type") != ENCODING:
        raise MatrixError(f"{url}: not in blocks of many sizes, but {attributes.get('encoding-type')}")
    if on_gpu:
        import cupy

        arrays = {name: cupy.asarray(array) for name, array in arrays.items()}
    return VBR(**arrays)
