"""Every benchmark runs, on sizes for a test, so that it never rots."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spdist.matrices.csr import CSR

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    import compare
    import record
finally:
    sys.path.remove(str(ROOT / "benchmarks"))
RUNNER = "suites.py"
TORTURE = ROOT / "tests" / "torture" / "__main__.py"
"""Has the options of `faults.py`."""
SCRIPTS = sorted(
    path.name
    for path in (ROOT / "benchmarks").glob("*.py")
    if "__main__" in path.read_text() and path.name not in (RUNNER, "guard.py")
)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_benchmark_runs_and_records(tmp_path, script):
    out = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=250)
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    assert set(record.FIELDS) <= set(content)
    assert content["command"].startswith("python")


def test_suites_name_scripts_and_options_that_there_are():
    """Each record has a name of its own, and each script takes the words that it is given."""
    names = []
    for suite in ("cores", "gpu", "gpus"):
        command = [sys.executable, str(ROOT / "benchmarks" / RUNNER), suite, "--list"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        for line in listed.splitlines():
            name, words = line.split(": ", 1)
            script, *options = shlex.split(words)
            assert script in SCRIPTS
            text = (ROOT / "benchmarks" / script).read_text() + TORTURE.read_text()
            assert all(f'"{one.partition("=")[0]}"' in text for one in options if one.startswith("--")), line
            names.append(name)
    assert len(names) == len(set(names)) > 30


@pytest.fixture
def suites(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("suites")


def test_records_of_other_code_are_stale(suites, monkeypatch, tmp_path):
    """Other code makes a record stale; other comments, docstrings and blank lines do not."""
    sources, results = tmp_path / "code", tmp_path / "results"
    sources.mkdir(), results.mkdir()
    python, kernel = sources / "a.py", sources / "a.cu"
    python.write_text('def f(x):\n    """Add one."""\n    return x + 1\n')
    kernel.write_text("// says\nint f() { return 1; }\n")
    one = suites.Benchmark("some", "some.py", ("code",))
    monkeypatch.setattr(suites, "SUITES", {"gpu": [[one]]})
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    (results / "some.json").write_text(json.dumps({"digest": suites.digest(one.paths)}))
    assert suites.stale(results) == []
    python.write_text('def f(x):\n    """Say more."""\n    # why\n\n    return x + 1  # more\n')
    kernel.write_text("/* says\nmore */ int f() {\n  return 1; }\n")
    assert suites.stale(results) == []
    kernel.write_text("int f() { return 2; }\n")
    assert [line.partition(":")[0] for line in suites.stale(results)] == ["some.json"]
    (results / "old.json").write_text("{}")
    assert any("no suite makes it" in line for line in suites.stale(results))


def test_a_digest_is_that_of_every_python(suites, tmp_path):
    """Records are made and checked by different versions of Python: what is hashed is the text, as it was written."""
    source = tmp_path / "a.py"
    source.write_text("""x = f"{y['#']!r:>{width}} {{}}"  # said\n""")
    assert suites.meaning(source) == b"""x = f"{y['#']!r:>{width}} {{}}\""""


def test_every_path_that_a_suite_names_is_there(suites):
    named = {path for parts in suites.SUITES.values() for part in parts for one in part for path in one.paths}
    assert all((ROOT / path).exists() for path in named)


@pytest.mark.parametrize("value_bytes", [4, 8])
def test_a_duplicated_block_sends_a_row_of_b_for_each_entry_of_a(monkeypatch, value_bytes):
    """Two rows of 3 entries and 1, which expand to 10 products; each of the seven arrays ends at a multiple of 256."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spgemm = importlib.import_module("spgemm")
    a = CSR(np.array([0, 3, 4]), np.array([0, 1, 2, 1]), np.ones(4), (2, 3))
    assert spgemm.sent_duplicated(a, 10, value_bytes) == 6 * 256
    many = spgemm.sent_duplicated(a, 10_000_000, value_bytes)
    assert 0 <= many - 10_000_000 * (value_bytes + 4) < 8 * 256


def test_the_guard_finds_a_call_that_stays_slower(monkeypatch):
    """One measurement above the limit is repeated; a ratio that stays above it is found."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    guard = importlib.import_module("guard")
    disturbed, slow = iter([9.0, 1.1]), iter([2.0, 2.1, 1.9, 2.0])
    measured = {
        "quick": lambda: 1.0,
        "disturbed": lambda: next(disturbed),
        "slow": lambda: next(slow),
        "new": lambda: 9.0,
    }
    assert guard.slower({"quick": 1.0, "disturbed": 1.0, "slow": 1.0}, measured) == {"slow": 1.9}


def test_the_guard_measures_what_the_release_did():
    """In a process of its own, as its calls start threads."""
    code = "import guard, json; print(json.dumps(['import', *guard.cases()]))"
    folder = ROOT / "benchmarks"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True, timeout=120
    )
    released = json.loads((folder / "release.json").read_text())["ratios"]
    assert set(json.loads(done.stdout.splitlines()[-1])) == set(released)


def test_a_suite_says_what_failed_and_goes_on(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / RUNNER),
        "cores",
        "--only",
        "block_spmv",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run([*command, "--limit", "0.1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "block_spmv: 0 s, stopped after 0 s" in done.stdout
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("writes", [True, False])
def test_what_was_recorded_before_a_stop_is_kept_as_a_part(suites, monkeypatch, tmp_path, writes):
    made = tmp_path / "some.json"
    made.write_text('{"rows": "old"}')

    def stop(command, timeout, **_):
        if writes:
            made.write_text('{"rows": [1]}')
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(suites.subprocess, "run", stop)
    one = suites.Benchmark("some", "some.py", ("Makefile",))
    assert suites.run(one, tmp_path, tmp_path, tmp_path, 7.0) == "stopped after 7 s"
    part = {"rows": [1], "digest": suites.digest(one.paths), "stopped_after_s": 7.0}
    assert json.loads(made.read_text()) == (part if writes else {"rows": "old"})


def test_a_benchmark_that_makes_no_record_has_failed(suites, monkeypatch, tmp_path):
    monkeypatch.setattr(suites.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0))
    one = suites.Benchmark("some", "some.py", ("Makefile",))
    assert suites.run(one, tmp_path, tmp_path, tmp_path, 7.0) == "it made no record"


@pytest.mark.parametrize(
    ("new", "slower"),
    [([1.2, 1.2, 1.21], True), ([0.8, 1.04, 1.3], False), ([1.04, 1.04, 1.04], False), ([0.5] * 3, False)],
)
def test_a_case_is_slower_beyond_its_spread(new, slower):
    assert compare.judged([1.0, 1.0, 1.0], new)["slower"] is slower


def test_a_record_names_sources_machine_and_versions(tmp_path):
    out = tmp_path / "record.json"
    record.write({"benchmark": "none"}, out)
    content = json.loads(out.read_text())
    assert tuple(content)[: len(record.FIELDS)] == record.FIELDS
    assert content["host"]["cpu"]
    assert content["host"]["cores"] >= 1
    assert content["device"]
    assert {"python", "numpy", "scipy", "numba", "cupy", "dask", "zarr"} <= set(content["versions"])
    assert isinstance(content["dirty"], bool) or content["commit"] == "unknown"


@pytest.mark.parametrize(
    ("told", "found"), [("abc123", ("abc123", False)), ("abc123-dirty", ("abc123", True)), ("", ("unknown", None))]
)
def test_an_exported_tree_is_told_its_commit(monkeypatch, tmp_path, told, found):
    monkeypatch.setattr(record, "__file__", str(tmp_path / "benchmarks" / "record.py"))
    monkeypatch.setenv("SPDIST_COMMIT", told)
    assert record.sources() == found


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_records_name_the_machine_and_hold_no_path(path):
    content = json.loads(path.read_text())
    assert {*record.FIELDS, "digest"} <= set(content)
    assert content["dirty"] is False
    assert "/tmp/" not in path.read_text()
