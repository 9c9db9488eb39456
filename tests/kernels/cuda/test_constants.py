"""Constants that Python and CUDA share stand in `constants.py` alone."""

from __future__ import annotations

import re

import pytest

from spdist.kernels.cuda import constants
from spdist.kernels.cuda.module import FOLDER, options
from spdist.kernels.hyspmm.sort_groups import REGISTER_CLASSES
from spdist.kernels.rowwise_gpu import row_classes

FILES = sorted([*FOLDER.rglob("*.cu"), *FOLDER.rglob("*.cuh")])
OF_CALLERS = {"APPLY", "ADD", "MULTIPLY", "ZERO", "FIRST", "LAST", "HEADERS"}
"""Macros that no constant stands for: C expressions of a caller, and helpers of `common.cuh`."""


def with_headers(path) -> str:
    """Return the text of a source and of the headers that it includes."""
    text = path.read_text()
    for name in re.findall(r'#include "(.*?)"', text):
        text += with_headers(next(found for found in (FOLDER / name, FOLDER / "cuda" / name) if found.exists()))
    return text


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".cu"], ids=lambda path: path.name)
def test_a_file_gets_the_constants_that_it_uses(path):
    used = set(re.findall(r"SPDIST_(\w+)", with_headers(path))) - OF_CALLERS
    used = {name for name in used if not name.startswith(("ATOMIC", "CAS"))}
    assert used == set(constants.SHARED.get(str(path.relative_to(FOLDER)), {}))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_defines_a_shared_constant_or_member(path):
    """Every number of the file that Python has too comes from the table."""
    table = constants.SHARED.get(str(path.relative_to(FOLDER)), {})
    enums = [one for one in table.values() if not isinstance(one, int)]
    shared = {name for name in vars(constants) if name.isupper()} | {m.name for one in enums for m in one}
    text = path.read_text()
    literals = set(re.findall(r"^(?:constexpr|#define)[^;\n]*?\b([A-Z]\w+) =? ?-?\d", text, re.MULTILINE))
    members = {name for body in re.findall(r"enum[^{]*{([^}]*)}", text) for name in re.findall(r"\b[A-Z]\w*", body)}
    assert not (literals | members) & shared


def test_no_comment_promises_agreement():
    for path in (*FILES, *FOLDER.rglob("*.py")):
        assert not re.search(r"as in [\w/]+\.(cuh?|py)\b", path.read_text()), path


def test_the_options_hold_the_constants():
    """CuPy's cache on disk is keyed by them."""
    assert "-DSPDIST_VERY_LONG=8192" in options("rowwise_gpu/rows.cu")
    facts = next(option for option in options("rowwise_gpu/rows.cu") if "ROW_FACT" in option)
    assert facts.startswith("-DSPDIST_ROW_FACT=PRODUCTS = 0, BAD_A = 1,")


def test_every_file_of_the_table_is_there():
    assert not [file for file in constants.SHARED if not (FOLDER / file).exists()]


def test_groups_are_the_classes_of_registers():
    """`group_rows` of hyspmm.cu puts rows into the groups by these names."""
    limits = [row_class.max_products for row_class in REGISTER_CLASSES]
    assert [f"R{limit}" for limit in limits] == [group.name for group in list(constants.SortGroup)[: len(limits)]]


def test_classes_fit_the_device():
    assert len(row_classes.CLASSES) < constants.ROW_CLASSES
