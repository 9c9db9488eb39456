"""`auto` takes the cores or the GPUs: by what both should take, and never a GPU that cannot make the product."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp

from spdist import cli
from spdist.api import products as api
from spdist.errors import InputError
from spdist.inmemory import spgemm as inmemory
from spdist.jobs.planning import planned_request
from spdist.jobs.predicting import choice
from spdist.jobs.predicting.choice import quickest, quickest_in_memory
from spdist.jobs.predicting.machine import remember, typical_machine
from spdist.kernels.engine import find_engine
from spdist.options import ExecutionOptions, ProductOptions
from spdist.scheduler.execution import worker_process
from spdist.scheduler.planner import outline, planner
from spdist.scheduler.planner.plan import Rates
from tests.conftest import random_matrix

SLOW = Rates(read=9e8, decode=9e8, write=1e9, product=1e3, entry=1e3)


@pytest.fixture(autouse=True)
def gpu_host(tmp_path, monkeypatch):
    """Begin on a host with a GPU, with rates of a typical machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(worker_process, "may_have_gpu", lambda: True)
    monkeypatch.setattr(choice, "room", lambda: 1 << 40)


@pytest.fixture
def slow_cores(monkeypatch):
    """Make products on the cores take hours, each in many blocks."""
    monkeypatch.setattr(outline, "MAX_BLOCK_PRODUCTS", 1_000)
    remember(replace(typical_machine(), core=SLOW))


def cores_request(stored, **options):
    """Return the request of ``A @ A`` for the cores, as it is before anything is compared."""
    a = stored("A", random_matrix(2_000, 2_000, 10, 5))
    cores = replace(ExecutionOptions(engine="numba"), **options)
    return replace(planned_request(a, a, ProductOptions(), cores), engine="auto")


def on_gpus(request, limit=1 << 33):
    """Return what makes the request for GPUs of `limit` bytes."""
    return lambda: replace(request, engine="cuda", memory_limit=limit, host_limit=1 << 31, threads=1)


def no_gpu(request):
    """Return what finds that there is no GPU."""

    def refuse():
        raise InputError("no GPU here")

    return refuse


def test_a_short_product_stays_on_the_cores(stored):
    request = cores_request(stored)
    found = quickest(request, lambda: pytest.fail("a GPU was asked"))
    assert found.engine == "auto"
    assert found.choice["auto"] < found.choice["cuda"]


def test_a_product_that_is_long_on_the_cores_goes_to_the_gpu(stored, slow_cores):
    request = cores_request(stored)
    found = quickest(request, on_gpus(request))
    assert (found.engine, found.memory_limit, found.host_limit) == ("cuda", 1 << 33, 1 << 31)
    assert found.choice["cuda"] < found.choice["auto"]
    made = planner.make_plan(found)
    assert made.engine == "cuda"
    assert made == planner.make_plan(replace(found, survey=None))


@pytest.mark.parametrize(
    ("for_gpus", "why"),
    [(no_gpu, "no GPU here"), (lambda request: on_gpus(request, 1 << 20), "1.00 MiB of memory left")],
)
def test_a_gpu_that_cannot_be_used_is_said(stored, slow_cores, caplog, for_gpus, why):
    request = cores_request(stored)
    with caplog.at_level(logging.WARNING, logger="spdist"):
        found = quickest(request, for_gpus(request))
    assert found.engine == "auto"
    assert why in caplog.text


@pytest.mark.parametrize("reason", ["blocks of values", "little memory", "a small host", "no sign of a GPU"])
def test_products_that_no_gpu_is_asked_for(stored, slow_cores, monkeypatch, reason):
    request = cores_request(stored, memory_limit="64MiB" if reason == "little memory" else None)
    if reason == "blocks of values":
        blocks = stored("blocks", sp.bsr_array(random_matrix(200, 200, 10, 5), blocksize=(2, 2)))
        request = replace(request, a=blocks, b=blocks)
    if reason == "a small host":
        monkeypatch.setattr(choice, "room", lambda: 1 << 29)
    if reason == "no sign of a GPU":
        monkeypatch.setattr(worker_process, "may_have_gpu", lambda: False)
    assert quickest(request, lambda: pytest.fail("a GPU was asked")) is request


def test_given_workers_are_of_the_cores(stored, slow_cores):
    a = stored("A", random_matrix(2_000, 2_000, 10, 5))
    request = planned_request(a, a, ProductOptions(), ExecutionOptions(engine="auto", workers=2))
    assert (request.engine, request.choice) == ("auto", {})


def test_plan_says_what_both_would_take(stored, capsys):
    a = stored("A", random_matrix(2_000, 2_000, 10, 5))
    assert cli.main(["plan", a.url, a.url]) == 0
    out = capsys.readouterr().out
    assert "engine auto: start and run" in out
    assert "s with cuda" in out


PLAIN = ProductOptions().row_spec()
LARGE = sp.random_array((3_000, 3_000), density=0.01, rng=np.random.default_rng(3), format="csr")


def chosen_in_memory(a, b=None, spec=PLAIN) -> str:
    return quickest_in_memory(a, a if b is None else b, spec, find_engine("auto")).name


@pytest.fixture
def free_gpu(monkeypatch):
    """Give the host a GPU with free memory."""
    monkeypatch.setattr(choice, "_has_free_gpu", lambda: True)


def test_matrices_in_memory_go_to_the_gpu_if_the_cores_are_slow(slow_cores, free_gpu):
    assert chosen_in_memory(LARGE) == "cuda"
    assert chosen_in_memory(LARGE.astype(np.int16)) == "auto", "no GPU multiplies them"
    assert chosen_in_memory(LARGE.tocsc()) == "auto"
    assert chosen_in_memory(LARGE, spec=ProductOptions(threshold=0.5).row_spec()) == "auto"
    assert chosen_in_memory(LARGE, spec=ProductOptions(sort=False).row_spec()) == "auto"
    broken = LARGE.copy()
    broken.indices[::7] = 5_000
    assert chosen_in_memory(broken) == "auto", "whoever multiplies says what is wrong"


def test_small_matrices_in_memory_touch_no_gpu(monkeypatch):
    monkeypatch.setattr(choice, "_has_free_gpu", lambda: pytest.fail("a GPU was asked"))
    assert chosen_in_memory(LARGE) == "auto"


def test_matrices_in_memory_stay_where_there_is_no_gpu(slow_cores, monkeypatch, caplog):
    def refuse():
        raise InputError("no GPU here")

    monkeypatch.setattr(worker_process, "count_gpus", refuse)
    with caplog.at_level(logging.WARNING, logger="spdist"):
        assert chosen_in_memory(LARGE) == "auto"
    assert "though a GPU should be quicker" in caplog.text


@pytest.mark.parametrize(
    ("engine", "method"), [("auto", "cuda"), ("numba", "numba"), ("cuda", "cuda"), ("hybrid", "cuda")]
)
def test_matmul_hands_the_choice_on(slow_cores, free_gpu, monkeypatch, engine, method):
    found = []
    monkeypatch.setattr(inmemory, "multiply", lambda a, b, product, options: found.append(options.method))
    api.matmul(LARGE, LARGE, engine=engine)
    assert found == [method]
