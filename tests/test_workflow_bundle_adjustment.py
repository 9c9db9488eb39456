"""The step of bundle adjustment on a small problem of its form."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import scipy.sparse as sp

SCRIPT = Path(__file__).resolve().parent.parent / "workflows" / "bundle_adjustment.py"


def test_a_step_solves_the_normal_equations(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("workflow_bundle_adjustment", SCRIPT)
    workflow = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(workflow)
    rng, cameras, points, observations = np.random.default_rng(1), 4, 60, 300
    seen = rng.integers(0, cameras, observations), np.arange(observations) % points
    indptr = np.arange(observations + 1)
    parts = (
        sp.bsr_array(
            (rng.standard_normal((observations, 2, width)), which, indptr), shape=(2 * observations, width * n)
        )
        for which, width, n in zip(seen, (9, 3), (cameras, points), strict=True)
    )
    sp.save_npz(tmp_path / "J.npz", sp.csr_array(sp.hstack(list(parts))))
    assert workflow.main([str(tmp_path / "J.npz"), "--cameras", "4", "--damping", "1e-2"]) == 0
    assert "equal: True" in capsys.readouterr().out
