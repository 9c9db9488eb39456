"""Mutants of a small file: what is planted, what kills it, and what is left as it was."""

from __future__ import annotations

import ast
import sqlite3

import pytest

from tests.mutation.mutants import mutants
from tests.mutation.trials import Coverage, Workplace

SOURCE = '''
LIMIT = 3

def clip(values: list[int], most: int = 2) -> list[int]:
    """Keep 5 < 6."""
    kept = []
    for value in values:
        if not value or value > most:
            continue
        kept.append(min(value, 9) + 1)
    while (len(kept)) < (1):
        kept.append(f"{1 + 1}")
    if len(kept) > 99:
        raise ValueError("more than " + str(99))
    return kept
'''
EXPECTED = {
    "if value or value > most:",
    "if not value and value > most:",
    "if not value or value >= most:",
    "if True:",
    "break",
    "pass",
    "kept.append(max(value, 9) + 1)",
    "kept.append(min(9, value) + 1)",
    "kept.append(min(value, 9) - 1)",
    "kept.append(min(value, 10) + 1)",
    "while (len(kept)) <= (1):",
    "if (len(kept)) < (1):",
    "if len(kept) > 100:",
}
TEST = "from spdist.small import clip\n\ndef test_clip():\n    assert clip([0, 1, 2, 3]) == [2, 3]\n"


@pytest.fixture
def small(tmp_path):
    (tmp_path / "spdist").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "spdist" / "__init__.py").touch()
    (tmp_path / "spdist" / "small.py").write_text(SOURCE)
    (tmp_path / "tests" / "test_small.py").write_text(TEST)
    return tmp_path


def changed_line(mutant, source: bytes) -> str:
    lines = zip(source.splitlines(), mutant.applied(source).splitlines(), strict=True)
    return next(after.decode().strip() for before, after in lines if before != after)


def test_mutants_are_small_mistakes_in_code(small):
    source = SOURCE.encode()
    found = mutants(small / "spdist" / "small.py", "spdist/small.py")
    lines = [changed_line(mutant, source) for mutant in found]
    assert set(lines) >= EXPECTED
    assert len({mutant.applied(source) for mutant in found}) == len(found)
    for mutant in found:
        ast.parse(mutant.applied(source))
        assert mutant.described(source).startswith(f"spdist/small.py:{mutant.line} ")
    assert not [line for line in lines if "LIMIT" in line or "Keep" in line or "def" in line or "more than" in line]
    assert not [line for line in lines if 'f"' in line]


def test_a_mutant_is_killed_by_a_test_or_survives(small, tmp_path):
    path = small / "spdist" / "small.py"
    lines = {changed_line(mutant, SOURCE.encode()): mutant for mutant in mutants(path, "spdist/small.py")}
    coverage = tmp_path / "coverage"
    sqlite3.connect(coverage).close()
    workplace = Workplace(small, Coverage(coverage), 60)
    killed = workplace.judge(lines["kept.append(min(value, 9) - 1)"])
    assert killed.killer == "tests/test_small.py::test_clip"
    survivor = workplace.judge(lines["if len(kept) > 100:"])
    assert (survivor.killer, survivor.tests) == ("", 1)
    assert path.read_text() == SOURCE
    (small / "tests" / "test_small.py").write_text(TEST.replace("[2, 3]", "[]"))
    assert workplace.judge(lines["kept.append(min(value, 9) - 1)"]).killer == ""  # fails without the mutant too
    assert workplace.left_out == {"tests/test_small.py::test_clip"}
