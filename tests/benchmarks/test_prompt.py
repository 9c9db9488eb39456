"""The benchmark from prompt to prompt: it sees wrong products and failed programs, and names what is quickest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import spdist

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def prompt():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import prompt
    finally:
        sys.path.remove(str(BENCHMARKS))
    return prompt


@pytest.fixture
def product(prompt, tmp_path):
    return prompt.Product(prompt.Case("27-point 6^3", prompt.poisson(6)), tmp_path)


@pytest.fixture
def right(product):
    """Return the product as SciPy makes it."""
    a = product.right
    c = a @ a
    c.sort_indices()
    return c


def test_a_right_product_is_right(product, right):
    spdist.save(product.c, right)
    assert product.is_right(verify=True)


@pytest.mark.parametrize("wrong", ["value", "column", "entries"])
def test_a_wrong_product_is_seen(product, right, wrong):
    spdist.save(product.c, right)
    assert product.is_right(verify=False)
    if wrong == "value":
        right.data[1000] += 1e-6
    elif wrong == "column":
        right.indices[right.indptr[8] - 1] += 1
    else:
        right = right[:-1]
        right.resize(product.nrows, product.nrows)
    spdist.save(product.c, right, overwrite=True)
    assert not product.is_right(verify=False)


def test_a_script_multiplies_in_blocks(prompt, product, right):
    script = prompt.Program("SciPy", "", [str(prompt.PEERS / "scipy_zarr.py"), "2"], True)
    found = product.measure(script, dict(os.environ))
    assert found["right"]
    assert found["nnz_c"] == right.nnz
    assert product.rows_at_a_time(2) == 108
    assert found["s"] >= found["cpu_s"] / (os.cpu_count() or 1) > 0
    assert not product.c.exists()


def test_a_failure_is_one_line_without_paths(prompt, product):
    product.a.rename(product.a.with_name("elsewhere"))
    script = prompt.Program("SciPy", "", [str(prompt.PEERS / "scipy_zarr.py"), "2"], True)
    found = product.measure(script, dict(os.environ))
    assert "27-point_6^3_A.zarr" in found["failed"]
    assert str(product.a.parent) not in found["failed"]
    assert "right" not in found


def test_spdist_is_compared_with_the_quickest_script(prompt):
    def row(program, *seconds):
        trials = [{"s": s, "cpu_s": s, "right": True} for s in seconds]
        return {"case": "one", "program": program, "ours": program == "spdist", "trials": trials}

    rows = prompt.summarised([row("spdist", 1.0, 2.0, 9.0), row("SciPy", 8.0), row("CuPy", 5.0, 7.0)])
    assert rows[0]["best_peer"] == "CuPy"
    assert rows[0]["over_best_peer"] == 3.0
    assert rows[0]["over"] == {"SciPy": 4.0, "CuPy": 3.0}


def test_phases_are_medians(prompt):
    phases = [{"start": 1.0, "run": 2.0}, {"start": 2.0, "run": 5.0}, {"start": 9.0}]
    trials = [{"s": 1.0, "cpu_s": 1.0, "right": True, "phases": found} for found in phases]
    (row,) = prompt.summarised([{"case": "one", "program": "spdist", "ours": True, "trials": trials}])
    assert row["median_phases"] == {"start": 2.0, "run": 2.0}


def test_trials_end_with_the_budget(prompt):
    done = []

    def measure(case, program):
        done.append(program.name)
        return {"s": 1.0, "right": True, "nnz_c": 1, "products": 1}

    programs = [prompt.Program(name, "", [], most) for name, most in (("a", True), ("b", False))]
    cases = [prompt.Case("small", None), prompt.Case("large", None, every=False)]
    list(prompt.rounds(cases, programs, 2, measure, prompt.Clock(1000)))
    assert done == ["a", "b", "a", "b", "a", "a"]  # in the other order the second time; few programs on large products
    rows = list(prompt.rounds(cases, programs, 2, measure, prompt.Clock(1)))[-1]
    assert len(done) == 6
    assert {row["left_out"] for row in rows} == {2}


def test_a_command_that_compiled_is_run_again(prompt):
    """Its seconds are kept apart from the trials."""
    found = iter([{"s": 9.0, "phases": {"compile": 2.5}}, {"s": 3.0, "phases": {"run": 2.0}}])

    def measure(case, program):
        return {**next(found), "right": True, "nnz_c": 1, "products": 1}

    programs = [prompt.Program("a", "cuda", [], True)]
    rows = list(prompt.rounds([prompt.Case("small", None)], programs, 1, measure, prompt.Clock(1000)))[-1]
    assert rows[0]["compiling_s"] == [9.0]
    assert [trial["s"] for trial in rows[0]["trials"]] == [3.0]
