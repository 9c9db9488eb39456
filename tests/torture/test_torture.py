"""About a minute of what ``make torture`` does for hours: fixed seeds, every part."""

from __future__ import annotations

import random
import shutil

import pytest

from tests.torture import calls
from tests.torture.jobs import NEED_COMPILER, PARTS
from tests.torture.kills import Bench
from tests.torture.outcome import VERDICTS
from tests.torture.products import PRODUCTS, Stock
from tests.torture.runs import Launcher

SEED = 22
TRIALS = {
    "kills": 4,
    "tasks": 2,
    "damage": 4,
    "pairs": 1,
    "calls": 3,
    "memory": 1,
    "power": 1,
    "cluster": 1,
    "network": 1,
    "histories": 1,
    "settings": 1,
    "rewrites": 3,
}
"""Trials of each part."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torture")
    with Launcher(calls.compile_library(folder)) as launcher:
        yield Bench(Stock(folder / "stock", launcher).make(), folder)


@pytest.mark.slow
@pytest.mark.parametrize("part", TRIALS)
def test_every_fault_has_an_answer(bench, part):
    if part in NEED_COMPILER and not bench.launcher.preload:
        pytest.skip("needs a C compiler, for system calls that fail")
    outcomes = [PARTS[part][0](bench, random.Random(f"{SEED}/{part}/{i}"), i) for i in range(TRIALS[part])]
    assert not [f"{outcome.verdict}: {outcome.what}: {outcome.detail}" for outcome in outcomes if not outcome.good]


@pytest.mark.slow
def test_a_wrong_product_is_seen(bench):
    """The harness itself: what it must notice, it notices."""
    product, trial = PRODUCTS[0], bench.trial()
    target = trial.data / "C.zarr"
    shutil.copytree(bench.stock.whole(product), target)
    assert not bench.stock.difference(product, target)
    (target / "spdist-journal").write_bytes(b"")
    assert "has too much" in bench.stock.difference(product, target)
    (target / "data" / "c" / "1").write_bytes((target / "data" / "c" / "0").read_bytes())
    assert "differs in data/c/1" in bench.stock.difference(product, target)
    outcome = bench.judge("test", "", trial, lambda: bench.check_end(trial, product))
    assert outcome.verdict == "wrong"
    assert {"right", "refused"} <= set(VERDICTS)
