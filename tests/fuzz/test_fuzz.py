"""Some malformed inputs, in this process; `python -m tests.fuzz` runs many, each in one of its own."""

import contextlib
import io
import random
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spdist import cli
from tests.conftest import load_workflow
from tests.fuzz.__main__ import Outcome
from tests.fuzz.cases import Case, import_of, write_case
from tests.fuzz.seeds import seeds, store_matrices

pytestmark = pytest.mark.filterwarnings("ignore")  # on stderr they would show, and are looked for there


@pytest.fixture(scope="module")
def whole():
    return seeds()


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    place = tmp_path_factory.mktemp("stored")
    store_matrices(place)
    return place


def run(case: Case, folder: Path, monkeypatch) -> Outcome:
    """Run the command of a case in this process."""
    before = {path.name for path in folder.iterdir()}
    said, handler = io.StringIO(), signal.getsignal(signal.SIGTERM)
    with contextlib.chdir(folder), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            if case.kind == "yaml":
                workflow = load_workflow("multiply")
                monkeypatch.setattr("job.catch_signals", lambda: None)
                code = workflow.main(list(case.arguments))
            else:
                code = cli.main(list(case.arguments))
        except SystemExit as end:
            code = int(str(end.code))
        finally:
            signal.signal(signal.SIGTERM, handler)
    allowed = before | (set(case.made) if code == 0 else set())
    left = {path.name for path in folder.iterdir()} - allowed
    return Outcome(case.kind, code, 0.0, 0, said.getvalue(), tuple(left))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rng=st.randoms(use_true_random=True))
def test_malformed_input_is_refused_in_a_line(rng: random.Random, whole, stored, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("case")
    try:
        case = write_case(rng, folder, whole, stored)
        outcome = run(case, folder, monkeypatch)
        assert not outcome.wrong, (case, outcome)
    finally:
        shutil.rmtree(folder)


def test_whole_seeds_are_read(whole, tmp_path, monkeypatch):
    """So that the malformed ones do not fail for another reason."""
    for name, raw in whole.items():
        if name.endswith(("npy", "yaml")) or "/" in name:
            continue
        (tmp_path / name).write_bytes(raw)
        outcome = run(Case("import", import_of(name)), tmp_path, monkeypatch)
        assert (outcome.code, outcome.wrong) == (0, ""), outcome
        shutil.rmtree(tmp_path / "out.zarr")
