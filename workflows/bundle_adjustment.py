"""A step of bundle adjustment by products of block matrices: normal equations, Schur complement, back-substitution.

::

    python workflows/bundle_adjustment.py J.npz [--cameras 16] [--damping 1e-4]

J is the Jacobian of a problem of *Bundle Adjustment in the Large*: two rows an observation, nine columns a camera, the
cameras first, three a point; an observation is of one point by one camera. With J = [Jc Jp] and damped diagonals,
``U = Jc' Jc`` has blocks of 9 x 9, ``V = Jp' Jp`` one of 3 x 3 for each point, ``W = Jc' Jp`` blocks of 9 x 3; the
points are eliminated by ``S = U - W inv(V) W'``. The residuals are random. Exits with 1 unless the step solves the
normal equations, and the same products made entry by entry agree; with 2 where J or an option is wrong.

S. Agarwal, N. Snavely, S. Seitz, R. Szeliski, "Bundle Adjustment in the Large", ECCV 2010.
"""

from __future__ import annotations

import math
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import job as jobs
import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

import spdist

CAMERA, POINT, OBSERVATION = 9, 3, 2
TOLERANCE = 1e-8

Vector = npt.NDArray[np.float64]


def read(path: Path) -> sp.csr_array:
    """Return a Jacobian that `scipy.sparse.save_npz` wrote.

    Raises `InputError` if the file cannot be read, or holds no matrix.
    Raises `MatrixError` if the matrix has values that are not finite real numbers.
    """
    try:
        j = sp.csr_array(sp.load_npz(path))
        j.check_format()
    except OSError as error:
        raise spdist.InputError(f"cannot be read: {error.strerror}; name a file of scipy.sparse.save_npz") from None
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        raise spdist.InputError("is no sparse matrix: name a file of scipy.sparse.save_npz") from None
    if j.ndim != 2:
        raise spdist.MatrixError(f"has {j.ndim} dimension, not 2: name a matrix")
    if j.dtype.kind not in "biuf" or not np.isfinite(j.data).all():
        raise spdist.MatrixError(f"holds {j.dtype}, not all of it finite real numbers: correct it")
    return j.astype(np.float64)


def split(j: sp.csr_array, cameras: int) -> tuple[sp.bsr_array, sp.bsr_array]:
    """Return the columns of the cameras and of the points, in blocks; each observation has one of both.

    `j`: the Jacobian.
    Returns blocks of 2 x 9 and of 2 x 3.
    Raises `MatrixError` if the shape does not fit, or an observation is not of one camera and one point.
    """
    cut = CAMERA * cameras
    if j.shape[0] % OBSERVATION or cameras < 1 or j.shape[1] <= cut or (j.shape[1] - cut) % POINT:
        raise spdist.MatrixError(
            f"is {j.shape[0]:,} x {j.shape[1]:,}, which are no {OBSERVATION} rows an observation, {CAMERA} columns for "
            f"each of {cameras:,} cameras and {POINT} for each point: give as many as J has, --cameras N"
        )
    parts = j[:, :cut].tobsr((OBSERVATION, CAMERA)), j[:, cut:].tobsr((OBSERVATION, POINT))
    for part, what in zip(parts, ("camera", "point"), strict=True):
        wrong = np.flatnonzero(np.diff(part.indptr) != 1)
        if len(wrong):
            raise spdist.MatrixError(
                f"with {cameras:,} cameras, observation {wrong[0]:,} has {np.diff(part.indptr)[wrong[0]]} {what}s "
                f"where it is of one: give as many as J has, --cameras N"
            )
    return parts


def normal_equations(jc: sp.bsr_array, jp: sp.bsr_array) -> tuple[sp.bsr_array, sp.bsr_array, sp.bsr_array]:
    """Return ``Jc' Jc``, ``Jp' Jp`` and ``Jc' Jp``.

    `jc`, `jp`: columns of the cameras and of the points.
    Returns u, V and W, in blocks of 9 x 9, 3 x 3 and 9 x 3.
    """
    return spdist.spgemm(jc.T, jc), spdist.spgemm(jp.T, jp), spdist.spgemm(jc.T, jp)


def damped(m: sp.bsr_array, damping: float) -> sp.bsr_array:
    """Return the matrix with its diagonal raised by a share of itself, which makes it positive definite."""
    return (m + sp.diags_array(damping * m.diagonal() + 1e-12)).tobsr(m.blocksize)


def inverse(v: sp.bsr_array) -> sp.bsr_array:
    """Return the inverse of a block diagonal matrix."""
    return sp.bsr_array((np.linalg.inv(v.data), v.indices, v.indptr), shape=v.shape)


def step(jc: sp.bsr_array, jp: sp.bsr_array, residuals: Vector, damping: float) -> tuple[Vector, Vector]:
    """Return the step of the cameras and of the points that solves the damped normal equations."""
    u, v, w = normal_equations(jc, jp)
    u, v = damped(u, damping), damped(v, damping)
    right, v_inverse = (-jc.T @ residuals, -jp.T @ residuals), inverse(v)
    w_v = spdist.spgemm(w, v_inverse)
    schur = u - spdist.spgemm(w_v, w.T)
    cameras = np.linalg.solve(schur.toarray(), right[0] - w_v @ right[1])
    return cameras, v_inverse @ (right[1] - w.T @ cameras)


def error_of(
    jc: sp.bsr_array, jp: sp.bsr_array, residuals: Vector, damping: float, cameras: Vector, points: Vector
) -> float:
    """Return the residual of the damped normal equations for a step, relative to their right-hand side.

    `cameras`, `points`: the step.
    Returns a ratio of Euclidean norms.
    """
    j, x = sp.hstack([jc.tocsr(), jp.tocsr()], format="csr"), np.concatenate([cameras, points])
    diagonal = damping * (j.multiply(j)).sum(axis=0) + 1e-12
    right = -j.T @ residuals
    return float(np.linalg.norm(j.T @ (j @ x) + diagonal * x - right) / np.linalg.norm(right))


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Call a function twice; return the second result, and the seconds that the second call took."""
    function()
    begin = time.perf_counter()
    return function(), time.perf_counter() - begin


def report(jc: sp.bsr_array, jp: sp.bsr_array, damping: float) -> bool:
    """Make a step and print its times and its error.

    Returns whether products by blocks and by entries agree, and the step solves the normal equations.
    """
    observations, cameras, points = jc.shape[0] // OBSERVATION, jc.shape[1] // CAMERA, jp.shape[1] // POINT
    print(f"{observations:,} observations, {cameras:,} cameras, {points:,} points")
    blocks, seconds = timed(lambda: normal_equations(jc, jp))
    numbers, by_entries = timed(lambda: normal_equations(jc.tocsr(), jp.tocsr()))
    agree = all(abs(m.tocsr() - n).max() <= TOLERANCE * abs(n).max() for m, n in zip(blocks, numbers, strict=True))
    print(f"normal equations: {seconds:.3f} s by blocks, {by_entries:.3f} s by entries; equal: {agree}")
    residuals = np.random.default_rng(0).standard_normal(jc.shape[0])
    found, seconds = timed(lambda: step(jc, jp, residuals, damping))
    error = error_of(jc, jp, residuals, damping, *found)
    print(f"a step: {seconds:.3f} s; it solves the normal equations to {error:.1e} of their right-hand side")
    return agree and error <= TOLERANCE


def main(arguments: list[str] | None = None) -> int:
    """Make a step; return the exit code."""
    parser = jobs.Parser(description="A step of bundle adjustment by products of block matrices.")
    parser.add_argument("jacobian", type=Path, help="a scipy.sparse.save_npz file")
    parser.add_argument("--cameras", type=int, default=16)
    parser.add_argument("--damping", type=float, default=1e-4)
    args = parser.parse_args(arguments)
    if not 0 <= args.damping < math.inf:
        parser.error(f"--damping {args.damping} is no finite number of 0 and more; write for instance 1e-4")
    try:
        return 0 if report(*split(read(args.jacobian), args.cameras), args.damping) else 1
    except spdist.InputError as error:
        print(f"{args.jacobian}: {error}", file=sys.stderr)
        return error.exit_code
    except np.linalg.LinAlgError as error:
        print(f"{args.jacobian}: the normal equations cannot be solved ({error}): raise --damping", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
