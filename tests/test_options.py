"""Keywords of the public calls: signatures list them, docstrings name them, values take them; wrong ones are named."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest
import scipy.sparse as sp

import spdist
from spdist import options
from spdist.foundation.units import parse_bytes
from spdist.kernels.engine import ENGINES

CALLS = {
    "matmul": options.MatmulKeywords,
    "multi_matmul": options.ChainKeywords,
    "multiply": options.MultiplyKeywords,
    "plan": options.PlanKeywords,
    "reduce": options.ReduceKeywords,
    "spgemm": options.SpgemmKeywords,
    "verify": options.VerifyKeywords,
}


@pytest.mark.parametrize("name", CALLS)
def test_signatures_list_every_keyword_with_its_default(name):
    parameters = inspect.signature(getattr(spdist, name)).parameters
    assert set(CALLS[name].__annotations__) <= set(parameters)
    assert not [one for one in parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD]
    for keyword in CALLS[name].__annotations__:
        assert parameters[keyword].default == options.DEFAULTS[keyword]
        assert parameters[keyword].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("name", CALLS)
def test_docstrings_name_every_parameter(name):
    call = getattr(spdist, name)
    missing = {parameter for parameter in inspect.signature(call).parameters if parameter not in call.__doc__}
    assert not missing


APPLICATIONS = ("cooccurrence", "markov_clustering", "pagerank", "shortest_paths", "similarity", "triangles")


@pytest.mark.parametrize("name", [*CALLS, *APPLICATIONS, "ewise_add", "ewise_mult", "apply"])
def test_docstrings_agree_with_declarations(name):
    call = getattr(spdist, name)
    section = call.__doc__.partition("Parameters\n    ----------\n")[2].partition("\n\n    Returns\n")[0]
    entries = re.findall(r"^    (\w[\w, ]*?)(?: : (.+))?$", section, re.MULTILINE)
    documented = [(one, kind) for names, kind in entries for one in names.split(", ")]
    parameters = inspect.signature(call).parameters
    assert sorted(one for one, _ in documented) == sorted(parameters)
    for one, kind in documented:
        default = parameters[one].default
        if kind and default is not inspect.Parameter.empty and not callable(default):
            assert kind.endswith(", optional") == (default is None), f"{one} : {kind}"
            assert (kind == "bool") == isinstance(default, bool), f"{one} : {kind}"
        if one == "engine" and kind:
            assert kind == "{" + ", ".join(f'"{engine}"' for engine in ENGINES) + "}"


def test_every_keyword_of_a_command_has_its_words():
    """What a call takes and no command does is left out by a decision, not forgotten."""
    shown = {name for name, one in options.OPTIONS.items() if one.metadata.get("help") or "parts" in one.metadata}
    in_python_only = {"sort", "method", "threads", "deterministic", "vectors", "seed", "progress"}
    assert set(options.OPTIONS) - shown == in_python_only


@pytest.mark.parametrize("keywords", [*CALLS.values(), options.TaskKeywords, options.CountKeywords])
def test_keywords_have_the_types_of_their_options(keywords):
    for name, kind in keywords.__annotations__.items():
        of_values = {one.type for value in options.VALUES for one in fields(value) if one.name == name}
        assert kind.__forward_arg__ in of_values | {"Any"}, name


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_keyword_is_named(name):
    operands = {"multi_matmul": [[]], "reduce": [None, None, "sum"], "matmul": [None, None], "spgemm": [None, None]}
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'top'"):
        getattr(spdist, name)(*operands.get(name, ["A", "B", "C"][: 2 if name == "plan" else 3]), top=3)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("verify", "check"), ("normalize", "epilogue"), ("memory_limt", "memory_limit"), ("transposeb", "transpose_b")],
)
def test_the_nearest_keyword_is_named(given, meant):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{given}'; did you mean '{meant}'"):
        spdist.multiply("A", "B", "C", **{given: True})


def test_the_name_on_the_command_line_is_named_where_there_is_one():
    with pytest.raises(TypeError, match="unexpected keyword argument 'verify'; did you mean 'check'"):
        spdist.similarity("A", "C", verify=True)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'verify'$"):
        spdist.plan("A", "B", verify=True)


def test_every_keyword_has_a_value_that_takes_it():
    taken = {name for kind in options.VALUES for name in kind.__dataclass_fields__}
    assert {keyword for keywords in CALLS.values() for keyword in keywords.__annotations__} <= taken


def test_values_take_their_own_keywords():
    given = {"engine": "numba", "top_n": 3, "resume": True}
    kinds = options.ProductOptions, options.ExecutionOptions, options.OutputOptions
    product, execution, output = options.options_of(spdist.multiply, given, *kinds)
    assert (product.top_n, execution.engine, output.resume) == (3, "numba", True)
    assert product == options.ProductOptions(top_n=3)


def test_positions_of_arguments_stay():
    firsts = {
        "multiply": ["a", "b", "c"], "matmul": ["a", "b", "out"], "plan": ["a", "b"], "verify": ["a", "b", "c"],
        "reduce": ["a", "b", "what"], "spgemm": ["a", "b", "method"], "multi_matmul": ["matrices", "out"],
    }  # fmt: skip
    for name, expected in firsts.items():
        parameters = inspect.signature(getattr(spdist, name)).parameters.values()
        assert [one.name for one in parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY] == expected


def test_words_of_dask_lead_to_ours():
    with pytest.raises(TypeError, match="'client'; did you mean 'scheduler'"):
        spdist.multiply("A.zarr", "A.zarr", "C.zarr", client=None)


def test_bytes_without_a_unit_are_asked_about():
    with pytest.raises(spdist.InputError, match="'256' is 256 bytes: write 256MiB, or 256B"):
        parse_bytes("256")
    assert (parse_bytes("256B"), parse_bytes(256), parse_bytes("1000000")) == (256, 256, 1_000_000)


def test_a_matrix_in_place_of_a_path_is_named_by_its_kind():
    m = sp.eye_array(3, format="csr")
    with pytest.raises(spdist.InputError, match="a csr_array of 3 x 3 is a matrix in memory"):
        spdist.cooccurrence(m, m)
