"""Every benchmark runs, on sizes for a test, so that it never rots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_benchmark_runs_and_records(tmp_path, script):
    out = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=250)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["date"]
    assert "commit" in record
    assert record["command"].startswith("python")


@pytest.mark.parametrize("record", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_records_name_the_machine_and_hold_no_path(record):
    content = json.loads(record.read_text())
    assert {"date", "command", "versions"} <= set(content)
    assert "commit" in content or record.stem < "2026-11-23", "records name the commit of the sources"
    assert "/tmp/" not in record.read_text()
