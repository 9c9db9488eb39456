"""The benchmark's matrices: the same bits on every machine, so that figures can be compared."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from spdist.kernels.cpu import multiply as cpu
from spdist.matrices.checks import check_canonical

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def suite():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import suite
    finally:
        sys.path.remove(str(BENCHMARKS))
    return suite


@pytest.mark.parametrize(
    ("name", "nnz", "products", "nnz_c"),
    [
        ("cca", 139_264, 401_408, 311_296),
        ("poisson3Da", 352_878, 9_473_852, 2_015_772),
        ("orsirr_1", 6_858, 45_946, 23_338),
        ("cage12", 2_032_270, 31_764_094, None),
        ("rmat17_e8", 999_302, 326_445_552, None),
    ],
)
def test_matrices_have_the_published_counts(suite, name, nnz, products, nnz_c):
    a, b = suite.make(name)
    check_canonical(a)
    assert a is b
    assert a.nnz == nnz
    assert int(np.diff(b.indptr)[a.indices].sum()) == products
    if nnz_c is not None:
        assert cpu.multiply(a, b).nnz == nnz_c


def test_values_are_the_same_bits_everywhere(suite):
    a, _ = suite.make("orsirr_1")
    assert a.data[:2].tolist() == [0.7800759626301593, 0.9611467098029421]


@pytest.mark.parametrize("name", ["fem", "27-point", "rmat", "longrows", "galerkin"])
def test_tiny_matrices_are_kept_in_the_folder(suite, tmp_path, name):
    suite.prepare([name], tmp_path, tiny=True)
    made, loaded = suite.make(name, tiny=True), suite.load(name, tmp_path, tiny=True)
    assert (loaded[0] is loaded[1]) == (made[0] is made[1])
    for m, n in zip(made, loaded, strict=True):
        check_canonical(n)
        assert m.shape == n.shape
        assert all(np.array_equal(getattr(m, part), getattr(n, part)) for part in ("indptr", "indices", "data"))
