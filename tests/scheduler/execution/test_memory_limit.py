"""Skewed products within their memory limit, by their report and from outside: a few of the cases of torture."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import spdist
from tests.torture.skewed import MIB, Case, matrix, verdict_on

CASES = [Case("rmat", 1, 33 * MIB), Case("long row", 3, 96 * MIB)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_a_skewed_product_takes_no_more_than_its_limit(tmp_path, case):
    assert verdict_on(case, matrix(case.kind, case.seed), tmp_path) == "right"


@pytest.mark.parametrize("workers", [[], ["--workers", "1"]])
def test_what_a_fresh_process_loads_does_not_count(tmp_path, workers):
    """Numba, its kernels and Zarr are loaded before memory is measured; the engine is chosen for the whole plan."""
    spdist.save(tmp_path / "A.zarr", matrix("rmat", 1))
    words = ["multiply", "A.zarr", "A.zarr", "C.zarr", "--memory-limit", "33MiB", "--json", *workers]
    done = subprocess.run([sys.executable, "-m", "spdist", *words], cwd=tmp_path, capture_output=True,
                          text=True, check=True)  # fmt: skip
    report = json.loads(done.stdout)
    assert 0 < report["peak_memory"] <= report["memory_limit"] == 33 * MIB
