"""Predictions: from the plan, the machine and a pilot; they never change the plan."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp

from spdist import cli
from spdist.api import products as api
from spdist.errors import InputError
from spdist.jobs.planning import PlanSource, planned_request
from spdist.jobs.predicting import machine as machines
from spdist.jobs.predicting import predict as predicting
from spdist.jobs.predicting.machine import remember, typical_machine
from spdist.jobs.predicting.pilot import PilotTuning, _sampled_rows, pilot
from spdist.jobs.predicting.predict import plan_and_predict, predict
from spdist.jobs.predicting.run_time import expectation, run_seconds
from spdist.kernels.cpu.engine import CpuEngine
from spdist.kernels.product_spec import Epilogue
from spdist.options import ExecutionOptions, ProductOptions
from spdist.scheduler.planner.plan import Rates
from tests.conftest import random_matrix

KNOWN = replace(typical_machine(), cpus=2, gains={"read": 2.0, "multiply": 2.0, "write": 2.0}, measured="2026-01-31")
MANY = ExecutionOptions(grid=(8, 1, 1))


@pytest.fixture(autouse=True)
def compiled(tmp_path, monkeypatch):
    """Begin with a machine that was not measured, whose kernels are compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(predicting, "is_noted", lambda note: True)


def source_of(a, product=None, execution=MANY) -> PlanSource:
    source = PlanSource(planned_request(a, a, product or ProductOptions(), execution))
    return replace(source, stored_plan=source.make())


def predicted(source: PlanSource, machine=KNOWN):
    return predict(source, source.stored_plan, 0.5, machine)


def test_phases_add_up_and_bounds_hold_them(stored):
    found = predicted(source_of(stored("A", random_matrix(2_000, 2_000, 10, 5))))
    assert found.seconds == pytest.approx(sum(found.phases.values()))
    assert list(found.phases) == ["start", "plan", "run", "close"]
    assert found.phases["plan"] == 0.5
    assert found.bounds[0] < found.seconds < found.bounds[1]
    assert found.doubt == predicting.SURE


def test_twice_the_cores_halve_the_run(stored):
    source = source_of(stored("A", random_matrix(2_000, 2_000, 10, 5)))
    core = {"preprocess": 1.0, "multiply": 8.0, "merge": 0.0, "commit": 3.0, "schedule": 0.0}
    two, four = (replace(KNOWN, cpus=cpus) for cpus in (2, 4))
    walls = [{stage: seconds / cpus for stage, seconds in core.items()} for cpus in (2, 4)]
    times = [run_seconds(source.stored_plan, m, core, wall) for m, wall in zip((two, four), walls, strict=True)]
    assert times == pytest.approx([6.0, 3.0])


def test_what_a_run_expects_is_its_prediction_without_a_pilot(stored, monkeypatch):
    remember(KNOWN)
    source = source_of(stored("A", random_matrix(2_000, 2_000, 10, 5)))
    monkeypatch.setattr(predicting, "pilot", lambda *_: None)
    assert expectation(source.request, MANY)(source.stored_plan) == pytest.approx(predicted(source).phases["run"])
    assert expectation(source.request, replace(MANY, scheduler="tcp://127.0.0.1:1"))(source.stored_plan) == 0.0


def test_kernels_that_are_not_compiled_take_their_time(stored, monkeypatch):
    source = source_of(stored("A", random_matrix(2_000, 2_000, 10, 5)))
    monkeypatch.setattr(predicting, "is_noted", lambda note: False)
    monkeypatch.setattr(predicting, "pilot", None)  # it would compile them
    found = predicted(source)
    assert found.phases["compile"] == KNOWN.wait("compile")
    assert found.doubt == predicting.UNSURE


def test_gpus_start_while_it_is_planned(stored, monkeypatch):
    monkeypatch.setattr(machines, "is_short", lambda plan: False)
    a = stored("A", random_matrix(2_000, 2_000, 10, 5))
    execution = ExecutionOptions(engine="cuda", memory_limit="1GiB", grid=(8, 1, 1))
    slow, quick = (replace(KNOWN, gpu=replace(KNOWN.gpu, write=rate)) for rate in (1e6, 2e6))
    first, second = (predicted(source_of(a, execution=execution), m) for m in (slow, quick))
    assert list(first.phases) == ["start", "run", "close"]
    assert first.phases["start"] == KNOWN.wait("start on GPUs")
    assert first.doubt == predicting.SURE, "a pilot is for cores"
    assert first.phases["run"] == pytest.approx(2 * second.phases["run"], rel=0.2), "the bus bounds it"


def test_a_plan_is_the_same_on_every_machine(stored):
    a = stored("A", random_matrix(5_000, 5_000, 10, 5))
    execution = ExecutionOptions(memory_limit="32MiB", grid=(8, 1, 1))
    first, slow = plan_and_predict((a, a), ProductOptions(), execution)
    remember(replace(typical_machine(), core=Rates(read=1e9, decode=1.0, write=1e3, product=1e3)))
    second, quick = plan_and_predict((a, a), ProductOptions(), execution)
    assert first == second == api.plan(a, a, memory_limit="32MiB", grid=(8, 1, 1))
    assert slow.phases["run"] != quick.phases["run"]


def test_plan_prints_what_it_predicts(stored, capsys, monkeypatch):
    a = stored("A", random_matrix(2_000, 2_000, 10, 5))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    words = ["plan", a.url, a.url, "--grid", "8,1,1"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "spdist multiply should take about" in text
    assert "`spdist info --machine` measures this machine" in text
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds_range"][0] < found["seconds"] < found["seconds_range"][1]
    assert set(api.plan(a, a).summary()) <= set(found)
    assert found["rates"] == "typical"


def test_a_reduction_is_planned_without_its_c(stored):
    a = stored("A", random_matrix(2_000, 2_000, 10, 5))
    whole, reduced = (plan_and_predict((a, a), ProductOptions(), MANY, what)[1] for what in (None, "frobenius"))
    assert whole.core_seconds["commit"] > 0
    assert reduced.core_seconds["commit"] == reduced.verify == 0
    with pytest.raises(InputError, match="needs no plan"):
        plan_and_predict((a, a), ProductOptions(), MANY, "row_sums")


def test_a_pilot_is_quick_and_slow_as_its_core(stored):
    source = source_of(stored("A", random_matrix(900, 900, 8, 3)))
    job, plan = source.draft().with_plan(source.stored_plan, ""), source.stored_plan
    slow, quick = (pilot(job, plan, Rates(product=rate, entry=rate)).slowness for rate in (1e3, 1e12))
    assert 0 < slow < 1 < quick


@pytest.mark.parametrize("wanted", ["scipy", "numba"])
def test_a_pilot_multiplies_as_the_product_will(stored, monkeypatch, wanted):
    source = source_of(stored("A", random_matrix(900, 900, 8, 3)), execution=replace(MANY, engine=wanted))
    engines = set()
    monkeypatch.setattr(CpuEngine, "multiply_rows", lambda self, _, b, *rest: engines.add(self.name) or b)
    assert pilot(source.draft().with_plan(source.stored_plan, ""), source.stored_plan, Rates()) is not None
    assert engines == {wanted}


@pytest.mark.parametrize("options", ["mask", "scale", "triangle"])
def test_a_pilot_has_the_options_of_its_rows(stored, monkeypatch, options):
    matrix = random_matrix(900, 900, 8, 3)
    a = stored("A", matrix + matrix.T)
    product = {
        "mask": ProductOptions(mask=a),
        "scale": ProductOptions(epilogue=Epilogue(np.arange(900.0), None, None, None, False)),
        "triangle": ProductOptions(triangle="upper"),
    }[options]
    source, made = source_of(a, product), []

    def multiply(engine, left, right, capacity, spec, *limits):
        assert left.ncols == right.nrows
        assert left.indices.max() < right.nrows
        assert capacity == np.diff(right.indptr)[left.indices].sum()
        if options == "mask":
            assert spec.mask.nrows == left.nrows
        if options == "scale":
            assert len(spec.epilogue.rows) == left.nrows
        assert spec.triangle is None
        made.append(left)
        return right

    monkeypatch.setattr(CpuEngine, "multiply_rows", multiply)
    job = source.draft().with_plan(source.stored_plan, "")
    assert pilot(job, source.stored_plan, Rates()) is not None
    assert len(made) == 1 + PilotTuning().repeats


def test_a_pilot_leaves_rows_out_that_would_be_all_of_it(stored):
    matrix = sp.lil_array((1_000, 1_000))
    matrix.setdiag(1.0)
    matrix[500, :] = 1.0
    source = source_of(stored("A", matrix.tocsr()))
    job, plan = source.draft().with_plan(source.stored_plan, ""), source.stored_plan
    lengths = np.diff(matrix.tocsr().indptr)
    rows, _ = _sampled_rows(job, plan, lengths, PilotTuning(products=4_000, runs=1))
    assert np.diff(rows.indptr).max() == 1
    assert rows.nrows > 900
    assert pilot(job, plan, Rates(), PilotTuning(chunks=0)) is None, "B would take long to read"
