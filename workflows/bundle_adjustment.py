"""A step of bundle adjustment by products of block matrices: normal equations, Schur complement, back-substitution.

::

    python workflows/bundle_adjustment.py J.npz [--cameras 16] [--damping 1e-4]

J is the Jacobian of a problem of *Bundle Adjustment in the Large*: two rows an observation, nine columns a camera, the
cameras first, three a point. With J = [Jc Jp] and damped diagonals, ``U = Jc' Jc`` has blocks of 9 x 9, ``V = Jp' Jp``
one of 3 x 3 for each point, ``W = Jc' Jp`` blocks of 9 x 3; the points are eliminated by ``S = U - W inv(V) W'``. The
residuals are random. Exits with 1 unless the step solves the normal equations, and the same products made entry by
entry agree.

S. Agarwal, N. Snavely, S. Seitz, R. Szeliski, "Bundle Adjustment in the Large", ECCV 2010.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

import spdist

CAMERA, POINT, OBSERVATION = 9, 3, 2
TOLERANCE = 1e-8


def normal_equations(jc: Any, jp: Any) -> tuple[Any, Any, Any]:
    """Return ``Jc' Jc``, ``Jp' Jp`` and ``Jc' Jp``."""
    return spdist.spgemm(jc.T, jc), spdist.spgemm(jp.T, jp), spdist.spgemm(jc.T, jp)


def damped(m: Any, damping: float) -> Any:
    """Return a matrix whose diagonal is larger by a share of itself, which makes it positive definite."""
    return (m + sp.diags_array(damping * m.diagonal() + 1e-12)).tobsr(m.blocksize)


def inverse(v: Any) -> Any:
    """Return the inverse of a matrix of blocks on the diagonal alone."""
    return sp.bsr_array((np.linalg.inv(v.data), v.indices, v.indptr), shape=v.shape)


def step(jc: Any, jp: Any, residuals: Any, damping: float) -> tuple[Any, Any]:
    """Return the step of the cameras and of the points that the damped normal equations give."""
    u, v, w = normal_equations(jc, jp)
    u, v = damped(u, damping), damped(v, damping)
    right, v_inverse = (-jc.T @ residuals, -jp.T @ residuals), inverse(v)
    w_v = spdist.spgemm(w, v_inverse)
    schur = u - spdist.spgemm(w_v, w.T)
    cameras = np.linalg.solve(schur.toarray(), right[0] - w_v @ right[1])
    return cameras, v_inverse @ (right[1] - w.T @ cameras)


def error_of(jc: Any, jp: Any, residuals: Any, damping: float, cameras: Any, points: Any) -> float:
    """Return how far a step is from solving the normal equations, in units of their right-hand side."""
    j, x = sp.hstack([jc.tocsr(), jp.tocsr()], format="csr"), np.concatenate([cameras, points])
    diagonal = damping * (j.multiply(j)).sum(axis=0) + 1e-12
    right = -j.T @ residuals
    return float(np.linalg.norm(j.T @ (j @ x) + diagonal * x - right) / np.linalg.norm(right))


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a function returns the second time, and the seconds it took then."""
    function()
    begin = time.perf_counter()
    return function(), time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> int:
    """Make a step; return the exit code."""
    parser = argparse.ArgumentParser(description="A step of bundle adjustment by products of block matrices.")
    parser.add_argument("jacobian", type=Path, help="a scipy.sparse.save_npz file")
    parser.add_argument("--cameras", type=int, default=16)
    parser.add_argument("--damping", type=float, default=1e-4)
    args = parser.parse_args(arguments)
    j = sp.csr_array(sp.load_npz(args.jacobian))
    cut = CAMERA * args.cameras
    jc, jp = j[:, :cut].tobsr((OBSERVATION, CAMERA)), j[:, cut:].tobsr((OBSERVATION, POINT))
    print(f"{j.shape[0] // OBSERVATION:,} observations, {args.cameras:,} cameras, {jp.shape[1] // POINT:,} points")
    blocks, seconds = timed(lambda: normal_equations(jc, jp))
    numbers, by_entries = timed(lambda: normal_equations(jc.tocsr(), jp.tocsr()))
    agree = all(abs(m.tocsr() - n).max() <= TOLERANCE * abs(n).max() for m, n in zip(blocks, numbers, strict=True))
    print(f"normal equations: {seconds:.3f} s by blocks, {by_entries:.3f} s by entries; equal: {agree}")
    residuals = np.random.default_rng(0).standard_normal(j.shape[0])
    found, seconds = timed(lambda: step(jc, jp, residuals, args.damping))
    error = error_of(jc, jp, residuals, args.damping, *found)
    print(f"a step: {seconds:.3f} s; it solves the normal equations to {error:.1e} of their right-hand side")
    return 0 if agree and error <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
