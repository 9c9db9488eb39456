"""Scans of patterns, by NumPy and compiled, against rules written out entry by entry."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spdist.kernels.cpu.pattern_scan import COMPILED
from spdist.matrices import pattern
from spdist.matrices.csr import CSR
from tests.support.cpus import pretend_cpus


def brute_force(indptr: list[int], indices: list[int]) -> tuple[bool, bool]:
    """Return whether offsets rise and rows are canonical, entry by entry."""
    rise = indptr[0] == 0 and indptr[-1] == len(indices) and all(a <= b for a, b in itertools.pairwise(indptr))
    rows = [indices[a:b] for a, b in itertools.pairwise(indptr)] if rise else []
    return rise, rise and all(a < b for row in rows for a, b in itertools.pairwise(row))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 9), max_size=12),
    columns=st.lists(st.integers(-2, 12), min_size=108, max_size=108),
    change=st.tuples(st.integers(0, 12), st.integers(-3, 30)) | st.none(),
    canonical=st.booleans(),
    part=st.sampled_from([1, 2, 3, 7, 1 << 16]),
    dtype=st.sampled_from([np.int32, np.int64]),
    scan=st.sampled_from([pattern.NUMPY, COMPILED]),
)
def test_a_scan_finds_what_every_entry_says(lengths, columns, change, canonical, part, dtype, scan, monkeypatch):
    """Parts of a few elements in several threads; empty rows, duplicates, offsets that fall or leave the range."""
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    indices = np.array(columns[: int(indptr[-1])], dtype)
    if canonical:
        indices = np.concatenate([np.arange(n) for n in lengths] or [[]]).astype(dtype)
    if change is not None and change[0] < len(indptr):
        indptr[change[0]] = change[1]
    for name, value in (("FEW_ENTRIES", -1), ("THREAD_PART", 1)):
        monkeypatch.setattr(pattern, name, value)
    monkeypatch.setattr(pattern, "choose_scan", lambda length: scan._replace(part=part))
    pretend_cpus(monkeypatch, 3)
    found = pattern.pattern_facts(CSR(indptr, indices, np.ones(len(indices)), (len(lengths), 13)))
    assert (found.offsets_rise, found.is_canonical) == brute_force(indptr.tolist(), indices.tolist())
    expected = (int(indices.min()), int(indices.max())) if len(indices) else (0, -1)
    assert (found.low, found.high) == expected


@pytest.mark.parametrize("scan", [pattern.NUMPY, COMPILED])
def test_a_scan_takes_no_copy_of_the_columns(scan, monkeypatch):
    monkeypatch.setattr(pattern, "choose_scan", lambda length: scan)
    n = 1 << 21
    m = CSR(np.array([0, n]), np.arange(n, dtype=np.int32), np.ones(n), (1, n))
    pattern.pattern_facts(m)
    tracemalloc.start()
    assert pattern.pattern_facts(m).is_canonical
    assert tracemalloc.get_traced_memory()[1] < m.indices.nbytes / 3
    tracemalloc.stop()


def test_read_only_arrays_are_scanned(monkeypatch):
    monkeypatch.setattr(pattern, "FEW_ENTRIES", -1)
    assert pattern.choose_scan(2) is COMPILED
    m = CSR(np.array([0, 1, 2]), np.array([1, 0], np.int32), np.ones(2), (2, 2))
    m.indptr.flags.writeable = m.indices.flags.writeable = False
    assert pattern.pattern_facts(m) == (True, 0, 1, True)


CHOICE = """
import sys
from spdist.matrices import pattern

assert pattern.choose_scan(pattern.FEW_ENTRIES + 1) is pattern.NUMPY
assert "numba" not in sys.modules
if sys.argv[1] == "many":
    pattern.choose_scan(pattern.MANY_ENTRIES + 1)
else:
    import spdist.kernels.hyspmm.prepare
from spdist.kernels.cpu.pattern_scan import COMPILED

assert pattern.choose_scan(pattern.FEW_ENTRIES + 1) is COMPILED
assert pattern.choose_scan(pattern.FEW_ENTRIES) is pattern.NUMPY
"""


@pytest.mark.parametrize("load", ["many", "kernels"])
def test_compiled_code_scans_once_any_kernel_is_loaded_or_entries_are_many(load):
    """The engine `cuda` loads kernels of the CPU that prepare its blocks, and no engine of the CPU."""
    subprocess.run([sys.executable, "-c", CHOICE, load], check=True)


@pytest.mark.parametrize(("length", "part", "threads"), [(1000, 7, 1), (7, 1000, 1), (3 << 20, 1 << 19, 2), (1, 1, 8)])
def test_parts_cover_a_range_and_are_no_longer_than_asked_for(length, part, threads):
    found = sorted(pattern._in_parts(lambda first, last: (first, last), length, part, threads))
    assert [found[0][0], found[-1][1]] == [0, length]
    assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
    assert 0 < min(last - first for first, last in found) <= max(last - first for first, last in found) <= part
