"""Every field of SamplingParams acts or is refused, by name."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_jax import SamplingParams

BAD = {
    "temperature": [-0.1, math.nan, math.inf, -math.inf, 10**400, "1", None, True, [1.0]],
    "top_p": [0, -0.1, 1.0001, math.nan, math.inf, "0.5", None, False],
    "top_k": [-2, 1.5, math.nan, "3", None, True, 2**31],
    "min_p": [-0.01, 1.01, math.nan, "0", None, True],
    "seed": [1.0, "1", True, 2**64, -(2**63) - 1, math.nan],
    "max_tokens": [0, -1, 1.0, "16", True, 2**31],
    "stop": ["", ["a", ""], [1], 5, b"x", [None]],
    "stop_token_ids": ["12", [-1], [1.0], [True], 5, [2**31], ["1"]],
    "ignore_eos": [1, "yes", None],
    "include_stop_str_in_output": [0, None],
    "skip_special_tokens": ["", None],
}


def test_every_field_has_bad_values_here():
    assert set(BAD) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, vs in BAD.items() for v in vs])
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_unknown_names_are_refused():
    with pytest.raises(TypeError, match="repetition_penaltee"):
        SamplingParams(repetition_penaltee=1.1)  # type: ignore[call-arg]


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert params.max_tokens == 16 and params.seed is None and not params.is_greedy


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-7, 1e-5])
def test_tiny_temperatures_are_greedy(temperature):
    assert SamplingParams(temperature=temperature).is_greedy


def test_top_k_1_is_greedy_and_minus_1_is_all():
    assert SamplingParams(top_k=1).is_greedy
    assert SamplingParams(top_k=-1).top_k == 0


def test_numpy_scalars_are_numbers():
    numbers: dict = {"temperature": np.float32(0.5), "top_k": np.int64(7), "seed": np.uint8(3)}
    params = SamplingParams(**numbers)
    assert (params.temperature, params.top_k, params.seed) == (0.5, 7, 3)


def test_one_stop_string_or_several():
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.integers()),
)


@given(field=st.sampled_from(sorted(BAD)), value=anything)
def test_any_value_is_accepted_or_a_value_error(field, value):
    try:
        params = SamplingParams(**{field: value})
    except ValueError as error:
        assert field in str(error)
    else:
        assert dataclasses.replace(params) == params
