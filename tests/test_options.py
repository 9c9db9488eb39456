"""Keywords of the public calls: signatures list them, docstrings name them, values take them; wrong ones are named."""

from __future__ import annotations

import inspect

import pytest

import spdist
from spdist import options

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
    taken = {name for kind in options.VALUES for name in kind.__dataclass_fields__} | set(options.CHECK_DEFAULTS)
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
