"""What README and docs/measured.md show of records of `benchmarks/prompt.py` and `benchmarks/cores.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def content(**changed: Any) -> dict[str, Any]:
    """Return a record of two programs on one product."""
    trials = [{"s": seconds, "right": True} for seconds in (2.0, 3.0, 4.0)]
    case = {"case": "27-point 100^3", "nnz_c": 10**9, "trials": trials, "median_cpu_s": 5.0}
    return {
        "date": "2026-11-30T00:00:00+00:00",
        "dirty": False,
        "shared_machine": False,
        "host": {"cpu": "Some CPU", "cores": 16},
        "device": "1 x NVIDIA H100 80GB HBM3",
        "gpu": {"device": "NVIDIA H100 80GB HBM3"},
        "storage": "tmpfs",
        "warm_up": [{"program": "spdist cuda, 1 GPU", "s": 9.0, "cold": True, "right": True}],
        "commands": {"spdist info": [0.3, 0.4, 0.5]},
        "rows": [
            {**case, "program": "spdist cuda, 1 GPU", "median_s": 3.0, "median_run_s": 1.25, "ours": True}
            | {"best_peer": "CuPy and zarr-python", "over_best_peer": 7.0},
            {**case, "program": "CuPy and zarr-python", "median_s": 21.0, "ours": False},
        ],
        "calls": {
            "rows": [
                {"case": name, "once_s": [0.4, 0.1], "again_s": [0.05, 0.05], "peer_s": [ratio / 10, ratio / 10]}
                for name, ratio in (("a", 2.0), ("b", 4.0), ("c", 8.0))
            ]
        },
        **changed,
    }


@pytest.fixture
def waits(monkeypatch, tmp_path):
    """Return the module, which finds records in a folder of the test's."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    import tables
    import waits

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(waits, "RESULTS", tmp_path)
    return waits


def test_readme_shows_the_quickest_command_and_script_and_calls(waits, tmp_path):
    (tmp_path / "prompt_a.json").write_text(json.dumps(content()))
    shown = waits.readme(waits.headlines())
    ours = "| 27-point 100^3 | 12 GB | H100, host with 16 cores | spdist cuda, 1 GPU | 3.0 s | 2.0 to 4.0, 3 |"
    assert f"{ours} CuPy and zarr-python | 7.00 |" in shown
    assert "| `spdist.matmul` in memory, 3 products | H100, host with 16 cores | 1.00, 0.50 | 4.00, 2.00 |" in shown


def test_two_trials_make_no_headline(waits, tmp_path):
    record = content()
    for row in record["rows"]:
        row["trials"] = row["trials"][:2]
    (tmp_path / "prompt_a.json").write_text(json.dumps(record))
    assert "27-point 100^3 |" not in waits.readme(waits.headlines())


@pytest.mark.parametrize("changed", [{"shared_machine": True}, {"dirty": True}])
def test_loaded_machines_and_changed_sources_make_no_headline(waits, tmp_path, changed):
    (tmp_path / "prompt_a.json").write_text(json.dumps(content(**changed)))
    assert waits.recorded()
    assert not waits.readme(waits.headlines())


def test_the_newest_record_of_a_machine_makes_the_headline(waits, tmp_path):
    (tmp_path / "prompt_a.json").write_text(json.dumps(content()))
    (tmp_path / "prompt_b.json").write_text(json.dumps(content(date="2026-12-01T00:00:00+00:00")))
    assert waits.headlines() == ["prompt_b"]


def test_every_trial_of_a_record_is_in_the_document(waits, tmp_path):
    (tmp_path / "prompt_a.json").write_text(json.dumps(content(shared_machine=True)))
    shown = waits.section("prompt_a")
    assert "other jobs ran beside" in shown
    assert "| spdist cuda, 1 GPU | 3.0 s | 2.0 to 4.0, 3 | 1.2 s |" in shown
    assert "empty caches of compiled kernels, 27-point 16^3: spdist cuda, 1 GPU 9.0 s." in shown
    assert "`spdist info` 0.40 s" in shown


def test_predictions_are_in_the_document(waits, tmp_path):
    rows = [
        {"job": "R-MAT", "engine": "numba", "predicted_s": 4.0, "wall_s": 5.0, "ratio": 0.8, "left_ratio": 1.1},
        {"job": "A @ P", "engine": "numba", "predicted_s": 4.0, "wall_s": 2.0, "ratio": 2.0, "left_ratio": None},
    ]
    rows = [row | {"trials": [{"range_s": [3, 6], "wall_s": row["wall_s"]}, {}]} for row in rows]
    rows[0]["trials"][1] = {"range_s": [3, 6], "wall_s": 5.5}
    rows += [{"job": "failed", "engine": "cuda", "trials": [{}]}]
    (tmp_path / "predictions_a.json").write_text(json.dumps(content(rows=rows)))
    shown = waits.predictions(waits.recorded("predictions")[0])
    assert "1 of 2 are predicted within 25 %; 2 of 3\ntrials lie within the bounds" in shown
    assert "| R-MAT | numba | 4.0 s | 5.0 s | 0.80 | 1.10 | 2 |" in shown


def test_threads_and_peers_are_in_the_document(waits, tmp_path):
    row = {"work": "27-point 90^3", "seconds": {"1": 1.5, "16": 0.1}, "speed_up": {"1": 1.0, "16": 15.0}}
    row["ratio"] = {"sp_matmul": {"16": 1.25}, "GraphBLAS": {"1": 3.0}}
    summary = {
        "speed_up": {"27-point 90^3": 15.0},
        "product, sp_matmul": {"geometric_mean": 1.3, "least": 1.1, "cases": 3},
    }
    more = {"rows": [row], "triad_bytes_s": {"1": 1.2e10, "16": 1e11}, "summary": summary}
    more["loop_speed_up"] = {"1": 1.0, "16": 11.3}
    (tmp_path / "cores_a.json").write_text(json.dumps(content() | more))
    shown = waits.cores(waits.recorded("cores")[0])
    assert "| 27-point 90^3 | 1,500 | 100.0 | 15.0 | sp_matmul 1.25 |" in shown
    assert "product, sp_matmul 1.30, least 1.10." in shown
    assert "GB/s by threads: 1: 12.0, 16: 100.0. A loop in registers gains 11.3 with 16." in shown
