"""Rows computed again: products made by loops in Python pass, and each way to spoil one is found."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.api import products as api
from spdist.storage.product_spec import WHOLE
from spdist.verification.recompute_sample import verify_by_recomputing
from tests.conftest import random_matrix

A = sp.csr_array(abs(random_matrix(30, 30, 5, 1)) * 8).ceil()
MASK = sp.csr_array(random_matrix(30, 30, 12, 2))


def product(top_n: int | None, threshold: float | None, masked: bool) -> dict[tuple[int, int], float]:
    """Return the entries of A @ A that are kept: the largest of each row, the first of equal ones."""
    dense, pattern, allowed = A.toarray(), A.toarray() != 0, MASK.toarray() != 0
    kept = {}
    for i in range(30):
        row = [(j, dense[i] @ dense[:, j]) for j in range(30) if (pattern[i] & pattern[:, j]).any()]
        row = [(j, x) for j, x in row if (not masked or allowed[i, j]) and (threshold is None or x >= threshold)]
        kept |= {(i, j): x for j, x in sorted(row, key=lambda one: (-one[1], one[0]))[:top_n]}
    return kept


def stored_entries(stored, name: str, entries: dict[tuple[int, int], float], shape: tuple[int, int] = (30, 30)):
    rows, columns = np.array(sorted(entries)).T
    return stored(name, sp.csr_array(([entries[key] for key in sorted(entries)], (rows, columns)), shape=shape))


@pytest.mark.parametrize("options", [(3, None, False), (None, 9.0, False), (2, 5.0, True), (None, None, True)], ids=str)
def test_spoilt_products_are_found(stored, options):
    a, right = stored("A", A), product(*options)
    wanted = dict(zip(("top_n", "threshold"), options, strict=False))
    if options[2]:
        wanted["mask"] = stored("M", MASK)
    found = api.verify(a, a, stored_entries(stored, "C", right), **wanted)
    assert (found.ok, found.method, found.nnz) == (True, "sampled", len(right))
    place = sorted(right)[len(right) // 2]
    columns = {j for i, j in right if i == place[0]}
    elsewhere = (place[0], next(j for j in range(30) if j not in columns))
    spoilt = {
        "value": right | {place: right[place] + 1},
        "left out": {key: x for key, x in right.items() if key != place},
        "too much": right | {elsewhere: right[place]},
        "elsewhere": {key: x for key, x in right.items() if key != place} | {elsewhere: right[place]},
    }
    for how, entries in spoilt.items():
        found = api.verify(a, a, stored_entries(stored, how.replace(" ", "-"), entries), **wanted)
        assert found.ok is False, how
        assert f"row {place[0]}" in found.reason, how


@pytest.mark.parametrize(
    ("options", "kept", "ok"),
    [
        ({"top_n": 1}, [0], True), ({"top_n": 1}, [1], True), ({"top_n": 1}, [2], False),
        ({"top_n": 2}, [0, 1], True), ({"top_n": 2}, [1, 2], False), ({"top_n": 2}, [0], False),
        ({"threshold": 0.6}, [0, 1], True), ({"threshold": 0.6}, [0], True), ({"threshold": 0.6}, [0, 1, 2], False),
        ({"threshold": 0.5}, [0], False),
    ],
)  # fmt: skip
def test_rounding_errors_explain_another_choice(stored, options, kept, ok):
    """Of 0.1 + 0.2 + 0.3, 0.6 and 0.4, either of the first two may be called the larger, and less than 0.6."""
    a = stored("A", sp.csr_array([[0.1, 0.2, 0.3, 0.6, 0.4]]))
    b = stored("B", sp.csr_array([[1.0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]))
    values = [0.1 + 0.2 + 0.3, 0.6, 0.4]
    c = stored_entries(stored, "C", {(0, j): values[j] for j in kept}, (1, 3))
    assert api.verify(a, b, c, **options).ok is ok


def test_a_kept_entry_in_a_column_without_products_is_found(stored):
    """Rounding explains no such choice, even if the value is right for the next column."""
    a = stored("A", sp.csr_array([[5.0, 4.0, 3.0]]))
    b = stored("B", sp.csr_array(np.eye(5)[[0, 2, 4]]))
    assert api.verify(a, b, stored_entries(stored, "C", {(0, 0): 5.0, (0, 2): 4.0}, (1, 5)), top_n=2).ok
    found = api.verify(a, b, stored_entries(stored, "D", {(0, 0): 5.0, (0, 1): 4.0}, (1, 5)), top_n=2)
    assert "row 0, column 1: this entry of C should not be there" in found.reason


def test_whole_numbers_may_have_an_epilogue(stored):
    m = sp.csr_array(random_matrix(90, 90, 6, 1, "int64"))
    a, c, epilogue = stored("A", m), m @ m, spdist.Epilogue(drop_zeros=True)
    assert api.verify(a, a, stored("C", c), epilogue=epilogue).ok
    c.data[7] += 1
    assert "computed again it is" in api.verify(a, a, stored("D", c), epilogue=epilogue).reason


def test_rows_are_counted_while_they_are_verified(stored):
    """First all rows of C, then those that are made again."""
    m, seen = sp.csr_array(random_matrix(300, 300, 6, 1, "int64")), []
    a, c = stored("A", m), stored("C", m @ m)
    assert verify_by_recomputing(a, a, c, WHOLE, progress=lambda *step: seen.append(step)).ok
    again = seen[-1][1] - 300
    assert again > 190
    assert seen[-again - 1 :] == [(300 + k, 300 + again) for k in range(again + 1)]
