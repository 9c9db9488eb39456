"""Plans as values: they compare, serialise, and read the text of older versions."""

from __future__ import annotations

import itertools
import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spdist.api import products as api
from spdist.scheduler.planner.plan import Plan, even_bounds
from tests.conftest import random_matrix


@given(st.lists(st.integers(0, 100), min_size=1, max_size=50), st.data())
def test_even_bounds_cover_everything_once(weights, data):
    parts = data.draw(st.integers(1, len(weights)))
    bounds = even_bounds(np.array(weights), parts)
    assert bounds[0] == 0
    assert bounds[-1] == len(weights)
    assert len(bounds) == parts + 1
    assert all(low < high for low, high in itertools.pairwise(bounds))


def test_plan_is_a_value(stored):
    a = stored("A", random_matrix(5_000, 5_000, 10, 5))
    first, second = (api.plan(a, a, memory_limit="32MiB") for _ in range(2))
    assert first == second
    assert Plan.from_json(first.to_json()) == first
    assert first.to_json() == second.to_json()


def test_plan_of_an_older_version_is_read(stored):
    a = stored("A", random_matrix(300, 300, 5, 8))
    raw = json.loads(api.plan(a, a).to_json())
    for block in raw["blocks"]:
        del block["b_read"]
    assert [block.b_read for block in Plan.from_json(json.dumps(raw)).blocks] == [0]


def test_keys_of_a_stored_plan_are_kept(stored):
    """An unfinished product of an older version is continued, and programs read the summary."""
    a = stored("A", random_matrix(300, 300, 5, 8))
    plan = api.plan(a, a)
    assert set(json.loads(plan.to_json())) == {
        "a", "b", "blocks", "c", "chunk", "column_bounds", "counted", "device_memory", "engine", "expansion",
        "host_limit", "inner_bounds", "memory_limit", "pairs", "reserved_memory", "resident", "threads",
        "threads_share_blocks",
    }  # fmt: skip
    assert set(plan.summary()) == {
        "b_resident", "bound_by", "chunk", "compression", "engine", "expansion", "grid", "host_limit", "memory_limit",
        "nnz_estimate", "pairs", "projected_host_memory", "projected_memory", "reserved_memory", "shape", "stage_bytes",
        "stage_seconds", "threads", "threads_share_blocks",
    }  # fmt: skip
